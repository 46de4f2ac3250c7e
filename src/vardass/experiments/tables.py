"""The tables of the paper, made from the records of sweeps, as far as these go; and sampler against sampler."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from vardass.errors import InputError
from vardass.experiments.frame import ALGORITHMS, OURS, UNIFORM, Cell, DataResults, Label, mean_and_error
from vardass.experiments.render import PValue, Row, Table, entry_mean
from vardass.experiments.statistics import Paired, holm, paired

__all__ = ["TABLE_NAMES", "Comparison", "best_of", "compare_samplers", "make_tables"]

Results = Mapping[str, DataResults]
Places = list[tuple[int, int]]  # row and column of entries among which one is best

_MAIN = ("erm", "coral", "mmd")
_DISCREPANCIES = {"coral": "coral", "mmd": "mmd2"}  # what each algorithm trains on
_PARTS = ("training", "features", "solver", "drawing", "evaluation", "saving")
_WHOLE = "whole run"


# --- Table 1, 2, 4 and the appendix ------------------------------------------------------------------


def _accuracy_tables(results: Results) -> list[Table]:
    """Table 1: target accuracy by sampler (rows) and algorithm (columns), one table for each data set.

    Algorithms beyond ERM, CORAL and MMD have a column if they were run with more than one sampler. ERM is shown
    but not compared.
    """
    tables = []
    for data in results.values():
        title = f"Table 1: target accuracy (%) by sampler, {data.name}"
        samplers: dict[str, set[str]] = defaultdict(set)
        for label in data.labels:
            samplers[label.algorithm].add(label.sampler)
        algorithms = [name for name in samplers if name in _MAIN or len(samplers[name]) > 1]
        if not algorithms:
            tables.append(Table("accuracy", title, notes=("no runs of ERM, CORAL or MMD",), data=data.name))
            continue
        shown = [label for label in data.labels if label.algorithm in algorithms]
        common = data.common_tasks(shown)
        rows = _sampler_rows({label: data.cell(label, tasks=common, scale=100) for label in shown}, algorithms)
        groups = [_column(rows, j) for j, name in enumerate(algorithms) if name != "erm"]
        columns = [ALGORITHMS.get(name, name) for name in algorithms]
        notes = _task_note(data, common)
        tables.append(_table("accuracy", title, "Sampler", columns, rows, groups, notes=notes, data=data.name))
    return tables or [Table("accuracy", "Table 1: target accuracy by sampler", notes=("no runs",))]


def _methods_tables(results: Results) -> list[Table]:
    """Table 2: methods of domain adaptation with uniform batches, and with this package's, on all data sets."""
    title = "Table 2: target accuracy (%) by method"

    def belongs(label: Label) -> bool:
        return label.sampler in UNIFORM or (label.sampler in OURS and label.algorithm != "erm")

    labels = sorted({label for data in results.values() for label in data.labels if belongs(label)})
    columns: dict[str, dict[Label, Cell]] = {}
    notes: list[str] = []
    for name, data in results.items():
        own = [label for label in labels if label in data.labels]
        if own:
            common = data.common_tasks(own)
            columns[name] = {label: data.cell(label, tasks=common, scale=100) for label in own}
            notes += _task_note(data, common)
    if not columns:
        return [Table("methods", title, notes=("no runs with uniform or stratified batches",))]
    rows = [
        Row(label.method_name, tuple(column.get(label) for column in columns.values()), label=label) for label in labels
    ]
    groups = [_column(rows, j) for j in range(len(columns))]
    return [_table("methods", title, "Method", list(columns), rows, groups, notes=notes)]


def _refresh_tables(results: Results) -> list[Table]:
    """Table 4: target accuracy by the number T of steps between refreshes, from cells that have it in their grid."""
    tables = []
    title = "Table 4: target accuracy (%) by steps T between refreshes"
    for data in results.values():
        shown = [label for label in data.labels if label.setting("refresh_every") is not None]
        shown = [label for label in shown if label.sampler not in UNIFORM]  # which have nothing to refresh
        if not shown:
            continue
        common = data.common_tasks(shown)
        by_step = sorted({Label("", "", (("refresh_every", label.setting("refresh_every")),)) for label in shown})
        steps = [label.setting("refresh_every") for label in by_step]
        cells: dict[Label, dict[object, Cell]] = defaultdict(dict)
        for label in shown:
            step = label.setting("refresh_every")
            cells[label.without("refresh_every")][step] = data.cell(label, tasks=common, scale=100)
        rows = [Row(label.method_name, tuple(map(found.get, steps)), label=label) for label, found in cells.items()]
        groups = [[(i, j) for j in range(len(steps))] for i in range(len(rows))]
        columns, notes = [f"T={step}" for step in steps], _task_note(data, common)
        name = f"{title}, {data.name}"
        tables.append(_table("refresh", name, "Method", columns, rows, groups, notes=notes, data=data.name))
    return tables or [Table("refresh", title, notes=("no runs whose refresh_every is part of the sweep's grid",))]


