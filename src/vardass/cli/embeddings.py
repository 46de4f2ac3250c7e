"""Commands on files of embeddings, ``vardass compare`` and ``vardass coreset``, and what others share with them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from vardass.analysis.comparison import LOSS_NAMES, Comparison
from vardass.analysis.comparison import compare as compare_sets
from vardass.analysis.coresets import Coreset
from vardass.analysis.coresets import coreset as make_coreset
from vardass.cli.terminal import print_json, print_line, progress_bar, shares_table, titled_table
from vardass.data.embedding_files import EmbeddingFile, in_one_order, open_embeddings
from vardass.errors import InputError
from vardass.files import check_replaceable, write_output
from vardass.kernels import Kernel, RBFMixture, as_kernel
from vardass.scaling import standardise as scaled
from vardass.shards import compare_shards, coreset_shards
from vardass.shards.files import expand, is_large
from vardass.table import csv_text
from vardass.validate import choose

FILE = "Embeddings (n, d): .npy, .npz, .csv or .parquet; or a quoted pattern of .npy or .parquet files."
KERNEL = "mmd (the paper's RBF mixture), rbf, coral or linear."
GAMMAS = "Gammas of mmd or rbf, such as 0.1,1,10."
SCALE = "Divisor of squared distances in mmd or rbf: a number, median or mean."
COLUMNS = "Columns to read: names, patterns (f*), numbers from 0 or ranges (2:), separated by commas."
LABELS = "Column of labels, excluded from the features; in .npz files an array."
PARTS = "Files in parts"
_SAMPLE = "Number of random rows {} \\[65536]."

Scale = Annotated[str | None, typer.Option(help=SCALE + r" \[median]; 1 for the paper's bandwidths.")]
Rank = Annotated[int | None, typer.Option(help="Rank of the low-rank kernel approximation, for many rows.")]
Workers = Annotated[int | None, typer.Option(help="Processes; default: one for each CPU.", rich_help_panel=PARTS)]
Engine = Annotated[
    str,
    typer.Option(
        help="local, or ray: tasks on the Ray cluster at RAY_ADDRESS, or on a local Ray.", rich_help_panel=PARTS
    ),
]


def in_parts(paths: Sequence[Path], options: Mapping[str, Any], refused: Mapping[str, bool]) -> bool:
    """Whether files are read in parts: several, a large one, or one with ``options`` that only parts have.

    Then none of the options ``refused`` may be given.
    """
    asked = any(value not in (None, "local") for value in options.values())
    if not (len(paths) > 1 or asked or is_large(paths[0])):
        return False
    if wrong := [option for option, is_given in refused.items() if is_given]:
        raise InputError(f"{wrong[0]} is for one file that is read as a whole; leave it out for files in parts")
    return True


def common_folder(paths: Sequence[Path]) -> Path:
    """The only file, or the folder that all files are in."""
    return paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute().parent for path in paths]))


def chosen_kernel(name: str, gammas: str | None, scale: str | None, *, default_scale: str | None = None) -> Kernel:
    """The kernel of the options; ``default_scale`` is that of an RBF mixture for which none is given."""
    kernel = as_kernel(name)
    if not isinstance(kernel, RBFMixture):
        if gammas is None and scale is None:
            return kernel
        raise InputError(f"--gammas and --scale are for --kernel mmd or rbf, got {name}; leave them out")
    if scale is None:
        scale = default_scale or "1"
    try:
        values = kernel.gammas if gammas is None else tuple(map(float, gammas.split(",")))
    except ValueError:
        raise InputError(f"--gammas must be numbers such as 0.1,1,10, got {gammas!r}") from None
    try:
        divisor = scale if scale in ("median", "mean") else float(scale)
    except ValueError:
        raise InputError(f"--scale must be a positive number, median or mean, got {scale!r}") from None
    return RBFMixture(values, divisor)


def check_output(option: str, target: Path, source: Path, command: str) -> None:
    """Refuse an output that is the input, a folder, cannot be written, or would replace a file of the user."""
    if target.exists() and source.exists() and os.path.samefile(target, source):
        raise InputError(f"{option} {target} is the input file; choose another name")
    if target.is_dir():
        raise InputError(f"{option} {target} is a folder; give a file name in it")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent} for {option} {target}; create it first")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write into {target.parent}; choose another folder with {option}")
    check_replaceable(target, command)


def check_folder(out: Path, data: Iterable[Path] = (), names: Iterable[str] = (), command: str = "") -> None:
    """Refuse a file, a folder in the data, where a picture would be a sample, and ``names`` not by the command."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")
    for path in data:
        if out.resolve().is_relative_to(path.resolve()):
            raise InputError(f"--out {out} is inside the data {path}; choose a folder outside of it")
    for name in names:
        check_replaceable(out / name, command)


