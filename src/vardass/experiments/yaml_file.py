"""Reading a YAML file strictly: no key twice, no guessing of types, and each complaint with its place."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from vardass.errors import InputError

__all__ = ["dump_yaml", "parse_yaml", "put"]

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
            r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    "merge": (re.compile(r"^<<$"), ["<"]),
}


class _Loader(yaml.SafeLoader):
    """The types of YAML 1.2: ``1e-3`` is a number; ``no``, ``1:30`` and ``2024-01-01`` are texts."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (as in the base class)


class _Dumper(yaml.SafeDumper):
    """Puts into quotes what this or another reader would not take for a text."""


for _name, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)


def parse_yaml(text: str) -> dict[str, Any]:
    """Read one mapping.

    Parameters
    ----------
    text : str
        YAML with the types that JSON has: a date or ``no`` is a text, ``1e-3`` a number.

    Raises
    ------
    InputError
        If the text is empty or not YAML (with line and column), is not a mapping, has a key twice, or a key or
        value of another type.

    Examples
    --------
    >>> parse_yaml("lr: 1e-3")
    {'lr': 0.001}
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise InputError("the file is empty; name at least data, algorithms and samplers")
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"a mapping of keys to values is needed, got {_kind(node)}; begin with 'data:'")
        _check_node(node, "", ())
        found: dict[str, Any] = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        why = error.problem or error.context
        raise InputError(f"not YAML{place}: {why}; check indentation, colons and quotes") from None
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {error}; save it as plain UTF-8 text") from None
    return found


def dump_yaml(content: dict[str, Any]) -> str:
    """Text from which `parse_yaml` gives ``content`` back."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def put(where: str, key: str | int) -> str:
    """Place of an entry: ``data`` and 0 is ``data[0]``, that and ``tasks`` is ``data[0].tasks``."""
    if isinstance(key, int):
        return f"{where}[{key}]"
    return f"{where}.{key}" if where else key


def _check_node(node: yaml.Node, where: str, above: tuple[int, ...]) -> None:
    line = node.start_mark.line + 1
    if id(node) in above:
        raise InputError(f"{where} in line {line} contains itself; remove the alias")
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            _check_node(entry, put(where, index), above)
        return
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            row = key.start_mark.line + 1
            if key.tag == _MERGE:
                _check_node(value, put(where, "<<"), above)
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:null":
                raise InputError(f"a key of {where or 'the file'} in line {row} is not a name; write it as text")
            if key.tag != "tag:yaml.org,2002:str":
                raise InputError(
                    f"key {key.value} of {where or 'the file'} in line {row} is not a name; put it in quotes if it is"
                )
            if key.value in seen:
                raise InputError(
                    f"{put(where, key.value)} is there twice, in lines {seen[key.value]} and {row}; keep one of them"
                )
            seen[key.value] = row
            _check_node(value, put(where, key.value), above)
        return
    kind = node.tag.rpartition(":")[2]
    if kind not in (*_PLAIN, "str"):
        raise InputError(f"{where} in line {line} has the type {node.tag}; use texts, numbers, lists and mappings")
    if kind == "float" and not math.isfinite(float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))):
        raise InputError(f"{where} in line {line} is {node.value}; give a finite number")


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"{node.value!r}"


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(node.value)  # YAML 1.1 reads 1:30 as 90


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
