"""Settings and search spaces of one level of a sweep's file, under one set of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vardass.adapt.config import RunConfig
from vardass.errors import InputError
from vardass.experiments.search import SPACE_NAMES, Distribution, parse_distribution
from vardass.experiments.yaml_file import put
from vardass.validate import choose, unknown

__all__ = ["GROUPS", "Layer", "as_list", "as_mapping", "as_text", "at", "check_setting", "flatten", "read_layer"]

GROUPS = ("algorithm_options", "network_options", "sampler_options")
_ELSEWHERE = {
    "algorithm": "list them under algorithms",
    "sampler": "list them under samplers",
    "seed": "give seed at the top of the file; each run's is made from it",
    "sampler_options": "give them as options of the sampler, under samplers, or under grid",
}
_FIELDS = [name for name in RunConfig.model_fields if name not in _ELSEWHERE]
_TYPES = {name: getattr(entry.annotation, "__name__", "") for name, entry in RunConfig.model_fields.items()}
_PLAIN: dict[str, tuple[type, str]] = {"bool": (bool, "true or false"), "str": (str, "a text")}
_TOGETHER = ("refresh_options",)  # what they may be depends on other settings: checked when all are known


@dataclass(frozen=True)
class Layer:
    """What one level says: the sweep, its data, an algorithm, a sampler or a point of the grid.

    Attributes
    ----------
    where : str
        Place in the file.
    values : dict
        Fixed settings; options have a dot, such as ``"algorithm_options.penalty"``.
    space : dict of str to Distribution
        Settings to search.
    like : str or None
        Named space that is searched where nothing else is said.
    """

    where: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    space: dict[str, Distribution] = field(default_factory=dict)
    like: str | None = None


def read_layer(
    where: str,
    *,
    settings: Any = None,
    space: Any = None,
    options: Any = None,
    group: str = "algorithm_options",
    settings_at: str | None = None,
    space_at: str | None = None,
) -> Layer:
    """Read ``settings``, ``space`` and ``options``, which belong to ``group``, of the entry at ``where``."""
    settings_at = settings_at or put(where, "settings")
    space_at = space_at or put(where, "space")
    values = flatten(as_mapping(settings, settings_at), settings_at)
    for name, value in as_mapping(options, put(where, "options")).items():
        key = f"{group}.{name}"
        if key in values:
            raise InputError(f"{put(where, 'options')}.{name} and {settings_at} both set {key}; give it once")
        values[key] = value
    checked = {key: check_setting(key, value, settings_at) for key, value in values.items()}
    like, found = _read_space(space, space_at)
    both = [key for key in found if key in checked]
    if both:
        raise InputError(
            f"{space_at} searches {both[0]}, which is fixed beside it to {checked[both[0]]!r}; remove one of them"
        )
    return Layer(where, checked, found, like)


def _read_space(space: Any, where: str) -> tuple[str | None, dict[str, Distribution]]:
    if isinstance(space, str):
        with at(where):
            return choose(space, "space", SPACE_NAMES), {}
    content = dict(as_mapping(space, where))
    like = content.pop("like", None)
    if like is not None:
        with at(put(where, "like")):
            choose(like, "space", SPACE_NAMES)
    found = {}
    for key, given in flatten(content, where).items():
        place = put(where, key)
        distribution = parse_distribution(given, place)
        for value in distribution.extremes():
            check_setting(key, value, place, named=False)
        found[key] = distribution
    return like, found


def flatten(content: Mapping[str, Any], where: str, *, sampler_options: bool = False) -> dict[str, Any]:
    """Values by full name; ``penalty`` and ``algorithm_options: {penalty: ...}`` are one name, and known ones only."""
    groups = GROUPS if sampler_options else GROUPS[:2]
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key in groups:
            inner = as_mapping(value, put(where, key))
            pairs = [(f"{key}.{name}", each) for name, each in inner.items()]
        else:
            pairs = [(full_name(key, where, groups), value)]
        for name, each in pairs:
            if name in found:
                raise InputError(f"{where} gives {name} twice; write it once")
            found[name] = each
    return found


def full_name(key: str, where: str, groups: Iterable[str] = GROUPS[:2]) -> str:
    """``key`` as a setting's full name; an InputError with the nearest if there is none."""
    if key == "penalty":
        return "algorithm_options.penalty"
    group, dot, option = key.partition(".")
    if dot and group in groups and option:
        return key
    if group in _ELSEWHERE:
        raise InputError(f"{where}: {key} cannot be set here; {_ELSEWHERE[group]}")
    if key not in _FIELDS or key in GROUPS:
        known = [name for name in _FIELDS if name not in GROUPS]
        raise InputError(f"{where}: {unknown('setting', key, [*known, 'penalty', *(f'{g}.*' for g in groups)])}")
    return key


def check_setting(key: str, value: Any, where: str, *, named: bool = True) -> Any:
    """``value`` in the type of its setting, if a run can have it; options are checked with their owner."""
    if "." in key:
        return value
    place = put(where, key) if named else where
    kind, needed = _PLAIN.get(_TYPES[key], (None, ""))
    if kind is not None and not isinstance(value, kind):
        raise InputError(f"{place} must be {needed}, got {value!r}")
    if key in _TOGETHER:
        return as_mapping(value, place)
    settings: dict[str, Any] = {key: value}
    with at(where):
        RunConfig(**settings)
    if key == "device" and value != "auto":
        try:
            torch.device(value)
        except RuntimeError:
            raise InputError(f"{place} is {value!r}, which is no device; use auto, cpu, cuda or cuda:1") from None
    return float(value) if _TYPES[key] == "float" else value


class at:
    """Put the place in the file before the message of an InputError raised inside."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InputError):
            raise InputError(f"{self.where}: {error}" if self.where else str(error)) from None


def as_mapping(found: Any, where: str, known: Iterable[str] | None = None) -> dict[str, Any]:
    """A mapping, with ``known`` keys only; nothing is an empty one."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InputError(f"{where} must be a mapping of names to values, got {found!r}; write it as 'name: value'")
    if known is not None:
        names = list(known)
        for key in found:
            if key not in names:
                error = unknown("key", key, names)
                raise InputError(f"{where}: {error}" if where else str(error))
    return dict(found)


def as_list(found: Any, where: str) -> list[Any]:
    """A list with entries; a single text or mapping stands for a list of one."""
    if isinstance(found, str | Mapping):
        return [found]
    if not isinstance(found, list):
        raise InputError(f"{where} must be a list, got {found!r}; write it as [a, b]")
    if not found:
        raise InputError(f"{where} is an empty list; give at least one entry")
    return found


def as_text(found: Any, where: str) -> str:
    """A text that is not empty."""
    if not isinstance(found, str) or not found.strip():
        raise InputError(f"{where} must be a text, got {found!r}; put it in quotes if it is one")
    return found
