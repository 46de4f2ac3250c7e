"""The folder of a sweep: records that are safe once written, and what is under way, whole after any crash.

::

    DIR/sweep.yaml        specification, as given last
    DIR/plan.json         names of all runs of the sweep, and how many run at once
    DIR/records.jsonl     one record on each line, written by the sweep's one parent; records.jsonl.gz is read too
    DIR/runs/<run_id>/    a run under way: checkpoint, log.txt, progress.json, record.json; removed once its record is
                          in records.jsonl, except for the log of a failed run
    DIR/lock              held by the parent while it lives; holder.json beside it says who that is
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, NonNegativeInt, PositiveInt

from vardass.errors import InputError
from vardass.files import (
    check_replaceable,
    inside,
    locked,
    parse_json,
    read_json,
    remove_temporary,
    write_output,
    write_text,
)
from vardass.lab.record import Record, RunId, RunSpec, Seconds
from vardass.lab.yaml_file import check_content

__all__ = [
    "Plan",
    "RunProgress",
    "SweepStore",
    "empty",
    "read_plan",
    "read_progress",
    "read_records",
    "record_files",
    "run_label",
    "whole_lines",
]

RECORDS_FILE = "records.jsonl"
SWEEP_FILE = "sweep.yaml"
PLAN_FILE = "plan.json"
RUNS_FOLDER = "runs"
RECORD_FILE = "record.json"
LOG_FILE = "log.txt"
PROGRESS_FILE = "progress.json"
_LOCK_SECONDS = 1.0  # a look at the status holds the lock for a moment
_MOST_BYTES = 2**28  # that a compressed file of records may hold: a thousandth of them can be on the disk


# --- reading ---


class Plan(BaseModel):
    """Content of ``plan.json``."""

    jobs: PositiveInt = 1
    runs: list[RunId]


class RunProgress(BaseModel):
    """Content of ``progress.json``: how far a run is, and what its attempts took."""

    label: str = ""
    step: NonNegativeInt
    steps: PositiveInt
    wall: Seconds = 0.0
    seconds: dict[str, Seconds] = {}


def read_plan(folder: Path) -> Plan | None:
    """The plan of a sweep's folder, if it has one."""
    found = read_json(file := folder / PLAN_FILE)
    try:
        return check_content(Plan.model_validate, found) if found else None
    except InputError as error:
        raise InputError(f"{file} is not the plan of a sweep: {error}; start the sweep again") from None


def read_progress(run: Path) -> RunProgress | None:
    """What a run noted last; None if it noted nothing, or a crash of the machine left half of it."""
    with suppress(InputError):
        return check_content(RunProgress.model_validate, read_json(run / PROGRESS_FILE))
    return None


def record_files(folder: Path) -> list[Path]:
    """Files of records in a folder, plain or compressed by gzip."""
    return sorted((*folder.glob(f"*{RECORDS_FILE}"), *folder.glob(f"*{RECORDS_FILE}.gz")))


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Records of a sweep, which may be under way or killed: one for each run, finished rather than failed.

    ``path`` is the folder of a sweep, any folder with files named ``*records.jsonl`` or ``*records.jsonl.gz``, or one
    such file. A line that a crash cut off is left out.
    """
    place = Path(path)
    if not place.exists():
        raise InputError(f"there is no {place}; name the folder of a sweep, or its {RECORDS_FILE}")
    files = record_files(place) if place.is_dir() else [place]
    runs = place / RUNS_FOLDER
    if not files and not runs.is_dir():
        raise InputError(f"{place} holds no {RECORDS_FILE}; name the folder of a sweep")
    found: dict[str, Record] = {}
    for record in (*_records(files), *_loose_records(runs)):
        _keep(found, record)
    return list(found.values())


def _records(files: Sequence[Path]) -> Iterator[Record]:
    for file in files:
        yield from _parse(file, whole_lines(file)[0])


def whole_lines(file: Path) -> tuple[list[str], bool]:
    """The whole lines of a file, and whether half a line follows; one without line feed is whole if it is JSON."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1) if file.suffix == ".gz" else opened.read()
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {file}: {why}; check its permissions, or restore it from a copy") from None
    if file.suffix == ".gz" and len(content) > _MOST_BYTES:
        raise InputError(
            f"{file} has {file.stat().st_size:,} bytes that stand for more than {_MOST_BYTES:,}; if you trust it, "
            "decompress it with gunzip first"
        )
    end = content.rfind(b"\n") + 1
    with suppress(InputError):  # else a crash while it was written
        parse_json(content[end:])
        end = len(content)
    try:
        return content[:end].decode().split("\n"), end < len(content)
    except UnicodeDecodeError:
        raise InputError(f"{file} is not text; name a file that a sweep wrote, or restore it from a copy") from None


