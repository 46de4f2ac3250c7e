"""What a page shows, as values for its template."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from vardass.lab.averages import POINTS, UNIFORM, DataResults, Label, collect, number
from vardass.lab.page.folder import Found
from vardass.lab.record import Record
from vardass.lab.tables import PARTS, compare_samplers
from vardass.table import Average, entry_mean

__all__ = ["MOST_CURVES", "MOST_POINTS", "duration", "page_content", "short"]

_MOST_FAILURES = 200
_MOST_CLASSES = 40  # of a confusion matrix
_MOST_VALUES = 8  # of one setting that are listed
_LONGEST = 400  # characters of an error
MOST_POINTS = 60  # of a curve
MOST_CURVES = 600
_CURVES = {
    "loss/total": "Training loss",
    "source_accuracy": "Source accuracy, held out",
    "source_r2": "Source R², held out",
    "source_rmse": "Source error (RMSE), held out",
    "score": "Score that chooses the model",
    "mmd": "MMD² of held-out features",
}
_VARIANCES = ("source/variance", "source/uniform_variance")
_COLOURS, _DASHES = 10, 4  # in page.css
_MEANS = {"source_accuracy": 100.0, "mmd2": 1.0, "coral": 1.0, "wall": 1.0}  # of the chosen runs, with their scale


def page_content(found: Found) -> dict[str, Any]:
    """Everything on a page, by the names that ``page.html`` has for it."""
    records = found.records
    results = collect(records)
    curves, seconds, gains = curve_content(results), mean_seconds(results), _gains(results)
    failures: list[tuple[Any, str]] = [_failure(record) for record in records if record.status != "finished"]
    failures += [(_cut(name), f"under way or interrupted, {where}") for name, where in found.unfinished]
    rows = [row for data in results.values() for row in _summary(data)]
    return {
        "title": _title(found),
        "subtitle": _subtitle(found),
        "facts": _facts(found),
        "grid": list(dict.fromkeys(name for row in rows for name, _ in row["label"].grid)),
        "rows": rows,
        "score_name": "R²" if _is_regression(found) else "accuracy",
        "measured": {name for row in rows for name in ("gain", *_MEANS) if entry_mean(row[name]) is not None},
        "tasks": [_by_task(data) for data in results.values() if len(data.tasks) > 1],
        "confusion": _confusion(found),
        "evaluated_classes": len(found.evaluation.get("overall", {}).get("classes", {})),
        "predicted": found.result.get("predicted") if not _is_regression(found) else None,
        "failures": failures[:_MOST_FAILURES],
        "failures_left_out": max(0, len(failures) - _MOST_FAILURES),
        "gained": bool(gains),
        "trained": bool(curves["series"] or seconds),
        "settings": _settings([record.spec.config for record in records]),
        "environment": _settings([{"vardass": record.version, **record.environment} for record in records]),
        "about_data": _settings([{name: value for name, value in found.data.items() if name != "scale"}]),
        "specification": found.specification,
        "kind": found.kind,
        "oracle": any(record.spec.config.get("selection") == "oracle" for record in records),
        "runs": len(records),
        "most": {"curves": MOST_CURVES, "points": MOST_POINTS},
        "data": {"curves": curves, "gains": gains, "margin": POINTS, "seconds": seconds, "parts": PARTS},
    }


def _summary(data: DataResults) -> list[dict[str, Any]]:
    """One row for each cell of a data set; numbers that were not measured are None."""
    means = data.chosen.groupby("label")[list(_MEANS)].mean()
    best = set().union(*map(data.best, {label.algorithm for label in data.labels}))
    rows = []
    for label in data.labels:
        accuracy = data.average(label, scale=100)
        reference = data.reference(label, "uniform")
        gain = None if reference is None or reference == label else data.gain(label, reference)
        row: dict[str, Any] = {
            "data": data.name,
            "label": label,
            "accuracy": accuracy,
            "gain": Average(None, None, 0, 0) if gain is None else gain.average,
            "best": label in best,
            "finished": accuracy.runs,
            "failed": accuracy.failed,
            "expected": accuracy.expected_runs,
        }
        for name, scale in _MEANS.items():
            mean = float(means[name].get(label, math.nan))
            row[name] = None if math.isnan(mean) else scale * mean
        rows.append(row)
    return rows


def _gains(results: Mapping[str, DataResults]) -> list[dict[str, Any]]:
    """Gains over uniform batches with their intervals, for the picture of them."""
    places = sampler_places(results)
    rows = []
    for one in compare_samplers(results, ["uniform"]):
        cell, result = one.gain.average, one.gain.result
        if cell.mean is not None:
            numbers = {"mean": cell.mean, "stderr": cell.stderr, "low": result.low, "high": result.high}
            rows.append(
                {
                    "data": one.data,
                    "algorithm": one.label.algorithm_name,
                    "label": one.label.row_name,
                    "reference": one.reference.row_name,
                    "colour": colour_of(places[one.label.sampler]),
                    "mark": "" if one.gain.whole else cell.mark or "(incomplete)",
                    "shown": one.verdict(f"within {POINTS:g} point"),
                    **{name: short(value) for name, value in numbers.items()},
                }
            )
    return rows


def _by_task(data: DataResults) -> dict[str, Any]:
    """Target accuracy of each cell in each task, mean and standard error over repeats."""
    rows = [(label, [data.average(label, task=task, scale=100) for task in data.tasks]) for label in data.labels]
    return {"data": data.name, "tasks": data.tasks, "rows": rows}


def _confusion(found: Found) -> dict[str, Any] | None:
    """Names of the classes and samples of class i that were taken for j, if the run was evaluated into its folder."""
    overall = found.evaluation.get("overall", {})
    names, counts = list(overall.get("classes", {})), overall.get("confusion", [])
    whole = 0 < len(names) <= _MOST_CLASSES and len(counts) == len(names)
    return {"names": names, "rows": list(zip(names, counts))} if whole else None


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
        return f"One run: {cell.algorithm_name} with {cell.sampler_name} batches"
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


def _facts(found: Found) -> list[tuple[str, str]]:
    if found.kind == "run":
        facts = [("state", found.unfinished[0][1] if found.unfinished else "finished")]
        run = found.records[0]
        step, rule = number(run.result.get("selected_step")), run.spec.config.get("selection")
        if step is not None:
            facts.append(("chosen model", f"step {step:,.0f}" + (f", by {rule}" if rule else "")))
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
    facts.append(("page made", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"))
    return facts


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"


def _failure(record: Record) -> tuple[tuple[str, ...], str]:
    spec, label = record.spec, Label.of(record.spec)
    where = spec.data_name, spec.task, label.algorithm_name, label.row_name, str(spec.repeat), str(spec.search)
    tries = f" (started {record.attempts} times)" if record.attempts > 1 else ""
    return where, _cut(record.error or "no message") + tries


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _settings(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each name with its values in the runs, those that differ first; without those that say nothing."""
    values: dict[str, dict[str, None]] = {}
    for one in found:
        for name, value in one.items():
            values.setdefault(str(name), {})[value if isinstance(value, str) else _plain(value)] = None
    settings = []
    for name, texts in values.items():
        listed = ", ".join(map(_cut, sorted(texts, key=_order)))
        if len(texts) > _MOST_VALUES:
            first, *_, last = sorted(texts, key=_order)
            listed = f"{len(texts):,} values, from {_cut(first)} to {_cut(last)}"
        if listed not in ("", "null"):
            settings.append({"name": name, "values": listed, "same": len(texts) == 1})
    return sorted(settings, key=lambda setting: setting["same"])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value, sort_keys=True, default=str)


