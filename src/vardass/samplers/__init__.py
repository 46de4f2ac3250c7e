"""Batch samplers: the paper's, its baselines, and two that couple batches."""

from vardass.samplers.background import BackgroundSampler
from vardass.samplers.balanced import BalancedBatchSampler
from vardass.samplers.base import MinibatchSampler
from vardass.samplers.batches import IndexBatch, with_weights
from vardass.samplers.dpp import DPPBatchSampler
from vardass.samplers.kmeanspp import KMeansPlusPlusBatchSampler
from vardass.samplers.ordered import OrderedBatchSampler
from vardass.samplers.stratified import StratifiedBatchSampler
from vardass.samplers.uniform import UniformBatchSampler

__all__ = [
    "BackgroundSampler",
    "BalancedBatchSampler",
    "DPPBatchSampler",
    "IndexBatch",
    "KMeansPlusPlusBatchSampler",
    "MinibatchSampler",
    "OrderedBatchSampler",
    "StratifiedBatchSampler",
    "UniformBatchSampler",
    "with_weights",
]
