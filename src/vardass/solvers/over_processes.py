"""Strata of features that lie on several processes, and stay there.

A uniform sample of the rows goes to the first process, which turns its strata into a rule (`rule.py`); each process
applies the rule to its own rows. The rule depends on the sample alone, and a label on the row and the rule, so the
number of processes makes no difference. The messages, for m rows of the sample, d columns, rank r and k strata:

    every process to all      number, width and type of its rows
    every process to the first  its rows of the sample: m d numbers together, and 16,384 d for the variance
    the first to all          the rule, 2rd + 2r² + kr numbers, and m labels
    every process to all      the labels of its rows, four bytes each, and kr + 3k sums
    the first to all          the variances

Up to m rows in all, the sample is everything: `stratify` on the first process makes the strata.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import KernelLike, as_kernel, fitted_kernel
from vardass.processes import Peers
from vardass.solvers.rule import JUDGED_ROWS, SampledRule, Totals, default_sample, draw_rows, fit_rule
from vardass.solvers.stratification import stratify
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_features, check_count, check_seed, row_blocks

__all__ = ["stratify_over_processes"]

_BLOCK_ROWS = 2**16  # rows that are embedded together


@torch.no_grad()
def stratify_over_processes(
    features: ArrayLike,
    k: int,
    group: Any,
    *,
    kernel: KernelLike = "mmd",
    rank: int | None = None,
    seed: int = 0,
    sample: int | None = None,
) -> Strata:
    """Partition the rows of all processes of a ``torch.distributed`` ``group``, each of which has to call this.

    Parameters
    ----------
    features : tensor or array of shape (n_p, d)
        Those of this process, which may have none. Rows are numbered through the processes, in the order of ranks.
    k : int
        Number of strata.
    group : ProcessGroup
        Its processes.
    kernel, rank, seed
        As for `stratify`.
    sample : int, optional
        Rows that strata are found on: by default 131,072, or 512 for each stratum if that is more.

    Returns
    -------
    Strata
        Those of all rows, the same on every process.
    """
    peers, known, clock = Peers(group), as_kernel(kernel), time.perf_counter()
    x, counts = _rows_of_all(peers, features, k)
    n, first = sum(counts), sum(counts[: peers.rank])
    k, seed = check_count(k, "k", high=n), check_seed(seed)
    count = check_count(default_sample(k) if sample is None else sample, "sample", low=k)
    rows, judged_rows = draw_rows(n, count, seed, 0), draw_rows(n, JUDGED_ROWS, seed, 1)
    wanted = rows if count >= n else np.union1d(rows, judged_rows)
    mine = wanted[slice(*np.searchsorted(wanted, (first, first + len(x))))] - first
    parts = peers.to_first(x[torch.from_numpy(mine).to(x.device)])
    together = None if parts is None else torch.cat(parts)

    def of_all() -> dict[str, Any]:
        assert together is not None
        return stratify(together, k, kernel=known, rank=rank, seed=seed).to_dict()

    if count >= n:
        found = Strata.from_dict(peers.from_first(of_all)).to(x.device)
        return replace(found, info={**found.info, "processes": peers.count})

    def of_sample() -> dict[str, Any]:
        assert together is not None
        chosen = together[torch.from_numpy(np.searchsorted(wanted, rows)).to(together.device)]
        return fit_rule(chosen, rows, k, fitted_kernel(known, chosen), rank=rank, seed=seed).state()

    sampled = SampledRule.from_state(peers.from_first(of_sample), known)  # a function as kernel cannot be sent
    planned = time.perf_counter()
    totals, labels = Totals.zero(*sampled.rule.sums.shape), []
    for theirs, sums in peers.to_all(lambda: _labelled(sampled, x, first)):
        labels.append(theirs.long().to(x.device))
        totals.add_totals(Totals(**sums))
    passed = time.perf_counter()

    def judged() -> dict[str, Any]:
        assert together is not None
        some = together[torch.from_numpy(np.searchsorted(wanted, judged_rows)).to(together.device)]
        value = vars(sampled.judge(totals, some, judged_rows, seed))
        info = {"uniform_stderr": value.pop("uniform_stderr"), "processes": peers.count, "sample": count}
        info |= {"rank": totals.sums.shape[1], "seconds_sample": planned - clock, "seconds_pass": passed - planned}
        return {**value, "info": info, "kernel": repr(sampled.rule.kernel)}

    return Strata(torch.cat(labels), k, solver="min-sum", **peers.from_first(judged))


def _rows_of_all(peers: Peers, features: ArrayLike, k: int) -> tuple[Tensor, list[int]]:
    """The rows of this process, checked, and how many each has; what is wrong on one is said on all."""

    def mine() -> tuple[int, int, str, int]:
        return len(x := _checked(features)), x.shape[1], str(x.dtype), k

    found = peers.to_all(mine)
    for name, place in (("columns", 1), ("the type", 2), ("k", 3)):
        kinds = [entry[place] for entry in found]
        if len(set(kinds)) > 1:
            other = next(number for number, kind in enumerate(kinds) if kind != kinds[0])
            raise InputError(
                f"processes must agree on {name}: the first has {kinds[0]}, process {other} {kinds[other]}; "
                "compute all features by the same network"
            )
    return _checked(features), [entry[0] for entry in found]


def _checked(features: ArrayLike) -> Tensor:
    if isinstance(features, Tensor | np.ndarray) and features.ndim == 2 and len(features) == 0:
        empty = torch.as_tensor(features)
        return empty if empty.dtype == torch.float64 else empty.float()
    return as_features(features)


def _labelled(sampled: SampledRule, x: Tensor, first: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Labels (n_p,) as int32 and sums of the rows ``x`` of a process, whose numbers begin with ``first``."""
    totals = Totals.zero(*sampled.rule.sums.shape)
    labels = torch.empty(len(x), dtype=torch.int32)
    for rows in row_blocks(len(x), _BLOCK_ROWS) if len(x) else ():
        sampled.rule.kernel.check_range(x[rows])
        problem = sampled.rule.embed(x[rows])
        numbers: NDArray[np.int64] = np.arange(first + rows.start, first + rows.start + problem.n)
        found = sampled.assign(problem, numbers)
        totals.add(problem, found)
        labels[rows] = found.int().cpu()
    return labels, vars(totals)
