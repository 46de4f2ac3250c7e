"""Weighted discrepancies between a source and a target batch of features: MMD² and CORAL.

A batch drawn from strata carries the weights size/n of its rows (sections 2.2 and 2.3); without weights
these are the textbook losses. All are differentiable with respect to the features, follow their device, and
are computed in float32 or float64 with autocast off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.kernels import (
    PAPER_GAMMAS,
    CoralKernel,
    Kernel,
    KernelLike,
    RBFMixture,
    as_kernel,
    fitted_kernel,
    mixture_reach,
    squared_distances,
)
from vardass.validate import ArrayLike, as_weights, check_count, choose

__all__ = ["DOMAINBED_GAMMAS", "CORALLoss", "MMDLoss", "Moments", "coral", "mmd2"]

DOMAINBED_GAMMAS = (*PAPER_GAMMAS, 100.0, 1000.0)
"""Bandwidths of DomainBed's mixture."""


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
    x : Tensor of shape (n_x, d)
        Features of the source batch.
    y : Tensor of shape (n_y, d)
        Features of the target batch; ``n_y`` may differ from ``n_x``.
    weights_x, weights_y : array of shape (n_x,) or (n_y,), optional
        Weights of the rows, which sum to 1. None means uniform.
    kernel : Kernel, str or callable, optional
        Anything that ``as_kernel`` takes; None is the paper's mixture. A kernel that takes a parameter from
        data and is not fitted is fitted on the two batches together, without gradient, at each call.
    estimator : {"v", "u"}
        ``"v"`` counts all pairs, so it is never negative; with μ̂ unbiased it exceeds MMD² by
        Var(μ̂_x) + Var(μ̂_y) on average. ``"u"`` leaves out the pairs of a row with itself and divides the
        within-domain sums by 1 - Σ w². It is unbiased for independent draws from one distribution. For one
        draw from each stratum it is not, as no pair comes from one stratum, but it still lacks the diagonal,
        whose share of the loss rewards a network for shrinking its features under a strong penalty.
    preset : {"paper", "domainbed"}, optional
        Instead of ``kernel``: the mixture with the 5 bandwidths of the paper, or DomainBed's 7. Both use the
        V-statistic.

    Returns
    -------
    Tensor
        A scalar, float64 if either input is and else float32.

    Raises
    ------
    InputError
        If shapes, weights or options do not fit; ``"u"`` needs two rows of positive weight in each domain.
        Values of weights are checked only on the CPU (see ``as_weights``).

    Examples
    --------
    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    >>> mmd2(x, y, kernel="linear")
    tensor(1.)
    >>> mmd2(x, y, kernel="linear", weights_x=[0.25, 0.75], weights_y=[1.0, 0.0])
    tensor(0.2500)
    """
    chosen = _mmd_kernel(kernel, preset)
    pairs_for = "estimator='u'" if choose(estimator, "estimator", _ESTIMATORS) == "u" else None
    x, y = _as_batches(x, y)
    with torch.autocast(x.device.type, enabled=False):
        w_x = _unit_weights(weights_x, x, "weights_x", pairs_for)
        w_y = _unit_weights(weights_y, y, "weights_y", pairs_for)
        pairs = _pair_weights(w_x, w_y, estimator)
        joint = torch.cat([x, y])
        chosen = fitted_kernel(chosen, joint.detach(), check_range=False)
        if type(chosen) is RBFMixture and torch.is_grad_enabled() and joint.requires_grad:
            value: Tensor = _MixtureForm.apply(joint, pairs, chosen.rates)[0]  # type: ignore[no-untyped-call]
            return value
        return (pairs * chosen.matrix(joint).to(joint.dtype)).sum()


def coral(
    x: Tensor,
    y: Tensor,
    *,
    weights_x: ArrayLike | None = None,
    weights_y: ArrayLike | None = None,
    preset: str = "paper",
    include_mean: bool | None = None,
    correction: str | None = None,
    normalization: str | None = None,
    population_x: int | None = None,
    population_y: int | None = None,
) -> Tensor:
    """CORAL, the squared Frobenius distance |R̂_x - R̂_y|² of weighted covariances (section 2.3).

    R̂ = f Σ_h w_h (z_h - μ̂)(z_h - μ̂)ᵀ with μ̂ = Σ_h w_h z_h and a factor f, see ``correction``.

    Parameters
    ----------
    x, y, weights_x, weights_y
        Features (n_x, d) and (n_y, d) and the weights of their rows, as for ``mmd2``.
    preset : {"paper", "domainbed", "deep-coral"}
        Defaults of the three options below.

        ============  ============  ======================================  =============
        preset        include_mean  correction                              normalization
        ============  ============  ======================================  =============
        "paper"       False         "population" if given the populations,  "none"
                                    else "none"
        "domainbed"   True          "batch"                                 "d2"
        "deep-coral"  False         "batch"                                 "4d2"
        ============  ============  ======================================  =============
    include_mean : bool, optional
        Add the squared distance of the means, divided by d unless ``normalization`` is ``"none"``.
    correction : {"none", "batch", "population"}, optional
        The factor f. ``"none"``: 1. ``"batch"``: 1 / (1 - Σ w²), which for uniform weights divides the
        scatter by b - 1, as DomainBed and Deep CORAL do. ``"population"``: n / (n - 1), so that weights
        size/n divide by n - 1, as the paper does. For equal weights the paper's loss is thus smaller than
        one with ``"batch"``, by nearly ((b - 1) / b)²: compare samplers under one correction.
    normalization : {"none", "d2", "4d2"}, optional
        Divide the covariance term by 1, d² or 4 d².
    population_x, population_y : int, optional
        Sizes n of the two data sets, for ``correction="population"``.

    Returns
    -------
    Tensor
        A scalar, float64 if either input is and else float32.

    Raises
    ------
    InputError
        As for ``mmd2``; here ``"batch"`` needs two rows of positive weight in each domain.

    Examples
    --------
    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    >>> coral(x, y), coral(x, y, preset="deep-coral")
    (tensor(9.), tensor(9.))
    """
    populations = (population_x, population_y)
    options = _coral_options(preset, include_mean, correction, normalization, populations)
    return _coral(x, y, weights_x, weights_y, options)


def _coral(
    x: Tensor, y: Tensor, weights_x: ArrayLike | None, weights_y: ArrayLike | None, options: _CoralOptions
) -> Tensor:
    x, y = _as_batches(x, y)
    with torch.autocast(x.device.type, enabled=False):
        w_x, w_y = _coral_weights(x, y, weights_x, weights_y, options)
        # a common shift changes nothing, but without it the means' difference cancels far from the origin
        shift = torch.cat([x.detach(), y.detach()]).mean(0)
        x, y = x - shift, y - shift
        mean_x, mean_y = w_x @ x, w_y @ y
        signed_x = _corrected(w_x, options.correction, options.population_x)
        signed_y = -_corrected(w_y, options.correction, options.population_y)
        gap = _covariance_gap(torch.cat([x - mean_x, y - mean_y]), torch.cat([signed_x, signed_y]))
        return _normalized(gap, mean_x - mean_y, options)


def _normalized(covariance_gap: Tensor, mean_difference: Tensor, options: _CoralOptions) -> Tensor:
    """Scale the squared distance of covariances, and add that of the means (d,) if it is asked for."""
    d = len(mean_difference)
    multiple, power = _NORMALIZATIONS[options.normalization]
    loss = covariance_gap / float(multiple * d**power)
    if options.include_mean:
        loss = loss + mean_difference.square().sum() / float(d ** (power // 2))
    return loss


def _coral_weights(
    x: Tensor, y: Tensor, weights_x: ArrayLike | None, weights_y: ArrayLike | None, options: _CoralOptions
) -> tuple[Tensor, Tensor]:
    pairs_for = "correction='batch'" if options.correction == "batch" else None
    return _unit_weights(weights_x, x, "weights_x", pairs_for), _unit_weights(weights_y, y, "weights_y", pairs_for)


class Moments(NamedTuple):
    """Weighted mean (d,) and covariance (d, d) of a batch."""

    mean: Tensor
    covariance: Tensor


def _moments(z: Tensor, w: Tensor, correction: str, population: int | None) -> Moments:
    mean = w @ z
    centred = z - mean
    return Moments(mean, (centred * _corrected(w, correction, population)[:, None]).T @ centred)


def _corrected(w: Tensor, correction: str, population: int | None) -> Tensor:
    """Weights times the factor f of the covariance."""
    if correction == "batch":
        return w / _pair_share(w)
    return w if population is None else w * (population / (population - 1))


class MMDLoss(nn.Module):
    """``mmd2`` as a module: the options here, the batches and their weights in ``forward``.

    Examples
    --------
    >>> MMDLoss(kernel="laplacian", estimator="u")
    MMDLoss(kernel=LaplacianKernel(gamma=1.0), estimator='u')
    """

    def __init__(self, *, kernel: KernelLike | None = None, estimator: str = "v", preset: str | None = None) -> None:
        super().__init__()
        self.kernel = _mmd_kernel(kernel, preset)
        self.estimator = choose(estimator, "estimator", _ESTIMATORS)

    def forward(
        self, x: Tensor, y: Tensor, weights_x: ArrayLike | None = None, weights_y: ArrayLike | None = None
    ) -> Tensor:
        """Return ``mmd2`` of ``x`` (n_x, d) and ``y`` (n_y, d)."""
        return mmd2(x, y, weights_x=weights_x, weights_y=weights_y, kernel=self.kernel, estimator=self.estimator)

    def extra_repr(self) -> str:
        """Name the options."""
        return f"kernel={self.kernel!r}, estimator={self.estimator!r}"


class CORALLoss(nn.Module):
    """``coral`` as a module: the options here, the batches and their weights in ``forward``.

    Examples
    --------
    >>> CORALLoss(preset="domainbed", include_mean=False)
    CORALLoss(include_mean=False, correction='batch', normalization='d2')
    """

    def __init__(
        self,
        *,
        preset: str = "paper",
        include_mean: bool | None = None,
        correction: str | None = None,
        normalization: str | None = None,
        population_x: int | None = None,
        population_y: int | None = None,
    ) -> None:
        super().__init__()
        populations = (population_x, population_y)
        self.options = _coral_options(preset, include_mean, correction, normalization, populations)

    def forward(
        self, x: Tensor, y: Tensor, weights_x: ArrayLike | None = None, weights_y: ArrayLike | None = None
    ) -> Tensor:
        """Return ``coral`` of ``x`` (n_x, d) and ``y`` (n_y, d)."""
        return _coral(x, y, weights_x, weights_y, self.options)

    def moments(
        self, x: Tensor, y: Tensor, weights_x: ArrayLike | None = None, weights_y: ArrayLike | None = None
    ) -> tuple[Moments, Moments]:
        """Return the weighted mean and covariance of either batch, with this loss's correction.

        ``loss.between(*loss.moments(x, y))`` is ``loss(x, y)`` but for rounding; moments can be averaged over
        batches in between.
        """
        x, y = _as_batches(x, y)
        with torch.autocast(x.device.type, enabled=False):
            w_x, w_y = _coral_weights(x, y, weights_x, weights_y, self.options)
            return (
                _moments(x, w_x, self.options.correction, self.options.population_x),
                _moments(y, w_y, self.options.correction, self.options.population_y),
            )

    def between(self, x: Moments, y: Moments) -> Tensor:
        """Return the loss of two domains with these moments."""
        with torch.autocast(x.mean.device.type, enabled=False):
            gap = (x.covariance - y.covariance).square().sum()
            return _normalized(gap, x.mean - y.mean, self.options)

    def kernel(self, d: int) -> CoralKernel:
        """Return the kernel for which strata of features (n, d) reduce the variance of this loss's statistics.

        With its μ halfway between the means of two batches, MMD² in this kernel is the loss, but for the factor f of
        the covariances, which is near 1 and left out.
        """
        multiple, power = _NORMALIZATIONS[self.options.normalization]
        mean_scale = 1.0 / d ** (power // 2) if self.options.include_mean else 0.0
        return CoralKernel(scale=1.0 / (multiple * d**power), mean_scale=mean_scale)

    def extra_repr(self) -> str:
        """Name the options."""
        given = {name: value for name, value in self.options._asdict().items() if value is not None}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


_ESTIMATORS = ("v", "u")
_MIXTURES = {"paper": PAPER_GAMMAS, "domainbed": DOMAINBED_GAMMAS}
_CORRECTIONS = ("none", "batch", "population")
_NORMALIZATIONS = {"none": (1, 0), "d2": (1, 2), "4d2": (4, 2)}  # (a, p): divide by a times d to the power p


class _CoralOptions(NamedTuple):
    include_mean: bool
    correction: str
    normalization: str
    population_x: int | None = None
    population_y: int | None = None


_CORAL_PRESETS = {
    "paper": _CoralOptions(False, "none", "none"),
    "domainbed": _CoralOptions(True, "batch", "d2"),
    "deep-coral": _CoralOptions(False, "batch", "4d2"),
}


def _mmd_kernel(kernel: KernelLike | None, preset: str | None) -> Kernel:
    if preset is None:
        return RBFMixture() if kernel is None else as_kernel(kernel)
    if kernel is not None:
        raise InputError(f"preset={preset!r} chooses the kernel, but kernel={kernel!r} is given; leave out one")
    return RBFMixture(_MIXTURES[choose(preset, "preset", _MIXTURES)])


def _coral_options(
    preset: str,
    include_mean: bool | None,
    correction: str | None,
    normalization: str | None,
    populations: tuple[int | None, int | None],
) -> _CoralOptions:
    default = _CORAL_PRESETS[choose(preset, "preset", _CORAL_PRESETS)]
    given = [size is not None for size in populations]
    if correction is None:
        correction = "population" if preset == "paper" and any(given) else default.correction
    choose(correction, "correction", _CORRECTIONS)
    if any(given) != (correction == "population") or any(given) != all(given):
        raise InputError(
            "correction='population' needs population_x and population_y, others take neither; got "
            f"correction={correction!r}, population_x={populations[0]}, population_y={populations[1]}"
        )
    for size, name in zip(populations, ("population_x", "population_y")):
        if size is not None:
            check_count(size, name, low=2, remedy="pass the number of rows of the data set")
    return _CoralOptions(
        default.include_mean if include_mean is None else include_mean,
        correction,
        choose(normalization or default.normalization, "normalization", _NORMALIZATIONS),
        *populations,
    )


def _as_batches(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Check the two batches and bring both to one dtype, float32 or float64."""
    for batch, name in ((x, "x"), (y, "y")):
        if not isinstance(batch, Tensor) or not batch.is_floating_point():
            kind = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
            raise InputError(f"{name} must be a tensor of floats, got {kind}; use torch.as_tensor(...).float()")
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or 0 in (*x.shape, *y.shape):
        raise InputError(
            "x and y must have shapes (n_x, d) and (n_y, d) with the same d and at least one row, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}; flatten each sample with .flatten(1)"
        )
    if x.device != y.device:
        raise InputError(f"x is on {x.device} and y on {y.device}; move one with .to(device)")
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype), y.to(dtype)


