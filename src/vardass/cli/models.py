"""What the model of a run is for: ``vardass predict``, ``vardass evaluate`` and ``vardass export``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs
from vardass.adapt.config import RunConfig
from vardass.adapt.devices import pick_device
from vardass.adapt.model import MODEL_FILE, export_model, load_model
from vardass.adapt.regression import regression_scores
from vardass.adapt.run_folder import DATA_FILE, reading_of
from vardass.adapt.scores import Evaluation, RegressionEvaluation, evaluate_domains, labelled_domains
from vardass.adapt.selection import outputs
from vardass.cli.embeddings import check_folder, check_output, make_folder
from vardass.cli.run_options import TrustCode, parse_pairs
from vardass.cli.terminal import name_cell, print_json, print_line, save_picture, titled_table
from vardass.data.domains import Domain, Task, find_sample, known_rows
from vardass.data.embedding_tasks import standardise_task
from vardass.data.from_paths import domain_from_path, task_from_paths
from vardass.data.images import IMAGENET
from vardass.data.registry import image_options, load_task
from vardass.data.splits import SPLITS, split_task
from vardass.errors import InputError
from vardass.files import write_output
from vardass.plots import evaluation_figure
from vardass.table import csv_text
from vardass.validate import refuse_code, shorten

PREDICTIONS_FILE = "predictions.csv"
RESULT_FILE, SAMPLES_FILE, FIGURE = "evaluation.json", "samples.csv", "evaluation"
_DATA = (
    "Labelled data, one argument for each domain: folder of class folders or file of embeddings, as PATH or NAME=PATH; "
    "or a folder of domains. By default: the samples held out of training, and the target."
)
_LABELS = r"Array or column of labels in embeddings \[that of the run]; for .npy a file beside it \[{name}.labels.npy]."
_MOST_CLASSES, _MOST_DOMAINS = 20, 3  # rows and columns of the table of classes

Run = Annotated[Path, typer.Argument(help="Folder of a run.")]
Key = Annotated[str | None, typer.Option(help="Array of features in an .npz file.")]
Workers = Annotated[int, typer.Option(help="Number of processes that decode files.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]


def predict(
    run: Run,
    data: Annotated[Path, typer.Argument(help="Folder of files, or file of embeddings, as in training.")],
    out: Annotated[Path | None, typer.Option(help="CSV file to write; by default the table is printed.")] = None,
    key: Key = None,
    workers: Workers = 0,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Predict a class with confidence for each sample, as CSV (sample, class, confidence); in a regression, numbers."""
    data = data.expanduser()
    if out is not None:
        if out.suffix.lower() != ".csv":
            raise InputError(f"--out {out} is written as CSV; give it a name that ends with .csv")
        check_output("--out", out, data, "predict")
    algorithm, about, how = load_run(run, device=device, trust_code=trust_code)
    domain = domain_from_path(data, about, how, key=key)
    predictions = predict_domain(algorithm, domain, about["config"].changed(workers=workers), root=data)
    if out is None:
        print(predictions.to_csv(), end="")
    else:
        write_output(out, predictions.to_csv(), "predict")
        print(f"{len(predictions.samples):,} predictions written to {out}")


