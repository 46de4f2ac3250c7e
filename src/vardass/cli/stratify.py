"""``vardass stratify FILE...``: strata for embeddings, with a report on what they save."""

from __future__ import annotations

import json
import os
import time
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from vardass.backend import compiled_loops, were_compiled
from vardass.cli.embeddings import COLUMNS, GAMMAS, KERNEL, SCALE, check_output, chosen_kernel
from vardass.cli.terminal import bar, plain_table, print_line, progress_bar
from vardass.data.embedding_files import read_embeddings
from vardass.errors import InputError
from vardass.files import atomic_write, plain
from vardass.kernels import Kernel
from vardass.samplers import BalancedBatchSampler, OrderedBatchSampler
from vardass.shards import ShardStrata, stratify_shards
from vardass.shards.files import expand, is_large
from vardass.solvers import stratify as make_strata
from vardass.strata import Strata

__all__ = ["stratify", "warmup"]

_SOLVER = "min-sum, dynamic-kmeans (the paper's), kmeans, kernel-kmeans; interior-point, of Figure 3, for small n."
_FILES = "Embeddings (n, d): .npy, .npz, .csv or .parquet; or several .npy or .parquet files, or a quoted pattern."
_PARTS = "Files in parts"
_SAMPLE = "Rows that strata are found on; default: 131072, or 512 for each stratum if that is more."
_WORKERS = "Processes; default: one for each CPU."
_ENGINE = "local, or ray: tasks on the Ray cluster at RAY_ADDRESS, or on a Ray of their own."
_CSV_HEADER = "row,stratum,weight\n"


def stratify(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help=_FILES)],
    k: Annotated[int, typer.Option("--k", "-k", help="Number of strata, which is the batch size.")],
    kernel: Annotated[str, typer.Option(help=KERNEL)] = "mmd",
    gammas: Annotated[str | None, typer.Option(help=GAMMAS)] = None,
    scale: Annotated[str | None, typer.Option(help=SCALE)] = None,
    solver: Annotated[str, typer.Option(help=_SOLVER)] = "min-sum",
    min_size: Annotated[int, typer.Option(help="Smallest stratum; 2 avoids singletons.")] = 1,
    max_size: Annotated[int | None, typer.Option(help="Largest stratum.")] = None,
    equal: Annotated[bool, typer.Option("--equal", help="Strata of equal size, up to one sample.")] = False,
    rank: Annotated[int | None, typer.Option(help="Rank of the kernel's approximation.")] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same strata.")] = 0,
    warm_start: Annotated[Path | None, typer.Option(help="Strata file to start from.")] = None,
    bound: Annotated[bool, typer.Option(help="Compute what no partition can go below.")] = True,
    certify: Annotated[bool, typer.Option("--certify", help="Compute a tighter, slower bound.")] = False,
    key: Annotated[str | None, typer.Option(help="Array of an .npz file.")] = None,
    columns: Annotated[str | None, typer.Option(help=COLUMNS)] = None,
    out: Annotated[Path | None, typer.Option(help="Strata file; default: FILE.strata.npz.")] = None,
    labels_csv: Annotated[Path | None, typer.Option(help="Write the stratum of each row here too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    sample: Annotated[int | None, typer.Option(help=_SAMPLE, rich_help_panel=_PARTS)] = None,
    workers: Annotated[int | None, typer.Option(help=_WORKERS, rich_help_panel=_PARTS)] = None,
    engine: Annotated[str, typer.Option(help=_ENGINE, rich_help_panel=_PARTS)] = "local",
) -> None:
    """Partition samples into k strata such that one draw from each gives the smallest variance.

    Writes the strata, and reports their variance next to uniform draws and to what is possible. One file is read as a
    whole; several, or one that is too large, in parts: then --out is a folder, with a file of strata for each file, and
    the same command goes on where it was stopped.
    """
    chosen = chosen_kernel(kernel, gammas, scale)
    paths = expand(files)
    if len(paths) > 1 or sample is not None or workers is not None or engine != "local" or is_large(paths[0]):
        limited = {
            "--solver": solver != "min-sum",
            "--min-size": min_size != 1,
            "--max-size": max_size is not None,
            "--equal": equal,
            "--warm-start": warm_start is not None,
            "--certify": certify,
            "--key": key is not None,
            "--labels-csv": labels_csv is not None,
        }
        if refused := [option for option, given in limited.items() if given]:
            raise InputError(f"{refused[0]} is for one file that is read as a whole; leave it out for files in parts")
        outcome = _in_parts(paths, k, chosen, columns, sample, rank, seed, workers, engine, out)
    else:
        (file,) = paths
        out = file.with_name(file.stem + ".strata.npz") if out is None else out
        clock = time.perf_counter()
        features = read_embeddings(file, key=key, columns=columns)
        start = None if warm_start is None else _load_strata(warm_start)
        _check_outputs(file, out, labels_csv)  # before the work, not after it
        seconds = {"read": time.perf_counter() - clock}
        with progress_bar() as progress:
            strata = make_strata(
                features,
                k,
                kernel=chosen,
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
        seconds |= _seconds(strata)
        _save(strata, out, labels_csv)
        outcome = _Outcome(strata, file, features.shape[1], out, labels_csv, seconds)
    if as_json:
        print(json.dumps(plain(_record(outcome)), allow_nan=False))
    else:
        _print_report(outcome, Console(highlight=False))


def _in_parts(
    paths: list[Path],
    k: int,
    kernel: Kernel,
    columns: str | None,
    sample: int | None,
    rank: int | None,
    seed: int,
    workers: int | None,
    engine: str,
    out: Path | None,
) -> _Outcome:
    """Strata of files that are read in parts."""
    source = paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute().parent for path in paths]))
    out = source.with_name(source.stem + ".strata") if out is None else out
    with progress_bar() as progress:
        strata = stratify_shards(
            paths,
            k,
            out=out,
            kernel=kernel,
            columns=columns,
            sample=sample,
            rank=rank,
            seed=seed,
            workers=workers,
            engine=engine,
            progress=progress,
        )
    return _Outcome(strata, source, strata.d, out, None, _seconds(strata))


