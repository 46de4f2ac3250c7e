"""Batches that are planned together: weighted ones from strata, and epochs cut into batches of equal weight."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vardass.errors import InputError
from vardass.kernels import Kernel, KernelLike, as_kernel, fitted_kernel
from vardass.samplers.base import Chunk, StreamOptions, derive_seed
from vardass.samplers.plan import NEGLIGIBLE, PLAN_RANK, SWAP_ROUNDS, couple_rows, cycle_table, plan_features
from vardass.samplers.stratified import GroupedSampler, StratifiedBatchSampler
from vardass.samplers.uniform import EpochSampler
from vardass.solvers import stratify_groups
from vardass.solvers.labels import SizeLimits, bisection_labels
from vardass.solvers.min_sum import min_sum
from vardass.solvers.stratification import is_collapsed, warn_of_collapse
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_generator, check_count, check_number, check_tensor
from vardass.view import LowRankView

__all__ = ["BalancedBatchSampler", "OrderedBatchSampler"]

_ROWS = 128  # batches that are planned together, at most
_LEADING = 32  # columns on which the parts of an epoch that are planned together are alike
_REFINED = 2048  # samples up to which the strata are refined by exchanges between them


class _Planned(GroupedSampler):
    """What both share: the kernel features (n, r) that a plan looks at, and tables of coupled rows."""

    kernel: KernelLike
    strata: Strata | None

    def __init__(self, n: int, batch_size: int, *, plan_rank: int, swap_rounds: int, **options: Any) -> None:
        super().__init__(n, batch_size, **options)
        self.plan_rank = check_count(plan_rank, "plan_rank")
        self.swap_rounds = check_count(swap_rounds, "swap_rounds", low=0)
        self._features: Tensor | None = None
        self._residual = 0.0  # error of a sample that is not worth a further sweep

    def _plan_view(self, features: Tensor, kernel: Kernel) -> LowRankView:
        generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
        return plan_features(features, kernel, self.plan_rank, generator=generator)

    def _plan_on(self, view: LowRankView, features: Tensor | None = None) -> None:
        """Plan on ``features``, by default those of ``view``, less the mean that rows of the strata have together.

        No swap changes that mean. It is the data set's, on which a view is centred, unless strata have shares.
        """
        self._residual = NEGLIGIBLE * float(view.residual.mean())
        self._features = view.features if features is None else features
        if self.strata is not None and self.strata.shares is not None:
            self._features = self._features - self.strata.row_weights.to(self._features) @ self._features

    def _coupled_rows(self, count: int, generator: torch.Generator, *, draws: int = 1) -> Tensor:
        """Plan (count, k * draws) of the strata, with coupled rows in random order."""
        assert self.strata is not None
        assert self._features is not None
        features = self._features
        table = cycle_table(self.strata, count, generator, draws=draws)
        units = table.to(features.device)
        if draws > 1:  # swapping one of several draws could bring a sample into its batch twice
            units = units.view(-1, draws)
            features, units = features[units].mean(1), torch.arange(len(units), device=units.device).view(count, -1)
        weights = self.strata.exact_weights
        residual = self._residual / draws  # residuals of different samples are independent
        units = couple_rows(
            units, features, weights, rounds=self.swap_rounds, residual=residual, generator=generator
        ).to("cpu")
        rows = table.view(-1, draws)[units].view(count, -1) if draws > 1 else units
        return rows[torch.randperm(count, generator=generator)]

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "features": self._features, "residual": self._residual}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        features = state["features"]
        self._features = None if features is None else check_tensor(features, "features", (self.n, None))
        self._residual = check_number(state["residual"], "residual", low=0.0)


class OrderedBatchSampler(_Planned, StratifiedBatchSampler):
    """Weighted draws from strata, coupled so that every batch's mean embedding is close to the full one.

    Each `refresh` makes strata, as `StratifiedBatchSampler` does, and then a table of ``plan_rows`` batches with one
    member of each stratum, in which every member of a stratum occurs equally often (to within one). Members are swapped
    inside their columns to bring each row's weighted mean embedding close to that of the data set. Rows come in random
    order; then another table is made. Each batch is unbiased for every function (see `vardass.samplers.plan`), and its
    variance on the plan's features is at most that of the strata. Draws from one stratum are swapped together.

    Parameters
    ----------
    n, batch_size, kernel, options
        As for `StratifiedBatchSampler`.
    plan_rows : int
        Batches planned together. More give the swaps more choice and cost more time.
    plan_rank : int
        Number of leading columns of the kernel features that the plan uses.
    swap_rounds : int
        Maximum number of swap sweeps over the columns of the plan; 0 leaves the draws uncoupled.

    Examples
    --------
    >>> sampler = OrderedBatchSampler(200, batch_size=8, seed=0)
    >>> sampler.refresh(torch.randn(200, 4, generator=torch.Generator().manual_seed(0)))
    >>> [len(batch) for batch in sampler] == [8] * 25
    True
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        kernel: KernelLike = "mmd",
        plan_rows: int = 100,
        plan_rank: int = PLAN_RANK,
        swap_rounds: int = SWAP_ROUNDS,
        **options: Any,
    ) -> None:
        if options.pop("replacement", False):
            raise InputError(
                "replacement=True is incompatible with ordered batches, whose plan uses each sample once; leave it out"
            )
        planned = {"plan_rank": plan_rank, "swap_rounds": swap_rounds}
        super().__init__(n, batch_size, kernel=kernel, replacement=False, **planned, **options)
        self.plan_rows = check_count(plan_rows, "plan_rows", low=2)

    def _fit(self, features: Tensor) -> None:
        view = self._plan_view(features, fitted_kernel(self.kernel, features))
        self._stratify(features, view)  # strata of many samples are found on the same features
        self._plan_on(view)

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        if self.strata is None or self._features is None:
            return super()._make_chunk(rounds, generator)
        count = -(-self.plan_rows // self.num_replicas) * self.num_replicas
        rows = self._coupled_rows(count, generator, draws=self.draws_per_stratum)
        return Chunk(rows, self._column_weights)


class BalancedBatchSampler(_Planned, EpochSampler):
    """Visit each sample once per epoch, in batches whose mean embedding is close to the full one.

    A refresh cuts the samples into batch_size strata of equal size. In each epoch a batch takes one sample of each
    stratum, and samples are swapped between batches inside their strata to bring each batch's mean embedding close to
    that of the data set. All weights are equal, so any loss can be used. Every epoch is planned from a new random
    start, so every sample is equally likely to be in any batch and the batch mean of every function is unbiased. At
    most 128 batches are planned at a time, from a random part of the epoch that has its mean. Uniform until the first
    `refresh`; a refresh in mid-epoch replans the rest of the epoch.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, drop_last, num_replicas, rank
        As for `UniformBatchSampler`.
    kernel : Kernel, name or callable
        The kernel of the loss.
    groups : array of shape (n,), optional
        Class labels, whose shares are balanced too. `refresh` may replace them.
    shares : array of shape (g,), optional
        Share of each group in each batch, as for `StratifiedBatchSampler`. Strata of equal size are then made within
        groups, and batches have weights. An epoch of n / batch_size batches visits the samples of a group equally
        often, to within one visit for each of its strata, and a refresh starts a new epoch.
    plan_rank, swap_rounds : int
        As for `OrderedBatchSampler`.

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
        planned = {"plan_rank": plan_rank, "swap_rounds": swap_rounds}
        super().__init__(n, batch_size, drop_last=drop_last, **planned, **options)
        as_kernel(kernel)  # an unknown one is not to be found out at the first refresh only
        self.kernel = kernel
        self._set_groups(groups, shares)
        self.strata: Strata | None = None  # with shares
        self.plan_labels: Tensor | None = None  # without: strata (n,) that the plan takes its columns from

    def _fit(self, features: Tensor) -> None:
        kernel = fitted_kernel(self.kernel, features)
        view = self._plan_view(features, kernel)
        if is_collapsed(view, kernel.diag(features)):
            warn_of_collapse(kernel, features, "batches are random")
        if self.shares is not None and self.groups is not None:
            seed = derive_seed(self.seed, self._refreshes)
            options: dict[str, Any] = {"kernel": kernel, "seed": seed, "equal": True}
            found = stratify_groups(features, self.batch_size, self.groups, shares=self.shares, **options)
            self.strata, self.plan_labels = found.to("cpu"), None
            self._plan_on(view)
            return
        planned = view.features
        if self.groups is not None and bool((self.groups != self.groups[0]).any()):
            planned = torch.cat([planned, self._group_features(planned)], dim=1)
        self.strata, self.plan_labels = None, _equal_strata(planned, view.residual, self.batch_size)
        self._plan_on(view, planned)

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
        return Chunk(self._coupled_rows(count, generator), self.strata.exact_weights)

    @property
    def _is_coupled(self) -> bool:  # type: ignore[override]
        return self._features is not None

    def _arrange(self, pool: Tensor, generator: torch.Generator) -> Tensor:
        if self._features is None or self.plan_labels is None:
            return super()._arrange(pool, generator)
        device = self._features.device
        # strata of one size: runs of samples in the order of the strata, whose neighbours are close to one another
        strata = pool[self.plan_labels[pool.to(device)].to("cpu").argsort(stable=True)].view(self.batch_size, -1)
        strata = strata.gather(1, torch.rand(strata.shape, generator=generator).argsort(1))
        entries = self._first_part(strata, generator).T
        # aim at the mean of what is planned, which every batch can reach, not at that of all samples
        features = self._features[entries.flatten().to(device)]
        features -= features.mean(0)
        table = torch.arange(len(features), device=device).view(entries.shape)
        weights = features.new_full((self.batch_size,), 1.0 / self.batch_size)
        table = couple_rows(
            table, features, weights, rounds=self.swap_rounds, residual=self._residual, generator=generator
        )
        return entries.reshape(-1)[table.to("cpu")[torch.randperm(len(table), generator=generator)]]

    def _first_part(self, strata: Tensor, generator: torch.Generator) -> Tensor:
        """What is planned together of each shuffled stratum (k, m), with the mean of the whole: (k, m')."""
        assert self._features is not None
        k, size = strata.shape
        if size <= _ROWS:
            return strata
        count = max(1, size // -(-size // _ROWS) // self.num_replicas) * self.num_replicas
        parts = size // count
        if parts == 1:
            return strata[:, :count]
        # the parts are rows of a plan of their own, of which the first is as good as any other
        table = strata[:, : parts * count].reshape(k * count, parts).T
        leading = self._features[:, :_LEADING].contiguous()
        weights = leading.new_full((k * count,), 1.0 / (k * count))
        table = couple_rows(table.to(leading.device), leading, weights, rounds=1, generator=generator)
        return table[int(torch.randint(parts, (1,), generator=generator))].to("cpu").view(k, count)

    def _extra_state(self) -> dict[str, Any]:
        strata = None if self.strata is None else self.strata.to_dict()
        return {**super()._extra_state(), "labels": self.plan_labels, "strata": strata}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        labels, last = state["labels"], self.batch_size - 1
        self.plan_labels = None if labels is None else check_tensor(labels, "labels", (self.n,), low=0, high=last)
        self.strata = None
        if state["strata"] is not None:
            self.strata = Strata.from_dict(state["strata"])
            self._check_fits(self.strata)


def _equal_strata(features: Tensor, residual: Tensor, k: int) -> Tensor:
    """Labels (n,) of k strata whose sizes differ by at most one."""
    labels = bisection_labels(features, k)
    if len(features) <= _REFINED:  # of more, swaps inside strata make up for it at less cost
        limits = SizeLimits.of(len(features), k, equal=True)
        labels = min_sum(LowRankView(features, residual), k, limits=limits, labels=labels, max_passes=2).labels
    return labels
