"""Strata for features in many files, or in one that does not fit in memory."""

from vardass.shards.stratification import ShardStrata, stratify_shards

__all__ = ["ShardStrata", "stratify_shards"]
