"""The process group of ``torch.distributed``, where there is one of several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

__all__ = ["from_first_process", "process_group"]


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
