"""Var(μ̂) against the batch size, for any features and several ways to draw: the numbers of Figure 4 and of the demo."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.bounds import nearest_neighbour_bound
from vardass.figures.base import BLUE, GREEN, ORANGE, PURPLE, VERMILION, Progress
from vardass.kernels import RBFMixture
from vardass.sampler_noise.noise import Batches, embedding_errors
from vardass.samplers import BalancedBatchSampler, OrderedBatchSampler
from vardass.solvers import stratify
from vardass.variance import uniform_variance

__all__ = ["COUPLED", "KERNEL", "METHODS", "Method", "Point", "measure", "measure_coupled", "of_method"]

KERNEL = RBFMixture(gammas=(1.0,), scale="median")
"""Unit bandwidth, for distances in the unit of their median: raw ones are far above 1, where exp(-d²) is 0."""


@dataclass(frozen=True)
class Method:
    """A solver of `stratify`, and how its curve is named and drawn."""

    solver: str
    name: str
    colour: str
    marker: str


METHODS = (
    Method("kmeans", "k-means", ORANGE, "s"),
    Method("kernel-kmeans", "kernel k-means", GREEN, "D"),
    Method("dynamic-kmeans", "VaRDASS (paper)", PURPLE, "^"),
    Method("min-sum", "min-sum (ours)", BLUE, "o"),
)
COUPLED = {"ordered (ours)": (VERMILION, "v"), "balanced (ours)": ("#56B4E9", "P")}


@dataclass(frozen=True)
class Point:
    """One way to draw at one batch size; ``stderr`` is 0 where the variance is exact."""

    k: int
    method: str
    variance: float
    relative: float
    seconds: float
    stderr: float = 0.0


def of_method(points: Sequence[Point], method: str) -> list[Point]:
    """The points of one method, by batch size."""
    return [point for point in points if point.method == method]


def measure(
    features: Tensor, ks: Sequence[int], *, seeds: Sequence[int], progress: Progress | None = None
) -> tuple[list[Point], list[float]]:
    """Var(μ̂) of uniform draws and of one draw from each stratum, for each of `METHODS`, exact.

    Parameters
    ----------
    features : Tensor of shape (n, d)
        All samples of one domain.
    ks : sequence of int
        Batch sizes.
    seeds : sequence of int
        The solvers' variances are means over these.
    progress : callable, optional
        ``progress(share_done, message)``.

    Returns
    -------
    points : list of Point
        For each k uniform first, then the methods in order.
    bounds : list of float
        What no partition can go below, for each k.
    """
    kernel = KERNEL.fit(features)
    points, bounds = [], []
    for number, k in enumerate(ks):
        uniform = uniform_variance(features, k, kernel=kernel)
        points.append(Point(k, "uniform", uniform, 1.0, 0.0))
        for step, method in enumerate(METHODS):
            if progress is not None:
                progress((number + step / len(METHODS)) / len(ks), f"{method.name}, k = {k}")
            clock = time.perf_counter()
            found = [stratify(features, k, kernel=kernel, solver=method.solver, seed=seed) for seed in seeds]
            seconds = (time.perf_counter() - clock) / len(seeds)
            variance = sum(strata.variance for strata in found) / len(seeds)
            points.append(Point(k, method.name, variance, variance / uniform, seconds))
        bounds.append(nearest_neighbour_bound(features, k, kernel=kernel, rows=len(features)).variance)
    return points, bounds


def measure_coupled(features: Tensor, k: int, *, seed: int, batches: int) -> list[Point]:
    """E|μ̂ - μ|² of planned batches, which have no closed form, over ``batches`` batches of each sampler."""
    kernel = KERNEL.fit(features)
    n, made, seconds = len(features), [], []
    for kind in (OrderedBatchSampler, BalancedBatchSampler):
        clock = time.perf_counter()
        sampler = kind(n, k, kernel=kernel, seed=seed)
        sampler.refresh(features)
        chunk = sampler.sample_batches(batches)
        seconds.append(time.perf_counter() - clock)
        even = torch.full((k,), 1.0 / k, dtype=torch.float64)
        weights = even if chunk.weights is None else chunk.weights.double()
        made.append(Batches(chunk.rows, weights.expand(chunk.rows.shape), chunk.weights is not None))
    measured = embedding_errors(features, kernel, made, max_columns=n, seed=seed)
    uniform = uniform_variance(features, k, kernel=kernel)
    points = []
    for name, errors, spent in zip(COUPLED, measured.errors, seconds, strict=True):
        variance = float(errors.mean())
        stderr = float(errors.std()) / len(errors) ** 0.5
        points.append(Point(k, name, variance, variance / uniform, spent, stderr))
    return points