def _split_tables(results: Results) -> list[Table]:
    """Appendix A: target accuracy by task, for each data set with more than one; best within an algorithm."""
    tables = []
    for data in results.values():
        if len(data.tasks) < 2:
            continue
        common = data.common_tasks(data.labels)
        sizes = Counter(label.algorithm for label in data.labels)
        blocks = [name for name in sizes if sizes[name] > 1]  # algorithms with one sampler share a block
        rows = []
        for label in data.labels:
            name = label.method_name
            if name != label.algorithm_name and Label(label.algorithm, "uniform") in data.labels:
                name = name.removeprefix(label.algorithm_name).strip(" ,")
            block = 1 + blocks.index(label.algorithm) if label.algorithm in blocks else 0
            cells = [data.cell(label, tasks=[task], expected_tasks=[task], scale=100) for task in data.tasks]
            entries = (*cells, data.cell(label, tasks=common, scale=100))
            rows.append(Row(name, entries, label.method_name, block, label))
        groups = [
            [(i, j) for i, label in enumerate(data.labels) if label.algorithm == name]
            for name in blocks
            for j in range(len(data.tasks) + 1)
            if name != "erm"
        ]
        title, columns = f"Target accuracy (%) by task, {data.name}", [*data.tasks, "Average"]
        notes = _task_note(data, common)
        tables.append(_table("splits", title, "Method", columns, rows, groups, notes=notes, data=data.name))
    return tables or [Table("splits", "Target accuracy by task", notes=("no data set has more than one task",))]


def _discrepancy_tables(results: Results) -> list[Table]:
    """Appendix B: MMD² or CORAL between held-out source and target features of the chosen models.

    Each algorithm is judged by the discrepancy that it trains on. ERM, which trains on none, is shown for comparison.
    """
    title = "Discrepancy of source and target after training"
    tables = []
    for data in results.values():
        trained = {name: [label for label in data.labels if label.algorithm == name] for name in _DISCREPANCIES}
        metrics = {
            name: metric
            for name, metric in _DISCREPANCIES.items()
            if any(data.common_tasks([label], metric) for label in trained[name])
        }
        if not metrics:
            continue
        plain = [label for label in data.labels if label.algorithm == "erm" and label.sampler in UNIFORM]
        present = [data.common_tasks([*trained[name], *plain], metric) for name, metric in metrics.items()]
        common = [task for task in data.tasks if all(task in tasks for tasks in present)]
        cells = {
            label: data.cell(label, tasks=common, metric=metric)
            for name, metric in metrics.items()
            for label in trained[name]
        }
        rows = _sampler_rows(cells, list(metrics))
        groups = [_column(rows, j) for j in range(len(metrics))]
        for label in plain:
            entries = tuple(data.cell(label, tasks=common, metric=metric) for metric in metrics.values())
            rows.append(Row(f"{label.method_name} (no adaptation)", entries, block=1))
        table = _table(
            "discrepancy",
            f"{title}, {data.name}",
            "Sampler",
            [ALGORITHMS[name] for name in metrics],
            rows,
            groups,
            decimals=[_significant_decimals(rows, j) for j in range(len(metrics))],
            lowest=True,
            notes=_task_note(data, common),
            data=data.name,
        )
        tables.append(table)
    return tables or [Table("discrepancy", title, notes=("no finished runs of CORAL or MMD with a discrepancy",))]


# --- Table 3 -----------------------------------------------------------------------------------------


