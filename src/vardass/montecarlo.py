"""The variance of any statistic of any sampler, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.validate import as_generator, check_count

__all__ = ["MonteCarlo", "monte_carlo_variance"]


@dataclass(frozen=True)
class MonteCarlo:
    """What repeated draws say of a statistic.

    Attributes
    ----------
    mean : Tensor
        Mean of the statistic, of its own shape, in double precision.
    variance : float
        Unbiased estimate of E|statistic - its mean|²: for a vector the trace of its covariance.
    stderr_of_variance : float
        Standard error of ``variance``.
    repeats : int
        Number of draws.
    """

    mean: Tensor
    variance: float
    stderr_of_variance: float
    repeats: int

    @property
    def stderr_of_mean(self) -> float:
        """Root mean square distance of ``mean`` from the true expectation."""
        return math.sqrt(self.variance / self.repeats)

    def bias(self, truth: Tensor) -> float:
        """Distance of ``mean`` from ``truth``; to be compared with ``stderr_of_mean``."""
        return float((self.mean - truth.to(self.mean)).norm())


def monte_carlo_variance(
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor | None]],
    statistic: Callable[[Tensor, Tensor | None], Tensor],
    *,
    repeats: int,
    seed: int | torch.Generator | None = 0,
) -> MonteCarlo:
    """Simulate the variance of any statistic of a batch from any sampler.

    Parameters
    ----------
    draw : callable
        ``draw(generator) -> (indices, weights or None)``, one batch; all its randomness must come from the
        generator.
    statistic : callable
        ``statistic(indices, weights) -> Tensor`` of any shape, the same each time. All ``repeats`` values
        are held in memory.
    repeats : int
        Number of batches, at least 2.
    seed : int or torch.Generator
        The same seed gives the same result.
    """
    repeats = check_count(repeats, "repeats", low=2, remedy="a variance needs two values")
    generator = seed if isinstance(seed, torch.Generator) else as_generator(seed)
    values: list[Tensor] = []
    with torch.no_grad():
        for _ in range(repeats):
            batch = draw(generator)
            if not isinstance(batch, tuple) or len(batch) != 2:
                raise InputError(
                    f"draw must return (indices, weights or None), got {type(batch).__name__}; return a pair"
                )
            value = statistic(*batch)
            if not isinstance(value, Tensor) or (values and value.shape != values[0].shape):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                first = f" of shape {tuple(values[0].shape)}, as at first" if values else ""
                raise InputError(f"statistic must return a tensor{first}, got {got}")
            values.append(value.detach().double())
    stacked = torch.stack(values).reshape(repeats, -1)
    if not bool(torch.isfinite(stacked).all()):
        bad = int((~torch.isfinite(stacked)).any(1).sum())
        raise InputError(f"statistic was NaN or infinite for {bad} of {repeats} batches; mend it first")
    mean = stacked.mean(0)
    squared = (stacked - mean).square().sum(1)
    # the trace of the sample covariance is, but for O(1/repeats), the mean of these squared distances
    return MonteCarlo(
        mean=mean.reshape(values[0].shape),
        variance=float(squared.sum()) / (repeats - 1),
        stderr_of_variance=float(squared.std()) / math.sqrt(repeats),
        repeats=repeats,
    )
