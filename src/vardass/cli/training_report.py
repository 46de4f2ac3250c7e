"""What the demo's trainings showed: numbers, tables and sentences, all computed from the runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, stdev

from rich import box
from rich.table import Table

from vardass.cli.training_demo import BATCH_SIZE, LAMBDA, PERIOD, WAYS, Run

__all__ = [
    "LOSSES",
    "Cell",
    "as_csv",
    "findings",
    "headline",
    "pair_table",
    "setting",
    "standard_error",
    "summarise",
    "summary_table",
]

LOSSES = {"mmd": "MMD", "coral": "CORAL"}


@dataclass(frozen=True)
class Cell:
    """One way to draw with one loss, over all pairs and seeds.

    Attributes
    ----------
    variance, error : float or None
        Of the minibatch discrepancy relative to uniform batches at the same state of the network, the
        error being the squared one around the value of all samples; geometric means over states.
    accuracy, accuracy_error : float
        Target accuracy in per cent, mean and standard error over the runs, NaN for one run.
    gain, gain_error : float
        The same for the difference from uniform with the same pair, seed and first weights.
    wins : int
        Runs that are more accurate than uniform.
    by_pair : dict
        Mean accuracy for each (source, target).
    """

    way: str
    variance: float | None
    error: float | None
    accuracy: float
    accuracy_error: float
    gain: float
    gain_error: float
    wins: int
    runs: int
    by_pair: dict[tuple[str, str], float]


def summarise(runs: Sequence[Run]) -> dict[str, list[Cell]]:
    """Cells of each loss, in the order of `WAYS`."""
    return {loss: _cells([run for run in runs if run.job.loss in (loss, "none")]) for loss in LOSSES}


def _cells(runs: Sequence[Run]) -> list[Cell]:
    grouped = {way: [run for run in runs if run.job.way == way] for way in WAYS}
    uniform = {_key(run): run.accuracy for run in grouped["uniform"]}
    cells = []
    for way, group in grouped.items():
        if not group:
            continue
        accuracies = [100.0 * run.accuracy for run in group]
        gains = [100.0 * (run.accuracy - uniform[_key(run)]) for run in group]
        noise = [state for run in group for state in run.noise]
        pairs = {(run.job.source, run.job.target): 0.0 for run in group}
        for pair in pairs:
            pairs[pair] = fmean(100.0 * run.accuracy for run in group if (run.job.source, run.job.target) == pair)
        cells.append(
            Cell(
                way,
                _ratio([(state.variance, state.uniform_variance) for state in noise]),
                _ratio([(state.error, state.uniform_error) for state in noise]),
                fmean(accuracies),
                standard_error(accuracies),
                fmean(gains),
                standard_error(gains),
                sum(gain > 0 for gain in gains),
                len(group),
                pairs,
            )
        )
    return cells


def _key(run: Run) -> tuple[str, str, int]:
    return run.job.source, run.job.target, run.job.seed


def standard_error(values: Sequence[float]) -> float:
    """Of the mean, NaN for one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    ratios = [a / b for a, b in pairs if a > 0 and b > 0]
    return geometric_mean(ratios) if ratios else None


