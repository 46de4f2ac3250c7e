"""Accelerate: a sampler whose state knows which batches have arrived, however far ahead a loader asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch.utils.data import Sampler

from vardass.errors import InputError
from vardass.processes import process_group
from vardass.samplers import IndexBatch

__all__ = ["CheckpointedSampler"]

Arrived = TypeVar("Arrived")


class CheckpointedSampler(Sampler[IndexBatch]):
    """Keep the batches that were asked for and have not arrived, so that a state is that of training.

    ``accelerator.prepare`` gives loaders that ask a batch ahead, and their workers more; under several processes it
    shares out the batches, and its own state forgets strata. Wrap the sampler, let Accelerate prepare the loader, take
    its batches through `follow`, and register this object: ``accelerator.register_for_checkpointing(sampler)``. It
    counts epochs itself: ``load_state`` and another loop over the loader go on with the very next batch.

    Parameters
    ----------
    sampler : MinibatchSampler or PairBatchSampler
        Made without ``num_replicas`` and ``rank``. Refresh it, not the wrapper.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> from vardass import UniformBatchSampler
    >>> sampler = CheckpointedSampler(UniformBatchSampler(8, 2, seed=0))
    >>> loader = DataLoader(range(8), batch_sampler=sampler, num_workers=0)  # accelerator.prepare(loader)
    >>> batches = [batch.tolist() for batch in sampler.follow(loader)]
    >>> sorted(sum(batches, []))
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    drop_last = True  # a batch that is not there for all processes is left out: a made-up one would have no weights

    def __init__(self, sampler: Any) -> None:
        sampler.shard(1, 0)  # Accelerate shares out
        self.sampler = sampler
        self.batch_size: int = sampler.batch_size
        self._under_way: deque[IndexBatch] = deque()
        self._is_restored = False
        self._has_ended = False  # nothing is left of the epoch but what is under way

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[IndexBatch]:
        if not self._is_restored:  # what a loop that was left had asked for
            self._under_way.clear()
        ends = self._is_restored and self._has_ended and bool(self._under_way)
        self._is_restored = False
        yield from list(self._under_way)
        if ends:
            return
        self._has_ended = False
        for batch in self.sampler:
            self._under_way.append(batch)
            yield batch
        self._has_ended = True

    def follow(self, loader: Iterable[Arrived]) -> Iterator[Arrived]:
        """Yield the batches of ``loader`` and note their arrival."""
        for batch in loader:
            self.arrived()
            yield batch

    def arrived(self) -> None:
        """Note that a batch has arrived at each process; `follow` does."""
        count, _ = process_group() or (1, 0)
        if len(self._under_way) < count:
            raise InputError(
                f"{count} batches arrived, but {len(self._under_way)} are under way; note each batch once, and use the "
                "loader that was made with this sampler"
            )
        for _ in range(count):
            self._under_way.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state and the batches under way; the same on every process."""
        count, _ = process_group() or (1, 0)
        batches = list(self._under_way)
        is_endless = getattr(self.sampler, "endless", False)
        has_ended = self._has_ended or (not is_endless and self.sampler.position >= len(self.sampler))
        if has_ended:  # the rest does not suffice for all processes
            batches = batches[: len(batches) // count * count]
        under_way = [{"indices": list(batch), "weights": batch.weights} for batch in batches]
        return {"sampler": self.sampler.state_dict(), "under_way": under_way, "has_ended": has_ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch after the last that had arrived."""
        self.sampler.load_state_dict(state["sampler"])
        self._under_way.clear()
        for saved in state["under_way"]:
            batch = IndexBatch(saved["indices"])
            batch.weights = saved["weights"]
            self._under_way.append(batch)
        self._has_ended = state["has_ended"]
        self._is_restored = True
