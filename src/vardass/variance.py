"""Variance of the minibatch mean embedding, exactly, and of any other statistic by simulation.

A batch estimates the mean embedding μ = (1/n) Σ φ(z_i) of its domain by μ̂, a weighted sum of φ over the
drawn rows. Its variance E|μ̂ - μ|² in the RKHS (section 2.2) is known exactly for independent draws: each
function here but the last costs kernel evaluations and no simulation. Sums are accumulated in double precision; the
kernel itself is evaluated in the precision of the features. `monte_carlo_variance` simulates what has no formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import DEFAULT_BLOCK_BYTES, Kernel, KernelLike, fitted_kernel
from vardass.validate import ArrayLike, as_features, as_generator, as_labels, as_weights, check_count, row_blocks

__all__ = [
    "MonteCarlo",
    "debias",
    "effective_sample_size",
    "mean_embedding_covariance",
    "monte_carlo_variance",
    "stratified_variance",
    "uniform_variance",
    "v_statistic_bias",
    "weighted_variance",
]

_PACK_ROWS = 256
"""Small strata are evaluated together, up to this many rows: a stratum of two rows is not worth a call."""

Number = TypeVar("Number", float, Tensor)


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
    x, fitted = _prepare(features, kernel)
    return _variance(x, fitted, _design(x, None, k, replacement))


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
    x, fitted = _prepare(features, kernel)
    return _variance(x, fitted, _design(x, labels, draws_per_stratum, replacement))


def weighted_variance(features: ArrayLike, weights: ArrayLike, *, kernel: KernelLike, k: int) -> float:
    """Variance of the importance estimator μ̂ = Σ φ(z_i) / (n k p_i) over ``k`` draws with replacement.

    Row i is drawn with probability p_i, so μ̂ is unbiased and its variance is
    (Σ κ(z_i, z_i)/p_i - Σ κ(z_i, z_j)) / (n² k).

    Parameters
    ----------
    features : array of shape (n, d)
        All rows of one domain.
    weights : array of shape (n,)
        The probabilities p_i, all positive; rounding in their sum is divided out.
    kernel : Kernel, str or callable
        Fitted to the features unless it is fitted.
    k : int
        Batch size.

    Examples
    --------
    >>> z = torch.tensor([[0.0], [1.0], [5.0]])
    >>> equal = weighted_variance(z, [1 / 3] * 3, kernel="linear", k=4)
    >>> abs(equal - uniform_variance(z, 4, kernel="linear")) < 1e-6
    True
    """
    x, fitted = _prepare(features, kernel)
    n, whole = len(x), _design(x, None, k, True)
    p = as_weights(weights, n, torch.empty(0, dtype=torch.float64, device=x.device))
    if p is None or not bool((p > 0).all()):
        zeros = "None" if p is None else f"{int((~(p > 0)).sum())} of {n} that are not"
        raise InputError(
            f"weights must be {n} positive probabilities, got {zeros}; a row that is never drawn makes the "
            "estimate biased: drop it from the features or give it a positive weight"
        )
    p = p / p.sum()
    with torch.no_grad():
        # Σ κ_ij = n (Σ κ_ii - scatter): written so that nothing cancels for nearly uniform weights
        excess = (fitted.diag(x).double() * (1.0 / p - n)).sum() + n * _scatter(x, fitted, whole).sum()
    return max(0.0, float(excess) / (n * n * k))


def effective_sample_size(weights: ArrayLike) -> float:
    """Kish's (Σ w)² / Σ w²: the number of equally weighted draws of the same noise as draws weighted so.

    Parameters
    ----------
    weights : array of shape (k,)
        Not negative, of any scale.

    Examples
    --------
    >>> effective_sample_size(torch.tensor([0.5, 0.5, 0.0]))
    2.0
    """
    w = as_features(weights, "weights")
    if w.shape[1] != 1:
        raise InputError(f"weights must have shape (k,), got {tuple(w.shape)}; pass one batch at a time")
    if bool((w < 0).any()) or not bool((w > 0).any()):
        raise InputError(
            f"weights must be at least 0 and not all 0, got values between {float(w.min()):.6g} and "
            f"{float(w.max()):.6g}; use stratum size / n"
        )
    w = w.double() / w.max().double()  # the ratio has no scale, and squares of tiny weights would underflow
    return float(w.sum().square() / w.square().sum())


def v_statistic_bias(variance_x: float, variance_y: float) -> float:
    """E|μ̂_x - μ̂_y|² - MMD² = Var(μ̂_x) + Var(μ̂_y), for independent unbiased μ̂_x and μ̂_y.

    The plain batch estimate of MMD² (eq. 3) is thus too large on average, and stratification lowers this
    bias by as much as the variance of the mean embeddings.

    Examples
    --------
    >>> v_statistic_bias(0.5, 0.25)
    0.75
    """
    for name, value in (("variance_x", variance_x), ("variance_y", variance_y)):
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name} must be finite and not negative, got {value}; use stratified_variance")
    return float(variance_x) + float(variance_y)


def debias(mmd2_value: Number, variance_x: float, variance_y: float) -> Number:
    """Subtract the bias of the batch estimate of MMD² from it, given the variances of both μ̂.

    A constant is subtracted: the value becomes unbiased (and can be negative), its gradient stays the same.
    The variances must be those of the current features and of the same kernel.

    Examples
    --------
    >>> debias(1.0, 0.5, 0.25)
    0.25
    """
    return mmd2_value - v_statistic_bias(variance_x, variance_y)


def mean_embedding_covariance(
    phi: ArrayLike,
    *,
    k: int | None = None,
    labels: ArrayLike | None = None,
    draws_per_stratum: int = 1,
    replacement: bool = True,
) -> Tensor:
    """Covariance Σ of μ̂ (r, r) from explicit or low-rank features, as Lemma 1 needs it.

    Its trace is the variance of μ̂ under the kernel <φ, φ'>.

    Parameters
    ----------
    phi : array of shape (n, r)
        Feature map of all rows of one domain.
    k : int, optional
        Batch size of uniform draws. Give either ``k`` or ``labels``.
    labels : integer array of shape (n,), optional
        Strata, for ``draws_per_stratum`` from each.
    draws_per_stratum : int
        Only with ``labels``.
    replacement : bool
        As for `uniform_variance` and `stratified_variance`.

    Examples
    --------
    >>> z = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 6.0], [2.0, 6.0]])
    >>> mean_embedding_covariance(z, labels=[0, 0, 1, 1])  # strata leave the first column only
    tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]])
    """
    x = as_features(phi, "phi")
    if (k is None) == (labels is None):
        raise InputError(f"give either k or labels, got k={k} and labels {'un' if labels is None else ''}set")
    design = _design(x, labels, draws_per_stratum if k is None else k, replacement)
    labels_of_rows, r = design.labels, x.shape[1]
    sums = torch.zeros(len(design.sizes), r, dtype=torch.float64, device=x.device)
    blocks = list(row_blocks(len(x), DEFAULT_BLOCK_BYTES // (4 * r * sums.element_size())))
    for block in blocks:
        sums.index_add_(0, labels_of_rows[block], x[block].double())
    means = sums / design.sizes[:, None]
    covariance = torch.zeros(r, r, dtype=torch.float64, device=x.device)
    for block in blocks:
        centred = x[block].double() - means[labels_of_rows[block]]
        covariance += (centred * design.scale[labels_of_rows[block], None]).T @ centred
    return covariance.to(x.dtype)


@dataclass(frozen=True)
class MonteCarlo:
    """What repeated draws say of a statistic.

    Attributes
    ----------
    mean : Tensor
        Mean of the statistic, of its own shape, in double precision.
    variance : float
        Unbiased estimate of E|statistic - its mean|²: for a vector the trace of its covariance.
    stderr_of_variance : float
        Standard error of ``variance``.
    repeats : int
        Number of draws.

    Examples
    --------
    >>> def coin(generator):
    ...     return torch.randint(2, (1,), generator=generator), None
    >>> found = monte_carlo_variance(coin, lambda side, weights: side.double(), repeats=4000)
    >>> abs(found.variance - 0.25) < 5 * found.stderr_of_variance, found.repeats
    (True, 4000)
    """

    mean: Tensor
    variance: float
    stderr_of_variance: float
    repeats: int

    @property
    def stderr_of_mean(self) -> float:
        """Root mean square distance of ``mean`` from the true expectation."""
        return math.sqrt(self.variance / self.repeats)

    def bias(self, truth: Tensor) -> float:
        """Distance of ``mean`` from ``truth``; to be compared with ``stderr_of_mean``."""
        return float((self.mean - truth.to(self.mean)).norm())


def monte_carlo_variance(
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor | None]],
    statistic: Callable[[Tensor, Tensor | None], Tensor],
    *,
    repeats: int,
    seed: int | torch.Generator | None = 0,
) -> MonteCarlo:
    """Simulate the variance of any statistic of a batch from any sampler.

    Parameters
    ----------
    draw : callable
        ``draw(generator) -> (indices, weights or None)``, one batch; all its randomness must come from the
        generator.
    statistic : callable
        ``statistic(indices, weights) -> Tensor`` of any shape, the same each time. All ``repeats`` values
        are held in memory.
    repeats : int
        Number of batches, at least 2.
    seed : int or torch.Generator
        The same seed gives the same result.

    Examples
    --------
    >>> z = torch.tensor([0.0, 1.0, 2.0, 3.0])
    >>> def draw(generator):
    ...     return torch.randint(4, (5,), generator=generator), None
    >>> found = monte_carlo_variance(draw, lambda rows, weights: z[rows].mean(), repeats=4000)
    >>> abs(found.variance - 1.25 / 5) < 5 * found.stderr_of_variance
    True
    """
    repeats = check_count(repeats, "repeats", low=2, remedy="a variance needs two values")
    generator = seed if isinstance(seed, torch.Generator) else as_generator(seed)
    values: list[Tensor] = []
    with torch.no_grad():
        for _ in range(repeats):
            batch = draw(generator)
            if not isinstance(batch, tuple) or len(batch) != 2:
                raise InputError(
                    f"draw must return (indices, weights or None), got {type(batch).__name__}; return a pair"
                )
            value = statistic(*batch)
            if not isinstance(value, Tensor) or (values and value.shape != values[0].shape):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                first = f" of shape {tuple(values[0].shape)}, as at first" if values else ""
                raise InputError(f"statistic must return a tensor{first}, got {got}")
            values.append(value.detach().double())
    stacked = torch.stack(values).reshape(repeats, -1)
    if not bool(torch.isfinite(stacked).all()):
        bad = int((~torch.isfinite(stacked)).any(1).sum())
        raise InputError(f"statistic was NaN or infinite for {bad} of {repeats} batches; fix it first")
    mean = stacked.mean(0)
    squared = (stacked - mean).square().sum(1)
    # the trace of the sample covariance is, but for O(1/repeats), the mean of these squared distances
    return MonteCarlo(
        mean=mean.reshape(values[0].shape),
        variance=float(squared.sum()) / (repeats - 1),
        stderr_of_variance=float(squared.std()) / math.sqrt(repeats),
        repeats=repeats,
    )


class _Design(NamedTuple):
    """How a batch is drawn: strata 0..k-1, none empty, and what each one's scatter counts for."""

    labels: Tensor  # (n,)
    sizes: Tensor  # (k,)
    scale: Tensor  # (k,) c_h with Var(μ̂) = Σ_h c_h Σ_{i in h} |φ_i - μ_h|²