def _seconds_tables(results: Results) -> list[Table]:
    """Table 3: seconds of a whole run by sampler and data set, over all finished runs, chosen or not.

    As in the paper, runs of CORAL and MMD count; if there are none, those of all algorithms. Further tables have the
    ratio to uniform batches (over the runs that both have) and the parts of a run. The whole is ``Record.wall``, which
    has evaluation and repeated attempts in it.
    """
    title = "Table 3: seconds of a run by sampler"
    timed = {name: runs for name, data in results.items() if (runs := _timed(data))}
    if not timed:
        return [Table("seconds", title, notes=("no finished runs",))]
    kinds = sorted({kind for runs in timed.values() for kind in runs})
    columns = list(timed)
    whole = [
        Row(kind.row_name, tuple(_seconds_cell(runs, kind) for runs in timed.values()), label=kind) for kind in kinds
    ]
    groups = [_column(whole, j) for j in range(len(columns))]
    decimals = [_seconds_decimals(whole, j) for j in range(len(columns))]
    notes = []
    for name, runs in timed.items():
        counted = sorted({algorithm for own in runs.values() for algorithm, *_ in own.index})
        if not set(counted) <= set(_DISCREPANCIES):
            notes.append(f"{name}: no runs of CORAL or MMD; over {', '.join(counted)}")
    seconds = _table(
        *("seconds", title, "Sampler", columns, whole, groups), decimals=decimals, lowest=True, notes=notes, unit="runs"
    )
    tables = [seconds]
    ratios = [Row(kind.row_name, tuple(_ratio(runs, kind) for runs in timed.values()), label=kind) for kind in kinds]
    if any(ratio is not None for row in ratios for ratio in row.entries):
        ratio_title = "Table 3, times uniform: seconds of a run by those with uniform batches"
        note = "over the runs that both samplers finished"
        two = [2] * len(columns)
        tables.append(_table("ratio", ratio_title, "Sampler", columns, ratios, decimals=two, notes=[note]))
    return tables + [_parts_table(name, runs) for name, runs in timed.items()]


Timed = dict[Label, pd.DataFrame]  # by sampler with its settings: a row for each run, a column for each part


def _timed(data: DataResults) -> Timed:
    """Seconds of the finished runs that count, indexed by what a pair of runs has in common."""
    found: dict[Label, dict[tuple[Any, ...], dict[str, float]]] = defaultdict(dict)
    main = any(label.algorithm in _DISCREPANCIES for label in data.labels)
    for label, record in zip(data.finished["label"], data.finished["record"]):
        if label.algorithm in _DISCREPANCIES or not main:
            key = (label.algorithm, record.spec.task, record.spec.repeat, record.spec.search)
            found[label.under("")][key] = {**record.seconds, _WHOLE: record.wall}
    return {kind: pd.DataFrame(list(runs.values()), index=list(runs)) for kind, runs in sorted(found.items())}


def _seconds_cell(runs: Timed, kind: Label) -> Cell | None:
    if kind not in runs:
        return None
    own = runs[kind][_WHOLE]
    return Cell(*mean_and_error(own), len(own), max(map(len, runs.values())))


def _ratio(runs: Timed, kind: Label) -> float | None:
    """Seconds by those of uniform batches, over the runs that both have."""
    candidates = (Label("", sampler, grid) for grid in (kind.grid, ()) for sampler in UNIFORM)
    base = next((candidate for candidate in candidates if candidate in runs), None)
    if base is None or kind not in runs:
        return None
    own, uniform = pd.concat([runs[kind][_WHOLE], runs[base][_WHOLE]], axis=1, join="inner").sum()
    return float(own / uniform) if uniform > 0 else None


def _parts_table(name: str, runs: Timed) -> Table:
    seen = {str(part) for own in runs.values() for part in own} - {_WHOLE}
    parts = [part for part in _PARTS if part in seen] + sorted(seen - set(_PARTS))
    rows = []
    for kind, own in runs.items():
        spent = own.reindex(columns=parts).fillna(0.0)
        cells = [Cell(*mean_and_error(spent[part]), len(own), len(own)) for part in parts]  # the whole has the mark
        rows.append(Row(kind.row_name, (*cells, _seconds_cell(runs, kind))))
    title = f"Table 3, parts: seconds of a run by what they were spent on, {name}"
    columns = [*parts, _WHOLE]
    decimals = [_seconds_decimals(rows, j) for j in range(len(columns))]
    return _table("parts", title, "Sampler", columns, rows, decimals=decimals, unit="runs", data=name)


