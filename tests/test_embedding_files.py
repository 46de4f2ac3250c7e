import builtins
import pickle
import sys
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from conftest import refused
from vardass.adapt.config import RunConfig
from vardass.cli import main
from vardass.data.embedding_files import open_embeddings, read_embeddings
from vardass.data.embedding_tasks import embedding_task, read_labelled
from vardass.data.from_paths import domain_from_path
from vardass.errors import InputError, MissingExtraError

X = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path, **options):
    with pytest.raises(InputError) as caught:
        read_embeddings(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# .npy


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1"])
def test_npy_is_mapped_and_keeps_its_type(tmp_path, dtype):
    x = (10 * X).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    with open_embeddings(tmp_path / "x.npy") as file:
        read = file.table(None, ())
    assert isinstance(read, np.memmap)
    assert read.dtype == x.dtype
    np.testing.assert_array_equal(read, x)
    assert read_embeddings(tmp_path / "x.npy").dtype == (torch.float64 if dtype == "f8" else torch.float32)


@pytest.mark.parametrize("dtype", [">f4", ">i2", "longdouble"])
def test_types_that_torch_lacks_are_converted(tmp_path, dtype):
    x = (10 * X).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    read = read_embeddings(tmp_path / "x.npy")
    np.testing.assert_array_equal(read, x.astype(read.numpy().dtype))


def test_fortran_order_is_read_as_it_was_written(tmp_path):
    np.save(tmp_path / "x.npy", np.asfortranarray(X))
    np.testing.assert_array_equal(read_embeddings(tmp_path / "x.npy"), X)


@pytest.mark.parametrize(
    ("array", "part"),
    [
        (X[:, 0], "x[:, None]"),
        (np.zeros((2, 3, 4)), "reshape"),
        (np.array([["a", "b"]]), "<U1"),
        (X.astype(complex), "complex128"),
        (X > 0, "bool"),
        (np.zeros((0, 3)), "(0, 3)"),
        (np.zeros((3, 0)), "(3, 0)"),
        (np.zeros(3, dtype=[("a", "f4")]), "astype"),
    ],
    ids=["1-D", "3-D", "text", "complex", "bool", "no rows", "no columns", "records"],
)
def test_npy_that_is_no_table_of_numbers(tmp_path, array, part):
    np.save(tmp_path / "x.npy", array)
    assert part in refusal(tmp_path / "x.npy")


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was read",))


def test_objects_are_never_unpickled(tmp_path):
    objects = np.array([[Bomb()]], dtype=object)
    np.save(tmp_path / "x.npy", objects, allow_pickle=True)
    assert "objects" in refusal(tmp_path / "x.npy")
    np.savez(tmp_path / "x.npz", x=objects, allow_pickle=True)
    assert "no table of numbers" in refusal(tmp_path / "x.npz")
    assert "objects" in refusal(tmp_path / "x.npz", key="x")
    assert "not a .npy file" in refusal(write(tmp_path / "p.npy", pickle.dumps(Bomb())))


def test_truncated_files_are_named_damaged(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.savez_compressed(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(50, 8)))
    pq.write_table(pa.table({"a": X[:, 0]}), tmp_path / "x.parquet")
    for name, kept in [("x.npy", 130), ("x.npy", 20), ("x.npz", 200), ("x.parquet", 60)]:
        content = (tmp_path / name).read_bytes()
        assert "damaged" in refusal(write(tmp_path / f"cut{kept}{name}", content[:kept]))
    flipped = bytearray((tmp_path / "x.npz").read_bytes())
    flipped[500:600] = bytes(100)
    assert "damaged" in refusal(write(tmp_path / "flipped.npz", bytes(flipped)))


# .npz


def test_npz_with_one_table_needs_no_key(tmp_path):
    np.savez(tmp_path / "x.npz", z=X, y=np.arange(7), names=np.array(["a"]))
    np.testing.assert_array_equal(read_embeddings(tmp_path / "x.npz"), X)


def test_npz_with_several_tables_needs_a_key(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", source=X, target=X + 1, y=np.arange(7))
    message = refusal(tmp_path / "x.npz")
    assert "source (7, 3) float32" in message
    assert "--key source" in message
    np.testing.assert_array_equal(read_embeddings(tmp_path / "x.npz", key="target"), X + 1)
    assert "no array 'other'" in refusal(tmp_path / "x.npz", key="other")
    assert "x[:, None]" in refusal(tmp_path / "x.npz", key="y")


def test_npz_without_a_table_lists_what_it_holds(tmp_path):
    np.savez(tmp_path / "x.npz", y=np.arange(7))
    assert "y (7,) int64" in refusal(tmp_path / "x.npz")


def test_key_is_for_npz_only(tmp_path):
    np.save(tmp_path / "x.npy", X)
    assert "leave the key out" in refusal(tmp_path / "x.npy", key="x")


# columns


@pytest.mark.parametrize(
    ("columns", "expected"), [("1:", [1, 2]), ("2,0", [2, 0]), (":2", [0, 1]), ([1], [1]), ("0:1,2", [0, 2])]
)
def test_columns_by_number(tmp_path, columns, expected):
    np.save(tmp_path / "x.npy", X)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "x.npy", columns=columns), X[:, expected])


