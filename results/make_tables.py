"""Write the tables and the page of this folder anew, from its records: ``python results/make_tables.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vardass.files import atomic_write
from vardass.lab.averages import ALGORITHMS, Label, collect, current_records
from vardass.lab.page import write_page
from vardass.lab.tables import make_tables
from vardass.table import markdown, render

HERE = Path(__file__).parent


def table_files() -> list[Path]:
    """Tables of the sweeps, each named after what ``vardass tables --table`` calls it."""
    return sorted(HERE.glob("*/table-*.md"))


def pages() -> list[Path]:
    """Pages of the sweeps."""
    return sorted(HERE.glob("*/report.html"))


def gains_files() -> list[Path]:
    """Gains of samplers, with all tasks and repeats as pairs."""
    return sorted(HERE.glob("*/gains.md"))


def table_text(file: Path) -> str:
    """What a file of tables should say, by the records beside it."""
    records, _ = current_records(file.parent)
    return render(make_tables(collect(records), file.stem.removeprefix("table-")), "markdown")


def gains_text(folder: Path) -> str:
    """Gain of each sampler over uniform batches in paired runs, with its standard error over tasks and repeats."""
    data = list(collect(current_records(folder)[0]).values())
    runs = sum(len(each.finished) for each in data)
    lines = [
        "Gain over uniform batches with replacement, points of target accuracy. ± is the standard error over tasks",
        f"and repeats, paired; {runs:,} runs.",
    ]
    for algorithm in ("erm", "coral", "mmd"):
        labels = list(dict.fromkeys(label for each in data for label in each.labels if label.algorithm == algorithm))
        reference = Label(algorithm, "uniform-replacement")
        levels = [100 * np.nanmean(each.values(reference)) for each in data]
        rows = [["uniform, in %", *(f"{level:.1f}" for level in levels), f"{np.mean(levels):.1f}"]]
        for label in sorted(labels):
            if label != reference:
                found = [100 * (each.values(label) - each.values(reference)).ravel() for each in data]
                errors = [gain.std(ddof=1) / np.sqrt(len(gain)) for gain in found]
                shown = [f"{gain.mean():+.1f} ± {error:.1f}" for gain, error in zip(found, errors, strict=True)]
                mean = np.mean([gain.mean() for gain in found])
                error = np.sqrt(np.sum(np.square(errors))) / len(data)
                rows.append([label.sampler_name, *shown, f"{mean:+.1f} ± {error:.1f}"])
        header = [ALGORITHMS[algorithm], *(each.name for each in data), "mean"]
        lines += ["", markdown(header, rows, quoted=True)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write all files."""
    for file in table_files():
        with atomic_write(file) as opened:
            opened.write(table_text(file).encode())
    for file in gains_files():
        with atomic_write(file) as opened:
            opened.write(gains_text(file.parent).encode())
    for page in pages():
        write_page(page.parent)


if __name__ == "__main__":
    main()
