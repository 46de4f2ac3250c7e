"""Low-rank kernel features that keep the exact residual diagonal.

Distances between n points become K_ij ≈ <φ_i, φ_j> for i ≠ j while K_ii stays exact: what the r features
miss of a point is kept as its residual r_i = K_ii - |φ_i|² ≥ 0, a direction of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vardass.kernels import Kernel
from vardass.validate import row_blocks

__all__ = ["DEFAULT_RANK", "FeatureMap", "fit_feature_map", "low_rank_features", "random_row_blocks"]

DEFAULT_RANK = 128

_SAMPLE = 1024  # rows that landmarks and directions are chosen from, or _PER_LANDMARK for each if that is more
_PER_LANDMARK = 3
_BLOCK_BYTES = 16 * 2**20  # a block of kernel rows should stay in cache
_ROUNDS = 2  # of landmarks drawn together; more find no better ones


@dataclass(frozen=True)
class FeatureMap:
    """A fitted map z -> φ(z) (r,): Nystrom through landmarks, or explicit where the kernel has one.

    It can be applied to points it has not seen, block by block, so shards of one data set share it.
    """

    kernel: Kernel
    landmarks: Tensor | None
    transform: Tensor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (n, r), not centred, and the residual diagonal (n,) of rows ``x`` (n, d)."""
        features = self.features(x)
        return features, self.residual(x, features)

    def features(self, x: Tensor) -> Tensor:
        """Features (n, r) of rows ``x`` (n, d), not centred."""
        features = x.new_empty(len(x), self.transform.shape[1])
        if self.landmarks is None:
            rows = _BLOCK_BYTES // (x.element_size() * len(self.transform))
        else:
            rows = _BLOCK_BYTES // (x.element_size() * max(len(self.landmarks), x.shape[1]))
        for block in row_blocks(len(x), rows):
            torch.mm(self._basis(x[block]), self.transform, out=features[block])
        return features

    def residual(self, x: Tensor, features: Tensor) -> Tensor:
        """κ(z, z) minus what ``features`` (n, r) of the rows ``x`` hold of it: (n,)."""
        if self.landmarks is None:
            return x.new_zeros(len(x))
        return (self.kernel.diag(x) - features.square().sum(1)).clamp_min_(0.0)

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
    rounds: int = _ROUNDS,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Features φ (n, at most ``rank``), centred, and residual diagonal (n,) of the rows of ``x`` (n, d).

    A landmark is seen through the other landmarks, unless most rows are landmarks. It would else have in its features
    what those of its neighbours miss, and strata and plans would tell landmarks from other rows.

    See `fit_feature_map` for ``landmarks``, which are drawn in ``rounds``: in one round all in proportion to κ(z, z),
    which is faster and with many landmarks as good. Time O(n (d + rank) landmarks), memory O(n rank).
    """
    fit = _fit(x, kernel, rank, landmarks, rounds, generator, leave_one_out=True)
    features = fit.basis @ fit.feature_map.transform if len(fit.basis) == len(x) else fit.feature_map.features(x)
    if fit.own_part is not None:
        features[fit.landmarks] -= fit.own_part[:, None] * fit.feature_map.transform
    residual = fit.feature_map.residual(x, features)
    # a common shift changes no distance and makes later sums exact
    features -= features.mean(0)
    return features, residual


def fit_feature_map(
    x: Tensor, kernel: Kernel, rank: int = DEFAULT_RANK, *, landmarks: int | None = None, generator: torch.Generator
) -> FeatureMap:
    """Choose landmarks and directions on a sample of the rows of ``x`` (n, d), for a fitted ``kernel``.

    The ``rank`` columns are the directions of largest variance; where not all fit, the last is what these miss of the
    mean embedding, on which a loss depends first.

    Parameters
    ----------
    landmarks : int, optional
        Points that span the approximation, 2 * rank by default. Randomly pivoted Cholesky (Chen, Epperly, Tropp and
        Webber 2022) draws them in two rounds in proportion to what is still missed, which matters for skewed kernels
        such as CORAL's.
    generator : torch.Generator
        On the device of ``x``.
    """
    return _fit(x, kernel, rank, landmarks, _ROUNDS, generator).feature_map


RANDOM_BLOCKS, BLOCK_ROWS = 64, 512
"""Random blocks of rows, and rows of each, on which what a map misses of a mean over all pairs is measured."""


def random_row_blocks(sizes: Sequence[int], generator: torch.Generator) -> list[list[Tensor]]:
    """Random subsets of the rows of some sets: 64 times distinct rows of each, 512 or all if there are fewer.

    Once all rows of each, where no set has more than 512.
    """

    def shuffled(n: int) -> Tensor:
        return torch.randperm(n, generator=generator, device=generator.device)

    if max(sizes) <= BLOCK_ROWS:
        return [[shuffled(n) for n in sizes]]
    columns = []
    for n in sizes:
        if n >= RANDOM_BLOCKS * BLOCK_ROWS:
            columns.append(list(shuffled(n)[: RANDOM_BLOCKS * BLOCK_ROWS].view(RANDOM_BLOCKS, -1)))
        else:
            columns.append([shuffled(n)[:BLOCK_ROWS] for _ in range(RANDOM_BLOCKS)])
    return [list(rows) for rows in zip(*columns)]


class _Fit(NamedTuple):
    feature_map: FeatureMap
    basis: Tensor  # what the map multiplies for the rows that it was chosen on, all of them if they are few
    landmarks: Tensor | None = None  # their rows
    own_part: Tensor | None = None  # part of κ(z, z) of each that the others do not hold, where it is to be left out


def _fit(
    x: Tensor,
    kernel: Kernel,
    rank: int,
    landmarks: int | None,
    rounds: int,
    generator: torch.Generator,
    *,
    leave_one_out: bool = False,  # landmarks shall be seen as other rows
) -> _Fit:
    count = landmarks or 2 * rank
    sample, rows = x, None
    if len(x) > (size := max(_SAMPLE, _PER_LANDMARK * count)):
        rows = torch.randperm(len(x), generator=generator, device=x.device)[:size]
        sample = x[rows]
    explicit = kernel.explicit_features(sample)
    if explicit is not None:  # few columns: rotate, keep them all
        return _Fit(FeatureMap(kernel, None, _principal_axes(explicit.double())[0].to(x.dtype)), explicit)
    count = min(len(sample), count)
    chosen = _random_pivots(sample, kernel, count, generator, rounds)
    points = sample[chosen].contiguous()
    columns = kernel.matrix(sample, points)
    whiten, own_part = _whitening(columns[chosen].double(), torch.finfo(x.dtype).eps)
    whitened = columns @ whiten.to(x.dtype)
    leave_one_out &= len(x) >= 2 * count
    if leave_one_out:
        whitened[chosen] -= (own_part[:, None] * whiten).to(x.dtype)
    # the precision of the kernel values is enough to tell which directions lead
    axes, mean = _principal_axes(whitened)
    if axes.shape[1] > rank > 1:
        axes = axes[:, : rank - 1]
        rest = mean - axes @ (axes.T @ mean)
        axes = torch.cat([axes, rest[:, None] / rest.norm().clamp_min(torch.finfo(x.dtype).tiny)], dim=1)
    feature_map = FeatureMap(kernel, points, (whiten @ axes[:, :rank].double()).to(x.dtype))
    if not leave_one_out:
        return _Fit(feature_map, columns)
    return _Fit(feature_map, columns, chosen if rows is None else rows[chosen], own_part.to(x.dtype))


def _whitening(matrix: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """T (L, R) with T Tᵀ the pseudo-inverse of a positive semi-definite ``matrix`` (L, L), and 1 / (K⁻¹)_ll (L,).

    The latter, the Schur complement, is what the other rows do not hold of K_ll. ``eps`` is the relative rounding of
    the entries.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    diagonal = factor.diagonal()
    # directions near the rounding error of the kernel entries would only amplify it
    if not bool(failed) and bool(diagonal.min().square() > 30.0 * eps * matrix.diagonal().sum()):
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False).T
        return inverse, inverse.square().sum(1).reciprocal()
    values, vectors = torch.linalg.eigh(matrix)
    least = max(30.0 * eps * float(values[-1].clamp_min(0.0)), torch.finfo(torch.float64).tiny)
    keep = values > least
    own_part = (vectors.square() / values.clamp_min(least)).sum(1).reciprocal()
    own_part = torch.where(own_part > 2.0 * least, own_part, 0.0)  # the rest is rounding
    if not bool(keep.any()):  # a kernel that is zero on the data: one column of zeros
        return matrix.new_zeros(len(matrix), 1), own_part
    return vectors[:, keep] / values[keep].sqrt(), own_part


