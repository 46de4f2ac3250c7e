"""When to recompute strata or a plan: policies that depend on the number of batches so far."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from vardass.errors import InputError
from vardass.registry import declared_options
from vardass.validate import check_count


class RefreshPolicy(ABC):
    """Decides at which steps to refresh (section 2.5 of the paper); subclasses implement ``due``.

    The answer depends on ``step`` alone, which counts the batches of the whole run, so a policy has no state.
    """

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether to refresh now, after ``step`` batches."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name, None)!r}" for name in declared_options(type(self)))
        return f"{type(self).__name__}({shown})"


class RefreshEvery(RefreshPolicy):
    """Refresh at a fixed period, as in the paper's experiments (T = 100).

    Parameters
    ----------
    period : int
        Steps between refreshes, the paper's T. 0 never refreshes: the sampler stays uniform, or keeps the strata it
        was given before training.
    start : int
        Step of the first refresh. If only training fills the feature bank, set it to the length of an epoch.

    Examples
    --------
    >>> policy = RefreshEvery(100)
    >>> [step for step in range(301) if policy.due(step)]
    [0, 100, 200, 300]
    """

    def __init__(self, period: int = 100, *, start: int = 0) -> None:
        self.period = check_count(period, "period", low=0, remedy="0 never refreshes")
        self.start = check_count(start, "start", low=0)

    def due(self, step: int) -> bool:
        """Whether ``step`` is ``start`` plus a multiple of ``period``."""
        waited = check_count(step, "step", low=0) - self.start
        return self.period > 0 and waited >= 0 and waited % self.period == 0


class GrowingRefresh(RefreshPolicy):
    """Refresh often at first, then less and less often, as features change most early in training.

    The paper suggests such a schedule under "Effect of T" (section 3.1). The j-th interval, from 0, is
    ``min(longest, floor(first * factor**j))`` steps, with a ``factor`` above 1 and no limit if ``longest`` is None; the
    first refresh is at step ``start``.
    """

    def __init__(self, first: int = 10, factor: float = 1.5, longest: int | None = 1000, *, start: int = 0) -> None:
        self.first = check_count(first, "first")
        if not (math.isfinite(factor) and factor > 1):
            raise InputError(f"factor must be above 1, got {factor}; RefreshEvery({first}) keeps one period")
        self.factor = float(factor)
        remedy = f"it is not below first={first}"
        self.longest = None if longest is None else check_count(longest, "longest", low=self.first, remedy=remedy)
        self.start = check_count(start, "start", low=0)

    def due(self, step: int) -> bool:
        """Whether ``step`` is on the schedule."""
        step = check_count(step, "step", low=0)
        refresh, interval, longest = self.start, float(self.first), self.longest or math.inf
        while refresh < step and interval < longest:
            refresh += int(interval)
            interval *= self.factor
        return refresh == step or (refresh < step and (step - refresh) % longest == 0)
