"""What a page shows, as plain values; `vardass.experiments.page.html` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vardass.experiments.collect import collect
from vardass.experiments.labels import Label, sampler_name
from vardass.experiments.page.curves import MOST_CURVES, MOST_POINTS, curve_content, mean_seconds
from vardass.experiments.page.reading import Found, Unfinished
from vardass.experiments.page.summary import SummaryRow, TaskTable, by_task, summarise
from vardass.experiments.record import Record

__all__ = ["PageContent", "Setting", "page_content"]

_MOST_FAILURES = 200
_MOST_VALUES = 8  # of one setting that are listed
_LONGEST = 400  # characters of an error


@dataclass(frozen=True)
class Setting:
    """A setting, or a fact about a machine, over all runs."""

    name: str
    values: str
    same: bool


@dataclass(frozen=True)
class PageContent:
    """Everything on a page.

    Attributes
    ----------
    title, subtitle : str
        Headline.
    facts : list of (str, str)
        Names and values beside it.
    grid : list of str
        Settings that are compared, apart from algorithm and sampler: further columns.
    rows : list of SummaryRow
        The summary table.
    tasks : list of TaskTable
        Accuracy task by task.
    failures : list of (str, ...)
        Data, task, algorithm, sampler, repeat, search and error of a run that failed; what is known of a run that is
        not finished, and how far it is.
    failures_left_out : int
        How many more there are.
    curves : dict
        See `curve_content`.
    seconds : list of dict
        See `mean_seconds`.
    settings, environment, data : list of Setting
        Of all runs; the data only of a single run.
    specification : str or None
        Text of the sweep's specification.
    notes : dict of str to str
        What a reader has to know, by section.
    strata : dict or None
        See `strata_content`.
    """

    title: str
    subtitle: str
    facts: list[tuple[str, str]]
    grid: list[str]
    rows: list[SummaryRow]
    tasks: list[TaskTable]
    failures: list[tuple[str, ...]]
    failures_left_out: int
    curves: dict[str, Any]
    seconds: list[dict[str, Any]]
    settings: list[Setting]
    environment: list[Setting]
    data: list[Setting]
    specification: str | None
    notes: dict[str, str]
    strata: dict[str, Any] | None = None


def page_content(found: Found, *, strata: dict[str, Any] | None = None, now: datetime | None = None) -> PageContent:
    """Put a page together.

    Parameters
    ----------
    found : Found
        See `read_folder`.
    strata : dict, optional
        See `strata_content`; None leaves the picture out.
    now : datetime, optional
        When the page is made.
    """
    records = found.records
    results = collect(records)
    curves = curve_content(results)
    failures = [_failure(record) for record in records if record.status != "finished"]
    failures += [_unfinished(entry) for entry in found.unfinished]
    return PageContent(
        title=_title(found),
        subtitle=_subtitle(found),
        facts=_facts(found, now or datetime.now(UTC)),
        grid=_grid(records),
        rows=summarise(results, records),
        tasks=by_task(results),
        failures=failures[:_MOST_FAILURES],
        failures_left_out=max(0, len(failures) - _MOST_FAILURES),
        curves=curves,
        seconds=mean_seconds(results),
        settings=_settings([record.spec.config for record in records]),
        environment=_settings([{"vardass": record.version, **record.environment} for record in records]),
        data=_settings([{name: value for name, value in (found.data or {}).items() if name != "scale"}]),
        specification=found.specification,
        notes={"summary": _summary_note(found), "curves": _curves_note(found, curves)},
        strata=strata,
    )


def _title(found: Found) -> str:
    if found.kind == "run":
        spec = found.records[0].spec
        return f"{spec.data_name}: {spec.task}" if spec.task else spec.data_name
    for line in (found.specification or "").splitlines():
        if line.startswith("name:"):
            return line.partition(":")[2].partition(" #")[0].strip().strip("\"'") or found.folder.resolve().name
    return found.folder.resolve().name


def _subtitle(found: Found) -> str:
    specs = [record.spec for record in found.records]
    if found.kind == "run":
        cell = Label.of(specs[0])
        return f"One run: {cell.algorithm_name} with {sampler_name(cell.sampler)} batches"
    data = list(dict.fromkeys(spec.data_name for spec in specs))
    counts = [
        _count(data, "data set"),
        _count({(spec.data_name, spec.task) for spec in specs}, "task"),
        _count({str(spec.cell.get("algorithm")) for spec in specs}, "algorithm"),
        _count({str(spec.cell.get("sampler")) for spec in specs}, "sampler"),
        _count({spec.repeat for spec in specs}, "repeat"),
    ]
    searches = {spec.search for spec in specs}
    if len(searches) > 1:
        counts.append(f"{len(searches)} draws of hyper-parameters")
    return ", ".join(counts) if specs else "No run has ended yet"


def _count(values: Iterable[Any], name: str) -> str:
    count = len(list(values))
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _facts(found: Found, now: datetime) -> list[tuple[str, str]]:
    if found.kind == "run":
        facts = [("state", _where(found.unfinished[0]) if found.unfinished else "finished")]
    else:
        statuses = [record.status for record in found.records]
        facts = [(status, f"{statuses.count(status):,}") for status in ("finished", "failed")]
        if found.unfinished:
            facts.append(("under way or interrupted", f"{len(found.unfinished):,}"))
        if found.planned is not None:
            facts.append(("planned", f"{found.planned:,}"))
    wall = sum(record.wall for record in found.records)
    facts.append(("time" if found.kind == "run" else "time of all runs", duration(wall)))
    if found.written is not None:
        facts.append(("last result", f"{found.written:%Y-%m-%d %H:%M} UTC"))
    facts.append(("page made", f"{now:%Y-%m-%d %H:%M} UTC"))
    return facts


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"


def _grid(records: Sequence[Record]) -> list[str]:
    found: dict[str, None] = {}
    for record in records:
        found |= dict.fromkeys(str(name) for name in record.spec.cell if name not in ("algorithm", "sampler"))
    return list(found)


def _failure(record: Record) -> tuple[str, ...]:
    spec, label = record.spec, Label.of(record.spec)
    tries = f" (started {record.attempts} times)" if record.attempts > 1 else ""
    what = _cut(record.error or "no message") + tries
    return spec.data_name, spec.task, label.algorithm_name, label.row_name, str(spec.repeat), str(spec.search), what


def _unfinished(entry: Unfinished) -> tuple[str, ...]:
    return _cut(entry.name), f"under way or interrupted, {_where(entry)}"


def _where(entry: Unfinished) -> str:
    if entry.step is None:
        return "before its first evaluation"
    return f"at step {entry.step:,}" + ("" if entry.steps is None else f" of {entry.steps:,}")


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _settings(found: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Each name with its values in the runs, those that differ first."""
    values: dict[str, dict[str, int]] = {}
    for one in found:
        for name, value in one.items():
            text = value if isinstance(value, str) else _plain(value)
            counts = values.setdefault(str(name), {})
            counts[text] = counts.get(text, 0) + 1
    settings = []
    for name, counts in values.items():
        same = len(counts) == 1
        texts = list(counts) if same else sorted(counts, key=_order)
        listed = ", ".join(_cut(text) for text in texts[:_MOST_VALUES])
        if len(texts) > _MOST_VALUES:
            listed = f"{len(texts):,} values, from {_cut(texts[0])} to {_cut(texts[-1])}"
        settings.append(Setting(name, listed, same))
    return sorted(settings, key=lambda setting: setting.same)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value, sort_keys=True, default=str)


