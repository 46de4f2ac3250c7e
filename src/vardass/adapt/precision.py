"""Mixed precision by Lightning's names: autocast, and the scaled loss of 16-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["PRECISIONS", "ScaledOptimiser", "Scaler", "autocast_dtype"]

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
