"""``vardass coreset FILE --size m``: m weighted representatives of a file of embeddings."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from vardass.analysis.coresets import Coreset
from vardass.analysis.coresets import coreset as make_coreset
from vardass.cli.embeddings import (
    COLUMNS,
    FILE,
    GAMMAS,
    KERNEL,
    SCALE,
    bar,
    check_output,
    chosen_kernel,
    features_of,
    finite,
    plain_table,
    print_line,
)
from vardass.cli.progress import progress_bar
from vardass.data.embedding_files import has_labels, read_labels
from vardass.errors import InputError
from vardass.files import atomic_write

__all__ = ["coreset"]

_OUT = r"Where to write rows and weights, .npz or .csv \[FILE.coreset.npz]."
_IDS = r"Array or column to write beside them \[ids, if there]."
_LABELS = r"The same for labels, excluded from the features \[labels, if there]."


def coreset(
    file: Annotated[Path, typer.Argument(help=FILE)],
    size: Annotated[int, typer.Option("--size", "-m", help="Number of representatives.")],
    kernel: Annotated[str, typer.Option(help=KERNEL)] = "mmd",
    gammas: Annotated[str | None, typer.Option(help=GAMMAS)] = None,
    scale: Annotated[str | None, typer.Option(help=SCALE + r" \[median]; 1 for the paper's bandwidths.")] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Optimise weights; else all are equal.")
    ] = True,
    rank: Annotated[int | None, typer.Option(help="Rank of the kernel's approximation for many rows.")] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same representatives.")] = 0,
    key: Annotated[str | None, typer.Option(help="Array of an .npz file.")] = None,
    ids: Annotated[str | None, typer.Option(help=_IDS)] = None,
    labels: Annotated[str | None, typer.Option(help=_LABELS)] = None,
    columns: Annotated[str | None, typer.Option(help=COLUMNS)] = None,
    out: Annotated[Path | None, typer.Option(help=_OUT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Choose m weighted rows whose mean embedding is closest to that of all rows.

    For a budget of labels, or an evaluation on few rows. Reports the error next to that of uniform draws.
    """
    file = file.expanduser()
    out = file.with_name(file.stem + ".coreset.npz") if out is None else out.expanduser()
    chosen = chosen_kernel(kernel, gammas, scale, default_scale="median")
    names = {"ids": ids or "ids", "labels": labels or "labels"}
    features = features_of(file, key=key, columns=columns, leave_out=list(names.values()))
    beside = _beside(file, len(features), names, {"ids": ids, "labels": labels})
    _check_out(out, file)
    with progress_bar() as progress:
        found = make_coreset(features, size, kernel=chosen, weights=weights, rank=rank, seed=seed, progress=progress)
    picked = {name: values[found.indices.numpy()] for name, values in beside.items()}
    _save(found, picked, out)
    if as_json:
        record = {"file": str(file), **found.to_dict(), **{name: values.tolist() for name, values in picked.items()}}
        print(json.dumps(finite({**record, "out": str(out)}), allow_nan=False))
    else:
        _print_report(found, file, out, features.shape[1], Console(highlight=False))


def _beside(file: Path, n: int, names: Mapping[str, str], asked: Mapping[str, str | None]) -> dict[str, NDArray[Any]]:
    """Ids and labels of the rows: those that are asked for, or those that the file has."""
    found = {}
    for what, name in names.items():
        if not has_labels(file, name):
            if asked[what] is None:
                continue
            raise InputError(f"{file} has no array or column {name!r} for --{what}; name another one")
        values = read_labels(file, name)
        if values.shape != (n,) or values.dtype.kind not in "iuUSfb":
            raise InputError(
                f"{what} {name!r} of {file} are {values.dtype} of shape {values.shape} for {n} rows; give one number "
                "or name for each row"
            )
        found[what] = values
    return found


def _check_out(out: Path, source: Path) -> None:
    if out.suffix.lower() not in (".npz", ".csv"):
        raise InputError(f"representatives are written as .npz or .csv, got --out {out}; change its ending")
    check_output("--out", out, source)
    if out.exists() and not _is_ours(out):  # an older result is replaced, anything else is not ours to replace
        raise InputError(f"--out {out} exists and holds something else; choose another name")


def _is_ours(out: Path) -> bool:
    if out.suffix.lower() == ".csv":
        with out.open("rb") as file:
            return file.read(10) == b"row,weight"
    try:
        with np.load(out, allow_pickle=False) as arrays:
            return {"indices", "weights", "meta"} <= set(arrays.files)
    except Exception:  # numpy and zipfile each raise their own for a foreign file
        return False


def _save(found: Coreset, beside: Mapping[str, NDArray[Any]], out: Path) -> None:
    indices, weights = found.indices.numpy(), found.weights.numpy()
    with atomic_write(out) as file:
        if out.suffix.lower() == ".npz":
            about = {name: value for name, value in found.to_dict().items() if name not in ("indices", "weights")}
            arrays: dict[str, Any] = {**beside, "indices": indices, "weights": weights}
            np.savez_compressed(file, meta=np.array(json.dumps(about)), **arrays)
            return
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["row", "weight", *beside])
        rows = zip(indices.tolist(), weights.tolist(), *(values.tolist() for values in beside.values()))
        table.writerows([row, f"{weight:.9g}", *rest] for row, weight, *rest in rows)
        file.write(text.getvalue().encode())


def _print_report(found: Coreset, source: Path, out: Path, d: int, console: Console) -> None:
    print_line(console, f"{source.name}: {found.n:,} rows, {d:,} columns, {found.size:,} representatives", "bold")
    print_line(console, f"kernel {found.kernel}")
    console.print()
    print_line(console, "squared error of the mean embedding", "bold")
    table = plain_table("left", "right", "right", "left")
    plus_minus = f" ± {found.error_stderr:.1g}" if found.error_stderr > 0 else ""
    for name, error, style in (
        ("uniform draws", found.uniform_error, "dim"),
        ("representatives", found.error, "bold green"),
    ):
        share = error / found.uniform_error if found.uniform_error > 0 else 0.0
        shown = f"{error:.4g}{plus_minus if style != 'dim' else ''}"
        table.add_row(name, shown, f"{100 * share:.1f} %", bar(share, console), style=style)
    console.print(table)
    print_line(console, f"as good as {found.worth:,.0f} uniform draws")
    if found.error > 0.9 * found.uniform_error > 0:
        print_line(
            console, "the kernel is close to the identity on these rows, where no choice helps; try a larger --scale"
        )
    largest, none = float(found.weights.max()), int((found.weights == 0).sum())
    extra = f"; {none} are 0, so fewer rows would do" if none else ""
    print_line(console, f"weights: {float(found.weights.min()):.3g} to {largest:.3g}{extra}")
    print_line(console, f"written: {out}")
