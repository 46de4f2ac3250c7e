"""How far apart two data sets are: MMD² and CORAL with a confidence interval and a permutation p-value, at any size.

Values are computed in `estimates`, their intervals in `intervals`. Of all rows both need only sums (`sums`), so for
sets that do not fit in memory a sample is enough for everything else. The test (`permutation_test`) compares the
plug-in value V = |μ̂_x - μ̂_y|² with that of relabelled rows. Its level is exact for any statistic: low-rank features
cost power, never validity.

Rows must be independent draws. Frames of one film or overlapping windows are not: take one of each first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vardass.analysis.estimates import Measured, TwoSets, coral_distance, mmd_distance
from vardass.analysis.intervals import confidence_interval, covariances
from vardass.analysis.permutation_test import Blocks
from vardass.analysis.sums import Sums, set_sums
from vardass.errors import InputError
from vardass.files import plain
from vardass.kernels import KernelLike, RBFMixture, fitted_kernel
from vardass.lowrank import DEFAULT_RANK, FeatureMap, fit_feature_map
from vardass.validate import (
    ArrayLike,
    Progress,
    as_features,
    as_generator,
    check_count,
    check_number,
    choose,
    silent,
)
from vardass.view import EXACT_LIMIT

__all__ = ["Comparison", "SetDistance", "compare"]

LOSS_NAMES = {"mmd": "MMD²", "coral": "CORAL"}
_FITTED_ROWS = 4096  # random ones, that kernels and landmarks are fitted to
_LEAST_ROWS = 4  # of each set: unbiased squares of covariances take four rows
_WIDEST = 8192  # columns for which CORAL's covariances fit in memory


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
        Ends of the confidence interval, cut at 0 and not symmetric about the value.
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
    """The result of `compare`; ``comparison["mmd"]`` is the result of one loss.

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
        results = {result.loss: result for result in self.results}
        return results[choose(loss, "loss", results)]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text."""
        record: dict[str, Any] = plain(self)
        return record


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
        Confidence level of the intervals, which hold for the fitted kernel. With few rows or a small difference they
        are too wide rather than too narrow.
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
    >>> mmd = compare(x, y, permutations=99)["mmd"]
    >>> mmd.low > 0.0, mmd.p_value
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
        sums = set_sums(first, feature_map, around), set_sums(second, feature_map, around)
    else:
        sums = whole(feature_map, around)
        permuted += f", of random samples of {len(first):,} and {len(second):,} rows"
    sets = TwoSets((first, second), sample, blocks, rank, generator, sums)
    results, notes = [], []
    share = 0.7 / len(losses)
    for i, name in enumerate(losses):
        report = _scaled_progress(tell, 0.3 + i * share, share, LOSS_NAMES[name])
        if name == "mmd":
            measured = mmd_distance(sets, fitted, feature_map, report)
        else:
            measured = coral_distance(sets, centre, report)
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
        results.append(result)
        notes += remarks
    kernel_name = repr(fitted) if "mmd" in losses else ""
    return Comparison(*sets.counts, d, confidence, permutations, kernel_name, tuple(results), tuple(notes))


def _scaled_progress(tell: Progress, start: float, share: float, name: str) -> Progress:
    return lambda fraction, message: tell(start + share * fraction, f"{name}: {message}")


def _judged(
    name: str, measured: Measured, confidence: float, p_value: float | None, test: str
) -> tuple[SetDistance, list[str]]:
    """The distance with its interval, and notes on it."""
    interval = confidence_interval(measured, confidence)
    xx, yy, xy = covariances(measured)
    notes = []
    if measured.spread <= 0.0:
        notes.append(f"{name}: the rows of each set are all alike")
    # the effective dimension of the kernel's features, spread² / |Σ|², is above the number of rows
    elif name == "mmd" and (xx + yy + 2.0 * xy) / 4.0 * sum(rows.n for rows in measured.rows) < measured.spread**2:
        notes.append(
            "mmd: the kernel is nearly the identity on these rows, each like itself only, so MMD² and the power of the "
            "test are small; use wider bandwidths, for example with scale='median'"
        )
    if measured.value < 0.0:
        notes.append(
            f"{name}: the value is an unbiased estimate, below 0 by chance where sets are nearly equal; the interval "
            "is of the true value, which is never below 0"
        )
    if measured.computing_stderr > math.sqrt(0.5) * interval.stderr:
        notes.append(
            f"{name}: most of the interval's width is from summing random blocks of pairs, not from the data; a higher "
            "rank makes it narrower; the test needs no pairs, so it can find smaller differences"
        )
    result = SetDistance(
        loss=name,
        value=measured.value,
        low=interval.low,
        high=interval.high,
        stderr=interval.stderr,
        computing_stderr=measured.computing_stderr,
        v_statistic=measured.v_statistic,
        relative=measured.value / measured.spread if measured.spread > 0 else 0.0,
        method=measured.method,
        p_value=p_value,
        test=test,
    )
    return result, notes
