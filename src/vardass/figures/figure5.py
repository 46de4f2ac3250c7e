"""Figure 5: variance of the estimator through training, for different times T between refreshes.

The paper follows one run on Humpbacks with k = 32 and a learning rate of 1e-4. Here it is a small network on the
smart-watch data that comes with the package, with the same k and learning rate. The variance of the present strata
on the present features is computed exactly from the features of all samples, between refreshes too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vardass.figures.aging import Aging, Way, follow_training
from vardass.figures.aging_findings import Summary, claims, sentences, summarise
from vardass.figures.base import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    VERMILION,
    Cell,
    FigureResult,
    Progress,
    dress,
)
from vardass.figures.threads import one_thread
from vardass.refresh import DriftRefresh, GrowingRefresh, RefreshEvery, VarianceRefresh

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure5"]

_EVERY = 5
# from dark to light as T grows
_SHADES = ("#3B0F52", "#3F4C8A", "#21828E", "#4DB56A", "#C9BC1F")
_OURS = {
    "min-sum, T = 100": (BLUE, "s"),
    "ordered, T = 100": (VERMILION, "D"),
    "growing T": (ORANGE, "^"),
    "on drift": ("#56B4E9", "v"),
    "on variance": (PURPLE, "X"),
}


def figure5(*, seed: int = 0, quick: bool = False, progress: Progress | None = None) -> FigureResult:
    """Follow Var(μ̂) of the source domain through training, for fixed T, growing T and T by observation.

    Parameters
    ----------
    seed : int
        Of the first run; each further run has the next one.
    quick : bool
        One run of 60 steps with T = 10, 20, 40 and ten times the learning rate instead of two of 2,000 with the
        paper's T.
    progress : callable, optional
        Called as ``progress(fraction, message)``.

    Returns
    -------
    FigureResult
        Columns ``seed``, ``step``, ``batches`` (the way to draw), ``variance``, ``relative_to_uniform`` and
        ``refreshes`` so far.
    """
    steps, runs = (60, 1) if quick else (2000, 2)
    periods = (10, 20, 40) if quick else (10, 50, 100, 500, 1000)
    usual, lr = (20, 1e-3) if quick else (100, 1e-4)
    seeds = [seed + run for run in range(runs)]
    found: dict[int, Aging] = {}
    for run, number in enumerate(seeds):

        def report(share: float, message: str, run: int = run) -> None:
            if progress is not None:
                progress((run + share) / runs, f"figure 5, run {run + 1} of {runs}, {message}")

        with one_thread():
            found[number] = follow_training(
                _ways(periods, usual), seed=number, steps=steps, every=_EVERY, lr=lr, progress=report
            )
    summary = summarise(list(found.values()), periods, usual)
    return FigureResult(
        number=5,
        title="variance of the estimator through training, by time between refreshes",
        columns=("seed", "step", "batches", "variance", "relative_to_uniform", "refreshes"),
        rows=_rows(found),
        sentences=sentences(summary, list(found.values()), lr=lr, every=_EVERY),
        claims=claims(summary),
        draw=lambda figure: _draw(figure, list(found.values()), summary),
        size=(13.0, 5.4),
        settings={"seed": seed, "quick": quick, "steps": steps, "runs": runs, "k": 32, "lr": lr, "periods": periods},
    )


def _ways(periods: tuple[int, ...], usual: int) -> list[Way]:
    """The paper's strata at each period; then others, next to the paper's at the ``usual`` one."""
    fixed = [Way(f"T = {period}", partial(RefreshEvery, period)) for period in periods]
    return [
        *fixed,
        Way(f"min-sum, T = {usual}", partial(RefreshEvery, usual), "min-sum"),
        Way(f"ordered, T = {usual}", partial(RefreshEvery, usual), "ordered"),
        Way("growing T", GrowingRefresh),
        # told the drift of all samples, not of a batch: there is no noise for a longer window to smooth
        Way("on drift", partial(DriftRefresh, window=1)),
        Way("on variance", VarianceRefresh),
    ]


def _rows(found: dict[int, Aging]) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for seed, aging in found.items():
        for place, (step, uniform) in enumerate(zip(aging.steps, aging.uniform, strict=True)):
            rows.append((seed, step, "uniform", uniform, 1.0, 0))
            for name, trace in aging.traces.items():
                variance = trace.variances[place]
                so_far = sum(refresh <= step for refresh in trace.refreshes)
                rows.append((seed, step, name, variance, variance / uniform, so_far))
    return rows


def _mean(series: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*series, strict=True)]


def _draw(figure: Figure, runs: list[Aging], summary: Summary) -> None:
    absolute, relative, cost = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.15, 1.15, 1.0)})
    steps = runs[0].steps
    uniform = _mean([run.uniform for run in runs])
    absolute.plot(steps, uniform, color="#000000", linestyle="--", linewidth=1.6, label="uniform")
    shades = dict(zip(summary.fixed, _SHADES, strict=False))
    for name, colour in reversed(shades.items()):
        variances = _mean([run.traces[name].variances for run in runs])
        absolute.plot(steps, variances, color=colour, linewidth=1.5, label=name)
    absolute.set_ylabel("Var(μ̂), source domain, k = 32")
    absolute.set_title("the paper's strata", loc="left", fontsize=11, fontweight="bold")
    for name in (summary.usual, *summary.others):
        colour = shades[name] if name in shades else _look(name)[0]
        shares = [[100.0 * v / u for v, u in zip(run.traces[name].variances, run.uniform, strict=True)] for run in runs]
        relative.plot(steps, _mean(shares), color=colour, linewidth=1.5, label=name)
    relative.set_ylabel("Var(μ̂), % of uniform")
    relative.set_title("other strata, other times", loc="left", fontsize=11, fontweight="bold")
    for axes in (absolute, relative):
        axes.set_xlabel("training step")
        axes.set_xlim(0, steps[-1])
        dress(axes)
    absolute.legend(fontsize=9, frameon=False, loc="lower right")
    relative.legend(fontsize=9, frameon=False, loc="upper right")
    _draw_cost(cost, summary, shades)
    figure.tight_layout(w_pad=2.0)


def _look(name: str) -> tuple[str, str]:
    kind = name.split(",")[0]
    return next(look for known, look in _OURS.items() if known.split(",")[0] == kind)


def _draw_cost(axes: Axes, summary: Summary, shades: dict[str, str]) -> None:
    """Refreshes against mean variance: further down and further left is better."""
    fixed = [summary.cells[name] for name in summary.fixed]
    xs, ys = [cell.refreshes for cell in fixed], [cell.relative for cell in fixed]
    axes.plot(xs, ys, color=GREY, linewidth=1.0, zorder=1)
    for name, cell in summary.cells.items():
        colour, marker = (shades[name], "o") if name in shades else _look(name)
        axes.plot([cell.refreshes], [cell.relative], marker, color=colour, markersize=8.5, markeredgecolor="white")
        side, offset = ("left", (4, 6)) if name in shades else ("center", (0, -16))
        if name == "on variance":  # beside the mark: it often is at that of the longest T
            side, offset = "left", (11, -4)
        shown = name.removeprefix("T = ") if name in summary.fixed[:-1] else name
        place = (cell.refreshes, cell.relative)
        axes.annotate(shown, place, offset, textcoords="offset points", fontsize=8.5, color=INK, ha=side)
    axes.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(cell.refreshes for cell in summary.cells.values()) / 1.6, xs[0] * 1.9)
    axes.set_xlabel("refreshes in the run (log scale)")
    axes.set_ylabel("mean Var(μ̂) of the run, % of uniform")
    axes.set_title("what a refresh buys", loc="left", fontsize=11, fontweight="bold")
    axes.margins(y=0.12)
    dress(axes)
