"""Curves and times of the chosen runs, small enough to be part of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vardass.lab.averages import UNIFORM, DataResults, Label, number
from vardass.lab.record import Record

__all__ = [
    "MOST_CURVES",
    "MOST_POINTS",
    "PARTS",
    "colour_of",
    "curve_content",
    "mean_seconds",
    "sampler_places",
    "short",
]

MOST_POINTS = 60  # of a curve
MOST_CURVES = 600
PARTS = ("training", "features", "solver", "drawing", "evaluation", "saving")
_METRICS = {
    "loss/total": "Training loss",
    "source_accuracy": "Source accuracy, held out",
    "source_r2": "Source R², held out",
    "source_rmse": "Source error (RMSE), held out",
    "score": "Score that chooses the model",
    "mmd": "MMD² of held-out features",
}
_VARIANCES = ("source/variance", "source/uniform_variance")
_COLOURS, _DASHES = 10, 4  # in page.css


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
    metrics = dict(_METRICS)
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
        "chosen": len(chosen),
        "thinned": sum(len(record.curve) > MOST_POINTS for _, record in kept),
        "score_is_source_accuracy": same and "source_accuracy" in present,
    }


def mean_seconds(results: Mapping[str, DataResults]) -> list[dict[str, Any]]:
    """Mean seconds of each part for each data set and cell, over the chosen runs."""
    rows = []
    for name, data in results.items():
        members: dict[Label, list[Record]] = {label: [] for label in data.labels}
        for label, record in zip(data.chosen["label"], data.chosen["record"]):
            if record.seconds:
                members[label].append(record)
        for label, own in members.items():
            if own:
                parts = [sum(number(one.seconds.get(part)) or 0.0 for one in own) / len(own) for part in PARTS]
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
    for name in (*_METRICS, *_VARIANCES):
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
    """At most `MOST_POINTS`, evenly, with the first and the last."""
    if len(lines) <= MOST_POINTS:
        return lines
    return [lines[round(place * (len(lines) - 1) / (MOST_POINTS - 1))] for place in range(MOST_POINTS)]
