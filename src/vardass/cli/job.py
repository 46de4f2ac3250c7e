"""What ``vardass stratify`` does, apart from options and printing: read, solve, save."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vardass.data.embedding_files import read_embeddings
from vardass.errors import InputError
from vardass.files import atomic_write
from vardass.kernels import Kernel, RBFMixture, as_kernel
from vardass.solvers import stratify
from vardass.strata import Strata

__all__ = ["Outcome", "make_kernel", "progress_bar", "stratify_file"]

_CSV_HEADER = "row,stratum,weight\n"


@dataclass(frozen=True)
class Outcome:
    """Strata of a file, where they came from and where they went."""

    strata: Strata
    source: Path
    d: int
    out: Path
    labels_csv: Path | None
    seconds: dict[str, float]


def make_kernel(name: str, gammas: str | None, scale: str | None) -> Kernel:
    """Build the kernel that the command-line options describe."""
    kernel = as_kernel(name)
    if gammas is None and scale is None:
        return kernel
    if not isinstance(kernel, RBFMixture):
        raise InputError(f"--gammas and --scale are for --kernel mmd or rbf, got {name}; leave them out")
    values = kernel.gammas
    if gammas is not None:
        try:
            values = tuple(float(part) for part in gammas.split(","))
        except ValueError:
            raise InputError(f"--gammas must be numbers such as 0.1,1,10, got {gammas!r}") from None
    if scale is None or scale in ("median", "mean"):
        return RBFMixture(values, scale or 1.0)
    try:
        return RBFMixture(values, float(scale))
    except ValueError:
        raise InputError(f"--scale must be a positive number, median or mean, got {scale!r}") from None


def stratify_file(
    source: Path,
    k: int,
    *,
    kernel: Kernel,
    solver: str = "min-sum",
    min_size: int = 1,
    max_size: int | None = None,
    equal: bool = False,
    rank: int | None = None,
    seed: int = 0,
    warm_start: Path | None = None,
    bound: bool = True,
    certify: bool = False,
    key: str | None = None,
    columns: str | None = None,
    out: Path | None = None,
    labels_csv: Path | None = None,
) -> Outcome:
    """Read embeddings, stratify them and save the strata; nothing is written unless all of it succeeds."""
    out = source.with_name(source.stem + ".strata.npz") if out is None else out
    clock = time.perf_counter()
    features = read_embeddings(source, key=key, columns=columns)
    start = None if warm_start is None else _load_strata(warm_start)
    _check_outputs(source, out, labels_csv)  # before the work, not after it
    seconds = {"read": time.perf_counter() - clock}
    with progress_bar() as progress:
        strata = stratify(
            features,
            k,
            kernel=kernel,
            solver=solver,
            warm_start=start,
            min_size=min_size,
            max_size=max_size,
            equal=equal,
            rank=rank,
            seed=seed,
            bound=bound,
            certify=certify,
            progress=progress,
        )
    parts = {name: value for name, value in strata.info.items() if name.startswith("seconds_")}
    seconds |= {name.removeprefix("seconds_"): float(value) for name, value in parts.items()}
    _save(strata, out, labels_csv)
    return Outcome(strata, source, features.shape[1], out, labels_csv, seconds)


@contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None] | None]:
    """A bar on stderr that leaves no trace, or None where nobody is looking."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(bar_width=12), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=1.0)
        yield lambda fraction, message: bars.update(task, completed=fraction, description=message)


def _load_strata(path: Path) -> Strata:
    if path.exists() and not zipfile.is_zipfile(path):
        raise InputError(f"{path} is not a strata file; give one that vardass stratify wrote")
    return Strata.load(path)


def _check_outputs(source: Path, out: Path, labels_csv: Path | None) -> None:
    if out.suffix != ".npz":
        raise InputError(f"strata are written as .npz, got --out {out}; for text use --labels-csv")
    if labels_csv is not None and labels_csv.absolute() == out.absolute():
        raise InputError(f"--out and --labels-csv are the same file {out}; choose two names")
    targets = {"--out": out} if labels_csv is None else {"--out": out, "--labels-csv": labels_csv}
    for option, target in targets.items():
        if target.exists() and os.path.samefile(target, source):
            raise InputError(f"{option} {target} is the input file; choose another name")
        if target.is_dir():
            raise InputError(f"{option} {target} is a folder; give a file name in it")
        if not target.parent.is_dir():
            raise InputError(f"there is no folder {target.parent} for {option} {target}; make it first")
        if not os.access(target.parent, os.W_OK):
            raise InputError(f"cannot write into {target.parent}; choose another folder with {option}")
    # an older result is replaced, anything else is not ours to replace
    if out.exists():
        try:
            _load_strata(out)
        except InputError:
            raise InputError(f"--out {out} exists and is not a strata file; choose another name") from None
    if labels_csv is not None and labels_csv.exists():
        with labels_csv.open("rb") as file:
            if file.read(len(_CSV_HEADER)) != _CSV_HEADER.encode():
                raise InputError(f"--labels-csv {labels_csv} holds something else; choose another name")


def _save(strata: Strata, out: Path, labels_csv: Path | None) -> None:
    if labels_csv is None:
        strata.save(out)
        return
    weights = [f"{weight:.9g}" for weight in strata.weights.tolist()]
    with atomic_write(labels_csv) as file:
        file.write(_CSV_HEADER.encode())
        rows = enumerate(strata.labels.tolist())
        file.writelines(f"{row},{label},{weights[label]}\n".encode() for row, label in rows)
        strata.save(out)  # in here, so that both files appear or neither
