"""The ascent of SDAT (sharpness-aware minimisation of the task loss), for any algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["climbed", "paused_statistics"]


@contextmanager
def climbed(parameters: Sequence[nn.Parameter], rho: float) -> Iterator[None]:
    """Within the block the parameters are w + ρ g/(|g| + 1e-12), g their present gradients; after it, w again.

    The old values are kept and put back, rather than the difference subtracted, so that none is left of it. Nothing
    moves where |g| is not finite, as after an overflow of a scaled loss.
    """
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
        before = [parameter.detach().clone() for parameter in moved]
        if moved:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients]))
            factor = rho / (norm + 1e-12)
            for parameter, gradient in zip(moved, gradients):
                parameter.add_(torch.where(torch.isfinite(norm), gradient * factor.to(gradient.dtype), 0))
    torch.clear_autocast_cache()  # it may hold half-precision copies of the old values
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(moved, before):
                parameter.copy_(value)
        torch.clear_autocast_cache()


@contextmanager
def paused_statistics(module: nn.Module) -> Iterator[None]:
    """Within the block BatchNorm layers use the batch as before but leave their running statistics alone."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
