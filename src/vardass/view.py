"""One domain seen through its kernel: the full matrix, low-rank features, or the kernel itself.

All give K_ij of n points, the first two up to a common shift that leaves all distances
d_ij = K_ii + K_jj - 2 K_ij alone, and the min-sum clustering cost of equation 8,

    J(S) = n² Var(μ̂) = Σ_h |S_h| Σ_{i in S_h} |φ_i - μ_h|² = ½ Σ_h Σ_{i,j in S_h} d_ij.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vardass.backend import compiled_loops
from vardass.kernels import Kernel
from vardass.lowrank import DEFAULT_RANK, low_rank_features, random_row_blocks
from vardass.validate import row_blocks

__all__ = ["EXACT_LIMIT", "ExactView", "KernelView", "LowRankView", "View"]

EXACT_LIMIT = 2048
"""Samples up to which all pairs are looked at: 16 MB of float32. Beyond, low-rank features take the place of the
matrix, and sums over all pairs are estimated."""

_BLOCK_NUMBERS = 2**22  # held at a time
_PAIRS = 20_000  # random pairs that estimate a sum over all
_CORRECTING_PAIRS = 2_000  # the same for the small part that low-rank features miss
_PACK_ROWS = 256  # small strata are evaluated together: a stratum of two rows is not worth a call


class View(ABC):
    """Kernel values K_ij of n points; ``diag`` (n,) is K_ii.

    Sums of embeddings Σ w_i φ_i are rows of *totals*: of features, or of the products with all points. ``residual``
    (n,) is what totals miss of K_ii, None for nothing.
    """

    diag: Tensor
    residual: Tensor | None = None

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.diag)

    @property
    def width(self) -> int:
        """Number of columns that represent each point."""
        return self.n

    @abstractmethod
    def columns(self, columns: Tensor, rows: slice = slice(None)) -> Tensor:
        """K_ij for the b points i in ``rows``, by default all, and the q points j in ``columns``: (b, q)."""

    @abstractmethod
    def block(self, rows: Tensor | slice) -> Tensor:
        """K_ij among the q points in ``rows``: (q, q)."""

    @abstractmethod
    def multiply(self, right: Tensor) -> Tensor:
        """K times ``right`` (n, c), in the precision of ``right``: (n, c)."""

    @abstractmethod
    def pair_distances(self, first: Tensor, second: Tensor) -> Tensor:
        """d_ij for pairs of distinct points i of ``first`` (q,) and j of ``second`` (q,): (q,)."""

    @cached_property
    def row_means(self) -> Tensor:
        """<φ_i, μ> of each point, in double precision: (n,)."""
        return self.multiply(self.diag.new_full((self.n, 1), 1.0 / self.n, dtype=torch.float64))[:, 0]

    @cached_property
    def spread(self) -> Tensor:
        """|φ_i - μ|² of each point: (n,)."""
        means = self.row_means
        return (self.diag - 2.0 * means + means.mean()).clamp_min(0.0).to(self.diag)

    @property
    def whole(self) -> float:
        """J of a single stratum that holds all points."""
        return self.n * float(self.spread.sum(dtype=torch.float64))

    def batch_errors(
        self, rows: Tensor, weights: Tensor, means: Tensor | None = None, squared_norm: Tensor | None = None
    ) -> Tensor:
        """|Σ_h w_h φ_h - μ|² of batches ``rows`` (b, k) with ``weights`` (b, k) or (k,): (b,), double.

        ``means`` (n,) are <φ_i, μ> and ``squared_norm`` |μ|², where they are known.
        """
        means = self.row_means if means is None else means
        weights = weights.double().expand(rows.shape)
        cross = (weights * means[rows]).sum(1)
        squares = [w @ (self.block(batch).double() @ w) for batch, w in zip(rows, weights)]
        return torch.stack(squares) - 2.0 * cross + (means.mean() if squared_norm is None else squared_norm)

    def totals(self, labels: Tensor, k: int) -> Tensor:
        """Σ φ_i of each stratum, for `products`: (k, width)."""
        return self.multiply(torch.nn.functional.one_hot(labels, k).to(self.diag)).T

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Σ w_i φ_i over ``rows`` (q,), as one row of totals: (width,)."""
        return self.columns(rows).to(weights) @ weights

    def products(self, totals: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """<φ_i, Σ φ_j> of the b points in ``rows`` with c ``totals``, without residuals: (b, c)."""
        return totals[:, rows].T

    def stratum_sums(self, labels: Tensor, k: int) -> Tensor:
        """A_ih = Σ_{j in S_h} K_ij for all i and h: (n, k)."""
        return self.with_own(self.products(self.totals(labels, k)), labels)

    def with_own(self, cross: Tensor, labels: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Add the residuals of the points in ``rows`` to their products (b, k) with their own strata, in place."""
        if self.residual is None:
            return cross
        return cross.scatter_add_(1, labels[rows, None], self.residual[rows, None])

    def within(self, labels: Tensor, k: int) -> Tensor:
        """Σ_{i,j in S_h} K_ij for each stratum, accumulated in double precision: (k,)."""
        own = self.stratum_sums(labels, k).gather(1, labels[:, None])[:, 0].double()
        return own.new_zeros(k).index_add_(0, labels, own)

    def objective(self, labels: Tensor, k: int) -> float:
        """J(S) of the strata given by ``labels`` (n,) with values below k."""
        sizes = torch.bincount(labels, minlength=k).double()
        sums = sizes.new_zeros(k).index_add_(0, labels, self.diag.double())
        return float((sizes * sums - self.within(labels, k)).sum().clamp_min(0.0))

    def centroid_distances(self, labels: Tensor, k: int) -> Tensor:
        """|φ_i - μ_h|² to each stratum mean (Algorithm 1, step 2): (n, k). An empty stratum is infinitely far."""
        sizes = torch.bincount(labels, minlength=k).to(self.diag)
        cross = self.stratum_sums(labels, k)
        own = cross.gather(1, labels[:, None])[:, 0]
        inner = torch.zeros_like(sizes).index_add_(0, labels, own) / sizes.square()
        distances = (self.diag[:, None] - 2.0 * cross / sizes + inner).clamp_min_(0.0)
        return distances.masked_fill_(sizes == 0, torch.inf)

    def coordinates(self, k: int, generator: torch.Generator) -> Tensor:
        """Principal coordinates (n, r) of some random columns, in which points can be cut into k strata."""
        picks = torch.randperm(self.n, generator=generator, device=self.diag.device)[: 48 if k <= 32 else 64]
        columns = self.columns(picks)
        columns = columns - columns.mean(0)
        columns /= columns.abs().amax().clamp_min(torch.finfo(columns.dtype).tiny)  # so that squares stay finite
        _, axes = torch.linalg.eigh(columns.T @ columns)
        coordinates: Tensor = columns @ axes.flip(1)
        return coordinates

    def in_full(self) -> ExactView:
        """The same values as a full matrix."""
        return ExactView(self.block(slice(None)))

    def arrays(self) -> tuple[Tensor, Tensor]:
        """For compiled loops: K (n, n) and nothing, or features (n, r) and residual (n,)."""
        return self.in_full().matrix, self.diag[:0]

    def leading(self, rank: int) -> View:
        """Only the ``rank`` leading columns of features, where there are features."""
        return self

    def mean_products(self, rows: Tensor) -> Tensor:
        """Mean K_ij over all j of ``rows`` (q,), for each i of them: (q,)."""
        return self.block(rows).mean(0)


@dataclass
class ExactView(View):
    """The full kernel matrix (n, n), symmetric."""

    matrix: Tensor

    def __post_init__(self) -> None:
        self.diag = self.matrix.diagonal().contiguous()

    @classmethod
    def of(cls, x: Tensor, kernel: Kernel) -> ExactView:
        """The rows of ``x`` (n, d) under a fitted ``kernel``, centred."""
        return cls.centred(kernel.square_matrix(x))

    @classmethod
    def centred(cls, matrix: Tensor) -> ExactView:
        """Make the rows of ``matrix`` (n, n) have the mean 0, in place; sums stay exact where it is nearly constant."""
        if (loops := compiled_loops(matrix)) is not None:
            loops.centre(matrix.numpy(), np.empty(len(matrix)), matrix.new_empty(len(matrix)).numpy())
        else:
            mean = matrix.mean(0, dtype=torch.float64)
            shift = (mean - mean.mean() / 2).to(matrix)
            matrix.sub_(shift[:, None]).sub_(shift)
        return cls(matrix)

    def totals(self, labels: Tensor, k: int) -> Tensor:
        return self.matrix.new_zeros(k, self.n).index_add_(0, labels, self.matrix)

    def columns(self, columns: Tensor, rows: slice = slice(None)) -> Tensor:
        return self.matrix[columns, rows].T

    def block(self, rows: Tensor | slice) -> Tensor:
        return self.matrix[rows, rows] if isinstance(rows, slice) else self.matrix[rows].index_select(1, rows)

    def multiply(self, right: Tensor) -> Tensor:
        blocks = row_blocks(self.n, max(1, _BLOCK_NUMBERS // self.n))
        return torch.cat([self.matrix[block].to(right.dtype) @ right for block in blocks])

    def pair_distances(self, first: Tensor, second: Tensor) -> Tensor:
        return self.diag[first] + self.diag[second] - 2.0 * self.matrix[first, second]

    @cached_property
    def spread(self) -> Tensor:
        """From row means in the precision of the matrix, which is centred or nearly so."""
        mean = self.matrix.mean(0)
        return (self.diag - 2.0 * mean + mean.mean()).clamp_min_(0.0)

    def in_full(self) -> ExactView:
        return self


@dataclass
class LowRankView(View):
    """K_ij ≈ <φ_i, φ_j> + r_i [i = j] with features φ (n, r), centred, and the exact residual diagonal r (n,).

    The residual is a private direction of each point. Without it large strata look too cheap. Columns are by falling
    variance, on a sample of the rows where there are more than 1,024.
    """

    features: Tensor
    residual: Tensor

    def __post_init__(self) -> None:
        self.diag = self.features.square().sum(1) + self.residual

    @classmethod
    def of(cls, x: Tensor, kernel: Kernel, rank: int = DEFAULT_RANK, **options: Any) -> LowRankView:
        """The rows of ``x`` (n, d) under a fitted ``kernel``; `low_rank_features` has the options."""
        return cls(*low_rank_features(x, kernel, rank, **options))

    @property
    def width(self) -> int:
        return self.features.shape[1]

    @cached_property
    def captured(self) -> float:
        """Share of the uniform draw's variance, Σ_i |φ_i - μ|², that lies in the features."""
        total = float(self.diag.sum(dtype=torch.float64))
        return 1.0 - float(self.residual.sum(dtype=torch.float64)) / total if total > 0 else 1.0

    def leading(self, rank: int | None = None, *, negligible: float = 0.0) -> LowRankView:
        """At most ``rank`` columns, without the last that together hold only the share ``negligible``.

        What is dropped goes to the residual diagonal; what is not negligible is a multiple of eight columns.
        """
        rank = self.width if rank is None else rank
        if negligible > 0.0:
            held = self.features.square().sum(0, dtype=torch.float64)
            after = held.flip(0).cumsum(0).flip(0)  # by a column and those that follow
            rank = min(rank, max(1, -(-int((after > negligible * after[0]).sum()) // 8) * 8))
        if rank >= self.width:
            return self
        kept, dropped = self.features[:, :rank].contiguous(), self.features[:, rank:]
        return LowRankView(kept, self.residual + dropped.square().sum(1))

    def totals(self, labels: Tensor, k: int) -> Tensor:
        sums = self.features.new_zeros(k, self.width)
        if not self.features.is_cuda:
            return sums.index_add_(0, labels, self.features)
        # there index_add_ sums in any order, and processes that compute apart shall find the same
        for block in row_blocks(self.n, _BLOCK_NUMBERS // k):
            sums += torch.nn.functional.one_hot(labels[block], k).to(sums).T @ self.features[block]
        return sums

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return weights.to(self.features) @ self.features[rows]

    def products(self, totals: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        return self.features[rows] @ totals.T

    def columns(self, columns: Tensor, rows: slice = slice(None)) -> Tensor:
        values = self.features[rows] @ self.features[columns].T
        start, stop, _ = rows.indices(self.n)
        met = ((columns >= start) & (columns < stop)).nonzero().flatten()
        values[columns[met] - start, met] += self.residual[columns[met]]
        return values

    def block(self, rows: Tensor | slice) -> Tensor:
        picked, residual = self.features[rows], self.residual[rows]
        values = picked @ picked.T
        if isinstance(rows, slice):
            values.diagonal().add_(residual)
        else:  # a point may be in ``rows`` more than once
            values += residual * (rows[:, None] == rows)
        return values

    def multiply(self, right: Tensor) -> Tensor:
        features = self.features.to(right.dtype)
        return features @ (features.T @ right) + self.residual.to(right.dtype)[:, None] * right

    def pair_distances(self, first: Tensor, second: Tensor) -> Tensor:
        """From differences; index_select is an order of magnitude faster here than features[first]."""
        apart = self.features.index_select(0, first) - self.features.index_select(0, second)
        return apart.square().sum(1) + self.residual[first] + self.residual[second]

    @cached_property
    def spread(self) -> Tensor:
        """From the mean of the features; a residual is a direction of its own, of which the mean has 1 / n."""
        mean = self.features.mean(0)
        return (self.diag - 2.0 * (self.features @ mean) + mean.square().sum()).clamp_min_(0.0)

    @property
    def whole(self) -> float:
        return float(self.n * self.spread.sum(dtype=torch.float64) - self.residual.sum(dtype=torch.float64))

    def within(self, labels: Tensor, k: int) -> Tensor:
        if k == 1:
            sums = self.features.sum(0, keepdim=True, dtype=torch.float64)
        else:
            sums = self.features.new_zeros(k, self.width, dtype=torch.float64)
            for block in row_blocks(self.n, 65536):
                sums.index_add_(0, labels[block], self.features[block].double())
        return sums.square().sum(1).index_add_(0, labels, self.residual.double())

    def coordinates(self, k: int, generator: torch.Generator) -> Tensor:
        return self.features

    def arrays(self) -> tuple[Tensor, Tensor]:
        return self.features, self.residual

    def mean_products(self, rows: Tensor) -> Tensor:
        features = self.features[rows]
        return features @ features.mean(0) + self.residual[rows] / len(rows)


class KernelView(View):
    """A fitted kernel on the rows ``x`` (n, d) of one domain, evaluated when values are asked for; none are held.

    Values have the precision ``dtype``, by default that of ``x``; rows are converted when they are used.
    """

    def __init__(self, x: Tensor, kernel: Kernel, dtype: torch.dtype | None = None) -> None:
        self.x, self.kernel, self.dtype = x, kernel, dtype or x.dtype

    @cached_property
    def diag(self) -> Tensor:  # type: ignore[override]
        blocks = row_blocks(len(self.x), max(1, 2**23 // self.x.shape[1]))
        return torch.cat([self.kernel.diag(self.rows(block)) for block in blocks])

    @property
    def n(self) -> int:
        return len(self.x)

    @property
    def is_small(self) -> bool:
        """Whether all pairs are looked at."""
        return self.n <= EXACT_LIMIT

    def rows(self, rows: Tensor | slice) -> Tensor:
        """Rows of the domain, in the precision of the values."""
        picked = self.x[rows] if isinstance(rows, slice) else self.x.index_select(0, rows)
        return picked.to(self.dtype)

    def columns(self, columns: Tensor, rows: slice = slice(None)) -> Tensor:
        return self.kernel.matrix(self.rows(rows), self.rows(columns))

    def block(self, rows: Tensor | slice) -> Tensor:
        return self.kernel.matrix(self.rows(rows))

    def multiply(self, right: Tensor) -> Tensor:
        x = self.rows(slice(None))
        return torch.cat([block.to(right.dtype) @ right for _, block in self.kernel.blocks(x)])

    def pair_distances(self, first: Tensor, second: Tensor) -> Tensor:
        return self.kernel.paired_distances(self.rows(first), self.rows(second))

    def mean_to_all(self, points: Tensor) -> Tensor:
        """Mean κ of each of ``points`` (m, d) to all rows, in double precision: (m,)."""
        sums = torch.zeros(len(points), dtype=torch.float64, device=points.device)
        for rows in row_blocks(self.n, 8192):
            sums += self.kernel.matrix(self.rows(rows), points).sum(0, dtype=torch.float64)
        return sums / self.n

    @property
    def whole(self) -> float:
        return self.objective(torch.zeros(self.n, dtype=torch.int64, device=self.x.device), 1)

    def objective(self, labels: Tensor, k: int) -> float:
        sizes = torch.bincount(labels, minlength=k)
        return max(0.0, float((sizes.double() * self.scatter(labels, sizes)).sum()))

    def scatter(self, labels: Tensor, sizes: Tensor) -> Tensor:
        """Σ_{i in h} |φ_i - μ_h|² = Σ_i κ_ii - Σ_ij κ_ij / m_h within strata of ``sizes`` (k,), not empty: (k,)."""
        by_stratum = torch.argsort(labels, stable=True)
        scatter = torch.zeros(len(sizes), dtype=torch.float64, device=labels.device)
        for rows in _pack(sizes.tolist()):
            members = by_stratum[rows]
            label, group = labels[members], self.rows(members)
            if len(members) > _PACK_ROWS:  # a single stratum
                for piece, values in self.kernel.blocks(group):
                    scatter[label[0]] += _excess(values, values.diagonal(piece.start), len(members)).sum()
            else:
                values = self.kernel.matrix(group)
                values, diagonal = torch.where(label[:, None] == label, values, 0.0), values.diagonal()
                scatter.index_add_(0, label, _excess(values, diagonal, sizes[label]))
        return scatter

    def mean_correction(
        self, seen: View | None, labels: Tensor, k: int, generator: torch.Generator
    ) -> tuple[float, float]:
        """Mean and standard error of d_ij, minus that of ``seen`` if there is one, over random pairs within strata."""
        sizes = torch.bincount(labels, minlength=k)
        pairs = (sizes * (sizes - 1)).double()
        if float(pairs.sum()) == 0.0:
            return 0.0, 0.0
        order = torch.arange(len(labels), device=labels.device) if k == 1 else labels.argsort(stable=True)
        starts = sizes.cumsum(0) - sizes
        count = _PAIRS if seen is None else _CORRECTING_PAIRS
        stratum = torch.multinomial(pairs, count, replacement=True, generator=generator)
        size = sizes[stratum]

        def below(limit: Tensor) -> Tensor:
            draw = torch.rand(count, dtype=torch.float64, generator=generator, device=labels.device)
            return (draw * limit).long().clamp_max_(limit - 1)

        first, second = below(size), below(size - 1)
        second = second + (second >= first)  # any member but the first
        i, j = order[starts[stratum] + first], order[starts[stratum] + second]
        found = self.pair_distances(i, j)
        if seen is not None:
            found = found - seen.pair_distances(i, j)
        return float(found.double().mean()), float(found.double().std()) / count**0.5

    def pair_mean(self, features: Tensor, residual: Tensor, generator: torch.Generator) -> tuple[float, float]:
        """Mean κ over all n² pairs and its standard error, from features (n, r) that are not centred.

        κ is <φ, φ'> and what that misses: all of it on the diagonal, its mean over random blocks of rows elsewhere.
        """
        n = self.n
        mean = float(features.mean(0, dtype=torch.float64).square().sum())
        mean += float(residual.sum(dtype=torch.float64)) / n**2
        if n == 1 or not bool(residual.any()):
            return mean, 0.0
        values = []
        for (rows,) in random_row_blocks([n], generator):
            rest = (self.block(rows) - features[rows] @ features[rows].T).double().fill_diagonal_(0.0)
            values.append(float(rest.sum()) / (len(rows) * (len(rows) - 1)))
        found = torch.tensor(values, dtype=torch.float64)
        error = float(found.std()) / len(found) ** 0.5 if len(found) > 1 else 0.0
        return mean + float(found.mean()) * (n - 1) / n, error


def _excess(values: Tensor, diagonal: Tensor, size: int | Tensor) -> Tensor:
    # the diagonal is that of the very block that is summed: a singleton's scatter is then exactly zero
    return diagonal.double() - values.sum(1, dtype=torch.float64) / size


def _pack(sizes: list[int]) -> Iterator[slice]:
    """Cut rows sorted by stratum into runs of whole strata, of ``_PACK_ROWS`` rows or of one stratum."""
    start = stop = 0
    for size in sizes:
        if stop > start and stop + size - start > _PACK_ROWS:
            yield slice(start, stop)
            start = stop
        stop += size
    yield slice(start, stop)
