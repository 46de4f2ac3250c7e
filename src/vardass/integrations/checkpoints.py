"""A sampler whose state counts only delivered batches, despite prefetching by workers or Accelerate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar, TypeVar

from torch.utils.data import Sampler

from vardass.errors import InputError
from vardass.processes import process_group
from vardass.samplers import IndexBatch
from vardass.validate import check_count, check_flag, check_state, reading

__all__ = ["CheckpointedSampler"]

Arrived = TypeVar("Arrived")


class CheckpointedSampler(Sampler[IndexBatch]):
    """Track batches that were prefetched but not delivered, so that checkpoints match the progress of training.

    Loader workers prefetch batches, and so do loaders from ``accelerator.prepare``. Wrap the sampler, and iterate over
    the loader through `follow`. Refresh the wrapper like the sampler; it counts epochs itself. After a restore,
    another loop over the loader continues with the very next batch. It tracks the batches of all processes, so all
    processes have the same state.

    Parameters
    ----------
    sampler : MinibatchSampler or PairBatchSampler
        Made without ``num_replicas`` and ``rank``.
    prepared_for : int, optional
        Number of processes if a library distributes the batches: ``accelerator.num_processes``, or
        ``arguments.world_size`` of the Trainer. Otherwise call `shard`; a process group requires one of the two.
    """

    drop_last = True  # a batch that is not there for all processes is left out: a made-up one would have no weights

    _passed_on: ClassVar[frozenset[str]] = frozenset(
        {"n", "seed", "endless", "needs_features", "kernel", "strata", "refresh", "fitted_state", "use_fitted_state"}
    )

    def __init__(self, sampler: Any, *, prepared_for: int | None = None) -> None:
        self.inner = sampler  # libraries call set_epoch of an attribute named sampler, with counts of their own
        self.batch_size: int = sampler.batch_size
        self._under_way: deque[IndexBatch] = deque()
        self._is_restored = False
        self._has_ended = False  # all batches of the epoch were asked for
        self._processes = 1  # each gets a batch at a time
        self._rank: int | None = None  # of this one; None where a library shares the batches out
        self._is_prepared = prepared_for is not None
        if prepared_for is not None:
            self._processes = check_count(prepared_for, "prepared_for")
            sampler.shard(1, 0)  # all batches of all processes

    def __getattr__(self, name: str) -> Any:
        if name in self._passed_on:
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def shard(self, num_replicas: int, rank: int) -> None:
        """Give this process every ``num_replicas``-th batch; before the first batch."""
        count = check_count(num_replicas, "num_replicas")
        rank = check_count(rank, "rank", low=0, high=count - 1)
        if self._is_prepared or (self._rank is not None and (count, rank) != (self._processes, self._rank)):
            by = "by the library that prepared the loader" if self._is_prepared else f"with rank={self._rank}"
            raise InputError(
                f"batches are already sharded, {by} of {self._processes}, got rank={rank} of {count}; call shard "
                "once, and leave out prepared_for"
            )
        self.inner.shard(1, 0)
        if not self.inner.endless and len(self.inner) < count:
            raise InputError(
                f"an epoch of {len(self.inner)} batches is too short for num_replicas={count} processes; lower "
                "batch_size or set batches"
            )
        self._processes, self._rank = count, rank

    @property
    def _drawn_together(self) -> int:
        return 1 if self._rank is None else self._processes

    def __len__(self) -> int:
        return len(self.inner) // self._drawn_together

    def __iter__(self) -> Iterator[IndexBatch]:
        if process_group() is not None and not self._is_prepared and self._rank is None:
            raise InputError(
                "there is a process group, and this CheckpointedSampler does not know who shares out its batches; "
                "make it with prepared_for=accelerator.num_processes if Accelerate does, else call its "
                "shard(num_replicas, rank)"
            )
        return self._batches()

    def _batches(self) -> Iterator[IndexBatch]:
        if not self._is_restored:  # what a loop that was left had asked for
            self._under_way.clear()
        ends = self._is_restored and self._has_ended and bool(self._under_way)
        self._is_restored = False
        size = self._drawn_together
        yield from self._own(list(self._under_way))
        if ends:
            return
        self._has_ended = False
        if self._rest_is_short():
            self.inner.leave_epoch()
        stream = iter(self.inner)
        while together := list(islice(stream, size)):  # of all processes, so that each has the same under way
            self._under_way.extend(together)
            yield from self._own(together)
            if self._rest_is_short():
                break
        self._has_ended = True

    def _own(self, batches: list[IndexBatch]) -> list[IndexBatch]:
        return batches if self._rank is None else batches[self._rank :: self._processes]

    def _rest_is_short(self) -> bool:
        """Whether what is left of the epoch does not suffice for all processes."""
        return not self.inner.endless and len(self.inner) - self.inner.position < self._drawn_together

    def follow(self, loader: Iterable[Arrived]) -> Iterator[Arrived]:
        """Yield the batches of ``loader`` and note their arrival."""
        for batch in loader:
            self.arrived()
            yield batch

    def arrived(self) -> None:
        """Note that a batch has arrived at each process; `follow` does."""
        if len(self._under_way) < self._processes:
            raise InputError(
                f"{self._processes} batches arrived, but {len(self._under_way)} are under way; note each batch once, "
                "and use the loader that was made with this sampler"
            )
        for _ in range(self._processes):
            self._under_way.popleft()

    def leave_epoch(self) -> None:
        """Begin the next epoch at the next iteration."""
        self._under_way.clear()
        self._is_restored = self._has_ended = False
        self.inner.leave_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state and the batches under way; the same on every process."""
        batches = list(self._under_way)
        has_ended = self._has_ended or self._rest_is_short()
        if has_ended:  # a rest that does not suffice for all processes is left out
            batches = batches[: len(batches) // self._processes * self._processes]
        return {
            "sampler": self.inner.state_dict(),
            "under_way": [batch.state() for batch in batches],
            "has_ended": has_ended,
            "processes": self._drawn_together,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch after the last that had arrived."""
        check_state(state, self, ("sampler", "under_way", "has_ended", "processes"))
        if state["processes"] != self._drawn_together:
            raise InputError(
                f"the state is of a sampler for {state['processes']} processes, here are {self._drawn_together}; "
                "resume with as many, or start over"
            )
        self.inner.load_state_dict(state["sampler"])
        with reading("the state of this CheckpointedSampler", "pass what its state_dict() gave"):
            self._under_way = deque(IndexBatch.from_state(saved, self.n) for saved in state["under_way"])
            self._has_ended = check_flag(state["has_ended"], "has_ended")
        self._is_restored = True
