"""A sweep is the same however it is run, stopped, killed and started again."""

import errno
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from sweeping import kill, make_runs, numbers, run_with_kills, start_sweep, wait_for, workers_of
from vardass.adapt.run_folder import CHECKPOINT_FILE
from vardass.cli import sweep as sweep_commands
from vardass.errors import InputError, VardassError
from vardass.experiments import run as execute_module
from vardass.experiments.engines import Attempt, Crashes, Outcome, attempt_run, drive, get_engine
from vardass.experiments.record import Record
from vardass.experiments.run import Stopped, execute
from vardass.experiments.store import SweepStore, is_locked, locked, read_records
from vardass.experiments.sweep import run_sweep, status

COUNT, STEPS = 4, 300


def finished(spec, **result):
    return Record(spec=spec, status="finished", result={"score": 0.5, **result}, wall=2.0)


def after(steps):
    """Says stop after so many steps."""
    left = iter(range(steps - 1))
    return lambda: next(left, None) is None


# --- the same numbers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    summary = run_sweep(make_runs(COUNT, STEPS), folder, jobs=1)
    assert (summary.total, summary.finished, summary.failed) == (COUNT, COUNT, 0)
    assert sorted(entry.name for entry in folder.iterdir()) == ["lock", "plan.json", "records.jsonl", "runs"]
    assert not list((folder / "runs").iterdir())
    return folder


def test_number_of_jobs_does_not_change_results(undisturbed, tmp_path):
    run_sweep(make_runs(COUNT, STEPS), tmp_path, jobs=2)
    assert numbers(read_records(tmp_path)) == numbers(read_records(undisturbed))
    for record in read_records(tmp_path):
        assert record.result["mmd2"] > 0
        assert record.result["coral"] > 0
        assert [line["step"] for line in record.curve] == [100, 200, 300]
        assert record.environment["threads"] == 1
        assert {"vardass", "commit", "python", "torch", "numpy"} <= set(record.environment)
        assert record.wall > sum(record.seconds.values())


def test_finished_runs_are_not_done_again(undisturbed):
    before = (undisturbed / "records.jsonl").read_bytes()
    shares = []
    summary = run_sweep(
        make_runs(COUNT - 1, STEPS), undisturbed, progress=lambda share, text: shares.append(share), text="a: 1\n"
    )
    assert (summary.before, summary.others, summary.finished, summary.total) == (COUNT - 1, 1, COUNT - 1, COUNT - 1)
    assert (undisturbed / "records.jsonl").read_bytes() == before
    assert (undisturbed / "sweep.yaml").read_text() == "a: 1\n"
    assert shares == [1.0]
    assert status(undisturbed).others == 1


def test_kills_of_workers_and_parents_change_nothing(undisturbed, tmp_path):
    done = run_with_kills(tmp_path, count=COUNT, steps=STEPS, jobs=1, targets="wpwp", seed=1)
    assert sum(done.values()) >= 2
    assert numbers(read_records(tmp_path)) == numbers(read_records(undisturbed))
    assert not list((tmp_path / "runs").iterdir())


def test_interrupt_writes_checkpoints_and_workers_leave_with_their_parent(tmp_path):
    process = start_sweep(tmp_path, count=2, steps=200_000, jobs=1)
    wait_for(lambda: list(tmp_path.glob(f"runs/*/{CHECKPOINT_FILE}")))
    seen = status(tmp_path)
    assert f"process {process.pid} on" in seen.worker
    assert [run.active for run in seen.under_way] == [True]
    assert (seen.to_do, seen.finished, seen.seconds_left) == (1, 0, None)
    with pytest.raises(InputError, match=rf"another sweep is at work .* process {process.pid} on "):
        run_sweep(make_runs(2, 200_000), tmp_path)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted=True" in out
    seen = status(tmp_path)
    assert (seen.worker, seen.finished, seen.to_do, seen.failed) == (None, 0, 1, [])
    assert [(run.active, run.steps, run.step > 0) for run in seen.under_way] == [(False, 200_000, True)]
    # the same folder once more, its parent killed
    process = start_sweep(tmp_path, count=2, steps=200_000, jobs=1)
    wait_for(lambda: any(run.active for run in status(tmp_path).under_way))
    workers = workers_of(process.pid)
    assert len(workers) == 1
    kill(process.pid)
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("sampler", ["uniform", "vardass"])
def test_stopped_run_goes_on_bit_for_bit(tmp_path, sampler):
    (spec,) = make_runs(1, sampler=sampler, refresh_every=10, eval_every=10, checkpoint_every=5)
    whole = execute(spec, tmp_path / "whole")
    for steps in (7, 6):
        with pytest.raises(Stopped):
            execute(spec, tmp_path / "parts", stop=after(steps))
    parts = execute(spec, tmp_path / "parts")
    assert numbers([parts]) == numbers([whole])
    log = (tmp_path / "parts" / "log.txt").read_text()
    assert "going on from step 7" in log
    assert "going on from step 13" in log
    assert parts.wall > 0
    # a finished run is not done again, even if its sweep never heard of it
    assert execute(spec, tmp_path / "parts", stop=after(1)) == parts


