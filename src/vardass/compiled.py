"""Hot loops compiled with numba: swaps between the rows of a plan, moves and exchanges of points, greedy assignment.

Each has a twin in torch or numpy, which runs on a GPU and where numba is not installed. Import this module only
through `hot_loops`, which says whether it can be used: importing numba takes longer than most of the loops.

The loops release the GIL. They are compiled at the first call for each precision, about a second each, and then kept
on disk beside this file (or where ``NUMBA_CACHE_DIR`` says).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["couple_rows", "greedy_in_order", "move_points", "swap_points"]

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]


@njit(nogil=True, cache=True, fastmath=True)
def couple_rows(
    table: Ints, features: Floats, weights: Floats, errors: Floats, orders: Ints, directions: Floats, tol: float
) -> float:
    """Swap entries of ``table`` (T, k) within columns, in place, where that lowers |E_a|² + |E_b|² of two rows.

    Rows are paired as ``orders`` (rounds, T) says, and in every second round by opposite errors along the round's
    direction. A swap in column h changes the total by 2 w_h (<d, e> + w_h |e|²) with d = E_a - E_b and
    e = φ_bh - φ_ah, and is made where that is negative, first come first served. ``errors`` (T, r) are E and stay so.
    Returns Σ |E_t|²; ends early once eight rounds together gain less than ``tol`` of it.
    """
    count, k = table.shape
    r = features.shape[1]
    half = count // 2
    zero = weights[0] * 0
    difference = np.empty(r, features.dtype)
    along = np.empty(count, features.dtype)
    total = 0.0
    for t in range(count):
        for c in range(r):
            total += errors[t, c] * errors[t, c]
    checkpoint = total
    for turn in range(len(orders)):
        order = orders[turn]
        opposite = turn % 2 == 1
        if opposite:
            for t in range(count):
                inner = zero
                for c in range(r):
                    inner += errors[t, c] * directions[turn, c]
                along[t] = inner
            order = np.argsort(along)
        gained = 0.0
        for pair in range(half):
            a = order[pair]
            b = order[count - 1 - pair] if opposite else order[half + pair]
            for c in range(r):
                difference[c] = errors[a, c] - errors[b, c]
            first = (7919 * pair + 104729 * turn) % k  # no column is always asked first
            for step in range(k):
                h = first + step
                if h >= k:
                    h -= k
                i, j = table[a, h], table[b, h]
                if i == j:
                    continue
                inner = zero
                square = zero
                for c in range(r):
                    e = features[j, c] - features[i, c]
                    inner += difference[c] * e
                    square += e * e
                w = weights[h]
                # rounding of the sums is no gain
                if inner + w * square < -1e-6 * w * square:
                    gained -= 2.0 * w * (inner + w * square)
                    table[a, h], table[b, h] = j, i
                    for c in range(r):
                        e = w * (features[j, c] - features[i, c])
                        errors[a, c] += e
                        errors[b, c] -= e
                        difference[c] += 2 * e
        total -= gained
        if turn % 8 == 7:
            if total >= (1.0 - tol) * checkpoint:
                break
            checkpoint = total
    return total


@njit(nogil=True, cache=True)
def _relabel(scores: Floats, kernel: Floats, diag: Floats, labels: Ints, i: int, target: int) -> None:
    source = labels[i]
    for j in range(len(labels)):
        if j != i:
            distance = diag[j] + diag[i] - 2 * kernel[i, j]
            scores[source, j] -= distance
            scores[target, j] += distance
    labels[i] = target


@njit(nogil=True, cache=True)
def move_points(
    scores: Floats,
    kernel: Floats,
    diag: Floats,
    labels: Ints,
    sizes: Floats,
    low: int,
    high: int,
    noise: float,
    worthwhile: float,
) -> float:
    """Moves of single points, best first, in place; see ``vardass.solvers.min_sum``. Returns the decrease of J."""
    k, q = scores.shape
    decrease = 0.0
    gain = np.empty(q, scores.dtype)
    best = np.empty(q, np.int64)
    for _ in range(8 * q):
        proposed = 0
        for i in range(q):
            best[i] = -1
            gain[i] = 0
        for h in range(k):
            if sizes[h] < high:
                for i in range(q):
                    if best[i] < 0 or scores[h, i] < scores[best[i], i]:
                        best[i] = h
        for i in range(q):
            if best[i] >= 0 and sizes[labels[i]] > low:
                gain[i] = scores[labels[i], i] - scores[best[i], i]
            proposed += gain[i] > noise
        if proposed == 0:
            break
        before = decrease
        for i in np.argsort(-gain)[:proposed]:
            source, target = labels[i], best[i]
            if sizes[source] <= low or sizes[target] >= high:
                continue
            current = scores[source, i] - scores[target, i]
            if current > noise:
                decrease += current
                sizes[source] -= 1
                sizes[target] += 1
                _relabel(scores, kernel, diag, labels, i, target)
        if decrease - before < worthwhile:
            break
    return decrease


@njit(nogil=True, cache=True)
def swap_points(
    scores: Floats, kernel: Floats, diag: Floats, labels: Ints, at_limit: NDArray[np.bool_], noise: float
) -> float:
    """One sweep of exchanges of points of strata ``at_limit`` (k,) with others, in place; returns the decrease of J."""
    q = len(labels)
    decrease = 0.0
    for i in range(q):
        a = labels[i]
        if not at_limit[a]:
            continue
        best, partner = noise, -1
        for j in range(q):
            b = labels[j]
            if b != a:
                distance = diag[i] + diag[j] - 2 * kernel[i, j]
                gain = scores[a, i] - scores[b, i] + scores[b, j] - scores[a, j] + 2 * distance
                if gain > best:
                    best, partner = gain, j
        if partner >= 0:
            decrease += best
            b = labels[partner]
            _relabel(scores, kernel, diag, labels, partner, a)
            _relabel(scores, kernel, diag, labels, i, b)
    return decrease


@njit(nogil=True, cache=True)
def greedy_in_order(distances: Floats, orders: Ints, parallel: int) -> tuple[Ints, NDArray[np.float64]]:
    """Algorithm 2 for given orders: strata of the points in visiting order (n, trials), and costs (trials,).

    ``distances`` (n, k) are at least the smallest number above 0, so that sizes decide between strata at distance 0.
    """
    n, k = distances.shape
    trials = orders.shape[1]
    picked = np.empty((n, trials), np.int64)
    costs = np.zeros(trials)
    weights = np.empty(k, distances.dtype)
    for t in range(trials):
        weights[:] = 1
        for start in range(0, n, parallel):
            stop = min(start + parallel, n)
            for position in range(start, stop):
                i = orders[position, t]
                best = 0
                lowest = distances[i, 0] * weights[0]
                for h in range(1, k):
                    score = distances[i, h] * weights[h]
                    if score < lowest:
                        lowest, best = score, h
                picked[position, t] = best
            for position in range(start, stop):
                weights[picked[position, t]] += 1
        for position in range(n):
            h = picked[position, t]
            costs[t] += distances[orders[position, t], h] * (weights[h] - 1)
    return picked, costs
