"""The data, algorithms, samplers and grid that a sweep's file names, each checked where it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from vardass.adapt.algorithms import algorithm_options
from vardass.adapt.batches import SAMPLER_NAMES
from vardass.data.domains import parse_pair
from vardass.data.registry import DATASETS, find_dataset, task_names
from vardass.errors import InputError
from vardass.experiments.layers import Layer, as_list, as_mapping, as_text, at, check_setting, flatten, read_layer
from vardass.experiments.yaml_file import put
from vardass.validate import choose, unknown

__all__ = [
    "AlgorithmPart",
    "DataPart",
    "SamplerPart",
    "read_algorithms",
    "read_data",
    "read_grid",
    "read_samplers",
]

_DATA_KEYS = ("dataset", "name", "root", "tasks", "options", "settings", "space")
_ALGORITHM_KEYS = ("name", "label", "samplers", "options", "settings", "space")
_SAMPLER_KEYS = ("name", "label", "options", "settings")


@dataclass(frozen=True)
class DataPart:
    """Tasks of a data set that share settings."""

    dataset: str
    name: str
    root: str | None
    tasks: tuple[str, ...]
    options: dict[str, Any]
    layer: Layer


@dataclass(frozen=True)
class SamplerPart:
    """A sampler with its options."""

    name: str
    label: str
    layer: Layer


@dataclass(frozen=True)
class AlgorithmPart:
    """An algorithm with its options and the samplers that serve it."""

    name: str
    label: str
    layer: Layer
    samplers: tuple[SamplerPart, ...] = field(default=())


def read_data(found: Any, folder: Path) -> list[DataPart]:
    """Read ``data``; relative roots begin at ``folder``."""
    parts: list[DataPart] = []
    places: dict[tuple[str, str], str] = {}
    for index, given in enumerate(as_list(found, "data")):
        where = put("data", index)
        part = _data_part({"dataset": given} if isinstance(given, str) else given, where, folder)
        for task in part.tasks:
            earlier = places.setdefault((part.name, task), where)
            if earlier != where:
                raise InputError(
                    f"{where} gives the task {task!r} of {part.name!r}, as {earlier} does; remove one of them, or give "
                    f"one another name"
                )
        parts.append(part)
    return parts


def _data_part(given: Any, where: str, folder: Path) -> DataPart:
    entry = as_mapping(given, where, _DATA_KEYS)
    if "dataset" not in entry:
        raise InputError(f"{where} has no dataset; name one of {', '.join(DATASETS)}")
    text = as_text(entry["dataset"], put(where, "dataset"))
    with at(put(where, "dataset")):
        info = find_dataset(text)
    dataset = info.name
    name = as_text(entry.get("name", dataset), put(where, "name"))
    root = _root(entry.get("root"), dataset, name, where, folder)
    options = as_mapping(entry.get("options"), put(where, "options"))
    with at(put(where, "options")):
        info.check_options(options)
    layer = read_layer(where, settings=entry.get("settings"), space=entry.get("space"))
    return DataPart(dataset, name, root, _tasks(entry.get("tasks", "all"), dataset, root, where), options, layer)


def _root(given: Any, dataset: str, name: str, where: str, folder: Path) -> str | None:
    info = find_dataset(dataset)
    if dataset not in DATASETS and given is None:
        return None  # a user's own code may need no files
    if dataset in DATASETS and not info.layout:
        if given is not None:
            raise InputError(f"{put(where, 'root')} is {given!r}, but {dataset} is not read from there; remove it")
        return None
    if given is None:
        raise InputError(
            f"{where}: {dataset} is read from files; give its folder as root, or with --root {name}=DIR\n"
            f"{info.layout}\nfrom {info.origin}"
        )
    path = (folder / Path(as_text(given, put(where, "root"))).expanduser()).resolve()
    if not (path.is_dir() or (dataset == "embeddings" and path.is_file())):
        raise InputError(
            f"{put(where, 'root')} is {given!r}, but there is no folder at {path}; give the folder of {dataset}\n"
            f"{info.layout}\nfrom {info.origin}"
        )
    return str(path)


def _tasks(given: Any, dataset: str, root: str | None, where: str) -> tuple[str, ...]:
    place = put(where, "tasks")
    with at(place):
        known = task_names(dataset, root)
    if given == "all":
        if not known:
            raise InputError(f"{place} is 'all', but the tasks in {root} cannot be listed; name them, as [a->b]")
        return known
    found: list[str] = []
    for index, task in enumerate(as_list(given, place)):
        spot = put(place, index)
        # the tasks of humpbacks may be given by position
        text = str(task) if isinstance(task, int) and not isinstance(task, bool) else as_text(task, spot)
        with at(spot):
            text = _task(text, known, dataset)
        if text in found:
            raise InputError(f"{spot} is {text!r}, which is there already; remove it")
        found.append(text)
    return tuple(found)


def _task(text: str, known: Sequence[str], dataset: str) -> str:
    if dataset not in DATASETS and not known:  # a user's own function knows its tasks
        return text
    if not known:  # one file: its arrays are looked at when it is loaded
        if "->" not in text:
            raise InputError(f"task {text!r} has no arrow; write it as 'source->target'")
        return text
    if dataset == "humpbacks" and text not in known and text in map(str, range(1, len(known) + 1)):
        return known[int(text) - 1]
    if "+" in text and "->" in text and all("->" in name for name in known):
        domains = list(dict.fromkeys(name.partition("->")[0] for name in known))
        sources, target = parse_pair(text, domains, dataset)
        return "+".join(sources) + "->" + target
    return choose(text, f"task of {dataset}", known, any_case=True)


def read_samplers(
    found: Any, place: str = "samplers", named: Mapping[str, SamplerPart] | None = None
) -> tuple[SamplerPart, ...]:
    """Read samplers; a text is a label of ``named``, the sweep's own, or the name of a sampler."""
    parts: dict[str, SamplerPart] = {}
    for index, given in enumerate(as_list(found, place)):
        where = put(place, index)
        if isinstance(given, str) and named and given in named:
            part = named[given]
        else:
            entry = as_mapping({"name": given} if isinstance(given, str) else given, where, _SAMPLER_KEYS)
            name = _name(entry, where)
            with at(where):
                choose(name, "sampler", SAMPLER_NAMES)
            label = as_text(entry.get("label", name), put(where, "label"))
            layer = read_layer(
                where, settings=entry.get("settings"), options=entry.get("options"), group="sampler_options"
            )
            part = SamplerPart(name, label, layer)
        if part.label in parts:
            raise InputError(f"{where} has the label {part.label!r} once more; remove it, or give it another label")
        parts[part.label] = part
    return tuple(parts.values())


