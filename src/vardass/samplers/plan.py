"""Plans: tables of coming batches, optimised together so that each is a small copy of the whole.

Row t of a plan is a batch, column h holds members of stratum h only. Swapping two entries of one column
keeps that column's multiset, so for a row drawn at random every member of a stratum stays as likely as
before: E[Σ_h w_h f(P_th)] = (1/n) Σ_i f(i) for every function f, however the swaps are chosen. What swaps
do change is which members meet: they bring each row's weighted mean embedding to that of the whole.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from vardass.backend import compiled_loops
from vardass.kernels import Kernel, overflow
from vardass.strata import Strata
from vardass.validate import row_blocks
from vardass.view import LowRankView

__all__ = ["NEGLIGIBLE", "PLAN_LANDMARKS", "PLAN_RANK", "SWAP_ROUNDS", "couple_rows", "cycle_table", "plan_features"]

PLAN_RANK = 96
"""Columns of the kernel features that plans look at: the leading ones of what `PLAN_LANDMARKS` samples span."""

PLAN_LANDMARKS = 256
"""Samples that span those features, or half of them all if these are fewer."""

NEGLIGIBLE = 0.01
"""Share of what the features miss of a row that its error on them may have: a further sweep would gain little."""


def plan_features(features: Tensor, kernel: Kernel, rank: int, *, generator: torch.Generator) -> LowRankView:
    """Kernel features of a plan: (n, at most ``rank``) columns by falling variance, all of an explicit feature map.

    There are at least as many landmarks as columns, but never more than half of the samples: a landmark is seen through
    the others, so that all samples are alike.
    """
    landmarks = max(1, min(max(rank, PLAN_LANDMARKS), len(features) // 2))
    found: LowRankView | None = None
    with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]  # the matrix is not finite
        found = LowRankView.of(features, kernel, rank, landmarks=landmarks, rounds=1, generator=generator)
    # swaps look at squares
    if found is None or not bool(torch.isfinite(found.features.square().sum() + found.residual.sum())):
        raise overflow(repr(kernel), features)
    return found


def cycle_table(strata: Strata, rows: int, generator: torch.Generator) -> Tensor:
    """Table (rows, k) with a column for each stratum, which runs through it in random order.

    Every member of a stratum of size m occurs ⌊rows / m⌋ times, and a uniformly random subset of rows mod m members
    once more.
    """
    sizes = strata.sizes
    cycles = (rows + sizes - 1) // sizes
    # one place for each (stratum, cycle, member), in this order; a cycle's places are shuffled among themselves
    stratum = torch.repeat_interleave(cycles)
    length = sizes[stratum]
    cycle = torch.repeat_interleave(length)
    key = torch.rand(len(cycle), dtype=torch.float64, generator=generator).add_(cycle)
    to_member = strata.starts[stratum] - (length.cumsum(0) - length)
    entries = strata.order[key.argsort() + to_member[cycle]]
    first = (sizes * cycles).cumsum(0) - sizes * cycles
    return entries[first + torch.arange(rows)[:, None]]


def row_errors(table: Tensor, features: Tensor, weights: Tensor) -> Tensor:
    """E_t = Σ_h w_h φ(P_th) for each row of ``table`` (T, k), with φ centred: (T, r)."""
    return torch.einsum("tkr,k->tr", features[table], weights)


SWAP_ROUNDS = 4
"""Most sweeps over the columns of a plan; mostly one or two are made, see `NEGLIGIBLE`."""

_GROUP = 128  # rows that share out their entries: more gain more, and cost as much more


def couple_rows(
    table: Tensor,
    features: Tensor,
    weights: Tensor,
    *,
    rounds: int,
    generator: torch.Generator,
    tol: float = 5e-3,
    residual: float = 0.0,
) -> Tensor:
    """Swap entries within columns to make every row's weighted mean close to zero.

    Each round goes over the columns. Given the rest of the rows, E_t - w_h φ(P_th), entries of column h are exchanged
    between the rows of a group until no exchange lowers Σ_t <E_t - w_h φ(P_th), φ(P_th)>, on which Σ |E_t|² depends.
    In the first round a row consists of the columns that were matched so far. Torch makes the exchanges of all rows
    that are each other's best at once, the compiled loop one after the other.

    Parameters
    ----------
    table : Tensor of shape (T, k)
        Rows of sample indices.
    features, weights : Tensor of shape (n, r) and (k,)
        Kernel features, centred over the data set, and the weight of each column.
    rounds : int
        Most rounds. The search ends earlier once one of them gains less than ``tol``, or once Σ |E_t|² is below what
        the features miss of it, T Σ_h w_h² ``residual``.
    generator : torch.Generator
        On the CPU.
    residual : float
        Mean residual diagonal of the features.

    Returns
    -------
    Tensor of shape (T, k)
        The same columns in another order, and Σ |E_t|² no larger.
    """
    count, k = table.shape
    if count < 2 or k < 2 or rounds == 0:
        return table
    weights = weights.to(features)
    # drawn here, so that the generator is the only source of randomness
    orders = torch.stack([torch.randperm(count, generator=generator) for _ in range(rounds)])
    size = count // -(-count // _GROUP)
    enough = count * residual * float(weights.square().sum())
    blocks = row_blocks(count, max(1, _NUMBERS // (k * features.shape[1])))
    start = sum(float(row_errors(table[rows], features, weights).square().sum()) for rows in blocks)
    loops, r = compiled_loops(features), features.shape[1]
    coupled, total = table.clone(memory_format=torch.contiguous_format), 0.0
    errors = features.new_zeros(count, r)
    known = coupled, features.contiguous(), features.square().sum(1), weights.contiguous()
    buffers = errors, features.new_empty(r, size), features.new_empty(size, size), orders.new_empty(2, size)
    for turn, order in enumerate(orders.to(table.device)):
        groups, rest = order[: count - count % size].view(-1, size), order[count - count % size :]
        if turn == 0:  # rows that are in no group keep their entries
            errors[rest] = row_errors(table[rest], features, weights)
        if loops is not None:
            loops.couple_rows(*(a.numpy() for a in (*known, order, *buffers)), turn > 0)
        else:
            for h in range(k):
                _match(coupled[:, h], features, weights[h], errors, groups, is_placed=turn > 0)
        before, total = total, float(errors.square().sum())
        if total < enough or (turn and total >= (1.0 - tol) * before):
            break
    return coupled if total <= start else table.clone()


_NUMBERS = 2**22  # held at a time


def _match(
    column: Tensor, features: Tensor, weight: Tensor, errors: Tensor, groups: Tensor, *, is_placed: bool
) -> None:
    """Match the entries of ``column`` (T,) to the rows of each of ``groups`` (g, s) anew, in place, with the errors."""
    own = features[column[groups]]
    rest = errors[groups]
    if is_placed:
        rest -= weight * own
    inner = rest @ own.transpose(1, 2)
    noise = 1e-6 * weight * own.square().sum(2).amax(1)[:, None]  # rounding of the sums is no gain
    here = torch.arange(groups.shape[1], device=column.device).expand_as(groups)
    place = here
    for _ in range(groups.shape[1]):
        diagonal = inner.diagonal(dim1=1, dim2=2)
        gain, partner = (diagonal[:, :, None] + diagonal[:, None, :] - inner - inner.transpose(1, 2)).max(2)
        swaps = (gain > noise) & (partner.gather(1, partner) == here)
        if not bool(swaps.any()):
            break
        partner = torch.where(swaps, partner, here)
        inner = inner.gather(2, partner[:, None, :].expand_as(inner))
        place = place.gather(1, partner)
    column[groups] = column[groups].gather(1, place)
    errors[groups] = rest + weight * own.gather(1, place[:, :, None].expand_as(own))


def match_rows(units: Tensor, errors: Tensor, kinds: Tensor, row_kinds: Tensor) -> Tensor:
    """Which of the ``units`` (T, r) to add to each row of ``errors`` (T, r), which they are added to: (T,).

    ``kinds`` (T,) of the units are a permutation of those that the rows take, ``row_kinds`` (T,). Units of a kind are
    exchanged as long as that lowers Σ |E_t|².
    """
    column = torch.empty(len(units), dtype=torch.int64, device=units.device)
    for kind in torch.unique(row_kinds).tolist():
        rows = (row_kinds == kind).nonzero().flatten().to(units.device)
        column[rows] = (kinds == kind).nonzero().flatten().to(units.device)
        _match(column, units, units.new_ones(()), errors, rows[None], is_placed=False)
    return column.to("cpu")


def share_rests(counts: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """The groups (rows, m) of which a batch has one sample more than ⌊count / rows⌋, in random order.

    Groups of ``counts`` (g,), which sum to a multiple of ``rows``, then have all their samples in ``rows`` batches of
    one size. No group is in a batch twice: each fills a run of fewer than ``rows`` places, column after column.
    """
    rests = counts % rows
    order = torch.randperm(len(counts), generator=generator)
    runs = order.repeat_interleave(rests[order])
    return runs.view(len(runs) // rows, rows).T[torch.randperm(rows, generator=generator)]
