"""K-means solvers: the paper's dynamically weighted one (Algorithms 1 and 2), and the ordinary one as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from vardass.backend import compiled_loops
from vardass.solvers.labels import Distances, SizeLimits, Solution, repair_sizes
from vardass.validate import Progress, as_generator, check_count, check_number, row_blocks
from vardass.view import View

__all__ = ["centroid_objective", "dynamic_kmeans", "greedy_assignment", "kernel_kmeans"]

# Scores of one step, and visits of all steps, that one batch of trials may hold: about 1 MB and 150 MB.
_STEP_NUMBERS = 2**18
_VISITS = 2**22


def dynamic_kmeans(
    view: View,
    k: int,
    *,
    limits: SizeLimits,
    labels: Tensor,
    generator: int | torch.Generator | None = None,
    trials: int = 100,
    parallel: int = 10,
    max_iter: int = 50,
    patience: int = 3,
    progress: Progress | None = None,
) -> Solution:
    """Alternate distance update and greedy weighted assignment (Algorithm 1).

    Each iteration computes the distance of every point to every stratum mean (step 2) and builds new strata with
    Algorithm 2 (step 3), ``trials`` times, ``parallel`` rows at once; empty strata and violated size limits are
    repaired. The best strata are returned, never worse than the start. The paper names no stopping rule: here the loop
    ends when ``patience`` iterations in a row did not lower J, when J is 0, or after ``max_iter`` iterations.
    """
    max_iter = check_count(max_iter, "max_iter", low=0)
    patience = check_count(patience, "patience")
    trials = check_count(trials, "trials")
    parallel = check_count(parallel, "parallel")
    generator = as_generator(generator, view.diag.device)
    distances = view.centroid_distances(labels, k)
    best, best_cost = labels, centroid_objective(distances, labels)
    stale = n_iter = 0
    converged = best_cost == 0.0
    while n_iter < max_iter and not converged:
        assigned = greedy_assignment(distances, trials=trials, parallel=parallel, generator=generator)
        current = repair_sizes(assigned, Distances(view, assigned, k, distances), limits)
        distances = view.centroid_distances(current, k)
        cost = centroid_objective(distances, current)
        n_iter += 1
        stale += 1
        if cost < best_cost:
            best, best_cost, stale = current, cost, 0
        converged = stale >= patience or best_cost == 0.0
        if progress is not None:
            progress(n_iter / max_iter, f"iteration {n_iter}, objective {best_cost:.6g}")
    objective = view.objective(best, k)
    if best is not labels:
        # the loop compares in the problem's precision; the promise is kept in double
        objective_at_start = view.objective(labels, k)
        if objective_at_start < objective:
            best, objective = labels, objective_at_start
    return Solution(best, n_iter, objective, converged)


def centroid_objective(distances: Tensor, labels: Tensor) -> float:
    """J(S) = Σ_i |S_{a_i}| D_{i,a_i} (equation 8) from distances (n, k) to the means of these same strata."""
    own = distances.gather(1, labels[:, None])[:, 0].double()
    sizes = torch.bincount(labels, minlength=distances.shape[1])
    return float((own * sizes[labels]).sum())


def greedy_assignment(distances: Tensor, *, trials: int, parallel: int, generator: torch.Generator) -> Tensor:
    """Assign points to strata one after another, weighted by the sizes so far (Algorithm 2).

    Point i goes to the stratum j with the smallest D_ij (n_j + 1), where n_j counts the points that j has got so far.
    Each trial visits the points in its own random order; ``parallel`` points in a row see the same n_j. The trial with
    the lowest cost Σ_i D_{i,a_i} |S_{a_i}| (equation 16 with D fixed) wins. Among strata at distance 0 the emptiest is
    taken, otherwise ties go to the first. Infinite ``distances`` (n, k) forbid a stratum, and some may be left empty.
    """
    n, k = distances.shape
    device = distances.device
    # as many trials at a time as fit in memory and in cache
    together = max(1, min(_STEP_NUMBERS // (k * min(parallel, n)), _VISITS // n))
    best = torch.zeros(n, dtype=torch.int64, device=device)
    best_cost = torch.full((), torch.inf, dtype=torch.float64, device=device)
    for batch in row_blocks(trials, together):
        # on a CPU n log n sorting of random keys would take as long as the assignment itself
        orders = torch.empty(batch.stop - batch.start, n, dtype=torch.int64, device=device)
        for order in orders:
            torch.randperm(n, generator=generator, out=order)
        picked, costs = _greedy_in_order(distances, orders, parallel)
        cost, winner = costs.min(0)
        labels = torch.empty_like(best).scatter_(0, orders[winner], picked[winner])
        best = torch.where(cost < best_cost, labels, best)
        best_cost = torch.minimum(cost, best_cost)
    return best


def _greedy_in_order(distances: Tensor, orders: Tensor, parallel: int) -> tuple[Tensor, Tensor]:
    """Algorithm 2 for given orders (trials, n): stratum of the point at each position (trials, n), costs (trials,)."""
    n, k = distances.shape
    # the floor lets the size decide between strata at distance 0
    table = distances.clamp_min(torch.finfo(distances.dtype).tiny)
    if (compiled := compiled_loops(table)) is not None:
        found = compiled.greedy_in_order(table.contiguous().numpy(), orders.numpy(), parallel)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
    weights = table.new_ones(len(orders), k)  # n_j + 1 of each trial
    picked = torch.empty_like(orders)
    for rows in row_blocks(n, parallel):
        scores = table[orders[:, rows]].mul_(weights[:, None])
        picked[:, rows] = chosen = _argmin(scores)
        weights.scatter_add_(1, chosen, weights.new_ones(()).expand(chosen.shape))
    own = table[orders, picked]
    sizes = weights.sub_(1.0).gather(1, picked)
    return picked, own.mul_(sizes).sum(1, dtype=torch.float64)


def _argmin(scores: Tensor) -> Tensor:
    """Index of the smallest along the last dimension, the first of several."""
    if scores.device.type == "cpu":  # where numpy's is some ten times faster
        return torch.from_numpy(scores.numpy().argmin(-1))
    return scores.argmin(-1)


# --- ordinary k-means, which ignores stratum sizes


def kernel_kmeans(
    view: View,
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

    Each iteration moves every point to the nearest stratum mean; empty strata take the points farthest from their own
    mean. The loop ends when no label changes, when the inertia Σ_h Σ_{i in S_h} |φ_i - μ_h|² falls by no more than
    ``tol`` times itself (tight size limits can make it rise: that iteration is then dropped), or after ``max_iter``
    iterations. J, which it does not minimise, may rise.

    With a `LowRankView` of raw features and zero residual this is ordinary k-means.
    """
    max_iter = check_count(max_iter, "max_iter", low=0)
    tol = check_number(tol, "tol", low=0.0, remedy="0 ends when no label changes")
    best = labels
    distances = Distances(view, best, k)
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
        distances = Distances(view, moved, k)
        nearest, own = distances.nearest(moved)
        previous, cost = cost, float(own.sum(dtype=torch.float64))
        converged = cost >= previous * (1.0 - tol)
        if cost < previous:
            best = moved
        if progress is not None:
            progress(n_iter / max_iter, f"iteration {n_iter}, inertia {min(cost, previous):.6g}")
    return Solution(best, n_iter, view.objective(best, k), converged)
