"""Hot loops compiled with numba: kernel values, moves and exchanges of points, greedy assignment, plans.

Each has a twin in torch or numpy, which runs on a GPU and where numba is not installed. Import this module only
through `backend.compiled_loops`, which says whether it can be used: importing numba takes longer than most of the
loops.

The loops release the GIL. They are compiled at the first call for each precision and then kept on disk. Users
wait for that, so the loops are few and plain: none of numpy's functions, which take numba a tenth of a second or more
each, and where there are many buffers callers pass them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

__all__ = [
    "centre",
    "couple_rows",
    "gaussian_mixture",
    "greedy_in_order",
    "kmeanspp",
    "nearest_strata",
    "squared_norms",
    "swap_points",
    "sweep_exact",
    "sweep_nearest",
]


def _can_be_kept() -> bool:
    """Whether numba finds a folder for what it compiles: beside this file, the user's, or that of NUMBA_CACHE_DIR."""
    try:
        njit(cache=True)(_can_be_kept)
    except RuntimeError:  # each process then compiles anew
        return False
    return True


_loop = partial(njit, nogil=True, cache=_can_be_kept(), error_model="numpy", no_cfunc_wrapper=True)
# called by loops only: compiled with them and kept in their files
_part = partial(njit, nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)


@_loop(fastmath=True)
def couple_rows(table, features, norms, weights, order, errors, own, inner, places, again):
    """Match the entries of each column of ``table`` (T, k) to the rows anew, in place; see `vardass.samplers.plan`.

    Groups of rows in the order of ``order`` (T,) share out their entries of a column by exchanges, pair after pair
    until none helps. ``errors`` (T, r) are those of the rows, and unless ``again`` of the columns before; ``norms``
    (n,) the squared ones of the features. The buffers ``own`` (r, s), ``inner`` (s, s) and ``places`` (2, s) say how
    large groups are.
    """
    size, r = len(inner), features.shape[1]
    member, place = places[0], places[1]
    for h in range(table.shape[1]):
        w = weights[h]
        for start in range(0, len(order) - size + 1, size):
            noise = w * 0
            for i in range(size):
                t = order[start + i]
                m = table[t, h]
                member[i] = m
                place[i] = i
                noise = norms[m] if norms[m] > noise else noise
                if again:
                    for c in range(r):
                        errors[t, c] -= w * features[m, c]
                for c in range(r):
                    own[c, i] = features[m, c]
            noise *= w * 1e-6  # rounding of the sums is no gain
            # the product of errors and entries, column after column, which is what streams depend on; four at a time
            # are nearly twice as fast, and no library is called, which would start threads
            for i in range(size):
                error, x = errors[order[start + i]], inner[i]
                for j in range(size):
                    x[j] = 0
                fours = r - r % 4
                for c in range(0, fours, 4):
                    for j in range(size):
                        x[j] += (
                            error[c] * own[c, j]
                            + error[c + 1] * own[c + 1, j]
                            + error[c + 2] * own[c + 2, j]
                            + error[c + 3] * own[c + 3, j]
                        )
                for c in range(fours, r):
                    for j in range(size):
                        x[j] += error[c] * own[c, j]
            for _ in range(size):
                moved = False
                for i in range(1, size):
                    a = place[i]
                    for j in range(i):
                        b = place[j]
                        if inner[i, a] + inner[j, b] - inner[i, b] - inner[j, a] > noise:
                            place[i] = b
                            place[j] = a
                            a = b
                            moved = True
                if not moved:
                    break
            for i in range(size):
                t = order[start + i]
                m = member[place[i]]
                table[t, h] = m
                for c in range(r):
                    errors[t, c] += w * features[m, c]


