"""What the processes of a run exchange when several devices train together.

A discrepancy is no mean over samples, so averaging the losses of parts would give another loss. Hence the features of
all parts are put together, with their gradients, and every process computes the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from vardass.errors import InputError
from vardass.processes import gather_rows

__all__ = ["Processes", "synchronised_statistics"]

Module = TypeVar("Module", bound=nn.Module)


class Processes:
    """The present process among those that train together; all must call the methods in the same order.

    Parameters
    ----------
    rank, count : int
        Number of this process, and of all; by default it is alone, and nothing is exchanged.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @property
    def leads(self) -> bool:
        """Whether this process refreshes, evaluates and writes for all."""
        return self.rank == 0

    def part(self, rows: int) -> slice:
        """Rows of a batch that are this process's."""
        if rows % self.count:
            raise InputError(
                f"a batch of {rows} samples cannot be shared evenly by {self.count} processes; use a batch_size and "
                f"target_batch_size that {self.count} divides"
            )
        each = rows // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def whole(self, local: Tensor) -> Tensor:
        """Rows (b, ...) of all processes, put together in the order of the batch: (count b, ...); see `gather_rows`."""
        if self.count == 1:
            return local
        return gather_rows(local)

    def same(self, value: Any) -> Any:
        """The value that the leading process has."""
        if self.count == 1:
            return value
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give all processes the mean of their gradients."""
        if self.count > 1:
            self._average([parameter.grad for parameter in parameters if parameter.grad is not None])

    def average_statistics(self, module: nn.Module) -> None:
        """Give all processes the mean of the running statistics of their BatchNorm layers."""
        if self.count > 1:
            layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.training]
            found = [statistic for layer in layers for statistic in (layer.running_mean, layer.running_var)]
            self._average([statistic for statistic in found if statistic is not None])

    def _average(self, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        with torch.no_grad():
            flat = torch.cat([tensor.flatten().float() for tensor in tensors])  # one exchange for all
            dist.all_reduce(flat)
            flat /= self.count
            for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors])):
                tensor.copy_(mean.view_as(tensor))


def synchronised_statistics(algorithm: Module, device: torch.device) -> Module:
    """Let BatchNorm see the whole batch where torch can (on GPUs); elsewhere each process normalises its own part."""
    if device.type != "cuda":
        return algorithm
    converted: Module = nn.SyncBatchNorm.convert_sync_batchnorm(algorithm)  # type: ignore[no-untyped-call]
    return converted
