"""Figures, with matplotlib, which is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vardass.errors import InputError
from vardass.files import atomic_write
from vardass.sampler_noise.report import MEASURES, Estimate, VarianceReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curve", "report_figure", "require_matplotlib", "save_figure", "variance_figure"]

_GREY = "#555555"


@dataclass(frozen=True)
class Curve:
    """A line of `variance_figure`.

    Attributes
    ----------
    name : str
        Written beside the line.
    variances : sequence of float
        Var(μ̂) for each k.
    colour, marker, dashes : str
        How it is drawn; colours of Okabe and Ito stay apart for the colour-blind.
    """

    name: str
    variances: Sequence[float]
    colour: str
    marker: str = "o"
    dashes: str = "-"


def variance_figure(
    sizes: Sequence[int],
    curves: Sequence[Curve],
    *,
    uniform: Sequence[float],
    bound: Sequence[float] | None = None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw Var(μ̂) against the batch size k (the paper's Figure 4), and beside it relative to uniform draws.

    Parameters
    ----------
    sizes : sequence of int
        The batch sizes k.
    curves : sequence of Curve
        One for each way to draw a batch, apart from uniform.
    uniform : sequence of float
        Var(μ̂) of k uniform draws.
    bound : sequence of float, optional
        What no partition can go below, drawn as a shaded region.
    title, subtitle : str
        What the figure shows, and of what data.
    """
    figure = _new_figure(figsize=(11.0, 5.2))
    absolute, relative = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.0, 1.15)})
    reference = Curve("uniform", uniform, "#000000", "", "--")
    for axes, scale in ((absolute, [1.0] * len(sizes)), (relative, [u / 100.0 for u in uniform])):
        for curve in (reference, *curves):
            shown = [v / s for v, s in zip(curve.variances, scale, strict=True)]
            axes.plot(
                sizes,
                shown,
                color=curve.colour,
                marker=curve.marker,
                linestyle=curve.dashes,
                linewidth=1.8,
                markersize=5.5,
                markeredgecolor="white",
                markeredgewidth=0.6,
                label=curve.name,
            )
        if bound is not None:
            floor = [v / s for v, s in zip(bound, scale, strict=True)]
            axes.fill_between(sizes, floor, 0.0 if axes is relative else 1e-12, color="#DDDDDD", linewidth=0, zorder=0)
        _dress(axes, sizes)
    lowest = min(min(curve.variances) for curve in curves)
    if bound is not None:
        lowest = min(lowest, min(value for value in bound if value > 0) if max(bound) > 0 else lowest)
    absolute.set_yscale("log")
    absolute.set_ylim(lowest / 1.6, max(uniform) * 1.4)
    absolute.set_ylabel("Var(μ̂), variance of the minibatch mean embedding")
    highest = max(v / u for curve in curves for v, u in zip(curve.variances, uniform, strict=True))
    relative.set_ylim(0.0, 100.0 * max(1.0, highest) + 8.0)
    relative.set_ylabel("Var(μ̂), % of uniform")
    _label_lines(
        relative,
        sizes,
        [(c.name, c.colour, 100.0 * c.variances[-1] / uniform[-1]) for c in (reference, *curves)],
    )
    if bound is not None:
        x = sizes[0] * 1.1
        relative.annotate("no partition can be here", (x, 4.0), color=_GREY, fontsize=9, va="bottom")
    figure.text(0.01, 0.985, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.01, 0.925, subtitle, fontsize=9.5, color=_GREY, va="top")
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 0.89))
    return figure


def require_matplotlib() -> None:
    """Raise an error that names the remedy if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("figures need matplotlib; install it with pip install 'vardass[plot]'") from None


def _new_figure(**options: Any) -> Figure:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**options)
    FigureCanvasAgg(figure)  # no window system and no global state, unlike pyplot
    return figure


def _dress(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(k) for k in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size k (samples)")
    axes.grid(True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label_lines(axes: Axes, sizes: Sequence[int], ends: Sequence[tuple[str, str, float]]) -> None:
    """Name each line at its right end, moved apart where ends meet."""
    gap = 5.0  # per cent
    place = -gap
    for name, colour, value in sorted(ends, key=lambda end: end[2]):
        place = max(value, place + gap)
        axes.annotate(
            name,
            (sizes[-1], value),
            (sizes[-1] * 1.12, place),
            color=colour,
            fontsize=9.5,
            va="center",
            annotation_clip=False,
        )
    axes.set_xlim(sizes[0] / 1.1, sizes[-1] * 2.8)


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``, each whole or not at all, and return their paths."""
    metadata: Mapping[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}}
    paths = []
    for ending, values in metadata.items():
        path = stem.with_suffix(f".{ending}")
        with atomic_write(path) as file:
            figure.savefig(file, format=ending, dpi=150, metadata=values)
        paths.append(path)
    return paths


