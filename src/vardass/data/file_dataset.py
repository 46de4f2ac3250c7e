"""Files that become tensors when they are asked for, and stay decoded in shared memory if wanted."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vardass.errors import InputError
from vardass.files import PathLike

__all__ = ["FileDataset", "SharedCache"]

_SHARED = Path("/dev/shm")


class SharedCache:
    """Room for ``n`` tensors of one shape, filled one by one, in memory that the workers share.

    No lock is needed: two workers that meet one sample write equal values, and its flag is set after them.
    """

    def __init__(self, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        need = n * dtype.itemsize * math.prod(shape)
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


class FileDataset(Dataset[Tensor]):
    """Files, each decoded when its item is asked for; with a cache, once by whichever worker meets it first.

    Subclasses say how a file is decoded, and may keep it in another form than they give it.
    """

    def __init__(self, paths: Sequence[PathLike], what: str) -> None:
        if isinstance(paths, str) or not isinstance(paths, Sequence):
            raise InputError(f"paths of {what} files must be a list, got {paths!r}; put a single one into a list")
        if not len(paths):
            raise InputError(f"0 {what} files were given; give at least one")
        self.paths = [str(path) for path in paths]
        self.cache: SharedCache | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        index = range(len(self))[int(index)]
        value = None if self.cache is None else self.cache.get(index)
        if value is None:
            value = self.decode(index)
            if self.cache is not None:
                self.cache.put(index, value)
        return self.present(value)

    def decode(self, index: int) -> Tensor:
        """The content of one file in the form that the cache keeps."""
        raise NotImplementedError

    def present(self, value: Tensor) -> Tensor:
        """The item of a decoded file."""
        return value


def _shared(tensor: Tensor) -> Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
