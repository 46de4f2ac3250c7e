"""What a solver hands back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Solution"]


@dataclass(frozen=True, eq=False)
class Solution:
    """Strata found by a solver for one problem.

    Attributes
    ----------
    labels : Tensor of shape (n,)
        Stratum of each point, int64; every stratum is within the size limits, so none is empty.
    n_iter : int
        Iterations done.
    objective : float
        J(S) of the labels (equation 8), n² times the variance, whatever the solver itself minimised.
    converged : bool
        Whether the solver's own stopping rule ended it, rather than the iteration limit.
    """

    labels: Tensor
    n_iter: int
    objective: float
    converged: bool
