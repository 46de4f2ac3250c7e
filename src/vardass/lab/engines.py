"""Where the runs of a sweep are done: on this machine, or on a Ray cluster.

An engine is a function ``run_all(todo, work, *, jobs, on_done, tick)``. It does each `Attempt` in its own folder of
``work``, ``jobs`` at a time, and calls ``on_done`` with its `AttemptResult`, which may return a further attempt. A run
whose worker died resumes from its checkpoint and has not failed, up to the limits of `Crashes`.
"""

from __future__ import annotations

import errno
import faulthandler
import multiprocessing
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from vardass.adapt.run_folder import CHECKPOINT_FILE
from vardass.errors import VardassError
from vardass.lab.record import Record, RunSpec
from vardass.lab.store import read_progress
from vardass.processes import begin_worker, count_workers, one_thread_each, quiet_workers, ray_session
from vardass.registry import Registry

__all__ = ["ENGINES", "Attempt", "AttemptResult", "Crashes", "attempt_run", "drive"]

_TICK = 1.0  # seconds between looks at the time while nothing ends
_FULL = (errno.ENOSPC, errno.EDQUOT)
_RAY_RETRIES = 3  # of a task whose worker or node died, by Ray itself
_PATIENCE = 20.0  # seconds for runs on Ray to finish their step and write a checkpoint when the sweep stops


class Attempt(NamedTuple):
    """A run to do, one more than how often it failed, and the seconds that it took until then."""

    spec: RunSpec
    number: int = 1
    wall: float = 0.0


class AttemptResult(NamedTuple):
    """How an attempt ended, and the seconds of the run until now.

    ``"finished"`` has a record, ``"failed"`` and ``"disk-full"`` a message, ``"stopped"`` a checkpoint to resume from.
    """

    kind: str
    record: Record | None = None
    message: str = ""
    wall: float = 0.0


OnDone: TypeAlias = Callable[[Attempt, AttemptResult], "Attempt | None"]
Tick: TypeAlias = Callable[[], None]


def attempt_run(attempt: Attempt, folder: Path, *, stop: Callable[[], bool] | None = None) -> AttemptResult:
    """Do a run in this process; whatever goes wrong is an outcome, not an exception."""
    # only workers need what a run needs
    from vardass.lab.run import Stopped, execute

    started = time.perf_counter()
    try:
        record = execute(attempt.spec, folder, attempt=attempt.number, wall_before=attempt.wall, stop=stop)
        return AttemptResult("finished", record, wall=record.wall)
    except (Stopped, KeyboardInterrupt):
        return AttemptResult("stopped")
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        wall = max(_noted_wall(folder, 0.0), attempt.wall + time.perf_counter() - started)
        return AttemptResult("disk-full" if _is_full(error) else "failed", message=message, wall=wall)


def _noted_wall(folder: Path, otherwise: float) -> float:
    noted = read_progress(folder)
    return otherwise if noted is None else noted.wall


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


class Crashes:
    """Counts the crashes of workers for each run that was under way.

    Any of these runs may have killed the worker. A run with `LIMIT` crashes since its last checkpoint therefore waits
    until all others are done and then runs alone; after `LIMIT` more it has failed. If `HOPELESS` runs in a row are
    lost without a result or a checkpoint, the sweep stops.
    """

    LIMIT = 3
    HOPELESS = 50

    def __init__(self, work: Path) -> None:
        self.work = work
        self._counts: Counter[str] = Counter()
        self._marks: dict[str, int | None] = {}
        self.fruitless = 0  # lost runs since one ended or wrote a checkpoint

    def is_suspect(self, attempt: Attempt) -> bool:
        """Whether the run must run alone."""
        return self._counts[attempt.spec.run_id] >= self.LIMIT

    def add(self, attempt: Attempt, cause: BaseException) -> AttemptResult | None:
        """Count a crash; return the failure if it is one too many."""
        name = attempt.spec.run_id
        checkpoint = self.work / name / CHECKPOINT_FILE
        mark = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
        if mark != self._marks.get(name):
            self._counts[name] = self.fruitless = 0
        self._marks[name] = mark
        self._counts[name] += 1
        self.fruitless += 1
        if self.fruitless >= self.HOPELESS:
            raise VardassError(
                f"workers died {self.fruitless} times and nothing was done in between ({cause}); see the logs in "
                f"{self.work}, check memory use, use fewer --jobs, and start the sweep again to resume"
            )
        if self._counts[name] < 2 * self.LIMIT:
            return None
        message = (
            f"its worker died {self._counts[name]} times without a new checkpoint, the last times with no other run "
            "beside it; out of memory?"
        )
        self._counts[name] = 0
        return AttemptResult("failed", message=message, wall=_noted_wall(self.work / name, attempt.wall))


