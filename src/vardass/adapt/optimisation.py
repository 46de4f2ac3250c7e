"""Optimisers, learning rates by step and by part of the network, and mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from vardass.adapt.algorithms import Algorithm
from vardass.errors import InputError
from vardass.validate import check_number, check_tensor, choose

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig


# --- optimisers ---------------------------------------------------------------------------------------

PARTS = ("featuriser", "bottleneck", "head", "discriminator", "context")
"""Parts of an algorithm that may have a learning rate of their own."""


def check_optimiser_options(optimiser: str, options: Mapping[str, Any]) -> None:
    """Refuse options that the optimiser does not take, or values that it cannot use."""
    own = {"betas": _check_betas} if optimiser == "adam" else {"momentum": partial(check_number, low=0.0, below=1.0)}
    checks: dict[str, Callable[[Any, str], object]] = {
        **own,
        "lr_multipliers": _check_multipliers,
        "discriminator_lr": partial(check_number, low=0.0),
        "discriminator_weight_decay": partial(check_number, low=0.0),
    }
    for name, value in options.items():
        checks[choose(name, f"option of optimiser {optimiser!r}:", checks)](value, name)


def _check_betas(value: Any, name: str) -> None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InputError(f"{name} must be two numbers such as (0.9, 0.999), got {value!r}", field=name)
    for beta in value:
        check_number(beta, name, low=0.0, below=1.0)


def _check_multipliers(value: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be a mapping of parts to factors, got {value!r}", field=name)
    for part, factor in value.items():
        check_number(factor, f"{name}[{choose(part, f'part of {name}', PARTS)!r}]", low=0.0)


def make_optimisers(config: RunConfig, algorithm: Algorithm) -> dict[str, Optimizer]:
    """One optimiser for each role of the algorithm's parameters, see ``optimiser_options`` of `RunConfig`."""
    options = config.optimiser_options
    multipliers: Mapping[str, float] = options.get("lr_multipliers", {})
    named = algorithm.named_parameters()
    part_of = {id(parameter): name.removeprefix("network.").partition(".")[0] for name, parameter in named}
    trained = {part_of[id(parameter)] for parameter in algorithm.parameters() if parameter.requires_grad}
    for part in multipliers:
        if part not in trained:
            have = [name for name in PARTS if name in trained]
            raise InputError(f"lr_multipliers names {part!r}, which has no trained parameters; there are {have}")
    roles = algorithm.parameter_groups()
    for name, value in options.items():
        if name.startswith("discriminator_") and "discriminator" not in roles:
            raise InputError(f"{name} is {value}, but algorithm {config.algorithm!r} has no discriminator; remove it")

    def optimiser(role: str, parameters: list[nn.Parameter]) -> Optimizer:
        if not parameters:
            raise InputError(
                f"algorithm {config.algorithm!r} has a role without trainable parameters; add a bottleneck"
            )
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_factor.setdefault(multipliers.get(part_of[id(parameter)], 1.0), []).append(parameter)
        lr, decay = config.lr, config.weight_decay
        if role == "discriminator":
            lr = options.get("discriminator_lr", lr)
            decay = options.get("discriminator_weight_decay", decay)
        groups = [
            {"params": group, "lr": check_number(lr * factor, "lr times its factor in lr_multipliers", low=0.0)}
            for factor, group in by_factor.items()
        ]
        if config.optimiser == "sgd":
            momentum = options.get("momentum", 0.9)
            return SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, weight_decay=decay)
        # DomainBed's alternating adversaries have betas of their own
        usual = (0.5, 0.9) if getattr(algorithm, "adversary", None) == "alternating" else (0.9, 0.999)
        first, second = options.get("betas", usual)
        return Adam(groups, lr=lr, betas=(first, second), weight_decay=decay)

    return {role: optimiser(role, list(parameters)) for role, parameters in roles.items()}


def load_optimiser(optimiser: Optimizer, state: dict[str, Any]) -> None:
    """Restore an optimiser from a checkpoint, if it has its settings and fits its parameters."""
    for group, saved in zip(optimiser.param_groups, state["param_groups"], strict=True):
        differing = [name for name in group if name not in ("params", "lr") and group[name] != saved[name]]
        if differing:
            raise InputError(f"the checkpoint's optimiser has another {differing[0]}; resume with the same settings")
    optimiser.load_state_dict(state)
    names = {"momentum_buffer"} if isinstance(optimiser, SGD) else {"step", "exp_avg", "exp_avg_sq"}
    for parameter, values in optimiser.state.items():
        if set(values) != names:
            raise ValueError(f"an optimiser with {sorted(values)} of a parameter")
        for name, value in values.items():
            check_tensor(value, name, () if name == "step" else parameter.shape, low=0.0 if name == "step" else None)


# --- learning rates by step ---------------------------------------------------------------------------

_FACTORS: dict[str, Callable[[int, int], float]] = {
    "none": lambda step, steps: 1.0,
    "cosine": lambda step, steps: 0.5 * (1.0 + math.cos(math.pi * min(step, steps) / steps)),
    "inverse": lambda step, steps: (1.0 + 0.001 * step) ** -0.75,
}

SCHEDULE_NAMES = tuple(_FACTORS)


class Schedule:
    """Set the learning rates of all optimisers for a step: a function of the step alone, so it needs no state."""

    def __init__(self, name: str, steps: int, optimisers: Mapping[str, Optimizer]) -> None:
        self.factor, self.steps = _FACTORS[name], steps
        groups = [group for optimiser in optimisers.values() for group in optimiser.param_groups]
        # of the settings, not of a loaded state, whose rates are those of its step
        self._rates = [group["lr"] for group in groups]
        self._optimisers = optimisers

    def before_step(self, step: int) -> None:
        """Take the rates of ``step``, counted from 0."""
        factor = self.factor(step, self.steps)
        groups = [group for optimiser in self._optimisers.values() for group in optimiser.param_groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * factor


# --- mixed precision ----------------------------------------------------------------------------------

PRECISIONS: dict[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Types of a forward pass by Lightning's names; None is full precision."""


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
