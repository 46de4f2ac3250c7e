"""Uniform batches: the usual ones, as a baseline with the same interface."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from vardass.samplers.base import Chunk, MinibatchSampler

__all__ = ["EpochSampler", "UniformBatchSampler"]

_DRAWS = 8192  # indices drawn at a time with replacement


class EpochSampler(MinibatchSampler):
    """Base of samplers whose epoch visits each sample once: one chunk is what is left of the epoch.

    Where batch_size does not divide n, a uniformly random remainder of each epoch is left out
    (``drop_last=True``) or comes as a last, smaller batch. Either way every sample is as likely as any other
    to be in any batch. Batches that num_replicas does not divide are left out at the end of the epoch.
    """

    def __init__(self, n: int, batch_size: int, *, drop_last: bool = True, **options: Any) -> None:
        self.drop_last = bool(drop_last)
        super().__init__(n, batch_size, **options)
        self._left: Tensor | None = None  # samples not yet visited when the present plan took over

    def _default_batches(self) -> int:
        full, rest = divmod(self.n, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def _new_epoch(self) -> None:
        self._left = None

    def _pool(self) -> Tensor:
        return torch.arange(self.n) if self._left is None else self._left

    def _before_refresh(self) -> None:
        """Only what this epoch has not visited is planned anew, so the epoch still visits each sample once."""
        if self._chunk is None:
            return
        visited = torch.zeros(self.n, dtype=torch.bool)
        done = (self.position - self._first) * self.num_replicas
        visited[self._chunk.rows[:done].flatten()] = True
        pool = self._pool()
        self._left = pool[~visited[pool]]

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        if rounds > 0:  # an endless stream goes round again
            self._left = None
        pool = self._pool()
        whole = len(pool) // self.batch_size * self.batch_size
        if whole < self.batch_size * self.num_replicas and self.endless:
            self._left, pool, whole = None, torch.arange(self.n), self.n // self.batch_size * self.batch_size
        pool = pool[torch.randperm(len(pool), generator=generator)]
        rest = None if self.drop_last or whole == len(pool) else pool[whole:]
        return Chunk(self._arrange(pool[:whole], generator), None, rest)

    def _arrange(self, pool: Tensor, generator: torch.Generator) -> Tensor:
        """Cut ``pool``, in random order and a multiple of batch_size long, into rows."""
        return pool.view(-1, self.batch_size)

    def _extra_state(self) -> dict[str, Any]:
        return {"left": self._left}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        self._left = state["left"]


class UniformBatchSampler(EpochSampler):
    """Uniform batches without weights.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`.
    replacement : bool
        Draw each batch anew from all samples, as DomainBed does, instead of visiting each sample once in an
        epoch.
    drop_last : bool
        Without replacement: leave out a random remainder, else make it a last, smaller batch.

    Examples
    --------
    >>> sampler = UniformBatchSampler(10, batch_size=5, seed=0)
    >>> sorted(index for batch in sampler for index in batch)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    needs_features: ClassVar[bool] = False

    def __init__(
        self, n: int, batch_size: int, *, replacement: bool = False, drop_last: bool = True, **options: Any
    ) -> None:
        self.replacement = bool(replacement)
        super().__init__(n, batch_size, drop_last=drop_last, **options)

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        if not self.replacement:
            return super()._make_chunk(rounds, generator)
        count = max(1, _DRAWS // self.batch_size) * self.num_replicas
        return Chunk(torch.randint(self.n, (count, self.batch_size), generator=generator))
