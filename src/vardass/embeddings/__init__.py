"""Reading embeddings from the files people keep them in: .npy, .npz, .csv and .parquet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vardass.embeddings.columns import select_columns
from vardass.embeddings.csv_files import read_csv
from vardass.embeddings.numpy_files import read_npy, read_npz
from vardass.embeddings.parquet_files import read_parquet
from vardass.errors import InputError

__all__ = ["read_embeddings"]

_MAGIC = {".npy": b"\x93NUMPY", ".npz": b"PK", ".parquet": b"PAR1"}


def read_embeddings(
    path: str | os.PathLike[str], *, key: str | None = None, columns: str | Sequence[str | int] | None = None
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

    Returns
    -------
    ndarray of shape (n, d)
        float32 from ``.csv``; the file's own number type otherwise.

    Raises
    ------
    InputError
        If the file is missing, empty, not what its ending says, or not a table of numbers.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in (".csv", *_MAGIC):
        raise InputError(f"{path} ends in {ending!r}; give a .npy, .npz, .csv or .parquet file")
    _check_content(path, ending)
    if key is not None and ending != ".npz":
        raise InputError(f"{path} is {ending}, and key {key!r} is for .npz files; leave the key out")
    if ending == ".csv":
        array = read_csv(path, columns)
    elif ending == ".parquet":
        array = read_parquet(path, columns)
    else:
        array = read_npy(path) if ending == ".npy" else read_npz(path, key)
        _check_table(array, str(path) if key is None else f"array {key!r} of {path}")
        if columns is not None:
            array = array[:, select_columns(columns, None, array.shape[1], path)]
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _check_content(path: Path, ending: str) -> None:
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


def _check_table(array: NDArray[Any], name: str) -> None:
    if array.dtype.kind not in "fiu":
        raise InputError(f"{name} holds {array.dtype}, not real numbers; save it with x.astype(np.float32)")
    if array.ndim != 2:
        remedy = "x[:, None]" if array.ndim == 1 else "x.reshape(len(x), -1)"
        raise InputError(f"{name} has shape {array.shape}, not (n, d); save it with {remedy}")
    if array.size == 0:
        raise InputError(f"{name} has shape {array.shape}, so no numbers; write the embeddings again")
