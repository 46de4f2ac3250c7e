"""The paper's numbers, and our tables beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from scipy import stats

from vardass.lab.averages import SAMPLERS, UNIFORM, DataResults, Label
from vardass.paper.datasets import OFFICE_HOME_DOMAINS
from vardass.table import Average, Entry, PValue, Table, TableRow, entry_mean

__all__ = ["PAPER_TASKS", "against_paper", "paper_entry", "paper_name", "paper_numbers"]

PAPER_TASKS = {"camelyon17": 1, "humpbacks": 4, "spawrious": 6, "office-home": 12}
_REPEATS = 5
_FEWEST_TASKS = 4  # fewer gains have no rank correlation to speak of
_UNIFORM = SAMPLERS["uniform"]
_BY_DATA = ("accuracy", "refresh", "splits", "discrepancy")  # one table for each data set
_PRINTED = {"seconds": 0, "discrepancy": 3}  # decimals, else one
_ADAPTING = ("coral", "mmd")
_OFFICE_HOME = {
    "".join(filter(str.isalpha, name)).lower(): letter.lower() for letter, name in OFFICE_HOME_DOMAINS.items()
}


@cache
def paper_numbers() -> dict[str, Any]:
    """All of the paper's tables as printed.

    ``"accuracy"`` (Table 1), ``"refresh"`` (4), ``"splits"`` and ``"discrepancy"`` (appendix) by data set, and
    ``"methods"`` (2) and ``"seconds"`` (3). Each has ``"columns"``, ``"rows"`` (lists of mean and standard error or
    None, by name) and ``"bold"`` (pairs of row and column).
    """
    text = resources.files("vardass.paper").joinpath("numbers.json").read_text(encoding="utf-8")
    numbers: dict[str, Any] = json.loads(text)
    return numbers


def paper_name(data: DataResults) -> str | None:
    """The paper's data set that these data are, by the name in tables or by the loader's; None if it has none."""
    names = [name.lower().replace("_", "-") for name in (data.name, data.dataset)]
    return next((name for name in names if name in PAPER_TASKS), None)


def paper_entry(kind: str, data: str, row: str, column: str) -> Entry:
    """One number of the paper, None if it has none."""
    numbers = paper_numbers()
    if kind == "ratio":
        one, uniform = (entry_mean(paper_entry("seconds", data, name, column)) for name in (row, _UNIFORM))
        return None if one is None or not uniform else one / uniform
    if kind not in numbers:
        return None
    table = numbers[kind].get(data) if kind in _BY_DATA else numbers[kind]
    if table is None:
        return None
    if kind not in _BY_DATA:
        column = data
    elif kind == "refresh":
        row, column = row.removesuffix(" + VaRDASS") if row.endswith(" + VaRDASS") else "", column.removeprefix("T=")
    names = {_column_key(name, data): place for place, name in enumerate(table["columns"])}
    place = names.get(_column_key(column, data))
    if place is None or row not in table["rows"]:
        return None
    mean, stderr = table["rows"][row][place]
    return float(mean) if stderr is None else Average(mean, stderr, _REPEATS, _REPEATS)


def _column_key(name: str, data: str) -> str:
    lowered = name.lower()
    if data == "office-home":  # embeddings have tasks such as Art->Real_World
        letters = [_OFFICE_HOME.get("".join(filter(str.isalpha, domain))) for domain in lowered.split("->")]
        return "-".join(filter(None, letters)) if len(letters) == 2 and all(letters) else lowered
    return lowered.removeprefix("domain ") if data == "humpbacks" else lowered


def against_paper(tables: list[Table], results: Mapping[str, DataResults]) -> list[Table]:
    """Our tables with the paper's numbers beside ours.

    Tables of data that the paper does not have, and those that it has no like of, stay as they are, with a note. Gains
    by task are compared by rank, in a table that follows those by task.
    """
    known = {name: paper_name(data) for name, data in results.items()}
    shown = [_beside(table, known, results) for table in tables]
    if any(table.kind == "splits" for table in tables):
        shown += [table for name, theirs in known.items() if theirs for table in _task_gains(results[name], theirs)]
    return shown


def _beside(table: Table, known: Mapping[str, str | None], results: Mapping[str, DataResults]) -> Table:
    columns: list[tuple[str, int, tuple[Entry, ...]]] = []  # name, decimals and entries
    places = []  # of our columns
    compared: dict[str, None] = {}
    for j, name in enumerate(table.columns):
        places.append(len(columns))
        columns.append((name, table.decimals[j], tuple(row.entries[j] for row in table.rows)))
        ours = name if table.data is None else table.data
        data = known.get(ours)
        if data is None:
            continue
        rows = _papers_rows(table, j)
        printed = tuple(paper_entry(table.kind, data, row, name) for row in rows)
        if any(entry is not None for entry in printed):
            digits = min(table.decimals[j], _PRINTED.get(table.kind, 1))
            columns.append((f"{name} (paper)", digits, printed))
            compared[ours] = None
    notes = [*table.notes]
    for ours in compared:
        theirs = PAPER_TASKS[known[ours] or ""]
        if len(results[ours].tasks) != theirs:
            notes.append(f"{ours}: ours has {len(results[ours].tasks)} tasks, the paper's {theirs}")
        notes += _frozen_note(results[ours])
    absent = [name for name in ([table.data] if table.data else table.columns) if name in known and not known[name]]
    if absent and table.rows and (table.kind in paper_numbers() or table.kind == "ratio"):
        notes.append(f"not in the paper: {', '.join(absent)}")
    names, decimals, entries = zip(*columns) if columns else ((), (), ())
    return replace(
        table,
        columns=names,
        decimals=decimals,
        rows=tuple(replace(row, entries=tuple(each[i] for each in entries)) for i, row in enumerate(table.rows)),
        best=frozenset((i, places[j]) for i, j in table.best),
        notes=tuple(notes),
    )


def _frozen_note(data: DataResults) -> list[str]:
    if data.dataset != "embeddings":
        return []
    return [
        f"{data.name}: ours are frozen features, which is not the fine-tuning of the paper; compare gains, not levels"
    ]


def _task_gains(data: DataResults, theirs: str) -> list[Table]:
    """Gains by task, of samplers over uniform batches and of uniform batches over ERM, ours and the paper's."""

    def printed(label: Label, task: str) -> float:
        uniform = replace(label, sampler="uniform") if label.sampler in UNIFORM else label
        found = entry_mean(paper_entry("splits", theirs, uniform.method_name, task))
        return float("nan") if found is None else found

    rows: list[TableRow] = []
    for label in data.labels:
        uniform = label.sampler in UNIFORM
        reference = data.reference(label.under("erm") if uniform else label, "uniform")
        if label.algorithm not in _ADAPTING or reference is None:
            continue
        ours = 100.0 * (data.values(label) - data.values(reference))
        mine = [float(column[np.isfinite(column)].mean()) if np.isfinite(column).any() else None for column in ours.T]
        gains = [printed(label, task) - printed(reference, task) for task in data.tasks]
        both = [(a, b) for a, b in zip(mine, gains) if a is not None and math.isfinite(b)]
        if len(both) < _FEWEST_TASKS:
            continue
        name = f"{label.method_name} − {reference.method_name}"
        rows.append(TableRow(name, (*mine, *_rank_correlation(both)), block=len(rows)))
        of_paper = tuple(gain if math.isfinite(gain) else None for gain in gains)
        rows.append(TableRow("paper", (*of_paper, None, None), f"{name} (paper)", block=len(rows) - 1))
    if not rows:
        return []
    columns = (*data.tasks, "Spearman", "p")
    note = "Spearman: rank correlation of our gains with the paper's over tasks; p of its t test, for each row alone"
    return [
        Table(
            "task-gains",
            f"Gain in target accuracy (points) by task, ours and the paper's, {data.name}",
            "Method",
            columns,
            tuple(rows),
            (*(1,) * len(data.tasks), 2, 3),
            notes=(note, *_frozen_note(data)),
            data=data.name,
        )
    ]


def _rank_correlation(pairs: list[tuple[float, float]]) -> tuple[Entry, Entry]:
    """Spearman's ρ and its p-value; nothing where one side is constant and so has no ranks."""
    if any(len(set(side)) == 1 for side in zip(*pairs)):
        return None, None
    found = stats.spearmanr(*zip(*pairs))
    return float(found.statistic), PValue(float(found.pvalue))


def _papers_rows(table: Table, column: int) -> list[str]:
    """What the paper calls the rows of a table.

    Its uniform batches are DomainBed's, which draws with replacement; the number stands beside ours without
    replacement only where there are none with.
    """
    run = {row.label for row in table.rows if row.entries[column] is not None}
    names = []
    for row in table.rows:
        label = row.label
        if label is None:
            names.append(row.own_name)
            continue
        if label.sampler == "uniform-replacement":
            label = replace(label, sampler="uniform")
        elif replace(label, sampler="uniform-replacement") in run and label.sampler == "uniform":
            names.append("")
            continue
        names.append(label.method_name if label.algorithm else label.row_name)
    return names
