"""Columns of embeddings scaled by mean and deviation of the sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vardass.data.domains import Task, TensorInputs
from vardass.errors import InputError

__all__ = ["scale_columns", "standardise", "standardise_task"]


def standardise(features: Tensor, *, reference: Tensor | None = None) -> Tensor:
    """Scale each column to mean 0 and deviation 1; constant columns become 0.

    Parameters
    ----------
    features : Tensor of shape (n, d)
        What to scale.
    reference : Tensor of shape (m, d), optional
        Rows to take mean and deviation from, such as the source domain; by default ``features``.
    """
    rows = features if reference is None else reference
    return (features - rows.mean(0)) / _deviation(rows)


def standardise_task(task: Task) -> tuple[Task, dict[str, list[float]]]:
    """Scale all columns by mean and deviation of the sources together.

    Returns
    -------
    task : Task
        With scaled samples.
    scale : dict
        ``"mean"`` and ``"deviation"`` of each column, for `scale_columns` on samples that come later.

    Raises
    ------
    InputError
        If the samples are not vectors in memory.
    """
    tables = []
    for domain in (*task.sources, task.target):
        if not isinstance(domain.dataset, TensorInputs) or domain.dataset.tensor.ndim != 2:
            raise InputError(f"only embeddings can be standardised, domain {domain.name!r} holds {domain.kind} data")
        tables.append(domain.dataset.tensor)
    reference = torch.cat(tables[:-1])
    scale = {"mean": reference.mean(0).tolist(), "deviation": _deviation(reference).tolist()}
    scaled = [
        domain.with_inputs(TensorInputs(scale_columns(table, scale)))
        for domain, table in zip((*task.sources, task.target), tables, strict=True)
    ]
    return Task(task.name, tuple(scaled[:-1]), scaled[-1]), scale


def scale_columns(features: Tensor, scale: Mapping[str, Sequence[float]]) -> Tensor:
    """Features (n, d) minus the means, divided by the deviations, that `standardise_task` gave."""
    return (features - features.new_tensor(scale["mean"])) / features.new_tensor(scale["deviation"])


def _deviation(rows: Tensor) -> Tensor:
    spread = rows.std(0, correction=0)
    return torch.where(spread > 0, spread, 1.0)
