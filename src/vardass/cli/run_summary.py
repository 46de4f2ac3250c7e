"""How a run shows its result: a table for the terminal, ``report.md`` with a figure, and JSON for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vardass.adapt.model import RunResult
from vardass.adapt.selection import FIRST_BEST, SCORE_NAMES
from vardass.backend import were_compiled
from vardass.cli.models import PredictedNumbers, Predictions
from vardass.errors import InputError
from vardass.files import atomic_write, write_text
from vardass.plots import new_figure, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Summary", "print_json", "print_summary", "write_report"]

_TOO_MANY = 0.3  # of the predictions, beyond the share of that class in the source
REPORT_FILE, RESULT_FILE, FIGURE_FILE = "report.md", "result.json", "training.png"
_SCORES = {
    "target_entropy": "target entropy, nats (lower = more confident)",
    "target_information": "target information, nats (more is better)",
    "target_density": "target neighbourhood density (more is better)",
    "mmd": "MMD² of held-out features (less is better)",
}
_READ_LAST = "labels read only now, after the model was chosen"
_ORACLE = "model chosen BY TARGET LABELS (oracle): for comparison only"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito


@dataclass(frozen=True, eq=False)
class Summary:
    """The end of a run: scores are those of the target, None without labels, of the samples that ``measured_on`` says.

    ``source_labels`` (n,) were trained on; ``doctor`` is the short diagnosis of the chosen model, where it was made.
    """

    task: str
    result: RunResult
    predictions: Predictions | PredictedNumbers
    target_scores: Mapping[str, float] | None
    measured_on: str
    source_labels: Tensor
    doctor: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, in the order of importance."""
        result = self.result
        config, line = result.config, self._selected()
        rows = [
            ("algorithm, sampler, network", f"{config.algorithm}, {config.sampler}, {config.network}"),
            ("steps", f"{result.step:,} of {config.steps:,}"),
            ("model", self._how_chosen()),
        ]
        told = SCORE_NAMES[config.regression]
        title = "R², RMSE, MAE" if config.regression else "accuracy"
        if f"source_{told[0]}" in line:
            rows.append((f"source validation {title}", _scores_text({name: line[f"source_{name}"] for name in told})))
        rows += [(label, f"{line[key]:.4g}") for key, label in _SCORES.items() if key in line]
        for domain in ("source", "target"):
            if f"{domain}/reduction" in line:
                value = f"{line[f'{domain}/reduction']:.3g} times less than uniform draws"
                rows.append((f"variance of {domain} batches", value))
            elif f"{domain}/left" in line:
                value = f"uniform draws: any strata would leave {100 * line[f'{domain}/left']:.0f} % of it"
                rows.append((f"variance of {domain} batches", value))
        if self.target_scores is None:
            rows.append((f"target {title}", "not known, the target has no labels"))
        else:
            note = _ORACLE if config.selection == "oracle" else _READ_LAST
            rows.append((f"target {title}", f"{_scores_text(self.target_scores)} of {self.measured_on} ({note})"))
        rows += [("predicted classes", self._classes_text())] if isinstance(self.predictions, Predictions) else []
        rows += [] if self.doctor is None else [("doctor", self.doctor)]
        rows.append(("seconds", _seconds_text(result.seconds)))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The same for programs; accuracies are shares, and None is not known."""
        result = self.result
        config = result.config
        return {
            "task": self.task,
            "algorithm": config.algorithm,
            "sampler": config.sampler,
            "network": config.network,
            "seed": config.seed,
            "steps": result.step,
            "selected_step": result.selected_step,
            "selection": config.selection,
            "score": result.score,
            "equal_steps": result.equal_steps,
            "competing": result.competing,
            "last_score": result.metrics[-1]["score"] if result.metrics else None,
            **{f"target_{name}": (self.target_scores or {}).get(name) for name in SCORE_NAMES[config.regression]},
            "measured_on": self.measured_on,
            "selected": {name: value for name, value in self._selected().items() if name != "seconds"},
            "predicted": _predicted(self.predictions),
            "seconds": result.seconds,
        }

    def _how_chosen(self) -> str:
        """Which evaluation the model is from, by which rule, and what the last one had."""
        result, name = self.result, self.result.config.selection
        said = f"of step {result.selected_step:,}, chosen by {name}"
        if name == "last" or not result.metrics:
            return said
        if not result.competing:
            return f"{said}: the latest, as the penalty never had its full strength"
        if len(result.equal_steps) > 1 and name != FIRST_BEST:
            said += f": the latest of {len(result.equal_steps)} that it cannot tell apart, of {result.competing}"
        else:
            said += f": the best of {result.competing}"
        if result.selected_step != result.metrics[-1]["step"]:
            said += f" (score {result.score:.4g}; the last one had {result.metrics[-1]['score']:.4g})"
        return said

    @property
    def one_class(self) -> str | None:
        """A warning, if one class has far more of the predictions than of the source's labels."""
        if not isinstance(self.predictions, Predictions) or not len(self.predictions.classes):
            return None
        name, share, before = self.predictions.most_frequent(self.source_labels)
        if share - before < _TOO_MANY:
            return None
        return (
            f"{100 * share:.0f} % of the predictions are {name!r}, but {100 * before:.0f} % of the source's labels; "
            "unless that is so in the target, do not trust the model: try a pretrained --network, more --steps or a "
            "lower --penalty"
        )

    def _classes_text(self) -> str:
        assert isinstance(self.predictions, Predictions)
        name, share, before = self.predictions.most_frequent(self.source_labels)
        distance = self.predictions.distance(self.source_labels)
        most = f"most often {name}, {100 * share:.1f} % ({100 * before:.1f} % of the source's labels)"
        return f"{most}; all shares together differ by {distance:.2f}"

    def _selected(self) -> Mapping[str, Any]:
        """Measurements of the chosen weights."""
        chosen = [line for line in self.result.metrics if line["step"] == self.result.selected_step]
        return chosen[-1] if chosen else {}