def _unit_weights(weights: ArrayLike | None, batch: Tensor, name: str, pairs_for: str | None) -> Tensor:
    """Weights of the rows, uniform by default. ``pairs_for`` names what needs two rows, if anything does."""
    n = len(batch)
    w = as_weights(weights, n, batch, name)
    if pairs_for is not None:
        # on a GPU the count would stop the training loop to wait for the device
        rows = n if w is None or w.device.type != "cpu" else int(w.count_nonzero())
        if rows < 2:
            raise InputError(
                f"{pairs_for} needs at least 2 rows of positive weight in each domain, got {rows} of {n} for "
                f"{name}; use a larger batch or another option"
            )
    if w is None:
        return batch.new_full((n,), 1.0 / n)
    # sums that are off by rounding would be multiplied by the features' distance from the origin
    return w / w.sum()


def _pair_share(w: Tensor) -> Tensor:
    """1 - Σ w², the total weight of pairs of distinct rows, without cancellation for a weight near 1."""
    return (w * (1.0 - w)).sum()


def _pair_weights(w_x: Tensor, w_y: Tensor, estimator: str) -> Tensor:
    """The matrix P with MMD² = Σ_ij P_ij κ(z_i, z_j) over the rows of both batches."""
    signed = torch.cat([w_x, -w_y])
    pairs = torch.outer(signed, signed)
    if estimator == "u":
        n_x = len(w_x)
        pairs[:n_x, :n_x] /= _pair_share(w_x)
        pairs[n_x:, n_x:] /= _pair_share(w_y)
        pairs.fill_diagonal_(0.0)
    return pairs


