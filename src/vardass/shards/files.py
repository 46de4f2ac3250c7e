"""Files of features that together need not fit in memory, and the parts of them that are worked on at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from vardass.data.embedding_files import Columns, finite_rows, open_embeddings, read_groups
from vardass.errors import InputError
from vardass.files import PathLike, as_path
from vardass.shards.engines import each
from vardass.validate import Progress, as_features, as_tensor, check_count, shorten

__all__ = ["Part", "Shard", "ShardDataset", "ShardRows", "expand", "is_large", "located", "open_shards"]

_PART_ROWS = 2**18  # rows of a part: seconds of work, which is what a restart can lose


@dataclass(frozen=True)
class Shard:
    """One file as it was when it was opened."""

    path: Path  # absolute
    size: int  # bytes
    mtime_ns: int  # of the last change
    groups: tuple[int, ...]  # rows that are stored together

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.groups)

    def check(self) -> None:
        """Refuse a file that has changed since it was opened."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            remedy = "put it back, or start over without it (strata: in another --out)"
            raise InputError(f"{self.path} is gone; {remedy}") from None
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise InputError(
                f"{self.path} has changed since the start: it had {self.size:,} bytes, now {now.st_size:,}, or "
                "was written again; put the old file back, or start over (strata: in another --out)"
            )


@dataclass(frozen=True)
class Part:
    """Row groups of one file that are worked on together."""

    shard: Shard
    groups: range
    row: int  # the first one, in the file
    start: int  # the same, counted through all files
    rows: int


def expand(given: PathLike | Sequence[PathLike]) -> list[Path]:
    """Files that paths and patterns name, in the order given, those of a pattern sorted."""
    found: list[Path] = []
    for one in [given] if isinstance(given, str | os.PathLike) else given:
        path = as_path(one)
        if has_magic(str(path)) and not path.exists():
            matches = sorted(glob(str(path), recursive=True))
            if not matches:
                raise InputError(f"no file matches {path}; check the pattern, and quote it for the shell")
            found += map(Path, matches)
        else:
            found.append(path)
    seen: dict[object, Path] = {}
    for path in found:
        first = seen.setdefault(_identity(path), path)
        if first is not path:
            raise InputError(f"{first} is given twice, again as {path}; its rows would count double, leave one out")
    return found


def _identity(path: Path) -> object:
    """The same for all names of one file: with ``..``, by a link of either kind, in other case where that is one."""
    try:
        status = path.stat()
    except OSError:  # opening it will say what is wrong
        return path.absolute()
    return (status.st_dev, status.st_ino) if status.st_ino else path.resolve()


def located(path: Path) -> Path:
    """A file in its real folder, without ``..``; if it is a link itself, it keeps its own name."""
    return path.parent.resolve() / path.name


def is_large(path: Path) -> bool:
    """Whether a ``.npy`` or ``.parquet`` file is too large to be worked on as a whole.

    It is where its bytes are more than an eighth of the machine's memory: there will be features in float32, kernel
    features of up to 128 columns, and copies.
    """
    if path.suffix.lower() not in (".npy", ".parquet") or not path.is_file() or not hasattr(os, "sysconf"):
        return False
    return path.stat().st_size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


def open_shards(paths: Sequence[Path], columns: Columns | None = None, leave_out: Collection[str] = ()) -> list[Shard]:
    """Look at headers and footers of ``.npy`` and ``.parquet`` files."""
    shards = []
    first: tuple[Path, list[str]] | None = None
    for path in map(located, paths):
        with open_embeddings(path) as file:
            if not file.in_parts:
                raise InputError(f"{path} is {path.suffix}; only .npy and .parquet files are read in parts, convert it")
            groups, names = tuple(file.groups()), file.feature_names(columns, leave_out)
        now = path.stat()
        shards.append(Shard(path, now.st_size, now.st_mtime_ns, groups))
        if names is not None:
            first = first or (path, names)
            if names != first[1]:  # numbers of one column would be taken for those of another
                raise InputError(
                    f"{path} has the columns {shorten(names)}, {first[0]} has {shorten(first[1])}; list the "
                    "columns that all files have, in one order, with --columns, or leave the file out"
                )
    if not any(shard.rows for shard in shards):
        raise InputError(f"there are no rows in {len(shards)} files, the first is {paths[0]}; write them again")
    return shards


