"""Where the seconds go: features, solver, drawing, training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from vardass.errors import InputError
from vardass.refresh.feature_extraction import as_device
from vardass.validate import check_state

__all__ = ["Timer"]


class Timer:
    """Add up the seconds spent in named parts of a run.

    Parts may be nested: time counts for the innermost one only, so that the parts sum to the total.

    Parameters
    ----------
    device : device, optional
        A CUDA device to wait for at the beginning and end of each part. Work on a GPU is only queued by the
        calls that start it; without waiting, its time is charged to whichever part waits next.
    clock : callable
        Gives seconds.

    Attributes
    ----------
    seconds : dict of str to float
        Seconds spent in each part.
    counts : dict of str to int
        How often each part was entered.

    Examples
    --------
    >>> timer = Timer(clock=iter([0.0, 3.0, 3.0, 4.0]).__next__)
    >>> with timer("features"):
    ...     pass
    >>> with timer("solver"):
    ...     pass
    >>> timer.seconds
    {'features': 3.0, 'solver': 1.0}
    """

    def __init__(
        self, *, device: torch.device | str | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device = None if device is None else as_device(device)
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Charge the seconds of a ``with`` block to ``part``."""
        self._charge()
        self._open.append(part)
        self.add(part, 0.0)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def add(self, part: str, seconds: float, count: int = 1) -> None:
        """Add seconds that were measured elsewhere."""
        if not seconds >= 0:
            raise InputError(f"seconds must not be negative, got {seconds} for {part!r}")
        self.seconds[part] = self.seconds.get(part, 0.0) + float(seconds)
        self.counts[part] = self.counts.get(part, 0) + count

    def _charge(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @property
    def total(self) -> float:
        """Seconds in all parts."""
        return sum(self.seconds.values())

    def state_dict(self) -> dict[str, Any]:
        """Seconds and counts."""
        return {"seconds": dict(self.seconds), "counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the seconds and counts of an earlier run."""
        check_state(state, self)
        if not {"seconds", "counts"} <= state.keys():
            raise InputError(f"the state has {sorted(state)}, it needs 'seconds' and 'counts'")
        self.seconds = {**dict.fromkeys(self._open, 0.0), **state["seconds"]}
        self.counts = {**dict.fromkeys(self._open, 1), **state["counts"]}
