"""How far apart two data sets are: MMD² and CORAL with a confidence interval and a permutation p-value, at any size.

Value
    The unbiased estimate U of MMD² = |μ_x - μ_y|², a mean over pairs of distinct rows. Up to 2,048 rows in all, every
    pair is summed. Beyond, low-rank features give the sum over all pairs, and random blocks of rows estimate what the
    features miss: U stays unbiased, and the standard error of this estimate is part of the interval.
    CORAL = |C_x - C_y|² needs only moments and is exact at any size. Both need only sums over rows (`row_sums`), so for
    sets that do not fit in memory a sample is enough for everything else.
Interval
    By Hoeffding's decomposition Var(U) is exactly

        4 Var(g(x))/n + 4 Var(g(y))/m + 2|Σ_x|²/(n(n-1)) + 2|Σ_y|²/(m(m-1)) + 4<Σ_x, Σ_y>/(nm)

    with g = μ_x - μ_y, as a function of a row, and Σ the covariance of φ. The first two terms, of order 1/n, vanish
    where the data sets are alike; the others, of order 1/n², remain. All are estimated, so the normal interval has the
    right width with and without a difference. It is cut at 0, below which MMD² cannot be.
Test
    The permutation test (`permutation_test`) compares the plug-in value V = |μ̂_x - μ̂_y|² with that of relabelled rows.
    Its level is exact for any statistic: low-rank features cost power, never validity.

Rows must be independent draws. Frames of one film or overlapping windows are not: take one of each first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vardass.analysis.permutation_test import Blocks, Statistic
from vardass.errors import InputError
from vardass.files import plain
from vardass.kernels import CoralKernel, Kernel, KernelLike, RBFMixture, fitted_kernel
from vardass.lowrank import DEFAULT_RANK, FeatureMap, fit_feature_map, random_row_blocks
from vardass.validate import (
    ArrayLike,
    Progress,
    as_features,
    as_generator,
    check_count,
    check_number,
    choose,
    row_blocks,
    silent,
)
from vardass.view import EXACT_LIMIT, ExactView

__all__ = ["Comparison", "SetDistance", "Sums", "add_sums", "compare", "row_sums"]

LOSS_NAMES = {"mmd": "MMD²", "coral": "CORAL"}
_FITTED_ROWS = 4096  # random ones, that kernels and landmarks are fitted to
_LEAST_ROWS = 4  # of each set: unbiased squares of covariances take four rows
_WIDEST = 8192  # columns for which CORAL's covariances fit in memory
_BLOCK = 8192  # rows that are used together

Sums: TypeAlias = dict[str, Tensor]
"""See `row_sums`."""


@dataclass(frozen=True)
class SetDistance:
    """One distance of two data sets.

    Attributes
    ----------
    loss : {"mmd", "coral"}
        MMD² or CORAL.
    value : float
        Unbiased estimate; can be slightly negative if the sets are nearly equal.
    low, high : float
        Ends of the confidence interval, cut at 0.
    stderr, computing_stderr : float
        Standard error of ``value`` for the populations, and the part of it that comes from summing random blocks of
        pairs instead of all.
    v_statistic : float
        The plug-in value, which a loss on all data would give; biased upwards by the noise of the means.
    relative : float
        ``value`` divided by the mean over both sets of E|φ - μ|². On this scale the V-statistic of two batches of b
        rows is too large by 2 / b.
    p_value : float or None
        p-value of the permutation test; None without permutations.
    method, test : str
        How the value was computed, and how rows were permuted.
    """

    loss: str
    value: float
    low: float
    high: float
    stderr: float
    computing_stderr: float
    v_statistic: float
    relative: float
    method: str
    p_value: float | None
    test: str


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; ``comparison["mmd"]`` is the result of one loss.

    ``n`` and ``m`` are the rows of the two sets and ``d`` their columns; ``kernel`` is that of MMD², as fitted, and
    ``notes`` list caveats.
    """

    n: int
    m: int
    d: int
    confidence: float
    permutations: int
    kernel: str
    results: tuple[SetDistance, ...]
    notes: tuple[str, ...]

    def __getitem__(self, loss: str) -> SetDistance:
        """The result for ``"mmd"`` or ``"coral"``."""
        found = {result.loss: result for result in self.results}
        return found[choose(loss, "loss", found)]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text."""
        found: dict[str, Any] = plain(self)
        return found


@torch.no_grad()
def compare(
    x: ArrayLike,
    y: ArrayLike,
    *,
    loss: str = "both",
    kernel: KernelLike | None = None,
    permutations: int = 999,
    confidence: float = 0.95,
    rank: int | None = None,
    seed: int | torch.Generator = 0,
    progress: Progress | None = None,
    whole: Callable[[FeatureMap | None, Tensor | None], tuple[Sums, Sums]] | None = None,
) -> Comparison:
    """MMD² and CORAL between two data sets, each with a confidence interval and a permutation p-value.

    Time grows as (n + m) (d + r) for MMD² and (n + m) d² for CORAL, memory beyond the data by a few numbers a row.

    Parameters
    ----------
    x, y : array of shape (n, d) and (m, d)
        At least 4 independent rows each.
    loss : {"both", "mmd", "coral"}
        CORAL is the paper's: |C_x - C_y|² of covariances, without means.
    kernel : Kernel, name or callable, optional
        Kernel of MMD². The default ``RBFMixture(scale="median")`` adapts its bandwidths to the data: the paper's fixed
        ones (``"mmd"``) are often so narrow that each row resembles only itself, and the test has little power. An
        unfitted kernel is fitted to random rows of both sets together, which keeps the test exact.
    permutations : int
        Permutations of the test; 0 skips it. The smallest possible p-value is 1 / (1 + permutations).
    confidence : float
        Confidence level of the intervals. They hold for the fitted kernel and many rows: the interval of CORAL, whose
        fourth powers have heavy tails, is too narrow below a few hundred rows.
    rank : int, optional
        Columns of the low-rank features. By default all pairs are summed up to 2,048 rows in all, and beyond there are
        128 columns.
    seed : int or torch.Generator
        The same seed gives the same result.
    progress : callable, optional
        Called as ``progress(fraction, message)``.
    whole : callable, optional
        If ``x`` and ``y`` are random rows of larger sets: returns `row_sums` over all rows of both, given a feature map
        and a centre. See `vardass.shards.compare_shards`.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(200, 3, generator=generator), torch.randn(300, 3, generator=generator) + 1.0
    >>> found = compare(x, y, permutations=99)["mmd"]
    >>> found.low > 0.0, found.p_value
    (True, 0.01)
    """
    first, second = as_features(x, "x"), as_features(y, "y")
    d = first.shape[1]
    if d != second.shape[1]:
        raise InputError(
            f"x and y must have the same columns, got {d} and {second.shape[1]}; use the same encoder or choose columns"
        )
    for name, rows in (("x", first), ("y", second)):
        if len(rows) < _LEAST_ROWS:
            raise InputError(f"{name} must have at least {_LEAST_ROWS} rows, got {len(rows)}; one row has no spread")
    losses = tuple(LOSS_NAMES) if choose(loss, "loss", ("both", *LOSS_NAMES)) == "both" else (loss,)
    if "coral" in losses and d > _WIDEST:
        raise InputError(f"CORAL holds {d} x {d} covariances; take at most {_WIDEST} columns, or loss='mmd'")
    permutations = check_count(permutations, "permutations", low=0)
    confidence = check_number(confidence, "confidence", low=1e-3, below=1.0, remedy="use 0.95")
    if rank is not None:
        check_count(rank, "rank", high=_FITTED_ROWS // 2)
    elif len(first) + len(second) > EXACT_LIMIT or whole is not None:
        rank = DEFAULT_RANK
    dtype = torch.promote_types(first.dtype, second.dtype)
    first = first.to(dtype)
    second = second.to(first)
    generator = as_generator(seed, first.device)
    tell = progress or silent
    # drawn whichever set a row is of, so that what is fitted to them does not harm the permutation test
    order = torch.randperm(len(first) + len(second), generator=generator, device=first.device)[:_FITTED_ROWS]
    sample = torch.stack([first[i] if i < len(first) else second[i - len(first)] for i in order.tolist()])
    fitted = fitted_kernel(RBFMixture(scale="median") if kernel is None else kernel, sample)
    blocks = Blocks.of(len(first), len(second), generator)
    feature_map = None
    if "mmd" in losses:
        for z in (first, second):
            fitted.check_range(z)
        feature_map = None if rank is None else fit_feature_map(sample, fitted, rank, generator=generator)
    centre = sample.mean(0, dtype=torch.float64)
    tell(0.0, "sums over all rows")
    permuted = f"permutations of {blocks}"
    around = centre if "coral" in losses else None
    if whole is None:
        sums = _sums(first, feature_map, around), _sums(second, feature_map, around)
    else:
        sums = whole(feature_map, around)
        permuted += f", of random samples of {len(first):,} and {len(second):,} rows"
    sets = _Sets((first, second), sample, blocks, rank, generator, sums)
    found, notes = [], []
    share = 0.7 / len(losses)
    for place, name in enumerate(losses):
        report = _part(tell, 0.3 + place * share, share, LOSS_NAMES[name])
        measured = _mmd(sets, fitted, feature_map, report) if name == "mmd" else _coral(sets, centre, report)
        if not all(map(math.isfinite, (measured.value, *measured.squares))):
            raise InputError(
                f"{name} overflows {dtype} on features of up to {max(float(z.abs().max()) for z in sets.xy):.3g}; "
                "scale them down or pass float64"
            )
        p_value, test = None, ""
        if permutations:
            p_value = blocks.p_value(measured.statistic, measured.scale, permutations, generator, report)
            test = permuted + measured.on_features
        result, remarks = _judged(name, measured, confidence, p_value, test)
        found.append(result)
        notes += remarks
    kernel_name = repr(fitted) if "mmd" in losses else ""
    return Comparison(*sets.counts, d, confidence, permutations, kernel_name, tuple(found), tuple(notes))


def row_sums(z: Tensor, feature_map: FeatureMap | None, centre: Tensor | None) -> Sums:
    """Sums over rows ``z`` (b, d) of a set, in double precision; those of two sets of rows can be added.

    With a feature map: of φ (r,), |φ|² and κ(z, z). With a centre (d,): of u = z - centre, uuᵀ (d, d), |u|²u and |u|⁴.
    """
    sums = {"count": torch.tensor(float(len(z)), dtype=torch.float64)}
    if feature_map is not None:
        features = feature_map.features(z).double()
        diagonal = feature_map.kernel.diag(z).sum(dtype=torch.float64)
        sums |= {"features": features.sum(0), "lengths": features.square().sum(), "diagonal": diagonal}
    if centre is not None:
        u = z - centre.to(z)
        lengths = u.square().sum(1).double()
        # a block's product in the precision of the data
        sums |= {"rows": u.sum(0, dtype=torch.float64), "products": (u.T @ u).double()}
        sums |= {"cubes": lengths @ u.double(), "fourths": lengths.square().sum()}
    return sums


def add_sums(parts: Iterable[Sums]) -> Sums:
    """The sums over all rows of some parts, added in their order."""
    total: Sums = {}
    for part in parts:
        total |= {name: total[name] + value if total else value for name, value in part.items()}
    return total


def _sums(z: Tensor, feature_map: FeatureMap | None, centre: Tensor | None) -> Sums:
    return add_sums(row_sums(z[rows], feature_map, centre) for rows in row_blocks(len(z), _BLOCK))


def _part(tell: Progress, start: float, share: float, name: str) -> Progress:
    return lambda fraction, message: tell(start + share * fraction, f"{name}: {message}")


class _Sets(NamedTuple):
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
            for rows in row_blocks(len(z), _BLOCK):
                yield which, slice(start + rows.start, start + rows.stop), z[rows], (start + rows.stop) / total
            start += len(z)


# --- what is summed over pairs of rows, and what follows for value and variance ---


class _RowMeans(NamedTuple):
    """κ of rows of a set of n: mean to the others of its own set, mean to all of the other set, with itself."""

    n: int
    own: Tensor
    other: Tensor
    diagonal: Tensor

    @property
    def witness(self) -> Tensor:
        """±(μ̂_x - μ̂_y) at each row; itself included, as distances from the others alone would shrink it."""
        return self.own + (self.diagonal - self.own) / self.n - self.other


class _Measured(NamedTuple):
    """Kernel means of two sets, those within a set over pairs of distinct rows, and the test of a difference."""

    value: float
    v_statistic: float
    spread: float  # E|φ - μ|², mean of both sets
    rows: tuple[_RowMeans, _RowMeans]  # of all rows, or of random ones
    squares: tuple[float, float, float]  # mean κ² of pairs xx, yy, xy
    method: str
    statistic: Statistic
    scale: float  # size of the terms that the statistic is a difference of
    on_features: str  # what the statistic leaves out, in words
    computing_stderr: float = 0.0

    def covariances(self) -> tuple[float, float, float]:
        """Unbiased |Σ_x|², |Σ_y|² and <Σ_x, Σ_y>: mean squares of κ centred in both arguments."""
        within = []
        for rows, square in zip(self.rows, self.squares[:2]):
            n = rows.n
            total, by_row = n * (n - 1) * rows.own.mean(), n * (n - 1) ** 2 * rows.own.square().mean()
            whole = n * (n - 1) * square + total.square() / ((n - 1) * (n - 2)) - 2.0 * by_row / (n - 2)
            within.append(max(0.0, float(whole) / (n * (n - 3))))
        (n, _, of_x, _), (m, _, of_y, _) = self.rows
        mean = float(of_x.mean())
        across = self.squares[2] - float(of_x.square().mean()) - float(of_y.square().mean()) + mean * mean
        return within[0], within[1], max(0.0, across * n * m / ((n - 1) * (m - 1)))


def _judged(
    name: str, found: _Measured, confidence: float, p_value: float | None, test: str
) -> tuple[SetDistance, list[str]]:
    """The distance with its interval, from Var(U) at the top of the file, and notes on it."""
    n, m = found.rows[0].n, found.rows[1].n
    xx, yy, xy = found.covariances()
    second = 2.0 * xx / (n * (n - 1)) + 2.0 * yy / (m * (m - 1)) + 4.0 * xy / (n * m)
    first = sum(4.0 * float(rows.witness.var()) / rows.n for rows in found.rows)
    # the noise of g adds to its variance twice the second-order term on average
    variance = max(first - second, second) + found.computing_stderr**2
    stderr = math.sqrt(variance)
    reach = stderr * float(torch.special.ndtri(torch.tensor(0.5 + confidence / 2.0, dtype=torch.float64)))
    notes = []
    if found.spread <= 0.0:
        notes.append(f"{name}: the rows of each set are all alike")
    # the effective dimension of the kernel's features, spread² / |Σ|², is above the number of rows
    elif name == "mmd" and (xx + yy + 2.0 * xy) / 4.0 * (n + m) < found.spread**2:
        notes.append(
            "mmd: the kernel is nearly the identity on these rows, each like itself only, so MMD² and the power of the "
            "test are small; use wider bandwidths, for example with scale='median'"
        )
    if found.value < 0.0:
        notes.append(
            f"{name}: the value is an unbiased estimate, below 0 by chance where sets are nearly equal; the interval "
            "is of the true value, which is never below 0"
        )
    if found.computing_stderr**2 > 0.5 * variance:
        notes.append(
            f"{name}: most of the interval's width is from summing random blocks of pairs, not from the data; a higher "
            "rank makes it narrower; the test needs no pairs, so it can find smaller differences"
        )
    result = SetDistance(
        loss=name,
        value=found.value,
        low=max(0.0, found.value - reach),
        high=max(0.0, found.value + reach),
        stderr=stderr,
        computing_stderr=found.computing_stderr,
        v_statistic=found.v_statistic,
        relative=found.value / found.spread if found.spread > 0 else 0.0,
        method=found.method,
        p_value=p_value,
        test=test,
    )
    return result, notes


def _row_means(sums: Tensor, diagonal: Tensor, split: int, counts: tuple[int, int]) -> tuple[_RowMeans, _RowMeans]:
    """From Σ κ of rows with all of x and with all of y (q, 2), and with themselves (q,); ``split`` of x, then of y."""
    n, m = counts
    own, other = (sums[:split, 0] - diagonal[:split]) / (n - 1), sums[:split, 1] / m
    of_x = _RowMeans(n, own, other, diagonal[:split])
    own, other = (sums[split:, 1] - diagonal[split:]) / (m - 1), sums[split:, 0] / n
    return of_x, _RowMeans(m, own, other, diagonal[split:])


def _means_of_matrix(matrix: Tensor, n: int) -> tuple[_RowMeans, _RowMeans]:
    """From all kernel values, of x before y, in double precision."""
    of_y = (torch.arange(len(matrix), device=matrix.device) >= n).long()
    return _row_means(ExactView(matrix).stratum_sums(of_y, 2), matrix.diagonal(), n, (n, len(matrix) - n))


def _means_by_blocks(
    sets: _Sets, look: Callable[[int, slice, Tensor], tuple[Tensor, Tensor]], tell: Progress
) -> tuple[_RowMeans, _RowMeans]:
    """From a function of some rows that gives their Σ κ with all of x and of y (b, 2), and with themselves (b,)."""
    parts = []
    for which, places, z, done in sets.stream():
        parts.append(look(which, places, z))
        tell(0.6 * done, "rows")
    sums, diagonal = (torch.cat(each) for each in zip(*parts))
    return _row_means(sums, diagonal, len(sets.xy[0]), sets.counts)


def _square_means(matrix: Tensor, n: int) -> tuple[float, float, float]:
    means = []
    for block in (matrix[:n, :n], matrix[n:, n:]):
        without = torch.linalg.vector_norm(block) ** 2 - block.diagonal().square().sum()
        means.append(float(without) / (len(block) * (len(block) - 1)))
    across = matrix[:n, n:]
    return means[0], means[1], float(torch.linalg.vector_norm(across) ** 2) / across.numel()


def _unbiased(rows: tuple[_RowMeans, _RowMeans]) -> float:
    """U from the means of all rows."""
    return float(rows[0].own.mean() + rows[1].own.mean() - 2.0 * rows[0].other.mean())


def _sampled_pairs(
    sets: _Sets,
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
    for place, (of_x, of_y) in enumerate(blocks):
        rows = torch.cat([z[chosen] - mean for z, chosen, mean in zip(sets.xy, (of_x, of_y), means)])
        matrix = kernel.matrix(rows).double()
        squares.append(_square_means(matrix, len(of_x)))
        if feature_map is not None and feature_map.landmarks is not None:
            features = feature_map(rows)[0].double()
            corrections.append(_unbiased(_means_of_matrix(matrix - features @ features.T, len(of_x))))
        tell(0.6 + 0.2 * (place + 1) / len(blocks), "pairs")
    xx, yy, xy = torch.tensor(squares, dtype=torch.float64).mean(0).tolist()
    if not corrections:  # explicit features miss nothing
        return 0.0, 0.0, (xx, yy, xy)
    values = torch.tensor(corrections, dtype=torch.float64)
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0  # one block is all rows
    return float(values.mean()), error, (xx, yy, xy)


# --- MMD² ---


def _mmd(sets: _Sets, kernel: Kernel, feature_map: FeatureMap | None, tell: Progress) -> _Measured:
    tell(0.0, "kernel")
    n, m = sets.counts
    on_features = ""
    if feature_map is None:
        matrix = kernel.square_matrix(torch.cat(sets.xy)).double()
        diagonals = [float(kernel.diag(z).mean(dtype=torch.float64)) for z in sets.xy]
        rows, squares, error = _means_of_matrix(matrix, n), _square_means(matrix, n), 0.0
        within, value = [float(each.own.mean()) for each in rows], _unbiased(rows)
        method = f"all {(n + m) * (n + m - 1) // 2:,} pairs"

        def statistic(members: Tensor) -> Tensor:
            signed = members / n - (1.0 - members) / m
            return ((signed @ matrix) * signed).sum(1)

    else:
        totals = torch.stack([each["features"] for each in sets.sums])
        diagonals = [float(each["diagonal"] / each["count"]) for each in sets.sums]
        within = [
            float((total.square().sum() - each["lengths"]) / (count * (count - 1)))
            for total, each, count in zip(totals, sets.sums, sets.counts)
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

    spread = [max(0.0, diagonal - own) for diagonal, own in zip(diagonals, within)]
    v_statistic = value + spread[0] / n + spread[1] / m
    return _Measured(
        value, v_statistic, sum(spread) / 2.0, rows, squares, method, statistic, max(diagonals), on_features, error
    )


# --- CORAL: MMD² in the products of rows that are centred by the mean of their own set ---


def _coral(sets: _Sets, centre: Tensor, tell: Progress) -> _Measured:
    n, m = counts = sets.counts
    means, scatters, powers = zip(*(_central_moments(each, centre) for each in sets.sums))
    scatter = torch.stack(scatters)
    # |C|² over quadruples of distinct rows: the unbiased HSIC of Song et al. (2012, equation 5), whose sums over a Gram
    # matrix are moments here
    squared = []
    for count, each, power in zip(counts, scatter, powers):
        whole = float(each.square().sum()) + float(each.trace()) ** 2 / ((count - 1) * (count - 2))
        squared.append((whole - power * count / (count - 2)) / (count * (count - 3)))
    value = sum(squared) - 2.0 * float((scatter[0] * scatter[1]).sum()) / ((n - 1) * (m - 1))
    spread = [max(0.0, power / count - each) for count, each, power in zip(counts, squared, powers)]
    v_statistic = float((scatter[0] / (n - 1) - scatter[1] / (m - 1)).square().sum())
    own_means = [mean.to(sets.sample) for mean in means]
    in_precision = scatter.to(sets.sample)

    def look(which: int, places: slice, z: Tensor) -> tuple[Tensor, Tensor]:
        centred = z - own_means[which]
        sums = torch.stack([((centred @ each) * centred).sum(1).double() for each in in_precision], 1)
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
    return _Measured(value, v_statistic, sum(spread) / 2.0, rows, squares, method, statistic, scale, on_features)


def _central_moments(sums: Sums, centre: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean (d,), Σ vvᵀ and Σ |v|⁴ of rows v less their mean, from sums around a centre near it."""
    n, products, shift = sums["count"], sums["products"], sums["rows"] / sums["count"]
    length = shift.square().sum()
    fourth = sums["fourths"] - 4.0 * shift @ sums["cubes"] + 4.0 * shift @ products @ shift
    fourth = fourth + 2.0 * length * products.trace() - 3.0 * n * length.square()
    return centre + shift, products - n * torch.outer(shift, shift), max(0.0, float(fourth))


def _coral_of_rows(z: Tensor, n: int, m: int) -> Statistic:
    """|C_x - C_y|² for memberships of the rows z (n + m, d) themselves, from one matrix of (zᵀz')²."""
    matrix = (z @ z.T).square()

    def statistic(members: Tensor) -> Tensor:
        rest = 1.0 - members
        signed = members / (n - 1) - rest / (m - 1)
        a, b = members @ z / n, rest @ z / m
        of_a, of_b = n / (n - 1), m / (m - 1)
        means = of_a * (a @ z.T).square() - of_b * (b @ z.T).square()
        both = of_a**2 * a.square().sum(1).square() + of_b**2 * b.square().sum(1).square()
        both = both - 2.0 * of_a * of_b * (a * b).sum(1).square()
        return (signed * (signed @ matrix - 2.0 * means)).sum(1) + both

    return statistic


def _coral_of_features(sets: _Sets, feature_map: FeatureMap, centre: Tensor, tell: Progress) -> Statistic:
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
