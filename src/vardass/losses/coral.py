"""CORAL: the squared distance of the covariances of two weighted batches, and of their means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import CoralKernel, Kernel
from vardass.losses.estimators import Batch, CheckedBatch, DiscrepancyLoss, Pair
from vardass.losses.mmd import estimate
from vardass.validate import ArrayLike, check_count, choose

_WEIGHTS = {  # of R, in words
    "none": "with weights |S_h| / n",
    "batch": "over 1 − Σw², which is over b − 1 for uniform batches",
    "population": "with weights |S_h| / (n − 1)",
}
_NORMALIZATIONS = {"none": (1, 0), "d2": (1, 2), "4d2": (4, 2)}  # (a, p): divide by a times d to the power p


class _CoralOptions(NamedTuple):
    include_mean: bool
    correction: str
    normalization: str
    population_x: int | None = None
    population_y: int | None = None

    def kernel(self, d: int) -> CoralKernel:
        """Scales of the two terms for d features."""
        multiple, power = _NORMALIZATIONS[self.normalization]
        mean_scale = 1.0 / d ** (power // 2) if self.include_mean else 0.0
        return CoralKernel(scale=1.0 / (multiple * d**power), mean_scale=mean_scale)


_CORAL_PRESETS = {
    "paper": _CoralOptions(False, "none", "none"),
    "domainbed": _CoralOptions(True, "batch", "d2"),
    "deep-coral": _CoralOptions(False, "batch", "4d2"),
}


class CoralForm(TypedDict, total=False):
    """Options of CORAL's formula, see `coral`."""

    preset: str
    include_mean: bool | None
    correction: str | None
    normalization: str | None
    population_x: int | None
    population_y: int | None


def coral(
    x: Tensor | Batch,
    y: Tensor | Batch,
    *,
    weights_x: ArrayLike | None = None,
    weights_y: ArrayLike | None = None,
    estimator: str = "v",
    **form: Unpack[CoralForm],
) -> Tensor:
    """CORAL, the squared Frobenius distance |R̂_x - R̂_y|² of weighted covariances (section 2.3).

    R̂ = f Σ_h w_h (z_h - μ̂)(z_h - μ̂)ᵀ with μ̂ = Σ_h w_h z_h and a factor f, see ``correction``.

    Parameters
    ----------
    x, y, weights_x, weights_y
        Features (n_x, d) and (n_y, d) and the weights of their rows, or Batches, as for ``mmd2``.
    preset : {"paper", "domainbed", "deep-coral"}
        Defaults of the next three options; ``"paper"`` if it is not given.

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
        size/n divide by n - 1, as the paper does. Compare samplers under one correction.
    normalization : {"none", "d2", "4d2"}, optional
        Divide the covariance term by 1, d² or 4 d².
    population_x, population_y : int, optional
        Sizes n of the two data sets, for ``correction="population"``.
    estimator : {"v", "unbiased", "reference"}
        ``"v"`` is the formula above. ``"unbiased"`` (or ``"u"``) and ``"reference"`` have the mean and the mean
        gradient of the loss of all data, with the same options and f = n / (n - 1) for ``"population"``, else 1. Both
        take covariances about the ``mean`` of a `Bank`, which both domains must have: the products of centred features
        are then the φ of ``vardass.losses.estimators``.

    Returns
    -------
    Tensor
        A scalar, float64 if either input is and else float32.

    Examples
    --------
    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    >>> coral(x, y), coral(x, y, preset="deep-coral")
    (tensor(9.), tensor(9.))
    """
    return CORALLoss(estimator=estimator, **form).forward(x, y, weights_x, weights_y)


def _of_batch(sides: Pair, options: _CoralOptions) -> Tensor:
    """The V-statistic."""
    for side in sides:
        _require_two_rows(side, options)
    (x, w_x), (y, w_y) = ((side.z, side.w) for side in sides)
    # a common shift changes nothing, but without it the means' difference cancels far from the origin
    shift = torch.cat([x.detach(), y.detach()]).mean(0)
    x, y = x - shift, y - shift
    mean_x, mean_y = w_x @ x, w_y @ y
    signed_x = _corrected(w_x, options.correction, options.population_x)
    signed_y = -_corrected(w_y, options.correction, options.population_y)
    gap = _covariance_gap(torch.cat([x - mean_x, y - mean_y]), torch.cat([signed_x, signed_y]))
    of = options.kernel(x.shape[1])
    loss = of.scale * gap
    return loss + of.mean_scale * (mean_x - mean_y).square().sum() if options.include_mean else loss


def _of_all_data(sides: Pair, options: _CoralOptions, name: str) -> Tensor:
    """The unbiased or the reference estimator: MMD² in the products of rows that are centred by their own bank's mean.

    The centre may be detached: the covariance about the mean has no derivative in the mean.
    """
    for side in sides:
        if side.bank is None:
            raise InputError(
                f"estimator={name!r} centres by the mean of all data, but {side.name} has no bank; pass "
                "Batch(z, weights=..., bank=bank.features()) with that of a FeatureBank"
            )
    means = [side.bank.mean for side in sides if side.bank is not None and side.bank.mean is not None]
    centre = (means[0] + means[1]) / 2.0
    populations = (options.population_x, options.population_y)
    x, y = (_lifted(side, centre, population) for side, population in zip(sides, populations))
    of = options.kernel(sides[0].z.shape[1])
    return estimate((x, y), _LiftedKernel(of.scale, of.mean_scale), name)