def print_summary(summary: Summary, written: Sequence[Path]) -> None:
    """Print the table and where the files are."""
    console = Console(highlight=False)
    console.print(Text(summary.task, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.rows():
        table.add_row(Text(name), Text(value), style="bold green" if name.startswith("source validation") else "")
    console.print(table)
    console.print(Text(f"written: {', '.join(map(str, written))}"), soft_wrap=True)


def print_json(summary: Summary, written: Sequence[Path]) -> None:
    """Print one JSON object with the result and where the files are."""
    print(json.dumps({**summary.as_dict(), "written": [str(path) for path in written]}, indent=2))


def write_report(summary: Summary, folder: Path, data: Mapping[str, Any]) -> list[Path]:
    """Write ``report.md``, ``result.json`` for programs and, if matplotlib is there, the figure; return their paths."""
    result = summary.result
    figure = _draw_run(result, folder, title=f"{summary.task}: {result.config.algorithm} with {result.config.sampler}")
    parts = [f"# {_markdown(summary.task)}", "", *_table(("", ""), summary.rows()), ""]
    if summary.one_class is not None:
        parts += [f"**{_markdown(summary.one_class)}**", ""]
    if figure is not None:
        parts += [f"![Losses, scores, variance and time]({figure.name})", ""]
    predictions = summary.predictions
    parts += _number_parts(predictions) if isinstance(predictions, PredictedNumbers) else _class_parts(predictions)
    parts += [
        "## Data",
        "",
        *_table(("", ""), [(name, str(value)) for name, value in data.items() if name != "scale"]),
        "",
    ]
    settings = [(name, str(value)) for name, value in result.config.to_dict().items()]
    parts += ["## Settings", "", *_table(("setting", "value"), settings), ""]
    parts += ["Predict other samples with `vardass predict RUN DIR`, where RUN is this folder.", ""]
    write_text(folder / REPORT_FILE, "\n".join(parts))
    write_text(folder / RESULT_FILE, json.dumps(summary.as_dict(), indent=2) + "\n")
    return [folder / REPORT_FILE] if figure is None else [folder / REPORT_FILE, figure]


def _class_parts(predictions: Predictions) -> list[str]:
    counts, confidences = predictions.counts(), predictions.confidences
    total = max(1, sum(counts.values()))
    rows = [(name, f"{count:,} ({100 * count / total:.1f} %)") for name, count in counts.items()]
    parts = ["## Predicted classes of the target", "", *_table(("class", "samples"), rows), ""]
    if len(confidences):
        low = 100 * float((confidences < 0.5).double().mean())
        parts += [
            f"Mean confidence {100 * float(confidences.mean()):.1f} %; {low:.1f} % of samples are below 50 %.",
            "",
        ]
    return parts


def _number_parts(predictions: PredictedNumbers) -> list[str]:
    rows = [
        (name, ", ".join(f"{key} {value:.6g}" for key, value in found.items()))
        for name, found in predictions.ranges().items()
    ]
    return ["## Predicted numbers of the target", "", *_table(("number", "predictions"), rows), ""]


def _predicted(predictions: Predictions | PredictedNumbers) -> dict[str, Any]:
    return dict(predictions.ranges() if isinstance(predictions, PredictedNumbers) else predictions.counts())


def _scores_text(scores: Mapping[str, float]) -> str:
    if "accuracy" in scores:
        return f"{100 * scores['accuracy']:.1f} %"
    return f"{scores['r2']:.4f}, {scores['rmse']:.5g}, {scores['mae']:.5g}"


def _table(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    cells = [[_markdown(cell) for cell in row] for row in (header, *rows)]
    lines = [f"| {left} | {right} |" for left, right in cells]
    return [lines[0], "| --- | --- |", *lines[1:]]


def _markdown(text: str) -> str:
    """Text from files that no reader takes for markup."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", text).replace("\n", " ")


def _seconds_text(seconds: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {value:.2f}" for name, value in sorted(seconds.items(), key=lambda item: -item[1]))
    compiled = " (compiling included, once for each machine)" if "solver" in seconds and were_compiled() else ""
    return f"{sum(seconds.values()):.2f}: {parts}{compiled}"


def _draw_run(result: RunResult, folder: Path, *, title: str) -> Path | None:
    """Write the figure of a run and return its path; None without matplotlib or without any evaluation."""
    try:
        require_matplotlib()
    except InputError:
        return None
    if not result.metrics:
        return None
    panels: list[Callable[[Axes, RunResult], None]] = [_losses, _scores, _seconds]
    if any("source/variance" in line for line in result.metrics):
        panels.insert(2, _variances)
    figure = new_figure(3.6 * len(panels), 3.8)
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
    _line(axes, result, "source_r2", "source R²", 0)
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
