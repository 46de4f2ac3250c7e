"""``vardass predict RUN DIR``: classes of new samples by the model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["predict"]


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[Path, typer.Argument(help="Folder of files, or file of embeddings, as in training.")],
    out: Annotated[Path | None, typer.Option(help="Table to write; by default it is printed.")] = None,
    key: Annotated[str | None, typer.Option(help="Array of features in an .npz file.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that decode files.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
) -> None:
    """Predict a class with confidence for each sample, as CSV: sample, class, confidence."""
    # torch is imported only now, so that --help and --version answer at once

    from vardass.adapt.model import MODEL_FILE, load_model
    from vardass.cli.own_data import own_domain
    from vardass.cli.runs import check_device, predict_domain, predictions_text, read_data_file, write_predictions
    from vardass.errors import InputError

    run, data = run.expanduser(), data.expanduser()
    file = run / MODEL_FILE if run.is_dir() else run
    if not file.is_file():
        raise InputError(f"there is no model at {file}; give the folder that vardass adapt --out wrote")
    if out is not None and out.exists() and (out.is_dir() or out.resolve() == data.resolve()):
        raise InputError(f"--out {out} is {'a folder' if out.is_dir() else 'the input'}; choose another file name")
    algorithm, about = load_model(file, device=check_device(device))
    domain = own_domain(data, about, read_data_file(file.parent), key=key)
    predictions = predict_domain(algorithm, domain, about["config"].changed(workers=workers), root=data)
    if out is None:
        print(predictions_text(predictions), end="")
    else:
        write_predictions(predictions, out)
        print(f"{len(predictions.samples):,} predictions written to {out}")
