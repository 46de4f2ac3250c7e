"""A sweep as a YAML file or a preset: read, checked and expanded to runs before the first of them starts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from vardass.adapt.algorithms import algorithm_options, make_algorithm
from vardass.adapt.config import RunConfig
from vardass.adapt.networks import NETWORK_NAMES, check_network_options, make_network
from vardass.adapt.selection import NEED_SOURCE
from vardass.data.domains import parse_pair
from vardass.data.registry import DATASETS, find_dataset, task_names
from vardass.data.splits import named_seed
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.lab.record import RunSpec
from vardass.lab.search import Distribution, draw, named_space
from vardass.lab.sweep_file import RECOMMENDED, AlgorithmSection, DataSection, SamplerSection, Specification, full_name
from vardass.lab.yaml_file import as_mapping, at, check_content, dump_yaml, parse_yaml
from vardass.registry import declared_options
from vardass.samplers.registry import make_sampler
from vardass.validate import choose, refuse_code, unknown

__all__ = ["Sweep", "load_sweep", "preset_names"]

_MOST_RUNS = 1_000_000
_ENDINGS = (".yaml", ".yml")
_IMAGE_NETWORK = "conv"  # where the data set names none
_VECTORS = ("watch", "embeddings")
_SEED_RANGE = 2**31


@dataclass(frozen=True)
class Sweep:
    """A sweep that was read and checked."""

    name: str
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
        A YAML file, or one of `preset_names`. An existing file takes precedence.
    roots : mapping of str to path, optional
        Folders of data by name, instead of the file's. They are relative to the working directory, the file's to
        the file's folder.
    data : sequence of str, optional
        Names of the data to keep; by default all.
    seed, repeats, search_size : int, optional
        Override those of the file.
    settings : mapping, optional
        Settings for all runs, such as ``{"steps": 100, "device": "cpu"}``. They override those of the file.
    trust_code : bool
        Import code that the file names as ``package.module:Name``, which runs it.

    Notes
    -----
    Settings can be given for the sweep, its data, an algorithm and a sampler; later ones override earlier ones. Given
    settings are not searched.

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
        spec = check_content(Specification.model_validate, document)
        names = [part.name for part in spec.data]
        for name, root in (roots or {}).items():
            with at(f"--root {name}={root}"):
                choose(name, "data", names)
        places = {name: str(Path(root).expanduser().resolve()) for name, root in (roots or {}).items()}
        chosen = _chosen(spec.data, data)
        parts = [_on_this_machine(part, folder, places.get(part.name, part.root)) for part in chosen]
        _check_tasks(parts)
        spec = spec.model_copy(update={"data": parts})
        count = spec.repeats * spec.tasks * spec.cells * spec.search.size
        if count > _MOST_RUNS:
            raise InputError(f"the sweep has {count:,} runs, more than {_MOST_RUNS:,}; lower repeats or search.size")
        return Sweep(spec.name or stem, text, spec, _expand(spec))
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def preset_names() -> tuple[str, ...]:
    """Names of the sweeps that come with the package."""
    return tuple(sorted(_presets()))


def _presets() -> dict[str, Traversable]:
    """Files of the presets by name; those of the paper are in a room above, which may be absent."""
    folders = [files("vardass") / room / "presets" for room in ("lab", "paper")]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
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


def _chosen(parts: list[DataSection], wanted: Sequence[str] | None) -> list[DataSection]:
    if wanted is None:
        return parts
    names = [part.name for part in parts]
    for name in wanted:
        choose(name, "data", names)
    if not wanted:
        raise InputError(f"no data are left; choose at least one of {', '.join(names)}")
    return [part for part in parts if part.name in wanted]


def _on_this_machine(part: DataSection, folder: Path, root: str | None) -> DataSection:
    """The part with an absolute root that is there, and with all its tasks by name."""
    info = find_dataset(part.dataset)
    is_own = part.dataset not in DATASETS
    files_needed = f"{info.layout}\nfrom {info.origin}"
    with at(f"data {part.name!r}"):
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


def _tasks(part: DataSection, root: str | None) -> list[str]:
    known = task_names(part.dataset, root)
    if part.tasks == ["all"]:
        if not known:
            raise InputError(f"is 'all', but the tasks in {root} cannot be listed; name them, as [a->b]")
        return list(known)
    return [_spelt(task, known, part.dataset) for task in part.tasks]


def _spelt(task: str, known: Sequence[str], dataset: str) -> str:
    """A task as the data set spells it."""
    if not known:  # a user's own function knows its tasks, and a file's arrays are looked at when it is loaded
        if dataset in DATASETS and "->" not in task:
            raise InputError(f"task {task!r} has no arrow; write it as 'source->target'")
        return task
    if "+" in task and "->" in task and all("->" in name for name in known):
        domains = list(dict.fromkeys(name.partition("->")[0] for name in known))
        sources, target = parse_pair(task, domains, dataset)
        return "+".join(sources) + "->" + target
    return choose(task, f"task of {dataset}", known, any_case=True)


def _check_tasks(parts: Sequence[DataSection]) -> None:
    for (name, task), times in Counter((part.name, task) for part in parts for task in part.tasks).items():
        if times > 1:
            raise InputError(
                f"the task {task!r} of {name!r} occurs twice; remove one of them, or give one entry of data another "
                "name"
            )


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# --- from what the file says to its runs; what no run could do is refused before any has begun ---


def _expand(spec: Specification) -> list[RunSpec]:
    """Runs of a sweep: repeats outermost, then data and tasks, algorithms, samplers, grid, and the search."""
    cells = [list(_cells(spec, part)) for part in spec.data]
    runs: list[RunSpec] = []
    for repeat in range(spec.repeats):
        split_seed = named_seed("split", spec.seed, repeat) % _SEED_RANGE
        seeds = [named_seed("run", spec.seed, repeat, search) % _SEED_RANGE for search in range(spec.search.size)]
        for part, compared in zip(spec.data, cells, strict=True):
            trials = [
                (cell, search, _trial(spec, cell, repeat, search, seed))
                for cell in compared
                for search, seed in enumerate(seeds)
            ]
            runs += [
                RunSpec(
                    dataset=part.dataset,
                    task=task,
                    data_name=part.name,
                    config=_copy(config),
                    cell=dict(cell.name),
                    root=part.root,
                    data_options=dict(part.options),
                    search=search,
                    repeat=repeat,
                    split_seed=split_seed,
                    holdout=spec.holdout,
                    unlabelled_fraction=spec.unlabelled_fraction,
                )
                for task in part.tasks
                for cell, search, config in trials
            ]
    return runs


# --- what is compared ---


@dataclass(frozen=True)
class _Cell:
    """One entry of a table for one data set: fixed settings and what is searched."""

    name: dict[str, Any]
    config: dict[str, Any]
    space: dict[str, Distribution]


def _cells(spec: Specification, data: DataSection) -> Iterator[_Cell]:
    points = [dict(zip(spec.grid, values)) for values in product(*spec.grid.values())]
    for algorithm in spec.algorithms:
        for sampler in algorithm.samplers:
            for point in points:
                with at(f"{data.name}, {algorithm.label} with {sampler.label}" + (" and grid" if point else "")):
                    cell = _cell(spec, data, algorithm, sampler, point)
                selection = cell.config["selection"]
                if spec.holdout == 0.0 and selection in NEED_SOURCE:
                    raise InputError(f"holdout is 0, but selection {selection!r} needs held-out samples; raise holdout")
                yield cell


def _cell(
    spec: Specification, data: DataSection, algorithm: AlgorithmSection, sampler: SamplerSection, point: dict[str, Any]
) -> _Cell:
    owned = algorithm_options(algorithm.name)

    def of_this_algorithm(settings: Mapping[str, Any]) -> dict[str, Any]:
        known = {f"algorithm_options.{option}" for option in owned}
        return {k: v for k, v in settings.items() if not k.startswith("algorithm_options.") or k in known}

    compared = {full_name(name): value for name, value in point.items()}
    for name in set(compared) - set(of_this_algorithm(compared)):
        raise unknown(f"option of algorithm {algorithm.name!r}:", name.partition(".")[2], owned)
    # what is said last counts; what is searched gives way to all that is said
    said: dict[str, Any] = {}
    for settings in (spec.values, data.values, algorithm.values, sampler.values, spec.overrides, compared):
        said.update(of_this_algorithm(settings))
    values = {"network": _IMAGE_NETWORK, **find_dataset(data.dataset).settings, **said}
    space = of_this_algorithm(spec.search.own)
    if isinstance(spec.search.space, str):
        adversary = values.get("algorithm_options.adversary")
        options = None if adversary is None else {"adversary": adversary}
        space = named_space(spec.search.space, algorithm.name, options)
    space = {name: each for name, each in space.items() if name not in said}
    if sampler.name == RECOMMENDED:
        config = RunConfig.recommended(**_nest({"algorithm": algorithm.name}, values)).to_dict()
    else:
        config = RunConfig(**_nest({"algorithm": algorithm.name, "sampler": sampler.name}, values)).to_dict()
    if data.dataset in _VECTORS and config["network"] in NETWORK_NAMES and config["network"] != "mlp":
        raise InputError(f"network {config['network']!r} is not for vectors, which {data.dataset} has; use 'mlp'")
    _try_run(config)
    own = {name: each for name, each in space.items() if name in spec.search.own}
    for trial in (config, *(_nest(config, {name: v}) for name, each in own.items() for v in each.extremes())):
        _once(_try_algorithm, trial["algorithm"], trial["algorithm_options"])
        _once(_try_network, trial["network"], trial["network_options"])
    return _Cell({"algorithm": algorithm.label, "sampler": sampler.label, **point}, config, space)


def _trial(spec: Specification, cell: _Cell, repeat: int, search: int, seed: int) -> dict[str, Any]:
    if search == 0 and spec.search.first == "defaults":
        drawn = {name: each.default for name, each in cell.space.items() if each.default is not None}
    else:
        drawn = draw(cell.space, seed=spec.seed, repeat=repeat, search=search)
    config = _nest(cell.config, drawn)
    config["seed"] = seed
    with at(f"{' with '.join(map(str, cell.name.values()))}, repeat {repeat}, search {search}"):
        _try_run(config)
    return config


def _nest(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``values``, whose options have a dot."""
    found = _copy(config)
    for name, value in values.items():
        group, dot, option = name.partition(".")
        if dot:
            found[group] = {**found.get(group, {}), option: value}
        else:
            found[name] = value
    return found


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in config.items()}


