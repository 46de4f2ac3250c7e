"""Maximum mean discrepancy between the features of source and target."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from vardass.adapt.algorithms.base import Algorithm, Batch, CommonOptions, Losses, weighted_mean
from vardass.adapt.algorithms.mcc import class_confusion
from vardass.adapt.algorithms.moving_average import MovingAverage, fourier_features, fourier_frequencies
from vardass.adapt.networks import Network
from vardass.errors import InputError
from vardass.kernels import Kernel, KernelLike
from vardass.losses import Draws, MMDLoss
from vardass.losses.estimators import Estimator
from vardass.validate import as_generator, check_count, check_number

__all__ = ["MMD", "Discrepancy", "DiscrepancyOptions"]


class DiscrepancyOptions(CommonOptions, total=False):
    """Options that MMD and CORAL share, see ``Discrepancy``."""

    penalty: float
    delay: int
    ramp: int
    confusion: float
    limit: float | None
    ema: float
    estimator: str
    contraction: float | None


class Discrepancy(Algorithm):
    """Cross-entropy + λ times a discrepancy of the two batches of features; base of MMD and CORAL.

    Parameters
    ----------
    penalty : float
        λ; DomainBed draws it from 10^U(-1, 1).
    delay : int
        Steps without the discrepancy, of the task alone, so that features mean something before they are aligned.
    ramp : int
        Steps over which λ then rises from 0 in a straight line.
    confusion : float
        Weight of the class confusion of the target's predictions (``class_confusion``, the loss of MCC), which rises
        as λ does. A batch with fewer samples than classes says little of how the classes of both domains correspond;
        the network's own predictions do. Not for regressions.
    limit : float, optional
        Most that λ times the discrepancy may pull at the source features, in parts of the task's pull: at each step λ
        is lowered until |λ ∂D/∂z_s| ≤ limit · min(1, b/32) · |∂task/∂z_s|, for b source samples in a batch, because the
        V-statistic's reward for shrinking features grows as 1/b. A network whose features are pulled harder by the
        discrepancy than by its task maps all samples to one point: that is how a large λ ruins a run. None: no limit.
    ema : float
        β of a moving average of the statistics that are compared (see ``MovingAverage``). 0 is the exact loss of the
        batch.
    estimator : {"v", "unbiased", "reference"}
        What a batch says of the loss of all data, see ``vardass.losses.estimators``. ``"unbiased"`` refuses batches
        whose samples depend on one another; ``"reference"`` compares every batch with the feature banks.
    contraction : float, optional
        Share, from 0 to 1, of the V-statistic's excess that the other two estimators keep; 0 by default.
    **common
        See ``Algorithm``.
    """

    uses_target: ClassVar[bool] = True
    takes_regression: ClassVar[bool] = True
    joint_by_default: ClassVar[bool] = False

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        penalty: float = 1.0,
        delay: int = 0,
        ramp: int = 0,
        confusion: float = 0.0,
        limit: float | None = None,
        ema: float = 0.0,
        estimator: str = "v",
        contraction: float | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(network, num_classes, **common)
        self.penalty = check_number(penalty, "penalty", low=0.0)
        self.delay = check_count(delay, "delay", low=0)
        self.ramp = check_count(ramp, "ramp", low=0)
        self.confusion = check_number(confusion, "confusion", low=0.0)
        if self.confusion and self.units is not None:
            raise InputError(f"confusion={confusion} needs classes, but this is a regression; use confusion=0")
        self.full_strength = self.delay + self.ramp if self.penalty + self.confusion > 0.0 else 0
        self.limit = None if limit is None else check_number(limit, "limit", low=0.0)
        self.ema = check_number(ema, "ema", low=0.0, below=1.0)
        self.estimator, self.contraction = Estimator.of(estimator, contraction)
        self.uses_banks = self.estimator != "v" and self.penalty > 0.0
        if self.ema and self.estimator != "v":
            raise InputError(
                f"ema averages statistics of batches, a V-statistic; with estimator={self.estimator!r} use ema=0"
            )

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, the discrepancy under the algorithm's name, and their sum with the penalty of this step.

        With a ``limit`` that penalty is among them, too. With penalty and confusion 0 the target is not looked
        at, so that all, BatchNorm too, is as in ERM.
        """
        if self.penalty == self.confusion == 0.0:
            task = self.task_loss(self.source_features(source), source)
            return {"total": task, "task": task}
        target = self.need_target(target)
        z_s, z_t = self.pair_features(source, target)
        task = self.task_loss(z_s, source)
        gap = self.discrepancy(z_s, z_t, source.weights, target.weights, **self._draws(source, target))
        risen = min(1.0, max(0.0, step - self.delay) / self.ramp) if self.ramp else float(step >= self.delay)
        found: Losses = {"task": task, self.name: gap}
        penalty: Tensor | float = self.penalty
        if self.limit is not None and z_s.requires_grad:
            penalty, gap = self._limited(task, gap, z_s, z_t)
            found |= {self.name: gap, "penalty": risen * penalty}
        total = task + risen * penalty * gap
        if self.confusion:
            found["confusion"] = class_confusion(self.network.head(z_t), target.weights)
            total = total + risen * self.confusion * found["confusion"]
        return {"total": total, **found}

    def _limited(self, task: Tensor, gap: Tensor, z_s: Tensor, z_t: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty within ``limit``, and the discrepancy as a form whose gradient need not be computed again."""
        assert self.limit is not None
        pull = torch.autograd.grad(task, z_s, retain_graph=True)[0].norm()
        by_gap = torch.autograd.grad(gap, [z_s, z_t])
        most = self.limit * min(1.0, len(z_s) / 32) * pull / by_gap[0].norm().clamp_min(torch.finfo(gap.dtype).tiny)
        linear = sum(((z - z.detach()) * slope).sum() for z, slope in zip((z_s, z_t), by_gap, strict=True))
        return most.clamp_max(self.penalty), gap.detach() + linear

    def _draws(self, source: Batch, target: Batch) -> Draws:
        """What the estimator wants to know of the two batches."""
        if self.estimator == "v":
            return {}
        told: Draws = {"bank_x": source.bank, "bank_y": target.bank}
        if self.estimator == "reference":
            return told
        for batch, domain in ((source, "source"), (target, "target")):
            if batch.strata is None:
                raise InputError(
                    f"estimator='unbiased' needs independent draws, but the samples of a {domain} batch depend on one "
                    "another, as those of ordered and balanced do, or its sampler gives no strata; use "
                    "estimator='reference', or the sampler vardass or uniform"
                )
        told |= {"strata_x": source.strata, "strata_y": target.strata, "pool_x": source.pool, "pool_y": target.pool}
        return told

    def discrepancy(
        self, z_s: Tensor, z_t: Tensor, w_s: Tensor | None, w_t: Tensor | None, **draws: Unpack[Draws]
    ) -> Tensor:
        """Return the discrepancy of features (b_s, d) and (b_t, d) with weights (b_s,) and (b_t,)."""
        raise NotImplementedError


class MMD(Discrepancy):
    """Cross-entropy + λ MMD² (section 2.2, equation 2).

    Parameters
    ----------
    kernel, preset
        See ``vardass.losses.mmd2``. The default is the paper's mixture.
    ema_frequencies : int
        With ``ema`` the mean embeddings are averaged in explicit features: z itself for the linear kernel, random
        Fourier features of the RBF mixture with so many frequencies for each bandwidth.
    **shared
        See ``Discrepancy`` and ``Algorithm``.

    Examples
    --------
    >>> from vardass.adapt import make_network
    >>> rule = MMD(make_network("mlp", (3,), 2, hidden=(4,)), 2, penalty=2.0)
    >>> source, target = Batch(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])), Batch(torch.ones(4, 3))
    >>> losses = rule.losses(source, target, 0)
    >>> bool(torch.isclose(losses["total"], losses["task"] + 2.0 * losses["mmd"]))
    True
    """

    name: ClassVar[str] = "mmd"
    frequencies: Tensor | None

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        kernel: KernelLike | None = None,
        preset: str | None = None,
        ema_frequencies: int = 256,
        **shared: Unpack[DiscrepancyOptions],
    ) -> None:
        super().__init__(network, num_classes, **shared)
        self.loss = MMDLoss(kernel=kernel, estimator=self.estimator, contraction=self.contraction, preset=preset)
        if self.ema:
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

    def discrepancy(
        self, z_s: Tensor, z_t: Tensor, w_s: Tensor | None, w_t: Tensor | None, **draws: Unpack[Draws]
    ) -> Tensor:
        """Return MMD² of the batches, or of the averaged mean embeddings."""
        if not self.ema:
            value: Tensor = self.loss(z_s, z_t, w_s, w_t, **draws)
            return value
        with torch.autocast(z_s.device.type, enabled=False):
            gap: Tensor = self.mean_s(self._embedding(z_s, w_s)) - self.mean_t(self._embedding(z_t, w_t))
            return gap.square().sum()

    def _embedding(self, z: Tensor, weights: Tensor | None) -> Tensor:
        psi = fourier_features(z if z.dtype == torch.float64 else z.float(), self.frequencies, self.ema_frequencies)
        return weighted_mean(psi, weights)
