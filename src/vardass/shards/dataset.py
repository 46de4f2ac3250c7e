"""Rows of many files by one number, for the samplers and a DataLoader."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from vardass.data.embedding_files import Columns, read_groups
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.shards.files import Shard, expand, open_shards
from vardass.validate import as_tensor, check_count

__all__ = ["ShardDataset"]


class ShardDataset(Dataset[Tensor]):
    """The rows of ``.npy`` and ``.parquet`` files, numbered through all of them in their order.

    A row of an ``.npy`` file is read from where it is; the operating system keeps what was read. Of a Parquet file
    the whole row group has to be read, and the last few are kept. So for training in random order take ``.npy`` files,
    or write row groups of a few hundred rows.

    Parameters
    ----------
    paths : path, pattern or sequence of them
        As for `stratify_shards`; ``ShardStrata.files`` are those that strata were made of.
    columns : str or sequence, optional
        See `read_embeddings`.
    kept_groups : int
        Row groups that are kept in memory.

    Examples
    --------
    >>> import tempfile
    >>> from torch.utils.data import DataLoader
    >>> from vardass.samplers import StratifiedBatchSampler
    >>> from vardass.shards import stratify_shards
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i in range(3):
    ...         np.save(f"{folder}/{i}.npy", np.random.default_rng(i).normal(size=(200, 4)).astype(np.float32))
    ...     strata = stratify_shards(f"{folder}/*.npy", 8, out=f"{folder}/strata")
    ...     sampler = StratifiedBatchSampler(strata.n, strata.k)
    ...     sampler.use(strata.strata())
    ...     batch = next(iter(DataLoader(ShardDataset(strata.files), batch_sampler=sampler)))
    >>> batch.shape
    torch.Size([8, 4])
    """

    def __init__(
        self, paths: PathLike | Sequence[PathLike], *, columns: Columns | None = None, kept_groups: int = 16
    ) -> None:
        self.shards: list[Shard] = open_shards([path.absolute() for path in expand(paths)])
        self.columns = columns
        self.kept_groups = check_count(kept_groups, "kept_groups")
        self._groups = [(shard, group) for shard in self.shards for group in range(len(shard.groups))]
        self._starts = np.array([0, *accumulate(size for shard in self.shards for size in shard.groups)])
        self._kept: dict[int, NDArray[np.generic]] = {}  # the least recently used first

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Rows (d,) in the order of ``indices``, each row group read once."""
        rows = np.asarray(indices, dtype=np.int64)
        if len(rows) and not (-len(self) <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"row {rows.max() if rows.max() >= len(self) else rows.min()} of {len(self)} rows")
        rows = np.where(rows < 0, rows + len(self), rows)
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            values = as_tensor(self._group(group)[rows[places] - self._starts[group]], "features")
            for place, value in zip(places.tolist(), values):
                found[place] = value
        return found

    def _group(self, number: int) -> NDArray[np.generic]:
        """Rows of a group; of an ``.npy`` file they are mapped, not read."""
        values = self._kept.pop(number, None)
        if values is None:
            shard, group = self._groups[number]
            shard.check()
            blocks = list(read_groups(shard.path, range(group, group + 1), columns=self.columns))
            values = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
            if len(values) != shard.groups[group]:
                raise InputError(f"{shard.path} has other rows than its footer says; write it again")
        self._kept[number] = values
        while len(self._kept) > self.kept_groups:
            del self._kept[next(iter(self._kept))]
        return values

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}}  # a worker of a DataLoader reads for itself
