"""Variance of the minibatch mean embedding, exactly and estimated.

A batch estimates the mean embedding μ = (1/n) Σ φ(z_i) of its domain by μ̂, a weighted sum of φ over the
drawn rows. Its variance E|μ̂ - μ|² in the RKHS (section 2.2) is known for independent draws: it costs kernel
evaluations and no simulation. Sums are accumulated in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.kernels import Kernel, KernelLike, fitted_kernel
from vardass.validate import ArrayLike, as_features, as_labels, check_count
from vardass.view import ExactView, KernelView, View

__all__ = ["stratified_variance", "uniform_variance"]

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
        Without replacement the variance is (n - k)/(n - 1) times that with replacement.
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
    if view.is_small:  # no pair is looked at twice
        p = torch.full_like(x[:, 0], 1.0 / n, dtype=torch.float64) if probabilities is None else probabilities.double()
        spread = float(p @ view.diag.double() - p @ (kernel.square_matrix(x).double() @ p))
        return max(0.0, spread) / k, 0.0
    if probabilities is None:
        everything = torch.zeros(n, dtype=torch.int64, device=x.device)
        total, error = true_objective(view, view, everything, 1, generator)
        return total / (k * n**2), error / (k * n**2)
    p = probabilities.double()
    i, j = torch.multinomial(p, 2 * _PAIRS, replacement=True, generator=generator).view(2, -1)
    half = 0.5 * view.pair_distances(i, j).double()
    return float(half.mean()) / k, float(half.std()) / (k * _PAIRS**0.5)
