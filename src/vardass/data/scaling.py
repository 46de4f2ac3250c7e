"""Embeddings of a task, scaled by the columns of its sources."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardass.data.domains import Task, TensorInputs
from vardass.errors import InputError
from vardass.scaling import Scale, robust_scale, scale_columns

__all__ = ["ScaledInputs", "standardise_task"]


class ScaledInputs(TensorInputs):
    """Vectors in memory that were scaled; ``scale`` says how, see `standardise_task`."""

    def __init__(self, tensor: Tensor, scale: Scale) -> None:
        super().__init__(tensor)
        self.scale = dict(scale)


def standardise_task(task: Task) -> tuple[Task, dict[str, Any]]:
    """Scale all columns by mean and deviation of the sources together, with a floor and a clip; see `robust_scale`.

    Returns
    -------
    task : Task
        With scaled samples, as `ScaledInputs`.
    scale : dict
        For `scale_columns` on samples that come later.

    Raises
    ------
    InputError
        If the samples are not vectors in memory.
    """
    tables = []
    for domain in (*task.sources, task.target):
        if not isinstance(domain.dataset, TensorInputs) or domain.dataset.tensor.ndim != 2:
            raise InputError(f"only embeddings can be standardised, domain {domain.name!r} holds {domain.kind} data")
        if isinstance(domain.dataset, ScaledInputs):
            raise InputError(f"domain {domain.name!r} is standardised already; ask for it once")
        tables.append(domain.dataset.tensor)
    scale = robust_scale(torch.cat(tables[:-1]))
    scaled = [
        domain.with_inputs(ScaledInputs(scale_columns(table, scale), scale))
        for domain, table in zip((*task.sources, task.target), tables, strict=True)
    ]
    return Task(task.name, tuple(scaled[:-1]), scaled[-1]), scale
