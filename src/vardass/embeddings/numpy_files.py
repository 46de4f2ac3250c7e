"""Reading .npy and .npz files, without pickle."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vardass.errors import InputError

__all__ = ["read_npy", "read_npz"]

Header: TypeAlias = "tuple[tuple[int, ...], np.dtype[Any]]"


def read_npy(path: Path) -> NDArray[Any]:
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
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path} is damaged ({_one_line(error)}); write it again with np.save") from None


def read_npz(path: Path, key: str | None) -> NDArray[Any]:
    """Read one array of an ``.npz`` file; only its header is read of any other."""
    try:
        with zipfile.ZipFile(path) as archive:
            headers = {}
            for name in archive.namelist():
                if name.endswith(".npy"):
                    with archive.open(name) as member:
                        headers[name.removesuffix(".npy")] = _header(member)
        key = _choose_key(path, key, headers)
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays[key])
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, RuntimeError) as error:
        raise InputError(f"{path} is damaged ({_one_line(error)}); write it again with np.savez") from None


def _header(file: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(file)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = reader(file)
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
