"""Figure 1: whether a small variance of the mean embedding means a small variance of the MMD loss.

The paper ranks Var(L̂_MMD) of Lemma 1 against Var(μ̂) = Tr Σ for random covariances Σ with m = 1, Σ_t = 0 and four
dimensions d. It says neither which d nor how the covariances are drawn. Here d = 1, 4, 16, 64, m is the vector of
ones, and covariances are drawn in three ways. Below, the same for random partitions of real data, with the exact
variance of the loss instead of Lemma 1's Gaussian one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vardass.figures.base import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILION,
    Cell,
    Claim,
    FigureResult,
    Progress,
    dress,
    log_axes,
)
from vardass.figures.exact import StratumMoments, mmd_variance
from vardass.figures.populations import (
    all_partitions,
    principal_windows,
    random_covariances,
    shaken_labels,
)
from vardass.solvers import stratify
from vardass.theory import lemma1_variance, log_worst_case_error, spearman

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LIMIT", "figure1", "note", "rho_text", "scatter"]

DIMENSIONS = (1, 4, 16, 64)
COVARIANCES = {"full, scaled": (BLUE, "o"), "full": (VERMILION, "^"), "diagonal": (ORANGE, "s")}
LIMIT = 0.99
"""The paper: correlations are all above this."""
_STRATA = 16
_TINY_STRATA = 3

Pairs = dict[tuple[str, int], tuple[Tensor, Tensor, Tensor | None]]


def figure1(*, seed: int = 0, quick: bool = False, progress: Progress | None = None) -> FigureResult:
    """Rank the variance of the MMD loss against that of the mean embedding.

    Parameters
    ----------
    seed : int
        Of all random numbers.
    quick : bool
        60 points of each kind in a panel instead of 600.
    progress : callable, optional
        Called as ``progress(fraction, message)``.

    Returns
    -------
    FigureResult
        Columns ``population``, ``d``, ``surrogate`` Var(μ̂), ``target`` Var(L̂_MMD) by Lemma 1 and
        ``exact_target`` over all draws, which covariances alone do not determine.
    """
    generator = torch.Generator().manual_seed(seed)
    count, n, tiny = (60, 80, 7) if quick else (600, 200, 8)
    points, shift = principal_windows(n, generator)
    found: Pairs = {}
    for step, d in enumerate(DIMENSIONS):
        if progress is not None:
            progress(step / len(DIMENSIONS), f"figure 1, d = {d}")
        for kind in COVARIANCES:
            cov = random_covariances(count, d, kind, generator)
            loss = lemma1_variance(torch.ones(d, dtype=cov.dtype), cov, torch.zeros_like(cov[0]))
            found[kind, d] = (cov.diagonal(dim1=1, dim2=2).sum(1), loss, None)
        x, m = points[:, :d], shift[:d]
        best = stratify(x, _STRATA, kernel="linear", seed=seed).labels
        shaken = shaken_labels(best, _STRATA, count, generator)
        found["partitions", d] = of_partitions(x, m, shaken, _STRATA)
        found["all partitions", d] = of_partitions(x[:tiny], m, all_partitions(tiny, _TINY_STRATA), _TINY_STRATA)
    rows: list[tuple[Cell, ...]] = []
    for (population, d), (surrogate, target, exact) in found.items():
        last = [""] * len(target) if exact is None else exact.tolist()
        rows += [(population, d, *values) for values in zip(surrogate.tolist(), target.tolist(), last, strict=True)]
    return FigureResult(
        number=1,
        title="variance of the MMD loss against variance of the mean embedding",
        columns=("population", "d", "surrogate", "target", "exact_target"),
        rows=rows,
        sentences=_sentences(found, count, n, tiny),
        claims=_claims(found),
        draw=lambda figure: _draw(figure, found),
        size=(10.0, 6.4),
        settings={"seed": seed, "quick": quick, "points": count, "n": n, "k": _STRATA, "dimensions": DIMENSIONS},
    )


def of_partitions(x: Tensor, m: Tensor, partitions: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Var(μ̂), Var(L̂_MMD) by Lemma 1 and exactly, for each of p partitions of points ``x`` (n, d): three (p,)."""
    surrogate, target, exact = [], [], []
    for labels in partitions:
        moments = StratumMoments.of_points(x, labels, k)
        weights = torch.bincount(labels, minlength=k).to(x) / len(x)
        cov = (weights.square()[:, None, None] * moments.cov).sum(0)
        surrogate.append(cov.trace())
        target.append(lemma1_variance(m, cov, torch.zeros_like(cov)))
        exact.append(mmd_variance(moments, weights, m))
    return torch.stack(surrogate), torch.stack(target), torch.stack(exact)


