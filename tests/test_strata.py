"""Strata: derived numbers, files that survive a crash, and files that are not strata."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pickle
import stat
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refused
from vardass.errors import InputError
from vardass.files import atomic_write
from vardass.strata import LowerBound, Strata


def example(**changes: Any) -> Strata:
    fields: dict[str, Any] = {
        "labels": torch.tensor([2, 0, 1, 0, 2, 2, 0, 2]),
        "k": 3,
        "variance": 0.25,
        "uniform_variance": 1.0,
        "variance_stderr": 0.01,
        "solver": "min-sum",
        "kernel": "LinearKernel()",
        "bound": LowerBound(0.2, 0.001),
        "info": {"n_iter": 3, "converged": True, "path": "exact", "captured": 0.5},
    }
    return Strata(**{**fields, **changes})


# --- derived numbers --------------------------------------------------------------------------------------


def test_every_derived_number_of_a_small_example() -> None:
    strata = example()
    assert strata.n == 8
    assert strata.sizes.tolist() == [3, 1, 4]
    assert strata.sizes.dtype == torch.int64
    assert strata.weights.dtype == torch.float32
    torch.testing.assert_close(strata.weights, torch.tensor([0.375, 0.125, 0.5]))
    assert strata.order.tolist() == [1, 3, 6, 2, 0, 4, 5, 7]
    assert strata.starts.tolist() == [0, 3, 4]
    assert [strata.members(h).tolist() for h in range(3)] == [[1, 3, 6], [2], [0, 4, 5, 7]]
    assert strata.reduction == 4.0
    assert strata.gap == pytest.approx(0.25)
    assert strata.singletons == 1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.data())
def test_members_and_weights_of_any_strata(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    rest = data.draw(st.lists(st.integers(0, k - 1), min_size=n - k, max_size=n - k))
    labels = torch.tensor(data.draw(st.permutations([*range(k), *rest])))
    strata = Strata(labels, k, variance=0.0, uniform_variance=0.0)
    assert float(strata.weights.double().sum()) == pytest.approx(1.0, abs=1e-6)
    for h in range(k):
        assert strata.members(h).tolist() == (labels == h).nonzero().flatten().tolist()
    assert strata.singletons == sum(int((labels == h).sum()) == 1 for h in range(k))


def test_weights_of_many_samples_sum_to_one() -> None:
    labels = torch.arange(1_000_003) % 7
    strata = Strata(labels, 7, variance=0.1, uniform_variance=0.2)
    assert float(strata.weights.double().sum()) == pytest.approx(1.0, abs=1e-6)


def test_reduction_and_gap_where_a_variance_is_zero() -> None:
    assert example(variance=0.0).reduction == math.inf
    assert example(variance=0.0, uniform_variance=0.0).reduction == 1.0
    assert example(bound=None).gap is None
    assert example(bound=LowerBound(0.0, 0.0)).gap is None


def test_copies_with_a_bound_and_on_a_device_leave_the_original_alone() -> None:
    strata = example(bound=None)
    assert strata.sizes.tolist() == [3, 1, 4]  # cached before the copies are made
    bounded = dataclasses.replace(strata, bound=LowerBound(0.1, 0.0))
    assert bounded.gap == pytest.approx(1.5)
    assert strata.bound is None
    moved = strata.to("cpu")
    assert torch.equal(moved.labels, strata.labels)
    assert moved.variance == strata.variance


def test_repr() -> None:
    assert repr(example()) == (
        "Strata(n=8, k=3, variance=0.25, relative to uniform=0.25, sizes=1..4, gap<=25.0%, solver='min-sum')"
    )
    plain = repr(example(bound=None, solver="", uniform_variance=0.0, variance=0.0))
    assert plain == "Strata(n=8, k=3, variance=0, relative to uniform=0, sizes=1..4)"


def test_strata_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().k = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (torch.tensor([0.0, 1.0, 2.0]), ("int64", "torch.float32")),
        (torch.tensor([[0, 1, 2]]), ("(n,)", "(1, 3)")),
        (torch.tensor([0, 1, 3]), ("labels", "0..2")),
        (torch.tensor([0, 1, -1]), ("labels", "0..2")),
        (torch.zeros(0, dtype=torch.int64), ("labels", "0..2", "one for each sample")),
        (torch.tensor([0, 0, 2]), ("1 of k=3",)),
    ],
)
def test_bad_labels_are_named(labels: torch.Tensor, named: tuple[str, ...]) -> None:
    with refused(*named):
        example(labels=labels)


# --- files ------------------------------------------------------------------------------------------------


def same(a: Strata, b: Strata) -> bool:
    fields = ("k", "variance", "uniform_variance", "variance_stderr", "solver", "kernel", "bound")
    return (
        torch.equal(a.labels, b.labels)
        and all(getattr(a, name) == getattr(b, name) for name in fields)
        and dict(a.info) == dict(b.info)
    )


@pytest.mark.parametrize("bound", [None, LowerBound(0.1234567890123456, 1e-300)])
@pytest.mark.parametrize("name", ["strata.npz", "no-suffix", "two.dots.bin"])
def test_round_trip(tmp_path: Path, bound: LowerBound | None, name: str) -> None:
    strata = example(bound=bound, variance=1 / 3)
    path = strata.save(tmp_path / name)
    assert path == tmp_path / name
    assert os.listdir(tmp_path) == [name]
    assert same(Strata.load(path), strata)
    assert same(Strata.load(str(path)), strata)
    assert Strata.load(path).labels.dtype == torch.int64


def test_round_trip_of_extreme_numbers(tmp_path: Path) -> None:
    strata = example(variance=math.inf, uniform_variance=5e-324, info={})
    assert same(Strata.load(strata.save(tmp_path / "s.npz")), strata)


def test_the_file_can_be_read_without_this_package(tmp_path: Path) -> None:
    path = example().save(tmp_path / "s.npz")
    with np.load(path, allow_pickle=False) as file:
        assert sorted(file.files) == ["labels", "meta", "weights"]
        assert file["labels"].tolist() == [2, 0, 1, 0, 2, 2, 0, 2]
        assert file["weights"].tolist() == pytest.approx([0.375, 0.125, 0.5])
        assert json.loads(str(file["meta"]))["variance"] == 0.25


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    example().save(tmp_path / "s.npz")
    example(variance=0.125).save(tmp_path / "s.npz")
    assert Strata.load(tmp_path / "s.npz").variance == 0.125


def test_saved_files_have_the_permissions_of_the_user(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    path = example().save(tmp_path / "s.npz")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


# --- files that are not strata ----------------------------------------------------------------------------


def written(path: Path, **changes: Any) -> Path:
    """A strata file with entries of its description replaced, or left out where the new value is ``...``."""
    with np.load(example().save(path), allow_pickle=False) as file:
        arrays = dict(file)
    meta = {**json.loads(str(arrays["meta"])), **changes}
    arrays["meta"] = np.array(json.dumps({key: value for key, value in meta.items() if value is not ...}))
    with path.open("wb") as out:
        np.savez(out, **arrays)
    return path


def test_helper_writes_a_good_file_when_nothing_is_changed(tmp_path: Path) -> None:
    assert same(Strata.load(written(tmp_path / "s.npz")), example())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(tmp_path / "nothing.npz"):
        Strata.load(tmp_path / "nothing.npz")


GARBAGE = {
    "empty": b"",
    "text": b"n,k\n1,2\n",
    "noise": np.random.default_rng(0).bytes(500),
    "zip magic only": b"PK\x03\x04",
    "pickle": pickle.dumps({"labels": [0, 1]}),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.npz"
    path.write_bytes(content)
    with refused(path, "not a strata file", "Strata.save"):
        Strata.load(path)


def test_every_truncation_and_a_flipped_byte_anywhere(tmp_path: Path) -> None:
    content = example().save(tmp_path / "good.npz").read_bytes()
    path = tmp_path / "bad.npz"
    for stop in range(0, len(content), 37):
        path.write_bytes(content[:stop])
        with refused(path, "Strata.save"):
            Strata.load(path)
    refusals = 0
    for position in range(0, len(content), 11):
        changed = bytearray(content)
        changed[position] ^= 0xFF
        path.write_bytes(changed)
        try:
            found = Strata.load(path)
        except InputError:
            refusals += 1
        else:
            assert same(found, example())  # a byte that nobody reads, such as a time stamp
    assert refusals > 20


def test_a_folder(tmp_path: Path) -> None:
    with refused(tmp_path, "Is a directory", "Strata.save"):
        Strata.load(tmp_path)


def test_a_npy_file(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.arange(5))
    with refused(tmp_path / "labels.npy", "single array", "Strata.save"):
        Strata.load(tmp_path / "labels.npy")


class Trap:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (Trap.path,)

    path = ""


@pytest.mark.parametrize("key", ["labels", "meta"])
def test_pickles_are_refused_and_not_run(tmp_path: Path, key: str) -> None:
    Trap.path = str(tmp_path / "owned")
    with np.load(example().save(tmp_path / "good.npz")) as file:
        arrays = dict(file)
    arrays[key] = np.array([Trap()], dtype=object)
    np.savez(tmp_path / "bad.npz", **arrays, allow_pickle=True)
    with refused(tmp_path / "bad.npz", "allow_pickle=False", "Strata.save"):
        Strata.load(tmp_path / "bad.npz")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("key", ["labels", "meta"])
def test_a_npz_file_of_something_else(tmp_path: Path, key: str) -> None:
    with np.load(example().save(tmp_path / "good.npz")) as file:
        arrays = dict(file)
    del arrays[key]
    np.savez(tmp_path / "bad.npz", **arrays)
    with refused(tmp_path / "bad.npz", key, "Strata.save"):
        Strata.load(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    "key", ["k", "variance", "uniform_variance", "variance_stderr", "solver", "kernel", "bound", "info"]
)
def test_a_missing_entry_is_named(tmp_path: Path, key: str) -> None:
    with refused(tmp_path / "s.npz", f"'{key}'", "Strata.save"):
        Strata.load(written(tmp_path / "s.npz", **{key: ...}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, ("version 1",)),
        ({"version": ...}, ("version 1",)),
        ({"format": "other"}, ("version 1",)),
        ({"format": ...}, ("version 1",)),
        ({"k": 2}, ("labels", "0..1")),
        ({"k": 4}, ("1 of k=4",)),
        ({"k": 10**15}, ("k", 8, 10**15)),
        ({"k": 0}, ("k", 8, 0)),
        ({"k": 3.0}, ("k", 3.0)),
        ({"k": "3"}, ("k", "'3'")),
        ({"k": None}, ("k", None)),
        ({"bound": "tight"}, ("LowerBound", "str")),
        ({"bound": {"variance": 0.1}}, ("LowerBound", "'stderr'")),
        ({"bound": {"variance": 0.1, "stderr": 0.0, "method": "x", "more": 1}}, ("LowerBound", "'method'")),
    ],
    ids=str,
)
def test_wrong_entries(tmp_path: Path, changes: dict[str, Any], named: tuple[Any, ...]) -> None:
    with refused(tmp_path / "s.npz", *named):
        Strata.load(written(tmp_path / "s.npz", **changes))


@pytest.mark.parametrize("meta", ["[]", "3", "{", "null", '"text"'])
def test_a_description_that_is_not_one(tmp_path: Path, meta: str) -> None:
    np.savez(tmp_path / "s.npz", labels=np.zeros(3, dtype=np.int64), meta=np.array(meta))
    with refused(tmp_path / "s.npz", "not a strata file", "Strata.save"):
        Strata.load(tmp_path / "s.npz")


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (np.zeros(3), ("float64", "int64", "Strata.save")),
        (np.array(["0", "1", "2"]), ("<U1", "int64", "Strata.save")),
        (np.zeros((3, 1), dtype=np.int64), ("labels", "(n,)", "(3, 1)")),
        (np.zeros(0, dtype=np.int64), ("k", "1 and 0", 3)),
        (np.array([0, 1, 5]), ("labels", "0..2")),
        (np.array(0), ("0-d", "Strata.save")),
    ],
    ids=["float", "text", "2-d", "none", "too large", "0-d"],
)
def test_labels_that_are_none(tmp_path: Path, labels: np.ndarray[Any, Any], named: tuple[Any, ...]) -> None:
    path = written(tmp_path / "s.npz")
    with np.load(path) as file:
        arrays = {**dict(file), "labels": labels}
    np.savez(path, **arrays)
    with refused(path, *named):
        Strata.load(path)


def test_an_encrypted_archive(tmp_path: Path) -> None:
    content = bytearray(example().save(tmp_path / "s.npz").read_bytes())
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        starts = [info.header_offset for info in archive.infolist()]
    directory = content.index(b"PK\x01\x02")
    for offset in starts:
        content[offset + 6] |= 1
    while directory != -1:
        content[directory + 8] |= 1
        directory = content.find(b"PK\x01\x02", directory + 4)
    (tmp_path / "s.npz").write_bytes(content)
    with refused(tmp_path / "s.npz", "encrypted", "Strata.save"):
        Strata.load(tmp_path / "s.npz")


# --- atomic writing ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a keyboard interrupt in the middle of a write."""


