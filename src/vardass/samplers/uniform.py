"""Uniform batches: the usual ones, as a baseline with the same interface."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import KernelLike, as_kernel
from vardass.samplers.base import Chunk, MinibatchSampler, StreamOptions
from vardass.validate import ArrayLike, as_labels, check_tensor

__all__ = ["EpochSampler", "UniformBatchSampler"]

_DRAWS = 8192  # indices drawn at a time with replacement


class EpochSampler(MinibatchSampler):
    """Base of samplers whose epoch visits each sample once: a chunk is what is left of the epoch, or its beginning.

    Where batch_size does not divide n, a random remainder is left out (``drop_last=True``) or is a last, smaller batch.
    """

    _visits_once = True

    def __init__(self, n: int, batch_size: int, *, drop_last: bool = True, **options: Unpack[StreamOptions]) -> None:
        self.drop_last = bool(drop_last)
        super().__init__(n, batch_size, **options)
        self._left: Tensor | None = None  # samples not yet visited when the present chunk took over

    def _set_processes(self, num_replicas: int, rank: int) -> None:
        if self._visits_once and self._default_batches() < num_replicas <= self._total:
            raise InputError(
                f"n={self.n} samples make {self._default_batches()} batches of batch_size={self.batch_size}, too few "
                f"for num_replicas={num_replicas} processes; lower batch_size"
            )
        super()._set_processes(num_replicas, rank)

    def _default_batches(self) -> int:
        return self._batches_of(None)

    def _batches_of(self, left: Tensor | None) -> int:
        """Batches that visit the samples ``left``, or all, once."""
        full, rest = divmod(self.n if left is None else len(left), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def _new_epoch(self) -> None:
        self._left = None

    def _before_drop(self) -> None:
        """Plan next only what this epoch has not visited."""
        if self._chunk is None:
            return
        visited = torch.zeros(self.n, dtype=torch.bool)
        done = (self.position - self._first) * self.num_replicas
        visited[self._chunk.rows[:done].flatten()] = True
        if self._chunk.tail is not None and done > len(self._chunk.rows):
            visited[self._chunk.tail] = True
        pool = torch.arange(self.n) if self._left is None else self._left
        self._left = pool[~visited[pool]]

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        if rounds > 0:
            self._before_drop()
        # a stream longer than one visit of all samples goes round again
        if self._left is not None and self._batches_of(self._left) < self.num_replicas:
            self._left = None
        return self._plan(self._left, generator)

    def _sample_chunk(self, generator: torch.Generator) -> Chunk:
        chunk = self._plan(None, generator)
        rows, left = chunk.rows, torch.ones(self.n, dtype=torch.bool)
        while len(rows) < min(self.n // self.batch_size, self._batches_of(None)) and chunk.weights is None:
            left[rows.flatten()] = False
            rows = torch.cat([rows, self._plan(left.nonzero().flatten(), generator).rows])
        return chunk._replace(rows=rows)

    def _plan(self, left: Tensor | None, generator: torch.Generator) -> Chunk:
        """Batches of the samples ``left``, or of all; perhaps only some of them."""
        order = torch.randperm(self.n if left is None else len(left), generator=generator)
        pool = order if left is None else left[order]
        whole = len(pool) // self.batch_size * self.batch_size
        rows = self._arrange(pool[:whole], generator) if whole else pool[:0].view(0, self.batch_size)
        is_last = rows.numel() == whole
        tail = pool[whole:] if is_last and not self.drop_last and whole < len(pool) else None
        return Chunk(rows, None, tail)

    def _arrange(self, pool: Tensor, generator: torch.Generator) -> Tensor:
        """Cut ``pool``, in random order and a multiple of batch_size long, into rows, or make the first of them."""
        return pool.view(-1, self.batch_size)

    def _extra_state(self) -> dict[str, Any]:
        return {"left": self._left}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        left = state["left"]
        self._left = None if left is None else check_tensor(left, "left", (None,), low=0, high=self.n - 1)


class UniformBatchSampler(EpochSampler):
    """Uniform batches without weights.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`.
    kernel : Kernel, name or callable
        Ignored; accepted so that this sampler can replace any other.
    replacement : bool
        Draw each batch independently from all samples, as DomainBed does, instead of visiting each sample once per
        epoch.
    drop_last : bool
        Without replacement: drop a random remainder; False makes it a last, smaller batch.
    from_each : array of shape (n,), optional
        With replacement: group of each sample, such as its source domain. Batches have equally many samples of each
        group, without weights to correct for it, as in DomainBed.

    Examples
    --------
    >>> sampler = UniformBatchSampler(10, batch_size=5, seed=0)
    >>> sorted(index for batch in sampler for index in batch)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    needs_features: ClassVar[bool] = False

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        kernel: KernelLike = "mmd",
        replacement: bool = False,
        drop_last: bool = True,
        from_each: ArrayLike | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        self.replacement = bool(replacement)
        self._visits_once = not self.replacement
        as_kernel(kernel)  # refuses an unknown one
        super().__init__(n, batch_size, drop_last=drop_last, **options)
        self._groups = None if from_each is None else self._members(from_each)
        self.from_each = None if self._groups is None else [len(group) for group in self._groups]

    def _members(self, from_each: ArrayLike) -> list[Tensor]:
        if not self.replacement:
            raise InputError("from_each needs draws with replacement, got replacement=False; use replacement=True")
        labels = as_labels(from_each, self.n, "from_each").cpu()
        groups = [(labels == group).nonzero().flatten() for group in sorted(set(labels.tolist()))]
        if self.batch_size % len(groups):
            raise InputError(
                f"batch_size={self.batch_size} is not a multiple of the {len(groups)} groups of from_each; use "
                f"batch_size={max(1, self.batch_size // len(groups)) * len(groups)}"
            )
        return groups

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        if self.replacement:
            return self._independent(generator)
        return super()._make_chunk(rounds, generator)

    def _sample_chunk(self, generator: torch.Generator) -> Chunk:
        return self._independent(generator) if self.replacement else super()._sample_chunk(generator)

    def _independent(self, generator: torch.Generator) -> Chunk:
        count = max(1, _DRAWS // self.batch_size) * self.num_replicas
        if self._groups is not None:
            size = (count, self.batch_size // len(self._groups))
            drawn = [group[torch.randint(len(group), size, generator=generator)] for group in self._groups]
            return Chunk(torch.cat(drawn, 1))
        return Chunk(torch.randint(self.n, (count, self.batch_size), generator=generator))
