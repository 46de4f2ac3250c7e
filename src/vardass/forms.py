"""The two quadratic forms that the losses are made of, with fast and accurate gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vardass.kernels import squared_distances

__all__ = ["MixtureForm", "covariance_gap"]


class MixtureForm(torch.autograd.Function):
    """Σ_ij P_ij Σ_γ exp(-γ |z_i - z_j|²) for a symmetric P.

    The exponentials of the value are also those of its slope in |z_i - z_j|², and with P symmetric the
    gradient takes one matrix product instead of two: the joint matrix then costs less than its three blocks
    under plain autograd.
    """

    @staticmethod
    def forward(z: Tensor, pairs: Tensor, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the form, and its slope in each squared distance for the gradient."""
        d2 = squared_distances(z)
        kernel, slope, term = torch.zeros_like(d2), torch.zeros_like(d2), torch.empty_like(d2)
        for rate in rates:
            # exp(-80) is nothing next to the diagonal, and results that underflow take a CPU ten times longer
            torch.exp(torch.mul(d2, -rate, out=term).clamp_min_(-80.0), out=term)
            kernel += term
            slope.sub_(term, alpha=rate)
        return (pairs * kernel).sum(), slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the gradient needs."""
        z, pairs, ctx.rates = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(z, pairs, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in z."""
        z, pairs, slope = ctx.saved_tensors
        with torch.autocast(z.device.type, enabled=False):
            if torch.is_grad_enabled():  # a second derivative is wanted: the slope must know of z
                d2 = squared_distances(z)
                slope = torch.stack([-rate * torch.exp(d2 * -rate) for rate in ctx.rates]).sum(0)
            z = z - z.detach().mean(0)  # the two terms below would cancel far from the origin
            # a row does not pull itself, but its slope is the steepest: rounding would leave some
            pull = (pairs * slope).fill_diagonal_(0.0)
            return 4.0 * grads[0] * (pull.sum(1, keepdim=True) * z - pull @ z), None, None


def covariance_gap(z: Tensor, signed: Tensor) -> Tensor:
    """|Σ_i c_i z_i z_iᵀ|_F² for centred rows ``z`` (m, d) and signed weights c (m,)."""
    m, d = z.shape
    if d >= 2 * m and z.device.type == "cpu":
        # Σ_ij c_i c_j <z_i, z_j>² needs only (m, m), but its terms cancel when the covariances are close:
        # double precision makes up for that, and on a CPU it is cheap enough
        z, c = z.double(), signed.double()
        return (c @ ((z @ z.T).square() @ c)).clamp_min(0.0).to(signed.dtype)
    return ((z * signed[:, None]).T @ z).square().sum()
