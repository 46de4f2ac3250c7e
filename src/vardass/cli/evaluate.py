"""``vardass evaluate RUN DATA``: how good the model of a run is on labelled data, by class and by domain."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vardass.adapt.run_folder import DATA_FILE, reading_of
from vardass.adapt.scores import ClassificationScores, Evaluation, evaluate_domains, labelled_domains, load_classifier
from vardass.cli.predict import clean_message, csv_text, sample_names
from vardass.cli.run_options import TrustCode, parse_pairs
from vardass.data.domains import Domain, Task
from vardass.data.images import IMAGENET
from vardass.data.own_data import own_task
from vardass.data.registry import image_options, load_task
from vardass.data.scaling import ScaledInputs, standardise_task
from vardass.data.splits import split_task
from vardass.errors import InputError
from vardass.files import write_text
from vardass.plots import evaluation_figure, require_matplotlib, save_figure
from vardass.validate import refuse_code, shorten

__all__ = ["evaluate"]

RESULT_FILE, SAMPLES_FILE, CONFUSION_FILE, FIGURE = "evaluation.json", "samples.csv", "confusion.csv", "evaluation"
_DATA = (
    "Labelled data, each a domain: folder of class folders or file of embeddings, as PATH or NAME=PATH; or a folder "
    "of domains. Without any: what the run kept out of training, and its target."
)
_LABELS = r"Array or column of labels in embeddings \[that of the run]; for .npy a file beside it \[{name}.labels.npy]."
_MOST_CLASSES, _MOST_DOMAINS = 20, 3  # rows and columns of the table of classes
_DASH = "–"


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[list[str] | None, typer.Argument(help=_DATA, metavar="DATA...")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the scores, tables and picture to.")] = None,
    key: Annotated[str | None, typer.Option(help="Array of features in an .npz file.")] = None,
    labels: Annotated[str | None, typer.Option(help=_LABELS)] = None,
    workers: Annotated[int, typer.Option(help="Processes that decode files.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Measure the model of a run on labelled data: accuracy, classes, confusion and calibration, by domain.

    The interval of the accuracy is Wilson's, for independent samples.
    Balanced accuracy is the mean recall of the classes that have samples.
    ECE is the expected calibration error, with 15 bins of the top probability.
    """
    run, given = run.expanduser(), [_named(text) for text in data or ()]
    if out is not None:
        _check_folder(out, [path for _, path in given])
    algorithm, about = load_classifier(run, device=device, trust_code=trust_code)
    note = ""
    if given:
        domains = labelled_domains(given, about, run, key=key, labels=labels)
    else:
        domains, note = _own_domains(run, about, trust_code=trust_code)
    try:
        found = evaluate_domains(algorithm, about, domains, workers=workers)
    except InputError as error:
        raise InputError(clean_message(str(error))) from error
    result = {"run": str(run), "measured_on": note or "the data given", **found.to_dict()}
    written = [] if out is None else _write(found, domains, result, out)
    if as_json:
        print(json.dumps({**result, "written": [str(path) for path in written]}, indent=2, allow_nan=False))
    else:
        _print(found, f"{run}{f': {note}' if note else ''}", written)


def _named(text: str) -> tuple[str | None, Path]:
    """Name and path of ``NAME=PATH``; no name for the path of something that is there."""
    name, equals, path = text.partition("=")
    if not equals or Path(text).expanduser().exists():
        return None, Path(text).expanduser()
    if not name or not path:
        raise InputError(f"DATA {text!r} is neither a path nor NAME=PATH; give one of them")
    return name, Path(path).expanduser()


# --- the data of the run itself -------------------------------------------------------------------------


