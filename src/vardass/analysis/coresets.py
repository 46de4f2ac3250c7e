"""Coresets: m weighted representatives of a data set whose mean embedding is closest to that of all rows.

The error is |μ - Σ_h w_h φ(z_h)|², with μ the mean of φ over all n rows: its root bounds by how much the weighted mean
of any function with norm 1 in the kernel's space differs from the mean over all rows. For a budget of m labels, or an
evaluation on m rows instead of n.

One representative of each stratum is taken, weighted by the stratum's share, and exchanged for another member where
that lowers the total error, as plans of batches do; a sweep over all strata costs one pass over the rows. Then weights
are optimised, at least 0 and with sum 1, and representatives exchanged for any other row. This second stage needs the
kernel matrix or many low-rank features for each representative: with few it would overfit the features. No step raises
the error in the features that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardass.analysis.sums import Sums
from vardass.errors import InputError
from vardass.kernels import KernelLike, RBFMixture, fitted_kernel
from vardass.lowrank import DEFAULT_RANK, FeatureMap, fit_feature_map
from vardass.solvers.labels import SizeLimits
from vardass.solvers.stratification import default_rank, solve
from vardass.validate import ArrayLike, Progress, as_features, as_generator, check_count, check_flag, row_blocks, silent
from vardass.view import ExactView, KernelView, LowRankView, View

__all__ = ["LARGEST", "Coreset", "coreset"]

LARGEST = 4096  # representatives: their weights come from a matrix of so many rows and columns
_SWEEPS = 8  # over the representatives, at most
_ENOUGH = 5e-3  # relative gain of a sweep below which the search ends
_ALL_ROWS = 4e9  # products of a sweep that looks at all rows for each representative; beyond, at those of its stratum
# Rows up to which the matrix (268 MB in float32) is used: it is as fast as the columns that choosing rows needs, and
# leaves 6 to 10 % less error (n = 4,096 and 8,192, m = 32 and 128)
_EXACT = 8_192
_MOST_COLUMNS = 512
_MOST_RANK = 2048  # of those that are asked for
_COLUMNS_EACH = 4  # columns for each representative, with which the features show enough to choose from all rows
_WEIGHT_WORK = 2e11  # of factorisations: for a thousand representatives the search for weights may end early


@dataclass(frozen=True, eq=False)
class Coreset:
    """Representatives of n rows.

    Attributes
    ----------
    indices, weights : Tensor of shape (m,)
        Distinct rows, ascending; weights of at least 0 with sum 1, in double precision.
    error : float
        |μ - Σ w φ|² under the true kernel.
    error_stderr : float
        Standard error of it and of ``spread``, where means of the kernel over all rows were estimated from random
        ones; 0 means exact.
    spread : float
        E|φ - μ|² of a row: the expected error of one uniform draw.
    """

    indices: Tensor
    weights: Tensor
    n: int
    error: float
    error_stderr: float
    spread: float
    kernel: str

    @property
    def size(self) -> int:
        """Number m of representatives."""
        return len(self.indices)

    @property
    def uniform_error(self) -> float:
        """Expected error of m distinct rows drawn uniformly, of equal weight."""
        return self.spread / self.size * (self.n - self.size) / max(1, self.n - 1)

    @property
    def worth(self) -> float:
        """Distinct uniform draws with the same expected error."""
        if self.spread <= 0.0:
            return float(self.size)
        return self.spread * self.n / (self.spread + max(0.0, self.error) * (self.n - 1))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text."""
        names = ("n", "size", "kernel", "error", "error_stderr", "uniform_error", "worth")
        rows = {"indices": self.indices.tolist(), "weights": self.weights.tolist()}
        return {**{name: getattr(self, name) for name in names}, **rows}

    def __repr__(self) -> str:
        numbers = f"error={self.error:.4g}, uniform_error={self.uniform_error:.4g}, worth={self.worth:.0f} draws"
        return f"Coreset(size={self.size}, n={self.n}, {numbers})"


