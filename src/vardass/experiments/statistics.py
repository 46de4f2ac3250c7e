"""Paired comparison of two samplers: the difference, who wins how often, and whether chance would do the same."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Paired", "holm", "paired", "sign_test", "student_p"]

Key = TypeVar("Key", bound=Hashable)


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


def paired(one: Mapping[Key, float], other: Mapping[Key, float], *, tie: float = 1e-9) -> Paired:
    """Compare values with the same key.

    The tests take pairs as independent. Repeats of one task are not quite: they share their data, so a small p
    value speaks about these tasks and not about others.

    Parameters
    ----------
    one, other : mapping of key to float
        Such as accuracies by (task, repeat). Keys that only one has are left out.
    tie : float
        Differences up to this size are ties.
    """
    differences = [one[key] - other[key] for key in one if key in other]
    n = len(differences)
    wins = sum(difference > tie for difference in differences)
    losses = sum(difference < -tie for difference in differences)
    if not n:
        return Paired(0, None, None, 0, 0, 0, None, None)
    mean = math.fsum(differences) / n
    stderr = t_p = None
    if n > 1:
        stderr = math.sqrt(math.fsum((difference - mean) ** 2 for difference in differences) / (n - 1) / n)
        if max(differences) - min(differences) > tie:
            t_p = student_p(mean / stderr, n - 1)
    return Paired(n, mean, stderr, wins, n - wins - losses, losses, sign_test(wins, losses), t_p)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided probability that a fair coin is at least as uneven.

    Examples
    --------
    >>> sign_test(5, 0)
    0.0625
    """
    n, fewer = wins + losses, min(wins, losses)
    count: int = sum(math.comb(n, i) for i in range(fewer + 1))
    return min(1.0, 2 * count / (1 << n))


def student_p(t: float, freedom: int) -> float:
    """Two-sided probability of Student's t with ``freedom`` degrees of freedom: I_x(freedom/2, 1/2), x = f/(f+t²)."""
    square = t * t
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: the family-wise p value of each test.

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


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    # regularised; rest = 1 - x is given too, since the subtraction would lose it for tiny t
    if x <= 0.0 or rest <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction of the other tail converges faster
        return 1.0 - _incomplete_beta(b, a, rest, x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    return math.exp(logarithm) * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    # the classical continued fraction, from the front by Lentz's method
    tiny = 1e-300
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1.0), tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1.0 / _away(1.0 + step * d, tiny)
            c = _away(1.0 + step / c, tiny)
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
