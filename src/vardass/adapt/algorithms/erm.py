"""Training on the source alone: the baseline."""

from __future__ import annotations

from typing import ClassVar

from vardass.adapt.algorithms.base import Algorithm, Batch, Losses

__all__ = ["ERM"]


class ERM(Algorithm):
    """Empirical risk minimisation: the cross-entropy of the source batch.

    Examples
    --------
    >>> import torch
    >>> from vardass.adapt import Batch, make_network
    >>> rule = ERM(make_network("mlp", (3,), 2, hidden=(4,)), 2)
    >>> sorted(rule.losses(Batch(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])), None, 0))
    ['task', 'total']
    """

    name: ClassVar[str] = "erm"
    uses_target: ClassVar[bool] = False
    takes_regression: ClassVar[bool] = True

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, which is the total."""
        task = self.task_loss(self.source_features(source), source)
        return {"total": task, "task": task}
