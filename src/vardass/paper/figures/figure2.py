"""Figure 2: whether a small variance of R̂' means a small variance of R̂, for CORAL.

R̂ is the stratified covariance around the batch mean, R̂' around the known mean. As in the paper there are k = 8 strata
with sizes in the ratio 1, ..., k, normal and lognormal. Both variances are exact; the paper simulates them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from vardass.paper.figures import Claim, FigureResult
from vardass.paper.figures.figure1 import (
    StratumMoments,
    legend_below,
    rank_panel,
    rho,
    rho_range,
    scale_factors,
    scatter,
    wishart,
)
from vardass.plots import BLACK, BLUE, VERMILION
from vardass.validate import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure2"]

DIMENSIONS = (1, 2, 8, 32)
DISTRIBUTIONS = ("normal", "lognormal")
SCALES = {
    "scaled": ("strata of a partition share a scale, over two decades", BLUE, "o"),
    "one scale": ("one scale for all partitions", VERMILION, "^"),
}
STRATA = 8
NEAR_MONOTONIC = 0.99  # rank correlation that counts as the paper's "near-monotonic"
SAME_SIZE = 0.1  # difference of target and surrogate that does not count
_LOG_SPREAD = 0.5  # the lognormal's exponent is half as wide as the normal: its fourth moment grows as exp(8 s²)


def figure2(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Rank the variance of the batch covariance against that of its surrogate."""
    generator = torch.Generator().manual_seed(seed)
    count = 60 if quick else 400
    sizes = torch.arange(1, STRATA + 1, dtype=torch.float64)
    parts = []
    for step, distribution in enumerate(DISTRIBUTIONS):
        for d in DIMENSIONS:
            progress(step / len(DISTRIBUTIONS), f"{distribution}, d = {d}")
            for population in SCALES:
                moments = strata_moments(distribution, count, d, generator, scaled=population == "scaled")
                target, surrogate = coral_variances(moments, sizes)
                names = {"distribution": distribution, "d": d, "population": population}
                parts.append(pd.DataFrame({**names, "surrogate": surrogate, "target": target}))
    numbers = pd.concat(parts, ignore_index=True)
    return FigureResult(
        number=2,
        title="variance of the batch covariance against that of its CORAL surrogate",
        caption=(
            f"Each panel ranks {count} random partitions of each kind into k = {STRATA} strata of sizes 1 to {STRATA}; "
            "both variances are exact, not simulated. The paper gives neither d nor the strata's parameters."
        ),
        numbers=numbers,
        claims=_claims(numbers),
        draw=lambda figure: _draw(figure, numbers),
        size=(10.0, 8.4),
        settings={"seed": seed, "quick": quick, "points": count, "k": STRATA, "dimensions": DIMENSIONS},
    )


def strata_moments(
    distribution: str, count: int, d: int, generator: torch.Generator, *, scaled: bool
) -> StratumMoments:
    """Moments of the strata of ``count`` random partitions, of the named distribution in ``d`` dimensions."""
    means, covariances = random_strata(count, STRATA, d, generator, scaled=scaled)
    if distribution == "normal":
        return normal_moments(means, covariances)
    return lognormal_moments(_LOG_SPREAD * means, _LOG_SPREAD**2 * covariances)


def random_strata(count: int, k: int, d: int, generator: torch.Generator, *, scaled: bool) -> tuple[Tensor, Tensor]:
    """Means (count, k, d) and covariances (count, k, d, d) of k strata for each of ``count`` partitions.

    Means are standard normal; a stratum's covariance is A Aᵀ/d times a uniform number, so that strata differ in
    spread. ``scaled`` multiplies the covariances of a partition by one common factor from 0.01 to 1.
    """
    means = torch.randn(count, k, d, dtype=torch.float64, generator=generator)
    spread = torch.rand(count, k, 1, 1, dtype=torch.float64, generator=generator)
    if scaled:
        spread = spread * scale_factors(count, generator)[:, None, None, None]
    return means, spread * wishart((count, k, d, d), generator)


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


def coral_variances(moments: StratumMoments, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Var(R̂) and Var(R̂'): total variance of the entries of the stratified covariance, for any dimension.

    R̂ is centred at the batch mean and divided by n - 1, R̂' at the known mean and divided by n (section 2.3). With
    a = |S|/n, M = diag(a) - aaᵀ, b_h = E z_h - μ and T_h = α_h x_h x_hᵀ + x_h c_hᵀ + c_h x_hᵀ,

        Var(R̂) = γ² [Σ_h Var(T_h) + 2 Σ_{g<h} M_gh² (Tr Σ_g Tr Σ_h + Tr Σ_g Σ_h)],  α_h = M_hh,  c_h = a_h b_h,

    and Var(R̂') = Σ_h Var(T_h) with α_h = a_h and the same c_h. For scalar Gaussian strata this is Theorem 4.
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


def _claims(numbers: pd.DataFrame) -> tuple[Claim, ...]:
    claims = []
    for population, (label, *_) in SCALES.items():
        own = numbers[numbers.population == population]
        rhos = [rho(each) for _, each in own.groupby(["distribution", "d"])]
        claims.append(
            Claim(
                f"the relation is near-monotonic in all cases, taken as ρ > {NEAR_MONOTONIC}; {label}",
                min(rhos) > NEAR_MONOTONIC,
                f"{rho_range(rhos)} over {len(rhos)} cases",
            )
        )
    low, high = (numbers.target / numbers.surrogate).quantile([0.05, 0.95])
    claims.append(
        Claim(
            f"the surrogate gives the size of the variance too, within {100 * SAME_SIZE:.0f} % in 90 % of all cases",
            low >= 1.0 - SAME_SIZE and high <= 1.0 + SAME_SIZE,
            f"the target is {low:.2f} to {high:.2f} times the surrogate in 90 % of all cases",
            source="ours",
        )
    )
    return tuple(claims)


def _draw(figure: Figure, numbers: pd.DataFrame) -> None:
    """For each distribution a row of target against surrogate and below it one of their ratio."""
    heights = (1.0, 0.45) * len(DISTRIBUTIONS)
    grid = figure.subplots(len(heights), len(DIMENSIONS), gridspec_kw={"height_ratios": heights})
    for row, distribution in enumerate(DISTRIBUTIONS):
        for above, below, d in zip(grid[2 * row], grid[2 * row + 1], DIMENSIONS, strict=True):
            below.sharex(above)
            own = numbers[(numbers.distribution == distribution) & (numbers.d == d)]
            shown = dict(list(own.groupby("population")))
            rank_panel(above, [(shown[name], "target", *look) for name, look in SCALES.items()])
            for name, look in SCALES.items():
                scatter(below, shown[name].surrogate, shown[name].target / shown[name].surrogate, *look)
            below.set_ylim(0.0, 1.5)
            below.axhline(1.0, color=BLACK, linewidth=1.0, linestyle="--")
            above.tick_params(labelbottom=False)
        grid[2 * row][0].set_ylabel(f"target Var(R̂),\n{distribution}", fontsize=10)
        grid[2 * row + 1][0].set_ylabel("target /\nsurrogate", fontsize=10)
    for axes, d in zip(grid[0], DIMENSIONS, strict=True):
        axes.set_title(f"d = {d}", fontsize=11, fontweight="bold")
    for axes in grid[-1]:
        axes.set_xlabel("surrogate Var(R̂')", fontsize=10)
    legend_below(figure, grid[0][:1])
