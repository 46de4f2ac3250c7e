"""The tables of the paper, made from the records of sweeps, as far as these go; and sampler against sampler."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from vardass.adapt.algorithms import algorithm_options
from vardass.lab.averages import (
    ALGORITHMS,
    FACTOR,
    LEVEL,
    OURS,
    POINTS,
    UNIFORM,
    DataResults,
    Gain,
    Label,
    best_of,
    holm,
    mean_and_error,
)
from vardass.lab.record import Record
from vardass.losses import CORALLoss
from vardass.table import Average, Entry, PValue, Table, TableRow, entry_mean
from vardass.validate import choose

__all__ = ["TABLE_NAMES", "SamplerComparison", "compare_samplers", "make_tables"]

Results = Mapping[str, DataResults]
Places = list[tuple[int, int]]  # row and column of entries among which one is best

_MAIN = ("erm", "coral", "mmd")
_DISCREPANCIES = {"coral": "coral", "mmd": "mmd2"}  # what each algorithm trains on
PARTS = ("training", "features", "solver", "drawing", "evaluation", "saving")
_WHOLE = "whole run"
_SAYS_FORM = ("accuracy", "methods", "refresh", "splits", "discrepancy", "pairs")  # tables that say CORAL's form
_MEASURED = "of held-out features: CORAL as |R_s − R_t|² and MMD² with the paper's kernel, for any training loss"


# --- Table 1, 2, 4 and the appendix ------------------------------------------------------------------


def _accuracy_table(data: DataResults) -> Table | None:
    """Table 1: target accuracy by sampler (rows) and algorithm (columns), for each data set.

    Algorithms beyond ERM, CORAL and MMD have a column if they were run with more than one sampler.
    """
    samplers: dict[str, set[str]] = defaultdict(set)
    for label in data.labels:
        samplers[label.algorithm].add(label.sampler)
    algorithms = [name for name in samplers if name in _MAIN or len(samplers[name]) > 1]
    if not algorithms:
        return None
    shown = [label for label in data.labels if label.algorithm in algorithms]
    rows = _sampler_rows({label: data.average(label, scale=100) for label in shown}, algorithms)
    groups = [_column(rows, j) for j, name in enumerate(algorithms) if name != "erm"]
    columns = [ALGORITHMS.get(name, name) for name in algorithms]
    title = f"Table 1: target accuracy (%) by sampler, {data.name}"
    return _table("accuracy", title, "Sampler", columns, rows, groups, data=data.name)


def _methods_tables(results: Results) -> list[Table]:
    """Table 2: methods of domain adaptation with uniform batches, and with this package's, on all data sets."""

    def belongs(label: Label) -> bool:
        return label.sampler in UNIFORM or (label.sampler in OURS and label.algorithm != "erm")

    labels = sorted({label for data in results.values() for label in data.labels if belongs(label)})
    shown = {name: data for name, data in results.items() if set(labels) & set(data.labels)}
    if not shown:
        return []
    rows = []
    for label in labels:
        found = (data.average(label, scale=100) if label in data.labels else None for data in shown.values())
        rows.append(TableRow(label.method_name, tuple(found), label=label))
    groups = [_column(rows, j) for j in range(len(shown))]
    return [_table("methods", "Table 2: target accuracy (%) by method", "Method", list(shown), rows, groups)]


def _refresh_table(data: DataResults) -> Table | None:
    """Table 4: target accuracy by the number T of steps between refreshes, from cells that have it in their grid."""
    every = "refresh_every"
    # uniform batches have nothing to refresh
    shown = [one for one in data.labels if one.setting(every) is not None and one.sampler not in UNIFORM]
    if not shown:
        return None
    by_step = sorted({Label("", "", ((every, label.setting(every)),)) for label in shown})
    steps = [label.setting(every) for label in by_step]
    found: dict[Label, dict[object, Average]] = defaultdict(dict)
    for label in shown:
        found[label.without(every)][label.setting(every)] = data.average(label, scale=100)
    rows = [TableRow(label.method_name, tuple(map(own.get, steps)), label=label) for label, own in found.items()]
    groups = [[(i, j) for j in range(len(steps))] for i in range(len(rows))]
    title = f"Table 4: target accuracy (%) by steps T between refreshes, {data.name}"
    columns = [f"T={step}" for step in steps]
    return _table("refresh", title, "Method", columns, rows, groups, data=data.name)


