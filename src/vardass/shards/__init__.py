"""Strata for features in many files, or in one that does not fit in memory, and batches drawn from them."""

from vardass.shards.batches import ShardBatches, ShardBatchSampler
from vardass.shards.files import ShardDataset
from vardass.shards.stratification import ShardStrata, stratify_shards

__all__ = ["ShardBatchSampler", "ShardBatches", "ShardDataset", "ShardStrata", "stratify_shards"]