def rho_text(rho: float) -> str:
    """Four digits, never rounded up to one."""
    return "1 exactly" if rho == 1.0 else f"{math.floor(rho * 1e4) / 1e4:.4f}"


def _rhos(found: Pairs, population: str, *, exact: bool = False) -> list[float]:
    values = []
    for d in DIMENSIONS:
        surrogate, target, other = found[population, d]
        values.append(spearman(other if exact and other is not None else target, surrogate))
    return values


def _listed(rhos: Sequence[float]) -> str:
    return ", ".join(f"{rho_text(rho)} (d = {d})" for d, rho in zip(DIMENSIONS, rhos, strict=True))


def _regret(surrogate: Tensor, target: Tensor) -> float:
    """By how much the target of the surrogate's minimiser is above the smallest target, as a share of it."""
    return float(target[surrogate.argmin()] / target.min()) - 1.0


def _sentences(found: Pairs, count: int, n: int, tiny: int) -> tuple[str, ...]:
    regrets = [100.0 * _regret(found["partitions", d][0], _exact(found["partitions", d])) for d in DIMENSIONS]
    excess = []
    for d in DIMENSIONS:
        surrogate, _, exact = found["all partitions", d]
        assert exact is not None
        growth = float(exact.sort().values.diff().max())
        bound = math.exp(log_worst_case_error(tiny, _TINY_STRATA, spearman(exact, surrogate), growth))
        excess.append(bound / float(exact.max() - exact.min()))
    all_rhos = _rhos(found, "all partitions", exact=True)
    p = len(found["all partitions", 1][0])
    # Lemma 1 at 2Σ is 4 f - 8 g, since a diagonal Σ has f = 2 Tr Σ² + 4 g
    doubled = [spearman(4.0 * f - 8.0 * g, g) for g, f, _ in (found["diagonal", d] for d in DIMENSIONS[1:])]
    return (
        f"Each panel ranks {count} random covariances (above) or partitions (below) by target and surrogate; the "
        "paper gives neither d nor the way covariances were drawn, so d = 1, 4, 16, 64 and three ways are shown.",
        f"Full covariances A Aᵀ/d with scales over two decades: ρ = {_listed(_rhos(found, 'full, scaled'))}.",
        f"Full covariances of one scale: ρ = {_listed(_rhos(found, 'full'))}.",
        f"Diagonal covariances: ρ = {_listed(_rhos(found, 'diagonal'))}; for m = 1 the term mᵀΣm is then Tr Σ, the "
        f"surrogate itself. The verdict is close: variances twice as large give {rho_text(min(doubled))} to "
        f"{rho_text(max(doubled))} for d > 1.",
        f"Partitions of {n} smart-watch windows into {_STRATA} strata, from the best found to random ones, with the "
        f"real mean difference of the wrists: by Lemma 1 ρ = {_listed(_rhos(found, 'partitions'))}; with the exact "
        f"variance over all draws ρ = {_listed(_rhos(found, 'partitions', exact=True))}.",
        f"The partition of smallest surrogate has an exact target at most {max(regrets):.2g} % above the smallest of "
        "its panel.",
        f"Over all {p} partitions of {tiny} windows into {_TINY_STRATA} strata the exact ρ = {_listed(all_rhos)}, and "
        f"Theorem 2's bound is {min(excess):.0f} to {max(excess):.0f} times the whole range of the target"
        f"{': it excludes nothing' if min(excess) >= 1.0 else ''}.",
    )


