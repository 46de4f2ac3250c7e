"""Decoded samples kept in shared memory, so that each is decoded once by whichever worker meets it first."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from vardass.errors import InputError

__all__ = ["SharedCache"]

_SHARED = Path("/dev/shm")


class SharedCache:
    """Room for ``n`` tensors of one shape, filled one by one.

    No lock is needed: two workers that meet one sample write equal values, and its flag is set after them.
    """

    def __init__(self, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        need = n * dtype.itemsize
        for side in shape:
            need *= side
        free = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None
        if free is not None and need + n > free:  # writing beyond it would end the process with a bus error
            raise InputError(
                f"a cache of {n} samples needs {need / 1e9:.2f} GB of shared memory, {free / 1e9:.2f} GB are free; "
                "leave cache off, make the samples smaller, or enlarge /dev/shm"
            )
        self.values = _shared(torch.empty((n, *shape), dtype=dtype))
        self.filled = _shared(torch.zeros(n, dtype=torch.bool))

    def get(self, index: int) -> Tensor | None:
        """A copy of sample ``index``, or None if it was not put yet."""
        return self.values[index].clone() if bool(self.filled[index]) else None

    def put(self, index: int, value: Tensor) -> None:
        """Keep a copy of ``value``."""
        self.values[index] = value
        self.filled[index] = True


def _shared(tensor: Tensor) -> Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
