"""Reading .parquet files with pyarrow, which is imported only here and only when needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vardass.embeddings.columns import select_columns, shorten
from vardass.errors import InputError

__all__ = ["read_parquet"]

_BLOCK_ROWS = 65536


def read_parquet(path: Path, columns: str | Sequence[str | int] | None) -> NDArray[Any]:
    """Read numeric columns, or the one column that holds lists of numbers, as (n, d)."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise InputError(f"{path} needs pyarrow to be read: pip install 'vardass[parquet]'") from None
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            # pandas stores an index other than 0, 1, 2, ... as such a column
            names = [name for name in schema.names if not name.startswith("__index_level_")]
            if columns is not None:
                names = [names[i] for i in select_columns(columns, names, len(names), path)]
            names = _usable(path, schema, names, asked=columns is not None)
            blocks = [
                _block(path, batch, names)
                for batch in file.iter_batches(_BLOCK_ROWS, columns=sorted(set(names)))
                if len(batch)
            ]
    except (pa.ArrowException, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is damaged ({reason}); write it again") from None
    if not blocks:
        raise InputError(f"{path} has no rows; write the embeddings again")
    if len({block.shape[1] for block in blocks}) > 1:
        raise _unequal(path, names[0])
    return np.concatenate(blocks)


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
