"""Low-rank kernel features that keep the exact residual diagonal.

Distances between n points become K_ij ≈ <φ_i, φ_j> for i ≠ j while K_ii stays exact: what the r features
miss of a point is kept as its residual r_i = K_ii - |φ_i|² ≥ 0, a direction of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.validate import row_blocks

__all__ = ["FeatureMap", "LowRankFeatures", "fit_feature_map", "low_rank_features", "random_row_blocks", "whitening"]

DEFAULT_RANK = 128

_SAMPLE = 4096  # rows that landmarks and directions are chosen from
_BLOCK_BYTES = 16 * 2**20  # a block of kernel rows should stay in cache
_ROUNDS = 2  # of landmarks that are drawn together; more of them find no better ones


@dataclass(frozen=True)
class LowRankFeatures:
    """Centred features φ (n, r), columns by falling variance, and the residual diagonal (n,).

    The order of the columns is that of all rows for up to 4,096 of them, else that of as many rows.

    Attributes
    ----------
    captured : float
        Share of the uniform draw's variance, Σ_i |φ_i - μ|², that lies in the r features.
    irreducible : float
        The rest, which no sampler that works on these features can reduce. For an RBF mixture most of it
        is the near-identity part of the large bandwidths, out of reach at any rank.

    Examples
    --------
    >>> from vardass.kernels import RBFMixture
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(300, 2, generator=generator)
    >>> found = low_rank_features(x, RBFMixture((0.1,)), rank=32, generator=generator)
    >>> found.features.shape[1] <= 32, found.captured > 0.99
    (True, True)
    """

    features: Tensor
    residual: Tensor

    @cached_property
    def captured(self) -> float:
        """Share of the variance in the features."""
        inside = float(self.features.square().sum(dtype=torch.float64))
        total = inside + float(self.residual.sum(dtype=torch.float64))
        return inside / total if total > 0 else 1.0

    @property
    def irreducible(self) -> float:
        """Share of the variance in the residual diagonal."""
        return 1.0 - self.captured


@dataclass(frozen=True)
class FeatureMap:
    """A fitted map z -> φ(z) (r,): Nystrom through landmarks, or explicit where the kernel has one.

    It can be applied to points it has not seen, block by block, so shards of one data set share it.

    Examples
    --------
    >>> from vardass.kernels import RBFMixture
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(300, 2, generator=generator)
    >>> phi = fit_feature_map(x, RBFMixture((0.1,)), rank=32, generator=generator)
    >>> features, residual = phi(x[:5])
    >>> len(features), bool((residual < 0.1).all())  # what the features miss of κ(z, z)
    (5, True)
    """

    kernel: Kernel
    landmarks: Tensor | None
    transform: Tensor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (n, r), not centred, and the residual diagonal (n,) of rows ``x`` (n, d)."""
        features = x.new_empty(len(x), self.transform.shape[1])
        if self.landmarks is None:
            rows = _BLOCK_BYTES // (x.element_size() * len(self.transform))
        else:
            rows = _BLOCK_BYTES // (x.element_size() * max(len(self.landmarks), x.shape[1]))
        for block in row_blocks(len(x), rows):
            torch.mm(self._basis(x[block]), self.transform, out=features[block])
        if self.landmarks is None:
            return features, x.new_zeros(len(x))
        return features, (self.kernel.diag(x) - features.square().sum(1)).clamp_min_(0.0)

    def _basis(self, x: Tensor) -> Tensor:
        if self.landmarks is not None:
            return self.kernel.matrix(x, self.landmarks)
        explicit = self.kernel.explicit_features(x)
        assert explicit is not None
        return explicit


