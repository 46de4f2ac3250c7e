"""Learning rates: how they fall with the step, and by part of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from vardass.errors import InputError

__all__ = ["PARTS", "SCHEDULE_NAMES", "Schedule", "check_parts", "parameter_parts", "schedule_factor"]

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
