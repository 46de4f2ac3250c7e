"""What samplers share that come in twos, one for each domain, and plan the batches of both together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Unpack

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel, KernelLike, as_kernel, fitted_kernel
from vardass.samplers.base import Chunk, MinibatchSampler, StreamOptions, derive_seed
from vardass.samplers.plan import plan_features
from vardass.validate import ArrayLike, as_features, as_generator, check_count, choose

__all__ = ["TwoDomainSampler"]


class TwoDomainSampler(MinibatchSampler, ABC):
    """One of two samplers, of source and target, which make the same plan and hand out its two sides in step.

    Both have one seed and are refreshed with the features of both domains. A subclass writes ``_fit_alone``,
    ``_fit_together`` and ``_make_chunk``, which must draw the same from its generator in either role.
    """

    plans_both_domains = True

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        role: str,
        other_batch_size: int | None,
        kernel: KernelLike,
        plan_rows: int,
        plan_rank: int,
        swap_rounds: int,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(n, batch_size, **options)
        as_kernel(kernel)  # an unknown one is not to be found out at the first refresh only
        self.kernel = kernel
        self.role = choose(role, "role", ("source", "target"))
        other = batch_size if other_batch_size is None else check_count(other_batch_size, "other_batch_size")
        self.other_batch_size = other
        self.plan_rows = check_count(plan_rows, "plan_rows", low=2)
        self.plan_rank = check_count(plan_rank, "plan_rank")
        self.swap_rounds = check_count(swap_rounds, "swap_rounds", low=0)
        self._other: Tensor | None = None  # what a refresh was given

    def refresh(self, features: ArrayLike, *, other: ArrayLike | None = None) -> None:
        """As for `MinibatchSampler.refresh`, with the features (n', d) of the ``other`` domain."""
        self._other = None if other is None else as_features(other, "other")
        try:
            super().refresh(features)
        finally:
            self._other = None

    def _fit(self, features: Tensor) -> None:
        other = self._other
        if other is None:
            self._fit_alone(features, fitted_kernel(self.kernel, features))
            return
        if other.shape[1] != features.shape[1]:
            raise InputError(
                f"features have {features.shape[1]} columns, those of the other domain {other.shape[1]}; pass both "
                "from the same network"
            )
        other = other.to(features)
        both = torch.cat(self._in_order(features, other))
        kernel = fitted_kernel(self.kernel, both)
        self._fit_together(features, other, kernel, self._kernel_features(both, kernel))

    @abstractmethod
    def _fit_alone(self, features: Tensor, kernel: Kernel) -> None:
        """Take what a plan of one domain needs from its features (n, d)."""

    @abstractmethod
    def _fit_together(self, features: Tensor, other: Tensor, kernel: Kernel, planned: Tensor) -> None:
        """Take what a plan needs from both domains; ``planned`` (n + n', r) are their kernel features, source first."""

    def _kernel_features(self, features: Tensor, kernel: Kernel) -> Tensor:
        generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
        return plan_features(features, kernel, self.plan_rank, generator=generator).features

    @property
    def _side(self) -> int:
        return 0 if self.role == "source" else 1

    def _in_order(self, mine: Any, other: Any) -> tuple[Any, Any]:
        return (mine, other) if self.role == "source" else (other, mine)

    def _own(self, generator: torch.Generator) -> torch.Generator:
        """A generator for draws that are not planned together: the other sampler's own draws must differ."""
        return torch.Generator().manual_seed(derive_seed(generator.initial_seed(), self._side))

    def _uniform_chunk(self, generator: torch.Generator) -> Chunk:
        count = -(-self.plan_rows // self.num_replicas) * self.num_replicas
        rows = torch.randint(self.n, (count, self.batch_size), generator=self._own(generator))
        return Chunk(rows, strata=torch.zeros(self.batch_size, dtype=torch.int64))