def make_folder(out: Path) -> None:
    """Make the folder of results, if it is not there."""
    check_folder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out}: {error.strerror}; choose another one with --out") from None


def compare(
    first: Annotated[Path, typer.Argument(help=FILE, metavar="A")],
    second: Annotated[Path, typer.Argument(help="The second data set, with the same columns.", metavar="B")],
    loss: Annotated[str, typer.Option(help="mmd, coral or both.")] = "both",
    kernel: Annotated[str, typer.Option(help="Kernel of MMD²: " + KERNEL)] = "mmd",
    gammas: Annotated[str | None, typer.Option(help=GAMMAS)] = None,
    scale: Scale = None,
    permutations: Annotated[int, typer.Option(help="Permutations of the test; 0 for no test.")] = 999,
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    standardise: Annotated[
        bool, typer.Option("--standardise", help="Scale each column to standard deviation 1 over both files.")
    ] = False,
    rank: Rank = None,
    key: Annotated[str | None, typer.Option(help="Array of .npz files.")] = None,
    labels: Annotated[str, typer.Option(help=LABELS)] = "labels",
    columns: Annotated[str | None, typer.Option(help=COLUMNS)] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    sample: Annotated[
        int | None, typer.Option(help=_SAMPLE.format("from each set, which the test permutes"), rich_help_panel=PARTS)
    ] = None,
    workers: Workers = None,
    engine: Engine = "local",
) -> None:
    """Measure MMD² and CORAL between two data sets of any size.

    Each comes with a confidence interval and the p-value of a permutation test. Rows must be independent. Patterns of
    files and files that are too large are read in parts: values use all rows, the test uses a random sample.
    """
    chosen = chosen_kernel(kernel, gammas, scale, default_scale="median")
    choose(loss, "--loss", ("both", *LOSS_NAMES))
    options: dict[str, Any] = {"loss": loss, "kernel": chosen, "rank": rank, "seed": seed}
    options |= {"permutations": permutations, "confidence": confidence}
    sets = [expand(first), expand(second)]
    given: dict[str, Any] = {"sample": sample, "workers": workers, "engine": engine}
    refused = {"--key": key is not None, "--standardise": standardise}
    if any([in_parts(paths, given, refused) for paths in sets]):
        with progress_bar() as progress:
            reading: dict[str, Any] = {"columns": columns, "leave_out": [labels]}
            found = compare_shards(sets[0], sets[1], progress=progress, **reading, **given, **options)
    else:
        tables = _read_both([paths[0] for paths in sets], key, columns, labels)
        if standardise and tables[0].shape[1] == tables[1].shape[1]:  # else compare says what is wrong
            pooled = torch.cat(tables)
            tables = [scaled(each, reference=pooled) for each in tables]
            del pooled
        with progress_bar() as progress:
            found = compare_sets(*tables, progress=progress, **options)
    if as_json:
        print_json({"a": str(first), "b": str(second), "standardised": standardise, **found.to_dict()})
    else:
        _print_comparison(found, first, second, Console(highlight=False))


def _read_both(paths: Sequence[Path], key: str | None, columns: str | None, labels: str) -> list[Tensor]:
    arrays = any(path.suffix.lower() == ".npz" for path in paths)
    found, names = [], []
    for path in paths:
        # --key is for the .npz file of the two, if there is one
        with open_embeddings(path, key if path.suffix.lower() == ".npz" or not arrays else None) as file:
            found.append(file.features(columns, [labels]))
            names.append(file.feature_names(columns, [labels]))
    return in_one_order(found, names, paths, columns)[0]


