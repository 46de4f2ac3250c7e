"""The variance of given strata under the true kernel, whichever path found them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.kernels import Kernel
from vardass.solvers.problem import ExactProblem, LowRankProblem, Problem
from vardass.variance import stratified_variance, uniform_variance

__all__ = ["Evaluation", "evaluate", "mean_missed", "uniform_evaluation"]

_EXACT_WORK = 2e7  # kernel pairs times dimensions that may be spent on an exact value: less than the solver takes
_PAIRS = 20_000  # pairs that estimate it beyond that
_PAIRS_MISSED = 2_000  # pairs that estimate the small part of it that low-rank features miss


@dataclass(frozen=True)
class Evaluation:
    """Variances of stratified and of uniform draws with their standard errors; 0 means exact."""

    variance: float
    variance_stderr: float
    uniform_variance: float
    uniform_stderr: float


def evaluate(
    problem: Problem | None,
    labels: Tensor,
    k: int,
    *,
    x: Tensor,
    kernel: Kernel,
    generator: torch.Generator,
    objective: float | None = None,
) -> Evaluation:
    """Var(μ̂) of one draw from each of k strata and of k uniform draws.

    The exact path has all kernel values. The low-rank path knows all distances up to the small part that
    its features miss between different points; where summing all pairs inside strata would cost too much,
    the mean of that part over random pairs corrects the low-rank value. Without a problem all pairs are summed
    or, where they are too many, estimated from random ones. ``objective`` is J of the problem, where it is known.
    """
    n = len(labels)
    if problem is not None and objective is None:
        objective = problem.objective(labels, k)
    if isinstance(problem, ExactProblem):
        assert objective is not None
        inside, total = objective, n * float(problem.spread.sum(dtype=torch.float64))
        return Evaluation(inside / n**2, 0.0, total / (k * n**2), 0.0)
    assert problem is None or isinstance(problem, LowRankProblem)
    if problem is None:
        uniform, uniform_stderr = uniform_evaluation(x, k, kernel=kernel, generator=generator)
    else:
        everything = torch.zeros_like(labels)
        # J of a single stratum; a residual is a direction of its own, of which the mean has 1 / n
        known = float(n * problem.spread.sum(dtype=torch.float64) - problem.residual.sum(dtype=torch.float64))
        total, total_error = _estimated_objective(problem, everything, 1, x, kernel, generator, known)
        uniform, uniform_stderr = total / (k * n**2), total_error / (k * n**2)
    sizes = torch.bincount(labels, minlength=k).double()
    if max(float(sizes.square().sum()), 256.0 * n) * x.shape[1] <= _EXACT_WORK:  # small strata are summed together
        return Evaluation(stratified_variance(x, labels, kernel=kernel), 0.0, uniform, uniform_stderr)
    inside, error = _estimated_objective(problem, labels, k, x, kernel, generator, objective)
    return Evaluation(inside / n**2, error / n**2, uniform, uniform_stderr)


def uniform_evaluation(
    x: Tensor, k: int, *, kernel: Kernel, generator: torch.Generator, probabilities: Tensor | None = None
) -> tuple[float, float]:
    """Variance of k independent draws from the rows of ``x`` (n, d), and its standard error.

    Uniform draws, or with ``probabilities`` p (n,) that sum to 1: (Σ_i p_i κ_ii - Σ_ij p_i p_j κ_ij) / k.
    """
    n, d = x.shape
    if probabilities is not None:
        p = probabilities.double()
        if float(n) * n * d <= _EXACT_WORK:
            spread = float(p @ kernel.diag(x).double())
            spread -= sum(float(p[rows] @ (block.double() @ p)) for rows, block in kernel.blocks(x))
            return max(0.0, spread) / k, 0.0
        i, j = torch.multinomial(p, 2 * _PAIRS, replacement=True, generator=generator).view(2, -1)
        half = (0.5 * (kernel.diag(x[i]) + kernel.diag(x[j])) - kernel.paired(x[i], x[j])).double()
        return float(half.mean()) / k, float(half.std()) / (k * _PAIRS**0.5)
    if float(n) * n * d <= _EXACT_WORK:
        return uniform_variance(x, k, kernel=kernel), 0.0
    everything = torch.zeros(n, dtype=torch.int64, device=x.device)
    total, error = _estimated_objective(None, everything, 1, x, kernel, generator)
    return total / (k * n**2), error / (k * n**2)


def _estimated_objective(
    problem: LowRankProblem | None,
    labels: Tensor,
    k: int,
    x: Tensor,
    kernel: Kernel,
    generator: torch.Generator,
    known: float | None = None,
) -> tuple[float, float]:
    """J(S) and its standard error: the low-rank value, if there is one, and what it misses on random pairs."""
    sizes = torch.bincount(labels, minlength=k).double()
    pairs = float((sizes * (sizes - 1)).sum()) / 2
    missed, error = mean_missed(problem, labels, k, x, kernel, generator)
    if known is None:
        known = 0.0 if problem is None else problem.objective(labels, k)
    return max(0.0, known + pairs * missed), pairs * error


def mean_missed(
    problem: LowRankProblem | None, labels: Tensor, k: int, x: Tensor, kernel: Kernel, generator: torch.Generator
) -> tuple[float, float]:
    """Mean and standard error of d_ij, minus its low-rank value, over random pairs within strata."""
    sizes = torch.bincount(labels, minlength=k)
    pairs = (sizes * (sizes - 1)).double()
    if float(pairs.sum()) == 0.0:
        return 0.0, 0.0
    order = torch.arange(len(labels), device=labels.device) if k == 1 else labels.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    count = _PAIRS if problem is None else _PAIRS_MISSED
    stratum = torch.multinomial(pairs, count, replacement=True, generator=generator)
    size = sizes[stratum]

    def below(limit: Tensor) -> Tensor:
        draw = torch.rand(count, dtype=torch.float64, generator=generator, device=x.device)
        return (draw * limit).long().clamp_max_(limit - 1)

    first, second = below(size), below(size - 1)
    second = second + (second >= first)  # any member but the first
    i, j = order[starts[stratum] + first], order[starts[stratum] + second]
    # index_select: an order of magnitude faster here than x[i]
    a, b = x.index_select(0, i), x.index_select(0, j)
    missed = kernel.diag(a) + kernel.diag(b) - 2.0 * kernel.paired(a, b)
    if problem is not None:
        apart = (problem.features.index_select(0, i) - problem.features.index_select(0, j)).square().sum(1)
        missed = missed - (apart + problem.residual[i] + problem.residual[j])
    return float(missed.double().mean()), float(missed.double().std()) / count**0.5
