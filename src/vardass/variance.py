"""Variance of the minibatch mean embedding, exactly and estimated.

A batch estimates the mean embedding μ = (1/n) Σ φ(z_i) of its domain by μ̂, a weighted sum of φ over the
drawn rows. Its variance E|μ̂ - μ|² in the RKHS (section 2.2) is known for independent draws: it costs kernel
evaluations and no simulation. Sums are accumulated in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel, KernelLike, fitted_kernel
from vardass.validate import ArrayLike, as_features, as_generator, as_labels, as_tensor, check_count, row_blocks
from vardass.view import KernelView, View

__all__ = [
    "MeasuredStrata",
    "measure_strata",
    "stratified_variance",
    "uniform_variance",
]

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

    Examples
    --------
    >>> uniform_variance(torch.tensor([0.0, 1.0]), 1, kernel="linear")
    0.25
    """
    x = as_features(features)
    name = "k", "rows"
    return _variance(x, kernel, x.new_zeros(len(x), dtype=torch.long), k, replacement, name)


def stratified_variance(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    kernel: KernelLike,
    draws_per_stratum: int = 1,
    replacement: bool = True,
) -> float:
    """Variance of the stratified μ̂ = Σ_h w_h (mean of φ over the draws from S_h), w_h = |S_h|/n.

    With one draw from each stratum this is the paper's Σ_h |S_h| Σ_{z in S_h} |φ(z) - μ_h|² / n²
    (section 2.2). It takes Σ_h |S_h|² kernel evaluations, and at most 256 more for each row, since small
    strata are evaluated together.

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

    Examples
    --------
    >>> stratified_variance(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0, 0, 1]), kernel="linear")
    0.1111111111111111
    """
    x = as_features(features)
    name = "draws_per_stratum", "rows in the smallest stratum"
    return _variance(x, kernel, as_labels(labels, len(x)).to(x.device), draws_per_stratum, replacement, name)


@torch.no_grad()
def _variance(
    x: Tensor, kernel: KernelLike, given: Tensor, draws: Any, replacement: bool, name: tuple[str, str]
) -> float:
    """Σ_h c_h Σ_{i in h} |φ_i - μ_h|² for ``draws``, called ``name``, from each of the strata ``given`` (n,)."""
    fitted = fitted_kernel(kernel, x)
    _, labels, sizes = torch.unique(given, return_inverse=True, return_counts=True)
    smallest = int(sizes.min())
    draws = check_count(
        draws,
        name[0],
        high=None if replacement else smallest,
        remedy=f"there are {smallest} {name[1]}; draw at least one, and no more without replacement",
    )
    m = sizes.double()
    scale = m / (len(x) ** 2 * draws)  # w_h² / (m_h draws)
    if not replacement:
        scale *= (m - draws) / (m - 1).clamp_min(1)
    return max(0.0, float((scale * KernelView(x, fitted).scatter(labels, sizes)).sum()))


def _stratum_means(x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    sums = torch.zeros(len(sizes), x.shape[1], dtype=torch.float64, device=x.device)
    for block in row_blocks(len(x), _BLOCK_NUMBERS // x.shape[1]):
        sums.index_add_(0, labels[block], x[block].double())
    return sums / sizes[:, None]


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
    """Var(μ̂) of one draw from each of k strata and of k uniform draws, under the kernel itself.

    ``seen`` is the view that the strata were made on, ``objective`` J of it, where it is known.
    """
    squared, everything = len(labels) ** 2, torch.zeros_like(labels)
    total, total_error = seen.true_objective(everything, 1, truth, generator)
    inside, error = seen.true_objective(labels, k, truth, generator, objective)
    return BatchVariances(inside / squared, error / squared, total / (k * squared), total_error / (k * squared))


def uniform_evaluation(
    x: Tensor, k: int, *, kernel: Kernel, generator: torch.Generator, probabilities: Tensor | None = None
) -> tuple[float, float]:
    """Variance of k independent draws from the rows of ``x`` (n, d), and its standard error.

    Uniform draws, or with ``probabilities`` p (n,) that sum to 1: (Σ_i p_i κ_ii - Σ_ij p_i p_j κ_ij) / k.
    """
    n, view = len(x), KernelView(x, kernel)
    if probabilities is None:
        total, error = view.true_objective(torch.zeros(n, dtype=torch.int64, device=x.device), 1, view, generator)
        return total / (k * n**2), error / (k * n**2)
    p = probabilities.double()
    if view.is_small:
        spread = float(p @ view.diag.double() - p @ view.multiply(p[:, None])[:, 0])
        return max(0.0, spread) / k, 0.0
    i, j = torch.multinomial(p, 2 * _PAIRS, replacement=True, generator=generator).view(2, -1)
    half = 0.5 * view.pair_distances(i, j).double()
    return float(half.mean()) / k, float(half.std()) / (k * _PAIRS**0.5)


class MeasuredStrata(NamedTuple):
    """Spread of the features within strata.

    Attributes
    ----------
    within : float
        Mean variance within strata, Σ_h w_h σ_h² with w_h = |S_h|/n and σ_h² = mean |φ - μ_h|² over S_h: the
        scale for `DriftRefresh`.
    variance : float
        Var(μ̂) = Σ_h w_h² σ_h² of one draw from each stratum (section 2.2).
    """

    within: float
    variance: float


@torch.no_grad()
def measure_strata(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    kernel: KernelLike | None = None,
    weights: ArrayLike | None = None,
    seed: int | torch.Generator = 0,
) -> MeasuredStrata:
    """Measure given strata on given features, cheaply enough to be done between refreshes.

    Parameters
    ----------
    features : array of shape (n, d)
        Current features of one domain.
    labels : integer array of shape (n,)
        The stratum of each row; rows with -1 are in none and are left out.
    kernel : Kernel, str, callable or None
        None measures the features themselves, exactly. With a kernel each row is compared with one random
        other member of its stratum: an unbiased estimate from n kernel evaluations, where
        `stratified_variance` sums all pairs. The kernel is fitted to the features unless it is fitted.
    weights : array of shape (k,), optional
        w_h of stratum h, where it is not |S_h|/n; labels are then 0 to k - 1.
    seed : int or torch.Generator
        For the random partners; the same seed pairs the same rows, so two estimates compare well.

    Examples
    --------
    >>> measure_strata(torch.tensor([0.0, 2.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]))
    MeasuredStrata(within=0.5, variance=0.25)
    """
    x = as_features(features)
    given = as_labels(labels, len(x)).to(x.device)
    if bool((given < 0).any()):
        x, given = x[given >= 0], given[given >= 0]
    n = len(x)
    _, label, sizes = torch.unique(given, return_inverse=True, return_counts=True)
    if kernel is None:
        means = _stratum_means(x, label, sizes)
        blocks = row_blocks(n, _BLOCK_NUMBERS // x.shape[1])
        squared = torch.cat([(x[rows].double() - means[label[rows]]).square().sum(1) for rows in blocks])
    else:
        view = KernelView(x, fitted_kernel(kernel, x))
        squared = _half_distances_to_partners(view, label, sizes, as_generator(seed, x.device))
    if weights is None:
        return MeasuredStrata(within=float(squared.sum()) / n, variance=float((squared * sizes[label]).sum()) / n**2)
    w = as_tensor(weights, "weights").to(squared)
    if len(w) != len(sizes):
        raise InputError(f"weights are one for each stratum, got {len(w)} for {len(sizes)} strata")
    each = squared / sizes[label]  # sums to σ_h² over a stratum
    return MeasuredStrata(within=float((w[label] * each).sum()), variance=float((w[label].square() * each).sum()))


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