def _prepare(features: ArrayLike, kernel: KernelLike) -> tuple[Tensor, Kernel]:
    x = as_features(features)
    return x, fitted_kernel(kernel, x)


def _design(x: Tensor, labels: ArrayLike | None, draws: Any, replacement: bool) -> _Design:
    """Check the arguments; uniform draws (``labels`` None) are draws from one stratum that holds all rows."""
    n = len(x)
    if labels is None:
        compact, sizes = x.new_zeros(n, dtype=torch.long), torch.tensor([n], device=x.device)
    else:
        _, compact, sizes = torch.unique(
            as_labels(labels, len(x)).to(x.device), return_inverse=True, return_counts=True
        )
    name, rows = ("k", "rows") if labels is None else ("draws_per_stratum", "rows in the smallest stratum")
    smallest = int(sizes.min())
    high = None if replacement else smallest
    draws = check_count(
        draws,
        name,
        high=high,
        remedy=f"there are {smallest} {rows}; draw at least one, and no more without replacement",
    )
    m = sizes.double()
    scale = m / (n * n * draws)  # w_h² / (m_h draws)
    return _Design(compact, sizes, scale if replacement else scale * (m - draws) / (m - 1).clamp_min(1))


def _variance(x: Tensor, kernel: Kernel, design: _Design) -> float:
    with torch.no_grad():
        total = (design.scale * _scatter(x, kernel, design)).sum()
    return max(0.0, float(total))


