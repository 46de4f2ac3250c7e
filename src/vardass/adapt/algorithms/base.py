"""The interface of all training rules, and what they share: the task loss, weights and the plain step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from vardass.adapt.devices import Processes
from vardass.adapt.networks import Network
from vardass.adapt.regression import Units, check_outputs, squared_error
from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.validate import as_weights, choose

Losses: TypeAlias = dict[str, Tensor]
Backward: TypeAlias = Callable[[Tensor], None]


class Batch(NamedTuple):
    """Samples of one domain for a step of an `Algorithm`.

    Attributes
    ----------
    x : Tensor of shape (b, *shape)
        Inputs of the network: those of this process.
    y : Tensor of shape (b,) or (b, m), optional
        Labels, or in a regression numbers scaled by ``Units``. Labels of a target batch are never read.
    weights : Tensor of shape (b,), optional
        They sum to 1, which a step does not check; None means uniform.
    domains : Tensor of shape (b,), optional
        The source domain of each sample, where several are combined.
    task_weights : Tensor of shape (b,), optional
        Weights of the task loss, where they are not ``weights``; see `vardass.samplers.task_weights`.
    rows : int, optional
        Samples over all processes, where ``x`` is only a part of them.
    """

    x: Tensor
    y: Tensor | None = None
    weights: Tensor | None = None
    domains: Tensor | None = None
    task_weights: Tensor | None = None
    rows: int | None = None

    @property
    def size(self) -> int:
        """Samples of the batch over all processes."""
        return len(self.x) if self.rows is None else self.rows


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
    final : nn.Module or None
        Makes the predictions from samples and their features after training, in place of the head.
    computed : dict of str to Tensor
        Features (b, d), before dropout and without gradient, that the last step computed of ``"source"`` and
        ``"target"``: `source_features` and `pair_features` leave them for the feature banks, which need another pass
        for what a step does not leave.
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
    full_strength = 0

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        regression: bool = False,
        task_weighting: str = "weighted",
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
        self.seed = seed
        self.processes = Processes()
        self.final: nn.Module | None = None
        self.computed: dict[str, Tensor] = {}

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
        parts = self.losses(source, target, step)
        backward(parts["total"])
        for role in self.trained_roles(step, list(optimisers)):
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
        """Return z (b, feature_dim), which the discrepancy sees, apart from dropout, and the samplers stratify."""
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
        """Return z of a source batch after dropout, of all processes."""
        return self.after_dropout(self.features(source.x), "source")

    def pair_features(self, source: Batch, target: Batch) -> tuple[Tensor, Tensor]:
        """Return z of both batches after dropout, from one forward pass or from two, of all processes."""
        if not self.joint_forward:
            z_s = self.source_features(source)
            return z_s, self.after_dropout(self.features(target.x), "target")
        z, b = self.features(torch.cat([source.x, target.x])), len(source.x)
        self.computed = {"source": z.detach()[:b], "target": z.detach()[b:]}
        dropped, whole = self.network.dropout(z), self.processes.whole
        return whole(dropped[:b]), whole(dropped[b:])

    def after_dropout(self, z: Tensor, domain: str) -> Tensor:
        """Return features ``z`` (b, d) of a domain's batch after dropout, of all processes; note them as `computed`."""
        self.computed[domain] = z.detach()
        return self.processes.whole(self.network.dropout(z))

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


def weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return Σ_h w_h v_h over the rows of ``values`` (b, ...), or their mean for None."""
    checked = as_weights(weights, len(values), values, read=False)
    if checked is None:
        return values.mean(0)
    return (checked.view(-1, *[1] * (values.ndim - 1)) * values).sum(0)  # a product of matrices might be cast to half


def trainable(*modules: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