class _MixtureForm(torch.autograd.Function):
    """Σ_ij P_ij Σ_γ exp(-γ |z_i - z_j|²) for a symmetric P.

    The exponentials of the value are also those of its slope in |z_i - z_j|², and with P symmetric the
    gradient takes one matrix product instead of two: the joint matrix then costs less than its three blocks
    under plain autograd.
    """

    @staticmethod
    def forward(z: Tensor, pairs: Tensor, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the form, and its slope in each squared distance for the gradient."""
        d2 = squared_distances(z, reach=mixture_reach(rates))  # as without gradient: the loss has one value
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
                d2 = squared_distances(z, reach=mixture_reach(ctx.rates))
                slope = torch.stack([-rate * torch.exp(d2 * -rate) for rate in ctx.rates]).sum(0)
            z = z - z.detach().mean(0)  # the two terms below would cancel far from the origin
            # a row does not pull itself, but its slope is the steepest: rounding would leave some
            pull = (pairs * slope).fill_diagonal_(0.0)
            return 4.0 * grads[0] * (pull.sum(1, keepdim=True) * z - pull @ z), None, None


def _covariance_gap(z: Tensor, signed: Tensor) -> Tensor:
    """|Σ_i c_i z_i z_iᵀ|_F² for centred rows ``z`` (m, d) and signed weights c (m,)."""
    m, d = z.shape
    if d >= 2 * m and z.device.type == "cpu":
        # Σ_ij c_i c_j <z_i, z_j>² needs only (m, m), but its terms cancel when the covariances are close:
        # double precision makes up for that, and on a CPU it is cheap enough
        z, c = z.double(), signed.double()
        return (c @ ((z @ z.T).square() @ c)).clamp_min(0.0).to(signed.dtype)
    return ((z * signed[:, None]).T @ z).square().sum()
