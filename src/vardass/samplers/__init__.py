"""Batch samplers: the paper's, uniform batches, and those that couple samples."""

from vardass.samplers.base import Chunk, MinibatchSampler, RowBatch
from vardass.samplers.class_alignment import ClassAlignment, align_classes, task_weights
from vardass.samplers.planned import BalancedBatchSampler, OrderedBatchSampler
from vardass.samplers.stratified import StratifiedBatchSampler
from vardass.samplers.uniform import UniformBatchSampler
from vardass.samplers.weighted_batches import IndexBatch, with_weights

__all__ = [
    "BalancedBatchSampler",
    "Chunk",
    "ClassAlignment",
    "IndexBatch",
    "MinibatchSampler",
    "OrderedBatchSampler",
    "RowBatch",
    "StratifiedBatchSampler",
    "UniformBatchSampler",
    "align_classes",
    "task_weights",
    "with_weights",
]
