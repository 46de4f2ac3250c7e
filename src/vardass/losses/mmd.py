"""Squared maximum mean discrepancy of two weighted batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
from vardass.losses.estimators import (
    Batch,
    DiscrepancyLoss,
    Pair,
    single_draw_terms,
    unbiased_pair_weights,
    with_doubled_gradient,
)
from vardass.validate import ArrayLike, choose

DOMAINBED_GAMMAS = (*PAPER_GAMMAS, 100.0, 1000.0)
"""Bandwidths of DomainBed's mixture."""

_MIXTURES = {"paper": PAPER_GAMMAS, "domainbed": DOMAINBED_GAMMAS}


def mmd2(
    x: Tensor | Batch,
    y: Tensor | Batch,
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
    x, y : Tensor of shape (n_x, d) and (n_y, d), or Batch
        Features of the source and the target batch; a `Batch` has weights, strata and banks too.
    weights_x, weights_y : array of shape (n_x,) or (n_y,), optional
        Weights of the rows of a tensor, which sum to 1. None means uniform.
    kernel : Kernel, str or callable, optional
        Anything that ``as_kernel`` takes; None is the paper's mixture, and with ``"energy"`` the result is the energy
        distance 2 E|x - y| - E|x - x'| - E|y - y'| (twice the ``SamplesLoss("energy")`` of geomloss). An unfitted
        kernel is fitted at each call, without gradient: on the two banks if given, otherwise on the two batches (not
        for ``"unbiased"``).
    estimator : {"v", "unbiased", "reference"}
        ``"v"`` counts all pairs, so it is never negative; with μ̂ unbiased it exceeds MMD² by
        Var(μ̂_x) + Var(μ̂_y) on average. ``"unbiased"`` and ``"reference"`` have the mean and the mean gradient of the
        MMD² of all data and may be negative. ``"unbiased"`` uses pairs of independent rows: of a uniform draw, or, with
        weights, of the ``strata`` of a `Batch`. ``"reference"`` compares with the ``bank`` of a `Batch`, for any
        weights and for coupled rows. See ``vardass.losses.estimators``.
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
    loss = MMDLoss(kernel=kernel, estimator=estimator, preset=preset)
    return loss.forward(x, y, weights_x, weights_y)


def _fitted(kernel: Kernel, sides: Pair, estimator: str) -> Kernel:
    banks = [side.bank.rows for side in sides if side.bank is not None]
    # without strata an energy distance does not depend on the base point
    needs_banks = not isinstance(kernel, EnergyKernel) or any(side.strata is not None for side in sides)
    if estimator == "unbiased" and not kernel.is_fitted and len(banks) < 2 and needs_banks:
        raise InputError(
            f"{kernel!r} would be fitted to the batch, which makes every estimator biased; fit it once on "
            "all features, kernel.fit(features), or pass Batches with banks"
        )
    rows = banks if len(banks) == 2 else [side.z.detach() for side in sides]
    return kernel if kernel.is_fitted else fitted_kernel(kernel, torch.cat(rows), check_range=False)


def estimate(sides: Pair, kernel: Kernel, estimator: str) -> Tensor:
    """MMD² in a fitted kernel."""
    x, y = sides
    z, signed = torch.cat([x.z, y.z]), torch.cat([x.w, -y.w])
    if estimator == "reference":  # <μ̂_x - μ̂_y, B_x - B_y>
        bank_x, bank_y = (side.need_bank(estimator) for side in sides)
        rows, v = torch.cat([bank_x.rows, bank_y.rows]), torch.cat([bank_x.weights, -bank_y.weights])
        return with_doubled_gradient(_bilinear(kernel, z, signed, rows, v))
    pairs = torch.outer(signed, signed)
    if estimator == "v":
        return _pair_sum(kernel, z, pairs)
    n_x = len(x.w)
    pairs[:n_x, :n_x], pairs[n_x:, n_x:] = unbiased_pair_weights(x), unbiased_pair_weights(y)
    missing = [single_draw_terms(side, kernel) for side in sides]
    return sum((term for term in missing if term is not None), _pair_sum(kernel, z, pairs))


class MMDLoss(DiscrepancyLoss):
    """``mmd2`` as a module: the options here, the batches in ``forward``.

    Examples
    --------
    >>> MMDLoss(kernel="linear", estimator="unbiased")
    MMDLoss(kernel=LinearKernel(), estimator='unbiased')
    """

    def __init__(self, *, kernel: KernelLike | None = None, estimator: str = "v", preset: str | None = None) -> None:
        super().__init__(estimator)
        if preset is not None and kernel is not None:
            raise InputError(f"preset={preset!r} chooses the kernel, but kernel={kernel!r} is given; leave out one")
        if kernel is None:
            kernel = RBFMixture(_MIXTURES[choose("paper" if preset is None else preset, "preset", _MIXTURES)])
        self.kernel = as_kernel(kernel)

    def _loss(self, pair: Pair) -> Tensor:
        return estimate(pair, _fitted(self.kernel, pair, self.estimator), self.estimator)

    def extra_repr(self) -> str:
        """Name the options."""
        return f"kernel={self.kernel!r}, estimator={self.estimator!r}"


def _pair_sum(kernel: Kernel, z: Tensor, pairs: Tensor) -> Tensor:
    """Σ_ij P_ij κ(z_i, z_j) for rows (b, d) and a symmetric P (b, b)."""
    if type(kernel) is RBFMixture:  # without gradient too: a compiled matrix would differ in the last digit
        value: Tensor = _MixtureForm.apply(z, pairs, kernel.rates)[0]  # type: ignore[no-untyped-call]
        return value
    return (pairs * kernel.matrix(z).to(z.dtype)).sum()


def _bilinear(kernel: Kernel, z: Tensor, c: Tensor, rows: Tensor, v: Tensor) -> Tensor:
    """Σ_ij c_i v_j κ(z_i, r_j) for rows z (b, d) and r (m, d), of which z alone has a gradient."""
    if type(kernel) is RBFMixture and torch.is_grad_enabled() and z.requires_grad:
        value: Tensor = _MixtureBilinear.apply(z, c, rows, v, kernel.rates)[0]  # type: ignore[no-untyped-call]
        return value
    return c @ (kernel.matrix(z, rows).to(z.dtype) @ v)


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


class _MixtureBilinear(torch.autograd.Function):
    """Σ_ij c_i v_j Σ_γ exp(-γ |z_i - r_j|²); found with its gradient, without a graph of (b, m) matrices."""

    @staticmethod
    def forward(z: Tensor, c: Tensor, rows: Tensor, v: Tensor, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        kernel, slope = _mixture_and_slope(squared_distances(z, rows, reach=mixture_reach(rates)), rates)
        shift = rows.mean(0)  # the two terms below would cancel far from the origin
        pull = slope * v
        gradient = pull.sum(1, keepdim=True) * (z - shift) - pull @ (rows - shift)
        return c @ (kernel @ v), 2.0 * c[:, None] * gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None, None, None


def _mixture_and_slope(d2: Tensor, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Σ_γ exp(-γ d²) and its derivative in d², for squared distances of any shape."""
    kernel, slope, term = torch.zeros_like(d2), torch.zeros_like(d2), torch.empty_like(d2)
    for rate in rates:
        # exp(-80) is nothing next to the diagonal, and results that underflow take a CPU ten times longer
        torch.exp(torch.mul(d2, -rate, out=term).clamp_min_(-80.0), out=term)
        kernel += term
        slope.sub_(term, alpha=rate)
    return kernel, slope
