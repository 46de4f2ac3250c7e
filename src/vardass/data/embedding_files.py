"""Reading embeddings and their labels from the files people keep them in: .npy, .npz, .csv and .parquet."""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vardass.errors import InputError
from vardass.files import PathLike, as_path
from vardass.validate import as_features, as_numbers, shorten

__all__ = [
    "BLOCK_ROWS",
    "EMBEDDING_ENDINGS",
    "Columns",
    "check_content",
    "has_labels",
    "read_embeddings",
    "read_groups",
    "read_labelled",
    "read_labels",
    "row_groups",
]

Columns: TypeAlias = "str | Sequence[str | int]"

_MAGIC = {".npy": b"\x93NUMPY", ".npz": b"PK", ".parquet": b"PAR1"}
EMBEDDING_ENDINGS = (".npz", ".npy", ".parquet", ".csv")
BLOCK_ROWS = 65536
"""Rows of a large file that are read together."""

_MOST_FRACTIONS = 20  # different labels with fractions that may be names of classes


# --- embeddings and labels of one file ---


def read_embeddings(
    path: PathLike, *, key: str | None = None, columns: Columns | None = None, leave_out: Collection[str] = ()
) -> NDArray[Any]:
    """Read an (n, d) array of numbers; ``.npy`` files are mapped into memory, not read. No pickle is read.

    Parameters
    ----------
    path : path
        ``.npy``; ``.npz``; ``.csv`` with or without a header, separated by comma, semicolon or tab; or
        ``.parquet`` with numeric columns or one column of lists.
    key : str, optional
        Array of an ``.npz`` file; needed if several are tables of numbers.
    columns : str or sequence of str or int, optional
        Columns to keep: names, patterns such as ``"f*"``, numbers from 0, or ranges such as ``"2:"``;
        a string is split at commas.
    leave_out : collection of str
        Names of columns that are never kept, such as labels; of arrays that are not meant where no key is given.

    Returns
    -------
    ndarray of shape (n, d)
        float32 from ``.csv``; the file's own number type otherwise.

    Raises
    ------
    InputError
        If the file is missing, empty, not what its ending says, or not a table of numbers.
    """
    path = as_path(path)
    ending = check_content(path)
    if key is not None and ending != ".npz":
        raise InputError(f"{path} is {ending}, and key {key!r} is for .npz files; leave the key out")
    if ending == ".csv":
        array = _read_csv(path, columns, leave_out)
    elif ending == ".parquet":
        array = _read_parquet(path, columns, leave_out)
    else:
        array = _read_npy(path) if ending == ".npy" else _read_npz(path, key, leave_out)
        _check_table(array, str(path) if key is None else f"array {key!r} of {path}")
        if columns is not None:
            array = array[:, _select_columns(columns, None, array.shape[1], path)]
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def read_labelled(
    path: PathLike,
    *,
    key: str | None = None,
    labels: str | None = None,
    columns: Columns | None = None,
    leave_out: Collection[str] = (),
    regression: bool = False,
) -> tuple[Tensor, NDArray[Any] | None]:
    """Read features and labels from one file.

    Parameters
    ----------
    path, key, columns
        See `read_embeddings`. The labels are never among the features.
    labels : str, optional
        Array of an ``.npz`` file or column of a ``.csv`` or ``.parquet`` file; for an ``.npy`` file, the path of
        another ``.npy`` file, from the same folder. Whole numbers or names. Without it there are no labels.
    leave_out : collection of str
        Further columns that are not features if they are there, such as labels that must not be used.
    regression : bool
        Labels are real numbers to predict, one column or an array (n,) or (n, m).

    Returns
    -------
    Tensor of shape (n, d), float32 as networks are, and an array of shape (n,), or float64 (n, m), or None
    """
    path = as_path(path)
    ending = check_content(path)
    if labels is not None and ending != ".npy":
        known = _names(path)
        if labels not in known:
            what = "array" if ending == ".npz" else "column"
            raise InputError(
                f"no {what} {labels!r} for labels in {path}; it has {shorten(known)}{_candidates(path)}; name another "
                "one with --labels"
            )
    others = [name for name in (labels, *leave_out) if name is not None]
    table = read_embeddings(path, key=key, columns=columns, leave_out=others)
    # checked twice: what float64 holds may be infinite in float32
    features = as_features(as_features(table, f"features of {path}").float(), f"features of {path} in float32")
    if labels is None:
        return features, None
    values = read_labels(path, labels)
    what = f"labels {labels!r} of {path}"
    if regression:
        return features, as_numbers(_as_numeric(values, what), len(features), what).numpy()
    if _are_real(values):
        raise InputError(
            f"{what} are {len(values):,} real numbers such as {float(values[0]):.6g}; give --regression to predict "
            "numbers, or name classes with --labels"
        )
    if values.shape != (len(features),) or values.dtype.kind not in "iuUSfb":
        raise InputError(
            f"{what} are {values.dtype} of shape {values.shape} for {len(features)} rows; "
            "give one whole number or name for each row"
        )
    if values.dtype.kind in "US":
        empty = (np.char.strip(values) == values.dtype.type()).nonzero()[0]
        if len(empty):
            raise InputError(
                f"{what} are empty in row {empty[0]} (from 0), and in {len(empty)} of {len(values)} rows in all; fill "
                "them in, or leave these rows out"
            )
    if values.dtype.kind == "f":
        whole = np.where(np.isfinite(values), values, 0.5)
        if (whole != np.round(whole)).any():
            raise InputError(f"{what} hold {values[whole != np.round(whole)][0]}, no whole number")
        values = values.astype(np.int64)
    return features, values


