"""Finding strata: one front, `stratify`, over interchangeable solvers, one file each."""

from vardass.solvers.grouped import stratify_groups
from vardass.solvers.starts import INITS
from vardass.solvers.stratification import EXACT_LIMIT, SOLVERS, stratify

__all__ = ["EXACT_LIMIT", "INITS", "SOLVERS", "stratify", "stratify_groups"]
