"""Labels of strata: limits on sizes and their repair, where solvers start, and what they hand back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.backend import compiled_loops
from vardass.errors import InputError
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_generator, as_tensor, row_blocks
from vardass.view import View

__all__ = [
    "INITS",
    "Distances",
    "SizeLimits",
    "Solution",
    "bisection_labels",
    "draw_by_mass",
    "given_labels",
    "kernel_kmeanspp",
    "nearest_seed_labels",
    "random_balanced_labels",
    "repair_sizes",
    "start_labels",
    "within_limits",
]

INITS = ("auto", "bisection", "kmeans++", "random")

_TABLE_NUMBERS = 2**22  # distances that are held at a time, 16 MB


@dataclass(frozen=True, eq=False)
class Solution:
    """Strata found by a solver: ``labels`` (n,), all within the size limits, after ``n_iter`` iterations.

    ``objective`` is J(S) (equation 8), n² times the variance, whatever the solver minimised; ``converged`` says
    whether its own stopping rule ended it, rather than the iteration limit.
    """

    labels: Tensor
    n_iter: int
    objective: float
    converged: bool


class Distances:
    """|φ_i - μ_h|² of n points to k stratum means, of which any part can be asked for; infinite to empty strata.

    Few are computed once, as a table (n, k), which can also be given; of many a block is held at a time, as a table
    would take 1 GB at n = 10^6 and k = 256.
    """

    def __init__(self, view: View, labels: Tensor, k: int, table: Tensor | None = None) -> None:
        self.view, self.labels, self.n, self.k = view, labels, view.n, k
        if table is None and self.n * k <= _TABLE_NUMBERS:
            table = view.centroid_distances(labels, k)
        self.table = table
        if table is None:
            self.sizes = torch.bincount(labels, minlength=k).to(view.diag)
            self.totals = view.totals(labels, k)
            self.inner = view.within(labels, k).to(view.diag) / self.sizes.square()

    def rows(self, rows: Tensor | slice) -> Tensor:
        """From the q points in ``rows`` to each mean: (q, k)."""
        if self.table is not None:
            return self.table[rows]
        cross = self.view.with_own(self.view.products(self.totals, rows), self.labels, rows)
        distances = (self.view.diag[rows, None] - 2.0 * cross / self.sizes + self.inner).clamp_min_(0.0)
        return distances.masked_fill_(self.sizes == 0, torch.inf)

    def column(self, stratum: int) -> Tensor:
        """From each point to one mean: (n,)."""
        if self.table is not None:
            return self.table[:, stratum]
        size = self.sizes[stratum]
        if size == 0:
            return torch.full_like(self.view.diag, torch.inf)
        cross = self.view.products(self.totals[stratum : stratum + 1])[:, 0]
        if self.view.residual is not None:
            cross = cross + self.view.residual * (self.labels == stratum)
        return (self.view.diag - 2.0 * cross / size + self.inner[stratum]).clamp_min_(0.0)

    def blocks(self) -> Iterator[slice]:
        """Rows that are asked for together."""
        return row_blocks(self.n, _TABLE_NUMBERS // self.k)

    def nearest(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest mean of each point, and its distance to the one that ``labels`` (n,) name: both (n,)."""
        found = []
        for block in self.blocks():
            distances = self.rows(block)
            found.append((distances.min(1).indices, distances.gather(1, labels[block, None])[:, 0]))
        return torch.cat([nearest for nearest, _ in found]), torch.cat([own for _, own in found])


@dataclass(frozen=True)
class SizeLimits:
    """Every stratum has between ``low`` and ``high`` members; ``low`` is at least 1."""

    low: int
    high: int

    @classmethod
    def of(cls, n: int, k: int, *, min_size: int = 1, max_size: int | None = None, equal: bool = False) -> SizeLimits:
        """Check limits of at least 1 against n points in k strata; ``equal`` sizes differ by at most one."""
        if k > n:
            raise InputError(f"k={k} strata need at least {k} samples, got n={n}; lower k or batch_size")
        if equal:
            low, high = n // k, -(-n // k)
            if min_size > low or (max_size is not None and max_size < high):
                raise InputError(
                    f"equal=True makes strata of {low} to {high} samples (n={n}, k={k}), which min_size={min_size}, "
                    f"max_size={max_size} do not allow; leave both out"
                )
            return cls(low, high)
        high = n if max_size is None else max_size
        if min_size * k > n:
            raise InputError(
                f"min_size={min_size} with k={k} strata needs at least {min_size * k} samples, got n={n}; "
                f"lower min_size to {n // k} or k to {n // min_size}"
            )
        if high * k < n:
            raise InputError(
                f"max_size={high} with k={k} strata holds at most {high * k} samples, got n={n}; "
                f"raise max_size to {-(-n // k)} or k to {-(-n // high)}"
            )
        return cls(min_size, high)

    def hold(self, sizes: Tensor) -> bool:
        """Whether all ``sizes`` (k,) are within the limits."""
        return bool(((sizes >= self.low) & (sizes <= self.high)).all())


