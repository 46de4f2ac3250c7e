"""A sweep as a YAML file or a preset: read, checked and expanded to runs before the first of them starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from vardass.data.domains import parse_pair
from vardass.data.registry import DATASETS, find_dataset, task_names
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.lab.expand import expand
from vardass.lab.record import RunSpec
from vardass.lab.spec_models import DataPart, Specification
from vardass.lab.yaml_file import as_mapping, at, check_content, dump_yaml, parse_yaml
from vardass.validate import choose, refuse_code, unknown

__all__ = ["Sweep", "load_sweep", "preset_names", "sweep_schema"]

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
    specification : Specification
        Its content with what was overridden, and with absolute roots.

    Examples
    --------
    >>> sweep = load_sweep("watch-quick", repeats=1)
    >>> sweep.source, len(sweep.runs()) > 0
    ('preset watch-quick', True)
    """

    name: str
    source: str
    text: str
    specification: Specification
    _runs: list[RunSpec] = field(repr=False)

    def runs(self) -> list[RunSpec]:
        """All runs: repeats outermost, then tasks, so that the first results cover everything."""
        return list(self._runs)

    def to_yaml(self) -> str:
        """YAML that gives the same runs wherever it is read, without the comments of the original."""
        # each algorithm has its samplers
        content = self.specification.model_dump(exclude_unset=True, exclude={"name", "samplers"})
        return dump_yaml({"name": self.name, **content})

    def describe(self) -> str:
        """What is compared, on what, and how many runs that takes."""
        spec = self.specification
        lines = [f"{self.name}: {len(self._runs):,} runs"]
        for data in spec.data:
            shown = ", ".join(data.tasks[:3]) + (", ..." if len(data.tasks) > 3 else "")
            lines.append(f"  {data.name}: {_number(len(data.tasks), 'task')} ({shown})")
        for part in spec.algorithms:
            lines.append(f"  {part.label} with {', '.join(sampler.label for sampler in part.samplers)}")
        for key, values in spec.grid.items():
            lines.append(f"  {key}: {', '.join(map(str, values))}")
        lines.append(
            f"  {_number(spec.tasks, 'task')} x {_number(spec.cells, 'cell')} x search of {spec.search.size} x "
            f"{_number(spec.repeats, 'repeat')}"
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
    trust_code: bool = False,
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
    trust_code : bool
        Import what the file names as ``package.module:Name``, which runs that code.

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
    try:
        document = parse_yaml(text, content="at least data, algorithms and samplers, such as 'data: watch'")
        refuse_code(_imported(document), "it", trust_code=trust_code)
        for key, value in (("seed", seed), ("repeats", repeats)):
            if value is not None:
                document[key] = value
        if search_size is not None:
            document["search"] = {**as_mapping(document.get("search")), "size": search_size}
        if settings:
            document["overrides"] = {**as_mapping(document.get("overrides")), **settings}
        spec = check_content(Specification, document)
        parts = _with_roots(_chosen(spec.data, data), spec.data, roots or {})
        parts = [_on_this_machine(part, folder) for part in parts]
        _check_tasks(parts)
        spec = spec.model_copy(update={"data": parts})
        count = spec.repeats * spec.tasks * spec.cells * spec.search.size
        if count > _MOST_RUNS:
            raise InputError(f"the sweep has {count:,} runs, more than {_MOST_RUNS:,}; lower repeats or search.size")
        return Sweep(spec.name or stem, source, text, spec, expand(spec))
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def sweep_schema() -> dict[str, Any]:
    """JSON schema of a sweep's file, with which editors complete keys and mark mistakes.

    Examples
    --------
    >>> "algorithms" in sweep_schema()["properties"]
    True
    """
    return Specification.model_json_schema()


def preset_names() -> tuple[str, ...]:
    """Names of the sweeps that come with the package.

    Examples
    --------
    >>> "paper-table1" in preset_names()
    True
    """
    return tuple(sorted(_presets()))


def _presets() -> dict[str, Traversable]:
    """Files of the presets by name; those of the paper are in a room above, named here as text."""
    folders = [files(room) / "presets" for room in ("vardass.lab", "vardass.paper")]
    entries = [entry for folder in folders for entry in folder.iterdir()]
    return {entry.name.removesuffix(".yaml"): entry for entry in entries if entry.name.endswith(".yaml")}


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
    name = str(given)
    preset = _presets().get(name)
    if preset is not None:  # a folder of that name is what a sweep of it left, as that of `make demo`
        return f"preset {name}", preset.read_text(encoding="utf-8"), Path.cwd(), name
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the YAML file of the sweep, such as {path / 'sweep.yaml'}")
    if path.suffix in _ENDINGS or len(path.parts) > 1:
        raise InputError(f"no file at {path.resolve()}; give a YAML file or a preset: {', '.join(preset_names())}")
    raise InputError(f"there is no such file, and {unknown('preset', name, preset_names())}")


def _imported(document: Mapping[str, Any]) -> list[Any]:
    """All of a sweep's file but its free texts: titles, labels, tasks, and folders and options of data."""

    def without(given: Any, *texts: str) -> Any:
        if isinstance(given, list):
            return [without(each, *texts) for each in given]
        if not isinstance(given, dict):
            return given
        return {name: without(each, "label") for name, each in given.items() if name not in texts}

    rest = without(document, "name", "data")
    return [rest, without(document.get("data"), "name", "tasks", "root", "options")]


def _chosen(parts: list[DataPart], wanted: Sequence[str] | None) -> list[DataPart]:
    if wanted is None:
        return parts
    names = [part.name for part in parts]
    for name in wanted:
        choose(name, "data", names)
    if not wanted:
        raise InputError(f"no data are left; choose at least one of {', '.join(names)}")
    return [part for part in parts if part.name in wanted]


def _with_roots(parts: list[DataPart], known: list[DataPart], roots: Mapping[str, PathLike]) -> list[DataPart]:
    for name, root in roots.items():
        with at(f"--root {name}={root}"):
            choose(name, "data", [part.name for part in known])
    places = {name: str(Path(root).expanduser().resolve()) for name, root in roots.items()}
    return [part.model_copy(update={"root": places[part.name]}) if part.name in places else part for part in parts]


def _on_this_machine(part: DataPart, folder: Path) -> DataPart:
    """The part with an absolute root that is there, and with all its tasks by name."""
    info = find_dataset(part.dataset)
    is_own = part.dataset not in DATASETS
    files_needed = f"{info.layout}\nfrom {info.origin}"
    root = part.root
    with at(part.place):
        if root is None and info.layout and not is_own:
            raise InputError(
                f"{part.dataset} is read from files; give its folder as root, or with --root {part.name}=DIR\n"
                f"{files_needed}"
            )
        if root is not None:
            path = (folder / Path(root).expanduser()).resolve()
            if not (path.is_dir() or (path.is_file() and (is_own or part.dataset == "embeddings"))):
                raise InputError(
                    f"root is {root!r}, but there is no folder at {path}; give the folder of {part.dataset}\n"
                    f"{files_needed}"
                )
            root = str(path)
        with at("tasks"):
            tasks = _tasks(part, root)
    return part.model_copy(update={"tasks": tasks} if root is None else {"tasks": tasks, "root": root})


def _tasks(part: DataPart, root: str | None) -> list[str]:
    known = task_names(part.dataset, root)
    if part.tasks == ["all"]:
        if not known:
            raise InputError(f"is 'all', but the tasks in {root} cannot be listed; name them, as [a->b]")
        return list(known)
    found: list[str] = []
    for index, given in enumerate(part.tasks):
        with at(index):
            task = _spelt(given, known, part.dataset)
            if task in found:
                raise InputError(f"is {task!r}, which is there already; remove it")
            found.append(task)
    return found


def _spelt(task: str, known: Sequence[str], dataset: str) -> str:
    """A task as the data set spells it."""
    if dataset not in DATASETS and not known:  # a user's own function knows its tasks
        return task
    if not known:  # one file: its arrays are looked at when it is loaded
        if "->" not in task:
            raise InputError(f"task {task!r} has no arrow; write it as 'source->target'")
        return task
    if dataset == "humpbacks" and task not in known and task in map(str, range(1, len(known) + 1)):
        return known[int(task) - 1]
    if "+" in task and "->" in task and all("->" in name for name in known):
        domains = list(dict.fromkeys(name.partition("->")[0] for name in known))
        sources, target = parse_pair(task, domains, dataset)
        return "+".join(sources) + "->" + target
    return choose(task, f"task of {dataset}", known, any_case=True)


def _check_tasks(parts: Sequence[DataPart]) -> None:
    places: dict[tuple[str, str], str] = {}
    for part in parts:
        for task in part.tasks:
            earlier = places.setdefault((part.name, task), part.place)
            if earlier != part.place:
                raise InputError(
                    f"{part.place} gives the task {task!r} of {part.name!r}, as {earlier} does; remove one of them, or "
                    "give one another name"
                )


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