def read_algorithms(found: Any, samplers: Any) -> list[AlgorithmPart]:
    """Read ``algorithms``, each with samplers of its own or with ``samplers``, those of the sweep."""
    shared = () if samplers is None else read_samplers(samplers)
    named = {part.label: part for part in shared}
    parts: list[AlgorithmPart] = []
    cells: dict[tuple[str, str], str] = {}
    for index, given in enumerate(as_list(found, "algorithms")):
        where = put("algorithms", index)
        entry = as_mapping({"name": given} if isinstance(given, str) else given, where, _ALGORITHM_KEYS)
        name = _name(entry, where)
        with at(where):
            known = algorithm_options(name)
        label = as_text(entry.get("label", name), put(where, "label"))
        layer = read_layer(
            where, settings=entry.get("settings"), space=entry.get("space"), options=entry.get("options")
        )
        for key in (*layer.values, *layer.space):
            group, _, option = key.partition(".")
            if group == "algorithm_options" and option not in known:
                raise InputError(f"{where}: {unknown(f'option of algorithm {name!r}:', option, known)}")
        own = read_samplers(entry["samplers"], put(where, "samplers"), named) if "samplers" in entry else shared
        if not own:
            raise InputError(f"{where} has no samplers and the file has none; add 'samplers: [uniform, vardass]'")
        for sampler in own:
            earlier = cells.setdefault((label, sampler.label), where)
            if earlier != where:
                raise InputError(
                    f"{where} is {label!r} with sampler {sampler.label!r}, as {earlier} is; remove one of them, or "
                    "give one a label"
                )
        parts.append(AlgorithmPart(name, label, layer, own))
    return parts


def read_grid(found: Any) -> list[tuple[dict[str, Any], Layer]]:
    """Points of ``grid``: what each adds to a cell, and its settings."""
    content = as_mapping(found, "grid")
    axes: list[list[tuple[str, str, Any]]] = []
    full = flatten(content, "grid", sampler_options=True)
    short = {"algorithm_options.penalty": "penalty"} if "penalty" in content else {}
    for key, values in full.items():
        place = put("grid", short.get(key, key))
        if not isinstance(values, list) or not values:
            raise InputError(f"{place} must be a list of values to compare, got {values!r}; write it as [10, 100]")
        axis: list[tuple[str, str, Any]] = []
        for index, value in enumerate(values):
            if not isinstance(value, str | int | float):
                raise InputError(f"{put(place, index)} must be a text or a number, got {value!r}")
            checked = check_setting(key, value, put(place, index), named=False)
            if any(checked == entry[2] for entry in axis):
                raise InputError(f"{put(place, index)} is {value!r}, which is there already; remove it")
            axis.append((short.get(key, key), key, checked))
        axes.append(axis)
    return [
        ({name: value for name, _, value in point}, Layer("grid", {key: value for _, key, value in point}))
        for point in product(*axes)
    ]


def _name(entry: dict[str, Any], where: str) -> str:
    if "name" not in entry:
        raise InputError(f"{where} has no name; write it as a text, or as {{name: ..., options: {{...}}}}")
    return as_text(entry["name"], put(where, "name"))
