"""Samplers of one small data set in all their forms, and how tests take batches from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import gen
from vardass.paper.paired_sampler import PairedBatchSampler
from vardass.samplers import (
    BalancedBatchSampler,
    IndexBatch,
    MinibatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
    stratified,
    uniform,
)

N, K = 26, 4  # K does not divide N
TWO_CLASSES = torch.arange(N) % 2
# shares unlike those of the data, one sample in no group
UNLIKE: dict[str, Any] = {"groups": torch.tensor([-1] + [0] * 15 + [1] * 10), "shares": [0.25, 0.75]}
QUICK = {"kernel": "rbf", "swap_rounds": 3}

# every sampler with and without each of its options, and every pair of options once
MAKERS: dict[str, Callable[..., MinibatchSampler]] = {
    "uniform": lambda **o: UniformBatchSampler(N, K, **o),
    "uniform, tail": lambda **o: UniformBatchSampler(N, K, drop_last=False, **o),
    "uniform, replacement": lambda **o: UniformBatchSampler(N, K, replacement=True, **o),
    "stratified": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", **o),
    "stratified, k-means": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", solver="kmeans", **o),
    "stratified, classes": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", groups=TWO_CLASSES, **o),
    "cycling, classes": lambda **o: StratifiedBatchSampler(
        N, K, kernel="rbf", replacement=False, groups=TWO_CLASSES, **o
    ),
    "ordered": lambda **o: OrderedBatchSampler(N, K, plan_rows=5, **QUICK, **o),
    "ordered, classes": lambda **o: OrderedBatchSampler(N, K, plan_rows=5, groups=TWO_CLASSES, **QUICK, **o),
    "balanced": lambda **o: BalancedBatchSampler(N, K, **QUICK, **o),
    "balanced, tail, classes": lambda **o: BalancedBatchSampler(
        N, K, drop_last=False, groups=torch.arange(N) % 3, **QUICK, **o
    ),
    "balanced, sets": lambda **o: BalancedBatchSampler(N, K, groups=TWO_CLASSES, set_size=2, **QUICK, **o),
    "one domain, pairs": lambda **o: PairedBatchSampler(N, K, plan_rows=5, **QUICK, **o),
    "shares, stratified": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", **UNLIKE, **o),
    "shares, ordered": lambda **o: OrderedBatchSampler(N, K, plan_rows=5, **UNLIKE, **QUICK, **o),
    "shares, balanced": lambda **o: BalancedBatchSampler(N, K, **UNLIKE, **QUICK, **o),
}
ONCE = [name for name in MAKERS if name.startswith("balanced") or name in ("uniform", "uniform, tail")]
STRATA = [name for name in MAKERS if name.startswith(("stratified", "cycling", "ordered"))]
LEARNING = [name for name in MAKERS if not name.startswith("uniform")]

each_sampler = pytest.mark.parametrize("name", MAKERS)
each_once = pytest.mark.parametrize("name", ONCE)
each_strata = pytest.mark.parametrize("name", STRATA)
each_learning = pytest.mark.parametrize("name", LEARNING)


def round_length(name: str) -> int:
    """Batches that visit all samples once."""
    return N // K + ("tail" in name)


def cloud(n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, generator=gen(seed)).exp()


def made(name: str, **options: Any) -> MinibatchSampler:
    """One of the samplers, refreshed once."""
    sampler = MAKERS[name](**options)
    sampler.refresh(cloud())
    return sampler


def taken(batches: Iterable[IndexBatch], count: int | None = None) -> list[tuple[list[int], Any]]:
    return [(list(batch), batch.weights) for batch in itertools.islice(batches, count)]


def indices(batches: Iterable[IndexBatch], count: int | None = None) -> list[int]:
    return [index for batch, _ in taken(batches, count) for index in batch]


def visits_once(name: str, seen: list[int]) -> None:
    """Assert that ``seen`` is what one round of the sampler visits."""
    assert len(seen) == len(set(seen)) == N // K * K + (N % K if "tail" in name else 0)


def use_small_chunks() -> None:
    """Let streams come to the end of a chunk within a few batches."""
    stratified._DRAWS = uniform._DRAWS = 24
