"""Quick figures, each computed once for all tests of a process."""

from __future__ import annotations

import functools

import torch

from vardass.paper.figures import FigureResult, make_figure
from vardass.paper.theory import spearman


@functools.cache
def quick(number: int) -> FigureResult:
    return make_figure(number, quick=True)


def select(result: FigureResult, **values: str | int) -> list[dict[str, str | int | float]]:
    """Rows whose columns have the given values, each by name."""
    named = result.numbers.to_dict("records")
    return [row for row in named if all(row[name] == value for name, value in values.items())]


def rho(result: FigureResult, **values: str | int) -> float:
    """Rank correlation of target and surrogate over the rows with these values."""
    found = select(result, **values)
    return spearman(
        *(torch.tensor([row[name] for row in found], dtype=torch.float64) for name in ("target", "surrogate"))
    )