def has_labels(path: Path, labels: str) -> bool:
    """Whether a file of embeddings has labels of this name, see `read_labelled`; their values are not looked at."""
    if path.suffix.lower() == ".npy":
        return (path.parent / labels).is_file()
    try:
        return labels in _names(path)
    except InputError:
        return False  # reading the features says what is wrong


def _are_real(values: NDArray[Any]) -> bool:
    """Whether labels look like measurements: fractions, more of them than one would name classes after."""
    if values.ndim != 1 or values.dtype.kind not in "fU" or len(np.unique(values)) <= _MOST_FRACTIONS:
        return False
    try:
        numbers = values.astype(np.float64)
    except ValueError:  # names
        return False
    finite = numbers[np.isfinite(numbers)]
    return bool((finite != np.round(finite)).any())


def _as_numeric(values: NDArray[Any], what: str) -> NDArray[Any]:
    """Labels as numbers, those written as text too."""
    if values.dtype.kind in "iuf":
        return values
    cells = [str(value) for value in values.flatten().tolist()]
    others = list(dict.fromkeys(cell for cell in cells if not _is_number(cell)))
    if values.dtype.kind == "U" and not others:
        return values.astype(np.float64)
    shown = shorten((others or cells)[:3])
    raise InputError(
        f"{what} hold {shown} ({values.dtype}), not numbers; leave --regression out to predict classes, or name a "
        "numeric column with --labels"
    )


def _names(path: Path) -> list[str]:
    """Arrays of an .npz file, columns of a .csv or .parquet file."""
    ending = check_content(path)
    if ending == ".npz":
        return list(_npz_headers(path))
    if ending == ".csv":
        return _csv_layout(path).names or []
    with _parquet_file(path) as file:
        return list(file.schema_arrow.names)


def _candidates(path: Path) -> str:
    """All columns or arrays of text in a file, which may be its labels, for a message."""
    ending = path.suffix.lower()
    if ending == ".npz":
        found = [name for name, (_, dtype) in _npz_headers(path).items() if dtype.kind in "US"]
    elif ending == ".csv":
        layout = _csv_layout(path)
        _, row = next(_csv_rows(path, layout), ("", []))
        found = [name for name, cell in zip(layout.names or [], row) if not _is_number(cell)]
    else:
        with _parquet_file(path) as file:
            found = [field.name for field in file.schema_arrow if "string" in str(field.type)]
    return f", of which these are text: {', '.join(map(repr, found))}" if found else ", none of them text"