def _order(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _summary_note(found: Found) -> str:
    if found.kind == "run":
        by = "No other number uses target labels."
        if found.records[0].spec.config.get("selection") == "oracle":
            by = "The model was chosen by target labels (oracle): for comparison only."
        return f"Accuracy on the target as the run's report has it. {by}"
    return (
        "Of each search the run with the best score counts; scores do not look at target labels unless the selection "
        "is oracle. Accuracy is the mean over tasks, then over repeats, ± the standard error over repeats. The gain is "
        "over uniform batches in the same repeat. Other columns are means over the chosen runs."
    )


def _curves_note(found: Found, curves: Mapping[str, Any]) -> str:
    parts = []
    if found.kind == "sweep":
        kept, chosen = len(curves["series"]), curves["chosen"]
        parts.append(
            f"Curves of the best run of each task, cell and repeat: {kept:,} of {len(found.records):,} runs are in "
            "this page."
        )
        if chosen > kept:
            parts.append(f"Of {chosen:,} such runs the first {MOST_CURVES:,} by repeat were taken.")
        parts.append("Lines are means over these runs; the shade goes from the smallest to the largest.")
    if curves["thinned"]:
        parts.append(f"Longer curves are thinned to {MOST_POINTS} points.")
    if curves["score_is_source_accuracy"]:
        parts.append("The score that chooses the model is the source accuracy.")
    return " ".join(parts)
