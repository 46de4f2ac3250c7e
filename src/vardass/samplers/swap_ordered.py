"""ORDERED of the paper's follow-up: strata of both domains, in an order that gives each batch the whole's discrepancy.

Napoli & White, "Order Matters: Improving Domain Adaptation by Reordering Data" (arXiv 2605.05084), a baseline. Only
this much of it is known here: strata with a minimum size in both domains; then greedy swaps within strata, over the
next M batches, that bring each batch's discrepancy, one number for both domains, to that of all data. The rest was
ours to decide, and is said in `SwapOrderedBatchSampler`. `OrderedBatchSampler` is another thing: it brings each batch's
mean embedding to that of its domain, one domain at a time.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from vardass.kernels import Kernel, KernelLike
from vardass.samplers.base import Chunk, StreamOptions, derive_seed
from vardass.samplers.plan import PLAN_LANDMARKS, cycle_table, row_errors
from vardass.samplers.two_domains import TwoDomainSampler
from vardass.solvers import SOLVERS, stratify
from vardass.strata import Strata
from vardass.validate import check_count, choose

__all__ = ["SwapOrderedBatchSampler", "match_discrepancies"]


class SwapOrderedBatchSampler(TwoDomainSampler):
    """One of two samplers, of source and target, whose batches are ordered together.

    Make both with the same seed, give each the other's batch size, refresh both at the same time with the features of
    both domains, ``refresh(features, other=features_of_the_other)``, and take their batches in step. Each makes the
    same plan of both domains and hands out its own side. Within the plan every stratum is gone through in random order,
    and entries are swapped inside their columns, so each batch is unbiased whatever the swaps (see
    `vardass.samplers.plan`). Without ``other``, as for a method that draws no target, the order stays random. Uniform
    until the first `refresh`.

    The follow-up's text being unknown, these are our choices: the strata's solver is the paper's; a stratum has at
    least half of the mean size; M is 128; the discrepancy of two batches is |Σ_h w_h φ(s_h) - Σ_h v_h φ(t_h)|², with φ
    the low-rank features of the kernel, fitted to both domains together (for CORAL: second moments around the common
    mean); and a swap is made if it lowers Σ_t (D_t - D)² over the batches t of the plan, D being that of all data.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`.
    role : {"source", "target"}
        Which of the two it is.
    other_batch_size : int, optional
        Of the other sampler; by default the same.
    kernel : Kernel, name or callable
        The kernel of the loss.
    solver : str
        See `vardass.solvers`.
    min_size : int, optional
        Least samples of a stratum in both domains; by default half of the mean size of each.
    plan_rows : int
        M, batches that are ordered together.
    plan_rank : int
        Columns of the kernel features that the swaps look at.
    swap_rounds : int
        Most pairings of batches; 0 leaves the order random.

    Attributes
    ----------
    strata : Strata or None
        Its own, of the last refresh.

    Examples
    --------
    >>> z = [torch.randn(60, 3, generator=torch.Generator().manual_seed(i)) + i for i in (0, 1)]
    >>> pair = [SwapOrderedBatchSampler(60, 8, role=role, seed=5) for role in ("source", "target")]
    >>> pair[0].refresh(z[0], other=z[1])
    >>> pair[1].refresh(z[1], other=z[0])
    >>> [len(batch) for batch in next(zip(*pair))]
    [8, 8]
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        role: str = "source",
        other_batch_size: int | None = None,
        kernel: KernelLike = "mmd",
        solver: str = "dynamic-kmeans",
        min_size: int | None = None,
        plan_rows: int = 128,
        plan_rank: int = PLAN_LANDMARKS,
        swap_rounds: int = 16,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(
            n,
            batch_size,
            role=role,
            other_batch_size=other_batch_size,
            kernel=kernel,
            plan_rows=plan_rows,
            plan_rank=plan_rank,
            swap_rounds=swap_rounds,
            **options,
        )
        self.solver = choose(solver, "solver", SOLVERS)
        self.min_size = None if min_size is None else check_count(min_size, "min_size")
        self.strata: Strata | None = None
        self._other_strata: Strata | None = None
        self._features: Tensor | None = None  # of both domains, source first

    def _fit_alone(self, features: Tensor, kernel: Kernel) -> None:
        self.strata = self._stratify(features, self.batch_size, kernel, self._side)
        self._other_strata = self._features = None

    def _fit_together(self, features: Tensor, other: Tensor, kernel: Kernel, planned: Tensor) -> None:
        own = self._stratify(features, self.batch_size, kernel, self._side)
        self._other_strata = self._stratify(other, self.other_batch_size, kernel, 1 - self._side)
        self.strata, self._features = own, planned

    def _stratify(self, features: Tensor, k: int, kernel: KernelLike, side: int) -> Strata:
        smallest = max(1, len(features) // (2 * k)) if self.min_size is None else self.min_size
        seed = derive_seed(self.seed, self._refreshes, side)
        return stratify(features, k, kernel=kernel, solver=self.solver, min_size=smallest, seed=seed).to("cpu")

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        count = -(-self.plan_rows // self.num_replicas) * self.num_replicas
        strata, other, features = self.strata, self._other_strata, self._features
        if strata is None:
            return self._uniform_chunk(generator)
        if other is None or features is None:
            table = cycle_table(strata, count, self._own(generator))
            return Chunk(table, strata.exact_weights, strata=torch.arange(strata.k), pool=self.n)
        source, target = self._in_order(strata, other)
        table = torch.cat([cycle_table(source, count, generator), cycle_table(target, count, generator) + source.n], 1)
        weights = torch.cat([source.exact_weights, -target.exact_weights])
        goal = float((features[: source.n].mean(0) - features[source.n :].mean(0)).square().sum())
        table = table.to(features.device)
        table = match_discrepancies(table, features, weights, goal, rounds=self.swap_rounds, generator=generator)
        table = table.to("cpu")[torch.randperm(count, generator=generator)]
        rows = table[:, : source.k] if self.role == "source" else table[:, source.k :] - source.n
        return Chunk(rows, strata.exact_weights)

    def _extra_state(self) -> dict[str, Any]:
        strata = {"strata": self.strata, "other_strata": self._other_strata}
        found = {name: None if each is None else each.to_dict() for name, each in strata.items()}
        return {**found, "features": self._features}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        found = [None if state[name] is None else Strata.from_dict(state[name]) for name in ("strata", "other_strata")]
        self.strata, self._other_strata = found
        self._features = state["features"]


def match_discrepancies(
    table: Tensor, features: Tensor, weights: Tensor, goal: float, *, rounds: int, generator: torch.Generator
) -> Tensor:
    """Swap entries within columns to bring the discrepancy of every row close to ``goal``.

    D_t = |Σ_h c_h φ(P_th)|² with positive c_h for columns of the source and negative ones for the target. Each round
    pairs the rows at random and goes over the columns in random order; a pair swaps its entries if that lowers
    (D_a - goal)² + (D_b - goal)².

    Parameters
    ----------
    table : Tensor of shape (T, k)
        Rows of sample indices.
    features : Tensor of shape (n, r)
        Kernel features of the samples of both domains.
    weights : Tensor of shape (k,)
        c_h; they sum to 0.
    goal : float
        Discrepancy of all data.
    rounds : int
        Most rounds; the search ends once none of a round's swaps helps.
    generator : torch.Generator
        On the CPU.

    Returns
    -------
    Tensor of shape (T, k)
        The same columns in another order, and Σ_t (D_t - goal)² no larger.
    """
    table = table.clone()
    count, k = table.shape
    signed = weights.to(features)
    gaps = row_errors(table, features, signed)
    for _ in range(rounds if count > 1 else 0):
        order = torch.randperm(count, generator=generator).to(table.device)
        a, b = order[: count // 2], order[count // 2 : count // 2 * 2]
        swapped = torch.zeros((), dtype=torch.int64, device=table.device)
        gap_a, gap_b = gaps[a], gaps[b]
        for column in torch.randperm(k, generator=generator).tolist():
            entry_a, entry_b = table[a, column], table[b, column]
            change = signed[column] * (features[entry_b] - features[entry_a])
            new_a, new_b = gap_a + change, gap_b - change
            better = _misses(new_a, new_b, goal) < _misses(gap_a, gap_b, goal)
            gap_a, gap_b = torch.where(better[:, None], new_a, gap_a), torch.where(better[:, None], new_b, gap_b)
            table[a, column] = torch.where(better, entry_b, entry_a)
            table[b, column] = torch.where(better, entry_a, entry_b)
            swapped += better.sum()
        gaps[a], gaps[b] = gap_a, gap_b
        if int(swapped) == 0:
            break
    return table


def _misses(a: Tensor, b: Tensor, goal: float) -> Tensor:
    """(|a|² - goal)² + (|b|² - goal)² of each pair of rows (p, r): (p,)."""
    return (a.square().sum(1) - goal).square() + (b.square().sum(1) - goal).square()
