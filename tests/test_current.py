"""A folder in which a sweep was changed and run again: tables take the runs of the present one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import refused
from vardass.adapt.config import RunConfig
from vardass.cli import main
from vardass.lab.averages import current_records
from vardass.lab.record import Record, RunSpec


def record(steps: int, *, sampler: str = "uniform", repeat: int = 0) -> Record:
    config = RunConfig(steps=steps, sampler=sampler, seed=repeat).to_dict()
    spec = RunSpec("watch", "a->b", "watch", config, {"algorithm": "mmd", "sampler": sampler}, repeat=repeat)
    return Record(spec, "finished", {"target_accuracy": steps / 100, "score": 0.5})


def folder(path: Path, records: list[Record], plan: list[Record] | None) -> Path:
    (path / "records.jsonl").write_text("".join(item.to_json() + "\n" for item in records))
    if plan is not None:
        (path / "plan.json").write_text(json.dumps({"jobs": 1, "runs": [item.run_id for item in plan]}))
    return path


def test_the_present_sweep_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    old, new = [record(10), record(10, repeat=1)], [record(20), record(20, repeat=1)]
    found, left_out = current_records(folder(tmp_path, old + new, new))
    assert [item.spec.config["steps"] for item in found] == [20, 20]
    assert left_out == 2


def test_sweeps_that_do_not_contradict_each_other_add_up(tmp_path: Path) -> None:
    old, new = record(10), record(10, sampler="ordered")
    found, left_out = current_records(folder(tmp_path, [old, new], [new]))
    assert {item.run_id for item in found} == {old.run_id, new.run_id}
    assert left_out == 0


def test_without_a_plan_nothing_is_left_out(tmp_path: Path) -> None:
    records = [record(10), record(20)]
    assert current_records(folder(tmp_path, records, None)) == (records, 0)
    assert current_records(tmp_path / "records.jsonl") == (records, 0)


def test_tables_say_what_they_leave_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path, [record(10), record(20)], [record(20)])
    assert main(["tables", str(tmp_path), "--table", "1"]) == 0
    shown = capsys.readouterr()
    assert "20.0" in shown.out
    assert "10.0" not in shown.out
    assert "1 records in" in shown.err


@pytest.mark.parametrize("name", ["regression", "tensorboard"])
def test_switches_are_true_or_false(name: str) -> None:
    with refused("true", "false", "'maybe'", field=name):
        RunConfig(**{name: "maybe"})