@pytest.mark.parametrize("columns", ["3", "a", "5:", "-1", "1:2:3", ""])
def test_columns_that_do_not_exist(tmp_path, columns):
    np.save(tmp_path / "x.npy", X)
    assert "3 columns" in refusal(tmp_path / "x.npy", columns=columns)


# .csv


def csv_text(header, delimiter=","):
    rows = [delimiter.join(f"{value:.9g}" for value in row) for row in X]
    return "\n".join(([delimiter.join(header)] if header else []) + rows) + "\n"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("header", [None, ["a", "b", "c"], ["0", "1", "2"], ['"a, b"', "", "2"]])
def test_csv_with_and_without_header(tmp_path, header, delimiter):
    read = read_embeddings(write(tmp_path / "x.csv", csv_text(header, delimiter)))
    assert read.dtype == torch.float32
    np.testing.assert_array_equal(read, X)


def test_csv_of_a_spreadsheet(tmp_path):
    text = "\ufeff" + csv_text(["a", "b", "c"]).replace("\n", "\r\n") + "\r\n"
    np.testing.assert_array_equal(read_embeddings(write(tmp_path / "x.csv", text)), X)


def test_csv_of_one_column_and_of_one_row(tmp_path):
    assert read_embeddings(write(tmp_path / "x.csv", "a\n1\n2\n")).tolist() == [[1.0], [2.0]]
    assert read_embeddings(write(tmp_path / "y.csv", "1.5,2\n")).tolist() == [[1.5, 2.0]]


def test_csv_with_text_columns_names_the_first(tmp_path):
    path = write(tmp_path / "x.csv", "id,f0,f1\n\ncat,1,2\ndog,3,4\n")
    message = refusal(path)
    assert "'cat'" in message
    assert "column 'id'" in message
    assert "row 1 (" in message
    assert "--columns" in message
    assert read_embeddings(path, columns="f*").tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert read_embeddings(path, columns="f1").tolist() == [[2.0], [4.0]]
    assert "'id', 'f0', 'f1'" in refusal(path, columns="g*")


def test_csv_row_of_text_and_numbers_is_not_taken_for_a_header(tmp_path):
    path = write(tmp_path / "x.csv", "cat,1,2\ndog,3,4\n")
    assert "column 0 is string, 'cat' in row 1" in refusal(path)
    assert read_embeddings(path, columns="1:").tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_csv_written_by_pandas_with_its_index(tmp_path):
    path = write(tmp_path / "x.csv", ",f0,f1\n0,5,6\n1,7,8\n")
    assert "counts the rows" in refusal(path)
    assert read_embeddings(path, columns="1:").tolist() == [[5.0, 6.0], [7.0, 8.0]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b\n1,2\n3,\n", ["missing", "'b'", "row 2 (row 1 = first data row)"]),
        ("a,b\n1,2\n3\n", ["row 2 ", "1 columns, not 2"]),
        ("a,b\n1,2\n3,4,5\n", ["row 2 ", "3 columns, not 2"]),
        ("a,b\n1,2\n3,x1\n", ["'x1'", "'b'", "row 2 (row 1 = first data row)"]),
        ("a;b\n1,5;2,5\n", ["'1,5'", "'a'", "row 1 "]),
        ("a,b\n", ["no rows"]),
        ("\n\n", ["blank"]),
        (b"\xff\xfe\x00\x01,\x80\n", ["not UTF-8"]),
        (b"a,b\n1,2\n\x80,3\n", ["not UTF-8"]),
        (b"a,b\n1,\x00\n", ["b"]),
    ],
    ids=["gap", "short", "long", "text", "comma decimals", "header only", "blank", "binary", "late", "nul"],
)
def test_csv_that_cannot_be_read_says_where(tmp_path, text, parts):
    message = refusal(write(tmp_path / "x.csv", text))
    for part in parts:
        assert part in message


# .parquet


