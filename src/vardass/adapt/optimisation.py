"""Optimisers, learning rates by step and by part of the network, and mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from vardass.adapt.algorithms import Algorithm
from vardass.errors import InputError

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig

__all__ = [
    "PARTS",
    "PRECISIONS",
    "SCHEDULE_NAMES",
    "ScaledOptimiser",
    "Scaler",
    "Schedule",
    "autocast_dtype",
    "check_parts",
    "make_optimisers",
    "parameter_parts",
    "plain_backward",
    "schedule_factor",
]


# --- learning rates ---

_FACTORS: dict[str, Callable[[int, int], float]] = {
    "none": lambda step, steps: 1.0,
    "cosine": lambda step, steps: 0.5 * (1.0 + math.cos(math.pi * min(step, steps) / steps)),
    "inverse": lambda step, steps: (1.0 + 0.001 * step) ** -0.75,
}
_PREFIXES = {
    "featuriser": "network.featuriser.",
    "bottleneck": "network.bottleneck.",
    "head": "network.head.",
    "discriminator": "discriminator.",
    "context": "context.",
}

SCHEDULE_NAMES = tuple(_FACTORS)
PARTS = tuple(_PREFIXES)


def schedule_factor(name: str, step: int, steps: int) -> float:
    """Factor of the learning rate at ``step`` of ``steps``, counted from 0.

    >>> schedule_factor("cosine", 50, 100), round(schedule_factor("inverse", 1000, 3000), 4)
    (0.5, 0.5946)
    """
    return _FACTORS[name](step, steps)


def parameter_parts(
    algorithm: nn.Module, parameters: list[nn.Parameter], multipliers: Mapping[str, float], lr: float
) -> list[dict[str, Any]]:
    """Groups of ``parameters`` for an optimiser, one for each part that has a learning rate of its own."""
    wanted = {id(parameter) for parameter in parameters}
    found: dict[float, list[Tensor]] = {}
    for name, parameter in algorithm.named_parameters():
        if id(parameter) in wanted:
            part = next((part for part, prefix in _PREFIXES.items() if name.startswith(prefix)), None)
            found.setdefault(multipliers.get(part or "", 1.0), []).append(parameter)
    return [{"params": params, "lr": lr * factor} for factor, params in found.items()]


def check_parts(algorithm: nn.Module, multipliers: Mapping[str, float]) -> None:
    """Say so if a multiplier has nothing to multiply."""
    names = [name for name, parameter in algorithm.named_parameters() if parameter.requires_grad]
    have = [part for part, prefix in _PREFIXES.items() if any(name.startswith(prefix) for name in names)]
    for part in multipliers:
        if part not in have:
            raise InputError(f"lr_multipliers names {part!r}, which has no trained parameters; there are {have}")


class Schedule:
    """Set the learning rates of all optimisers for a step: a function of the step alone, so it needs no state."""

    def __init__(self, name: str, steps: int, optimisers: Mapping[str, Optimizer]) -> None:
        self.name, self.steps = name, steps
        # of the settings, not of a loaded state, whose rates are those of its step
        self._base = [group["lr"] for optimiser in optimisers.values() for group in optimiser.param_groups]
        self._optimisers = optimisers

    def before_step(self, step: int) -> None:
        """Take the rates of ``step``; a constant schedule leaves the optimisers alone."""
        if self.name == "none":
            return
        factor = schedule_factor(self.name, step, self.steps)
        rates = iter(self._base)
        for optimiser in self._optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = next(rates) * factor


# --- mixed precision by Lightning's names ---

_TYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}

PRECISIONS = tuple(_TYPES)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Type of a forward pass, or None for full precision."""
    return _TYPES[precision]


class ScaledOptimiser:
    """An optimiser whose gradients were scaled with the loss; a step with gradients that overflowed is left out."""

    def __init__(self, optimiser: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimiser = optimiser
        self._scaler = scaler

    def step(self) -> None:
        """Divide the gradients by the scale and step, if they are finite."""
        self._scaler.step(self.optimiser)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimiser, name)


class Scaler:
    """Loss scaling of a run in ``"16-mixed"``, where small gradients would vanish; for other precisions nothing.

    All optimisers of a step see one scale: it changes only when the step is over.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(device.type) if precision == "16-mixed" else None

    def wrap(self, optimisers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Optimisers that undo the scale."""
        scaler = self.scaler
        if scaler is None:
            return optimisers
        return {role: cast(Optimizer, ScaledOptimiser(optimiser, scaler)) for role, optimiser in optimisers.items()}

    def around(self, backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """``backward`` of a scaled loss."""
        scaler = self.scaler
        if scaler is None:
            return backward
        return lambda loss: backward(scaler.scale(loss))

    def step_is_over(self) -> None:
        """Lower the scale after an overflow, raise it after many steps without one."""
        if self.scaler is not None:
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history; empty without scaling."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def plain_backward(loss: Tensor) -> None:
    """Write gradients, in a single process and full precision."""
    loss.backward()  # type: ignore[no-untyped-call]


def make_optimisers(config: RunConfig, algorithm: Algorithm) -> dict[str, Optimizer]:
    """One optimiser for each role of the algorithm's parameters."""
    check_parts(algorithm, config.lr_multipliers)
    return {role: _optimiser(config, algorithm, list(group)) for role, group in algorithm.parameter_groups().items()}


def _optimiser(config: RunConfig, algorithm: Algorithm, parameters: list[nn.Parameter]) -> Optimizer:
    if not parameters:
        raise InputError(f"algorithm {config.algorithm!r} has a role without trainable parameters; add a bottleneck")
    groups: Any = parameters
    if config.lr_multipliers:
        groups = parameter_parts(algorithm, parameters, config.lr_multipliers, config.lr)
    if config.optimiser == "sgd":
        return SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
            weight_decay=config.weight_decay,
        )
    # DomainBed's alternating adversaries have betas of their own
    betas = (0.5, 0.9) if getattr(algorithm, "adversary", None) == "alternating" else (0.9, 0.999)
    if config.adam_betas is not None:
        betas = (config.adam_betas[0], config.adam_betas[1])
    return Adam(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
