"""How far apart samples are in kernel features: between two moments, and within strata."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel, as_kernel, fitted_kernel
from vardass.validate import ArrayLike, as_features, as_generator, as_labels, as_tensor, row_blocks

__all__ = ["StrataSpread", "strata_spread"]

_BLOCK_NUMBERS = 2**23  # numbers gathered at a time


class StrataSpread(NamedTuple):
    """Spread of the features within strata.

    Attributes
    ----------
    within : float
        Mean variance within strata, Σ_h w_h σ_h² with w_h = |S_h|/n and σ_h² = mean |φ - μ_h|² over S_h: the
        scale for `DriftRefresh`.
    variance : float
        Var(μ̂) = Σ_h w_h² σ_h² of one draw from each stratum (section 2.2): what `VarianceRefresh` watches.

    Examples
    --------
    >>> from vardass.refresh import strata_spread
    >>> z = torch.tensor([[0.0], [2.0], [10.0], [10.0]])
    >>> strata_spread(z, [0, 0, 1, 1], kernel="linear")
    StrataSpread(within=0.5, variance=0.25)
    """

    within: float
    variance: float


@torch.no_grad()
def strata_spread(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    kernel: Any = None,
    weights: ArrayLike | None = None,
    seed: int | torch.Generator = 0,
) -> StrataSpread:
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
        `vardass.variance.stratified_variance` sums all pairs. The kernel is fitted to the features if it
        has to be.
    weights : array of shape (k,), optional
        w_h of stratum h, where it is not |S_h|/n; labels are then 0 to k - 1.
    seed : int or torch.Generator
        For the random partners; the same seed pairs the same rows, so two estimates compare well.

    Examples
    --------
    >>> strata_spread(torch.tensor([0.0, 2.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]))
    StrataSpread(within=0.5, variance=0.25)
    """
    x = as_features(features)
    given = as_labels(labels, len(x)).to(x.device)
    if bool((given < 0).any()):
        x, given = x[given >= 0], given[given >= 0]
    n = len(x)
    _, label, sizes = torch.unique(given, return_inverse=True, return_counts=True)
    if kernel is None:
        squared = _distances_to_means(x, label, sizes)
    else:
        fitted = fitted_kernel(kernel, x)
        squared = _half_distances_to_partners(x, label, sizes, fitted, as_generator(seed, x.device))
    if weights is None:
        return StrataSpread(within=float(squared.sum()) / n, variance=float((squared * sizes[label]).sum()) / n**2)
    w = as_tensor(weights, "weights").to(squared)
    if len(w) != len(sizes):
        raise InputError(f"weights are one for each stratum, got {len(w)} for {len(sizes)} strata")
    each = squared / sizes[label]  # sums to σ_h² over a stratum
    return StrataSpread(within=float((w[label] * each).sum()), variance=float((w[label].square() * each).sum()))


def feature_distances(a: Tensor, b: Tensor, kernel: Kernel | None) -> Tensor:
    """|φ(a_i) - φ(b_i)|² for each pair of rows (m, d): (m,). Without a kernel φ is the identity."""
    if kernel is None:
        return (a - b).square().sum(1)
    return (kernel.diag(a) + kernel.diag(b) - 2.0 * kernel.paired(a, b)).clamp_min(0.0)


def known_kernel(kernel: Any) -> Kernel | None:
    """Return a kernel that can be evaluated, or None for None."""
    if kernel is None:
        return None
    known = as_kernel(kernel)
    if not known.is_fitted:
        raise InputError(f"{known!r} takes a parameter from the data; pass kernel.fit(bank.features())")
    return known


def _distances_to_means(x: Tensor, label: Tensor, sizes: Tensor) -> Tensor:
    sums = torch.zeros(len(sizes), x.shape[1], dtype=torch.float64, device=x.device)
    blocks = list(row_blocks(len(x), _BLOCK_NUMBERS // x.shape[1]))
    for rows in blocks:
        sums.index_add_(0, label[rows], x[rows].double())
    means = sums / sizes[:, None]
    return torch.cat([(x[rows].double() - means[label[rows]]).square().sum(1) for rows in blocks])


def _half_distances_to_partners(
    x: Tensor, label: Tensor, sizes: Tensor, kernel: Kernel, generator: torch.Generator
) -> Tensor:
    """½ d(i, j) (m - 1)/m for a random other member j of the stratum of i, which has expectation σ²."""
    n = len(x)
    order = label.argsort(stable=True)
    size = sizes[label[order]]
    start = (sizes.cumsum(0) - sizes)[label[order]]
    own = torch.arange(n, device=x.device) - start
    draw = torch.rand(n, dtype=torch.float64, generator=generator, device=x.device)
    other = (draw * (size - 1)).long().clamp_max_(size - 2).clamp_min_(0)
    other = torch.where(size > 1, other + (other >= own), own)
    partner = torch.empty_like(order)
    partner[order] = order[start + other]
    squared = [
        feature_distances(x[rows], x[partner[rows]], kernel).double()
        for rows in row_blocks(n, _BLOCK_NUMBERS // x.shape[1])
    ]
    m = sizes[label].double()
    return torch.cat(squared) * (0.5 * (m - 1) / m)
