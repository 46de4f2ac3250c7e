"""Start for min-sum: recursive bisection along principal axes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["bisection_labels"]

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
