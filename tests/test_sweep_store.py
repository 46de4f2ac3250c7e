"""The folder of a sweep: whole after any crash, written by one process at a time."""

import errno
import gzip
import os
import platform
import threading
import time

import pytest

from conftest import refused
from sweeping import finished, make_runs
from vardass.files import HOLDER_FILE, is_locked, locked, read_json
from vardass.lab.engines import ENGINES, Attempt, attempt_run
from vardass.lab.record import FORMAT, Record
from vardass.lab.store import SweepStore, read_records
from vardass.lab.sweep import run_sweep, status
from vardass.registry import Registry


def test_half_a_line_is_cut_off_and_its_record_taken_from_the_run(tmp_path):
    first, second, third = (finished(spec) for spec in make_runs(3))
    whole = first.to_json() + "\n"
    (tmp_path / "records.jsonl").write_text(whole + second.to_json()[:200])
    folder = tmp_path / "runs" / third.run_id
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(third.to_json())
    assert read_records(tmp_path) == [first, third]
    (tmp_path / "plan.json").write_text('{"runs": []}')
    assert status(tmp_path).half_line
    with SweepStore.open(tmp_path) as store:
        assert (tmp_path / "records.jsonl").read_text() == whole + third.to_json() + "\n"
        assert not folder.exists()
        assert set(store.done) == {first.run_id, third.run_id}
        store.add(second)
    assert not status(tmp_path).half_line
    assert read_records(tmp_path) == [first, third, second]


@pytest.mark.parametrize("tail", ["", "\0" * 100, "\xff\n"[:1]])
def test_whole_line_without_line_feed_counts_and_zeros_do_not(tmp_path, tail):
    first, second = (finished(spec) for spec in make_runs(2))
    file = tmp_path / "records.jsonl"
    line_feed = "\n" if tail else ""
    file.write_bytes((first.to_json() + line_feed + tail).encode("latin-1"))
    with SweepStore.open(tmp_path) as store:
        store.add(second)
    assert file.read_text().splitlines() == [first.to_json(), second.to_json()]


def test_every_place_of_a_cut_keeps_all_whole_lines(tmp_path):
    records = [finished(spec) for spec in make_runs(2)]
    lines = [record.to_json() + "\n" for record in records]
    file = tmp_path / "records.jsonl"
    for cut in [*range(0, len("".join(lines)), 97), len(lines[0]) - 1, len(lines[0]), len(lines[0]) + 1]:
        file.write_text("".join(lines)[:cut])
        whole = int(cut >= len(lines[0]) - 1)
        assert read_records(tmp_path) == records[:whole]
        with SweepStore.open(tmp_path) as store:
            for record in records:
                if not store.is_finished(record.run_id):
                    store.add(record)
        assert file.read_text() == "".join(lines)


def test_other_format_is_an_error_that_changes_nothing(tmp_path):
    first, second = (finished(spec) for spec in make_runs(2))
    other = second.to_json().replace(f'"format":{FORMAT}', '"format":99')
    text = first.to_json() + "\n" + other + "\n" + '{"half'
    (tmp_path / "records.jsonl").write_text(text)
    for action in (read_records, lambda path: run_sweep(make_runs(2), path)):
        with refused(tmp_path / "records.jsonl", "line 2", "format 99", FORMAT, "nothing was changed"):
            action(tmp_path)
    assert (tmp_path / "records.jsonl").read_text() == text
    (tmp_path / "records.jsonl").write_text(first.to_json())
    loose = tmp_path / "runs" / second.run_id
    loose.mkdir(parents=True)
    (loose / "record.json").write_text(other)
    with refused(loose / "record.json", "line 1", "format 99", FORMAT):
        run_sweep(make_runs(2), tmp_path)
    assert (tmp_path / "records.jsonl").read_text() == first.to_json()


def test_finished_record_beats_a_failed_one_over_several_files(tmp_path):
    first, second = make_runs(2)
    failed = Record(spec=first, status="failed", error="no")
    (tmp_path / "a-records.jsonl").write_text(finished(first).to_json() + "\n" + finished(second).to_json() + "\n")
    (tmp_path / "b-records.jsonl").write_text(failed.to_json() + "\n")
    (tmp_path / "other.jsonl").write_text("not a record\n")
    assert [record.status for record in read_records(tmp_path)] == ["finished", "finished"]
    assert read_records(tmp_path / "b-records.jsonl") == [failed]


