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

_SHARED = Path("/dev/shm")


class FileDataset(Dataset[Tensor]):
    """Files, each decoded when its item is asked for; after `keep`, once by whichever worker meets it first.

    Subclasses say how a file is decoded, and may keep it in another form than they give it.
    """

    def __init__(self, paths: Sequence[PathLike], what: str) -> None:
        if isinstance(paths, str) or not isinstance(paths, Sequence):
            raise InputError(f"paths of {what} files must be a list, got {paths!r}; put a single one into a list")
        if not len(paths):
            raise InputError(f"0 {what} files were given; give at least one")
        self.paths = [str(path) for path in paths]
        self._kept: tuple[Tensor, Tensor] | None = None  # decoded files, and which of them are there

    def keep(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make room for all decoded files in memory that the workers share."""
        n = len(self)
        need = n * dtype.itemsize * math.prod(shape)
        free = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None
        if free is not None and need + n > free:  # writing beyond it would end the process with a bus error
            raise InputError(
                f"a cache of {n} samples needs {need / 1e9:.2f} GB of shared memory, {free / 1e9:.2f} GB are free; "
                "leave cache off, make the samples smaller, or enlarge /dev/shm"
            )
        self._kept = torch.empty((n, *shape), dtype=dtype), torch.zeros(n, dtype=torch.bool)
        for tensor in self._kept:
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        index = range(len(self))[int(index)]
        if self._kept is None:
            return self.present(self.decode(index))
        values, filled = self._kept
        if not bool(filled[index]):  # no lock: two workers that meet one file write equal values, and then the flag
            values[index] = self.decode(index)
            filled[index] = True
        return self.present(values[index].clone())

    def decode(self, index: int) -> Tensor:
        """The content of one file in the form that is kept."""
        raise NotImplementedError

    def present(self, value: Tensor) -> Tensor:
        """The item of a decoded file."""
        return value