def read_labels(path: Path, labels: str) -> NDArray[Any]:
    """Labels, or any other array or column of one value a row, as they are in the file; see `read_labelled`."""
    ending = path.suffix.lower()
    if ending == ".csv":
        return _read_csv_column(path, labels)
    if ending == ".parquet":
        with _parquet_file(path) as file:
            return np.asarray(file.read(columns=[labels]).column(labels).to_pylist())
    source = path if ending == ".npz" else path.parent / labels
    if not source.is_file():
        raise InputError(f"no file at {source} for the labels of {path}; give the name of an .npy file beside it")
    try:
        loaded = np.load(source, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return np.asarray(loaded[labels])
    except Exception as error:  # of many kinds, as what is damaged may be an archive or a header
        raise InputError(f"the labels in {source} are not usable ({error}); save whole numbers or text") from None


def check_content(path: Path) -> str:
    """The ending of a file that is what its ending says."""
    ending = path.suffix.lower()
    if ending not in EMBEDDING_ENDINGS:
        raise InputError(f"{path} ends in {ending!r}; give a .npy, .npz, .csv or .parquet file")
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except FileNotFoundError:
        raise InputError(f"no file at {path}; check the name") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a readable file") from None
    if not start:
        raise InputError(f"{path} is empty (0 bytes); write the embeddings again")
    actual = next((name for name, magic in _MAGIC.items() if start.startswith(magic)), None)
    if actual != (ending if ending in _MAGIC else None):
        remedy = "write the file again" if actual is None else f"it is a {actual} file, rename it"
        raise InputError(f"{path} is not a {ending} file; {remedy}")
    return ending


def _check_table(array: NDArray[Any], name: str) -> None:
    if array.dtype.kind not in "fiu":
        raise InputError(f"{name} holds {array.dtype}, not real numbers; save it with x.astype(np.float32)")
    if array.ndim != 2:
        remedy = "x[:, None]" if array.ndim == 1 else "x.reshape(len(x), -1)"
        raise InputError(f"{name} has shape {array.shape}, not (n, d); save it with {remedy}")
    if array.size == 0:
        raise InputError(f"{name} has shape {array.shape}, so no numbers; write the embeddings again")


# --- choosing columns of a table by name, pattern, number or range ---


def _select_columns(columns: Columns, names: Sequence[str] | None, count: int, path: Path) -> list[int]:
    """Positions of the wanted columns, in the order asked for.

    Parameters
    ----------
    columns : str or sequence of str or int
        Each a name, a pattern (``"f*"``), a number from 0, or a range (``"2:"``, ``"2:10"``), tried in this
        order; a string is split at commas.
    names : sequence of str or None
        Names of the columns, if they have any.
    count : int
        Number of columns.
    path : Path
        Named in errors.
    """
    chosen: list[int] = []
    for item in columns.split(",") if isinstance(columns, str) else columns:
        text = str(item).strip()
        found = [i for i, name in enumerate(names or []) if name == text]
        found = found or [i for i, name in enumerate(names or []) if fnmatchcase(name, text)]
        found = found or _numbered(text, count)
        if not found:
            known = f"{count} columns, numbered from 0" if names is None else f"the columns {shorten(names)}"
            raise InputError(f"no column {text!r} in {path}; it has {known}; change --columns")
        chosen += found
    return chosen


def _numbered(text: str, count: int) -> list[int]:
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and (part.isdigit() or not part) for part in parts):
        return []
    if len(parts) == 1:
        return [int(text)] if text and int(text) < count else []
    start, stop = (int(part) if part else None for part in parts)
    return list(range(count))[start:stop]


def _kept(
    columns: Columns | None, names: Sequence[str] | None, count: int, leave_out: Collection[str], path: Path
) -> list[int]:
    """Positions of the wanted columns without those that are left out."""
    chosen = list(range(count)) if columns is None else _select_columns(columns, names, count, path)
    if names is None:
        return chosen
    kept = [i for i in chosen if names[i] not in leave_out]
    if chosen and not kept:
        raise InputError(f"{path} has no column but {shorten(list(leave_out))}, which are not features; add some")
    return kept


