"""The demo's last part: ``vardass adapt`` on two files, as a user would call it, against source-only training."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vardass.cli.adapt import adapt
from vardass.cli.training_demo import BATCH_SIZE, PAIRS
from vardass.cli.training_report import standard_error
from vardass.data import load_watch, watch_domains

__all__ = ["run_adapt"]

_WAYS = {
    "source only": ("erm", "uniform"),
    "MMD, uniform batches": ("mmd", "uniform"),
    "MMD, ordered batches": ("mmd", "ordered"),
}


def run_adapt(folder: Path, *, pairs: int, steps: int) -> None:
    """Adapt from one wrist and group of people to the other, and print target accuracies."""
    console = Console(highlight=False)
    console.rule("the same with one command, on two files")
    data, runs = folder / "data", folder / "adapt"
    data.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(runs, ignore_errors=True)  # of an earlier demo
    names = np.array(load_watch().class_names)
    for domain, (features, labels) in watch_domains().items():
        np.savez(data / f"{domain}.npz", x=features.numpy(), labels=names[labels.numpy()])
    found: dict[str, list[dict[str, Any]]] = {}
    for name, (algorithm, sampler) in _WAYS.items():
        for source, target in PAIRS[:pairs]:
            text = io.StringIO()
            with redirect_stdout(text):
                adapt(
                    source=[data / f"{source}.npz"],
                    target=data / f"{target}.npz",
                    out=runs / f"{algorithm}-{sampler}-{source}-{target}",
                    algorithm=algorithm,
                    sampler=sampler,
                    steps=steps,
                    batch_size=BATCH_SIZE,
                    standardise=True,
                    as_json=True,
                )
            found.setdefault(name, []).append(json.loads(text.getvalue()))
    source, target = PAIRS[0]
    console.print(
        f"vardass adapt --source {data / source}.npz --target {data / target}.npz --standardise --algorithm mmd "
        f"--sampler ordered --steps {steps} --batch-size {BATCH_SIZE} --out RUN",
        soft_wrap=True,
        markup=False,
    )
    console.print(_table(found, f"{pairs} source-target pairs, {steps} steps; labels of the target read last"))
    console.print(f"models, predictions and reports: {runs}", soft_wrap=True, markup=False)


def _table(found: dict[str, list[dict[str, Any]]], caption: str) -> Table:
    table = Table(title="target accuracy", caption=caption)
    for heading in ("", "target accuracy, %", "gain over source only", "gain over uniform batches", "seconds a run"):
        table.add_column(heading, justify="left" if not heading else "right")
    accuracy = {name: [100 * run["target_accuracy"] for run in runs] for name, runs in found.items()}
    for name, values in accuracy.items():
        seconds = np.mean([sum(run["seconds"].values()) for run in found[name]])
        table.add_row(
            name,
            f"{np.mean(values):.1f}",
            _gain(values, accuracy["source only"]),
            _gain(values, accuracy["MMD, uniform batches"]) if name.startswith("MMD") else "",
            f"{seconds:.1f}",
        )
    return table


def _gain(values: list[float], base: list[float]) -> str:
    if values is base:
        return ""
    gains = [value - other for value, other in zip(values, base, strict=True)]
    error = f" ± {standard_error(gains):.1f}" if len(gains) > 1 else ""
    return f"{np.mean(gains):+.1f}{error}"
