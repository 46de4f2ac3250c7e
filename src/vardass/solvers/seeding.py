"""Starting strata: kernel k-means++ seeds, their nearest points, or random equal strata."""

from __future__ import annotations

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.solvers.problem import Problem
from vardass.solvers.sizes import SizeLimits, repair_sizes
from vardass.validate import as_generator, check_count

__all__ = ["kernel_kmeanspp", "nearest_seed_labels", "random_balanced_labels", "start_labels"]


def kernel_kmeanspp(problem: Problem, k: int, generator: int | torch.Generator | None = None) -> Tensor:
    """Draw k distinct seeds by k-means++ in the kernel's feature space (Algorithm 1, step 1).

    The first is uniform, each next one has a probability proportional to its squared distance
    d_ij = K_ii + K_jj - 2 K_ij to the nearest seed so far; one candidate for each draw. When every point
    left coincides with a seed the draw is uniform among the points not yet chosen.

    Parameters
    ----------
    problem : Problem
        n points. One kernel column is asked for at a time: O(n k) kernel values, O(n) memory.
    k : int
        Number of seeds, at most n.
    generator : int or torch.Generator, optional
        Source of randomness.

    Returns
    -------
    Tensor of shape (k,)
        Indices of the seeds, int64, in the order they were drawn.
    """
    k = check_count(k, "k", high=problem.n, remedy="there is one seed for each stratum and none is drawn twice")
    diag = problem.diag
    generator = as_generator(generator, diag.device)
    seeds = torch.empty(k, dtype=torch.int64, device=diag.device)
    unchosen = torch.ones(problem.n, dtype=torch.float64, device=diag.device)
    nearest = torch.full_like(unchosen, torch.inf)
    mass = unchosen
    for h in range(k):
        # not torch.multinomial, which takes at most 2^24 categories
        reached = mass.cumsum(0)
        level = torch.rand(1, dtype=torch.float64, generator=generator, device=diag.device) * reached[-1]
        seed = torch.searchsorted(reached, level, right=True).clamp_max_(problem.n - 1)
        seeds[h : h + 1] = seed
        distance = diag + diag[seed] - 2.0 * problem.columns(seed)[:, 0]
        torch.minimum(nearest, distance.double(), out=nearest)
        nearest.clamp_min_(0.0)
        # rounding may leave a seed at a small distance from itself
        unchosen[seed] = 0.0
        mass = nearest * unchosen
        mass = torch.where(mass.sum() > 0.0, mass, unchosen)
    return seeds


def nearest_seed_labels(problem: Problem, seeds: Tensor) -> Tensor:
    """Put each point in the stratum of its nearest seed: (n,) int64.

    Seed h is always in stratum h, so that no stratum is empty even where seeds coincide.
    """
    # K_ii is common to a row, so the nearest seed needs only K_jj - 2 K_ij
    labels = torch.sub(problem.diag[seeds], problem.columns(seeds), alpha=2.0).min(1).indices
    labels[seeds] = torch.arange(len(seeds), device=seeds.device)
    return labels


def random_balanced_labels(
    n: int, k: int, generator: int | torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Deal n points at random into k strata whose sizes differ by at most one: (n,) int64."""
    k = check_count(k, "k", high=n, remedy="lower k or batch_size")
    return torch.randperm(n, generator=as_generator(generator, device), device=device) % k


def start_labels(
    problem: Problem, k: int, limits: SizeLimits, labels: Tensor | None, generator: torch.Generator
) -> Tensor:
    """Return labels (n,) for a solver to start from: the given ones or kernel k-means++, within ``limits``.

    Raises
    ------
    InputError
        If k is not between 1 and n, ``limits`` cannot hold n points in k strata, or ``labels`` are not n
        integers below k.
    """
    n = problem.n
    k = check_count(k, "k", high=n, remedy="every stratum needs a sample; lower k or batch_size")
    if not limits.low * k <= n <= limits.high * k:
        raise InputError(
            f"k={k} strata of {limits.low} to {limits.high} samples cannot hold n={n}; "
            "make the limits with SizeLimits.of(n, k)"
        )
    if labels is None:
        labels = nearest_seed_labels(problem, kernel_kmeanspp(problem, k, generator))
    else:
        if labels.shape != (n,) or labels.dtype != torch.int64:
            raise InputError(
                f"labels must be int64 of shape ({n},), got {labels.dtype} of shape {tuple(labels.shape)}; "
                "pass one stratum for each sample"
            )
        labels = labels.to(problem.diag.device)
        low, high = (int(v) for v in labels.aminmax())
        if low < 0 or high >= k:
            raise InputError(f"labels must lie in 0..{k - 1} for k={k} strata, got {low}..{high}")
    if limits.hold(torch.bincount(labels, minlength=k)):
        return labels
    return repair_sizes(labels, problem.centroid_distances(labels, k), limits)
