"""Features in many files, or in one that does not fit in memory: strata, batches, comparison and coresets."""

from vardass.shards.batches import ShardBatches, ShardBatchSampler
from vardass.shards.files import ShardDataset
from vardass.shards.measures import compare_shards, coreset_shards
from vardass.shards.stratification import ShardStrata, stratify_shards

__all__ = [
    "ShardBatchSampler",
    "ShardBatches",
    "ShardDataset",
    "ShardStrata",
    "compare_shards",
    "coreset_shards",
    "stratify_shards",
]
