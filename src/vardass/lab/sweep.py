"""A sweep: executes all its runs, each once, despite interruptions; estimates its time and shows its progress."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import vardass
from vardass.errors import InputError
from vardass.files import holder_name, is_locked
from vardass.lab.engines import ENGINES, Attempt, AttemptResult
from vardass.lab.record import Record, RunSpec, versions
from vardass.lab.store import (
    LOG_FILE,
    PROGRESS_FILE,
    RECORDS_FILE,
    RUNS_FOLDER,
    SweepStore,
    read_plan,
    read_progress,
    read_records,
    run_label,
    whole_lines,
)
from vardass.processes import count_workers
from vardass.validate import Progress, check_count

__all__ = [
    "Failed",
    "Progress",
    "Status",
    "SweepResult",
    "UnderWay",
    "estimate_seconds",
    "run_sweep",
    "status",
    "under_way",
]


@dataclass(frozen=True)
class SweepResult:
    """How a sweep ended."""

    total: int  # runs of the sweep, those that have finished, and those that have failed for good
    finished: int
    failed: int
    before: int  # how many had finished when the sweep was started
    others: int  # finished runs in the folder that are not part of the sweep, as its specification was changed
    interrupted: bool  # whether Ctrl-C stopped it
    seconds: float  # since it was started


def run_sweep(
    runs: Sequence[RunSpec],
    folder: str | os.PathLike[str],
    *,
    engine: str = "local",
    jobs: int | None = None,
    retry: int = 1,
    progress: Progress | None = None,
    text: str | None = None,
) -> SweepResult:
    """Execute all runs that have not finished yet, and write their records to ``folder``.

    It may be killed at any moment and started again with the same or more runs: unfinished ones resume from their
    checkpoints, and failed ones are tried again.

    Parameters
    ----------
    runs : sequence of RunSpec
        A run that occurs twice is executed once.
    folder : path
        Folder for this sweep only; created if missing. See ``vardass.lab.store``.
    engine : {"local", "ray"}
        Where to run.
    jobs : int, optional
        Runs at a time; by default, and at most, one for each CPU.
    retry : int
        How often a failed run is retried before it is recorded as failed; crashes of workers do not count.
    progress : callable, optional
        ``progress(share_done, message)`` about once a second.
    text : str, optional
        Specification, kept in ``sweep.yaml``.

    Raises
    ------
    InputError
        If another sweep runs in the folder, it is not writable, or the disk is full; records stay safe.
    """
    if jobs is not None:
        check_count(jobs, "jobs")
    check_count(retry, "retry", low=0)
    run_all = ENGINES.find(engine)
    specs = {spec.run_id: spec for spec in runs}
    if not specs:
        raise InputError("the sweep has 0 runs; name at least one algorithm, sampler and task")
    clock = time.monotonic()
    interrupted = False
    with SweepStore.open(folder) as store:
        store.write_plan(list(specs), jobs=count_workers(jobs), text=text)
        failed = {name: (record.attempts + 1, record.wall) for name, record in store.done.items()}
        todo = [Attempt(spec, *failed.get(name, ())) for name, spec in specs.items() if not store.is_finished(name)]
        last = {attempt.spec.run_id: attempt.number + retry for attempt in todo}
        before, ended = len(specs) - len(todo), Counter[str]()

        def on_done(attempt: Attempt, outcome: AttemptResult) -> Attempt | None:
            if outcome.kind == "failed" and attempt.number < last[attempt.spec.run_id]:
                return Attempt(attempt.spec, attempt.number + 1, outcome.wall)
            store.add(_ended_record(attempt, outcome, store))
            ended[outcome.kind] += 1
            return None

        def tick() -> None:
            if progress is not None:
                done = before + ended.total()
                lost = f", {ended['failed']} failed" if ended["failed"] else ""
                progress(done / len(specs), f"{done} of {len(specs)} runs{lost}")

        tick()
        try:
            if todo:
                run_all(todo, store.path / RUNS_FOLDER, jobs=jobs, on_done=on_done, tick=tick)
        except KeyboardInterrupt:
            interrupted = True
        finished = {name for name in store.done if store.is_finished(name)}
    return SweepResult(
        total=len(specs),
        finished=len(finished & set(specs)),
        failed=ended["failed"],
        before=before,
        others=len(finished - set(specs)),
        interrupted=interrupted,
        seconds=time.monotonic() - clock,
    )


def _ended_record(attempt: Attempt, outcome: AttemptResult, store: SweepStore) -> Record:
    if outcome.kind == "disk-full":
        raise InputError(
            f"the disk is full: {outcome.message}; all {len(store.done)} records in {store.path} are safe; make room "
            "and start the sweep again to resume"
        )
    if outcome.record is not None:
        return outcome.record
    return Record(
        attempt.spec,
        "failed",
        wall=outcome.wall,
        attempts=attempt.number,
        error=outcome.message,
        environment=dict(versions()),
        version=vardass.__version__,
    )


# --- how long it takes, and how far it is ---


def estimate_seconds(runs: Sequence[RunSpec]) -> dict[str, float]:
    """Seconds of all runs one after the other, by data: of each cell one run is tried for its first steps."""
    from vardass.lab.run import seconds_of

    known: dict[tuple[str, str], float] = {}
    found: dict[str, float] = {}
    for run in runs:
        cell = (run.data_name, str(run.cell))
        if cell not in known:
            known[cell] = seconds_of(run)
        found[run.data_name] = found.get(run.data_name, 0.0) + known[cell]
    return found


@dataclass(frozen=True)
class UnderWay:
    """A run that was begun; nobody works on it now unless ``active``."""

    run_id: str
    label: str
    step: int
    steps: int
    wall: float
    active: bool
    share: float  # of its steps that are done


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
    """How far a sweep is."""

    total: int  # runs of the sweep, those that have finished, and those that nobody has begun
    finished: int
    to_do: int
    under_way: list[UnderWay]  # begun and not finished
    failed: list[Failed]  # failed for good; starting the sweep again retries them
    others: int  # finished runs that are no longer part of the sweep
    worker: str | None  # process and machine that are at work on the sweep; None if nobody is
    jobs: int  # runs at a time
    seconds_left: float | None  # estimate from the mean time of finished runs; None as long as there is none
    half_line: bool  # whether a crash cut off the last record; starting the sweep again repairs it


def status(folder: str | os.PathLike[str]) -> Status:
    """Look at a sweep, which may be running, without changing it."""
    place = Path(folder)
    plan = read_plan(place)
    if plan is None:
        raise InputError(f"{place} is not the folder of a sweep; name the one given to vardass sweep --out")
    names = set(plan.runs)
    records = {record.run_id: record for record in read_records(place)}
    finished = {name for name, record in records.items() if record.status == "finished"}
    begun = {run.run_id: run for run in under_way(place / RUNS_FOLDER) if run.run_id in names - finished}
    failed = [
        Failed(name, run_label(record.spec), record.error or "", *_log(place / RUNS_FOLDER / name / LOG_FILE))
        for name, record in records.items()
        if name in names - finished - set(begun)
    ]
    to_do = len(names - finished) - len(begun) - len(failed)
    left = None
    if finished:
        mean = sum(records[name].wall for name in finished) / len(finished)
        left = mean * (to_do + sum(1 - run.share for run in begun.values())) / plan.jobs
    file = place / RECORDS_FILE
    return Status(
        total=len(names),
        finished=len(names & finished),
        to_do=to_do,
        under_way=list(begun.values()),
        failed=failed,
        others=len(finished - names),
        worker=holder_name(place) if is_locked(place) else None,
        jobs=plan.jobs,
        seconds_left=left,
        half_line=file.exists() and whole_lines(file)[1],
    )


def under_way(runs: Path) -> list[UnderWay]:
    """Runs that have a folder of their own, and so no record in the sweep's file yet."""
    result = []
    for file in sorted(runs.glob(f"*/{PROGRESS_FILE}")):
        run = file.parent
        if (noted := read_progress(run)) is not None:
            share = min(1.0, noted.step / noted.steps)
            result.append(UnderWay(run.name, noted.label, noted.step, noted.steps, noted.wall, is_locked(run), share))
    return result


def _log(file: Path) -> tuple[str, str]:
    """The log's path and its last line."""
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    return str(file), text.rpartition("\n")[2].strip()
