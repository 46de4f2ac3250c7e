"""Strata of a sample, turned into a rule that gives any row its stratum.

A row x adds Σ_{z in S_h} |φ(x) - φ(z)|² = m_h |φ(x) - μ|² + D_h - 2 <φ(x) - μ, F_h> to stratum h of the sample, with
m_h its size, D_h = Σ |φ(z) - μ|² and F_h = Σ (φ(z) - μ). By the least of these, all new rows that are alike would go
to the one stratum that happens to be small, as sizes do not change. So each stratum has a price β_h instead of D_h,
such that strata have the same shares of rows as in the sample. Prices are the dual variables of the transport of rows
to strata of given sizes, found by Sinkhorn's iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.kernels import Kernel, LinearKernel
from vardass.lowrank import FeatureMap, fit_feature_map
from vardass.solvers.stratification import default_rank, stratify
from vardass.validate import as_generator, row_blocks
from vardass.variance import BatchVariances
from vardass.view import KernelView, LowRankView

__all__ = ["JUDGED_ROWS", "Rule", "SampledRule", "Totals", "default_sample", "draw_rows", "fit_rule"]

JUDGED_ROWS = 2**14
"""Rows on which it is measured what low-rank features miss of distances."""

_BLOCK_ROWS = 4096  # rows whose scores are computed together: they stay in cache
_PRICED_ROWS = 2**16  # rows of the sample that prices are found on
_ROUNDS, _ITERATIONS = 2, 12  # of prices; the smoothing is chosen anew in each round
_SMOOTHING = 0.3  # of the median gap between the best and the second stratum of a row


@dataclass(frozen=True)
class Totals:
    """Sums over rows, by stratum, from which the variance follows; those of two sets of rows can be added."""

    sizes: Tensor  # (k,)
    sums: Tensor  # (k, r): Σ φ
    spread: Tensor  # (k,): Σ |φ|² + residual
    residual: Tensor  # (k,): Σ residual

    @classmethod
    def zero(cls, k: int, rank: int) -> Totals:
        """Those of no rows, in double precision, on the CPU."""
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in ((k,), (k, rank), (k,), (k,))))

    def add(self, problem: LowRankView, labels: Tensor) -> None:
        """Count further rows."""
        k, rank = self.sums.shape
        self.sizes.add_(torch.bincount(labels, minlength=k).cpu())
        self.sums.add_(problem.features.new_zeros(k, rank).index_add_(0, labels, problem.features).cpu())
        for total, values in ((self.spread, problem.diag), (self.residual, problem.residual)):
            own = torch.zeros(k, dtype=torch.float64, device=labels.device).index_add_(0, labels, values.double())
            total.add_(own.cpu())

    def add_totals(self, other: Totals) -> None:
        """Count the rows of ``other`` too."""
        for mine, theirs in zip(vars(self).values(), vars(other).values()):
            mine.add_(theirs)

    def objective(self) -> float:
        """Σ_h |S_h| Σ_{z in S_h} |φ(z) - μ_h|², n² times the variance, by low-rank distances between rows."""
        inside = self.sizes * self.spread - self.sums.square().sum(1) - self.residual
        return max(0.0, float(inside.sum()))

    def together(self) -> Totals:
        """The same rows as one stratum."""
        return Totals(*(value.sum(0, keepdim=True) for value in vars(self).values()))


@dataclass(frozen=True)
class Rule:
    """A fixed function from rows to strata: low-rank features around a fixed centre, and what rows add to strata.

    ``shares`` (k,), ``sums`` (k, r) and ``prices`` (k,) are m_h, F_h and β_h over the size of the sample.
    """

    feature_map: FeatureMap
    shift: Tensor | None  # (d,), taken from rows first; only for the linear kernel, for the sake of rounding
    mean: Tensor  # (r,), of the features in the sample
    shares: Tensor
    sums: Tensor
    prices: Tensor

    @property
    def k(self) -> int:
        """Number of strata."""
        return len(self.prices)

    @property
    def kernel(self) -> Kernel:
        """The fitted kernel."""
        return self.feature_map.kernel

    def embed(self, x: Tensor) -> LowRankView:
        """Features of rows ``x`` (n, d), and what they miss of κ(z, z)."""
        features, residual = self.feature_map(self.shifted(x))
        return LowRankView(features.sub_(self.mean), residual)

    def shifted(self, x: Tensor) -> Tensor:
        """Rows as the kernel is to see them."""
        return x if self.shift is None else x - self.shift

    def assign(self, problem: LowRankView) -> Tensor:
        """Strata (n,) of embedded rows."""
        labels = torch.empty(problem.n, dtype=torch.int64, device=problem.features.device)
        for rows in row_blocks(problem.n, _BLOCK_ROWS):
            scores = self.scores(problem, rows).add_(self.prices)
            # on a CPU numpy's argmin is several times faster than torch's here
            labels[rows] = scores.argmin(1) if scores.is_cuda else torch.from_numpy(scores.numpy().argmin(1))
        return labels

    def scores(self, problem: LowRankView, rows: slice) -> Tensor:
        """What some rows would add to each stratum, without its price: (b, k)."""
        return (problem.features[rows] @ (-2.0 * self.sums).T).addr_(problem.diag[rows], self.shares)


@dataclass(frozen=True)
class SampledRule:
    """A rule and the sample that it was found on, whose rows keep the strata that the solver gave them."""

    rule: Rule  # for all other rows
    rows: NDArray[np.int64]  # (m,), numbers of the sample's rows among all, rising
    labels: Tensor  # (m,), their strata

    def state(self) -> dict[str, Any]:
        """Arrays, tensors and numbers that `from_state` makes the same of, for files and messages."""
        rule = self.rule
        return {
            "kernel": rule.kernel.state(),
            "landmarks": rule.feature_map.landmarks,
            "transform": rule.feature_map.transform,
            **{name: getattr(rule, name) for name in ("shift", "mean", "shares", "sums", "prices")},
            "rows": self.rows,
            "labels": self.labels,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], kernel: Kernel) -> SampledRule:
        """What `state` was taken of; ``kernel`` need not be fitted. Missing tensors are None."""
        feature_map = FeatureMap(kernel.with_state(state["kernel"]), state.get("landmarks"), state["transform"])
        rule = Rule(feature_map, state.get("shift"), *(state[name] for name in ("mean", "shares", "sums", "prices")))
        return cls(rule, state["rows"], state["labels"])

    def assign(self, problem: LowRankView, numbers: NDArray[np.int64]) -> Tensor:
        """Strata (b,) of embedded rows with the given numbers (b,)."""
        found = self.rule.assign(problem)
        place = np.searchsorted(self.rows, numbers).clip(max=len(self.rows) - 1)
        kept = torch.from_numpy(self.rows[place] == numbers).to(found.device)
        return torch.where(kept, self.labels[torch.from_numpy(place).to(self.labels.device)], found)

    def judge(self, totals: Totals, x: Tensor, numbers: NDArray[np.int64], seed: int) -> BatchVariances:
        """Variances: low-rank distances between all rows, and what they miss on random pairs of some rows ``x``.

        ``x`` (b, d), with their ``numbers`` (b,), are a sample that is independent of the rule's.
        """
        rule, n = self.rule, float(totals.sizes.sum())
        problem = rule.embed(x)
        labels = self.assign(problem, numbers)
        generator = as_generator(seed, x.device)
        truth = KernelView(rule.shifted(x), rule.kernel)

        def judged(sums: Totals, groups: Tensor, draws: int) -> tuple[float, float]:
            pairs = float((sums.sizes * (sums.sizes - 1)).sum()) / 2
            correction, error = truth.mean_correction(problem, groups, len(sums.sizes), generator)
            return max(0.0, sums.objective() + pairs * correction) / (draws * n**2), pairs * error / (draws * n**2)

        return BatchVariances(*judged(totals, labels, 1), *judged(totals.together(), torch.zeros_like(labels), rule.k))


def default_sample(k: int) -> int:
    """Rows that strata are found on: 131,072, or 512 for each stratum if that is more."""
    return max(2**17, 512 * k)


def draw_rows(n: int, count: int, seed: int, stream: int) -> NDArray[np.int64]:
    """``count`` distinct rows of n, each with the same probability, rising; other streams are independent."""
    if count >= n:
        return np.arange(n)
    numbers = np.random.default_rng([seed % 2**64, stream])
    return np.sort(numbers.choice(n, count, replace=False, shuffle=False))


def fit_rule(x: Tensor, rows: NDArray[np.int64], k: int, kernel: Kernel, *, rank: int | None, seed: int) -> SampledRule:
    """Stratify a sample ``x`` (m, d), the given ``rows`` (m,) of all, under a fitted ``kernel``."""
    generator = as_generator(seed, x.device)
    shift = x.mean(0) if isinstance(kernel, LinearKernel) else None
    seen = x if shift is None else x - shift
    feature_map = fit_feature_map(seen, kernel, rank or default_rank(k), generator=generator)
    features, residual = feature_map(seen)
    mean = features.mean(0)
    problem = LowRankView(features.sub_(mean), residual)
    labels = stratify(seen, k, kernel=kernel, kernel_features=problem, seed=seed).labels
    totals = Totals.zero(k, features.shape[1])
    totals.add(problem, labels)
    shares, sums, start = ((value / len(x)).to(features) for value in (totals.sizes, totals.sums, totals.spread))
    unpriced = Rule(feature_map, shift, mean, shares, sums, start)
    return SampledRule(replace(unpriced, prices=_prices(unpriced, problem, generator)), rows, labels)


def _prices(rule: Rule, problem: LowRankView, generator: torch.Generator) -> Tensor:
    """Prices with which strata have the shares of the rule, on rows of the sample."""
    if problem.n > _PRICED_ROWS:
        rows = torch.randperm(problem.n, generator=generator, device=generator.device)[:_PRICED_ROWS]
        problem = LowRankView(problem.features[rows], problem.residual[rows])
    scores = [rule.scores(problem, rows) for rows in row_blocks(problem.n, _BLOCK_ROWS)]
    prices = rule.prices
    tiny = torch.finfo(prices.dtype).tiny
    for _ in range(_ROUNDS if rule.k > 1 else 0):
        best = torch.cat([(block + prices).topk(2, 1, largest=False).values for block in scores])
        # as smooth as the choice between neighbouring strata; far less would take long, far more would mix strata
        smoothing = max(_SMOOTHING * float((best[:, 1] - best[:, 0]).median()), tiny)
        for _ in range(_ITERATIONS):
            sizes = sum(torch.softmax((block + prices).div_(-smoothing), 1).sum(0) for block in scores)
            assert isinstance(sizes, Tensor)
            prices = prices + smoothing * (sizes / problem.n / rule.shares).clamp_min(tiny).log()
    return prices
