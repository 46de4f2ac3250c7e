"""When to recompute strata or a plan: policies that go by time, and one that goes by the drift of features.

A policy is asked once a step. ``step`` counts the batches of the whole run so far.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, ClassVar

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.registry import Registry, declared_options
from vardass.validate import check_count, check_state

_STATE_VERSION = 1


class RefreshPolicy(ABC):
    """Says at which steps to refresh (section 2.5 of the paper); for one of your own write ``due``."""

    observes_drift: ClassVar[bool] = False  # whether `observe` needs the drift of each batch

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether to refresh now, after ``step`` batches. The same step gets the same answer."""

    def observe(self, drift: Tensor | float) -> None:  # noqa: B027
        """Take the drift of one batch: `FeatureBank.drift` divided by `variance_within` strata; NaN is ignored."""

    def state_dict(self) -> dict[str, Any]:
        """What the next answers depend on, in plain numbers and text; settings are not part of it."""
        return {"policy": type(self).__name__, "version": _STATE_VERSION}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the policy that gave ``state`` was."""
        mine = self.state_dict()
        check_state(state, self, ("policy", "version"))
        for key in ("policy", "version"):
            if state[key] != mine[key]:
                raise InputError(
                    f"the state has {key}={state[key]!r}, this policy {key}={mine[key]!r}; "
                    "pass what the same kind of policy gave"
                )
        check_state(state, self, mine)

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
        Step of the first refresh. With a feature bank that only training fills, the length of an epoch.

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
    """Refresh often at first and ever less often, as features distort most early in training.

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


class DriftRefresh(RefreshPolicy):
    """Refresh when the features have drifted from those that the strata were made from.

    The drift of a batch, Σ_h w_h |φ_new - φ_bank|² divided by the mean variance within strata, is 1 when samples have
    moved as far as the members of a stratum are apart. It costs no extra forward pass.

    Parameters
    ----------
    threshold : float
        For the mean drift of the last ``window`` batches. Gradient noise rose by 24 % at a drift of 0.11 and by 46 % at
        0.38 on a small network.
    shortest, longest : int
        Least and most steps between refreshes.
    window : int
        Batches in the running mean.
    start : int
        Step of the first refresh.

    Notes
    -----
    An answer of True counts as a refresh: what was observed before it is forgotten. Once ``shortest`` steps have
    passed, every ``due`` reads the newest drift: for a bank on a GPU it waits for that number.

    Examples
    --------
    >>> policy = DriftRefresh(threshold=0.3, shortest=2, longest=50, window=2)
    >>> due = []
    >>> for step in range(12):
    ...     policy.observe(0.1 * step)
    ...     due += [step] if policy.due(step) else []
    >>> due
    [0, 4, 6, 8, 10]
    """

    observes_drift = True

    def __init__(
        self, threshold: float = 0.3, shortest: int = 25, longest: int = 1000, *, window: int = 10, start: int = 0
    ) -> None:
        if not (math.isfinite(threshold) and threshold > 0):
            raise InputError(f"threshold must be positive, got {threshold}; 0.3 is the default")
        self.threshold = float(threshold)
        self.shortest = check_count(shortest, "shortest")
        self.longest = check_count(longest, "longest", low=self.shortest, remedy="not below shortest")
        self.window = check_count(window, "window")
        self.start = check_count(start, "start", low=0)
        self._last: int | None = None  # step of the last refresh
        self._recent: deque[Tensor | float] = deque(maxlen=self.window)

    def observe(self, drift: Tensor | float) -> None:
        """Add the drift of one batch to the running mean."""
        value = torch.as_tensor(drift).detach()
        if value.ndim:
            raise InputError(f"drift must be one number, got shape {tuple(value.shape)}; use FeatureBank.drift")
        # kept as a tensor: nothing waits for the device before `due` wants to know
        self._recent.append(value)

    @property
    def drift(self) -> float:
        """Mean drift of the last batches, NaN before there is one."""
        # each number is fetched from its device once
        self._recent = deque((float(value) for value in self._recent), maxlen=self.window)
        known = [value for value in self._recent if not math.isnan(float(value))]
        return float(sum(known)) / len(known) if known else math.nan

    def due(self, step: int) -> bool:
        """Whether the drift since the last refresh, or the time since then, asks for a refresh."""
        step = check_count(step, "step", low=0)
        if self._last is None:
            wanted = step >= self.start
        elif step < self._last:
            raise InputError(
                f"step={step} comes before the last refresh at step={self._last}; count the steps of the "
                "whole run, not of the epoch"
            )
        elif step == self._last:
            return True
        else:
            waited = step - self._last
            wanted = waited >= self.longest or (waited >= self.shortest and self.drift > self.threshold)
        if wanted:
            self._last = step
            self._recent.clear()
        return wanted

    def state_dict(self) -> dict[str, Any]:
        """The last refresh, and the drifts since."""
        return super().state_dict() | {"last_step": self._last, "recent": [float(value) for value in self._recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the policy that gave ``state`` was."""
        super().load_state_dict(state)
        self._last = state["last_step"]
        self._recent = deque(state["recent"], maxlen=self.window)


POLICIES: Registry[type[RefreshPolicy]] = Registry(
    "refresh_policy", {"every": RefreshEvery, "growing": GrowingRefresh, "drift": DriftRefresh}
)
"""Policies by the names that settings of a run have."""
