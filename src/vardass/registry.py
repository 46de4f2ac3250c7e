"""Things by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar, cast

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping of names to things, some of which are imported when they are first asked for.

    An entry that is a text, ``"package.module:Name"``, is the home of the thing. So a room may name what a room above
    it holds without importing it: the library knows the names of the paper's data sets and rivals.

    Parameters
    ----------
    entries : mapping
        Things, or their homes, by name.

    Examples
    --------
    >>> roots = Registry({"two": abs, "four": "math:sqrt"})
    >>> list(roots), roots["four"](16.0)
    (['two', 'four'], 4.0)
    """

    def __init__(self, entries: Mapping[str, T | str]) -> None:
        self._entries: dict[str, T | str] = dict(entries)

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = cast(T, getattr(import_module(module), attribute))
            self._entries[name] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