def drive(
    todo: Sequence[Attempt],
    work: Path,
    *,
    width: int,
    submit: Callable[[Attempt], Future[AttemptResult]],
    lost: tuple[type[BaseException], ...],
    on_done: OnDone,
    tick: Tick,
) -> None:
    """Keep ``width`` attempts under way until all are done; ``lost`` is what a future raises if its worker died."""
    waiting, suspects = deque(todo), deque[Attempt]()
    crashes = Crashes(work)
    under_way: dict[Future[AttemptResult], Attempt] = {}

    def fill() -> None:
        while (waiting and len(under_way) < width) or (suspects and not under_way):
            attempt = waiting.popleft() if waiting else suspects.popleft()
            under_way[submit(attempt)] = attempt

    fill()
    while under_way:
        done, _ = wait(under_way, timeout=_TICK, return_when=FIRST_COMPLETED)
        ended: list[tuple[Attempt, AttemptResult]] = []
        for future in done:
            attempt = under_way.pop(future)
            try:
                outcome: AttemptResult | None = future.result()
                crashes.fruitless = 0
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
        tick()


# --- processes of this machine ---

_should_stop: list[Callable[[], bool]] = []  # of a worker, filled once when it begins


def _run_local(todo: Sequence[Attempt], work: Path, *, jobs: int | None, on_done: OnDone, tick: Tick) -> None:
    """Do all runs in ``jobs`` processes with one thread each; default: as many as there are CPUs.

    A single job has a process of its own too, so that a crash ends the run and not the sweep. Workers exit with their
    parent. Ctrl-C lets each run finish its step and write a checkpoint; a second one kills the workers. Workers are
    spawned, hence a script that calls this needs ``if __name__ == "__main__":``.
    """
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    stop = context.RawValue("b", 0)  # without a lock, which a killed worker might keep for ever
    size = min(count_workers(jobs), max(len(todo), 1))

    def new_pool() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(size, mp_context=context, initializer=_begin_local, initargs=(stop,))

    with one_thread_each():
        pool = new_pool()

        def submit(attempt: Attempt) -> Future[AttemptResult]:
            nonlocal pool
            folder = work / attempt.spec.run_id
            with quiet_workers():
                try:
                    return pool.submit(_attempt_local, attempt, folder)
                except BrokenProcessPool:  # a worker has died: new ones for all
                    pool.shutdown(wait=True)
                    pool = new_pool()
                    return pool.submit(_attempt_local, attempt, folder)

        try:
            drive(todo, work, width=size, submit=submit, lost=(BrokenProcessPool,), on_done=on_done, tick=tick)
        finally:
            stop.value = 1  # runs under way stop at their next step
            try:
                pool.shutdown(wait=True, cancel_futures=True)
            except KeyboardInterrupt:
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()
                raise


def _begin_local(stop: Any) -> None:
    """Prepare a worker."""
    begin_worker()
    faulthandler.enable()  # to the run's log, as that is where stderr goes
    _should_stop.append(lambda: bool(stop.value))


def _attempt_local(attempt: Attempt, folder: Path) -> AttemptResult:
    return attempt_run(attempt, folder, stop=_should_stop[0])


# --- Ray ---


def _run_on_ray(todo: Sequence[Attempt], work: Path, *, jobs: int | None, on_done: OnDone, tick: Tick) -> None:
    """Do all runs as tasks of one CPU each, at most ``jobs`` at a time; default: as many as Ray has CPUs.

    They run on the cluster at ``RAY_ADDRESS``, else on a local Ray. Where there are GPUs, each run that does not ask
    for the CPU gets one. Each node needs vardass and the data, at the same path. Without a shared file system, a run
    whose worker died starts from the beginning, and of a failed run only the message is kept.
    """
    with ray_session(jobs) as ray:
        resources = ray.cluster_resources()
        remote = ray.remote(max_retries=_RAY_RETRIES)(_attempt_on_ray)
        under_way: dict[Future[AttemptResult], Any] = {}

        def submit(attempt: Attempt) -> Future[AttemptResult]:
            gpus = 1 if resources.get("GPU", 0) and attempt.spec.config.get("device", "auto") != "cpu" else 0
            task = remote.options(num_cpus=1, num_gpus=gpus).remote(attempt, str(work.absolute()))
            future: Future[AttemptResult] = task.future()
            under_way[future] = task
            future.add_done_callback(lambda done: under_way.pop(done, None))
            return future

        there = max(1, int(resources.get("CPU", 1)))
        width, lost = min(jobs or there, there), (ray.exceptions.RayError,)
        try:
            drive(todo, work, width=width, submit=submit, lost=lost, on_done=on_done, tick=tick)
        finally:
            unfinished = dict(under_way)
            for task in unfinished.values():
                ray.cancel(task)  # as Ctrl-C would, so that the run writes a checkpoint
            wait(unfinished, timeout=_PATIENCE)


def _attempt_on_ray(attempt: Attempt, work: str) -> AttemptResult:
    import torch

    torch.set_num_threads(1)
    shared = Path(work)
    if shared.is_dir():
        return attempt_run(attempt, shared / attempt.spec.run_id)
    with tempfile.TemporaryDirectory(prefix="vardass-run-") as folder:
        return attempt_run(attempt, Path(folder) / attempt.spec.run_id)


ENGINES: Registry[Callable[..., None]] = Registry("engine", {"local": _run_local, "ray": _run_on_ray})