def _exact(entry: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
    assert entry[2] is not None
    return entry[2]


def _claims(found: Pairs) -> tuple[Claim, ...]:
    first = [_rhos(found, population)[0] for population in (*COVARIANCES, "partitions")]
    claims = [
        Claim(
            "for d = 1 Theorem 1 holds and ρ = 1 exactly",
            all(rho == 1.0 for rho in first),
            f"ρ is at least {rho_text(min(first))} by Lemma 1, for three kinds of covariances and for partitions",
        )
    ]
    names = {
        "diagonal": "diagonal covariances",
        "full, scaled": "full covariances with scales over two decades",
        "full": "full covariances of one scale",
    }
    for population, name in names.items():
        rest = _rhos(found, population)[1:]
        claims.append(_above(f"for d > 1 the correlations are all above {LIMIT}, on {name}", rest))
    for exact, how in ((False, "by Lemma 1"), (True, "by the exact variance, not assumed Gaussian")):
        rest = _rhos(found, "partitions", exact=exact)[1:]
        claims.append(_above(f"the same on partitions of real data, {how}", rest))
    return tuple(claims)


def _above(text: str, rhos: Sequence[float]) -> Claim:
    return Claim(text, min(rhos) > LIMIT, f"ρ from {rho_text(min(rhos))} to {rho_text(max(rhos))}")


def _draw(figure: Figure, found: Pairs) -> None:
    grid = figure.subplots(2, len(DIMENSIONS))
    for column, d in enumerate(DIMENSIONS):
        top, bottom = grid[0][column], grid[1][column]
        notes = []
        for kind, (colour, marker) in COVARIANCES.items():
            surrogate, target, _ = found[kind, d]
            scatter(top, surrogate, target, colour, marker, _LABELS[kind])
            notes.append((spearman(target, surrogate), colour))
        note(top, notes)
        surrogate, target, exact = found["partitions", d]
        assert exact is not None
        scatter(bottom, surrogate, exact, GREEN, "D", "partition of real data: exact")
        scatter(bottom, surrogate, target, GREY, "x", "by Lemma 1")
        note(bottom, [(spearman(exact, surrogate), GREEN), (spearman(target, surrogate), GREY)])
        top.set_title(f"d = {d}", fontsize=11, fontweight="bold")
        for axes in (top, bottom):
            log_axes(axes)
            axes.tick_params(labelsize=8.5)
            dress(axes)
        bottom.set_xlabel("surrogate Var(μ̂)", fontsize=10)
    grid[0][0].set_ylabel("target Var(L̂), covariances", fontsize=10)
    grid[1][0].set_ylabel("target Var(L̂), partitions", fontsize=10)
    handles = [handle for axes in (grid[0][0], grid[1][0]) for handle in axes.get_legend_handles_labels()[0]]
    figure.tight_layout(rect=(0.0, 0.075, 1.0, 1.0))
    figure.legend(handles=handles, loc="lower center", ncols=5, fontsize=9.5, frameon=False, markerscale=1.8)


_LABELS = {"full, scaled": "full Σ, two decades of scale", "full": "full Σ, one scale", "diagonal": "diagonal Σ"}


def scatter(axes: Axes, x: Tensor, y: Tensor, colour: str, marker: str, label: str) -> None:
    """Many small half-transparent points."""
    axes.plot(
        x.numpy(),
        y.numpy(),
        marker,
        color=colour,
        markersize=2.6,
        alpha=0.6,
        markeredgewidth=0.5,
        label=label,
        rasterized=True,
    )


def note(axes: Axes, notes: Sequence[tuple[float, str]]) -> None:
    """Rank correlations in the colours of their points, in the upper left corner, where rising data leave room."""
    for line, (rho, colour) in enumerate(notes):
        text = "ρ = 1" if rho == 1.0 else f"ρ = {rho_text(rho)}"
        place = (0.05, 0.95 - 0.105 * line)
        axes.text(*place, text, transform=axes.transAxes, fontsize=9.5, color=colour, va="top", fontweight="bold")
