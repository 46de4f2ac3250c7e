"""Figure 1: whether a small variance of the mean embedding means a small variance of the MMD loss.

The paper ranks Var(L̂_MMD) of Lemma 1 against Var(μ̂) = Tr Σ for random covariances Σ with m = 1, Σ_t = 0 and four
dimensions d. Here the same is done for random partitions of real data too, also with the exact variance of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from vardass.data import load_watch, standardise
from vardass.paper.figures import Claim, FigureResult
from vardass.paper.theory import lemma1_variance, spearman
from vardass.plots import BLUE, GREEN, GREY, ORANGE, VERMILION, style_axes
from vardass.solvers import stratify
from vardass.validate import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure1"]

DIMENSIONS = (1, 4, 16, 64)
LIMIT = 0.99  # the paper: correlations are all above this
COVARIANCES = {
    "full, scaled": ("full Σ, two decades of scale", BLUE, "o"),
    "full": ("full Σ, one scale", VERMILION, "^"),
    "diagonal": ("diagonal Σ", ORANGE, "s"),
}
_STRATA = 16


def figure1(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Rank the variance of the MMD loss against that of the mean embedding."""
    generator = torch.Generator().manual_seed(seed)
    count, n = (60, 80) if quick else (600, 200)
    points, shift = principal_windows(n, generator)
    parts = []
    for step, d in enumerate(DIMENSIONS):
        progress(step / len(DIMENSIONS), f"d = {d}")
        for kind in COVARIANCES:
            cov = random_covariances(count, d, kind, generator)
            loss = lemma1_variance(torch.ones(d, dtype=cov.dtype), cov, torch.zeros_like(cov[0]))
            columns = {"surrogate": cov.diagonal(dim1=1, dim2=2).sum(1), "target": loss}
            parts.append(pd.DataFrame({"population": kind, "d": d, **columns}))
        x = points[:, :d]
        best = stratify(x, _STRATA, kernel="linear", seed=seed).labels
        found = of_partitions(x, shift[:d], shaken_labels(best, _STRATA, count, generator), _STRATA)
        columns = dict(zip(("surrogate", "target", "exact_target"), found, strict=True))
        parts.append(pd.DataFrame({"population": "partitions", "d": d, **columns}))
    numbers = pd.concat(parts, ignore_index=True)
    return FigureResult(
        number=1,
        title="variance of the MMD loss against variance of the mean embedding",
        caption=(
            f"Each panel ranks {count} random covariances (above) or partitions (below) by target and surrogate. The "
            f"paper gives neither d nor the way covariances were drawn, so d = {', '.join(map(str, DIMENSIONS))} and "
            f"three ways are shown. Partitions are of {n} smart-watch windows into {_STRATA} strata, from the best "
            "found to random ones, with the real mean difference of the wrists. At d = 1 both rise with the same "
            "number (Theorem 1): ρ = 1 is no finding."
        ),
        numbers=numbers,
        claims=_claims(numbers),
        draw=lambda figure: _draw(figure, numbers),
        size=(10.0, 6.4),
        settings={"seed": seed, "quick": quick, "points": count, "n": n, "k": _STRATA, "dimensions": DIMENSIONS},
    )


def random_covariances(count: int, d: int, kind: str, generator: torch.Generator) -> Tensor:
    """Covariances (count, d, d), float64."""
    if kind == "diagonal":
        return torch.diag_embed(torch.rand(count, d, dtype=torch.float64, generator=generator))
    full = wishart((count, d, d), generator)
    return full if kind == "full" else full * scale_factors(count, generator)[:, None, None]


