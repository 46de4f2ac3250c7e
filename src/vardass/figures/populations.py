"""Random covariances, strata and partitions over which Figures 1 and 2 compare target and surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from vardass.data import load_watch, standardise

__all__ = [
    "all_partitions",
    "principal_windows",
    "random_covariances",
    "random_strata",
    "scale_factors",
    "shaken_labels",
]

DECADES = 2.0
"""How many powers of ten the scales of one population cover where they vary."""


def random_covariances(count: int, d: int, kind: str, generator: torch.Generator) -> Tensor:
    """Covariances (count, d, d), float64.

    Parameters
    ----------
    count, d : int
        How many, and their dimension.
    kind : {"diagonal", "full", "full, scaled"}
        Independent variances, uniform from 0 to 1, on the diagonal; A Aᵀ/d with A standard normal; the same times a
        factor of its own for each, log-uniform from 0.01 to 1.
    generator : torch.Generator
        Source of randomness.
    """
    if kind == "diagonal":
        return torch.diag_embed(torch.rand(count, d, dtype=torch.float64, generator=generator))
    full = _wishart((count, d, d), generator)
    return full if kind == "full" else full * scale_factors(count, generator)[:, None, None]


def scale_factors(count: int, generator: torch.Generator) -> Tensor:
    """Log-uniform factors from 0.01 to 1: (count,)."""
    return 10.0 ** (-DECADES * torch.rand(count, dtype=torch.float64, generator=generator))


def random_strata(count: int, k: int, d: int, generator: torch.Generator, *, scaled: bool) -> tuple[Tensor, Tensor]:
    """Means (count, k, d) and covariances (count, k, d, d) of k strata for each of ``count`` partitions.

    Means are standard normal; a stratum's covariance is A Aᵀ/d times a uniform number, so that strata differ in
    spread. ``scaled`` multiplies the covariances of a partition by one common factor from 0.01 to 1.
    """
    means = torch.randn(count, k, d, dtype=torch.float64, generator=generator)
    spread = torch.rand(count, k, 1, 1, dtype=torch.float64, generator=generator)
    if scaled:
        spread = spread * scale_factors(count, generator)[:, None, None, None]
    return means, spread * _wishart((count, k, d, d), generator)


def _wishart(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    root = torch.randn(shape, dtype=torch.float64, generator=generator)
    return root @ root.mT / shape[-1]


def principal_windows(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Principal coordinates of n random windows of the right wrist, and their mean less that of the left wrist.

    Returns
    -------
    Tensor of shape (n, 78) and Tensor of shape (78,)
        float64, standardised with the right wrist; columns fall in variance, so that the first d are the best
        d-dimensional picture of the data.
    """
    data = load_watch()
    right = data.features[data.side == 1].double()
    left = standardise(data.features[data.side == 0].double(), reference=right)
    right = standardise(right)
    axes = torch.linalg.eigh(right.T @ right)[1].flip(1)
    rows = torch.randperm(len(right), generator=generator)[:n]
    points = right[rows] @ axes
    return points, points.mean(0) - (left @ axes).mean(0)


def shaken_labels(best: Tensor, k: int, count: int, generator: torch.Generator) -> Tensor:
    """Relabel at random a share of the points that grows from none to all of them: (count, n).

    A draw that leaves a stratum empty is made again.
    """
    rows = []
    for share in torch.linspace(0.0, 1.0, count).tolist():
        while True:
            moved = torch.rand(len(best), generator=generator) < share
            labels = torch.where(moved, torch.randint(k, best.shape, generator=generator), best)
            if int(torch.bincount(labels, minlength=k).min()) > 0:
                break
        rows.append(labels)
    return torch.stack(rows)


def all_partitions(n: int, k: int) -> Tensor:
    """Every partition of n points into k non-empty strata, once each: (Stirling(n, k), n) int64.

    Strata are numbered in the order of their first points (restricted growth).
    """
    rows = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(n - 1):
        fresh = rows.amax(1) + 1
        repeated = rows.repeat_interleave(fresh + 1, 0)
        starts = (fresh + 1).cumsum(0) - fresh - 1
        last = torch.arange(len(repeated)) - starts.repeat_interleave(fresh + 1)
        rows = torch.cat([repeated, last[:, None]], 1)
        rows = rows[rows.amax(1) < k]
    return rows[rows.amax(1) == k - 1]
