"""Coresets: m weighted representatives of a data set whose mean embedding is closest to that of all rows.

The error is |μ - Σ_h w_h φ(z_h)|², with μ the mean of φ over all n rows: its root bounds by how much the weighted mean
of any function with norm 1 in the kernel's space differs from the mean over all rows. For a budget of m labels, or an
evaluation on m rows instead of n.

Strata find where representatives have to be. One of each is taken, weighted by the stratum's share, and exchanged for
another member where that lowers the error of all together, as plans of batches do; a sweep over all strata costs one
pass over the rows. Then weights are optimised, at least 0 and with sum 1, and representatives exchanged for any other
row. That is done where the kernel matrix is at hand or its low-rank features are many for so few representatives, which
could else make the most of what the features do not show. No step raises the error in the features that are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel, KernelLike, RBFMixture, fitted_kernel
from vardass.lowrank import DEFAULT_RANK, LowRankFeatures, fit_feature_map, random_row_blocks
from vardass.solvers.problem import ExactProblem, LowRankProblem, Problem
from vardass.solvers.sizes import SizeLimits
from vardass.solvers.stratification import default_rank, solve
from vardass.validate import ArrayLike, Progress, as_features, as_generator, check_count, check_flag, row_blocks

__all__ = ["EXACT_ROWS", "LARGEST", "Coreset", "coreset", "simplex_minimum"]

LARGEST = 4096
"""Most representatives: their weights come from a matrix of so many rows and columns."""

EXACT_ROWS = 4096
"""Up to so many rows the kernel matrix is used, unless ``rank`` is given."""

_SWEEPS = 8  # over the representatives, at most
_ENOUGH = 5e-3  # relative gain of a sweep below which the search ends
_ALL_ROWS = 4e9  # products of a sweep that looks at all rows for each representative; beyond, at those of its stratum
_MOST_COLUMNS = 512
_COLUMNS_EACH = 4  # columns for each representative, with which the features show enough to choose from all rows
_WEIGHT_WORK = 2e11  # of factorisations: for a thousand representatives the search for weights may end early
_STREAM_ROWS = 8192


@dataclass(frozen=True, eq=False)
class Coreset:
    """Representatives of n rows.

    Attributes
    ----------
    indices : Tensor of shape (m,)
        Distinct rows, ascending.
    weights : Tensor of shape (m,)
        At least 0, with sum 1, in double precision.
    n : int
        Rows that are represented.
    error : float
        |μ - Σ w φ|² under the true kernel.
    error_stderr : float
        Standard error of it and of ``spread``, where the mean of the kernel over all pairs was estimated from random
        blocks of rows; 0 means exact.
    spread : float
        E|φ - μ|² of a row: the expected error of one uniform draw.
    kernel : str
        The kernel, as fitted.

    Examples
    --------
    >>> found = coreset(torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), 10)
    >>> len(found.indices), found.error < found.uniform_error
    (10, True)
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
        return {
            "n": self.n,
            "size": self.size,
            "kernel": self.kernel,
            "error": self.error,
            "error_stderr": self.error_stderr,
            "uniform_error": self.uniform_error,
            "worth": self.worth,
            "indices": self.indices.tolist(),
            "weights": self.weights.tolist(),
        }

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
) -> Coreset:
    """Choose weighted representatives with a small mean-embedding error.

    Parameters
    ----------
    features : array of shape (n, d)
        All rows.
    size : int
        Number m of representatives, up to n and 4,096.
    kernel : Kernel, name or callable, optional
        Fitted to the features unless it is fitted. By default ``RBFMixture(scale="median")``: where the paper's fixed
        bandwidths, the name ``"mmd"``, make each row like itself only, no choice is better than another.
    weights : bool
        Optimise the weights; without it all are 1 / m, for losses and labels that know none.
    rank : int, optional
        Columns of the low-rank features in which rows are looked for. By default the kernel matrix is used up to 4,096
        rows, and beyond 4 m columns, at least 128 and at most 512. Weights and error are of the true kernel either way.
    seed : int or torch.Generator
        The same seed gives the same representatives.
    progress : callable, optional
        Called as ``progress(fraction, message)``.

    Returns
    -------
    Coreset

    Examples
    --------
    >>> z = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> found = coreset(z, 20)
    >>> found.size, found.error < found.uniform_error
    (20, True)
    """
    x = as_features(features)
    n = len(x)
    size = check_count(
        size, "size", high=min(n, LARGEST), remedy=f"there are {n} rows, and at most {LARGEST} are chosen"
    )
    check_flag(weights, "weights")
    generator = as_generator(seed, x.device)
    fitted = fitted_kernel(RBFMixture(scale="median") if kernel is None else kernel, x)
    tell = progress if progress is not None else _silent
    tell(0.0, "kernel")
    problem, kernel_mean = _problem(x, size, fitted, rank, generator)
    if not bool(torch.isfinite(problem.diag.double().sum())):
        raise InputError(
            f"{fitted!r} overflows {x.dtype} on features of up to {float(x.abs().max()):.3g}; scale them down"
        )
    tell(0.2, "strata")
    labels = _strata(problem, size, equal=not weights, generator=generator)
    chosen, shares = _representatives(problem, labels, size, weighted=weights, tell=tell)
    order = chosen.argsort()
    indices, shares = chosen[order], shares[order]
    tell(0.9, "weights")
    matrix, means = fitted.square_matrix(x[indices]).double(), _means_to_all(fitted, x[indices], x)
    if weights:
        shares = simplex_minimum(matrix, means, shares)
    mean, error = kernel_mean
    value = float(shares @ (matrix @ shares - 2.0 * means)) + mean
    return Coreset(
        indices=indices,
        weights=shares,
        n=n,
        error=max(0.0, value),
        error_stderr=error,
        spread=max(0.0, float(fitted.diag(x).mean(dtype=torch.float64)) - mean),
        kernel=repr(fitted),
    )


