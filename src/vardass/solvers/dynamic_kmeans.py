"""The paper's solver: dynamically weighted kernel k-means (Algorithms 1 and 2, section 2.4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from vardass.errors import InputError
from vardass.solvers.problem import Problem
from vardass.solvers.seeding import start_labels
from vardass.solvers.sizes import SizeLimits, repair_sizes
from vardass.solvers.solution import Solution
from vardass.validate import as_generator, check_count, row_blocks

__all__ = ["centroid_objective", "dynamic_kmeans", "greedy_assignment"]

# Scores of one step, and visits of all steps, that one batch of trials may hold: about 1 MB and 150 MB.
_STEP_NUMBERS = 2**18
_VISITS = 2**22


def dynamic_kmeans(
    problem: Problem,
    k: int,
    *,
    limits: SizeLimits,
    labels: Tensor | None = None,
    generator: int | torch.Generator | None = None,
    trials: int = 100,
    parallel: int = 10,
    max_iter: int = 50,
    patience: int = 3,
    progress: Callable[[float, str], None] | None = None,
) -> Solution:
    """Alternate distance update and greedy weighted assignment (Algorithm 1).

    Each iteration computes the distance of every point to every stratum mean (step 2) and builds new strata
    from scratch with Algorithm 2 (step 3). The greedy strata can be worse than those before them, so the
    best ones seen are kept and returned: the result is never worse than the start.

    The paper names neither a stopping rule nor an iteration limit. Here the loop ends when ``patience``
    iterations in a row brought no improvement of J, when J is 0, or after ``max_iter`` iterations.

    Parameters
    ----------
    problem : Problem
        The n points.
    k : int
        Number of strata.
    limits : SizeLimits
        Sizes that strata may have. Algorithm 2 knows no limits and may leave strata empty; its strata are
        repaired before the next distance update.
    labels : Tensor of shape (n,), optional
        Strata to start from; without them kernel k-means++ (step 1).
    generator : int or torch.Generator, optional
        Source of randomness.
    trials, parallel : int
        Random trials of Algorithm 2 and rows that it assigns at once; the paper takes 100 and 10.
    max_iter, patience : int
        Stopping rule, see above.
    progress : callable, optional
        Called after each iteration with the fraction of ``max_iter`` done and a message.

    Returns
    -------
    Solution
        ``converged`` is False where ``max_iter`` ended the loop.
    """
    max_iter = check_count(max_iter, "max_iter", low=0)
    patience = check_count(patience, "patience")
    trials = check_count(trials, "trials")
    parallel = check_count(parallel, "parallel")
    generator = as_generator(generator, problem.diag.device)
    start = start_labels(problem, k, limits, labels, generator)
    distances = problem.centroid_distances(start, k)
    best, best_cost = start, centroid_objective(distances, start)
    stale = n_iter = 0
    converged = best_cost == 0.0
    while n_iter < max_iter and not converged:
        assigned = _best_of_trials(distances, trials, parallel, generator)
        current = repair_sizes(assigned, distances, limits)
        distances = problem.centroid_distances(current, k)
        cost = centroid_objective(distances, current)
        n_iter += 1
        stale += 1
        if cost < best_cost:
            best, best_cost, stale = current, cost, 0
        converged = stale >= patience or best_cost == 0.0
        if progress is not None:
            progress(n_iter / max_iter, f"iteration {n_iter}, objective {best_cost:.6g}")
    objective = problem.objective(best, k)
    if best is not start:
        # the loop compares in the problem's precision; the promise is kept in double
        objective_at_start = problem.objective(start, k)
        if objective_at_start < objective:
            best, objective = start, objective_at_start
    return Solution(best, n_iter, objective, converged)


def centroid_objective(distances: Tensor, labels: Tensor) -> float:
    """J(S) = Σ_i |S_{a_i}| D_{i,a_i} (equation 8) from distances (n, k) to the means of these same strata."""
    own = distances.gather(1, labels[:, None])[:, 0].double()
    sizes = torch.bincount(labels, minlength=distances.shape[1])
    return float((own * sizes[labels]).sum())


def greedy_assignment(
    distances: Tensor,
    *,
    trials: int = 100,
    parallel: int = 10,
    generator: int | torch.Generator | None = None,
) -> Tensor:
    """Assign points to strata one after another, weighted by the sizes so far (Algorithm 2).

    Point i goes to the stratum j with the smallest D_ij (n_j + 1), where n_j counts the points that j has
    got so far. Each trial visits the points in its own random order; ``parallel`` points in a row see the
    same n_j. The trial with the lowest cost Σ_i D_{i,a_i} |S_{a_i}| (equation 16 with D fixed) wins.
    Among strata at distance 0 the emptiest is taken, otherwise ties go to the first.

    Parameters
    ----------
    distances : Tensor of shape (n, k)
        Squared distance of each point to each stratum mean, not negative; infinity forbids a stratum.
    trials, parallel : int
        Number of random orders, and of points assigned at once; the paper takes 100 and 10.
    generator : int or torch.Generator, optional
        Source of randomness.

    Returns
    -------
    Tensor of shape (n,)
        Strata, int64. Some may be empty.
    """
    if distances.ndim != 2 or 0 in distances.shape or not distances.is_floating_point():
        raise InputError(
            f"distances must be real numbers of shape (n, k), got {distances.dtype} of shape {tuple(distances.shape)}"
        )
    if not bool((distances >= 0).all()):
        raise InputError("distances must not be negative or NaN; clamp squared distances at 0")
    trials = check_count(trials, "trials")
    parallel = check_count(parallel, "parallel")
    return _best_of_trials(distances, trials, parallel, as_generator(generator, distances.device))


def _best_of_trials(distances: Tensor, trials: int, parallel: int, generator: torch.Generator) -> Tensor:
    """Run Algorithm 2 in batches of trials that fit in memory and in cache; no check of the input."""
    n, k = distances.shape
    device = distances.device
    together = max(1, min(_STEP_NUMBERS // (k * min(parallel, n)), _VISITS // n))
    best = torch.zeros(n, dtype=torch.int64, device=device)
    best_cost = torch.full((), torch.inf, dtype=torch.float64, device=device)
    for batch in row_blocks(trials, together):
        # on a CPU n log n sorting of random keys would take as long as the assignment itself
        orders = torch.stack(
            [torch.randperm(n, generator=generator, device=device) for _ in range(batch.stop - batch.start)],
            1,
        )
        picked, costs = _greedy_in_order(distances, orders, parallel)
        cost, winner = costs.min(0)
        labels = torch.empty_like(best).scatter_(0, orders[:, winner], picked[:, winner])
        best = torch.where(cost < best_cost, labels, best)
        best_cost = torch.minimum(cost, best_cost)
    return best


def _greedy_in_order(distances: Tensor, orders: Tensor, parallel: int) -> tuple[Tensor, Tensor]:
    """Algorithm 2 for given orders, all trials side by side.

    Parameters
    ----------
    distances : Tensor of shape (n, k)
        D.
    orders : Tensor of shape (n, trials)
        Column t is the permutation in which trial t visits the points.
    parallel : int
        Points assigned with the same interim sizes.

    Returns
    -------
    picked : Tensor of shape (n, trials)
        Stratum of the point visited at each position.
    costs : Tensor of shape (trials,)
        Cost of each trial, in double precision.
    """
    n, k = distances.shape
    # the floor lets the size decide between strata at distance 0
    negated = distances.T.clamp_min(torch.finfo(distances.dtype).tiny).neg_().contiguous()
    weights = negated.new_ones(k, orders.shape[1])
    picked = torch.empty_like(orders)
    rest = n % parallel
    _assign_rows(negated, orders[: n - rest], picked[: n - rest], weights, parallel)
    _assign_rows(negated, orders[n - rest :], picked[n - rest :], weights, rest)
    own = negated.view(-1).index_select(0, (picked * n + orders).view(-1)).view_as(picked).neg_()
    sizes = weights.sub_(1.0).gather(0, picked)
    return picked, own.mul_(sizes).sum(0, dtype=torch.float64)


def _assign_rows(negated: Tensor, orders: Tensor, picked: Tensor, weights: Tensor, parallel: int) -> None:
    """Fill ``picked`` (m, trials), ``parallel`` rows at a time.

    ``negated`` (k, n) is -D transposed, ``weights`` (k, trials) are n_j + 1 and go on counting, and
    ``parallel`` divides m.
    """
    m, trials = orders.shape
    if m == 0:
        return
    k = len(negated)
    scores = negated.new_empty(k, parallel, trials)
    # Strata are the height and (row, trial) pairs the channels of an image in channels-last layout: of
    # torch's reductions that return an index only pooling is vectorised on a CPU.
    image = scores.view(1, k, 1, parallel * trials).permute(0, 3, 1, 2)
    one = negated.new_ones(()).expand(parallel, trials)
    weights_of_step = weights[:, None]
    # D is read column by column: where it is larger than a cache, gather for so many steps at once that a
    # column in cache is used up
    steps = max(1, m // (parallel * trials))
    for block in row_blocks(m, steps * parallel):
        ahead = negated.index_select(1, orders[block].view(-1)).view(k, -1, parallel, trials)
        places = picked[block].view(-1, parallel, trials)
        for gathered, place in zip(ahead.unbind(1), places.unbind(0)):
            torch.mul(gathered, weights_of_step, out=scores)
            winners = max_pool2d(image, (k, 1), return_indices=True)[1].view(parallel, trials)
            place.copy_(winners)
            weights.scatter_add_(0, winners, one)
