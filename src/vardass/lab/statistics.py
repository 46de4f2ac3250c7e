"""Differences over independent repeats: their mean, standard error, interval and tests.

All runs of a repeat share hyper-parameters, seeds and splits, so the tasks of a repeat are not independent. What is
given here are therefore means over the tasks of each repeat, never values of single tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

__all__ = ["LEVEL", "Difference", "difference", "holm", "mean_and_error"]

LEVEL = 0.05  # of all tests and intervals


def mean_and_error(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error: sample standard deviation (n - 1) by the root of n.

    The error is None for fewer than two values, the mean for none. DomainBed, and perhaps the paper, divide by n.
    """
    found = np.array(list(values))
    if not len(found):
        return None, None
    return float(found.mean()), float(stats.sem(found)) if len(found) > 1 else None


@dataclass(frozen=True)
class Difference:
    """What repeats say about a difference. All but the mean are None for fewer than two repeats.

    Examples
    --------
    >>> found = difference([0.9, 1.1, 1.0, 1.2], margin=0.5)
    >>> found.n, found.low < found.mean < found.high
    (4, True)
    """

    n: int  # repeats
    mean: float | None = None  # see `mean_and_error`
    stderr: float | None = None
    low: float | None = None  # 95 % interval of Student's t
    high: float | None = None
    # two-sided t test of no difference; None if all repeats are the same, where the test says nothing
    p: float | None = None
    # two one-sided t tests (TOST): small if the difference is shown to be within the margin. A large one shows
    # nothing, as a large ``p`` does not show that there is no difference
    equivalence_p: float | None = None


def difference(means: Iterable[float], *, margin: float) -> Difference:
    """Judge the differences of independent repeats."""
    found = np.array(list(means))
    mean, stderr = mean_and_error(found)
    if mean is None or stderr is None:
        return Difference(len(found), mean)
    if np.ptp(found) <= 1e-12 * max(1.0, abs(mean)):
        return Difference(len(found), mean, stderr, mean, mean)
    freedom = len(found) - 1
    reach = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * stderr
    p = 2 * float(stats.t.sf(abs(mean) / stderr, freedom))
    equivalence_p = float(stats.t.sf((margin - abs(mean)) / stderr, freedom))  # the larger of both sides
    return Difference(len(found), mean, stderr, mean - reach, mean + reach, p, equivalence_p)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: the family-wise p value of each test. scipy has none.

    A test without a p value stays without, but counts as one of the family.
    """
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    floor = 0.0
    for rank, (p, place) in enumerate(known):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p))
        adjusted[place] = floor
    return adjusted