def low_rank_features(
    x: Tensor,
    kernel: Kernel,
    rank: int = DEFAULT_RANK,
    *,
    landmarks: int | None = None,
    pivoting: str = "rpcholesky",
    negligible: float = 0.0,
    sort: bool = True,
    generator: torch.Generator,
) -> LowRankFeatures:
    """Features of the rows of ``x`` (n, d) under a fitted ``kernel``: at most ``rank`` columns.

    Columns that together hold no more than the share ``negligible`` of the variance of uniform draws are replaced by
    one, along their mean; what they held stays in the residual diagonal. Without ``sort`` the columns come in any
    order, which saves two eigendecompositions where there are as many landmarks as columns. See `fit_feature_map` for
    the other parameters. Time O(n (d + rank) landmarks), memory O(n rank).

    Examples
    --------
    >>> from vardass.kernels import LinearKernel
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [4.0, 1.0]])
    >>> found = low_rank_features(x, LinearKernel(), rank=2, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(found.features.mean(0), torch.zeros(2).to(found.features), atol=1e-5)
    True
    """
    sort = sort or negligible > 0.0
    feature_map, moment, mean = _fit(x, kernel, rank, landmarks, pivoting, generator, sort=sort)
    if sort and feature_map.landmarks is not None:
        # its axes are those of the largest second moment, of which the mean has a part: turn them to the variance
        centred = moment - mean[:, None] * mean
        turn = _principal_axes(centred, len(mean))
        if negligible > 0.0:
            held = (turn * (centred @ turn)).sum(0).flip(0).cumsum(0).flip(0)  # by a column and those after it
            spread = kernel.diag(x[:: -(-len(x) // _SAMPLE)]).double().mean() - mean.square().sum()
            wanted = -(-int((held > negligible * spread).sum()) // 8) * 8
            rest = turn[:, wanted:]
            # the part of the mean that is left out is common to all points: it is no residual of theirs
            common = rest @ (rest.T @ mean)
            turn = torch.cat([turn[:, :wanted], common[:, None] / common.norm().clamp_min(1e-300)], 1)
        feature_map = replace(feature_map, transform=feature_map.transform @ turn.to(x.dtype))
    features, residual = feature_map(x)
    # a common shift changes no distance and makes later sums exact
    features -= features.mean(0)
    return LowRankFeatures(features, residual)


def fit_feature_map(
    x: Tensor,
    kernel: Kernel,
    rank: int = DEFAULT_RANK,
    *,
    landmarks: int | None = None,
    pivoting: str = "rpcholesky",
    generator: torch.Generator,
) -> FeatureMap:
    """Choose landmarks and directions on a sample of the rows of ``x``.

    Parameters
    ----------
    x : Tensor of shape (n, d)
        Features of one domain.
    kernel : Kernel
        Fitted.
    rank : int
        Columns of the result.
    landmarks : int, optional
        Points that span the approximation, 2 * rank by default.
    pivoting : {"rpcholesky", "uniform"}
        Randomly pivoted Cholesky (Chen, Epperly, Tropp and Webber 2022) draws landmarks in proportion to
        what is still missed, which matters for skewed kernels such as CORAL's; uniform is a little faster.
    generator : torch.Generator
        On the device of ``x``.

    Examples
    --------
    >>> from vardass.kernels import LinearKernel
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> phi = fit_feature_map(x, LinearKernel(), rank=2, generator=torch.Generator().manual_seed(0))
    >>> features, residual = phi(x)
    >>> torch.allclose(features @ features.T, x @ x.T, atol=1e-5)
    True
    """
    return _fit(x, kernel, rank, landmarks, pivoting, generator)[0]


MISSED_BLOCKS, MISSED_ROWS = 64, 512
"""Random blocks of rows, and rows of each, on which what a map misses of a mean over all pairs is measured."""


def random_row_blocks(sizes: Sequence[int], generator: torch.Generator) -> list[list[Tensor]]:
    """Random subsets of the rows of some sets: 64 times distinct rows of each, 512 or all if there are fewer.

    Once all rows of each, where no set has more than 512.

    Examples
    --------
    >>> [(len(first), len(second)) for first, second in random_row_blocks([100, 300], torch.Generator())]
    [(100, 300)]
    >>> blocks = random_row_blocks([1000, 300], torch.Generator())
    >>> len(blocks), [len(rows) for rows in blocks[0]]
    (64, [512, 300])
    """

    def shuffled(n: int) -> Tensor:
        return torch.randperm(n, generator=generator, device=generator.device)

    if max(sizes) <= MISSED_ROWS:
        return [[shuffled(n) for n in sizes]]
    columns = []
    for n in sizes:
        if n >= MISSED_BLOCKS * MISSED_ROWS:
            columns.append(list(shuffled(n)[: MISSED_BLOCKS * MISSED_ROWS].view(MISSED_BLOCKS, -1)))
        else:
            columns.append([shuffled(n)[:MISSED_ROWS] for _ in range(MISSED_BLOCKS)])
    return [list(rows) for rows in zip(*columns)]


def _fit(
    x: Tensor,
    kernel: Kernel,
    rank: int,
    landmarks: int | None,
    pivoting: str,
    generator: torch.Generator,
    *,
    sort: bool = True,
) -> tuple[FeatureMap, Tensor, Tensor]:
    """The map, and the second moment (r, r) and the mean (r,) of its features on the sample, in double precision."""
    if pivoting not in ("rpcholesky", "uniform"):
        raise InputError(f"pivoting must be 'rpcholesky' or 'uniform', got {pivoting!r}")
    count = landmarks or 2 * rank
    sample = x
    if len(x) > (size := min(_SAMPLE, max(1024, 8 * count))):
        sample = x[torch.randperm(len(x), generator=generator, device=x.device)[:size]]
    explicit = kernel.explicit_features(sample)
    if explicit is not None:  # few columns: rotate, keep them all
        centred = (explicit - explicit.mean(0)).double()
        moment = centred.T @ centred / len(centred)
        axes = _principal_axes(moment, len(moment))
        return FeatureMap(kernel, None, axes.to(x.dtype)), axes.T @ moment @ axes, moment.new_zeros(len(moment))
    count = min(len(sample), count)
    if pivoting == "uniform":
        chosen = torch.randperm(len(sample), generator=generator, device=x.device)[:count]
    else:
        chosen = _random_pivots(sample, kernel, count, generator)
    points = sample[chosen].contiguous()
    columns = kernel.matrix(sample, points)
    whiten = whitening(columns[chosen].double(), torch.finfo(x.dtype).eps)
    if not sort and whiten.shape[1] <= rank:
        return FeatureMap(kernel, points, whiten.to(x.dtype)), whiten[:0], whiten[0, :0]
    whitened = columns @ whiten.to(x.dtype)
    mean = whitened.mean(0, dtype=torch.float64)
    whitened -= mean.to(x.dtype)  # the mean may be most of it, and would take the digits of the rest
    moment = (whitened.T @ whitened).double() / len(sample) + mean[:, None] * mean
    axes = _principal_axes(moment, min(rank, len(moment)))
    return FeatureMap(kernel, points, (whiten @ axes).to(x.dtype)), axes.T @ moment @ axes, mean @ axes


def whitening(matrix: Tensor, eps: float) -> Tensor:
    """T (L, R) with T Tᵀ the inverse of a positive semi-definite ``matrix`` (L, L), on the directions that it has.

    ``eps`` is the rounding of its entries, relative to their size.

    Examples
    --------
    >>> whiten = whitening(torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=torch.float64), 1e-7)
    >>> (whiten @ whiten.T).tolist()
    [[0.25, 0.0], [0.0, 1.0]]
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    diagonal = factor.diagonal()
    # directions near the rounding error of the kernel entries would only amplify it
    if not bool(failed) and bool(diagonal.min().square() > 30.0 * eps * matrix.diagonal().sum()):
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False).T
        return inverse
    values, vectors = torch.linalg.eigh(matrix)
    keep = values > max(30.0 * eps * float(values[-1].clamp_min(0.0)), torch.finfo(torch.float64).tiny)
    if not bool(keep.any()):  # a kernel that is zero on the data: one column of zeros
        return matrix.new_zeros(len(matrix), 1)
    whiten: Tensor = vectors[:, keep] / values[keep].sqrt()
    return whiten


def _principal_axes(moment: Tensor, rank: int) -> Tensor:
    """Orthonormal directions (D, rank) of largest second ``moment`` (D, D), the largest first."""
    _, vectors = torch.linalg.eigh(moment)
    axes: Tensor = vectors.flip(1)[:, :rank]
    return axes


def _random_pivots(x: Tensor, kernel: Kernel, count: int, generator: torch.Generator) -> Tensor:
    """Block randomly pivoted Cholesky: indices (at most count,) of distinct rows of ``x``."""
    missed = kernel.diag(x).double().clamp_min(0.0)
    floor = 1e-6 * missed.sum()
    factor = x.new_zeros(len(x), 0)
    chosen = torch.zeros(0, dtype=torch.int64, device=x.device)
    size = max(1, -(-count // _ROUNDS))
    while float(missed.sum()) > float(floor):
        open_rows = int((missed > 0).sum())
        picks = torch.multinomial(missed, min(size, count - len(chosen), open_rows), generator=generator)
        chosen = torch.cat([chosen, picks])
        if len(chosen) >= count:
            break
        columns = kernel.matrix(x, x[picks]) - factor @ factor[picks].T
        values, vectors = torch.linalg.eigh(columns[picks].double())
        keep = values > 1e-5 * values[-1].clamp_min(1e-300)
        new = columns @ (vectors[:, keep] / values[keep].sqrt()).to(x.dtype)
        factor = torch.cat([factor, new], dim=1)
        missed = (missed - new.double().square().sum(1)).clamp_min(0.0)
        missed[chosen] = 0.0
    if len(chosen) == 0:  # a kernel that is zero on the data
        chosen = torch.zeros(1, dtype=torch.int64, device=x.device)
    return chosen
