"""Batches of indices that carry their weights, and the dataset wrapper that hands the weights on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex, cast

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from vardass.errors import InputError, VardassWarning
from vardass.validate import check_count, check_number

__all__ = ["IndexBatch", "WeightedDataset", "with_weights"]


class IndexBatch(list[int]):
    """A list of sample indices with the weights of the strata that they were drawn from.

    A DataLoader prefetches indices, so weights that were looked up when a batch arrives could belong to newer strata.
    These weights are pickled with the batch, and a slice keeps its part of them.

    Attributes
    ----------
    weights : list of float or None
        One for each index, summing to 1; None means uniform.
    """

    def __init__(self, indices: Iterable[int] = (), weights: Sequence[float] | None = None) -> None:
        super().__init__(indices)
        self.weights = weights

    def __getitem__(self, item: SupportsIndex | slice) -> Any:
        picked = super().__getitem__(item)
        if not isinstance(item, slice):
            return picked
        return IndexBatch(cast("list[int]", picked), None if self.weights is None else self.weights[item])

    def state(self) -> dict[str, Any]:
        """The constructor arguments of this batch, in plain values."""
        return {"indices": list(self), "weights": self.weights}

    @classmethod
    def from_state(cls, saved: Mapping[str, Any], n: int) -> IndexBatch:
        """The batch of ``n`` samples that `state` was taken of."""
        batch = cls(**saved)
        for index in batch:
            check_count(index, "index of a batch", low=0, high=n - 1)
        for weight in batch.weights or ():
            check_number(weight, "weight of a batch", low=0.0, high=1.0)
        if batch.weights is not None and len(batch.weights) != len(batch):
            raise InputError(f"a batch of {len(batch)} samples has {len(batch.weights)} weights; restore it")
        return batch


class WeightedDataset(Dataset[Any]):
    """A dataset whose samples end with their weight; made by `with_weights`."""

    weights_attached: ClassVar[bool] = True  # `extract_features` looks inside

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._has_warned = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        raise InputError(
            f"sample {index} was requested alone, but a weight belongs to a batch; "
            "use a DataLoader with batch_sampler=..., or index the dataset without with_weights"
        )

    def __getitems__(self, batch: Sequence[int]) -> list[Any]:
        """Fetch one batch: called by the DataLoader, in the worker."""
        weights = getattr(batch, "weights", None)
        if weights is None:
            if not isinstance(batch, IndexBatch):
                self._notice_plain_indices(batch)
            weights = [1.0 / len(batch)] * len(batch)
        fetch = getattr(self.dataset, "__getitems__", None)
        try:
            samples = fetch(list(batch)) if callable(fetch) else [self.dataset[i] for i in batch]
        except IndexError as error:
            if max(batch) < len(self.dataset):
                raise
            raise InputError(
                f"sample {max(batch)} was requested, but the data set has {len(self.dataset)}; make the sampler with "
                "n=len(dataset)"
            ) from error
        return [_append(sample, weight) for sample, weight in zip(samples, weights, strict=True)]

    def _notice_plain_indices(self, batch: Sequence[Any]) -> None:
        """Say that weights may have been dropped on the way."""
        if any(isinstance(index, Sequence) for index in batch):
            raise InputError(
                f"the loader asks for {len(batch)} batches as if each were one sample, such as {list(batch[0])}; pass "
                "the sampler as DataLoader(..., batch_sampler=sampler), not as sampler="
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a batch of {len(batch)} plain indices came without weights, so each sample gets 1 / {len(batch)}; "
                "use a vardass sampler as batch_sampler, wrap the data set last (with_weights(Subset(...)), not "
                "Subset(with_weights(...))), and remove wrappers that rebuild batches",
                VardassWarning,
                stacklevel=3,
            )


def with_weights(dataset: Any) -> WeightedDataset:
    """Wrap a map-style dataset so that each sample ends with its weight.

    ``(x, y)`` becomes ``(x, y, weight)``, a mapping gains the key ``"weight"``, anything else becomes
    ``(sample, weight)``. Batches without weights get 1 / batch size. Wrap last: a Subset around the result drops them.

    Parameters
    ----------
    dataset : map-style dataset
        Returns samples by index.

    Examples
    --------
    >>> batch = IndexBatch([2, 0], weights=[0.75, 0.25])
    >>> [(x, float(w)) for x, w in with_weights(["a", "b", "c"]).__getitems__(batch)]
    [('c', 0.75), ('a', 0.25)]
    """
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_indexed or isinstance(dataset, Mapping | IterableDataset):
        raise InputError(
            f"with_weights needs a dataset with __getitem__ and __len__, got {type(dataset).__name__}; its samples are "
            "asked for by number"
        )
    return WeightedDataset(dataset)


def _append(sample: Any, weight: float) -> Any:
    value = np.float32(weight)
    if isinstance(sample, Mapping):
        if "weight" in sample:
            raise InputError(
                f"the samples have a key 'weight' of their own (keys {list(sample)}), which that of the draw would "
                "overwrite; rename it"
            )
        return {**sample, "weight": value}
    if isinstance(sample, tuple | list):
        return (*sample, value)
    return (sample, value)
