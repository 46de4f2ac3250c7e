"""What a folder holds: the records of a sweep, or one run as a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vardass.errors import InputError
from vardass.files import read_json
from vardass.lab.averages import current_records, number
from vardass.lab.record import Record, RunSpec
from vardass.lab.store import record_files

__all__ = ["Found", "Unfinished", "read_folder"]

_REMEDY = "name the folder of a sweep (records.jsonl) or of a run (metrics.jsonl)"


@dataclass(frozen=True)
class Unfinished:
    """A run without a record: how far it came."""

    name: str
    step: int | None
    steps: int | None


@dataclass(frozen=True)
class Found:
    """What a page is made from."""

    folder: Path  # where it was found
    kind: str  # which of the two
    records: list[Record]  # finished and failed runs; of a single run the only one, whether it is finished or not
    unfinished: list[Unfinished]  # runs under way or interrupted
    planned: int | None = None  # runs of the whole sweep, where it says so
    specification: str | None = None  # text of ``sweep.yaml``
    written: datetime | None = None  # when the last result was written, UTC
    data: Mapping[str, Any] | None = None  # of a single run: ``data.json``
    result: Mapping[str, Any] = field(default_factory=dict)  # of a single run: ``result.json``
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # what ``vardass evaluate`` wrote there


def read_folder(folder: Path) -> Found:
    """Read a sweep's folder or a single run's."""
    if not folder.exists():
        raise InputError(f"no folder at {folder}; {_REMEDY}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; {_REMEDY}")
    files = record_files(folder) + sorted(folder.glob("runs/*/record.json"))
    if files or (folder / "sweep.yaml").is_file():
        return _read_sweep(folder, files)
    if (folder / "metrics.jsonl").is_file():
        return _read_run(folder)
    raise InputError(f"{folder} holds neither records.jsonl nor metrics.jsonl; {_REMEDY}")


def _read_sweep(folder: Path, files: list[Path]) -> Found:
    records = current_records(folder)[0] if files else []
    unfinished = _unfinished(folder / "runs", {record.run_id for record in records})
    if not records and not unfinished:
        raise InputError(f"{folder} has no record of a run yet; start the sweep, and make the page when runs are done")
    sweep = folder / "sweep.yaml"
    text = sweep.read_text(encoding="utf-8", errors="replace") if sweep.is_file() else None
    plan = read_json(folder / "plan.json").get("runs")
    planned = len(plan) if isinstance(plan, list) else None
    return Found(folder, "sweep", records, unfinished, planned, text, _latest(files))


def _unfinished(runs: Path, known: set[str]) -> list[Unfinished]:
    found = []
    for run in sorted(runs.glob("*/")) if runs.is_dir() else []:
        if run.name in known or (run / "record.json").is_file():
            continue
        noted = read_json(run / "progress.json")
        step, steps = number(noted.get("step")), number(noted.get("steps"))
        name = str(noted.get("label") or f"run {run.name}")
        found.append(Unfinished(name, None if step is None else int(step), None if steps is None else int(steps)))
    return found


def _read_run(folder: Path) -> Found:
    config = read_json(folder / "config.json")
    if not config:
        raise InputError(f"{folder / 'config.json'} is missing or damaged; {_REMEDY}")
    lines = _lines(folder / "metrics.jsonl")
    if not lines:
        raise InputError(f"{folder / 'metrics.jsonl'} has no evaluation yet; make the page when the run has gone on")
    data = read_json(folder / "data.json")
    step, steps = number(lines[-1].get("step")) or 0, number(config.get("steps")) or 0
    chosen = [line for line in lines if line.get("step") == lines[-1].get("best_step")] or lines[-1:]
    score = "r2" if config.get("regression") else "accuracy"  # shown in its place, under its own name
    ended = read_json(folder / "result.json")
    result = {
        "source_accuracy": chosen[-1].get(f"source_{score}"),
        "score": chosen[-1].get("score"),
        "mmd2": chosen[-1].get("mmd"),
        "selected_step": lines[-1].get("best_step"),
        "target_accuracy": ended.get(f"target_{score}"),
    }
    spent = lines[-1].get("seconds")
    seconds = {str(part): number(value) or 0.0 for part, value in spent.items()} if isinstance(spent, dict) else {}
    spec = RunSpec(
        dataset=str(data.get("dataset") or "own data"),
        data_name=str(data.get("dataset") or Path(str(data.get("target") or folder.name)).stem),
        task=str(data.get("task") or _own_task(data)),
        config=config,
        cell={"algorithm": str(config.get("algorithm", "")), "sampler": str(config.get("sampler", ""))},
    )
    record = Record(
        spec=spec, status="finished", result=result, curve=lines, seconds=seconds, wall=sum(seconds.values())
    )
    unfinished = [Unfinished(folder.name, int(step), int(steps))] if step < steps else []
    evaluation: dict[str, Any] = {}
    for file in (folder / "evaluation.json", *sorted(folder.glob("*/evaluation.json"))):
        evaluation = evaluation or read_json(file)
    written = _latest([folder / "metrics.jsonl"])
    more: dict[str, Any] = {"written": written, "data": data, "result": ended, "evaluation": evaluation}
    return Found(folder, "run", [record], unfinished, **more)


def _own_task(data: Mapping[str, Any]) -> str:
    sources = data.get("sources")
    names = [Path(str(source)).stem for source in sources] if isinstance(sources, list) else []
    return f"{'+'.join(names)}->{Path(str(data.get('target'))).stem}" if names else ""


def _lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a file with one on each line; what is not whole is left out."""
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def _latest(files: list[Path]) -> datetime | None:
    times = [file.stat().st_mtime for file in files if file.is_file()]
    return datetime.fromtimestamp(max(times), UTC) if times else None
