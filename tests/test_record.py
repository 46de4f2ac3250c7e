"""Runs are named by what determines their result, and records survive the way through a file."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vardass
from conftest import refused
from vardass.adapt.config import RunConfig
from vardass.lab import record as module
from vardass.lab.record import FORMAT, Record, RunSpec, versions
from vardass.lab.store import read_records

RESULTS = Path(__file__).parents[1] / "results"
needs_results = pytest.mark.skipif(not RESULTS.is_dir(), reason="results/ is not part of the sdist")

CONFIG = RunConfig(algorithm="coral", steps=10).to_dict()
SPEC = RunSpec("watch", "left-A->right-B", "watch", CONFIG, {"algorithm": "coral", "sampler": "vardass"})
RECORD = Record(SPEC, "finished", {"target_accuracy": 0.5, "score": 1.0}, [{"step": 10}], {"training": 1.0}, 2.0)


def changed(**settings: object) -> RunSpec:
    return dataclasses.replace(SPEC, config={**CONFIG, **settings})


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SPEC, root="/elsewhere"),
        changed(device="cuda:1"),
        changed(workers=4),
        changed(checkpoint_every=7),
        dataclasses.replace(SPEC, config={name: CONFIG[name] for name in reversed(CONFIG)}),
        dataclasses.replace(SPEC, config={name: value for name, value in CONFIG.items() if name != "weight_decay"}),
    ],
    ids=["root", "device", "workers", "checkpoints", "order", "a default that was not written down"],
)
def test_the_surroundings_do_not_name_a_run(other: RunSpec) -> None:
    assert other.run_id == SPEC.run_id


@pytest.mark.parametrize(
    "other",
    [
        changed(seed=1),
        changed(lr=0.1),
        changed(algorithm_options={"penalty": 2.0}),
        dataclasses.replace(SPEC, task="right-B->left-A"),
        dataclasses.replace(SPEC, repeat=1),
        dataclasses.replace(SPEC, search=1),
        dataclasses.replace(SPEC, split_seed=1),
        dataclasses.replace(SPEC, data_options={"standardised": False}),
        dataclasses.replace(SPEC, holdout=0.3),
    ],
)
def test_whatever_changes_the_result_changes_the_name(other: RunSpec) -> None:
    assert other.run_id != SPEC.run_id


@needs_results
@pytest.mark.parametrize("sweep", ["algorithms", "finetuning", "refresh", "samplers"])
def test_committed_records_are_read_with_the_names_that_they_have(sweep: str) -> None:
    file = RESULTS / sweep / "records.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    assert [record.run_id for record in read_records(file.parent)] == [json.loads(line)["id"] for line in lines]


def test_a_setting_that_is_added_renames_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    later = {**module._defaults(), "brand_new": 3}
    before = SPEC.run_id
    monkeypatch.setattr(module, "_defaults", lambda: later)
    assert changed(brand_new=3).run_id == before
    assert changed(brand_new=4).run_id != before


def test_a_record_outlives_its_settings() -> None:
    line = RECORD.to_json().replace('"config":{', '"config":{"no_longer_there":3,')
    back = Record.from_json(line)
    assert back.spec.config["no_longer_there"] == 3
    assert back.run_id == RECORD.run_id != back.spec.run_id


def test_a_record_comes_back_as_it_was() -> None:
    line = RECORD.to_json()
    assert "\n" not in line
    back = Record.from_json(line)
    assert back == RECORD
    assert back.run_id == SPEC.run_id == json.loads(line)["id"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (RECORD.to_json()[:-9], ("not a whole record", "remove the line")),
        ("[1, 2]", ("not a record", "'[1, 2]'")),
        ('{"a": 1}', ("not a record", """'{"a": 1}'""")),
        (RECORD.to_json().replace(f'"format":{FORMAT}', '"format":99'), ("format 99", FORMAT)),
        (RECORD.to_json().replace('"status"', '"state"'), ("fields", "status")),
        (RECORD.to_json().replace('"data_name"', '"called"'), ("fields", "called")),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(line: str, named: tuple[Any, ...]) -> None:
    with refused(*named):
        Record.from_json(line)


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(RECORD, wall=float("nan")).to_json()


def test_records_say_what_made_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = versions()
    assert (found["vardass"], found["torch"], found["numpy"]) == (
        vardass.__version__,
        torch.__version__,
        np.__version__,
    )
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True)
    if git.returncode == 0:
        assert (found["commit"] or "").removesuffix("-dirty") == git.stdout.strip()
    # packages that lie in another project's checkout have no commit of their own
    package = tmp_path / "site-packages" / "vardass"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(vardass, "__file__", str(package / "__init__.py"))
    versions.cache_clear()
    commit = versions()["commit"]
    versions.cache_clear()
    assert commit is None


def test_a_cache_does_not_name_a_run() -> None:
    assert dataclasses.replace(SPEC, data_options={"cache": True}).run_id == SPEC.run_id
