"""Curves of a run: losses and scores, variance against uniform draws, and where the time went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vardass.adapt.model import RunResult
from vardass.errors import InputError
from vardass.files import atomic_write
from vardass.plots import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FIGURE_FILE", "draw_run"]

FIGURE_FILE = "training.png"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito


def draw_run(result: RunResult, folder: Path, *, title: str) -> Path | None:
    """Write the figure of a run and return its path; None without matplotlib or without any evaluation."""
    try:
        require_matplotlib()
    except InputError:
        return None
    if not result.metrics:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[Callable[[Axes, RunResult], None]] = [_losses, _scores, _seconds]
    if any("source/variance" in line for line in result.metrics):
        panels.insert(2, _variances)
    figure = Figure(figsize=(3.6 * len(panels), 3.8))
    FigureCanvasAgg(figure)
    for axes, draw in zip(figure.subplots(1, len(panels)), panels, strict=True):
        draw(axes, result)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.tight_layout()
    path = folder / FIGURE_FILE
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=130)
    return path


def _losses(axes: Axes, result: RunResult) -> None:
    names = sorted({name for line in result.metrics for name in line if name.startswith("loss/")})
    for place, name in enumerate(names):
        _line(axes, result, name, name.removeprefix("loss/"), place)
    _finish(axes, "training loss", "mean since the last evaluation")


def _scores(axes: Axes, result: RunResult) -> None:
    _line(axes, result, "source_accuracy", "source accuracy", 0)
    _line(axes, result, "target_entropy", "target entropy, nats", 1)
    _line(axes, result, "target_information", "target information, nats", 2)
    axes.axvline(result.selected_step, color="#555555", linestyle=":", label="chosen")
    _finish(axes, "held-out samples, without target labels", "")


def _variances(axes: Axes, result: RunResult) -> None:
    for place, domain in enumerate(("source", "target")):
        lines = [line for line in result.metrics if f"{domain}/variance" in line]
        shares = [_share(line, domain) for line in lines]
        if lines:
            axes.plot([line["step"] for line in lines], shares, "o-", ms=3, color=_COLOURS[place], label=domain)
    axes.axhline(1.0, color="#000000", linewidth=1.0, label="uniform draws")
    axes.set_ylim(bottom=0.0)
    _finish(axes, "variance of the batch mean", "relative to uniform draws")


def _share(line: dict[str, Any], domain: str) -> float:
    uniform = float(line[f"{domain}/uniform_variance"])
    return float(line[f"{domain}/variance"]) / uniform if uniform > 0 else 1.0


def _seconds(axes: Axes, result: RunResult) -> None:
    parts = sorted(result.seconds.items(), key=lambda item: item[1])
    axes.barh([name for name, _ in parts], [value for _, value in parts], color=_COLOURS[0])
    axes.set_title("time", loc="left", fontsize=10)
    axes.set_xlabel("seconds")


def _line(axes: Axes, result: RunResult, key: str, label: str, place: int) -> None:
    lines = [line for line in result.metrics if key in line]
    if lines:
        colour = _COLOURS[place % len(_COLOURS)]
        axes.plot(
            [line["step"] for line in lines], [line[key] for line in lines], "o-", ms=3, color=colour, label=label
        )


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel(label, fontsize=9)
    # below the axes: no corner is free in every run
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
