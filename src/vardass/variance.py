"""Variance of the minibatch mean embedding, exactly and estimated.

A batch estimates the mean embedding μ = (1/n) Σ φ(z_i) of its domain by μ̂, a weighted sum of φ over the
drawn rows. Its variance E|μ̂ - μ|² in the RKHS (section 2.2) is known for independent draws: it costs kernel
evaluations and no simulation. Sums are accumulated in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel, KernelLike, fitted_kernel
from vardass.validate import ArrayLike, as_features, as_generator, as_labels, as_tensor, check_count, row_blocks
from vardass.view import ExactView, KernelView, View

__all__ = ["stratified_variance", "uniform_variance", "variance_within"]

_BLOCK_NUMBERS = 2**23  # numbers gathered at a time
_PAIRS = 20_000  # random pairs that estimate a mean over all


def uniform_variance(features: ArrayLike, k: int, *, kernel: KernelLike, replacement: bool = True) -> float:
    """Variance of μ̂ for a batch of ``k`` rows drawn uniformly: (mean κ(z, z) - mean κ(z, z')) / k.

    Parameters
    ----------
    features : array of shape (n, d)
        All rows of one domain.
    k : int
        Batch size.
    kernel : Kernel, str or callable
        Fitted to the features unless it is fitted.
    replacement : bool
        Without replacement the variance is (n - k)/(n - 1) times as large.
    """
    x = as_features(features)
    k = check_count(k, "k", high=None if replacement else len(x), remedy=f"there are {len(x)} rows")
    one = x.new_zeros(len(x), dtype=torch.long)
    return stratified_variance(x, one, kernel=kernel, draws_per_stratum=k, replacement=replacement)


@torch.no_grad()
def stratified_variance(
    features: ArrayLike, labels: ArrayLike, *, kernel: KernelLike, draws_per_stratum: int = 1, replacement: bool = True
) -> float:
    """Variance of the stratified μ̂ = Σ_h w_h (mean of φ over the draws from S_h), w_h = |S_h|/n.

    With one draw from each stratum this is the paper's Σ_h |S_h| Σ_{z in S_h} |φ(z) - μ_h|² / n² (section 2.2). It
    takes Σ_h |S_h|² kernel evaluations, and at most 256 more for each row.

    Parameters
    ----------
    features : array of shape (n, d)
        All rows of one domain.
    labels : integer array of shape (n,)
        The stratum of each row; equal numbers mean the same stratum.
    kernel : Kernel, str or callable
        Fitted to the features unless it is fitted.
    draws_per_stratum : int
        Rows drawn from each stratum, independently between strata.
    replacement : bool
        Whether a row can be drawn twice from its stratum for one batch.
    """
    x = as_features(features)
    fitted = fitted_kernel(kernel, x)
    _, strata, sizes = torch.unique(as_labels(labels, len(x)).to(x.device), return_inverse=True, return_counts=True)
    smallest = int(sizes.min())
    remedy = f"there are {smallest} rows in the smallest stratum; draw at least one, and no more without replacement"
    high = None if replacement else smallest
    draws = check_count(draws_per_stratum, "draws_per_stratum", high=high, remedy=remedy)
    m = sizes.double()
    scale = m / (len(x) ** 2 * draws)  # w_h² / (m_h draws)
    if not replacement:
        scale *= (m - draws) / (m - 1).clamp_min(1)
    return max(0.0, float((scale * KernelView(x, fitted).scatter(strata, sizes)).sum()))


# --- estimates, where all pairs would be too many


@dataclass(frozen=True)
class BatchVariances:
    """Variances of stratified and of uniform draws with their standard errors; 0 means exact."""

    variance: float
    variance_stderr: float
    uniform_variance: float
    uniform_stderr: float


def judge_strata(
    seen: View, truth: KernelView, labels: Tensor, k: int, generator: torch.Generator, objective: float | None = None
) -> BatchVariances:
    """Var(μ̂) of one draw from each of k strata and of k uniform draws; arguments as for `true_objective`."""
    squared = len(labels) ** 2
    total, total_error = true_objective(seen, truth, torch.zeros_like(labels), 1, generator)
    inside, error = true_objective(seen, truth, labels, k, generator, objective)
    return BatchVariances(inside / squared, error / squared, total / (k * squared), total_error / (k * squared))


def true_objective(
    seen: View, truth: KernelView, labels: Tensor, k: int, generator: torch.Generator, known: float | None = None
) -> tuple[float, float]:
    """J under the kernel itself and its standard error; ``known`` is J of the view ``seen``, where it is known.

    From all pairs where they are few, else that of ``seen``, corrected by what it misses on random pairs.
    """
    if not isinstance(seen, ExactView) and truth.is_small:
        return truth.objective(labels, k), 0.0
    if seen is truth:
        known = 0.0
    elif known is None:
        known = seen.whole if k == 1 else seen.objective(labels, k)
    if isinstance(seen, ExactView):
        return known, 0.0
    sizes = torch.bincount(labels, minlength=k).double()
    pairs = float((sizes * (sizes - 1)).sum()) / 2
    correction, error = truth.mean_correction(None if seen is truth else seen, labels, k, generator)
    return max(0.0, known + pairs * correction), pairs * error


def uniform_evaluation(
    x: Tensor, k: int, *, kernel: Kernel, generator: torch.Generator, probabilities: Tensor | None = None
) -> tuple[float, float]:
    """Variance of k independent draws from the rows of ``x`` (n, d), and its standard error.

    Uniform draws, or with ``probabilities`` p (n,) that sum to 1: (Σ_i p_i κ_ii - Σ_ij p_i p_j κ_ij) / k.
    """
    n, view = len(x), KernelView(x, kernel)
    if probabilities is None:
        everything = torch.zeros(n, dtype=torch.int64, device=x.device)
        total, error = true_objective(view, view, everything, 1, generator)
        return total / (k * n**2), error / (k * n**2)
    p = probabilities.double()
    if view.is_small:
        spread = float(p @ view.diag.double() - p @ view.multiply(p[:, None])[:, 0])
        return max(0.0, spread) / k, 0.0
    i, j = torch.multinomial(p, 2 * _PAIRS, replacement=True, generator=generator).view(2, -1)
    half = 0.5 * view.pair_distances(i, j).double()
    return float(half.mean()) / k, float(half.std()) / (k * _PAIRS**0.5)


@torch.no_grad()
def variance_within(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    kernel: KernelLike | None = None,
    weights: ArrayLike | None = None,
    seed: int | torch.Generator = 0,
) -> float:
    """Mean variance within strata, Σ_h w_h σ_h² with σ_h² = mean |φ - μ_h|² over S_h: the scale for `DriftRefresh`.

    Parameters
    ----------
    features : array of shape (n, d)
        Current features of one domain.
    labels : integer array of shape (n,)
        The stratum of each row; rows with -1 are in none and are left out.
    kernel : Kernel, str, callable or None
        None measures the features themselves, exactly. With a kernel, fitted to the features unless it is fitted, each
        row is compared with one random other member of its stratum: an unbiased estimate from n kernel evaluations.
    weights : array of shape (k,), optional
        w_h of stratum h, where it is not |S_h|/n; labels are then 0 to k - 1.
    seed : int or torch.Generator
        For the random partners; the same seed pairs the same rows, so two estimates compare well.
    """
    x = as_features(features)
    given = as_labels(labels, len(x)).to(x.device)
    if bool((given < 0).any()):
        x, given = x[given >= 0], given[given >= 0]
    n = len(x)
    _, label, sizes = torch.unique(given, return_inverse=True, return_counts=True)
    if kernel is None:
        blocks = list(row_blocks(n, _BLOCK_NUMBERS // x.shape[1]))
        sums = torch.zeros(len(sizes), x.shape[1], dtype=torch.float64, device=x.device)
        for rows in blocks:
            sums.index_add_(0, label[rows], x[rows].double())
        means = sums / sizes[:, None]
        squared = torch.cat([(x[rows].double() - means[label[rows]]).square().sum(1) for rows in blocks])
    else:
        view = KernelView(x, fitted_kernel(kernel, x))
        squared = _half_distances_to_partners(view, label, sizes, as_generator(seed, x.device))
    if weights is None:
        return float(squared.sum()) / n
    w = as_tensor(weights, "weights").to(squared)
    if len(w) != len(sizes):
        raise InputError(f"weights are one for each stratum, got {len(w)} for {len(sizes)} strata")
    return float((w[label] * (squared / sizes[label])).sum())


def _half_distances_to_partners(view: KernelView, label: Tensor, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """½ d(i, j) (m - 1)/m for a random other member j of the stratum of i, which has expectation σ²."""
    n, device = view.n, label.device
    order = label.argsort(stable=True)
    size = sizes[label[order]]
    start = (sizes.cumsum(0) - sizes)[label[order]]
    own = torch.arange(n, device=device) - start
    draw = torch.rand(n, dtype=torch.float64, generator=generator, device=device)
    other = (draw * (size - 1)).long().clamp_max_(size - 2).clamp_min_(0)
    other = torch.where(size > 1, other + (other >= own), own)
    partner = torch.empty_like(order)
    partner[order] = order[start + other]
    rows = torch.arange(n, device=device)
    blocks = row_blocks(n, _BLOCK_NUMBERS // view.x.shape[1])
    squared = torch.cat([view.pair_distances(rows[block], partner[block]).double() for block in blocks])
    m = sizes[label].double()
    return squared.clamp_min_(0.0) * (0.5 * (m - 1) / m)