def _principal_axes(features: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal directions (D, D) of ``features`` (n, D), that of the largest variance first, and their mean (D,)."""
    mean = features.mean(0, dtype=torch.float64).to(features.dtype)
    centred = features - mean  # the mean may be most of it, and would take the digits of the rest
    return torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1), mean


def _random_pivots(x: Tensor, kernel: Kernel, count: int, generator: torch.Generator, rounds: int) -> Tensor:
    """Block randomly pivoted Cholesky: indices (at most count,) of distinct rows of ``x``."""
    unexplained = kernel.diag(x).double().clamp_min(0.0)
    floor = 1e-6 * unexplained.sum()
    factor = x.new_zeros(len(x), 0)
    chosen = torch.zeros(0, dtype=torch.int64, device=x.device)
    size = max(1, -(-count // rounds))
    while float(unexplained.sum()) > float(floor):
        open_rows = int((unexplained > 0).sum())
        picks = torch.multinomial(unexplained, min(size, count - len(chosen), open_rows), generator=generator)
        chosen = torch.cat([chosen, picks])
        if len(chosen) >= count:
            break
        columns = kernel.matrix(x, x[picks]) - factor @ factor[picks].T
        values, vectors = torch.linalg.eigh(columns[picks].double())
        keep = values > 1e-5 * values[-1].clamp_min(1e-300)
        new = columns @ (vectors[:, keep] / values[keep].sqrt()).to(x.dtype)
        factor = torch.cat([factor, new], dim=1)
        unexplained = (unexplained - new.double().square().sum(1)).clamp_min(0.0)
        unexplained[chosen] = 0.0
    if len(chosen) == 0:  # a kernel that is zero on the data
        chosen = torch.zeros(1, dtype=torch.int64, device=x.device)
    return chosen
