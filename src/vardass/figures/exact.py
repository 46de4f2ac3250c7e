"""Variances of the batch losses over all draws, in closed form and without the assumption that anything is Gaussian.

Lemma 1 and Theorem 4 take batch means or draws to be Gaussian, and the paper turns to simulation for the rest. One
independent draw from each stratum needs neither: with x_h the deviation of the draw from its stratum's mean, both
losses are polynomials in the x_h whose mixed terms are uncorrelated, and four moments of each stratum suffice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["StratumMoments", "coral_variances", "lognormal_moments", "mmd_variance", "normal_moments"]


@dataclass(frozen=True, eq=False)
class StratumMoments:
    """Moments of one draw z from each of k strata, with x = z - E z; leading dimensions are problems side by side.

    Attributes
    ----------
    mean : Tensor of shape (..., k, d)
        E z.
    cov : Tensor of shape (..., k, d, d)
        E x xᵀ.
    third : Tensor of shape (..., k, d)
        E |x|² x.
    fourth : Tensor of shape (..., k)
        E |x|⁴.
    """

    mean: Tensor
    cov: Tensor
    third: Tensor
    fourth: Tensor

    @classmethod
    def of_points(cls, phi: Tensor, labels: Tensor, k: int) -> StratumMoments:
        """Moments of a uniform draw from each of k strata of points ``phi`` (n, d), none of them empty."""
        member = torch.nn.functional.one_hot(labels, k).to(phi)
        share = member / member.sum(0)
        mean = share.T @ phi
        x = phi - mean[labels]
        square = x.square().sum(1)
        cov = torch.einsum("nk,ni,nj->kij", share, x, x)
        return cls(mean, cov, share.T @ (square[:, None] * x), share.T @ square.square())

    @property
    def trace(self) -> Tensor:
        """E |x|²: (..., k)."""
        return self.cov.diagonal(dim1=-2, dim2=-1).sum(-1)

    @property
    def square(self) -> Tensor:
        """|E x xᵀ|_F²: (..., k)."""
        return self.cov.square().sum((-2, -1))

    def along(self, c: Tensor) -> Tensor:
        """E (c_h·x_h)² for ``c`` (..., k, d): (..., k)."""
        return (c * (self.cov @ c[..., None])[..., 0]).sum(-1)


def normal_moments(mean: Tensor, cov: Tensor) -> StratumMoments:
    """Moments of N(mean, cov): E |x|⁴ = (Tr Σ)² + 2 |Σ|²."""
    trace = cov.diagonal(dim1=-2, dim2=-1).sum(-1)
    return StratumMoments(mean, cov, torch.zeros_like(mean), trace.square() + 2.0 * cov.square().sum((-2, -1)))


def lognormal_moments(log_mean: Tensor, log_cov: Tensor) -> StratumMoments:
    """Moments of exp(y), y ~ N(log_mean, log_cov) in ``d`` dimensions.

    E z_i^p z_j^q = M_i^p M_j^q exp(½ p (p - 1) S_ii + ½ q (q - 1) S_jj + p q S_ij) with M = E z; central moments
    follow from the binomial theorem.
    """
    own = log_cov.diagonal(dim1=-2, dim2=-1)
    mean = torch.exp(log_mean + 0.5 * own)
    a, b = torch.exp(own)[..., :, None], torch.exp(own)[..., None, :]  # E z² / (E z)²
    c = torch.exp(log_cov)  # E z_i z_j / (E z_i E z_j)
    x, y = mean[..., :, None], mean[..., None, :]
    cov = x * y * (c - 1.0)
    # E x_i² x_j and E x_i² x_j², each divided by powers of the means
    third = a * c.square() - 2.0 * c - a + 2.0
    fourth = a * b * c.pow(4) - 2.0 * (a + b) * c.square() + a + b + 4.0 * c - 3.0
    return StratumMoments(mean, cov, (x.square() * y * third).sum(-2), (x.square() * y.square() * fourth).sum((-2, -1)))


def mmd_variance(moments: StratumMoments, weights: Tensor, shift: Tensor) -> Tensor:
    """Var |μ̂ - μ_t|² over all batches, for a fixed μ_t: what Lemma 1 approximates with Σ_t = 0.

    With m = E μ̂ - μ_t it is Σ_h Var(2 w_h m·x_h + w_h² |x_h|²) + 2 Σ_{g≠h} w_g² w_h² Tr(Σ_g Σ_h).

    Parameters
    ----------
    moments : StratumMoments
        Of φ(z) in each stratum.
    weights : Tensor of shape (..., k)
        w_h = |S_h|/n.
    shift : Tensor of shape (..., d)
        m.
    """
    m = shift[..., None, :].expand_as(moments.mean)
    own = weights.pow(4) * (moments.fourth - moments.trace.square())
    own = own + 4.0 * weights.pow(3) * (m * moments.third).sum(-1) + 4.0 * weights.square() * moments.along(m)
    total = (weights.square()[..., None, None] * moments.cov).sum(-3)
    pairs = total.square().sum((-2, -1)) - (weights.pow(4) * moments.square).sum(-1)
    return own.sum(-1) + 2.0 * pairs


def coral_variances(moments: StratumMoments, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Var(R̂) and Var(R̂'): total variance of the entries of the stratified covariance, for any dimension.

    R̂ is centred at the batch mean and divided by n - 1, R̂' at the known mean and divided by n (section 2.3). With
    a = |S|/n, M = diag(a) - aaᵀ, b_h = E z_h - μ and T_h = α_h x_h x_hᵀ + x_h c_hᵀ + c_h x_hᵀ,

        Var(R̂) = γ² [Σ_h Var(T_h) + 2 Σ_{g<h} M_gh² (Tr Σ_g Tr Σ_h + Tr Σ_g Σ_h)],  α_h = M_hh,  c_h = a_h b_h,

    and Var(R̂') = Σ_h Var(T_h) with α_h = a_h and the same c_h. For scalar Gaussian strata this is Theorem 4.

    Parameters
    ----------
    moments : StratumMoments
        Of z in each stratum.
    sizes : Tensor of shape (k,)
        |S_h|.
    """
    n = sizes.sum()
    a = sizes / n
    overall = (a[:, None] * moments.mean).sum(-2, keepdim=True)
    c = a[:, None] * (moments.mean - overall)
    linear = 2.0 * c.square().sum(-1) * moments.trace + 2.0 * moments.along(c)
    skew = 4.0 * (c * moments.third).sum(-1)
    spread = moments.fourth - moments.square

    def of(alpha: Tensor) -> Tensor:
        return (alpha.square() * spread + alpha * skew + linear).sum(-1)

    mixed = (torch.diag(a) - torch.outer(a, a)).fill_diagonal_(0.0).square()
    flat = moments.cov.flatten(-2)
    pairs = moments.trace[..., :, None] * moments.trace[..., None, :] + flat @ flat.mT
    gamma = n / (n - 1.0)
    return gamma.square() * (of(a - a.square()) + (mixed * pairs).sum((-2, -1))), of(a)
