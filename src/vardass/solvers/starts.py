"""Where solvers start: bisection along principal axes, kernel k-means++, random equal strata, or given labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vardass.backend import hot_loops
from vardass.errors import InputError
from vardass.solvers.problem import ExactProblem, LowRankProblem, Problem
from vardass.solvers.sizes import SizeLimits, repair_sizes
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_generator, as_tensor, check_count, row_blocks

__all__ = [
    "INITS",
    "bisection_labels",
    "draw_by_mass",
    "given_labels",
    "kernel_kmeanspp",
    "nearest_seed_labels",
    "random_balanced_labels",
    "start_labels",
    "within_limits",
]

INITS = ("auto", "bisection", "kmeans++", "random")

_BLOCK_NUMBERS = 2**22  # kernel values that are held at a time


def start_labels(problem: Problem, k: int, init: str, *, limits: SizeLimits, generator: torch.Generator) -> Tensor:
    """Labels (n,) of the start ``init``, any of ``INITS`` but "auto", within ``limits``."""
    if init == "random":
        labels = random_balanced_labels(problem.n, k, generator, problem.diag.device)
    elif init == "kmeans++":
        labels = nearest_seed_labels(problem, kernel_kmeanspp(problem, k, generator))
    else:
        coordinates = problem.features if isinstance(problem, LowRankProblem) else _coordinates(problem, k, generator)
        even = limits.high - limits.low <= 1
        labels = bisection_labels(coordinates, k, importance=None if even else problem.spread.sqrt())
    return within_limits(problem, labels, k, limits)


def within_limits(problem: Problem, labels: Tensor, k: int, limits: SizeLimits) -> Tensor:
    """Return ``labels`` (n,), repaired where strata are too small or too large."""
    if limits.hold(torch.bincount(labels, minlength=k)):
        return labels
    return repair_sizes(labels, problem.distances(labels, k), limits)


def given_labels(
    given: Strata | ArrayLike | None, n: int, k: int, name: str, device: torch.device | str = "cpu"
) -> Tensor:
    """Return strata that a user wants to start from as labels (n,), int64, or raise an InputError.

    Parameters
    ----------
    given : Strata or array of shape (n,)
        Whole numbers in 0..k-1; some strata may be empty.
    n, k : int
        Samples and strata.
    name : str
        The argument, for the message.
    device : torch.device or str
        Where the result shall be.
    """
    values: Any = given
    if isinstance(given, Strata):
        if given.k != k:
            raise InputError(f"{name} has k={given.k} strata, asked for k={k}; use the same k or leave it out")
        values = given.labels
    labels = as_tensor(values, name, f"{n} whole numbers").to(device)
    if labels.shape != (n,):
        raise InputError(
            f"{name} has labels of shape {tuple(labels.shape)}, features have n={n} rows; "
            "strata belong to the data set that they were made from"
        )
    whole = not (labels.is_floating_point() or labels.is_complex())
    labels = labels.long() if whole else labels  # torch cannot compare most unsigned types
    if not whole or int(labels.min()) < 0 or int(labels.max()) >= k:
        raise InputError(f"{name} labels must be whole numbers in 0..{k - 1}")
    return labels


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
    levels = torch.rand(k, dtype=torch.float64, generator=generator, device=diag.device)
    if (loops := hot_loops(diag)) is not None and isinstance(problem, ExactProblem | LowRankProblem):
        if isinstance(problem, ExactProblem):
            values, residual = problem.matrix, diag[:0]
        else:
            values, residual = problem.features, problem.residual
        arrays = (values.contiguous(), residual.contiguous(), diag.contiguous(), levels)
        return torch.from_numpy(loops.kmeanspp(*(a.numpy() for a in arrays)))
    seeds = torch.empty(k, dtype=torch.int64, device=diag.device)
    unchosen = torch.ones(problem.n, dtype=torch.float64, device=diag.device)
    nearest = torch.full_like(unchosen, torch.inf)
    mass = unchosen
    for h in range(k):
        seed = draw_by_mass(mass[None], levels[h : h + 1])
        seeds[h : h + 1] = seed
        distance = diag + diag[seed] - 2.0 * problem.columns(seed)[:, 0]
        torch.minimum(nearest, distance.double(), out=nearest)
        nearest.clamp_min_(0.0)
        # rounding may leave a seed at a small distance from itself
        unchosen[seed] = 0.0
        mass = nearest * unchosen
        mass = torch.where(mass.sum() > 0.0, mass, unchosen)
    return seeds


def draw_by_mass(mass: Tensor, level: Tensor) -> Tensor:
    """Draw one column of each row of ``mass`` (count, m), with a probability in proportion to it: (count,).

    ``level`` (count,) is uniform on [0, 1), in double precision: the draw is where the running sum of the
    row passes that share of its total. Unlike torch.multinomial it takes any number of columns.
    """
    reached = mass.cumsum(1)
    # level < 1 in double precision leaves the product below the total, so an entry with mass is found
    found = torch.searchsorted(reached, (level * reached[:, -1])[:, None], right=True)
    return found[:, 0].clamp_max_(mass.shape[1] - 1)


def nearest_seed_labels(problem: Problem, seeds: Tensor) -> Tensor:
    """Put each point in the stratum of its nearest seed: (n,) int64.

    Seed h is always in stratum h, so that no stratum is empty even where seeds coincide.
    """
    # K_ii is common to a row, so the nearest seed needs only K_jj - 2 K_ij
    diag = problem.diag[seeds]
    labels = torch.cat(
        [
            torch.sub(diag, problem.columns(seeds, rows), alpha=2.0).min(1).indices
            for rows in row_blocks(problem.n, _BLOCK_NUMBERS // len(seeds))
        ]
    )
    labels[seeds] = torch.arange(len(seeds), device=seeds.device)
    return labels


def random_balanced_labels(
    n: int, k: int, generator: int | torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Deal n points at random into k strata whose sizes differ by at most one: (n,) int64."""
    k = check_count(k, "k", high=n, remedy="lower k or batch_size")
    return torch.randperm(n, generator=as_generator(generator, device), device=device) % k


