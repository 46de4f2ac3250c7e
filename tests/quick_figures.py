"""Quick figures, each computed once for all tests of a process."""

from __future__ import annotations

import functools

import torch

from vardass.paper.figures import FigureResult, make_figure
from vardass.paper.theory import spearman


@functools.cache
def quick(number: int) -> FigureResult:
    return make_figure(number, quick=True)


def rho(result: FigureResult, **values: str | int) -> float:
    """Rank correlation of target and surrogate over the rows with these values."""
    found = result.select(**values)
    return spearman(
        *(torch.tensor([row[name] for row in found], dtype=torch.float64) for name in ("target", "surrogate"))
    )