def _own_domains(run: Path, about: Mapping[str, Any], *, trust_code: bool) -> tuple[dict[str, Domain], str]:
    """What a run kept out of training of each source, its target as far as it has labels, and what these are."""
    folder = run if run.is_dir() else run.parent
    how = reading_of(run, about)
    if "holdout" not in how:
        raise InputError(f"{run} has no {DATA_FILE}, so its data are not known; name data to evaluate on")
    refuse_code(how.get("dataset"), folder / DATA_FILE, trust_code=trust_code)
    task = _task_of(how, about)
    before = how["source_samples"], how["target_samples"], how["classes"]
    if before != ([len(source) for source in task.sources], len(task.target), list(task.class_names)):
        raise InputError(f"the data of {run} were changed since it was trained; name data to evaluate on")
    share = how.get("unlabelled_fraction", 1.0)
    splits = split_task(task, seed=about["config"].seed, holdout=how["holdout"], unlabelled_fraction=share)
    kept = splits.source_val
    found = {}
    for place, source in enumerate(task.sources):
        rows = (kept.domain_ids == place).nonzero().flatten()
        if len(rows):
            found[source.name] = kept.subset(rows)
    notes = ["samples held out of training"] if found else []
    if task.target.has_labels:
        # the model is chosen: now its labels may be read
        found[task.target.name] = (splits.target_test if len(splits.target_test) else task.target).reveal()
        test = "those not trained on" if len(splits.target_test) else "all, adapted to without labels"
        notes.append(f"of the target {test}")
    else:
        notes.append("the target has no labels")
    if not found:
        raise InputError(f"{run} kept 0 source samples out and its target has no labels; name data to evaluate on")
    return found, "; ".join(notes)


def _task_of(how: Mapping[str, Any], about: Mapping[str, Any]) -> Task:
    """The task of a run, loaded again as its folder says."""
    shape = tuple(about["input_shape"])
    images = {"size": shape[1:], "interpolation": how.get("interpolation", "bilinear")}
    if "dataset" not in how:
        names = ("key", "labels", "columns") if how["kind"] == "features" else ("front_end",)
        reading: dict[str, Any] = {name: how.get(name) for name in names}
        if how["kind"] == "image":
            reading = {**images, "channels": shape[0]}
        sources = [Path(source) for source in how["sources"]]
        return own_task(sources, Path(how["target"]), how["kind"], standardise=bool(how.get("scale")), **reading)
    options = parse_pairs("--data-option", [f"{name}={value}" for name, value in how["options"].items()])
    wanted = {name: images[name] for name in image_options(how["dataset"], IMAGENET)}
    task = load_task(how["dataset"], how["task"], how["root"], **{**wanted, **options})
    unscaled = how.get("scale") and not isinstance(task.target.dataset, ScaledInputs)
    return standardise_task(task)[0] if unscaled else task


# --- files ----------------------------------------------------------------------------------------------


def _check_folder(out: Path, data: Sequence[Path]) -> None:
    """Refuse a file, a folder inside the data, and one whose files of the same names are no older evaluation."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")
    for path in data:
        # the picture would be a sample the next time
        if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise InputError(f"--out {out} is inside the data {path}; choose a folder outside of it")
    names = [RESULT_FILE, SAMPLES_FILE, CONFUSION_FILE, *(f"{FIGURE}.{ending}" for ending in ("png", "svg"))]
    there = [name for name in names if (out / name).exists()]
    if there and not _is_evaluation(out / RESULT_FILE):
        raise InputError(f"{out} holds {there[0]!r}, which is of no earlier evaluation; choose another folder")


def _is_evaluation(file: Path) -> bool:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"run", "overall", "domains"} <= found.keys()


def _write(found: Evaluation, domains: Mapping[str, Domain], result: Mapping[str, Any], out: Path) -> list[Path]:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out}: {error.strerror}; choose another one with --out") from None
    names = found.overall.classes
    samples: list[Sequence[Any]] = [("domain", "sample", "label", "class", "confidence")]
    for title, domain in domains.items():
        confidences, guesses = found.probabilities[title].max(1)
        columns = found.labels[title].tolist(), guesses.tolist(), confidences.tolist()
        rows = zip(sample_names(domain, None), *columns, strict=True)
        samples += [(title, sample, names[y], names[guess], f"{sure:.6f}") for sample, y, guess, sure in rows]
    confusion: list[Sequence[Any]] = [("domain", "class", *names)]
    for title, scores in _tables(found):
        confusion += [(title, name, *row) for name, row in zip(names, scores.confusion.tolist(), strict=True)]
    write_text(out / RESULT_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
    write_text(out / SAMPLES_FILE, csv_text(samples[0], samples[1:]))
    write_text(out / CONFUSION_FILE, csv_text(confusion[0], confusion[1:]))
    written = [out / RESULT_FILE, out / SAMPLES_FILE, out / CONFUSION_FILE]
    try:
        require_matplotlib()
    except InputError:
        return written
    return [*written, *save_figure(evaluation_figure(found, title=Path(result["run"]).name), out / FIGURE)]


# --- terminal -------------------------------------------------------------------------------------------


def _tables(found: Evaluation) -> list[tuple[str, ClassificationScores]]:
    """Scores of each domain and, where there are several, of all; no domain's name is taken twice."""
    rows = list(found.domains.items())
    return rows if len(rows) == 1 else [*rows, ("all" if "all" not in found.domains else "all domains", found.overall)]


