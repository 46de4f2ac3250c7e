"""CORAL: the distance between the covariances of source and target features."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from vardass.adapt.algorithms.base import CommonOptions
from vardass.adapt.algorithms.mmd import Discrepancy
from vardass.adapt.algorithms.moving import MovingAverage
from vardass.adapt.networks import Network
from vardass.losses import _NORMALIZATIONS, CORALLoss, _corrected, _unit_weights

__all__ = ["CORAL"]


class CORAL(Discrepancy):
    """Cross-entropy + λ |R_s - R_t|² (section 2.3).

    Parameters
    ----------
    penalty : float
        λ.
    preset, include_mean, correction, normalization, population_x, population_y
        See ``vardass.losses.coral``; the paper does not say which normalisation its runs used.
    ema : float
        β of a moving average of the means and the covariances (see ``MovingAverage``). 0 is the loss of the
        batch. The state has 2 (d² + d) numbers.
    **common
        See ``Algorithm``.
    """

    name: ClassVar[str] = "coral"

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        penalty: float = 1.0,
        preset: str = "paper",
        include_mean: bool | None = None,
        correction: str | None = None,
        normalization: str | None = None,
        population_x: int | None = None,
        population_y: int | None = None,
        ema: float = 0.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(network, num_classes, penalty=penalty, ema=ema, **common)
        self.loss = CORALLoss(
            preset=preset,
            include_mean=include_mean,
            correction=correction,
            normalization=normalization,
            population_x=population_x,
            population_y=population_y,
        )
        if self.ema:
            d = network.feature_dim
            self.mean_s, self.mean_t = MovingAverage(self.ema, (d,)), MovingAverage(self.ema, (d,))
            self.covariance_s, self.covariance_t = MovingAverage(self.ema, (d, d)), MovingAverage(self.ema, (d, d))

    def discrepancy(self, z_s: Tensor, z_t: Tensor, w_s: Tensor | None, w_t: Tensor | None) -> Tensor:
        """Return CORAL of the batches, or of the averaged means and covariances."""
        if not self.ema:
            value: Tensor = self.loss(z_s, z_t, w_s, w_t)
            return value
        options = self.loss.options
        multiple, power = _NORMALIZATIONS[options.normalization]
        d = z_s.shape[1]
        with torch.autocast(z_s.device.type, enabled=False):
            mean_s, r_s = self._moments(z_s, w_s, "weights_x", options.population_x)
            mean_t, r_t = self._moments(z_t, w_t, "weights_y", options.population_y)
            gap: Tensor = (self.covariance_s(r_s) - self.covariance_t(r_t)).square().sum() / (multiple * d**power)
            if options.include_mean:
                means: Tensor = self.mean_s(mean_s) - self.mean_t(mean_t)
                gap = gap + means.square().sum() / d ** (power // 2)
            return gap

    def _moments(self, z: Tensor, weights: Tensor | None, name: str, population: int | None) -> tuple[Tensor, Tensor]:
        z = z if z.dtype == torch.float64 else z.float()
        correction = self.loss.options.correction
        w = _unit_weights(weights, z, name, "correction='batch'" if correction == "batch" else None)
        mean = w @ z
        centred = z - mean
        return mean, (centred * _corrected(w, correction, population)[:, None]).T @ centred
