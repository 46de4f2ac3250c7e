"""CORAL: the distance between the covariances of source and target features."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from vardass.adapt.algorithms.mmd import Discrepancy, DiscrepancyOptions
from vardass.adapt.algorithms.moving_average import MovingAverage
from vardass.adapt.networks import Network
from vardass.errors import InputError
from vardass.kernels import CoralKernel
from vardass.losses import CORALLoss, Draws, Moments

__all__ = ["CORAL"]


class CORAL(Discrepancy):
    """Cross-entropy + λ CORAL: the distance of the covariances R_s and R_t (section 2.3), and of the means.

    The paper's formula is |R_s - R_t|², which grows with d²: λ = 1 then means at d = 512 what 262,144 means at
    d = 1. Its experiments ran in DomainBed, whose CORAL is |R_s - R_t|² / d² + |μ_s - μ_t|² / d, so that λ means the
    same for all networks, and the range 10^U(-1, 1) of its search is made for that one. The default is the
    experiments' form, ``preset="domainbed"``; the formula is ``preset="paper"``, with the weights |S_h| / (n - 1) of
    the strata that it prints. Strata are made by the kernel of the loss, which for ``"paper"`` is the paper's κ_c.

    Parameters
    ----------
    preset, include_mean, correction, normalization, population_x, population_y
        See ``vardass.losses.coral``. Where the populations are needed and not given, the trainer takes them from the
        data; in a loop of your own `use_populations` does. Until then ``preset="paper"`` has weights |S_h| / n.
    **shared
        See ``Discrepancy`` and ``Algorithm``. ``ema`` averages means and covariances, 2 (d² + d) numbers.

    Examples
    --------
    >>> import torch
    >>> from vardass.adapt import Batch, make_network
    >>> rule = CORAL(make_network("mlp", (3,), 2, hidden=(4,)), 2)
    >>> x = torch.randn(4, 3)
    >>> losses = rule.losses(Batch(x, torch.tensor([0, 1, 0, 1])), Batch(x), 0)
    >>> losses["coral"].item() < 1e-9  # the batches are equal
    True
    """

    name: ClassVar[str] = "coral"

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        preset: str = "domainbed",
        include_mean: bool | None = None,
        correction: str | None = None,
        normalization: str | None = None,
        population_x: int | None = None,
        population_y: int | None = None,
        **shared: Unpack[DiscrepancyOptions],
    ) -> None:
        super().__init__(network, num_classes, **shared)
        counted = population_x is not None or population_y is not None
        self._waits = correction == "population" and not counted
        self._takes_populations = self._waits or (preset == "paper" and correction is None and not counted)
        self.loss = CORALLoss(
            preset=preset,
            include_mean=include_mean,
            correction=None if self._waits else correction,
            normalization=normalization,
            population_x=population_x,
            population_y=population_y,
            estimator=self.estimator,
            contraction=self.contraction,
        )
        if self.ema:
            d = network.feature_dim
            self.mean_s, self.mean_t = MovingAverage(self.ema, (d,)), MovingAverage(self.ema, (d,))
            self.covariance_s, self.covariance_t = MovingAverage(self.ema, (d, d)), MovingAverage(self.ema, (d, d))

    @property
    def kernel(self) -> CoralKernel:
        """That of the loss: covariances, and means in the loss's proportion."""
        return self.loss.kernel(self.network.feature_dim)

    def use_populations(self, source: int, target: int) -> None:
        """Take n_s and n_t for the division by n - 1, where options ask for it and do not give them."""
        if self._takes_populations:
            self.loss.use_populations(source, target)
            self._waits = False

    def discrepancy(
        self, z_s: Tensor, z_t: Tensor, w_s: Tensor | None, w_t: Tensor | None, **draws: Unpack[Draws]
    ) -> Tensor:
        """Return CORAL of the batches, or of the averaged means and covariances."""
        if self._waits:
            raise InputError(
                "correction='population' needs the numbers of samples of both domains, got none; pass population_x and "
                "population_y, or call use_populations(n_source, n_target)"
            )
        if not self.ema:
            value: Tensor = self.loss(z_s, z_t, w_s, w_t, **draws)
            return value
        source, target = self.loss.moments(z_s, z_t, w_s, w_t)
        with torch.autocast(z_s.device.type, enabled=False):
            return self.loss.between(
                Moments(self.mean_s(source.mean), self.covariance_s(source.covariance)),
                Moments(self.mean_t(target.mean), self.covariance_t(target.covariance)),
            )
