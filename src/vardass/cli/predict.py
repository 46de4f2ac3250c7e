"""``vardass predict RUN DIR``: classes, or numbers, of new samples by the model of a run; predictions as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs
from vardass.adapt.config import RunConfig
from vardass.adapt.devices import pick_device
from vardass.adapt.model import MODEL_FILE, load_model
from vardass.adapt.regression import regression_scores
from vardass.adapt.run_folder import reading_of
from vardass.adapt.selection import outputs
from vardass.cli.embeddings import check_output
from vardass.cli.run_options import TrustCode
from vardass.data.domains import Domain, find_sample
from vardass.data.own_data import own_domain
from vardass.errors import InputError
from vardass.files import write_text

__all__ = [
    "PREDICTIONS_FILE",
    "PredictedNumbers",
    "Predictions",
    "clean_message",
    "csv_text",
    "predict",
    "predict_domain",
    "sample_names",
]

PREDICTIONS_FILE = "predictions.csv"


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[Path, typer.Argument(help="Folder of files, or file of embeddings, as in training.")],
    out: Annotated[Path | None, typer.Option(help="Table to write; by default it is printed.")] = None,
    key: Annotated[str | None, typer.Option(help="Array of features in an .npz file.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that decode files.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Predict a class with confidence for each sample, as CSV: sample, class, confidence; by a regression, numbers."""
    run, data = run.expanduser(), data.expanduser()
    file = run / MODEL_FILE if run.is_dir() else run
    if not file.is_file():
        raise InputError(f"there is no model at {file}; give the folder that vardass adapt --out wrote")
    if out is not None:
        check_output("--out", out, data)
        if out.suffix.lower() != ".csv":
            raise InputError(f"--out {out} is a table as CSV; give it a name that ends with .csv")
    algorithm, about = load_model(file, device=pick_device(device), trust_code=trust_code)
    domain = own_domain(data, about, reading_of(file, about), key=key)
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

    def scores(self, labels: Tensor) -> dict[str, float]:
        """Accuracy for the true classes (n,)."""
        return {"accuracy": float((self.classes == labels).double().mean())}

    def to_csv(self) -> str:
        """A table with the columns sample, class and confidence."""
        rows = zip(self.samples, self.classes.tolist(), self.confidences.tolist(), strict=True)
        lines = ((sample, self.class_names[place], f"{confidence:.6f}") for sample, place, confidence in rows)
        return csv_text(("sample", "class", "confidence"), lines)


@dataclass(frozen=True, eq=False)
class PredictedNumbers:
    """Numbers of some samples, by a regression.

    Attributes
    ----------
    samples : sequence of str
        Files, or rows from 0.
    values : Tensor of shape (n, m)
        In their own units.
    names : sequence of str
        Of the m numbers.
    """

    samples: Sequence[str]
    values: Tensor
    names: Sequence[str]

    def ranges(self) -> dict[str, dict[str, float]]:
        """Mean, deviation, smallest and largest of each number."""
        columns = self.values.double()
        found = {
            "mean": columns.mean(0),
            "deviation": columns.std(0, correction=0),
            "smallest": columns.amin(0),
            "largest": columns.amax(0),
        }
        return {name: {key: float(row[i]) for key, row in found.items()} for i, name in enumerate(self.names)}

    def scores(self, labels: Tensor) -> dict[str, float]:
        """`regression_scores` for the true numbers (n, m)."""
        return regression_scores(self.values, labels)

    def to_csv(self) -> str:
        """A table with a column for the sample and one for each number."""
        rows = zip(self.samples, self.values.tolist(), strict=True)
        return csv_text(("sample", *self.names), ((sample, *(f"{v:.9g}" for v in values)) for sample, values in rows))


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows below their header, separated by commas."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def predict_domain(
    algorithm: Algorithm, domain: Domain, config: RunConfig, *, root: Path | None
) -> Predictions | PredictedNumbers:
    """Classes and confidences, or numbers, of all samples of a domain, in its order."""
    inputs = Inputs(domain, next(algorithm.parameters()).device)
    try:
        _, found = outputs(
            algorithm,
            inputs,
            **config.pass_options,
        )
    except InputError as error:
        raise InputError(clean_message(str(error))) from error
    if not bool(found.isfinite().all()):
        row = int(found.isfinite().all(1).int().argmin())
        raise InputError(
            f"the model gives {found[row].tolist()} for sample {sample_names(domain, root)[row]}, which is no "
            "prediction; check its values, or train again with a lower learning rate"
        )
    if algorithm.units is not None:
        return PredictedNumbers(sample_names(domain, root), found, domain.class_names)
    confidences, classes = found.double().softmax(1).max(1)
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
