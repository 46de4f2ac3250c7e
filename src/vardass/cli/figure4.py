"""The demo: strata for one wrist of the smart-watch data, and Var(μ̂) against k for five ways to draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from vardass.cli.progress import progress_bar
from vardass.cli.stratify import stratify
from vardass.data import load_watch, standardise
from vardass.errors import InputError
from vardass.figures.base import FigureResult, one_thread, render
from vardass.figures.figure4 import OURS, PAPER, SOLVERS, batch_size_figure
from vardass.files import atomic_write
from vardass.plots import require_matplotlib, save_figure
from vardass.validate import check_count

__all__ = ["run_demo"]

_SHOWN_K = 64


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
            result = batch_size_figure(
                features,
                ks,
                seeds=range(seeds),
                caption=(
                    f"Smart-watch exercises, right wrist, n = {len(features):,} windows of 78 standardised features; "
                    f"Gaussian kernel, squared distances divided by their median; mean of {seeds} runs."
                ),
                settings={"seeds": seeds},
                progress=progress,
            )
    console.print(_table(result, ks, seeds))
    written = save_figure(render(result), folder / "variance_vs_k")
    table = folder / "variance_vs_k.csv"
    with atomic_write(table) as file:
        file.write(result.to_csv().encode())
    console.print(_summary(result, ks), soft_wrap=True)
    console.print(f"written: {', '.join(map(str, [*written, table]))}", soft_wrap=True, markup=False)


def _parse_sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(f"--sizes must be whole numbers such as 8,16,32, got {text!r}") from None
    if sizes[0] < 2 or len(sizes) < 2:
        raise InputError(f"--sizes must be two or more numbers of at least 2, got {text!r}")
    return sizes


def _table(result: FigureResult, ks: list[int], seeds: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title = f"variance relative to uniform, and seconds on one thread (mean of {seeds} runs)"
    table.title_justify = "left"
    for name in ("k", "uniform", *SOLVERS):
        table.add_column(name, justify="right", no_wrap=True)
    for k in ks:
        row = [
            (_numbers(result, "relative_to_uniform", name, k)[0], _numbers(result, "seconds", name, k)[0])
            for name in SOLVERS
        ]
        best = min(row)[0]
        texts = [(relative, f"{relative:.3f}  [dim]{seconds:5.2f}[/]") for relative, seconds in row]
        table.add_row(str(k), "1", *(f"[bold]{text}[/]" if relative == best else text for relative, text in texts))
    return table


def _numbers(result: FigureResult, column: str, method: str, k: int | None = None) -> list[float]:
    """A column of one method, at all batch sizes or at one."""
    rows = result.select(method=method) if k is None else result.select(method=method, k=k)
    return [float(row[column]) for row in rows]


def _span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _summary(result: FigureResult, ks: list[int]) -> str:
    factors = [1.0 / share for share in _numbers(result, "relative_to_uniform", OURS)]
    both = zip(_numbers(result, "variance", OURS), _numbers(result, "variance", PAPER), strict=True)
    ratios = [100.0 * ours / paper for ours, paper in both]
    time = 100.0 * sum(_numbers(result, "seconds", OURS)) / sum(_numbers(result, "seconds", PAPER))
    return (
        f"One draw from each stratum: {_span(factors, '.1f')} times less variance than uniform draws, for k from "
        f"{ks[0]} to {ks[-1]}; min-sum reaches {_span(ratios, '.1f')} % of the variance of the paper's solver in "
        f"{time:.2g} % of its time."
    )