def _seconds(strata: Strata | ShardStrata) -> dict[str, float]:
    parts = {name: value for name, value in strata.info.items() if name.startswith("seconds_")}
    return {name.removeprefix("seconds_"): float(value) for name, value in parts.items()}


@dataclass(frozen=True)
class _Outcome:
    """Strata, where they came from and where they went."""

    strata: Strata | ShardStrata
    source: Path
    d: int
    out: Path
    labels_csv: Path | None
    seconds: dict[str, float]


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
        check_output(option, target, source)
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


def _record(outcome: _Outcome) -> dict[str, Any]:
    """One flat record."""
    strata, bound = outcome.strata, outcome.strata.bound
    record = {
        "file": str(outcome.source),
        "n": strata.n,
        "d": outcome.d,
        "k": strata.k,
        "kernel": strata.kernel,
        "solver": strata.solver,
        "variance": strata.variance,
        "variance_stderr": strata.variance_stderr,
        "uniform_variance": strata.uniform_variance,
        "relative_variance": _relative(outcome, strata.variance),
        "without_replacement": _without_replacement(outcome),
        "reduction": strata.reduction,
        "bound": None if bound is None else bound.variance,
        "bound_stderr": None if bound is None else bound.stderr,
        "bound_method": None if bound is None else bound.method,
        "gap": strata.gap,
        "min_size": int(strata.sizes.min()),
        "median_size": float(strata.sizes.double().quantile(0.5)),
        "max_size": int(strata.sizes.max()),
        "singletons": strata.singletons,
        "size_histogram": strata.size_histogram(),
        "seconds": outcome.seconds,
        "info": {name: value for name, value in strata.info.items() if not name.startswith("seconds_")},
        "out": str(outcome.out),
        "labels_csv": None if outcome.labels_csv is None else str(outcome.labels_csv),
    }
    return record


def _relative(outcome: _Outcome, variance: float) -> float:
    uniform = outcome.strata.uniform_variance
    return variance / uniform if uniform > 0 else 0.0


def _without_replacement(outcome: _Outcome) -> float:
    n, k = outcome.strata.n, outcome.strata.k
    return (n - k) / (n - 1) if n > 1 else 0.0


