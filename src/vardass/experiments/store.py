"""The folder of a sweep: records that are safe once written, and what is under way, whole after any crash.

::

    DIR/sweep.yaml        specification, as given last
    DIR/plan.json         names of all runs of the sweep, and how many run at once
    DIR/records.jsonl     one record on each line, written by the sweep's one parent process
    DIR/runs/<run_id>/    a run under way: checkpoint, log.txt, progress.json, record.json; removed once its record is
                          in records.jsonl, except for the log of a failed run
    DIR/lock              held by the parent while it lives
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vardass.errors import InputError
from vardass.experiments.record import Record, RunSpec

__all__ = [
    "LOG_FILE",
    "PLAN_FILE",
    "PROGRESS_FILE",
    "RECORDS_FILE",
    "RECORD_FILE",
    "RUNS_FOLDER",
    "SWEEP_FILE",
    "Scan",
    "keep",
    "loose_records",
    "parse",
    "read_json",
    "read_records",
    "run_label",
    "scan",
    "whole_lines",
]

RECORDS_FILE = "records.jsonl"
SWEEP_FILE = "sweep.yaml"
PLAN_FILE = "plan.json"
RUNS_FOLDER = "runs"
RECORD_FILE = "record.json"
LOG_FILE = "log.txt"
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Scan:
    """What a folder holds.

    Attributes
    ----------
    records : list of Record
        One for each run: finished rather than failed, and else the latest.
    half_lines : list of Path
        Files whose last line a crash cut off; the sweep repairs its own when it is started again.
    loose : list of str
        Names of runs whose record is in their own folder only.
    """

    records: list[Record]
    half_lines: list[Path] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Records of a sweep, also of one that is under way or was killed.

    Parameters
    ----------
    path : path
        Folder of a sweep, or any folder with files named ``*records.jsonl``, or one such file.

    Returns
    -------
    list of Record
        One for each run, in the order of writing. A line that a crash cut off is left out, see `scan`.

    Raises
    ------
    InputError
        If there are no records, or some are damaged or of another format.
    """
    return scan(path).records


def scan(path: str | os.PathLike[str]) -> Scan:
    """Like `read_records`, with what was found besides whole records."""
    place = Path(path)
    if not place.exists():
        raise InputError(f"there is no {place}; name the folder of a sweep, or its {RECORDS_FILE}")
    files = sorted(place.glob(f"*{RECORDS_FILE}")) if place.is_dir() else [place]
    runs = place / RUNS_FOLDER
    if not files and not runs.is_dir():
        raise InputError(f"{place} holds no {RECORDS_FILE}; name the folder of a sweep")
    found: dict[str, Record] = {}
    half_lines = []
    for file in files:
        lines, is_cut = whole_lines(file)
        if is_cut:
            half_lines.append(file)
        for record in parse(file, lines):
            keep(found, record)
    loose = []
    for record in loose_records(runs):
        known = found.get(record.run_id)
        if known is None or known.status != "finished":
            loose.append(record.run_id)
            keep(found, record)
    return Scan(list(found.values()), half_lines, loose)


def keep(found: dict[str, Record], record: Record) -> None:
    """Add a record to those found so far, unless it failed and its run has finished."""
    name = record.run_id  # made anew at each call
    known = found.get(name)
    if known is None or known.status != "finished" or record.status == "finished":
        found[name] = record


def whole_lines(file: Path) -> tuple[list[str], bool]:
    """The whole lines of a file, and whether half a line follows; one without line feed is whole if it is JSON."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; check its permissions") from None
    end = content.rfind(b"\n") + 1
    tail = content[end:]
    try:
        json.loads(tail)
        end = len(content)
    except ValueError:
        pass  # a crash while it was written
    try:
        return content[:end].decode().split("\n"), end < len(content)
    except UnicodeDecodeError:
        raise InputError(f"{file} is not text; name a file that a sweep wrote, or restore it from a copy") from None


def parse(file: Path, lines: Sequence[str]) -> Iterator[Record]:
    """Records from the lines of a file; errors say which line."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield Record.from_json(line)
            except InputError as error:
                raise InputError(f"{file}, line {number}: {error}; nothing was changed") from None


def loose_records(runs: Path) -> Iterator[Record]:
    """Records that finished runs left in their own folders."""
    for file in sorted(runs.glob(f"*/{RECORD_FILE}")):
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue  # the sweep has just taken it over
        yield from parse(file, text.splitlines())


def run_label(spec: RunSpec) -> str:
    """A run in a few words, for people."""
    cell = " ".join(str(value) for value in spec.cell.values())
    return f"{spec.data_name} {spec.task} {cell} repeat {spec.repeat} search {spec.search}"


def read_json(path: Path) -> dict[str, Any]:
    """A small file that may be absent or just being replaced: empty then."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
