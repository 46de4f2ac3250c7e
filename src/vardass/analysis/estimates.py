"""Estimates of MMD² and CORAL between two data sets, with the sums that their intervals and tests are made of.

The unbiased estimate U of MMD² = |μ_x - μ_y|² is a mean over pairs of distinct rows. Up to 2,048 rows in all, every
pair is summed. Beyond, low-rank features give the sum over all pairs, and random blocks of rows estimate what the
features miss: U stays unbiased, and the standard error of this estimate is part of the interval.
CORAL = |C_x - C_y|² needs only moments and is exact at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vardass.analysis.permutation_test import Blocks, Statistic
from vardass.analysis.sums import BLOCK, Sums, central_moments
from vardass.kernels import CoralKernel, Kernel
from vardass.lowrank import FeatureMap, fit_feature_map, random_row_blocks
from vardass.validate import Progress, row_blocks
from vardass.view import ExactView


class TwoSets(NamedTuple):
    """Rows of both data sets, how to look at them, and sums over all rows of each."""

    xy: tuple[Tensor, Tensor]
    sample: Tensor  # random rows of both, in random order
    blocks: Blocks  # that the test permutes
    rank: int | None  # None: all pairs
    generator: torch.Generator
    sums: tuple[Sums, Sums]

    @property
    def counts(self) -> tuple[int, int]:
        """Rows of the whole sets."""
        return int(self.sums[0]["count"]), int(self.sums[1]["count"])

    def stream(self) -> Iterator[tuple[int, slice, Tensor, float]]:
        """Some rows at a time: the set (0 or 1), where they are, x before y, the rows, and the share that is done."""
        total, start = sum(map(len, self.xy)), 0
        for which, z in enumerate(self.xy):
            for rows in row_blocks(len(z), BLOCK):
                yield which, slice(start + rows.start, start + rows.stop), z[rows], (start + rows.stop) / total
            start += len(z)


# --- what is summed over pairs of rows, and what follows for value and variance ---


class RowMeans(NamedTuple):
    """κ of rows of a set of n: mean to all others of this set, mean to all of the other set, with itself."""

    n: int
    within: Tensor
    across: Tensor
    diagonal: Tensor

    @property
    def witness(self) -> Tensor:
        """±(μ̂_x - μ̂_y) at each row; itself included, as distances from the others alone would shrink it."""
        return self.within + (self.diagonal - self.within) / self.n - self.across


class Measured(NamedTuple):
    """Kernel means of two sets, those within a set over pairs of distinct rows, and the test of a difference."""

    value: float
    v_statistic: float
    spread: float  # E|φ - μ|², mean of both sets
    rows: tuple[RowMeans, RowMeans]  # of all rows, or of random ones
    squares: tuple[float, float, float]  # mean κ² of pairs xx, yy, xy
    method: str
    statistic: Statistic
    scale: float  # size of the terms that the statistic is a difference of
    on_features: str  # what the statistic leaves out, in words
    computing_stderr: float = 0.0


def _row_means(sums: Tensor, diagonal: Tensor, split: int, counts: tuple[int, int]) -> tuple[RowMeans, RowMeans]:
    """From Σ κ of rows with all of x and with all of y (q, 2), and with themselves (q,); ``split`` of x, then of y."""
    n, m = counts
    within, across = (sums[:split, 0] - diagonal[:split]) / (n - 1), sums[:split, 1] / m
    of_x = RowMeans(n, within, across, diagonal[:split])
    within, across = (sums[split:, 1] - diagonal[split:]) / (m - 1), sums[split:, 0] / n
    return of_x, RowMeans(m, within, across, diagonal[split:])


def _means_of_matrix(matrix: Tensor, n: int) -> tuple[RowMeans, RowMeans]:
    """From all kernel values, of x before y, in double precision."""
    of_y = (torch.arange(len(matrix), device=matrix.device) >= n).long()
    return _row_means(ExactView(matrix).stratum_sums(of_y, 2), matrix.diagonal(), n, (n, len(matrix) - n))


def _means_by_blocks(
    sets: TwoSets, look: Callable[[int, slice, Tensor], tuple[Tensor, Tensor]], tell: Progress
) -> tuple[RowMeans, RowMeans]:
    """From a function of some rows that gives their Σ κ with all of x and of y (b, 2), and with themselves (b,)."""
    blocks = []
    for which, places, z, done in sets.stream():
        blocks.append(look(which, places, z))
        tell(0.6 * done, "rows")
    sums, diagonal = (torch.cat(values) for values in zip(*blocks))
    return _row_means(sums, diagonal, len(sets.xy[0]), sets.counts)


def _square_means(matrix: Tensor, n: int) -> tuple[float, float, float]:
    means = []
    for block in (matrix[:n, :n], matrix[n:, n:]):
        without = torch.linalg.vector_norm(block) ** 2 - block.diagonal().square().sum()
        means.append(float(without) / (len(block) * (len(block) - 1)))
    across = matrix[:n, n:]
    return means[0], means[1], float(torch.linalg.vector_norm(across) ** 2) / across.numel()


def _unbiased(rows: tuple[RowMeans, RowMeans]) -> float:
    """U from the means of all rows."""
    return float(rows[0].within.mean() + rows[1].within.mean() - 2.0 * rows[0].across.mean())


def _sampled_pairs(
    sets: TwoSets,
    kernel: Kernel,
    feature_map: FeatureMap | None,
    tell: Progress,
    means: Sequence[Tensor | float] = (0.0, 0.0),
) -> tuple[float, float, tuple[float, float, float]]:
    """What features miss of U, its standard error, and mean squares of κ, from random blocks of rows less ``means``.

    Given the data, blocks are independent and U of each is unbiased for that of all rows.
    """
    corrections, squares = [], []
    blocks = random_row_blocks([len(z) for z in sets.xy], sets.generator)
    for i, (of_x, of_y) in enumerate(blocks):
        rows = torch.cat([z[block] - mean for z, block, mean in zip(sets.xy, (of_x, of_y), means)])
        matrix = kernel.matrix(rows).double()
        squares.append(_square_means(matrix, len(of_x)))
        if feature_map is not None and feature_map.landmarks is not None:
            features = feature_map(rows)[0].double()
            corrections.append(_unbiased(_means_of_matrix(matrix - features @ features.T, len(of_x))))
        tell(0.6 + 0.2 * (i + 1) / len(blocks), "pairs")
    xx, yy, xy = torch.tensor(squares, dtype=torch.float64).mean(0).tolist()
    if not corrections:  # explicit features miss nothing
        return 0.0, 0.0, (xx, yy, xy)
    values = torch.tensor(corrections, dtype=torch.float64)
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0  # one block is all rows
    return float(values.mean()), error, (xx, yy, xy)


# --- MMD² ---


def mmd_distance(sets: TwoSets, kernel: Kernel, feature_map: FeatureMap | None, tell: Progress) -> Measured:
    """MMD² under a fitted kernel, from all pairs or with a feature map."""
    tell(0.0, "kernel")
    n, m = sets.counts
    on_features = ""
    if feature_map is None:
        matrix = kernel.square_matrix(torch.cat(sets.xy)).double()
        diagonals = [float(kernel.diag(z).mean(dtype=torch.float64)) for z in sets.xy]
        rows, squares, error = _means_of_matrix(matrix, n), _square_means(matrix, n), 0.0
        within, value = [float(means.within.mean()) for means in rows], _unbiased(rows)
        method = f"all {(n + m) * (n + m - 1) // 2:,} pairs"

        def statistic(members: Tensor) -> Tensor:
            signed = members / n - (1.0 - members) / m
            return ((signed @ matrix) * signed).sum(1)

    else:
        totals = torch.stack([total["features"] for total in sets.sums])
        diagonals = [float(total["diagonal"] / total["count"]) for total in sets.sums]
        within = [
            float((total.square().sum() - sums["lengths"]) / (count * (count - 1)))
            for total, sums, count in zip(totals, sets.sums, sets.counts)
        ]
        r = totals.shape[1]
        by_block = totals.new_zeros(sets.blocks.count, r)

        def look(which: int, places: slice, z: Tensor) -> tuple[Tensor, Tensor]:
            features = feature_map.features(z).double()
            by_block.index_add_(0, sets.blocks.labels[places], features)
            return features @ totals.T, features.square().sum(1)

        rows = _means_by_blocks(sets, look, tell)
        correction, error, squares = _sampled_pairs(sets, kernel, feature_map, tell)
        value = sum(within) - 2.0 * float(totals[0] @ totals[1]) / (n * m) + correction
        method = f"all pairs, by their {r} features"
        if feature_map.landmarks is not None:
            method = f"rank {r} and, for what it misses, random blocks of rows"
            on_features = f", on {r} kernel features"
        of_x, of_y = map(len, sets.xy)

        def statistic(members: Tensor) -> Tensor:
            signed = members / of_x - (1.0 - members) / of_y
            return (signed @ by_block).square().sum(1)

    spread = [max(0.0, diagonal - pairs) for diagonal, pairs in zip(diagonals, within)]
    v_statistic = value + spread[0] / n + spread[1] / m
    return Measured(
        value, v_statistic, sum(spread) / 2.0, rows, squares, method, statistic, max(diagonals), on_features, error
    )


# --- CORAL ---


def coral_distance(sets: TwoSets, centre: Tensor, tell: Progress) -> Measured:
    """CORAL from sums around a centre (d,): MMD² in products of rows that are centred by the mean of their set."""
    n, m = counts = sets.counts
    means, scatters, powers = zip(*(central_moments(sums, centre) for sums in sets.sums))
    scatter = torch.stack(scatters)
    # |C|² over quadruples of distinct rows: the unbiased HSIC of Song et al. (2012, equation 5), whose sums over a Gram
    # matrix are moments here
    squared = []
    for count, products, power in zip(counts, scatter, powers):
        total = float(products.square().sum()) + float(products.trace()) ** 2 / ((count - 1) * (count - 2))
        squared.append((total - power * count / (count - 2)) / (count * (count - 3)))
    value = sum(squared) - 2.0 * float((scatter[0] * scatter[1]).sum()) / ((n - 1) * (m - 1))
    spread = [max(0.0, power / count - square) for count, square, power in zip(counts, squared, powers)]
    v_statistic = float((scatter[0] / (n - 1) - scatter[1] / (m - 1)).square().sum())
    own_means = [mean.to(sets.sample) for mean in means]
    in_precision = scatter.to(sets.sample)

    def look(which: int, places: slice, z: Tensor) -> tuple[Tensor, Tensor]:
        centred = z - own_means[which]
        sums = torch.stack([((centred @ matrix) * centred).sum(1).double() for matrix in in_precision], 1)
        return sums, centred.square().sum(1).double().square()

    rows = _means_by_blocks(sets, look, tell)
    products = CoralKernel(mean=torch.zeros_like(own_means[0]))
    middle = (n * means[0] + m * means[1]) / (n + m)
    on_features = ""
    if sets.rank is None:
        centred = torch.cat([z - mean for z, mean in zip(sets.xy, own_means)])
        squares = _square_means(products.matrix(centred).double(), n)
        statistic = _coral_of_rows(torch.cat(sets.xy).double() - middle, n, m)
    else:
        squares = _sampled_pairs(sets, products, None, tell, own_means)[2]
        kernel = CoralKernel(mean=middle.to(sets.sample))
        feature_map = fit_feature_map(sets.sample, kernel, sets.rank, generator=sets.generator)
        statistic = _coral_of_features(sets, feature_map, middle, tell)
        if feature_map.landmarks is not None:
            r = feature_map.transform.shape[1]
            on_features = f", with covariances approximated by {r} features"
    method, scale = "the moments of all rows", max(squared) + max(spread)
    return Measured(value, v_statistic, sum(spread) / 2.0, rows, squares, method, statistic, scale, on_features)


def _coral_of_rows(z: Tensor, n: int, m: int) -> Statistic:
    """|C_x - C_y|² for memberships of the rows z (n + m, d) themselves, from one matrix of (zᵀz')²."""
    matrix = (z @ z.T).square()

    def statistic(members: Tensor) -> Tensor:
        of_y = 1.0 - members
        signed = members / (n - 1) - of_y / (m - 1)
        a, b = members @ z / n, of_y @ z / m
        f, g = n / (n - 1), m / (m - 1)
        means = f * (a @ z.T).square() - g * (b @ z.T).square()
        both = f**2 * a.square().sum(1).square() + g**2 * b.square().sum(1).square()
        both = both - 2.0 * f * g * (a * b).sum(1).square()
        return (signed * (signed @ matrix - 2.0 * means)).sum(1) + both

    return statistic


def _coral_of_features(sets: TwoSets, feature_map: FeatureMap, centre: Tensor, tell: Progress) -> Statistic:
    """The same for memberships of blocks of rows; with features φ of the products, C is n/(n-1) (mean φ - φ(mean))."""
    blocks = sets.blocks
    features = centre.new_zeros(blocks.count, feature_map.transform.shape[1])
    sums = centre.new_zeros(blocks.count, len(centre))
    for _, places, z, done in sets.stream():
        features.index_add_(0, blocks.labels[places], feature_map(z)[0].double())
        sums.index_add_(0, blocks.labels[places], z.double() - centre)
        tell(0.8 + 0.1 * done, "features")

    def statistic(members: Tensor) -> Tensor:
        covariances = []
        for weights, count in zip((members, 1.0 - members), map(len, sets.xy)):
            at_mean = feature_map((weights @ sums / count + centre).to(sets.sample))[0].double()
            covariances.append((weights @ features - count * at_mean) / (count - 1))
        return (covariances[0] - covariances[1]).square().sum(1)

    return statistic
