"""Solvers by name, with their starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.solvers.bisection import bisection_labels
from vardass.solvers.dynamic_kmeans import dynamic_kmeans
from vardass.solvers.interior_point import interior_point
from vardass.solvers.lloyd import kernel_kmeans
from vardass.solvers.min_sum import min_sum
from vardass.solvers.problem import LowRankProblem, Problem
from vardass.solvers.seeding import kernel_kmeanspp, nearest_seed_labels, random_balanced_labels
from vardass.solvers.sizes import SizeLimits, repair_sizes
from vardass.solvers.solution import Solution

__all__ = ["INITS", "SOLVERS", "Progress", "solve"]

Progress = Callable[[float, str], None]

INITS = ("auto", "bisection", "kmeans++", "random")

_SOLVERS: dict[str, tuple[Callable[..., Solution], frozenset[str]]] = {
    "min-sum": (min_sum, frozenset({"max_passes", "tol"})),
    "dynamic-kmeans": (dynamic_kmeans, frozenset({"trials", "parallel", "max_iter", "patience"})),
    "kernel-kmeans": (kernel_kmeans, frozenset({"max_iter", "tol"})),
    "kmeans": (kernel_kmeans, frozenset({"max_iter", "tol"})),
    "interior-point": (interior_point, frozenset({"max_iter"})),
}

SOLVERS = tuple(_SOLVERS)


def solve(
    problem: Problem,
    k: int,
    *,
    solver: str = "min-sum",
    init: str = "auto",
    start: Tensor | None = None,
    limits: SizeLimits,
    generator: torch.Generator,
    progress: Progress | None = None,
    **options: Any,
) -> Solution:
    """Run one solver on ``problem`` from ``start`` labels, or from the start named by ``init``.

    ``"auto"`` is bisection for min-sum, with k-means++ tried too where few points make up most of the spread, and
    k-means++ for the other solvers.
    """
    function, known = _SOLVERS[solver]
    if unknown := sorted(set(options) - known):
        raise InputError(f"solver {solver!r} takes no option {unknown[0]!r}; it takes {', '.join(sorted(known))}")
    inits = [init]
    if init == "auto":
        inits = ["bisection"] if solver == "min-sum" else ["kmeans++"]
        if solver == "min-sum" and start is None and _has_heavy_tails(problem):
            inits.append("kmeans++")  # a few far points decide: cuts may miss them, distances do not
    best: Solution | None = None
    for name in inits:
        labels = start if start is not None else _initial_labels(problem, k, name, limits, generator)
        if not limits.hold(torch.bincount(labels, minlength=k)):
            labels = repair_sizes(labels, problem.centroid_distances(labels, k), limits)
        found = function(problem, k, limits=limits, labels=labels, generator=generator, progress=progress, **options)
        if best is None or found.objective < best.objective:
            best = found
    assert best is not None
    return best


def _has_heavy_tails(problem: Problem) -> bool:
    """Whether fewer than a tenth of the points, in effect, make up the total spread."""
    spread = problem.spread().double()
    return float(spread.sum()) ** 2 < 0.1 * problem.n * float(spread.square().sum())


def _initial_labels(problem: Problem, k: int, init: str, limits: SizeLimits, generator: torch.Generator) -> Tensor:
    if init == "random":
        return random_balanced_labels(problem.n, k, generator, problem.diag.device)
    if init == "kmeans++":
        return nearest_seed_labels(problem, kernel_kmeanspp(problem, k, generator))
    coordinates = problem.features if isinstance(problem, LowRankProblem) else _coordinates(problem, generator)
    even = limits.high - limits.low <= 1
    return bisection_labels(coordinates, k, importance=None if even else problem.spread().sqrt())


def _coordinates(problem: Problem, generator: torch.Generator, count: int = 96) -> Tensor:
    """Principal coordinates (n, ≤ count) of random kernel columns: enough to bisect an exact problem."""
    picks = torch.randperm(problem.n, generator=generator, device=problem.diag.device)[:count]
    columns = problem.columns(picks)
    columns = columns - columns.mean(0)
    columns /= columns.abs().amax().clamp_min(torch.finfo(columns.dtype).tiny)  # so that squares stay finite
    _, axes = torch.linalg.eigh(columns.T @ columns)
    coordinates: Tensor = columns @ axes.flip(1)
    return coordinates
