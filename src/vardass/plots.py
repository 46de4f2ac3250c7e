"""The look of all figures, how they are written, and those of a variance report, a diagnosis and an evaluation.

matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

import io
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vardass.analysis.doctor import Diagnosis
from vardass.errors import needs_extra
from vardass.files import atomic_write, write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vardass.adapt.scores import ClassificationScores, Evaluation, RegressionEvaluation

__all__ = [
    "diagnosis_figure",
    "evaluation_figure",
    "new_figure",
    "require_matplotlib",
    "save_figure",
    "style_axes",
]

BLACK, INK, GREY = "#000000", "#222222", "#555555"
# Okabe and Ito: they stay apart for the colour-blind
BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
_PANEL: dict[str, Any] = {"loc": "left", "fontsize": 10}  # titles of panels
_MOST_CLASSES = 20  # of a panel of class shares


def require_matplotlib() -> None:
    """Raise an error that names the remedy if matplotlib is missing."""
    with needs_extra("plot"):
        import matplotlib  # noqa: F401


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of the given size in inches, without a window system or global state, unlike pyplot."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Light grid behind the data and no box around it."""
    axes.grid(True, axis=grid, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save_figure(figure: Figure, stem: Path, command: str = "") -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``, each whole or not at all, and return their paths.

    For a ``command``, no other file is replaced.
    """
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path, metadata in zip(paths, ({}, {"Date": None}), strict=True):
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:], dpi=150, metadata=metadata)
        if command:
            write_output(path, content.getvalue(), command)
            continue
        with atomic_write(path) as file:
            file.write(content.getvalue())
    return paths


def _headline(figure: Figure, title: str, subtitle: str = "") -> None:
    """Write both into the uppermost 0.6 inches of a figure; dollars are no formulas."""
    height = figure.get_size_inches()[1]
    figure.text(0.01, 1.0 - 0.08 / height, title, parse_math=False, fontsize=13, fontweight="bold", va="top")
    figure.text(0.01, 1.0 - 0.36 / height, subtitle, parse_math=False, fontsize=9.5, color=GREY, va="top")


def diagnosis_figure(found: Diagnosis, *, title: str) -> Figure:
    """Draw what `vardass.diagnose` found: losses, gradients, bandwidths and classes as far as measured, and advice."""
    panels = [_draw_loss_parts]
    if found.gradient is not None:
        panels.append(_draw_gradients)
    if len(found.parts) > 1:
        panels.append(_draw_bandwidths)
    if found.classes is not None and len(found.classes.source) <= _MOST_CLASSES:
        panels.append(_draw_classes)
    figure = new_figure(0.6 + 3.3 * max(2, len(panels)), 5.0)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, found)
        style_axes(axes, grid="y")
    sizes = " and ".join(f"{n:,}" for n in found.sizes)
    subtitle = f"{sizes} samples, batches of {found.batch_size}, {found.loss.upper()}, λ = {found.penalty:g}"
    _headline(figure, f"Doctor: {title}", subtitle)
    figure.text(0.01, 0.02, "\n".join(map(str, found.advice)), fontsize=8.5, va="bottom", linespacing=1.4)
    figure.tight_layout(rect=(0.0, 0.24, 1.0, 0.9))
    return figure


def _draw_loss_parts(axes: Axes, found: Diagnosis) -> None:
    names = [effect.name for effect in found.samplers]
    excess = [effect.excess.value for effect in found.samplers]
    axes.bar(names, found.discrepancy, color=BLUE, width=0.6, label="discrepancy")
    axes.bar(names, excess, bottom=found.discrepancy, color=ORANGE, width=0.6, label="finite-batch bias")
    for place, effect in enumerate(found.samplers):
        top = found.discrepancy + effect.excess.value
        text = f"{100 * effect.contraction:.0f} %"
        axes.annotate(text, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=9)
    axes.set_ylim(0.0, 1.35 * (found.discrepancy + max(excess)) or 1.0)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    axes.set_title("mean loss of a batch", **_PANEL)


def _draw_gradients(axes: Axes, found: Diagnosis) -> None:
    bars = {f"noise,\n{effect.name}": effect.gradient_noise or 0.0 for effect in found.samplers}
    colours = [ORANGE] * len(bars)
    bars["discre-\npancy"] = found.gradient or 0.0
    if found.task_gradient is not None:
        bars["task"] = found.task_gradient
    axes.bar(list(bars), list(bars.values()), color=[*colours, BLUE, GREEN][: len(bars)], width=0.6)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title("size of gradients", **_PANEL)


def _draw_bandwidths(axes: Axes, found: Diagnosis) -> None:
    names = [part.name for part in found.parts]
    shares = [part.share for part in found.parts]
    beyond = [part.share * part.irreducible for part in found.parts]
    axes.bar(names, shares, color=SKY, width=0.6, label="strata may remove")
    axes.bar(names, beyond, color="#999999", width=0.6, label="not removable by stratification")
    axes.set_ylim(0.0, 1.35 * max(shares) or 1.0)
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_title("variance by bandwidth, share", **_PANEL)


def _draw_classes(axes: Axes, found: Diagnosis) -> None:
    assert found.classes is not None
    places = range(len(found.classes.source))
    axes.bar([place - 0.2 for place in places], found.classes.source, width=0.38, color=BLUE, label="source")
    axes.bar([place + 0.2 for place in places], found.classes.target, width=0.38, color=VERMILION, label="target")
    axes.set_ylim(0.0, 1.3 * max(*found.classes.source, *found.classes.target))
    labels = [_label(name) for name in found.classes.names]
    size = 8 if len(labels) <= 12 else 6
    upright = _text_inches(max(labels, key=len), size) < 2.4 / len(labels)  # inches of the panel
    axes.set_xticks(places, labels, fontsize=size, rotation=0 if upright else 90)
    axes.tick_params(axis="x", length=0)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    axes.set_title("shares of classes (target: pseudo-labels)", **_PANEL)


_MOST_COUNTS = 20  # classes whose cells have room for a number
_MOST_LABELS = 70
_LONGEST_LABEL = 18  # characters
_DOMAIN_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)


def evaluation_figure(found: Evaluation | RegressionEvaluation, *, title: str) -> Figure:
    """Draw the scores of a model: confusion matrix, recall of each class by domain, and calibration.

    Of a regression: predicted against true numbers, a panel for each of up to four. Rows of the matrix are true
    classes, and the colour of a cell is its share of the row.
    """
    from vardass.adapt.scores import Evaluation

    if not isinstance(found, Evaluation):
        return _regression_figure(found, title)
    scores = found.overall
    classes = len(scores.classes)
    side = _matrix_side(classes)
    widths = side, 2.2, 3.4
    figure = new_figure(sum(widths) + 2.2, side + 2.4)
    figure.set_layout_engine("constrained", rect=(0.0, 0.0, 1.0, 1.0 - 0.75 / (side + 2.4)), wspace=0.03)
    columns = figure.add_gridspec(1, 3, width_ratios=widths)
    confusion = figure.add_subplot(columns[0])
    _draw_confusion(confusion, scores)
    _draw_recalls(figure.add_subplot(columns[1], sharey=confusion), found, side)
    _draw_reliability(figure.add_subplot(columns[2]), scores)
    low, high = scores.accuracy_interval
    parts = [
        f"{scores.n:,} samples of {len(found.domains)} domain{'s' if len(found.domains) > 1 else ''}",
        f"accuracy {100 * scores.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f})",
        f"balanced {100 * scores.balanced_accuracy:.1f} %",
        f"NLL {scores.nll:.3g}, Brier {scores.brier:.3g}, calibration error {scores.calibration_error:.3g}",
    ]
    _headline(figure, f"Evaluation: {title}", "; ".join(parts))
    return figure


def _regression_figure(found: RegressionEvaluation, title: str) -> Figure:
    shown = list(enumerate(found.names))[:4]
    figure = new_figure(0.6 + 3.6 * max(2, len(shown)), 4.6)
    for axes, (place, name) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for colour, domain in zip(cycle(_DOMAIN_COLOURS), found.domains):
            x, y = found.labels[domain][:, place], found.predictions[domain][:, place]
            axes.plot(x, y, "o", markersize=3, alpha=0.5, color=colour, label=_label(domain))
        ends = min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot(ends, ends, color=GREY, linewidth=1)
        axes.set(xlim=ends, ylim=ends, box_aspect=1, xlabel="true", ylabel="predicted")
        scores = found.overall.columns.get(name, found.overall)
        axes.set_title(f"{_label(name)}: R² {scores.r2:.3f}, MAE {scores.mae:.3g}", **_PANEL)
        style_axes(axes)
    figure.axes[0].legend(fontsize=8, frameon=False)
    _headline(figure, f"Evaluation: {title}")
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 0.92))
    return figure


def _draw_confusion(axes: Axes, scores: ClassificationScores) -> None:
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    classes = len(scores.classes)
    shares = (scores.confusion.double() / scores.support[:, None]).cpu().numpy()  # NaN for a class without samples
    colours = LinearSegmentedColormap.from_list("shares", ["#FFFFFF", SKY, "#003A5D"]).with_extremes(bad="#EEEEEE")
    # without numbers by the root of the share, so that rare mistakes are seen
    norm = PowerNorm(1.0 if classes <= _MOST_COUNTS else 0.5, vmin=0.0, vmax=1.0)
    axes.imshow(shares, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    if classes <= _MOST_COUNTS:
        size = 10 if classes <= 8 else 7
        for i, row in enumerate(scores.confusion.tolist()):
            for j, count in enumerate(row):
                if count:
                    ink = "#FFFFFF" if shares[i, j] > 0.5 else INK
                    axes.text(j, i, f"{count:,}", ha="center", va="center", fontsize=size, color=ink)
    # some labels only where there are too many to read
    places = range(0, classes, -(-classes // _MOST_LABELS))
    labels = [_label(scores.classes[place]) for place in places]
    label_size = 9 if classes <= 12 else 7.5 if classes <= _MOST_COUNTS else 6
    across = _text_inches(max(labels, key=len), label_size)
    upright = len(places) == classes and across < 0.85 * _matrix_side(classes) / classes  # names must not touch
    axes.set_xticks(places, labels, fontsize=label_size, rotation=0 if upright else 90)
    axes.set_yticks(places, labels, fontsize=label_size)
    axes.tick_params(length=0)
    axes.set(xlabel="predicted class", ylabel="true class")
    scale = "share of row: white 0, light blue 0.25, dark blue 1"
    axes.set_title("samples (colour: share of row)" if classes <= _MOST_COUNTS else scale, **_PANEL)


def _matrix_side(classes: int) -> float:
    """Inches of the confusion matrix."""
    return max(3.2, 0.42 * classes if classes <= _MOST_COUNTS else min(0.14 * classes, 12.0))


def _text_inches(text: str, size: float) -> float:
    """About how wide a text is at a font size in points."""
    return 0.62 * len(text) * size / 72.0


def _label(name: str) -> str:
    """A name, cut in the middle if it is long; dollars are no formulas."""
    half = _LONGEST_LABEL // 2
    return (name if len(name) <= _LONGEST_LABEL else f"{name[:half]}…{name[1 - half :]}").replace("$", r"\$")


def _draw_recalls(axes: Axes, found: Evaluation, side: float) -> None:
    places = range(len(found.overall.classes))
    few = len(found.domains) <= len(_DOMAIN_COLOURS)
    size = 6 if len(places) <= _MOST_COUNTS else 3.5
    for number, (name, scores) in enumerate(found.domains.items()):
        colour = _DOMAIN_COLOURS[number] if few else "#999999"
        label = _label(name) if few else ("each domain" if number == 0 else None)
        recall = scores.recall.tolist()
        axes.plot(recall, places, "o", ms=size, color=colour, alpha=0.85, label=label, clip_on=False, zorder=3)
    if len(found.domains) > 1:
        recall = found.overall.recall.tolist()
        axes.plot(recall, places, "|", ms=1.6 * size, mew=1.6, color=BLACK, label="all", clip_on=False, zorder=4)
    for place, support in enumerate(found.overall.support.tolist()):
        if not support:
            axes.text(0.02, place, "no samples", fontsize=8 if size > 4 else 6, color=GREY, va="center")
    axes.set_xlim(0.0, 1.0)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2 / side), ncols=2)
    axes.set_title("recall by domain", **_PANEL)
    style_axes(axes, grid="both" if size > 4 else "x")


def _draw_reliability(axes: Axes, scores: ClassificationScores) -> None:
    bins = scores.reliability
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1.0, linestyle="--", label="calibrated")
    full = [m for m, count in enumerate(bins.counts.tolist()) if count]
    sure, right = ([column[m] for m in full] for column in (bins.confidence.tolist(), bins.accuracy.tolist()))
    axes.vlines(sure, sure, right, color=ORANGE, linewidth=4, alpha=0.5, label="gap")
    axes.plot(sure, right, "o-", ms=4, color=BLUE, label="model")
    axes.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0), box_aspect=1, anchor="N")
    axes.set(xlabel="probability of the predicted class", ylabel="share that is right")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_title("calibration", **_PANEL)
    style_axes(axes)
