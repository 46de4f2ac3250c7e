"""Hot loops compiled with numba: rows of a plan, moves and exchanges of points, greedy assignment.

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
def _products(a: Floats, b: Floats, out: Floats) -> None:
    """``a @ b.T`` of two (s, r) arrays, in tiles of 2 x 4 sums: no call of a library that starts threads."""
    s, r = a.shape
    zero = a[0, 0] * 0
    for i in range(0, s, 2):
        i1 = min(i + 1, s - 1)
        for j in range(0, s, 4):
            j1, j2, j3 = min(j + 1, s - 1), min(j + 2, s - 1), min(j + 3, s - 1)
            x0, x1, x2, x3 = zero, zero, zero, zero
            y0, y1, y2, y3 = zero, zero, zero, zero
            for c in range(r):
                u, v = a[i, c], a[i1, c]
                b0, b1, b2, b3 = b[j, c], b[j1, c], b[j2, c], b[j3, c]
                x0 += u * b0
                x1 += u * b1
                x2 += u * b2
                x3 += u * b3
                y0 += v * b0
                y1 += v * b1
                y2 += v * b2
                y3 += v * b3
            out[i, j], out[i, j1], out[i, j2], out[i, j3] = x0, x1, x2, x3
            out[i1, j], out[i1, j1], out[i1, j2], out[i1, j3] = y0, y1, y2, y3


@njit(nogil=True, cache=True, fastmath=True)
def _sum_of_squares(errors: Floats) -> float:
    total = 0.0
    for t in range(errors.shape[0]):
        for c in range(errors.shape[1]):
            total += errors[t, c] * errors[t, c]
    return total


@njit(nogil=True, cache=True, fastmath=True)
def _add_entries(errors: Floats, table: Ints, features: Floats, weights: Floats, rows: Ints, h: int) -> None:
    for t in rows:
        for c in range(features.shape[1]):
            errors[t, c] += weights[h] * features[table[t, h], c]


@njit(nogil=True, cache=True, fastmath=True)
def couple_rows(table: Ints, features: Floats, weights: Floats, orders: Ints, size: int, tol: float) -> float:
    """Match the entries of each column of ``table`` (T, k) to the rows anew, in place; see `vardass.samplers.plan`.

    Groups of ``size`` rows in the order of ``orders`` (sweeps, T) share out their entries of a column by exchanges,
    pair after pair until none helps. Returns Σ |E_t|², which is no more than before; ends early once a sweep after the
    first gains less than ``tol`` of it.
    """
    count, k = table.shape
    r = features.shape[1]
    rest = np.empty((size, r), features.dtype)
    own = np.empty((size, r), features.dtype)
    inner = np.empty((size, size), features.dtype)
    member = np.empty(size, np.int64)
    place = np.empty(size, np.int64)
    kept = table.copy()
    errors = np.zeros((count, r), features.dtype)
    for h in range(k):
        _add_entries(errors, table, features, weights, orders[0], h)
    first = _sum_of_squares(errors)
    errors[:] = 0
    total = 0.0
    for turn in range(len(orders)):
        order = orders[turn]
        for h in range(k):
            w = weights[h]
            placed = w if turn else w * 0  # in the first sweep a row holds the columns before h only
            for start in range(0, count - size + 1, size):
                noise = w * 0
                for i in range(size):
                    t = order[start + i]
                    member[i], place[i] = table[t, h], i
                    square = w * 0
                    for c in range(r):
                        value = features[member[i], c]
                        own[i, c] = value
                        rest[i, c] = errors[t, c] - placed * value
                        square += value * value
                    noise = max(noise, square)
                noise *= w * 1e-6  # rounding of the sums is no gain
                _products(rest, own, inner)
                for _ in range(size):
                    moved = False
                    for i in range(1, size):
                        a = place[i]
                        for j in range(i):
                            b = place[j]
                            if inner[i, a] + inner[j, b] - inner[i, b] - inner[j, a] > noise:
                                place[i], place[j] = b, a
                                a = b
                                moved = True
                    if not moved:
                        break
                for i in range(size):
                    t, a = order[start + i], place[i]
                    table[t, h] = member[a]
                    for c in range(r):
                        errors[t, c] = rest[i, c] + w * own[a, c]
            if turn == 0:  # rows that fill no group
                _add_entries(errors, table, features, weights, order[count - count % size :], h)
        before, total = total, _sum_of_squares(errors)
        if turn and total >= (1.0 - tol) * before:
            break
    if total > first:
        table[:] = kept
        return first
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
