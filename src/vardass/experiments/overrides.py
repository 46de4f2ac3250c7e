"""Change the content of a sweep's file by what a command's options say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vardass.errors import InputError
from vardass.experiments.layers import GROUPS, as_list
from vardass.validate import unknown

__all__ = ["override"]


def override(
    document: dict[str, Any],
    *,
    roots: Mapping[str, str],
    data: Sequence[str] | None,
    seed: int | None,
    repeats: int | None,
    search_size: int | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Change ``document``, which may still be wrong in any way, in place.

    Data become a list of mappings. ``settings``, by full names, are taken out of all other places, so that they count
    for all runs.
    """
    if "data" in document:
        entries = [{"dataset": e} if isinstance(e, str) else e for e in as_list(document["data"], "data")]
        document["data"] = _chosen(entries, data)
        names = [_data_name(entry) for entry in document["data"]]
        for name, root in roots.items():
            if name not in [_data_name(entry) for entry in entries]:
                raise InputError(f"--root {name}={root}: {unknown('data', name, names)}")
            for entry in document["data"]:
                if _data_name(entry) == name:
                    entry["root"] = root
    for key, value in (("seed", seed), ("repeats", repeats)):
        if value is not None:
            document[key] = value
    if search_size is not None:
        document["search"] = {**(_part(document, "search")), "size": search_size}
    if settings:
        _set_all(document, settings)
    return document


def _chosen(entries: list[Any], wanted: Sequence[str] | None) -> list[Any]:
    if wanted is None:
        return entries
    names = [_data_name(entry) for entry in entries]
    for name in wanted:
        if name not in names:
            raise unknown("data", name, names)
    if not wanted:
        raise InputError(f"no data are left; choose at least one of {', '.join(names)}")
    return [entry for entry, name in zip(entries, names, strict=True) if name in wanted]


def _data_name(entry: Any) -> str:
    return str(entry.get("name", entry.get("dataset"))) if isinstance(entry, dict) else ""


def _set_all(document: dict[str, Any], settings: Mapping[str, Any]) -> None:
    grid = _part(document, "grid")
    for name in settings:
        if _has(grid, name):
            raise InputError(f"{name} is compared under grid, so it cannot be {settings[name]!r} for all runs")
    owners: list[Any] = [document]
    for key in ("data", "algorithms", "samplers"):
        found = document.get(key)
        owners += found if isinstance(found, list) else [found]
    for owner in list(owners):
        inner = owner.get("samplers") if isinstance(owner, dict) and owner is not document else None
        owners += inner if isinstance(inner, list) else [inner]
    for owner in owners:
        if not isinstance(owner, dict):
            continue
        places = [_part(owner, "settings"), _part(owner, "space"), _part(_part(owner, "search"), "space")]
        for name in settings:
            for place in places:
                _remove(place, name)
            group, _, option = name.partition(".")
            if group == "algorithm_options" and owner is not document:
                _part(owner, "options").pop(option, None)
    document["settings"] = {**_part(document, "settings"), **settings}


def _part(owner: dict[str, Any], key: str) -> dict[str, Any]:
    found = owner.get(key)
    return found if isinstance(found, dict) else {}


def _spellings(name: str) -> tuple[str, ...]:
    return (name, "penalty") if name == "algorithm_options.penalty" else (name,)


def _has(place: dict[str, Any], name: str) -> bool:
    group, _, option = name.partition(".")
    return any(each in place for each in _spellings(name)) or (group in GROUPS and option in _part(place, group))


def _remove(place: dict[str, Any], name: str) -> None:
    group, dot, option = name.partition(".")
    for each in _spellings(name):
        place.pop(each, None)
    if dot:
        _part(place, group).pop(option, None)
