"""What a solver is given and what it hands back.

A problem is one domain seen through its kernel: exact (n x n) or low rank (n x r).

The objective is the min-sum clustering cost of equation 8,

    J(S) = n² Var(μ̂) = Σ_h |S_h| Σ_{i in S_h} |φ_i - μ_h|² = ½ Σ_h Σ_{i,j in S_h} d_ij,
    d_ij = K_ii + K_jj - 2 K_ij.

Solvers see only the three views below, so each is written once for both forms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vardass.backend import hot_loops
from vardass.validate import row_blocks

__all__ = ["DistanceTable", "Distances", "ExactProblem", "LowRankProblem", "Problem", "Solution"]

_TABLE_NUMBERS = 2**22  # distances to stratum means that are kept as one table, 16 MB; more are computed in blocks


class Distances(ABC):
    """Distances of n points to k stratum means, of which any part can be asked for.

    Not more than a block of them is held at a time: a table would take 1 GB at n = 10^6 and k = 256.
    """

    n: int
    k: int

    @abstractmethod
    def rows(self, rows: Tensor | slice) -> Tensor:
        """From the q points in ``rows`` to each mean: (q, k)."""

    @abstractmethod
    def column(self, stratum: int) -> Tensor:
        """From each point to one mean: (n,)."""

    def blocks(self) -> Iterator[slice]:
        """Rows that are asked for together."""
        return row_blocks(self.n, _TABLE_NUMBERS // self.k)

    def nearest(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest mean of each point, and its distance to the one that ``labels`` (n,) name: both (n,)."""
        found = []
        for block in self.blocks():
            distances = self.rows(block)
            found.append((distances.min(1).indices, distances.gather(1, labels[block, None])[:, 0]))
        return torch.cat([nearest for nearest, _ in found]), torch.cat([own for _, own in found])


