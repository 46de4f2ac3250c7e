"""Embeddings and labels from the files people keep them in: .npy and .npz by numpy, .csv and .parquet by pyarrow."""

from __future__ import annotations

import csv
import io
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.errors import InputError, needs_extra
from vardass.files import PathLike, as_path
from vardass.validate import as_features, shorten

Columns: TypeAlias = "str | Sequence[str | int]"
Header: TypeAlias = "tuple[tuple[int, ...], np.dtype[Any]]"
Read: TypeAlias = "Callable[[list[int], range | None], Iterator[list[Any]]]"

_MAGIC = {".npy": b"\x93NUMPY", ".npz": b"PK", ".parquet": b"PAR1"}
EMBEDDING_ENDINGS = (".npz", ".npy", ".parquet", ".csv")
BLOCK_ROWS = 65536
"""Rows of a large file that are read together."""


# --- embeddings and labels of one file ---


def read_embeddings(
    path: PathLike, *, key: str | None = None, columns: Columns | None = None, leave_out: Collection[str] = ()
) -> Tensor:
    """Read features (n, d), float32 or float64, all of them finite. No pickle is read.

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
        Names of columns to drop, such as labels, and of arrays to ignore if no key is given.
    """
    with open_embeddings(path, key) as file:
        return file.features(columns, leave_out)


def in_one_order(
    tables: Sequence[Tensor], names: Sequence[list[str] | None], paths: Sequence[Path], columns: Columns | None
) -> tuple[list[Tensor], list[str] | None]:
    """Tables (n, d) with their columns in the order of the first one, and the names of these columns.

    Columns of one ``name`` belong together wherever they stand; tables with other names are refused. If a table has no
    names, or ``columns`` were asked for by their numbers, places count: all stay as they are, and there are no names.
    """
    if columns is not None and all(re.fullmatch(r"[-\d:\s]*", str(item)) for item in _items(columns)):
        return list(tables), None
    ordered: list[Tensor] = []
    shared: list[str] | None = None
    for table, own, path in zip(tables, names, paths, strict=True):
        twice = [name for name, count in Counter(own or ()).items() if name and count > 1]
        if twice:
            raise InputError(
                f"{path} has several columns named {shorten(twice)}; rename them, or choose features by number, such "
                "as --columns 0:8"
            )
        if own is None or "" in own:  # an unnamed one may count the rows
            return list(tables), None
        shared = own if shared is None else shared
        if set(own) != set(shared):
            raise InputError(
                f"{paths[0]} and {path} have different columns: {shorten(sorted(set(shared) ^ set(own)))} are in one "
                "of them only; rename them, or choose features with --columns, by number if the order is what counts, "
                "such as --columns 0:8"
            )
        ordered.append(table if own == shared else table[:, [own.index(name) for name in shared]])
    return ordered, shared


def read_groups(
    path: Path, groups: range, *, columns: Columns | None = None, leave_out: Collection[str] = ()
) -> Iterator[NDArray[Any]]:
    """Read some row groups of a file that `EmbeddingFile.in_parts` in blocks (b, d) of at most 65,536 rows."""
    with open_embeddings(path) as file:
        yield from file.blocks(columns, groups, leave_out)


def row_name(row: int) -> str:
    """How messages name a row, counted from 0 here, of any file."""
    return f"row {row + 1} (row 1 = first data row)"


def finite_rows(x: Tensor, what: str, rows: Sequence[int] | NDArray[Any] | None = None) -> Tensor:
    """Return ``x`` (n, ...), finite, or refuse it; ``rows`` are the places of its rows in the file, from 0."""
    if bool(torch.isfinite(x.sum())):  # unless finite entries overflow
        return x
    bad = (~torch.isfinite(x)).reshape(len(x), -1).any(1).nonzero().flatten().tolist()
    if bad:
        first, part = (bad[0], "") if rows is None else (int(rows[bad[0]]), " that were read together")
        raise InputError(
            f"{what} have NaN, infinite values or ones beyond {str(x.dtype)[6:]} in {len(bad)} of {len(x)} rows{part}, "
            f"the first in {row_name(first)}; correct or drop these rows"
        )
    return x


