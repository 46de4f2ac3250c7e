"""YAML files: read strictly and checked by pydantic models; every error names its place in the file."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vardass.errors import InputError
from vardass.validate import unknown

__all__ = ["Section", "as_mapping", "at", "check_content", "dump_yaml", "parse_yaml"]

_PLAIN = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")),
    "float": (
        re.compile(r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"),
        list("-+.0123456789"),
    ),
    "merge": (re.compile(r"^<<$"), ["<"]),
}
_MOST_CHARACTERS, _MOST_ENTRIES = 10_000_000, 1_000_000
_TAG = "tag:yaml.org,2002:"
_VERBS = ("must ", "needs ", "has ", "is ")


class _Loader(yaml.SafeLoader):
    """The types of YAML 1.2: ``1e-3`` is a number; ``no``, ``1:30`` and ``2024-01-01`` are texts. No key twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (as in the base class)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are texts without duplicates."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == f"{_TAG}merge":
                continue
            if key.tag != f"{_TAG}str":
                raise InputError(f"the key {key.value!r} in line {line} is not a name; put it in quotes if it is one")
            if key.value in lines:
                raise InputError(f"{key.value} occurs twice, in lines {lines[key.value]} and {line}; keep one of them")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts into quotes what this or another reader would not take for a text."""


for _name, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def parse_yaml(text: str, *, content: str = "settings, such as 'steps: 100'") -> dict[str, Any]:
    """Read one mapping."""
    if len(text) > _MOST_CHARACTERS:
        raise InputError(f"it has {len(text):,} characters, more than {_MOST_CHARACTERS:,}; give a file of settings")
    try:
        found = _load(text)
        copied = json.loads(json.dumps(found, allow_nan=False))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        why = error.problem or error.context
        raise InputError(f"not YAML{place}: {why}; check indentation, colons and quotes") from None
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {error}; save it as plain UTF-8 text") from None
    except InputError:
        raise
    except RecursionError:
        raise InputError("it is nested too deeply to be read; settings are a few levels deep") from None
    except (TypeError, ValueError) as error:  # of json
        raise InputError(f"only texts, finite numbers, lists and mappings can be used: {error}; change it") from None
    if copied is None:
        raise InputError(f"the file is empty; it should hold {content}")
    if not isinstance(copied, dict):
        shown = textwrap.shorten(repr(copied), 80, placeholder=" ...")
        raise InputError(f"a mapping of keys to values is needed, got {shown}; the file should hold {content}")
    return copied


def _load(text: str) -> Any:
    """What the text says, if it is not too much: aliases of aliases make gigabytes of a few lines."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    entries = _count_entries(node, {})
    if entries > _MOST_ENTRIES:
        raise InputError(f"its aliases stand for {entries:.3g} entries, more than {_MOST_ENTRIES:,}; use fewer")
    return loader.construct_document(node)


def _count_entries(node: yaml.Node, known: dict[int, int]) -> int:
    """Entries of a node with all its aliases written out; one that holds itself counts once."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 1
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] += sum(_count_entries(part, known) for part in parts)
    return known[id(node)]


def dump_yaml(content: dict[str, Any]) -> str:
    """Text from which `parse_yaml` gives ``content`` back."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


# --- content that is checked, with the place of what is wrong ---


class _Located(InputError):
    """An InputError that knows its place."""

    def __init__(self, place: tuple[str | int, ...], message: str) -> None:
        self.place, self.message = place, message
        where = ""
        for key in place:
            where = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}" if where else str(key)
        # "steps must be ..." at settings.steps is "settings.steps must be ..."
        rest = message.removeprefix(f"{place[-1]} ") if place else message
        joint = " " if rest != message or rest.startswith(_VERBS) else ": "
        super().__init__(f"{where}{joint}{rest}" if where else message)


@contextmanager
def at(*place: str | int) -> Iterator[None]:
    """Put a place before the message of an InputError that is raised inside."""
    try:
        yield
    except _Located as error:
        raise _Located((*place, *error.place), error.message) from None
    except InputError as error:
        raise _Located(place, str(error)) from None


class Section(BaseModel):
    """A mapping in a file. Unknown keys are refused with the nearest known one; nothing is an empty mapping."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    short: ClassVar[str] = ""
    """Key that a bare text in place of the mapping stands for."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if isinstance(given, cls):
            return given
        if cls.short and isinstance(given, str):
            given = {cls.short: given}
        found = cls.prepare(as_mapping(given))
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in found:
                raise InputError(f"{key} is missing; {field.description}")
        return found

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Check the keys; a place for subclasses to fill in what can be left out."""
        for key in given:
            if key not in cls.model_fields:
                raise unknown("key", key, cls.model_fields)
        return given


def as_mapping(given: Any) -> dict[str, Any]:
    """A mapping; nothing is an empty one."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"must be a mapping of names to values, got {given!r}; write it as 'name: value'")
    return dict(given)


Content = TypeVar("Content")


def check_content(validate: Callable[[Any], Content], content: Any) -> Content:
    """``content`` as a pydantic model has it; of what is wrong, the first is raised as an InputError with its place."""
    try:
        return validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    ours = first.get("ctx", {}).get("error")
    with at(*first["loc"]):
        if isinstance(ours, InputError):
            raise ours
        got = repr(first["input"])
        raise InputError(
            f"{first['msg'][0].lower()}{first['msg'][1:]}, got {got if len(got) <= 100 else got[:100] + ' ...'}"
        )