@_part()
def _relabel(scores, kernel, diag, labels, i, target):
    left, joined, inner = scores[labels[i]], scores[target], kernel[i]
    own_left, own_joined = left[i], joined[i]
    for j in range(len(labels)):
        distance = diag[j] + diag[i] - 2 * inner[j]
        left[j] -= distance
        joined[j] += distance
    left[i], joined[i] = own_left, own_joined  # a point is no distance from itself, whatever rounding says
    labels[i] = target


@_loop(fastmath=True)
def swap_points(scores, kernel, diag, labels, at_limit, noise, own, gain, there, never):
    """One sweep of exchanges of points of strata ``at_limit`` (k,) with others, in place; returns the decrease of J.

    ``own`` (q,) is the score of each point in its own stratum.
    """
    k, q = scores.shape
    decrease = 0.0
    for i in range(q):
        a = labels[i]
        if not at_limit[a]:
            continue
        for h in range(k):
            there[h] = scores[h, i]
        there[a] = never  # no exchange within a stratum
        inner, here = kernel[i], scores[a]
        fixed, best = own[i] + 2 * diag[i], -4 * there[a]
        for j in range(q):
            gain[j] = own[j] - here[j] + 2 * diag[j] - 4 * inner[j] - there[labels[j]]
            best = gain[j] if gain[j] > best else best
        if fixed + best > noise:
            partner = 0
            while partner < q - 1 and gain[partner] < best:
                partner += 1
            decrease += fixed + best
            b = labels[partner]
            _relabel(scores, kernel, diag, labels, partner, a)
            _relabel(scores, kernel, diag, labels, i, b)
            for j in range(q):
                if labels[j] == a or labels[j] == b:
                    own[j] = scores[labels[j], j]
    return decrease


@_part(inline="always")
def _place_of_least(values):
    """Where the least of ``values`` (k,) is, none of which is negative; the first place of several."""
    if values.itemsize == 4:  # as integers such numbers have the same order: the place fits behind them
        bits, least = values.view(np.int32), np.int64(2**63 - 1)
        for h in range(len(values)):
            least = min(least, np.int64(bits[h]) << 32 | h)
        return int(least & np.int64(2**32 - 1))
    best = 0
    for h in range(1, len(values)):
        if values[h] < values[best]:
            best = h
    return best


@_loop()
def greedy_in_order(distances, orders, parallel):
    """Algorithm 2 for given orders: strata of the points in visiting order (trials, n), and costs (trials,).

    ``distances`` (n, k) are at least the smallest number above 0, so that sizes decide between strata at distance 0.
    """
    n, k = distances.shape
    picked = np.empty(orders.shape, np.int64)
    costs = np.zeros(len(orders))
    weights, scores = np.empty(k, distances.dtype), np.empty(k, distances.dtype)
    for t in range(len(orders)):
        order, found, cost = orders[t], picked[t], 0.0
        for h in range(k):
            weights[h] = 1
        for start in range(0, n, parallel):
            stop = min(start + parallel, n)
            for position in range(start, stop):
                row = distances[order[position]]
                for h in range(k):
                    scores[h] = row[h] * weights[h]
                found[position] = _place_of_least(scores)
            for position in range(start, stop):
                weights[found[position]] += 1
        for position in range(n):
            h = found[position]
            cost += distances[order[position], h] * (weights[h] - 1)
        costs[t] = cost
    return picked, costs


# all of fastmath but the freedom to reorder, which would undo the rounding of an exponent
_IN_ORDER = {"nnan", "ninf", "nsz", "arcp", "contract"}


@_loop(fastmath=True)
def squared_norms(rows, norms):
    """Fill ``norms`` (n,) with the squared norms of ``rows`` (n, d)."""
    for i in range(len(rows)):
        row, norm = rows[i], rows.dtype.type(0)
        for c in range(len(row)):
            norm += row[c] * row[c]
        norms[i] = norm