@torch.no_grad()
def coreset(
    features: ArrayLike,
    size: int,
    *,
    kernel: KernelLike | None = None,
    weights: bool = True,
    rank: int | None = None,
    seed: int | torch.Generator = 0,
    progress: Progress | None = None,
    whole: Callable[[FeatureMap], Sums] | None = None,
) -> Coreset:
    """Choose weighted representatives with a small mean-embedding error.

    Parameters
    ----------
    features : array of shape (n, d)
        All rows.
    size : int
        Number m of representatives, at most n and at most 4,096.
    kernel : Kernel, name or callable, optional
        Fitted to the features unless it is fitted. By default ``RBFMixture(scale="median")``: where the paper's fixed
        bandwidths (``"mmd"``) make each row resemble only itself, no choice is better than another.
    weights : bool
        Optimise the weights; False sets all to 1 / m, for uses without weights.
    rank : int, optional
        Columns of the low-rank features used to search for rows. By default the kernel matrix is used up to 8,192
        rows, and beyond 4 m columns, at least 128 and at most 512. Weights and error are of the true kernel either way.
    seed : int or torch.Generator
        The same seed gives the same representatives.
    progress : callable, optional
        Called as ``progress(fraction, message)``.
    whole : callable, optional
        If ``features`` are random rows of a larger set: returns `row_sums` over all of its rows, given a feature
        map. See `vardass.shards.coreset_shards`.

    Examples
    --------
    >>> z = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> found = coreset(z, 20)
    >>> found.size, found.error < found.uniform_error
    (20, True)
    """
    x = as_features(features)
    remedy = f"there are {len(x)} rows to choose from, and at most {LARGEST} are chosen"
    size = check_count(size, "size", high=min(len(x), LARGEST), remedy=remedy)
    check_flag(weights, "weights")
    generator = as_generator(seed, x.device)
    fitted = fitted_kernel(RBFMixture(scale="median") if kernel is None else kernel, x)
    tell = progress or silent
    tell(0.0, "kernel")
    view, all_rows = _view(KernelView(x, fitted), size, rank, generator, whole)
    if not bool(torch.isfinite(view.diag.double().sum())):
        raise InputError(
            f"{fitted!r} overflows {x.dtype} on features of up to {float(x.abs().max()):.3g}; scale them down"
        )
    tell(0.2, "strata")
    labels = _strata(view, size, equal=not weights, generator=generator)
    chosen, shares = _representatives(view, labels, size, weighted=weights, tell=tell)
    indices, order = chosen.sort()
    shares = shares[order]
    tell(0.9, "weights")
    matrix, means = fitted.square_matrix(x[indices]).double(), all_rows.means(indices)
    if weights:
        shares = simplex_minimum(matrix, means, shares)
    mean, error = all_rows.kernel_mean
    return Coreset(
        indices=indices,
        weights=shares,
        n=all_rows.n,
        error=max(0.0, float(shares @ (matrix @ shares - 2.0 * means)) + mean),
        error_stderr=math.hypot(error, all_rows.stderr(indices, shares)),
        spread=max(0.0, all_rows.diagonal - mean),
        kernel=repr(fitted),
    )


class _AllRows(NamedTuple):
    """Means of κ over all rows of a set in memory, or of a larger one known by a sample and sums over all its rows.

    For the latter κ(z, z') = <φ, φ'> + residual: <φ, φ'> is summed over all rows, the residual's mean is the sample's.
    """

    truth: KernelView
    n: int
    kernel_mean: tuple[float, float]  # over all pairs, and its standard error
    diagonal: float
    features: Tensor | None = None  # (s, r) of the sample
    mean: Tensor | None = None  # (r,) of φ over all rows

    def means(self, indices: Tensor) -> Tensor:
        """Mean κ of rows to all rows: (m,)."""
        found = self.truth.mean_to_all(self.truth.x[indices])
        if self.features is None or self.mean is None:
            return found
        s, picked = self.truth.n, self.features[indices].double()
        own = self.truth.diag[indices].double() - picked.square().sum(1)
        low_rank = picked @ self.features.mean(0, dtype=torch.float64)
        residual = (s * (found - low_rank) - own) / (s - 1)  # to the other rows
        return picked @ self.mean + (own + (self.n - 1) * residual) / self.n

    def stderr(self, indices: Tensor, weights: Tensor) -> float:
        """Standard error of -2 Σ w_h mean κ(z_h, z), from estimating the mean residual on a sample."""
        if self.features is None:
            return 0.0
        points, combined = self.truth.x[indices], weights @ self.features[indices].double()
        residuals = [
            self.truth.kernel.matrix(self.truth.rows(rows), points).double() @ weights
            - self.features[rows].double() @ combined
            for rows in row_blocks(self.truth.n, 8192)
        ]
        return 2.0 * float(torch.cat(residuals).std()) / math.sqrt(self.truth.n)


