"""Finding strata: one front, `stratify`, over interchangeable solvers."""

from vardass.solvers.grouped import stratify_groups
from vardass.solvers.labels import INITS
from vardass.solvers.stratification import SOLVERS, stratify
from vardass.view import EXACT_LIMIT

__all__ = ["EXACT_LIMIT", "INITS", "SOLVERS", "stratify", "stratify_groups"]
