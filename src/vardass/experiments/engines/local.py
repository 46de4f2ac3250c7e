"""Runs in processes of this machine."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from vardass.experiments.engines import Attempt, OnDone, Outcome, Tick, attempt_run, count_cpus, drive

__all__ = ["run_all"]

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
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
    with _one_thread_each():
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
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    torch.set_num_threads(1)
    faulthandler.enable()  # to the run's log, as that is where stderr goes
    _should_stop.append(lambda: bool(stop.value))
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _attempt(attempt: Attempt, folder: Path) -> Outcome:
    return attempt_run(attempt, folder, stop=_should_stop[0])


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let new processes use one thread: more would fight over the CPUs, and sums would depend on their number."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
