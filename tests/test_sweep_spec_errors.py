"""What a sweep's file must not say, and how it is told so: the file, the place, the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweep_yaml import BASE, changed, load
from vardass.errors import InputError
from vardass.experiments.spec import load_sweep


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in BASE.items() if key not in names}


# --- what is refused ----------------------------------------------------------------------------------

WATCH = {"dataset": "watch"}
BAD: list[tuple[dict[str, Any], str]] = [
    # unknown names at each level
    ({"repeat": 3}, "unknown key 'repeat'; did you mean 'repeats'"),
    ({"search": {"sise": 3}}, "search: unknown key 'sise'; did you mean 'size'"),
    ({"search": {"first": "default"}}, "search.first: unknown choice 'default'; did you mean 'defaults'"),
    ({"search": {"size": 2, "space": "papper"}}, "search.space: unknown space 'papper'; did you mean 'paper'"),
    ({"search": {"space": {"like": "x"}}}, "search.space.like: unknown space 'x'"),
    ({"settings": {"stepz": 3}}, "settings: unknown setting 'stepz'; did you mean 'steps'"),
    ({"grid": {"refresh": [1]}}, "grid: unknown setting 'refresh'; did you mean 'refresh_"),
    ({"data": [{"dataset": "wach"}]}, r"data[0].dataset: unknown data set 'wach'; did you mean 'watch'"),
    ({"data": [WATCH, {"dataset": "watch", "task": "all"}]}, "data[1]: unknown key 'task'; did you mean 'tasks'"),
    ({"data": [{**WATCH, "tasks": ["left-A->right-C"]}]}, "data[0].tasks[0]: unknown task of watch 'left-A->right-C'"),
    ({"data": [{**WATCH, "tasks": ["left-A+left-B->rigt-A"]}]}, "unknown domain of watch 'rigt-A'"),
    ({"data": [{**WATCH, "options": {"standardized": 1}}]}, "data[0].options: unknown option of watch: 'standardized'"),
    ({"data": [{**WATCH, "settings": {"stps": 1}}]}, "data[0].settings: unknown setting 'stps'; did you mean 'steps'"),
    ({"data": [{**WATCH, "space": {"l_r": {"choice": [1]}}}]}, "data[0].space: unknown setting 'l_r'"),
    ({"algorithms": ["erm", "mmdd"]}, "algorithms[1]: unknown algorithm 'mmdd'; did you mean 'mmd'"),
    ({"algorithms": [{"name": "mmd", "opts": {}}]}, "algorithms[0]: unknown key 'opts'"),
    ({"algorithms": [{"name": "mmd", "options": {"penality": 1}}]}, "'penality'; did you mean 'penalty'"),
    ({"algorithms": [{"name": "erm", "space": {"penalty": {"choice": [1]}}}]}, "option of algorithm 'erm': 'penalty'"),
    ({"algorithms": [{"name": "mmd", "samplers": ["dp"]}]}, "algorithms[0].samplers[0]: unknown sampler 'dp'"),
    ({"samplers": ["uniform", "vardas"]}, "samplers[1]: unknown sampler 'vardas'; did you mean 'vardass'"),
    ({"samplers": [{"name": "dpp", "options": {"trial": 1}}]}, "samplers[0]: unknown option of sampler 'dpp'"),
    ({"settings": {"network_options": {"hiden": [2]}}}, "option of network 'mlp': 'hiden'; did you mean 'hidden'"),
    ({"settings": {"network": "mpl"}}, "unknown network 'mpl'; did you mean 'mlp'"),
    ({"settings": {"algorithm_options": {"x": 1}}}, "option of the algorithms of this sweep: 'x'"),
    ({"settings": {"selection": "orakel"}}, "settings: unknown selection 'orakel'; did you mean 'oracle'"),
    # wrong types and values
    ({"repeats": "five"}, "repeats must be a whole number, got 'five'"),
    ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ({"repeats": None}, "repeats must be a whole number, got None"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"seed": True}, "seed must be a whole number"),
    ({"holdout": 1.0}, "holdout must be a number of at least 0 and below 1"),
    ({"holdout": 0}, "holdout is 0, but selection 'source-accuracy' needs held-out"),
    ({"unlabelled_fraction": 0}, "unlabelled_fraction must be a number above 0"),
    ({"name": 5}, "name must be a text, got 5"),
    ({"settings": {"steps": 1.5}}, "settings: steps must be a whole number, got 1.5"),
    ({"settings": {"augment": "yes"}}, "settings.augment must be true or false, got 'yes'"),
    ({"settings": {"lr": "fast"}}, "settings: lr must be a number"),
    ({"settings": [1]}, "settings must be a mapping"),
    ({"settings": {"sampler": "dpp"}}, "sampler cannot be set here; list them under samplers"),
    ({"settings": {"seed": 1}}, "seed cannot be set here"),
    ({"settings": {"sampler_options": {"trials": 1}}}, "sampler_options cannot be set here"),
    ({"settings": {"penalty": -1}}, "penalty must be a number of at least 0"),
    ({"settings": {"penalty": 1, "algorithm_options": {"penalty": 1}}}, "algorithm_options.penalty twice"),
    ({"settings": {"network_options": {"dropout": 2}}}, "dropout"),
    ({"search": {"size": 2.0}}, "search.size must be a whole number"),
    ({"search": 10}, "search must be a mapping"),
    ({"search": {"size": 5}}, "search.size is 5, but there is no space"),
    ({"samplers": 5}, "samplers must be a list, got 5"),
    ({"samplers": [5]}, "samplers[0] must be a mapping"),
    ({"samplers": [{"label": "x"}]}, "samplers[0] has no name"),
    ({"samplers": [{"name": "vardass", "options": {"draws_per_stratum": 3}}]}, "draws_per_stratum"),
    ({"samplers": [{"name": "vardass", "options": {"solver": "kmean"}}]}, "samplers[0]: unknown solver 'kmean'"),
    ({"samplers": [{"name": "vardass", "options": {"trials": -4}}]}, "trials must be at least 1, got -4"),
    ({"samplers": [{"name": "vardass", "options": {"trials": "x"}}]}, "trials must be a whole number, got 'x'"),
    ({"samplers": [{"name": "dpp", "options": {"kernel": "x"}}]}, "unknown kernel 'x'"),
    ({"settings": {"device": "gpuu"}}, "settings.device is 'gpuu', which is no device"),
    ({"data": [{**WATCH, "settings": {"network": "conv"}}]}, "network 'conv' is not for vectors, which watch has"),
    ({"settings": {"groups": "classes"}}, "unknown option of sampler 'uniform': 'groups'"),
    ({"settings": {"refresh_options": {"perriod": 2}}}, "unknown option of refresh_policy 'every': 'perriod'"),
    ({"data": [{"name": "x"}]}, "data[0] has no dataset"),
    ({"data": 7}, "data must be a list"),
    ({"data": [7]}, "data[0] must be a mapping"),
    ({"data": [{**WATCH, "tasks": [1.5]}]}, "data[0].tasks[0] must be a text"),
    ({"grid": {"refresh_every": 10}}, "grid.refresh_every must be a list"),
    ({"grid": {"refresh_every": [10, 1.5]}}, "grid.refresh_every[1]: refresh_every must be a whole number"),
    ({"grid": {"penalty": [1.0]}}, "grid and algorithms[0]: unknown option of algorithm 'erm': 'penalty'"),
    ({"grid": {"sampler_options.trials": [3]}}, "unknown option of sampler 'uniform': 'trials'"),
    # distributions
    ({"search": {"space": {"lr": 0.1}}}, "search.space.lr must be a distribution"),
    ({"search": {"space": {"lr": {"loguniform": [1, 2]}}}}, "search.space.lr: unknown key 'loguniform'"),
    ({"search": {"space": {"lr": {"uniform": [1, 2], "choice": [1]}}}}, "search.space.lr needs one of"),
    ({"search": {"space": {"lr": {"uniform": [2, 1]}}}}, "lowest and highest"),
    ({"search": {"space": {"lr": {"uniform": [1]}}}}, "two numbers"),
    ({"search": {"space": {"lr": {"uniform": ["a", 1]}}}}, "two numbers"),
    ({"search": {"space": {"lr": {"choice": []}}}}, "must be a list of values"),
    ({"search": {"space": {"lr": {"uniform": [-1, 1]}}}}, "search.space.lr: lr must be a number of at least 0"),
    ({"search": {"space": {"lr": {"log10_uniform": [1e-5, 1e5]}}}}, "exponents beyond 64"),
    ({"search": {"space": {"batch_size": {"uniform": [8, 9]}}}}, "batch_size must be a whole number, got 8.0"),
    ({"search": {"space": {"batch_size": {"log2_uniform": [3, 7], "integer": 1}}}}, "integer must be true or false"),
    ({"search": {"space": {"steps": {"choice": [1, 0]}}}}, "search.space.steps: steps must be at least 1"),
    ({"search": {"space": {"steps": {"choice": [1]}}}}, "search.space searches steps, which is fixed beside it to 20"),
    ({"search": {"space": {"penalty": {"uniform": [-2, 1]}}}}, "penalty must be a number of at least 0"),
    ({"search": {"space": {"network_options.dropout": {"choice": [0.1, 3]}}}}, "dropout"),
    # nothing, or the same twice
    ({"samplers": []}, "samplers is an empty list"),
    ({"algorithms": []}, "algorithms is an empty list"),
    ({"data": []}, "data is an empty list"),
    ({"data": [{**WATCH, "tasks": []}]}, "data[0].tasks is an empty list"),
    ({"grid": {"refresh_every": []}}, "grid.refresh_every must be a list"),
    ({"samplers": ["uniform", "uniform"]}, "samplers[1] has the label 'uniform' once more"),
    ({"algorithms": ["mmd", {"name": "mmd", "options": {"penalty": 2}}]}, "algorithms[1] is 'mmd' with sampler"),
    ({"data": ["watch", WATCH]}, "data[1] gives the task 'left-A->left-B' of 'watch', as data[0] does"),
    ({"data": [{**WATCH, "tasks": ["left-A->left-B", "LEFT-A->left-B"]}]}, "data[0].tasks[1] is 'left-A->left-B'"),
    ({"grid": {"refresh_every": [5, 5]}}, "grid.refresh_every[1] is 5, which is there already"),
    # roots
    ({"data": [{**WATCH, "root": "."}]}, "data[0].root is '.', but watch is not read from there"),
    ({"data": ["office_home"]}, "data[0]: office-home is read from files"),
    ({"data": [{"dataset": "images", "root": "."}]}, "data[0].tasks: "),
    ({"repeats": 10**6}, "runs, more than 1,000,000"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_bad_content(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, changed(**changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "sweep.yaml") + ": ")


@pytest.mark.parametrize("missing", ["data", "algorithms", "samplers"])
def test_missing_parts(tmp_path: Path, missing: str) -> None:
    with pytest.raises(InputError, match=missing):
        load(tmp_path, without(missing))


def test_missing_root_is_named_in_full(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, changed(data=[{"dataset": "spawrious", "root": "no/such"}]))
    assert f"data[0].root is 'no/such', but there is no folder at {tmp_path / 'no' / 'such'}" in str(caught.value)
    with pytest.raises(InputError, match="unknown data 'wach'; did you mean 'watch'"):
        load(tmp_path, BASE, roots={"wach": "."})
    with pytest.raises(InputError, match="unknown data 'wach'; did you mean 'watch'"):
        load(tmp_path, BASE, data=["wach"])


def test_overrides_are_checked(tmp_path: Path) -> None:
    for options, message in (
        ({"settings": {"stps": 1}}, "unknown setting 'stps'; did you mean 'steps'"),
        ({"settings": {"steps": 0}}, "steps must be at least 1"),
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
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "a mapping of keys to values is needed, got a list"),
        ("hello", "a mapping of keys to values is needed, got 'hello'"),
        ("seed: 1\n  repeats: 2\n", "not YAML in line 2"),
        ("seed: [1, 2\nrepeats: 3\n", "not YAML in line 2"),
        ("seed: 1\n\trepeats: 2\n", "not YAML in line 2"),
        ("seed: 1\nrepeats: 2\nseed: 3\n", "seed is there twice, in lines 1 and 3"),
        ("data:\n  - dataset: watch\n    dataset: digits\n", "data[0].dataset is there twice, in lines 2 and 3"),
        ("seed: !!python/object:os.system 1\n", "has the type"),
        ("seed: .nan\n", "seed in line 1 is .nan; give a finite number"),
        ("1: 2\n", "key 1 of the file in line 1 is not a name"),
        ("data: &a\n  - *a\n", "contains itself"),
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