def is_number(text: str) -> bool:
    """Whether a cell is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- choosing columns of a table by name, pattern, number or range ---


def _select_columns(
    columns: Columns | None, names: Sequence[str] | None, count: int, leave_out: Collection[str], path: Path
) -> list[int]:
    """Positions of the wanted columns, in the order asked for, without those that are left out.

    Each item is tried as a name, a pattern (``"f*"``), a number from 0, and a range (``"2:"``, ``"2:10"``).
    """
    chosen: list[int] = []
    for item in [":"] if columns is None else _items(columns):
        text = str(item).strip()
        found = [i for i, name in enumerate(names or []) if name == text]
        found = found or [i for i, name in enumerate(names or []) if fnmatchcase(name, text)]
        found = found or _numbered(text, count)
        if not found and columns is not None:
            known = f"{count} columns, numbered from 0" if names is None else f"the columns {shorten(names)}"
            raise InputError(f"no column {text!r} in {path}; it has {known}; change --columns")
        chosen += found
    kept = [i for i in chosen if names is None or names[i] not in leave_out]
    if chosen and not kept:
        raise InputError(f"{path} has no column but {shorten(list(leave_out))}, which are not features; add some")
    return kept


def _items(columns: Columns) -> Sequence[str | int]:
    return columns.split(",") if isinstance(columns, str) else columns


def _numbered(text: str, count: int) -> list[int]:
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and (part.isdigit() or not part) for part in parts):
        return []
    if len(parts) == 1:
        return [int(text)] if text and int(text) < count else []
    start, stop = (int(part) if part else None for part in parts)
    return list(range(count))[start:stop]


# --- opening a file ---


class EmbeddingFile:
    """An open file; only what is asked for is read."""

    path: Path
    names: list[str]  # what labels may be called: arrays, columns, or files beside it
    member: str  # what such a thing is
    in_parts = False  # whether the file need not fit in memory

    def texts(self) -> list[str]:
        """Those of the names that hold text."""
        return []

    def features(self, columns: Columns | None, leave_out: Collection[str]) -> Tensor:
        """Features (n, d), see `read_embeddings`."""
        what = f"features of {self.path}"
        return finite_rows(as_features(self.table(columns, leave_out), what, check_finite=False), what)

    def table(self, columns: Columns | None, leave_out: Collection[str]) -> NDArray[Any]:
        """Features (n, d) as they are in the file."""
        raise NotImplementedError

    def column(self, name: str) -> NDArray[Any]:
        """One of the names, such as labels (n,)."""
        raise NotImplementedError

    def groups(self) -> list[int]:
        """Rows that are stored together: 65,536 of an ``.npy`` file, row groups of a ``.parquet`` file."""
        raise NotImplementedError

    def feature_names(self, columns: Columns | None, leave_out: Collection[str] = ()) -> list[str] | None:
        """Names of the columns that are features, if these have names of their own."""
        return None

    def blocks(self, columns: Columns | None, groups: range, leave_out: Collection[str] = ()) -> Iterator[NDArray[Any]]:
        """Features of some groups, in blocks (b, d)."""
        raise NotImplementedError


@contextmanager
def open_embeddings(path: PathLike, key: str | None = None) -> Iterator[EmbeddingFile]:
    """Open a file of the format that its ending says; every reading error becomes an InputError that names it."""
    path = as_path(path)
    ending = path.suffix.lower()
    if ending not in EMBEDDING_ENDINGS:
        what = "is a folder" if path.is_dir() else f"ends in {ending!r}"
        raise InputError(f"{path} {what}; give a .npy, .npz, .csv or .parquet file")
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise InputError(f"no file at {path}; check the name") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a readable file") from None
    with file:
        start = file.read(6)
        if not start:
            raise InputError(f"{path} is empty (0 bytes); write the embeddings again")
        actual = next((name for name, magic in _MAGIC.items() if start.startswith(magic)), None)
        if actual != (ending if ending in _MAGIC else None):
            remedy = "write the file again" if actual is None else f"it is a {actual} file, rename it"
            raise InputError(f"{path} is not a {ending} file; {remedy}")
        if key is not None and ending != ".npz":
            raise InputError(f"{path} is {ending}, and key {key!r} is for .npz files; leave the key out")
        file.seek(0)
        try:
            if ending == ".npz":
                yield _Npz(path, file, key)
            else:
                yield {".npy": _Npy, ".csv": _open_csv, ".parquet": _open_parquet}[ending](path, file)
        except InputError:
            raise
        except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, OverflowError, RuntimeError) as error:
            raise InputError(f"{path} is damaged ({_one_line(error)}); write it again") from None


def _one_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# --- .npy and .npz, without pickle ---


class _Npy(EmbeddingFile):
    """One array, mapped into memory; labels are in another file beside it."""

    member, in_parts = "file", True

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.names = sorted(other.name for other in path.parent.glob("*.npy"))
        shape, dtype = _header(file)
        if dtype.hasobject:
            raise _objects(str(path))
        self.array = np.empty(shape, dtype) if 0 in shape else np.load(path, mmap_mode="r", allow_pickle=False)

    def table(self, columns: Columns | None, leave_out: Collection[str]) -> NDArray[Any]:
        return _as_table(self.array, columns, self.path, str(self.path))

    def column(self, name: str) -> NDArray[Any]:
        with open_embeddings(self.path.parent / name) as other:
            return np.asarray(cast(_Npy, other).array)

    def groups(self) -> list[int]:
        if self.array.ndim != 2 or len(self.array):  # one of many files may have no rows
            _check_table(self.array, str(self.path))
        n = len(self.array)
        return [min(BLOCK_ROWS, n - start) for start in range(0, n, BLOCK_ROWS)]

    def blocks(self, columns: Columns | None, groups: range, leave_out: Collection[str] = ()) -> Iterator[NDArray[Any]]:
        for group in groups:
            block = self.array[group * BLOCK_ROWS : (group + 1) * BLOCK_ROWS]
            yield _as_table(block, columns, self.path, str(self.path))


class _Npz(EmbeddingFile):
    """Several arrays; of those that are not asked for only the header is read."""

    member = "array"

    def __init__(self, path: Path, file: IO[bytes], key: str | None) -> None:
        self.path, self.key = path, key
        self.arrays = np.load(file, allow_pickle=False)
        self.headers: dict[str, Header] = {}
        for name in self.arrays.zip.namelist():
            if name.endswith(".npy"):
                with self.arrays.zip.open(name) as member:
                    self.headers[name.removesuffix(".npy")] = _header(member)
        self.names = list(self.headers)

    def texts(self) -> list[str]:
        return [name for name, (_, dtype) in self.headers.items() if dtype.kind in "US"]

    def table(self, columns: Columns | None, leave_out: Collection[str]) -> NDArray[Any]:
        what = str(self.path) if self.key is None else f"array {self.key!r} of {self.path}"
        return _as_table(self.column(self._choose(leave_out)), columns, self.path, what)

    def column(self, name: str) -> NDArray[Any]:
        if self.headers[name][1].hasobject:
            raise _objects(f"array {name!r} of {self.path}")
        return np.asarray(self.arrays[name])

    def _choose(self, leave_out: Collection[str]) -> str:
        """The array that is meant: the one named, or the only table of numbers but the labels."""
        headers = {n: header for n, header in self.headers.items() if self.key is not None or n not in leave_out}
        listing = ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in headers.items()) or "no arrays"
        if self.key is not None:
            if self.key not in headers:
                raise InputError(f"{self.path} has no array {self.key!r}; it holds {listing}; change --key")
            return self.key
        tables = [name for name, (shape, dtype) in headers.items() if len(shape) == 2 and dtype.kind in "fiu"]
        if not tables:
            raise InputError(f"{self.path} has no table of numbers, only {listing}; save one of shape (n, d)")
        if len(tables) > 1:
            raise InputError(f"{self.path} holds {len(tables)} tables: {listing}; choose one with --key {tables[0]}")
        return tables[0]


def _objects(what: str) -> InputError:
    return InputError(
        f"{what} holds Python objects, which are not read; save text with labels.astype(str), numbers with "
        "x.astype(np.float32)"
    )


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


def _as_table(array: NDArray[Any], columns: Columns | None, path: Path, what: str) -> NDArray[Any]:
    """The wanted columns of an array."""
    _check_table(array, what)
    return array if columns is None else array[:, _select_columns(columns, None, array.shape[1], (), path)]


def _check_table(array: NDArray[Any], what: str) -> None:
    if array.dtype.kind not in "fiu":
        raise InputError(f"{what} holds {array.dtype}, not real numbers; save it with x.astype(np.float32)")
    if array.ndim != 2:
        remedy = "x[:, None]" if array.ndim == 1 else "x.reshape(len(x), -1)"
        raise InputError(f"{what} has shape {array.shape}, not (n, d); save it with {remedy}")
    if array.size == 0:
        raise InputError(f"{what} has shape {array.shape}, so no numbers; write the embeddings again")


# --- .csv and .parquet by pyarrow, which is imported only here and only when needed ---


class _Table(EmbeddingFile):
    """Columns of a ``.csv`` or ``.parquet`` file, which ``read(positions, groups)`` gives in blocks of rows.

    ``sizes`` are the rows of each group.
    """

    member = "column"

    def __init__(self, path: Path, schema: Any, read: Read, sizes: list[int], named: bool) -> None:
        self.path, self.schema, self.read, self.sizes = path, schema, read, sizes
        self.names = [name.strip() for name in schema.names] if named else []
        self.in_parts = path.suffix.lower() == ".parquet"

    def texts(self) -> list[str]:
        return [name for name, field in zip(self.names, self.schema) if "string" in str(field.type)]

    def groups(self) -> list[int]:
        return self.sizes

    def table(self, columns: Columns | None, leave_out: Collection[str]) -> NDArray[Any]:
        blocks = list(self.blocks(columns, None, leave_out))
        if not blocks:
            raise InputError(f"{self.path} has no rows; write the embeddings again")
        found = np.concatenate(blocks)
        if self.in_parts:
            return found
        unnamed = columns is None and self.names[:1] == [""]
        if unnamed and len(found) > 1 and np.array_equal(found[:, 0], np.arange(len(found))):
            raise InputError(f"the unnamed first column of {self.path} counts the rows; leave it out: --columns 1:")
        with np.errstate(over="ignore"):  # what is beyond single precision is refused, with its row
            return found.astype(np.float32)

    def column(self, name: str) -> NDArray[Any]:
        cells = [cell for (block,) in self.read([self.names.index(name)], None) for cell in block.to_pylist()]
        numbers = all(isinstance(cell, int) for cell in cells) if not self.in_parts else None not in cells
        if numbers or all(isinstance(cell, float) and cell.is_integer() for cell in cells):
            return np.asarray(cells)
        return np.array(["" if cell is None else str(cell).strip() for cell in cells])  # few fractions may be names

    def blocks(
        self, columns: Columns | None, groups: range | None, leave_out: Collection[str] = ()
    ) -> Iterator[NDArray[Any]]:
        chosen = self._choose(columns, leave_out)
        width, row = None, 0
        for block in self.read(chosen, groups):
            if len(block[0]):
                found = np.column_stack([self._numbers(i, column, row) for i, column in zip(chosen, block)])
                if found.shape[1] != (width := width or found.shape[1]):
                    raise self._unequal(chosen[0])
                row += len(found)
                yield found

    def feature_names(self, columns: Columns | None, leave_out: Collection[str] = ()) -> list[str] | None:
        chosen = self._choose(columns, leave_out)
        named = self.names and not _is_list(self.schema.field(chosen[0]).type)
        return [self.names[i] for i in chosen] if named else None

    def _choose(self, columns: Columns | None, leave_out: Collection[str]) -> list[int]:
        """Columns that are features: those asked for, all, or the one that holds lists."""
        # pandas stores an index other than 0, 1, 2, ... as such a column
        places = [i for i, name in enumerate(self.schema.names) if not name.startswith("__index_level_")]
        names = [self.names[i] for i in places] if self.names else None
        chosen = [places[i] for i in _select_columns(columns, names, len(places), leave_out, self.path)]
        kinds = {i: self.schema.field(i).type for i in chosen}
        lists = [i for i in chosen if _is_list(kinds[i]) and _is_numeric(kinds[i].value_type)]
        other = [i for i in chosen if i not in lists and not _is_numeric(kinds[i])]
        if len(lists) == 1 and (columns is None or len(chosen) == 1):
            return lists  # beside a column of embeddings, the others are identifiers and labels
        if lists:
            names = [self.names[i] for i in lists]
            raise InputError(
                f"the columns {shorten(names)} of {self.path} hold lists; choose one with --columns {names[0]}"
            )
        if other or not chosen:
            shown = "; ".join(f"{self._name(i)} is {kinds[i]}{self._example(i)}" for i in other[:6]) or "no columns"
            commas = re.search(r", '-?\d*,\d+' in row", shown)
            remedy = "write decimals with a point, not a comma" if commas else "choose others with --columns"
            raise InputError(f"{self.path} has columns that are not numbers ({shown}); {remedy}")
        return chosen

    def _example(self, position: int) -> str:
        """The first cell of a column of a ``.csv`` file that is not a number."""
        if self.in_parts:
            return ""
        cells = (cell for (block,) in self.read([position], None) for cell in block.to_pylist())
        row, cell = next((row, cell) for row, cell in enumerate(cells) if not is_number(str(cell)))
        if isinstance(cell, bytes):
            return f", not UTF-8 text in {row_name(row)}"
        return (
            f", {str(cell)!r} in {row_name(row)}" if str(cell).strip() else f", a value is missing in {row_name(row)}"
        )

    def _numbers(self, position: int, column: Any, row: int) -> NDArray[Any]:
        """One column of a block that begins at ``row``, or the columns that its lists make."""
        values = column.flatten() if _is_list(column.type) else column
        if column.null_count or values.null_count:
            places = column.is_null().to_pylist() if column.null_count else [True]
            raise InputError(
                f"{self._name(position)} of {self.path} has missing values, the first in "
                f"{row_name(row + places.index(True))}; fill them or drop the rows"
            )
        found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
        if not _is_list(column.type):
            return found
        lengths = np.asarray(column.value_lengths())
        if lengths.min() != lengths.max() or lengths[0] == 0:
            raise self._unequal(position)
        return found.reshape(len(column), -1)

    def _unequal(self, position: int) -> InputError:
        return InputError(
            f"lists in {self._name(position)} of {self.path} are empty or differ in length; make them equal"
        )

    def _name(self, position: int) -> str:
        return f"column {repr(self.names[position]) if self.names else position}"


def _is_numeric(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind))


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _open_parquet(path: Path, handle: IO[bytes]) -> _Table:
    with needs_extra("cli"):
        import pyarrow.parquet as pq

    file = pq.ParquetFile(handle)
    names = file.schema_arrow.names
    if twice := [name for name, count in Counter(names).items() if count > 1]:  # pyarrow chooses columns by name
        raise InputError(f"{path} has several columns named {shorten(twice)}; rename them and write it again")

    def read(positions: list[int], groups: range | None) -> Iterator[list[Any]]:
        chosen = None if groups is None else list(groups)
        wanted = [names[i] for i in positions]
        for batch in file.iter_batches(BLOCK_ROWS, row_groups=chosen, columns=sorted(set(wanted))):
            yield [batch.column(name) for name in wanted]

    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    return _Table(path, file.schema_arrow, read, sizes, True)


def _open_csv(path: Path, handle: IO[bytes]) -> _Table:
    with needs_extra("cli"):
        import pyarrow as pa
        import pyarrow.csv as pacsv

    content = handle.read()
    lines = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")
    try:
        line = next((line for line in lines if line.strip()), "")
        delimiter = max(",;\t", key=line.count)
        lines.seek(0)
        rows = (row for row in csv.reader(lines, delimiter=delimiter) if row)
        first, second = next(rows, []), next(rows, [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); write it again as .csv") from None
    if not first:
        raise InputError(f"{path} has only blank lines; write the embeddings again")
    named = _is_header(first, second)
    if named and not second:
        raise InputError(f"{path} has a header but no rows; write the embeddings again")
    quoted_rows = _check_quotes(path, lines, delimiter, named) if b'"' in content else None

    ragged: list[Any] = []

    def note(row: Any) -> str:
        ragged.append(row)
        return "error"  # what a handler raises itself is lost

    block = min(len(content) + 1, 2**31 - 1)  # all of the file: types follow from all rows
    try:
        table = pacsv.read_csv(
            pa.py_buffer(content),
            pacsv.ReadOptions(use_threads=False, block_size=block, autogenerate_column_names=not named),
            pacsv.ParseOptions(
                delimiter=delimiter,
                newlines_in_values=True,
                invalid_row_handler=note,
            ),
            pacsv.ConvertOptions(true_values=[], false_values=[]),
        )
    except pa.ArrowInvalid:
        for row in ragged:
            raise InputError(
                f"{row_name(row.number - 1 - named)} of {path}, blank lines not counted, has {row.actual_columns} "
                f"columns, not {row.expected_columns}; fix the row"
            ) from None
        raise
    if quoted_rows is not None and len(table) != quoted_rows:
        raise InputError(
            f"{path} has {quoted_rows} rows, but {len(table)} as another program reads its quotation marks; write it "
            "again without quotation marks"
        )

    def read(positions: list[int], groups: range | None) -> Iterator[list[Any]]:
        for batch in table.to_batches(BLOCK_ROWS):
            yield [batch.column(i) for i in positions]

    return _Table(path, table.schema, read, [len(table)], named)


def _check_quotes(path: Path, lines: io.TextIOWrapper, delimiter: str, named: bool) -> int:
    """Count the rows, and refuse quotation marks between which rows may be hidden.

    Cells of text may have line breaks. But k rows of d columns that a stray mark joins to one cell have k (d - 1)
    delimiters between the k line breaks.
    """
    lines.seek(0)
    rows, number = csv.reader(lines, delimiter=delimiter, strict=True), -named
    try:
        for row in rows:
            for cell in row:
                breaks = len(cell.splitlines()) - 1
                if breaks > 0 and (is_number(cell) or cell.count(delimiter) >= breaks * (len(row) - 1)):
                    raise InputError(
                        f"{row_name(number)} of {path} has a cell of {breaks + 1} lines in quotation marks, which may "
                        f"hide rows: {cell[:40]!r}; remove stray quotation marks, or line breaks within the cell"
                    )
            number += bool(row)
    except csv.Error as error:
        raise InputError(
            f"{row_name(number)} of {path}, at line {rows.line_num}, has a quotation mark that does not begin or end "
            f"its cell ({error}); remove it, or double it within quotation marks"
        ) from None
    return number


def _is_header(first: list[str], second: list[str]) -> bool:
    if len(first) > 1 and first == [str(i) for i in range(len(first))]:
        return True  # what pandas writes for a table without column names
    text = [i for i, cell in enumerate(first) if not is_number(cell)]
    if len(text) in (0, len(first)):
        return bool(text)
    # numbers and text: a header, unless the same columns hold text below as well
    return any(i < len(second) and is_number(second[i]) for i in text)
