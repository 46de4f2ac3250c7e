"""Things by name, and the options that they declare."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from vardass.errors import InputError
from vardass.validate import choose, import_by_name, unknown

T = TypeVar("T")

_WAYS = {"class": "a subclass of", "object": "a", "function": "a function"}


class Registry(Mapping[str, T], Generic[T]):
    """A mapping of names to objects, some of which are imported on first use.

    A string entry, ``"package.module:Name"``, is imported on first use, so that a package can name objects of packages
    above it. `find` is for names given by a user, ``registry[name]`` for known names. ``kind`` is what messages call
    the objects.

    With a class ``base``, `find` also accepts the user's own ``"package.module:Name"``: a subclass ("class"), an
    "object" of it or a "function", as ``own`` allows; this is checked before anything is called. For names from a file
    call ``refuse_code`` first: see SECURITY.md.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, T | str], *, base: type | None = None, own: Collection[str] = ("class",)
    ) -> None:
        self.kind, self.base, self._own = kind, base, own
        self._entries: dict[str, T | str] = dict(entries)

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = cast(T, import_by_name(entry, self.kind))
            self._entries[name] = entry
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str, *, any_case: bool = False) -> T:
        """The thing of a name, or the user's own of ``"package.module:Name"``."""
        if self.base is None or not isinstance(name, str) or ":" not in name:
            return self[choose(name, self.kind, self, any_case=any_case)]
        return self.check_own(import_by_name(name, self.kind), name)

    def check_own(self, thing: Any, name: str) -> T:
        """Return the user's own ``thing``, refused unless it is of a kind that is taken."""
        assert self.base is not None
        is_class = isinstance(thing, type)
        found = {
            "class": is_class and issubclass(thing, self.base),
            "object": isinstance(thing, self.base),
            "function": callable(thing) and not is_class,
        }
        if not any(found[way] for way in self._own):
            base = f"{self.base.__module__}.{self.base.__qualname__}"
            wanted = " or ".join(_WAYS[way] + (f" {base}" if way != "function" else "") for way in self._own)
            raise InputError(f"{self.kind} {name!r} is {thing!r}, not {wanted}; name one that is")
        return cast(T, thing)


@cache
def declared_options(thing: Any) -> Mapping[str, Any]:
    """Options of a function or class, its own first, and their defaults, or ``inspect.Parameter.empty``.

    They are the arguments that are keyword-only or have a default; of inherited constructors only keyword-only ones.
    """
    owners = [thing]
    if isinstance(thing, type):
        owners = [parent for parent in thing.__mro__ if parent is not object and "__init__" in vars(parent)]
    found: dict[str, Any] = {}
    for owner in owners:
        for each in _parameters(owner):
            is_given_by_place = each.kind is each.POSITIONAL_OR_KEYWORD and each.default is not each.empty
            if each.kind is each.KEYWORD_ONLY or (is_given_by_place and owner is owners[0]):
                found.setdefault(each.name, each.default)
    return MappingProxyType(found)


def check_options(
    what: str, given: Iterable[str], thing: Any, *, besides: Iterable[str] = (), without: Collection[str] = ()
) -> None:
    """Refuse an option that ``thing``, called ``what`` in the message, does not declare, naming the nearest one.

    A function with ``**`` takes any. Names in ``besides`` are taken too, those in ``without`` are not.
    """
    if not isinstance(thing, type) and any(each.kind is each.VAR_KEYWORD for each in _parameters(thing)):
        return
    known = [name for name in dict.fromkeys([*declared_options(thing), *besides]) if name not in without]
    for name in given:
        if name not in known:
            raise unknown(f"option of {what}:", name, known)


@cache
def _parameters(thing: Any) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(thing).parameters.values())