def _silent(fraction: float, message: str) -> None:
    """No progress to show."""


def _problem(
    x: Tensor, size: int, kernel: Kernel, rank: int | None, generator: torch.Generator
) -> tuple[Problem, tuple[float, float]]:
    """The rows through their kernel, centred at their mean; the mean of κ over all pairs, and its standard error."""
    n = len(x)
    if rank is None and n <= EXACT_ROWS:
        matrix = kernel.square_matrix(x)
        all_pairs = float(matrix.mean(0, dtype=torch.float64).mean())
        return ExactProblem.centred(matrix), (all_pairs, 0.0)
    if rank is None:
        rank = min(_MOST_COLUMNS, max(DEFAULT_RANK, _COLUMNS_EACH * size))
    rank = check_count(rank, "rank", high=EXACT_ROWS // 2)
    feature_map = fit_feature_map(x, kernel, rank, landmarks=rank, generator=generator)
    features, residual = feature_map(x)
    mean = features.mean(0, dtype=torch.float64)
    # κ is <φ, φ'> and what it misses: all of it on the diagonal, its mean over random blocks of rows elsewhere
    own = float(residual.sum(dtype=torch.float64)) / n**2
    missed, error = 0.0, 0.0
    if feature_map.landmarks is not None and n > 1:
        values = []
        for (rows,) in random_row_blocks([n], generator):
            rest = (kernel.matrix(x[rows]) - features[rows] @ features[rows].T).double().fill_diagonal_(0.0)
            values.append(float(rest.sum()) / (len(rows) * (len(rows) - 1)))
        found = torch.tensor(values, dtype=torch.float64)
        missed = float(found.mean()) * (n - 1) / n
        error = float(found.std()) / len(found) ** 0.5 if len(found) > 1 else 0.0
    features -= mean.to(features)
    return LowRankProblem(features, residual), (float(mean.square().sum()) + own + missed, error)


def _strata(problem: Problem, size: int, *, equal: bool, generator: torch.Generator) -> Tensor:
    limits = SizeLimits.of(problem.n, size, equal=equal)
    if size == 1 or size == problem.n:
        return torch.arange(problem.n, device=problem.diag.device) % size
    if isinstance(problem, LowRankProblem):  # strata need fewer columns than the choice within them
        leading = LowRankFeatures(problem.features, problem.residual).leading(default_rank(size))
        problem = LowRankProblem(leading.features, leading.residual)
    return solve(problem, size, limits=limits, generator=generator).labels


def _representatives(
    problem: Problem, labels: Tensor, size: int, *, weighted: bool, tell: Progress
) -> tuple[Tensor, Tensor]:
    """Rows (m,) and weights (m,): the best of each stratum together, then of all rows if that is cheap."""
    counts = torch.bincount(labels, minlength=size).double()
    weights = counts / problem.n if weighted else torch.full_like(counts, 1.0 / size)
    order = labels.argsort(stable=True)
    members = list(order.split(counts.long().tolist()))  # type: ignore[no-untyped-call]
    search = _Search(problem, torch.stack([_middle(problem, rows) for rows in members]), weights)
    _sweep(search, members, free=False, tell=lambda fraction: tell(0.4 + 0.2 * fraction, "representatives"))
    columns = problem.features.shape[1] if isinstance(problem, LowRankProblem) else problem.n
    if columns < _COLUMNS_EACH * size:  # freer choices would make the most of what the features do not show
        return search.chosen, search.weights
    cheap = float(size) * problem.n * min(columns, size) <= _ALL_ROWS
    if weighted:
        search.optimise_weights()
    if weighted or cheap:
        candidates = [order] * size if cheap else members
        _sweep(search, candidates, free=weighted, tell=lambda fraction: tell(0.6 + 0.3 * fraction, "exchanges"))
    return search.chosen, search.weights


def _middle(problem: Problem, rows: Tensor) -> Tensor:
    """The one of ``rows`` (q,) that is nearest to their mean."""
    if isinstance(problem, LowRankProblem):
        features = problem.features[rows]
        inner = features @ features.mean(0) + problem.residual[rows] / len(rows)
    else:
        inner = problem.block(rows).mean(0)
    return rows[(problem.diag[rows] - 2.0 * inner).argmin()]


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
    """Representatives of a centred problem, with their kernel matrix K; the error is wᵀKw."""

    def __init__(self, problem: Problem, chosen: Tensor, weights: Tensor) -> None:
        self.problem, self.chosen = problem, chosen
        self.matrix = problem.block(chosen).double()
        self.set_weights(weights)

    def set_weights(self, weights: Tensor) -> None:
        """Take them, and what exchanges need of them: Kw, the error, and the weighted sum of all that are chosen."""
        self.weights = weights
        self.product = self.matrix @ weights
        self.error = float(weights @ self.product)
        if isinstance(self.problem, LowRankProblem):
            self.total = weights.to(self.problem.features) @ self.problem.features[self.chosen]  # of their features
        else:
            self.total = self.problem.columns(self.chosen).double() @ weights  # of their kernel values with each row

    def optimise_weights(self) -> None:
        self.set_weights(simplex_minimum(self.matrix, torch.zeros_like(self.weights), self.weights))

    def exchange(self, place: int, rows: Tensor, *, free: bool) -> None:
        """Put the best of ``rows`` (q,) at ``place``, if it is better; with ``free``, at its best weight.

        With e the mean embedding of the others, the error is |(1 - a) e + a φ_i|², a parabola in the weight a.
        """
        own, diagonal = float(self.weights[place]), self.problem.diag[rows].double()
        if own >= 1.0 and len(self.weights) > 1:
            return  # the others have no weight
        others, inner = 0.0, torch.zeros_like(diagonal)
        if own < 1.0:
            left = self.error - 2.0 * own * float(self.product[place]) + own * own * float(self.matrix[place, place])
            others = max(0.0, left) / (1.0 - own) ** 2
            inner = self._inner_others(place, rows, own) / (1.0 - own)
        share = torch.full_like(diagonal, own)
        if free and own < 1.0:
            share = ((others - inner) / (others - 2.0 * inner + diagonal).clamp_min(1e-300)).clamp(0.0, 1.0)
        errors = (1.0 - share).square() * others + 2.0 * share * (1.0 - share) * inner + share.square() * diagonal
        errors.masked_fill_(torch.isin(rows, self.chosen), torch.inf)
        best = int(errors.argmin())
        if not float(errors[best]) < (1.0 - 1e-9) * self.error:
            return
        self.chosen = self.chosen.clone()
        self.chosen[place] = rows[best]
        self.matrix[place] = self.matrix[:, place] = self._values(rows[best])
        weights = self.weights * (1.0 - share[best]) / (1.0 - own) if own < 1.0 else self.weights.clone()
        weights[place] = share[best]
        self.set_weights(weights)

    def _values(self, row: Tensor) -> Tensor:
        """K of one of the chosen with all of them: (m,)."""
        if not isinstance(self.problem, LowRankProblem):
            return self.problem.columns(row[None])[self.chosen, 0].double()
        features = self.problem.features
        return torch.where(self.chosen == row, self.problem.diag[row], features[self.chosen] @ features[row]).double()

    def _inner_others(self, place: int, rows: Tensor, own: float) -> Tensor:
        """Σ w_h K_ih over all chosen but the one at ``place``, for each row i that is not chosen: (q,)."""
        out = self.chosen[place]
        if not isinstance(self.problem, LowRankProblem):
            return (self.total - own * self.problem.columns(out[None])[:, 0].double())[rows]
        features = self.problem.features
        total = self.total - own * features[out]
        if len(rows) == self.problem.n:  # all of them: no copy
            return (features @ total)[rows].double()
        return (features[rows] @ total).double()


def _means_to_all(kernel: Kernel, points: Tensor, x: Tensor) -> Tensor:
    """Mean κ of each of ``points`` (m, d) to all rows of ``x``, in double precision: (m,)."""
    sums = torch.zeros(len(points), dtype=torch.float64, device=x.device)
    for rows in row_blocks(len(x), _STREAM_ROWS):
        sums += kernel.matrix(x[rows], points).sum(0, dtype=torch.float64)
    return sums / len(x)


def simplex_minimum(matrix: Tensor, linear: Tensor, start: Tensor) -> Tensor:
    """The w >= 0 with sum 1 that minimises wᵀKw - 2 wᵀb, by an active set, from ``start`` which is such a w.

    For more than 500 rows the search may end early, never worse than it began.

    Parameters
    ----------
    matrix : Tensor of shape (m, m)
        K, positive semi-definite, in double precision.
    linear : Tensor of shape (m,)
        b.
    start : Tensor of shape (m,)
        Where to begin.

    Examples
    --------
    >>> simplex_minimum(torch.eye(2).double(), torch.zeros(2).double(), torch.tensor([1.0, 0.0]).double())
    tensor([0.5000, 0.5000], dtype=torch.float64)
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