def repair_sizes(labels: Tensor, distances: Distances, limits: SizeLimits) -> Tensor:
    """Return ``labels`` (n,) within ``limits``, moving as few points as needed and the cheapest ones first.

    An empty stratum, infinitely far, takes the points farthest from their own mean.
    """
    k = distances.k
    labels = labels.clone()
    sizes = torch.bincount(labels, minlength=k)
    if limits.hold(sizes):
        return labels
    own = distances.nearest(labels)[1]
    # first fill strata that are too small, then shrink those that are too large
    for h in (sizes < limits.low).nonzero().flatten().tolist():
        cost = _finite(distances.column(h)) - own
        while int(sizes[h]) < limits.low:
            spare = (sizes - limits.low).clamp_min(0)
            offered = (_rank_within(labels, cost, k) < spare[labels]) & (labels != h)
            candidates = offered.nonzero().flatten()
            take = candidates[cost[candidates].argsort(stable=True)[: limits.low - int(sizes[h])]]
            labels[take] = h
            sizes = torch.bincount(labels, minlength=k)
    for h in (sizes > limits.high).nonzero().flatten().tolist():
        while int(sizes[h]) > limits.high:
            room = limits.high - sizes
            members = (labels == h).nonzero().flatten()
            price, target = _cheapest(distances, members, room > 0)
            order = (price - own[members]).argsort(stable=True)[: int(sizes[h]) - limits.high]
            members, target = members[order], target[order]
            fits = _rank_within(target, torch.arange(len(target), device=target.device), k) < room[target]
            labels[members[fits]] = target[fits]
            sizes = torch.bincount(labels, minlength=k)
    return labels


def _finite(distances: Tensor) -> Tensor:
    """Distances with 0 to empty strata."""
    return distances.masked_fill(torch.isinf(distances), 0.0)


