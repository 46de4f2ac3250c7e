"""Table 3: how long runs take by sampler, as a multiple of uniform batches, and where the time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vardass.experiments.collect import Cell, DataResults, mean_and_error
from vardass.experiments.labels import UNIFORM, Label
from vardass.experiments.record import Record
from vardass.experiments.table import Row, Table, best_of, marks_note, missing_table

__all__ = ["seconds_tables"]

_PARTS = ("training", "features", "solver", "drawing", "evaluation", "saving")
_COMPARED = ("coral", "mmd")  # the paper's times are over these two

RunKey = tuple[str, str, int, int]  # algorithm, task, repeat, search


@dataclass(frozen=True)
class _Times:
    """Finished runs of one data set by sampler with its settings, then by all else."""

    name: str
    runs: Mapping[Label, Mapping[RunKey, Record]]

    @property
    def most(self) -> int:
        return max((len(runs) for runs in self.runs.values()), default=0)

    def cell(self, kind: Label) -> Cell | None:
        if kind not in self.runs:
            return None
        return _cell([record.wall for record in self.runs[kind].values()], self.most)

    def part(self, kind: Label, name: str) -> Cell:
        runs = self.runs[kind].values()
        return _cell([float(record.seconds.get(name, 0.0)) for record in runs], len(runs))  # the whole has the mark

    def ratio(self, kind: Label) -> float | None:
        """Seconds by those of uniform batches, over the runs that both have."""
        base = _uniform(kind, self.runs)
        if base is None or kind not in self.runs:
            return None
        shared = self.runs[kind].keys() & self.runs[base].keys()
        below = math.fsum(self.runs[base][key].wall for key in shared)
        return math.fsum(self.runs[kind][key].wall for key in shared) / below if below > 0 else None


def _cell(seconds: list[float], expected: int) -> Cell:
    mean, stderr = mean_and_error(seconds)
    return Cell(mean, stderr, len(seconds), expected)


def seconds_tables(results: Mapping[str, DataResults]) -> list[Table]:
    """Table 3: seconds of a whole run by sampler and data set, over all finished runs, chosen or not.

    As in the paper, runs of CORAL and MMD count; if there are none, those of all algorithms. Further tables have the
    ratio to uniform batches (over the runs that both have) and the parts of a run. The whole is ``Record.wall``, which
    has evaluation and repeated attempts in it.
    """
    title = "Table 3: seconds of a run by sampler"
    times = [_times(data) for data in results.values()]
    times = [entry for entry in times if entry.runs]
    kinds = sorted({kind for entry in times for kind in entry.runs}, key=lambda kind: kind.row_order)
    if not kinds:
        return [missing_table("seconds", title, "no finished runs")]
    columns = tuple(entry.name for entry in times)
    whole = tuple(Row(kind.row_name, tuple(entry.cell(kind) for entry in times)) for kind in kinds)
    ratios = tuple(Row(kind.row_name, tuple(entry.ratio(kind) for entry in times)) for kind in kinds)
    decimals = tuple(_decimals(whole, j) for j in range(len(times)))
    best = [best_of(whole, [(i, j) for i in range(len(kinds))], decimals, lowest=True) for j in range(len(times))]
    tables = [
        Table(
            "seconds",
            title,
            "Sampler",
            columns,
            whole,
            decimals,
            frozenset().union(*best),
            (*_algorithm_notes(times), *marks_note(whole, "runs")),
        )
    ]
    if any(ratio is not None for row in ratios for ratio in row.entries):
        shape = (2,) * len(times)
        ratio_title = "Table 3, times uniform: seconds of a run by those with uniform batches"
        note = "over the runs that both samplers finished"
        tables.append(Table("ratio", ratio_title, "Sampler", columns, ratios, shape, notes=(note,)))
    return tables + [_parts_table(entry) for entry in times]


def _times(data: DataResults) -> _Times:
    main = any(label.algorithm in _COMPARED for label in data.labels)
    runs: dict[Label, dict[RunKey, Record]] = {}
    for record in data.records:
        label, spec = Label.of(record.spec), record.spec
        if label.algorithm in _COMPARED or not main:
            kind = Label("", label.sampler, label.grid)
            runs.setdefault(kind, {})[label.algorithm, spec.task, spec.repeat, spec.search] = record
    return _Times(data.name, runs)


def _uniform(kind: Label, runs: Mapping[Label, object]) -> Label | None:
    candidates = [Label("", sampler, grid) for grid in (kind.grid, ()) for sampler in UNIFORM]
    return next((candidate for candidate in candidates if candidate in runs), None)


def _algorithm_notes(times: list[_Times]) -> list[str]:
    notes = []
    for entry in times:
        counted = sorted({key[0] for runs in entry.runs.values() for key in runs})
        if not set(counted) <= set(_COMPARED):
            notes.append(f"{entry.name}: no runs of CORAL or MMD; over {', '.join(counted)}")
    return notes


def _parts_table(entry: _Times) -> Table:
    kinds = sorted(entry.runs, key=lambda kind: kind.row_order)
    seen = {name for runs in entry.runs.values() for record in runs.values() for name in record.seconds}
    parts = [name for name in _PARTS if name in seen] + sorted(seen - set(_PARTS))
    rows = tuple(Row(kind.row_name, (*(entry.part(kind, name) for name in parts), entry.cell(kind))) for kind in kinds)
    decimals = tuple(_decimals(rows, j) for j in range(len(parts) + 1))
    title = f"Table 3, parts: seconds of a run by what they were spent on, {entry.name}"
    columns = (*parts, "whole run")
    return Table("parts", title, "Sampler", columns, rows, decimals, notes=marks_note(rows, "runs"), data=entry.name)


def _decimals(rows: tuple[Row, ...], column: int) -> int:
    means = [cell.mean for row in rows if isinstance(cell := row.entries[column], Cell) and cell.mean is not None]
    greatest = max(means, default=0.0)
    return 0 if greatest >= 100 else 1 if greatest >= 10 else 2