def test_parquet_of_numeric_columns(tmp_path):
    pq.write_table(
        pa.table({"a": X[:, 0], "b": X[:, 1], "__index_level_0__": np.arange(7) * 3}), tmp_path / "x.parquet"
    )
    read = read_embeddings(tmp_path / "x.parquet")
    assert read.dtype == torch.float32
    np.testing.assert_array_equal(read, X[:, :2])
    np.testing.assert_array_equal(read_embeddings(tmp_path / "x.parquet", columns="b"), X[:, 1:2])


@pytest.mark.parametrize(
    "lists",
    [
        pa.array(X.tolist(), pa.list_(pa.float32())),
        pa.array(X.tolist(), pa.large_list(pa.float64())),
        pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 3),
    ],
    ids=["list", "large list", "fixed size"],
)
def test_parquet_of_lists_beside_other_columns(tmp_path, lists):
    table = pa.table({"id": [str(i) for i in range(7)], "label": range(7), "embedding": lists})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "x.parquet"), X)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "x.parquet", columns="embedding"), X)


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ({"id": ["a", "b"], "x": [1.0, 2.0]}, "'id' is string"),
        ({"x": [1.0, None]}, "missing values"),
        ({"x": [[1.0, 2.0], None]}, "missing values"),
        ({"x": [[1.0, None]]}, "missing values"),
        ({"x": [[1.0], [1.0, 2.0, 3.0]]}, "differ in length"),
        ({"x": pa.array([[], []], pa.list_(pa.float32()))}, "empty"),
        ({"x": [[1.0]], "y": [[2.0]]}, "--columns x"),
        ({"x": pa.array([], pa.float32())}, "no rows"),
        ({"x": [True, False]}, "'x' is bool"),
        ({"x": [["a"]]}, "not numbers"),
    ],
    ids=[
        "text",
        "null",
        "null list",
        "null in list",
        "ragged",
        "empty lists",
        "two",
        "no rows",
        "bool",
        "text lists",
    ],
)
def test_parquet_that_is_no_table_of_numbers(tmp_path, table, part):
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    assert part in refusal(tmp_path / "x.parquet")


def test_tables_without_pyarrow_name_the_extra_and_arrays_need_none(tmp_path, monkeypatch):
    pq.write_table(pa.table({"a": [1.0]}), tmp_path / "x.parquet")
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    (tmp_path / "x.csv").write_text("1,2\n")
    for ending in ("csv", "parquet"):
        with pytest.raises(MissingExtraError, match=r"pyarrow.*vardass\[cli"):
            read_embeddings(tmp_path / f"x.{ending}")
    np.savez(tmp_path / "x.npz", x=X)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "x.npz"), X)


# any file


@pytest.mark.parametrize("ending", [".npy", ".npz", ".csv", ".parquet"])
def test_missing_empty_and_folder(tmp_path, ending):
    assert "no file" in refusal(tmp_path / f"none{ending}")
    assert "empty" in refusal(write(tmp_path / f"empty{ending}", ""))
    (tmp_path / f"folder{ending}").mkdir()
    assert "cannot read" in refusal(tmp_path / f"folder{ending}")


@pytest.mark.parametrize("ending", [".npy", ".npz", ".parquet"])
def test_content_that_the_ending_does_not_promise(tmp_path, ending):
    assert f"not a {ending} file" in refusal(write(tmp_path / f"x{ending}", "1,2\n3,4\n"))


