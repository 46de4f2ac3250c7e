"""Samplers by name, for the command line, YAML and `RunConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.registry import Registry, check_options, declared_options
from vardass.samplers.base import MinibatchSampler
from vardass.samplers.planned import BalancedBatchSampler, OrderedBatchSampler
from vardass.samplers.stratified import GroupedSampler, StratifiedBatchSampler
from vardass.samplers.uniform import UniformBatchSampler

__all__ = ["SAMPLER_NAMES", "SamplerEntry", "check_takes_shares", "find_sampler", "make_sampler"]

_KINDS: Registry[type[MinibatchSampler]] = Registry(
    "sampler",
    {
        "uniform": UniformBatchSampler,
        "uniform-replacement": UniformBatchSampler,
        "stratified": StratifiedBatchSampler,
        "vardass": StratifiedBatchSampler,
        "ordered": OrderedBatchSampler,
        "balanced": BalancedBatchSampler,
        "paired": "vardass.paper.paired_sampler:PairedBatchSampler",
        "kmeans++": "vardass.paper.diverse_samplers:KMeansPlusPlusBatchSampler",
        "dpp": "vardass.paper.diverse_samplers:DPPBatchSampler",
        "kmeans-inputs": StratifiedBatchSampler,
        "kmeans-features": StratifiedBatchSampler,
    },
    base=MinibatchSampler,
)
_PRESETS: dict[str, dict[str, Any]] = {
    "uniform-replacement": {"replacement": True},
    "vardass": {"solver": "dynamic-kmeans"},
    # a loss's kernel is made for features, not for inputs
    "kmeans-inputs": {"solver": "kmeans", "kernel": "linear"},
    "kmeans-features": {"solver": "kmeans"},
}
_SET_BY_CALLER = ("seed", "endless", "batches", "num_replicas", "rank", "warm_start", "progress")

SAMPLER_NAMES = tuple(_KINDS)


@dataclass(frozen=True)
class SamplerEntry:
    """What a name stands for."""

    name: str  # one of SAMPLER_NAMES, or "package.module:Name"
    preset: Mapping[str, Any]  # options that the name sets
    of_inputs: bool  # whether its features are the inputs, so that it is refreshed once, before training

    @property
    def kind(self) -> type[MinibatchSampler]:
        """The class, imported if it is the user's own."""
        return _KINDS.find(self.name)


def find_sampler(name: str) -> SamplerEntry:
    """What a name stands for; nothing of the user's own is imported yet."""
    return SamplerEntry(name, _PRESETS.get(name, {}), of_inputs=name == "kmeans-inputs")


def make_sampler(
    name: str, n: int, batch_size: int, *, kernel: Kernel | str = "mmd", seed: int = 0, **options: Any
) -> MinibatchSampler:
    """Make an endless sampler from its name.

    ``name`` is ``"package.module:Name"`` for a subclass of ``MinibatchSampler``, or one of ``SAMPLER_NAMES``. The
    ``kernel`` of the loss is for samplers that have such an option; k-means on inputs has its own. ``options`` are
    those of the sampler, and of ``stratify`` where it makes strata; they override what the name sets.
    """
    kind, preset = _KINDS.find(name), find_sampler(name).preset
    given: dict[str, Any] = {**preset, **options}
    passed_on = kind.passed_on(given.get("solver", "min-sum")) if issubclass(kind, StratifiedBatchSampler) else ()
    check_options(f"sampler {name!r}", options, kind, besides=passed_on, without=_SET_BY_CALLER)
    if "kernel" in declared_options(kind):
        given.setdefault("kernel", kernel)
    sampler = kind(n, batch_size, seed=seed, endless=True, **given)
    sampler.shard(1, 0)  # every process of a run draws the whole batch, and takes its rows
    return sampler


def check_takes_shares(name: str, purpose: str) -> None:
    """Refuse a sampler that has no groups with shares; the message names the ``purpose`` that needs them."""
    if not issubclass(_KINDS.find(name), GroupedSampler):
        able = [known for known, kind in _KINDS.items() if issubclass(kind, GroupedSampler)]
        raise InputError(
            f"{purpose} needs groups, which sampler {name!r} does not support; use {', '.join(able)}", field="sampler"
        )
