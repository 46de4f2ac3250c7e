"""Batches and losses for the tests of the losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vardass.losses import Batch, coral, mmd2


def of_batches(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``loss(x, y, weights_x=..., strata_y=..., ...)``: what is said of either side goes into its Batch.

    Strata without a pool are those of draws with replacement.
    """

    def call(x: Tensor, y: Tensor, **told: Any) -> Tensor:
        sides = []
        for s, z in (("x", x), ("y", y)):
            keys = [key for key in ("weights", "strata", "pool", "bank") if f"{key}_{s}" in told]
            about = {key: told.pop(f"{key}_{s}") for key in keys}
            sides.append(Batch(z, **({"pool": math.inf} if "strata" in about else {}) | about))
        return loss(*sides, **told)

    return call


def normal(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def some_weights(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=dtype) + 0.05
    return w / w.sum()


LOSSES = {
    "mmd v": lambda x, y, **w: mmd2(x, y, **w),
    "mmd u": lambda x, y, **w: of_batches(mmd2)(
        x, y, estimator="unbiased", strata_x=[0] * len(x), strata_y=[0] * len(y), **w
    ),
    "mmd domainbed": lambda x, y, **w: mmd2(x, y, preset="domainbed", **w),
    "coral paper": lambda x, y, **w: coral(x, y, **w),
    "coral domainbed": lambda x, y, **w: coral(x, y, preset="domainbed", **w),
    "coral deep": lambda x, y, **w: coral(x, y, preset="deep-coral", **w),
}
