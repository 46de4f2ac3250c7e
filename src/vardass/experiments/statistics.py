"""Paired comparison of two samplers: the difference, who wins how often, and whether chance would do the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

__all__ = ["Paired", "holm", "paired"]


@dataclass(frozen=True)
class Paired:
    """One against another over the pairs that both have.

    Attributes
    ----------
    pairs : int
        Number of pairs.
    mean : float or None
        Mean difference, first minus second.
    stderr : float or None
        Its standard error (sample standard deviation by the root of the number); None for fewer than two pairs.
    wins, ties, losses : int
        Of the first.
    sign_p : float or None
        Two-sided exact sign test, without ties.
    t_p : float or None
        Two-sided paired t test; None for fewer than two pairs or if all differences are the same, where the test
        says nothing.
    """

    pairs: int
    mean: float | None
    stderr: float | None
    wins: int
    ties: int
    losses: int
    sign_p: float | None
    t_p: float | None


def paired(differences: Iterable[float], *, tie: float = 1e-9) -> Paired:
    """Judge differences of pairs.

    The tests take pairs as independent. Repeats of one task are not quite: they share their data, so a small p
    value speaks about these tasks and not about others.

    Parameters
    ----------
    differences : iterable of float
        Such as those of accuracies on the same task and repeat, see ``DataResults.pairs``.
    tie : float
        Differences up to this size are ties.
    """
    values = np.array(list(differences))
    n = len(values)
    if not n:
        return Paired(0, None, None, 0, 0, 0, None, None)
    wins, losses = int((values > tie).sum()), int((values < -tie).sum())
    sign_p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    stderr = float(stats.sem(values)) if n > 1 else None
    t_p = float(stats.ttest_1samp(values, 0.0).pvalue) if n > 1 and np.ptp(values) > tie else None
    return Paired(n, float(values.mean()), stderr, wins, n - wins - losses, losses, sign_p, t_p)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: the family-wise p value of each test. scipy has none.

    A test without a p value stays without, but counts as one of the family.

    Examples
    --------
    >>> holm([0.01, 0.04, None])
    [0.03, 0.08, None]
    """
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    floor = 0.0
    for rank, (p, place) in enumerate(known):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p))
        adjusted[place] = floor
    return adjusted
