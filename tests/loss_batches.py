"""Batches and losses for the tests of the losses."""

from __future__ import annotations

import torch
from torch import Tensor

from vardass.losses import coral, mmd2


def normal(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def some_weights(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=dtype) + 0.05
    return w / w.sum()


LOSSES = {
    "mmd v": lambda x, y, **w: mmd2(x, y, **w),
    "mmd u": lambda x, y, **w: mmd2(x, y, estimator="unbiased"),  # which takes no weights
    "mmd domainbed": lambda x, y, **w: mmd2(x, y, preset="domainbed", **w),
    "coral paper": lambda x, y, **w: coral(x, y, **w),
    "coral domainbed": lambda x, y, **w: coral(x, y, preset="domainbed", **w),
    "coral deep": lambda x, y, **w: coral(x, y, preset="deep-coral", **w),
}
