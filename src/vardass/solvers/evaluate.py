"""The variance of given strata under the true kernel, whichever path found them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.kernels import Kernel
from vardass.solvers.problem import ExactProblem, LowRankProblem, Problem
from vardass.variance import stratified_variance

__all__ = ["Evaluation", "evaluate"]

_EXACT_WORK = 4e9  # kernel pairs times dimensions that may be spent on the exact value
_PAIRS = 20_000  # pairs that estimate it beyond that


@dataclass(frozen=True)
class Evaluation:
    """Variances of stratified and of uniform draws with their standard errors; 0 means exact."""

    variance: float
    variance_stderr: float
    uniform_variance: float
    uniform_stderr: float


def evaluate(
    problem: Problem, labels: Tensor, k: int, *, x: Tensor, kernel: Kernel, generator: torch.Generator
) -> Evaluation:
    """Var(μ̂) of one draw from each of k strata and of k uniform draws.

    The exact path has all kernel values. The low-rank path knows all distances up to the small part that
    its features miss between different points; where summing all pairs inside strata would cost too much,
    the mean of that part over random pairs corrects the low-rank value.
    """
    n = problem.n
    everything = torch.zeros_like(labels)
    inside, total = problem.objective(labels, k), problem.objective(everything, 1)
    if isinstance(problem, ExactProblem):
        return Evaluation(inside / n**2, 0.0, total / (k * n**2), 0.0)
    assert isinstance(problem, LowRankProblem)
    missed, error = _mean_missed(problem, everything, 1, x, kernel, generator)
    pairs = n * (n - 1) / 2
    uniform = max(0.0, total + pairs * missed) / (k * n**2)
    uniform_stderr = pairs * error / (k * n**2)
    sizes = torch.bincount(labels, minlength=k).double()
    if float(sizes.square().sum()) * x.shape[1] <= _EXACT_WORK:
        exact = stratified_variance(x, labels, kernel=kernel)
        return Evaluation(exact, 0.0, uniform, uniform_stderr)
    missed, error = _mean_missed(problem, labels, k, x, kernel, generator)
    pairs = float((sizes * (sizes - 1)).sum()) / 2
    return Evaluation(max(0.0, inside + pairs * missed) / n**2, pairs * error / n**2, uniform, uniform_stderr)


def _mean_missed(
    problem: LowRankProblem, labels: Tensor, k: int, x: Tensor, kernel: Kernel, generator: torch.Generator
) -> tuple[float, float]:
    """Mean and standard error of d_ij minus its low-rank value over random pairs within strata."""
    sizes = torch.bincount(labels, minlength=k)
    pairs = (sizes * (sizes - 1)).double()
    if float(pairs.sum()) == 0.0:
        return 0.0, 0.0
    order = labels.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    stratum = torch.multinomial(pairs, _PAIRS, replacement=True, generator=generator)
    size = sizes[stratum]

    def below(limit: Tensor) -> Tensor:
        draw = torch.rand(_PAIRS, dtype=torch.float64, generator=generator, device=x.device)
        return (draw * limit).long().clamp_max_(limit - 1)

    first, second = below(size), below(size - 1)
    second = second + (second >= first)  # any member but the first
    i, j = order[starts[stratum] + first], order[starts[stratum] + second]
    exact = kernel.diag(x[i]) + kernel.diag(x[j]) - 2.0 * kernel.paired(x[i], x[j])
    model = (problem.features[i] - problem.features[j]).square().sum(1) + problem.residual[i] + problem.residual[j]
    missed = (exact - model).double()
    return float(missed.mean()), float(missed.std()) / _PAIRS**0.5
