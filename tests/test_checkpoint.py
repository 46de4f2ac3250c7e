"""A checkpoint gives back what was put in, bit for bit, or says what is wrong with the file."""

from __future__ import annotations

import errno
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refused
from vardass.adapt.run_folder import load_checkpoint, save_checkpoint
from vardass.errors import InputError

KEYS = st.one_of(st.text(max_size=4), st.integers(-5, 5), st.sampled_from(["vardass", "a.b", ""]))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.floats(-1e30, 1e30), max_size=3).map(lambda values: torch.tensor(values, dtype=torch.float64)),
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def through(path: Path, state: Any) -> Any:
    save_checkpoint(path, {"state": state})
    return load_checkpoint(path)["state"]


@settings(max_examples=60, deadline=None)
@given(state=NESTED)
def test_any_nested_state_comes_back(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert same(through(tmp_path_factory.mktemp("state") / "file", state), state)


def test_an_optimisers_state_comes_back(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1 / 3)
    layer(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    assert same(through(tmp_path / "file", optimiser.state_dict()), optimiser.state_dict())


def test_keys_that_look_alike_stay_apart(tmp_path: Path) -> None:
    state = {1: torch.ones(1), "1": torch.zeros(1), "a.b": torch.full((1,), 2.0), "a": {"b": torch.full((1,), 3.0)}}
    assert same(through(tmp_path / "file", state), state)


def test_views_and_special_numbers_come_back(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3)
    found = through(tmp_path / "file", {"view": base.T, "base": base, "half": base.bfloat16()})
    assert torch.equal(found["view"], base.T)
    assert torch.equal(found["base"], base)
    assert found["half"].dtype == torch.bfloat16
    special = through(tmp_path / "file", [math.inf, -math.inf, math.nan])
    assert special[:2] == [math.inf, -math.inf]
    assert math.isnan(special[2])


def test_a_new_checkpoint_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save_checkpoint(tmp_path / "file", {"x": torch.full((2,), value), "value": value})
    found = load_checkpoint(tmp_path / "file")
    assert found["x"].tolist() == [2.0, 2.0]
    assert found["value"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kept", [0, 4, 40, 700, -1])
def test_a_truncated_checkpoint_is_named_with_a_remedy(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"x": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:kept])
    with refused(path, f"{path.stat().st_size} bytes", "damaged", "another folder"):
        load_checkpoint(path)


def test_a_truncated_checkpoint_is_no_matter_of_permissions(tmp_path: Path) -> None:
    """Of files of tens of kilobytes torch says "invalid argument", as it looks for their end before their beginning."""
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"x": torch.arange(100_000.0)})
    whole = path.read_bytes()
    for kept in range(4_000, 100_000, 4_000):
        path.write_bytes(whole[:kept])
        with refused(path, f"{kept} bytes", "damaged", "another folder"):
            load_checkpoint(path)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code was run",)


def test_other_files_are_refused_and_no_code_in_them_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    with refused(path, "no checkpoint"):
        load_checkpoint(path)
    path.write_text("hello " * 100)
    with refused(path, "600 bytes", "damaged"):
        load_checkpoint(path)
    torch.save({"x": Evil()}, path)
    with refused(path, f"{path.stat().st_size} bytes", "damaged"):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Evil()))
    with refused(path, f"{path.stat().st_size} bytes", "damaged"):
        load_checkpoint(path)
    assert "code was run" not in capsys.readouterr().out
    for other in ({"vardass": 99}, [1, 2], torch.ones(1)):
        torch.save(other, path)
        with refused(path, "not a checkpoint", "format 3"):
            load_checkpoint(path)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    save_checkpoint(path, {"x": torch.ones(3)})

    def stale(*given: Any, **options: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", stale)
        with pytest.raises(InputError) as found:
            load_checkpoint(path)
    assert isinstance(found.value.__cause__, OSError)
    assert all(each in str(found.value) for each in (str(path), "Stale file handle", "permissions"))
    assert "damaged" not in str(found.value)
    with refused(tmp_path, "no checkpoint"):
        load_checkpoint(tmp_path)
    assert load_checkpoint(path)["x"].tolist() == [1.0, 1.0, 1.0]


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with refused("inner.0", "object", "tensors"):
        save_checkpoint(tmp_path / "file", {"inner": [object()]})
    assert not list(tmp_path.iterdir())
