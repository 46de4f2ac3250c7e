"""From the parts of a sweep to its runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vardass.adapt.algorithms import algorithm_options
from vardass.adapt.config import RunConfig
from vardass.adapt.evaluation import _NEED_SOURCE
from vardass.adapt.networks import NETWORK_NAMES
from vardass.data.splits import derived_seed
from vardass.errors import InputError
from vardass.experiments.checks import Checks
from vardass.experiments.layers import Layer, at
from vardass.experiments.parts import AlgorithmPart, DataPart, SamplerPart
from vardass.experiments.record import RunSpec
from vardass.experiments.search import Distribution, draw, named_space
from vardass.validate import unknown

__all__ = ["Plan", "expand"]

# as `vardass train` has them
_NETWORKS = {"watch": "mlp", "embeddings": "mlp", "humpbacks": "audio", "audio": "audio"}
_IMAGE_NETWORK = "conv"
_VECTORS = ("watch", "embeddings")
_SEED_RANGE = 2**31


@dataclass(frozen=True)
class Plan:
    """All that a sweep's file says, read and checked part by part."""

    seed: int
    repeats: int
    size: int
    first: str
    holdout: float
    unlabelled_fraction: float
    layer: Layer
    data: list[DataPart]
    algorithms: list[AlgorithmPart]
    grid: list[tuple[dict[str, Any], Layer]]

    @property
    def cells(self) -> int:
        """Number of cells that are compared on each task."""
        return len(self.grid) * sum(len(part.samplers) for part in self.algorithms)

    @property
    def tasks(self) -> int:
        """Number of tasks of all data."""
        return sum(len(part.tasks) for part in self.data)


@dataclass(frozen=True)
class _Cell:
    """One entry of a table for one data set: fixed settings and what is searched."""

    name: dict[str, Any]
    config: dict[str, Any]
    space: dict[str, Distribution]
    defaults: dict[str, Any]


def expand(plan: Plan) -> list[RunSpec]:
    """Runs of a plan: repeats outermost, then data and tasks, algorithms, samplers, grid, and the search.

    Each configuration is made once, so that one which cannot be run is refused before any is.
    """
    _check_owners(plan)
    checks = Checks()
    cells = [list(_cells(plan, part, checks)) for part in plan.data]
    runs = []
    for repeat in range(plan.repeats):
        split_seed = derived_seed("split", plan.seed, repeat) % _SEED_RANGE
        seeds = [derived_seed("run", plan.seed, repeat, search) % _SEED_RANGE for search in range(plan.size)]
        for part, compared in zip(plan.data, cells, strict=True):
            configs = [
                [_trial(plan, cell, repeat, search, seed, checks) for search, seed in enumerate(seeds)]
                for cell in compared
            ]
            for task in part.tasks:
                for cell, trials in zip(compared, configs, strict=True):
                    for search, config in enumerate(trials):
                        runs.append(
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
                                holdout=plan.holdout,
                                unlabelled_fraction=plan.unlabelled_fraction,
                            )
                        )
    return runs


def _check_owners(plan: Plan) -> None:
    """Refuse options of algorithms that no algorithm of the sweep has."""
    known = dict.fromkeys(option for part in plan.algorithms for option in algorithm_options(part.name))
    for layer in (plan.layer, *(part.layer for part in plan.data)):
        for key in (*layer.values, *layer.space):
            group, _, option = key.partition(".")
            if group == "algorithm_options" and option not in known:
                with at(layer.where or "settings or search.space"):
                    raise unknown("option of the algorithms of this sweep:", option, known)


def _cells(plan: Plan, data: DataPart, checks: Checks) -> Iterator[_Cell]:
    for algorithm in plan.algorithms:
        for sampler in algorithm.samplers:
            for name, point in plan.grid:
                cell = _cell(plan.layer, data, algorithm, sampler, name, point, checks)
                selection = cell.config["selection"]
                if plan.holdout == 0.0 and selection in _NEED_SOURCE:
                    raise InputError(f"holdout is 0, but selection {selection!r} needs held-out samples; raise holdout")
                yield cell


def _cell(
    sweep: Layer,
    data: DataPart,
    algorithm: AlgorithmPart,
    sampler: SamplerPart,
    point_name: dict[str, Any],
    point: Layer,
    checks: Checks,
) -> _Cell:
    owned = algorithm_options(algorithm.name)
    layers = (sweep, data.layer, algorithm.layer, sampler.layer, point)
    for key in point.values:
        group, _, option = key.partition(".")
        if group == "algorithm_options" and option not in owned:
            with at(f"grid and {algorithm.layer.where}"):
                raise unknown(f"option of algorithm {algorithm.name!r}:", option, owned)

    def applies(key: str) -> bool:
        group, _, option = key.partition(".")
        return group != "algorithm_options" or option in owned

    values: dict[str, Any] = {"network": _NETWORKS.get(data.dataset, _IMAGE_NETWORK)}
    for layer in layers:
        values.update({key: value for key, value in layer.values.items() if applies(key)})
    like = next((layer.like for layer in reversed(layers) if layer.like is not None), None)
    space: dict[str, Distribution] = {}
    if like is not None:
        adversary = values.get("algorithm_options.adversary")
        space = named_space(like, algorithm.name, None if adversary is None else {"adversary": adversary})
    own: dict[str, Distribution] = {}
    for layer in layers:  # what is said last counts, be it a value or a distribution
        for key in layer.values:
            space.pop(key, None)
            own.pop(key, None)
        found = {key: each for key, each in layer.space.items() if applies(key)}
        space.update(found)
        own.update(found)
    settings = _nest({"algorithm": algorithm.name, "sampler": sampler.name}, values)
    where = f"{data.layer.where}, {algorithm.layer.where} and {sampler.layer.where}"
    with at(where + (" and grid" if point_name else "")):
        config = RunConfig(**settings).to_dict()
        if data.dataset in _VECTORS and config["network"] in NETWORK_NAMES and config["network"] != "mlp":
            raise InputError(f"network {config['network']!r} is not for vectors, which {data.dataset} has; use 'mlp'")
        checks.sampler(config["sampler"], config["sampler_options"], config["batch_size"])
        for trial in (config, *(_nest(config, {key: value}) for key in own for value in own[key].extremes())):
            checks.algorithm(trial["algorithm"], trial["algorithm_options"])
            checks.network(trial["network"], trial["network_options"])
    defaults = {key: each.default for key, each in space.items() if each.default is not None}
    name = {"algorithm": algorithm.label, "sampler": sampler.label, **point_name}
    return _Cell(name, config, space, defaults)


def _trial(plan: Plan, cell: _Cell, repeat: int, search: int, seed: int, checks: Checks) -> dict[str, Any]:
    if search == 0 and plan.first == "defaults":
        drawn = cell.defaults
    else:
        drawn = draw(cell.space, seed=plan.seed, repeat=repeat, search=search)
    config = _nest(cell.config, drawn)
    config["seed"] = seed
    with at(f"{' with '.join(map(str, cell.name.values()))}, repeat {repeat}, search {search}"):
        checks.config(config)
    return config


def _nest(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``values``, whose options have a dot."""
    found = _copy(config)
    for key, value in values.items():
        group, dot, option = key.partition(".")
        if dot:
            found[group] = {**found.get(group, {}), option: value}
        else:
            found[key] = value
    return found


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.copy() if isinstance(value, dict | list) else value for key, value in config.items()}
