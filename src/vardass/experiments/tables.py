"""The tables of the paper, made from the records of sweeps, as far as these go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from vardass.errors import InputError
from vardass.experiments.collect import Cell, DataResults
from vardass.experiments.comparisons import pairs_tables
from vardass.experiments.labels import OURS, UNIFORM, Label, algorithm_name
from vardass.experiments.table import (
    Row,
    Table,
    best_of,
    marks_note,
    missing_table,
    significant_decimals,
    task_note,
)
from vardass.experiments.timing import seconds_tables

__all__ = [
    "TABLE_NAMES",
    "accuracy_tables",
    "discrepancy_tables",
    "make_tables",
    "methods_tables",
    "refresh_tables",
    "split_tables",
]

Results = Mapping[str, DataResults]
_MAIN = ("erm", "coral", "mmd")


def accuracy_tables(results: Results) -> list[Table]:
    """Table 1: target accuracy by sampler (rows) and algorithm (columns), one table for each data set.

    Algorithms beyond ERM, CORAL and MMD have a column if they were run with more than one sampler. ERM is shown
    but not compared.
    """
    tables = []
    for data in results.values():
        title = f"Table 1: target accuracy (%) by sampler, {data.name}"
        algorithms = list(dict.fromkeys(label.algorithm for label in data.labels if _in_table_1(label, data.labels)))
        if not algorithms:
            tables.append(missing_table("accuracy", title, "no runs of ERM, CORAL or MMD", data=data.name))
            continue
        shown = [label for label in data.labels if label.algorithm in algorithms]
        common = data.common_tasks(shown)
        cells = {label: data.cell(label, tasks=common, scale=100) for label in shown}
        rows = _sampler_rows(cells, algorithms)
        decimals = (1,) * len(algorithms)
        best = [
            best_of(rows, [(i, j) for i in range(len(rows))], decimals)
            for j, name in enumerate(algorithms)
            if name != "erm"
        ]
        tables.append(
            Table(
                "accuracy",
                title,
                "Sampler",
                tuple(algorithm_name(name) for name in algorithms),
                rows,
                decimals,
                frozenset().union(*best),
                (*task_note(data, common), *marks_note(rows)),
                data.name,
            )
        )
    return tables or [missing_table("accuracy", "Table 1: target accuracy by sampler", "no runs")]


def methods_tables(results: Results) -> list[Table]:
    """Table 2: methods of domain adaptation with uniform batches, and with this package's, on all data sets."""
    title = "Table 2: target accuracy (%) by method"

    def belongs(label: Label) -> bool:
        return label.sampler in UNIFORM or (label.sampler in OURS and label.algorithm != "erm")

    labels = sorted({label for data in results.values() for label in data.labels if belongs(label)}, key=_order)
    if not labels:
        return [missing_table("methods", title, "no runs with uniform or stratified batches")]
    columns: dict[str, dict[Label, Cell]] = {}
    notes: list[str] = []
    for name, data in results.items():
        own = [label for label in labels if label in data.labels]
        if not own:
            continue
        common = data.common_tasks(own)
        columns[name] = {label: data.cell(label, tasks=common, scale=100) for label in own}
        notes += task_note(data, common)
    rows = tuple(Row(label.method_name, tuple(column.get(label) for column in columns.values())) for label in labels)
    decimals = (1,) * len(columns)
    best = [best_of(rows, [(i, j) for i in range(len(rows))], decimals) for j in range(len(columns))]
    notes += marks_note(rows)
    return [Table("methods", title, "Method", tuple(columns), rows, decimals, frozenset().union(*best), tuple(notes))]


def refresh_tables(results: Results) -> list[Table]:
    """Table 4: target accuracy by the number T of steps between refreshes, from cells that have it in their grid."""
    tables = []
    for data in results.values():
        shown = [label for label in data.labels if label.setting("refresh_every") is not None]
        shown = [label for label in shown if label.sampler not in UNIFORM]  # which have nothing to refresh
        if not shown:
            continue
        common = data.common_tasks(shown)
        steps = list(dict.fromkeys(label.setting("refresh_every") for label in sorted(shown, key=_refresh_order)))
        by_step: dict[Label, dict[object, Cell]] = {}
        for label in shown:
            row = by_step.setdefault(label.without("refresh_every"), {})
            row[label.setting("refresh_every")] = data.cell(label, tasks=common, scale=100)
        rows = tuple(Row(label.method_name, tuple(row.get(step) for step in steps)) for label, row in by_step.items())
        decimals = (1,) * len(steps)
        best = [best_of(rows, [(i, j) for j in range(len(steps))], decimals) for i in range(len(rows))]
        tables.append(
            Table(
                "refresh",
                f"Table 4: target accuracy (%) by steps T between refreshes, {data.name}",
                "Method",
                tuple(f"T={step}" for step in steps),
                rows,
                decimals,
                frozenset().union(*best),
                (*task_note(data, common), *marks_note(rows)),
                data.name,
            )
        )
    reason = "no runs whose refresh_every is part of the sweep's grid"
    return tables or [missing_table("refresh", "Table 4: target accuracy by steps T between refreshes", reason)]


