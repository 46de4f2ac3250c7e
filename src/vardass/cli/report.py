"""``vardass tables DIR`` and ``vardass report DIR``: what came of sweeps and runs, as tables and as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vardass.errors import InputError
from vardass.files import write_text
from vardass.table import FORMATS, render
from vardass.validate import choose

__all__ = ["report", "tables"]

_TABLE = (
    "summary (one for each data set), 1 (samplers), 2 (methods), 3 (seconds), 4 (steps between refreshes), splits, "
    "discrepancy, pairs (tests), or all that have content."
)
_SUFFIXES = {".md": "markdown", ".tex": "latex", ".csv": "csv"}


def tables(
    folders: Annotated[list[Path], typer.Argument(help="Folders of sweeps, or files of records.", metavar="DIR...")],
    table: Annotated[str, typer.Option(help=_TABLE)] = "summary",
    form: Annotated[
        str | None, typer.Option("--format", help="text, markdown, latex or csv; by default as --out ends.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="paper: show the paper's numbers beside ours.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead.")] = None,
) -> None:
    """Choose models by their score, average over tasks and repeats, and print the paper's tables.

    Numbers that lack runs are marked. Target labels play no part in choosing.
    """
    from vardass.lab.averages import collect, current_records
    from vardass.lab.tables import TABLE_NAMES, make_tables
    from vardass.paper.numbers import against_paper

    form = form or _SUFFIXES.get(out.suffix.lower() if out else "", "text")
    choose(table, "table", TABLE_NAMES)
    choose(form, "format", FORMATS)
    if against not in (None, "paper"):
        raise InputError(f"cannot compare with {against!r}; the only choice is --against paper")
    records = []
    for folder in folders:
        found, left_out = current_records(folder)
        records += found
        if left_out:
            print(f"{left_out} records in {folder} are left out: the sweep was changed since", file=sys.stderr)
    if not records:
        named = ", ".join(map(str, folders))
        raise InputError(f"no records of runs in {named}; name the folder of a sweep with at least one finished run")
    results = collect(records)
    made = make_tables(results, table)
    text = render(against_paper(made, results) if against else made, form)
    if out is None:
        print(text, end="")
        if table == "summary":
            print(f"more: --table {', '.join(TABLE_NAMES[1:])}", file=sys.stderr)
        return
    write_text(out, text)
    print(f"written: {out}")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a sweep or of a run.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; default: DIR/report.html.")] = None,
) -> None:
    """Write one self-contained HTML page: tables, curves, variance, time, settings.

    The page needs no network and no other file, so it can be sent or kept.
    """
    from vardass.lab.page import write_page

    path = write_page(folder, out)
    print(f"written: {path} ({path.stat().st_size / 1e6:.2f} MB); open it in a browser")