def export(
    run: Run,
    out: Annotated[Path | None, typer.Option(help=r"File to write \[RUN/model.pt2].")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Export the model of a run for programs without vardass: torch.export.load reads it, with torch alone.

    It includes the scaling of columns or normalisation of pixels, takes unscaled samples and returns probabilities
    or numbers. Class names and the shape of a sample are written to a JSON file beside it.
    """
    algorithm, about, how = load_run(run, device="cpu", trust_code=trust_code)
    folder = run.expanduser() if run.expanduser().is_dir() else run.expanduser().parent
    out = folder / "model.pt2" if out is None else out.expanduser()
    if out.suffix != ".pt2":
        raise InputError(f"--out {out} is written by torch.export; give it a name that ends with .pt2")
    for file in (out, out.with_suffix(".json")):
        check_output("--out", file, folder / MODEL_FILE, "export")
    written = export_model(algorithm, about, how, out)
    print(f"written: {', '.join(map(str, written))}")


def load_run(run: Path, *, device: str = "auto", trust_code: bool) -> tuple[Algorithm, dict[str, Any], dict[str, Any]]:
    """The chosen model of a run, what its file says of it, and how its samples were read."""
    run = run.expanduser()
    algorithm, about = load_model(run, device=pick_device(device), trust_code=trust_code)
    return algorithm, about, reading_of(run, about)


# --- predictions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Predictions:
    """Samples (files, or rows from 0), positions (n,) of their classes in ``class_names``, and their probability."""

    samples: Sequence[str]
    classes: Tensor
    confidences: Tensor
    class_names: Sequence[str]

    def to_dict(self) -> dict[str, int]:
        """How often each class was predicted."""
        found = torch.bincount(self.classes, minlength=len(self.class_names)).tolist()
        return dict(zip(self.class_names, found, strict=True))

    def against(self, labels: Tensor) -> tuple[str, float, float, float]:
        """The most frequent class, its share of the predictions and of other ``labels`` (m,), and ½ Σ|p - q| of all."""
        count = len(self.class_names)
        p, q = (torch.bincount(y.cpu(), minlength=count).double() / max(1, len(y)) for y in (self.classes, labels))
        place = int(p.argmax())
        return self.class_names[place], float(p[place]), float(q[place]), float((p - q).abs().sum() / 2)

    def scores(self, labels: Tensor) -> dict[str, float]:
        """Accuracy for the true classes (n,)."""
        known = known_rows(labels)
        return {"accuracy": float((self.classes[known] == labels[known]).double().mean())}

    def overview(self) -> tuple[tuple[str, str], list[tuple[str, str]], str]:
        """Header and rows of a table for a report, and a remark on it."""
        total, sure = max(1, len(self.classes)), self.confidences
        rows = [(name, f"{count:,} ({100 * count / total:.1f} %)") for name, count in self.to_dict().items()]
        low = 100 * float((sure < 0.5).double().mean())
        remark = f"Mean confidence {100 * float(sure.mean()):.1f} %; {low:.1f} % of samples are below 50 %."
        return ("class", "samples"), rows, remark if len(sure) else ""

    def to_csv(self) -> str:
        """A table with the columns sample, class and confidence."""
        rows = zip(self.samples, self.classes.tolist(), self.confidences.tolist(), strict=True)
        lines = ((sample, self.class_names[place], f"{confidence:.6f}") for sample, place, confidence in rows)
        return csv_text(("sample", "class", "confidence"), lines)


@dataclass(frozen=True, eq=False)
class PredictedNumbers:
    """Samples (files, or rows from 0) and their numbers (n, m), in their own units, by a regression."""

    samples: Sequence[str]
    values: Tensor
    names: Sequence[str]

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Mean, deviation, smallest and largest of each number."""
        columns = self.values.double()
        found = {"mean": columns.mean(0), "deviation": columns.std(0, correction=0)}
        found |= {"smallest": columns.amin(0), "largest": columns.amax(0)}
        return {name: {key: float(row[i]) for key, row in found.items()} for i, name in enumerate(self.names)}

    def scores(self, labels: Tensor) -> dict[str, float]:
        """`regression_scores` for the true numbers (n, m)."""
        known = known_rows(labels)
        return regression_scores(self.values[known], labels[known])

    def overview(self) -> tuple[tuple[str, str], list[tuple[str, str]], str]:
        """Header and rows of a table for a report, and no remark."""
        found = {name: [f"{key} {value:.6g}" for key, value in of.items()] for name, of in self.to_dict().items()}
        return ("number", "predictions"), [(name, ", ".join(texts)) for name, texts in found.items()], ""

    def to_csv(self) -> str:
        """A table with a column for the sample and one for each number."""
        rows = zip(self.samples, self.values.tolist(), strict=True)
        return csv_text(("sample", *self.names), ((sample, *(f"{v:.9g}" for v in values)) for sample, values in rows))


def predict_domain(
    algorithm: Algorithm, domain: Domain, config: RunConfig, *, root: Path | None
) -> Predictions | PredictedNumbers:
    """Classes and confidences, or numbers, of all samples of a domain, in its order."""
    inputs = Inputs(domain, next(algorithm.parameters()).device)
    _, found = outputs(algorithm, inputs, **config.pass_options)
    samples = sample_names(domain, root)
    if not bool(found.isfinite().all()):
        row = int(found.isfinite().all(1).int().argmin())
        raise InputError(
            f"the model gives {found[row].tolist()} for sample {samples[row]}, not a prediction; check its values, or "
            "train again with a lower learning rate"
        )
    if algorithm.units is not None:
        return PredictedNumbers(samples, found, domain.class_names)
    confidences, classes = found.double().softmax(1).max(1)
    return Predictions(samples, classes, confidences, domain.class_names)


def sample_names(domain: Domain, root: Path | None) -> list[str]:
    """Files below ``root``, or numbers of rows, of the samples of a domain."""
    names = []
    for part, row in (find_sample(domain.dataset, index) for index in range(len(domain))):
        if not hasattr(part, "paths"):
            names.append(str(row))
            continue
        file = Path(part.paths[row])
        names.append((file.relative_to(root) if root and file.is_relative_to(root) else file).as_posix())
    return names


# --- scores on labelled data ----------------------------------------------------------------------------


def evaluate(
    run: Run,
    data: Annotated[list[str] | None, typer.Argument(help=_DATA, metavar="DATA...")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the scores, tables and figure.")] = None,
    key: Key = None,
    labels: Annotated[str | None, typer.Option(help=_LABELS)] = None,
    workers: Workers = 0,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Evaluate the model of a run on labelled data, by domain: accuracy, classes, confusion, calibration; or errors.

    The interval of the accuracy is Wilson's, for independent samples.
    Balanced accuracy is the mean recall of the classes that have samples.
    ECE is the expected calibration error, with 15 bins of the top probability.
    For a regression: R², root mean squared error and mean absolute error.
    """
    run, given = run.expanduser(), [_named(text) for text in data or ()]
    if out is not None:
        names = [RESULT_FILE, SAMPLES_FILE, *(f"{FIGURE}.{ending}" for ending in ("png", "svg"))]
        check_folder(out, [path for _, path in given], names, "evaluate")
    algorithm, about, how = load_run(run, device=device, trust_code=trust_code)
    if given:
        domains, note = labelled_domains(given, about, run, key=key, labels=labels), ""
    else:
        domains, note = _own_domains(run, about, how, trust_code=trust_code)
    found = evaluate_domains(algorithm, about, domains, workers=workers)
    result = {"run": str(run), "measured_on": note or "the data given", **found.to_dict()}
    written = [] if out is None else _write(found, domains, result, out)
    if as_json:
        print_json({**result, "written": written}, indent=2)
        return
    console = Console(highlight=False)
    print_line(console, f"{run}{f': {note}' if note else ''}", "bold")
    if isinstance(found, RegressionEvaluation):
        _print_numbers(found, console)
    else:
        _print_scores(found, console)
    if written:
        print_line(console, f"written: {', '.join(map(str, written))}")


def _named(text: str) -> tuple[str | None, Path]:
    """Name and path of ``NAME=PATH``; no name for the path of something that exists."""
    name, equals, path = text.partition("=")
    if not equals or Path(text).expanduser().exists():
        return None, Path(text).expanduser()
    if not name or not path:
        raise InputError(f"DATA {text!r} is neither a path nor NAME=PATH; give one of them")
    return name, Path(path).expanduser()


# --- the data of the run itself -------------------------------------------------------------------------


def _own_domains(
    run: Path, about: Mapping[str, Any], how: Mapping[str, Any], *, trust_code: bool
) -> tuple[dict[str, Domain], str]:
    """What a run kept out of training of each source, its target as far as it has labels, and what these are."""
    folder = run if run.is_dir() else run.parent
    counted = "numbers" if about["config"].regression else "classes"
    needed = {"kind", "holdout", "source_samples", "target_samples", counted}
    needed |= {"task", "options"} if "dataset" in how else {"sources", "target"}
    if absent := needed - {name for name, value in how.items() if value is not None}:
        raise InputError(f"{folder / DATA_FILE} does not give the run's {min(absent)}; name data to evaluate on")
    refuse_code(how.get("dataset"), folder / DATA_FILE, trust_code=trust_code)
    task = _task_of(how, about)
    before = how["source_samples"], how["target_samples"], how["numbers" if task.target.regression else "classes"]
    if before != ([len(source) for source in task.sources], len(task.target), list(task.class_names)):
        raise InputError(f"the data of {run} were changed since it was trained; name data to evaluate on")
    if how.get("splits") != SPLITS:
        raise InputError(f"{run} was split by an older version; name data to evaluate on that it was not trained on")
    share = how.get("unlabelled_fraction", 1.0)
    splits = split_task(task, seed=about["config"].seed, holdout=how["holdout"], unlabelled_fraction=share)
    kept = splits.source_val
    found = {}
    for place, source in enumerate(task.sources):
        rows = (kept.domain_ids == place).nonzero().flatten()
        if len(rows):
            found[source.name] = kept.subset(rows)
    notes = ["samples held out of training"] if found else []
    if how.get("target_labels"):
        notes.append("the labels of the target were trained on")
    elif task.target.has_labels:
        # the model is chosen: now its labels may be read
        found[task.target.name] = (splits.target_test if len(splits.target_test) else task.target).reveal()
        test = "those not trained on" if len(splits.target_test) else "all, adapted to without labels"
        notes.append(f"of the target {test}")
    else:
        notes.append("the target has no labels")
    if not found:
        raise InputError(f"{run} held out 0 source samples and its target has no labels; name data to evaluate on")
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
        more = {"standardise": bool(how.get("scale")), "regression": about["config"].regression}
        return task_from_paths(sources, Path(how["target"]), how["kind"], **more, **reading)
    options = parse_pairs("--data-option", [f"{name}={value}" for name, value in how["options"].items()])
    wanted = {name: images[name] for name in image_options(how["dataset"], IMAGENET)}
    task = load_task(how["dataset"], how["task"], how.get("root"), **{**wanted, **options})
    unscaled = how.get("scale") and not getattr(task.target.dataset, "scale", None)
    return standardise_task(task) if unscaled else task


# --- files ----------------------------------------------------------------------------------------------


def _write(
    found: Evaluation | RegressionEvaluation, domains: Mapping[str, Domain], result: Mapping[str, Any], out: Path
) -> list[Path]:
    make_folder(out)
    rows: list[Sequence[Any]] = []
    for title, domain in domains.items():
        cells: list[Sequence[Any]]
        if isinstance(found, RegressionEvaluation):
            head = [f"{name}{end}" for end in ("", " predicted") for name in found.names]
            numbers = torch.cat([found.labels[title], found.predictions[title]], 1).tolist()
            cells = [[f"{value:.9g}" for value in row] for row in numbers]
        else:
            head, names = ["label", "class", "confidence"], found.overall.classes
            confidences, guesses = found.probabilities[title].max(1)
            columns = found.labels[title].tolist(), guesses.tolist(), confidences.tolist()
            cells = [(names[y], names[guess], f"{sure:.6f}") for y, guess, sure in zip(*columns, strict=True)]
        rows += [
            (title, sample, *row) for sample, row in zip(sample_names(domain.labelled(), None), cells, strict=True)
        ]
    write_output(out / RESULT_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n", "evaluate")
    write_output(out / SAMPLES_FILE, csv_text(["domain", "sample", *head], rows), "evaluate")
    picture = save_picture(lambda: evaluation_figure(found, title=Path(result["run"]).name), out / FIGURE, "evaluate")
    return [out / RESULT_FILE, out / SAMPLES_FILE, *picture]


# --- terminal -------------------------------------------------------------------------------------------


def _tables(found: Any) -> list[tuple[str, Any]]:
    """Scores of each domain and, where there are several, of all."""
    rows = list(found.domains.items())
    return rows if len(rows) == 1 else [*rows, ("all" if "all" not in found.domains else "all domains", found.overall)]


def _print_numbers(found: RegressionEvaluation, console: Console) -> None:
    table = titled_table(("domain", "samples", "R²", "RMSE", "MAE"))
    for name, scores in _tables(found):
        for title, each in {name: scores, **{f"  {column}": of for column, of in scores.columns.items()}}.items():
            table.add_row(name_cell(title), f"{scores.n:,}", f"{each.r2:.4f}", f"{each.rmse:.5g}", f"{each.mae:.5g}")
    console.print(table)


def _print_scores(found: Evaluation, console: Console) -> None:
    table = titled_table(("domain", "samples", "accuracy, 95 %", "balanced", "NLL", "Brier", "ECE"))
    for name, scores in _tables(found):
        low, high = scores.accuracy_interval
        table.add_row(
            name_cell(name),
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
            print_line(console, f"{name} has no samples of {many}; they are left out of the balanced accuracy")
    mistakes = [f"{one} as {other} ({count:,})" for one, other, count in found.overall.most_confused()]
    if mistakes:
        print_line(console, f"most frequent mistakes: {', '.join(mistakes)}")


def _print_classes(found: Evaluation, console: Console) -> None:
    scores = found.overall
    domains = found.domains if 1 < len(found.domains) <= _MOST_DOMAINS else {}
    table = titled_table(("class", "samples", "precision", "recall", "F1", *(f"recall {name}" for name in domains)))
    order = torch.arange(len(scores.classes))
    if len(order) > _MOST_CLASSES:
        order = scores.recall.nan_to_num(math.inf).argsort(stable=True)[:_MOST_CLASSES]
    columns = [scores.precision, scores.recall, scores.f1, *(each.recall for each in domains.values())]
    for place in order.tolist():
        cells = [_percent(float(column[place])) for column in columns]
        table.add_row(name_cell(scores.classes[place]), f"{int(scores.support[place]):,}", *cells)
    console.print()
    console.print(table)
    if len(order) < len(scores.classes):
        remark = f"the {len(order)} of {len(scores.classes)} classes with the lowest recall; --out writes all"
        print_line(console, remark)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"
