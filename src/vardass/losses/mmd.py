"""Squared maximum mean discrepancy of two weighted batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import (
    PAPER_GAMMAS,
    EnergyKernel,
    Kernel,
    KernelLike,
    RBFMixture,
    as_kernel,
    fitted_kernel,
    mixture_reach,
    squared_distances,
)
from vardass.losses.base import DiscrepancyLoss
from vardass.validate import ArrayLike, choose

DOMAINBED_GAMMAS = (*PAPER_GAMMAS, 100.0, 1000.0)
"""Bandwidths of DomainBed's mixture."""

ESTIMATORS = ("v", "unbiased")
_MIXTURES = {"paper": PAPER_GAMMAS, "domainbed": DOMAINBED_GAMMAS}


def mmd2(
    x: Tensor,
    y: Tensor,
    *,
    weights_x: ArrayLike | None = None,
    weights_y: ArrayLike | None = None,
    kernel: KernelLike | None = None,
    estimator: str = "v",
    preset: str | None = None,
) -> Tensor:
    """Squared maximum mean discrepancy |μ̂_x - μ̂_y|² with μ̂ = Σ_h w_h φ(z_h) (section 2.2, equation 2).

    Parameters
    ----------
    x, y : Tensor of shape (n_x, d) and (n_y, d)
        Features of the source and the target batch.
    weights_x, weights_y : array of shape (n_x,) or (n_y,), optional
        Weights of the rows, which sum to 1. None means uniform.
    kernel : Kernel, str or callable, optional
        Anything that ``as_kernel`` takes; None is the paper's mixture, and with ``"energy"`` the result is the energy
        distance 2 E|x - y| - E|x - x'| - E|y - y'| (twice the ``SamplesLoss("energy")`` of geomloss). An unfitted
        kernel is fitted to the two batches at each call, without gradient (not for ``"unbiased"``).
    estimator : {"v", "unbiased"}
        ``"v"`` counts all pairs, so it is never negative; with μ̂ unbiased it exceeds MMD² by
        Var(μ̂_x) + Var(μ̂_y) on average, which rewards a network for shrinking its features. ``"unbiased"`` is the
        U-statistic: within a domain it counts pairs of distinct rows only. For independent uniform draws it has the
        mean and the mean gradient of the MMD² of all data, and may be negative. Other rows are no such draws: it takes
        no weights, and batches of `OrderedBatchSampler` and `BalancedBatchSampler`, which are coupled, bias it.
    preset : {"paper", "domainbed"}, optional
        Instead of ``kernel``: the mixture with the 5 bandwidths of the paper, or DomainBed's 7.

    Returns
    -------
    Tensor
        A scalar: float64 if either input is, else float32.

    Examples
    --------
    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    >>> mmd2(x, y, kernel="linear")
    tensor(1.)
    >>> mmd2(x, y, kernel="linear", weights_x=[0.25, 0.75], weights_y=[1.0, 0.0])
    tensor(0.2500)
    >>> mmd2(x, y, kernel="linear", estimator="unbiased")
    tensor(-1.)
    """
    return MMDLoss(kernel=kernel, estimator=estimator, preset=preset).forward(x, y, weights_x, weights_y)


