"""Checks of user input that no other file tests: names, and objects found by their names."""

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from conftest import refused
from vardass.errors import InputError
from vardass.validate import (
    as_features,
    as_weights,
    check_count,
    check_number,
    check_seed,
    choose,
    import_by_name,
    shorten,
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of a user that is on the import path."""
    folder = tmp_path / "users_own"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text("class Sampler:\n    class Inner:\n        pass\n")
    (folder / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "users_own"
    for name in [name for name in sys.modules if name.split(".")[0] == "users_own"]:
        del sys.modules[name]


def test_an_object_is_found_by_module_and_name(package: str) -> None:
    assert import_by_name("pathlib:Path", "data set") is Path
    sampler = import_by_name(f"{package}.parts:Sampler", "sampler")
    assert sampler.__module__ == "users_own.parts"
    assert import_by_name(f"{package}.parts:Sampler.Inner", "sampler") is sampler.Inner


@pytest.mark.parametrize(
    "name",
    ["pathlib.Path", "pathlib:", ":Path", "pathlib:Path:Path", ".pathlib:Path", "path lib:Path", "./mine.py:Path", ""],
)
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with refused(f"algorithm {name!r}", "package.module:Name"):
        import_by_name(name, "algorithm")


def test_a_missing_module_says_how_to_make_it_importable(package: str) -> None:
    with refused("kernel 'nowhere.at.all:K'", "'nowhere'", "PYTHONPATH"):
        import_by_name("nowhere.at.all:K", "kernel")
    with refused(f"kernel '{package}.other:K'", f"'{package}.other'", "PYTHONPATH"):
        import_by_name(f"{package}.other:K", "kernel")


def test_the_current_folder_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_in_this_folder.py").write_text("Thing = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    before = list(sys.path)
    with refused("data set 'module_in_this_folder:Thing'", "'module_in_this_folder'", "PYTHONPATH"):
        import_by_name("module_in_this_folder:Thing", "data set")
    assert sys.path == before


def test_a_missing_name_is_reported_with_the_nearest(package: str) -> None:
    with refused(f"{package}.parts", "'Sampler_'", "'Sampler'"):
        import_by_name(f"{package}.parts:Sampler_", "sampler")
    with refused(f"{package}.parts", "'Sampler.Outer'"):
        import_by_name(f"{package}.parts:Sampler.Outer", "sampler")
    with refused("time (built in)", "'nothing_near'"):
        import_by_name("time:nothing_near", "sampler")


def test_an_error_inside_the_module_is_shown_as_it_is(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        import_by_name(f"{package}.broken:Thing", "network")


def test_a_name_is_chosen_as_it_is_spelt_or_whatever_the_case() -> None:
    assert choose("A-C", "task", ("A-C", "C-A")) == "A-C"
    assert choose("c-a", "task", ("A-C", "C-A"), any_case=True) == "C-A"
    with refused("'a-c'", "'A-C'", "A-C, C-A", field="task"):
        choose("a-c", "task", ("A-C", "C-A"))
    with refused("'xyz'", "A-C, C-A", field="task"):
        choose("xyz", "task", ("A-C", "C-A"), any_case=True)


def test_long_lists_of_names_are_cut() -> None:
    assert shorten([]) == "none"
    assert shorten(["a", "b"]) == "'a', 'b'"
    assert shorten([str(i) for i in range(9)]) == "'0', '1', '2', '3', '4', '5', ... (9 in all)"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: check_count(0, "steps"), "steps"),
        (lambda: check_number(2.0, "share", low=0.0, high=1.0), "share"),
        (lambda: choose("sgdd", "optimiser", ("adam", "sgd")), "optimiser"),
        (lambda: as_weights([0.5], 2, torch.zeros(2), "weights_x"), "weights_x"),
        (lambda: as_features(torch.zeros(2, 2, 2)), "features"),
        (lambda: check_seed("now"), "seed"),
    ],
)
def test_an_error_carries_the_name_of_what_is_wrong(call: Callable[[], object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.field == field
    assert pickle.loads(pickle.dumps(caught.value)).field == field  # errors come back from worker processes
