"""One function applied to many parts, by processes of this machine or by Ray."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from vardass.backend import one_thread
from vardass.errors import VardassError
from vardass.processes import begin_worker, count_cpus, one_thread_each, ray_session
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

    ``function`` is one that workers can import; ``shared`` is sent to each of them once. By default there are as many
    as CPUs; a single local worker is this process itself.
    """
    if choose(engine, "engine", ENGINES) == "ray":
        yield from _by_ray(function, shared, parts, workers)
    elif min(workers or count_cpus(), len(parts)) <= 1:
        with one_thread():
            for i, part in enumerate(parts):
                yield i, function(shared, part)
    else:
        yield from _by_processes(function, shared, parts, min(workers or count_cpus(), len(parts)))


def _by_processes(
    function: Callable[[Any, Part], Result], shared: Any, parts: Sequence[Part], workers: int
) -> Iterator[tuple[int, Result]]:
    with one_thread_each():
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(shared,))
        try:
            tasks = {pool.submit(_apply, function, part): i for i, part in enumerate(parts)}
            for task in as_completed(tasks):
                yield tasks[task], task.result()
        except BrokenProcessPool:
            raise _died(workers) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _died(workers: int) -> VardassError:
    return VardassError(
        f"one of {workers} workers died, perhaps for lack of memory; start again to go on, with fewer --workers"
    )


def _begin(shared: Any) -> None:
    begin_worker()
    _shared.append(shared)


def _apply(function: Callable[[Any, Part], Result], part: Part) -> Result:
    return function(_shared[0], part)


def _by_ray(
    function: Callable[[Any, Part], Result], shared: Any, parts: Sequence[Part], workers: int | None
) -> Iterator[tuple[int, Result]]:
    with ray_session(workers) as ray:
        width = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        task = ray.remote(num_cpus=1)(_apply_alone)
        sent = ray.put(shared)
        waiting = iter(enumerate(parts))
        under_way: dict[Any, int] = {}
        try:
            while True:
                while len(under_way) < width and (following := next(waiting, None)) is not None:
                    under_way[task.remote(function, sent, following[1])] = following[0]
                if not under_way:
                    return
                done, _ = ray.wait(list(under_way), num_returns=1)
                yield under_way.pop(done[0]), ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.WorkerCrashedError:
            raise _died(width) from None
        finally:
            for left in under_way:
                ray.cancel(left)


def _apply_alone(function: Callable[[Any, Part], Result], shared: Any, part: Part) -> Result:
    torch.set_num_threads(1)
    return function(shared, part)
