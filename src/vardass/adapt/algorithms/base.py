"""The interface of all training rules, and what they share: the task loss, weights and the plain step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from vardass.adapt.devices import Processes
from vardass.adapt.networks import Network
from vardass.adapt.regression import Units, check_outputs, squared_error
from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.losses import Batch
from vardass.validate import ArrayLike, as_weights, check_number, choose, import_by_name

Losses: TypeAlias = dict[str, Tensor]
Backward: TypeAlias = Callable[[Tensor], None]

_SDAT = "vardass.paper.adversarial:ascended"  # imported by the steps that need it: the paper is above this room


class Algorithm(nn.Module):
    """A rule for unsupervised domain adaptation: losses of a source and a target batch, and a step.

    BatchNorm layers give all rows of a batch the same weight. With strata of unequal sizes rows represent different
    shares of the data, so small strata count too much in these statistics. Samplers without weights (uniform,
    balanced) and networks with ``freeze_bn`` do not have this bias.

    A custom rule needs ``name``, ``uses_target`` and `losses`; options beyond those below are keyword-only
    arguments of its constructor. See ``examples/own_algorithm.py``.

    Parameters
    ----------
    network : Network
        Trained in place.
    num_classes : int
        At least 2; in a regression, how many numbers to predict.
    regression : bool
        The head predicts numbers, scaled to mean 0 and deviation 1, and the task loss is their squared error, which
        then replaces the cross-entropy.
    task_weighting : {"weighted", "plain"}
        The cross-entropy as Σ_h w_h CE_h, which is unbiased for batches drawn from strata, or as a plain
        mean (the paper does not say which it used). Discrepancies are weighted either way.
    sharpness : float
        ρ of SDAT: the step's gradients are taken at w + ρ g/|g| with g the gradient of the task loss alone
        and the norm over all parameters of the role ``"network"``. 0 is the ordinary step. BatchNorm
        statistics are updated once for each step.
    seed : int
        Seed of the initial parameters of discriminators, context networks and random maps.

    Attributes
    ----------
    joint_forward : bool
        Source and target pass through the network as one batch, which BatchNorm notices (as in TLlib and DomainBed's
        DANN), or one after the other (MMD and CORAL, as in DomainBed).
    processes : Processes
        Those that share each batch; by default this one alone. The trainer sets it.
    units : Units or None
        Scale of the numbers in a regression, which the trainer takes from the source.
    is_ascended : bool
        Whether the parameters are currently those of SDAT's ascent, not the network's own.
    uses_banks : bool
        Whether the losses use the ``bank`` of a batch.
    final : nn.Module or None
        Makes the predictions from samples and their features after training, in place of the head.
    full_strength : int
        Step from which the penalty has its full strength; models of earlier steps are not adapted yet.
    seen_together : int
        Samples of one domain that `features` must see together, where a sample's features depend on others. Passes
        over data are then made one domain at a time, in batches of at least as many.
    """

    name: ClassVar[str]
    uses_target: ClassVar[bool]
    takes_regression: ClassVar[bool] = False  # a loss of class probabilities would be silently wrong
    joint_forward: ClassVar[bool] = True
    seen_together = 1
    uses_banks = False
    full_strength = 0
    is_ascended = False

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        regression: bool = False,
        task_weighting: str = "weighted",
        sharpness: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_outputs(num_classes, regression=regression)
        if regression:
            self.check_regression()
        if isinstance(network.head, nn.Linear) and network.head.out_features != num_classes:
            raise InputError(f"the network gives {network.head.out_features} logits, but num_classes is {num_classes}")
        self.units = Units(num_classes) if regression else None
        self.network = network
        self.num_classes = num_classes
        self.task_weighting = choose(task_weighting, "task_weighting", ("weighted", "plain"))
        self.sharpness = check_number(sharpness, "sharpness", low=0.0)
        self.seed = seed
        self.processes = Processes()
        self.final: nn.Module | None = None

    @classmethod
    def check_regression(cls) -> None:
        """Refuse a rule whose losses need class probabilities."""
        if not cls.takes_regression:
            raise InputError(
                f"regression needs a rule without class probabilities, got {getattr(cls, 'name', cls.__name__)!r}; use "
                "erm, mmd, coral, dann or arm (a class of your own without them sets takes_regression = True)"
            )

    @property
    def kernel(self) -> Kernel | str:
        """Kernel whose mean embeddings the rule compares, for which strata are made; the paper's mixture by default."""
        return "mmd"

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return the parts of the loss by name, and their sum as ``"total"``, which is to be minimised."""
        raise NotImplementedError

    def update(
        self, source: Batch, target: Batch | None, step: int, *, optimisers: dict[str, Optimizer], backward: Backward
    ) -> Losses:
        """Take one step and return the detached losses.

        Parameters
        ----------
        source, target : Batch
            The target may be None if ``uses_target`` is False.
        step : int
            Counted from 0.
        optimisers : dict
            One for each role of ``parameter_groups``.
        backward : callable
            Called with the loss; writes gradients to ``.grad``. It may scale the loss, or average the
            gradients over processes.
        """
        for optimiser in optimisers.values():
            optimiser.zero_grad()
        trained = self.trained_roles(step, list(optimisers))
        ascent: AbstractContextManager[None] = nullcontext()
        if self.sharpness and "network" in trained:
            ascent = import_by_name(_SDAT, "step")(self, source, target, backward)
        with ascent:
            parts = self.losses(source, target, step)
            backward(parts["total"])
        for role in trained:
            optimisers[role].step()
        return {name: value.detach() for name, value in parts.items()}

    def trained_roles(self, step: int, roles: list[str]) -> list[str]:
        """Return those of the ``roles`` whose parameters ``step`` changes."""
        return roles

    def use_populations(self, source: int, target: int) -> None:
        """Take the sizes of both data sets, which the trainer knows; most rules ignore them."""

    def extra_state(self) -> dict[str, Any]:
        """State besides parameters and buffers that later steps need; saved in checkpoints, not in models."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from where ``state`` was taken."""

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by role; each role has its own optimiser."""
        return {"network": trainable(self.network)}

    def features(self, x: Tensor) -> Tensor:
        """Return z (b, feature_dim), which the discrepancy sees and the samplers stratify."""
        return self.network.features(x)

    def readout(self, z: Tensor) -> Tensor:
        """Return what the head makes of features ``z``: logits (b, num_classes), or numbers in their own units."""
        outputs: Tensor = self.network.head(z)
        return outputs if self.units is None else self.units(outputs)

    def decide(self, x: Tensor, z: Tensor) -> Tensor:
        """Return logits (b, num_classes), or numbers in their own units, for samples ``x`` of features ``z``."""
        if self.final is None:
            return self.readout(z)
        logits: Tensor = self.final(x, z)
        return logits

    def predict(self, x: Tensor) -> Tensor:
        """Return logits (b, num_classes), or numbers in their own units."""
        return self.decide(x, self.features(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return what `predict` does."""
        return self.predict(x)

    def source_features(self, source: Batch) -> Tensor:
        """Return z of a source batch, of all processes."""
        return self.processes.whole(self.features(source.x))

    def pair_features(self, source: Batch, target: Batch) -> tuple[Tensor, Tensor]:
        """Return z of both batches, from one forward pass or from two, of all processes."""
        whole = self.processes.whole
        if not self.joint_forward:
            return whole(self.features(source.x)), whole(self.features(target.x))
        z = self.features(torch.cat([source.x, target.x]))
        return whole(z[: len(source.x)]), whole(z[len(source.x) :])

    def task_loss(self, z: Tensor, source: Batch) -> Tensor:
        """Return the cross-entropy of the head at features ``z``, or the squared error of its numbers."""
        return self.output_loss(self.network.head(z), source)

    def output_loss(self, outputs: Tensor, source: Batch) -> Tensor:
        """Return the (weighted) mean cross-entropy, or squared error, of the head's outputs (b, num_classes)."""
        if source.y is None:
            raise InputError("the source batch has no labels; pass Batch(x, y, weights) with y of shape (b,)")
        if self.units is None:
            each = F.cross_entropy(outputs, source.y, reduction="none")
        else:
            each = squared_error(outputs, source.y)
        weights = source.weights if source.task_weights is None else source.task_weights
        return weighted_mean(each, weights if self.task_weighting == "weighted" else None)

    def need_target(self, target: Batch | None) -> Batch:
        """Return ``target``, or raise an InputError if it is None."""
        if target is None:
            raise InputError(f"algorithm {self.name!r} needs a target batch, got None; pass one or use 'erm'")
        return target


class ERM(Algorithm):
    """Empirical risk minimisation: the cross-entropy of the source batch."""

    name: ClassVar[str] = "erm"
    uses_target: ClassVar[bool] = False
    takes_regression: ClassVar[bool] = True

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, which is the total."""
        task = self.task_loss(self.source_features(source), source)
        return {"total": task, "task": task}


def weighted_mean(values: Tensor, weights: ArrayLike | None) -> Tensor:
    """Return Σ_h w_h v_h over the rows of ``values`` (b, ...), or their mean for None."""
    checked = as_weights(weights, len(values), values)
    if checked is None:
        return values.mean(0)
    return (checked.view(-1, *[1] * (values.ndim - 1)) * values).sum(0)  # a product of matrices might be cast to half


def trainable(*modules: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
