"""Errors of minibatch mean embeddings, exact in the RKHS.

|μ̂ - μ|² = Σ_hl w_h w_l κ(z_h, z_l) - 2 Σ_h w_h <φ(z_h), μ> + |μ|² needs no feature map: the k x k kernel matrix of
the batch, and <φ(z_i), μ> = (1/n) Σ_j κ(z_i, z_j) for each sample once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vardass.kernels import Kernel
from vardass.sampler_noise.draws import Batches
from vardass.samplers import StratifiedBatchSampler, UniformBatchSampler
from vardass.validate import as_generator
from vardass.variance import stratified_variance

__all__ = ["Embedding", "embedding_errors", "exact_variance", "sample_rows"]


@dataclass(frozen=True)
class Embedding:
    """One domain under a kernel.

    Attributes
    ----------
    kernel : Kernel
        Fitted to the domain.
    errors : list of Tensor of shape (b,)
        |μ̂ - μ|² of the batches of each sampler.
    squared_bias : list of float or None
        |mean of μ̂ - μ|² for each sampler; None for a domain too large.
    spread : float or None
        E|φ(z) - μ|², the variance of a single uniform draw; None for a domain too large.
    """

    kernel: Kernel
    errors: list[Tensor]
    squared_bias: list[float] | None
    spread: float | None


def sample_rows(n: int, limit: int, seed: int, device: torch.device) -> Tensor | None:
    """A seeded draw of ``limit`` of n rows without replacement, or None if there are no more than that."""
    if n <= limit:
        return None
    return torch.randperm(n, generator=as_generator(seed))[:limit].to(device)


@torch.no_grad()
def embedding_errors(x: Tensor, kernel: Kernel, draws: list[Batches], *, max_columns: int, seed: int) -> Embedding:
    """Errors of each sampler's batches in the domain ``x`` (n, d) under a fitted ``kernel``."""
    n = len(x)
    columns = sample_rows(n, max_columns, seed, x.device)
    if columns is None:
        # one pass over the kernel matrix gives <φ_i, μ> and, for each sampler, <φ_i, mean of μ̂ - μ>
        offsets = torch.stack([_mean_weights(batches, n) - 1.0 / n for batches in draws], dim=1)
        products = _multiply(x, x, kernel, torch.cat([offsets.new_full((n, 1), 1.0 / n), offsets], dim=1))
        inner = products[:, 0]
        squared_norm = inner.mean()
        squared_bias = (offsets * products[:, 1:]).sum(0).clamp_min(0.0).tolist()
        spread = max(0.0, float(kernel.diag(x).double().mean() - squared_norm))
        errors = [_errors(x, kernel, batches, inner, squared_norm) for batches in draws]
        return Embedding(kernel, errors, squared_bias, spread)
    # a sample of m stands in for all n: E|μ̂ - μ_m|² is too large by |μ_m - μ|², (n - m)/(n - 1) spread / m on average
    m = len(columns)
    used = torch.unique(torch.cat([columns, *(batches.rows.flatten() for batches in draws)]))
    inner = torch.zeros(n, dtype=torch.float64, device=x.device)
    inner[used] = _multiply(x[used], x[columns], kernel, inner.new_full((m, 1), 1.0 / m))[:, 0]
    squared_norm = inner[columns].mean()
    variance_of_sample = (kernel.diag(x[columns]).double().mean() - squared_norm) * m / (m - 1) * (n - 1) / n
    excess = variance_of_sample / m * (n - m) / (n - 1)
    return Embedding(
        kernel, [_errors(x, kernel, batches, inner, squared_norm) - excess for batches in draws], None, None
    )


def _mean_weights(batches: Batches, n: int) -> Tensor:
    total = batches.weights.new_zeros(n)
    return total.index_add_(0, batches.rows.flatten(), batches.weights.flatten()) / len(batches.rows)


def _multiply(x: Tensor, y: Tensor, kernel: Kernel, right: Tensor) -> Tensor:
    """κ(x, y) times ``right`` (m, c), block by block: (n, c)."""
    result = right.new_empty(len(x), right.shape[1])
    for rows, block in kernel.blocks(x, y):
        result[rows] = block.to(right.dtype) @ right
    return result


def _errors(x: Tensor, kernel: Kernel, batches: Batches, inner: Tensor, squared_norm: Tensor) -> Tensor:
    cross = (batches.weights * inner[batches.rows]).sum(1)
    squares = [w @ (kernel.matrix(x[rows]).to(w.dtype) @ w) for rows, w in zip(batches.rows, batches.weights)]
    return torch.stack(squares) - 2.0 * cross + squared_norm


def exact_variance(sampler: Any, x: Tensor, domain: Embedding) -> float | None:
    """E|μ̂ - μ|² of a sampler's batches where a closed form is known, else None."""
    n = len(x)
    # subclasses couple their draws, so only these very classes have a closed form
    if type(sampler) is UniformBatchSampler and domain.spread is not None:
        k = sampler.batch_size
        share = 1.0 if sampler.replacement else (n - k) / max(1, n - 1)
        return domain.spread / k * share
    if type(sampler) is StratifiedBatchSampler:
        strata = sampler.strata
        if strata is None:
            return None if domain.spread is None else domain.spread / sampler.batch_size
        return stratified_variance(
            x,
            strata.labels,
            kernel=domain.kernel,
            draws_per_stratum=sampler.draws_per_stratum,
            replacement=sampler.replacement,
        )
    return None
