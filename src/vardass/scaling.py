"""Columns of features scaled by mean and deviation of a reference, such as the source domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Scale: TypeAlias = Mapping[str, Any]

FLOOR = 0.01  # of the median column's deviation
CLIP = 8.0


def standardise(features: Tensor, *, reference: Tensor | None = None) -> Tensor:
    """Scale each column of ``features`` (n, d) to mean 0 and deviation 1; constant columns become 0.

    Mean and deviation are those of the rows of ``reference`` (m, d), such as the source domain, if there is one.
    """
    rows = features if reference is None else reference
    deviation = rows.std(0, correction=0)
    return (features - rows.mean(0)) / torch.where(deviation > 0, deviation, 1.0)


def robust_scale(reference: Tensor) -> dict[str, Any]:
    """How to scale columns by those of ``reference`` (m, d), robustly, for `scale_columns`.

    A column that hardly varies in the sources may vary much in the target, where dividing by its deviation would
    let it tower above all others. So a column whose deviation is below 1% of the median column's is divided by the
    median deviation, and scaled values are cut at ±8. The columns should be of one unit, as those of embeddings are.
    """
    deviation = reference.std(0, correction=0)
    typical = deviation[deviation > 0].median() if bool((deviation > 0).any()) else deviation.new_ones(())
    deviation = torch.where(deviation < FLOOR * typical, typical, deviation)
    return {"mean": reference.mean(0).tolist(), "deviation": deviation.tolist(), "clip": CLIP}


def scale_columns(features: Tensor, scale: Scale) -> Tensor:
    """Features (n, d) minus the means, divided by the deviations and cut, as `robust_scale` says.

    Without ``"clip"`` nothing is cut.
    """
    scaled = (features - features.new_tensor(scale["mean"])) / features.new_tensor(scale["deviation"])
    clip = scale.get("clip")
    return scaled if clip is None else scaled.clamp(-clip, clip)