def _order(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _is_regression(found: Found) -> bool:
    return any(record.spec.config.get("regression") for record in found.records)


# --- curves and seconds ---


def curve_content(results: Mapping[str, DataResults]) -> dict[str, Any]:
    """Curves of the chosen run of each data set, task, cell and repeat, as JSON.

    At most `MOST_CURVES` of at most `MOST_POINTS` points: the first repeats of everything come before later ones.
    """
    chosen = [
        (label, record)
        for data in results.values()
        for label, record in zip(data.chosen["label"], data.chosen["record"])
        if record.curve
    ]
    chosen.sort(key=lambda entry: entry[1].spec.repeat)
    kept = chosen[:MOST_CURVES]
    labels = sorted({label for label, _ in kept})
    series = [_series(record, labels.index(label)) for label, record in kept]
    metrics = dict(_CURVES)
    if any(record.spec.config.get("selection") == "oracle" for _, record in kept):
        metrics["score"] += " (by target labels)"
    columns = [one["values"] for one in series]
    same = all(each.get("score") == each.get("source_r2", each.get("source_accuracy")) for each in columns)
    if same:
        del metrics["score"]
    present = {name for one in series for name in one["values"]}
    return {
        "cells": _drawn_cells(labels, sampler_places(results)),
        "metrics": [{"key": key, "title": title} for key, title in metrics.items() if key in present],
        "series": series,
        "varied": any(_VARIANCES[0] in one["values"] for one in series),
        "chosen": len(chosen),
        "thinned": sum(len(record.curve) > MOST_POINTS for _, record in kept),
        "score_is_source_accuracy": same and "source_accuracy" in present,
    }


def mean_seconds(results: Mapping[str, DataResults]) -> list[dict[str, Any]]:
    """Mean seconds of each part for each data set and cell, over the chosen runs."""
    rows = []
    for name, data in results.items():
        timed = [(label, record.seconds) for label, record in zip(data.chosen["label"], data.chosen["record"])]
        for label in data.labels:
            own = [seconds for one, seconds in timed if one == label and seconds]
            if own:
                parts = pd.DataFrame(own, columns=PARTS).fillna(0.0).mean()
                names = {"data": name, "algorithm": label.algorithm_name, "label": label.row_name}
                rows.append({**names, "parts": [short(value) for value in parts]})
    return rows


def short(value: float | None) -> float | None:
    """Four digits: more cannot be seen in a picture."""
    return None if value is None else float(f"{value:.4g}")


def sampler_places(results: Mapping[str, DataResults]) -> dict[str, int]:
    """Number of each sampler, for its colour on the whole page; what the others are compared with has 0, a grey."""
    rows = sorted({label.under("") for data in results.values() for label in data.labels})
    samplers = list(dict.fromkeys(label.sampler for label in rows))
    baseline = next((name for name in UNIFORM if name in samplers), None)
    others = [name for name in samplers if name != baseline]
    return {name: 1 + place for place, name in enumerate(others)} | ({} if baseline is None else {baseline: 0})


def colour_of(place: int) -> int:
    """Of ``page.css``, by the number of a sampler."""
    return 1 + (place - 1) % (_COLOURS - 1) if place else 0


def _drawn_cells(labels: Sequence[Label], places: Mapping[str, int]) -> list[dict[str, Any]]:
    """Name, colour and dashes: a sampler has one colour, settings differ in dashes."""
    grids = list(dict.fromkeys(label.grid for label in labels))
    drawn = []
    for label in labels:
        place = places[label.sampler]
        drawn.append(
            {
                "algorithm": label.algorithm_name,
                "sampler": label.sampler_name,
                "label": label.row_name,
                "colour": colour_of(place),
                "dash": (grids.index(label.grid) + max(0, place - 1) // (_COLOURS - 1)) % _DASHES,
            }
        )
    return drawn


def _series(record: Record, cell: int) -> dict[str, Any]:
    lines = [line for line in record.curve if isinstance(line, dict) and number(line.get("step")) is not None]
    lines = _thinned(lines)
    values = {}
    for name in (*_CURVES, *_VARIANCES):
        if name == "score" and record.spec.config.get("selection") == "last":  # the number of the step
            continue
        column = [short(number(line.get(name))) for line in lines]
        if any(value is not None for value in column):
            values[name] = column
    return {
        "data": record.spec.data_name,
        "task": record.spec.task,
        "cell": cell,
        "id": record.run_id,
        "repeat": record.spec.repeat,
        "search": record.spec.search,
        "steps": [int(line["step"]) for line in lines],
        "values": values,
    }


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `MOST_POINTS`, evenly spaced, with the first and the last."""
    if len(lines) <= MOST_POINTS:
        return lines
    return [lines[round(place * (len(lines) - 1) / (MOST_POINTS - 1))] for place in range(MOST_POINTS)]
