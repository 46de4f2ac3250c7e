"""Records as pandas tables: what is compared, the best run of each search, and the one average behind every table.

Accuracy is averaged over the tasks of a repeat first, then over repeats. Tables, page and wins all ask
`DataResults` for it, so that no two of them can disagree.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from vardass.errors import InputError
from vardass.experiments.record import Record, RunSpec
from vardass.experiments.store import PLAN_FILE, read_json, read_records

__all__ = [
    "ALGORITHMS",
    "OURS",
    "SAMPLERS",
    "UNIFORM",
    "Cell",
    "DataResults",
    "Label",
    "collect",
    "current_records",
    "mean_and_error",
    "number",
]

# names of algorithms and samplers in tables, in the order of the paper's
ALGORITHMS = {
    "erm": "ERM",
    "dann": "DANN",
    "cdan": "CDAN",
    "cdan+sdat": "CDAN + SDAT",
    "cdan+els": "CDAN + ELS",
    "arm": "ARM",
    "mcc": "MCC",
    "coral": "CORAL",
    "mmd": "MMD",
}
SAMPLERS = {
    "uniform": "Uniform random",
    "uniform-replacement": "Uniform, with replacement",
    "kmeans++": "k-means++",
    "dpp": "DPP",
    "kmeans-inputs": "k-means (inputs)",
    "kmeans-features": "k-means (features)",
    "vardass": "VaRDASS",
    "stratified": "min-sum strata",
    "ordered": "ordered",
    "balanced": "balanced",
}
UNIFORM = ("uniform", "uniform-replacement")
OURS = ("vardass", "stratified", "ordered", "balanced")  # the samplers that Table 2 sets against other methods

_METRICS = ("target_accuracy", "source_accuracy", "score", "mmd2", "coral")  # of ``Record.result``
_PLACE = ["label", "task", "repeat"]  # has one chosen run

FloatArray = NDArray[np.float64]
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Label:
    """What is compared: an algorithm, a sampler, and the settings of the sweep's grid.

    Labels are sorted as the paper's tables list them; unknown names come last, by name.

    Attributes
    ----------
    algorithm, sampler : str
        Names as in ``RunSpec.cell``; labels of the user's own are kept as they are.
    grid : tuple of (str, value)
        Further settings, by name.
    """

    algorithm: str
    sampler: str
    grid: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, spec: RunSpec) -> Label:
        """The label of a run."""
        cell, config = spec.cell, spec.config
        algorithm = cell.get("algorithm", config.get("algorithm", "unknown"))
        sampler = cell.get("sampler", config.get("sampler", "unknown"))
        grid = sorted((name, _scalar(value)) for name, value in cell.items() if name not in ("algorithm", "sampler"))
        return cls(_known(str(algorithm), ALGORITHMS), _known(str(sampler), SAMPLERS), tuple(grid))

    @property
    def algorithm_name(self) -> str:
        """The algorithm, as tables call it."""
        return ALGORITHMS.get(self.algorithm, self.algorithm)

    @property
    def sampler_name(self) -> str:
        """The sampler, as tables call it."""
        return SAMPLERS.get(self.sampler, self.sampler)

    @property
    def row_name(self) -> str:
        """Sampler and settings, as tables call them."""
        return self._with_settings(self.sampler_name)

    @property
    def method_name(self) -> str:
        """Algorithm, then the sampler unless it is uniform, then settings."""
        base = self.algorithm_name
        return self._with_settings(base if self.sampler == "uniform" else f"{base} + {self.sampler_name}")

    def setting(self, name: str) -> Scalar:
        """Value of a setting of the grid; None if it is not part of it."""
        return dict(self.grid).get(name)

    def without(self, name: str) -> Label:
        """The label without one setting of the grid."""
        return replace(self, grid=tuple(pair for pair in self.grid if pair[0] != name))

    def under(self, algorithm: str) -> Label:
        """The same sampler and settings with another algorithm; the empty one stands for the row of a sampler."""
        return replace(self, algorithm=algorithm)

    def __lt__(self, other: Label) -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[Any, ...]:
        grid = tuple((name, *_sortable(value)) for name, value in self.grid)
        return (*_place(self.algorithm, ALGORITHMS), *_place(self.sampler, SAMPLERS), grid)

    def _with_settings(self, name: str) -> str:
        return ", ".join([name, *(f"{setting}={value}" for setting, value in self.grid)])


def _known(given: str, names: Mapping[str, str]) -> str:
    # a label such as "MMD" means the algorithm of that name
    lowered = given.strip().lower()
    if lowered in names:
        return lowered
    return next((name for name, shown in names.items() if shown.lower() == lowered), given)


def _scalar(value: Any) -> Scalar:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)


def _sortable(value: Scalar) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _place(name: str, names: Mapping[str, str]) -> tuple[int, str]:
    return (list(names).index(name) if name in names else len(names), name)


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


def mean_and_error(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Mean and standard error as DomainBed has them: population standard deviation by the root of the number.

    The error is None for fewer than two values, the mean for none.

    Examples
    --------
    >>> mean_and_error([1.0, 1.0, 3.0, 3.0])
    (2.0, 0.5)
    """
    found = np.array(list(values))
    if not len(found):
        return None, None
    return float(found.mean()), float(stats.sem(found, ddof=0)) if len(found) > 1 else None


