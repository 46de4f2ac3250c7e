"""Samplers by name, with the kernel of the algorithm that they serve."""

from __future__ import annotations

import inspect
from typing import Any

from vardass.adapt.algorithms import CORAL, MMD, Algorithm
from vardass.adapt.names import choose, unknown
from vardass.kernels import Kernel
from vardass.samplers import (
    BalancedBatchSampler,
    DPPBatchSampler,
    KMeansPlusPlusBatchSampler,
    MinibatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
)
from vardass.stratify import stratify

__all__ = ["SAMPLER_NAMES", "algorithm_kernel", "make_sampler"]

_NAMED: dict[str, tuple[type[MinibatchSampler], dict[str, Any]]] = {
    "uniform": (UniformBatchSampler, {}),
    "uniform-replacement": (UniformBatchSampler, {"replacement": True}),
    "stratified": (StratifiedBatchSampler, {}),
    "vardass": (StratifiedBatchSampler, {"solver": "dynamic-kmeans"}),
    "ordered": (OrderedBatchSampler, {}),
    "balanced": (BalancedBatchSampler, {}),
    "kmeans++": (KMeansPlusPlusBatchSampler, {}),
    "dpp": (DPPBatchSampler, {}),
    # a loss's kernel is made for features, not for inputs
    "kmeans-inputs": (StratifiedBatchSampler, {"solver": "kmeans", "kernel": "linear"}),
    "kmeans-features": (StratifiedBatchSampler, {"solver": "kmeans"}),
}
_SET_BY_CALLER = ("seed", "endless", "batches", "num_replicas", "warm_start", "progress")
_SOLVER_OPTIONS = ("trials", "parallel", "patience", "max_iter", "max_passes", "tol")  # each solver checks its own

SAMPLER_NAMES = tuple(_NAMED)


def make_sampler(
    name: str, n: int, batch_size: int, *, kernel: Kernel | str = "mmd", seed: int = 0, **options: Any
) -> MinibatchSampler:
    """Make an endless sampler from its name.

    Parameters
    ----------
    name : str
        One of ``SAMPLER_NAMES``: uniform batches without and with replacement; strata by the default solver; the
        paper's (``"vardass"``, dynamic weighted k-means); strata with coupled batches; balanced epochs; the
        paper's rivals k-means++, k-DPP and k-means on inputs, whose features are to be the inputs and which is
        refreshed once, or on the network's features.
    n, batch_size : int
        Samples of the data set and of a batch.
    kernel : Kernel or name
        The kernel of the loss; uniform batches and k-means on inputs have no use for it.
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
    kind, preset = _NAMED[choose(name, "sampler", SAMPLER_NAMES)]
    known = _options(kind)
    for option in options:
        if option not in known:
            raise unknown(f"option of sampler {name!r}:", option, known)
    given: dict[str, Any] = {**preset, **options}
    if kind is not UniformBatchSampler:
        given.setdefault("kernel", kernel)
    return kind(n, batch_size, seed=seed, endless=True, **given)


def algorithm_kernel(algorithm: Algorithm) -> Kernel | str:
    """Kernel whose mean embeddings the algorithm compares; the paper's mixture for those that have none."""
    if isinstance(algorithm, MMD):
        return algorithm.loss.kernel
    return "coral" if isinstance(algorithm, CORAL) else "mmd"


def _options(kind: type[MinibatchSampler]) -> list[str]:
    owners: list[Any] = [parent for parent in kind.__mro__ if "__init__" in vars(parent)]
    if issubclass(kind, StratifiedBatchSampler):
        owners.append(stratify)
    found: dict[str, None] = {}
    for owner in owners:
        for parameter in inspect.signature(owner).parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in _SET_BY_CALLER:
                found[parameter.name] = None
    return [*found, *(_SOLVER_OPTIONS if stratify in owners else ())]
