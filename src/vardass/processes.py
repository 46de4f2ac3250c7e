"""Processes: the group of ``torch.distributed``, and workers that are started for one job, here or by Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from vardass.errors import InputError, VardassError, needs_extra

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def process_group() -> tuple[int, int] | None:
    """Number of processes and rank of this one, or None without a process group of several."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    count = torch.distributed.get_world_size()
    return None if count == 1 else (count, torch.distributed.get_rank())


class _Gather(torch.autograd.Function):
    """All parts, one after the other; the gradient of a part is the sum of what all processes ask of it.

    As torch.distributed.nn.functional.all_gather, which torch 2.13 deprecates for a private function.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group, first = group, torch.distributed.get_rank(group) * len(local)
        ctx.place = slice(first, first + len(local))
        parts = [torch.empty_like(local) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, local, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total[ctx.place], None


def gather_rows(local: Tensor, group: Any = None) -> Tensor:
    """Rows (b, ...) of all processes, in the order of their ranks, with their gradient: (count b, ...).

    A discrepancy is not a mean over samples, so it must be computed on the whole batch. Every process computes the same
    loss of the gathered rows; where gradients are then averaged, as DDP and FSDP do, each parameter has the gradient of
    that loss. Weights have to be divided by the number of processes. ``local`` has the same shape on every process of
    ``group``, by default all.
    """
    # not every backend exchanges half precision
    sent = (local.float() if local.dtype in (torch.float16, torch.bfloat16) else local).contiguous()
    gathered: Tensor = _Gather.apply(sent, group)  # type: ignore[no-untyped-call]
    return gathered.to(local.dtype)


def is_first_process() -> bool:
    """Whether this is the first process of the process group."""
    return torch.distributed.get_rank() == 0


def from_first(make: Callable[[], Any]) -> Any:
    """What ``make`` returns on the first process, on all; it is called on that one only, and its errors raised on all.

    Every process of the process group has to call this. Tensors in dictionaries, lists and tuples arrive on the
    receiver's device of the same type.
    """
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    box = [_attempt(make) if rank == 0 else None]
    try:
        torch.distributed.broadcast_object_list(box, src=0)
    except RuntimeError as error:  # of torch.distributed: a connection was closed, or the timeout is over
        reason = str(error).strip().splitlines()[-1]
        raise VardassError(
            f"process {rank} of {count} waits for another one that has ended or is stuck ({reason}); look at the "
            "message of the one that ended first, then start all of them again"
        ) from None
    if isinstance(box[0], InputError) and rank:
        raise InputError(f"process 0 of {count}: {box[0]}") from None
    if isinstance(box[0], Exception):
        raise box[0]
    return _unpacked(box[0])


def _attempt(make: Callable[[], Any]) -> Any:
    try:
        return _packed(make())
    except Exception as error:  # the others wait for an answer
        return error


def _packed(value: Any) -> Any:
    return _walk(value, Tensor, lambda tensor: _Sent(tensor.device.type, tensor.detach().cpu()))


def _unpacked(value: Any) -> Any:
    return _walk(value, _Sent, lambda sent: sent.tensor.to(sent.device_type))


class _Sent(NamedTuple):
    device_type: str
    tensor: Tensor


def _walk(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """``value`` with each part of the given kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _walk(part, kind, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walk(part, kind, change) for part in value)
    return value


def count_cpus() -> int:
    """CPUs that this process may use, which on a shared machine can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_workers(asked: int | None) -> int:
    """Processes to start where ``asked`` are wanted, by default and at most one for each CPU: more are no faster."""
    return count_cpus() if asked is None else min(asked, count_cpus())


@contextmanager
def one_thread_each() -> Iterator[None]:
    """One thread for new processes: more would compete for the CPUs, and sums would depend on their number."""
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


@contextmanager
def quiet_workers() -> Iterator[None]:
    """Block Ctrl-C in processes that are started within: their parent handles it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its own start would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """``iter(loader)``, of a ``DataLoader`` with `quiet_workers`."""
    with quiet_workers() if getattr(loader, "num_workers", 0) else nullcontext():
        return iter(loader)


def begin_worker() -> None:
    """Prepare a new process: one thread, Ctrl-C left to the parent, and an end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextmanager
def ray_session(cpus: int | None) -> Iterator[Any]:
    """Ray, connected: to the cluster at ``RAY_ADDRESS``, or started here with ``cpus`` CPUs; one that runs is used."""
    with needs_extra("ray"):
        import ray
    own = not ray.is_initialized()
    if own:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if os.environ.get("RAY_ADDRESS"):
            ray.init(address="auto", **quiet)
        else:
            ray.init(num_cpus=count_workers(cpus), include_dashboard=False, **quiet)
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()