def _seconds_decimals(rows: Sequence[Row], column: int) -> int:
    greatest = max((entry_mean(row.entries[column]) or 0.0 for row in rows), default=0.0)
    return 0 if greatest >= 100 else 1 if greatest >= 10 else 2


# --- sampler against sampler -------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One sampler against a reference, with the same data, algorithm and settings."""

    data: str
    label: Label
    reference: Label
    result: Paired
    expected: int
    holm_p: float | None = None

    @property
    def ablation(self) -> bool:
        """Whether it is about ERM, whose loss the sampler should not matter to: a family of tests of its own."""
        return self.label.algorithm == "erm"


def compare_samplers(results: Results) -> list[Comparison]:
    """Every sampler against uniform batches and against VaRDASS, paired by task and repeat.

    Holm's correction of the t test's p values is over all comparisons, those of ERM apart.
    """
    found: list[Comparison] = []
    for sampler in ("uniform", "vardass"):
        for data in results.values():
            for label in data.labels:
                reference = data.reference(label, sampler)
                # uniform against VaRDASS would be VaRDASS against uniform once more
                skip = label.sampler in UNIFORM if sampler == "vardass" else label.sampler == "uniform"
                if reference is None or reference == label or skip:
                    continue
                result = paired(data.pairs(label, reference))
                found.append(Comparison(data.name, label, reference, result, len(data.tasks) * len(data.repeats)))
    adjusted: dict[int, float | None] = {}
    for ablation in (False, True):
        family = [place for place, one in enumerate(found) if one.ablation == ablation]
        adjusted |= dict(zip(family, holm([found[place].result.t_p for place in family])))
    return [replace(one, holm_p=adjusted[place]) for place, one in enumerate(found)]


def _pairs_tables(results: Results) -> list[Table]:
    """Paired differences with tests, and the number of cases in which each sampler is ahead or best."""
    title = "Pairs: difference in target accuracy (points) on the same tasks and repeats"
    comparisons = compare_samplers(results)
    if not comparisons:
        return [Table("pairs", title, notes=("no sampler was run beside uniform batches or VaRDASS",))]
    rows = []
    for one in comparisons:
        result = one.result
        name = f"{one.data}, {one.label.algorithm_name}: {one.label.row_name} − {one.reference.sampler_name}"
        mean, stderr = (None if value is None else 100 * value for value in (result.mean, result.stderr))
        counts = f"{result.wins} / {result.ties} / {result.losses}"
        p_values = [None if p is None else PValue(p) for p in (result.sign_p, result.t_p, one.holm_p)]
        entries = (Cell(mean, stderr, result.pairs, one.expected), counts, *p_values)
        rows.append(Row(name, entries, block=0 if one.reference.sampler in UNIFORM else 1))
    columns = ["difference", "wins / ties / losses", "sign p", "t p", "Holm p"]
    note = (
        "two-sided exact sign test and paired t test over pairs of (task, repeat), which the tests take as "
        "independent; Holm's correction of the t test over all rows, those of ERM apart"
    )
    decimals = [2, 0, 0, 0, 0]
    table = _table("pairs", title, "Comparison", columns, rows, decimals=decimals, notes=[note], unit="pairs")
    return [table, *_wins_tables(results)]


def _wins_tables(results: Results) -> list[Table]:
    """In how many cases (data set and algorithm, without ERM) each sampler is ahead of another, and of all."""
    columns = ["best", "ahead of uniform", "ahead of VaRDASS"]
    tally: dict[Label, dict[str, list[bool]]] = {}
    for data in results.values():
        for algorithm in dict.fromkeys(label.algorithm for label in data.labels if label.algorithm != "erm"):
            values = {label: data.values(label) for label in data.labels if label.algorithm == algorithm}
            values = {label: found for label, found in values.items() if not np.isnan(found).all()}
            if len(values) < 2:
                continue
            shared = ~np.isnan(sum(values.values()))
            sums = {label: found[shared].sum() for label, found in values.items()}
            for label in values:
                won = tally.setdefault(label.under(""), {column: [] for column in columns})
                if shared.any():
                    won["best"].append(sums[label] >= max(sums.values()))
                for column, sampler in zip(columns[1:], ("uniform", "vardass")):
                    reference = data.reference(label, sampler)
                    if reference in values and reference != label:
                        difference = paired(data.pairs(label, reference)).mean
                        if difference is not None:
                            won[column].append(difference > 0)
    if not tally:
        return []
    rows = [
        Row(kind.row_name, tuple(f"{sum(won)} of {len(won)}" if won else None for won in tally[kind].values()))
        for kind in sorted(tally)
    ]
    note = (
        "a case is a data set with an algorithm other than ERM; over the tasks and repeats that all compared ones have"
    )
    title = "Wins: cases in which a sampler has the highest mean"
    return [_table("wins", title, "Sampler", columns, rows, decimals=[0, 0, 0], notes=[note])]


