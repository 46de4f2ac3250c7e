"""Memory of the solvers, by the shapes of what they allocate: linear in n, with no table of n points by k strata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solver_problems import points
from vardass import view as view_module
from vardass.samplers import BalancedBatchSampler
from vardass.solvers import labels as labels_module
from vardass.solvers import min_sum as min_sum_module
from vardass.solvers import stratification, stratify

N, K = 900, 300


class Largest(TorchDispatchMode):
    """Note the most numbers that a floating-point result of any operation has."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.numbers = max(self.numbers, value.untyped_storage().nbytes() // value.element_size())
        return result


def largest(run: Callable[[], object]) -> int:
    with Largest() as seen:
        run()
    return seen.numbers


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that stand to this problem as the true ones do to a million samples."""
    monkeypatch.setattr(labels_module, "_TABLE_NUMBERS", 10_000)
    monkeypatch.setattr(min_sum_module, "_CANDIDATES", 32)
    monkeypatch.setattr(min_sum_module, "_BLOCK_NUMBERS", 10_000)
    monkeypatch.setattr(view_module, "EXACT_LIMIT", 0)  # so that not all pairs are looked at


CASES: dict[str, dict[str, Any]] = {
    "min-sum": {"min_size": 2},
    "min-sum from k-means++": {"init": "kmeans++", "max_size": 6, "max_passes": 1},
    "kmeans": {"solver": "kmeans", "min_size": 2},
    "kernel-kmeans": {"solver": "kernel-kmeans", "max_size": 6, "max_iter": 3},
    "equal": {"equal": True, "max_passes": 1},
    "given labels": {"init": torch.arange(N) % 3, "min_size": 2, "max_passes": 1},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_no_table_of_points_by_strata(options: dict[str, Any], small_blocks: None) -> None:
    x = points(N, 4)
    assert largest(lambda: stratify(x, K, kernel="linear", rank=4, **options)) < 0.4 * N * K


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_blocks_change_no_strata(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = points(N, 4)
    whole = stratify(x, K, kernel="linear", rank=4, **options)
    monkeypatch.setattr(labels_module, "_TABLE_NUMBERS", 10_000)
    assert torch.equal(stratify(x, K, kernel="linear", rank=4, **options).labels, whole.labels)


def test_cuts_of_a_balanced_epoch_need_no_table(small_blocks: None) -> None:
    sampler = BalancedBatchSampler(N - 1, K, kernel="linear", swap_rounds=1)
    sampler.refresh(points(N - 1, 4))
    assert largest(lambda: list(sampler)) < 0.4 * N * K


def test_kmeans_builds_no_kernel_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the features alone; its variance is summed within strata and, for uniform draws, in blocks."""

    def refuse(*_: object) -> None:
        raise AssertionError("k-means asked for a problem of the kernel")

    monkeypatch.setattr(stratification, "_view", refuse)
    strata = stratify(points(400, 4), 20, kernel="mmd", solver="kmeans")
    assert (strata.variance_stderr, strata.info["uniform_stderr"], strata.info["path"]) == (0.0, 0.0, "features")