def _splits_table(data: DataResults) -> Table | None:
    """Appendix A: target accuracy by task, for each data set with more than one; best within an algorithm."""
    if len(data.tasks) < 2:
        return None
    sizes = Counter(label.algorithm for label in data.labels)
    blocks = [name for name in sizes if sizes[name] > 1]  # algorithms with one sampler share a block
    rows = []
    for label in data.labels:
        name = label.method_name
        if name != label.algorithm_name and Label(label.algorithm, "uniform") in data.labels:
            name = name.removeprefix(label.algorithm_name).strip(" ,")
        block = 1 + blocks.index(label.algorithm) if label.algorithm in blocks else 0
        entries = tuple(data.average(label, task=task, scale=100) for task in (*data.tasks, None))
        rows.append(TableRow(name, entries, label.method_name, block, label))
    groups = [
        [(i, j) for i, label in enumerate(data.labels) if label.algorithm == name]
        for name in blocks
        for j in range(len(data.tasks) + 1)
        if name != "erm"
    ]
    title, columns = f"Target accuracy (%) by task, {data.name}", [*data.tasks, "Average"]
    return _table("splits", title, "Method", columns, rows, groups, data=data.name)


def _discrepancy_table(data: DataResults) -> Table | None:
    """Appendix B: the discrepancy that an algorithm trains on, of held-out features of the chosen models; and ERM's."""
    judged = [label for label in data.labels if label.algorithm in _DISCREPANCIES]
    found = {label: data.average(label, metric=_DISCREPANCIES[label.algorithm]) for label in judged}
    trained = {label.algorithm for label, average in found.items() if average.repeats}
    metrics = {name: metric for name, metric in _DISCREPANCIES.items() if name in trained}
    if not metrics:
        return None
    rows = _sampler_rows({one: found[one] for one in judged if one.algorithm in metrics}, list(metrics))
    groups = [_column(rows, j) for j in range(len(metrics))]
    for label in data.labels:
        if label.algorithm == "erm" and label.sampler in UNIFORM:
            entries = tuple(data.average(label, metric=metric) for metric in metrics.values())
            rows.append(TableRow(f"{label.method_name} (no adaptation)", entries, block=1))
    title = f"Discrepancy of source and target after training, {data.name}"
    columns = [ALGORITHMS[name] for name in metrics]
    more: dict[str, Any] = {
        "decimals": _significant_decimals(rows),
        "lowest": True,
        "notes": [_MEASURED],
        "data": data.name,
    }
    return _table("discrepancy", title, "Sampler", columns, rows, groups, **more)


# --- Table 3 -----------------------------------------------------------------------------------------


def _seconds_tables(results: Results) -> list[Table]:
    """Table 3: seconds of a whole run (``Record.wall``) by sampler and data set, over all finished runs.

    As in the paper, runs of CORAL and MMD count; if there are none, those of all algorithms. Further tables have the
    ratio to uniform batches (over the runs that both have) and the parts of a run.
    """
    timed = {name: runs for name, data in results.items() if (runs := _timed(data))}
    if not timed:
        return []
    kinds = sorted({kind for runs in timed.values() for kind in runs})
    columns = list(timed)
    whole, ratios = (
        [TableRow(kind.row_name, tuple(make(runs, kind) for runs in timed.values()), label=kind) for kind in kinds]
        for make in (_seconds_cell, _ratio)
    )
    notes = []
    for name, runs in timed.items():
        counted = sorted({algorithm for own in runs.values() for algorithm, *_ in own.index})
        if not set(counted) <= set(_DISCREPANCIES):
            notes.append(f"{name}: no runs of CORAL or MMD; over {', '.join(counted)}")
    more: dict[str, Any] = {"decimals": _seconds_decimals(whole), "lowest": True, "notes": notes, "unit": "runs"}
    groups = [_column(whole, j) for j in range(len(columns))]
    tables = [_table("seconds", "Table 3: seconds of a run by sampler", "Sampler", columns, whole, groups, **more)]
    if any(ratio is not None for row in ratios for ratio in row.entries):
        ratio_title = "Table 3, times uniform: seconds of a run by those with uniform batches"
        more = {"decimals": [2] * len(columns), "notes": ["over the runs that both samplers finished"]}
        tables.append(_table("ratio", ratio_title, "Sampler", columns, ratios, **more))
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
    names = ["algorithm", "task", "repeat", "search"]
    return {
        kind: pd.DataFrame(list(runs.values()), index=pd.MultiIndex.from_tuples(list(runs), names=names)).fillna(0.0)
        for kind, runs in sorted(found.items())
    }


