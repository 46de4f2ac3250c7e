"""The one process that writes the folder of a sweep; see ``vardass.experiments.store`` for what is in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vardass.errors import InputError
from vardass.experiments.locks import locked
from vardass.experiments.record import Record
from vardass.experiments.store import (
    LOG_FILE,
    PLAN_FILE,
    RECORDS_FILE,
    RUNS_FOLDER,
    SWEEP_FILE,
    keep,
    loose_records,
    parse,
    whole_lines,
)
from vardass.files import write_text

__all__ = ["SweepStore", "empty"]

_LOCK_SECONDS = 1.0  # a look at the status holds the lock for a moment


class SweepStore:
    """A sweep's folder, for the one process that writes its records; make it with `open`.

    Attributes
    ----------
    path : Path
        The folder.
    done : dict of str to Record
        Records by the names of their runs, finished or failed, without their curves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, Record] = {}
        self._handle = -1  # of the records' file, once it is open

    @classmethod
    @contextmanager
    def open(cls, path: str | os.PathLike[str]) -> Iterator[SweepStore]:
        """Lock the folder, made if need be, repair what a crash left, and take over records of finished runs.

        Raises
        ------
        InputError
            If another sweep is at work there, the folder cannot be written to, or it holds records of another
            format; nothing is changed then.
        """
        place = Path(path)
        if place.exists() and not place.is_dir():
            raise InputError(f"{place} is a file; name a folder for the sweep")
        with _writing(place):
            place.mkdir(parents=True, exist_ok=True)
        with locked(place, wait=_LOCK_SECONDS, work="sweep"):
            file = place / RECORDS_FILE
            store = cls(place)
            for record in parse(file, whole_lines(file)[0]) if file.exists() else ():
                store._remember(record)
            loose = list(loose_records(place / RUNS_FOLDER))  # before any change, as it may be of another format
            with _writing(place):
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
                        store.clear(folder.name, keep_log=False)
                yield store
            finally:
                os.close(store._handle)

    def is_finished(self, run_id: str) -> bool:
        """Whether a run needs not be done again."""
        record = self.done.get(run_id)
        return record is not None and record.status == "finished"

    def run_folder(self, run_id: str) -> Path:
        """Working folder of a run."""
        return self.path / RUNS_FOLDER / run_id

    def add(self, record: Record) -> None:
        """Write a record to the disk, and only then remove the run's folder.

        Raises
        ------
        InputError
            If it cannot be written; records before it are safe.
        """
        line = record.to_json().encode() + b"\n"
        before = os.fstat(self._handle).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._handle, line[written:])
            os.fsync(self._handle)
        except OSError as error:
            # half a line would be repaired at the next start anyway
            with suppress(OSError):
                os.ftruncate(self._handle, before)
            raise InputError(
                f"cannot write {self.path / RECORDS_FILE}: {error.strerror}; all {len(self.done)} records before are "
                f"safe, and the run {record.run_id} keeps its own in {self.run_folder(record.run_id)}; make room and "
                "start the sweep again to go on"
            ) from None
        self._remember(record)
        self.clear(record.run_id, keep_log=record.status == "failed")

    def _remember(self, record: Record) -> None:
        # thousands of curves would only take memory here
        keep(self.done, Record(**{**vars(record), "curve": []}))

    def clear(self, run_id: str, *, keep_log: bool) -> None:
        """Remove the folder of a run, or all in it but the log."""
        folder = self.run_folder(run_id)
        if keep_log:
            empty(folder, keep=(LOG_FILE,))
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def write_plan(self, runs: Sequence[str], *, jobs: int, text: str | None = None) -> None:
        """Note which runs the sweep has, for `status`, and its specification."""
        with _writing(self.path):
            write_text(self.path / PLAN_FILE, json.dumps({"jobs": jobs, "runs": list(runs)}) + "\n")
            if text is not None:
                write_text(self.path / SWEEP_FILE, text)


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
