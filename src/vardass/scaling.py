"""Columns of features scaled by mean and deviation of a reference, such as the source domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vardass.validate import some_rows

Scale: TypeAlias = Mapping[str, Any]

HARDLY = 0.01  # of what the target varies
CLIP = 8.0
_MOST_ROWS = 10_000  # of the target that are used


def standardise(features: Tensor, *, reference: Tensor | None = None) -> Tensor:
    """Scale each column of ``features`` (n, d) to mean 0 and deviation 1; constant columns become 0.

    Mean and deviation are those of the rows of ``reference`` (m, d), if given, such as the source domain.
    """
    rows = features if reference is None else reference
    deviation = deviations(rows)
    return (features - rows.mean(0)) / torch.where(deviation > 0, deviation, 1.0)


def deviations(rows: Tensor) -> Tensor:
    """Deviations (d,) of columns; exactly 0 for a constant one, where rounding of the mean would leave some."""
    return rows.std(0, correction=0) * (rows.amin(0) < rows.amax(0))


def robust_scale(reference: Tensor, target: Tensor) -> dict[str, Any]:
    """How to scale columns by those of ``reference`` (m, d), such as the sources, robustly, for `scale_columns`.

    A column that hardly varies in the sources may vary much in the ``target`` (n, d), where dividing by its deviation
    would let it tower above all others. So where its deviation is below 1% of the distance that nine tenths of the
    target's values keep from their median, it is divided by that distance, and scaled values are cut at ±8. Each column
    is judged by itself, so columns may have different units.
    """
    deviation, reach = deviations(reference), usual_reach(target)
    deviation = torch.where(deviation < HARDLY * reach, reach, deviation)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return {"mean": reference.mean(0).tolist(), "deviation": deviation.tolist(), "clip": CLIP}


def usual_reach(target: Tensor) -> Tensor:
    """The distance (d,) that nine tenths of the values of each column (n, d) keep from their median.

    A few absurd values do not count.
    """
    some = some_rows(target, _MOST_ROWS)
    apart = (some - some.median(0).values).abs()
    return apart.kthvalue(-(-9 * len(apart) // 10), dim=0).values


def scale_columns(features: Tensor, scale: Scale) -> Tensor:
    """Features (n, d) minus the means, divided by the deviations and cut, as `robust_scale` says.

    Without ``"clip"`` nothing is cut.
    """
    scaled = (features - features.new_tensor(scale["mean"])) / features.new_tensor(scale["deviation"])
    clip = scale.get("clip")
    return scaled if clip is None else scaled.clamp(-clip, clip)
