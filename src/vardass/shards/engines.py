"""One function applied to many parts, by processes of this machine or by Ray."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from vardass.backend import one_thread
from vardass.errors import VardassError
from vardass.processes import begin_worker, count_workers, one_thread_each, quiet_workers, ray_session
from vardass.validate import choose

__all__ = ["ENGINES", "each"]

ENGINES = ("local", "ray")

Part = TypeVar("Part")
Result = TypeVar("Result")
_shared: list[Any] = []  # of a worker, filled once when it begins


def each(
    function: Callable[[Any, Part], Result], shared: Any, parts: Sequence[Part], *, engine: str, workers: int | None
) -> Iterator[tuple[int, Result]]:
    """Yield ``(i, function(shared, parts[i]))`` as they are done, each computed by one thread.

    ``function`` is one that workers can import; ``shared`` is sent to each of them once. By default there is a worker
    for each CPU; a single local worker is this process itself.
    """
    if choose(engine, "engine", ENGINES) == "ray":
        with ray_session(workers) as ray:
            there = max(1, int(ray.cluster_resources().get("CPU", 1)))
            width = min(workers or there, there)
            task, sent = ray.remote(num_cpus=1)(_apply_alone), ray.put(shared)
            try:
                yield from _as_done(lambda part: task.remote(function, sent, part).future(), parts, width)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.WorkerCrashedError:
                raise _died(width) from None
        return
    width = min(count_workers(workers), len(parts))
    if width <= 1:
        with one_thread():
            for i, part in enumerate(parts):
                yield i, function(shared, part)
        return
    with one_thread_each():
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(width, mp_context=context, initializer=_begin, initargs=(shared,))

        def submit(part: Part) -> Future[Result]:
            with quiet_workers():
                return pool.submit(_apply, function, part)

        try:
            yield from _as_done(submit, parts, 2 * width)
        except BrokenProcessPool:
            raise _died(width) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _as_done(
    submit: Callable[[Part], Future[Result]], parts: Sequence[Part], most: int
) -> Iterator[tuple[int, Result]]:
    """Results as they come, with ``most`` parts handed over at a time."""
    waiting, under_way = iter(enumerate(parts)), dict[Future[Result], int]()
    while True:
        while len(under_way) < most and (following := next(waiting, None)) is not None:
            under_way[submit(following[1])] = following[0]
        if not under_way:
            return
        for done in wait(under_way, return_when=FIRST_COMPLETED).done:
            yield under_way.pop(done), done.result()


def _died(workers: int) -> VardassError:
    return VardassError(
        f"one of {workers} workers died, perhaps out of memory; start again to resume, with fewer --workers"
    )


def _begin(shared: Any) -> None:
    begin_worker()
    _shared.append(shared)


def _apply(function: Callable[[Any, Part], Result], part: Part) -> Result:
    return function(_shared[0], part)


def _apply_alone(function: Callable[[Any, Part], Result], shared: Any, part: Part) -> Result:
    torch.set_num_threads(1)
    return function(shared, part)