def _lifted(side: CheckedBatch, centre: Tensor, population: int | None) -> CheckedBatch:
    """Rows [√f (z - μ), z - c] of a batch and of its bank, with μ the bank's mean."""
    bank = side.bank
    assert bank is not None
    assert bank.mean is not None
    mean, root = bank.mean, 1.0 if population is None else (population / (population - 1)) ** 0.5

    def lift(z: Tensor) -> Tensor:
        return torch.cat([root * (z - mean), z - centre], 1)

    return side._replace(z=lift(side.z), bank=bank._replace(rows=lift(bank.rows)))


@dataclass(frozen=True)
class _LiftedKernel(Kernel):
    """a (uᵀu')² + b vᵀv' of rows [u, v]."""

    scale: float
    mean_scale: float

    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor:
        (u, v), (s, t) = x.chunk(2, 1), (x if y is None else y).chunk(2, 1)
        return self.scale * (u @ s.T).square() + self.mean_scale * (v @ t.T)

    def paired(self, x: Tensor, y: Tensor) -> Tensor:
        u, v = (x * y).chunk(2, 1)
        return self.scale * u.sum(1).square() + self.mean_scale * v.sum(1)

    def _diag(self, x: Tensor) -> Tensor:
        return self.paired(x, x)


def _require_two_rows(side: CheckedBatch, options: _CoralOptions) -> None:
    if options.correction != "batch":
        return
    # on a GPU the count would stop the training loop to wait for the device
    n = len(side.w)
    rows = n if side.w.device.type != "cpu" else int(side.w.count_nonzero())
    if rows < 2:
        raise InputError(
            f"correction='batch' needs at least 2 rows of positive weight in each domain, got {rows} of {n} for "
            f"weights_{side.name}; use a larger batch or another option"
        )


def _corrected(w: Tensor, correction: str, population: int | None) -> Tensor:
    """Weights times the factor f of the covariance."""
    if correction == "batch":
        return w / (w * (1.0 - w)).sum()  # 1 - Σ w², without cancellation for a weight near 1
    return w if population is None else w * (population / (population - 1))


class CORALLoss(DiscrepancyLoss):
    """``coral`` as a module: the options here, the batches and their weights in ``forward``.

    Examples
    --------
    >>> CORALLoss(preset="domainbed", include_mean=False)
    CORALLoss(include_mean=False, correction='batch', normalization='d2', estimator='v')
    """

    def __init__(
        self,
        *,
        estimator: str = "v",
        preset: str = "paper",
        include_mean: bool | None = None,
        correction: str | None = None,
        normalization: str | None = None,
        population_x: int | None = None,
        population_y: int | None = None,
    ) -> None:
        super().__init__(estimator)
        default = _CORAL_PRESETS[choose(preset, "preset", _CORAL_PRESETS)]
        populations = {"population_x": population_x, "population_y": population_y}
        given = [size is not None for size in populations.values()]
        if correction is None:
            correction = "population" if preset == "paper" and any(given) else default.correction
        choose(correction, "correction", _WEIGHTS)
        if any(given) != (correction == "population") or any(given) != all(given):
            raise InputError(
                "correction='population' needs population_x and population_y, others take neither; got "
                f"correction={correction!r}, population_x={population_x}, population_y={population_y}"
            )
        for name, size in populations.items():
            if size is not None:
                check_count(size, name, low=2, remedy="pass the number of rows of the data set")
        self.options = _CoralOptions(
            default.include_mean if include_mean is None else include_mean,
            correction,
            choose(normalization or default.normalization, "normalization", _NORMALIZATIONS),
            **populations,
        )

    def _loss(self, pair: Pair) -> Tensor:
        if self.estimator == "v":
            return _of_batch(pair, self.options)
        return _of_all_data(pair, self.options, self.estimator)

    def use_populations(self, x: int, y: int) -> None:
        """Divide covariances by n - 1 of data sets with so many rows, ``correction="population"``, from now on."""
        means, _, normalization, *_ = self.options
        self.options = CORALLoss(
            include_mean=means, correction="population", normalization=normalization, population_x=x, population_y=y
        ).options

    @property
    def formula(self) -> str:
        """The loss in one line, for tables."""
        multiple, power = _NORMALIZATIONS[self.options.normalization]
        by_d, by_root = (f" / {'4' if multiple == 4 else ''}d²", " / d") if power else ("", "")
        means = f" + |μ_s − μ_t|²{by_root}" if self.options.include_mean else ""
        return f"|R_s − R_t|²{by_d}{means}, R {_WEIGHTS[self.options.correction]}"

    def kernel(self, d: int) -> CoralKernel:
        """Return the kernel for which strata of features (n, d) reduce the variance of this loss's statistics.

        With its μ halfway between the means of two batches, MMD² in this kernel is the loss, but for the factor f of
        the covariances, which is near 1 and left out.
        """
        return self.options.kernel(d)

    def extra_repr(self) -> str:
        """Name the options."""
        given = {name: value for name, value in self.options._asdict().items() if value is not None}
        given["estimator"] = self.estimator
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _covariance_gap(z: Tensor, signed: Tensor) -> Tensor:
    """|Σ_i c_i z_i z_iᵀ|_F² for centred rows ``z`` (m, d) and signed weights c (m,)."""
    m, d = z.shape
    if d >= 2 * m and z.device.type == "cpu":
        # Σ_ij c_i c_j <z_i, z_j>² needs only (m, m), but its terms cancel when the covariances are close:
        # double precision makes up for that, and on a CPU it is cheap enough
        z, c = z.double(), signed.double()
        return (c @ ((z @ z.T).square() @ c)).clamp_min(0.0).to(signed.dtype)
    return ((z * signed[:, None]).T @ z).square().sum()