def _print_comparison(found: Comparison, first: Path, second: Path, console: Console) -> None:
    a, b = (first.name, second.name) if first.name != second.name else (first, second)
    print_line(console, f"{a}: {found.n:,} rows; {b}: {found.m:,}; {found.d:,} columns", "bold")
    if found.kernel:
        print_line(console, f"kernel {found.kernel}")
    console.print()
    percent = f"{100 * found.confidence:g} % interval"
    table = titled_table(("", "value", percent, "of the spread", "plug-in", "p"))
    for each in found.results:
        p = "" if each.p_value is None else f"{each.p_value:.3g}"
        share = f"{100 * each.relative:.3g} %"
        interval = f"{each.low:.4g} to {each.high:.4g}"
        table.add_row(LOSS_NAMES[each.loss], f"{each.value:.4g}", interval, share, f"{each.v_statistic:.4g}", p)
    console.print(table)
    console.print()
    for sentence in _verdict(found):
        print_line(console, sentence)


def _verdict(found: Comparison) -> list[str]:
    level = 1.0 - found.confidence
    lines = []
    for each in found.results:
        name = LOSS_NAMES[each.loss]
        if each.p_value is not None:
            is_least = each.p_value * (1 + found.permutations) < 1.5
            least = " (the smallest possible with this many permutations)" if is_least else ""
            seen = "the sets differ" if each.p_value <= level else "no difference found"
            lines.append(f"{name}: {seen}, p = {each.p_value:.3g}{least}; {found.permutations:,} {each.test}")
        error = f", ± {each.computing_stderr:.1g}" if each.computing_stderr > 0 else ""
        lines.append(f"{name}: from {each.method}{error}")
    return [*lines, *(f"note: {note}" for note in found.notes)]


