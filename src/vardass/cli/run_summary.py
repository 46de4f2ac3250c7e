"""How a run shows its result: a table for the terminal, ``report.md``, and JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from vardass.adapt.algorithms import algorithm_options
from vardass.adapt.model import RunResult
from vardass.adapt.run_folder import RUN
from vardass.adapt.selection import FIRST_BEST, SCORE_NAMES
from vardass.backend import were_compiled
from vardass.cli.models import PredictedNumbers, Predictions
from vardass.cli.terminal import name_cell, print_line
from vardass.files import plain, write_output
from vardass.table import markdown, quote_markdown

_TOO_MANY = 0.3  # of the predictions, beyond the share of that class in the source
REPORT_FILE, RESULT_FILE = "report.md", "result.json"
_SCORES = {  # what a number is called, and which way is good
    "target_entropy": ("target entropy", "of at most {most:.3g}; lower = more confident predictions"),
    "target_information": ("target information", "of at most {most:.3g}; higher = confident, and of all classes"),
    "mmd": ("MMD² of held-out features", "(lower = source and target are more alike)"),
}
_KEPT = {
    "vote": "the adapted model, by a vote of class structure in the inputs and the features of both models",
    "adapted": "the adapted model",
    "source-only": "the source-only model",
}
_READ_LAST = "labels read only now, after the model was chosen"
_ORACLE = "model chosen BY TARGET LABELS (oracle): for comparison only"


@dataclass(frozen=True, eq=False)
class Summary:
    """The end of a run."""

    task: str
    result: RunResult
    predictions: Predictions | PredictedNumbers
    target_scores: Mapping[str, float] | None  # None without labels
    measured_on: str  # which samples of the target
    source_labels: Tensor  # (n,), those trained on
    doctor: str | None  # the short diagnosis of the chosen model, where it was made
    columns: str | None = None  # of embeddings

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, in the order of importance."""
        result = self.result
        config, line = result.config, self._selected()
        rows = [
            *([] if self.columns is None else [("features", self.columns)]),
            ("algorithm, sampler, network", f"{config.algorithm}, {config.sampler}, {config.network}"),
            ("steps", f"{result.step:,} of {config.steps:,}"),
            ("model", self._how_chosen()),
        ]
        names = SCORE_NAMES[config.regression]
        title = "R², RMSE, MAE" if config.regression else "accuracy"
        if f"source_{names[0]}" in line:
            rows.append((f"source validation {title}", _scores_text({name: line[f"source_{name}"] for name in names})))
        rows += self._choice_rows(title)
        most = math.log(max(1, len(getattr(self.predictions, "class_names", ()))))
        rows += [
            (name, f"{line[key]:.4g} {text.format(most=most)}") for key, (name, text) in _SCORES.items() if key in line
        ]
        for domain in ("source", "target"):
            if f"{domain}/reduction" in line:
                value = f"{1.0 / line[f'{domain}/reduction']:.3g} of that of uniform draws (less is better)"
                rows.append((f"variance of {domain} batches", value))
        value = "not known, the target has no labels to score by"
        if self.target_scores is not None:
            note = _ORACLE if config.selection == "oracle" else _READ_LAST
            value = f"{_scores_text(self.target_scores)} of {self.measured_on} ({note})"
        rows.append((f"target {title}", value))
        if isinstance(self.predictions, Predictions):
            name, share, before, distance = self.predictions.against(self.source_labels)
            value = f"most often {name}, {100 * share:.1f} % ({100 * before:.1f} % of the source's labels)"
            rows.append(("predicted classes", f"{value}; all shares differ by {distance:.2f} of at most 1"))
        rows += [] if self.doctor is None else [("doctor", self.doctor)]
        rows.append(("seconds", _seconds_text(result.seconds)))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The same for programs; accuracies are shares, and None is not known."""
        result, config = self.result, self.result.config
        return {
            "task": self.task,
            **{name: getattr(config, name) for name in ("algorithm", "sampler", "network", "seed")},
            "steps": result.step,
            "selected_step": result.selected_step,
            "selection": config.selection,
            "score": result.score,
            "equal_steps": result.equal_steps,
            "competing": result.competing,
            "last_score": result.metrics[-1]["score"] if result.metrics else None,
            **{f"target_{name}": (self.target_scores or {}).get(name) for name in SCORE_NAMES[config.regression]},
            "measured_on": self.measured_on,
            "choice": None if result.choice is None else plain(result.choice),
            "selected": {name: value for name, value in self._selected().items() if name != "seconds"},
            "predicted": self.predictions.to_dict(),
            "seconds": result.seconds,
        }

    def _choice_rows(self, title: str) -> list[tuple[str, str]]:
        """What was kept, beside a model of the source alone, and why."""
        choice = self.result.choice
        if choice is None:
            return []
        rows = [("kept", _KEPT[choice.model])]
        if choice.objection is not None:
            text = f"adaptation is not expected to help here: {choice.objection}; the source-only model was kept"
            rows = [("kept", text)]
        if choice.source_only_score is not None:
            score = (
                f"{choice.source_only_score:.4f}"
                if title.startswith("R²")
                else f"{100 * choice.source_only_score:.1f} %"
            )
            rows.append((f"source validation {title.split(',')[0]}, source-only", score))
        if "changed" in choice.evidence:
            changed, moved = choice.evidence["changed"], choice.evidence["moved"]
            rows.append(
                (
                    "adaptation would change" if choice.objection else "adaptation changed",
                    f"{100 * changed:.1f} % of the target's predictions, and {100 * moved:.1f} % of the class shares",
                )
            )
        return rows

    def _how_chosen(self) -> str:
        """Which evaluation the model is from, by which rule, and what the last one had."""
        result, name = self.result, self.result.config.selection
        text = f"of step {result.selected_step:,}, chosen by {name}"
        if name == "last" or not result.metrics:
            return text
        if not result.competing:
            return f"{text}: the latest, as the penalty never reached its full strength"
        if len(result.equal_steps) > 1 and name != FIRST_BEST:
            text += f": the latest of {len(result.equal_steps)} with equivalent scores, of {result.competing}"
        else:
            text += f": the best of {result.competing}"
        if result.selected_step != result.metrics[-1]["step"]:
            text += f" (score {result.score:.4g}; the last one had {result.metrics[-1]['score']:.4g})"
        return text

    @property
    def one_class(self) -> str | None:
        """A warning, if one class has far more of the predictions than of the source's labels."""
        if not isinstance(self.predictions, Predictions) or not len(self.predictions.classes):
            return None
        name, share, before, _ = self.predictions.against(self.source_labels)
        if share - before < _TOO_MANY:
            return None
        config, choice = self.result.config, self.result.choice
        doubt = (
            f"{100 * share:.0f} % of the predictions are {name!r}, but {100 * before:.0f} % of the source's labels; "
            "unless this holds in the target, do not trust the model: "
        )
        if choice is not None and choice.model == "source-only":
            if self.columns is None:  # files have no column of labels
                return f"{doubt}look at some of them"
            return f"{doubt}label some target samples, and train on them with --target-labels"
        tries = ["more --steps"]
        if config.network in ("conv", "resnet18-random"):
            tries.insert(0, "a pretrained --network FOLDER")
        adapts = "penalty" in algorithm_options(config.algorithm)
        tries.append("a lower --penalty" if adapts else "an --algorithm that adapts, such as mmd")
        return f"{doubt}try {', '.join(tries[:-1])} or {tries[-1]}"

    def _selected(self) -> Mapping[str, Any]:
        """Measurements of the chosen weights."""
        chosen = [line for line in self.result.metrics if line["step"] == self.result.selected_step]
        return chosen[-1] if chosen else {}


