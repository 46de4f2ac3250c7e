"""One run of a sweep: stopped and resumed, its times, its data, its record."""

import errno
import json
import os
import platform
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import refused
from sweeping import make_runs, numbers
from vardass.adapt.run_folder import CHECKPOINT_FILE
from vardass.errors import MissingExtraError
from vardass.files import locked
from vardass.lab import run as execute_module
from vardass.lab.run import Stopped, execute
from vardass.lab.store import read_records
from vardass.lab.sweep import estimate_seconds


def after(steps):
    """Says stop after so many steps."""
    left = iter(range(steps - 1))
    return lambda: next(left, None) is None


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
    assert log.count("resuming from step") == 2
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
    (folder / "progress.json").write_text(
        json.dumps({"step": 10, "steps": 20, "wall": 1000.0, "seconds": {"training": 900.0}})
    )
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
        with refused(tmp_path / "checkpoint.pt", error.strerror, "left alone"):
            execute(spec, tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(MissingExtraError, match="needs safetensors, which is not installed"):
            execute(spec, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    execute(spec, tmp_path)
    assert "resuming from step 7" in (tmp_path / "log.txt").read_text()


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


def test_relative_coral_does_not_change_with_the_scale_of_features(monkeypatch):
    x, y = (torch.randn(50, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    splits = type("Splits", (), {"source_val": [0], "target_test": [1]})
    found = []
    for scale in (1.0, 0.01):
        monkeypatch.setattr(execute_module, "_features", lambda _, domain, scale=scale: scale * (x, y)[domain[0]])
        found.append(execute_module._discrepancies(None, splits))
    cov = [torch.cov(z.T, correction=0) for z in (x, y)]
    by_hand = (cov[0] - cov[1]).square().sum() / (cov[0].square().sum() + cov[1].square().sum()) * 2.0
    assert found[0]["coral_relative"] == pytest.approx(float(by_hand), rel=1e-5)
    assert found[1]["coral_relative"] == pytest.approx(found[0]["coral_relative"], rel=1e-5)
    assert found[1]["coral"] < 1e-6 * found[0]["coral"]


def test_two_workers_never_share_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(execute_module, "_LOCK_SECONDS", 0.1)
    (spec,) = make_runs(1, 2)
    with locked(tmp_path), refused("another run", tmp_path, f"process {os.getpid()}", platform.node()):
        execute(spec, tmp_path)
    assert execute(spec, tmp_path).status == "finished"


def test_the_time_of_a_run_follows_from_its_first_steps(monkeypatch):
    class Timed:
        def __init__(self, config, splits):
            assert config.steps <= 10

        def run(self):
            return SimpleNamespace(seconds={"training": 2.0, "solver": 3.0, "features": 5.0, "evaluation": 7.0})

    monkeypatch.setattr(execute_module, "Trainer", Timed)
    for source, passes in (("full", 4), ("bank", 1)):
        (spec,) = make_runs(1, 40, sampler="vardass", refresh_every=10, eval_every=20, feature_source=source)
        assert execute_module.seconds_of(spec) == 2.0 * 4 + 3.0 * 4 + 5.0 * passes + 7.0 * 2


def test_a_sweep_times_each_cell_once(monkeypatch):
    tried = []
    monkeypatch.setattr(execute_module, "seconds_of", lambda spec: tried.append(spec.cell["sampler"]) or 3.0)
    assert estimate_seconds(make_runs(6)) == {"watch": 18.0}
    assert tried == ["uniform", "vardass"]
