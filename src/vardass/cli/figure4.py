"""The demo: strata for one wrist of the smart-watch data, and Var(μ̂) against k for five ways to draw."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from vardass.cli.progress import progress_bar
from vardass.cli.stratify import stratify
from vardass.data import load_watch, standardise
from vardass.errors import InputError
from vardass.figures.batch_sizes import METHODS, Point, measure, of_method
from vardass.figures.threads import one_thread
from vardass.files import atomic_write
from vardass.plots import Curve, require_matplotlib, save_figure, variance_figure
from vardass.validate import check_count

__all__ = ["run_demo"]

_SHOWN_K = 64
_PAPER, _OURS = METHODS[-2].name, METHODS[-1].name


def run_demo(folder: Path, sizes: str, seeds: int) -> None:
    """Write strata, figure and numbers into ``folder`` and print what they show."""
    require_matplotlib()  # before the work, not after it
    console = Console(highlight=False)
    ks = _parse_sizes(sizes)
    check_count(seeds, "--seeds")
    data = load_watch()
    features = standardise(data.features[data.side == 1])
    if max(ks) > len(features):
        raise InputError(f"--sizes go up to {max(ks)} for {len(features)} samples; choose smaller ones")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from None
    source = folder / "right_wrist.npy"
    with atomic_write(source) as file:
        np.save(file, features.numpy())

    console.rule("vardass stratify, on smart-watch data (right wrist, 10 people, 7 exercises)")
    with one_thread():
        stratify(source, _SHOWN_K, gammas="1", scale="median")
        console.rule("variance against batch size")
        with progress_bar() as progress:
            points, bounds = measure(features, ks, seeds=range(seeds), progress=progress)
    console.print(_table(points, ks, seeds))
    written = _write(folder, points, bounds, ks, len(features), seeds)
    console.print(_summary(points, ks), soft_wrap=True)
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, markup=False)


def _parse_sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(f"--sizes must be whole numbers such as 8,16,32, got {text!r}") from None
    if sizes[0] < 2 or len(sizes) < 2:
        raise InputError(f"--sizes must be two or more numbers of at least 2, got {text!r}")
    return sizes


def _table(points: Sequence[Point], ks: list[int], seeds: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title = f"variance relative to uniform, and seconds on one thread (mean of {seeds} runs)"
    table.title_justify = "left"
    for name in ("k", "uniform", *(method.name for method in METHODS)):
        table.add_column(name, justify="right", no_wrap=True)
    for k in ks:
        row = [point for point in points if point.k == k]
        best = min(point.relative for point in row)
        cells = []
        for point in row[1:]:
            text = f"{point.relative:.3f}  [dim]{point.seconds:5.2f}[/]"
            cells.append(f"[bold]{text}[/]" if point.relative == best else text)
        table.add_row(str(k), "1", *cells)
    return table


def _span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _finding(points: Sequence[Point]) -> str:
    factors = [1.0 / point.relative for point in of_method(points, _OURS)]
    return f"One draw from each stratum: {_span(factors, '.1f')} times less variance than uniform draws"


def _summary(points: Sequence[Point], ks: list[int]) -> str:
    ours, paper = of_method(points, _OURS), of_method(points, _PAPER)
    ratios = [100.0 * a.variance / b.variance for a, b in zip(ours, paper, strict=True)]
    speed = sum(point.seconds for point in paper) / sum(point.seconds for point in ours)
    return (
        f"{_finding(points)}, for k from {ks[0]} to {ks[-1]}; min-sum reaches {_span(ratios, '.1f')} % of "
        f"the variance of the paper's solver in {100.0 / speed:.2g} % of its time."
    )


def _write(folder: Path, points: Sequence[Point], bounds: list[float], ks: list[int], n: int, seeds: int) -> list[Path]:
    curves = [
        Curve(method.name, [point.variance for point in of_method(points, method.name)], method.colour, method.marker)
        for method in METHODS
    ]
    figure = variance_figure(
        ks,
        curves,
        uniform=[point.variance for point in of_method(points, "uniform")],
        bound=bounds,
        title=_finding(points),
        subtitle=(
            f"Smart-watch exercises, right wrist, n = {n:,} windows of 78 standardised features; Gaussian "
            f"kernel, squared distances divided by their median; mean of {seeds} runs"
        ),
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["k", "method", "variance", "relative_to_uniform", "seconds"])
    for k, bound in zip(ks, bounds, strict=True):
        row = [point for point in points if point.k == k]
        writer.writerows((p.k, p.method, f"{p.variance:.9g}", f"{p.relative:.6f}", f"{p.seconds:.3f}") for p in row)
        writer.writerow((k, "lower bound", f"{bound:.9g}", f"{bound / row[0].variance:.6f}", ""))
    paths = save_figure(figure, folder / "variance_vs_k.png")
    table = folder / "variance_vs_k.csv"
    with atomic_write(table) as file:
        file.write(text.getvalue().encode())
    return [*paths, table]