def print_summary(summary: Summary, written: Sequence[Path]) -> None:
    """Print the table and where the files are."""
    console = Console(highlight=False)
    print_line(console, summary.task, "bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.rows():
        style = "bold green" if name.startswith("source validation") else ""
        table.add_row(name_cell(name), name_cell(value), style=style)
    console.print(table)
    print_line(console, f"written: {', '.join(map(str, written))}")


def write_report(summary: Summary, folder: Path, data: Mapping[str, Any]) -> Path:
    """Write ``report.md``, whose path is returned, and ``result.json`` for programs."""

    def table(header: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> str:
        return markdown(header, [(name, str(value)) for name, value in rows], right=False)

    header, rows, remark = summary.predictions.overview()
    parts = [
        f"# {quote_markdown(summary.task)}",
        table(("", ""), summary.rows()),
        "" if summary.one_class is None else f"**{quote_markdown(summary.one_class)}**",
        f"## Predicted {'numbers' if summary.result.config.regression else 'classes'} of the target",
        table(header, rows),
        remark,
        "## Data",
        table(("", ""), [(name, value) for name, value in data.items() if name != "scale"]),
        "## Settings",
        table(("setting", "value"), summary.result.config.to_dict().items()),
        "`vardass report RUN`, where RUN is this folder, draws losses, scores, variance and time; "
        "`vardass predict RUN DIR` predicts other samples.",
    ]
    write_output(folder / REPORT_FILE, "\n\n".join(part for part in parts if part) + "\n", RUN)
    write_output(folder / RESULT_FILE, json.dumps(summary.as_dict(), indent=2) + "\n", RUN)
    return folder / REPORT_FILE


def _scores_text(scores: Mapping[str, float]) -> str:
    if "accuracy" in scores:
        return f"{100 * scores['accuracy']:.1f} %"
    return f"{scores['r2']:.4f}, {scores['rmse']:.5g}, {scores['mae']:.5g}"


def _seconds_text(seconds: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {value:.2f}" for name, value in sorted(seconds.items(), key=lambda item: -item[1]))
    compiled = " (including one-time compilation)" if "solver" in seconds and were_compiled() else ""
    return f"{sum(seconds.values()):.2f}: {parts}{compiled}"
