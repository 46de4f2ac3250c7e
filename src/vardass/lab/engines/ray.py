"""Runs on a Ray cluster, or on this machine through Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from vardass.lab.engines import Attempt, OnDone, Outcome, Tick, attempt_run, drive
from vardass.processes import ray_session

__all__ = ["run_all"]

_RETRIES = 3  # of a task whose worker or node died, by Ray itself
_PATIENCE = 20.0  # seconds for runs to finish their step and write a checkpoint when the sweep stops


def run_all(
    todo: Sequence[Attempt], work: Path, *, jobs: int | None, on_done: OnDone, tick: Tick | None = None
) -> None:
    """Do all runs as tasks of one CPU each, at most ``jobs`` at a time; default: as many as Ray has CPUs.

    With ``RAY_ADDRESS`` in the environment they run on that cluster, else on a Ray of their own on this machine. Where
    there are GPUs, each run that does not ask for the CPU gets one.

    Records come back through Ray, so the nodes need not share a file system. Without a shared one, a run whose worker
    died starts from the beginning instead of from its checkpoint, and of a failed run only the message is kept, not
    the log. Each node needs vardass and the data, at the same path.
    """
    with ray_session(jobs) as ray:
        _run_all(ray, todo, work, jobs, on_done, tick)


def _run_all(
    ray: Any, todo: Sequence[Attempt], work: Path, jobs: int | None, on_done: OnDone, tick: Tick | None
) -> None:
    resources = ray.cluster_resources()
    width = jobs or max(1, int(resources.get("CPU", 1)))
    remote = ray.remote(max_retries=_RETRIES)(_attempt)
    under_way: dict[Future[Outcome], Any] = {}

    def submit(attempt: Attempt) -> Future[Outcome]:
        gpus = 1 if resources.get("GPU", 0) and attempt.spec.config.get("device", "auto") != "cpu" else 0
        task = remote.options(num_cpus=1, num_gpus=gpus).remote(attempt, str(work.absolute()))
        future: Future[Outcome] = task.future()
        under_way[future] = task
        future.add_done_callback(lambda done: under_way.pop(done, None))
        return future

    lost = (ray.exceptions.RayError,)
    try:
        drive(todo, work, width=width, submit=submit, lost=lost, on_done=on_done, tick=tick)
    finally:
        left = dict(under_way)
        for task in left.values():
            ray.cancel(task)  # as Ctrl-C would, so that the run writes a checkpoint
        wait(left, timeout=_PATIENCE)


def _attempt(attempt: Attempt, work: str) -> Outcome:
    import torch

    torch.set_num_threads(1)
    shared = Path(work)
    if shared.is_dir():
        return attempt_run(attempt, shared / attempt.spec.run_id)
    with tempfile.TemporaryDirectory(prefix="vardass-run-") as folder:
        return attempt_run(attempt, Path(folder) / attempt.spec.run_id)
