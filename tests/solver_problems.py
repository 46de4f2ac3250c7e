"""Small problems for the tests of the solvers."""

from __future__ import annotations

import torch
from torch import Tensor

from vardass.kernels import RBFMixture
from vardass.paper.kmeans import dynamic_kmeans, kernel_kmeans
from vardass.solvers.labels import SizeLimits, Solution, start_labels, within_limits
from vardass.view import ExactView, LowRankView, View

SOLVERS = {"dynamic-kmeans": dynamic_kmeans, "kernel-kmeans": kernel_kmeans}


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(n: int, d: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A skewed cloud, so that strata of equal size are not the natural ones."""
    return torch.randn(n, d, generator=gen(seed), dtype=dtype).exp()


def exact(x: Tensor) -> ExactView:
    return ExactView(RBFMixture(gammas=(0.1, 1.0)).matrix(x))


def linear(x: Tensor) -> LowRankView:
    return LowRankView(x - x.mean(0), x.new_zeros(len(x)))


def low_rank_with_residual(n: int = 20, seed: int = 3) -> LowRankView:
    x = points(n, 4, seed)
    return LowRankView(x, torch.rand(n, generator=gen(seed + 1), dtype=x.dtype))


def sizes_of(labels: Tensor, k: int) -> Tensor:
    assert int(labels.min()) >= 0
    assert int(labels.max()) < k
    return torch.bincount(labels, minlength=k)


def run(
    name: str,
    problem: View,
    k: int,
    *,
    limits: SizeLimits,
    labels: Tensor | None = None,
    seed: int = 0,
    **options: object,
) -> Solution:
    """One of SOLVERS from given labels or from k-means++, as `stratify` would call it."""
    generator = gen(seed)
    if labels is None:
        labels = start_labels(problem, k, "kmeans++", limits=limits, generator=generator)
    else:
        labels = within_limits(problem, labels, k, limits)
    if name == "dynamic-kmeans":
        options = {"trials": 8, **options}
    return SOLVERS[name](problem, k, limits=limits, labels=labels, generator=generator, **options)  # type: ignore[operator]


def greedy_cost(distances: Tensor, labels: Tensor) -> float:
    """Equation 16 at a one-hot U."""
    u = torch.nn.functional.one_hot(labels, distances.shape[1]).to(distances)
    return float((u * distances * u.sum(0)).sum())