class DistanceTable(Distances):
    """All distances (n, k) in one table."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.n, self.k = table.shape

    def rows(self, rows: Tensor | slice) -> Tensor:
        """Rows of the table."""
        return self.table[rows]

    def column(self, stratum: int) -> Tensor:
        """A column of the table."""
        return self.table[:, stratum]


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
    def columns(self, columns: Tensor, rows: slice = slice(None)) -> Tensor:
        """K_ij for the b points i in ``rows``, by default all, and the q points j in ``columns``: (b, q)."""

    @abstractmethod
    def block(self, rows: Tensor | slice) -> Tensor:
        """K_ij among the q points in ``rows``, which must be distinct: (q, q)."""

    @abstractmethod
    def within(self, labels: Tensor, k: int) -> Tensor:
        """Σ_{i,j in S_h} K_ij for each stratum, accumulated in double precision: (k,)."""

    @cached_property
    def spread(self) -> Tensor:
        """|φ_i - μ|² of each point: (n,)."""
        return self._spread()

    @abstractmethod
    def _spread(self) -> Tensor: ...

    def objective(self, labels: Tensor, k: int) -> float:
        """J(S) of the strata given by ``labels`` (n,) with values below k."""
        sizes = torch.bincount(labels, minlength=k).double()
        sums = sizes.new_zeros(k).index_add_(0, labels, self.diag.double())
        return float((sizes * sums - self.within(labels, k)).sum().clamp_min(0.0))

    def centroid_distances(self, labels: Tensor, k: int) -> Tensor:
        """|φ_i - μ_h|² from each point to each stratum mean (Algorithm 1, step 2): (n, k).

        An empty stratum is infinitely far. See `distances` for what needs less memory.
        """
        sizes = torch.bincount(labels, minlength=k).to(self.diag)
        cross = self.stratum_sums(labels, k)
        own = cross.gather(1, labels[:, None])[:, 0]
        inner = torch.zeros_like(sizes).index_add_(0, labels, own) / sizes.square()
        distances = (self.diag[:, None] - 2.0 * cross / sizes + inner).clamp_min_(0.0)
        return distances.masked_fill_(sizes == 0, torch.inf)

    def distances(self, labels: Tensor, k: int) -> Distances:
        """The same, of which any part can be asked for."""
        return DistanceTable(self.centroid_distances(labels, k))


@dataclass
class ExactProblem(Problem):
    """The full kernel matrix (n, n), symmetric."""

    matrix: Tensor

    def __post_init__(self) -> None:
        self.diag = self.matrix.diagonal().contiguous()

    @classmethod
    def centred(cls, matrix: Tensor) -> ExactProblem:
        """The problem of a kernel ``matrix`` (n, n), which is changed in place so that its rows have the mean 0.

        That changes no distance and keeps sums exact where the kernel is nearly constant.
        """
        if (loops := hot_loops(matrix)) is not None:
            loops.centre(matrix.numpy())
        else:
            mean = matrix.mean(0, dtype=torch.float64)
            shift = (mean - mean.mean() / 2).to(matrix)
            matrix.sub_(shift[:, None]).sub_(shift)
        return cls(matrix)

    def stratum_sums(self, labels: Tensor, k: int) -> Tensor:
        """A, summed over rows of the symmetric matrix: O(n²), whatever k is."""
        return self.matrix.new_zeros(k, self.n).index_add_(0, labels, self.matrix).T

    def columns(self, columns: Tensor, rows: slice = slice(None)) -> Tensor:
        """Rows of the matrix, which is symmetric."""
        return self.matrix[columns, rows].T

    def block(self, rows: Tensor | slice) -> Tensor:
        """A submatrix."""
        return self.matrix[rows, rows] if isinstance(rows, slice) else self.matrix[rows].index_select(1, rows)

    def _spread(self) -> Tensor:
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
        cross = self.features @ self.feature_sums(labels, k).T
        return cross.scatter_add_(1, labels[:, None], self.residual[:, None])

    def feature_sums(self, labels: Tensor, k: int) -> Tensor:
        """Σ φ_i of each stratum: (k, r)."""
        sums = self.features.new_zeros(k, self.features.shape[1])
        if not self.features.is_cuda:
            return sums.index_add_(0, labels, self.features)
        # there index_add_ sums in any order, and processes that compute apart shall find the same
        for block in self.blocks(k):
            sums += torch.nn.functional.one_hot(labels[block], k).to(sums).T @ self.features[block]
        return sums

    def blocks(self, k: int) -> Iterator[slice]:
        """Rows whose products with k strata are held together."""
        return row_blocks(self.n, _TABLE_NUMBERS // k)

    def distances(self, labels: Tensor, k: int) -> Distances:
        """From the feature sums, in parts where there are many."""
        if self.n * k <= _TABLE_NUMBERS:
            return super().distances(labels, k)
        return _CentroidDistances(self, labels, k)

    def columns(self, columns: Tensor, rows: slice = slice(None)) -> Tensor:
        """Inner products, with the residual where a point meets itself."""
        values = self.features[rows] @ self.features[columns].T
        start, stop, _ = rows.indices(self.n)
        met = ((columns >= start) & (columns < stop)).nonzero().flatten()
        values[columns[met] - start, met] += self.residual[columns[met]]
        return values

    def block(self, rows: Tensor | slice) -> Tensor:
        """Inner products, with the residual on the diagonal."""
        picked = self.features[rows]
        matrix = picked @ picked.T
        matrix.diagonal().add_(self.residual[rows])
        return matrix

    def _spread(self) -> Tensor:
        """From the mean of the features."""
        mean = self.features.mean(0)
        return (self.diag - 2.0 * (self.features @ mean) + mean.square().sum()).clamp_min_(0.0)

    def within(self, labels: Tensor, k: int) -> Tensor:
        """|Σ φ|² + Σ r of each stratum."""
        if k == 1:
            sums = self.features.sum(0, keepdim=True, dtype=torch.float64)
        else:
            sums = self.features.new_zeros(k, self.features.shape[1], dtype=torch.float64)
            for block in row_blocks(self.n, 65536):
                sums.index_add_(0, labels[block], self.features[block].double())
        return sums.square().sum(1).index_add_(0, labels, self.residual.double())


class _CentroidDistances(Distances):
    """|φ_i - μ_h|² of a low-rank problem, from the k feature sums; an empty stratum is infinitely far."""

    def __init__(self, problem: LowRankProblem, labels: Tensor, k: int) -> None:
        self.n, self.k = problem.n, k
        self.problem, self.labels = problem, labels
        self.sizes = torch.bincount(labels, minlength=k).to(problem.diag)
        self.sums = problem.feature_sums(labels, k)
        within = self.sums.square().sum(1).index_add_(0, labels, problem.residual)
        self.inner = within / self.sizes.square()

    def rows(self, rows: Tensor | slice) -> Tensor:
        cross = self.problem.features[rows] @ self.sums.T
        cross.scatter_add_(1, self.labels[rows, None], self.problem.residual[rows, None])
        distances = (self.problem.diag[rows, None] - 2.0 * cross / self.sizes + self.inner).clamp_min_(0.0)
        return distances.masked_fill_(self.sizes == 0, torch.inf)

    def column(self, stratum: int) -> Tensor:
        size = self.sizes[stratum]
        if size == 0:
            return torch.full_like(self.problem.diag, torch.inf)
        cross = self.problem.features @ self.sums[stratum] + self.problem.residual * (self.labels == stratum)
        return (self.problem.diag - 2.0 * cross / size + self.inner[stratum]).clamp_min_(0.0)


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
