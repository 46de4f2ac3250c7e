"""``vardass demo``: what the package does, made of its own commands, on data that come with it."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
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
from vardass.cli.embeddings import check_folder, make_folder
from vardass.cli.stratify import stratify
from vardass.cli.terminal import progress_bar
from vardass.data import load_watch, standardise, watch_domains
from vardass.data.from_paths import domain_from_path
from vardass.errors import InputError
from vardass.files import OUTPUTS_FILE, write_output
from vardass.samplers.registry import make_sampler
from vardass.validate import check_count

if TYPE_CHECKING:
    from vardass.lab.record import RunSpec
    from vardass.table import Average

_PRESET = "demo"
_STRATIFIED, _NOISE_FILE = "right-wrist.npy", "noise.json"
_PAIRS = 4  # source-target pairs of the preset
_SHOWN_K = 64
_NOISE_BATCHES = 300
_NOTES = (
    "noise: variance of the minibatch loss relative to uniform batches, on the features of networks that vardass adapt "
    "trained; geometric mean over pairs. recommended: the defaults of vardass adapt, with strata of equal size, "
    "delayed penalty and class confusion, then the same classes on both sides; its noise is that of its strata alone. "
    "accuracy: on target samples that were not trained on. gain: over uniform with the same pair, repeat and initial "
    "weights; ± is the standard error. better: runs with a gain."
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, strata, runs, numbers and the page.")] = Path("demo"),
    repeats: Annotated[int, typer.Option(help="Runs to average, each with its own seed.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each training run.")] = 600,
    pairs: Annotated[int, typer.Option(help=f"Source-target pairs to train on, 1 to {_PAIRS}.")] = _PAIRS,
    jobs: Annotated[int | None, typer.Option(help="Concurrent runs; by default one for each CPU.")] = None,
) -> None:
    """Show on real smart-watch data how much variance strata remove and how that affects training.

    Runs vardass stratify on one file; then vardass adapt from one wrist and group of people to the other, and measures
    how noisy the loss is with each sampler; finally vardass sweep demo, which trains with each sampler and shows the
    noise of the loss beside target accuracy. The same command resumes where it stopped.
    """
    from vardass.lab.spec import load_sweep
    from vardass.lab.sweep import run_sweep

    check_count(repeats, "--repeats")
    check_count(steps, "--steps")
    check_count(pairs, "--pairs", high=_PAIRS)
    if jobs is not None:
        check_count(jobs, "--jobs")
    _check_out(out)
    sweep = load_sweep(_PRESET, repeats=repeats, settings={"steps": steps})
    tasks = list(dict.fromkeys(run.task for run in sweep.runs()))[:pairs]
    runs = [run for run in sweep.runs() if run.task in tasks]
    console = Console(highlight=False)
    data = _write_data(out)

    with one_thread():
        console.rule("vardass stratify: smart-watch data, right wrist, 10 people, 7 exercises")
        stratify([str(data / _STRATIFIED)], _SHOWN_K, gammas="1", scale="median")
        console.rule("vardass adapt: other wrist, other people")
        noise = _adapt_and_measure(runs, data, out / "adapt", console)
    console.rule("vardass sweep demo: training with each sampler")
    console.print(f"{len(runs)} runs of {steps} steps")
    with progress_bar() as progress:
        ended = run_sweep(runs, out / "sweep", jobs=jobs, progress=progress, text=sweep.to_yaml())
    if ended.interrupted or ended.failed:
        why = "interrupted" if ended.interrupted else f"{ended.failed} runs failed, see vardass status {out / 'sweep'}"
        print(f"{why}; the same command resumes", file=sys.stderr)
        raise typer.Exit(130 if ended.interrupted else 1)
    batch_size = runs[0].config["batch_size"]
    setting = f"{repeats} repeats x {len(tasks)} source-target pairs, {steps} steps, batches of {batch_size}"
    _show_results(out, noise, setting, console)


def _check_out(out: Path) -> None:
    """Refuse a folder with anything but an earlier demo, whose files are replaced."""
    check_folder(out)
    data = {_STRATIFIED, *(f"{name}.npz" for name in watch_domains()), Path(_STRATIFIED).stem + ".strata.npz"}
    for folder, own in ((out, {"data", "adapt", "sweep", _NOISE_FILE}), (out / "data", data)):
        entries = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        if foreign := [name for name in entries if name not in (*own, OUTPUTS_FILE)]:
            raise InputError(f"--out {out} holds {foreign[0]!r}, which is not of a demo; choose a new or empty folder")


def _write_data(out: Path) -> Path:
    """Files as a user would have them: features of one wrist, and features with labels of each domain."""
    folder = out / "data"
    make_folder(folder)
    watch = load_watch()

    def write(name: str, save: Callable[..., None], *values: Any, **arrays: Any) -> None:
        packed = io.BytesIO()
        save(packed, *values, **arrays)
        write_output(folder / name, packed.getvalue(), "demo")

    write(_STRATIFIED, np.save, standardise(watch.features[watch.side == 1]).numpy())
    names = np.array(watch.class_names)
    for domain, (features, labels) in watch_domains().items():
        write(f"{domain}.npz", np.savez, x=features.numpy(), labels=names[labels.numpy()])
    return folder


Noise = dict[str, dict[str, float]]  # by algorithm, then sampler


def _adapt_and_measure(runs: Sequence[RunSpec], data: Path, folder: Path, console: Console) -> Noise:
    """Adapt with uniform batches, then draw many batches of each kind from the features: variances of the loss."""
    ratios: dict[str, dict[str, list[float]]] = {}
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
        # runs of one task, repeat and algorithm differ in their sampler, whose strata see the kernel of the loss
        factories = {
            other.cell["sampler"]: partial(
                make_sampler,
                other.config["sampler"],
                batch_size=other.config["batch_size"],
                **{"kernel": kernel, **other.config["sampler_options"]},
            )
            for other in runs
            if (other.task, other.repeat, other.config["algorithm"]) == (run.task, run.repeat, config["algorithm"])
        }
        report = variance_report(
            factories, *features, kernel=kernel, loss=loss, batches=_NOISE_BATCHES, gradient_batches=0
        )
        for row in report.rows:
            ratio = report.relative(row.name, "loss_variance")
            if ratio is not None and ratio.value > 0:
                of_sampler = ratios.setdefault(config["algorithm"], {}).setdefault(row.name, [])
                of_sampler.append(math.log(ratio.value))
    console.print(f"{len(list(folder.iterdir()))} such runs with models, predictions and reports are in {folder}")
    return {
        algorithm: {name: math.exp(float(np.mean(logs))) for name, logs in of_samplers.items()}
        for algorithm, of_samplers in ratios.items()
    }


def _show_results(out: Path, noise: Noise, setting: str, console: Console) -> None:
    """Print tables, and write numbers and the page of the sweep."""
    from vardass.lab.averages import collect, current_records
    from vardass.lab.page import write_page
    from vardass.lab.tables import make_tables
    from vardass.table import render

    records, _ = current_records(out / "sweep")
    results = collect(records)
    ((_, data),) = results.items()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title, table.title_justify = f"noise of the loss, and target accuracy: {setting}", "left"
    for name in ("loss", "batches", "noise", "accuracy, %", "gain", "better"):
        table.add_column(name, justify="left" if name in ("loss", "batches") else "right", no_wrap=True)
    before = None
    for label in data.labels:
        if before not in (None, label.algorithm):
            table.add_section()
        before = label.algorithm
        accuracy, uniform = data.average(label, scale=100), data.reference(label, "uniform")
        gain = None if uniform is None or uniform == label else data.gain(label, uniform)
        noisy = noise.get(label.algorithm, {}).get(label.sampler)
        table.add_row(
            "none" if noisy is None else label.algorithm_name,
            "source only" if label.algorithm == "erm" else label.row_name,
            "" if noisy is None else f"{noisy:.3f}",
            _with_error(accuracy),
            "" if gain is None else _with_error(gain.average, "+"),
            "" if gain is None else f"{gain.wins}/{gain.wins + gain.ties + gain.losses}",
        )
    console.print(table)
    console.print(_NOTES)
    console.print()
    console.print(render(make_tables(results, "splits"), "text"), soft_wrap=True, markup=False)
    write_output(out / _NOISE_FILE, json.dumps(noise, indent=2) + "\n", "demo")
    written = [write_page(out / "sweep"), out / _NOISE_FILE, out / "sweep"]
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, markup=False)


def _with_error(found: Average, sign: str = "") -> str:
    error = "" if found.stderr is None else f" ± {found.stderr:.1f}"
    return "" if found.mean is None else f"{found.mean:{sign}.1f}{error}"
