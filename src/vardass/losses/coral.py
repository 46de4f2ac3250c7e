"""CORAL: the squared distance of the covariances of two weighted batches, and of their means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import CoralKernel
from vardass.losses.base import DiscrepancyLoss
from vardass.validate import ArrayLike, check_count, choose, is_readable

_WEIGHTS = {  # of R, in words
    "none": "with weights |S_h| / n",
    "batch": "over 1 − Σw², which is over b − 1 for uniform batches",
    "population": "with weights |S_h| / (n − 1)",
}
_NORMALIZATIONS = {"none": (1, 0), "d2": (1, 2), "4d2": (4, 2)}  # (a, p): divide by a times d to the power p
_PRESETS = {  # include_mean, correction, normalization
    "paper": (False, "none", "none"),
    "domainbed": (True, "batch", "d2"),
    "deep-coral": (False, "batch", "4d2"),
}


def coral(
    x: Tensor,
    y: Tensor,
    *,
    weights_x: ArrayLike | None = None,
    weights_y: ArrayLike | None = None,
    **options: Any,
) -> Tensor:
    """CORAL, the squared Frobenius distance |R̂_x - R̂_y|² of weighted covariances (section 2.3).

    R̂ = f Σ_h w_h (z_h - μ̂)(z_h - μ̂)ᵀ with μ̂ = Σ_h w_h z_h and a factor f, see ``correction``.

    Parameters
    ----------
    x, y, weights_x, weights_y
        Features (n_x, d) and (n_y, d) and the weights of their rows, as for ``mmd2``.
    preset : {"paper", "domainbed", "deep-coral"}
        Sets the defaults of the next three options; ``"paper"`` by default.

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
        The factor f. ``"none"``: 1. ``"batch"``: 1 / (1 - Σ w²), for uniform weights b / (b - 1) as in DomainBed and
        Deep CORAL. ``"population"``: n / (n - 1), as in the paper. Compare samplers under one correction.
    normalization : {"none", "d2", "4d2"}, optional
        Divide the covariance term by 1, d² or 4 d².
    population_x, population_y : int, optional
        Sizes n of the two data sets, for ``correction="population"``.

    Returns
    -------
    Tensor
        A scalar, as for ``mmd2``.

    Examples
    --------
    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    >>> coral(x, y), coral(x, y, preset="deep-coral")
    (tensor(9.), tensor(9.))
    """
    return CORALLoss(**options).forward(x, y, weights_x, weights_y)


class CORALLoss(DiscrepancyLoss):
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
        means, usual, by = _PRESETS[choose(preset, "preset", _PRESETS)]
        given = [size is not None for size in (population_x, population_y)]
        if correction is None:
            correction = "population" if preset == "paper" and any(given) else usual
        self.include_mean = means if include_mean is None else include_mean
        self.correction = choose(correction, "correction", _WEIGHTS)
        self.normalization = choose(normalization or by, "normalization", _NORMALIZATIONS)
        self.populations: tuple[int | None, int | None] = (None, None)
        if any(given) != (correction == "population") or any(given) != all(given):
            raise InputError(
                "correction='population' needs population_x and population_y, others take neither; got "
                f"correction={correction!r}, population_x={population_x}, population_y={population_y}"
            )
        if population_x is not None and population_y is not None:
            self.use_populations(population_x, population_y)

    def use_populations(self, x: int, y: int) -> None:
        """Switch to ``correction="population"``, for data sets with x and y rows: divide covariances by n - 1."""
        for size, name in ((x, "population_x"), (y, "population_y")):
            check_count(size, name, low=2, remedy="pass the number of rows of the data set")
        self.correction, self.populations = "population", (x, y)

    def _check(self, x: Tensor, y: Tensor, weights_x: Tensor | None, weights_y: Tensor | None) -> None:
        for weights, name in ((weights_x, "x"), (weights_y, "y")):
            if self.correction == "batch" and weights is not None and is_readable(weights):
                _require_pairs(int(weights.count_nonzero()), len(weights), name)

    def _loss(self, x: Tensor, y: Tensor, w_x: Tensor, w_y: Tensor) -> Tensor:
        # a common shift changes nothing, but without it the means' difference cancels far from the origin
        shift = torch.cat([x.detach(), y.detach()]).mean(0)
        x, y = x - shift, y - shift
        mean_x, mean_y = w_x @ x, w_y @ y
        f_x, f_y = map(self._corrected, (w_x, w_y), self.populations, "xy")
        gap = _covariance_gap(torch.cat([x - mean_x, y - mean_y]), torch.cat([f_x, -f_y]))
        of = self.kernel(x.shape[1])
        loss = of.scale * gap
        return loss + of.mean_scale * (mean_x - mean_y).square().sum() if self.include_mean else loss

    def _corrected(self, w: Tensor, population: int | None, name: str) -> Tensor:
        """Weights times the factor f of the covariance."""
        if self.correction != "batch":
            return w if population is None else w * (population / (population - 1))
        _require_pairs(len(w), len(w), name)
        return w / (w * (1.0 - w)).sum()  # 1 - Σ w², without cancellation for a weight near 1

    @property
    def formula(self) -> str:
        """The loss in one line, for tables."""
        multiple, power = _NORMALIZATIONS[self.normalization]
        by_d, by_root = (f" / {'4' if multiple == 4 else ''}d²", " / d") if power else ("", "")
        means = f" + |μ_s − μ_t|²{by_root}" if self.include_mean else ""
        return f"|R_s − R_t|²{by_d}{means}, R {_WEIGHTS[self.correction]}"

    def kernel(self, d: int) -> CoralKernel:
        """Return the kernel for which strata of features (n, d) reduce the variance of this loss's statistics.

        With its μ halfway between the means of two batches, MMD² in this kernel is the loss, but for the factor f.
        """
        multiple, power = _NORMALIZATIONS[self.normalization]
        mean_scale = 1.0 / d ** (power // 2) if self.include_mean else 0.0
        return CoralKernel(scale=1.0 / (multiple * d**power), mean_scale=mean_scale)

    def extra_repr(self) -> str:
        """Name the options."""
        names = ["include_mean", "correction", "normalization"]
        shown = [f"{name}={getattr(self, name)!r}" for name in names]
        if self.populations != (None, None):
            shown[3:3] = [f"population_x={self.populations[0]}", f"population_y={self.populations[1]}"]
        return ", ".join(shown)


def _require_pairs(positive: int, rows: int, name: str) -> None:
    if positive < 2:
        raise InputError(
            f"correction='batch' needs at least 2 rows of positive weight in each domain, got {positive} of {rows} for "
            f"weights_{name}; use a larger batch or another option"
        )


def _covariance_gap(z: Tensor, signed: Tensor) -> Tensor:
    """|Σ_i c_i z_i z_iᵀ|_F² for centred rows ``z`` (m, d) and signed weights c (m,)."""
    m, d = z.shape
    if d >= 2 * m and z.device.type == "cpu":
        # Σ_ij c_i c_j <z_i, z_j>² needs only (m, m), but its terms cancel when the covariances are close:
        # double precision makes up for that, and on a CPU it is cheap enough
        z, c = z.double(), signed.double()
        return (c @ ((z @ z.T).square() @ c)).clamp_min(0.0).to(signed.dtype)
    return ((z * signed[:, None]).T @ z).square().sum()
