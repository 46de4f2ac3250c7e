"""``vardass stratify FILE``: strata for a file of embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["stratify"]

_KERNEL = "mmd (the paper's RBF mixture), rbf, coral, linear, polynomial or laplacian."
_SOLVER = "min-sum, dynamic-kmeans (the paper's), kmeans, kernel-kmeans or interior-point."
_COLUMNS = "Columns to read: names, patterns (f*), numbers from 0 or ranges (2:), separated by commas."


def stratify(
    file: Annotated[Path, typer.Argument(help="Embeddings (n, d): .npy, .npz, .csv or .parquet.")],
    k: Annotated[int, typer.Option("--k", "-k", help="Number of strata, which is the batch size.")],
    kernel: Annotated[str, typer.Option(help=_KERNEL)] = "mmd",
    gammas: Annotated[str | None, typer.Option(help="Gammas of mmd or rbf, such as 0.1,1,10.")] = None,
    scale: Annotated[
        str | None, typer.Option(help="Divide squared distances in mmd or rbf by a number, median or mean.")
    ] = None,
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
    columns: Annotated[str | None, typer.Option(help=_COLUMNS)] = None,
    out: Annotated[Path | None, typer.Option(help="Strata file; default: FILE.strata.npz.")] = None,
    labels_csv: Annotated[Path | None, typer.Option(help="Write the stratum of each row here too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Partition samples into k strata such that one draw from each gives the smallest variance.

    Writes the strata, and reports their variance next to uniform draws and to what is possible.
    """
    # torch is imported only now, so that --help and --version answer at once
    from vardass.cli.job import make_kernel, stratify_file
    from vardass.cli.report import as_record, print_report

    outcome = stratify_file(
        file,
        k,
        kernel=make_kernel(kernel, gammas, scale),
        solver=solver,
        min_size=min_size,
        max_size=max_size,
        equal=equal,
        rank=rank,
        seed=seed,
        warm_start=warm_start,
        bound=bound,
        certify=certify,
        key=key,
        columns=columns,
        out=out,
        labels_csv=labels_csv,
    )
    if as_json:
        print(json.dumps(as_record(outcome), allow_nan=False))
    else:
        print_report(outcome)
