"""From records of runs to numbers with errors: model selection, then averages over tasks and repeats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vardass.errors import InputError
from vardass.experiments.labels import Label
from vardass.experiments.record import Record

__all__ = ["Cell", "DataResults", "collect", "mean_and_error"]

Place = tuple[Label, str, int]  # what is compared, task, repeat


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes
    ----------
    mean : float or None
        None if no repeat has a value.
    stderr : float or None
        Standard error of the mean; None if it is unknown, as it is from a single repeat.
    repeats, expected : int
        Repeats (or runs) that the mean is over, and how many there should be.
    runs, expected_runs : int
        Finished runs of the search behind it, and how many there should be.
    """

    mean: float | None
    stderr: float | None
    repeats: int
    expected: int
    runs: int = 0
    expected_runs: int = 0

    @property
    def complete(self) -> bool:
        """Whether all repeats and all runs are there."""
        return self.mean is not None and self.repeats >= self.expected and self.runs >= self.expected_runs


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard error as DomainBed has them: population standard deviation by the root of the number.

    The error is None for fewer than two values, the mean for none.

    Examples
    --------
    >>> mean_and_error([1.0, 1.0, 3.0, 3.0])
    (2.0, 0.5)
    """
    if not values:
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values)) / len(values)


@dataclass(frozen=True)
class DataResults:
    """All runs of one data set, with the chosen run of each label, task and repeat.

    Attributes
    ----------
    name, dataset : str
        What tables call the data, and the loader's name.
    labels : tuple of Label
        All that were run, also those whose runs all failed, in the order of the tables.
    tasks, repeats, searches : tuple
        All that were seen for any label: what a complete label has.
    chosen : dict of (label, task, repeat) to Record
        The finished run with the greatest score; of equal ones that with the lowest search number.
    finished : dict of (label, task, repeat) to int
        How many runs of the search there were to choose from.
    records : tuple of Record
        All finished runs, chosen or not.
    """

    name: str
    dataset: str
    labels: tuple[Label, ...]
    tasks: tuple[str, ...]
    repeats: tuple[int, ...]
    searches: tuple[int, ...]
    chosen: Mapping[Place, Record]
    finished: Mapping[Place, int]
    records: tuple[Record, ...]

    def values(self, label: Label, metric: str = "target_accuracy") -> dict[tuple[str, int], float]:
        """A number of the chosen runs' results by (task, repeat), without those that have none."""
        found = {}
        for task in self.tasks:
            for repeat in self.repeats:
                record = self.chosen.get((label, task, repeat))
                value = None if record is None else number(record.result.get(metric))
                if value is not None:
                    found[task, repeat] = value
        return found

    def common_tasks(self, labels: Iterable[Label], metric: str = "target_accuracy") -> tuple[str, ...]:
        """Tasks that every label has a value of; labels without any value at all do not count."""
        present = [{task for task, _ in self.values(label, metric)} for label in labels]
        present = [tasks for tasks in present if tasks]
        return tuple(task for task in self.tasks if present and all(task in tasks for tasks in present))

    def cell(
        self,
        label: Label,
        *,
        tasks: Sequence[str] | None = None,
        expected_tasks: Sequence[str] | None = None,
        metric: str = "target_accuracy",
        scale: float = 1.0,
    ) -> Cell:
        """Mean over tasks within a repeat first, then mean and standard error over repeats.

        Parameters
        ----------
        label : Label
            What to average.
        tasks : sequence of str, optional
            The tasks to average over, all by default. A repeat that lacks one of them does not count, so that
            no two repeats are over different tasks.
        expected_tasks : sequence of str, optional
            The tasks whose runs a complete cell has, all by default.
        metric : str
            Name of the number in ``Record.result``.
        scale : float
            Factor of all numbers, such as 100 for percent.
        """
        wanted = self.tasks if tasks is None else tuple(tasks)
        values = self.values(label, metric)
        means = [
            scale * math.fsum(values[task, repeat] for task in wanted) / len(wanted)
            for repeat in self.repeats
            if wanted and all((task, repeat) in values for task in wanted)
        ]
        planned = self.tasks if expected_tasks is None else expected_tasks
        runs = sum(self.finished.get((label, task, repeat), 0) for task in planned for repeat in self.repeats)
        expected_runs = len(planned) * len(self.repeats) * len(self.searches)
        mean, stderr = mean_and_error(means)
        return Cell(mean, stderr, len(means), len(self.repeats), runs, expected_runs)


def collect(records: Iterable[Record]) -> dict[str, DataResults]:
    """Choose the model of each label, task and repeat, by ``result["score"]`` alone, for each data set.

    Target labels play no part: the score is what the run's validator gave. A run without a score is chosen only if
    there is no other.

    Parameters
    ----------
    records : iterable of Record
        Of one sweep or several. Of two records of the same run a finished one counts.

    Returns
    -------
    dict of str to DataResults
        By the data's name, in the order in which they were first seen.

    Raises
    ------
    InputError
        If two different runs have the same data, task, cell, repeat and search number, as those of two sweeps with
        different settings have: averages over both would mean nothing.
    """
    grouped: dict[str, dict[tuple[Label, str, int, int], Record]] = {}
    for record in records:
        spec = record.spec
        slots = grouped.setdefault(str(spec.data_name), {})
        slot = (Label.of(spec), str(spec.task), spec.repeat, spec.search)
        before = slots.get(slot)
        if before is not None:
            _check_same(before, record)
        if before is None or (record.status == "finished" and before.status != "finished"):
            slots[slot] = record
    return {name: _results(name, slots) for name, slots in grouped.items()}


def _check_same(one: Record, other: Record) -> None:
    if one.run_id == other.run_id:
        return
    spec, differing = one.spec, []
    for field, value in spec.to_dict().items():
        found = getattr(other.spec, field)
        if field == "config":
            differing += [name for name in {**value, **found} if value.get(name) != found.get(name)]
        elif value != found and field != "root":
            differing.append(field)
    raise InputError(
        f"runs {one.run_id} and {other.run_id} are both {spec.data_name}, {spec.task}, {Label.of(spec).method_name}, "
        f"repeat {spec.repeat}, search {spec.search}, but differ in {', '.join(sorted(differing))}; "
        "make tables of one sweep at a time, or give the data of each sweep its own name"
    )


def _results(name: str, slots: Mapping[tuple[Label, str, int, int], Record]) -> DataResults:
    chosen: dict[Place, Record] = {}
    finished: dict[Place, int] = {}
    # by search number, so that of equal scores the first one stays
    for (label, task, repeat, _), record in sorted(slots.items(), key=lambda item: item[0][3]):
        if record.status != "finished":
            continue
        place = (label, task, repeat)
        finished[place] = finished.get(place, 0) + 1
        if place not in chosen or _score(record) > _score(chosen[place]):
            chosen[place] = record
    return DataResults(
        name=name,
        dataset=str(next(iter(slots.values())).spec.dataset),
        labels=tuple(sorted({slot[0] for slot in slots}, key=lambda label: label.order)),
        tasks=tuple(dict.fromkeys(slot[1] for slot in slots)),
        repeats=tuple(sorted({slot[2] for slot in slots})),
        searches=tuple(sorted({slot[3] for slot in slots})),
        chosen=chosen,
        finished=finished,
        records=tuple(record for record in slots.values() if record.status == "finished"),
    )


def _score(record: Record) -> float:
    score = number(record.result.get("score"))
    return -math.inf if score is None else score


def number(value: Any) -> float | None:
    """A finite number, or None for all that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
