"""Figure 2: whether a small variance of R̂' means a small variance of R̂, for CORAL.

R̂ is the stratified covariance around the batch mean, R̂' around the known mean. As in the paper there are k = 8 strata
with sizes in the ratio 1, ..., k, normal (above) and lognormal (below). The paper estimates both variances by Monte
Carlo simulation and gives neither the dimensions nor the distribution of the strata's parameters. Here both variances
are exact, d = 1, 2, 8, 32, and parameters are drawn as in `random_strata`, with and without a scale of its own for each
partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vardass.figures.base import (
    BLUE,
    VERMILION,
    Cell,
    Claim,
    FigureResult,
    Progress,
    dress,
    log_axes,
)
from vardass.figures.exact import StratumMoments, coral_variances, lognormal_moments, normal_moments
from vardass.figures.figure1 import note, rho_text, scatter
from vardass.figures.populations import random_strata
from vardass.theory import spearman

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NEAR_MONOTONIC", "STRATA", "figure2", "strata_moments"]

DIMENSIONS = (1, 2, 8, 32)
DISTRIBUTIONS = ("normal", "lognormal")
SCALES = {"scaled": (BLUE, "o"), "one scale": (VERMILION, "^")}
STRATA = 8
NEAR_MONOTONIC = 0.99
"""Rank correlation that counts as the paper's "near-monotonic", which it does not put in numbers."""

_LABELS = {
    "scaled": "strata of a partition share a scale, over two decades",
    "one scale": "one scale for all partitions",
}
_LOG_SPREAD = 0.5  # the lognormal's exponent is half as wide as the normal: its fourth moment grows as exp(8 s²)

Pairs = dict[tuple[str, int, str], tuple[Tensor, Tensor]]


def figure2(*, seed: int = 0, quick: bool = False, progress: Progress | None = None) -> FigureResult:
    """Rank the variance of the batch covariance against that of its surrogate.

    Parameters
    ----------
    seed : int
        Of all random numbers.
    quick : bool
        60 points for each population instead of 400.
    progress : callable, optional
        Called as ``progress(fraction, message)``.

    Returns
    -------
    FigureResult
        Columns ``distribution``, ``d``, ``population``, ``surrogate`` Var(R̂') and ``target`` Var(R̂).
    """
    generator = torch.Generator().manual_seed(seed)
    count = 60 if quick else 400
    sizes = torch.arange(1, STRATA + 1, dtype=torch.float64)
    found: Pairs = {}
    for step, distribution in enumerate(DISTRIBUTIONS):
        for d in DIMENSIONS:
            if progress is not None:
                progress(step / len(DISTRIBUTIONS), f"figure 2, {distribution}, d = {d}")
            for population in SCALES:
                moments = strata_moments(distribution, count, d, generator, scaled=population == "scaled")
                target, surrogate = coral_variances(moments, sizes)
                found[distribution, d, population] = (surrogate, target)
    rows: list[tuple[Cell, ...]] = [
        (*name, *values)
        for name, (surrogate, target) in found.items()
        for values in zip(surrogate.tolist(), target.tolist(), strict=True)
    ]
    return FigureResult(
        number=2,
        title="variance of the batch covariance against that of its CORAL surrogate",
        columns=("distribution", "d", "population", "surrogate", "target"),
        rows=rows,
        sentences=_sentences(found, count),
        claims=_claims(found),
        draw=lambda figure: _draw(figure, found),
        size=(10.0, 6.0),
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


def _rhos(found: Pairs, distribution: str, population: str) -> list[float]:
    pairs = (found[distribution, d, population] for d in DIMENSIONS)
    return [spearman(target, surrogate) for surrogate, target in pairs]


def _listed(rhos: Sequence[float]) -> str:
    return ", ".join(f"{rho_text(rho)} (d = {d})" for d, rho in zip(DIMENSIONS, rhos, strict=True))


def _sentences(found: Pairs, count: int) -> tuple[str, ...]:
    ratios = torch.cat([target / surrogate for surrogate, target in found.values()])
    low, high = torch.quantile(ratios, torch.tensor([0.05, 0.95], dtype=ratios.dtype)).tolist()
    return (
        f"Each panel ranks {count} random partitions of each kind into k = {STRATA} strata of sizes 1 to {STRATA}; "
        "both variances are exact, not simulated. The paper gives neither d nor the strata's parameters.",
        *(
            f"{distribution.capitalize()} strata, {_LABELS[population]}: "
            f"ρ = {_listed(_rhos(found, distribution, population))}."
            for distribution in DISTRIBUTIONS
            for population in SCALES
        ),
        f"The target is {low:.2f} to {high:.2f} times the surrogate in 90 % of all cases: the surrogate ranks "
        "partitions, it does not give the size of the variance.",
    )


def _claims(found: Pairs) -> tuple[Claim, ...]:
    claims = []
    for population in SCALES:
        rhos = [rho for distribution in DISTRIBUTIONS for rho in _rhos(found, distribution, population)]
        claims.append(
            Claim(
                f"the relation is near-monotonic in all cases, taken as ρ > {NEAR_MONOTONIC}; {_LABELS[population]}",
                min(rhos) > NEAR_MONOTONIC,
                f"ρ from {rho_text(min(rhos))} to {rho_text(max(rhos))} over {len(rhos)} cases",
            )
        )
    return tuple(claims)


def _draw(figure: Figure, found: Pairs) -> None:
    grid = figure.subplots(len(DISTRIBUTIONS), len(DIMENSIONS))
    for row, distribution in zip(grid, DISTRIBUTIONS, strict=True):
        for axes, d in zip(row, DIMENSIONS, strict=True):
            notes = []
            for population, (colour, marker) in SCALES.items():
                surrogate, target = found[distribution, d, population]
                scatter(axes, surrogate, target, colour, marker, _LABELS[population])
                notes.append((spearman(target, surrogate), colour))
            note(axes, notes)
            log_axes(axes)
            dress(axes)
            axes.tick_params(labelsize=8.5)
        row[0].set_ylabel(f"target Var(R̂), {distribution}", fontsize=10)
    for axes, d in zip(grid[0], DIMENSIONS, strict=True):
        axes.set_title(f"d = {d}", fontsize=11, fontweight="bold")
    for axes in grid[-1]:
        axes.set_xlabel("surrogate Var(R̂')", fontsize=10)
    handles = grid[0][0].get_legend_handles_labels()[0]
    figure.tight_layout(rect=(0.0, 0.075, 1.0, 1.0))
    figure.legend(handles=handles, loc="lower center", ncols=2, fontsize=9.5, frameon=False, markerscale=1.8)
