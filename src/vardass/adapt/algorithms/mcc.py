"""Minimum class confusion on the target's predictions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from vardass.adapt.algorithms.base import Algorithm, Batch, Losses
from vardass.adapt.networks import Network
from vardass.errors import InputError
from vardass.validate import as_weights, check_number


class MCC(Algorithm):
    """Cross-entropy + λ times the confusion of classes in the target batch (Jin et al. 2020).

    Parameters
    ----------
    penalty : float
        λ.
    temperature : float
        Divides the target's logits.
    **common
        See ``Algorithm``.
    """

    name: ClassVar[str] = "mcc"
    uses_target: ClassVar[bool] = True

    def __init__(
        self, network: Network, num_classes: int, *, penalty: float = 1.0, temperature: float = 2.5, **common: Any
    ) -> None:
        super().__init__(network, num_classes, **common)
        self.penalty = check_number(penalty, "penalty", low=0.0)
        self.temperature = check_number(temperature, "temperature", low=0.0)
        if self.temperature == 0.0:
            raise InputError("temperature must be positive, got 0; the usual values are 1 to 3")

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, ``confusion`` and their sum."""
        target = self.need_target(target)
        z_s, z_t = self.pair_features(source, target)
        task = self.task_loss(z_s, source)
        confusion = class_confusion(self.network.head(z_t), target.weights, temperature=self.temperature)
        return {"total": task + self.penalty * confusion, "task": task, "confusion": confusion}


def class_confusion(logits: Tensor, weights: Tensor | None = None, *, temperature: float = 2.5) -> Tensor:
    """Return (sum - trace) / C of the row-normalised confusion matrix Pᵀ diag(u) P.

    P = softmax(logits / T) has shape (b, C) and u_i is in proportion to w_i (1 + exp(-H_i)), with w the
    sampling weights and H_i the entropy of row i, which carries no gradient. The scale of u cancels.
    """
    with torch.autocast(logits.device.type, enabled=False):
        full = logits if logits.dtype == torch.float64 else logits.float()
        p = (full / temperature).softmax(1)
        certainty = 1.0 + torch.exp(-entropy(p.detach()))
        w = as_weights(weights, len(p), p, read=False)
        u = certainty if w is None else certainty * w
        confusion = (p * (u / u.sum())[:, None]).T @ p
        confusion = confusion / confusion.sum(1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
        return (confusion.sum() - confusion.trace()) / confusion.shape[0]


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of each row of ``p`` (b, C), with log(p + 1e-5) as in TLlib: (b,)."""
    return -(p * torch.log(p + 1e-5)).sum(1)
