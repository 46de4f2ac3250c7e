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

from vardass.backend import hot_loops
from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.lowrank import LowRankFeatures, low_rank_features
from vardass.strata import Strata
from vardass.validate import row_blocks

__all__ = ["PLAN_RANK", "couple_rows", "cycle_table", "plan_features", "row_errors"]

PLAN_RANK = 256
"""Columns of the kernel features that plans look at; coupling profits from more than strata do."""


def plan_features(features: Tensor, kernel: Kernel, rank: int, *, generator: torch.Generator) -> LowRankFeatures:
    """Kernel features that a plan looks at: as many landmarks as columns.

    Twice as many, as strata have, cost three times as much here, and batches gain nothing that can be measured.
    """
    found: LowRankFeatures | None = None
    with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]  # the matrix is not finite
        found = low_rank_features(features, kernel, rank, landmarks=rank, generator=generator)
    # swaps look at squares
    if found is None or not bool(torch.isfinite(found.features.square().sum() + found.residual.sum())):
        raise InputError(
            f"{kernel!r} overflows {features.dtype} on features of up to {float(features.abs().max()):.3g}; scale them "
            "down or pass float64"
        )
    return found


def cycle_table(strata: Strata, rows: int, generator: torch.Generator, *, draws: int = 1) -> Tensor:
    """Table (rows, k * draws) with ``draws`` columns for each stratum, which run through it in random order.

    With one draw every member of a stratum of size m occurs ⌊rows / m⌋ times, and a uniformly random subset of
    rows mod m members once more. With more draws those of one row are distinct members: where m is not a
    multiple of ``draws``, each run leaves out a uniformly random rest of the stratum. No stratum may be smaller
    than ``draws``.
    """
    sizes = strata.sizes
    rows_of_cycle = sizes // draws
    cycles = (rows + rows_of_cycle - 1) // rows_of_cycle
    # one place for each (stratum, cycle, member), in this order; a cycle's places are shuffled among themselves
    stratum = torch.repeat_interleave(cycles)
    length = sizes[stratum]
    cycle = torch.repeat_interleave(length)
    key = torch.rand(len(cycle), dtype=torch.float64, generator=generator).add_(cycle)
    to_member = strata.starts[stratum] - (length.cumsum(0) - length)
    entries = strata.order[key.argsort() + to_member[cycle]]
    row = torch.arange(rows)[:, None]
    first = (sizes * cycles).cumsum(0) - sizes * cycles
    start = first + row // rows_of_cycle * sizes + row % rows_of_cycle * draws
    return entries[start[:, :, None] + torch.arange(draws)].view(rows, -1)


def row_errors(table: Tensor, features: Tensor, weights: Tensor) -> Tensor:
    """E_t = Σ_h w_h φ(P_th) for each row of ``table`` (T, k), with φ centred: (T, r)."""
    return torch.einsum("tkr,k->tr", features[table], weights)