def setting(runs: Sequence[Run]) -> str:
    """What was run, in one sentence."""
    seeds = len({run.job.seed for run in runs})
    pairs = len({(run.job.source, run.job.target) for run in runs})
    return (
        f"{_count(seeds, 'seed')} x {_count(pairs, 'source-target pair')} = {_count(seeds * pairs, 'run')} of "
        f"{runs[0].job.steps} steps, batch size {BATCH_SIZE}, lambda rising linearly from 0 to {LAMBDA:g}, "
        f"refresh every {PERIOD} steps"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def summary_table(loss: str, cells: Sequence[Cell], *, caption: str) -> Table:
    """Noise and accuracy side by side."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title, table.title_justify = f"{LOSSES[loss]}: noise of the loss, and target accuracy", "left"
    table.caption, table.caption_justify = caption, "left"
    table.add_column("batches", no_wrap=True)
    for name in ("variance", "sq. error", "accuracy, %", "gain", "better"):
        table.add_column(name, justify="right", no_wrap=True)
    best = max(cell.accuracy for cell in cells)
    for cell in cells:
        itself = cell.way == "uniform"
        table.add_row(
            cell.way,
            _share(cell.variance),
            _share(cell.error),
            f"{cell.accuracy:.1f}{_plus_minus(cell.accuracy_error)}",
            "" if itself else f"{_signed(cell.gain)}{_plus_minus(cell.gain_error)}",
            "" if itself else f"{cell.wins}/{cell.runs}",
            style="bold" if cell.accuracy == best else "",
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # no -0.0


def _plus_minus(error: float) -> str:
    return "" if math.isnan(error) else f" ± {error:.1f}"


def pair_table(cells: dict[str, list[Cell]]) -> Table:
    """Accuracy on each pair, the losing ones too."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title, table.title_justify = "target accuracy of each pair, %; * = below uniform", "left"
    table.add_column("loss", no_wrap=True)
    table.add_column("batches", no_wrap=True)
    pairs = list(next(iter(cells.values()))[0].by_pair)
    for source, target in pairs:
        table.add_column(f"{source} to\n{target}", justify="right", no_wrap=True)
    for loss, group in cells.items():
        uniform = _of(group, "uniform").by_pair
        for cell in group:
            shown = [f"{cell.by_pair[pair]:.1f}{'*' if cell.by_pair[pair] < uniform[pair] else ' '}" for pair in pairs]
            table.add_row(LOSSES[loss], cell.way, *shown, end_section=cell is group[-1])
    return table


def _of(cells: Sequence[Cell], way: str) -> Cell:
    return next(cell for cell in cells if cell.way == way)


def findings(loss: str, cells: Sequence[Cell]) -> str:
    """What the numbers say, in words."""
    best, uniform = max(cells, key=lambda cell: cell.accuracy), _of(cells, "uniform")
    sentences = [f"most accurate: {best.way} ({best.accuracy:.1f} %, uniform {uniform.accuracy:.1f} %)"]
    measured = [(cell.variance, cell.way) for cell in cells if cell.variance is not None]
    if measured:
        variance, quiet = min(measured)
        also = ", which is also" if quiet == best.way else ", which is not"
        sentences.insert(0, f"least variance: {quiet} ({variance:.3f} of uniform's){also} the most accurate")
    for verdict in _VERDICTS:
        ways = [f"{cell.way} ({_signed(cell.gain)})" for cell in cells if _verdict(cell) == verdict]
        if ways:
            sentences.append(f"{verdict}: {', '.join(ways)}")
    return f"{LOSSES[loss]}: " + "; ".join(sentences) + "."


_VERDICTS = (
    "more than two standard errors above uniform",
    "within two standard errors of uniform",
    "more than two standard errors below uniform",
    "gain over uniform in the only run",
)


def _verdict(cell: Cell) -> str | None:
    if cell.way in ("uniform", "source only"):
        return None
    if math.isnan(cell.gain_error):
        return _VERDICTS[3]
    if abs(cell.gain) <= 2.0 * cell.gain_error:
        return _VERDICTS[1]
    return _VERDICTS[0 if cell.gain > 0 else 2]


def headline(cells: dict[str, list[Cell]]) -> str:
    """Range of variances and gains of the ways that look at features."""
    chosen = [cell for group in cells.values() for cell in group if _looks_at_features(cell.way)]
    gains = [cell.gain for cell in chosen]
    variances = [cell.variance for cell in chosen if cell.variance is not None]
    text = f"Target accuracy {_signed(min(gains))} to {_signed(max(gains))} points next to uniform batches"
    if variances:
        text += f", with {min(variances):.2g} to {max(variances):.2g} of the loss variance"
    return text


def _looks_at_features(way: str) -> bool:
    sampler = WAYS[way].sampler
    return sampler is not None and sampler.needs_features


def as_csv(runs: Sequence[Run]) -> str:
    """One line for each run."""
    rows = [
        {
            "loss": run.job.loss,
            "batches": run.job.way,
            "source": run.job.source,
            "target": run.job.target,
            "seed": run.job.seed,
            "steps": run.job.steps,
            "target_accuracy": f"{run.accuracy:.6f}",
            "relative_variance": _ratio([(state.variance, state.uniform_variance) for state in run.noise]),
            "relative_squared_error": _ratio([(state.error, state.uniform_error) for state in run.noise]),
            "sampling_seconds": f"{run.sampling_seconds:.3f}",
        }
        for run in runs
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
