"""What tests share: seeded generators and points. Tests of Ctrl-C need it to work: a background job ignores it."""

from __future__ import annotations

import signal

import torch
from torch import Tensor

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=gen(seed))
