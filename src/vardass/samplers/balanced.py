"""An epoch cut into batches each of which is a small copy of the whole; no weights needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vardass.kernels import Kernel, as_kernel
from vardass.lowrank import low_rank_features
from vardass.samplers.base import derive_seed
from vardass.samplers.ordered import PLAN_RANK
from vardass.samplers.plan import couple_rows
from vardass.samplers.uniform import EpochSampler
from vardass.stratify.bisection import bisection_labels
from vardass.stratify.min_sum import min_sum
from vardass.stratify.problem import LowRankProblem
from vardass.stratify.sizes import SizeLimits
from vardass.validate import ArrayLike, as_generator, as_labels, check_count

__all__ = ["BalancedBatchSampler"]


class BalancedBatchSampler(EpochSampler):
    """Visit each sample once per epoch, in batches whose mean embedding is close to the full one.

    The samples of an epoch are cut into batch_size strata of equal size, a batch takes one sample of each,
    and samples are swapped between batches inside their strata until each batch's mean embedding is as
    close to that of the data set as it gets. All weights are equal, so any loss can be used. Batches come in
    random order and every epoch is planned anew from a random start, so every sample is equally likely to be
    in any batch and the batch mean of every function is unbiased. Uniform until the first `refresh`; one in
    mid-epoch plans what is left of the epoch anew.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, drop_last, num_replicas, rank
        As for `UniformBatchSampler`: a uniformly random remainder of each epoch is left out, or comes as a last,
        smaller batch.
    kernel : Kernel, name or callable
        The kernel of the loss.
    groups : array of shape (n,), optional
        Class labels, whose shares are balanced too.
    plan_rank : int
        Columns of the kernel features that the plan looks at.
    swap_rounds : int
        Most rounds of swaps.

    Examples
    --------
    >>> z = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    >>> sampler = BalancedBatchSampler(96, batch_size=8, seed=0)
    >>> sampler.refresh(z)
    >>> sorted(index for batch in sampler for index in batch) == list(range(96))
    True
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        kernel: Kernel | str = "mmd",
        groups: ArrayLike | None = None,
        plan_rank: int = PLAN_RANK,
        swap_rounds: int = 48,
        **options: Any,
    ) -> None:
        super().__init__(n, batch_size, **options)
        self.kernel = kernel
        self.groups = None if groups is None else as_labels(groups, n, "groups")
        self.plan_rank = check_count(plan_rank, "plan_rank")
        self.swap_rounds = check_count(swap_rounds, "swap_rounds", low=0)
        self._features: Tensor | None = None
        self._residual: Tensor | None = None

    def _fit(self, features: Tensor) -> None:
        kernel = as_kernel(self.kernel).fit(features)
        generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
        low_rank = low_rank_features(features, kernel, self.plan_rank, generator=generator)
        self._features, self._residual = low_rank.features, low_rank.residual
        if self.groups is not None:
            self._features = torch.cat([self._features, self._group_features(low_rank.features)], dim=1)

    def _group_features(self, features: Tensor) -> Tensor:
        """Centred one-hot groups, as large as the features: class shares then count as much as they do."""
        assert self.groups is not None
        group = torch.unique(self.groups.to(features.device), return_inverse=True)[1]
        indicator = one_hot(group).to(features)
        indicator -= indicator.mean(0)
        size = indicator.square().sum().clamp_min(torch.finfo(features.dtype).tiny)
        return indicator * (features.square().sum() / size).sqrt()

    def _arrange(self, pool: Tensor, generator: torch.Generator) -> Tensor:
        if self._features is None or self._residual is None:
            return super()._arrange(pool, generator)
        device = self._features.device
        pool = pool.to(device)
        features = self._features[pool]
        table = self._equal_strata(features, self._residual[pool], generator)
        weights = features.new_full((self.batch_size,), 1.0 / self.batch_size)
        # aim at the mean of what is to be visited, which every batch can reach, not at that of all samples
        table = couple_rows(table, features - features.mean(0), weights, rounds=self.swap_rounds, generator=generator)
        order = torch.randperm(len(table), generator=generator).to(device)
        return pool[table[order]].to("cpu")

    def _equal_strata(self, features: Tensor, residual: Tensor, generator: torch.Generator) -> Tensor:
        """Rows (B, batch_size) with one member of each of batch_size equal strata, members shuffled."""
        k, count = self.batch_size, len(features)
        labels = bisection_labels(features, k)
        if count <= _REFINED:  # exchanges inside strata do the rest where there are many samples
            problem = LowRankProblem(features, residual)
            limits = SizeLimits.of(count, k, equal=True)
            labels = min_sum(problem, k, limits=limits, labels=labels, max_passes=2).labels
        order = torch.randperm(count, generator=generator).to(features.device)
        order = order[labels[order].argsort(stable=True)]
        return order.view(k, -1).T.contiguous()

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "features": self._features, "residual": self._residual}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        self._features, self._residual = state["features"], state["residual"]


_REFINED = 4096  # samples up to which the start is refined by exchanges between strata
