"""Batches of one row from each stratum of many files, drawn so that they read few row groups.

Rows drawn independently are in as many row groups as there are strata, and a row group has to be read as a whole. Here
c cursors go through the row groups, each in a random order of its own. A cursor is a number x that begins uniform in
[0, 1) and grows by k / (c n) with each batch. Batch t takes the row of stratum h from cursor (σ_h + t) mod c, with σ a
random permutation: of the rows of the stratum, in the order of that cursor's row groups, the one at place ⌊x |S_h|⌋.

At each batch x mod 1 is uniform, so each row of S_h is drawn with probability 1 / |S_h|, in any order and wherever the
rows are: a batch weighted by |S_h| / n is unbiased for the mean of all rows. Cursors, and so rows from different ones,
are independent. With c = k no two strata share a cursor, and a batch is distributed as one of `StratifiedBatchSampler`.
With fewer cursors strata that share one take rows that are near one another in the files, so that their sum varies more
if files are sorted. In an epoch a stratum of average size meets each of its rows about once, and the cursors together
read each row group about once. Starts and orders are new in each epoch, and in an endless stream after c epochs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vardass.errors import InputError
from vardass.processes import process_group
from vardass.samplers.base import Chunk, MinibatchSampler, StreamOptions, derive_seed
from vardass.shards.files import ShardDataset
from vardass.shards.stratification import ShardStrata
from vardass.validate import check_count, check_state

__all__ = ["ShardBatchSampler", "ShardBatches"]

_DRAWS = 16384  # made at a time


class _StratumIndex(NamedTuple):
    """Where the rows of each stratum are. It takes four bytes for each row."""

    starts: Tensor  # (g + 1,): first row of each row group, counted through all files
    counts: Tensor  # (k, g): rows of each stratum in each row group
    first: Tensor  # (k, g): rows of the strata before it in the row group
    rows: Tensor  # (n,), int32: rows within each row group, those of stratum 0 first


def _index_of(strata: ShardStrata) -> _StratumIndex:
    """Read the labels, a file at a time."""
    starts = ShardDataset(strata.files).starts
    if starts[-1] != strata.n:
        raise InputError(
            f"the files have {starts[-1]:,} rows, their strata in {strata.folder} are of {strata.n:,}; make the strata "
            "again"
        )
    rows = torch.empty(strata.n, dtype=torch.int32)
    counts = torch.zeros(strata.k, len(starts) - 1, dtype=torch.int64)
    begin = group = 0
    for labels in strata.labels_by_file():
        while group < len(starts) - 1 and starts[group + 1] <= begin + len(labels):
            here = slice(starts[group], starts[group + 1])
            mine = labels[here.start - begin : here.stop - begin]
            rows[here] = torch.from_numpy(np.argsort(mine, kind="stable").astype(np.int32))
            counts[:, group] = torch.from_numpy(np.bincount(mine, minlength=strata.k))
            group += 1
        begin += len(labels)
    return _StratumIndex(torch.from_numpy(starts), counts, counts.cumsum(0) - counts, rows)


class ShardBatchSampler(MinibatchSampler):
    """Batches of one row from each stratum of many files, whose rows are in few row groups.

    Weights |S_h| / n are exact, as in `StratifiedBatchSampler`; see the module for how rows are drawn. For a
    ``DataLoader`` over `ShardDataset`, or better, as it reads ahead, for `ShardBatches`.

    Parameters
    ----------
    strata : ShardStrata
        From `stratify_shards`; a batch has one row of each.
    cursors : int
        Number of places in the files to read rows from. More cursors make the rows of a batch less dependent if
        files are sorted, but read more row groups; with one per stratum, rows are independent.
    **options
        ``seed``, ``batches``, ``endless``, ``num_replicas`` and ``rank``, see `MinibatchSampler`.
    """

    needs_features = False

    def __init__(self, strata: ShardStrata, *, cursors: int = 8, **options: Unpack[StreamOptions]) -> None:
        super().__init__(strata.n, strata.k, **options)
        self.cursors = min(check_count(cursors, "cursors"), strata.k)
        self.index = _index_of(strata)
        self.sizes = self.index.counts.sum(1)

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        count = max(1, _DRAWS // self.batch_size) * self.num_replicas
        step = rounds * self.num_replicas + torch.arange(count)
        length = self.cursors * -(-self.n // self.batch_size)  # batches in which a cursor meets all row groups
        rows = []
        for era in sorted(set((step // length).tolist())):
            own = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch, era))
            begin = torch.rand(self.cursors, dtype=torch.float64, generator=own)
            rows.append(self._draw(step[step // length == era] % length, begin, own))
        return self._weighted(torch.cat(rows))

    def _sample_chunk(self, generator: torch.Generator) -> Chunk:
        begin = torch.rand(self.cursors, dtype=torch.float64, generator=generator)
        step = torch.randint(self.n, (max(1, _DRAWS // self.batch_size),), generator=generator)
        return self._weighted(self._draw(step, begin, generator))

    def _weighted(self, rows: Tensor) -> Chunk:
        return Chunk(rows, self.sizes.double() / self.n)

    def _draw(self, step: Tensor, begin: Tensor, generator: torch.Generator) -> Tensor:
        """Rows (m, k) of batches ``step`` (m,), with cursors that began at ``begin`` (c,) and go by random orders."""
        rows = torch.empty(len(step), self.batch_size, dtype=torch.int64)
        turn = torch.randperm(self.batch_size, generator=generator)
        cursor_of = (turn + step[:, None]) % self.cursors
        for cursor in range(self.cursors):
            share = (begin[cursor] + step * (self.batch_size / (self.cursors * self.n))) % 1.0
            batch, stratum = (cursor_of == cursor).nonzero(as_tuple=True)
            rows[batch, stratum] = self._at(stratum, share[batch], generator)
        return rows

    def _at(self, stratum: Tensor, share: Tensor, generator: torch.Generator) -> Tensor:
        """Rows of strata at a share of the way through the row groups, in a random order of these."""
        k, groups = self.index.counts.shape
        order = torch.randperm(groups, generator=generator)
        shift = torch.rand(k, dtype=torch.float64, generator=generator)  # strata begin at different rows of a group
        passed = self.index.counts[:, order].cumsum(1)
        place = (share * self.sizes[stratum]).long().clamp_max_(self.sizes[stratum] - 1)
        # all strata in one search: those of stratum h are moved by h (n + 1)
        keys = (passed + torch.arange(k)[:, None] * (self.n + 1)).flatten()
        at = torch.searchsorted(keys, place + stratum * (self.n + 1), right=True) - stratum * groups
        group = order[at]
        size = self.index.counts[stratum, group]
        place = (place - passed[stratum, at] + size + (shift[stratum] * size).long()) % size
        start = self.index.starts[group]
        return start + self.index.rows[start + self.index.first[stratum, group] + place]

    def _settings(self) -> dict[str, Any]:
        strata = zlib.crc32(self.index.counts.numpy().tobytes())
        return {**super()._settings(), "strata": strata}  # a state of other strata is refused


class ShardBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of rows of many files with their weights, read some batches ahead, each row group once.

    For ``DataLoader(batches, batch_size=None, num_workers=...)``. Workers and ranks share out the batches of one
    stream, every one of them for one worker of one rank.

    Parameters
    ----------
    dataset : ShardDataset
        The rows.
    sampler : MinibatchSampler
        Draws batches of row numbers: `ShardBatchSampler`, or any other.
    ahead : int
        Batches whose rows are read together, and are in memory.
    num_replicas, rank : int, optional
        Ranks that share the stream, and which of them this is; by default those of the process group at this moment.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        sampler: MinibatchSampler,
        *,
        ahead: int = 64,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if sampler.n != len(dataset):
            raise InputError(
                f"the sampler draws from {sampler.n:,} rows, the files have {len(dataset):,}; make it of their strata"
            )
        group = process_group() or (1, 0)
        self.dataset = dataset
        self.sampler = sampler
        self.ahead = check_count(ahead, "ahead")
        self.num_replicas = check_count(group[0] if num_replicas is None else num_replicas, "num_replicas")
        self.rank = check_count(group[1] if rank is None else rank, "rank", low=0, high=self.num_replicas - 1)
        self._restored: dict[str, Any] | None = None
        self._block: dict[str, Any] | None = None  # state of the sampler before the batches that were read together
        self._given = 0  # of these

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch next; workers that are restarted for each epoch cannot count epochs."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        self.sampler.shard(self.num_replicas * workers, self.rank * workers + worker)
        skip = 0
        if self._restored is not None:
            if self._restored["block"] is not None:
                self.sampler.load_state_dict(self._restored["block"])
            skip, self._restored = self._restored["given"], None
        indices = iter(self.sampler)
        while True:
            self._block, self._given = self.sampler.state_dict(), 0
            block = list(islice(indices, self.ahead))
            if not block:
                return
            rows = self.dataset.rows([index for batch in block for index in batch])
            for batch, x in zip(block, rows.split([len(batch) for batch in block])):  # type: ignore[no-untyped-call]
                self._given += 1
                if self._given > skip:
                    weights = batch.weights or [1.0 / len(batch)] * len(batch)
                    # a copy: a worker would send the whole tensor that x is a part of
                    yield x.clone(), torch.tensor(weights, dtype=torch.float32)
            skip = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, for torchdata's StatefulDataLoader, which asks each worker."""
        return self._restored or {"block": self._block, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the last batch returned when ``state`` was taken; needs as many workers and ranks."""
        check_state(state, self)
        self._restored = dict(state)
