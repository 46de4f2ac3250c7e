"""A sweep is the same however it is run, stopped, killed and started again; what fails is tried again and said."""

import json
import os
import signal
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from conftest import refused
from sweeping import kill, make_runs, numbers, run_with_kills, start_sweep, wait_for, workers_of
from vardass.adapt.run_folder import CHECKPOINT_FILE
from vardass.cli import lab as sweep_commands
from vardass.errors import VardassError
from vardass.files import is_locked
from vardass.lab.engines import Attempt, AttemptResult, Crashes, attempt_run, drive
from vardass.lab.store import read_records
from vardass.lab.sweep import run_sweep, status
from vardass.registry import Registry

COUNT, STEPS = 3, 300


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
    done = run_with_kills(tmp_path, count=COUNT, steps=STEPS, jobs=1, targets="wp", seed=1)
    assert sum(done.values()) >= 1
    assert numbers(read_records(tmp_path)) == numbers(read_records(undisturbed))
    assert not list((tmp_path / "runs").iterdir())


def test_interrupt_writes_checkpoints_and_workers_leave_with_their_parent(tmp_path):
    process = start_sweep(tmp_path, count=2, steps=200_000, jobs=1)
    wait_for(lambda: list(tmp_path.glob(f"runs/*/{CHECKPOINT_FILE}")))
    seen = status(tmp_path)
    assert f"process {process.pid} on" in seen.worker
    assert [run.active for run in seen.under_way] == [True]
    assert (seen.to_do, seen.finished, seen.seconds_left) == (1, 0, None)
    with refused("another sweep", tmp_path, f"process {process.pid}"):
        run_sweep(make_runs(2, 200_000), tmp_path)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted=True" in out
    seen = status(tmp_path)
    assert (seen.worker, seen.finished, seen.to_do, seen.failed) == (None, 0, 1, [])
    assert [(run.active, run.steps, run.step > 0) for run in seen.under_way] == [(False, 200_000, True)]
    # the same once more, told to all processes of a terminal while workers import torch
    process = start_sweep(tmp_path, count=2, steps=200_000, jobs=1)
    wait_for(lambda: workers_of(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "Traceback" not in out
    # the same folder once more, its parent killed
    process = start_sweep(tmp_path, count=2, steps=200_000, jobs=1)
    wait_for(lambda: any(run.active for run in status(tmp_path).under_way))
    workers = workers_of(process.pid)
    assert len(workers) == 1
    kill(process.pid)
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert not is_locked(tmp_path)


# --- failures --------------------------------------------------------------------------------------------


def here(todo, work, *, jobs, on_done, tick):
    """An engine in this process."""

    def submit(attempt):
        future = Future()
        future.set_result(attempt_run(attempt, work / attempt.spec.run_id))
        return future

    drive(todo, work, width=1, submit=submit, lost=(BrokenProcessPool,), on_done=on_done, tick=tick)


def test_failing_run_is_tried_twice_and_keeps_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("vardass.lab.sweep.ENGINES", Registry("engine", {"local": here}))
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

    drive(todo, work, width=width, submit=submit, lost=(BrokenProcessPool,), on_done=on_done, tick=int)
    return asked, ended


def test_run_that_kills_its_worker_each_time_fails_in_the_end(tmp_path):
    todo = [Attempt(spec) for spec in make_runs(6)]
    poison = todo[0]

    def verdict(attempt):
        if attempt is poison:
            raise BrokenProcessPool("dead")
        return AttemptResult("finished")

    asked, ended = drive_fake(todo, tmp_path, verdict)
    assert [outcome.kind for attempt, outcome in ended if attempt is not poison] == ["finished"] * 5
    assert ended[-1][0] is poison
    assert ended[-1][1].kind == "failed"
    assert "died 6 times" in ended[-1][1].message
    assert [beside for attempt, beside in asked if attempt is poison][-Crashes.LIMIT :] == [0] * Crashes.LIMIT


def test_crashes_with_a_new_checkpoint_in_between_never_fail(tmp_path):
    (spec,) = make_runs(1)
    (tmp_path / spec.run_id).mkdir()
    left = iter(range(40))

    def verdict(attempt):
        step = next(left, None)
        if step is None:
            return AttemptResult("finished")
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
    monkeypatch.setattr("vardass.lab.sweep.ENGINES", Registry("engine", {"local": here}))
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
    assert "finished   0 of 2 runs; not running" in found.output
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
