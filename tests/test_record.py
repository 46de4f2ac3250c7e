"""Runs are named by what determines their result, and records survive the way through a file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import vardass
from vardass.adapt import algorithm_options
from vardass.adapt.config import RunConfig
from vardass.errors import InputError
from vardass.lab.record import _SURROUNDINGS, _UNNAMED, FORMAT, Record, RunSpec
from vardass.lab.spec import load_sweep
from vardass.lab.versions import versions

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
def test_committed_records_keep_their_names(sweep: str) -> None:
    lines = (RESULTS / sweep / "records.jsonl").read_text().splitlines()
    assert [Record.from_json(line).run_id for line in lines] == [json.loads(line)["id"] for line in lines]


@needs_results
@pytest.mark.parametrize("sweep", ["algorithms", "refresh", "samplers"])
def test_committed_specifications_find_their_records_again(sweep: str) -> None:
    lines = [json.loads(line) for line in (RESULTS / sweep / "records.jsonl").read_text().splitlines()]
    committed = {line["id"] for line in lines if line["spec"]["data_name"] == "watch"}
    asked = {run.run_id for run in load_sweep(RESULTS / f"{sweep}.yaml", data=["watch"]).runs()}
    assert asked
    assert asked <= committed


def test_a_setting_that_is_added_renames_no_run() -> None:
    # one that is new belongs in the table, with the value that means what runs did before it
    assert set(RunConfig.model_fields) <= {*_UNNAMED, *_SURROUNDINGS}


def test_scaling_that_became_the_default_renames_no_run() -> None:
    def spec(dataset: str, **options: bool) -> RunSpec:
        return dataclasses.replace(SPEC, dataset=dataset, data_options=options)

    for dataset, option in (("embeddings", "standardise"), ("watch", "clip")):
        now, off = spec(dataset), spec(dataset, **{option: False})
        assert now.data_options == {option: True}  # a record says what it means in every version
        assert now.run_id == spec(dataset, **{option: True}).run_id != off.run_id
        before = now.to_dict() | {"data_options": {}}  # a record of when it was off
        assert RunSpec.from_dict(before) == off
        assert RunSpec.from_dict(before).run_id == off.run_id


def test_a_record_comes_back_as_it_was() -> None:
    line = RECORD.to_json()
    assert "\n" not in line
    back = Record.from_json(line)
    assert back == RECORD
    assert back.run_id == SPEC.run_id == json.loads(line)["id"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (RECORD.to_json()[:-9], "not a whole record"),
        ("[1, 2]", "not a record"),
        ('{"a": 1}', "not a record"),
        (RECORD.to_json().replace(f'"format":{FORMAT}', '"format":99'), r"format 99, this version reads 1 and 2"),
        (RECORD.to_json().replace('"status"', '"state"'), "status"),
        (RECORD.to_json().replace('"data_name"', '"called"'), "data_name"),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
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


def test_coral_of_before_and_of_now_are_different_runs() -> None:
    old = SPEC.to_dict() | {"config": {**CONFIG, "algorithm_options": {}}}  # as records of format 1 have it
    read = RunSpec.from_dict(old)
    assert read.config["algorithm_options"] == {"preset": "paper", "correction": "none"}  # what it was run with
    now = dataclasses.replace(read, config={**read.config, "algorithm_options": {"preset": "domainbed"}})
    assert now.run_id != read.run_id
    # whatever the default, a run says which of the two it is, and keeps it on its way through a file
    spec = RunSpec("watch", "a->b", "watch", RunConfig(algorithm="coral").to_dict(), {})
    assert spec.config["algorithm_options"] == {"preset": algorithm_options("coral")["preset"]}
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    # the paper's formula divided by n before, and divides by n - 1 as printed now
    printed = dataclasses.replace(read, config={**read.config, "algorithm_options": {"preset": "paper"}})
    assert printed.config["algorithm_options"] == {"preset": "paper", "correction": "population"}
    assert printed.run_id not in (read.run_id, now.run_id)
    assert RunSpec.from_dict(json.loads(json.dumps(printed.to_dict()))) == printed


def test_the_rule_of_format_1_is_called_domainbeds_now() -> None:
    spec = dataclasses.replace(SPEC, config={**SPEC.config, "selection": "domainbed"})
    line = Record(spec, "finished", {"score": 0.5}).to_json()
    old = line.replace(f'"format":{FORMAT}', '"format":1')
    old = old.replace('"selection":"domainbed"', '"selection":"source-accuracy"')
    assert Record.from_json(old).spec == spec
    latest = dataclasses.replace(SPEC, config={**SPEC.config, "selection": "source-accuracy"})
    assert latest.run_id != spec.run_id
    assert Record.from_json(Record(latest, "finished", {"score": 0.5}).to_json()).spec == latest


def test_a_cache_does_not_name_a_run() -> None:
    assert dataclasses.replace(SPEC, data_options={"cache": True}).run_id == SPEC.run_id