# --- parts of files that need not fit in memory ---


def row_groups(path: Path) -> list[int]:
    """Rows that are stored together in a ``.npy`` or ``.parquet`` file: 65,536 of the former, row groups of the latter.

    Only the header or the footer is read.
    """
    if check_content(path) == ".npy":
        n = len(_mapped(path))
        return [min(BLOCK_ROWS, n - start) for start in range(0, n, BLOCK_ROWS)]
    with _parquet_file(path) as file:
        return [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]


def read_groups(path: Path, groups: range, *, columns: Columns | None = None) -> Iterator[NDArray[Any]]:
    """Read some of the `row_groups` of a file in blocks (b, d) of at most 65,536 rows; see `read_embeddings`."""
    if check_content(path) == ".parquet":
        with _parquet_file(path) as file:
            yield from _parquet_blocks(path, file, columns, (), groups)
        return
    array = _mapped(path)
    chosen = None if columns is None else _select_columns(columns, None, array.shape[1], path)
    for group in groups:
        block = array[group * BLOCK_ROWS : (group + 1) * BLOCK_ROWS]
        yield block if chosen is None else block[:, chosen]


def _mapped(path: Path) -> NDArray[Any]:
    """An ``.npy`` file, mapped into memory; it may have no rows."""
    array = _read_npy(path)
    if array.ndim != 2 or len(array):
        _check_table(array, str(path))
    return array


# --- reading .npy and .npz files, without pickle ---

Header: TypeAlias = "tuple[tuple[int, ...], np.dtype[Any]]"


def _read_npy(path: Path) -> NDArray[Any]:
    """Map an ``.npy`` file into memory, read-only."""
    try:
        with path.open("rb") as file:
            shape, dtype = _header(file)
        if dtype.hasobject:
            raise InputError(f"{path} holds Python objects; save it with x.astype(np.float32)")
        if 0 in shape:  # nothing to map
            return np.empty(shape, dtype)
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except InputError:
        raise
    except (ValueError, OSError, EOFError, OverflowError) as error:
        raise InputError(f"{path} is damaged ({_one_line(error)}); write it again with np.save") from None


def _read_npz(path: Path, key: str | None, leave_out: Collection[str]) -> NDArray[Any]:
    """Read one array of an ``.npz`` file; only its header is read of any other."""
    headers = _npz_headers(path)
    if key is None:  # labels (n, m) are a table too
        headers = {name: header for name, header in headers.items() if name not in leave_out}
    key = _choose_key(path, key, headers)
    with _whole_npz(path), np.load(path, allow_pickle=False) as arrays:
        return np.asarray(arrays[key])


def _npz_headers(path: Path) -> dict[str, Header]:
    headers = {}
    with _whole_npz(path), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".npy"):
                with archive.open(name) as member:
                    headers[name.removesuffix(".npy")] = _header(member)
    return headers


@contextmanager
def _whole_npz(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, RuntimeError) as error:
        raise InputError(f"{path} is damaged ({_one_line(error)}); write it again with np.savez") from None


def _header(file: IO[bytes]) -> Header:
    try:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
    except (ValueError, OSError, EOFError):
        raise
    except Exception as error:  # numpy parses the header as Python, which fails in many ways
        raise ValueError(f"its header cannot be read: {_one_line(error)}") from None
    if min(shape, default=0) < 0:
        raise ValueError(f"its header says shape {shape}")
    return shape, dtype


def _one_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _choose_key(path: Path, key: str | None, headers: dict[str, Header]) -> str:
    listing = ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in headers.items()) or "no arrays"
    if key is not None:
        if key not in headers:
            raise InputError(f"{path} has no array {key!r}; it holds {listing}; change --key")
        if headers[key][1].hasobject:
            raise InputError(f"array {key!r} of {path} holds objects; save it with x.astype(np.float32)")
        return key
    tables = [name for name, (shape, dtype) in headers.items() if len(shape) == 2 and dtype.kind in "fiu"]
    if not tables:
        raise InputError(f"{path} has no table of numbers, only {listing}; save one of shape (n, d)")
    if len(tables) > 1:
        raise InputError(f"{path} holds {len(tables)} tables: {listing}; choose one with --key {tables[0]}")
    return tables[0]


