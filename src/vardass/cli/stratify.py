"""``vardass stratify FILE...``: strata for embeddings, with a report on what they save."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from vardass.backend import compiled_loops, were_compiled
from vardass.cli.embeddings import (
    COLUMNS,
    GAMMAS,
    KERNEL,
    LABELS,
    PARTS,
    SCALE,
    Engine,
    Workers,
    check_output,
    chosen_kernel,
    common_folder,
    in_parts,
)
from vardass.cli.terminal import print_json, print_line, progress_bar, shares_table
from vardass.data.embedding_files import read_embeddings
from vardass.errors import InputError
from vardass.files import note_output
from vardass.samplers import BalancedBatchSampler, OrderedBatchSampler
from vardass.shards import ShardStrata, stratify_shards
from vardass.shards.files import expand
from vardass.solvers import stratify as make_strata
from vardass.strata import Strata
from vardass.validate import check_count

_SOLVER = "min-sum, dynamic-kmeans (the paper's), kmeans, kernel-kmeans."
_FILES = "Embeddings (n, d): .npy, .npz, .csv or .parquet; or several .npy or .parquet files, or a quoted pattern."
_SAMPLE = "Rows used to find the strata; default: 131072, or 512 for each stratum if that is more."


def stratify(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help=_FILES)],
    k: Annotated[int, typer.Option("--k", "-k", help="Number of strata: the batch size.")],
    kernel: Annotated[str, typer.Option(help=KERNEL)] = "mmd",
    gammas: Annotated[str | None, typer.Option(help=GAMMAS)] = None,
    scale: Annotated[str | None, typer.Option(help=SCALE)] = None,
    solver: Annotated[str, typer.Option(help=_SOLVER)] = "min-sum",
    min_size: Annotated[int, typer.Option(help="Smallest stratum; 2 avoids singletons.")] = 1,
    max_size: Annotated[int | None, typer.Option(help="Largest stratum.")] = None,
    equal: Annotated[bool, typer.Option("--equal", help="Make strata of equal size, to within one sample.")] = False,
    rank: Annotated[int | None, typer.Option(help="Rank of the low-rank kernel approximation.")] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same strata.")] = 0,
    warm_start: Annotated[Path | None, typer.Option(help="Strata file to start from.")] = None,
    bound: Annotated[bool, typer.Option(help="Compute a lower bound on the variance of any strata.")] = True,
    key: Annotated[str | None, typer.Option(help="Array of an .npz file.")] = None,
    labels: Annotated[str, typer.Option(help=LABELS)] = "labels",
    columns: Annotated[str | None, typer.Option(help=COLUMNS)] = None,
    out: Annotated[Path | None, typer.Option(help="Strata file; default: FILE.strata.npz.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    sample: Annotated[int | None, typer.Option(help=_SAMPLE, rich_help_panel=PARTS)] = None,
    workers: Workers = None,
    engine: Engine = "local",
) -> None:
    """Partition samples into k strata so that batches with one draw from each have minimal variance.

    Writes the strata, and reports their variance, that of uniform draws and a lower bound. One file is read as a whole.
    Several files, or one that is too large, are read in parts: --out is then a folder with a file of strata for each
    file, and the same command resumes where it stopped.
    """
    chosen = chosen_kernel(kernel, gammas, scale)
    paths = expand(files)
    given: dict[str, Any] = {"sample": sample, "workers": workers, "engine": engine}
    options: dict[str, Any] = {"kernel": chosen, "rank": rank, "seed": seed}
    reading: dict[str, Any] = {"columns": columns, "leave_out": [labels]}
    refused = {
        "--solver": solver != "min-sum",
        "--min-size": min_size != 1,
        "--max-size": max_size is not None,
        "--equal": equal,
        "--warm-start": warm_start is not None,
        "--key": key is not None,
    }
    strata: Strata | ShardStrata
    if in_parts(paths, given, refused):
        source = common_folder(paths)
        out = source.with_name(source.stem + ".strata") if out is None else out
        with progress_bar() as progress:
            strata = stratify_shards(paths, k, out=out, progress=progress, **reading, **given, **options)
        d, seconds = strata.d, _seconds(strata)
    else:
        (source,) = paths
        out = source.with_name(source.stem + ".strata.npz") if out is None else out
        clock = time.perf_counter()
        features = read_embeddings(source, key=key, **reading)
        n, d = features.shape
        check_count(k, "--k", high=n, remedy=f"{source} has {n:,} rows, each stratum at least one")
        start = None if warm_start is None else Strata.load(warm_start)
        if out.suffix != ".npz":  # before the work, not after it
            raise InputError(f"strata are written as .npz, got --out {out}; give it a name that ends with .npz")
        check_output("--out", out, source, "stratify")
        seconds_read = time.perf_counter() - clock
        options |= {"solver": solver, "min_size": min_size, "max_size": max_size, "equal": equal}
        options |= {"bound": bound, "warm_start": start}
        with progress_bar() as progress:
            strata = make_strata(features, k, progress=progress, **options)
        strata.save(out)
        note_output(out, "stratify")
        seconds = {"read": seconds_read, **_seconds(strata)}
    if as_json:
        print_json({"file": str(source), "d": d, **_record(strata), "seconds": seconds, "out": str(out)})
    else:
        _print_report(strata, f"{source.name}: {strata.n:,} samples, {d:,} features", seconds, out)


def _seconds(strata: Strata | ShardStrata) -> dict[str, float]:
    parts = {name: value for name, value in strata.info.items() if name.startswith("seconds_")}
    return {name.removeprefix("seconds_"): float(value) for name, value in parts.items()}


def _record(strata: Strata | ShardStrata) -> dict[str, Any]:
    bound, sizes = strata.bound, strata.sizes
    names = ("n", "k", "kernel", "solver", "variance", "variance_stderr", "uniform_variance", "reduction", "gap")
    return {
        **{name: getattr(strata, name) for name in (*names, "singletons")},
        "relative_variance": strata.variance / strata.uniform_variance if strata.uniform_variance > 0 else 0.0,
        "without_replacement": _without_replacement(strata),
        "bound": None if bound is None else bound.variance,
        "bound_stderr": None if bound is None else bound.stderr,
        "min_size": int(sizes.min()),
        "median_size": float(sizes.double().quantile(0.5)),
        "max_size": int(sizes.max()),
        "info": {name: value for name, value in strata.info.items() if not name.startswith("seconds_")},
    }


def _without_replacement(strata: Strata | ShardStrata) -> float:
    return (strata.n - strata.k) / (strata.n - 1) if strata.n > 1 else 0.0


def _print_report(strata: Strata | ShardStrata, data: str, seconds: dict[str, float], out: Path) -> None:
    """Print variances, bound, sizes, seconds and where the strata are; 80 columns unless a path is long."""
    console = Console(highlight=False)
    line = partial(print_line, console)
    line(f"{data}, {strata.k:,} strata", "bold")
    line(f"solver {strata.solver}, kernel {strata.kernel}")
    console.print()
    line("variance of the minibatch mean embedding", "bold")
    uniform, bound = strata.uniform_variance, strata.bound
    rows = [
        ("uniform draws", uniform, 0.0, "dim"),
        ("uniform, no repeats", uniform * _without_replacement(strata), 0.0, "dim"),
        ("one from each stratum", strata.variance, strata.variance_stderr, "bold green"),
        *([] if bound is None else [("lower bound", bound.variance, bound.stderr, "")]),
    ]
    console.print(shares_table(rows, uniform, console))
    for sentence in _verdict(strata):
        line(sentence)
    console.print()
    sizes = strata.sizes
    median = float(sizes.double().quantile(0.5))
    line(f"samples in a stratum: {int(sizes.min())} to {int(sizes.max())}, median {median:g}", "bold")
    if strata.singletons:
        line(f"{strata.singletons} strata of one sample, which is in every batch; --min-size 2 avoids them")
    console.print()
    compiled = " (including one-time compilation)" if were_compiled() else ""
    line("seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()) + compiled)
    line(f"written: {out}")


def _verdict(strata: Strata | ShardStrata) -> list[str]:
    lines = [f"{strata.reduction:.3g} times less variance than uniform draws"]
    if strata.gap is not None and strata.bound is not None:
        lines[0] += f"; at most {100 * max(strata.gap, 0.0):.2g} % above the best possible partition"
        if strata.bound.stderr > 0:
            lines[0] += " (the bound is estimated from sampled rows)"
    if "captured" in strata.info:
        captured, rank = 100 * float(strata.info["captured"]), strata.info.get("rank", "?")
        lines.append(f"strata were found on features of rank {rank}, which capture {captured:.3g} % of the variance")
    if strata.variance > 0.6 * strata.uniform_variance and "scale=1.0" in strata.kernel:
        lines.append("with these bandwidths most features are far apart, so strata help little; try --scale median")
    return lines


def warmup() -> None:
    """Compile all kernels now instead of on first use, for example while a container image is built."""
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
    print(f"compiled and cached in {loops.centre.stats.cache_path or 'no folder: none is writable'}")