def principal_windows(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Principal coordinates of n random windows of the right wrist, and their mean less that of the left wrist."""
    data = load_watch()
    right = data.features[data.side == 1].double()
    left = standardise(data.features[data.side == 0].double(), reference=right)
    right = standardise(right)
    axes = torch.linalg.eigh(right.T @ right)[1].flip(1)
    rows = torch.randperm(len(right), generator=generator)[:n]
    points = right[rows] @ axes
    return points, points.mean(0) - (left @ axes).mean(0)


def shaken_labels(best: Tensor, k: int, count: int, generator: torch.Generator) -> Tensor:
    """Relabel at random a share of the points that grows from none to all of them: (count, n).

    A draw that leaves a stratum empty is made again.
    """
    rows = []
    for share in torch.linspace(0.0, 1.0, count).tolist():
        while True:
            moved = torch.rand(len(best), generator=generator) < share
            labels = torch.where(moved, torch.randint(k, best.shape, generator=generator), best)
            if int(torch.bincount(labels, minlength=k).min()) > 0:
                break
        rows.append(labels)
    return torch.stack(rows)


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


def mmd_variance(moments: StratumMoments, weights: Tensor, shift: Tensor) -> Tensor:
    """Var |μ̂ - μ_t|² over all batches, for a fixed μ_t: what Lemma 1 approximates with Σ_t = 0.

    With m = E μ̂ - μ_t it is Σ_h Var(2 w_h m·x_h + w_h² |x_h|²) + 2 Σ_{g≠h} w_g² w_h² Tr(Σ_g Σ_h).
    """
    m = shift[..., None, :].expand_as(moments.mean)
    own = weights.pow(4) * (moments.fourth - moments.trace.square())
    own = own + 4.0 * weights.pow(3) * (m * moments.third).sum(-1) + 4.0 * weights.square() * moments.along(m)
    total = (weights.square()[..., None, None] * moments.cov).sum(-3)
    pairs = total.square().sum((-2, -1)) - (weights.pow(4) * moments.square).sum(-1)
    return own.sum(-1) + 2.0 * pairs


def _claims(numbers: pd.DataFrame) -> tuple[Claim, ...]:
    def above(population: str, name: str, column: str = "target") -> Claim:
        own = numbers[(numbers.population == population) & (numbers.d > 1)]
        rhos = [rho(each, column) for _, each in own.groupby("d")]
        return Claim(
            f"for d > 1 the correlations are all above {LIMIT}, on {name}",
            min(rhos) > LIMIT,
            rho_range(rhos),
            "ours" if population == "partitions" else "paper",
        )

    exactly = "partitions of real data, by the exact variance, not assumed Gaussian"
    return (
        above("diagonal", "diagonal covariances"),
        above("full, scaled", "full covariances with scales over two decades"),
        above("full", "full covariances of one scale"),
        above("partitions", "partitions of real data, by Lemma 1"),
        above("partitions", exactly, "exact_target"),
    )


def _draw(figure: Figure, numbers: pd.DataFrame) -> None:
    grid = figure.subplots(2, len(DIMENSIONS))
    for (top, bottom), d in zip(grid.T, DIMENSIONS, strict=True):
        shown = dict(list(numbers[numbers.d == d].groupby("population")))
        rank_panel(top, [(shown[kind], "target", *look) for kind, look in COVARIANCES.items()])
        exact = shown["partitions"], "exact_target", "partition of real data: exact", GREEN, "D"
        rank_panel(bottom, [exact, (shown["partitions"], "target", "by Lemma 1", GREY, "x")])
        top.set_title(f"d = {d}", fontsize=11, fontweight="bold")
        bottom.set_xlabel("surrogate Var(μ̂)", fontsize=10)
    grid[0][0].set_ylabel("target Var(L̂), covariances", fontsize=10)
    grid[1][0].set_ylabel("target Var(L̂), partitions", fontsize=10)
    legend_below(figure, grid[:, 0])


# --- shared with figure 2: moments of strata, random covariances, panels of target against surrogate ---
#
# Neither Gaussian draws nor simulation are needed: with x_h the deviation of the draw from its stratum's mean, both
# losses are polynomials in the x_h whose mixed terms are uncorrelated, and four moments of each stratum suffice.

_DECADES = 2.0  # powers of ten that the scales of one population cover where they vary


@dataclass(frozen=True, eq=False)
class StratumMoments:
    """Moments of one draw z from each of k strata, with x = z - E z; leading dimensions are problems side by side."""

    mean: Tensor  # (..., k, d), E z
    cov: Tensor  # (..., k, d, d), E x xᵀ
    third: Tensor  # (..., k, d), E |x|² x
    fourth: Tensor  # (..., k), E |x|⁴

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


def wishart(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A Aᵀ/d of ``shape`` (..., d, d), with A standard normal, float64."""
    root = torch.randn(shape, dtype=torch.float64, generator=generator)
    return root @ root.mT / shape[-1]


def scale_factors(count: int, generator: torch.Generator) -> Tensor:
    """Log-uniform factors from 0.01 to 1: (count,)."""
    return 10.0 ** (-_DECADES * torch.rand(count, dtype=torch.float64, generator=generator))


def rho(table: pd.DataFrame, target: str = "target") -> float:
    """Rank correlation of a column with the surrogate."""
    return spearman(*(torch.tensor(table[name].to_numpy()) for name in (target, "surrogate")))


def rho_text(value: float) -> str:
    """Four digits, never rounded up to one."""
    return "1 exactly" if value == 1.0 else f"{math.floor(value * 1e4) / 1e4:.4f}"


def rho_range(values: Sequence[float]) -> str:
    """The lowest and the highest."""
    return f"ρ from {rho_text(min(values))} to {rho_text(max(values))}"


def scatter(axes: Axes, x: pd.Series, y: pd.Series, label: str, colour: str, marker: str) -> None:
    """Many small half-transparent points."""
    looks: dict[str, Any] = {"markersize": 2.6, "alpha": 0.6, "markeredgewidth": 0.5, "rasterized": True}
    axes.plot(x, y, marker, color=colour, label=label, **looks)
    axes.tick_params(labelsize=8.5)
    style_axes(axes)


def rank_panel(axes: Axes, series: Sequence[tuple[pd.DataFrame, str, str, str, str]]) -> None:
    """Columns of tables against their surrogates, with label, colour and marker, and their rank correlations."""
    for line, (table, target, *look) in enumerate(series):
        scatter(axes, table["surrogate"], table[target], *look)
        place = (0.05, 0.95 - 0.105 * line)  # the upper left corner, where rising data leave room
        text: dict[str, Any] = {"fontsize": 9.5, "fontweight": "bold", "color": look[1], "va": "top"}
        axes.text(*place, f"ρ = {rho_text(rho(table, target))}", transform=axes.transAxes, **text)
    _log_axes(axes)


def legend_below(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for the curves of some panels, below all of them."""
    handles = [handle for axes in panels for handle in axes.get_legend_handles_labels()[0]]
    figure.tight_layout(rect=(0.0, 0.45 / figure.get_size_inches()[1], 1.0, 1.0))
    looks: dict[str, Any] = {"loc": "lower center", "fontsize": 9.5, "frameon": False, "markerscale": 1.8}
    figure.legend(handles=handles, ncols=len(handles), **looks)


def _log_axes(axes: Axes) -> None:
    """Logarithmic scales with few plain labels that do not run into each other."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        decades = math.log10(high / low)
        axis.set_minor_formatter(NullFormatter())
        if decades < 1.7:  # two labels at least
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades > 0.7 else (1.0, 2.0, 3.0, 5.0, 7.0)))
        elif decades > 4.0:
            axis.set_major_locator(LogLocator(numticks=5))
        if low > 1e-4 and high < 1e5:
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