def split_tables(results: Results) -> list[Table]:
    """Appendix A: target accuracy by task, for each data set with more than one; best within an algorithm."""
    tables = []
    for data in results.values():
        if len(data.tasks) < 2:
            continue
        common = data.common_tasks(data.labels)
        rows = []
        sizes = Counter(label.algorithm for label in data.labels)
        blocks = [
            name for name in sizes if sizes[name] > 1
        ]  # algorithms with one sampler share a block, as in the paper
        for label in data.labels:
            name = label.method_name
            head = algorithm_name(label.algorithm)
            if name != head and Label(label.algorithm, "uniform") in data.labels:
                name = name.removeprefix(head).strip(" ,")
            block = 1 + blocks.index(label.algorithm) if label.algorithm in blocks else 0
            cells = [data.cell(label, tasks=[task], expected_tasks=[task], scale=100) for task in data.tasks]
            entries = (*cells, data.cell(label, tasks=common, scale=100))
            rows.append(Row(name, entries, label.method_name, block))
        decimals = (1,) * (len(data.tasks) + 1)
        best = [
            best_of(rows, [(i, j) for i, label in enumerate(data.labels) if label.algorithm == name], decimals)
            for name in blocks
            for j in range(len(decimals))
            if name != "erm"
        ]
        tables.append(
            Table(
                "splits",
                f"Target accuracy (%) by task, {data.name}",
                "Method",
                (*data.tasks, "Average"),
                tuple(rows),
                decimals,
                frozenset().union(*best),
                (*task_note(data, common), *marks_note(rows)),
                data.name,
            )
        )
    return tables or [missing_table("splits", "Target accuracy by task", "no data set has more than one task")]


def discrepancy_tables(results: Results) -> list[Table]:
    """Appendix B: MMD² or CORAL between held-out source and target features of the chosen models.

    Each algorithm is judged by the discrepancy that it trains on. ERM, which trains on none, is shown for comparison.
    """
    metrics = {"coral": "coral", "mmd": "mmd2"}
    tables = []
    for data in results.values():
        algorithms = [
            name
            for name in metrics
            if any(data.values(label, metrics[name]) for label in data.labels if label.algorithm == name)
        ]
        if not algorithms:
            continue
        shown = [label for label in data.labels if label.algorithm in algorithms]
        plain = [label for label in data.labels if label.algorithm == "erm" and label.sampler in UNIFORM]
        present = [
            set(data.common_tasks([label], metric))
            for name, metric in metrics.items()
            for label in (*shown, *plain)
            if name in algorithms and label.algorithm in (name, "erm")
        ]
        common = [task for task in data.tasks if all(task in tasks for tasks in present if tasks)]
        cells = {label: data.cell(label, tasks=common, metric=metrics[label.algorithm]) for label in shown}
        compared = _sampler_rows(cells, algorithms)
        reference = []
        for label in plain:
            entries = tuple(data.cell(label, tasks=common, metric=metrics[name]) for name in algorithms)
            reference.append(Row(f"{label.method_name} (no adaptation)", entries, block=1))
        rows = (*compared, *reference)
        decimals = tuple(significant_decimals(rows, j) for j in range(len(algorithms)))
        best = [
            best_of(compared, [(i, j) for i in range(len(compared))], decimals, lowest=True)
            for j in range(len(algorithms))
        ]
        tables.append(
            Table(
                "discrepancy",
                f"Discrepancy of source and target after training, {data.name}",
                "Sampler",
                tuple(algorithm_name(name) for name in algorithms),
                rows,
                decimals,
                frozenset().union(*best),
                (*task_note(data, common), *marks_note(rows)),
                data.name,
            )
        )
    title = "Discrepancy of source and target after training"
    return tables or [missing_table("discrepancy", title, "no finished runs of CORAL or MMD with a discrepancy")]


_MAKERS: dict[str, Callable[[Results], list[Table]]] = {
    "1": accuracy_tables,
    "2": methods_tables,
    "3": seconds_tables,
    "4": refresh_tables,
    "splits": split_tables,
    "discrepancy": discrepancy_tables,
    "pairs": pairs_tables,
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


def _in_table_1(label: Label, labels: Iterable[Label]) -> bool:
    samplers = {other.sampler for other in labels if other.algorithm == label.algorithm}
    return label.algorithm in _MAIN or len(samplers) > 1


def _sampler_rows(cells: Mapping[Label, Cell], algorithms: Sequence[str]) -> tuple[Row, ...]:
    """One row for each sampler with its settings, one column for each algorithm."""
    kinds = {(label.sampler, label.grid): label for label in sorted(cells, key=lambda label: label.row_order)}
    return tuple(
        Row(label.row_name, tuple(cells.get(Label(name, sampler, grid)) for name in algorithms))
        for (sampler, grid), label in kinds.items()
    )


def _order(label: Label) -> tuple[object, ...]:
    return label.order


def _refresh_order(label: Label) -> tuple[object, ...]:
    step = label.setting("refresh_every")
    return (0, float(step), "") if isinstance(step, int | float) else (1, 0.0, str(step))
