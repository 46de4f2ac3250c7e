"""Quadruplets of two source and two target samples that are always drawn together, so that their noise cancels.

Derived from the abstract of arXiv 2607.20367 (PSDA), a follow-up of the paper: observations are paired within and
across domains into quadruplets by linear assignments that minimise the variance of the gradient.

Within a domain pairs make Σ |φ_i + φ_j - 2μ|² small, with φ the features of the loss's kernel: a linear assignment
between the halves of a random split. Across domains pairs of the source are assigned to pairs of the target so that
Σ_q |d_q - D|² is small, with d_q = (φ_i + φ_j)/2 - (ψ_k + ψ_l)/2 and D = μ_s - μ_t. A batch of K of the Q quadruplets
of a plan, drawn without replacement, then has

    E|D̂ - D̄|² = (Q - K) / (K (Q - 1)) · (1/Q) Σ_q |d_q - D̄|²,   D̄ = (1/Q) Σ_q d_q,

and the difference D̂ is all that MMD² and its gradient depend on. Samples come in random order and the assignment only
permutes them, so each batch is unbiased in either domain.

The assignments are made by exchanges (`couple_rows`): on trained features their sums were within 2 % of the exact ones.
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import KernelLike, as_kernel, fitted_kernel
from vardass.samplers.base import Chunk, MinibatchSampler, StreamOptions, derive_seed
from vardass.samplers.plan import PLAN_RANK, SWAP_ROUNDS, couple_rows, plan_features
from vardass.validate import ArrayLike, as_features, as_generator, check_count, check_tensor, choose

__all__ = ["PairedBatchSampler"]


class PairedBatchSampler(MinibatchSampler):
    """One of two samplers, of source and target, whose batches consist of quadruplets.

    Make both with the same seed, refresh both at the same time with the features of both domains,
    ``refresh(features, other=features_of_the_other)``, and take their batches in step: the samples 2q and 2q + 1 of
    both batches are a quadruplet. Weights are equal, so any loss can be used. Without ``other`` samples are paired
    within the domain only. Uniform until the first `refresh`. Derived from the abstract of arXiv 2607.20367 alone.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`; ``batch_size`` must be even.
    role : {"source", "target"}
        Which of the two it is.
    other_batch_size : int, optional
        Of the other sampler, which must be the same.
    kernel : Kernel, name or callable
        The kernel of the loss.
    plan_rows : int
        Batches that are planned together, at most: a plan visits no sample twice.
    plan_rank : int
        Columns of the kernel features that the pairings look at, the leading ones.
    swap_rounds : int
        Most rounds of exchanges for each assignment; 0 leaves the pairs random.

    Examples
    --------
    >>> z = [torch.randn(60, 3, generator=torch.Generator().manual_seed(i)) + i for i in (0, 1)]
    >>> pair = [PairedBatchSampler(60, 8, role=role, seed=5) for role in ("source", "target")]
    >>> pair[0].refresh(z[0], other=z[1])
    >>> pair[1].refresh(z[1], other=z[0])
    >>> source, target = next(zip(*pair))
    >>> quadruplet = source[:2] + target[:2]
    >>> len(quadruplet), source.weights
    (4, None)
    """

    plans_both_domains: ClassVar[bool] = True

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        role: str = "source",
        other_batch_size: int | None = None,
        kernel: KernelLike = "mmd",
        plan_rows: int = 128,
        plan_rank: int = PLAN_RANK,
        swap_rounds: int = SWAP_ROUNDS,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(n, batch_size, **options)
        as_kernel(kernel)  # refuses an unknown one before the first refresh
        self.kernel = kernel
        self.role = choose(role, "role", ("source", "target"))
        self.other_batch_size = batch_size if other_batch_size is None else other_batch_size
        self.plan_rows = check_count(plan_rows, "plan_rows", low=2)
        self.plan_rank = check_count(plan_rank, "plan_rank")
        self.swap_rounds = check_count(swap_rounds, "swap_rounds", low=0)
        if batch_size % 2:
            raise InputError(f"batch_size={batch_size} cannot be cut into pairs; use batch_size={batch_size + 1}")
        if self.other_batch_size != batch_size:
            raise InputError(
                f"a quadruplet has two samples of each domain, but batch_size={batch_size} and "
                f"other_batch_size={other_batch_size}; give both domains batches of one size"
            )
        self._features: Tensor | None = None  # centred on the mean of each domain; of both, source first, or of its own
        self._sizes: list[int] = []  # samples of the domains that they are of
        self._other: Tensor | None = None  # features of the other domain, during a refresh

    def refresh(self, features: ArrayLike, *, other: ArrayLike | None = None) -> None:
        """As for `MinibatchSampler.refresh`, with the features (n', d) of the ``other`` domain."""
        self._other = None if other is None else as_features(other, "other")
        try:
            super().refresh(features)
        finally:
            self._other = None

    def _fit(self, features: Tensor) -> None:
        domains = [features]
        if self._other is not None:
            if self._other.shape[1] != features.shape[1]:
                raise InputError(
                    f"features have {features.shape[1]} columns, those of the other domain {self._other.shape[1]}; "
                    "pass both from the same network"
                )
            domains.insert(0 if self._side else 1, self._other.to(features))
        both = torch.cat(domains)
        kernel = fitted_kernel(self.kernel, both)
        generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
        planned = plan_features(both, kernel, self.plan_rank, generator=generator).features
        self._sizes = [len(domain) for domain in domains]
        if len(domains) == 2:
            planned = torch.cat([part - part.mean(0) for part in torch.split(planned, self._sizes)])
        self._features = planned

    @property
    def _side(self) -> int:
        return 0 if self.role == "source" else 1

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        if len(self._sizes) < 2:  # not planned together: the draws of the other sampler, of the same seed, must differ
            generator = torch.Generator().manual_seed(derive_seed(generator.initial_seed(), self._side))
        if self._features is None:
            count = -(-self.plan_rows // self.num_replicas) * self.num_replicas
            return Chunk(torch.randint(self.n, (count, self.batch_size), generator=generator))
        most = min(self.plan_rows, *(n // self.batch_size for n in self._sizes))
        count = max(1, most // self.num_replicas) * self.num_replicas
        parts = torch.split(self._features, self._sizes)
        pairs = [self._pairs(part, count * self.batch_size, generator) for part in parts]
        mine = pairs[0]
        if len(pairs) == 2:
            means = [part[each].mean(1) for part, each in zip(parts, pairs)]
            matched = self._assigned(means[0], -means[1], generator)
            mine = pairs[self._side][matched[self._side]]
        order = torch.randperm(len(mine), generator=generator)
        return Chunk(mine.to("cpu")[order].view(count, self.batch_size))

    def _pairs(self, features: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Random ``count`` of the samples (n, r), none twice unless there are fewer, in pairs: (count / 2, 2)."""
        n = len(features)
        orders = [torch.randperm(n, generator=generator) for _ in range(-(-count // n))]
        first, second = torch.cat(orders)[:count].to(features.device).view(2, -1)
        i, j = self._assigned(features[first], features[second], generator)
        return torch.stack([first[i], second[j]], 1)

    def _assigned(self, a: Tensor, b: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Orders i and j of the rows of two matrices (m, r) in which Σ |a_i + b_j|² is small."""
        m = len(a)
        table = torch.arange(2 * m, device=a.device).view(2, m).T
        both = torch.cat([a, b])
        table = couple_rows(table, both, both.new_ones(2), rounds=self.swap_rounds, generator=generator)
        return table[:, 0], table[:, 1] - m

    def _extra_state(self) -> dict[str, Any]:
        return {"features": self._features, "sizes": self._sizes}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        self._sizes = [check_count(size, "sizes") for size in state["sizes"]]
        self._features = state["features"]
        if self._features is not None:
            check_tensor(self._features, "features", (sum(self._sizes), None))
            if len(self._sizes) > 2 or self._sizes[self._side if len(self._sizes) == 2 else 0] != self.n:
                raise InputError(f"the state plans domains of {self._sizes} samples, this one has n={self.n}")
