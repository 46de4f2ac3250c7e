"""What runs of `follow_training` show, in numbers and words (the paper's "Effect of T")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from vardass.figures.aging import Aging, Trace
from vardass.figures.base import Claim

__all__ = ["Cell", "Summary", "claims", "sentences", "summarise"]

KEPT = 0.95
"""A schedule that keeps this share of the variance reduction does negligible harm."""


@dataclass(frozen=True)
class Cell:
    """One way to refresh, over all runs.

    Attributes
    ----------
    relative : float
        Mean of Var(μ̂) over the probed steps, % of uniform draws.
    refreshes : float
        Mean number in a run.
    rise : float
        Var(μ̂) just before a refresh over that just after the one before it, geometric mean over intervals.
    excess : float
        Var(μ̂) just before a refresh over that of strata made anew every few steps (the smallest T), likewise.
    early, late : float
        ``excess`` of the intervals that begin in the first and in the second half of the run.
    share : float
        Share of refreshes in the time of a run, %.
    """

    relative: float
    refreshes: float
    rise: float
    excess: float
    early: float
    late: float
    share: float


@dataclass(frozen=True)
class Summary:
    """All ways over all runs.

    Attributes
    ----------
    cells : dict of str to Cell
        By name of the way.
    fixed, usual, others
        Names: of the paper's strata with fixed T, the smallest first; the usual one of these; all others.
    runs : int
        Number of runs.
    uniform_growth : float
        Var(μ̂) of uniform draws at the end over that at the beginning.
    noise : float
        Relative standard deviation of Var(μ̂) between solutions that the solver finds for much the same features.
    """

    cells: dict[str, Cell]
    fixed: tuple[str, ...]
    usual: str
    others: tuple[str, ...]
    runs: int
    uniform_growth: float
    noise: float


def summarise(runs: Sequence[Aging], periods: Sequence[int], usual: int) -> Summary:
    """Numbers of each way over all runs; the excess is over the first of ``periods``."""
    fixed = tuple(f"T = {period}" for period in periods)
    names = tuple(runs[0].traces)
    growth = _geometric([run.uniform[-1] / run.uniform[0] for run in runs])
    cells = {name: _cell(runs, name, fixed[0]) for name in names}
    others = tuple(name for name in names if name not in fixed)
    return Summary(cells, fixed, f"T = {usual}", others, len(runs), growth, _noise(runs, fixed[0]))


def _noise(runs: Sequence[Aging], freshest: str) -> float:
    """From second differences between strata of the smallest T that follow each other, which leave out trends."""
    changes = []
    for run in runs:
        trace = run.traces[freshest]
        known = zip(run.steps, trace.variances, run.uniform, strict=True)
        new = [math.log(variance / uniform) for step, variance, uniform in known if step in trace.refreshes]
        changes += [abs(after - 2.0 * now + before) for before, now, after in zip(new, new[1:], new[2:], strict=False)]
    return median(changes) / (0.6745 * math.sqrt(6.0))


def _cell(runs: Sequence[Aging], name: str, freshest: str) -> Cell:
    traces = [run.traces[name] for run in runs]
    relative = [
        sum(v / u for v, u in zip(trace.variances, run.uniform, strict=True)) / len(run.steps)
        for run, trace in zip(runs, traces, strict=True)
    ]
    ends = [end for run in runs for end in intervals(run.steps, run.traces[name], run.traces[freshest])]
    middle = runs[0].steps[-1] / 2
    early = [end.excess for end in ends if end.start < middle]
    late = [end.excess for end in ends if end.start >= middle]
    refreshes = sum(len(trace.refreshes) for trace in traces) / len(runs)
    return Cell(
        relative=100.0 * sum(relative) / len(runs),
        refreshes=refreshes,
        rise=_geometric([end.rise for end in ends]),
        excess=_geometric([end.excess for end in ends]),
        early=_geometric(early),
        late=_geometric(late),
        share=100.0 * sum(_share(run, name) for run in runs) / len(runs),
    )


@dataclass(frozen=True)
class Interval:
    """From one refresh to the last probe before the next: how much worse the strata became."""

    start: int
    rise: float
    excess: float


def intervals(steps: Sequence[int], trace: Trace, fresh: Trace) -> list[Interval]:
    """Intervals between refreshes with at least two probes, the last one to the end of the run."""
    found = []
    for start, stop in zip(trace.refreshes, [*trace.refreshes[1:], steps[-1] + 1], strict=True):
        inside = [place for place, step in enumerate(steps) if start <= step < stop]
        if len(inside) > 1:
            first, last = inside[0], inside[-1]
            rise = trace.variances[last] / trace.variances[first]
            found.append(Interval(start, rise, trace.variances[last] / fresh.variances[last]))
    return found


def _share(run: Aging, name: str) -> float:
    """Share of refreshes in the time; both domains are refreshed, as the run itself does."""
    trace = run.traces[name]
    each = run.seconds["features"] + run.seconds["solver"]
    if trace.maker != "dynamic-kmeans":  # not what the run itself trains with: its own seconds, for one domain
        each = run.seconds["features"] + 2.0 * trace.seconds / len(trace.refreshes)
    spent = len(trace.refreshes) * each
    return spent / (spent + run.seconds["training"])


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _percent(ratio: float) -> str:
    return f"{100.0 * (ratio - 1.0):+.1f} %".replace("-0.0", "+0.0")


def sentences(summary: Summary, runs: Sequence[Aging], *, lr: float, every: int) -> tuple[str, ...]:
    """What the figure shows, with its numbers."""
    cells, fixed = summary.cells, summary.fixed
    usual = cells[summary.usual]
    steps = runs[0].steps[-1] + every
    shown = {name: f"{cell.refreshes:.3g} refreshes, {cell.share:.0f} % of the time" for name, cell in cells.items()}
    return (
        f"A small network learns the watch task left-A->right-B with MMD, k = 32 and a learning rate of {lr:g}: "
        f"{summary.runs} run{'s' if summary.runs > 1 else ''} of {steps:,} steps, trained with the paper's strata and "
        f"T = 100. All curves are watched on the features of these same runs, every {every} steps: the variance of "
        "the present strata on the present features of the source domain, exact (ordered: measured on 128 planned "
        "batches).",
        f"The variance of uniform draws grows {summary.uniform_growth:.2f} times as the features spread. Two "
        f"solutions of the paper's solver for much the same features differ by {100.0 * summary.noise:.1f} % "
        "(standard deviation).",
        f"Mean variance over the run, relative to uniform draws: {_list(summary, fixed, 'relative')}.",
        f"From one refresh to just before the next the variance changes by {_list(summary, fixed, 'rise')}; just "
        f"before a refresh it differs from that of strata made anew every {fixed[0].removeprefix('T = ')} steps by "
        f"{_list(summary, fixed[1:], 'excess')}.",
        "Cost on one core, refreshes of both domains against the steps of a small network: "
        + "; ".join(f"{name}: {shown[name]}" for name in fixed)
        + ".",
        f"Next to the paper's strata at {summary.usual} ({usual.relative:.1f} %): "
        + "; ".join(f"{name}: {cells[name].relative:.1f} %, {shown[name]}" for name in summary.others)
        + ".",
        _on_variance(runs[0], fixed[0]),
    )


def _on_variance(run: Aging, freshest: str) -> str:
    """What the policy that waits for a rise of the variance relative to uniform saw before its second refresh."""
    trace = run.traces["on variance"]
    second = trace.refreshes[1] if len(trace.refreshes) > 1 else run.steps[-1] + 1
    last = max(place for place, step in enumerate(run.steps) if step < second)
    first, then = (100.0 * trace.variances[place] / run.uniform[place] for place in (0, last))
    fresh = 100.0 * run.traces[freshest].variances[last] / run.uniform[last]
    return (
        f"The policy that waits for a rise of the variance relative to uniform kept its first strata for "
        f"{run.steps[last]:,} steps in the first run: what it watches went from {first:.1f} to {then:.1f} %, when new "
        f"strata would have had {fresh:.1f} %."
    )


def _list(summary: Summary, names: Sequence[str], field: str) -> str:
    values = [getattr(summary.cells[name], field) for name in names]
    texts = [f"{value:.2f} %" if field == "relative" else _percent(value) for value in values]
    return ", ".join(f"{text} ({name})" for text, name in zip(texts, names, strict=True))


def claims(summary: Summary) -> tuple[Claim, ...]:
    """The paper's statements on the effect of T, and whether they held."""
    cells, fixed = summary.cells, summary.fixed
    later = [cells[name] for name in fixed[1:]]
    usual, growing = cells[summary.usual], cells["growing T"]
    kept = (100.0 - growing.relative) / (100.0 - usual.relative)
    # two standard errors of a mean over as many solutions of the solver as the rarer of the two has refreshes
    slack = [2.0 * summary.noise / math.sqrt(cell.refreshes * summary.runs) for cell in later]
    ratios = [b.relative / a.relative for a, b in pairwise([cells[name] for name in fixed])]
    over_all = later[-1].relative / cells[fixed[0]].relative
    return (
        Claim(
            "the less frequently the strata are updated, the greater the estimator variance",
            all(ratio > 1.0 - s for ratio, s in zip(ratios, slack, strict=True)) and over_all > 1.0 + slack[-1],
            f"mean over the run, relative to uniform, {_list(summary, fixed, 'relative')}; allowing a longer T to "
            f"be lower by {100.0 * slack[0]:.2f} to {100.0 * slack[-1]:.2f} % of these, two standard errors of the "
            "solver's randomness, and asking the longest to be higher than the shortest by more than that",
        ),
        Claim(
            "strata become worse over time, and so the estimator variance increases until they are updated",
            all(cell.rise > 1.0 for cell in later) and later[-1].excess > 1.0 + slack[-1],
            f"from refresh to refresh {_list(summary, fixed[1:], 'rise')}, of which due to the age of the strata "
            f"{_list(summary, fixed[1:], 'excess')}",
        ),
        Claim(
            "this effect is strongest towards the start of training",
            all(cell.early > cell.late for cell in later),
            "excess over fresh strata just before a refresh, first half and second half of the run, "
            + ", ".join(
                f"{_percent(cell.early)} and {_percent(cell.late)} ({name})"
                for cell, name in zip(later, fixed[1:], strict=True)
            ),
        ),
        Claim(
            "an increasing schedule for T could save computation with negligible detriment",
            growing.refreshes < usual.refreshes and kept >= KEPT,
            f"the growing schedule keeps {100.0 * kept:.1f} % of the reduction of {summary.usual} with "
            f"{growing.refreshes:.0f} refreshes instead of {usual.refreshes:.0f}",
        ),
    )
