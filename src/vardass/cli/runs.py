"""What ``adapt``, ``train`` and ``predict`` share: the folder of a run, training, and predictions as a table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs
from vardass.adapt.config import RunConfig
from vardass.adapt.distributed import pick_device
from vardass.adapt.evaluation import outputs
from vardass.adapt.model import RunResult
from vardass.adapt.run_folder import BOARD_FOLDER, CONFIG_FILE, METRICS_FILE, RunFolder
from vardass.adapt.trainer import Trainer
from vardass.cli.job import progress_bar
from vardass.data.domains import Domain, Kind, Rows
from vardass.data.splits import TaskSplits
from vardass.errors import InputError
from vardass.files import write_text

__all__ = [
    "DATA_FILE",
    "DEFAULT_NETWORKS",
    "PREDICTIONS_FILE",
    "Predictions",
    "check_device",
    "default_size",
    "go_on",
    "make_folder",
    "open_run",
    "predict_domain",
    "predictions_text",
    "read_data_file",
    "run_trainer",
    "sample_names",
    "write_predictions",
]

DATA_FILE = "data.json"
PREDICTIONS_FILE = "predictions.csv"
DEFAULT_NETWORKS: dict[Kind, str] = {"features": "mlp", "image": "conv", "audio": "audio"}
_LEFT_BY_A_RUN = (CONFIG_FILE, METRICS_FILE, DATA_FILE, BOARD_FOLDER)
_HEADER = ("sample", "class", "confidence")
_SMALL, _USUAL = 64, 224  # pixels: of the small network, and of pretrained ones


@dataclass(frozen=True, eq=False)
class Predictions:
    """Classes of some samples.

    Attributes
    ----------
    samples : sequence of str
        Files, or rows from 0.
    classes : Tensor of shape (n,)
        Positions in ``class_names``.
    confidences : Tensor of shape (n,)
        Largest probability of each sample.
    class_names : sequence of str
        Names of the classes.
    """

    samples: Sequence[str]
    classes: Tensor
    confidences: Tensor
    class_names: Sequence[str]

    def counts(self) -> dict[str, int]:
        """How often each class was predicted."""
        found = torch.bincount(self.classes, minlength=len(self.class_names)).tolist()
        return dict(zip(self.class_names, found, strict=True))


def default_size(network: str) -> int:
    """Height and width of images for a network."""
    return _SMALL if network == "conv" else _USUAL


def open_run(out: Path, data: Mapping[str, Any], *, resume: bool, domains: Sequence[Path] = ()) -> None:
    """Check that ``out`` may be written to, is outside ``domains`` and, if it holds a run, that it had the same data.

    Raises
    ------
    InputError
        If the folder holds a run and nobody asked to resume it, or something else, or a run on other data.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")
    for domain in domains:
        # its figure would be a sample the next time
        if out.resolve().is_relative_to(domain.resolve()):
            raise InputError(f"--out {out} is inside the data {domain}; choose a folder outside of it")
    is_run = RunFolder(out).has_checkpoint
    if is_run and not resume:
        raise InputError(f"{out} already holds a run; go on with --resume, or choose another folder with --out")
    if not is_run and out.is_dir():
        # what a run leaves that stopped before its first checkpoint may be replaced, nothing else
        other = sorted(entry.name for entry in out.iterdir() if entry.name not in _LEFT_BY_A_RUN)
        if other:
            raise InputError(f"{out} holds {other[0]!r} and no run; choose an empty or new folder with --out")
    before = read_data_file(out) if is_run else {}
    for name, value in data.items():
        if name in before and before[name] != value:
            raise InputError(
                f"the run in {out} has {name} {before[name]!r}, this one {value!r}; resume with the same data, or "
                "choose another folder with --out"
            )


def read_data_file(run: Path) -> dict[str, Any]:
    """How the data of a run were read; empty if it does not say."""
    file = run / DATA_FILE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{file} is damaged; remove it and go on with --resume")
    return found


def run_trainer(
    config: RunConfig, splits: TaskSplits, out: Path, data: Mapping[str, Any], *, resume: bool
) -> RunResult:
    """Train, with a progress bar where somebody is looking."""
    check_device(config.device)
    try:
        trainer = _make_trainer(config, splits, out)
        make_folder(out)
        write_text(out / DATA_FILE, json.dumps(dict(data), indent=2) + "\n")
        with progress_bar() as progress:
            return trainer.run(resume=resume, progress=progress)
    except InputError as error:
        raise InputError(_without_trace(str(error)).replace("resume=True", "--resume")) from error


def _make_trainer(config: RunConfig, splits: TaskSplits, out: Path) -> Trainer:
    options = {**config.algorithm_options, **config.sampler_options, **config.network_options}
    try:
        return Trainer(config, splits, out)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError) or not options:
            raise
        # the value of an option goes straight to whoever uses it
        raise InputError(f"one of the options {options} has a value of the wrong type: {error}; change it") from error


def make_folder(out: Path) -> None:
    """Make the folder of a run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out}: {error.strerror}; choose another one with --out") from None


def check_device(name: str) -> torch.device:
    """Device by name, if it is there."""
    device = pick_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name} is not there, torch sees {torch.cuda.device_count()} GPUs; use cpu or auto")
    return device


def go_on(result: RunResult, out: Path) -> str:
    """What to do about an interrupted run."""
    return (
        f"interrupted after step {result.step} of {result.config.steps}; repeat the command with --resume to go on "
        f"in {out}"
    )


def predict_domain(algorithm: Algorithm, domain: Domain, config: RunConfig, *, root: Path | None) -> Predictions:
    """Classes and confidences of all samples of a domain, in its order."""
    inputs = Inputs(domain, next(algorithm.parameters()).device)
    try:
        _, logits = outputs(
            algorithm,
            inputs,
            batch_size=config.eval_batch_size,
            workers=config.workers,
            dtype=config.autocast_dtype,
        )
    except InputError as error:
        raise InputError(_without_trace(str(error))) from error
    confidences, classes = logits.double().softmax(1).max(1)
    return Predictions(sample_names(domain, root), classes, confidences, domain.class_names)


def sample_names(domain: Domain, root: Path | None) -> list[str]:
    """Files below ``root``, or numbers of rows, of the samples of a domain."""
    dataset: Any = domain.dataset
    rows: Sequence[int] = range(len(domain))
    if isinstance(dataset, Rows):
        rows, dataset = dataset.rows.tolist(), dataset.dataset
    paths = cast("Sequence[str] | None", getattr(dataset, "paths", None))
    if paths is None:
        return [str(row) for row in rows]
    base = None if root is None else root.expanduser()
    files = [Path(paths[row]) for row in rows]
    return [(file.relative_to(base) if base and file.is_relative_to(base) else file).as_posix() for file in files]


def write_predictions(predictions: Predictions, path: Path) -> None:
    """Write `predictions_text` to a file."""
    write_text(path, predictions_text(predictions))


def predictions_text(predictions: Predictions) -> str:
    """A table as CSV with the columns sample, class and confidence."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEADER)
    columns = (predictions.samples, predictions.classes.tolist(), predictions.confidences.tolist())
    for sample, position, confidence in zip(*columns, strict=True):
        writer.writerow((sample, predictions.class_names[position], f"{confidence:.6f}"))
    return text.getvalue()


def _without_trace(message: str) -> str:
    """The message of an error in a loading process, which comes wrapped in that process's traceback."""
    if not message.startswith("Caught "):
        return message
    return message.rpartition("InputError: ")[2].strip()