def _view(
    truth: KernelView,
    size: int,
    rank: int | None,
    generator: torch.Generator,
    whole: Callable[[FeatureMap], Sums] | None,
) -> tuple[View, _AllRows]:
    """The rows through their kernel, centred at the mean of all rows, and what is known of all rows."""
    n = truth.n
    if rank is None and n <= _EXACT and whole is None:
        matrix = truth.kernel.square_matrix(truth.x)
        all_pairs = float(matrix.mean(0, dtype=torch.float64).mean())
        diagonal = float(truth.diag.mean(dtype=torch.float64))
        return ExactView.centred(matrix), _AllRows(truth, n, (all_pairs, 0.0), diagonal)
    if rank is None:
        rank = min(_MOST_COLUMNS, max(DEFAULT_RANK, _COLUMNS_EACH * size))
    rank = check_count(rank, "rank", high=_MOST_RANK)
    feature_map = fit_feature_map(truth.x, truth.kernel, rank, landmarks=rank, generator=generator)
    features, residual = feature_map(truth.x)
    pairs, error = truth.pair_mean(features, residual, generator)
    mean = features.mean(0, dtype=torch.float64)
    if whole is None:
        all_rows = _AllRows(truth, n, (pairs, error), float(truth.diag.mean(dtype=torch.float64)))
    else:
        sums = whole(feature_map)
        count, missed = int(sums["count"]), pairs - float(mean.square().sum() + residual.double().sum() / n**2)
        mean = sums["features"] / count
        own = float(sums["diagonal"] - sums["lengths"]) / count**2
        pairs = float(mean.square().sum()) + own + missed * n / (n - 1) * (count - 1) / count
        diagonal = float(sums["diagonal"]) / count
        all_rows = _AllRows(truth, count, (pairs, error), diagonal, features.clone(), mean)
    features -= mean.to(features)
    return LowRankView(features, residual), all_rows


def _strata(view: View, size: int, *, equal: bool, generator: torch.Generator) -> Tensor:
    if size == 1 or size == view.n:
        return torch.arange(view.n, device=view.diag.device) % size
    leading = view.leading(default_rank(size))  # strata need fewer columns than the choice within them
    limits = SizeLimits.of(view.n, size, equal=equal)
    return solve(leading, size, limits=limits, generator=generator).labels


def _representatives(view: View, labels: Tensor, size: int, *, weighted: bool, tell: Progress) -> tuple[Tensor, Tensor]:
    """Rows (m,) and weights (m,): the best of each stratum together, then of all rows if that is cheap."""
    if size == 1:
        return view.diag.argmin()[None], view.diag.new_ones(1, dtype=torch.float64)
    counts = torch.bincount(labels, minlength=size).double()
    weights = counts / view.n if weighted else torch.full_like(counts, 1.0 / size)
    order = labels.argsort(stable=True)
    members = list(order.split(counts.long().tolist()))  # type: ignore[no-untyped-call]
    nearest = [rows[(view.diag[rows] - 2.0 * view.mean_products(rows)).argmin()] for rows in members]  # to their mean
    search = _Search(view, torch.stack(nearest), weights)
    _sweep(search, members, free=False, tell=lambda fraction: tell(0.4 + 0.2 * fraction, "representatives"))
    if view.width < _COLUMNS_EACH * size:  # a freer choice would overfit the features
        return search.chosen, search.weights
    cheap = float(size) * view.n * min(view.width, size) <= _ALL_ROWS
    if weighted:
        search.optimise_weights()
    if weighted or cheap:
        candidates = [order] * size if cheap else members
        _sweep(search, candidates, free=weighted, tell=lambda fraction: tell(0.6 + 0.3 * fraction, "exchanges"))
    return search.chosen, search.weights


def _sweep(search: _Search, candidates: list[Tensor], *, free: bool, tell: Callable[[float], object]) -> None:
    """Exchange one representative after the other for the best of its candidates, until sweeps gain little."""
    error = search.error
    for turn in range(_SWEEPS):
        for place, rows in enumerate(candidates):
            search.exchange(place, rows, free=free)
        if free:
            search.optimise_weights()
        before, error = error, search.error
        tell((turn + 1) / _SWEEPS)
        if error >= (1.0 - _ENOUGH) * before:
            break


