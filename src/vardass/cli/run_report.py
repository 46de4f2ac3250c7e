"""How a run shows its result: a table for the terminal and ``report.md`` with the figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vardass.adapt.model import RunResult
from vardass.cli.run_figure import draw_run
from vardass.cli.runs import Predictions
from vardass.files import write_text

__all__ = ["Summary", "print_json", "print_summary", "write_report"]

REPORT_FILE, RESULT_FILE = "report.md", "result.json"
_SCORES = {
    "target_entropy": "target entropy, nats (less is surer)",
    "target_information": "target information, nats (more is better)",
    "target_density": "target neighbourhood density (more is better)",
    "mmd": "MMD² of held-out features (less is better)",
}
_READ_LAST = "labels read only now, after the model was chosen"
_ORACLE = "model chosen BY TARGET LABELS (oracle): for comparison only"


@dataclass(frozen=True, eq=False)
class Summary:
    """The end of a run.

    Attributes
    ----------
    task : str
        Name of the task.
    result : RunResult
        What the trainer returned.
    predictions : Predictions
        Of target samples.
    target_accuracy : float or None
        None where the target has no labels.
    measured_on : str
        Which target samples the accuracy is of.
    """

    task: str
    result: RunResult
    predictions: Predictions
    target_accuracy: float | None
    measured_on: str

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, in the order of importance."""
        result = self.result
        config, line = result.config, self._selected()
        rows = [
            ("algorithm, sampler, network", f"{config.algorithm}, {config.sampler}, {config.network}"),
            ("steps", f"{result.step:,} of {config.steps:,}, chosen: {result.selected_step:,} by {config.selection}"),
        ]
        if "source_accuracy" in line:
            rows.append(("source validation accuracy", f"{100 * line['source_accuracy']:.1f} %"))
        rows += [(label, f"{line[key]:.4g}") for key, label in _SCORES.items() if key in line]
        for domain in ("source", "target"):
            if f"{domain}/reduction" in line:
                value = f"{line[f'{domain}/reduction']:.3g} times less than uniform draws"
                rows.append((f"variance of {domain} batches", value))
        if self.target_accuracy is None:
            rows.append(("target accuracy", "not known, the target has no labels"))
        else:
            note = _ORACLE if config.selection == "oracle" else _READ_LAST
            rows.append(("target accuracy", f"{100 * self.target_accuracy:.1f} % of {self.measured_on} ({note})"))
        rows.append(("seconds", _seconds(result.seconds)))
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
            "target_accuracy": self.target_accuracy,
            "measured_on": self.measured_on,
            "selected": {name: value for name, value in self._selected().items() if name != "seconds"},
            "predicted": self.predictions.counts(),
            "seconds": result.seconds,
        }

    def _selected(self) -> Mapping[str, Any]:
        """Measurements of the chosen weights."""
        chosen = [line for line in self.result.metrics if line["step"] == self.result.selected_step]
        return chosen[-1] if chosen else {}


def print_summary(summary: Summary, written: Sequence[Path], *, console: Console | None = None) -> None:
    """Print the table and where the files are."""
    console = console or Console(highlight=False)
    console.print(Text(summary.task, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.rows():
        table.add_row(Text(name), Text(value), style="bold green" if name == "source validation accuracy" else "")
    console.print(table)
    console.print(Text(f"written: {', '.join(map(str, written))}"), soft_wrap=True)


def print_json(summary: Summary, written: Sequence[Path]) -> None:
    """Print one JSON object with the result and where the files are."""
    print(json.dumps({**summary.as_dict(), "written": [str(path) for path in written]}, indent=2))


def write_report(summary: Summary, folder: Path, data: Mapping[str, Any]) -> list[Path]:
    """Write ``report.md``, ``result.json`` for programs and, if matplotlib is there, the figure; return their paths."""
    result = summary.result
    figure = draw_run(result, folder, title=f"{summary.task}: {result.config.algorithm} with {result.config.sampler}")
    parts = [f"# {summary.task}", "", *_table(("", ""), summary.rows()), ""]
    if figure is not None:
        parts += [f"![Losses, scores, variance and time]({figure.name})", ""]
    counts = summary.predictions.counts()
    total = max(1, sum(counts.values()))
    parts += ["## Predicted classes of the target", ""]
    rows = [(name, f"{count:,} ({100 * count / total:.1f} %)") for name, count in counts.items()]
    parts += [*_table(("class", "samples"), rows), ""]
    confidences = summary.predictions.confidences
    if len(confidences):
        low = 100 * float((confidences < 0.5).double().mean())
        parts += [
            f"Mean confidence {100 * float(confidences.mean()):.1f} %; {low:.1f} % of samples are below 50 %.",
            "",
        ]
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


def _table(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    lines = [f"| {left} | {right} |" for left, right in cells]
    return [lines[0], "| --- | --- |", *lines[1:]]


def _seconds(seconds: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {value:.2f}" for name, value in sorted(seconds.items(), key=lambda item: -item[1]))
    return f"{sum(seconds.values()):.2f}: {parts}"