def run_label(spec: RunSpec) -> str:
    """A run in a few words, for people."""
    cell = " ".join(str(value) for value in spec.cell.values())
    return f"{spec.data_name} {spec.task} {cell} repeat {spec.repeat} search {spec.search}"


def _parse(file: Path, lines: Sequence[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield Record.from_json(line)
            except InputError as error:
                raise InputError(f"{file}, line {number}: {error}; nothing was changed") from None


def _loose_records(runs: Path) -> Iterator[Record]:
    """Records that finished runs left in their own folders."""
    for file in sorted(runs.glob(f"*/{RECORD_FILE}")):
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue  # the sweep has just taken it over
        yield from _parse(file, text.splitlines())


def _keep(found: dict[str, Record], record: Record) -> None:
    """Add a record to those found so far, unless it failed and its run has finished."""
    known = found.get(record.run_id)
    if known is None or known.status != "finished" or record.status == "finished":
        found[record.run_id] = record


# --- writing ---


class SweepStore:
    """A sweep's folder, for the one process that writes its records; make it with `open`.

    ``done`` has the records by the names of their runs, finished or failed, without their curves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, Record] = {}
        self._handle = -1  # of the records' file, once it is open

    @classmethod
    @contextmanager
    def open(cls, path: str | os.PathLike[str]) -> Iterator[SweepStore]:
        """Lock the folder, repair what a crash left, and take over records of finished runs."""
        place = Path(path)
        if place.exists() and not place.is_dir():
            raise InputError(f"{place} is a file; name a folder for the sweep")
        with _writing(place):
            place.mkdir(parents=True, exist_ok=True)
        with locked(place, wait=_LOCK_SECONDS, work="sweep"):
            file = place / RECORDS_FILE
            store = cls(place)
            for record in _records(record_files(place)):
                store._remember(record)
            for folder in (runs := inside(place, RUNS_FOLDER)).glob("*"):
                inside(runs, folder.name)
            loose = list(_loose_records(runs))  # before any change, as it may be of another format
            with _writing(place):
                remove_temporary(place)
                (place / RUNS_FOLDER).mkdir(exist_ok=True)
                _repair(file)
                store._handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                _sync_folder(place)
            try:
                for record in loose:
                    if not store.is_finished(record.run_id):
                        store.add(record)
                for folder in (place / RUNS_FOLDER).iterdir():
                    if store.is_finished(folder.name):
                        shutil.rmtree(folder, ignore_errors=True)
                yield store
            finally:
                os.close(store._handle)

    def is_finished(self, run_id: str) -> bool:
        """Whether a run needs not be done again."""
        record = self.done.get(run_id)
        return record is not None and record.status == "finished"

    def add(self, record: Record) -> None:
        """Write a record to the disk, and only then remove the run's folder; a failed run keeps its log."""
        folder = self.path / RUNS_FOLDER / record.run_id
        line = record.to_json().encode() + b"\n"
        before = os.fstat(self._handle).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._handle, line[written:])
            os.fsync(self._handle)
        except OSError as error:
            with suppress(OSError):  # half a line would be repaired at the next start anyway
                os.ftruncate(self._handle, before)
            raise InputError(
                f"cannot write {self.path / RECORDS_FILE}: {error.strerror}; all {len(self.done)} records before are "
                f"safe, and the run {record.run_id} keeps its own in {folder}; make room and start the sweep again to "
                "go on"
            ) from None
        self._remember(record)
        if record.status == "failed":
            empty(folder, keep=(LOG_FILE,))
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def _remember(self, record: Record) -> None:
        # thousands of curves would only take memory here
        _keep(self.done, Record(**{**vars(record), "curve": []}))

    def write_plan(self, runs: Sequence[str], *, jobs: int, text: str | None = None) -> None:
        """Note which runs the sweep has, for `status`, and its specification."""
        with _writing(self.path):
            plan = self.path / PLAN_FILE
            if read_json(plan, lenient=True).keys() != {"jobs", "runs"}:
                check_replaceable(plan, "sweep")
            if text is not None:
                write_output(self.path / SWEEP_FILE, text, "sweep")
            write_text(plan, json.dumps({"jobs": jobs, "runs": list(runs)}) + "\n")


def empty(folder: Path, *, keep: Sequence[str]) -> None:
    """Remove all in a folder but some files."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name in keep:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _repair(file: Path) -> None:
    """Cut off half a last line, or end a whole one, by replacing the file."""
    if not file.exists():
        return
    lines, is_cut = whole_lines(file)
    if is_cut or lines[-1]:  # a line feed ends the last line, hence nothing follows it
        write_text(file, "".join(f"{line}\n" for line in lines if line))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}; choose another folder, or make room") from None


def _sync_folder(path: Path) -> None:
    """Make sure that a new file's name is on the disk too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
