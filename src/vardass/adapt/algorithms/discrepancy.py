"""MMD and CORAL: the task loss and a penalty on the discrepancy of source and target features."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from vardass.adapt.algorithms.base import Algorithm, Batch, Losses
from vardass.adapt.algorithms.mcc import class_confusion
from vardass.adapt.networks import Network
from vardass.errors import InputError
from vardass.kernels import CoralKernel, Kernel, KernelLike
from vardass.losses import CORALLoss, MMDLoss, StreamWeights
from vardass.losses.base import DiscrepancyLoss
from vardass.validate import check_count, check_flag, check_number


class Discrepancy(Algorithm):
    """Cross-entropy + λ times a discrepancy of the two batches of features; base of MMD and CORAL.

    Parameters
    ----------
    penalty : float
        λ; DomainBed draws it from 10^U(-1, 1).
    delay : int
        Steps of task loss only, so that features are meaningful before they are aligned.
    ramp : int
        Steps over which λ then rises linearly from 0.
    confusion : float
        Weight of the class confusion of the target's predictions (``class_confusion``, the loss of MCC), which rises
        with λ. A batch with fewer samples than classes says little about how the classes of both domains correspond;
        the network's predictions say more. Not for regressions.
    stream_weights : bool
        The discrepancy alone weighs the rows of both batches by `StreamWeights` with the kernel of the loss. For
        samplers without weights, such as uniform.
    **common
        See ``Algorithm``.
    """

    uses_target: ClassVar[bool] = True
    takes_regression: ClassVar[bool] = True
    joint_forward: ClassVar[bool] = False
    loss: DiscrepancyLoss

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        penalty: float = 1.0,
        delay: int = 0,
        ramp: int = 0,
        confusion: float = 0.0,
        stream_weights: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(network, num_classes, **common)
        self.penalty = check_number(penalty, "penalty", low=0.0)
        self.delay = check_count(delay, "delay", low=0)
        self.ramp = check_count(ramp, "ramp", low=0)
        self.confusion = check_number(confusion, "confusion", low=0.0)
        if self.confusion and self.units is not None:
            raise InputError(f"confusion={confusion} needs classes, but this is a regression; use confusion=0")
        self.full_strength = self.delay + self.ramp if self.penalty + self.confusion > 0.0 else 0
        self.stream_weights = check_flag(stream_weights, "stream_weights")

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, the discrepancy under the algorithm's name, and their sum with the penalty of this step.

        With penalty and confusion 0 the target is ignored, so that everything, including BatchNorm, is as in ERM.
        """
        if self.penalty == self.confusion == 0.0:
            task = self.task_loss(self.source_features(source), source)
            return {"total": task, "task": task}
        target = self.need_target(target)
        z_s, z_t = self.pair_features(source, target)
        task = self.task_loss(z_s, source)
        gap = self.loss.of_rows(z_s, z_t, self._weights(source, z_s, "source"), self._weights(target, z_t, "target"))
        risen = min(1.0, max(0.0, step - self.delay) / self.ramp) if self.ramp else float(step >= self.delay)
        found: Losses = {"total": task + risen * self.penalty * gap, "task": task, self.name: gap}
        if self.confusion:
            found["confusion"] = class_confusion(self.network.head(z_t), target.weights)
            found["total"] = found["total"] + risen * self.confusion * found["confusion"]
        return found

    @cached_property
    def streams(self) -> dict[str, StreamWeights]:
        """Weights of each domain's batches, if enabled; created on first use, because the kernel comes last."""
        domains = ("source", "target") if self.stream_weights else ()
        return {domain: StreamWeights(self.kernel, seed=self.seed) for domain in domains}

    def extra_state(self) -> dict[str, Any]:
        """Running statistics of `streams`."""
        return {domain: weights.state_dict() for domain, weights in self.streams.items()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from where ``state`` was taken."""
        for domain, weights in self.streams.items():
            weights.load_state_dict(state[domain])

    def _weights(self, batch: Batch, z: Tensor, domain: str) -> Tensor | None:
        """Weights (b,) of the discrepancy."""
        if not self.stream_weights:
            return batch.weights
        if batch.weights is not None:
            raise InputError(
                f"stream_weights=True needs batches without weights, but the sampler of the {domain} gives them; "
                "use the sampler uniform or balanced, or stream_weights=False"
            )
        return self.streams[domain](z.detach())


class MMD(Discrepancy):
    """Cross-entropy + λ MMD² (section 2.2, equation 2).

    Parameters
    ----------
    kernel, preset
        See ``vardass.losses.mmd2``. The default is the paper's mixture.
    **shared
        See ``Discrepancy`` and ``Algorithm``.
    """

    name: ClassVar[str] = "mmd"
    loss: MMDLoss

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        kernel: KernelLike | None = None,
        preset: str | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(network, num_classes, **shared)
        self.loss = MMDLoss(kernel=kernel, preset=preset)

    @property
    def kernel(self) -> Kernel:
        """Kernel of the loss."""
        return self.loss.kernel


class CORAL(Discrepancy):
    """Cross-entropy + λ CORAL: the distance of the covariances R_s and R_t (section 2.3), and of the means.

    The paper's formula is |R_s - R_t|², which grows with d²: λ = 1 then means at d = 512 what 262,144 means at
    d = 1. Its experiments ran in DomainBed, whose CORAL is |R_s - R_t|² / d² + |μ_s - μ_t|² / d, so that λ means the
    same for all networks, and the range 10^U(-1, 1) of its search is made for that one. The default is the
    experiments' form, ``preset="domainbed"``; the formula is ``preset="paper"``, with the weights |S_h| / (n - 1) of
    the strata that it prints. Strata are made by the kernel of the loss, which for ``"paper"`` is the paper's κ_c.

    Parameters
    ----------
    preset, include_mean, correction, normalization
        See ``vardass.losses.coral``. With ``preset="paper"`` the trainer sets the sizes of the data sets by
        `use_populations`, and so can your own loop; until then its weights are |S_h| / n.
    **shared
        See ``Discrepancy`` and ``Algorithm``.
    """

    name: ClassVar[str] = "coral"
    loss: CORALLoss

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        preset: str = "domainbed",
        include_mean: bool | None = None,
        correction: str | None = None,
        normalization: str | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(network, num_classes, **shared)
        self._takes_populations = preset == "paper" and correction is None
        self.loss = CORALLoss(
            preset=preset,
            include_mean=include_mean,
            correction=correction,
            normalization=normalization,
        )

    @property
    def kernel(self) -> CoralKernel:
        """That of the loss: covariances, and means in the loss's proportion."""
        return self.loss.kernel(self.network.feature_dim)

    def use_populations(self, source: int, target: int) -> None:
        """Take n_s and n_t for the division by n - 1 of ``preset="paper"``."""
        if self._takes_populations:
            self.loss.use_populations(source, target)
