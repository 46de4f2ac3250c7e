"""The rows of the summary table: one for each data set and cell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vardass.experiments.collect import DataResults, mean_and_error, number
from vardass.experiments.labels import UNIFORM, Label
from vardass.experiments.record import Record

__all__ = ["SummaryRow", "TaskTable", "by_task", "summarise"]


@dataclass(frozen=True)
class SummaryRow:
    """What came of one cell on one data set. Numbers that were not measured are None.

    Attributes
    ----------
    data : str
        Name of the data.
    label : Label
        Algorithm, sampler and further settings that are compared.
    finished, failed, expected : int
        Runs, those of a search included; expected are as many as other cells of the same data have.
    accuracy, gain : tuple of (float or None, float or None)
        Target accuracy, and how much more than with uniform batches in the same repeat; mean and standard error.
    source_accuracy, wall, mmd2, coral : float or None
        Means over the chosen runs.
    """

    data: str
    label: Label
    finished: int
    failed: int
    expected: int
    accuracy: tuple[float | None, float | None]
    gain: tuple[float | None, float | None]
    source_accuracy: float | None
    wall: float | None
    mmd2: float | None
    coral: float | None


@dataclass(frozen=True)
class TaskTable:
    """Target accuracy of each cell in each task of a data set, mean and standard error over repeats."""

    data: str
    tasks: tuple[str, ...]
    rows: list[tuple[Label, list[tuple[float | None, float | None]]]]


def by_task(results: Mapping[str, DataResults]) -> list[TaskTable]:
    """A table for each data set with several tasks."""
    tables = []
    for name, data in results.items():
        if len(data.tasks) > 1:
            rows = []
            for label in data.labels:
                cells = [data.cell(label, tasks=[task]) for task in data.tasks]
                rows.append((label, [(cell.mean, cell.stderr) for cell in cells]))
            tables.append(TaskTable(name, data.tasks, rows))
    return tables


def summarise(results: Mapping[str, DataResults], records: Sequence[Record]) -> list[SummaryRow]:
    """Rows in the order of data and of the paper's tables.

    Parameters
    ----------
    results : mapping of str to DataResults
        What `collect` made of the records.
    records : sequence of Record
        All of them, to count those that failed.
    """
    failed = Counter(
        (record.spec.data_name, Label.of(record.spec)) for record in records if record.status != "finished"
    )
    rows = []
    for name, data in results.items():
        # an average over fewer tasks cannot be compared with others
        tasks = data.common_tasks(data.labels)
        chosen: dict[Label, list[Record]] = {label: [] for label in data.labels}
        for (label, _, _), record in data.chosen.items():
            chosen[label].append(record)
        for label in data.labels:
            cell = data.cell(label, tasks=tasks)
            rows.append(
                SummaryRow(
                    data=name,
                    label=label,
                    finished=sum(data.finished.get((label, task, r), 0) for task in data.tasks for r in data.repeats),
                    failed=failed[name, label],
                    expected=cell.expected_runs,
                    accuracy=(cell.mean, cell.stderr),
                    gain=_gain(data, label, tasks),
                    source_accuracy=_mean([record.result.get("source_accuracy") for record in chosen[label]]),
                    wall=_mean([record.wall for record in chosen[label]]),
                    mmd2=_mean([record.result.get("mmd2") for record in chosen[label]]),
                    coral=_mean([record.result.get("coral") for record in chosen[label]]),
                )
            )
    return rows


def _gain(data: DataResults, label: Label, tasks: Sequence[str]) -> tuple[float | None, float | None]:
    """Over uniform batches with the same algorithm and settings, repeat by repeat."""
    if label.sampler in UNIFORM:
        return None, None
    candidates = [Label(label.algorithm, sampler, label.grid) for sampler in UNIFORM]
    base = next((candidate for candidate in candidates if candidate in data.labels), None)
    if base is None:
        return None, None
    own, others = data.values(label), data.values(base)
    gains = []
    for repeat in data.repeats:
        places = [(task, repeat) for task in tasks]
        if places and all(place in own and place in others for place in places):
            gains.append(math.fsum(own[place] - others[place] for place in places) / len(places))
    return mean_and_error(gains)


def _mean(values: Sequence[object]) -> float | None:
    return mean_and_error([value for value in map(number, values) if value is not None])[0]
