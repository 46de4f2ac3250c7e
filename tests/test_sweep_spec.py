"""A sweep's file: what it expands to, which draws its runs share, and what it refuses."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refused
from sweep_yaml import BASE, changed, load
from vardass.adapt.config import RunConfig
from vardass.data import named_seed, task_names
from vardass.lab.record import RunSpec
from vardass.lab.search import draw, named_space
from vardass.lab.spec import Sweep
from vardass.lab.sweep_file import Specification
from vardass.lab.yaml_file import dump_yaml, parse_yaml


def ids(sweep: Sweep) -> set[str]:
    return {run.run_id for run in sweep.runs()}


# --- expansion ----------------------------------------------------------------------------------------


def place(run: RunSpec) -> tuple[Any, ...]:
    return (run.repeat, run.data_name, run.task, *run.cell.values(), run.search)


def test_runs_are_the_product_in_order(tmp_path: Path) -> None:
    content = changed(
        grid={"refresh_every": [10, 50], "penalty": [0.5, 2]},
        algorithms=["mmd", {"name": "coral", "samplers": ["dpp"], "label": "C"}],
        data=[*BASE["data"], {"dataset": "watch", "name": "again", "tasks": "all"}],
    )
    data = {"watch": ["left-A->right-B", "right-B->left-A"], "again": task_names("watch")}
    cells = [("mmd", "uniform"), ("mmd", "vardass"), ("C", "dpp")]
    expected = [
        (repeat, name, task, *cell, *point, search)
        for repeat in range(2)
        for name, tasks in data.items()
        for task in tasks
        for cell in cells
        for point in itertools.product([10, 50], [0.5, 2])
        for search in range(3)
    ]
    sweep = load(tmp_path, content)
    runs = sweep.runs()
    assert [place(run) for run in runs] == expected
    assert list(runs[0].cell) == ["algorithm", "sampler", "refresh_every", "penalty"]
    assert len(ids(sweep)) == len(expected) == 2 * 14 * 12 * 3
    assert f"{len(expected):,} runs" in sweep.describe()
    for run in runs:
        assert run.config["refresh_every"] == run.cell["refresh_every"]
        assert run.config["algorithm_options"]["penalty"] == run.cell["penalty"]  # the grid, not the search


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.sampled_from(["erm", "mmd", "coral", "dann", "arm", "mcc"]), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["uniform", "vardass", "ordered", "dpp"]), min_size=1, max_size=3, unique=True),
)
def test_counts(
    tmp_path_factory: pytest.TempPathFactory, repeats: int, size: int, algorithms: list[str], samplers: list[str]
) -> None:
    content = changed(
        repeats=repeats, search={"size": size, "space": "paper"}, algorithms=algorithms, samplers=samplers
    )
    runs = load(tmp_path_factory.mktemp("sweep"), content).runs()
    counts = Counter((run.cell["algorithm"], run.cell["sampler"]) for run in runs)
    assert counts == {cell: 2 * repeats * size for cell in itertools.product(algorithms, samplers)}


def test_configs_are_complete_and_usable(tmp_path: Path) -> None:
    for run in load(tmp_path, BASE).runs():
        config = RunConfig(**run.config)
        assert config.to_dict() == run.config
        assert (config.steps, config.network) == (20, "mlp")
        assert RunSpec(**json.loads(json.dumps(asdict(run)))) == run


def test_runs_do_not_share_mutable_settings(tmp_path: Path) -> None:
    runs = load(tmp_path, BASE).runs()
    for name in ("config", "cell", "data_options"):
        assert len({id(getattr(run, name)) for run in runs}) == len(runs)
    assert len({id(run.config["algorithm_options"]) for run in runs}) == len(runs)


def test_seeds(tmp_path: Path) -> None:
    for run in load(tmp_path, BASE).runs():
        assert run.config["seed"] == named_seed("run", 3, run.repeat, run.search) % 2**31
        assert run.split_seed == named_seed("split", 3, run.repeat) % 2**31
    runs = load(tmp_path, BASE).runs()
    assert len({run.config["seed"] for run in runs}) == 6
    assert len({run.split_seed for run in runs}) == 2


# --- draws --------------------------------------------------------------------------------------------


def test_all_cells_and_tasks_share_draws(tmp_path: Path) -> None:
    drawn: dict[tuple[int, int], set[tuple[float, int]]] = {}
    penalties: dict[tuple[int, int], set[float]] = {}
    for run in load(tmp_path, changed(algorithms=["erm", "mmd", "coral"])).runs():
        key = (run.repeat, run.search)
        drawn.setdefault(key, set()).add((run.config["lr"], run.config["batch_size"]))
        if run.cell["algorithm"] == "erm":
            assert run.config["algorithm_options"] == {}
        else:
            penalties.setdefault(key, set()).add(run.config["algorithm_options"]["penalty"])
    assert all(len(values) == 1 for values in (*drawn.values(), *penalties.values()))
    tried = {key: values.pop() for key, values in drawn.items()}
    assert tried[0, 0] == tried[1, 0] == (1e-3, 64)  # the defaults
    assert len(set(tried.values())) == 5  # all others differ, between repeats too


def test_first_random_draws_the_first_too(tmp_path: Path) -> None:
    runs = load(tmp_path, changed(search={"size": 2, "first": "random", "space": "paper"})).runs()
    assert len({run.config["lr"] for run in runs}) == 4
    space = named_space("paper", "mmd")
    for run in (run for run in runs if run.cell["algorithm"] == "mmd"):
        found = draw(space, seed=3, repeat=run.repeat, search=run.search)
        assert found["lr"] == run.config["lr"]
        assert found["network_options.dropout"] == run.config["network_options"]["dropout"]


def test_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    space = {"lr": {"log10_uniform": [-4, -2]}, "batch_size": {"log2_uniform": [3, 5], "integer": True}}
    one = changed(search={"size": 3, "space": space})
    other = {key: one[key] for key in reversed(one)}
    other["search"] = {"space": dict(reversed(space.items())), "size": 3}
    assert [run.run_id for run in load(tmp_path, one).runs()] == [run.run_id for run in load(tmp_path, other).runs()]


@pytest.mark.parametrize(
    "longer",
    [
        {"samplers": ["dpp", "uniform", "vardass"]},
        {"algorithms": ["erm", "mmd", "coral"]},
        {"data": [{"dataset": "watch", "tasks": "all"}]},
        {"data": [{"dataset": "watch", "name": "more"}, *BASE["data"]]},
        {"repeats": 4},
        {"search": {"size": 7, "space": "paper-small"}},
        {"name": "another title"},
    ],
)
def test_a_sweep_can_be_extended(tmp_path: Path, longer: dict[str, Any]) -> None:
    before, after = ids(load(tmp_path, BASE)), ids(load(tmp_path, changed(**longer)))
    assert before <= after
    assert (before < after) == ("name" not in longer)


@pytest.mark.parametrize("other", [{"seed": 4}, {"settings": {"steps": 21}}, {"holdout": 0.3}])
def test_other_content_gives_other_runs(tmp_path: Path, other: dict[str, Any]) -> None:
    assert not ids(load(tmp_path, BASE)) & ids(load(tmp_path, changed(**other)))


def test_a_number_may_be_written_as_a_whole_one(tmp_path: Path) -> None:
    one = load(tmp_path, changed(settings={"lr": 1, "weight_decay": 0}, unlabelled_fraction=1))
    other = load(tmp_path, changed(settings={"lr": 1.0, "weight_decay": 0.0}, unlabelled_fraction=1.0))
    assert ids(one) == ids(other)


# --- levels -------------------------------------------------------------------------------------------


def test_what_is_said_last_counts(tmp_path: Path) -> None:
    content = changed(
        repeats=1,
        search={"size": 2, "first": "random", "space": {"lr": {"choice": [0.5]}}},
        settings={"batch_size": 16, "steps": 5, "penalty": 7, "network_options": {"hidden": [8]}},
        data=[
            {"dataset": "watch", "name": "a", "tasks": "left-A->right-B"},
            {"dataset": "watch", "name": "b", "tasks": "left-A->right-B", "settings": {"lr": 0.25, "steps": 6}},
        ],
        algorithms=["mmd", {"name": "coral", "options": {"penalty": 8}, "settings": {"steps": 7}}, "erm"],
        samplers=["uniform", {"name": "ordered", "label": "o", "options": {"plan_rank": 4}, "settings": {"steps": 8}}],
    )
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for run in load(tmp_path, content).runs():
        found[run.data_name, *run.cell.values()] = run.config
    assert {key: (c["lr"], c["batch_size"], c["steps"]) for key, c in found.items() if key[1] == "mmd"} == {
        ("a", "mmd", "uniform"): (0.5, 16, 5),
        ("a", "mmd", "o"): (0.5, 16, 8),
        ("b", "mmd", "uniform"): (0.25, 16, 6),
        ("b", "mmd", "o"): (0.25, 16, 8),
    }
    assert found["a", "coral", "uniform"]["steps"] == 7
    assert found["a", "coral", "uniform"]["algorithm_options"]["penalty"] == 8
    assert found["a", "mmd", "uniform"]["algorithm_options"] == {"penalty": 7}
    assert found["a", "erm", "uniform"]["algorithm_options"] == {}
    assert found["a", "erm", "o"]["sampler_options"] == {"plan_rank": 4}
    assert found["a", "erm", "uniform"]["sampler_options"] == {}
    assert found["a", "erm", "uniform"]["network_options"] == {"hidden": [8]}


def test_data_of_ones_own_are_named_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    data = {"dataset": "own_dataset:load", "name": "moons", "tasks": ["0->30"], "options": {"noise": 0.2}}
    run = load(tmp_path, changed(data=[data]), trust_code=True).runs()[0]
    assert (run.dataset, run.task, run.data_options) == ("own_dataset:load", "0->30", {"noise": 0.2})
    with refused("data[0].options", "'own_dataset:load'", "'nois'", "'noise'"):
        load(tmp_path, changed(data=[{**data, "options": {"nois": 0.2}}]), trust_code=True)
    with refused("data[0].dataset", "'own_data_set:load'", "'own_data_set'", "PYTHONPATH"):
        load(tmp_path, changed(data=[{**data, "dataset": "own_data_set:load"}]), trust_code=True)


def test_defaults_of_a_distribution(tmp_path: Path) -> None:
    content = changed(
        settings={"steps": 20},
        search={
            "size": 1,
            "space": {"lr": {"log10_uniform": [-4, -2], "default": 0.3}, "weight_decay": {"uniform": [0.1, 0.5]}},
        },
    )
    assert {(run.config["lr"], run.config["weight_decay"]) for run in load(tmp_path, content).runs()} == {(0.3, 0.0)}


def test_settings_that_depend_on_others_may_be_said_elsewhere(tmp_path: Path) -> None:
    content = changed(
        settings={"class_shares": "source"},
        data=[{**BASE["data"][0], "settings": {"refresh_every": 7}}],
        samplers=["ordered"],
    )
    assert {run.config["refresh_every"] for run in load(tmp_path, content).runs()} == {7}


def test_one_text_stands_for_a_list(tmp_path: Path) -> None:
    short = changed(data="watch", algorithms="mmd", samplers="uniform")
    long = changed(data=[{"dataset": "watch", "tasks": "all"}], algorithms=["mmd"], samplers=[{"name": "uniform"}])
    assert ids(load(tmp_path, short)) == ids(load(tmp_path, long))


def test_tasks_are_spelt_as_the_data_set_does(tmp_path: Path) -> None:
    content = changed(data=[{"dataset": "watch", "tasks": ["LEFT-a->right-B", "left-A+LEFT-B->right-A"]}])
    assert {run.task for run in load(tmp_path, content).runs()} == {"left-A->right-B", "left-A+left-B->right-A"}


def test_samplers_of_an_algorithm_may_be_labels_of_the_sweeps(tmp_path: Path) -> None:
    content = changed(
        samplers=["uniform", {"name": "vardass", "label": "few", "options": {"trials": 3}}],
        algorithms=[{"name": "mmd", "samplers": ["few", "dpp"]}],
    )
    cells = {run.cell["sampler"]: run.config for run in load(tmp_path, content).runs()}
    assert set(cells) == {"few", "dpp"}
    assert cells["few"]["sampler"] == "vardass"
    assert cells["few"]["sampler_options"] == {"trials": 3}


@pytest.mark.parametrize("algorithm", ["mmd", "erm"])
def test_recommended_in_the_place_of_a_sampler_is_all_that_adapt_does(tmp_path: Path, algorithm: str) -> None:
    own = {"steps": 20, "eval_every": 10}
    content = {**BASE, "search": {"size": 1}, "algorithms": [algorithm], "samplers": ["recommended"]}
    for chosen, wanted in (
        (own, RunConfig.recommended(algorithm=algorithm, **own)),
        ({**own, "steps": 800, "batch_size": 8}, RunConfig.recommended(algorithm=algorithm, steps=800, batch_size=8)),
    ):
        for run in load(tmp_path, {**content, "settings": chosen}).runs():
            assert run.cell == {"algorithm": algorithm, "sampler": "recommended"}
            kept = {name: value for name, value in run.config.items() if name not in ("seed", "eval_every")}
            assert kept == {name: value for name, value in wanted.to_dict().items() if name in kept}
    if algorithm == "mmd":
        (run, *_) = load(tmp_path, {**content, "settings": {**own, "penalty": 9}}).runs()
        assert run.config["algorithm_options"]["penalty"] == 9
        assert run.config["sampler_options"] == {"equal": True}


# --- files and folders --------------------------------------------------------------------------------


def embeddings(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("a", "b", "c"):
        np.savez(folder / f"{name}.npz", features=np.zeros((4, 2)), labels=np.arange(4) % 2)
    return folder


def test_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings(tmp_path / "data")
    (tmp_path / "conf").mkdir()
    other = embeddings(tmp_path / "elsewhere" / "x")
    content = changed(data=[{"dataset": "embeddings", "name": "mine", "root": "../data", "tasks": "all"}])
    monkeypatch.chdir(tmp_path / "elsewhere")
    sweep = load(tmp_path / "conf", content)
    assert {run.root for run in sweep.runs()} == {str(tmp_path / "data")}
    assert {run.task for run in sweep.runs()} == {"a->b", "a->c", "b->a", "b->c", "c->a", "c->b"}
    moved = load(tmp_path / "conf", content, roots={"mine": "x"})
    assert {run.root for run in moved.runs()} == {str(other)}
    assert ids(moved) == ids(sweep)  # the same data elsewhere


def test_yaml_of_a_sweep_gives_the_same_runs_from_anywhere(tmp_path: Path) -> None:
    embeddings(tmp_path / "data")
    data = [{"dataset": "embeddings", "root": "data"}, "watch"]
    changes = {"settings": {"steps": 9, "penalty": 2.0}, "repeats": 1, "search_size": 2, "seed": 8}
    sweep = load(tmp_path, changed(data=data), **changes)
    (tmp_path / "far").mkdir()
    again = load(tmp_path / "far", sweep.to_yaml())
    assert again.runs() == sweep.runs()
    assert sweep.text == (tmp_path / "sweep.yaml").read_text()


def test_yaml_that_is_written_can_be_read() -> None:
    content = {"a": ["1e3", "no", "1:30", "010", "2024-01-01", "", "~", "a: b", "é"], "b": {"c": [1e-5, 3, None, True]}}
    assert parse_yaml(dump_yaml(content)) == content


def test_entries_that_share_an_anchor_are_separate(tmp_path: Path) -> None:
    text = "data:\n- &d {dataset: watch, name: a, settings: {lr: 0.5}}\n- {<<: *d, name: b}\n"
    text += "algorithms: [mmd]\nsamplers: [uniform]\n"
    sweep = load(tmp_path, text, settings={"lr": 0.25}, data=["b"])
    assert {(run.data_name, run.config["lr"]) for run in sweep.runs()} == {("b", 0.25)}


def test_overrides_come_before_the_file(tmp_path: Path) -> None:
    content = changed(
        algorithms=["erm", {"name": "mmd", "options": {"penalty": 3}, "settings": {"steps": 4}}],
        data=[
            {"dataset": "watch", "settings": {"lr": 0.5, "steps": 3}},
            {"dataset": "watch", "name": "b"},
        ],
        search={"size": 2, "space": {"lr": {"choice": [1.0]}}},
    )
    sweep = load(tmp_path, content, settings={"steps": 2, "penalty": 5, "lr": 0.125}, data=["b"], repeats=1)
    assert {run.data_name for run in sweep.runs()} == {"b"}
    assert {(run.config["steps"], run.config["lr"]) for run in sweep.runs()} == {(2, 0.125)}
    assert {run.config["algorithm_options"].get("penalty") for run in sweep.runs()} == {None, 5}
    assert {run.repeat for run in sweep.runs()} == {0}


def test_plain_values_have_the_types_of_json() -> None:
    found = parse_yaml("{a: 1e-3, b: no, c: 2024-01-01, d: 010, e: 1:30, f: true, g: -5, h: ~, i: .5, j: 1_000, k: 1.}")
    assert list(found.values()) == [1e-3, "no", "2024-01-01", "010", "1:30", True, -5, None, 0.5, "1_000", 1.0]
    merged = parse_yaml("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\n")
    assert merged["y"] == {"a": 1, "b": 3}


def test_parts_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_parts.py").write_text(
        "from torch import nn\n"
        "from vardass.adapt.algorithms import MMD\n"
        "from vardass.samplers import UniformBatchSampler\n"
        "class Mine(MMD):\n    name = 'mine'\n"
        "class Drawn(UniformBatchSampler):\n    pass\n"
        "def net(input_shape):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    content = changed(
        algorithms=[{"name": "my_parts:Mine", "label": "mine", "options": {"penalty": 2}}],
        samplers=[{"name": "my_parts:Drawn", "options": {"replacement": True}}],
        settings={"network": "my_parts:net", "steps": 5},
    )
    configs = [run.config for run in load(tmp_path, content, trust_code=True).runs()]
    assert {(c["algorithm"], c["sampler"], c["network"]) for c in configs} == {
        ("my_parts:Mine", "my_parts:Drawn", "my_parts:net")
    }
    for part, wrong, place, right in (
        ("algorithms", "my_parts:Mne", "algorithms[0].name", "Mine"),
        ("samplers", "my_parts:Drwn", "mine with my_parts:Drwn", "Drawn"),
    ):
        with refused(place, f"'{wrong}'", f"'{right}'"):
            load(tmp_path, {**content, part: [wrong]}, trust_code=True)


def test_data_of_the_users_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_data.py").write_text(
        "from vardass.data import load_task\n"
        "def load(task, root=None, *, scale=1):\n"
        "    return load_task('watch', task)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = {"dataset": "my_data:load", "name": "mine", "tasks": ["left-A->right-B"], "options": {"scale": 2}}
    runs = load(tmp_path, changed(data=[entry], settings={"network": "mlp"}), trust_code=True).runs()
    assert {(run.dataset, run.data_name, run.root) for run in runs} == {("my_data:load", "mine", None)}
    placed = load(tmp_path, changed(data=[{**entry, "root": "."}]), trust_code=True).runs()
    assert {run.root for run in placed} == {str(tmp_path)}
    with refused("data[0].options", "'my_data:load'", "'scales'", "'scale'"):
        load(tmp_path, changed(data=[{**entry, "options": {"scales": 2}}]), trust_code=True)


def test_schema_for_editors_knows_what_the_file_may_say() -> None:
    schema = Specification.model_json_schema()
    json.dumps(schema)
    assert set(schema["required"]) == {"data", "algorithms"}
    assert not schema["additionalProperties"]
    known = schema["properties"]["settings"]["properties"]
    assert set(RunConfig.model_fields) - set(known) == {"algorithm", "regression", "sampler", "sampler_options", "seed"}
    assert known["steps"]["description"] == RunConfig.model_fields["steps"].description
    distribution = schema["$defs"]["Distribution"]["properties"]
    assert {"uniform", "log10_uniform", "log2_uniform", "choice", "integer", "default"} == set(distribution)