def _seconds_cell(runs: Timed, kind: Label, part: str = _WHOLE) -> Average | None:
    """Mean over runs; the error is that of the means of repeats, and the mark counts runs."""
    if kind not in runs:
        return None
    own = runs[kind]
    seconds = own[part] if part in own else 0.0 * own[_WHOLE]
    _, stderr = mean_and_error(seconds.groupby(level="repeat").mean())
    expected = max(map(len, runs.values())) if part == _WHOLE else len(own)
    return Average(float(seconds.mean()), stderr, len(own), expected)


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
    parts = [part for part in PARTS if part in seen] + sorted(seen - set(PARTS))
    columns = [*parts, _WHOLE]
    rows = [TableRow(kind.row_name, tuple(_seconds_cell(runs, kind, part) for part in columns)) for kind in runs]
    title = f"Table 3, parts: seconds of a run by activity, {name}"
    return _table("parts", title, "Sampler", columns, rows, decimals=_seconds_decimals(rows), unit="runs", data=name)


def _seconds_decimals(rows: Sequence[TableRow]) -> list[int]:
    """For each column, so that its greatest number has three digits or so."""
    columns = zip(*(row.entries for row in rows), strict=True)
    greatest = [max(entry_mean(entry) or 0.0 for entry in column) for column in columns]
    return [0 if most >= 100 else 1 if most >= 10 else 2 for most in greatest]


# --- sampler against sampler -------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplerComparison:
    """One sampler against a reference, with the same data, algorithm and settings."""

    data: str
    label: Label
    reference: Label
    gain: Gain
    p: float | None = None
    equivalence_p: float | None = None

    def verdict(self, within: str) -> str:
        """What the tests show. A difference that was not shown is open, unless it is shown to be small."""
        if not self.gain.whole:
            return "incomplete"
        same = self.equivalence_p is not None and self.equivalence_p < LEVEL
        if self.p is not None and self.p < LEVEL:
            side = "higher" if (self.gain.average.mean or 0.0) > 0 else "lower"
            return f"{side}, {within}" if same else side
        return within if same else "open"


def compare_samplers(
    results: Results, samplers: Sequence[str] = ("uniform", "vardass"), *, ratios: bool = False
) -> list[SamplerComparison]:
    """Every sampler against reference samplers, repeat by repeat, by accuracy or ratios of the trained discrepancy.

    Holm's correction is over all comparisons of whole cells, those of ERM apart.
    """
    found: list[SamplerComparison] = []
    for sampler in samplers:
        for data in results.values():
            for label in data.labels:
                reference = data.reference(label, sampler)
                # uniform against VaRDASS would be VaRDASS against uniform once more
                skip = sampler == "vardass" and label.sampler in UNIFORM
                if reference is None or reference == label or skip:
                    continue
                if not ratios or label.algorithm in _DISCREPANCIES:
                    gain = data.gain(label, reference, ratio_of=_DISCREPANCIES[label.algorithm] if ratios else None)
                    found.append(SamplerComparison(data.name, label, reference, gain))
    for is_erm in (False, True):  # the sampler should not matter to ERM's loss: a family of tests of its own
        family = [i for i, one in enumerate(found) if (one.label.algorithm == "erm") == is_erm and one.gain.whole]
        shown = holm([found[i].gain.result.p for i in family])
        equal = holm([found[i].gain.result.equivalence_p for i in family])
        for i, p, equivalence_p in zip(family, shown, equal):
            found[i] = replace(found[i], p=p, equivalence_p=equivalence_p)
    return found


