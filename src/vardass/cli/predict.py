"""``vardass predict RUN DIR``: classes of new samples by the model of a run; and predictions as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs
from vardass.adapt.config import RunConfig
from vardass.adapt.devices import pick_device
from vardass.adapt.evaluation import outputs
from vardass.adapt.model import MODEL_FILE, load_model
from vardass.adapt.run_folder import read_data_file
from vardass.data.domains import Domain, find_sample
from vardass.data.own_data import own_domain
from vardass.errors import InputError
from vardass.files import write_text

__all__ = [
    "PREDICTIONS_FILE",
    "Predictions",
    "clean_message",
    "predict",
    "predict_domain",
    "sample_names",
]

PREDICTIONS_FILE = "predictions.csv"
_HEADER = ("sample", "class", "confidence")


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[Path, typer.Argument(help="Folder of files, or file of embeddings, as in training.")],
    out: Annotated[Path | None, typer.Option(help="Table to write; by default it is printed.")] = None,
    key: Annotated[str | None, typer.Option(help="Array of features in an .npz file.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that decode files.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
) -> None:
    """Predict a class with confidence for each sample, as CSV: sample, class, confidence."""
    run, data = run.expanduser(), data.expanduser()
    file = run / MODEL_FILE if run.is_dir() else run
    if not file.is_file():
        raise InputError(f"there is no model at {file}; give the folder that vardass adapt --out wrote")
    if out is not None and out.exists() and (out.is_dir() or out.resolve() == data.resolve()):
        raise InputError(f"--out {out} is {'a folder' if out.is_dir() else 'the input'}; choose another file name")
    algorithm, about = load_model(file, device=pick_device(device))
    domain = own_domain(data, about, read_data_file(file.parent), key=key)
    predictions = predict_domain(algorithm, domain, about["config"].changed(workers=workers), root=data)
    if out is None:
        print(predictions.to_csv(), end="")
    else:
        write_text(out, predictions.to_csv())
        print(f"{len(predictions.samples):,} predictions written to {out}")


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

    def to_csv(self) -> str:
        """A table with the columns sample, class and confidence."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_HEADER)
        for sample, position, confidence in zip(
            self.samples, self.classes.tolist(), self.confidences.tolist(), strict=True
        ):
            writer.writerow((sample, self.class_names[position], f"{confidence:.6f}"))
        return text.getvalue()


def predict_domain(algorithm: Algorithm, domain: Domain, config: RunConfig, *, root: Path | None) -> Predictions:
    """Classes and confidences of all samples of a domain, in its order."""
    inputs = Inputs(domain, next(algorithm.parameters()).device)
    try:
        _, logits = outputs(
            algorithm,
            inputs,
            **config.pass_options,
        )
    except InputError as error:
        raise InputError(clean_message(str(error))) from error
    confidences, classes = logits.double().softmax(1).max(1)
    return Predictions(sample_names(domain, root), classes, confidences, domain.class_names)


def sample_names(domain: Domain, root: Path | None) -> list[str]:
    """Files below ``root``, or numbers of rows, of the samples of a domain."""
    base = None if root is None else root.expanduser()
    names = []
    for part, row in (find_sample(domain.dataset, index) for index in range(len(domain))):
        paths = cast("Sequence[str] | None", getattr(part, "paths", None))
        if paths is None:
            names.append(str(row))
            continue
        file = Path(paths[row])
        names.append((file.relative_to(base) if base and file.is_relative_to(base) else file).as_posix())
    return names


def clean_message(message: str) -> str:
    """The message of an error in a loading process, which comes wrapped in that process's traceback."""
    if not message.startswith("Caught "):
        return message
    return message.rpartition("InputError: ")[2].strip()