class _Search:
    """Representatives of a centred view, with their kernel matrix K; the error is wᵀKw."""

    def __init__(self, view: View, chosen: Tensor, weights: Tensor) -> None:
        self.view, self.chosen = view, chosen
        self.matrix = view.block(chosen).double()
        self.set_weights(weights)

    def set_weights(self, weights: Tensor) -> None:
        """Take them, and what exchanges need of them: Kw, the error, and the weighted sum of all that are chosen."""
        self.weights = weights
        self.product = self.matrix @ weights
        self.error = float(weights @ self.product)
        self.total = self.view.combine(self.chosen, weights)

    def optimise_weights(self) -> None:
        self.set_weights(simplex_minimum(self.matrix, torch.zeros_like(self.weights), self.weights))

    def exchange(self, place: int, rows: Tensor, *, free: bool) -> None:
        """Put the best of ``rows`` (q,) at ``place``, if it is better; with ``free``, at its best weight.

        With e the mean embedding of the others, the error is |(1 - a) e + a φ_i|², a parabola in the weight a.
        """
        own, diagonal = float(self.weights[place]), self.view.diag[rows].double()
        if own >= 1.0:
            return  # the others have no weight
        rest = self.error - 2.0 * own * float(self.product[place]) + own * own * float(self.matrix[place, place])
        others = max(0.0, rest) / (1.0 - own) ** 2
        combined = (self.total - own * self._alone(self.chosen[place]))[None]  # Σ w_h φ_h without that at place
        all_rows = len(rows) == self.view.n  # no copy of them
        inner = self.view.products(combined)[rows] if all_rows else self.view.products(combined, rows)
        inner = inner[:, 0].double() / (1.0 - own)
        share = torch.full_like(diagonal, own)
        if free:
            share = ((others - inner) / (others - 2.0 * inner + diagonal).clamp_min(1e-300)).clamp(0.0, 1.0)
        errors = (1.0 - share).square() * others + 2.0 * share * (1.0 - share) * inner + share.square() * diagonal
        errors.masked_fill_(torch.isin(rows, self.chosen), torch.inf)
        best = int(errors.argmin())
        if not float(errors[best]) < (1.0 - 1e-9) * self.error:
            return
        self.chosen = self.chosen.clone()
        self.chosen[place] = rows[best]
        values = self.view.products(self._alone(rows[best])[None], self.chosen)[:, 0].double()
        values[place] = self.view.diag[rows[best]]
        self.matrix[place] = self.matrix[:, place] = values
        weights = self.weights * (1.0 - share[best]) / (1.0 - own)
        weights[place] = share[best]
        self.set_weights(weights)

    def _alone(self, row: Tensor) -> Tensor:
        return self.view.combine(row[None], self.weights.new_ones(1))


def simplex_minimum(matrix: Tensor, linear: Tensor, start: Tensor) -> Tensor:
    """The w (m,) >= 0 with sum 1 that minimises wᵀKw - 2 wᵀb, by an active set, from ``start`` which is such a w.

    ``matrix`` is K (m, m), positive semi-definite, and ``linear`` b (m,), both in double precision. For more than 500
    rows the search may end early, never worse than it began.
    """
    w, m = start.clone(), len(start)
    scale = float(matrix.abs().max())
    free = w > 0
    for _ in range(min(4 * m + 16, 16 + int(_WEIGHT_WORK / m**3)) if scale > 0.0 else 0):
        index = free.nonzero().flatten()
        before = w[index]
        target = _on_plane(matrix[index][:, index], linear[index], scale)
        steps = torch.where(target <= 0.0, before / (before - target), torch.inf)
        if float(steps.min()) < 1.0:  # one of them reaches 0 on the way
            first = steps.argmin()
            w[index] = (before + steps[first] * (target - before)).clamp_min(0.0)
            w[index[first]], free[index[first]] = 0.0, False
            continue
        w[index] = target
        slope = matrix @ w - linear
        gain = torch.where(free, 0.0, (w * slope).sum() - slope)
        if float(gain.max()) <= 1e-9 * scale:
            break
        free[gain.argmax()] = True
    w = w.clamp_min(0.0) / w.clamp_min(0.0).sum()
    better = float(w @ (matrix @ w - 2.0 * linear)) < float(start @ (matrix @ start - 2.0 * linear))
    return w if better else start  # rounding may leave a matrix that is not quite positive


def _on_plane(matrix: Tensor, linear: Tensor, scale: float) -> Tensor:
    """The minimum with sum 1 and any signs; rows that are alike share their weight."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    right = torch.stack([linear, torch.ones_like(linear)], 1)
    for ridge in (1e-12, 1e-9, 1e-6, 1e-3, float(len(matrix))):  # the last is above any rounding of the matrix
        factor, failed = torch.linalg.cholesky_ex(matrix + ridge * scale * eye)
        if not bool(failed):
            break
    solved = torch.cholesky_solve(right, factor)
    found: Tensor = solved[:, 0] + solved[:, 1] * (1.0 - solved[:, 0].sum()) / solved[:, 1].sum()
    return found