@pytest.mark.parametrize("error", [Killed, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, error: type[BaseException], exists: bool
) -> None:
    path = tmp_path / "s.npz"
    if exists:
        example().save(path)
    before = path.read_bytes() if exists else None

    def half_a_write() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            assert len(os.listdir(tmp_path)) == 1 + exists  # the temporary file is beside the target
            raise error

    with pytest.raises(error):
        half_a_write()
    assert os.listdir(tmp_path) == (["s.npz"] if exists else [])
    assert not exists or path.read_bytes() == before


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = example().save(tmp_path / "s.npz")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space"):
            example(variance=0.5).save(path)
    assert os.listdir(tmp_path) == ["s.npz"]
    assert Strata.load(path).variance == 0.25


def test_nothing_is_at_the_path_until_the_whole_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append((tmp_path / "s").exists()), fsync(handle))[1])
    with atomic_write(tmp_path / "s") as file:
        file.write(b"whole")
        assert not (tmp_path / "s").exists()
    assert synced == [False]
    assert (tmp_path / "s").read_bytes() == b"whole"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder, why in (("missing", "No such file or directory"), ("file", "Not a directory")):
        with refused(tmp_path / folder / "s.npz", why, "another folder"):
            example().save(tmp_path / folder / "s.npz")

    def denied(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", denied)  # tests may run as root, whom nothing is denied
    with refused(tmp_path / "s.npz", "Permission denied", "another folder"):
        example().save(tmp_path / "s.npz")


def test_strata_as_a_dictionary() -> None:
    strata = example()
    state = strata.to_dict()
    assert same(Strata.from_dict(state), strata)
    with refused("version 1", "Strata.to_dict"):
        Strata.from_dict({**state, "version": 2})
    with refused("version 1", "Strata.to_dict"):
        Strata.from_dict({})
    del state["variance"]
    with refused("'variance'", "Strata.to_dict"):
        Strata.from_dict(state)