def _pairs_tables(results: Results) -> list[Table]:
    """Paired differences with tests."""
    rows = []
    for one in compare_samplers(results):
        low, high, *_ = one.gain.result
        interval = None if low is None else f"{low:.1f} to {high:.1f}"
        rows.append(_comparison_row(one, "−", one.gain.average, interval, f"within {POINTS:g}"))
    if not rows:
        return []
    note = (
        "difference, interval and t tests are over repeats, each the mean of its tasks, since the tasks of a repeat "
        "share seeds and hyper-parameters; wins are counted by task and repeat; Holm's correction is over all complete "
        f"rows, those of ERM apart; within {POINTS:g}: two one-sided tests that the difference is below {POINTS:g} "
        f"point either way, also with Holm's correction; open: neither was shown at {LEVEL:g}"
    )
    title = "Pairs: difference in target accuracy (points) in the same repeats"
    return [_comparison_table("pairs", title, ["difference", "wins / ties / losses"], f"within {POINTS:g}", rows, note)]


def _ratio_tables(results: Results) -> list[Table]:
    """Whether the discrepancy after training depends on the sampler, by ratios in the same tasks and repeats."""
    rows = []
    for one in compare_samplers(results, ["uniform"], ratios=True):
        low, high, *_ = one.gain.result
        cell = one.gain.average
        if cell.mean is not None:
            ratio = math.exp(cell.mean)
            interval = None if low is None or high is None else f"{math.exp(low):.2f} to {math.exp(high):.2f}"
            size: Entry = f"{ratio:.2f} {cell.mark}" if cell.mark else ratio
            rows.append(_comparison_row(one, "/", size, interval, f"within {FACTOR:g}"))
    if not rows:
        return []
    note = (
        "geometric mean of the ratios of a repeat's tasks, then of repeats; interval and t tests are of logarithms, "
        "over repeats; higher is counted by task and repeat; Holm's correction is over all complete rows; within "
        f"{FACTOR:g}: two one-sided tests that the ratio is between {1 / FACTOR:g} and {FACTOR:g}, also with Holm's "
        f"correction; open: neither was shown at {LEVEL:g}"
    )
    title, names = "Discrepancy after training by that with uniform batches", ["ratio", "higher / same / lower"]
    return [_comparison_table("discrepancy-ratio", title, names, f"within {FACTOR:g}", rows, note)]


def _comparison_row(one: SamplerComparison, sign: str, size: Entry, interval: str | None, within: str) -> TableRow:
    name = f"{one.data}, {one.label.algorithm_name}: {one.label.row_name} {sign} {one.reference.sampler_name}"
    counts = f"{one.gain.wins} / {one.gain.ties} / {one.gain.losses}"
    p_values = [None if p is None else PValue(p) for p in (one.gain.result.p, one.p, one.equivalence_p)]
    block = 0 if one.reference.sampler in UNIFORM else 1
    return TableRow(name, (size, interval, counts, *p_values, one.verdict(within)), block=block)


def _comparison_table(
    kind: str, title: str, names: Sequence[str], within: str, rows: Sequence[TableRow], note: str
) -> Table:
    columns = [names[0], "95 % interval", names[1], "p", "Holm p", f"{within}: p", "shown"]
    return _table(kind, title, "Comparison", columns, rows, decimals=[2] * len(columns), notes=[note])


def _summary(results: Results) -> list[Table]:
    """Table 4 of data whose sweep compares T, else Table 1 if that has all algorithms; the others share Table 2."""
    found, others = [], {}
    for name, data in results.items():
        table = _refresh_table(data) or _accuracy_table(data)
        algorithms = {label.algorithm for label in data.labels}
        if table is None or (table.kind == "accuracy" and len(table.columns) < len(algorithms)):
            others[name] = data
        else:
            found.append(table)
    return found + _methods_tables(others)


# --- all of them -------------------------------------------------------------------------------------


def _each(make: Callable[[DataResults], Table | None]) -> Callable[[Results], list[Table]]:
    """One table for each data set that has what it needs."""
    return lambda results: [table for data in results.values() if (table := make(data)) is not None]


_discrepancies = _each(_discrepancy_table)
# makers of tables by name, and what is missing where they make none
_MAKERS: dict[str, tuple[Callable[[Results], list[Table]], str]] = {
    "summary": (_summary, "no runs with uniform or stratified batches"),
    "1": (_each(_accuracy_table), "no runs of ERM, CORAL or MMD"),
    "2": (_methods_tables, "no runs with uniform or stratified batches"),
    "3": (_seconds_tables, "no finished runs"),
    "4": (_each(_refresh_table), "no runs whose refresh_every is part of the sweep's grid"),
    "splits": (_each(_splits_table), "no data set has more than one task"),
    "discrepancy": (
        lambda results: _discrepancies(results) + _ratio_tables(results),
        "no finished runs of CORAL or MMD with a discrepancy",
    ),
    "pairs": (_pairs_tables, "no sampler was run beside uniform batches or VaRDASS"),
}
TABLE_NAMES = (*_MAKERS, "all")