# --- reading .csv files ---

_DELIMITERS = ",;\t"
_ENCODING = "utf-8-sig"  # spreadsheets begin a file with a byte-order mark


@dataclass(frozen=True)
class _CsvLayout:
    delimiter: str
    width: int
    names: list[str] | None
    header_lines: int


def _read_csv(path: Path, columns: Columns | None, leave_out: Collection[str]) -> NDArray[np.float32]:
    """Read numbers separated by comma, semicolon or tab, with or without a header, as float32 (n, d)."""
    layout = _csv_layout(path)
    chosen = _kept(columns, layout.names, layout.width, leave_out, path)
    with _csv_text(path) as file:
        for _ in range(layout.header_lines):
            next(file)
        try:
            array: NDArray[np.float32] = np.loadtxt(
                file,
                dtype=np.float32,
                delimiter=layout.delimiter,
                usecols=None if len(chosen) == layout.width and columns is None else chosen,
                ndmin=2,
                comments=None,
                quotechar='"',
            )
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise _explain(path, layout, chosen, error) from None
    unnamed = layout.names is not None and layout.names[0] == "" and columns is None
    if unnamed and len(array) > 1 and np.array_equal(array[:, 0], np.arange(len(array))):
        raise InputError(f"the unnamed first column of {path} counts the rows; leave it out: --columns 1:")
    return array


def _read_csv_column(path: Path, name: str) -> NDArray[Any]:
    """Cells of a named column: whole numbers if all are, else text."""
    layout = _csv_layout(path)
    position = (layout.names or []).index(name)
    cells = [row[position].strip() for _, row in _csv_rows(path, layout)]
    try:
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    except ValueError:
        return np.array(cells)


def _csv_rows(path: Path, layout: _CsvLayout) -> Iterator[tuple[str, list[str]]]:
    """Cells of each row below the header, all of one width, with the row's place for messages."""
    with _csv_text(path) as file:
        reader = csv.reader(file, delimiter=layout.delimiter, skipinitialspace=True)
        for row in reader:
            if not row or reader.line_num <= layout.header_lines:
                continue
            where = f"line {reader.line_num} of {path}"
            if len(row) != layout.width:
                raise InputError(f"{where} has {len(row)} columns, not {layout.width}; fix the line")
            yield where, row


@contextmanager
def _csv_text(path: Path) -> Iterator[IO[str]]:
    try:
        with path.open(encoding=_ENCODING, newline="") as file:
            yield file
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); write it again as .csv") from None


def _csv_layout(path: Path) -> _CsvLayout:
    with _csv_text(path) as file:
        line = next((line for line in file if line.strip()), "")
        delimiter = max(_DELIMITERS, key=line.count)
        file.seek(0)
        reader = csv.reader(file, delimiter=delimiter)
        rows = ((row, reader.line_num) for row in reader if row)
        first, lines = next(rows, ([], 0))
        second, _ = next(rows, ([], 0))
    if not first:
        raise InputError(f"{path} has only blank lines; write the embeddings again")
    if not _is_header(first, second):
        return _CsvLayout(delimiter, len(first), None, 0)
    if not second:
        raise InputError(f"{path} has a header but no rows; write the embeddings again")
    return _CsvLayout(delimiter, len(first), [cell.strip() for cell in first], lines)


