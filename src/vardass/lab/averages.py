"""Records as pandas tables: what is compared, the best run of each search, and the one average behind every table.

Accuracy is averaged over the tasks of a repeat first, then over repeats, and its error is over repeats: all runs of a
repeat share hyper-parameters, seeds and splits, so its tasks are not independent.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from vardass.errors import InputError
from vardass.lab.record import Record, RunSpec
from vardass.lab.store import read_plan, read_records
from vardass.table import Average

__all__ = ["DataResults", "Difference", "Gain", "Label", "collect", "current_records", "difference", "holm"]

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
    "stratified": "stratified",
    "ordered": "ordered",
    "balanced": "balanced",
    "paired": "paired (follow-up)",
}
UNIFORM = ("uniform-replacement", "uniform")  # DomainBed and the paper draw with replacement
OURS = ("vardass", "stratified", "ordered", "balanced")  # the samplers that Table 2 sets against other methods

_METRICS = ("target_accuracy", "source_accuracy", "score", "mmd2", "coral", "coral_relative")  # of ``Record.result``
LEVEL = 0.05  # of all tests and intervals
POINTS = 1.0  # of accuracy: smaller differences do not matter in practice
FACTOR = 1.25  # of a discrepancy: the same
_TIE = 1e-9
_PLACE = ["label", "task", "repeat"]  # has one chosen run

FloatArray = NDArray[np.float64]
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Label:
    """What is compared: an algorithm, a sampler, and the settings of the sweep's grid.

    Labels are sorted as the paper's tables list them; unknown names come last, by name.
    """

    algorithm: str  # names as in ``RunSpec.cell``; labels of the user's own are kept as they are
    sampler: str
    grid: tuple[tuple[str, Scalar], ...] = ()  # further settings, by name

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


Key = TypeVar("Key")


def best_of(averages: Mapping[Key, Average | None], *, decimals: int = 1, lowest: bool = False) -> set[Key]:
    """Those with the best mean, at the decimals that are shown.

    Only whole averages compete, and one alone is not best.
    """
    means = {
        key: round(-found.mean if lowest else found.mean, decimals)
        for key, found in averages.items()
        if found is not None and found.mean is not None and found.whole
    }
    return {key for key, mean in means.items() if len(means) > 1 and mean == max(means.values())}


# --- differences over independent repeats ---


def mean_and_error(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Mean, and its standard error from the sample standard deviation (n - 1), None for fewer than two values.

    DomainBed, and perhaps the paper, divide by n.
    """
    found = np.array(list(values))
    if not len(found):
        return None, None
    return float(found.mean()), float(stats.sem(found)) if len(found) > 1 else None


class Difference(NamedTuple):
    """What repeats say about a difference; nothing for fewer than two repeats."""

    low: float | None = None  # 95 % interval of Student's t
    high: float | None = None
    p: float | None = None  # two-sided t test of no difference; None if all repeats are the same
    equivalence_p: float | None = None  # two one-sided t tests (TOST) that the difference is within the margin


def difference(means: Iterable[float], *, margin: float) -> Difference:
    """Judge the differences of independent repeats."""
    found = np.array(list(means))
    mean, stderr = mean_and_error(found)
    if mean is None or stderr is None:
        return Difference()
    if np.ptp(found) <= 1e-12 * max(1.0, abs(mean)):
        return Difference(mean, mean)
    freedom = len(found) - 1
    reach = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * stderr
    p = 2 * float(stats.t.sf(abs(mean) / stderr, freedom))
    equivalence_p = float(stats.t.sf((margin - abs(mean)) / stderr, freedom))  # the larger of both sides
    return Difference(mean - reach, mean + reach, p, equivalence_p)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction, which scipy lacks: family-wise p values. A test without one counts as part of the family."""
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    floor = 0.0
    for rank, (p, place) in enumerate(known):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p))
        adjusted[place] = floor
    return adjusted


# --- what is compared, and its averages ---


@dataclass(frozen=True)
class Gain:
    """One label against another in the same repeats."""

    average: Average  # the mean difference
    result: Difference  # what the repeats say about it; nothing unless both labels are whole
    wins: int  # on tasks and repeats that both have
    ties: int
    losses: int
    whole: bool  # whether both labels are


def number(value: Any) -> float | None:
    """A finite number, or None for all that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


