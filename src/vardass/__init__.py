"""Variance-reduced minibatches for training with a domain-discrepancy loss.

Strata for one domain, the samplers that draw from them, and the weighted losses that use them:

>>> import torch, vardass
>>> z = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
>>> strata = vardass.stratify(z, k=16, kernel="mmd")
>>> strata.variance < strata.uniform_variance
True

More kernels are in `vardass.kernels`, exact variances in `vardass.variance`, the paper's lemma and theorems in
`vardass.theory`, lower bounds in `vardass.bounds`, further refresh policies in `vardass.refresh`.
"""

from vardass.doctor import diagnose
from vardass.errors import InputError, VardassError
from vardass.kernels import CoralKernel, Kernel, RBFMixture
from vardass.losses import CORALLoss, MMDLoss, coral, mmd2
from vardass.refresh import DriftRefresh, FeatureBank, Refresher, RefreshEvery, extract_features
from vardass.sampler_noise import variance_report
from vardass.samplers import (
    BalancedBatchSampler,
    DPPBatchSampler,
    KMeansPlusPlusBatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
    align_classes,
    with_weights,
)
from vardass.solvers import stratify
from vardass.strata import Strata

__version__ = "0.2.0.dev0"  # the one home of the version: the build reads it here

__all__ = [
    "BalancedBatchSampler",
    "CORALLoss",
    "CoralKernel",
    "DPPBatchSampler",
    "DriftRefresh",
    "FeatureBank",
    "InputError",
    "KMeansPlusPlusBatchSampler",
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
