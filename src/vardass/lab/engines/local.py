"""Runs in processes of this machine."""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from vardass.lab.engines import Attempt, OnDone, Outcome, Tick, attempt_run, drive
from vardass.processes import begin_worker, count_cpus, one_thread_each

__all__ = ["run_all"]

_should_stop: list[Callable[[], bool]] = []  # of a worker, filled once when it begins


def run_all(
    todo: Sequence[Attempt], work: Path, *, jobs: int | None, on_done: OnDone, tick: Tick | None = None
) -> None:
    """Do all runs in ``jobs`` processes with one thread each; default: as many as there are CPUs.

    The processes stay for many runs, so that torch is imported once. A single job has a process of its own too: a
    crash of native code or a lack of memory then takes the run, not the sweep. Workers exit when their parent is
    gone. Ctrl-C lets each run finish its step and write a checkpoint; a second one kills the workers.

    Workers are started afresh, hence a script that calls this needs ``if __name__ == "__main__":``.
    """
    before = set(multiprocessing.active_children())
    with one_thread_each():
        pools = _Pools(min(jobs or count_cpus(), max(len(todo), 1)), work)
        try:
            drive(
                todo,
                work,
                width=pools.size,
                submit=pools.submit,
                lost=(BrokenProcessPool,),
                on_done=on_done,
                tick=tick,
            )
        finally:
            try:
                pools.close()
            except KeyboardInterrupt:
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()
                raise


class _Pools:
    """A pool of workers, replaced by a new one when a worker has died."""

    def __init__(self, size: int, work: Path) -> None:
        self.size = size
        self.work = work
        self._context = multiprocessing.get_context("spawn")
        # without a lock, which a killed worker might keep for ever
        self._stop = self._context.RawValue("b", 0)
        self._pool = self._make()

    def _make(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.size, mp_context=self._context, initializer=_begin, initargs=(self._stop,))

    def submit(self, attempt: Attempt) -> Future[Outcome]:
        """Hand an attempt to a worker."""
        folder = self.work / attempt.spec.run_id
        try:
            return self._pool.submit(_attempt, attempt, folder)
        except BrokenProcessPool:
            self._pool.shutdown(wait=True)
            self._pool = self._make()
            return self._pool.submit(_attempt, attempt, folder)

    def close(self) -> None:
        """Let runs under way stop at their next step, and end the workers."""
        self._stop.value = 1
        self._pool.shutdown(wait=True, cancel_futures=True)


def _begin(stop: Any) -> None:
    """Prepare a worker."""
    begin_worker()
    faulthandler.enable()  # to the run's log, as that is where stderr goes
    _should_stop.append(lambda: bool(stop.value))


def _attempt(attempt: Attempt, folder: Path) -> Outcome:
    return attempt_run(attempt, folder, stop=_should_stop[0])
