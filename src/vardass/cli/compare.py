"""``vardass compare A B``: how far apart two files of embeddings are, how sure that is, and whether it is chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from vardass.analysis.comparison import Comparison
from vardass.analysis.comparison import compare as compare_sets
from vardass.cli.embeddings import (
    COLUMNS,
    FILE,
    GAMMAS,
    KERNEL,
    SCALE,
    chosen_kernel,
    features_of,
    finite,
    print_line,
)
from vardass.cli.progress import progress_bar
from vardass.scaling import standardise as scaled
from vardass.validate import choose

__all__ = ["compare"]

_NAMES = {"mmd": "MMD²", "coral": "CORAL"}
_LABELS = r"Label column, excluded from the features \[labels]."


def compare(
    first: Annotated[Path, typer.Argument(help=FILE, metavar="A")],
    second: Annotated[Path, typer.Argument(help="Another one, with the same columns.", metavar="B")],
    loss: Annotated[str, typer.Option(help="mmd, coral or both.")] = "both",
    kernel: Annotated[str, typer.Option(help="Of MMD²: " + KERNEL)] = "mmd",
    gammas: Annotated[str | None, typer.Option(help=GAMMAS)] = None,
    scale: Annotated[str | None, typer.Option(help=SCALE + r" \[median]; 1 for the paper's bandwidths.")] = None,
    permutations: Annotated[int, typer.Option(help="Of the test; 0 for none.")] = 999,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    standardise: Annotated[
        bool, typer.Option("--standardise", help="Scale each column to deviation 1 over both files.")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Rank of the kernel's approximation for many rows.")] = None,
    key: Annotated[str | None, typer.Option(help="Array of .npz files.")] = None,
    labels: Annotated[str, typer.Option(help=_LABELS, show_default=False)] = "labels",
    columns: Annotated[str | None, typer.Option(help=COLUMNS)] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Measure MMD² and CORAL between two data sets of any size.

    Each comes with a confidence interval and the p-value of a permutation test. Rows must be independent.
    """
    chosen = chosen_kernel(kernel, gammas, scale, default_scale="median")
    choose(loss, "--loss", ("both", *_NAMES))
    paths = [first.expanduser(), second.expanduser()]
    arrays = any(path.suffix.lower() == ".npz" for path in paths)
    sets = []
    for path in paths:  # --key is for the .npz file of the two, if there is one
        own_key = key if path.suffix.lower() == ".npz" or not arrays else None
        sets.append(features_of(path, key=own_key, columns=columns, leave_out=[labels]))
    if standardise and sets[0].shape[1] == sets[1].shape[1]:  # else compare says what is wrong
        pooled = torch.cat(sets)
        sets = [scaled(each, reference=pooled) for each in sets]
        del pooled
    with progress_bar() as progress:
        found = compare_sets(
            *sets,
            loss=loss,
            kernel=chosen,
            permutations=permutations,
            confidence=confidence,
            rank=rank,
            seed=seed,
            progress=progress,
        )
    if as_json:
        record = {"a": str(first), "b": str(second), "standardised": standardise, **found.to_dict()}
        print(json.dumps(finite(record), allow_nan=False))
    else:
        _print_report(found, first, second, Console(highlight=False))


def _print_report(found: Comparison, first: Path, second: Path, console: Console) -> None:
    print_line(console, f"{first.name}: {found.n:,} rows; {second.name}: {found.m:,}; {found.d:,} columns", "bold")
    if found.kernel:
        print_line(console, f"kernel {found.kernel}")
    console.print()
    table = Table(box=None, pad_edge=False)
    percent = f"{100 * found.confidence:g} % interval"
    for title in ("", "value", percent, "of the spread", "plug-in", "p"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for each in found.results:
        p = "" if each.p_value is None else f"{each.p_value:.3g}"
        share = f"{100 * each.relative:.3g} %"
        interval = f"{each.low:.4g} to {each.high:.4g}"
        table.add_row(_NAMES[each.loss], f"{each.value:.4g}", interval, share, f"{each.v_statistic:.4g}", p)
    console.print(table)
    console.print()
    for sentence in _verdict(found):
        print_line(console, sentence)


def _verdict(found: Comparison) -> list[str]:
    level = 1.0 - found.confidence
    lines = []
    for each in found.results:
        name = _NAMES[each.loss]
        if each.p_value is not None:
            least = (
                " (the smallest possible with this many permutations)"
                if each.p_value * (1 + found.permutations) < 1.5
                else ""
            )
            seen = "the sets differ" if each.p_value <= level else "no difference found"
            lines.append(f"{name}: {seen}, p = {each.p_value:.3g}{least}; {found.permutations:,} {each.test}")
        error = f", ± {each.computing_stderr:.1g}" if each.computing_stderr > 0 else ""
        lines.append(f"{name}: from {each.method}{error}")
    return [*lines, *(f"note: {note}" for note in found.notes)]