def test_swapped_endings_are_recognised(tmp_path):
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    assert "it is a .npy file, rename it" in refusal(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", X)
    (tmp_path / "y.npz").rename(tmp_path / "y.csv")
    assert "it is a .npz file, rename it" in refusal(tmp_path / "y.csv")


@pytest.mark.parametrize("name", ["x.pt", "x", "x.npy.gz"])
def test_unknown_endings(tmp_path, name):
    assert ".npy, .npz, .csv or .parquet" in refusal(write(tmp_path / name, "x"))


def test_what_is_no_path_is_refused():
    assert "path must be a path, got None" in refusal(None)


def test_rows_of_another_width_are_named_where_only_labels_are_missing(tmp_path):
    path = tmp_path / "ragged.csv"
    path.write_text("a,b,labels\n1,2,x\n3,4\n5,6,y\n")
    with refused("row 2", path, "2 columns", 3):
        read_labelled(path, labels="labels")


def test_any_damage_to_a_header_is_named(tmp_path):
    """Each byte of the header is replaced by some that Python's grammar cares about; the file is read or refused."""
    np.save(tmp_path / "x.npy", np.ones((3, 2), np.float32))
    whole = (tmp_path / "x.npy").read_bytes()
    end = whole.index(b"\n")
    for place in range(6, end):
        for byte in b"\x00(']{9-,\xff\\":
            damaged = whole[:place] + bytes([byte]) + whole[place + 1 :]
            (tmp_path / "x.npy").write_bytes(damaged)
            with suppress(InputError):
                read_embeddings(tmp_path / "x.npy")
            with suppress(InputError):
                read_labelled(tmp_path / "x.npy", labels="x.npy")


def test_a_late_cell_decides_the_type_of_a_column(tmp_path):
    rows = 300_000
    path = write(tmp_path / "x.csv", "a,b\n" + "1,2\n" * rows + "1.5,2\n")
    assert read_embeddings(path)[-1].tolist() == [1.5, 2.0]
    message = refusal(write(tmp_path / "y.csv", "a,b\n" + "1,2\n" * rows + "1,no\n"))
    assert "'no' in row 300001 (" in message
    assert "'b'" in message


def labelled_file(path):
    labels = np.array(["a", "b", "a", "b", "a", "b", "a"])
    if path.suffix == ".npz":
        np.savez(path, x=X[:, :1], labels=labels)
    elif path.suffix == ".csv":
        write(path, "f0,labels\n" + "".join(f"{x},{label}\n" for x, label in zip(X[:, 0], labels)))
    else:
        pq.write_table(pa.table({"f0": X[:, 0], "labels": labels.tolist()}), path)
    return path


def read_task(path, other):
    task = embedding_task(path, other, labels="labels")
    assert task.class_names == ("a", "b")
    assert len(task.target) == 7


def read_as_a_model_does(path, other):
    about = {"data_kind": "features", "input_shape": (1,), "class_names": ("a", "b")}
    about["config"] = RunConfig()
    domain = domain_from_path(path, about, {"column_names": ["f0"]}, labelled=True)
    assert domain.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    domain_from_path(other, about, {})


def read_by_commands(path, other):
    assert main(["compare", str(path), str(other), "--permutations", "0"]) == 0
    assert main(["coreset", str(path), "--size", "2", "--labels", "labels"]) == 0


@pytest.mark.parametrize("ending", ["npz", "csv", "parquet"])
@pytest.mark.parametrize("read", [read_task, read_as_a_model_does, read_by_commands])
def test_each_file_is_opened_once(tmp_path, ending, read):
    path, other = (labelled_file(tmp_path / f"{name}.{ending}") for name in "xy")
    opened = []
    OPENED.append(lambda name: opened.append(str(name)) if str(name) in (str(path), str(other)) else None)
    try:
        read(path, other)
    finally:
        OPENED.clear()
    times = 2 if read is read_by_commands else 1  # two commands
    assert opened.count(str(path)) == times
    assert opened.count(str(other)) == 1


@pytest.mark.parametrize("ending", ["npz", "npy", "csv", "parquet"])
@pytest.mark.parametrize("value", [np.nan, None])
def test_a_row_has_the_same_number_in_all_files(tmp_path, ending, value):
    path, column = tmp_path / f"x.{ending}", [0.5, value, 1.5]
    table = np.array([column, [1.0, 2.0, 3.0]], dtype=float).T
    if ending == "csv":
        write(path, "a,b\n0.5,1\n" + ("nan" if value else "") + ",2\n1.5,3\n")
    elif ending == "parquet":
        pq.write_table(pa.table({"a": pa.array(column, pa.float64()), "b": table[:, 1]}), path)
    elif ending == "npz":
        np.savez(path, x=table)
    else:
        np.save(path, table)
    assert "the first in row 2 (row 1 = first data row); " in refusal(path)


def test_text_that_was_saved_as_objects_gets_advice_for_text(tmp_path):
    labels = np.array(["cat", "dog", "cat"] * 2 + ["cat"], dtype=object)
    np.savez(tmp_path / "x.npz", x=X, labels=labels)
    with refused("'labels'", tmp_path / "x.npz", "objects", "labels.astype(str)"):
        read_labelled(tmp_path / "x.npz", labels="labels")
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", labels)
    with refused(tmp_path / "y.npy", "objects", "labels.astype(str)"):
        read_labelled(tmp_path / "x.npy", labels="y.npy")


OPENED = []
sys.addaudithook(lambda event, args: [tell(args[0]) for tell in OPENED] if event == "open" else None)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_missing_number_among_labels_is_an_empty_label(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    if ending == "csv":
        write(path, "f0,labels\n1,0\n2,\n3,1\n")
    else:
        pq.write_table(pa.table({"f0": [1.0, 2.0, 3.0], "labels": [0, None, 1]}), path)
    with refused(path, "'labels'", "row 2", "1 of 3"):
        read_labelled(path, labels="labels")
