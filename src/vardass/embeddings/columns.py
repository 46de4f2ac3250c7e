"""Choosing columns of a table by name, pattern, number or range."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from vardass.errors import InputError

__all__ = ["select_columns", "shorten"]


def select_columns(
    columns: str | Sequence[str | int], names: Sequence[str] | None, count: int, path: Path
) -> list[int]:
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


def shorten(names: Sequence[str]) -> str:
    """Names for a message, at most six of them."""
    return ", ".join(map(repr, names[:6])) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")
