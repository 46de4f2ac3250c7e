"""What a sweep's file must not say, and how it is told so: the file, the place, both values, the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweep_yaml import BASE, changed, load
from vardass.errors import InputError
from vardass.lab.spec import load_sweep
from vardass.lab.yaml_file import parse_yaml

WATCH = {"dataset": "watch"}
# one for each kind of error, spread over the places where it can occur
BAD: list[tuple[dict[str, Any], str]] = [
    # unknown names, at each level
    ({"repeat": 3}, "unknown key 'repeat'; did you mean 'repeats'"),
    ({"search": {"first": "default"}}, "search.first: unknown choice 'default'; did you mean 'defaults'"),
    ({"search": {"size": 2, "space": "papper"}}, "search.space: unknown space 'papper'; did you mean 'paper'"),
    ({"settings": {"stepz": 3}}, "settings: unknown setting 'stepz'; did you mean 'steps'"),
    ({"settings": {"selection": "orakel"}}, "settings.selection: unknown selection 'orakel'; did you mean 'oracle'"),
    ({"settings": {"algorithm_options": {"x": 1}}}, "unknown option of the algorithms of this sweep: 'x'"),
    ({"settings": {"network_options": {"hiden": [2]}}}, "option of network 'mlp': 'hiden'; did you mean 'hidden'"),
    ({"data": [{"dataset": "wach"}]}, "data[0].dataset: unknown data set 'wach'; did you mean 'watch'"),
    ({"data": [WATCH, {**WATCH, "task": "all"}]}, "data[1]: unknown key 'task'; did you mean 'tasks'"),
    (
        {"data": [{**WATCH, "tasks": ["left-A->right-C"]}]},
        "data 'watch'.tasks: unknown task of watch 'left-A->right-C'",
    ),
    (
        {"data": [{**WATCH, "options": {"standardized": 1}}]},
        "unknown option of data set 'watch': 'standardized'",
    ),
    ({"algorithms": ["erm", "mmdd"]}, "algorithms[1].name: unknown algorithm 'mmdd'; did you mean 'mmd'"),
    (
        {"algorithms": [{"name": "mmd", "options": {"penality": 1}}]},
        "algorithms[0]: unknown option of algorithm 'mmd': 'penality'; did you mean 'penalty'",
    ),
    ({"algorithms": [{"name": "mmd", "samplers": ["dp"]}]}, "algorithms[0].samplers[0].name: unknown sampler 'dp'"),
    ({"samplers": ["uniform", "vardas"]}, "samplers[1].name: unknown sampler 'vardas'; did you mean 'vardass'"),
    (
        {"samplers": ["uniform", {"name": "dpp", "options": {"trial": 1}}]},
        "watch, erm with dpp: unknown option of sampler 'dpp': 'trial'",
    ),
    ({"grid": {"refresh": [1]}}, "grid: unknown setting 'refresh'; did you mean 'refresh_"),
    ({"grid": {"penalty": [1.0]}}, "watch, erm with uniform and grid: unknown option of algorithm 'erm': 'penalty'"),
    # values that the setting, option or part cannot have
    ({"repeats": None}, "repeats must be a whole number, got None"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"holdout": 1.0}, "holdout: input should be less than 1, got 1.0"),
    (
        {"holdout": 0, "settings": {"selection": "source-accuracy"}},
        "holdout is 0, but selection 'source-accuracy' needs held-out samples; raise holdout",
    ),
    ({"unlabelled_fraction": 0}, "unlabelled_fraction: input should be greater than 0, got 0"),
    ({"name": 5}, "name must be a text, got 5; put it in quotes"),
    ({"settings": {"steps": 1.5}}, "settings.steps must be a whole number, got 1.5"),
    ({"settings": {"tensorboard": "yes"}}, "settings.tensorboard must be true or false, got 'yes'"),
    ({"settings": {"device": "gpuu"}}, "settings.device is 'gpuu', which is not a valid device; use auto"),
    ({"settings": {"penalty": -1}}, "penalty must be a number of at least 0, got -1"),
    ({"settings": {"network_options": {"dropout": 2}}}, "dropout"),
    ({"settings": {"class_shares": "source"}}, "unknown option of sampler 'uniform': 'groups'"),
    ({"search": {"size": 2.0}}, "search.size must be a whole number, got 2.0"),
    ({"data": [{**WATCH, "settings": {"network": "conv"}}]}, "network 'conv' is not for vectors, which watch has"),
    ({"samplers": [{"name": "vardass", "options": {"solver": "kmean"}}]}, "erm with vardass: unknown solver 'kmean'"),
    (
        {"samplers": [{"name": "vardass", "options": {"trials": -4}}]},
        "erm with vardass: trials must be at least 1, got -4",
    ),
    ({"grid": {"refresh_every": [10, 1.5]}}, "grid.refresh_every[1]: refresh_every must be a whole number, got 1.5"),
    # distributions
    ({"search": {"space": {"lr": 0.1}}}, "search.space.lr must be a distribution such as {log10_uniform: [-5, -3.5]}"),
    ({"search": {"space": {"lr": {"loguniform": [1, 2]}}}}, "search.space.lr: unknown key 'loguniform'"),
    ({"search": {"space": {"lr": {"uniform": [1, 2], "choice": [1]}}}}, "search.space.lr needs one of uniform"),
    ({"search": {"space": {"lr": {"uniform": [2, 1]}}}}, "search.space.lr.uniform must be lowest and highest"),
    ({"search": {"space": {"lr": {"uniform": ["a", 1]}}}}, "search.space.lr.uniform must be two numbers"),
    ({"search": {"space": {"lr": {"choice": []}}}}, "search.space.lr.choice must be a list of values, got []"),
    ({"search": {"space": {"lr": {"uniform": [-1, 1]}}}}, "search.space.lr must be a number of at least 0, got -1.0"),
    ({"search": {"space": {"lr": {"log10_uniform": [1e-5, 1e5]}}}}, "give exponents, not values"),
    (
        {"search": {"space": {"batch_size": {"uniform": [8, 9]}}}},
        "search.space.batch_size must be a whole number, got 8.0",
    ),
    ({"search": {"space": {"batch_size": {"choice": [8], "integer": True}}}}, "search.space.batch_size has choice and"),
    ({"search": {"space": {"penalty": {"uniform": [-2, 1]}}}}, "penalty must be a number of at least 0"),
    ({"search": {"size": 5}}, "search.size is 5, but there is no space to search; add 'space: paper'"),
    # other shapes, and nothing
    ({"settings": [1]}, "settings must be a mapping of names to values, got [1]"),
    ({"samplers": 5}, "samplers must be a list, got 5; write it as [a, b]"),
    ({"data": [7]}, "data[0] must be a mapping of names to values, got 7"),
    ({"data": [{**WATCH, "tasks": [1.5]}]}, "data[0].tasks[0] must be a text, got 1.5"),
    ({"grid": {"refresh_every": 10}}, "grid.refresh_every must be a list of values to compare, got 10"),
    ({"algorithms": []}, "algorithms is an empty list; give at least one entry"),
    ({"samplers": [{"label": "x"}]}, "samplers[0]: name is missing; write the entry as a text"),
    ({"data": [{"name": "x"}]}, "data[0]: dataset is missing; name one of watch"),
    # said in another place, or twice
    ({"settings": {"sampler": "dpp"}}, "settings: sampler cannot be set here; list them under samplers"),
    ({"settings": {"penalty": 1, "algorithm_options": {"penalty": 1}}}, "algorithm_options.penalty twice"),
    ({"search": {"space": {"steps": {"choice": [1]}}}}, "space searches steps, which is fixed beside it to 20"),
    (
        {"algorithms": [{"name": "mmd", "options": {"penalty": 1}, "settings": {"penalty": 2}}]},
        "algorithms[0] has penalty in options and in settings; give it once",
    ),
    ({"samplers": ["uniform", "uniform"]}, "algorithms[0] is 'erm' with sampler 'uniform', which is there already"),
    ({"algorithms": ["mmd", {"name": "mmd", "options": {"penalty": 2}}]}, "algorithms[1] is 'mmd' with sampler"),
    ({"data": ["watch", WATCH]}, "the task 'left-A->left-B' of 'watch' is there twice"),
    (
        {"data": [{**WATCH, "tasks": ["left-A->left-B", "LEFT-A->left-B"]}]},
        "the task 'left-A->left-B' of 'watch' is there twice",
    ),
    ({"grid": {"refresh_every": [5, 5]}}, "grid.refresh_every[1] is 5, which is there already; remove it"),
    # folders
    ({"data": [{**WATCH, "root": "."}]}, "data[0].root is '.', but watch is not read from there; remove it"),
    ({"data": ["office_home"]}, "data 'office-home': office-home is read from files; give its folder as root"),
    ({"data": [{"dataset": "images", "root": "."}]}, "data 'images'.tasks"),
    ({"repeats": 10**6}, "runs, more than 1,000,000; lower repeats"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_bad_content(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, changed(**changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "sweep.yaml") + ": ")


@pytest.mark.parametrize("missing", ["data", "algorithms", "samplers"])
def test_missing_parts(tmp_path: Path, missing: str) -> None:
    with pytest.raises(InputError, match=f"{missing} is missing"):
        load(tmp_path, {key: value for key, value in BASE.items() if key != missing})


def test_missing_root_is_named_in_full(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, changed(data=[{"dataset": "spawrious", "root": "no/such"}]))
    assert f"data 'spawrious': root is 'no/such', but there is no folder at {tmp_path / 'no' / 'such'}" in str(
        caught.value
    )
    with pytest.raises(InputError, match=r"--root wach=\.: unknown data 'wach'; did you mean 'watch'"):
        load(tmp_path, BASE, roots={"wach": "."})
    with pytest.raises(InputError, match="unknown data 'wach'; did you mean 'watch'"):
        load(tmp_path, BASE, data=["wach"])


def test_overrides_are_checked(tmp_path: Path) -> None:
    for options, message in (
        ({"settings": {"stps": 1}}, "overrides: unknown setting 'stps'; did you mean 'steps'"),
        ({"settings": {"steps": 0}}, r"overrides\.steps must be at least 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"search_size": 0}, "search.size must be at least 1"),
        ({"data": []}, "no data are left"),
    ):
        with pytest.raises(InputError, match=message):
            load(tmp_path, BASE, **options)
    with pytest.raises(InputError, match="compared under grid"):
        load(tmp_path, changed(grid={"lr": [0.1]}), settings={"lr": 0.2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "the file is empty"),
        (
            "- a\n- b\n",
            "a mapping of keys to values is needed, got ['a', 'b']; the file should hold at least data, algorithms",
        ),
        ("seed: 1\n  repeats: 2\n", "not YAML in line 2"),
        ("seed: 1\n\trepeats: 2\n", "not YAML in line 2"),
        ("data:\n  - dataset: watch\n    dataset: digits\n", "dataset is there twice, in lines 2 and 3; keep one"),
        ("seed: !!python/object:os.system 1\n", "could not determine a constructor"),
        ("data: !!float .nan\n", "only texts, finite numbers, lists and mappings can be used"),
        ("1: 2\n", "the key '1' in line 1 is not a name"),
        ("data: &a\n  - *a\n", "Circular reference"),
        ("seed: 1\n---\nseed: 2\n", "not YAML in line 2"),
        ("seed: *x\n", "not YAML in line 1"),
        ("seed: 1\x00", "not YAML"),
    ],
)
def test_bad_text(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "sweep.yaml" in str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file at .*none\.yaml"):
        load_sweep(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="unknown preset 'paper-tabel1'; did you mean 'paper-table1'"):
        load_sweep("paper-tabel1")
    with pytest.raises(InputError, match="is a folder"):
        load_sweep(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(InputError, match="not UTF-8"):
        load_sweep(tmp_path / "latin.yaml")


def bomb(levels: int) -> str:
    """A few lines whose aliases stand for 10 ** levels entries."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def test_aliases_cannot_fill_the_memory(tmp_path: Path) -> None:
    assert len(parse_yaml(bomb(3))["a2"]) == 10
    with pytest.raises(InputError, match=r"sweep.yaml: its aliases stand for 1.23e\+30 entries, more than 1,000,000"):
        load(tmp_path, bomb(30))
    merged = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)
    )
    with pytest.raises(InputError, match="its aliases stand for"):
        load(tmp_path, merged)
    with pytest.raises(InputError, match="nested too deeply"):
        load(tmp_path, "a: " + "[" * 100_000)
    with pytest.raises(InputError, match="only texts, finite numbers, lists and mappings"):
        load(tmp_path, "a: &a [*a]")
    with pytest.raises(InputError, match="it has 10,000,004 characters, more than 10,000,000"):
        load(tmp_path, "a: b" + " " * 10_000_000)