def test_compressed_records_count_and_new_ones_are_written_beside_them(tmp_path):
    first, second = (finished(spec) for spec in make_runs(2))
    file = tmp_path / "records.jsonl.gz"
    file.write_bytes(gzip.compress((first.to_json() + "\n").encode()))
    with SweepStore.open(tmp_path) as store:
        assert store.is_finished(first.run_id)
        store.add(second)
    assert (tmp_path / "records.jsonl").read_text() == second.to_json() + "\n"
    assert {record.run_id for record in read_records(tmp_path)} == {first.run_id, second.run_id}
    assert read_records(file) == [first]
    file.write_bytes(file.read_bytes()[:50])
    with refused(file):
        read_records(tmp_path)


def test_full_disk_says_what_is_safe(tmp_path, monkeypatch):
    first, second = (finished(spec) for spec in make_runs(2))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with SweepStore.open(tmp_path) as store:
        store.add(first)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with refused("No space left on device", "all 1 records", tmp_path / "runs" / second.run_id):
                store.add(second)
        assert (tmp_path / "records.jsonl").read_text() == first.to_json() + "\n"
        store.add(second)
    assert read_records(tmp_path) == [first, second]
    # a run that cannot write its checkpoint stops the sweep too, and is not recorded as failed
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        outcome = attempt_run(Attempt(first.spec), tmp_path / "run")
    assert outcome.kind == "disk-full"

    def engine(todo, work, *, on_done, **rest):
        on_done(todo[0], outcome)

    monkeypatch.setattr("vardass.lab.sweep.ENGINES", Registry("engine", {"local": engine}))
    third = make_runs(3)[2]
    with refused("No space left on device", f"all 2 records in {tmp_path}"):
        run_sweep([third], tmp_path)
    assert read_records(tmp_path) == [first, second]


def test_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with refused(f"{tmp_path / 'file'} is a file", "folder"):
        run_sweep(make_runs(1), tmp_path / "file")
    with refused(tmp_path / "file" / "sweep", "Not a directory", "another folder"):
        run_sweep(make_runs(1), tmp_path / "file" / "sweep")
    original = os.open

    def read_only(path, flags, *rest, **named):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return original(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    with refused(tmp_path / "sweep", "Read-only file system", "another folder"):
        run_sweep(make_runs(1), tmp_path / "sweep")


def test_what_is_not_a_sweep_is_said_so(tmp_path):
    with refused(tmp_path / "absent", "records.jsonl"):
        read_records(tmp_path / "absent")
    with refused(tmp_path, "no records.jsonl"):
        read_records(tmp_path)
    with refused(tmp_path, "vardass sweep --out"):
        status(tmp_path)
    with refused("0 runs"):
        run_sweep([], tmp_path)
    with refused(0, 1, field="jobs"):
        run_sweep(make_runs(1), tmp_path, jobs=0)
    with refused("'locl'", "'local'", field="engine"):
        ENGINES.find("locl")


def test_sweep_waits_for_a_short_look_at_its_lock(tmp_path):
    held, done = threading.Event(), []

    def look():
        with locked(tmp_path):
            held.set()
            time.sleep(0.2)
            done.append(True)

    thread = threading.Thread(target=look)
    thread.start()
    assert held.wait(10)
    with SweepStore.open(tmp_path):
        assert done
    thread.join()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def missing(handle, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    # filelock would take a lock instead that a killed sweep keeps for ever
    monkeypatch.setattr("fcntl.flock", missing)
    with (
        pytest.warns(UserWarning, match="flock not supported"),
        refused(tmp_path, "locks"),
        locked(tmp_path),
    ):
        pass


def test_a_lock_says_who_holds_it_and_only_while_it_is_held(tmp_path):
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
        assert read_json(tmp_path / HOLDER_FILE) == {"pid": os.getpid(), "host": platform.node()}
        with refused("another sweep", tmp_path, f"process {os.getpid()}", platform.node()):
            run_sweep(make_runs(1), tmp_path)
    assert not is_locked(tmp_path)
    assert not (tmp_path / HOLDER_FILE).exists()