# constants in single precision: to numba each conversion is a call
_EPS, _ZERO, _HALF, _ONE, _TWO = np.array([1.1920929e-07, 0.0, 0.5, 1.0, 2.0], np.float32)
_FAR, _LOG_2, _MINUS_LOG2_E = np.array([1e5, 0.6931471805599453, -1.4426950408889634], np.float32)
_BIAS, _MANTISSA = np.array([127, 23], np.int32)  # of the exponent; bits behind it
_LOWEST, _E3, _E4, _E5, _E6 = np.array([-126.0, 1 / 6, 1 / 24, 1 / 120, 1 / 720], np.float32)


@_loop(fastmath=_IN_ORDER)
def gaussian_mixture(products, x, y, norm_x, norm_y, rates, near, small, symmetric, d2):
    """Turn ``products`` <x_i, y_j> (n, m) into Σ_rate exp(-rate |x_i - y_j|²), in place; single precision.

    Squared distances below ``near`` are exact, unless their error is below ``small``; see
    ``vardass.kernels.squared_distances``. There one limit holds for all pairs, here each pair has that of its own
    norms, so that a single outlier does not slow down all others. Where it is ``symmetric`` only one of two equal
    values is computed, and none on the diagonal. ``d2`` (m,) is a buffer.
    """
    n = len(products)
    for i in range(n):
        first = i + 1 if symmetric else 0
        row, norms = products[i, first:], norm_y[first:]  # from 0, as loops from elsewhere are not vectorised
        norm, close = norm_x[i], 0
        for j in range(len(row)):
            sums = norm + norms[j]
            value = sums - _TWO * row[j]
            value = value if value > _ZERO else _ZERO
            error = _EPS * sums
            limit = _FAR * error
            limit = limit if limit > near else near
            close += 1 if (error >= small and value < limit) else 0
            d2[j] = value
            row[j] = _ZERO
        if close > 0:
            for j in range(len(row)):
                error = _EPS * (norm + norms[j])
                if error >= small and (d2[j] < near or d2[j] < _FAR * error):
                    value = _ZERO
                    for c in range(x.shape[1]):
                        value += (x[i, c] - y[first + j, c]) * (x[i, c] - y[first + j, c])
                    d2[j] = value
        for q in range(len(rates)):
            factor = rates[q] * _MINUS_LOG2_E
            for j in range(len(row)):
                # 2^t to 2e-7 of itself; below 2^-126 it is 2^-126
                t = d2[j] * factor
                t = t if t > _LOWEST else _LOWEST
                whole = np.int32(t - _HALF)
                v = (t - np.float32(whole)) * _LOG_2
                e = _E6 * v + _E5
                e = e * v + _E4
                e = e * v + _E3
                e = e * v + _HALF
                e = e * v + _ONE
                e = e * v + _ONE
                row[j] += e * np.int32((whole + _BIAS) << _MANTISSA).view(np.float32)
    if symmetric:
        for left in range(0, n, 32):  # 32 rows, which stay in cache, to as many columns
            for i in range(left, n):
                for j in range(left, left + 32 if left + 32 < i else i):
                    products[i, j] = products[j, i]


@_loop(fastmath=True)
def centre(matrix, shift, single):
    """Subtract s_i + s_j from a symmetric ``matrix`` (n, n), in place, so that its rows have the mean 0.

    ``shift`` (n,) is a buffer in double precision, ``single`` one in that of the matrix.
    """
    n = len(matrix)
    mean = 0.0
    for i in range(n):
        row, total = matrix[i], 0.0
        for j in range(n):
            total += row[j]
        shift[i] = total / n
        mean += shift[i]
    mean /= n
    for i in range(n):
        single[i] = shift[i] - mean / 2
    for i in range(n):
        row, own = matrix[i], single[i]
        for j in range(n):
            row[j] -= own + single[j]


@_part()
def _draw(mass, level):
    """Where the running sum of ``mass`` (n,) passes the share ``level`` of its total."""
    total, reached, heaviest = 0.0, 0.0, 0
    for i in range(len(mass)):
        total += mass[i]
        heaviest = i if mass[i] > mass[heaviest] else heaviest
    for i in range(len(mass)):
        reached += mass[i]
        if reached > level * total:
            return i
    return heaviest  # rounding of the total


