"""Exponential moving averages of batch statistics: the rival way to a discrepancy with less noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.kernels import Kernel, LinearKernel, RBFMixture

__all__ = ["FourierFeatures", "MovingAverage", "explicit_map"]


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


class FourierFeatures(nn.Module):
    """Random Fourier features of an RBF mixture: <ψ(z), ψ(z')> has mean Σ_γ exp(-γ |z - z'|²).

    Each bandwidth has its own frequencies ω ~ N(0, 2γ I), ψ = √(1/m) [cos zω, sin zω], so that |ψ(z)|² is
    the number of bandwidths exactly. The frequencies are buffers: a checkpoint keeps them.

    Parameters
    ----------
    kernel : RBFMixture
        With a fixed scale.
    d : int
        Columns of z.
    frequencies : int
        m, for each bandwidth.
    generator : torch.Generator
        Draws them.
    """

    frequencies: Tensor

    def __init__(self, kernel: RBFMixture, d: int, frequencies: int, generator: torch.Generator) -> None:
        super().__init__()
        normal = torch.randn(d, frequencies, len(kernel.gammas), generator=generator, dtype=torch.float64)
        roots = torch.tensor(kernel.rates, dtype=torch.float64).mul(2.0).sqrt()
        self.register_buffer("frequencies", (normal * roots).flatten(1).float())
        self.width = 2 * frequencies * len(kernel.gammas)
        self._factor = 1.0 / math.sqrt(frequencies)

    def forward(self, z: Tensor) -> Tensor:
        """Return ψ(z) of shape (b, 2 m bandwidths)."""
        angles = z @ self.frequencies.to(z.dtype)
        return torch.cat([angles.cos(), angles.sin()], 1) * self._factor


class _Rows(nn.Module):
    """The linear kernel's own features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, z: Tensor) -> Tensor:
        return z


def explicit_map(kernel: Kernel, d: int, frequencies: int, generator: torch.Generator) -> FourierFeatures | _Rows:
    """Return a module with ψ(z) for a kernel that has one, exact or random."""
    if isinstance(kernel, LinearKernel):
        return _Rows(d)
    if isinstance(kernel, RBFMixture) and not isinstance(kernel.scale, str):
        return FourierFeatures(kernel, d, frequencies, generator)
    raise InputError(
        f"ema averages explicit features, which {kernel!r} does not have; use RBFMixture with a fixed scale, 'linear', "
        "or ema=0"
    )