def make_tables(results: Results, which: str = "summary") -> list[Table]:
    """All tables of a name, or a note that says what is missing; ``"all"`` are those of all names but the summary."""
    choose(which, "table", TABLE_NAMES)
    if which == "all":
        found = [table for name, (make, _) in _MAKERS.items() if name != "summary" for table in make(results)]
    else:
        make, missing = _MAKERS[which]
        found = make(results) or [Table(which, f"Table {which}", notes=(missing,))]
    return [_with_forms(table, results) for table in found]


def _with_forms(table: Table, results: Results) -> Table:
    """The table with the form of CORAL that its runs were trained on, where it has some."""
    if table.kind not in _SAYS_FORM or not table.rows:
        return table
    shown = [data for data in results.values() if table.data in (None, data.name)]
    forms = dict.fromkeys(form for data in shown for form in map(_coral_form, data.finished["record"]) if form)
    if not forms:
        return table
    return replace(table, notes=(*table.notes, f"CORAL was trained as {'; and as '.join(forms)}"))


def _coral_form(record: Record) -> str | None:
    """CORAL's formula in a run; None for other algorithms."""
    if str(record.spec.config.get("algorithm")).split("+")[0] != "coral":
        return None
    given = {**algorithm_options("coral"), **record.spec.config.get("algorithm_options", {})}
    options: dict[str, Any] = {name: given.get(name) for name in ("include_mean", "correction", "normalization")}
    if options["correction"] is None and given["preset"] == "paper":
        options |= {"population_x": 2, "population_y": 2}  # a run knows them; any will do for the formula
    return CORALLoss(preset=given["preset"], **options).formula


def _table(
    kind: str,
    title: str,
    corner: str,
    columns: Sequence[str],
    rows: Sequence[TableRow],
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
    best = set()
    for group in groups:
        cells = {(i, j): entry for i, j in group if isinstance(entry := rows[i].entries[j], Average)}
        best |= best_of(cells, decimals=decimals[group[0][1]], lowest=lowest) if group else set()
    notes = (*notes, *_marks_note(rows, unit))
    return Table(kind, title, corner, tuple(columns), tuple(rows), decimals, frozenset(best), notes, data)


def _sampler_rows(cells: Mapping[Label, Average], algorithms: Sequence[str]) -> list[TableRow]:
    """One row for each sampler with its settings, one column for each algorithm."""
    kinds = sorted({label.under("") for label in cells})
    return [
        TableRow(kind.row_name, tuple(cells.get(kind.under(name)) for name in algorithms), label=kind) for kind in kinds
    ]


def _column(rows: Sequence[TableRow], column: int) -> Places:
    return [(i, column) for i in range(len(rows))]


def _marks_note(rows: Iterable[TableRow], unit: str) -> list[str]:
    """Explain the marks of incomplete entries, if there are any."""
    marks = {entry.mark for row in rows for entry in row.entries if isinstance(entry, Average)} - {""}
    notes = []
    if any(mark[-1:] == ")" and mark[-2].isdigit() for mark in marks):
        notes.append(f"(n/N): over n of N {unit}, the others failed or are missing; never best")
    if any(mark.endswith("tasks)") for mark in marks):
        notes.append("(n/N tasks): over n of N tasks, so not to be compared; never best")
    if any(mark.endswith("runs)") for mark in marks):
        notes.append("(n/N runs): n of N runs to choose from finished")
    return notes


def _significant_decimals(rows: Sequence[TableRow]) -> list[int]:
    """For each column, so that its smallest number has two significant digits; from 3 to 8."""
    found = []
    for column in zip(*(row.entries for row in rows), strict=True):
        means = [abs(mean) for entry in column if (mean := entry_mean(entry))]
        found.append(min(8, max(3, 1 - math.floor(math.log10(min(means))))) if means else 3)
    return found