def test_damaged_checkpoint_starts_from_the_beginning(tmp_path):
    (spec,) = make_runs(1, eval_every=10)
    whole = execute(spec, tmp_path / "whole")
    with pytest.raises(Stopped):
        execute(spec, tmp_path / "cut", stop=after(12))
    checkpoint = tmp_path / "cut" / CHECKPOINT_FILE
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert numbers([execute(spec, tmp_path / "cut")]) == numbers([whole])
    assert "starting from the beginning, as the checkpoint cannot be used" in (tmp_path / "cut/log.txt").read_text()


def test_time_of_killed_attempts_counts(tmp_path):
    (spec,) = make_runs(1)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "progress.json").write_text(json.dumps({"wall": 1000.0, "seconds": {"training": 900.0}}))
    record = execute(spec, folder)
    assert record.wall > 1000
    assert record.seconds["training"] > 900
    assert record.curve[0]["seconds"]["training"] > 900


def test_time_beyond_the_checkpoint_counts(tmp_path):
    (spec,) = make_runs(1, eval_every=10)
    with pytest.raises(Stopped):
        execute(spec, tmp_path, stop=after(7))
    # an attempt that was killed before it wrote a checkpoint of its own
    progress = json.loads((tmp_path / "progress.json").read_text())
    saved = progress["seconds"]["training"]
    progress["wall"] += 1000.0
    progress["seconds"]["training"] += 900.0
    progress["seconds"]["drawing"] = 0.0  # noted before the checkpoint was written
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    with pytest.raises(Stopped):
        execute(spec, tmp_path, stop=after(7))
    noted = json.loads((tmp_path / "progress.json").read_text())
    assert saved + 900 < noted["seconds"]["training"] < 1000
    record = execute(spec, tmp_path)
    assert record.seconds["training"] > noted["seconds"]["training"]
    assert record.seconds["drawing"] > 0
    assert 900 < sum(record.seconds.values()) < record.wall - 100 + 1e-6
    assert all(line["seconds"]["training"] > 900 for line in record.curve)


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EIO, "I/O error")])
def test_checkpoint_that_cannot_be_read_is_left_alone(tmp_path, monkeypatch, error):
    (spec,) = make_runs(1)
    with pytest.raises(Stopped):
        execute(spec, tmp_path, stop=after(7))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name not in ("log.txt", "lock")}

    def fail(*given, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("torch.load", fail)
        with pytest.raises(InputError, match=r"cannot read .* the file is left alone: try again"):
            execute(spec, tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(InputError, match="need safetensors, which is not installed"):
            execute(spec, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    execute(spec, tmp_path)
    assert "going on from step 7" in (tmp_path / "log.txt").read_text()


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


def test_data_are_read_once(tmp_path, monkeypatch):
    calls = []
    load = execute_module.load_task
    monkeypatch.setattr(execute_module, "load_task", lambda *given, **options: calls.append(1) or load(*given))
    execute_module._task.cache_clear()
    for spec in make_runs(3, 2):
        execute(spec, tmp_path / spec.run_id)
    assert len(calls) == 1


def test_values_that_json_lacks_become_null(tmp_path, monkeypatch):
    monkeypatch.setattr(execute_module, "mmd2", lambda x, y: torch.tensor(float("nan")))
    (spec,) = make_runs(1, 2)
    record = execute(spec, tmp_path)
    assert record.result["mmd2"] is None
    assert read_records(tmp_path.parent / tmp_path.name / "record.json") == [record]


def test_two_workers_never_share_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(execute_module, "_LOCK_SECONDS", 0.1)
    (spec,) = make_runs(1, 2)
    with locked(tmp_path), pytest.raises(InputError, match=f"another run is at work .*process {os.getpid()} on"):
        execute(spec, tmp_path)
    assert execute(spec, tmp_path).status == "finished"


# --- failures --------------------------------------------------------------------------------------------


def here(todo, work, *, jobs, on_done, tick):
    """An engine in this process."""

    def submit(attempt):
        future = Future()
        future.set_result(attempt_run(attempt, work / attempt.spec.run_id))
        return future

    drive(todo, work, width=1, submit=submit, lost=(BrokenProcessPool,), on_done=on_done, tick=tick)


def test_failing_run_is_tried_twice_and_keeps_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("vardass.experiments.sweep.get_engine", lambda name: here)
    good, bad = make_runs(2)
    bad = replace(bad, config={**bad.config, "network_options": {"hidden": "wide"}})
    summary = run_sweep([bad, good], tmp_path, jobs=1)
    assert (summary.finished, summary.failed) == (1, 1)
    found = {record.run_id: record for record in read_records(tmp_path)}
    assert found[good.run_id].status == "finished"
    failed = found[bad.run_id]
    assert (failed.status, failed.attempts, failed.result) == ("failed", 2, {})
    assert failed.environment["vardass"] == failed.version
    assert failed.wall > 0
    kept = list((tmp_path / "runs").glob("*/*"))
    assert kept == [tmp_path / "runs" / bad.run_id / "log.txt"]
    assert kept[0].read_text().count("Traceback") == 2
    seen = status(tmp_path)
    assert (seen.finished, seen.to_do, seen.under_way) == (1, 0, [])
    assert seen.failed[0].error == failed.error
    assert seen.failed[0].last_line.split(":")[-1] == failed.error.split(":")[-1]
    # started again, it is tried anew
    run_sweep([bad, good], tmp_path, jobs=1, retry=0)
    again = {record.run_id: record for record in read_records(tmp_path)}[bad.run_id]
    assert again.attempts == 3
    assert again.wall > failed.wall
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3


def drive_fake(todo, work, verdict, *, width=2):
    """Drive with futures that are done at once; ``verdict(attempt, under_way)`` is an outcome or an error."""
    under_way, asked, ended = [], [], []

    class Fake(Future):
        def result(self, timeout=None):
            beside = [other for other in under_way if other is not self]
            under_way.remove(self)
            asked.append((self.attempt, len(beside)))
            return verdict(self.attempt)

    def submit(attempt):
        future = Fake()
        future.attempt = attempt
        future.set_result(None)
        under_way.append(future)
        return future

    def on_done(attempt, outcome):
        ended.append((attempt, outcome))

    drive(todo, work, width=width, submit=submit, lost=(BrokenProcessPool,), on_done=on_done)
    return asked, ended


def test_run_that_kills_its_worker_each_time_fails_in_the_end(tmp_path):
    todo = [Attempt(spec) for spec in make_runs(6)]
    poison = todo[0]

    def verdict(attempt):
        if attempt is poison:
            raise BrokenProcessPool("dead")
        return Outcome("finished")

    asked, ended = drive_fake(todo, tmp_path, verdict)
    assert [outcome.kind for attempt, outcome in ended if attempt is not poison] == ["finished"] * 5
    assert ended[-1][0] is poison
    assert ended[-1][1].kind == "failed"
    assert "died 6 times" in ended[-1][1].text
    assert [beside for attempt, beside in asked if attempt is poison][-Crashes.LIMIT :] == [0] * Crashes.LIMIT


def test_crashes_with_a_new_checkpoint_in_between_never_fail(tmp_path):
    (spec,) = make_runs(1)
    (tmp_path / spec.run_id).mkdir()
    left = iter(range(40))

    def verdict(attempt):
        step = next(left, None)
        if step is None:
            return Outcome("finished")
        os.utime((tmp_path / spec.run_id / CHECKPOINT_FILE).absolute(), ns=(step, step))
        raise BrokenProcessPool("dead")

    (tmp_path / spec.run_id / CHECKPOINT_FILE).touch()
    _, ended = drive_fake([Attempt(spec)], tmp_path, verdict)
    assert [outcome.kind for _, outcome in ended] == ["finished"]


def test_workers_that_only_die_stop_the_sweep(tmp_path):
    def verdict(attempt):
        raise BrokenProcessPool("dead")

    with pytest.raises(VardassError, match="workers died 50 times and nothing was done"):
        drive_fake([Attempt(spec) for spec in make_runs(30)], tmp_path, verdict)


# --- the commands ----------------------------------------------------------------------------------------

YAML = """
settings: {network: mlp, steps: 10}
data: [{dataset: watch, tasks: [left-A->right-B]}]
algorithms: [mmd]
samplers: [uniform]  # kept
repeats: 2
"""


def command(*arguments):
    app = typer.Typer()
    app.command()(sweep_commands.sweep)
    app.command()(sweep_commands.status)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_commands_sweep_and_status(tmp_path, monkeypatch):
    monkeypatch.setattr("vardass.experiments.sweep.get_engine", lambda name: here)
    file, out = tmp_path / "my.yaml", tmp_path / "out"
    file.write_text(YAML)
    found = command("sweep", file, "--dry-run", "--out", out)
    assert found.exit_code == 0
    assert "0 of 2 runs have finished" in found.output
    assert not out.exists()
    found = command("sweep", file, "--out", out, "--jobs", 1)
    assert found.exit_code == 0, found.output
    assert "2 of 2 runs have finished" in found.output
    assert (out / "sweep.yaml").read_text() == YAML
    # one repeat less and a sampler more: what is finished stays
    file.write_text(YAML.replace("[uniform]", "[uniform, vardass]").replace("repeats: 2", "repeats: 1"))
    found = command("sweep", file, "--out", out)
    assert "2 of 2 runs have finished" in found.output
    assert "1 of them had finished before" in found.output
    assert "1 finished runs there are no longer part of the specification" in found.output
    assert "vardass" in (out / "sweep.yaml").read_text()
    found = command("sweep", file, "--out", out, "--set", "lr=1e30", "--repeats", 1)
    assert found.exit_code == 1
    assert "2 failed; see vardass status" in found.output
    found = command("status", out)
    assert "finished   0 of 2 runs; nobody is at work on it" in found.output
    assert "failed     2" in found.output
    assert "the loss is not finite at step 10" in found.output
    assert "log.txt" in found.output
    seen = json.loads(command("status", out, "--json").output)
    assert (seen["finished"], seen["to_do"], len(seen["failed"]), seen["others"]) == (0, 0, 2, 3)


def test_commands_say_what_is_missing(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(YAML)
    assert "--out is not given" in str(command("sweep", file).exception)
    assert "--root must be NAME=DIR, got 'x'" in str(command("sweep", file, "--root", "x").exception)


# --- the folder ------------------------------------------------------------------------------------------


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
    other = second.to_json().replace('"format":1', '"format":99')
    text = first.to_json() + "\n" + other + "\n" + '{"half'
    (tmp_path / "records.jsonl").write_text(text)
    for action in (read_records, lambda path: run_sweep(make_runs(2), path)):
        with pytest.raises(InputError, match=r"records.jsonl, line 2: the record has format 99, .*nothing was changed"):
            action(tmp_path)
    assert (tmp_path / "records.jsonl").read_text() == text
    (tmp_path / "records.jsonl").write_text(first.to_json())
    loose = tmp_path / "runs" / second.run_id
    loose.mkdir(parents=True)
    (loose / "record.json").write_text(other)
    with pytest.raises(InputError, match=r"record.json, line 1: the record has format 99"):
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


def test_full_disk_says_what_is_safe(tmp_path, monkeypatch):
    first, second = (finished(spec) for spec in make_runs(2))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with SweepStore.open(tmp_path) as store:
        store.add(first)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(InputError, match=r"No space left on device; all 1 records .* safe.* to go on"):
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

    monkeypatch.setattr("vardass.experiments.sweep.get_engine", lambda name: engine)
    third = make_runs(3)[2]
    with pytest.raises(InputError, match=r"the disk is full: .* all 2 records in .* are safe; make room"):
        run_sweep([third], tmp_path)
    assert read_records(tmp_path) == [first, second]


def test_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file is a file; name a folder"):
        run_sweep(make_runs(1), tmp_path / "file")
    with pytest.raises(InputError, match=r"cannot write to .*Not a directory; choose another folder"):
        run_sweep(make_runs(1), tmp_path / "file" / "sweep")
    original = os.open

    def read_only(path, flags, *rest, **named):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return original(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(InputError, match="Read-only file system; choose another folder"):
        run_sweep(make_runs(1), tmp_path / "sweep")


def test_what_is_not_a_sweep_is_said_so(tmp_path):
    with pytest.raises(InputError, match="there is no"):
        read_records(tmp_path / "absent")
    with pytest.raises(InputError, match="holds no records"):
        read_records(tmp_path)
    with pytest.raises(InputError, match="not the folder of a sweep"):
        status(tmp_path)
    with pytest.raises(InputError, match="0 runs"):
        run_sweep([], tmp_path)
    with pytest.raises(InputError, match="jobs"):
        run_sweep(make_runs(1), tmp_path, jobs=0)
    with pytest.raises(InputError, match="unknown engine 'locl'; did you mean 'local'"):
        get_engine("locl")
