"""From what a sweep's file says to its runs; what no run could do is refused here, before any has begun."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from vardass.adapt.algorithms import algorithm_options, make_algorithm
from vardass.adapt.config import RunConfig
from vardass.adapt.networks import NETWORK_NAMES, make_network
from vardass.adapt.networks.registry import _builder, _check_options
from vardass.adapt.selection import _NEED_SOURCE
from vardass.data.registry import find_dataset
from vardass.data.splits import named_seed
from vardass.errors import InputError
from vardass.lab.record import RunSpec
from vardass.lab.search import Distribution, draw, named_space
from vardass.lab.spec_models import AlgorithmPart, DataPart, SamplerPart, Specification, full_name
from vardass.lab.yaml_file import at
from vardass.samplers.registry import make_sampler
from vardass.validate import unknown

__all__ = ["Tries", "expand"]

_IMAGE_NETWORK = "conv"  # where the data set names none
_VECTORS = ("watch", "embeddings")
_SEED_RANGE = 2**31


def expand(spec: Specification) -> list[RunSpec]:
    """Runs of a sweep: repeats outermost, then data and tasks, algorithms, samplers, grid, and the search.

    Each configuration is made once, so that one which cannot be run is refused before any is.
    """
    tries = Tries()
    cells = [list(_cells(spec, part, tries)) for part in spec.data]
    runs = []
    for repeat in range(spec.repeats):
        split_seed = named_seed("split", spec.seed, repeat) % _SEED_RANGE
        seeds = [named_seed("run", spec.seed, repeat, search) % _SEED_RANGE for search in range(spec.search.size)]
        for part, compared in zip(spec.data, cells, strict=True):
            configs = [
                [_trial(spec, cell, repeat, search, seed, tries) for search, seed in enumerate(seeds)]
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
                                holdout=spec.holdout,
                                unlabelled_fraction=spec.unlabelled_fraction,
                            )
                        )
    return runs


# --- what is compared ---


@dataclass(frozen=True)
class _Cell:
    """One entry of a table for one data set: fixed settings and what is searched."""

    name: dict[str, Any]
    config: dict[str, Any]
    space: dict[str, Distribution]


def _cells(spec: Specification, data: DataPart, tries: Tries) -> Iterator[_Cell]:
    points = [dict(zip(spec.grid, values)) for values in product(*spec.grid.values())]
    for algorithm in spec.algorithms:
        for sampler in algorithm.samplers:
            for point in points:
                where = f"{data.place}, {algorithm.place} and {sampler.place}" + (" and grid" if point else "")
                with at(where):
                    cell = _cell(spec, data, algorithm, sampler, point, tries)
                selection = cell.config["selection"]
                if spec.holdout == 0.0 and selection in _NEED_SOURCE:
                    raise InputError(f"holdout is 0, but selection {selection!r} needs held-out samples; raise holdout")
                yield cell


def _cell(
    spec: Specification,
    data: DataPart,
    algorithm: AlgorithmPart,
    sampler: SamplerPart,
    point: dict[str, Any],
    tries: Tries,
) -> _Cell:
    owned = algorithm_options(algorithm.name)

    def of_this_algorithm(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in settings.items()
            if not name.startswith("algorithm_options.") or name.partition(".")[2] in owned
        }

    compared = {full_name(name): value for name, value in point.items()}
    for name in set(compared) - set(of_this_algorithm(compared)):
        raise unknown(f"option of algorithm {algorithm.name!r}:", name.partition(".")[2], owned)
    # what is said last counts, be it a value or a distribution; a named space gives way to all of them
    values: dict[str, Any] = {"network": _IMAGE_NETWORK, **find_dataset(data.dataset).settings}
    searched: dict[str, Distribution] = {}
    like, fixed = None, set()
    for part in (spec, data, algorithm, sampler):
        said = of_this_algorithm(part.values)
        values.update(said)
        fixed |= set(said)
        searched = {name: each for name, each in searched.items() if name not in said}
        searched.update(of_this_algorithm(part.searched.distributions))
        like = part.searched.like or like
    last = {**of_this_algorithm(spec.overrides), **compared}
    values.update(last)
    searched = {name: each for name, each in searched.items() if name not in last}
    space: dict[str, Distribution] = {}
    if like is not None:
        adversary = values.get("algorithm_options.adversary")
        named = named_space(like, algorithm.name, None if adversary is None else {"adversary": adversary})
        space = {name: each for name, each in named.items() if name not in fixed and name not in last}
    config = RunConfig(**_nest({"algorithm": algorithm.name, "sampler": sampler.name}, values)).to_dict()
    if data.dataset in _VECTORS and config["network"] in NETWORK_NAMES and config["network"] != "mlp":
        raise InputError(f"network {config['network']!r} is not for vectors, which {data.dataset} has; use 'mlp'")
    tries.sampler(config["sampler"], config["sampler_options"], config["batch_size"])
    for trial in (config, *(_nest(config, {name: v}) for name, each in searched.items() for v in each.extremes())):
        tries.algorithm(trial["algorithm"], trial["algorithm_options"])
        tries.network(trial["network"], trial["network_options"])
    return _Cell({"algorithm": algorithm.label, "sampler": sampler.label, **point}, config, {**space, **searched})


def _trial(spec: Specification, cell: _Cell, repeat: int, search: int, seed: int, tries: Tries) -> dict[str, Any]:
    if search == 0 and spec.search.first == "defaults":
        drawn = {name: each.default for name, each in cell.space.items() if each.default is not None}
    else:
        drawn = draw(cell.space, seed=spec.seed, repeat=repeat, search=search)
    config = _nest(cell.config, drawn)
    config["seed"] = seed
    with at(f"{' with '.join(map(str, cell.name.values()))}, repeat {repeat}, search {search}"):
        tries.config(config)
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

_NETWORK_OPTIONS = [
    p.name for p in inspect.signature(make_network).parameters.values() if p.kind is p.KEYWORD_ONLY and p.name != "seed"
]
# options whose values are read at a refresh; the others depend on the number of samples
_TRIED = (
    *("kernel", "solver", "restarts", "init", "trials", "parallel", "patience", "max_iter", "max_passes", "tol"),
    *("kernel_rank", "plan_rank", "swap_rounds"),
)
_ROWS, _BATCH = 128, 8


class Tries:
    """Make algorithms, networks and samplers as runs would, each combination once: runs differ in few ways."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def config(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that no run can have; the sampler's batches are tried too."""
        shared = {name: value for name, value in settings.items() if name not in ("seed", "sampler", "sampler_options")}
        self._once(["config", shared], lambda: RunConfig(**shared))
        for name in ("batch_size", "target_batch_size"):
            if settings[name] is not None:
                grouped = settings["class_shares"] == "source" and name == "batch_size"
                self.sampler(settings["sampler"], settings["sampler_options"], settings[name], grouped=grouped)

    def sampler(self, name: str, options: Mapping[str, Any], batch_size: int, *, grouped: bool = False) -> None:
        """Refuse options that the sampler does not have, and batch sizes that they do not fit."""
        n = 64 * batch_size

        def attempt() -> None:
            groups = {"groups": torch.zeros(n, dtype=torch.int64)} if grouped else {}
            make_sampler(name, n, batch_size, **{**options, **groups})

        self._once(["sampler", name, options, batch_size, grouped], attempt)
        tried = {option: value for option, value in options.items() if option in _TRIED}
        if tried:
            self._once(["values", name, tried], lambda: _try_sampler(name, tried))

    def algorithm(self, name: str, options: Mapping[str, Any]) -> None:
        """Refuse options that the algorithm does not have, or values that it cannot use."""

        def attempt() -> None:
            make_algorithm(name, make_network("mlp", (4,), 2, hidden=(4,)), 2, **options)

        self._once(["algorithm", name, options], attempt)

    def network(self, spec: str, options: Mapping[str, Any]) -> None:
        """Refuse options that the network does not have, or values that no network can use."""
        self._once(["network", spec, options], lambda: _try_network(spec, options))

    def _once(self, content: list[Any], attempt: Callable[[], object]) -> None:
        key = json.dumps(content, sort_keys=True)
        if key not in self._seen:
            try:
                attempt()
            except (TypeError, ValueError) as error:  # an InputError is a ValueError
                raise InputError(str(error)) from None
            self._seen.add(key)


def _try_sampler(name: str, options: Mapping[str, Any]) -> None:
    features = torch.randn(_ROWS, 16, generator=torch.Generator().manual_seed(0))
    sampler = make_sampler(name, _ROWS, _BATCH, **options)
    if sampler.needs_features:
        sampler.refresh(features)
    next(iter(sampler))


def _try_network(spec: str, options: Mapping[str, Any]) -> None:
    if "seed" in options:
        raise InputError(
            f"seed={options['seed']!r} cannot be an option of the network; each run's is made by the sweep"
        )
    own = {name: value for name, value in options.items() if name not in _NETWORK_OPTIONS}
    _check_options(spec, _builder(spec, 2), own)
    shared = {name: value for name, value in options.items() if name not in own}
    # others need their data, or a download: what all networks share is tried on a small one
    make_network("mlp", (4,), 2, **shared, **(own if spec == "mlp" else {"hidden": (4,)}))
