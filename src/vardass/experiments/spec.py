"""A sweep as a YAML file or a preset: read, checked and expanded to runs before the first of them starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from vardass.adapt.algorithms.base import check_number
from vardass.errors import InputError
from vardass.experiments.expand import Plan, expand
from vardass.experiments.layers import as_mapping, as_text, at, flatten, read_layer
from vardass.experiments.overrides import override
from vardass.experiments.parts import read_algorithms, read_data, read_grid
from vardass.experiments.record import RunSpec
from vardass.experiments.yaml_file import dump_yaml, parse_yaml
from vardass.files import PathLike
from vardass.validate import check_count, choose, unknown

__all__ = ["Sweep", "load_sweep", "preset_names"]

_KEYS = (
    "name",
    "seed",
    "repeats",
    "search",
    "settings",
    "grid",
    "holdout",
    "unlabelled_fraction",
    "data",
    "algorithms",
    "samplers",
)
_MOST_RUNS = 1_000_000
_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class Sweep:
    """A sweep that was read and checked.

    Attributes
    ----------
    name : str
        Title.
    source : str
        File or preset that it was read from.
    text : str
        The YAML as it was given.
    document : dict
        Its content with what was overridden, and with absolute roots.
    plan : Plan
        Its parts.
    """

    name: str
    source: str
    text: str
    document: dict[str, Any]
    plan: Plan
    _runs: list[RunSpec] = field(repr=False)

    def runs(self) -> list[RunSpec]:
        """All runs: repeats outermost, then tasks, so that the first results cover everything."""
        return list(self._runs)

    def to_yaml(self) -> str:
        """YAML that gives the same runs wherever it is read, without the comments of the original."""
        return dump_yaml(self.document)

    def describe(self) -> str:
        """What is compared, on what, and how many runs that takes."""
        plan = self.plan
        lines = [f"{self.name}: {len(self._runs):,} runs"]
        for data in plan.data:
            shown = ", ".join(data.tasks[:3]) + (", ..." if len(data.tasks) > 3 else "")
            lines.append(f"  {data.name}: {_number(len(data.tasks), 'task')} ({shown})")
        for part in plan.algorithms:
            lines.append(f"  {part.label} with {', '.join(sampler.label for sampler in part.samplers)}")
        for key in plan.grid[0][0]:
            values = dict.fromkeys(point[key] for point, _ in plan.grid)
            lines.append(f"  {key}: {', '.join(map(str, values))}")
        lines.append(
            f"  {_number(plan.tasks, 'task')} x {_number(plan.cells, 'cell')} x search of {plan.size} x "
            f"{_number(plan.repeats, 'repeat')}"
        )
        return "\n".join(lines)


def load_sweep(
    path_or_preset: PathLike,
    *,
    roots: Mapping[str, PathLike] | None = None,
    data: Sequence[str] | None = None,
    seed: int | None = None,
    repeats: int | None = None,
    search_size: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Sweep:
    """Read a sweep and check all of it.

    Parameters
    ----------
    path_or_preset : path or str
        A YAML file, or one of `preset_names`. A file comes first.
    roots : mapping of str to path, optional
        Folders of data by name; they come before those of the file and begin at the working directory, while
        the file's begin at the file's folder.
    data : sequence of str, optional
        Names of the data to keep; by default all.
    seed, repeats, search_size : int, optional
        Instead of the file's.
    settings : mapping, optional
        Settings for all runs, such as ``{"steps": 100, "device": "cpu"}``. They come before all that the file says.

    Raises
    ------
    InputError
        With the file, the place in it, what is wrong, and the nearest known name.

    Notes
    -----
    A setting can be said for the sweep, its data, an algorithm and a sampler; what is said last, in this order,
    counts, be it a value or a distribution to search. A named space is the base and gives way to all of them.
    Of the points of a search the first has the defaults (``first: defaults``, as in DomainBed) or is drawn too.

    Examples
    --------
    >>> sweep = load_sweep("watch-quick", repeats=1)
    >>> sweep.runs()[0].dataset
    'watch'
    """
    source, text, folder, stem = _find(path_or_preset)
    with at(source):
        document = override(
            json.loads(json.dumps(parse_yaml(text))),  # entries that share an anchor become separate
            roots={name: str(Path(root).expanduser().resolve()) for name, root in (roots or {}).items()},
            data=data,
            seed=seed,
            repeats=repeats,
            search_size=search_size,
            settings=flatten(settings or {}, "settings given to load_sweep"),
        )
        plan = _plan(document, folder)
        for entry, part in zip(document["data"], plan.data, strict=True):
            if part.root is not None:
                entry["root"] = part.root
        name = as_text(document.setdefault("name", stem), "name")
        count = plan.repeats * plan.tasks * plan.cells * plan.size
        if count > _MOST_RUNS:
            raise InputError(f"the sweep has {count:,} runs, more than {_MOST_RUNS:,}; lower repeats or search.size")
        return Sweep(name, source, text, document, plan, expand(plan))


def preset_names() -> tuple[str, ...]:
    """Names of the sweeps that come with the package."""
    return tuple(
        sorted(
            entry.name.removesuffix(".yaml")
            for entry in (files("vardass.experiments") / "presets").iterdir()
            if entry.name.endswith(".yaml")
        )
    )


def _find(given: PathLike) -> tuple[str, str, Path, str]:
    """Name for messages, text, folder at which relative roots begin, and title."""
    path = Path(given).expanduser()
    if path.is_file():
        try:
            return str(path), path.read_text(encoding="utf-8-sig"), path.resolve().parent, path.stem
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the YAML file of the sweep, such as {path / 'sweep.yaml'}")
    name = str(given)
    if name in preset_names():
        preset = files("vardass.experiments") / "presets" / f"{name}.yaml"
        return f"preset {name}", preset.read_text(encoding="utf-8"), Path.cwd(), name
    if path.suffix in _ENDINGS or len(path.parts) > 1:
        raise InputError(f"no file at {path.resolve()}; give a YAML file or a preset: {', '.join(preset_names())}")
    raise InputError(f"there is no such file, and {unknown('preset', name, preset_names())}")


def _plan(document: Mapping[str, Any], folder: Path) -> Plan:
    as_mapping(document, "", _KEYS)
    for key in ("data", "algorithms"):
        if key not in document:
            raise InputError(f"{key} is missing; the file needs data, algorithms and samplers")
    search = as_mapping(document.get("search"), "search", ("size", "first", "space"))
    size = check_count(search.get("size", 1), "search.size")
    first = search.get("first", "defaults")
    with at("search.first"):
        choose(first, "choice", ("defaults", "random"))
    seed = check_count(document.get("seed", 0), "seed", low=0)
    repeats = check_count(document.get("repeats", 1), "repeats")
    holdout = check_number(document.get("holdout", 0.2), "holdout", low=0.0, below=1.0)
    share = document.get("unlabelled_fraction", 0.5)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
        raise InputError(f"unlabelled_fraction must be a number above 0 and at most 1, got {share!r}; 0.5 is usual")
    layer = read_layer("", settings=document.get("settings"), space=search.get("space"), space_at="search.space")
    parts = read_data(document["data"], folder)
    algorithms = read_algorithms(document["algorithms"], document.get("samplers"))
    layers = (layer, *(part.layer for part in parts), *(part.layer for part in algorithms))
    if size > 1 and not any(each.space or each.like for each in layers):
        raise InputError(f"search.size is {size}, but there is no space to search; add 'space: paper' to search")
    grid = read_grid(document.get("grid"))
    return Plan(seed, repeats, size, first, holdout, float(share), layer, parts, algorithms, grid)


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