@_part(fastmath=True)
def _inner_products(vectors, i, out):
    point = vectors[i]
    for j in range(len(vectors)):
        other, inner = vectors[j], vectors[0, 0] * 0
        for c in range(len(point)):
            inner += point[c] * other[c]
        out[j] = inner


@_loop()
def kmeanspp(values, residual, diag, levels):
    """Seeds of k-means++ for uniform ``levels`` (k,); see ``vardass.solvers.labels.kernel_kmeanspp``.

    ``values`` are low-rank features (n, r) with their ``residual`` (n,), or the full matrix (n, n) with an empty one.
    """
    n = len(diag)
    seeds = np.empty(len(levels), np.int64)
    unchosen, nearest, mass = np.empty(n), np.empty(n), np.empty(n)
    for i in range(n):
        unchosen[i], nearest[i], mass[i] = 1.0, np.inf, 1.0
    column = np.empty(n, diag.dtype)
    for h in range(len(levels)):
        seed = _draw(mass, levels[h])
        seeds[h] = seed
        if len(residual) > 0:
            _inner_products(values, seed, column)
            column[seed] += residual[seed]
        else:
            for i in range(n):
                column[i] = values[seed, i]
        unchosen[seed] = 0.0
        total = 0.0
        for i in range(n):
            distance = diag[i] + diag[seed] - 2 * column[i]
            nearest[i] = max(0.0, min(nearest[i], distance))
            mass[i] = nearest[i] * unchosen[i]
            total += mass[i]
        if not total > 0.0:
            for i in range(n):
                mass[i] = unchosen[i]
    return seeds


