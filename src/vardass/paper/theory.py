"""The paper's Lemma 1 and Theorems 1 to 4 as functions, and the rank correlation its figures report.

Everything is evaluated in closed form. Where the printed formula does not follow from its proof, the proof
is implemented and the docstring says what differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.validate import ArrayLike, as_features, as_tensor, check_count

__all__ = [
    "Theorem4",
    "lemma1_variance",
    "log_expected_error",
    "log_stirling2",
    "log_worst_case_error",
    "spearman",
    "theorem1_variance",
    "theorem4",
]


def lemma1_variance(mean_difference: ArrayLike, cov_s: ArrayLike, cov_t: ArrayLike) -> Tensor:
    """Var(L̂_MMD) = 2 Tr((Σ_s + Σ_t)²) + 4 mᵀ(Σ_s + Σ_t) m for Gaussian mean embeddings (Lemma 1, eq. 4).

    Parameters
    ----------
    mean_difference : Tensor of shape (..., r)
        m = μ_s - μ_t.
    cov_s, cov_t : Tensor of shape (..., r, r)
        Covariances of the two batch mean embeddings. Leading dimensions broadcast.

    Returns
    -------
    Tensor of shape (...)
    """
    m = _as_mean(mean_difference)
    total = _as_covariance(cov_s, "cov_s", m) + _as_covariance(cov_t, "cov_t", m)
    return 2.0 * total.square().sum((-2, -1)) + 4.0 * _quadratic(m, total)


def theorem1_variance(variance_mu: float | Tensor, m: ArrayLike, cov_t: ArrayLike) -> Tensor:
    """Var(L̂_MMD) as a function of v = Var(μ̂_s) when Σ_s = (v/d) I (proof of Theorem 1).

    It is (2/d) v² + (4/d) v (mᵀm + Tr Σ_t) + 2 Tr(Σ_t²) + 4 mᵀ Σ_t m, which increases with v.

    Parameters
    ----------
    variance_mu : float or Tensor
        v, not negative; a tensor of any shape is taken elementwise.
    m : Tensor of shape (d,)
        Difference of the mean embeddings.
    cov_t : Tensor of shape (d, d)
        Covariance of the target's batch mean embedding.

    Returns
    -------
    Tensor of the shape of ``variance_mu``
    """
    shift = _as_mean(m)
    cov = _as_covariance(cov_t, "cov_t", shift)
    d = len(shift)
    if shift.ndim != 1 or cov.ndim != 2:
        shapes = f"{tuple(shift.shape)} and {tuple(cov.shape)}"
        raise InputError(f"m and cov_t must have shapes (d,) and (d, d), got {shapes}; pass one of each")
    v = torch.as_tensor(variance_mu, dtype=cov.dtype, device=shift.device)
    if not bool((v >= 0).all()):
        raise InputError(f"variance_mu must be at least 0, got {float(v.min())}; use stratified_variance")
    slope = shift.square().sum() + cov.trace()
    return 2.0 / d * v.square() + 4.0 / d * v * slope + 2.0 * cov.square().sum() + 4.0 * _quadratic(shift, cov)


def log_stirling2(n: int, k: int) -> float:
    """Log of the number of partitions of ``n`` rows into ``k`` non-empty strata (Stirling, second kind).

    Takes k vectorised steps in log space, on the band T_k[i] = S(k + i, k), which obeys
    T_k[i] = k T_k[i - 1] + T_{k-1}[i] and so T_k[i] = Σ_{j <= i} k^(i - j) T_{k-1}[j].
    """
    n = check_count(n, "n")
    k = check_count(k, "k", high=n, remedy="there cannot be more strata than rows")
    steps = torch.arange(n - k + 1, dtype=torch.float64)
    row = torch.zeros_like(steps)
    for strata in range(2, k + 1):
        powers = steps * math.log(strata)
        row = powers + torch.logcumsumexp(row - powers, 0)
    return float(row[-1])


def log_worst_case_error(n: int, k: int, rho: float, growth: float) -> float:
    """Log of Theorem 2's bound K √(p (p² - 1)(1 - ρ) / 6) on the loss variance given up by the surrogate.

    p = S(n, k) is the number of partitions of n rows into k strata; ``rho`` the Spearman correlation of Var(L̂_MMD) and
    Var(μ̂) over all of them; ``growth`` K, the most that Var(L̂_MMD) grows from one partition to the next in rank. As no
    error can exceed K (p - 1), the bound says something only for a ρ within about 6/p of one. It is ``-inf`` for ρ = 1
    or p = 1. The printed proof bounds δ_1 where it needs δ_l; the bound is the same.
    """
    log_p = log_stirling2(n, k)
    return _log_error(log_p, rho, growth, log_p)


def log_expected_error(n: int, k: int, rho: float, growth: float) -> float:
    """Log of Theorem 3's K √((p² - 1)(1 - ρ) / 6), for rank displacements that are all of one size.

    Arguments are those of `log_worst_case_error`. It is exact where Var(L̂_MMD) grows by K with each rank, else a bound.
    """
    return _log_error(log_stirling2(n, k), rho, growth, 0.0)


def _log_error(log_p: float, rho: float, growth: float, extra: float) -> float:
    """Return log K + ½ (extra + log(p² - 1) + log(1 - ρ) - log 6)."""
    if not -1.0 <= rho <= 1.0:
        raise InputError(f"rho must be between -1 and 1, got {rho}; use spearman(f, g)")
    if not (growth > 0 and math.isfinite(growth)):
        raise InputError(f"growth must be positive and finite, got {growth}; pass the largest step of sorted f")
    if rho == 1.0 or log_p == 0.0:
        return -math.inf
    log_p2_less_1 = 2.0 * log_p + math.log(-math.expm1(-2.0 * log_p))
    return math.log(growth) + 0.5 * (extra + log_p2_less_1 + math.log(1.0 - rho) - math.log(6.0))


@dataclass(frozen=True)
class Theorem4:
    """Variances of the two covariance estimates of scalar Gaussian strata."""

    var_r: float  # Var(R̂) of the estimate around the batch mean, as the proof derives it
    var_r_known_mean: float  # Var(R̂') around the known mean: what stratification for CORAL minimises
    var_r_as_printed: float  # the theorem's first line as printed, without the factor 2 of the trace: too small


def theorem4(means: ArrayLike, variances: ArrayLike, sizes: ArrayLike) -> Theorem4:
    """Theorem 4: how the variances of R̂ and R̂' relate for strata that are scalar Gaussians.

    With a = sizes/n, A = diag(a), C = I - 1aᵀ and γ = n/(n - 1), R̂ = Σ |S_h| (z_h - μ̂)²/(n - 1) is
    γ zᵀACz, so

        Var(R̂) = γ² (2 Tr((ACΣ)²) + 4 μᵀACΣACμ) = γ² (Var(R̂') + 2 Tr(A²Σ)² - 4 Tr(A³Σ²)),
        Var(R̂') = 2 Tr((AΣ)²) + 4 μᵀACΣACμ.

    AC = CᵀAC = A - aaᵀ is symmetric, so the last term is (μ - μ_s)ᵀAΣA(μ - μ_s) as printed. Two slips of
    the paper: the first line lacks the factor 2 that the proof and the third line have, and the proof's
    (CZ)ᵀA(CZ) is zᵀACz, without the γ that belongs to R̂.

    Parameters
    ----------
    means, variances : array of shape (k,)
        μ_h and Σ_h of the draw from each stratum.
    sizes : array of shape (k,)
        |S_h|, positive, with a sum n above one.
    """
    mu, s, size = _as_vector(means, "means"), _as_vector(variances, "variances"), _as_vector(sizes, "sizes")
    if not len(mu) == len(s) == len(size):
        raise InputError(
            f"means, variances and sizes must be of one length, got {len(mu)}, {len(s)} and {len(size)}; "
            "give one of each for every stratum"
        )
    if bool((s < 0).any()):
        raise InputError(f"variances must be at least 0, got {float(s.min())}; pass squares, not deviations")
    n = float(size.sum())
    if bool((size <= 0).any()) or n <= 1:
        raise InputError(
            f"sizes must be positive with a sum above 1, got a smallest of {float(size.min())} and a sum of "
            f"{n}; leave out empty strata"
        )
    gamma2 = (n / (n - 1.0)) ** 2
    a = size / n
    acs = (torch.diag(a) - torch.outer(a, a)) * s
    trace = float((acs * acs.T).sum())
    mean_term = 4.0 * float((a.square() * s * (mu - a @ mu).square()).sum())
    var_r = gamma2 * (2.0 * trace + mean_term)
    var_known = 2.0 * float((a * s).square().sum()) + mean_term
    return Theorem4(
        var_r=var_r,
        var_r_known_mean=var_known,
        var_r_as_printed=gamma2 * (trace + mean_term),
    )


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation of two lists of n numbers, with the average rank for ties (Figures 1 and 2).

    Exactly 1 or -1 for equal or opposite orders, since twice the centred ranks are whole numbers.
    """
    x, y = _centred_ranks(a), _centred_ranks(b)
    return float(x @ y / (x.square().sum() * y.square().sum()).sqrt())


def _centred_ranks(values: ArrayLike) -> Tensor:
    """Twice the average ranks, less their mean n + 1."""
    _, place, counts = torch.unique(torch.as_tensor(values), return_inverse=True, return_counts=True)
    twice_rank: Tensor = 2 * counts.cumsum(0) - counts + 1
    return twice_rank[place].double() - (len(place) + 1)


def _as_vector(values: ArrayLike, name: str) -> Tensor:
    vector = as_tensor(values, name)
    if vector.ndim != 1:
        raise InputError(f"{name} must have one dimension, got shape {tuple(vector.shape)}; flatten it")
    return as_features(vector.double(), name)[:, 0]


def _as_mean(mean_difference: ArrayLike) -> Tensor:
    m = torch.as_tensor(mean_difference)
    return _checked(m, "the mean difference", m.shape[-1:] or (1,))


def _as_covariance(covariance: ArrayLike, name: str, m: Tensor) -> Tensor:
    r = m.shape[-1]
    cov = _checked(torch.as_tensor(covariance), name, (r, r))
    skew = (cov - cov.mT).abs()
    variances = cov.diagonal(dim1=-2, dim2=-1)
    if bool((skew > 1e-4 * cov.abs().amax((-2, -1), keepdim=True)).any()) or bool((variances < 0).any()):
        raise InputError(
            f"{name} must be symmetric with no negative variance, got asymmetry {float(skew.max()):.3g} "
            f"and a lowest variance of {float(variances.min()):.3g}; use torch.cov"
        )
    return cov.to(torch.promote_types(cov.dtype, m.dtype))


def _checked(values: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    if values.shape[-len(shape) :] != shape or not values.is_floating_point():
        raise InputError(
            f"{name} must be floats of shape (..., {', '.join(map(str, shape))}), got {values.dtype} of shape "
            f"{tuple(values.shape)}; use the same feature map for all of them"
        )
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"{name} has NaN or infinite values; fix the features")
    return values


def _quadratic(m: Tensor, matrix: Tensor) -> Tensor:
    return (m * (matrix @ m[..., None].to(matrix))[..., 0]).sum(-1)
