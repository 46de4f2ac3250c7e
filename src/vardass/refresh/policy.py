"""When to recompute strata or a plan: the interface, and the policies that go by time.

A policy is asked once a step. ``step`` counts the batches trained on so far over the whole run: ``due(0)``
asks before the first batch, ``due(1)`` after it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from typing import Any, ClassVar

from torch import Tensor

from vardass.errors import InputError
from vardass.validate import check_count

__all__ = ["EpochRefresh", "GrowingRefresh", "NeverRefresh", "RefreshEvery", "RefreshPolicy"]

_STATE_VERSION = 1


class RefreshPolicy(ABC):
    """Says at which steps to refresh (section 2.5 of the paper).

    All policies are asked and told in the same way, so that a loop can exchange one for another.

    Attributes
    ----------
    observes : str or None
        What `observe` needs to be told: ``"drift"``, ``"variance"``, or None for policies that go by time.
    """

    observes: ClassVar[str | None] = None
    _shown: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether to refresh now, after ``step`` batches. The same step gets the same answer."""

    def observe(  # noqa: B027
        self, *, drift: Tensor | float | None = None, scale: float = 1.0, variance: float | None = None
    ) -> None:
        """Take note of measurements; policies ignore what they do not need.

        Parameters
        ----------
        drift : scalar tensor or float, optional
            Σ_h w_h |φ_new - φ_bank|² of one batch, from `FeatureBank.drift`. NaN says nothing.
        scale : float
            Divides ``drift``: the mean variance within strata, from `strata_spread`.
        variance : float, optional
            Variance of the current strata on current features.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the next answers depend on, in plain numbers and text; settings are not part of it."""
        return {"policy": type(self).__name__, "version": _STATE_VERSION, **self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the policy that gave ``state`` was."""
        for key, value in (("policy", type(self).__name__), ("version", _STATE_VERSION)):
            if state.get(key) != value:
                raise InputError(
                    f"the state has {key}={state.get(key)!r}, this policy {key}={value!r}; "
                    "pass what the same kind of policy gave"
                )
        missing = self._state().keys() - state.keys()
        if missing:
            raise InputError(f"the state of {type(self).__name__} lacks {sorted(missing)}; pass a whole state")
        self._load_state(state)

    def _state(self) -> dict[str, Any]:
        return {}

    def _load_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `_state` gave."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._shown)})"


class RefreshEvery(RefreshPolicy):
    """Refresh at a fixed period, as in the paper's experiments (T = 100).

    Parameters
    ----------
    period : int
        Steps between refreshes, the paper's T.
    start : int
        Step of the first refresh. With a feature bank that only training fills, the length of an epoch.

    Examples
    --------
    >>> policy = RefreshEvery(100)
    >>> [step for step in range(301) if policy.due(step)]
    [0, 100, 200, 300]
    """

    _shown: ClassVar[tuple[str, ...]] = ("period", "start")

    def __init__(self, period: int = 100, *, start: int = 0) -> None:
        self.period = check_count(period, "period", remedy="NeverRefresh() never refreshes")
        self.start = check_count(start, "start", low=0)

    def due(self, step: int) -> bool:
        """Whether ``step`` is ``start`` plus a multiple of ``period``."""
        step = check_count(step, "step", low=0)
        return step >= self.start and (step - self.start) % self.period == 0


class EpochRefresh(RefreshEvery):
    """Refresh before the first batch and at the end of every epoch, or of every few.

    Parameters
    ----------
    steps_per_epoch : int
        Batches in an epoch, ``len(sampler)``.
    epochs : int
        Epochs between refreshes.
    start : int
        Step of the first refresh; ``start=steps_per_epoch`` leaves out the one before the first batch.

    Examples
    --------
    >>> policy = EpochRefresh(40, epochs=2)
    >>> [step for step in range(161) if policy.due(step)]
    [0, 80, 160]
    """

    _shown: ClassVar[tuple[str, ...]] = ("steps_per_epoch", "epochs", "start")

    def __init__(self, steps_per_epoch: int, *, epochs: int = 1, start: int = 0) -> None:
        self.steps_per_epoch = check_count(steps_per_epoch, "steps_per_epoch")
        self.epochs = check_count(epochs, "epochs")
        super().__init__(self.steps_per_epoch * self.epochs, start=start)


class NeverRefresh(RefreshPolicy):
    """Never refresh: the sampler stays uniform, or keeps the strata it was given before training."""

    def due(self, step: int) -> bool:
        """False."""
        check_count(step, "step", low=0)
        return False


class GrowingRefresh(RefreshPolicy):
    """Refresh often at first and ever less often, as features distort most early in training.

    The paper suggests such a schedule under "Effect of T" (section 3.1). The j-th interval, from 0, is
    ``min(longest, floor(first * factor**j))`` steps.

    Parameters
    ----------
    first : int
        Steps between the first two refreshes.
    factor : float
        Growth of the interval, above 1.
    longest : int or None
        Limit of the interval.
    start : int
        Step of the first refresh.

    Examples
    --------
    >>> policy = GrowingRefresh(first=10, factor=1.5, longest=40)
    >>> [step for step in range(170) if policy.due(step)]
    [0, 10, 25, 47, 80, 120, 160]
    """

    _shown: ClassVar[tuple[str, ...]] = ("first", "factor", "longest", "start")

    def __init__(self, first: int = 10, factor: float = 1.5, longest: int | None = 1000, *, start: int = 0) -> None:
        self.first = check_count(first, "first")
        if not (math.isfinite(factor) and factor > 1):
            raise InputError(f"factor must be above 1, got {factor}; RefreshEvery({first}) keeps one period")
        self.factor = float(factor)
        self.longest = None if longest is None else check_count(longest, "longest", low=1)
        if self.longest is not None and self.longest < self.first:
            raise InputError(f"longest={longest} is below first={first}; raise longest or lower first")
        self.start = check_count(start, "start", low=0)
        self._steps = [self.start]  # refreshes up to the largest step asked for, while the interval grows
        self._interval = float(self.first)

    def due(self, step: int) -> bool:
        """Whether ``step`` is on the schedule."""
        step = check_count(step, "step", low=0)
        while self._steps[-1] < step and (self.longest is None or self._interval < self.longest):
            self._steps.append(self._steps[-1] + int(self._interval))
            self._interval *= self.factor
        if self.longest is not None and step > self._steps[-1]:
            return (step - self._steps[-1]) % self.longest == 0
        place = bisect_left(self._steps, step)
        return place < len(self._steps) and self._steps[place] == step
