"""Maximum mean discrepancy between the features of source and target."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from vardass.adapt.algorithms.base import Algorithm, Batch, CommonOptions, Losses, weighted_mean
from vardass.adapt.algorithms.moving_average import MovingAverage, fourier_features, fourier_frequencies
from vardass.adapt.networks import Network
from vardass.errors import InputError
from vardass.kernels import Kernel, KernelLike
from vardass.losses import MMDLoss
from vardass.validate import as_generator, check_count, check_number

__all__ = ["MMD", "Discrepancy", "DiscrepancyOptions"]


class DiscrepancyOptions(CommonOptions, total=False):
    """Options that MMD and CORAL share, see ``Discrepancy``."""

    penalty: float
    ema: float


class Discrepancy(Algorithm):
    """Cross-entropy + λ times a discrepancy of the two batches of features; base of MMD and CORAL.

    Parameters
    ----------
    penalty : float
        λ; DomainBed draws it from 10^U(-1, 1).
    ema : float
        β of a moving average of the statistics that are compared (see ``MovingAverage``). 0 is the exact loss of the
        batch.
    **common
        See ``Algorithm``.
    """

    uses_target: ClassVar[bool] = True
    joint_by_default: ClassVar[bool] = False

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        penalty: float = 1.0,
        ema: float = 0.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(network, num_classes, **common)
        self.penalty = check_number(penalty, "penalty", low=0.0)
        self.ema = check_number(ema, "ema", low=0.0, below=1.0)

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, the discrepancy under the algorithm's name, and their sum.

        With penalty 0 the target is not looked at, so that all, BatchNorm too, is as in ERM.
        """
        if self.penalty == 0.0:
            task = self.task_loss(self.source_features(source), source)
            return {"total": task, "task": task}
        target = self.need_target(target)
        z_s, z_t = self.pair_features(source, target)
        task = self.task_loss(z_s, source)
        gap = self.discrepancy(z_s, z_t, source.weights, target.weights)
        return {"total": task + self.penalty * gap, "task": task, self.name: gap}

    def discrepancy(self, z_s: Tensor, z_t: Tensor, w_s: Tensor | None, w_t: Tensor | None) -> Tensor:
        """Return the discrepancy of features (b_s, d) and (b_t, d) with weights (b_s,) and (b_t,)."""
        raise NotImplementedError


class MMD(Discrepancy):
    """Cross-entropy + λ MMD² (section 2.2, equation 2).

    Parameters
    ----------
    kernel, estimator, preset
        See ``vardass.losses.mmd2``. The default is the paper's mixture with the V-statistic.
    ema_frequencies : int
        With ``ema`` the mean embeddings are averaged in explicit features: z itself for the linear kernel, random
        Fourier features of the RBF mixture with so many frequencies for each bandwidth.
    **shared
        See ``Discrepancy`` and ``Algorithm``.
    """

    name: ClassVar[str] = "mmd"
    frequencies: Tensor | None

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        kernel: KernelLike | None = None,
        estimator: str = "v",
        preset: str | None = None,
        ema_frequencies: int = 256,
        **shared: Unpack[DiscrepancyOptions],
    ) -> None:
        super().__init__(network, num_classes, **shared)
        self.loss = MMDLoss(kernel=kernel, estimator=estimator, preset=preset)
        if self.ema:
            if estimator == "u":
                raise InputError("ema averages mean embeddings, a V-statistic; with estimator='u' use ema=0")
            self.ema_frequencies = check_count(ema_frequencies, "ema_frequencies")
            frequencies = fourier_frequencies(
                self.loss.kernel, network.feature_dim, ema_frequencies, as_generator(self.seed)
            )
            self.register_buffer("frequencies", frequencies)
            width = network.feature_dim if frequencies is None else 2 * frequencies.shape[1]
            self.mean_s, self.mean_t = MovingAverage(self.ema, (width,)), MovingAverage(self.ema, (width,))

    @property
    def kernel(self) -> Kernel:
        """Kernel of the loss."""
        return self.loss.kernel

    def discrepancy(self, z_s: Tensor, z_t: Tensor, w_s: Tensor | None, w_t: Tensor | None) -> Tensor:
        """Return MMD² of the batches, or of the averaged mean embeddings."""
        if not self.ema:
            value: Tensor = self.loss(z_s, z_t, w_s, w_t)
            return value
        with torch.autocast(z_s.device.type, enabled=False):
            gap: Tensor = self.mean_s(self._embedding(z_s, w_s)) - self.mean_t(self._embedding(z_t, w_t))
            return gap.square().sum()

    def _embedding(self, z: Tensor, weights: Tensor | None) -> Tensor:
        psi = fourier_features(z if z.dtype == torch.float64 else z.float(), self.frequencies, self.ema_frequencies)
        return weighted_mean(psi, weights)
