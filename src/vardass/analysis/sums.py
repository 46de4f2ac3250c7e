"""Sums over the rows of a data set, all that MMD² and CORAL need of sets that do not fit in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from vardass.lowrank import FeatureMap
from vardass.validate import row_blocks

__all__ = ["BLOCK", "Sums", "add_sums", "central_moments", "row_sums", "set_sums"]

BLOCK = 8192  # rows that are used together

Sums: TypeAlias = dict[str, Tensor]
"""See `row_sums`."""


def row_sums(z: Tensor, feature_map: FeatureMap | None, centre: Tensor | None) -> Sums:
    """Sums over rows ``z`` (b, d) of a set, in double precision; those of two sets of rows can be added.

    With a feature map: of φ (r,), |φ|² and κ(z, z). With a centre (d,): of u = z - centre, uuᵀ (d, d), |u|²u and |u|⁴.
    """
    sums = {"count": torch.tensor(float(len(z)), dtype=torch.float64)}
    if feature_map is not None:
        features = feature_map.features(z).double()
        diagonal = feature_map.kernel.diag(z).sum(dtype=torch.float64)
        sums |= {"features": features.sum(0), "lengths": features.square().sum(), "diagonal": diagonal}
    if centre is not None:
        u = z - centre.to(z)
        lengths = u.square().sum(1).double()
        # a block's product in the precision of the data
        sums |= {"rows": u.sum(0, dtype=torch.float64), "products": (u.T @ u).double()}
        sums |= {"cubes": lengths @ u.double(), "fourths": lengths.square().sum()}
    return sums


def add_sums(sums: Iterable[Sums]) -> Sums:
    """The sums over the rows of several blocks together, added in their order."""
    total: Sums = {}
    for block in sums:
        total |= {name: total[name] + value if total else value for name, value in block.items()}
    return total


def set_sums(z: Tensor, feature_map: FeatureMap | None, centre: Tensor | None) -> Sums:
    """`row_sums` of a set that is in memory, some rows at a time."""
    return add_sums(row_sums(z[rows], feature_map, centre) for rows in row_blocks(len(z), BLOCK))


def central_moments(sums: Sums, centre: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean (d,), Σ vvᵀ and Σ |v|⁴ of rows v less their mean, from sums around a centre near it."""
    n, products, shift = sums["count"], sums["products"], sums["rows"] / sums["count"]
    length = shift.square().sum()
    fourth = sums["fourths"] - 4.0 * shift @ sums["cubes"] + 4.0 * shift @ products @ shift
    fourth = fourth + 2.0 * length * products.trace() - 3.0 * n * length.square()
    return centre + shift, products - n * torch.outer(shift, shift), max(0.0, float(fourth))
