"""Arguments that `stratify` must refuse or take in any form, and numbers at the edge of float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.solvers import stratify
from vardass.variance import stratified_variance


def cloud(n: int, d: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=dtype).exp()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_size": 2.5}, "min_size must be a whole number, got 2.5"),
        ({"max_size": 30.5}, "max_size must be a whole number, got 30.5"),
        ({"max_passes": -1}, "max_passes must be at least 0, got -1"),
        ({"tol": -1.0}, "tol must not be negative, got -1.0"),
        ({"tol": float("nan")}, "tol must not be negative, got nan"),
        ({"init": None}, "init must be 40 whole numbers, got NoneType"),
        ({"warm_start": "random"}, "warm_start must be 40 whole numbers, got str"),
    ],
)
def test_more_bad_arguments_are_named(options, message):
    with pytest.raises(InputError) as caught:
        stratify(cloud(40), 5, **options)
    assert message in str(caught.value)


def test_unsigned_labels():
    start = torch.arange(40) % 5
    for dtype in (np.uint8, np.uint32, np.uint64):
        assert torch.equal(stratify(cloud(40), 5, init=start.numpy().astype(dtype), max_passes=0).labels, start)


@pytest.mark.parametrize(("kernel", "scale"), [("coral", 1e10), ("linear", 1e20)])
@pytest.mark.parametrize("rank", [0, 16])
def test_an_overflow_is_named(kernel, scale, rank):
    with pytest.raises(InputError, match=r"overflows torch\.float32"):
        stratify(cloud(60, 30, dtype=torch.float32) * scale, 5, kernel=kernel, rank=rank)


def test_linear_kernel_in_float32_far_from_the_origin():
    x = (cloud(200, 8).clamp_max(6.0) * 64).round() / 64
    far = stratify((x + 1e4).float(), 10, kernel="linear")
    assert far.variance == pytest.approx(stratified_variance(x, far.labels, kernel="linear"), rel=1e-4)
    assert far.variance <= 1.02 * stratify(x, 10, kernel="linear").variance


@pytest.mark.parametrize("rank", [1, 4])
def test_a_poor_rank_does_not_make_a_warm_start_worse(rank):
    x = cloud(400, 8)
    good = stratify(x, 10, restarts=5)
    assert stratify(x, 10, warm_start=good, rank=rank).variance <= good.variance * (1 + 1e-9)


@pytest.mark.parametrize("rank", [0, 12])
def test_a_function_may_compute_in_another_precision(rank):
    x = cloud(60, dtype=torch.float32)
    strata = stratify(x, 6, kernel=lambda a, b: torch.exp(-torch.cdist(a.double(), b.double(), p=1.0)), rank=rank)
    assert strata.variance <= 1.02 * stratify(x, 6, kernel="laplacian", rank=rank).variance


def test_saving_to_a_folder(tmp_path):
    with pytest.raises(InputError, match="it is a folder"):
        stratify(cloud(40), 5).save(tmp_path)
