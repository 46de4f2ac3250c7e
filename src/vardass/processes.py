"""Processes: the group of ``torch.distributed``, and workers that are started for one job, here or by Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from vardass.errors import InputError

__all__ = ["begin_worker", "count_cpus", "from_first_process", "one_thread_each", "process_group", "ray_session"]

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def process_group() -> tuple[int, int] | None:
    """Number of processes and rank of this one, or None without a process group of several."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    count = torch.distributed.get_world_size()
    return None if count == 1 else (count, torch.distributed.get_rank())


def from_first_process(value: Any) -> Any:
    """What the first process calls this with, on all of them; every process of the group has to call it.

    Tensors in dictionaries, lists and tuples come to the device of each process that is of the same type.
    """
    first = torch.distributed.get_rank() == 0
    box = [_walk(value, Tensor, lambda tensor: _Sent(tensor.device.type, tensor.detach().cpu())) if first else None]
    torch.distributed.broadcast_object_list(box, src=0)
    return _walk(box[0], _Sent, lambda sent: sent.tensor.to(sent.device_type))


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


@contextmanager
def one_thread_each() -> Iterator[None]:
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
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError(
            "the engine 'ray' needs Ray, which is not installed: pip install 'vardass[ray]', or use --engine local"
        ) from None
    own = not ray.is_initialized()
    if own:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if os.environ.get("RAY_ADDRESS"):
            ray.init(address="auto", **quiet)
        else:
            ray.init(num_cpus=cpus or count_cpus(), include_dashboard=False, **quiet)
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()
