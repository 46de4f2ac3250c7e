"""A lower bound on Var(μ̂) over all partitions into k strata.

It bounds the objective of equation 8, which is n² Var(μ̂) for one uniform draw from each stratum,

    J(S) = ½ Σ_h Σ_{i,j in S_h} d_ij,    d_ij = K_ii + K_jj - 2 K_ij = |φ_i - φ_j|².
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from vardass.kernels import FunctionKernel, KernelLike, fitted_kernel
from vardass.strata import LowerBound
from vardass.validate import ArrayLike, as_features, as_generator, check_count, row_blocks
from vardass.view import EXACT_LIMIT, KernelView

__all__ = ["nearest_neighbour_bound"]

_SAMPLED_ROWS = 300
_BLOCK_BYTES = 2**28  # for the distances of a block of rows
_TILE_BYTES = 2**24  # for the kernel of these rows and some columns: small, as it is passed over many times
_LEAST_COLUMNS = 32
_GRID = 512  # stratum sizes tried while the multiplier is chosen


@torch.no_grad()
def nearest_neighbour_bound(
    features: ArrayLike,
    k: int,
    *,
    kernel: KernelLike = "mmd",
    rows: int | None = None,
    seed: int | torch.Generator | None = 0,
    min_size: int = 1,
    max_size: int | None = None,
) -> LowerBound:
    """Bound Var(μ̂) of every partition into k strata by counting nearest neighbours.

    Let N_i(m) be the sum of the m - 1 smallest d_ij over j ≠ i. For every θ >= 0

        n² Var(μ̂) = J  >=  Σ_i min_m [ N_i(m) / 2 + θ / m ] - θ k,

    where m runs over the sizes a stratum can have among k that are not empty. The right side is concave in θ
    and is maximised. ``stderr`` is 0 if all rows were summed; an estimate below zero is returned as zero.

    Parameters
    ----------
    features : Tensor or ndarray of shape (n, d)
        One row per sample.
    k : int
        Number of strata, at most n.
    kernel : Kernel, name or callable
        Fitted to ``features`` unless it is fitted.
    rows : int, optional
        Rows i to sum over. By default all for n <= 2048, which gives a rigorous bound, else 300 drawn at random to
        choose θ and another 300 to evaluate the sum: an unbiased estimate of a bound that is valid for any θ.
    seed : int or Generator
        For the random rows.
    min_size, max_size : int
        Size limits of every stratum.

    Notes
    -----
    Proof. Let m_i be the size of the stratum of i. J = ½ Σ_i Σ_{j in the stratum of i} d_ij, and the inner
    sum has m_i - 1 terms j ≠ i, so it is at least N_i(m_i). Σ_i 1/m_i is the number of strata, at most k. Hence for
    θ >= 0 J >= Σ_i N_i(m_i)/2 + θ (Σ_i 1/m_i - k), and each term is at least its minimum over m.

    For n > 2048 only the M ≈ 8 n/k smallest distances of a row are kept. Further ones are no smaller than the last one
    kept, so N_i(m) >= N_i(M + 1) + (m - M - 1) d_i(M) bounds the sizes beyond. As N_i is convex in m, nothing is lost
    where the best m is at most M. Time is O(rows · n · d); memory is a few hundred MB, for any n.
    """
    x = as_features(features)
    n = len(x)
    k = check_count(k, "k", high=n, remedy=f"n={n} samples make at most {n} strata")
    smallest, largest = _size_range(n, k, min_size, max_size)
    if rows is None:
        rows = n if n <= EXACT_LIMIT else _SAMPLED_ROWS
    else:
        rows = min(n, check_count(rows, "rows", low=2, remedy="a standard error needs two rows"))
    if k == n:
        return LowerBound(0.0, 0.0)
    kept = largest - 1 if n <= EXACT_LIMIT else min(largest - 1, max(8 * -(-n // k), 64, smallest))
    view = _view(x, kernel)
    if rows == n:
        drawn = [torch.arange(n, device=x.device)] * 2
    else:
        # drawn apart from each other: rows left over by the first sample would not be a sample of all rows
        generator = as_generator(seed)
        drawn = [torch.randperm(n, generator=generator)[:rows].to(x.device) for _ in range(2)]
    blocks: list[Iterable[Tensor]] = [_nearest(view, numbers, kept) for numbers in drawn]
    if n <= EXACT_LIMIT and rows == n:  # few enough to be held
        blocks = [list(blocks[0])] * 2
    theta = _best_theta(blocks[0], n, k, smallest, min(largest, kept + 1))
    minima = _row_minima(blocks[1], theta, smallest, largest)
    bound = float(n * minima.mean() - theta * k)
    spread = 0.0 if rows == n else float(minima.std()) * (n * (n - rows) / rows) ** 0.5
    return LowerBound(max(bound, 0.0) / n**2, spread / n**2)


def _size_range(n: int, k: int, min_size: int, max_size: int | None) -> tuple[int, int]:
    """Smallest and largest size that a stratum can have in a partition into k that keeps the limits."""
    given = f"with n={n} samples in k={k} strata"
    low = check_count(min_size, "min_size", high=n // k, remedy=f"{given}, lower it or k")
    high = n if max_size is None else max_size
    check_count(high, "max_size", low=max(low, -(-n // k)), remedy=f"{given}, raise it or k")
    return max(low, n - (k - 1) * high), min(high, n - (k - 1) * low)


def _nearest(view: KernelView, rows: Tensor, kept: int) -> Iterator[Tensor]:
    """Yield the ``kept`` smallest d_ij, j ≠ i, in ascending order for i in ``rows``: (block, kept)."""
    (n, d), diag = view.x.shape, view.diag.double()
    # a row takes its features, n distances, then its smallest with their indices and sums
    for block in row_blocks(len(rows), _BLOCK_BYTES // (8 * (n + d) + 32 * kept)):
        picked = rows[block]
        points = view.rows(picked)
        distances = diag.new_empty(len(picked), n)
        # the kernel passes over all picked rows for each tile, however narrow it is
        for columns in row_blocks(n, max(_LEAST_COLUMNS, _TILE_BYTES // (32 * (len(picked) + d)))):
            cross = view.kernel.matrix(points, view.rows(columns)).double()
            distances[:, columns] = diag[picked, None] + diag[columns] - 2.0 * cross
        distances.clamp_min_(0.0)
        distances.scatter_(1, picked[:, None], torch.inf)
        yield distances.topk(kept, largest=False, sorted=True).values


def _view(x: Tensor, kernel: KernelLike) -> KernelView:
    # d_ij is a difference of kernel values, so they are evaluated in double precision; a user's function
    # may hold tensors of its own and gets the features in the type they came in
    fitted = fitted_kernel(kernel, x)
    return KernelView(x, fitted, x.dtype if isinstance(fitted, FunctionKernel) else torch.float64)


def _sums(nearest: Tensor) -> Tensor:
    """N_i(m) for m = 1 to M + 1 from M sorted distances: (rows, M + 1)."""
    return torch.nn.functional.pad(nearest.cumsum(1), (1, 0))


def _best_theta(blocks: Iterable[Tensor], n: int, k: int, smallest: int, largest: int) -> float:
    """The θ that maximises the bound over some rows, with m on a grid: any θ is valid, this one is good."""
    grid = np.unique(np.geomspace(smallest, largest, _GRID).round().astype(np.int64))
    if len(grid) == 1:
        return 0.0
    half = torch.cat([_sums(nearest)[:, grid - 1] / 2.0 for nearest in blocks])
    inverse = 1.0 / torch.from_numpy(grid).to(half)
    # the slope of the bound in θ is Σ_i 1/m_i - k: it falls, and is not positive once all m_i are largest
    low = half.new_zeros(())
    high = ((half[:, -1] - half[:, -2]) / (inverse[-2] - inverse[-1])).amax()
    for _ in range(64):
        theta = (low + high) / 2.0
        strata = n * inverse[(half + theta * inverse).argmin(1)].mean()
        low, high = torch.where(strata > k, theta, low), torch.where(strata > k, high, theta)
    return float((low + high) / 2.0)


def _row_minima(blocks: Iterable[Tensor], theta: float, smallest: int, largest: int) -> Tensor:
    """min_m [N_i(m) / 2 + θ / m], smallest <= m <= largest, or less if distances were cut off: (rows,)."""
    minima = []
    for nearest in blocks:
        reach = min(largest, nearest.shape[1] + 1)
        sizes = torch.arange(smallest, reach + 1, device=nearest.device, dtype=torch.float64)
        half = _sums(nearest)[:, smallest - 1 : reach] / 2.0
        minimum = (half + theta / sizes).amin(1)
        if reach < largest:  # beyond, a line of slope d_i(M) / 2 stays below N_i(m) / 2
            slope = nearest[:, -1] / 2.0
            best = torch.where(slope > 0.0, (theta / slope).sqrt(), torch.inf).clamp(reach, largest)
            minimum = minimum.minimum(half[:, -1] + slope * (best - reach) + theta / best)
        minima.append(minimum)
    return torch.cat(minima)
