"""Strata for features in many files, or in one that does not fit in memory."""

from vardass.shards.dataset import ShardDataset
from vardass.shards.stratification import ShardStrata, stratify_shards

__all__ = ["ShardDataset", "ShardStrata", "stratify_shards"]
