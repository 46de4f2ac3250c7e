"""An epoch cut into batches each of which is a small copy of the whole; no weights needed."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vardass.kernels import KernelLike, as_kernel, fitted_kernel
from vardass.samplers.base import Chunk, StreamOptions, derive_seed, kernel_name
from vardass.samplers.groups import GroupedSampler
from vardass.samplers.ordered import centred_on, coupled_rows
from vardass.samplers.plan import PLAN_RANK, SWAP_ROUNDS, couple_rows, plan_features
from vardass.samplers.uniform import EpochSampler
from vardass.solvers import stratify_groups
from vardass.solvers.min_sum import min_sum
from vardass.solvers.problem import LowRankProblem
from vardass.solvers.sizes import SizeLimits, repair_sizes
from vardass.solvers.starts import bisection_labels
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_generator, check_count

__all__ = ["BalancedBatchSampler"]


class BalancedBatchSampler(GroupedSampler, EpochSampler):
    """Visit each sample once per epoch, in batches whose mean embedding is close to the full one.

    A refresh cuts the samples into batch_size strata of equal size. In each epoch a batch takes one sample of
    each stratum, and samples are swapped between batches inside their strata until each batch's mean embedding
    is as close to that of the data set as it gets. All weights are equal, so any loss can be used. Batches come
    in random order and every epoch is planned anew from a random start, so every sample is equally likely to be
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
        Class labels, whose shares are balanced too. `refresh` may replace them.
    shares : array of shape (g,), optional
        Shares that the groups 0 to g - 1 are to have in each batch instead of those of their samples, as for
        `StratifiedBatchSampler`. Strata of equal size are then made within groups, and batches have weights, equal
        within a group up to the rounding of sizes. An epoch of n / batch_size batches visits the samples of a group
        equally often, to within one visit for each of its strata, and a refresh begins another one.
    plan_rank : int
        Columns of the kernel features that the plan looks at.
    swap_rounds : int
        Most sweeps of swaps over the columns of the plan; 0 leaves the draws uncoupled.

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
        kernel: KernelLike = "mmd",
        groups: ArrayLike | None = None,
        shares: ArrayLike | None = None,
        plan_rank: int = PLAN_RANK,
        swap_rounds: int = SWAP_ROUNDS,
        drop_last: bool = True,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(n, batch_size, drop_last=drop_last, **options)
        as_kernel(kernel)  # an unknown one is not to be found out at the first refresh only
        self.kernel = kernel
        self._set_groups(groups, shares)
        self.plan_rank = check_count(plan_rank, "plan_rank")
        self.swap_rounds = check_count(swap_rounds, "swap_rounds", low=0)
        self._features: Tensor | None = None
        self._labels: Tensor | None = None
        self._missed = 0.0  # what the features miss of a sample, on average
        self.strata: Strata | None = None  # with shares

    @property
    def plan_labels(self) -> Tensor | None:
        """Strata (n,) that the plan takes its columns from."""
        return self._labels

    def _fit(self, features: Tensor) -> None:
        kernel = fitted_kernel(self.kernel, features)
        generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
        low_rank = plan_features(features, kernel, self.plan_rank, generator=generator)
        planned, self._missed = low_rank.features, float(low_rank.residual.mean())
        if self.shares is not None and self.groups is not None:
            options: dict[str, Any] = {"kernel": kernel, "seed": derive_seed(self.seed, self._refreshes), "equal": True}
            found = stratify_groups(features, self.batch_size, self.groups, shares=self.shares, **options)
            self.strata, self._labels = found.to("cpu"), None
            self._features = centred_on(self.strata, planned)
            return
        self.strata = None
        if self.groups is not None and bool((self.groups != self.groups[0]).any()):
            planned = torch.cat([planned, self._group_features(planned)], dim=1)
        self._labels = _equal_strata(planned, low_rank.residual, self.batch_size)
        self._features = planned

    def _group_features(self, features: Tensor) -> Tensor:
        """Centred one-hot groups, as large as the features: class shares then count as much as they do."""
        assert self.groups is not None
        group = torch.unique(self.groups.to(features.device), return_inverse=True)[1]
        indicator = one_hot(group).to(features)
        indicator -= indicator.mean(0)
        size = indicator.square().sum().clamp_min(torch.finfo(features.dtype).tiny)
        return indicator * (features.square().sum() / size).sqrt()

    def _plan(self, left: Tensor | None, generator: torch.Generator) -> Chunk:
        if self.strata is None or self._features is None:
            return super()._plan(left, generator)
        count = max(1, self.n // self.batch_size // self.num_replicas) * self.num_replicas
        rows = coupled_rows(
            self.strata, count, self._features, rounds=self.swap_rounds, missed=self._missed, generator=generator
        )
        return Chunk(rows, self.strata.exact_weights)

    @property
    def _is_coupled(self) -> bool:  # type: ignore[override]
        return self._features is not None

    def _arrange(self, pool: Tensor, generator: torch.Generator) -> Tensor:
        if self._features is None or self._labels is None:
            return super()._arrange(pool, generator)
        device = self._features.device
        pool = pool.to(device)
        # aim at the mean of what is to be visited, which every batch can reach, not at that of all samples
        features = self._features[pool]
        features -= features.mean(0)
        labels = _cut_equally(self._labels[pool], features, self.batch_size)
        order = torch.randperm(len(pool), generator=generator).to(device)
        order = order[labels[order].argsort(stable=True)]
        table = order.view(self.batch_size, -1).T.contiguous()
        weights = features.new_full((self.batch_size,), 1.0 / self.batch_size)
        table = couple_rows(table, features, weights, rounds=self.swap_rounds, missed=self._missed, generator=generator)
        order = torch.randperm(len(table), generator=generator).to(device)
        return pool[table[order]].to("cpu")

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "kernel": kernel_name(self.kernel)}

    def _extra_state(self) -> dict[str, Any]:
        strata = None if self.strata is None else self.strata.to_dict()
        mine = {"features": self._features, "labels": self._labels, "missed": self._missed, "strata": strata}
        return {**super()._extra_state(), **mine}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        self._features, self._labels = state["features"], state["labels"]
        self._missed = state.get("missed", 0.0)
        self.strata = None if state.get("strata") is None else Strata.from_dict(state["strata"])


_REFINED = 4096  # samples up to which the strata are refined by exchanges between them


def _equal_strata(features: Tensor, residual: Tensor, k: int) -> Tensor:
    """Labels (n,) of k strata whose sizes differ by at most one."""
    labels = bisection_labels(features, k)
    if len(features) <= _REFINED:  # exchanges inside strata do the rest where there are many samples
        limits = SizeLimits.of(len(features), k, equal=True)
        labels = min_sum(LowRankProblem(features, residual), k, limits=limits, labels=labels, max_passes=2).labels
    return labels


def _cut_equally(labels: Tensor, features: Tensor, k: int) -> Tensor:
    """Labels of the samples of an epoch, a multiple of k, in strata of one size.

    The epoch lacks a few samples, so the strata differ a little in size: the cheapest members move. Where
    little is left of an epoch that would be most of them, and a new cut is as good.
    """
    size = len(labels) // k
    missing = (size - torch.bincount(labels, minlength=k)).clamp_min(0).sum()
    if int(missing) > 2 * k:
        return bisection_labels(features, k)
    distances = LowRankProblem(features, features.new_zeros(len(features))).distances(labels, k)
    return repair_sizes(labels, distances, SizeLimits(size, size))