class MMDLoss(DiscrepancyLoss):
    """``mmd2`` as a module: the options here, the batches in ``forward``.

    Examples
    --------
    >>> MMDLoss(kernel="linear", estimator="unbiased")
    MMDLoss(kernel=LinearKernel(), estimator='unbiased')
    """

    def __init__(self, *, kernel: KernelLike | None = None, estimator: str = "v", preset: str | None = None) -> None:
        super().__init__()
        self.estimator = choose(estimator, "estimator", ESTIMATORS)
        if preset is not None and kernel is not None:
            raise InputError(f"preset={preset!r} chooses the kernel, but kernel={kernel!r} is given; leave out one")
        if kernel is None:
            kernel = RBFMixture(_MIXTURES[choose("paper" if preset is None else preset, "preset", _MIXTURES)])
        self.kernel = as_kernel(kernel)

    def _check(self, x: Tensor, y: Tensor, weights_x: Tensor | None, weights_y: Tensor | None) -> None:
        if self.estimator == "v":
            return
        for rows, weights, name in ((len(x), weights_x, "x"), (len(y), weights_y, "y")):
            if weights is not None:
                raise InputError(
                    f"estimator='unbiased' is for independent draws of equal weight, got weights_{name}; leave them "
                    "out, or use estimator='v'",
                    field=f"weights_{name}",
                )
            if rows < 2:
                raise InputError(
                    f"estimator='unbiased' needs at least 2 rows of each domain, got {rows} for {name}; use a larger "
                    "batch"
                )
        # an energy distance does not depend on the base point
        if not self.kernel.is_fitted and not isinstance(self.kernel, EnergyKernel):
            raise InputError(
                f"{self.kernel!r} would be fitted to the batch, which makes every estimator biased; fit it once on all "
                "features with kernel.fit(features)"
            )

    def _loss(self, x: Tensor, y: Tensor, w_x: Tensor, w_y: Tensor) -> Tensor:
        z, signed = torch.cat([x, y]), torch.cat([w_x, -w_y])
        pairs = torch.outer(signed, signed)
        if self.estimator == "unbiased":
            is_x = torch.arange(len(z), device=z.device) < len(x)
            distinct = torch.cat([z.new_full((n,), n / (n - 1)) for n in (len(x), len(y))])
            pairs = torch.where(is_x[:, None] == is_x, pairs * distinct, pairs).fill_diagonal_(0.0)
        return _pair_sum(fitted_kernel(self.kernel, z.detach(), check_range=False), z, pairs)

    def extra_repr(self) -> str:
        """Name the options."""
        return f"kernel={self.kernel!r}, estimator={self.estimator!r}"


def _pair_sum(kernel: Kernel, z: Tensor, pairs: Tensor) -> Tensor:
    """Σ_ij P_ij κ(z_i, z_j) for rows (b, d) and a symmetric P (b, b)."""
    if type(kernel) is RBFMixture:  # without gradient too: a compiled matrix would differ in the last digit
        if not (torch.is_grad_enabled() and z.requires_grad):
            d2 = squared_distances(z, reach=mixture_reach(kernel.rates))
            return (pairs * _mixture_and_slope(d2, kernel.rates, slope=False)[0]).sum()
        value: Tensor = _MixtureForm.apply(z, pairs, kernel.rates)[0]  # type: ignore[no-untyped-call]
        return value
    return (pairs * kernel.matrix(z).to(z.dtype)).sum()


class _MixtureForm(torch.autograd.Function):
    """Σ_ij P_ij Σ_γ exp(-γ |z_i - z_j|²) for a symmetric P.

    The exponentials of the value are also those of its slope in |z_i - z_j|², and with P symmetric the gradient takes
    one matrix product instead of two.
    """

    @staticmethod
    def forward(z: Tensor, pairs: Tensor, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        d2 = squared_distances(z, reach=mixture_reach(rates))  # as without gradient: the loss has one value
        kernel, slope = _mixture_and_slope(d2, rates)
        return (pairs * kernel).sum(), slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        z, pairs, ctx.rates = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(z, pairs, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        z, pairs, slope = ctx.saved_tensors
        with torch.autocast(z.device.type, enabled=False):
            if torch.is_grad_enabled():  # a second derivative is wanted: the slope must know of z
                d2 = squared_distances(z, reach=mixture_reach(ctx.rates))
                slope = torch.stack([-rate * torch.exp(d2 * -rate) for rate in ctx.rates]).sum(0)
            z = z - z.detach().mean(0)  # the two terms below would cancel far from the origin
            # a row does not pull itself, but its slope is the steepest: rounding would leave some
            pull = (pairs * slope).fill_diagonal_(0.0)
            return 4.0 * grads[0] * (pull.sum(1, keepdim=True) * z - pull @ z), None, None


def _mixture_and_slope(d2: Tensor, rates: Sequence[float], *, slope: bool = True) -> tuple[Tensor, Tensor]:
    """Σ_γ exp(-γ d²) and its derivative in d², unless that is not asked for, for squared distances of any shape."""
    kernel, derivative, term = torch.zeros_like(d2), torch.zeros_like(d2), torch.empty_like(d2)
    for rate in rates:
        # exp(-80) is nothing next to the diagonal, and results that underflow take a CPU ten times longer
        torch.exp(torch.mul(d2, -rate, out=term).clamp_min_(-80.0), out=term)
        kernel += term
        if slope:
            derivative.sub_(term, alpha=rate)
    return kernel, derivative
