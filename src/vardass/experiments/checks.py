"""Try out names and options of algorithms, networks and samplers without data, each combination once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vardass.adapt.algorithms import make_algorithm
from vardass.adapt.batches import make_sampler
from vardass.adapt.config import RunConfig
from vardass.adapt.networks import make_network
from vardass.adapt.networks.make import _builder, _check_options
from vardass.errors import InputError
from vardass.validate import unknown

__all__ = ["Checks"]

_NETWORK_OPTIONS = [
    p.name for p in inspect.signature(make_network).parameters.values() if p.kind is p.KEYWORD_ONLY and p.name != "seed"
]

# options whose values are read at a refresh; the others depend on the number of samples
_TRIED = (
    *("kernel", "solver", "restarts", "init", "trials", "parallel", "patience", "max_iter", "max_passes", "tol"),
    *("kernel_rank", "plan_rank", "swap_rounds"),
)
_ROWS, _BATCH = 128, 8


class Checks:
    """Checks that remember what they have seen: runs of a sweep differ in few ways."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def config(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that no run can have; the sampler's batches are tried too."""
        shared = {name: value for name, value in settings.items() if name not in ("seed", "sampler", "sampler_options")}
        self._once(["config", shared], lambda: RunConfig(**shared))
        for name in ("batch_size", "target_batch_size"):
            if settings[name] is not None:
                grouped = settings["groups"] is not None and name == "batch_size"
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
        self._once(["algorithm", name, options], lambda: _try_algorithm(name, options))

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


def _try_algorithm(name: str, options: Mapping[str, Any]) -> None:
    make_algorithm(name, make_network("mlp", (4,), 2, hidden=(4,)), 2, **options)


def _try_network(spec: str, options: Mapping[str, Any]) -> None:
    build = _builder(spec, 2)
    if "seed" in options:
        raise InputError(
            f"seed={options['seed']!r} cannot be an option of the network; each run's is made by the sweep"
        )
    own = {name: value for name, value in options.items() if name not in _NETWORK_OPTIONS}
    try:
        _check_options(spec, build, own)
    except InputError:
        parameters = inspect.signature(build).parameters.values()
        known = [*(p.name for p in parameters if p.kind is p.KEYWORD_ONLY), *_NETWORK_OPTIONS]
        odd = next(name for name in own if name not in known)
        raise unknown(f"option of network {spec!r}:", odd, known) from None
    shared = {name: value for name, value in options.items() if name not in own}
    make_network("mlp", (4,), 2, **shared, **(own if spec == "mlp" else {"hidden": (4,)}))