def coreset(
    file: Annotated[Path, typer.Argument(help=FILE)],
    size: Annotated[int, typer.Option("--size", "-m", help="Number of representatives.")],
    kernel: Annotated[str, typer.Option(help=KERNEL)] = "mmd",
    gammas: Annotated[str | None, typer.Option(help=GAMMAS)] = None,
    scale: Scale = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Optimise the weights; otherwise all are equal.")
    ] = True,
    rank: Rank = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same representatives.")] = 0,
    key: Annotated[str | None, typer.Option(help="Array of an .npz file.")] = None,
    ids: Annotated[str | None, typer.Option(help=r"Array or column of ids for the output \[ids, if present].")] = None,
    labels: Annotated[str | None, typer.Option(help=r"The same for labels \[labels, if present].")] = None,
    columns: Annotated[str | None, typer.Option(help=COLUMNS)] = None,
    out: Annotated[Path | None, typer.Option(help=r".npz or .csv of rows and weights \[FILE.coreset.npz].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    sample: Annotated[int | None, typer.Option(help=_SAMPLE.format("to choose from"), rich_help_panel=PARTS)] = None,
    workers: Workers = None,
    engine: Engine = "local",
) -> None:
    """Choose m weighted rows whose mean embedding is closest to that of all rows.

    For a labelling budget, or an evaluation on few rows. Reports the error and that of uniform draws. A pattern of
    files, or a file that is too large, is read in parts: rows of a random sample are chosen for the mean of all rows,
    and the output names the file and row of each.
    """
    paths = expand(file)
    file = common_folder(paths)
    out = file.with_name(file.stem + ".coreset.npz") if out is None else out.expanduser()
    chosen = chosen_kernel(kernel, gammas, scale, default_scale="median")
    names = {"ids": ids or "ids", "labels": labels or "labels"}
    given: dict[str, Any] = {"sample": sample, "workers": workers, "engine": engine}
    refused = {"--key": key is not None, "--ids": ids is not None, "--labels": labels is not None}
    options: dict[str, Any] = {"kernel": chosen, "weights": weights, "rank": rank, "seed": seed}
    if in_parts(paths, given, refused):
        _check_out(out, file)
        reading: dict[str, Any] = {"columns": columns, "leave_out": list(names.values())}
        with progress_bar() as progress:
            found, places = coreset_shards(paths, size, progress=progress, **reading, **given, **options)
        found, d = replace(found, indices=torch.tensor([row for _, row in places])), None
        picked: dict[str, NDArray[Any]] = {"path": np.array([str(path) for path, _ in places])}
    else:
        with open_embeddings(file, key) as opened:
            features = opened.features(columns, list(names.values()))
            beside = _beside(opened, len(features), names, {"ids": ids, "labels": labels})
        _check_out(out, file)
        with progress_bar() as progress:
            found = make_coreset(features, size, progress=progress, **options)
        picked, d = {name: values[found.indices.numpy()] for name, values in beside.items()}, features.shape[1]
    _save(found, picked, out)
    if as_json:
        chosen_rows = {name: values.tolist() for name, values in picked.items()}
        print_json({"file": str(file), **found.to_dict(), **chosen_rows, "out": str(out)})
    else:
        _print_coreset(found, file, out, d, Console(highlight=False))


def _beside(
    file: EmbeddingFile, n: int, names: Mapping[str, str], asked: Mapping[str, str | None]
) -> dict[str, NDArray[Any]]:
    """Ids and labels of the rows: those that are asked for, or those that the file has."""
    found = {}
    for what, name in names.items():
        if name not in file.names:
            if asked[what] is None:
                continue
            raise InputError(f"{file.path} has no array or column {name!r} for --{what}; name another one")
        values = file.column(name)
        if values.shape != (n,) or values.dtype.kind not in "iuUSfb":
            raise InputError(
                f"{what} {name!r} of {file.path} are {values.dtype} of shape {values.shape} for {n} rows; give one "
                "number or name for each row"
            )
        found[what] = values
    return found


def _check_out(out: Path, source: Path) -> None:
    if out.suffix.lower() not in (".npz", ".csv"):
        raise InputError(f"representatives are written as .npz or .csv, got --out {out}; change its ending")
    check_output("--out", out, source, "coreset")


def _save(found: Coreset, beside: Mapping[str, NDArray[Any]], out: Path) -> None:
    indices, weights = found.indices.numpy(), found.weights.numpy()
    if out.suffix.lower() == ".npz":
        about = {name: value for name, value in found.to_dict().items() if name not in ("indices", "weights")}
        arrays: dict[str, Any] = {**beside, "indices": indices, "weights": weights}
        packed = io.BytesIO()
        np.savez_compressed(packed, meta=np.array(json.dumps(about)), **arrays)
        write_output(out, packed.getvalue(), "coreset")
        return
    rows = zip(indices.tolist(), weights.tolist(), *(values.tolist() for values in beside.values()))
    shown = ([row, f"{weight:.9g}", *rest] for row, weight, *rest in rows)
    write_output(out, csv_text(["row", "weight", *beside], shown), "coreset")


def _print_coreset(found: Coreset, source: Path, out: Path, d: int | None, console: Console) -> None:
    line = partial(print_line, console)
    columns = "" if d is None else f"{d:,} columns, "
    line(f"{source.name}: {found.n:,} rows, {columns}{found.size:,} representatives", "bold")
    if d is None:
        line("chosen from random rows, for the mean embedding of all")
    line(f"kernel {found.kernel}")
    console.print()
    line("squared error of the mean embedding", "bold")
    errors = [
        ("uniform draws", found.uniform_error, 0.0, "dim"),
        ("representatives", found.error, found.error_stderr, "bold green"),
    ]
    console.print(shares_table(errors, found.uniform_error, console))
    line(f"as good as {found.worth:,.0f} uniform draws")
    if found.error > 0.9 * found.uniform_error > 0:
        line("the kernel is close to the identity on these rows, so no selection helps; try a larger --scale")
    zeros = int((found.weights == 0).sum())
    extra = f"; {zeros} are 0, so fewer rows would be enough" if zeros else ""
    line(f"weights: {float(found.weights.min()):.3g} to {float(found.weights.max()):.3g}{extra}")
    line(f"written: {out}")
