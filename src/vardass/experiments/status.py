"""How far a sweep is, read from its folder while it runs or after it was killed."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vardass.errors import InputError
from vardass.experiments.locks import holder, is_locked
from vardass.experiments.store import (
    LOG_FILE,
    PLAN_FILE,
    PROGRESS_FILE,
    RUNS_FOLDER,
    read_json,
    run_label,
    scan,
)

__all__ = ["Failed", "Status", "UnderWay", "status"]

_LOG_END = 4096  # bytes of a log that its last line is looked for in


@dataclass(frozen=True)
class UnderWay:
    """A run that was begun; nobody works on it now unless ``active``."""

    run_id: str
    label: str
    step: int
    steps: int
    wall: float
    active: bool

    @property
    def share(self) -> float:
        """Of its steps that are done."""
        return self.step / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Failed:
    """A run that failed for good, and the last line of its log."""

    run_id: str
    label: str
    error: str
    log: str
    last_line: str


@dataclass(frozen=True)
class Status:
    """How far a sweep is.

    Attributes
    ----------
    total, finished, to_do : int
        Runs of the sweep, those that have finished, and those that nobody has begun.
    under_way : list of UnderWay
        Begun and not finished.
    failed : list of Failed
        Failed for good; starting the sweep again tries them anew.
    others : int
        Finished runs that are no longer part of the sweep.
    worker : str or None
        Process and machine that are at work on the sweep; None if nobody is.
    jobs : int
        Runs at a time.
    seconds_left : float or None
        Estimate from the mean time of finished runs; None as long as there is none.
    half_line : bool
        Whether a crash cut off the last record; starting the sweep again repairs it.
    """

    total: int
    finished: int
    to_do: int
    under_way: list[UnderWay]
    failed: list[Failed]
    others: int
    worker: str | None
    jobs: int
    seconds_left: float | None
    half_line: bool

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        found = asdict(self)
        for entry, run in zip(found["under_way"], self.under_way):
            entry["share"] = run.share
        return found


def status(folder: str | os.PathLike[str]) -> Status:
    """Look at a sweep without touching it.

    Raises
    ------
    InputError
        If there is no sweep in the folder.
    """
    place = Path(folder)
    plan = read_json(place / PLAN_FILE)
    if "runs" not in plan:
        raise InputError(f"{place} is not the folder of a sweep; name the one given to vardass sweep --out")
    names = set(plan["runs"])
    found = scan(place)
    records = {record.run_id: record for record in found.records}
    finished = {name for name, record in records.items() if record.status == "finished"}
    under_way = [run for run in _under_way(place / RUNS_FOLDER) if run.run_id in names - finished]
    begun = {run.run_id for run in under_way}
    failed = [
        Failed(name, run_label(record.spec), record.error or "", *_log(place / RUNS_FOLDER / name / LOG_FILE))
        for name, record in records.items()
        if name in names - finished - begun
    ]
    to_do = len(names) - len(names & finished) - len(begun) - len(failed)
    jobs = int(plan.get("jobs", 1))
    left = None
    if finished:
        mean = sum(records[name].wall for name in finished) / len(finished)
        left = mean * (to_do + sum(1 - run.share for run in under_way)) / jobs
    worker = None
    if is_locked(place):
        who = holder(place)
        worker = f"process {who.get('pid', 'unknown')} on {who.get('host', 'unknown')}"
    return Status(
        total=len(names),
        finished=len(names & finished),
        to_do=to_do,
        under_way=under_way,
        failed=failed,
        others=len(finished - names),
        worker=worker,
        jobs=jobs,
        seconds_left=left,
        half_line=bool(found.half_lines),
    )


def _under_way(runs: Path) -> list[UnderWay]:
    result = []
    for file in sorted(runs.glob(f"*/{PROGRESS_FILE}")):
        noted = read_json(file)
        if "steps" in noted:
            result.append(
                UnderWay(
                    run_id=file.parent.name,
                    label=str(noted["label"]),
                    step=int(noted["step"]),
                    steps=int(noted["steps"]),
                    wall=float(noted["wall"]),
                    active=is_locked(file.parent),
                )
            )
    return result


def _log(file: Path) -> tuple[str, str]:
    """The log's path and its last line."""
    try:
        with open(file, "rb") as opened:
            opened.seek(max(0, file.stat().st_size - _LOG_END))
            lines = opened.read().decode(errors="replace").split("\n")
    except OSError:
        return str(file), ""
    return str(file), next((line.strip() for line in reversed(lines) if line.strip()), "")
