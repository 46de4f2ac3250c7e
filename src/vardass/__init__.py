"""Variance-reduced minibatches for training with a domain-discrepancy loss.

Strata for one domain, the samplers that draw from them, and the weighted losses that use them:

>>> import torch, vardass
>>> z = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
>>> strata = vardass.stratify(z, k=16, kernel="mmd")
>>> strata.variance < strata.uniform_variance
True

More kernels are in `vardass.kernels`, exact variances in `vardass.variance`, the paper's lemma and theorems in
`vardass.paper.theory`, lower bounds in `vardass.bounds`, further refresh policies in `vardass.refresh`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vardass.errors import InputError, VardassError

if TYPE_CHECKING:
    from vardass.analysis.doctor import diagnose
    from vardass.analysis.sampler_noise import variance_report
    from vardass.kernels import CoralKernel, Kernel, RBFMixture
    from vardass.losses.coral import CORALLoss, coral
    from vardass.losses.mmd import MMDLoss, mmd2
    from vardass.refresh import FeatureBank, Refresher, RefreshEvery, extract_features
    from vardass.samplers import (
        BalancedBatchSampler,
        OrderedBatchSampler,
        StratifiedBatchSampler,
        UniformBatchSampler,
        align_classes,
        with_weights,
    )
    from vardass.solvers import stratify
    from vardass.strata import Strata

__version__ = "0.2.0"  # the one home of the version: the build reads it here

__all__ = [
    "BalancedBatchSampler",
    "CORALLoss",
    "CoralKernel",
    "FeatureBank",
    "InputError",
    "Kernel",
    "MMDLoss",
    "OrderedBatchSampler",
    "RBFMixture",
    "RefreshEvery",
    "Refresher",
    "Strata",
    "StratifiedBatchSampler",
    "UniformBatchSampler",
    "VardassError",
    "align_classes",
    "coral",
    "diagnose",
    "extract_features",
    "mmd2",
    "stratify",
    "variance_report",
    "with_weights",
]

# imported when they are first asked for: torch takes seconds, in which the command could not be interrupted cleanly
_HOMES = {
    "analysis.doctor": ["diagnose"],
    "kernels": ["CoralKernel", "Kernel", "RBFMixture"],
    "losses": ["CORALLoss", "MMDLoss", "coral", "mmd2"],
    "refresh": ["FeatureBank", "RefreshEvery", "Refresher", "extract_features"],
    "analysis.sampler_noise": ["variance_report"],
    "samplers": [
        "BalancedBatchSampler",
        "OrderedBatchSampler",
        "StratifiedBatchSampler",
        "UniformBatchSampler",
        "align_classes",
        "with_weights",
    ],
    "solvers": ["stratify"],
    "strata": ["Strata"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