def _print_report(outcome: _Outcome, console: Console) -> None:
    """Print variances, bound, sizes, seconds and where the strata are; 80 columns unless a path is long."""
    strata = outcome.strata

    line = partial(print_line, console)

    line(f"{outcome.source.name}: {strata.n:,} samples, {outcome.d:,} features, {strata.k:,} strata", "bold")
    line(f"solver {strata.solver}, kernel {strata.kernel}")
    console.print()
    line("variance of the minibatch mean embedding", "bold")
    console.print(_variances(outcome, console))
    for sentence in _verdict(outcome):
        line(sentence)
    console.print()
    sizes = strata.sizes
    middle = f"{float(sizes.double().quantile(0.5)):g}"
    line(f"samples in a stratum: {int(sizes.min())} to {int(sizes.max())}, median {middle}", "bold")
    console.print(_histogram(outcome, console))
    if strata.singletons:
        line(f"{strata.singletons} strata of one sample, which is in every batch; --min-size 2 avoids them")
    console.print()
    compiled = " (compiling included, once for each machine)" if were_compiled() else ""
    line("seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in outcome.seconds.items()) + compiled)
    written = [outcome.out] if outcome.labels_csv is None else [outcome.out, outcome.labels_csv]
    line(f"written: {', '.join(map(str, written))}")


def _variances(outcome: _Outcome, console: Console) -> Table:
    strata, bound = outcome.strata, outcome.strata.bound
    rows = [
        ("uniform draws", strata.uniform_variance, 0.0, "dim"),
        ("uniform, no repeats", strata.uniform_variance * _without_replacement(outcome), 0.0, "dim"),
        ("one from each stratum", strata.variance, strata.variance_stderr, "bold green"),
    ]
    if bound is not None:
        rows.append(("lower bound", bound.variance, bound.stderr, ""))
    table = plain_table("left", "right", "right", "left")
    plus_minus = "+-" if console.options.ascii_only else "±"
    for name, variance, error, style in rows:
        share = _relative(outcome, variance)
        spread = f" {plus_minus} {error:.1g}" if error > 0 else ""
        percent = f"{100 * share:.1f} %"
        table.add_row(name, f"{variance:.4g}{spread}", percent, bar(share, console), style=style)
    return table


def _verdict(outcome: _Outcome) -> list[str]:
    strata = outcome.strata
    lines = [f"{strata.reduction:.3g} times less variance than uniform draws"]
    if strata.gap is not None and strata.bound is not None:
        lines[0] += f"; at most {100 * max(strata.gap, 0.0):.2g} % above the best possible partition"
        sampled = ", estimated from sampled rows" if strata.bound.stderr > 0 else ""
        lines.append(f"lower bound: {strata.bound.method}{sampled}")
    if "captured" in strata.info:
        captured, rank = 100 * float(strata.info["captured"]), strata.info.get("rank", "?")
        lines.append(f"strata were found on features of rank {rank}, which hold {captured:.3g} % of the variance")
    if strata.variance > 0.8 * strata.uniform_variance and "scale=1.0" in strata.kernel:
        lines.append("the kernel is close to the identity on these features, where no strata help; try --scale median")
    return lines


def _histogram(outcome: _Outcome, console: Console) -> Table:
    table = plain_table("right", "right", "left")
    histogram = outcome.strata.size_histogram()
    for label, count in histogram.items():
        table.add_row(label, f"{count} strata", bar(count / max(histogram.values()), console))
    return table


def warmup() -> None:
    """Compile what is compiled on first use, once, for example while a container image is built."""
    loops = compiled_loops(torch.zeros(1))
    if loops is None:
        print("nothing to compile: numba is not installed (pip install 'vardass[fast]')")
        return
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(2500, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
        some = x[:300]
        make_strata(x, 40)
        make_strata(some, 20, equal=True)
        make_strata(some, 20, init="kmeans++", rank=4)
        make_strata(some, 20, solver="dynamic-kmeans", max_iter=1)
        for kind in (OrderedBatchSampler, BalancedBatchSampler):
            sampler = kind(len(some), 20)
            sampler.refresh(some)
            next(iter(sampler))
    print(f"compiled, and kept in {loops.centre.stats.cache_path or 'no folder: none can be written to'}")