def _cheapest(distances: Distances, members: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Distance to the nearest of the ``allowed`` strata (k,), and which it is, for each of ``members`` (m,)."""
    found = [
        _finite(distances.rows(members[block])).masked_fill_(~allowed, torch.inf).min(1)
        for block in distances.blocks()
        if block.start < len(members)
    ]
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def _rank_within(groups: Tensor, key: Tensor, k: int) -> Tensor:
    """Rank of each element by ``key`` among those of its group, from 0."""
    order = key.argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    counts = torch.bincount(groups, minlength=k)
    starts = (counts.cumsum(0) - counts)[groups[order]]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - starts
    return rank


# --- where solvers start


def start_labels(view: View, k: int, init: str, *, limits: SizeLimits, generator: torch.Generator) -> Tensor:
    """Labels (n,) of the start ``init``, any of ``INITS`` but "auto", within ``limits``."""
    if init == "random":
        labels = random_balanced_labels(view.n, k, generator, view.diag.device)
    elif init == "kmeans++":
        labels = nearest_seed_labels(view, kernel_kmeanspp(view, k, generator))
    else:
        coordinates = view.coordinates(k, generator)
        even = limits.high - limits.low <= 1
        labels = bisection_labels(coordinates, k, importance=None if even else view.spread.sqrt())
    return within_limits(view, labels, k, limits)


def within_limits(view: View, labels: Tensor, k: int, limits: SizeLimits) -> Tensor:
    """Return ``labels`` (n,), repaired where strata are too small or too large."""
    if limits.hold(torch.bincount(labels, minlength=k)):
        return labels
    return repair_sizes(labels, Distances(view, labels, k), limits)


def given_labels(
    given: Strata | ArrayLike | None, n: int, k: int, name: str, device: torch.device | str = "cpu"
) -> Tensor:
    """Strata that a user wants to start from as labels (n,), int64, or an InputError that names the argument."""
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


def kernel_kmeanspp(view: View, k: int, generator: int | torch.Generator | None = None) -> Tensor:
    """Draw k distinct seeds by k-means++ in the kernel's feature space (Algorithm 1, step 1): (k,) int64.

    The first is uniform, each next one has a probability proportional to its squared distance to the nearest seed so
    far, and is uniform among the points not yet chosen where all of these coincide with a seed.
    """
    diag = view.diag
    generator = as_generator(generator, diag.device)
    levels = torch.rand(k, dtype=torch.float64, generator=generator, device=diag.device)
    if (loops := compiled_loops(diag)) is not None:
        arrays = (*view.arrays(), diag, levels)
        return torch.from_numpy(loops.kmeanspp(*(a.contiguous().numpy() for a in arrays)))
    seeds = torch.empty(k, dtype=torch.int64, device=diag.device)
    unchosen = torch.ones(view.n, dtype=torch.float64, device=diag.device)
    nearest = torch.full_like(unchosen, torch.inf)
    mass = unchosen
    for h in range(k):
        seed = draw_by_mass(mass[None], levels[h : h + 1])
        seeds[h : h + 1] = seed
        distance = diag + diag[seed] - 2.0 * view.columns(seed)[:, 0]
        torch.minimum(nearest, distance.double(), out=nearest)
        nearest.clamp_min_(0.0)
        # rounding may leave a seed at a small distance from itself
        unchosen[seed] = 0.0
        mass = nearest * unchosen
        mass = torch.where(mass.sum() > 0.0, mass, unchosen)
    return seeds


def draw_by_mass(mass: Tensor, level: Tensor) -> Tensor:
    """Draw one column of each row of ``mass`` (count, m), with a probability in proportion to it: (count,).

    The draw is where the running sum of the row passes the share ``level`` (count,), uniform on [0, 1) in double
    precision, of its total. Unlike torch.multinomial it takes any number of columns.
    """
    reached = mass.cumsum(1)
    # level < 1 in double precision leaves the product below the total, so an entry with mass is found
    found = torch.searchsorted(reached, (level * reached[:, -1])[:, None], right=True)
    return found[:, 0].clamp_max_(mass.shape[1] - 1)


def nearest_seed_labels(view: View, seeds: Tensor) -> Tensor:
    """Put each point in the stratum of its nearest seed: (n,) int64.

    Seed h is always in stratum h, so that no stratum is empty even where seeds coincide.
    """
    # K_ii is common to a row, so the nearest seed needs only K_jj - 2 K_ij
    diag = view.diag[seeds]
    labels = torch.cat(
        [
            torch.sub(diag, view.columns(seeds, rows), alpha=2.0).min(1).indices
            for rows in row_blocks(view.n, _TABLE_NUMBERS // len(seeds))
        ]
    )
    labels[seeds] = torch.arange(len(seeds), device=seeds.device)
    return labels


def random_balanced_labels(
    n: int, k: int, generator: int | torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Deal n points at random into k strata whose sizes differ by at most one: (n,) int64."""
    return torch.randperm(n, generator=as_generator(generator, device), device=device) % k


_AXES = 32  # leading principal coordinates that the cuts look at
_ENOUGH = 1024  # points of a part that its axis is found on


def bisection_labels(features: Tensor, k: int, *, importance: Tensor | None = None) -> Tensor:
    """Cut n points (n, r), columns by falling variance, into k strata: labels (n,).

    Each part is cut across its own principal axis in proportion to the number of strata that either side will hold, in
    ⌈log₂ k⌉ levels, on the host. Strata hold equal amounts of ``importance`` (n,); without it sizes differ by at most
    one. The min-sum cost of a part with m points of spread σ, cut into k' strata, falls as (m σ)² / k', so strata are
    best given in proportion to m σ; for a kernel whose features have unequal lengths, those lengths are the spread.
    """
    scale = features[:, :_AXES].abs().amax().clamp_min(torch.finfo(features.dtype).tiny)
    z = (features[:, :_AXES] / scale).cpu().numpy()  # so that squares stay finite
    order = np.arange(len(z))
    # the parts are next to one another in ``order``, and part p will hold strata[p] strata
    lengths, strata = np.array([len(z)]), np.array([k])
    while strata.max() > 1:
        ends, left = lengths.cumsum(), strata // 2
        starts = ends - lengths
        points = z[order]
        parts = [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist())]
        axes = _leading_axes([points[part][:: (part.stop - part.start - 1) // _ENOUGH + 1] for part in parts])
        for part, axis in zip(parts, axes.astype(z.dtype)):
            order[part] = order[part][(points[part] @ axis).argsort(kind="stable")]
        if importance is None:
            cuts = lengths * left // strata
        else:
            reached = np.concatenate([[0.0], importance.double().cpu().numpy()[order].cumsum()])
            shares = reached[starts] + (reached[ends] - reached[starts]) * (left / strata)
            cuts = reached[1:].searchsorted(shares) - starts
            cuts = cuts.clip(left, lengths - (strata - left))  # each stratum needs a point
        lengths = np.stack([cuts, lengths - cuts], 1).ravel()
        strata = np.stack([left, strata - left], 1).ravel()
        lengths, strata = lengths[strata > 0], strata[strata > 0]
    labels = np.empty(len(z), np.int64)
    labels[order] = np.repeat(np.arange(k), lengths)
    return torch.from_numpy(labels).to(features.device)


def _leading_axes(parts: list[NDArray[np.floating]]) -> NDArray[np.float64]:
    """Principal axes, to within what a start needs, of parts (m, r) of the points: (p, r).

    24 steps of the power method from the widest column, in a handful of products; an eigensolver takes far longer.
    """
    centred = [part - part.sum(0) / len(part) for part in parts]
    power = np.stack([part.T @ part for part in centred]).astype(np.float64)
    variances = power.diagonal(axis1=1, axis2=2)
    axes = power[np.arange(len(parts)), variances.argmax(1), :, None]
    power /= np.maximum(variances.sum(1), np.finfo(np.float64).tiny)[:, None, None]
    for _ in range(3):
        power = power @ power
    return (power @ (power @ (power @ axes)))[..., 0]
