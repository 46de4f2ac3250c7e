"""How far apart two data sets are: MMD² and CORAL with a confidence interval and a permutation p-value, at any size.

Three questions, three answers that are computed apart.

How large?
    The unbiased estimate U of MMD² = |μ_x - μ_y|², a mean over pairs of distinct rows. Up to 2,048 rows in all, every
    pair is summed. Beyond, low-rank features give all pairs but for what they miss, and the mean of that over random
    blocks of rows is added: U stays unbiased, and the standard error of this mean is reported and is part of the
    interval. CORAL = |C_x - C_y|² needs only moments and is exact at any size. Both need only sums over rows
    (`row_sums`), so that of sets that do not fit in memory a sample is enough for all else.
How sure?
    By Hoeffding's decomposition Var(U) is exactly

        4 Var(g(x))/n + 4 Var(g(y))/m + 2|Σ_x|²/(n(n-1)) + 2|Σ_y|²/(m(m-1)) + 4<Σ_x, Σ_y>/(nm)

    with g = μ_x - μ_y, as a function of a row, and Σ the covariance of φ. The first two terms, of order 1/n, vanish
    where the data sets are alike; the others, of order 1/n², are then all that there is. Both are estimated, so the
    normal interval has the right width with and without a difference. It is cut at 0, below which MMD² cannot be.
By chance?
    The permutation test compares the plug-in value V = |μ̂_x - μ̂_y|² with that of relabelled rows. Its level is exact
    for whatever statistic is used, so low-rank features cost power and never validity. The same holds for permutations
    of random blocks of rows, a subgroup of all permutations: many rows are permuted as about 4,096 blocks.

Rows must be independent draws. Frames of one film or overlapping windows are not: take one of each first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

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

__all__ = ["LOSSES", "Comparison", "SetDistance", "Sums", "add_sums", "compare", "row_sums"]

LOSSES = ("mmd", "coral")

_FITTED_ROWS = 4096  # random ones, that kernels and landmarks are fitted to
_LEAST_ROWS = 4  # of each set: unbiased squares of covariances take four rows
_WIDEST = 8192  # columns for which CORAL's covariances fit in memory
_PERMUTED_BLOCKS = 4096
_LEAST_BLOCKS = 256  # of the smaller set, if it has as many rows
_CHUNK = 64  # permutations at a time
_STREAM_ROWS = 8192

Sums: TypeAlias = dict[str, Tensor]
"""See `row_sums`."""

WholeSums: TypeAlias = Callable[[FeatureMap | None, Tensor | None], tuple[Sums, Sums]]
"""Sums over all rows of both sets for a feature map and a centre."""

_Three: TypeAlias = tuple[float, float, float]

_Statistic: TypeAlias = Callable[[Tensor], Tensor]
"""Values (q,) of the test statistic for memberships (q, blocks): 1 where a block counts as one of x."""


@dataclass(frozen=True)
class SetDistance:
    """One distance of two data sets.

    Attributes
    ----------
    loss : {"mmd", "coral"}
        MMD² or CORAL.
    value : float
        Unbiased estimate; below 0 by chance where the sets are alike.
    low, high : float
        Ends of the confidence interval, cut at 0.
    stderr, computing_stderr : float
        Standard error of ``value`` for the populations, and the part of it that comes from summing random blocks of
        pairs instead of all.
    v_statistic : float
        The plug-in value, which is what a loss of the whole data gives: too large on average by the noise of means.
    relative : float
        ``value`` divided by the mean over both sets of E|φ - μ|². On this scale the V-statistic of two batches of b
        rows is too large by 2 / b.
    p_value : float or None
        Of the permutation test; None without permutations.
    method, test : str
        How the value was summed; how rows were permuted, and what was computed of them.
    """

    loss: str
    value: float
    low: float
    high: float
    stderr: float
    computing_stderr: float
    v_statistic: float
    relative: float
    p_value: float | None
    method: str
    test: str


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; ``comparison["mmd"]`` is the result of one loss.

    Attributes
    ----------
    n, m, d : int
        Rows of the first and of the second set, and their columns.
    confidence : float
        Of the intervals.
    permutations : int
        Of the tests; the least p-value is 1 / (1 + permutations).
    kernel : str
        That of MMD², as fitted.
    results : tuple of SetDistance
        One for each loss.
    notes : tuple of str
        What to keep in mind when reading them.
    """

    n: int
    m: int
    d: int
    confidence: float
    permutations: int
    kernel: str
    results: tuple[SetDistance, ...]
    notes: tuple[str, ...] = ()

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
    whole: WholeSums | None = None,
) -> Comparison:
    """MMD² and CORAL between two data sets, each with a confidence interval and a permutation p-value.

    Time grows as (n + m) (d + r) for MMD² and (n + m) d² for CORAL, memory beyond the data by a few numbers a row.

    Parameters
    ----------
    x, y : array of shape (n, d) and (m, d)
        At least 4 independent rows each.
    loss : {"both", "mmd", "coral"}
        CORAL is the paper's: |C_x - C_y|² of covariances, means left aside.
    kernel : Kernel, name or callable, optional
        Of MMD². By default ``RBFMixture(scale="median")``, whose bandwidths follow the data: the paper's fixed ones,
        by the name ``"mmd"``, are often so narrow that each row is like itself only, and then little can be found. A
        kernel that is not fitted is fitted to random rows of both sets together, which keeps the test exact.
    permutations : int
        Relabellings of the test; 0 for none.
    confidence : float
        Of the intervals. They are for the kernel as it was fitted, and for many rows: that of CORAL, whose squares of
        squares have heavy tails, is too narrow below a few hundred.
    rank : int, optional
        Columns of the low-rank features. By default all pairs are summed up to 2,048 rows in all, and beyond there are
        128 columns.
    seed : int or torch.Generator
        The same seed gives the same result.
    progress : callable, optional
        Called as ``progress(fraction, message)``.
    whole : callable, optional
        Where ``x`` and ``y`` are random rows of larger sets: gives `row_sums` over all rows of both, for a feature map
        and a centre. Values are then those of all rows; intervals take variances from the random rows, and the test
        permutes these. See `vardass.shards.compare_shards`.

    Returns
    -------
    Comparison

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(200, 3, generator=generator), torch.randn(300, 3, generator=generator) + 1.0
    >>> found = compare(x, y, permutations=99)["mmd"]
    >>> found.low > 0.0, found.p_value
    (True, 0.01)
    """
    first, second = as_features(x, "x"), as_features(y, "y")
    if first.shape[1] != second.shape[1]:
        raise InputError(
            f"x and y must have the same columns, got {first.shape[1]} and {second.shape[1]}; "
            "use the same encoder or choose columns"
        )
    for name, rows in (("x", first), ("y", second)):
        if len(rows) < _LEAST_ROWS:
            raise InputError(f"{name} must have at least {_LEAST_ROWS} rows, got {len(rows)}; one row has no spread")
    losses = LOSSES if choose(loss, "loss", ("both", *LOSSES)) == "both" else (loss,)
    permutations = check_count(permutations, "permutations", low=0)
    if check_number(confidence, "confidence", low=0.0, below=1.0) == 0.0:
        raise InputError(f"confidence must be above 0 and below 1, got {confidence}; use 0.95")
    if rank is not None:
        check_count(rank, "rank", high=_FITTED_ROWS // 2)
    elif len(first) + len(second) > EXACT_LIMIT or whole is not None:
        rank = DEFAULT_RANK
    dtype = torch.promote_types(first.dtype, second.dtype)
    first = first.to(dtype)
    second = second.to(first)
    generator = as_generator(seed, first.device)
    sample = _random_rows(first, second, generator)
    fitted = fitted_kernel(RBFMixture(scale="median") if kernel is None else kernel, sample)
    blocks = feature_map = None
    if "mmd" in losses:
        for z in (first, second):
            fitted.check_range(z)
        blocks = _Blocks.of(len(first), len(second), generator)
        feature_map = None if rank is None else fit_feature_map(sample, fitted, rank, generator=generator)
    centre = sample.mean(0, dtype=torch.float64) if "coral" in losses else None
    if centre is not None and len(centre) > _WIDEST:
        d = len(centre)
        raise InputError(f"CORAL holds {d} x {d} covariances; take at most {_WIDEST} columns, or loss='mmd'")
    tell = _part(progress, 0.0, 0.3, "all rows")
    sums = (_sums_in_memory(first, second, tell) if whole is None else whole)(feature_map, centre)
    sets = _Sets(first, second, sample, rank, generator, sums, whole is not None)
    share = 0.7 / len(losses)
    found, notes = [], []
    for place, name in enumerate(losses):
        tell = _part(progress, 0.3 + place * share, share, "MMD²" if name == "mmd" else "CORAL")
        if name == "mmd":
            assert blocks is not None
            measured = _mmd(sets, fitted, feature_map, blocks, tell)
        else:
            assert centre is not None
            measured = _coral(sets, centre, tell)
        if not all(map(math.isfinite, (measured.value, *measured.squares))):
            raise InputError(
                f"{name} overflows {dtype} on features of up to {max(float(z.abs().max()) for z in sets.xy):.3g}; "
                "scale them down or pass float64"
            )
        found.append(_set_distance(name, measured, sets, confidence, permutations, tell))
        notes += _notes(name, measured)
    return Comparison(
        n=sets.counts[0],
        m=sets.counts[1],
        d=first.shape[1],
        confidence=float(confidence),
        permutations=permutations,
        kernel=repr(fitted) if "mmd" in losses else "",
        results=tuple(found),
        notes=tuple(notes),
    )


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
        total = {name: total[name] + value if total else value for name, value in part.items()} or total
    return total


def _sums_in_memory(x: Tensor, y: Tensor, tell: Progress) -> WholeSums:
    def sums(feature_map: FeatureMap | None, centre: Tensor | None) -> tuple[Sums, Sums]:
        tell(0.0, "sums")
        parts = [[row_sums(z[rows], feature_map, centre) for rows in row_blocks(len(z), _STREAM_ROWS)] for z in (x, y)]
        return add_sums(parts[0]), add_sums(parts[1])

    return sums


class _Sets(NamedTuple):
    """Rows of both data sets, random ones of them together, how to look at them, and sums over all rows of each."""

    x: Tensor
    y: Tensor
    sample: Tensor
    rank: int | None  # None: all pairs
    generator: torch.Generator
    sums: tuple[Sums, Sums]
    sampled: bool  # x and y are random rows of larger sets

    @property
    def xy(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    @property
    def counts(self) -> tuple[int, int]:
        """Rows of the whole sets."""
        return int(self.sums[0]["count"]), int(self.sums[1]["count"])

    def rows_permuted(self, blocks: _Blocks, features: str) -> str:
        """What the test permutes, in words."""
        of = f", of random samples of {len(self.x):,} and {len(self.y):,} rows" if self.sampled else ""
        return blocks.name + of + features


def _random_rows(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of both sets in random order, all or as many as kernels and landmarks are fitted to.

    Their choice knows nothing of which set a row is of: what is fitted to them does not harm the permutation test.
    """
    order = torch.randperm(len(x) + len(y), generator=generator, device=x.device)[:_FITTED_ROWS]
    of_x = order < len(x)
    rows = x.new_empty(len(order), x.shape[1])
    rows[of_x], rows[~of_x] = x[order[of_x]], y[order[~of_x] - len(x)]
    return rows


def _part(progress: Progress | None, start: float, share: float, name: str) -> Progress:
    tell = progress or silent
    return lambda fraction, message: tell(start + share * fraction, f"{name}: {message}")


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


@dataclass(frozen=True)
class _Measured:
    """Kernel means of two sets, those within a set over pairs of distinct rows, and the test of a difference."""

    value: float
    v_statistic: float
    spread: tuple[float, float]  # E|φ - μ|² of either set
    rows: tuple[_RowMeans, _RowMeans]  # of all rows, or of random ones
    squares: _Three  # mean κ² of pairs xx, yy, xy
    method: str
    test: _Test
    computing_stderr: float = 0.0

    def sizes(self) -> tuple[int, int]:
        return self.rows[0].n, self.rows[1].n

    def covariances(self) -> _Three:
        """Unbiased |Σ_x|², |Σ_y|² and <Σ_x, Σ_y>: mean squares of κ centred in both arguments."""
        within = []
        for rows, square in zip(self.rows, self.squares[:2]):
            n = rows.n
            total, by_row = n * (n - 1) * rows.own.mean(), n * (n - 1) ** 2 * rows.own.square().mean()
            whole = n * (n - 1) * square + total.square() / ((n - 1) * (n - 2)) - 2.0 * by_row / (n - 2)
            within.append(max(0.0, float(whole) / (n * (n - 3))))
        n, m = self.sizes()
        of_x, of_y = self.rows[0].other, self.rows[1].other
        mean = float(of_x.mean())
        across = self.squares[2] - float(of_x.square().mean()) - float(of_y.square().mean()) + mean * mean
        return within[0], within[1], max(0.0, across * n * m / ((n - 1) * (m - 1)))

    def variance(self) -> float:
        """Var(U), see the top of the file, and that of computing it."""
        n, m = self.sizes()
        xx, yy, xy = self.covariances()
        second = 2.0 * xx / (n * (n - 1)) + 2.0 * yy / (m * (m - 1)) + 4.0 * xy / (n * m)
        first = sum(4.0 * float(rows.witness.var()) / rows.n for rows in self.rows)
        # the noise of g adds to its variance twice the second-order term on average
        return max(first - second, second) + self.computing_stderr**2


def _set_distance(
    name: str, found: _Measured, sets: _Sets, confidence: float, permutations: int, tell: Progress
) -> SetDistance:
    stderr = math.sqrt(found.variance())
    reach = stderr * float(torch.special.ndtri(torch.tensor(0.5 + confidence / 2.0, dtype=torch.float64)))
    spread = sum(found.spread) / 2.0
    return SetDistance(
        loss=name,
        value=found.value,
        low=max(0.0, found.value - reach),
        high=max(0.0, found.value + reach),
        stderr=stderr,
        computing_stderr=found.computing_stderr,
        v_statistic=found.v_statistic,
        relative=found.value / spread if spread > 0 else 0.0,
        p_value=None if permutations == 0 else found.test.p_value(permutations, sets.generator, tell),
        method=found.method,
        test=found.test.words if permutations else "",
    )


def _notes(name: str, found: _Measured) -> list[str]:
    spread = sum(found.spread) / 2.0
    if spread <= 0.0:
        return [f"{name}: the rows of each set are all alike"]
    notes = []
    xx, yy, xy = found.covariances()
    # the effective dimension of the kernel's features, spread² / |Σ|², is above the number of rows
    if name == "mmd" and (xx + yy + 2.0 * xy) / 4.0 * sum(found.sizes()) < spread**2:
        notes.append(
            "mmd: the kernel is nearly the identity on these rows, each like itself only, so MMD² and the power of the "
            "test are small; use wider bandwidths, such as those of scale='median'"
        )
    if found.computing_stderr**2 > 0.5 * found.variance():
        notes.append(
            f"{name}: most of the interval's width is from summing random blocks of pairs, not from the data; a higher "
            "rank makes it narrower, and the test, which needs no pairs, can find what it cannot"
        )
    return notes


# --- MMD² ---


def _mmd(sets: _Sets, kernel: Kernel, feature_map: FeatureMap | None, blocks: _Blocks, tell: Progress) -> _Measured:
    tell(0.0, "kernel")
    n, m = sets.counts
    if feature_map is None:
        matrix = kernel.square_matrix(torch.cat(sets.xy)).double()
        diagonals = [float(kernel.diag(z).mean(dtype=torch.float64)) for z in sets.xy]
        rows, squares, error = _means_of_matrix(matrix, n), _square_means(matrix, n), 0.0
        within, value = [float(each.own.mean()) for each in rows], _value(rows)
        method, features = f"all {(n + m) * (n + m - 1) // 2:,} pairs", ""

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
        rows, by_block = _means_of_features(sets, feature_map, totals, blocks, tell)
        correction, error, squares = _sampled_pairs(sets, kernel, feature_map, tell)
        value = sum(within) - 2.0 * float(totals[0] @ totals[1]) / (n * m) + correction
        method, features = _named(feature_map)
        many, few = map(len, sets.xy)

        def statistic(members: Tensor) -> Tensor:
            signed = members / many - (1.0 - members) / few
            return (signed @ by_block).square().sum(1)

    spread = [max(0.0, diagonal - own) for diagonal, own in zip(diagonals, within)]
    v_statistic = value + spread[0] / n + spread[1] / m
    test = _Test(statistic, blocks, 1e-12 * max(diagonals), sets.rows_permuted(blocks, features))
    return _Measured(value, v_statistic, (spread[0], spread[1]), rows, squares, method, test, error)


def _value(rows: tuple[_RowMeans, _RowMeans]) -> float:
    """U from the means of all rows."""
    return float(rows[0].own.mean() + rows[1].own.mean() - 2.0 * rows[0].other.mean())


def _named(feature_map: FeatureMap) -> tuple[str, str]:
    """How the value was summed and how the test looked at rows."""
    r = feature_map.transform.shape[1]
    if feature_map.landmarks is None:
        return f"all pairs, by their {r} features", ""
    return f"rank {r} and, for what it misses, random blocks of rows", f", on {r} kernel features"


def _means_of_matrix(matrix: Tensor, n: int) -> tuple[_RowMeans, _RowMeans]:
    """From all kernel values, of x before y, in double precision."""
    of_y = (torch.arange(len(matrix), device=matrix.device) >= n).long()
    return _row_means(ExactView(matrix).stratum_sums(of_y, 2), matrix.diagonal(), n, (n, len(matrix) - n))


def _row_means(sums: Tensor, diagonal: Tensor, split: int, counts: tuple[int, int]) -> tuple[_RowMeans, _RowMeans]:
    """From Σ κ of rows with all of x and with all of y (q, 2), and with themselves (q,); ``split`` of x, then of y."""
    n, m = counts
    own, other = (sums[:split, 0] - diagonal[:split]) / (n - 1), sums[:split, 1] / m
    of_x = _RowMeans(n, own, other, diagonal[:split])
    own, other = (sums[split:, 1] - diagonal[split:]) / (m - 1), sums[split:, 0] / n
    return of_x, _RowMeans(m, own, other, diagonal[split:])


def _square_means(matrix: Tensor, n: int) -> _Three:
    means = []
    for block in (matrix[:n, :n], matrix[n:, n:]):
        without = torch.linalg.vector_norm(block) ** 2 - block.diagonal().square().sum()
        means.append(float(without) / (len(block) * (len(block) - 1)))
    across = matrix[:n, n:]
    return means[0], means[1], float(torch.linalg.vector_norm(across) ** 2) / across.numel()


def _stream(sets: _Sets) -> Iterator[tuple[int, slice, Tensor, float]]:
    """Blocks of rows: the set (0 or 1), where they are, x before y, the rows, and the share of all that is done."""
    total, start = len(sets.x) + len(sets.y), 0
    for which, z in enumerate(sets.xy):
        for rows in row_blocks(len(z), _STREAM_ROWS):
            yield which, slice(start + rows.start, start + rows.stop), z[rows], (start + rows.stop) / total
        start += len(z)


def _means_of_features(
    sets: _Sets, feature_map: FeatureMap, totals: Tensor, blocks: _Blocks, tell: Progress
) -> tuple[tuple[_RowMeans, _RowMeans], Tensor]:
    """Means of rows by the features' sums over either set (2, r), and the features' sums over blocks of rows."""
    q = len(sets.x) + len(sets.y)
    sums, diagonal = totals.new_empty(q, 2), totals.new_empty(q)
    by_block = totals.new_zeros(blocks.count, totals.shape[1])
    for _, rows, z, done in _stream(sets):
        features = feature_map.features(z).double()
        sums[rows], diagonal[rows] = features @ totals.T, features.square().sum(1)
        by_block.index_add_(0, blocks.labels[rows], features)
        tell(0.6 * done, "rows")
    return _row_means(sums, diagonal, len(sets.x), sets.counts), by_block


def _sampled_pairs(
    sets: _Sets,
    kernel: Kernel,
    feature_map: FeatureMap | None,
    tell: Progress,
    means: Sequence[Tensor | float] = (0.0, 0.0),
) -> tuple[float, float, _Three]:
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
            corrections.append(_value(_means_of_matrix(matrix - features @ features.T, len(of_x))))
        tell(0.6 + 0.2 * (place + 1) / len(blocks), "pairs")
    xx, yy, xy = torch.tensor(squares, dtype=torch.float64).mean(0).tolist()
    if not corrections:  # explicit features miss nothing
        return 0.0, 0.0, (xx, yy, xy)
    values = torch.tensor(corrections, dtype=torch.float64)
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0  # one block is all rows
    return float(values.mean()), error, (xx, yy, xy)


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
    rows = _means_of_products(sets, means, scatter, tell)
    products = CoralKernel(mean=sets.x.new_zeros(len(centre)))
    own_means = [mean.to(sets.x) for mean in means]
    if sets.rank is None:
        centred = torch.cat([z - mean for z, mean in zip(sets.xy, own_means)])
        squares = _square_means(products.matrix(centred).double(), n)
    else:
        squares = _sampled_pairs(sets, products, None, tell, own_means)[2]
    v_statistic = float((scatter[0] / (n - 1) - scatter[1] / (m - 1)).square().sum())
    blocks = _Blocks.of(len(sets.x), len(sets.y), sets.generator)
    middle = (n * means[0] + m * means[1]) / (n + m)
    if sets.rank is None:
        statistic, features = _coral_of_rows(torch.cat(sets.xy).double() - middle, n, m), ""
    else:
        kernel = CoralKernel(mean=middle.to(sets.x))
        feature_map = fit_feature_map(sets.sample, kernel, sets.rank, generator=sets.generator)
        statistic = _coral_of_features(sets, feature_map, middle, blocks, tell)
        features = _named(feature_map)[1]
    test = _Test(statistic, blocks, 1e-12 * (max(squared) + max(spread)), sets.rows_permuted(blocks, features))
    method = "the moments of all rows"
    return _Measured(value, v_statistic, (spread[0], spread[1]), rows, squares, method, test)


def _central_moments(sums: Sums, centre: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean (d,), Σ vvᵀ and Σ |v|⁴ of rows v less their mean, from sums around a centre near it."""
    n, products, shift = sums["count"], sums["products"], sums["rows"] / sums["count"]
    length = shift.square().sum()
    fourth = sums["fourths"] - 4.0 * shift @ sums["cubes"] + 4.0 * shift @ products @ shift
    fourth = fourth + 2.0 * length * products.trace() - 3.0 * n * length.square()
    return centre + shift, products - n * torch.outer(shift, shift), max(0.0, float(fourth))


def _means_of_products(
    sets: _Sets, means: Sequence[Tensor], scatter: Tensor, tell: Progress
) -> tuple[_RowMeans, _RowMeans]:
    """Means of (zᵀz')² for each row."""
    q = len(sets.x) + len(sets.y)
    sums, diagonal = scatter.new_empty(q, 2), scatter.new_empty(q)
    own_precision = scatter.to(sets.x)
    for which, rows, z, done in _stream(sets):
        centred = z - means[which].to(z)
        diagonal[rows] = centred.square().sum(1).double().square()
        sums[rows] = torch.stack([((centred @ each) * centred).sum(1).double() for each in own_precision], 1)
        tell(0.6 * done, "rows")
    return _row_means(sums, diagonal, len(sets.x), sets.counts)


def _coral_of_rows(z: Tensor, n: int, m: int) -> _Statistic:
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


def _coral_of_features(
    sets: _Sets, feature_map: FeatureMap, centre: Tensor, blocks: _Blocks, tell: Progress
) -> _Statistic:
    """The same for memberships of blocks of rows; with features φ of the products, C is n/(n-1) (mean φ - φ(mean))."""
    n, m = len(sets.x), len(sets.y)
    features = centre.new_zeros(blocks.count, feature_map.transform.shape[1])
    sums = centre.new_zeros(blocks.count, len(centre))
    for _, rows, z, done in _stream(sets):
        features.index_add_(0, blocks.labels[rows], feature_map(z)[0].double())
        sums.index_add_(0, blocks.labels[rows], z.double() - centre)
        tell(0.8 + 0.1 * done, "features")

    def statistic(members: Tensor) -> Tensor:
        covariances = []
        for weights, count in ((members, n), (1.0 - members, m)):
            at_mean = feature_map((weights @ sums / count + centre).to(sets.x))[0].double()
            covariances.append((weights @ features - count * at_mean) / (count - 1))
        return (covariances[0] - covariances[1]).square().sum(1)

    return statistic


# --- the permutation test ---


@dataclass(frozen=True)
class _Blocks:
    """Random blocks of ``size`` rows of one set each, which are permuted as a whole; rows that are left over stay.

    Blocks of x come first, then those of y, then the two rests, one of x and one of y.
    """

    labels: Tensor  # block of each row, x before y
    of_x: int
    of_y: int
    size: int

    @classmethod
    def of(cls, n: int, m: int, generator: torch.Generator) -> _Blocks:
        size = max(1, min(-(-(n + m) // _PERMUTED_BLOCKS), min(n, m) // _LEAST_BLOCKS))
        few = min(n, m) // size
        many = min(max(n, m) // size, max(few, _PERMUTED_BLOCKS - few))
        of_x, of_y = (few, many) if n <= m else (many, few)
        labels = []
        for count, whole, start, rest in ((n, of_x, 0, 0), (m, of_y, of_x, 1)):
            if count == whole:  # rows are their own blocks, in their order
                labels.append(torch.arange(count, device=generator.device) + start)
                continue
            block = torch.randperm(count, generator=generator, device=generator.device) // size
            labels.append(torch.where(block < whole, block + start, of_x + of_y + rest))
        return cls(torch.cat(labels), of_x, of_y, size)

    @property
    def is_plain(self) -> bool:
        """Whether all rows are permuted, each for itself."""
        return self.size == 1 and self.of_x + self.of_y == len(self.labels)

    @property
    def count(self) -> int:
        """Blocks, with the two rests."""
        return self.of_x + self.of_y + (0 if self.is_plain else 2)

    @property
    def name(self) -> str:
        if self.is_plain:
            return "permutations of rows"
        return f"permutations of {self.of_x:,} and {self.of_y:,} blocks of {self.size:,} rows"

    def identity(self) -> Tensor:
        """Membership as it is: (1, blocks)."""
        members = torch.zeros(1, self.count, dtype=torch.float64, device=self.labels.device)
        members[:, : self.of_x] = 1.0
        if not self.is_plain:
            members[:, -2] = 1.0
        return members

    def permuted(self, count: int, generator: torch.Generator) -> Tensor:
        """Random memberships: (count, blocks)."""
        total = self.of_x + self.of_y
        members = self.identity().repeat(count, 1)
        keys = torch.rand(count, total, generator=generator, device=members.device)
        members[:, :total] = members[:, :total].gather(1, keys.argsort(1))
        return members


class _Test(NamedTuple):
    statistic: _Statistic
    blocks: _Blocks
    rounding: float  # of the statistic
    words: str

    def p_value(self, permutations: int, generator: torch.Generator, tell: Progress) -> float:
        """(1 + permutations with at least the observed value) / (1 + permutations)."""
        least = self.statistic(self.blocks.identity()) - self.rounding
        least = least - 1e-9 * least.abs()  # labels that swap two equal sets have the same value but for rounding
        above = 0
        for rows in row_blocks(permutations, _CHUNK):
            members = self.blocks.permuted(rows.stop - rows.start, generator)
            above += int((self.statistic(members) >= least).sum())
            tell(0.9 + 0.1 * rows.stop / permutations, "permutations")
        return (1 + above) / (1 + permutations)
