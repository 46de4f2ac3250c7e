"""A table as data: names, numbers, which of them are best, and what a reader has to know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vardass.experiments.collect import Cell, DataResults

__all__ = [
    "Entry",
    "PValue",
    "Row",
    "Table",
    "best_of",
    "entry_mean",
    "marks_note",
    "missing_table",
    "significant_decimals",
    "task_note",
]


@dataclass(frozen=True)
class PValue:
    """A probability, shown to three decimals."""

    p: float


Entry = Cell | PValue | float | str | None  # with and without an error, text, nothing


@dataclass(frozen=True)
class Row:
    """One row: what it is called in its place, its entries, and what it is called by itself (default: the same)."""

    name: str
    entries: tuple[Entry, ...]
    full_name: str = ""
    block: int = 0  # a line is drawn between blocks

    @property
    def own_name(self) -> str:
        """Name that needs no other row to be understood."""
        return self.full_name or self.name


@dataclass(frozen=True)
class Table:
    """Rows and columns of entries.

    Attributes
    ----------
    kind : str
        Which table it is, such as ``"accuracy"``.
    title, corner : str
        Caption, and what the rows' names are.
    columns : tuple of str
        Names of the columns.
    rows : tuple of Row
        Without any, the notes say why.
    decimals : tuple of int
        For each column.
    best : set of (row, column)
        Entries that none is better than, at the decimals that are shown.
    notes : tuple of str
        Sentences below the table.
    data : str or None
        The data set, if it is a table of one.
    """

    kind: str
    title: str
    corner: str
    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    decimals: tuple[int, ...] = ()
    best: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    notes: tuple[str, ...] = ()
    data: str | None = None


def missing_table(kind: str, title: str, reason: str, *, data: str | None = None) -> Table:
    """A table that cannot be made: its title and one line that says why."""
    return Table(kind, title, "", notes=(reason,), data=data)


def entry_mean(entry: Entry) -> float | None:
    """The number of an entry, if it has one."""
    if isinstance(entry, Cell):
        return entry.mean
    return entry if isinstance(entry, float) else None


def best_of(
    rows: Sequence[Row], group: Iterable[tuple[int, int]], decimals: Sequence[int], *, lowest: bool = False
) -> set[tuple[int, int]]:
    """Places in ``group`` with the best number, as shown; with fewer than two numbers there is nothing to be best of.

    Where some have all their repeats, only those can be best.
    """
    found = []
    for i, j in group:
        entry = rows[i].entries[j]
        mean = entry_mean(entry)
        if mean is not None:
            whole = not isinstance(entry, Cell) or entry.repeats >= entry.expected
            found.append((whole, round(-mean if lowest else mean, decimals[j]), (i, j)))
    if len(found) < 2:
        return set()
    _, highest, _ = max(found, key=lambda item: item[:2])
    anyone = not any(whole for whole, _, _ in found)
    return {place for whole, mean, place in found if mean == highest and (whole or anyone)}


def task_note(data: DataResults, common: Sequence[str]) -> tuple[str, ...]:
    """Say which tasks averages are over, if not all."""
    if len(common) == len(data.tasks):
        return ()
    prefix = f"{data.name}: "
    if not common:
        return (f"{prefix}no task has results of all compared entries, so there is no average",)
    missing = [task for task in data.tasks if task not in common]
    return (
        f"{prefix}averages over {len(common)} of {len(data.tasks)} tasks, those that all compared entries have; "
        f"without {_listed(missing)}",
    )


def marks_note(rows: Iterable[Row], unit: str = "repeats") -> tuple[str, ...]:
    """Explain the marks of incomplete entries, if there are any."""
    cells = [entry for row in rows for entry in row.entries if isinstance(entry, Cell) and not entry.complete]
    notes = []
    if any(cell.repeats < cell.expected for cell in cells):
        notes.append(f"(n/N): over n of N {unit}, the others failed or are missing")
    if any(cell.repeats >= cell.expected and cell.mean is not None for cell in cells):
        notes.append("(n/N runs): n of N runs to choose from finished")
    return tuple(notes)


def significant_decimals(rows: Iterable[Row], column: int, *, least: int = 3, most: int = 8) -> int:
    """Decimals with which the smallest number of a column has two significant digits."""
    means = [abs(mean) for row in rows if (mean := entry_mean(row.entries[column]))]
    return min(most, max(least, 1 - math.floor(math.log10(min(means))))) if means else least


def _listed(names: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
