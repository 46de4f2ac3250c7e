"""The demo's second figure: how noisy the loss is with each way to draw, and what accuracy came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vardass.cli.training_report import LOSSES, Cell
from vardass.plots import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["training_figure"]

_GREY, _INK = "#555555", "#222222"
# colours of Okabe and Ito, which stay apart for the colour-blind, and a marker of its own for each
_LOOKS = {
    "source only": ("#999999", "X"),
    "uniform": ("#000000", "o"),
    "uniform, U-statistic": ("#56B4E9", "h"),
    "VaRDASS (paper)": ("#CC79A7", "^"),
    "min-sum strata": ("#0072B2", "s"),
    "ordered": ("#D55E00", "D"),
    "balanced": ("#009E73", "v"),
}


def training_figure(cells: dict[str, list[Cell]], *, title: str, subtitle: str) -> Figure:
    """Draw, for each loss, the relative variance of its minibatch value and the target accuracy.

    Parameters
    ----------
    cells : dict of lists of Cell
        From `summarise`.
    title, subtitle : str
        What the figure shows, and how it was measured.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 6.8))
    FigureCanvasAgg(figure)
    heights = [len(group) for group in cells.values()]
    grid = figure.subplots(len(cells), 2, squeeze=False, gridspec_kw={"height_ratios": heights}, sharex="col")
    for (noise, accuracy), (loss, group) in zip(grid, cells.items(), strict=True):
        _noise(noise, group)
        _accuracy(accuracy, group)
        noise.set_title(LOSSES[loss], loc="left", fontsize=11, fontweight="bold")
    grid[-1][0].set_xlabel("variance of the minibatch loss relative to uniform (log scale)")
    grid[-1][1].set_xlabel("target accuracy, %")
    figure.text(0.01, 0.985, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.01, 0.94, subtitle, fontsize=9, color=_GREY, va="top", linespacing=1.35)
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 0.885), w_pad=2.0)
    return figure


def _rows(axes: Axes, group: Sequence[Cell], *, names: bool) -> None:
    axes.set_ylim(len(group) - 0.5, -0.5)
    axes.set_yticks(range(len(group)), [cell.way for cell in group] if names else [""] * len(group))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.grid(True, axis="x", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _noise(axes: Axes, group: Sequence[Cell]) -> None:
    axes.set_xscale("log")
    axes.axvline(1.0, color="#000000", linewidth=1.0, linestyle="--", zorder=1)
    for row, cell in enumerate(group):
        colour, marker = _LOOKS[cell.way]
        if cell.variance is None:
            axes.text(
                1.15, row, "no discrepancy" if cell.way == "source only" else "", color=_GREY, fontsize=9, va="center"
            )
            continue
        axes.plot([1.0, cell.variance], [row, row], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot([cell.variance], [row], marker, color=colour, markersize=8.5, markeredgecolor="white")
        left = cell.variance < 1.0
        axes.annotate(
            f"{cell.variance:.2g}",
            (cell.variance, row),
            (-9 if left else 9, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=9.5,
            color=_INK,
        )
    known = [cell.variance for cell in group if cell.variance is not None]
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, min(known, default=1.0) / 3.5), max(high, 6.0))
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    _rows(axes, group, names=True)


def _accuracy(axes: Axes, group: Sequence[Cell]) -> None:
    uniform = next(cell for cell in group if cell.way == "uniform")
    axes.axvline(uniform.accuracy, color="#000000", linewidth=1.0, linestyle="--", zorder=1)
    for row, cell in enumerate(group):
        colour, marker = _LOOKS[cell.way]
        places = list(cell.by_pair.values())
        axes.plot(places, [row] * len(places), "|", color=colour, alpha=0.55, markersize=11, markeredgewidth=1.6)
        axes.errorbar(
            [cell.accuracy],
            [row],
            xerr=None if math.isnan(cell.gain_error) else [cell.gain_error],
            fmt=marker,
            color=colour,
            markersize=7.5,
            markeredgecolor="white",
            elinewidth=2.0,
            capsize=3.5,
            zorder=3,
        )
        text = f"{cell.accuracy:.1f}" if cell is uniform else f"{cell.accuracy:.1f}  ({round(cell.gain, 1) + 0.0:+.1f})"
        axes.annotate(
            text,
            (1.0, row),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=_INK,
            annotation_clip=False,
        )
    _rows(axes, group, names=False)
