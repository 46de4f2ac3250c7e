"""Samplers by name, for the command line, YAML and `RunConfig`."""

from __future__ import annotations

import inspect
from typing import Any

from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.registry import Registry
from vardass.samplers.balanced import BalancedBatchSampler
from vardass.samplers.base import MinibatchSampler, declared_options
from vardass.samplers.groups import GroupedSampler
from vardass.samplers.ordered import OrderedBatchSampler
from vardass.samplers.paired import PairedBatchSampler
from vardass.samplers.stratified import StratifiedBatchSampler
from vardass.samplers.swap_ordered import SwapOrderedBatchSampler
from vardass.samplers.two_domains import TwoDomainSampler
from vardass.samplers.uniform import UniformBatchSampler
from vardass.solvers import stratify
from vardass.validate import choose, import_by_name, unknown

__all__ = ["SAMPLER_NAMES", "check_takes_shares", "make_sampler", "plans_both_domains"]

_KINDS: Registry[type[MinibatchSampler]] = Registry(
    {
        "uniform": UniformBatchSampler,
        "uniform-replacement": UniformBatchSampler,
        "stratified": StratifiedBatchSampler,
        "vardass": StratifiedBatchSampler,
        "ordered": OrderedBatchSampler,
        "balanced": BalancedBatchSampler,
        "swap-ordered": SwapOrderedBatchSampler,
        "paired": PairedBatchSampler,
        "kmeans++": "vardass.paper.diverse_samplers:KMeansPlusPlusBatchSampler",
        "dpp": "vardass.paper.diverse_samplers:DPPBatchSampler",
        "kmeans-inputs": StratifiedBatchSampler,
        "kmeans-features": StratifiedBatchSampler,
    }
)
_PRESETS: dict[str, dict[str, Any]] = {
    "uniform-replacement": {"replacement": True},
    "vardass": {"solver": "dynamic-kmeans"},
    # a loss's kernel is made for features, not for inputs
    "kmeans-inputs": {"solver": "kmeans", "kernel": "linear"},
    "kmeans-features": {"solver": "kmeans"},
}
_SET_BY_CALLER = ("seed", "endless", "batches", "num_replicas", "rank", "warm_start", "progress")
_SOLVER_OPTIONS = ("trials", "parallel", "patience", "max_iter", "max_passes", "tol")  # each solver checks its own

SAMPLER_NAMES = tuple(_KINDS)


def make_sampler(
    name: str, n: int, batch_size: int, *, kernel: Kernel | str = "mmd", seed: int = 0, **options: Any
) -> MinibatchSampler:
    """Make an endless sampler from its name.

    Parameters
    ----------
    name : str
        ``"package.module:Name"`` for a sampler of one's own, a subclass of ``MinibatchSampler``, or one of
        ``SAMPLER_NAMES``: uniform batches without and with replacement; strata by the default solver; the
        paper's (``"vardass"``, dynamic weighted k-means); strata with coupled batches; balanced epochs; the order of
        one of the paper's follow-ups and the quadruplets of another (``"swap-ordered"`` and ``"paired"``, which plan
        both domains together); the paper's rivals k-means++, k-DPP and k-means on inputs, whose features are to be the
        inputs and which is refreshed once, or on the network's features.
    n, batch_size : int
        Samples of the data set and of a batch.
    kernel : Kernel or name
        The kernel of the loss, for samplers that have such an option; k-means on inputs has its own.
    seed : int
        Of the stream.
    **options
        Of the sampler, and of ``stratify`` where it makes strata. They come before what the name sets.

    Raises
    ------
    InputError
        If the name or an option is unknown; the message has the nearest one.

    Examples
    --------
    >>> make_sampler("vardass", 100, 8, kernel="coral").solver
    'dynamic-kmeans'
    """
    kind, preset = _kind(name)
    known = _options(kind)
    for option in options:
        if option not in known:
            raise unknown(f"option of sampler {name!r}:", option, known)
    given: dict[str, Any] = {**preset, **options}
    if "kernel" in known:
        given.setdefault("kernel", kernel)
    sampler = kind(n, batch_size, seed=seed, endless=True, **given)
    sampler.shard(1, 0)  # every process of a run draws the whole batch, and takes its rows
    return sampler


def check_takes_shares(name: str, purpose: str) -> None:
    """Refuse a sampler that has no groups with shares, naming the ``purpose`` that they are wanted for."""
    if not issubclass(_kind(name)[0], GroupedSampler):
        able = [known for known, kind in _KINDS.items() if issubclass(kind, GroupedSampler)]
        raise InputError(f"{purpose} needs groups with shares, which sampler {name!r} has not; use {', '.join(able)}")


def plans_both_domains(name: str) -> bool:
    """Whether the sampler is one of two that have the same seed, know their ``role`` and plan both domains together."""
    return issubclass(_kind(name)[0], TwoDomainSampler)


def _kind(name: str) -> tuple[type[MinibatchSampler], dict[str, Any]]:
    if not isinstance(name, str) or ":" not in name:
        return _KINDS[choose(name, "sampler", SAMPLER_NAMES)], _PRESETS.get(name, {})
    own = import_by_name(name, "sampler")
    if not isinstance(own, type) or not issubclass(own, MinibatchSampler):
        raise InputError(f"sampler {name!r} is {own!r}, not a subclass of vardass.samplers.MinibatchSampler")
    return own, {}


def _options(kind: type[MinibatchSampler]) -> list[str]:
    found = list(declared_options(kind))
    if issubclass(kind, StratifiedBatchSampler):
        parameters = inspect.signature(stratify).parameters.values()
        found += [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        found += _SOLVER_OPTIONS
    return [name for name in dict.fromkeys(found) if name not in _SET_BY_CALLER]