def number(value: Any) -> float | None:
    """A finite number, or None for all that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


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
    runs, finished : DataFrame
        One row for each run: label, task, repeat, search, whether it finished, the numbers of its result, its seconds
        and its record; and those that finished.
    chosen : DataFrame
        The finished run of each label, task and repeat with the greatest score; of equal ones that with the lowest
        search number.
    """

    def __init__(self, name: str, runs: pd.DataFrame) -> None:
        self.name = name
        self.dataset = str(runs["record"].iloc[0].spec.dataset)
        self.labels: tuple[Label, ...] = tuple(sorted(runs["label"].unique()))
        self.tasks: tuple[str, ...] = tuple(runs["task"].unique())
        self.repeats: tuple[int, ...] = tuple(sorted(runs["repeat"].unique()))
        self.searches: tuple[int, ...] = tuple(sorted(runs["search"].unique()))
        self.runs = runs
        self.finished = runs[runs["finished"]]
        ranked = self.finished.sort_values(["score", "search"], ascending=[False, True], na_position="last")
        self.chosen = ranked.drop_duplicates(_PLACE).sort_index()
        self._values: dict[str, dict[Label, FloatArray]] = {}

    def values(self, label: Label, metric: str = "target_accuracy") -> FloatArray:
        """A number of the chosen runs' results, of shape (repeats, tasks); NaN where there is none."""
        if metric not in self._values:
            found = np.full((len(self.labels), len(self.repeats), len(self.tasks)), np.nan)
            found[self._places(self.chosen)] = self.chosen[metric]
            self._values[metric] = dict(zip(self.labels, found))
        return self._values[metric][label]

    @cached_property
    def _runs_of(self) -> FloatArray:
        """Finished runs of each label and task."""
        counts = np.zeros((len(self.labels), len(self.tasks)))
        labels, _, tasks = self._places(self.finished)
        np.add.at(counts, (labels, tasks), 1)
        return counts

    def _places(self, runs: pd.DataFrame) -> tuple[Any, ...]:
        axes = {"label": self.labels, "repeat": self.repeats, "task": self.tasks}
        return tuple(pd.Index(values).get_indexer(pd.Index(runs[axis])) for axis, values in axes.items())

    def pairs(self, label: Label, reference: Label, metric: str = "target_accuracy") -> FloatArray:
        """How much more a label has than another, on each task and repeat of which both have a value."""
        differences = self.values(label, metric) - self.values(reference, metric)
        return differences[~np.isnan(differences)]

    def common_tasks(self, labels: Iterable[Label], metric: str = "target_accuracy") -> tuple[str, ...]:
        """Tasks that every label has a value of; labels without any value at all do not count."""
        known = [np.isfinite(self.values(label, metric)).any(axis=0) for label in labels]
        known = [tasks for tasks in known if np.any(tasks)]
        common = np.all(known, axis=0) if known else np.zeros(len(self.tasks))
        return tuple(task for task, is_common in zip(self.tasks, common) if is_common)

    def reference(self, label: Label, sampler: str) -> Label | None:
        """The label with another sampler and the same settings (or none, where a sampler has no use for them)."""
        samplers = UNIFORM if sampler == "uniform" else (sampler,)
        candidates = (Label(label.algorithm, name, grid) for grid in (label.grid, ()) for name in samplers)
        return next((candidate for candidate in candidates if candidate in self.labels), None)

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
        planned = [self.tasks.index(task) for task in (self.tasks if expected_tasks is None else expected_tasks)]
        runs = int(self._runs_of[self.labels.index(label), planned].sum())
        expected_runs = len(planned) * len(self.repeats) * len(self.searches)
        return self._average(scale * self.values(label, metric), tasks, runs, expected_runs)

    def gain(self, label: Label, reference: Label, *, tasks: Sequence[str] | None = None, scale: float = 1.0) -> Cell:
        """The same of the difference in target accuracy between two labels."""
        return self._average(scale * (self.values(label) - self.values(reference)), tasks)

    def _average(self, values: FloatArray, tasks: Sequence[str] | None, runs: int = 0, expected_runs: int = 0) -> Cell:
        wanted = [self.tasks.index(task) for task in (self.tasks if tasks is None else tasks)]
        means = values[:, wanted].mean(axis=1) if wanted else np.empty(0)
        means = means[~np.isnan(means)]
        return Cell(*mean_and_error(means), len(means), len(self.repeats), runs, expected_runs)


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
    slots: dict[tuple[str, Label, str, int, int], Record] = {}
    for record in records:
        spec = record.spec
        slot = (str(spec.data_name), Label.of(spec), str(spec.task), spec.repeat, spec.search)
        before = slots.setdefault(slot, record)
        _check_same(before, record)
        if record.status == "finished" and before.status != "finished":
            slots[slot] = record
    rows = [
        (
            *slot,
            record.status == "finished",
            *(number(record.result.get(name)) for name in _METRICS),
            record.wall,
            record,
        )
        for slot, record in slots.items()
    ]
    columns = ["data", *_PLACE, "search", "finished", *_METRICS, "wall", "record"]
    frame = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(_METRICS, float))
    return {str(name): DataResults(str(name), runs) for name, runs in frame.groupby("data", sort=False)}


def _check_same(one: Record, other: Record) -> None:
    if one is other or one.run_id == other.run_id:
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


def current_records(path: str | os.PathLike[str]) -> tuple[list[Record], int]:
    """Records of a sweep, and how many were left out because a run of the present sweep took their place.

    Sweeps that share a folder add up. If one was changed and run again, two runs may have the same data, task, cell,
    repeat and number of the search: then those that ``plan.json`` names count.

    Parameters
    ----------
    path : path
        See `read_records`.
    """
    records = read_records(path)
    plan = read_json(Path(path) / PLAN_FILE) if Path(path).is_dir() else {}
    planned = set(plan.get("runs") or ())
    places: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        spec = record.spec
        place = [spec.data_name, spec.task, spec.cell, spec.repeat, spec.search]
        places[json.dumps(place, sort_keys=True)].append(record)
    kept = []
    for rivals in places.values():
        present = [record for record in rivals if record.run_id in planned]
        kept += present if len(rivals) > 1 and present else rivals
    return kept, len(records) - len(kept)