# --- names and options, tried out without data ---

# options whose values are read at a refresh; the others depend on the number of samples
_TRIED = (
    *("kernel", "solver", "restarts", "init", "trials", "parallel", "patience", "max_iter", "max_passes", "tol"),
    *("kernel_rank", "plan_rank", "swap_rounds"),
)
_ROWS, _BATCH = 128, 8


def _try_run(config: Mapping[str, Any]) -> None:
    """Refuse settings that no run can have, options that its sampler does not have, and batches that it cannot draw."""
    _once(
        _try_settings,
        {name: v for name, v in config.items() if name not in ("seed", "sampler", "sampler_options")},
    )
    sampler, options = config["sampler"], config["sampler_options"]
    _once(_try_batches, sampler, options, config["batch_size"], config["class_shares"] == "source")
    if config["target_batch_size"] is not None:
        _once(_try_batches, sampler, options, config["target_batch_size"], False)
    _once(_try_refresh, sampler, {option: value for option, value in options.items() if option in _TRIED})


def _once(attempt: Callable[..., object], *given: Any) -> None:
    """Make an attempt, each of them once: runs differ in few ways."""
    try:
        _attempted(attempt, json.dumps(given, sort_keys=True))
    except (TypeError, ValueError) as error:  # an InputError is a ValueError
        raise InputError(str(error)) from None


