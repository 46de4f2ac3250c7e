"""Reading .csv files: numpy's fast reader, and a slow second look to explain what stopped it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vardass.embeddings.columns import select_columns
from vardass.errors import InputError

__all__ = ["read_csv"]

_DELIMITERS = ",;\t"
_ENCODING = "utf-8-sig"  # spreadsheets begin a file with a byte-order mark


@dataclass(frozen=True)
class _Layout:
    delimiter: str
    width: int
    names: list[str] | None
    header_lines: int


def read_csv(path: Path, columns: str | Sequence[str | int] | None) -> NDArray[np.float32]:
    """Read numbers separated by comma, semicolon or tab, with or without a header, as float32 (n, d)."""
    try:
        layout = _layout(path)
        chosen = None if columns is None else select_columns(columns, layout.names, layout.width, path)
        with path.open(encoding=_ENCODING) as file:
            for _ in range(layout.header_lines):
                next(file)
            try:
                array: NDArray[np.float32] = np.loadtxt(
                    file,
                    dtype=np.float32,
                    delimiter=layout.delimiter,
                    usecols=chosen,
                    ndmin=2,
                    comments=None,
                    quotechar='"',
                )
            except UnicodeDecodeError:
                raise
            except ValueError as error:
                raise _explain(path, layout, chosen or range(layout.width), error) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); write it again as .csv") from None
    unnamed = layout.names is not None and layout.names[0] == "" and columns is None
    if unnamed and len(array) > 1 and np.array_equal(array[:, 0], np.arange(len(array))):
        raise InputError(f"the unnamed first column of {path} counts the rows; leave it out: --columns 1:")
    return array


def _layout(path: Path) -> _Layout:
    with path.open(encoding=_ENCODING, newline="") as file:
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
        return _Layout(delimiter, len(first), None, 0)
    if not second:
        raise InputError(f"{path} has a header but no rows; write the embeddings again")
    return _Layout(delimiter, len(first), [cell.strip() for cell in first], lines)


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


def _explain(path: Path, layout: _Layout, wanted: Sequence[int], cause: ValueError) -> InputError:
    """Find the first line or cell that stopped the fast reader."""
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.reader(file, delimiter=layout.delimiter)
        for row in reader:
            if not row or reader.line_num <= layout.header_lines:
                continue
            where = f"line {reader.line_num} of {path}"
            if len(row) != layout.width:
                return InputError(f"{where} has {len(row)} columns, not {layout.width}; mend the line")
            for i in wanted:
                if not _is_number(row[i]):
                    name = f"column {layout.names[i]!r}" if layout.names else f"column {i}"
                    what = f"{row[i]!r} is not a number" if row[i].strip() else "a value is missing"
                    return InputError(
                        f"{what} in {name}, {where}; mend the value, or choose numeric columns with --columns"
                    )
    return InputError(f"cannot read {path} ({str(cause).splitlines()[0]}); write it again as plain numbers")