# --- all of them -------------------------------------------------------------------------------------

_MAKERS: dict[str, Callable[[Results], list[Table]]] = {
    "1": _accuracy_tables,
    "2": _methods_tables,
    "3": _seconds_tables,
    "4": _refresh_tables,
    "splits": _split_tables,
    "discrepancy": _discrepancy_tables,
    "pairs": _pairs_tables,
}
TABLE_NAMES = (*_MAKERS, "all")


def make_tables(results: Results, which: str = "all") -> list[Table]:
    """All tables of a name.

    Parameters
    ----------
    results : dict of str to DataResults
        As `collect` gives them.
    which : str
        One of ``TABLE_NAMES``.
    """
    if which not in TABLE_NAMES:
        raise InputError(f"unknown table {which!r}; choose one of {', '.join(TABLE_NAMES)}")
    makers = _MAKERS.values() if which == "all" else [_MAKERS[which]]
    return [table for make in makers for table in make(results)]


def _table(
    kind: str,
    title: str,
    corner: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    groups: Iterable[Places] = (),
    *,
    decimals: Sequence[int] | None = None,
    lowest: bool = False,
    notes: Sequence[str] = (),
    unit: str = "repeats",
    data: str | None = None,
) -> Table:
    """A table whose best entries are marked, within each group, and whose marks are explained."""
    decimals = tuple(decimals or [1] * len(columns))
    best = frozenset(place for group in groups for place in best_of(rows, group, decimals, lowest=lowest))
    notes = (*notes, *_marks_note(rows, unit))
    return Table(kind, title, corner, tuple(columns), tuple(rows), decimals, best, notes, data)


def _sampler_rows(cells: Mapping[Label, Cell], algorithms: Sequence[str]) -> list[Row]:
    """One row for each sampler with its settings, one column for each algorithm."""
    kinds = sorted({label.under("") for label in cells})
    return [Row(kind.row_name, tuple(cells.get(kind.under(name)) for name in algorithms), label=kind) for kind in kinds]


def _column(rows: Sequence[Row], column: int) -> Places:
    return [(i, column) for i in range(len(rows))]


def best_of(
    rows: Sequence[Row], group: Places, decimals: Sequence[int], *, lowest: bool = False
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


def _task_note(data: DataResults, common: Sequence[str]) -> list[str]:
    """Say which tasks averages are over, if not all."""
    missing = [task for task in data.tasks if task not in common]
    if not missing:
        return []
    if not common:
        return [f"{data.name}: no task has results of all compared entries, so there is no average"]
    listed = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
    return [
        f"{data.name}: averages over {len(common)} of {len(data.tasks)} tasks, those that all compared entries have; "
        f"without {listed}"
    ]


def _marks_note(rows: Iterable[Row], unit: str) -> list[str]:
    """Explain the marks of incomplete entries, if there are any."""
    cells = [entry for row in rows for entry in row.entries if isinstance(entry, Cell) and not entry.complete]
    notes = []
    if any(cell.repeats < cell.expected for cell in cells):
        notes.append(f"(n/N): over n of N {unit}, the others failed or are missing")
    if any(cell.repeats >= cell.expected and cell.mean is not None for cell in cells):
        notes.append("(n/N runs): n of N runs to choose from finished")
    return notes


def _significant_decimals(rows: Iterable[Row], column: int, *, least: int = 3, most: int = 8) -> int:
    """Decimals with which the smallest number of a column has two significant digits."""
    means = [abs(mean) for row in rows if (mean := entry_mean(row.entries[column]))]
    return min(most, max(least, 1 - math.floor(math.log10(min(means))))) if means else least