@_loop(fastmath=_IN_ORDER)
def nearest_strata(cross, diag, labels, sizes, diag_sums, high, nearest):
    """Fill ``nearest`` (b, c) with c of the k > c strata that b points may best move to, the best one among them.

    ``cross`` (b, k) is <φ_i, Σ φ> of points and strata. Place j is for the best of the strata h with h % c = j, which
    is found side by side for all places; strata with neighbouring numbers, as bisection makes them, are neighbours.
    Strata of ``high`` points, which take no more, come last.
    """
    count, k = cross.shape
    c = nearest.shape[1]
    padded = -(-k // c) * c
    never = cross.dtype.type(3e38)
    scores = np.empty(padded, cross.dtype)
    for h in range(padded):
        scores[h] = never
    lowest = np.empty(c, cross.dtype)
    factors, offsets = np.empty(k, sizes.dtype), np.empty(k, diag_sums.dtype)
    for h in range(k):
        full = sizes[h] >= high
        factors[h], offsets[h] = (0 if full else sizes[h]), (never if full else diag_sums[h])
    for i in range(count):
        row, own_diag, found = cross[i], diag[i], nearest[i]
        for h in range(k):
            scores[h] = factors[h] * own_diag + offsets[h] - 2 * row[h]
        scores[labels[i]] = never
        for j in range(c):
            lowest[j], found[j] = scores[j], j
        for start in range(c, padded, c):
            part = scores[start : start + c]
            for j in range(c):
                better = part[j] < lowest[j]
                lowest[j] = part[j] if better else lowest[j]
                found[j] = np.int32(start + j) if better else found[j]


@_loop(fastmath=True)
def sweep_nearest(features, residual, diag, labels, sums, sizes, diag_sums, nearest, gaps, limit, low, high, noise):
    """Let each of n points in turn move to the best of the strata in ``nearest`` (n, c), in place.

    ``sums`` (k, r) are Σ φ of the strata; ``noise`` is the share of a score that is rounding. A point that moves puts
    the stratum that it leaves in the place of the one that it joins. ``gaps`` (n,) is what the best move would have
    cost each point when it was last looked at; those above ``limit`` are passed over. Returns the decrease of J and
    the number of moves.
    """
    n, r = features.shape
    c = nearest.shape[1]
    zero = features[0, 0] * 0
    decrease, moves = 0.0, 0
    for i in range(n):
        source = labels[i]
        if gaps[i] > limit or sizes[source] <= low:
            continue
        point, own_diag, choice, own_sums = features[i], diag[i], nearest[i], sums[source]
        inner = zero
        for f in range(r):
            inner += point[f] * own_sums[f]
        own = sizes[source] * own_diag + diag_sums[source] - 2 * (inner + residual[i])
        lowest, place = zero, -1
        for j in range(c):
            h = choice[j]
            if h != source and sizes[h] < high:
                other = sums[h]
                inner = zero
                for f in range(r):
                    inner += point[f] * other[f]
                score = sizes[h] * own_diag + diag_sums[h] - 2 * inner
                if place < 0 or score < lowest:
                    lowest, place = score, j
        if place < 0:
            continue
        gaps[i] = lowest - own
        if own - lowest > noise * abs(own):
            target = choice[place]
            choice[place] = source
            decrease += own - lowest
            moves += 1
            labels[i] = target
            sizes[source] -= 1
            sizes[target] += 1
            diag_sums[source] -= own_diag
            diag_sums[target] += own_diag
            new_sums = sums[target]
            for f in range(r):
                own_sums[f] -= point[f]
                new_sums[f] += point[f]
    return decrease, moves


@_loop(fastmath=True)
def sweep_exact(
    matrix, diag, labels, cross, sizes, diag_sums, low, high, noise, worthwhile, lowest, gain, best, proposed, never
):
    """Moves of single points of the full matrix (n, n), best first, in place; returns the decrease of J.

    ``cross`` (k, n) is Σ_{j in S_h} K_ij. Rounds are made until one gains less than ``worthwhile``; ``noise`` is the
    share of a score that is rounding.
    """
    k, n = cross.shape
    decrease = 0.0
    for _ in range(8 * n):
        for i in range(n):
            lowest[i] = never
        for h in range(k):
            row, size, total = cross[h], sizes[h], diag_sums[h]
            if size < high:
                for i in range(n):
                    score = size * diag[i] + total - 2 * row[i]
                    better = score < lowest[i]
                    lowest[i] = score if better else lowest[i]
                    best[i] = np.int32(h) if better else best[i]
        count = 0
        for i in range(n):
            source = labels[i]
            own = sizes[source] * diag[i] + diag_sums[source] - 2 * cross[source, i]
            if own - lowest[i] > noise * abs(own):
                gain[count], proposed[count] = lowest[i] - own, i
                count += 1
        before, gap = decrease, count
        while gap > 1:  # sorted by Shell's method
            gap = 1 if gap < 5 else (gap * 5 - 1) // 11
            for p in range(gap, count):
                key, item, q = gain[p], proposed[p], p
                while q >= gap and gain[q - gap] > key:
                    gain[q], proposed[q] = gain[q - gap], proposed[q - gap]
                    q -= gap
                gain[q], proposed[q] = key, item
        for rank in range(count):
            i = proposed[rank]
            source, target, own_diag = labels[i], best[i], diag[i]
            if sizes[source] <= low or sizes[target] >= high:
                continue
            current = sizes[source] * own_diag + diag_sums[source] - 2 * cross[source, i]
            fall = current - (sizes[target] * own_diag + diag_sums[target] - 2 * cross[target, i])
            if fall > noise * abs(current):
                decrease += fall
                labels[i] = target
                sizes[source] -= 1
                sizes[target] += 1
                diag_sums[source] -= own_diag
                diag_sums[target] += own_diag
                row, left, joined = matrix[i], cross[source], cross[target]
                for j in range(n):
                    left[j] -= row[j]
                    joined[j] += row[j]
        if decrease - before <= worthwhile:
            break
    return decrease
