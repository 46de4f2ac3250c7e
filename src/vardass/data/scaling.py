"""Columns of embeddings scaled by mean and deviation of the sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vardass.data.domains import Task, TensorInputs
from vardass.errors import InputError

__all__ = ["Scale", "ScaledInputs", "scale_columns", "standardise", "standardise_task"]

Scale: TypeAlias = Mapping[str, Any]

_FLOOR = 0.01  # of the median column's deviation
_CLIP = 8.0


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
    deviation = rows.std(0, correction=0)
    return (features - rows.mean(0)) / torch.where(deviation > 0, deviation, 1.0)


class ScaledInputs(TensorInputs):
    """Vectors in memory that were scaled; ``scale`` says how, see `standardise_task`."""

    def __init__(self, tensor: Tensor, scale: Scale) -> None:
        super().__init__(tensor)
        self.scale = dict(scale)


def standardise_task(task: Task) -> tuple[Task, dict[str, Any]]:
    """Scale all columns by mean and deviation of the sources together, robustly.

    A column that hardly varies in the sources may vary much in the target, where dividing by its deviation would
    let it tower above all others. So a column whose deviation is below 1% of the median column's is divided by the
    median deviation, and scaled values are cut at ±8. The columns should be of one unit, as those of embeddings are.

    Returns
    -------
    task : Task
        With scaled samples, as `ScaledInputs`.
    scale : dict
        ``"mean"`` and ``"deviation"`` of each column and ``"clip"``, for `scale_columns` on samples that come later.

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
    reference = torch.cat(tables[:-1])
    deviation = reference.std(0, correction=0)
    typical = deviation[deviation > 0].median() if bool((deviation > 0).any()) else deviation.new_ones(())
    deviation = torch.where(deviation < _FLOOR * typical, typical, deviation)
    scale = {"mean": reference.mean(0).tolist(), "deviation": deviation.tolist(), "clip": _CLIP}
    scaled = [
        domain.with_inputs(ScaledInputs(scale_columns(table, scale), scale))
        for domain, table in zip((*task.sources, task.target), tables, strict=True)
    ]
    return Task(task.name, tuple(scaled[:-1]), scaled[-1]), scale


def scale_columns(features: Tensor, scale: Scale) -> Tensor:
    """Features (n, d) minus the means, divided by the deviations and cut, as `standardise_task` did.

    Without ``"clip"``, as runs of before stored it, nothing is cut.
    """
    scaled = (features - features.new_tensor(scale["mean"])) / features.new_tensor(scale["deviation"])
    clip = scale.get("clip")
    return scaled if clip is None else scaled.clamp(-clip, clip)
