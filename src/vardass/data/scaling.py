"""Embeddings of a task, scaled by the columns of its sources."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from vardass.data.domains import Task, TensorInputs
from vardass.errors import InputError, VardassWarning
from vardass.scaling import Scale, robust_scale, scale_columns

__all__ = ["ScaledInputs", "scaled_inputs", "standardise_task"]

_FAR = 1000.0  # deviations: a mark for missing values, or another unit, rather than a tail


class ScaledInputs(TensorInputs):
    """Vectors in memory that were scaled; ``scale`` says how, see `standardise_task`."""

    def __init__(self, tensor: Tensor, scale: Scale) -> None:
        super().__init__(tensor)
        self.scale = dict(scale)


def scaled_inputs(table: Tensor, scale: Scale, name: str) -> ScaledInputs:
    """Rows (n, d) of the domain ``name`` scaled by ``scale``, with a warning if values are absurdly far from it."""
    far = scale_columns(table, {**scale, "clip": None}).abs()
    if "clip" in scale and bool((far > _FAR).any()):
        row, column = divmod(int(far.argmax()), far.shape[1])
        warnings.warn(
            f"{name} has {float(table[row, column]):.6g} in column {column} of row {row} (both from 0), "
            f"{float(far[row, column]):.3g} deviations of the sources from their mean; it is cut to "
            f"{scale['clip']:g}, as are {int((far > _FAR).sum()) - 1:,} more such values: fix them if they stand for "
            "missing ones",
            VardassWarning,
            stacklevel=3,
        )
    return ScaledInputs(scale_columns(table, scale), scale)


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
    reference = torch.cat(tables[:-1])
    scale = robust_scale(reference)
    _tell_of_constant_columns(reference)
    scaled = [
        domain.with_inputs(scaled_inputs(table, scale, domain.name))
        for domain, table in zip((*task.sources, task.target), tables, strict=True)
    ]
    return Task(task.name, tuple(scaled[:-1]), scaled[-1]), scale


def _tell_of_constant_columns(reference: Tensor) -> None:
    constant = (reference == reference[0]).all(0).nonzero().flatten().tolist()
    if constant and len(reference) > 1:
        column = constant[0]
        warnings.warn(
            f"{len(constant):,} of {reference.shape[1]:,} columns are constant in the sources, such as column {column} "
            f"(from 0), which is always {float(reference[0, column]):.6g}; nothing can be learnt from them: leave them "
            "out, or check the encoder",
            VardassWarning,
            stacklevel=3,
        )
