"""Batches of k-means++ seeds, far from each other under the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardass.lowrank import DEFAULT_RANK, low_rank_features
from vardass.samplers.base import derive_seed
from vardass.samplers.diverse import DiverseBatchSampler, MassTable, check_values, kernel_matrix
from vardass.validate import as_generator

__all__ = ["KMeansPlusPlusBatchSampler"]

_ROUNDING = 32.0  # squared distances below this many units of rounding are taken for zero


class KMeansPlusPlusBatchSampler(DiverseBatchSampler):
    """Each batch is one run of k-means++ seeding in the kernel's feature space.

    The first sample is uniform, each next one has a probability proportional to its squared kernel distance
    d_ij = κ(z_i, z_i) + κ(z_j, z_j) - 2 κ(z_i, z_j) to the nearest sample so far, one candidate for each
    draw. Samples that coincide with chosen ones are taken only when no other is left. Batches are
    independent of each other, hold distinct samples, and carry no weights: rare regions are drawn more often
    than their share on purpose, so batch means are *not* unbiased for those of the data set. Uniform until the
    first `refresh`.

    On the low-rank path κ(z_i, z_j) is approximated for i ≠ j while κ(z_i, z_i) stays exact, so copies of a
    sample are still a little apart for kernels with a residual (see `vardass.lowrank`).

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`; ``rank`` is that of the process.
    kernel : Kernel, name or callable
        The kernel of the loss; ``"linear"`` is k-means++ on the features themselves.
    kernel_rank : int, optional
        Columns of the low-rank kernel features, with time O(n kernel_rank batch_size) and memory
        O(n kernel_rank); 0 for all distances between samples, with memory O(n²). By default 0 up to 2,048
        samples, 128 beyond.

    Examples
    --------
    >>> z = torch.cat([torch.zeros(98, 2), torch.tensor([[3.0, 0.0], [0.0, 3.0]])])
    >>> sampler = KMeansPlusPlusBatchSampler(100, batch_size=3, kernel="linear", seed=0)
    >>> sampler.refresh(z)
    >>> all({98, 99} <= set(batch) for batch in sampler)
    True
    """

    _table: Tensor | None = None  # squared distances (n, n), or points (n, r + 2) that give them
    _is_exact = True

    @property
    def _is_fitted(self) -> bool:
        return self._table is not None

    @torch.no_grad()
    def _fit(self, features: Tensor) -> None:
        kernel = self.kernel.fit(features)
        columns = self._columns(DEFAULT_RANK)
        if columns == 0:
            matrix = kernel_matrix(kernel, features)
            diag = matrix.diagonal().clone()
            distances = matrix.mul_(-2.0).add_(diag[:, None]).add_(diag)
            table = torch.threshold_(distances, _tolerance(diag), 0.0).to(features.dtype)
        else:
            generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
            check_values(kernel.diag(features), kernel, features)
            low_rank = low_rank_features(features, kernel, columns, generator=generator)
            diag = low_rank.features.square().sum(1) + low_rank.residual
            table = torch.cat([low_rank.features, diag[:, None], torch.ones_like(diag)[:, None]], dim=1)
        self._table, self._is_exact = check_values(table, kernel, features), columns == 0

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        table = self._table
        assert table is not None
        # one transfer: the generator is on the CPU, as for all samplers
        levels = torch.rand(self.batch_size, count, 2, dtype=torch.float64, generator=generator).to(table.device)
        masses = MassTable(count, self.n, table)
        nearest = masses.mass
        chosen = torch.empty(count, self.batch_size, dtype=torch.int64, device=table.device)
        tolerance = 0.0 if self._is_exact else _tolerance(table[:, -2])
        distances = torch.empty_like(nearest, memory_format=torch.contiguous_format)
        for step in range(self.batch_size):
            # no mass yet makes the first draw uniform
            chosen[:, step] = seeds = masses.draw(levels[step])
            if self._is_exact:
                torch.index_select(table, 0, seeds, out=distances)
            else:
                torch.mm(_facing(table[seeds]), table.T, out=distances)
            if step == 0:
                nearest.copy_(distances)
                nearest.scatter_(1, seeds[:, None], 0.0)
            else:
                torch.minimum(nearest, distances, out=nearest)
            if not self._is_exact:
                torch.threshold_(nearest, tolerance, 0.0)
        return chosen

    def _extra_state(self) -> dict[str, Any]:
        return {"table": self._table, "is_exact": self._is_exact}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        self._table, self._is_exact = state["table"], state["is_exact"]


def _facing(points: Tensor) -> Tensor:
    """Rows (-2 φ_j, 1, K_jj), whose inner product with a point (φ_i, K_ii, 1) is d_ij."""
    return torch.cat([points[:, :-2] * -2.0, points[:, -2:].flip(1)], dim=1)


def _tolerance(diag: Tensor) -> float:
    return _ROUNDING * torch.finfo(diag.dtype).eps * float(diag.max())
