"""Time and memory of a sweep: the sums that are made of what is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sweep_yaml import load
from vardass.data import load_task, split_task
from vardass.lab import sweep_cost as module
from vardass.lab.record import RunSpec
from vardass.lab.sweep_cost import Estimate, estimate

GIB = 2**30


@pytest.fixture(autouse=True)
def _one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured is done once and takes a second."""

    def timed(work: Any) -> float:
        work()
        return 1.0

    monkeypatch.setattr(module, "_timed", timed)


def runs_of(folder: Path, **changes: Any) -> list[RunSpec]:
    content = {
        "settings": {"steps": 10, "eval_every": 4, "batch_size": 8, "refresh_every": 5, "feature_source": "full"},
        "data": [{"dataset": "watch", "tasks": ["left-A->right-B"]}],
        "algorithms": ["mmd"],
        "samplers": ["uniform"],
    }
    return load(folder, {**content, **changes}).runs()


def sizes(run: RunSpec) -> dict[str, int]:
    splits = split_task(load_task("watch", run.task), seed=run.split_seed)
    return {name: len(getattr(splits, name)) for name in vars(splits)}


def test_the_parts_of_a_run(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path)
    n = sizes(run)
    parts = estimate([run], jobs=1).seconds["watch"]
    # a step of 8 + 8 samples takes a second, and so does a pass of 8
    assert parts["training"] == pytest.approx(10.0)
    held_out = n["source_val"] + n["target_val"]
    assert parts["evaluation"] == pytest.approx((3 * held_out + n["target_test"] + n["source_val"]) / 8)
    assert parts["features"] == parts["strata"] == 0.0  # uniform batches need none
    assert parts["drawing"] == pytest.approx(2 * 10 / 10)  # ten batches of each domain take a second


def test_strata_cost_passes_and_solves_that_grow_with_the_square(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, samplers=[{"name": "vardass", "options": {"trials": 2}}])
    n = sizes(run)
    found = estimate([run], jobs=1)
    parts = found.seconds["watch"]
    trained = [n["source_train"], n["target_unlabelled"]]
    assert parts["features"] == pytest.approx(2 * sum(trained) / 8)  # before steps 0 and 5
    rows = [2 ** round(np.log2(size)) for size in trained]
    assert parts["strata"] == pytest.approx(2 * sum((size / row) ** 2 for size, row in zip(trained, rows)))
    (uniform,) = runs_of(tmp_path)
    assert found.memory - estimate([uniform], jobs=1).memory < 4.0 * max(trained) ** 2 + GIB / 4
    assert module._matrix_bytes(run, module._Data(run)) == 4.0 * max(trained) ** 2


def test_a_bank_needs_no_passes_and_erm_no_target(tmp_path: Path) -> None:
    settings = {"steps": 10, "batch_size": 8, "feature_source": "bank", "refresh_every": 5}
    (run,) = runs_of(tmp_path, settings=settings, algorithms=["erm"], samplers=["stratified"])
    parts = estimate([run], jobs=1).seconds["watch"]
    assert parts["features"] == 0.0
    assert parts["training"] == pytest.approx(10.0)  # 8 samples a second now
    n = sizes(run)["source_train"]
    assert parts["drawing"] == pytest.approx((n / 2 ** round(np.log2(n))) ** 2)


def test_files_are_loaded_by_workers_and_caches_take_shared_memory(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for domain in ("a", "b"):
        for kind in ("x", "y"):
            (tmp_path / "images" / domain / kind).mkdir(parents=True)
            for number in range(10):
                pixels = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / domain / kind / f"{number}.png")
    entry = {"dataset": "images", "root": "images", "tasks": ["a->b"], "options": {"size": 16}}
    settings = {"steps": 10, "batch_size": 4, "eval_every": 10, "network": "conv", "workers": 2}
    (slow,) = runs_of(tmp_path, data=[entry], settings=settings)
    cached = {**entry, "options": {"size": 16, "cache": True}}
    (fast,) = runs_of(tmp_path, data=[cached], settings=settings)
    (cropped,) = runs_of(tmp_path, data=[cached], settings={**settings, "augment": "source"})
    plain, kept, crops = (estimate([run], jobs=3) for run in (slow, fast, cropped))
    # 8 files take a second, by two processes half of it: a step of 4 + 4 samples waits less than it trains
    assert plain.seconds["images"]["training"] == pytest.approx(10.0)
    assert kept.seconds["images"]["training"] == pytest.approx(10.0 + 40 / 16)  # each file once
    assert crops.seconds["images"]["training"] == pytest.approx(10.0 + 40 / 16)
    assert plain.seconds["images"]["evaluation"] == pytest.approx(1.5 * kept.seconds["images"]["evaluation"])
    assert (plain.shared, kept.shared) == (0.0, 2 * 40 * 3 * 16 * 16)  # of the two tasks that a worker keeps
    assert "/dev/shm" in kept.describe()


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    (run,) = runs_of(
        tmp_path, settings={"network": "nobody/nothing", "steps": 5, "network_options.local_files_only": True}
    )
    found = estimate([run], jobs=2)
    assert found.seconds == {}
    assert found.left_out[0].startswith("watch left-A->right-B: ")
    assert found.describe().startswith("time and memory cannot be estimated\n  left out: watch")
    (other,) = runs_of(tmp_path)
    assert "left out: watch" in estimate([run, other], jobs=2).describe()


def test_the_description_adds_up() -> None:
    parts = {"training": 3600.0, "evaluation": 0.0, "features": 0.0, "strata": 3600.0, "drawing": 0.0}
    text = Estimate({"a": parts, "b": parts}, 2 * GIB, 0.0, 4).describe()
    assert "about 60 min with 4 at a time, 4.0 h in one process" in text
    assert "a: 2.0 h (training 50%, strata 50%)" in text
    assert "about 2.0 GiB for the largest run, 8.0 GiB with 4 at a time" in text
    assert "measured on this machine" in text