def _print(found: Evaluation, title: str, written: Sequence[Path]) -> None:
    console = Console(highlight=False)
    console.print(Text(title, style="bold"), soft_wrap=True)
    head = ("domain", "samples", "accuracy, 95 %", "balanced", "NLL", "Brier", "ECE")
    table = _empty(head)
    for name, scores in _tables(found):
        low, high = scores.accuracy_interval
        table.add_row(
            Text(name),
            f"{scores.n:,}",
            f"{_percent(scores.accuracy)} ({100 * low:.1f} to {100 * high:.1f})",
            _percent(scores.balanced_accuracy),
            *(f"{value:.3f}" for value in (scores.nll, scores.brier, scores.calibration_error)),
        )
    console.print(table)
    _print_classes(found, console)
    for name, scores in _tables(found):
        if scores.missing:
            many = f"{len(scores.missing)} of {len(scores.classes)} classes: {shorten(scores.missing)}"
            text = f"{name} has no samples of {many}; they are left out of the balanced accuracy"
            console.print(Text(text), soft_wrap=True)
    mistakes = [f"{one} as {other} ({count:,})" for one, other, count in found.overall.most_confused()]
    if mistakes:
        console.print(Text(f"most frequent mistakes: {', '.join(mistakes)}"), soft_wrap=True)
    if written:
        console.print(Text(f"written: {', '.join(map(str, written))}"), soft_wrap=True)


def _print_classes(found: Evaluation, console: Console) -> None:
    scores = found.overall
    domains = found.domains if 1 < len(found.domains) <= _MOST_DOMAINS else {}
    table = _empty(("class", "samples", "precision", "recall", "F1", *(f"recall {name}" for name in domains)))
    order = torch.arange(len(scores.classes))
    shown = len(order)
    if shown > _MOST_CLASSES:
        order, shown = scores.recall.nan_to_num(math.inf).argsort(stable=True)[:_MOST_CLASSES], _MOST_CLASSES
    columns = [scores.precision, scores.recall, scores.f1, *(each.recall for each in domains.values())]
    for place in order.tolist():
        cells = [_percent(float(column[place])) for column in columns]
        table.add_row(Text(scores.classes[place]), f"{int(scores.support[place]):,}", *cells)
    console.print()
    console.print(table)
    if shown < len(scores.classes):
        text = f"the {shown} of {len(scores.classes)} classes with the lowest recall; --out writes all"
        console.print(Text(text), soft_wrap=True)


def _empty(head: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(Text(name), justify="right" if place else "left", overflow="fold")
    return table


def _percent(share: float) -> str:
    return _DASH if math.isnan(share) else f"{100 * share:.1f} %"