class DataResults:
    """All runs of one data set, with the chosen run of each label, task and repeat."""

    def __init__(self, name: str, runs: pd.DataFrame) -> None:
        self.name = name
        self.dataset = str(runs["record"].iloc[0].spec.dataset)
        # all that were run, also those whose runs all failed, in the order of the tables
        self.labels: tuple[Label, ...] = tuple(sorted(runs["label"].unique()))
        # all that were seen for any label: what a complete label has
        self.tasks: tuple[str, ...] = tuple(runs["task"].unique())
        self.repeats: tuple[int, ...] = tuple(sorted(runs["repeat"].unique()))
        self.searches: tuple[int, ...] = tuple(sorted(runs["search"].unique()))
        self.runs = runs
        self.finished = runs[runs["finished"]]
        # of each label, task and repeat the run with the greatest score; of equal ones the lowest search number
        ranked = self.finished.sort_values(["score", "search"], ascending=[False, True], na_position="last")
        self.chosen = ranked.drop_duplicates(_PLACE).sort_index()
        self._values: dict[str, dict[Label, FloatArray]] = {}
        self._ended = Counter(zip(runs["label"], runs["task"], runs["finished"]))

    def values(self, label: Label, metric: str = "target_accuracy") -> FloatArray:
        """A number of the chosen runs' results, of shape (repeats, tasks); NaN where there is none."""
        if metric not in self._values:
            found = np.full((len(self.labels), len(self.repeats), len(self.tasks)), np.nan)
            axes = {"label": self.labels, "repeat": self.repeats, "task": self.tasks}
            places = (pd.Index(seen).get_indexer(pd.Index(self.chosen[axis])) for axis, seen in axes.items())
            found[tuple(places)] = self.chosen[metric]
            self._values[metric] = dict(zip(self.labels, found))
        return self._values[metric][label]

    def reference(self, label: Label, sampler: str) -> Label | None:
        """The label with another sampler and the same settings (or none, where a sampler has no use for them).

        Uniform batches are those with replacement, as in the paper, where both kinds were run.
        """
        samplers = UNIFORM if sampler == "uniform" else (sampler,)
        candidates = (Label(label.algorithm, name, grid) for grid in (label.grid, ()) for name in samplers)
        return next((candidate for candidate in candidates if candidate in self.labels), None)

    def average(
        self, label: Label, *, task: str | None = None, metric: str = "target_accuracy", scale: float = 1.0
    ) -> Average:
        """Mean over tasks within a repeat first, then mean and standard error over repeats.

        Tasks without any value are left out, which the mark says. A repeat that lacks one of the others does not count,
        so that all repeats are over the same tasks.
        """
        tasks = self.tasks if task is None else (task,)
        values = self.values(label, metric)[:, [self.tasks.index(name) for name in tasks]]
        finished, failed = (sum(self._ended[label, name, kind] for name in tasks) for kind in (True, False))
        means, seen = _repeat_means(scale * values)
        expected_runs = len(tasks) * len(self.repeats) * len(self.searches)
        counts = (len(means), len(self.repeats), finished, expected_runs, failed, seen, len(tasks))
        return Average(*mean_and_error(means), *counts)

    def gain(self, label: Label, reference: Label, *, ratio_of: str | None = None) -> Gain:
        """Difference in accuracy of two labels over the tasks and repeats of both, or log-ratio of ``ratio_of``."""
        metric = ratio_of or "target_accuracy"
        one, other = self.values(label, metric), self.values(reference, metric)
        with np.errstate(divide="ignore", invalid="ignore"):
            differences = np.log(one) - np.log(other) if ratio_of else 100.0 * (one - other)
        differences[~np.isfinite(differences)] = np.nan
        means, seen = _repeat_means(differences)
        counts = {"tasks": seen, "expected_tasks": len(self.tasks)}
        average = Average(*mean_and_error(means), len(means), len(self.repeats), **counts)
        whole = average.whole and all(self.average(one, metric=metric).whole for one in (label, reference))
        wins, losses = int((differences > _TIE).sum()), int((differences < -_TIE).sum())
        ties = int(np.isfinite(differences).sum()) - wins - losses
        result = difference(means if whole else [], margin=math.log(FACTOR) if ratio_of else POINTS)
        return Gain(average, result, wins, ties, losses, whole)

    def best(self, algorithm: str) -> set[Label]:
        """The samplers of an algorithm with the highest target accuracy; none for ERM, which is not compared."""
        own = [label for label in self.labels if label.algorithm == algorithm and algorithm != "erm"]
        return best_of({label: self.average(label, scale=100) for label in own})


def _repeat_means(values: FloatArray) -> tuple[FloatArray, int]:
    """Means over the tasks (columns) of each repeat (row) that has all tasks seen, and the number of these tasks."""
    seen = np.isfinite(values).any(axis=0)
    means = values[:, seen].mean(axis=1) if seen.any() else np.empty(0)
    return means[np.isfinite(means)], int(seen.sum())


def collect(records: Iterable[Record]) -> dict[str, DataResults]:
    """Choose the model of each label, task and repeat by its score, for each data set.

    A run without a score is chosen only if there is no other. Two different runs in one place are refused.
    """
    slots: dict[tuple[str, Label, str, int, int], Record] = {}
    for record in records:
        spec = record.spec
        slot = (str(spec.data_name), Label.of(spec), str(spec.task), spec.repeat, spec.search)
        before = slots.setdefault(slot, record)
        _check_same(before, record)
        if record.status == "finished" and before.status != "finished":
            slots[slot] = record
    rows = []
    for slot, record in slots.items():
        metrics = (number(record.result.get(name)) for name in _METRICS)
        rows.append((*slot, record.status == "finished", *metrics, record.wall, record))
    columns = ["data", *_PLACE, "search", "finished", *_METRICS, "wall", "record"]
    frame = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(_METRICS, float))
    return {str(name): DataResults(str(name), runs) for name, runs in frame.groupby("data", sort=False)}


def _check_same(one: Record, other: Record) -> None:
    if one is other or one.run_id == other.run_id:
        return
    spec = one.spec
    first, second = ({**asdict(each), **each.config, "config": None, "root": None} for each in (spec, other.spec))
    differing = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    raise InputError(
        f"runs {one.run_id} and {other.run_id} are both {spec.data_name}, {spec.task}, {Label.of(spec).method_name}, "
        f"repeat {spec.repeat}, search {spec.search}, but differ in {', '.join(sorted(differing))}; "
        "make tables of one sweep at a time, or give the data of each sweep its own name"
    )


def current_records(path: str | os.PathLike[str]) -> tuple[list[Record], int]:
    """Records of a sweep, and how many were left out because a run of the present sweep took their place.

    Where two runs have the same data, task, cell, repeat and search number, those that ``plan.json`` names count.
    """
    records = read_records(path)
    plan = read_plan(Path(path)) if Path(path).is_dir() else None
    planned = set() if plan is None else set(plan.runs)
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
