"""What a run has measured so far: mean losses since the last evaluation, and one line of metrics for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vardass.errors import VardassError
from vardass.refresh import TimeAccount

__all__ = ["History"]


class History:
    """Losses, metrics and the latest variances of a run.

    Attributes
    ----------
    metrics : list of dict
        One entry for each evaluation.
    strata_log : dict of str to float
        Variances of the latest refresh, by domain.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.metrics: list[dict[str, Any]] = []
        self.strata_log: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add_losses(self, parts: Mapping[str, Tensor]) -> None:
        """Take in the losses of one step."""
        for name, value in parts.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def add_refresh(self, log: Mapping[str, Any] | None) -> None:
        """Take in what a refresh reports; None if there was none."""
        if log is not None:
            self.strata_log = {key: value for key, value in log.items() if "seconds" not in key and key != "step"}

    def take_losses(self, step: int, lr: float) -> dict[str, float]:
        """Mean losses since the last call.

        Raises
        ------
        VardassError
            If one is not finite.
        """
        losses = {f"loss/{name}": float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        if not all(math.isfinite(value) for value in losses.values()):
            raise VardassError(f"the loss is not finite at step {step}: {losses}; lower lr={lr} or the penalty")
        return losses

    def message(self, step: int, steps: int, account: TimeAccount) -> str:
        """One line for a progress bar: step, loss, variance reduction and where the time goes."""
        parts = [f"step {step} of {steps}"]
        if self.device.type == "cpu" and "total" in self._sums:
            parts.append(f"loss {float(self._sums['total']) / self._counts['total']:.4g}")
        elif self.metrics and "loss/total" in self.metrics[-1]:
            # of the last evaluation: reading the present one would wait for the device
            parts.append(f"loss {self.metrics[-1]['loss/total']:.4g}")
        if "source/reduction" in self.strata_log:
            parts.append(f"variance reduced {self.strata_log['source/reduction']:.3g}x")
        total = account.total or 1.0
        largest = sorted(account.seconds.items(), key=lambda item: -item[1])[:3]
        parts.append(" ".join(f"{name} {seconds / total:.0%}" for name, seconds in largest))
        return ", ".join(parts)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {
            "sums": self._sums,
            "counts": self._counts,
            "strata_log": self.strata_log,
            "metrics": self.metrics,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self._sums = {name: value.to(self.device) for name, value in state["sums"].items()}
        self._counts, self.strata_log, self.metrics = state["counts"], state["strata_log"], state["metrics"]
