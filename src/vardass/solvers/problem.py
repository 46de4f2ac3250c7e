"""What a solver is given and what it hands back.

A problem is one domain seen through its kernel: exact (n x n) or low rank (n x r).

The objective is the min-sum clustering cost of equation 8,

    J(S) = n² Var(μ̂) = Σ_h |S_h| Σ_{i in S_h} |φ_i - μ_h|² = ½ Σ_h Σ_{i,j in S_h} d_ij,
    d_ij = K_ii + K_jj - 2 K_ij.

Solvers see only the three views below, so each is written once for both forms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.validate import row_blocks

__all__ = ["ExactProblem", "LowRankProblem", "Problem", "Solution"]


class Problem(ABC):
    """Kernel values K_ij of n points, up to a common shift that leaves all d_ij alone.

    Attributes
    ----------
    diag : Tensor of shape (n,)
        K_ii.
    """

    diag: Tensor

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.diag)

    @abstractmethod
    def stratum_sums(self, labels: Tensor, k: int) -> Tensor:
        """A_ih = Σ_{j in S_h} K_ij for all i and h: (n, k)."""

    @abstractmethod
    def columns(self, rows: Tensor) -> Tensor:
        """K_ij for all i and the q points j in ``rows``: (n, q)."""

    @abstractmethod
    def block(self, rows: Tensor | slice) -> Tensor:
        """K_ij among the q points in ``rows``, which must be distinct: (q, q)."""

    @abstractmethod
    def within(self, labels: Tensor, k: int) -> Tensor:
        """Σ_{i,j in S_h} K_ij for each stratum, accumulated in double precision: (k,)."""

    @abstractmethod
    def spread(self) -> Tensor:
        """|φ_i - μ|² of each point: (n,)."""

    def objective(self, labels: Tensor, k: int) -> float:
        """J(S) of the strata given by ``labels`` (n,) with values below k."""
        sizes = torch.bincount(labels, minlength=k).double()
        sums = sizes.new_zeros(k).index_add_(0, labels, self.diag.double())
        return float((sizes * sums - self.within(labels, k)).sum().clamp_min(0.0))

    def centroid_distances(self, labels: Tensor, k: int) -> Tensor:
        """|φ_i - μ_h|² from each point to each stratum mean (Algorithm 1, step 2): (n, k).

        An empty stratum is infinitely far.
        """
        sizes = torch.bincount(labels, minlength=k).to(self.diag)
        cross = self.stratum_sums(labels, k)
        own = cross.gather(1, labels[:, None])[:, 0]
        inner = torch.zeros_like(sizes).index_add_(0, labels, own) / sizes.square()
        distances = (self.diag[:, None] - 2.0 * cross / sizes + inner).clamp_min_(0.0)
        return distances.masked_fill_(sizes == 0, torch.inf)


@dataclass
class ExactProblem(Problem):
    """The full kernel matrix (n, n), symmetric."""

    matrix: Tensor

    def __post_init__(self) -> None:
        self.diag = self.matrix.diagonal().contiguous()

    def stratum_sums(self, labels: Tensor, k: int) -> Tensor:
        """A, summed over rows of the symmetric matrix: O(n²), whatever k is."""
        return self.matrix.new_zeros(k, self.n).index_add_(0, labels, self.matrix).T

    def columns(self, rows: Tensor) -> Tensor:
        """Rows of the matrix, which is symmetric."""
        return self.matrix[rows].T

    def block(self, rows: Tensor | slice) -> Tensor:
        """A submatrix."""
        return self.matrix[rows, rows] if isinstance(rows, slice) else self.matrix[rows].index_select(1, rows)

    def spread(self) -> Tensor:
        """From row means."""
        mean = self.matrix.mean(0)
        return (self.diag - 2.0 * mean + mean.mean()).clamp_min_(0.0)

    def within(self, labels: Tensor, k: int) -> Tensor:
        """Sums of the diagonal blocks."""
        own = self.stratum_sums(labels, k).gather(1, labels[:, None])[:, 0].double()
        return own.new_zeros(k).index_add_(0, labels, own)


@dataclass
class LowRankProblem(Problem):
    """K_ij ≈ <φ_i, φ_j> + r_i [i = j] with features φ (n, r) and the exact residual diagonal r (n,).

    The residual acts as a private direction of each point. It carries the part of the size penalty that the
    features miss; without it large strata look too cheap.
    """

    features: Tensor
    residual: Tensor

    def __post_init__(self) -> None:
        self.diag = self.features.square().sum(1) + self.residual

    def stratum_sums(self, labels: Tensor, k: int) -> Tensor:
        """A from the k feature sums."""
        sums = self.features.new_zeros(k, self.features.shape[1]).index_add_(0, labels, self.features)
        cross = self.features @ sums.T
        return cross.scatter_add_(1, labels[:, None], self.residual[:, None])

    def columns(self, rows: Tensor) -> Tensor:
        """Inner products, with the residual where a point meets itself."""
        columns = self.features @ self.features[rows].T
        columns[rows, torch.arange(len(rows), device=rows.device)] += self.residual[rows]
        return columns

    def block(self, rows: Tensor | slice) -> Tensor:
        """Inner products, with the residual on the diagonal."""
        picked = self.features[rows]
        return picked @ picked.T + self.residual[rows].diag()

    def spread(self) -> Tensor:
        """From centred features and the residual."""
        return (self.features - self.features.mean(0)).square().sum(1) + self.residual

    def within(self, labels: Tensor, k: int) -> Tensor:
        """|Σ φ|² + Σ r of each stratum."""
        sums = self.features.new_zeros(k, self.features.shape[1], dtype=torch.float64)
        for block in row_blocks(self.n, 65536):
            sums.index_add_(0, labels[block], self.features[block].double())
        return sums.square().sum(1).index_add_(0, labels, self.residual.double())


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