def couple_rows(
    table: Tensor,
    features: Tensor,
    weights: Tensor,
    *,
    rounds: int,
    generator: torch.Generator,
    tol: float = 5e-3,
) -> Tensor:
    """Swap entries within columns to make every row's weighted mean close to zero.

    Each round pairs the rows. Two rows with entries φ_a, φ_b differ by Σ_h v_h with v_h = w_h (φ_ah - φ_bh);
    swapping column h flips the sign of v_h, and |E_a|² + |E_b|² falls exactly as |Σ_h s_h v_h|² does. Signs
    are flipped one by one, so no flip is made that does not lower the total: the best first, for all pairs
    together, on the k x k inner products of the v_h; or, compiled, in the order of the columns, which is so much
    cheaper that each round counts for two pairings.

    Parameters
    ----------
    table : Tensor of shape (T, k)
        Rows of sample indices.
    features : Tensor of shape (n, r)
        Kernel features, centred over the data set.
    weights : Tensor of shape (k,)
        Weight of each column.
    rounds : int
        Most rounds; the search ends earlier once eight rounds together gain less than ``tol``.
    generator : torch.Generator
        On the CPU.
    tol : float
        See ``rounds``.

    Returns
    -------
    Tensor of shape (T, k)
        The same columns in another order.
    """
    count, k = table.shape
    if count < 2 or k < 2 or rounds == 0:
        return table
    table = table.clone()
    weights = weights.to(features)
    errors = _blockwise_errors(table, features, weights)
    if (compiled := hot_loops(features)) is not None:
        # drawn here, so that the generator is the only source of randomness
        orders = torch.stack([torch.randperm(count, generator=generator) for _ in range(2 * rounds)])
        directions = torch.randn(2 * rounds, features.shape[1], generator=generator, dtype=features.dtype)
        arrays = (table, features.contiguous(), weights.contiguous(), errors, orders, directions)
        compiled.couple_rows(*(array.numpy() for array in arrays), tol)
        return table
    total = float(errors.square().sum())
    checkpoint = total
    for turn in range(rounds):
        a, b = _pair_rows(errors, turn, generator)
        gained = 0.0
        per_block = max(1, _PAIR_NUMBERS // (k * (features.shape[1] + k)))
        for start in range(0, len(a), per_block):
            gained += _flip(
                table, features, weights, errors, a[start : start + per_block], b[start : start + per_block]
            )
        total -= gained
        if turn % 8 == 7:
            if total >= (1.0 - tol) * checkpoint:
                break
            checkpoint = total
    return table


_PAIR_NUMBERS = 2**22  # numbers held at a time while pairs are looked at


def _blockwise_errors(table: Tensor, features: Tensor, weights: Tensor) -> Tensor:
    step = max(1, _PAIR_NUMBERS // (table.shape[1] * features.shape[1]))
    return torch.cat([row_errors(table[rows], features, weights) for rows in row_blocks(len(table), step)])


def _pair_rows(errors: Tensor, turn: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pair all rows (but one, if odd): at random, or those with opposite errors along a random direction."""
    count = len(errors)
    order = torch.randperm(count, generator=generator).to(errors.device)
    half = count // 2
    if turn % 2 == 0:
        return order[:half], order[half : 2 * half]
    # a pair can at best reach its mean, so rows whose errors cancel gain most
    direction = torch.randn(errors.shape[1], generator=generator, dtype=errors.dtype).to(errors.device)
    order = (errors @ direction).argsort()
    return order[:half], order.flip(0)[:half]


def _flip(table: Tensor, features: Tensor, weights: Tensor, errors: Tensor, a: Tensor, b: Tensor) -> float:
    """Improve the pairs (a, b) in place; return by how much Σ |E_t|² fell."""
    rows_a, rows_b = table[a], table[b]
    difference = (features[rows_a] - features[rows_b]).mul_(weights[:, None])  # v: (p, k, r)
    inner = difference @ difference.transpose(1, 2)
    diagonal = inner.diagonal(dim1=1, dim2=2)
    # for signs s: g = s ∘ (inner s) is how far each v_h points along the sum; flipping h lowers |Σ s v|² by
    # 4 (g_h - inner_hh)
    signs = torch.ones_like(diagonal)
    along = inner.sum(2)
    scale = torch.finfo(inner.dtype).eps * 16.0 * diagonal.sum(1)
    pairs = torch.arange(len(a), device=a.device)
    for _ in range(2 * table.shape[1]):
        gain, column = (signs * along - diagonal).max(1)
        better = gain > scale
        if not bool(better.any()):
            break
        flipped = torch.where(better, signs[pairs, column], torch.zeros_like(gain))
        along = torch.addcmul(along, inner[pairs, column], flipped[:, None], value=-2.0)
        signs[pairs, column] -= 2.0 * flipped
    swap = signs < 0
    table[a] = torch.where(swap, rows_b, rows_a)
    table[b] = torch.where(swap, rows_a, rows_b)
    shift = torch.einsum("pkr,pk->pr", difference, swap.to(difference))
    before = errors[a].square().sum() + errors[b].square().sum()
    errors[a] -= shift
    errors[b] += shift
    return float(before - errors[a].square().sum() - errors[b].square().sum())