@dataclass(frozen=True)
class ShardRows:
    """The rows of some files, read part by part by workers; see `read_embeddings` and `stratify_shards`."""

    shards: list[Shard]
    columns: Columns | None
    leave_out: tuple[str, ...]
    engine: str
    workers: int | None

    @classmethod
    def of(
        cls, paths: Sequence[Path], columns: Columns | None, leave_out: Sequence[str], engine: str, workers: int | None
    ) -> ShardRows:
        """The rows of files that are opened now."""
        workers = None if workers is None else check_count(workers, "workers")
        return cls(open_shards(paths, columns, leave_out), columns, tuple(leave_out), engine, workers)

    @cached_property
    def parts(self) -> list[Part]:
        """All rows in their order, cut into parts of at most 2^18, or of one row group that is larger."""
        parts: list[Part] = []
        start = 0
        for shard in self.shards:
            first = row = rows = 0
            for group, size in enumerate(shard.groups):
                if rows and rows + size > _PART_ROWS:
                    parts.append(Part(shard, range(first, group), row, start, rows))
                    first, row, start, rows = group, row + rows, start + rows, 0
                rows += size
            if rows:
                parts.append(Part(shard, range(first, len(shard.groups)), row, start, rows))
                start += rows
        return parts

    @cached_property
    def n(self) -> int:
        """Number of rows."""
        return sum(shard.rows for shard in self.shards)

    def each(self, function: Callable[[Any, Any], Any], shared: Any, tasks: Sequence[Any]) -> Iterator[Any]:
        """Apply a function to tasks as `engines.each` does."""
        return each(function, shared, tasks, engine=self.engine, workers=self.workers)

    def locate(self, rows: NDArray[np.int64]) -> list[tuple[Path, int]]:
        """File of each row, and its number there."""
        starts = np.array([0, *accumulate(shard.rows for shard in self.shards)])
        files = np.searchsorted(starts, rows, side="right") - 1
        return [(self.shards[i].path, int(row - starts[i])) for i, row in zip(files, rows)]

    def read(self, rows: NDArray[np.int64], progress: Progress) -> Tensor:
        """Features of some rows, rising, counted through all files: float32 (m, d)."""
        tasks = []
        for part in self.parts:
            first, last = np.searchsorted(rows, (part.start, part.start + part.rows))
            if last > first:
                tasks.append((part, rows[first:last] - part.start))
        found: dict[int, Tensor] = {}
        for i, values in self.each(ShardRows.sample, self, tasks):
            found[i] = values
            progress(len(found) / len(tasks), f"reading a sample of {len(rows):,} rows of {self.n:,}")
        blocks = [found[i] for i in range(len(tasks))]
        for values, (part, _) in zip(blocks, tasks):
            _check_width(part, values.shape[1], blocks[0].shape[1])
        return torch.cat(blocks)

    def blocks(self, part: Part, width: int) -> Iterator[Tensor]:
        """Rows of a part as float32, in blocks (b, width) of at most 65,536; the file is checked before and after."""
        row = part.row
        for block in self._blocks(part):
            _check_width(part, block.shape[1], width)
            yield _finite(block, part.shard.path, range(row, row + len(block)))
            row += len(block)
        if row - part.row != part.rows:
            raise InputError(f"{part.shard.path} has other rows than its footer says; write it again")

    def sample(self, task: tuple[Part, NDArray[np.int64]]) -> Tensor:
        """Rows of a part by their number within it, rising: (m, d). Of an ``.npy`` file no other is read."""
        (part, rows), found, start = task, [], 0
        for block in self._blocks(part):
            first, last = np.searchsorted(rows, (start, start + len(block)))
            if last > first:
                picked = rows[first:last]
                found.append(_finite(block[picked - start], part.shard.path, part.row + picked))
            start += len(block)
        return torch.cat(found)

    def _blocks(self, part: Part) -> Iterator[NDArray[Any]]:
        part.shard.check()
        yield from read_groups(part.shard.path, part.groups, columns=self.columns, leave_out=self.leave_out)
        part.shard.check()  # what was read in between is of one version


def _check_width(part: Part, columns: int, width: int) -> None:
    if columns != width:
        raise InputError(
            f"{part.shard.path} has {columns} columns of features, the other files {width}; leave it out, or choose "
            "the columns that all files have with --columns"
        )


def _finite(block: NDArray[Any], path: Path, numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
    return finite_rows(as_features(block, "features", check_finite=False).float(), f"features of {path}", numbers)


class ShardDataset(Dataset[Tensor]):
    """The rows of ``.npy`` and ``.parquet`` files, numbered through all of them in their order.

    Rows of ``.npy`` files are memory-mapped. Of a Parquet file the whole row group has to be read, and the last few are
    kept: `ShardBatchSampler` draws batches that need few of them, and `ShardBatches` reads ahead. For batches of other
    samplers take ``.npy`` files.

    Parameters
    ----------
    paths : path, pattern or sequence of them
        As for `stratify_shards`; ``ShardStrata.files`` are those that strata were made of.
    columns : str or sequence, optional
        See `read_embeddings`.
    kept_groups : int
        Row groups that are kept in memory.

    Attributes
    ----------
    starts : ndarray of shape (groups + 1,)
        First row of each row group, counted through all files, and the number of rows.
    groups_read : int
        Row groups that were read so far.
    """

    def __init__(
        self, paths: PathLike | Sequence[PathLike], *, columns: Columns | None = None, kept_groups: int = 16
    ) -> None:
        self.shards: list[Shard] = open_shards(expand(paths), columns)
        self.columns = columns
        self.kept_groups = check_count(kept_groups, "kept_groups")
        self._groups = [(shard, group) for shard in self.shards for group in range(len(shard.groups))]
        self.starts = np.array([0, *accumulate(size for shard in self.shards for size in shard.groups)])
        self._kept: dict[int, NDArray[np.generic]] = {}  # the least recently used first
        self.groups_read = 0

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Tensor:
        return self.rows([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Rows (d,) in the order of ``indices``, for a DataLoader."""
        return list(self.rows(indices))

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Rows (m, d) in the order of ``indices``; each row group is read once."""
        rows = np.asarray(indices, dtype=np.int64)
        if len(rows) and not (-len(self) <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"row {rows.max() if rows.max() >= len(self) else rows.min()} of {len(self)} rows")
        rows = np.where(rows < 0, rows + len(self), rows)
        groups = np.searchsorted(self.starts, rows, side="right") - 1
        by_group = np.argsort(groups, kind="stable")
        found: Tensor | None = None
        for places in np.split(by_group, np.flatnonzero(np.diff(groups[by_group])) + 1):
            if len(places):
                group = int(groups[places[0]])
                values = as_tensor(self._group(group)[rows[places] - self.starts[group]], "features")
                if found is None:
                    found = values.new_empty(len(rows), values.shape[1])
                found[torch.from_numpy(places)] = values
        return torch.empty(0, 0) if found is None else found

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
            self.groups_read += 1
        self._kept[number] = values
        while len(self._kept) > self.kept_groups:
            del self._kept[next(iter(self._kept))]
        return values

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}}  # a worker of a DataLoader reads for itself
