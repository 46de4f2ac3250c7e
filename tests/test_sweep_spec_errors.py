"""What a sweep's file must not say, and how it is told so: the file, the place, both values, the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import refused
from sweep_yaml import BASE, changed, load
from vardass.lab.spec import load_sweep
from vardass.lab.yaml_file import parse_yaml

WATCH = {"dataset": "watch"}
# one for each kind of error, spread over the places where it can occur; what the message names: place, both values
BAD: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    # unknown names, at each level
    ({"repeat": 3}, ("'repeat'", "'repeats'")),
    ({"search": {"first": "default"}}, ("search.first", "'default'", "'defaults'")),
    ({"search": {"size": 2, "space": "papper"}}, ("search.space", "'papper'", "'paper'")),
    ({"settings": {"stepz": 3}}, ("settings", "'stepz'", "'steps'")),
    ({"settings": {"selection": "orakel"}}, ("settings.selection", "'orakel'", "'oracle'")),
    ({"settings": {"algorithm_options": {"x": 1}}}, ("option of the algorithms", "'x'", "penalty")),
    ({"settings": {"network_options": {"hiden": [2]}}}, ("network 'mlp'", "'hiden'", "'hidden'")),
    ({"data": [{"dataset": "wach"}]}, ("data[0].dataset", "'wach'", "'watch'")),
    ({"data": [WATCH, {**WATCH, "task": "all"}]}, ("data[1]", "'task'", "'tasks'")),
    (
        {"data": [{**WATCH, "tasks": ["left-A->right-C"]}]},
        ("data 'watch'.tasks", "'left-A->right-C'", "left-B->left-A"),
    ),
    ({"data": [{**WATCH, "options": {"standardized": 1}}]}, ("data[0].options", "'standardized'", "'standardised'")),
    ({"algorithms": ["erm", "mmdd"]}, ("algorithms[1].name", "'mmdd'", "'mmd'")),
    (
        {"algorithms": [{"name": "mmd", "options": {"penality": 1}}]},
        ("algorithms[0]", "algorithm 'mmd'", "'penality'", "'penalty'"),
    ),
    ({"algorithms": [{"name": "mmd", "samplers": ["dp"]}]}, ("algorithms[0].samplers[0].name", "'dp'", "'dpp'")),
    ({"samplers": ["uniform", "vardas"]}, ("samplers[1].name", "'vardas'", "'vardass'")),
    (
        {"samplers": ["uniform", {"name": "dpp", "options": {"trial": 1}}]},
        ("watch, erm with dpp", "sampler 'dpp'", "'trial'", "kernel_rank"),
    ),
    ({"grid": {"refresh": [1]}}, ("grid", "'refresh'", "'refresh_every'")),
    ({"grid": {"penalty": [1.0]}}, ("watch, erm with uniform and grid", "algorithm 'erm'", "'penalty'")),
    # values that the setting, option or part cannot have
    ({"repeats": None}, ("repeats", None)),
    ({"seed": -1}, ("seed", 0, -1)),
    ({"holdout": 1.0}, ("holdout", "less than 1", 1.0)),
    ({"holdout": 0, "settings": {"selection": "source-accuracy"}}, ("holdout is 0", "'source-accuracy'")),
    ({"unlabelled_fraction": 0}, ("unlabelled_fraction", "greater than 0", "got 0")),
    ({"name": 5}, ("name", "text", 5)),
    ({"settings": {"steps": 1.5}}, ("settings.steps", 1.5)),
    ({"settings": {"tensorboard": "yes"}}, ("settings.tensorboard", "true", "false", "'yes'")),
    ({"settings": {"device": "gpuu"}}, ("settings.device", "'gpuu'", "cuda:1")),
    ({"settings": {"penalty": -1}}, ("watch, mmd with uniform", "penalty", 0, -1)),
    ({"settings": {"network_options": {"dropout": 2}}}, ("watch, erm with uniform", "dropout", "0 and below 1", 2)),
    ({"settings": {"class_shares": "source"}}, ("sampler 'uniform'", "class_shares='source'")),
    ({"search": {"size": 2.0}}, ("search.size", 2.0)),
    ({"data": [{**WATCH, "settings": {"network": "conv"}}]}, ("watch, erm with uniform", "'conv'", "'mlp'")),
    (
        {"samplers": [{"name": "vardass", "options": {"solver": "kmean"}}]},
        ("watch, erm with vardass", "solver", "'kmean'", "'kmeans'"),
    ),
    ({"samplers": [{"name": "vardass", "options": {"trials": -4}}]}, ("watch, erm with vardass", "trials", 1, -4)),
    ({"grid": {"refresh_every": [10, 1.5]}}, ("grid.refresh_every[1]", 1.5)),
    # distributions
    ({"search": {"space": {"lr": 0.1}}}, ("search.space.lr", "log10_uniform", 0.1, "settings")),
    ({"search": {"space": {"lr": {"loguniform": [1, 2]}}}}, ("search.space.lr", "'loguniform'", "log10_uniform")),
    ({"search": {"space": {"lr": {"uniform": [1, 2], "choice": [1]}}}}, ("search.space.lr", "uniform and choice")),
    ({"search": {"space": {"lr": {"uniform": [2, 1]}}}}, ("search.space.lr.uniform", "[2, 1]", "order")),
    ({"search": {"space": {"lr": {"uniform": ["a", 1]}}}}, ("search.space.lr.uniform", "two numbers", "['a', 1]")),
    ({"search": {"space": {"lr": {"choice": []}}}}, ("search.space.lr.choice", "[]")),
    ({"search": {"space": {"lr": {"uniform": [-1, 1]}}}}, ("search.space.lr", 0, -1.0)),
    (
        {"search": {"space": {"lr": {"log10_uniform": [1e-5, 1e5]}}}},
        ("search.space.lr.log10_uniform", "exponents", [1e-5, 1e5]),
    ),
    ({"search": {"space": {"batch_size": {"uniform": [8, 9]}}}}, ("search.space.batch_size", 8.0)),
    (
        {"search": {"space": {"batch_size": {"choice": [8], "integer": True}}}},
        ("search.space.batch_size", "choice", "integer"),
    ),
    ({"search": {"space": {"penalty": {"uniform": [-2, 1]}}}}, ("watch, mmd with uniform", "penalty", 0, -2.0)),
    ({"search": {"size": 5}}, ("search.size", 5, "space: paper")),
    # other shapes, and nothing
    ({"settings": [1]}, ("settings", "[1]", "name: value")),
    ({"samplers": 5}, ("samplers", 5, "[a, b]")),
    ({"data": [7]}, ("data[0]", 7, "name: value")),
    ({"data": [{**WATCH, "tasks": [1.5]}]}, ("data[0].tasks[0]", 1.5, "text")),
    ({"grid": {"refresh_every": 10}}, ("grid.refresh_every", 10, "[10, 100]")),
    ({"algorithms": []}, ("algorithms", "empty list")),
    ({"samplers": [{"label": "x"}]}, ("samplers[0]", "name is missing")),
    ({"data": [{"name": "x"}]}, ("data[0]", "dataset is missing", "watch")),
    # said in another place, or twice
    ({"settings": {"sampler": "dpp"}}, ("settings", "sampler", "samplers")),
    (
        {"settings": {"penalty": 1, "algorithm_options": {"penalty": 1}}},
        ("settings", "algorithm_options.penalty twice"),
    ),
    ({"search": {"space": {"steps": {"choice": [1]}}}}, ("space", "steps", 20)),
    (
        {"algorithms": [{"name": "mmd", "options": {"penalty": 1}, "settings": {"penalty": 2}}]},
        ("algorithms[0]", "penalty", "options", "settings"),
    ),
    ({"samplers": ["uniform", "uniform"]}, ("algorithms[0]", "'erm'", "'uniform'", "label")),
    (
        {"algorithms": ["mmd", {"name": "mmd", "options": {"penalty": 2}}]},
        ("algorithms[1]", "'mmd'", "'uniform'", "label"),
    ),
    ({"data": ["watch", WATCH]}, ("'left-A->left-B' of 'watch'", "twice")),
    ({"data": [{**WATCH, "tasks": ["left-A->left-B", "LEFT-A->left-B"]}]}, ("'left-A->left-B' of 'watch'", "twice")),
    ({"grid": {"refresh_every": [5, 5]}}, ("grid.refresh_every[1]", "is 5")),
    # folders
    ({"data": [{**WATCH, "root": "."}]}, ("data[0].root", "'.'", "watch")),
    ({"data": ["office_home"]}, ("data 'office-home'", "root", "--root office-home=DIR")),
    ({"data": [{"dataset": "images", "root": "."}]}, ("data 'images'.tasks", "0 folders", 2)),
    ({"repeats": 10**6}, ("24,000,000 runs", "1,000,000", "repeats")),
]


@pytest.mark.parametrize(("changes", "named"), BAD, ids=[", ".join(map(str, named))[:60] for _, named in BAD])
def test_bad_content(tmp_path: Path, changes: dict[str, Any], named: tuple[Any, ...]) -> None:
    with refused(tmp_path / "sweep.yaml", *named):
        load(tmp_path, changed(**changes))


@pytest.mark.parametrize("missing", ["data", "algorithms", "samplers"])
def test_missing_parts(tmp_path: Path, missing: str) -> None:
    with refused(tmp_path / "sweep.yaml", f"{missing} is missing"):
        load(tmp_path, {key: value for key, value in BASE.items() if key != missing})


def test_missing_root_is_named_in_full(tmp_path: Path) -> None:
    with refused("data 'spawrious'", "'no/such'"):
        load(tmp_path, changed(data=[{"dataset": "spawrious", "root": "no/such"}]))
    with refused("--root wach=.", "'wach'", "'watch'"):
        load(tmp_path, BASE, roots={"wach": "."})
    with refused("data", "'wach'", "'watch'"):
        load(tmp_path, BASE, data=["wach"])


def test_overrides_are_checked(tmp_path: Path) -> None:
    for options, named in (
        ({"settings": {"stps": 1}}, ("overrides", "'stps'", "'steps'")),
        ({"settings": {"steps": 0}}, ("overrides.steps", 1, 0)),
        ({"repeats": 0}, ("repeats", 1, 0)),
        ({"search_size": 0}, ("search.size", 1, 0)),
        ({"data": []}, ("no data", "watch")),
    ):
        with refused(tmp_path / "sweep.yaml", *named):
            load(tmp_path, BASE, **options)
    with refused("lr", "grid", 0.2):
        load(tmp_path, changed(grid={"lr": [0.1]}), settings={"lr": 0.2})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("# nothing\n", ("empty", "data, algorithms and samplers")),
        ("- a\n- b\n", ("mapping", "['a', 'b']", "data, algorithms and samplers")),
        ("seed: 1\n  repeats: 2\n", ("line 2", "column 10", "colons")),
        ("seed: 1\n\trepeats: 2\n", ("line 2", "column 1", "'\\t'")),
        ("data:\n  - dataset: watch\n    dataset: digits\n", ("dataset", "lines 2 and 3")),
        ("seed: !!python/object:os.system 1\n", ("line 1", "column 7", "os.system")),
        ("data: !!float .nan\n", ("finite numbers", "float")),
        ("1: 2\n", ("'1'", "line 1", "quotes")),
        ("data: &a\n  - *a\n", ("lists and mappings", "Circular")),
        ("seed: 1\n---\nseed: 2\n", ("line 2", "column 1", "another document")),
        ("seed: *x\n", ("line 1", "column 7", "'x'")),
        ("seed: 1\x00", ("#x0000", "position 7", "UTF-8")),
    ],
)
def test_bad_text(tmp_path: Path, text: str, named: tuple[str, ...]) -> None:
    with refused(tmp_path / "sweep.yaml", *named):
        load(tmp_path, text)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with refused(tmp_path / "none.yaml", "paper-table1"):
        load_sweep(tmp_path / "none.yaml")
    with refused("preset", "'paper-tabel1'", "'paper-table1'"):
        load_sweep("paper-tabel1")
    with refused(f"{tmp_path} is a folder", tmp_path / "sweep.yaml"):
        load_sweep(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with refused(tmp_path / "latin.yaml", "UTF-8", "byte 9"):
        load_sweep(tmp_path / "latin.yaml")


def bomb(levels: int) -> str:
    """A few lines whose aliases stand for 10 ** levels entries."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def test_aliases_cannot_fill_the_memory(tmp_path: Path) -> None:
    assert len(parse_yaml(bomb(3))["a2"]) == 10
    with refused(tmp_path / "sweep.yaml", "aliases", "1.23e+30", "1,000,000"):
        load(tmp_path, bomb(30))
    merged = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)
    )
    with refused("aliases", "3.7e+29", "1,000,000"):
        load(tmp_path, merged)
    with refused(tmp_path / "sweep.yaml", "nested too deeply"):
        load(tmp_path, "a: " + "[" * 100_000)
    with refused("lists and mappings", "Circular"):
        load(tmp_path, "a: &a [*a]")
    with refused("10,000,004", "10,000,000"):
        load(tmp_path, "a: b" + " " * 10_000_000)