def _scatter(x: Tensor, kernel: Kernel, design: _Design) -> Tensor:
    """Σ_{i in h} |φ_i - μ_h|² = Σ_i κ_ii - Σ_ij κ_ij / m_h within each stratum (k,)."""
    labels, sizes = design.labels, design.sizes
    by_stratum = torch.argsort(labels, stable=True)
    scatter = torch.zeros(len(sizes), dtype=torch.float64, device=x.device)
    for rows in _pack(sizes.tolist()):
        members = by_stratum[rows]
        label = labels[members]
        group = x[members]
        if len(members) > _PACK_ROWS:  # a single stratum
            for piece, values in kernel.blocks(group):
                scatter[label[0]] += _excess(values, values.diagonal(piece.start), len(members)).sum()
        else:
            values = kernel.matrix(group)
            values, diagonal = torch.where(label[:, None] == label, values, 0.0), values.diagonal()
            scatter.index_add_(0, label, _excess(values, diagonal, sizes[label]))
    return scatter


def _excess(values: Tensor, diagonal: Tensor, size: int | Tensor) -> Tensor:
    # the diagonal is that of the very block that is summed: a singleton's scatter is then exactly zero
    return diagonal.double() - values.sum(1, dtype=torch.float64) / size


def _pack(sizes: list[int]) -> Iterator[slice]:
    """Cut rows sorted by stratum into runs of whole strata, of ``_PACK_ROWS`` rows or of one stratum."""
    start = stop = 0
    for size in sizes:
        if stop > start and stop + size - start > _PACK_ROWS:
            yield slice(start, stop)
            start = stop
        stop += size
    yield slice(start, stop)
