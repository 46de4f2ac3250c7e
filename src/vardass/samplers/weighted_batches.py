"""Batches of indices that carry their weights, and the dataset wrapper that hands the weights on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex, cast

import numpy as np
from torch.utils.data import Dataset

from vardass.errors import InputError

__all__ = ["IndexBatch", "WeightedDataset", "with_weights"]


class IndexBatch(list[int]):
    """A list of sample indices with the weights of the strata that they were drawn from.

    A DataLoader asks its sampler for indices many batches ahead, so a weight that is looked up when the
    batch arrives may belong to newer strata. Here the weights are part of the batch: they are pickled with
    it, and a slice keeps its share.

    Attributes
    ----------
    weights : list of float or None
        One for each index, summing to 1; None means uniform.
    """

    weights: Sequence[float] | None = None

    def __getitem__(self, item: SupportsIndex | slice) -> Any:
        picked = super().__getitem__(item)
        if isinstance(item, slice):
            part = IndexBatch(cast("list[int]", picked))
            part.weights = None if self.weights is None else self.weights[item]
            return part
        return picked


class WeightedDataset(Dataset[Any]):
    """A dataset whose samples end with their weight; made by `with_weights`."""

    weights_attached: ClassVar[bool] = True  # `extract_features` looks inside

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        raise InputError(
            f"sample {index} was asked for alone, but a weight belongs to a batch; "
            "use a DataLoader with batch_sampler=..., or index the dataset without with_weights"
        )

    def __getitems__(self, batch: Sequence[int]) -> list[Any]:
        """Fetch one batch: called by the DataLoader, in the worker."""
        weights = getattr(batch, "weights", None)
        if weights is None:
            weights = [1.0 / len(batch)] * len(batch)
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(list(batch)) if callable(fetch) else [self.dataset[i] for i in batch]
        return [_append(sample, np.float32(weight)) for sample, weight in zip(samples, weights, strict=True)]


def with_weights(dataset: Any) -> WeightedDataset:
    """Wrap a map-style dataset so that each sample ends with its weight.

    ``(x, y)`` becomes ``(x, y, weight)``, a mapping gains the key ``"weight"``, anything else becomes
    ``(sample, weight)``. Batches from a sampler without weights get 1 / batch size. Wrap last: a Subset or
    another wrapper around the result would hand on bare indices.

    Examples
    --------
    >>> batch = IndexBatch([2, 0])
    >>> batch.weights = [0.75, 0.25]
    >>> [(x, float(w)) for x, w in with_weights(["a", "b", "c"]).__getitems__(batch)]
    [('c', 0.75), ('a', 0.25)]
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise InputError(f"with_weights needs a dataset with __getitem__ and __len__, got {type(dataset).__name__}")
    return WeightedDataset(dataset)


def _append(sample: Any, weight: np.float32) -> Any:
    if isinstance(sample, Mapping):
        if "weight" in sample:
            raise InputError(
                f"the samples have a key 'weight' of their own (keys {list(sample)}), which the weight of the draw "
                "would replace; rename it"
            )
        return {**sample, "weight": weight}
    if isinstance(sample, tuple | list):
        return (*sample, weight)
    return (sample, weight)
