"""Exponential moving averages of batch statistics: the rival way to a discrepancy with less noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.kernels import Kernel, LinearKernel, RBFMixture

__all__ = ["MovingAverage", "fourier_features", "fourier_frequencies"]


class MovingAverage(nn.Module):
    """S_t = (1 - β) Σ_j β^j s_(t-j) / (1 - β^t) of a statistic s of each batch.

    The result has the value S_t and the gradient of s_t: a loss f then gets ∇s_t f'(S_t), the gradient of
    stochastic compositional gradient descent (Wang, Fang and Liu 2017). The history carries no gradient,
    yet the gradient is not shrunk by 1 - β, so that β does not act as a smaller penalty. The history
    belongs to older parameters: noise is bought off with lag.

    Parameters
    ----------
    beta : float
        At least 0, the batch alone, and below 1.
    shape : tuple of int
        Of the statistic.
    """

    total: Tensor
    mass: Tensor

    def __init__(self, beta: float, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.beta = beta
        self.register_buffer("total", torch.zeros(shape))
        self.register_buffer("mass", torch.zeros(()))

    def forward(self, statistic: Tensor) -> Tensor:
        """Take in the statistic of a batch; in evaluation mode the history stays as it is."""
        now = statistic.detach()
        total = self.total.to(now).lerp(now, 1.0 - self.beta)
        mass = self.mass * self.beta + (1.0 - self.beta)
        if self.training and torch.is_grad_enabled():
            self.total.copy_(total)
            self.mass.copy_(mass)
        return statistic + (total / mass.to(total.dtype) - now)


def fourier_frequencies(kernel: Kernel, d: int, count: int, generator: torch.Generator) -> Tensor | None:
    """Random frequencies of `fourier_features`, ``count`` for each bandwidth: (d, count * bandwidths).

    None for the linear kernel, whose features are z itself.

    Raises
    ------
    InputError
        If the kernel has no such features.
    """
    if isinstance(kernel, LinearKernel):
        return None
    if not isinstance(kernel, RBFMixture) or isinstance(kernel.scale, str):
        raise InputError(
            f"ema averages explicit features, which {kernel!r} does not have; use RBFMixture with a fixed scale, "
            "'linear', or ema=0"
        )
    normal = torch.randn(d, count, len(kernel.gammas), generator=generator, dtype=torch.float64)
    roots = torch.tensor(kernel.rates, dtype=torch.float64).mul(2.0).sqrt()
    return (normal * roots).flatten(1).float()


def fourier_features(z: Tensor, frequencies: Tensor | None, count: int) -> Tensor:
    """ψ(z) (b, D) of an RBF mixture: <ψ(z), ψ(z')> has mean Σ_γ exp(-γ |z - z'|²) (Rahimi and Recht 2007).

    Each bandwidth has its own frequencies ω ~ N(0, 2γ I), ψ = √(1/count) [cos zω, sin zω], so that |ψ(z)|² is the
    number of bandwidths exactly.
    """
    if frequencies is None:
        return z
    angles = z @ frequencies.to(z.dtype)
    return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(count)
