"""Where the seconds go: features, solver, drawing, training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from vardass.errors import InputError
from vardass.refresh.feature_extraction import as_device
from vardass.validate import check_state

__all__ = ["TimeAccount"]

Item = TypeVar("Item")


class TimeAccount:
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
    >>> account = TimeAccount(clock=iter([0.0, 3.0, 3.0, 4.0]).__next__)
    >>> with account("features"):
    ...     pass
    >>> with account("solver"):
    ...     pass
    >>> account.seconds, account.share()
    ({'features': 3.0, 'solver': 1.0}, {'features': 0.75, 'solver': 0.25})
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
        self.seconds.setdefault(part, 0.0)
        self.counts[part] = self.counts.get(part, 0) + 1
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def iterate(self, part: str, items: Iterable[Item]) -> Iterator[Item]:
        """Pass ``items`` on, and charge the wait for each one: ``account.iterate("drawing", loader)``."""
        iterator = iter(items)
        end = object()
        while True:
            with self(part):
                item: Any = next(iterator, end)
            if item is end:
                return
            yield item

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

    def share(self) -> dict[str, float]:
        """Share of each part in the total."""
        total = self.total
        return {part: seconds / total if total > 0 else 0.0 for part, seconds in self.seconds.items()}

    def as_dict(self, prefix: str = "seconds/") -> dict[str, float]:
        """Seconds by part, for any logger."""
        return {prefix + part: seconds for part, seconds in self.seconds.items()}

    def report(self) -> str:
        """A table of the parts, longest first.

        >>> account = TimeAccount()
        >>> account.add("training", 9.0, count=100)
        >>> account.add("solver", 1.0)
        >>> print(account.report())
        part      seconds  share  times  each
        training    9.000  90.0%    100  0.09
        solver      1.000  10.0%      1     1
        total      10.000
        """
        share = self.share()
        table = [("part", "seconds", "share", "times", "each")]
        for part in sorted(self.seconds, key=lambda name: -self.seconds[name]):
            seconds, count = self.seconds[part], self.counts[part]
            each = f"{seconds / count:.3g}" if count else ""
            table.append((part, f"{seconds:.3f}", f"{share[part]:.1%}", str(count), each))
        table.append(("total", f"{self.total:.3f}", "", "", ""))
        widths = [max(len(row[column]) for row in table) for column in range(5)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]).rstrip()
            for row in table
        )

    def reset(self) -> None:
        """Start again from zero; parts that are open go on."""
        self.seconds = dict.fromkeys(self._open, 0.0)
        self.counts = dict.fromkeys(self._open, 1)

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

    def __repr__(self) -> str:
        parts = ", ".join(f"{part}={seconds:.3g}s" for part, seconds in self.seconds.items())
        return f"TimeAccount({parts})"
