"""Sampler against sampler on the same tasks and repeats, and how often each is best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vardass.experiments.collect import Cell, DataResults
from vardass.experiments.labels import UNIFORM, Label, sampler_name
from vardass.experiments.statistics import Paired, holm, paired
from vardass.experiments.table import PValue, Row, Table, missing_table

__all__ = ["Comparison", "compare_samplers", "pairs_tables"]


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


def reference_of(label: Label, labels: tuple[Label, ...], sampler: str) -> Label | None:
    """The label with another sampler and the same settings (or none, where a sampler has no use for them)."""
    samplers = UNIFORM if sampler == "uniform" else (sampler,)
    for grid in (label.grid, ()):
        for name in samplers:
            candidate = Label(label.algorithm, name, grid)
            if candidate in labels:
                return candidate
    return None


def compare_samplers(results: Mapping[str, DataResults]) -> list[Comparison]:
    """Every sampler against uniform batches and against VaRDASS, paired by task and repeat.

    Holm's correction of the t test's p values is over all comparisons, those of ERM apart.
    """
    found: list[Comparison] = []
    for sampler in ("uniform", "vardass"):
        for data in results.values():
            for label in data.labels:
                reference = reference_of(label, data.labels, sampler)
                # uniform against VaRDASS would be VaRDASS against uniform once more
                skip = label.sampler in UNIFORM if sampler == "vardass" else label.sampler == "uniform"
                if reference is None or reference == label or skip:
                    continue
                result = paired(data.values(label), data.values(reference))
                found.append(Comparison(data.name, label, reference, result, len(data.tasks) * len(data.repeats)))
    adjusted: dict[int, float | None] = {}
    for ablation in (False, True):
        family = [place for place, one in enumerate(found) if one.ablation == ablation]
        adjusted |= dict(zip(family, holm([found[place].result.t_p for place in family])))
    return [
        Comparison(one.data, one.label, one.reference, one.result, one.expected, adjusted[place])
        for place, one in enumerate(found)
    ]


def pairs_tables(results: Mapping[str, DataResults]) -> list[Table]:
    """Paired differences with tests, and the number of cases in which each sampler is ahead or best."""
    title = "Pairs: difference in target accuracy (points) on the same tasks and repeats"
    comparisons = compare_samplers(results)
    if not comparisons:
        return [missing_table("pairs", title, "no sampler was run beside uniform batches or VaRDASS")]
    rows = []
    for one in comparisons:
        result = one.result
        name = f"{one.data}, {one.label.algorithm_name}: {one.label.row_name} − {sampler_name(one.reference.sampler)}"
        difference = Cell(
            None if result.mean is None else 100 * result.mean,
            None if result.stderr is None else 100 * result.stderr,
            result.pairs,
            one.expected,
        )
        counts = f"{result.wins} / {result.ties} / {result.losses}"
        block = 0 if one.reference.sampler in UNIFORM else 1
        entries = (difference, counts, _p(result.sign_p), _p(result.t_p), _p(one.holm_p))
        rows.append(Row(name, entries, block=block))
    columns = ("difference", "wins / ties / losses", "sign p", "t p", "Holm p")
    notes = [
        "two-sided exact sign test and paired t test over pairs of (task, repeat), which the tests take as "
        "independent; Holm's correction of the t test over all rows, those of ERM apart"
    ]
    if any(one.result.pairs < one.expected for one in comparisons):
        notes.append("(n/N): over n of N pairs, the others failed or are missing")
    table = Table("pairs", title, "Comparison", columns, tuple(rows), (2, 0, 0, 0, 0), notes=tuple(notes))
    return [table, *_wins_tables(results)]


def _p(p: float | None) -> PValue | None:
    return None if p is None else PValue(p)


def _wins_tables(results: Mapping[str, DataResults]) -> list[Table]:
    """In how many cases (data set and algorithm, without ERM) each sampler is ahead of another, and of all."""
    kinds: dict[tuple[object, ...], Label] = {}
    tally: dict[tuple[object, ...], list[list[int]]] = {}
    for data in results.values():
        for algorithm in dict.fromkeys(label.algorithm for label in data.labels if label.algorithm != "erm"):
            labels = tuple(label for label in data.labels if label.algorithm == algorithm)
            values = {label: found for label in labels if (found := data.values(label))}
            if len(values) < 2:
                continue
            shared = set.intersection(*(set(found) for found in values.values()))
            sums = {label: sum(found[key] for key in sorted(shared)) for label, found in values.items()}
            for label, found in values.items():
                kinds[label.row_order] = label
                counts = tally.setdefault(label.row_order, [[0, 0] for _ in range(3)])
                if shared:
                    counts[0] = [counts[0][0] + (sums[label] >= max(sums.values())), counts[0][1] + 1]
                for place, sampler in enumerate(("uniform", "vardass"), start=1):
                    reference = reference_of(label, labels, sampler)
                    if reference is None or reference == label or reference not in values:
                        continue
                    difference = paired(found, values[reference]).mean
                    if difference is not None:
                        counts[place] = [counts[place][0] + (difference > 0), counts[place][1] + 1]
    if not tally:
        return []
    rows = tuple(
        Row(kinds[key].row_name, tuple(f"{won} of {cases}" if cases else None for won, cases in tally[key]))
        for key in sorted(tally)
    )
    columns = ("best", "ahead of uniform", "ahead of VaRDASS")
    note = (
        "a case is a data set with an algorithm other than ERM; over the tasks and repeats that all compared ones have"
    )
    title = "Wins: cases in which a sampler has the highest mean"
    return [Table("wins", title, "Sampler", columns, rows, (0, 0, 0), notes=(note,))]
