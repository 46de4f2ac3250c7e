"""Limits on stratum sizes, and the repair of labels that break them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.solvers.problem import Distances

__all__ = ["SizeLimits", "repair_sizes"]


@dataclass(frozen=True)
class SizeLimits:
    """Every stratum has between ``low`` and ``high`` members; ``low`` is at least 1."""

    low: int
    high: int

    @classmethod
    def of(cls, n: int, k: int, *, min_size: int = 1, max_size: int | None = None, equal: bool = False) -> SizeLimits:
        """Check the limits against n points in k strata.

        ``equal`` asks for sizes that differ by at most one.
        """
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
        if min_size < 1:
            raise InputError(f"min_size must be at least 1, got {min_size}")
        if min_size * k > n:
            raise InputError(
                f"min_size={min_size} with k={k} strata needs at least {min_size * k} samples, got n={n}; "
                f"lower min_size to {n // k} or k to {n // min_size}"
            )
        if high < min_size:
            raise InputError(f"max_size={max_size} is below min_size={min_size}; raise max_size")
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
    """Return labels within ``limits``, moving as few points as needed and the cheapest ones first.

    Parameters
    ----------
    labels : Tensor of shape (n,)
        Strata, perhaps too small, too large or empty.
    distances : Distances
        Cost of each point in each stratum. Infinite for an empty stratum, which then takes the points
        farthest from their own mean.
    limits : SizeLimits
        Must be feasible for n and k.
    """
    k = distances.k
    labels = labels.clone()
    sizes = torch.bincount(labels, minlength=k)
    if limits.hold(sizes):
        return labels
    own = distances.nearest(labels)[1]
    # Phase 1 fills strata that are too small, phase 2 empties those that are too large. Each step serves one
    # stratum with all the points it lacks or sheds, so there are at most 2k steps.
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
