"""``vardass tables DIR``: the paper's tables from the records of sweeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["tables"]

_TABLE = "1 (samplers), 2 (methods), 3 (seconds), 4 (steps between refreshes), splits, discrepancy, pairs or all."
_SUFFIXES = {".md": "markdown", ".tex": "latex", ".csv": "csv"}


def tables(
    folders: Annotated[list[Path], typer.Argument(help="Folders of sweeps, or files of records.", metavar="DIR...")],
    table: Annotated[str, typer.Option(help=_TABLE)] = "all",
    form: Annotated[
        str | None, typer.Option("--format", help="text, markdown, latex or csv; by default as --out ends.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="paper: show the paper's numbers beside ours.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead.")] = None,
) -> None:
    """Choose models by their score, average over tasks and repeats, and print the paper's tables.

    Numbers that lack runs are marked. Target labels play no part in choosing.
    """
    # imported only now, so that --help answers at once
    from vardass.errors import InputError
    from vardass.experiments.collect import collect
    from vardass.experiments.current import current_records
    from vardass.experiments.paper import against_paper
    from vardass.experiments.render import FORMATS, render
    from vardass.experiments.tables import TABLE_NAMES, make_tables
    from vardass.files import atomic_write

    form = form or _SUFFIXES.get(out.suffix.lower() if out else "", "text")
    for given, what, known in ((table, "table", TABLE_NAMES), (form, "format", tuple(FORMATS))):
        if given not in known:
            raise InputError(f"unknown {what} {given!r}; choose one of {', '.join(known)}")
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
        return
    with atomic_write(out) as file:
        file.write(text.encode())
    print(f"written: {out}")
