"""Batches from any sampler, as training would get them, and the time they take."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.samplers import MinibatchSampler

__all__ = ["Batches", "Drawn", "check_samplers", "draw"]


class Batches(NamedTuple):
    """Batches of one domain.

    Attributes
    ----------
    rows : Tensor of shape (b, k)
        Sample indices.
    weights : Tensor of shape (b, k)
        Their weights, double; each row sums to 1.
    weighted : bool
        False where the sampler gives no weights, so that losses are called without them.
    """

    rows: Tensor
    weights: Tensor
    weighted: bool

    def pick(self, i: int) -> tuple[Tensor, Tensor | None]:
        """Indices and weights of batch ``i`` as a loss takes them."""
        return self.rows[i], self.weights[i] if self.weighted else None


class Drawn(NamedTuple):
    """What one entry of the report's samplers gave: a sampler and its batches for each domain."""

    samplers: list[Any]
    batches: list[Batches]
    refresh_seconds: float
    draw_seconds: float


def check_samplers(samplers: Any) -> Mapping[str, Any]:
    """Refuse what is not a mapping with at least one entry."""
    if not isinstance(samplers, Mapping):
        raise InputError(
            f"samplers must map names to samplers or factories, got {type(samplers).__name__}; "
            "pass {'uniform': lambda n: UniformBatchSampler(n, 32), ...}"
        )
    if not samplers:
        raise InputError(
            "got no samplers; pass at least one, such as {'uniform': lambda n: UniformBatchSampler(n, 32)}"
        )
    return samplers


def draw(name: str, entry: Any, domains: list[Tensor], count: int, *, refresh: bool, seed: int) -> Drawn:
    """Make the samplers of ``entry``, refresh them on ``domains``, each (n, d), and draw ``count`` batches of each."""
    samplers = _samplers(name, entry, domains)
    started = time.perf_counter()
    if refresh:
        for sampler, features in zip(samplers, domains):
            if hasattr(sampler, "refresh"):
                sampler.refresh(features)
    refreshed = time.perf_counter()
    # other seeds for the other domain: two samplers with one seed would move in step
    batches = [
        _batches(name, sampler, len(features), count, 2 * seed + place)
        for place, (sampler, features) in enumerate(zip(samplers, domains))
    ]
    drawn = time.perf_counter()
    batches = [_on(batch, features.device) for batch, features in zip(batches, domains)]
    return Drawn(samplers, batches, refreshed - started, drawn - refreshed)


def _samplers(name: str, entry: Any, domains: list[Tensor]) -> list[Any]:
    """One sampler for each domain: made by a factory, or copies of ready ones."""
    if callable(entry):
        samplers = [entry(len(features)) for features in domains]
    else:
        ready = list(entry) if isinstance(entry, tuple | list) else [entry]
        if len(ready) != len(domains):
            raise InputError(
                f"{name!r} has {len(ready)} ready samplers for {len(domains)} domains; pass one for each domain, in a "
                "tuple, or a factory n -> sampler"
            )
        # a refresh would change a stream that is in use; others are only read, and may hold a whole data set
        samplers = [copy.deepcopy(sampler) if isinstance(sampler, MinibatchSampler) else sampler for sampler in ready]
    for sampler, features in zip(samplers, domains):
        if not hasattr(sampler, "__iter__"):
            raise InputError(f"{name!r} gave a {type(sampler).__name__}, which is no sampler: it cannot be iterated")
        n = getattr(sampler, "n", len(features))
        if n != len(features):
            raise InputError(
                f"{name!r} has a sampler made for n={n} samples, its features have {len(features)} rows; "
                "pass a factory n -> sampler"
            )
    return samplers


def _batches(name: str, sampler: Any, n: int, count: int, seed: int) -> Batches:
    if isinstance(sampler, MinibatchSampler):
        chunk = sampler.sample_batches(count, seed=seed)
        rows, weights = chunk.rows, chunk.weights
    else:
        rows, weights = _iterate(name, sampler, count)
    if int(rows.min()) < 0 or int(rows.max()) >= n:
        raise InputError(
            f"{name!r} draws indices from {int(rows.min())} to {int(rows.max())}, the features have {n} rows; "
            "pass the features of the whole data set"
        )
    if weights is None:
        return Batches(rows, torch.full(rows.shape, 1.0 / rows.shape[1], dtype=torch.float64), False)
    return Batches(rows, weights.double().to(rows.device).expand(rows.shape), True)


def _iterate(name: str, sampler: Any, count: int) -> tuple[Tensor, Tensor | None]:
    """Batches of any iterable, as often as it takes; a smaller one at its end is left out."""
    found: list[Any] = []
    while len(found) < count:
        before = len(found)
        for batch in sampler:
            if not found or len(batch) == len(found[0]):
                found.append(batch)
            if len(found) == count:
                break
        if len(found) == before:
            raise InputError(f"{name!r} yields no batches; lower its batch size or set drop_last=False")
    rows = torch.stack([torch.as_tensor(list(batch), dtype=torch.int64) for batch in found])
    if any(getattr(batch, "weights", None) is None for batch in found):
        return rows, None
    return rows, torch.stack([torch.as_tensor(batch.weights, dtype=torch.float64) for batch in found])


def _on(batches: Batches, device: torch.device) -> Batches:
    return Batches(batches.rows.to(device), batches.weights.to(device), batches.weighted)