def _coordinates(problem: Problem, k: int, generator: torch.Generator) -> Tensor:
    """Principal coordinates (n, ≤ 64) of random kernel columns: enough to bisect an exact problem into k strata."""
    count = 48 if k <= 32 else 64
    picks = torch.randperm(problem.n, generator=generator, device=problem.diag.device)[:count]
    columns = problem.columns(picks)
    columns = columns - columns.mean(0)
    columns /= columns.abs().amax().clamp_min(torch.finfo(columns.dtype).tiny)  # so that squares stay finite
    _, axes = torch.linalg.eigh(columns.T @ columns)
    coordinates: Tensor = columns @ axes.flip(1)
    return coordinates


_AXES = 32  # leading principal coordinates that the cuts look at
_PADDED = 2**18  # rows, padding included, that are cut together


def bisection_labels(features: Tensor, k: int, *, importance: Tensor | None = None) -> Tensor:
    """Cut n points (n, r) into k strata.

    Each part is cut across its own principal axis in proportion to the number of strata that either side
    will hold. A level's cuts are made together: O(n log k) work in ⌈log₂ k⌉ levels.

    Parameters
    ----------
    features : Tensor of shape (n, r)
        Columns by falling variance; the first 32 are used.
    k : int
        Number of strata, at most n.
    importance : Tensor of shape (n,), optional
        What strata shall hold equal amounts of. The min-sum cost of a part with m points of spread σ, cut
        into k' strata, falls as (m σ)² / k', so strata are best given in proportion to m σ; for a kernel
        whose features have unequal lengths, those lengths are the spread. Without it sizes differ by at
        most one.

    Returns
    -------
    Tensor of shape (n,)
        Labels 0 to k - 1.
    """
    n = len(features)
    device = features.device
    z = features[:, :_AXES]
    z = z / z.abs().amax().clamp_min(torch.finfo(z.dtype).tiny)  # so that squares stay finite
    if (loops := hot_loops(z)) is not None:
        amounts = z.new_empty(0) if importance is None else importance.contiguous()
        return torch.from_numpy(loops.bisect(z.contiguous().numpy(), k, amounts.numpy()))
    order = torch.arange(n, device=device)
    # part p is order[start[p] : start[p] + length[p]] and will hold strata[p] strata
    start = torch.zeros(1, dtype=torch.int64, device=device)
    length = torch.tensor([n], device=device)
    strata = torch.tensor([k], device=device)
    while int(strata.max()) > 1:
        left = strata // 2
        cut = length.clone()
        for parts in _groups(length, strata):
            cut[parts] = _cut(z, order, importance, start[parts], length[parts], strata[parts], left[parts])
        split = torch.stack([left, strata - left], 1).flatten()
        whole = split > 0
        cut = torch.where(left > 0, cut, 0)
        start = torch.stack([start, start + cut], 1).flatten()[whole]
        length = torch.stack([cut, length - cut], 1).flatten()[whole]
        strata = split[whole]
    labels = torch.empty(n, dtype=torch.int64, device=device)
    labels[order] = torch.repeat_interleave(length)
    return labels


def _groups(length: Tensor, strata: Tensor) -> Iterator[Tensor]:
    """Parts still to be cut, in groups whose padded size is bounded: parts of similar length together."""
    parts = (strata > 1).nonzero().flatten()
    parts = parts[length[parts].argsort(descending=True, stable=True)]
    while len(parts):
        count = max(1, _PADDED // int(length[parts[0]]))
        yield parts[:count]
        parts = parts[count:]


def _cut(
    z: Tensor,
    order: Tensor,
    importance: Tensor | None,
    start: Tensor,
    length: Tensor,
    strata: Tensor,
    left: Tensor,
) -> Tensor:
    """Sort each part along its axis, in place in ``order``; return how many points go left: (p,)."""
    slot = torch.arange(int(length.max()), device=z.device)
    inside = slot < length[:, None]
    position = (start[:, None] + slot).clamp_max(len(order) - 1)
    rows = order[position]
    points = z[rows]
    mean = (points * inside[..., None]).sum(1) / length[:, None]
    points = (points - mean[:, None]).mul_(inside[..., None])
    axis = _leading_axis(points.transpose(1, 2) @ points)
    along = (points @ axis[..., None])[..., 0].masked_fill_(~inside, torch.inf)
    rows = rows.gather(1, along.argsort(dim=1, stable=True))
    order[position[inside]] = rows[inside]
    if importance is None:
        return length * left // strata
    amount = (importance[rows] * inside).double().cumsum(1)
    share = amount[:, -1:] * (left / strata)[:, None]
    cut = (amount < share).sum(1)
    return cut.clamp(min=left, max=length - (strata - left))


def _leading_axis(matrices: Tensor) -> Tensor:
    """Leading eigenvectors, to within what a start needs, of (p, r, r) positive semi-definite matrices: (p, r).

    Repeated squaring finds them in a handful of small products; a batched eigensolver takes far longer.
    """
    power = matrices
    tiny = torch.finfo(power.dtype).tiny
    for _ in range(5):
        power = power / power.diagonal(dim1=1, dim2=2).sum(1).clamp_min(tiny)[:, None, None]
        power = power @ power
    column = power.diagonal(dim1=1, dim2=2).argmax(1)
    return power.gather(2, column[:, None, None].expand(-1, power.shape[1], 1))[..., 0]
