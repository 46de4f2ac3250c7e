"""The U-statistic: mean and mean gradient over all draws, enumerated; what is refused; precision."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from conftest import refused
from loss_batches import normal
from vardass.kernels import FunctionKernel, RBFMixture
from vardass.losses import mmd2

X, Y = 0.8 * normal(5, 2, 1), 1.1 * normal(6, 2, 2) + 0.5
KERNELS = {
    "mixture": RBFMixture((0.05, 0.5, 3.0)),
    "polynomial": FunctionKernel(lambda x, y: (0.5 * x @ y.T + 1.0) ** 2),
}


def multisets(n: int, b: int) -> Iterator[tuple[list[int], float]]:
    """Independent draws, up to their order, with their probabilities."""
    for rows in itertools.combinations_with_replacement(range(n), b):
        ways = math.factorial(b) / math.prod(math.factorial(m) for m in Counter(rows).values())
        yield list(rows), ways / n**b


def of_all(loss: Callable[..., Tensor], x: Tensor = X, y: Tensor = Y) -> tuple[Tensor, ...]:
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    value = loss(x, y)
    return value.detach(), *torch.autograd.grad(value, (x, y))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [2, 3])
def test_unbiased_mmd_has_the_mean_and_the_mean_gradient_of_all_data(kernel: str, rows: int) -> None:
    def mean_over_draws(x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for (i, p), (j, q) in itertools.product(multisets(len(X), rows), list(multisets(len(Y), 2))):
            total = total + p * q * mmd2(x[i], y[j], kernel=KERNELS[kernel], estimator="unbiased")
        return total

    for mean, truth in zip(of_all(mean_over_draws), of_all(lambda x, y: mmd2(x, y, kernel=KERNELS[kernel]))):
        torch.testing.assert_close(mean, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("call", "field", "named"),
    [
        (lambda: mmd2(X, Y, weights_y=[1 / 6] * 6, estimator="unbiased"), "weights_y", ("unbiased", "estimator='v'")),
        (lambda: mmd2(X, Y[:1], estimator="unbiased"), None, ("estimator='unbiased'", 2, 1, "batch")),
        (
            lambda: mmd2(X, Y, kernel=RBFMixture(scale="median"), estimator="unbiased"),
            None,
            ("scale='median'", "kernel.fit(features)"),
        ),
        (lambda: mmd2(X, Y, estimator="w"), "estimator", ("'w'", "v, unbiased")),
    ],
)
def test_what_cannot_be_unbiased_is_refused(call: Callable[[], Tensor], field: str | None, named: tuple) -> None:
    with refused(*named, field=field):
        call()


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_float32_is_close_to_float64(offset: float) -> None:
    x, y = normal(16, 20, 1) + offset, 1.2 * normal(12, 20, 2) + 0.1 + offset

    def value(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return of_all(lambda a, b: mmd2(a, b, estimator="unbiased"), x.to(dtype), y.to(dtype))

    for single, double in zip(value(torch.float32), value(torch.float64)):
        assert single.dtype == torch.float32
        scale = float(double.abs().max()) if double.ndim else float(mmd2(x, y))
        torch.testing.assert_close(single.double(), double, rtol=0.0, atol=2e-4 * scale)
