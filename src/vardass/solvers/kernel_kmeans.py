"""Ordinary (kernel) k-means: the baseline that ignores stratum sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.solvers.problem import Problem, Solution
from vardass.solvers.sizes import SizeLimits, repair_sizes
from vardass.validate import Progress, check_count

__all__ = ["inertia", "kernel_kmeans"]


def inertia(problem: Problem, labels: Tensor, k: int) -> float:
    """The k-means cost Σ_i |φ_i - μ_{a_i}|²."""
    return float(problem.distances(labels, k).nearest(labels)[1].sum(dtype=torch.float64))


def kernel_kmeans(
    problem: Problem,
    k: int,
    *,
    limits: SizeLimits,
    labels: Tensor,
    generator: int | torch.Generator | None = None,
    max_iter: int = 100,
    tol: float = 1e-6,
    progress: Progress | None = None,
) -> Solution:
    """Lloyd's algorithm in the kernel's feature space, without the size weights of equation 8.

    Each iteration moves every point to the nearest stratum mean; strata left empty take the points farthest
    from their own mean. The inertia Σ_h Σ_{i in S_h} |φ_i - μ_h|² never rises. The loop ends when no label
    changes, when the inertia falls by no more than ``tol`` times itself (tight size limits can make it rise:
    that iteration is then dropped), or after ``max_iter`` iterations.

    Called with a ``LowRankProblem`` of raw features and zero residual this is ordinary k-means.

    Parameters
    ----------
    problem : Problem
        The n points.
    k : int
        Number of strata.
    limits : SizeLimits
        Sizes that strata may have.
    labels : Tensor of shape (n,)
        Strata to start from, within ``limits``.
    generator : int or torch.Generator, optional
        Not used: all solvers are called alike.
    max_iter : int
        Iteration limit.
    tol : float
        Relative fall of the inertia that counts as none; 0 goes on until no label changes.
    progress : callable, optional
        Called after each iteration with the fraction of ``max_iter`` done and a message.

    Returns
    -------
    Solution
        Its inertia is never above that of the start. Its ``objective`` is J as for every solver and may be:
        k-means does not minimise it.
    """
    max_iter = check_count(max_iter, "max_iter", low=0)
    if not tol >= 0.0:
        raise InputError(f"tol must not be negative, got {tol}; 0 goes on until no label changes")
    best = labels
    distances = problem.distances(best, k)
    nearest, own = distances.nearest(best)
    cost = float(own.sum(dtype=torch.float64))
    n_iter = 0
    converged = False
    while n_iter < max_iter and not converged:
        moved = repair_sizes(nearest, distances, limits)
        n_iter += 1
        if torch.equal(moved, best):
            converged = True
            break
        distances = problem.distances(moved, k)
        nearest, own = distances.nearest(moved)
        previous, cost = cost, float(own.sum(dtype=torch.float64))
        converged = cost >= previous * (1.0 - tol)
        if cost < previous:
            best = moved
        if progress is not None:
            progress(n_iter / max_iter, f"iteration {n_iter}, inertia {min(cost, previous):.6g}")
    return Solution(best, n_iter, problem.objective(best, k), converged)
