"""Where the runs of a sweep are done: on this machine, or on a Ray cluster.

An engine is a function ``run_all(todo, work, *, jobs, on_done, tick)``. It does each `Attempt` in its own folder of
``work``, hands every `Outcome` to ``on_done`` in the calling thread, and does what ``on_done`` returns once more.

A run whose worker died goes on from its checkpoint; that is no failure of the run. So that a run which kills its
worker each time does not go on for ever, see `Crashes`.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from vardass.adapt.run_folder import CHECKPOINT_FILE
from vardass.errors import VardassError
from vardass.files import read_json
from vardass.lab.record import RunSpec
from vardass.lab.store import PROGRESS_FILE
from vardass.validate import choose

__all__ = [
    "ENGINES",
    "Attempt",
    "Crashes",
    "Engine",
    "OnDone",
    "Outcome",
    "Tick",
    "attempt_run",
    "drive",
    "get_engine",
]

ENGINES = ("local", "ray")
_TICK = 1.0  # seconds between looks at the time while nothing ends
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Attempt(NamedTuple):
    """A run to do.

    Attributes
    ----------
    spec : RunSpec
        What to run.
    number : int
        One more than how often it failed.
    wall : float
        Seconds that it took until then.
    """

    spec: RunSpec
    number: int = 1
    wall: float = 0.0


class Outcome(NamedTuple):
    """How an attempt ended.

    Attributes
    ----------
    kind : {"finished", "failed", "stopped", "disk-full"}
        A stopped one has a checkpoint to go on from.
    text : str
        Record as a line of JSON, or the message of the error.
    wall : float
        Seconds of the run until now.
    """

    kind: str
    text: str = ""
    wall: float = 0.0


OnDone: TypeAlias = Callable[[Attempt, Outcome], "Attempt | None"]
Tick: TypeAlias = Callable[[], None]


class Engine(Protocol):
    """Does all runs, see `vardass.lab.engines`."""

    def __call__(
        self, todo: Sequence[Attempt], work: Path, *, jobs: int | None, on_done: OnDone, tick: Tick | None = None
    ) -> None:
        """Do ``todo`` in folders below ``work``, ``jobs`` at a time."""


def get_engine(name: str) -> Engine:
    """An engine by name; Ray is imported only if it is asked for."""
    if choose(name, "engine", ENGINES) == "ray":
        from vardass.lab.engines import ray

        return ray.run_all
    from vardass.lab.engines import local

    return local.run_all


def attempt_run(attempt: Attempt, folder: Path, *, stop: Callable[[], bool] | None = None) -> Outcome:
    """Do a run in this process; whatever goes wrong is an outcome, not an exception."""
    # only workers need what a run needs
    from vardass.lab.run import Stopped, execute

    started = time.perf_counter()
    try:
        record = execute(attempt.spec, folder, attempt=attempt.number, wall_before=attempt.wall, stop=stop)
        return Outcome("finished", record.to_json(), record.wall)
    except (Stopped, KeyboardInterrupt):
        return Outcome("stopped")
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        noted = float(read_json(folder / PROGRESS_FILE).get("wall", 0.0))
        wall = max(noted, attempt.wall + time.perf_counter() - started)
        return Outcome("disk-full" if _is_full(error) else "failed", text, wall)


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


class Crashes:
    """Runs that were under way when a worker died, and what becomes of them.

    Such a run is done again, from its checkpoint. Nobody knows which of the runs under way killed the worker, if any
    did. Therefore a run that was under way in `LIMIT` crashes without a new checkpoint in between waits until all
    others are done, and then runs alone. `LIMIT` more crashes without a new checkpoint, and it has failed. If
    `HOPELESS` runs in a row are lost and nothing finishes or writes a checkpoint, the machine is at fault, and the
    sweep stops.

    Parameters
    ----------
    work : Path
        Folder of the runs' folders.
    """

    LIMIT = 3
    HOPELESS = 50

    def __init__(self, work: Path) -> None:
        self.work = work
        self._counts: dict[str, int] = {}
        self._marks: dict[str, int | None] = {}
        self._fruitless = 0

    def is_suspect(self, attempt: Attempt) -> bool:
        """Whether the run has to run alone."""
        return self._counts.get(attempt.spec.run_id, 0) >= self.LIMIT

    def progress(self) -> None:
        """Note that a run ended."""
        self._fruitless = 0

    def add(self, attempt: Attempt, cause: BaseException) -> Outcome | None:
        """Count a crash; the run's outcome if it is the last straw."""
        name = attempt.spec.run_id
        mark = self._checkpoint(name)
        if mark != self._marks.get(name):
            self._counts[name] = 0
            self._fruitless = 0
        self._marks[name] = mark
        self._counts[name] = self._counts.get(name, 0) + 1
        self._fruitless += 1
        if self._fruitless >= self.HOPELESS:
            raise VardassError(
                f"workers died {self._fruitless} times and nothing was done in between ({cause}); see the logs in "
                f"{self.work}, look for a lack of memory, take fewer --jobs, and start the sweep again to go on"
            )
        if self._counts[name] < 2 * self.LIMIT:
            return None
        text = (
            f"its worker died {self._counts[name]} times without a new checkpoint, the last times with no other run "
            "beside it; out of memory?"
        )
        self._counts[name] = 0
        return Outcome("failed", text, float(read_json(self.work / name / PROGRESS_FILE).get("wall", attempt.wall)))

    def _checkpoint(self, name: str) -> int | None:
        try:
            return (self.work / name / CHECKPOINT_FILE).stat().st_mtime_ns
        except OSError:
            return None


def drive(
    todo: Sequence[Attempt],
    work: Path,
    *,
    width: int,
    submit: Callable[[Attempt], Future[Outcome]],
    lost: tuple[type[BaseException], ...],
    on_done: OnDone,
    tick: Tick | None = None,
) -> None:
    """Keep ``width`` attempts under way until all are done.

    Parameters
    ----------
    todo, work, on_done, tick
        As for an engine.
    width : int
        Attempts at a time; no more are handed to the workers, so those that were handed over are under way.
    submit : callable
        Hands an attempt to a worker.
    lost : tuple of exception types
        What a future raises if its worker died.
    """
    waiting, suspects = deque(todo), deque[Attempt]()
    crashes = Crashes(work)
    under_way: dict[Future[Outcome], Attempt] = {}

    def hand_over(attempt: Attempt) -> None:
        under_way[submit(attempt)] = attempt

    def fill() -> None:
        while waiting and len(under_way) < width:
            hand_over(waiting.popleft())
        if suspects and not under_way:
            hand_over(suspects.popleft())

    fill()
    while under_way:
        done, _ = wait(under_way, timeout=_TICK, return_when=FIRST_COMPLETED)
        ended: list[tuple[Attempt, Outcome]] = []
        for future in done:
            attempt = under_way.pop(future)
            try:
                outcome: Outcome | None = future.result()
                crashes.progress()
            except lost as error:
                outcome = crashes.add(attempt, error)
            if outcome is not None and outcome.kind != "stopped":
                ended.append((attempt, outcome))
            elif crashes.is_suspect(attempt):
                suspects.append(attempt)
            else:
                waiting.appendleft(attempt)
        fill()  # before the records are written, so that no worker waits for the disk
        for attempt, outcome in ended:
            again = on_done(attempt, outcome)
            if again is not None:
                waiting.append(again)
        fill()
        if tick is not None:
            tick()
