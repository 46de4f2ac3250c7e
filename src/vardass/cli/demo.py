"""``vardass demo``: what the package does, made of its own commands, on data that come with it."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vardass.adapt.batches import Inputs
from vardass.adapt.model import load_model
from vardass.adapt.run_folder import RunFolder, reading_of
from vardass.adapt.selection import outputs
from vardass.analysis.sampler_noise import variance_report
from vardass.backend import one_thread
from vardass.cli.adapt import adapt
from vardass.cli.stratify import stratify
from vardass.cli.terminal import progress_bar
from vardass.data import load_watch, standardise, watch_domains
from vardass.data.from_paths import domain_from_path
from vardass.errors import InputError
from vardass.files import write_text
from vardass.plots import new_figure, require_matplotlib, save_figure
from vardass.samplers.registry import make_sampler
from vardass.validate import check_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vardass.kernels import KernelLike
    from vardass.lab.record import Record, RunSpec

__all__ = ["demo"]

_PRESET = "demo"
_PAIRS = 4  # source-target pairs of the preset
_SHOWN_K = 64
_NOISE_BATCHES = 300
_GREY = "#555555"
# colours of Okabe and Ito, which stay apart for the colour-blind, and a marker of its own for each
_LOOKS = {
    "uniform": ("#000000", "o"),
    "vardass": ("#CC79A7", "^"),
    "stratified": ("#0072B2", "s"),
    "ordered": ("#D55E00", "D"),
    "balanced": ("#009E73", "v"),
    "recommended": ("#E69F00", "*"),
}
_NOTES = (
    "noise: variance of the minibatch loss relative to uniform batches, on the features of networks that vardass adapt "
    "trained; geometric mean over pairs. recommended: as vardass adapt, strata of equal size, a penalty and class "
    "confusion that set in later, then the same classes on both sides; its noise is that of its strata alone. "
    "accuracy: of target samples that were not trained on. gain: over uniform with the same pair, repeat and first "
    "weights; ± is the standard error. better: runs that gained."
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, strata, runs, numbers and the figure.")],
    repeats: Annotated[int, typer.Option("--repeats", "--seeds", help="Runs to average, each with its own seed.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 600,
    pairs: Annotated[int, typer.Option(help=f"Source-target pairs to train on, 1 to {_PAIRS}.")] = _PAIRS,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "--processes", help="Runs at a time; by default one for each CPU.")
    ] = None,
) -> None:
    """Show on real smart-watch data what strata save and what that does to training.

    First vardass stratify on one file; then vardass adapt from one wrist and group of people to the other, and how
    noisy its loss is with each way to draw batches; last vardass sweep demo, which trains with each of them: noise of
    the loss beside target accuracy. The same command goes on where it was stopped.
    """
    from vardass.lab.spec import load_sweep
    from vardass.lab.sweep import run_sweep

    require_matplotlib()  # before the work, not after it
    check_count(repeats, "--repeats")
    check_count(steps, "--steps")
    check_count(pairs, "--pairs", high=_PAIRS)
    if jobs is not None:
        check_count(jobs, "--jobs")
    sweep = load_sweep(_PRESET, repeats=repeats, settings={"steps": steps})
    tasks = list(dict.fromkeys(run.task for run in sweep.runs()))[:pairs]
    runs = [run for run in sweep.runs() if run.task in tasks]
    console = Console(highlight=False)
    data = _write_data(out)

    with one_thread():
        console.rule("vardass stratify: smart-watch data, right wrist, 10 people, 7 exercises")
        stratify([str(data / "right-wrist.npy")], _SHOWN_K, gammas="1", scale="median")
        console.rule("vardass adapt: other wrist, other people")
        noise = _adapt_and_measure(runs, data, out / "adapt", console)
    console.rule("vardass sweep demo: training with each way to draw batches")
    console.print(f"{len(runs)} runs of {steps} steps")
    with progress_bar() as progress:
        ended = run_sweep(runs, out / "sweep", jobs=jobs, progress=progress, text=sweep.to_yaml())
    if ended.interrupted or ended.failed:
        why = "interrupted" if ended.interrupted else f"{ended.failed} runs failed, see vardass status {out / 'sweep'}"
        print(f"{why}; the same command goes on", file=sys.stderr)
        raise typer.Exit(130 if ended.interrupted else 1)
    batch_size = runs[0].config["batch_size"]
    setting = f"{repeats} repeats x {len(tasks)} source-target pairs, {steps} steps, batches of {batch_size}"
    _show_results(out, noise, setting, console)


def _write_data(out: Path) -> Path:
    """Files as a user would have them: features of one wrist, and features with labels of each domain."""
    folder = out / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from None
    watch = load_watch()
    np.save(folder / "right-wrist.npy", standardise(watch.features[watch.side == 1]).numpy())
    names = np.array(watch.class_names)
    for domain, (features, labels) in watch_domains().items():
        np.savez(folder / f"{domain}.npz", x=features.numpy(), labels=names[labels.numpy()])
    return folder


Noise = dict[tuple[str, str], float]  # by algorithm and sampler


def _adapt_and_measure(runs: Sequence[RunSpec], data: Path, folder: Path, console: Console) -> Noise:
    """Adapt with uniform batches, then draw many batches of each kind from the features: variances of the loss."""
    ratios: dict[tuple[str, str], list[float]] = {}
    first = True
    for run in runs:
        config = run.config
        if run.repeat or config["sampler"] != "uniform" or config["algorithm"] == "erm":
            continue
        source, target = (data / f"{name}.npz" for name in run.task.split("->"))
        place = folder / f"{config['algorithm']}-{source.stem}-{target.stem}"
        options = {name: config[name] for name in ("algorithm", "sampler", "steps", "batch_size", "lr")}
        with redirect_stdout(console.file if first else io.StringIO()):
            adapt(
                source=[source],
                target=target,
                out=place,
                resume=RunFolder(place).has_checkpoint,
                algorithm_options=[f"{name}={value}" for name, value in config["algorithm_options"].items()],
                **options,
            )
        first = False
        algorithm, about = load_model(place)
        domains = [domain_from_path(path, about, reading_of(place, about)) for path in (source, target)]
        device = next(algorithm.parameters()).device
        features = [outputs(algorithm, Inputs(domain, device))[0] for domain in domains]
        loss: Any = algorithm.loss
        kernel = algorithm.kernel
        # runs of one task, repeat and algorithm differ in their sampler, and one in its settings
        rivals = [other for other in runs if _place(other) == _place(run)]
        report = variance_report(
            {other.cell["sampler"]: partial(_sampler, other, kernel) for other in rivals},
            *features,
            kernel=kernel,
            loss=loss,
            batches=_NOISE_BATCHES,
            gradient_batches=0,
        )
        for row in report.rows:
            ratio = report.relative(row.name, "loss_variance")
            if ratio is not None and ratio.value > 0:
                ratios.setdefault((config["algorithm"], row.name), []).append(math.log(ratio.value))
    console.print(f"{len(list(folder.iterdir()))} such runs with models, predictions and reports are in {folder}")
    return {key: math.exp(float(np.mean(values))) for key, values in ratios.items()}


def _place(run: RunSpec) -> tuple[str, int, str]:
    return run.task, run.repeat, run.config["algorithm"]


def _sampler(run: RunSpec, kernel: KernelLike, n: int) -> Any:
    """A sampler as the run has it: its strata and plans see the kernel of the very loss that is trained."""
    config = run.config
    options = {"kernel": kernel, **config["sampler_options"]}
    return make_sampler(config["sampler"], n, config["batch_size"], **options)


@dataclass(frozen=True)
class _Row:
    """One algorithm with one sampler: noise relative to uniform, accuracy and gain in per cent with their errors."""

    algorithm: str
    sampler: str
    name: str
    noise: float | None
    accuracy: float
    error: float | None
    gain: float | None
    gain_error: float | None
    better: str


def _show_results(out: Path, noise: Noise, setting: str, console: Console) -> None:
    """Print tables, and write figure and numbers."""
    from vardass.lab.averages import collect, current_records
    from vardass.lab.tables import make_tables
    from vardass.table import render

    records, _ = current_records(out / "sweep")
    results = collect(records)
    ((_, data),) = results.items()
    rows = []
    for label in data.labels:
        cell, uniform = data.average(label, scale=100), data.reference(label, "uniform")
        gain = None if uniform is None or uniform == label else data.gain(label, uniform)
        rows.append(
            _Row(
                label.algorithm_name,
                label.sampler,
                "source only" if label.algorithm == "erm" else label.row_name,
                noise.get((label.algorithm, label.sampler)),
                math.nan if cell.mean is None else cell.mean,
                cell.stderr,
                None if gain is None else gain.average.mean,
                None if gain is None else gain.average.stderr,
                "" if gain is None else f"{gain.wins}/{gain.pairs}",
            )
        )
    console.print(_table(rows, setting))
    console.print(_NOTES)
    console.print()
    console.print(render(make_tables(results, "splits"), "text"), soft_wrap=True, markup=False)
    write_text(out / "demo.csv", _csv(records, noise))
    written = [*save_figure(_figure(rows, setting), out / "demo.png"), out / "demo.csv", out / "sweep"]
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, markup=False)
    console.print(f"more: vardass report {out / 'sweep'}; vardass figure all", soft_wrap=True, markup=False)


def _table(rows: Sequence[_Row], setting: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title, table.title_justify = f"noise of the loss, and target accuracy: {setting}", "left"
    for name in ("loss", "batches", "noise", "accuracy, %", "gain", "better"):
        table.add_column(name, justify="left" if name in ("loss", "batches") else "right", no_wrap=True)
    for place, row in enumerate(rows):
        table.add_row(
            row.algorithm if row.noise is not None else "none",
            row.name,
            "" if row.noise is None else f"{row.noise:.3f}",
            f"{row.accuracy:.1f}{_plus_minus(row.error)}",
            "" if row.gain is None else f"{row.gain:+.1f}{_plus_minus(row.gain_error)}",
            row.better,
            end_section=place + 1 < len(rows) and rows[place + 1].algorithm != row.algorithm,
        )
    return table


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.1f}"


def _csv(records: Sequence[Record], noise: Noise) -> str:
    """One line for each run."""
    import pandas as pd

    rows = [
        {
            "algorithm": record.spec.config["algorithm"],
            "sampler": record.spec.cell["sampler"],
            "task": record.spec.task,
            "repeat": record.spec.repeat,
            "steps": record.spec.config["steps"],
            "target_accuracy": record.result["target_accuracy"],
            "relative_loss_variance": noise.get((record.spec.config["algorithm"], record.spec.cell["sampler"])),
        }
        for record in records
    ]
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.6f")


def _figure(rows: Sequence[_Row], setting: str) -> Figure:
    """Noise on the left, accuracy on the right, one line for each way to draw, one block for each loss."""
    figure = new_figure(10.5, 5.6)
    noisy = [row for row in rows if row.noise is not None]
    algorithms = list(dict.fromkeys(row.algorithm for row in noisy))
    plain = next((row.accuracy for row in rows if row.noise is None), None)
    grid = figure.subplots(len(algorithms), 2, squeeze=False, sharex="col")
    for (left, right), algorithm in zip(grid, algorithms, strict=True):
        group = [row for row in noisy if row.algorithm == algorithm]
        left.set_xscale("log")
        for place, row in enumerate(group):
            colour, marker = _LOOKS.get(row.sampler, (_GREY, "o"))
            look: dict[str, Any] = {"color": colour, "markersize": 8, "markeredgecolor": "white"}
            left.plot([1.0, row.noise or 1.0], [place, place], color=colour, linewidth=2.2)
            left.plot([row.noise or 1.0], [place], marker, **look)
            right.errorbar([row.accuracy], [place], xerr=row.gain_error, fmt=marker, elinewidth=2, capsize=3.5, **look)
            gain = "" if row.gain is None else f"  ({row.gain:+.1f}{_plus_minus(row.gain_error)})"
            _write(left, f"{row.noise:.2g}", place)
            _write(right, f"{row.accuracy:.1f}{gain}", place)
        left.axvline(1.0, color="#000000", linewidth=1, linestyle="--", zorder=0)
        right.axvline(group[0].accuracy, color="#000000", linewidth=1, linestyle="--", zorder=0)
        if plain is not None:
            right.axvline(plain, color="#999999", linewidth=1.4, linestyle=":", zorder=0)
        left.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
        left.set_title(algorithm, loc="left", fontsize=11, fontweight="bold")
        _dress(left, [row.name for row in group])
        _dress(right, [""] * len(group))
    grid[-1][0].set_xlabel("variance of the loss, relative to uniform batches")
    grid[-1][1].set_xlabel("target accuracy, % (gain over uniform)")
    figure.text(0.01, 0.985, "Less noise in the loss, and what came of it", fontsize=13, fontweight="bold", va="top")
    subtitle = (
        f"Smart-watch exercises, other wrist and other people; {setting}\n"
        "Bars: standard error of the gain. Dashed: uniform batches. Dotted: source only, without a discrepancy."
    )
    figure.text(0.01, 0.935, subtitle, fontsize=9, color=_GREY, va="top", linespacing=1.35)
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 0.88), w_pad=3.0)
    return figure


def _write(axes: Axes, text: str, place: int) -> None:
    """Write a number at the right of its line."""
    where: Any = ("axes fraction", "data")
    axes.annotate(text, (1.0, place), (6, 0), xycoords=where, textcoords="offset points", va="center", fontsize=9)


def _dress(axes: Axes, names: Sequence[str]) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