def _is_header(first: list[str], second: list[str]) -> bool:
    if len(first) > 1 and first == [str(i) for i in range(len(first))]:
        return True  # what pandas writes for a table without column names
    text = [i for i, cell in enumerate(first) if not _is_number(cell)]
    if len(text) in (0, len(first)):
        return bool(text)
    # numbers and text: a header, unless the same columns hold text below as well
    return any(i < len(second) and _is_number(second[i]) for i in text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _explain(path: Path, layout: _CsvLayout, wanted: Sequence[int], cause: ValueError) -> InputError:
    """Find the first line or cell that stopped the fast reader."""
    for where, row in _csv_rows(path, layout):
        for i in wanted:
            if not _is_number(row[i]):
                name = f"column {layout.names[i]!r}" if layout.names else f"column {i}"
                what = f"{row[i]!r} is not a number" if row[i].strip() else "a value is missing"
                return InputError(f"{what} in {name}, {where}; fix the value, or choose numeric columns with --columns")
    return InputError(f"cannot read {path} ({str(cause).splitlines()[0]}); write it again as plain numbers")


# --- reading .parquet files with pyarrow, which is imported only here and only when needed ---


def _read_parquet(path: Path, columns: Columns | None, leave_out: Collection[str]) -> NDArray[Any]:
    """Read numeric columns, or the one column that holds lists of numbers, as (n, d)."""
    with _parquet_file(path) as file:
        blocks = list(_parquet_blocks(path, file, columns, leave_out))
    if not blocks:
        raise InputError(f"{path} has no rows; write the embeddings again")
    return np.concatenate(blocks)


def _parquet_blocks(
    path: Path, file: Any, columns: Columns | None, leave_out: Collection[str], groups: range | None = None
) -> Iterator[NDArray[Any]]:
    """The wanted columns of some row groups, or of all, in blocks (b, d) of at most 65,536 rows."""
    schema = file.schema_arrow
    # pandas stores an index other than 0, 1, 2, ... as such a column
    names = [name for name in schema.names if not name.startswith("__index_level_")]
    names = [names[i] for i in _kept(columns, names, len(names), leave_out, path)]
    names = _usable(path, schema, names, asked=columns is not None)
    chosen = None if groups is None else list(groups)
    width = None
    for batch in file.iter_batches(BLOCK_ROWS, row_groups=chosen, columns=sorted(set(names))):
        if len(batch):
            block = _block(path, batch, names)
            if block.shape[1] != (width := width or block.shape[1]):
                raise _unequal(path, names[0])
            yield block


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise InputError(f"{path} needs pyarrow to be read: pip install 'vardass[parquet]'") from None
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged ({_one_line(error)}); write it again") from None


def _usable(path: Path, schema: Any, names: list[str], *, asked: bool) -> list[str]:
    kinds = {name: schema.field(name).type for name in names}
    lists = [name for name in names if _is_list(kinds[name]) and _is_numeric(kinds[name].value_type)]
    other = [name for name in names if name not in lists and not _is_numeric(kinds[name])]
    if len(lists) == 1 and (not asked or len(names) == 1):
        return lists  # beside a column of embeddings, the others are identifiers and labels
    if lists:
        raise InputError(f"the columns {shorten(lists)} of {path} hold lists; choose one with --columns {lists[0]}")
    if other or not names:
        shown = ", ".join(f"{name!r} {kinds[name]}" for name in other[:6]) or "no columns"
        raise InputError(f"{path} has columns that are not numbers ({shown}); choose others with --columns")
    return names


def _is_numeric(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind))


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _block(path: Path, batch: Any, names: list[str]) -> NDArray[Any]:
    parts = []
    for name in names:
        column = batch.column(name)
        values = column.flatten() if _is_list(column.type) else column
        if column.null_count or values.null_count:
            raise InputError(f"column {name!r} of {path} has missing values; fill them or drop the rows")
        part = values.to_numpy(zero_copy_only=False)
        if _is_list(column.type):
            lengths = np.asarray(column.value_lengths())
            if lengths.min() != lengths.max() or lengths[0] == 0:
                raise _unequal(path, name)
            part = part.reshape(len(batch), -1)
        parts.append(part)
    return np.column_stack(parts)


def _unequal(path: Path, name: str) -> InputError:
    return InputError(f"lists in column {name!r} of {path} are empty or differ in length; make them equal")