_OKABE_ITO = ("#999999", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#F0E442")


def report_figure(report: VarianceReport, *, title: str = "Noise of minibatches, by sampler") -> Figure:
    """Draw how much less noise each sampler leaves than the report's baseline, on a logarithmic scale.

    One panel for each of the variance of the mean embedding, that of the loss and the error of its gradient, as
    far as they were measured. Bars reach from the baseline, 1, to the sampler; whiskers are two standard errors.

    Parameters
    ----------
    report : VarianceReport
        From `vardass.sampler_noise.variance_report`.
    title : str
        What the figure shows.
    """
    names = [row.name for row in report.rows]
    panels = {}
    for measure, label in MEASURES.items():
        ratios = [report.relative(name, measure) for name in names]
        shown = [None if ratio is None or not ratio.value > 0 else ratio for ratio in ratios]
        if any(shown):
            panels[label] = shown
    if not panels:
        raise InputError(f"nothing to draw: {report.baseline!r} has no variance; compare with another baseline")
    figure = _new_figure(figsize=(1.8 + 3.4 * len(panels), 1.6 + 0.42 * len(names)))
    axes_of_panels = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, ratios) in zip(axes_of_panels, panels.items(), strict=True):
        _draw_ratios(axes, ratios)
        axes.set_xlabel(f"{label}, relative to {report.baseline}")
    axes_of_panels[0].set_yticks(range(len(names)), names)
    axes_of_panels[0].set_ylim(len(names) - 0.4, -0.6)  # the first sampler on top
    batch = " and ".join(sorted({str(size) for row in report.rows for size in row.batch_sizes}))
    samples = " and ".join(f"{n:,}" for n in report.sizes)
    measured = f"{samples} samples, batches of {batch}, kernel {report.kernel}"
    subtitle = f"{measured}, loss {report.loss}" if report.loss else measured
    height = figure.get_size_inches()[1]
    figure.text(0.01, 1.0 - 0.08 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.01, 1.0 - 0.36 / height, subtitle, fontsize=9.5, color=_GREY, va="top")
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 1.0 - 0.6 / height))
    return figure


def _draw_ratios(axes: Axes, ratios: Sequence[Estimate | None]) -> None:
    """Horizontal bars from 1 to each ratio, the ratio written at its end."""
    low = min(1.0, *(ratio.value for ratio in ratios if ratio is not None))
    high = max(1.0, *(ratio.value for ratio in ratios if ratio is not None))
    low = min(low, high / 10.0)  # at least a decade
    room = (high / low) ** 0.3  # for the numbers
    axes.set_xscale("log")
    axes.set_xlim(low / room, high * (room if high > 1.0 else 1.15))
    for place, ratio in enumerate(ratios):
        if ratio is None:
            axes.annotate("not measured", (1.0, place), (-4, 0), textcoords="offset points", ha="right", va="center")
            continue
        whisker = min(2.0 * ratio.stderr, 0.99 * ratio.value)  # a log axis has no room below zero
        axes.barh(
            place,
            ratio.value - 1.0,
            left=1.0,
            height=0.62,
            color=_OKABE_ITO[place % len(_OKABE_ITO)],
            xerr=[[whisker], [2.0 * ratio.stderr]] if ratio.stderr > 0 else None,
            error_kw={"ecolor": "#222222", "elinewidth": 1.1, "capsize": 2.5},
        )
        left = ratio.value < 1.0
        end = ratio.value - whisker if left else ratio.value + 2.0 * ratio.stderr
        axes.annotate(
            f"{ratio.value:.2g}",
            (max(end, low / room**0.35), place),
            (-4 if left else 4, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=9,
        )
    axes.axvline(1.0, color="#000000", linewidth=1.0)
    axes.grid(True, axis="x", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
