"""Batches of two domains from one data set: for libraries whose loop has a single loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from vardass.errors import InputError
from vardass.refresh.refresher import warn_of_equal_seeds
from vardass.samplers import IndexBatch
from vardass.samplers.base import features_of_all, one_iterator
from vardass.validate import ArrayLike, check_count, check_state

__all__ = ["PairBatchSampler"]


class PairBatchSampler(Sampler[IndexBatch]):
    """Source and target in one batch, as indices of ``ConcatDataset([source, target])``.

    The first ``source_size`` indices of a batch are of the source, the others of the target. The weights of either
    part sum to 1. Both streams continue across epochs, whichever is longer.

    Parameters
    ----------
    source, target : MinibatchSampler
        Made with ``endless=True`` and different seeds.
    batches : int, optional
        Batches in an epoch, over all processes; by default as many as cover the larger domain once.
    """

    drop_last = True  # what Accelerate asks
    endless = False

    def __init__(self, source: Any, target: Any, *, batches: int | None = None) -> None:
        for name, sampler in (("source", source), ("target", target)):
            if not getattr(sampler, "endless", False):
                raise InputError(f"the {name} sampler ends after an epoch; make it with endless=True")
        warn_of_equal_seeds({"source": source, "target": target})
        self.source, self.target = source, target
        self.n = source.n + target.n
        self.source_size = source.batch_size
        self.batch_size = source.batch_size + target.batch_size
        self.needs_features = source.needs_features or target.needs_features
        longer = max(source.n // source.batch_size, target.n // target.batch_size)
        self.batches = longer if batches is None else check_count(batches, "batches")
        self.position = 0
        self._streams: tuple[Iterator[IndexBatch], Iterator[IndexBatch]] | None = None
        self._is_restored = False

    def __len__(self) -> int:
        processes: int = self.source._process_count
        return self.batches // processes

    def shard(self, num_replicas: int, rank: int) -> None:
        """Give this process every ``num_replicas``-th batch of both streams; before the first batch."""
        if self.batches < num_replicas:
            raise InputError(
                f"an epoch of {self.batches} batches is too short for {num_replicas} processes; set batches higher"
            )
        for sampler in (self.source, self.target):
            sampler.shard(num_replicas, rank)

    def __iter__(self) -> Iterator[IndexBatch]:
        for sampler in (self.source, self.target):
            sampler._join_process_group()
        return one_iterator(self, self._batches())

    def _batches(self) -> Iterator[IndexBatch]:
        if self._streams is None:
            self._streams = iter(self.source), iter(self.target)
        streams = self._streams
        rounds = self.batches // self.source.num_replicas
        if not self._is_restored:  # an epoch that was left does not continue
            self.position = 0
        self._is_restored = False
        while self.position < rounds:
            source, target = map(next, streams)
            weights = [weight for part in (source, target) for weight in part.weights or [1.0 / len(part)] * len(part)]
            self.position += 1
            yield IndexBatch([*source, *(self.source.n + index for index in target)], weights)

    def refresh(self, features: ArrayLike) -> None:
        """Refresh both samplers from the features (n, d) of the concatenated data set."""
        if self.needs_features:
            x = features_of_all(features, self.n)
            self.source.refresh(x[: self.source.n])
            self.target.refresh(x[self.source.n :])

    def leave_epoch(self) -> None:
        """Begin the next epoch at the next iteration; the streams run on."""
        self._is_restored = False

    def fitted_state(self) -> dict[str, Any]:
        """What the last refresh found, to be sent to the other processes."""
        return {"source": self.source.fitted_state(), "target": self.target.fitted_state()}

    def use_fitted_state(self, state: Mapping[str, Any]) -> None:
        """Draw from what another process found."""
        self.source.use_fitted_state(state["source"])
        self.target.use_fitted_state(state["target"])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the stream depends on; the same on every process."""
        states = {"source": self.source.state_dict(), "target": self.target.state_dict()}
        return {"batches": self.batches, "position": self.position, **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the stream that ``state`` was taken from."""
        check_state(state, self, ("batches", "position", "source", "target"))
        if state["batches"] != self.batches:
            raise InputError(
                f"the state has epochs of {state['batches']} batches, here are {self.batches}; set batches"
            )
        self.source.load_state_dict(state["source"])
        self.target.load_state_dict(state["target"])
        self.position = state["position"]
        self._streams, self._is_restored = None, True

    def __getstate__(self) -> dict[str, Any]:
        # a copy continues the stream, as one whose state was restored
        return {**self.__dict__, "_streams": None, "_is_restored": True}