@lru_cache(maxsize=10_000)
def _attempted(attempt: Callable[..., object], given: str) -> None:
    attempt(*json.loads(given))


def _try_settings(settings: Mapping[str, Any]) -> None:
    RunConfig(**settings)


def _try_algorithm(name: str, options: Mapping[str, Any]) -> None:
    make_algorithm(name, make_network("mlp", (4,), 2, hidden=(4,)), 2, **options)


def _try_batches(name: str, options: Mapping[str, Any], batch_size: int, grouped: bool) -> None:
    n = 64 * batch_size
    groups: dict[str, Any] = {"groups": torch.zeros(n, dtype=torch.int64)} if grouped else {}
    make_sampler(name, n, batch_size, **{**options, **groups})


def _try_refresh(name: str, options: Mapping[str, Any]) -> None:
    if not options:
        return
    sampler = make_sampler(name, _ROWS, _BATCH, **options)
    if sampler.needs_features:
        sampler.refresh(torch.randn(_ROWS, 16, generator=torch.Generator().manual_seed(0)))
    next(iter(sampler))


def _try_network(spec: str, options: Mapping[str, Any]) -> None:
    if "seed" in options:
        raise InputError(
            f"seed={options['seed']!r} cannot be an option of the network; each run's is made by the sweep"
        )
    own = {name: value for name, value in options.items() if name not in declared_options(make_network)}
    check_network_options(spec, own)
    shared = {name: value for name, value in options.items() if name not in own}
    # others need their data, or a download: what all networks share is tried on a small one
    make_network("mlp", (4,), 2, **shared, **(own if spec == "mlp" else {"hidden": (4,)}))
