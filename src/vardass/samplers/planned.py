"""Batches that are planned together: weighted ones from strata, and epochs cut into batches of equal weight."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel, KernelLike, as_kernel, fitted_kernel
from vardass.samplers.base import Chunk, StreamOptions, derive_seed
from vardass.samplers.plan import (
    NEGLIGIBLE,
    PLAN_RANK,
    SWAP_ROUNDS,
    couple_rows,
    cycle_table,
    match_rows,
    plan_features,
    share_rests,
)
from vardass.samplers.stratified import GroupedSampler, StratifiedBatchSampler
from vardass.samplers.uniform import EpochSampler
from vardass.solvers import stratify_groups
from vardass.solvers.grouped import Groups
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

    def _coupled_rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Plan (count, k) of the strata, with coupled rows in random order."""
        assert self.strata is not None
        assert self._features is not None
        table = cycle_table(self.strata, count, generator).to(self._features.device)
        weights = self.strata.exact_weights
        rows = couple_rows(
            table, self._features, weights, rounds=self.swap_rounds, residual=self._residual, generator=generator
        ).to("cpu")
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
    variance on the plan's features is at most that of the strata.

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
        rows = self._coupled_rows(count, generator)
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
        Arms of a trial, perturbations or class labels. The rows of each group are then balanced among themselves, as
        a sampler for each group would balance them, and a batch has ⌊n_g / m⌋ or one more of the n_g samples of a
        group that m batches share. More than two groups are also combined so that the mean of the batch is close to
        that of the data. `refresh` may replace them.
    shares : array of shape (g,), optional
        Share of each group in each batch, as for `StratifiedBatchSampler`. Strata of equal size are then made within
        groups, batches have weights, and only their weighted mean is balanced. An epoch of n / batch_size batches
        visits the samples of a group equally often, to within one visit for each of its strata, and a refresh starts
        a new epoch.
    plan_rank, swap_rounds : int
        As for `OrderedBatchSampler`.
    set_size : int, optional
        With ``groups``: a batch is a sequence of batch_size / set_size sets, each of ``set_size`` samples of one group
        that are close to the group in mean. Every group has as many sets in an epoch as it has samples for.

    Examples
    --------
    >>> z = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    >>> sampler = BalancedBatchSampler(96, batch_size=8, seed=0)
    >>> sampler.refresh(z)
    >>> sorted(index for batch in sampler for index in batch) == list(range(96))
    True
    >>> arm = torch.arange(96) % 3 == 0
    >>> sampler = BalancedBatchSampler(96, batch_size=8, groups=arm.long(), set_size=4, seed=0)
    >>> sampler.refresh(z)
    >>> {count for batch in sampler for count in arm[batch].view(2, 4).sum(1).tolist()} == {0, 4}
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
        set_size: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        planned = {"plan_rank": plan_rank, "swap_rounds": swap_rounds}
        self.n, self.batch_size = check_count(n, "n"), check_count(batch_size, "batch_size")
        self.set_size = None if set_size is None else check_count(set_size, "set_size")
        self._set_groups(groups, shares)  # first: they decide how many sets an epoch has
        if self.groups is not None:
            self._check_groups(self.groups, drop_last)
        elif set_size is not None:
            raise InputError(f"set_size={set_size} needs groups, got groups=None; pass groups= too", field="set_size")
        super().__init__(n, batch_size, drop_last=drop_last, **planned, **options)
        as_kernel(kernel)  # an unknown one is not to be found out at the first refresh only
        self.kernel = kernel
        self.strata: Strata | None = None  # with shares
        self.plan_labels: Tensor | None = None  # without: strata (n,) that the plan takes its columns from

    def _check_groups(self, groups: Tensor, drop_last: bool) -> None:
        """Refuse groups that no batch or set can be balanced in."""
        names, counts = torch.unique(groups, return_counts=True)
        name, least, size = int(names[counts.argmin()]), int(counts.min()), self.set_size
        if self.shares is not None:
            mixture = Groups.of(groups, self.shares, self.n)
            rows = (mixture.shares * self.batch_size).long()
            g = int((rows - mixture.counts).argmax())
            share, rows_of, count = float(mixture.shares[g]), int(rows[g]), int(mixture.counts[g])
            problems = [
                (size is not None, "set_size", f"sets have no shares, got set_size={size} and shares; leave one out"),
                (rows_of > count, "shares", f"a group of {count} samples has the share {share:.3g}, {rows_of} samples "
                 f"of each batch of {self.batch_size}; lower batch_size or its share"),
            ]  # fmt: skip
        elif size is None:
            problems = [
                (len(names) == 1, "groups", f"all {self.n} samples are in group {name}, so any other group is empty; "
                 "leave groups out, or pass labels with at least two values"),
                (least == 1, "groups", f"group {name} has one sample, which cannot be balanced between batches; merge "
                 "it with another group or leave it out"),
            ]  # fmt: skip
        else:
            sets, many = int((counts // size).sum()), self.batch_size // size
            problems = [
                (many * size != self.batch_size, "batch_size", f"batch_size={self.batch_size} is not a multiple of "
                 f"set_size={size}; use batch_size={max(1, many) * size}"),
                (least < size, "set_size", f"group {name} has {least} samples, fewer than set_size={size}; lower "
                 "set_size, or leave the group out"),
                (sets < many, "batch_size", f"the groups hold {sets} sets of set_size={size}, fewer than the {many} of "
                 "a batch; lower batch_size"),
                (not drop_last, "drop_last", f"sets have the one set_size={size}, got drop_last=False; leave it out"),
            ]  # fmt: skip
        for is_bad, field, text in problems:
            if is_bad:
                raise InputError(text, field=field)

    def refresh(self, features: ArrayLike, *, groups: ArrayLike | None = None, shares: ArrayLike | None = None) -> None:
        """As for `GroupedSampler`; the groups of sets stay."""
        if self.set_size is not None and (groups is not None or shares is not None):
            raise InputError(
                f"sets of set_size={self.set_size} keep their groups, got new groups or shares; make a new sampler",
                field="groups",
            )
        super().refresh(features, groups=groups, shares=shares)

    def _fit(self, features: Tensor) -> None:
        kernel = fitted_kernel(self.kernel, features)
        view = self._plan_view(features, kernel)
        if is_collapsed(view, kernel.diag(features)):
            warn_of_collapse(kernel, features, "batches are random")
        if self.shares is not None and self.groups is not None:
            seed = derive_seed(self.seed, self._refreshes)
            options: dict[str, Any] = {"kernel": kernel, "seed": seed, "equal": True, "check_finite": False}
            found = stratify_groups(features, self.batch_size, self.groups, shares=self.shares, **options)
            self.strata, self.plan_labels = found.to("cpu"), None
            self._plan_on(view)
            return
        self.strata, group = None, self._group_of.to(features.device)
        planned, labels, first = view.features, torch.zeros_like(group), 0
        counts = torch.bincount(group).tolist()
        if len(counts) > 1:  # rows of a group are to be like their group, not like all samples
            planned = planned.clone()
        for g, count in enumerate(counts):
            k = self.set_size or max(1, count * self.batch_size // self.n)
            members = slice(None) if count == self.n else (group == g).nonzero().flatten()
            if count < self.n:
                planned[members] -= planned[members].mean(0)
            labels[members] = first + _equal_strata(planned[members], view.residual[members], k)
            first += k
        self.plan_labels = labels
        self._plan_on(view, planned)

    @property
    def _group_of(self) -> Tensor:
        """Number of the group of each sample, 0 without groups: (n,)."""
        if self.groups is None:
            return torch.zeros(self.n, dtype=torch.int64)
        number: Tensor = torch.unique(self.groups, return_inverse=True)[1]
        return number

    def _batches_of(self, left: Tensor | None) -> int:
        if self.set_size is None:
            return super()._batches_of(left)
        group = self._group_of if left is None else self._group_of[left]
        return int((torch.bincount(group) // self.set_size).sum()) * self.set_size // self.batch_size

    def _plan(self, left: Tensor | None, generator: torch.Generator) -> Chunk:
        if self.set_size is not None:
            return Chunk(self._set_rows(torch.arange(self.n) if left is None else left, self.set_size, generator))
        if self.strata is None or self._features is None:
            return super()._plan(left, generator)
        count = max(1, self.n // self.batch_size // self.num_replicas) * self.num_replicas
        return Chunk(self._coupled_rows(count, generator), self.strata.exact_weights)

    def _arrange(self, pool: Tensor, generator: torch.Generator) -> Tensor:
        if self._features is None or self.plan_labels is None:
            return super()._arrange(pool, generator)
        group = self._group_of[pool]
        if bool((group != group[0]).any()):
            rows = self._group_rows(pool, group, generator)
        else:
            strata = self._cut(pool, len(pool) // self.batch_size, generator)
            rows = self._coupled(self._first_part(strata, generator).T, generator)
        return rows[torch.randperm(len(rows), generator=generator)]

    def _group_rows(self, pool: Tensor, group: Tensor, generator: torch.Generator) -> Tensor:
        """Batches (m, batch_size) of rows that each ``group`` of the samples ``pool`` has planned for itself."""
        assert self._features is not None
        count = len(pool) // self.batch_size
        rests = share_rests(torch.bincount(group), count, generator)[: self._part_size(count)]
        # rows of two groups, which are there to be compared, are paired at random: the sum of their errors would fall
        # only as their difference rises
        width = 0 if len(torch.unique(group)) == 2 else self._features.shape[1]
        errors = self._features.new_zeros(len(rests), width)
        columns, last = [], torch.empty_like(rests)
        for g in torch.unique(group).tolist():
            members, has_rest = pool[group == g], (rests == g).any(1)
            k = len(members) // count
            entries = self._first_part(self._cut(members[: k * count], count, generator), generator).T
            extra = entries.new_full((len(rests), 1), -1)
            extra[: int(has_rest.sum()), 0] = members[k * count :][: int(has_rest.sum())]
            table = self._coupled(torch.cat([entries, extra], 1), generator)
            sums = self._centred(table.flatten())[:, :width].view(*table.shape, width).sum(1)
            table = table[match_rows(sums, errors, table[:, -1] >= 0, has_rest)]
            columns.append(table[:, :-1])
            last[rests == g] = table[has_rest, -1]
        return torch.cat([*columns, last], 1)

    def _set_rows(self, pool: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Sets of ``size`` samples of one group each, in random order, in batches (m, batch_size)."""
        pool = pool[torch.randperm(len(pool), generator=generator)]
        group, sets = self._group_of[pool], []
        for g in torch.unique(group).tolist():
            members = pool[group == g]
            members = members[: len(members) // size * size]
            if len(members) == 0:  # a rest of this epoch
                continue
            if self._features is None:
                sets.append(members.view(-1, size))
            else:
                sets.append(self._coupled(self._cut(members, len(members) // size, generator).T, generator))
        rows = torch.cat(sets)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        count = len(rows) * size // self.batch_size
        return rows.flatten()[: count * self.batch_size].view(count, -1)

    def _cut(self, pool: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Shuffled strata (k, size): runs of ``pool`` in the order of the strata, whose neighbours are close."""
        assert self.plan_labels is not None
        labels = self.plan_labels[pool.to(self.plan_labels.device)].to("cpu")
        strata = pool[labels.argsort(stable=True)].view(len(pool) // size, size)
        return strata.gather(1, torch.rand(strata.shape, generator=generator).argsort(1))

    def _centred(self, samples: Tensor) -> Tensor:
        """Features of ``samples`` (m,), 0 for those below 0, around the mean of what is planned.

        Every batch can reach that mean, but perhaps not that of all samples.
        """
        assert self._features is not None
        samples = samples.to(self._features.device)
        features = self._features[samples]
        if bool((samples >= 0).all()):
            return features.sub_(features.mean(0))
        is_hole = (samples < 0)[:, None]
        features.masked_fill_(is_hole, 0.0)
        return features.sub_(features.sum(0) / (~is_hole).sum().clamp_min(1)).masked_fill_(is_hole, 0.0)

    def _coupled(self, entries: Tensor, generator: torch.Generator) -> Tensor:
        """The samples ``entries`` (m, k), below 0 for none, swapped inside their columns."""
        features = self._centred(entries.flatten())
        table = torch.arange(len(features), device=features.device).view(entries.shape)
        weights = features.new_full((table.shape[1],), 1.0 / table.shape[1])
        table = couple_rows(
            table, features, weights, rounds=self.swap_rounds, residual=self._residual, generator=generator
        )
        return entries.reshape(-1)[table.to("cpu")]

    def _part_size(self, size: int) -> int:
        """How many of ``size`` batches are planned together."""
        if size <= _ROWS:
            return size
        return max(1, size // -(-size // _ROWS) // self.num_replicas) * self.num_replicas

    def _first_part(self, strata: Tensor, generator: torch.Generator) -> Tensor:
        """What is planned together of each shuffled stratum (k, m), with the mean of the whole: (k, m')."""
        assert self._features is not None
        k, size = strata.shape
        count = self._part_size(size)
        parts = size // count
        if parts == 1 or k == 0:
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
