"""Strata first, then a plan of the next batches in which each is a small, weighted copy of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import KernelLike, fitted_kernel
from vardass.samplers.base import Chunk, derive_seed
from vardass.samplers.plan import NEGLIGIBLE, PLAN_RANK, SWAP_ROUNDS, couple_rows, cycle_table, plan_features
from vardass.samplers.stratified import StratifiedBatchSampler
from vardass.strata import Strata
from vardass.validate import as_generator, check_count

__all__ = ["OrderedBatchSampler"]


class OrderedBatchSampler(StratifiedBatchSampler):
    """Weighted draws from strata, coupled so that every batch's mean embedding is close to the full one.

    Each `refresh` makes strata, as `StratifiedBatchSampler` does, and then a table of ``plan_rows`` batches
    with one member of each stratum, in which every member of a stratum of size m occurs equally often (to
    within one). Members are swapped inside their columns until each row's weighted mean embedding is as
    close to that of the data set as it gets. Rows come in random order. Each batch is unbiased for every
    function, whatever the swaps (see `vardass.samplers.plan`), and its variance on the features that the plan
    looks at is at most that of the strata. When the rows are used up, another table is made from the same
    features. With several draws per stratum those of one row stay together and are swapped as one.

    Parameters
    ----------
    n, batch_size, kernel, solver, groups, shares, seed, batches, endless, num_replicas, rank, strata_options
        As for `StratifiedBatchSampler`.
    plan_rows : int
        Batches planned together. More give the swaps more choice and cost more time.
    plan_rank : int
        Columns of the kernel features that the plan looks at, the leading ones.
    swap_rounds : int
        Most sweeps of swaps over the columns of the plan; 0 leaves the draws uncoupled.

    Examples
    --------
    >>> z = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> sampler = OrderedBatchSampler(200, batch_size=8, seed=0)
    >>> sampler.refresh(z)
    >>> batch = next(iter(sampler))
    >>> len(batch), round(sum(batch.weights), 6)
    (8, 1.0)
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
                "replacement=True does not go with ordered batches, whose plan uses a sample once; leave it out"
            )
        super().__init__(n, batch_size, kernel=kernel, replacement=False, **options)
        self.plan_rows = check_count(plan_rows, "plan_rows", low=2)
        self.plan_rank = check_count(plan_rank, "plan_rank")
        self.swap_rounds = check_count(swap_rounds, "swap_rounds", low=0)
        self._features: Tensor | None = None
        self._residual = 0.0  # error of a sample that is not worth a further sweep

    def _fit(self, features: Tensor) -> None:
        kernel = fitted_kernel(self.kernel, features)
        generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
        planned = plan_features(features, kernel, self.plan_rank, generator=generator)
        self._stratify(features, planned)  # strata of many samples are found on the same features
        assert self.strata is not None
        self._features = centred_on(self.strata, planned.features)
        self._residual = NEGLIGIBLE * float(planned.residual.mean())

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        if self.strata is None or self._features is None:
            return super()._make_chunk(rounds, generator)
        count = -(-self.plan_rows // self.num_replicas) * self.num_replicas
        rows = coupled_rows(
            self.strata,
            count,
            self._features,
            draws=self.draws_per_stratum,
            rounds=self.swap_rounds,
            residual=self._residual,
            generator=generator,
        )
        return Chunk(rows, self._column_weights)

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "features": self._features, "residual": self._residual}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        self._features, self._residual = state["features"], state["residual"]


def centred_on(strata: Strata, features: Tensor) -> Tensor:
    """Features (n, r) of a plan minus the mean that its rows have together, which no swap changes.

    They come centred on the data set's mean, which is that of the rows unless strata have shares of their own.
    """
    if strata.shares is None:
        return features
    return features - strata.row_weights.to(features) @ features


def coupled_rows(
    strata: Strata,
    count: int,
    features: Tensor,
    *,
    draws: int = 1,
    rounds: int,
    residual: float,
    generator: torch.Generator,
) -> Tensor:
    """Plan (count, k * draws) of strata whose rows are coupled on ``features`` (n, r), in random order."""
    table = cycle_table(strata, count, generator, draws=draws)
    units = table.to(features.device)
    if draws > 1:  # swapping one of several draws could bring a sample into its batch twice
        units = units.view(-1, draws)
        features, units = features[units].mean(1), torch.arange(len(units), device=units.device).view(count, -1)
    weights = strata.exact_weights
    residual /= draws  # residuals of different samples are independent
    units = couple_rows(units, features, weights, rounds=rounds, residual=residual, generator=generator).to("cpu")
    rows = table.view(-1, draws)[units].view(count, -1) if draws > 1 else units
    return rows[torch.randperm(count, generator=generator)]
