"""What a folder holds: the records of a sweep, or one run as a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from vardass.adapt.run_folder import METRICS_FILE
from vardass.errors import InputError
from vardass.files import parse_json, read_json
from vardass.lab.averages import current_records
from vardass.lab.record import Record, RunSpec, Seconds
from vardass.lab.store import RECORD_FILE, RUNS_FOLDER, SWEEP_FILE, read_plan, record_files, whole_lines
from vardass.lab.sweep import under_way
from vardass.lab.yaml_file import at, check_content

__all__ = ["Found", "read_folder"]

_REMEDY = "name the folder of a sweep (records.jsonl) or of a run (metrics.jsonl)"


class _File(BaseModel):
    """What a page counts on in a file of a single run; all else in it is only listed."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def content(cls, found: Any) -> dict[str, Any]:
        return cls.model_validate(found).model_dump(exclude_unset=True)

    @classmethod
    def read(cls, file: Path) -> dict[str, Any]:
        with at(str(file)):
            return check_content(cls.content, read_json(file))


class _Config(_File):
    steps: NonNegativeInt = 0


class _Line(_File):
    step: NonNegativeInt
    best_step: NonNegativeInt | None = None
    seconds: dict[str, Seconds] = {}


class _Data(_File):
    sources: list[Any] | None = None


class _Result(_File):
    predicted: dict[str, Any] | None = None


class _Overall(_File):
    classes: dict[str, Any] = {}
    confusion: list[list[int]] = []


class _Evaluation(_File):
    overall: _Overall = _Overall()


@dataclass(frozen=True)
class Found:
    """What a page is made from."""

    folder: Path  # where it was found
    kind: str  # "sweep" or "run"
    records: list[Record]  # finished and failed runs; of a single run the only one, whether it is finished or not
    unfinished: list[tuple[str, str]]  # runs under way or interrupted, and how far they are
    written: datetime | None  # when the last result was written, UTC
    planned: int | None = None  # runs of the whole sweep, where it says so
    specification: str | None = None  # text of ``sweep.yaml``
    data: Mapping[str, Any] = field(default_factory=dict)  # of a single run: ``data.json``
    result: Mapping[str, Any] = field(default_factory=dict)  # of a single run: ``result.json``
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # what ``vardass evaluate`` wrote there


def read_folder(folder: Path) -> Found:
    """Read a sweep's folder or a single run's."""
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; {_REMEDY}" if folder.exists() else f"no folder at {folder}; {_REMEDY}")
    files = record_files(folder) + sorted(folder.glob(f"{RUNS_FOLDER}/*/{RECORD_FILE}"))
    if files or (folder / SWEEP_FILE).is_file():
        return _read_sweep(folder, files)
    if (folder / METRICS_FILE).is_file():
        return _read_run(folder)
    raise InputError(f"{folder} holds neither records.jsonl nor metrics.jsonl; {_REMEDY}")


def _read_sweep(folder: Path, files: Sequence[Path]) -> Found:
    records = current_records(folder)[0] if files else []
    known = {record.run_id for record in records}
    begun = [run for run in under_way(folder / RUNS_FOLDER) if run.run_id not in known]
    if not records and not begun:
        raise InputError(f"{folder} has no record of a run yet; start the sweep, and make the page once runs are done")
    sweep = folder / SWEEP_FILE
    text = sweep.read_text(encoding="utf-8", errors="replace") if sweep.is_file() else None
    plan = read_plan(folder)
    unfinished = [(run.label, _where(run.step, run.steps)) for run in begun]
    return Found(folder, "sweep", records, unfinished, _latest(files), None if plan is None else len(plan.runs), text)


def _read_run(folder: Path) -> Found:
    config = _Config.read(folder / "config.json")
    if not config:
        raise InputError(f"{folder / 'config.json'} is missing or damaged; {_REMEDY}")
    lines = []
    for number, line in enumerate(whole_lines(folder / METRICS_FILE)[0], 1):
        with at(f"{folder / METRICS_FILE}, line {number}"):
            lines += [check_content(_Line.content, parse_json(line))] if line else []
    if not lines:
        raise InputError(f"{folder / METRICS_FILE} has no evaluation yet; make the page after the first evaluation")
    data, ended, last = _Data.read(folder / "data.json"), _Result.read(folder / "result.json"), lines[-1]
    chosen = next((line for line in reversed(lines) if line["step"] == last.get("best_step")), last)
    score = "r2" if config.get("regression") else "accuracy"  # shown in its place, under its own name
    result = {
        "source_accuracy": chosen.get(f"source_{score}"),
        "score": chosen.get("score"),
        "mmd2": chosen.get("mmd"),
        "selected_step": last.get("best_step"),
        "target_accuracy": ended.get(f"target_{score}"),
    }
    seconds = last.get("seconds", {})
    sources = "+".join(Path(str(source)).stem for source in data.get("sources") or ())
    target = Path(str(data.get("target") or folder.name)).stem
    spec = RunSpec(
        dataset=str(data.get("dataset") or "own data"),
        data_name=str(data.get("dataset") or target),
        task=str(data.get("task") or (f"{sources}->{target}" if sources else "")),
        config=config,
        cell={"algorithm": str(config.get("algorithm", "")), "sampler": str(config.get("sampler", ""))},
    )
    record = Record(spec, "finished", result, lines, seconds, sum(seconds.values()))
    step, steps = last["step"], config.get("steps", 0)
    unfinished = [(folder.name, _where(step, steps))] if step < steps else []
    found = map(_Evaluation.read, (folder / "evaluation.json", *sorted(folder.glob("*/evaluation.json"))))
    evaluation = next(filter(None, found), {})
    written = _latest([folder / METRICS_FILE])
    return Found(folder, "run", [record], unfinished, written, data=data, result=ended, evaluation=evaluation)


def _where(step: int, steps: int) -> str:
    return f"at step {step:,} of {steps:,}"


def _latest(files: Sequence[Path]) -> datetime | None:
    times = [file.stat().st_mtime for file in files]
    return datetime.fromtimestamp(max(times), UTC) if times else None
