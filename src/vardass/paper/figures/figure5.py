"""Figure 5: variance of the estimator through training, for different times T between refreshes.

The paper follows one run on Humpbacks with k = 32 and a learning rate of 1e-4. Here it is a small network on the
smart-watch data that comes with the package, with the same k and learning rate. The features of all source samples are
recorded every few steps of one run, and every way to refresh is followed on them afterwards, so that ways differ in
nothing else. The variance of the present strata on the present features is exact, between refreshes too.

In training the features spread, and the variance of every way to draw grows with them. How much strata have aged is
therefore their variance next to that of new strata on the same features, and policies are compared with refreshes of
the same number at equal distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, geometric_mean, median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from torch import Tensor

from vardass.kernels import Kernel, as_kernel
from vardass.paper.figures import Claim, FigureResult, Value
from vardass.paper.figures.figure4 import small_trainer, source_features
from vardass.plots import BLACK, BLUE, GREY, INK, ORANGE, SKY, VERMILION, style_axes
from vardass.refresh import DriftRefresh, GrowingRefresh, RefreshEvery, RefreshPolicy
from vardass.samplers import OrderedBatchSampler
from vardass.samplers.base import derive_seed
from vardass.solvers import stratify
from vardass.validate import Progress
from vardass.variance import measure_strata
from vardass.view import ExactView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure5"]

BATCH_SIZE = 32
LOST = 0.05
"""A schedule does negligible harm where it loses no more than this share of what refreshing gains."""
NEVER = "never again"
POLICIES = ("growing T", "on drift")

_EVERY = 5  # steps between recorded features
_PLAN_RANK = 64  # as many columns as the features of the small network have
_PLANNED = 128  # batches that stand for a plan: one table of it
# from dark to light as T grows
_SHADES = ("#3B0F52", "#3F4C8A", "#21828E", "#4DB56A", "#C9BC1F")
_OURS = {
    "min-sum": (BLUE, "s"),
    "ordered": (VERMILION, "D"),
    "growing T": (ORANGE, "^"),
    "on drift": (SKY, "v"),
    NEVER: (GREY, "o"),
}


def figure5(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Follow Var(μ̂) of the source domain through training, for fixed T, growing T and T by observation."""
    steps, runs = (60, 1) if quick else (2000, 2)
    periods = (10, 20, 40) if quick else (10, 50, 100, 500, 1000)
    usual, lr = (20, 1e-3) if quick else (100, 1e-4)
    found: list[Aging] = []
    for run in range(runs):

        def report(share: float, message: str, run: int = run) -> None:
            progress((run + share) / runs, f"run {run + 1} of {runs}, {message}")

        record = record_training(seed + run, steps=steps, lr=lr, progress=report)
        aging = follow(_ways(periods, usual), record, progress=report)
        even = follow(evenly_spaced(aging), record)
        found.append(Aging(aging.steps, aging.uniform, {**aging.traces, **even.traces}))
    summary = summarise(found, periods, usual)
    return FigureResult(
        number=5,
        title="variance of the estimator through training, by time between refreshes",
        caption=(
            f"A small network learns the watch task left-A->right-B with MMD, k = {BATCH_SIZE} and a learning rate of "
            f"{lr:g}, {steps:,} steps with the paper's strata and T = 100 (runs: {runs}). All curves are of the same "
            "runs: the variance of the present strata on the present features of the source domain, every "
            f"{_EVERY} steps (ordered: measured on {_PLANNED} planned batches). Aged by: variance above that of "
            f"strata made anew every {periods[0]} steps, on the same features. Each policy stands next to as many "
            "refreshes at equal distances."
        ),
        columns=("seed", "step", "batches", "variance", "relative_to_uniform", "relative_to_fresh", "refreshes"),
        rows=[(seed + run, *row) for run, aging in enumerate(found) for row in _rows(aging, f"T = {periods[0]}")],
        claims=claims(summary),
        draw=lambda figure: _draw(figure, found, summary),
        size=(13.0, 5.4),
        settings={"seed": seed, "quick": quick, "steps": steps, "runs": runs, "k": 32, "lr": lr, "periods": periods},
    )


class Way(NamedTuple):
    """A way to draw, and when it is refreshed."""

    name: str
    policy: Callable[[], RefreshPolicy]
    maker: str = "dynamic-kmeans"  # solver of the strata, or "ordered"


def _ways(periods: Sequence[int], usual: int) -> list[Way]:
    """The paper's strata at each period; then others, next to the paper's at the ``usual`` one."""
    fixed = [Way(f"T = {period}", partial(RefreshEvery, period)) for period in periods]
    return [
        *fixed,
        Way(f"min-sum, T = {usual}", partial(RefreshEvery, usual), "min-sum"),
        Way(f"ordered, T = {usual}", partial(RefreshEvery, usual), "ordered"),
        Way("growing T", GrowingRefresh),
        # told the drift of all samples, not of a batch: there is no noise for a longer window to smooth
        Way("on drift", partial(DriftRefresh, window=1)),
        Way(NEVER, partial(_AtSteps, [0])),
    ]


class _AtSteps(RefreshPolicy):
    """Refresh at given steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps

    def due(self, step: int) -> bool:
        """Whether ``step`` is one of them."""
        return step in self.steps


def evenly_spaced(aging: Aging) -> list[Way]:
    """For each policy as many refreshes as it made in this run, at recorded steps in equal distances."""
    ways = []
    for name in POLICIES:
        count, recorded = len(aging.traces[name].refreshes), aging.steps
        steps = [recorded[i * len(recorded) // count] for i in range(count)]
        ways.append(Way(_evenly(name), partial(_AtSteps, steps)))
    return ways


def _evenly(name: str) -> str:
    return f"{name}, evenly"


@dataclass(frozen=True)
class FeatureHistory:
    """Features of all samples of one domain through a training run."""

    steps: list[int]
    features: list[Tensor]
    kernel: Kernel
    k: int
    seed: int
    _made: dict[tuple[str, int], tuple[Tensor, ...]] = field(default_factory=dict, repr=False)

    def make(self, maker: str, place: int) -> tuple[Tensor, ...]:
        """Strata (labels,) or a plan (rows, weights) from the features at ``place``, the same for all who ask."""
        if (maker, place) not in self._made:
            z, seed = self.features[place], derive_seed(self.seed, self.steps[place])
            kernel = self.kernel.fit(z)
            if maker == "ordered":
                sampler = OrderedBatchSampler(len(z), self.k, kernel=kernel, plan_rank=_PLAN_RANK, seed=seed)
                sampler.refresh(z)
                chunk = sampler.sample_batches(_PLANNED)
                assert chunk.weights is not None
                self._made[maker, place] = chunk.rows, chunk.weights
            else:
                self._made[maker, place] = (stratify(z, self.k, kernel=kernel, solver=maker, seed=seed).labels,)
        return self._made[maker, place]


def record_training(seed: int, *, steps: int, lr: float, progress: Progress) -> FeatureHistory:
    """Train the small network with MMD and the paper's strata (T = 100), and record its source domain."""
    trainer = small_trainer("left-A->right-B", seed=seed, steps=steps, lr=lr, sampler="vardass", period=100)
    kernel = as_kernel(trainer.algorithm.kernel)
    record = FeatureHistory([0], [source_features(trainer)], kernel, trainer.config.batch_size, seed)

    def after_step(share: float, message: str) -> None:
        progress(0.5 * share, f"step {trainer.step} of {steps}")
        if trainer.step < steps and trainer.step % _EVERY == 0:
            record.steps.append(trainer.step)
            record.features.append(source_features(trainer))

    trainer.run(progress=after_step)
    return record


@dataclass
class Trace:
    """What became of one way in one run: Var(μ̂) at each recorded step, and the steps of the refreshes."""

    variances: list[float] = field(default_factory=list)
    refreshes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Aging:
    """One training run."""

    steps: list[int]
    uniform: list[float]
    traces: dict[str, Trace]


def follow(ways: Sequence[Way], record: FeatureHistory, *, progress: Progress | None = None) -> Aging:
    """Var(μ̂) of all ``ways`` through a recorded run.

    A refresh that is due between two recorded steps is made at the second. A policy that goes by drift is told the
    exact one, and asked, at recorded steps only.
    """
    followers = [_Follower(way, record) for way in ways]
    uniform = []
    for place, (step, z) in enumerate(zip(record.steps, record.features, strict=True)):
        if progress is not None:
            progress(0.5 + 0.5 * place / len(record.steps), f"strata at step {step}")
        kernel = record.kernel.fit(z)
        view = ExactView(kernel.matrix(z).double())
        uniform.append(view.uniform_variance(record.k))
        for follower in followers:
            follower.at(place, view, kernel)
    return Aging(record.steps, uniform, {follower.way.name: follower.trace for follower in followers})


class _Follower:
    """Strata or plan of one way, as old as its policy lets them get."""

    def __init__(self, way: Way, record: FeatureHistory) -> None:
        self.way, self.record = way, record
        self.policy = way.policy()
        self.trace = Trace()
        self.made: tuple[Tensor, ...] | None = None
        self.refreshed = -1  # place of the last refresh
        self.scale = 1.0

    def at(self, place: int, view: ExactView, kernel: Kernel) -> None:
        """Refresh if it is due, and measure."""
        step, policy = self.record.steps[place], self.policy
        if policy.observes_drift and self.made is not None:
            z, old = self.record.features[place], self.record.features[self.refreshed]
            # the mean over all samples is what the drift of a weighted batch estimates
            drift = float(kernel.paired_distances(z, old).mean())
            policy.observe(drift, scale=self.scale)
        before = self.record.steps[place - 1] if place > 0 and not policy.observes_drift else step - 1
        if any(policy.due(due) for due in range(before + 1, step + 1)):
            self._refresh(place, kernel)
        self.trace.variances.append(self._variance(view))

    def _refresh(self, place: int, kernel: Kernel) -> None:
        self.made, self.refreshed = self.record.make(self.way.maker, place), place
        self.trace.refreshes.append(self.record.steps[place])
        if self.policy.observes_drift:
            self.scale = measure_strata(self.record.features[place], self.made[0], kernel=kernel).within

    def _variance(self, view: ExactView) -> float:
        assert self.made is not None  # all policies here start at step 0
        planned = len(self.made) == 2
        return float(view.batch_errors(*self.made).mean()) if planned else view.stratified_variance(*self.made)


def _rows(aging: Aging, freshest: str) -> list[tuple[Value, ...]]:
    rows: list[tuple[Value, ...]] = []
    for place, (step, uniform) in enumerate(zip(aging.steps, aging.uniform, strict=True)):
        fresh = aging.traces[freshest].variances[place]
        rows.append((step, "uniform", uniform, 1.0, uniform / fresh, 0))
        for name, trace in aging.traces.items():
            variance, refreshes = trace.variances[place], sum(refresh <= step for refresh in trace.refreshes)
            rows.append((step, name, variance, variance / uniform, variance / fresh, refreshes))
    return rows


@dataclass(frozen=True)
class AgingSummary:
    """All ways over all runs.

    ``ways`` has a row for each. ``refreshes`` is their mean number in a run; ``aged`` the geometric mean over recorded
    steps of Var(μ̂) over that of strata made anew every few steps (the smallest T) on the same features; ``before`` the
    same just before a refresh, over the intervals between refreshes, of which those of ``early`` and ``late`` begin in
    the first and in the second half of the run.
    """

    ways: pd.DataFrame
    fixed: tuple[str, ...]
    usual: str
    runs: int
    noise: float

    def lost(self, name: str) -> float:
        """Share of what refreshing gains, from strata that are never made again to fresh ones, that a way loses."""
        gained = self.ways.aged[NEVER] - 1.0
        return float((self.ways.aged[name] - 1.0) / gained) if gained > 0.0 else math.nan


def summarise(runs: Sequence[Aging], periods: Sequence[int], usual: int) -> AgingSummary:
    """Numbers of each way over all runs; age is measured against the first of ``periods``."""
    fixed = tuple(f"T = {period}" for period in periods)
    ways = pd.DataFrame({name: _summarise_way(runs, name, fixed[0]) for name in runs[0].traces}).T
    return AgingSummary(ways, fixed, f"T = {usual}", len(runs), solver_noise(runs, fixed[0]))


def solver_noise(runs: Sequence[Aging], freshest: str) -> float:
    """From second differences between strata of the smallest T that follow each other, which leave out trends."""
    changes = []
    for run in runs:
        trace = run.traces[freshest]
        known = zip(run.steps, trace.variances, run.uniform, strict=True)
        new = [math.log(variance / uniform) for step, variance, uniform in known if step in trace.refreshes]
        changes += [abs(after - 2.0 * now + before) for before, now, after in zip(new, new[1:], new[2:], strict=False)]
    return median(changes) / (0.6745 * math.sqrt(6.0))


def _summarise_way(runs: Sequence[Aging], name: str, freshest: str) -> dict[str, float]:
    aged, ends = [], []
    for run in runs:
        trace = run.traces[name]
        ages = [v / f for v, f in zip(trace.variances, run.traces[freshest].variances, strict=True)]
        aged += ages
        ends += before_refreshes(run.steps, ages, trace.refreshes)
    middle = runs[0].steps[-1] / 2
    ratios = {
        "aged": aged,
        "before": [age for _, age in ends],
        "early": [age for start, age in ends if start < middle],
        "late": [age for start, age in ends if start >= middle],
    }
    means = {name: geometric_mean(values) if values else math.nan for name, values in ratios.items()}
    return {"refreshes": fmean(len(run.traces[name].refreshes) for run in runs), **means}


def before_refreshes(steps: Sequence[int], ages: Sequence[float], refreshes: Sequence[int]) -> list[tuple[int, float]]:
    """Start of each interval between refreshes and the age at its last recorded step, if it has more than one."""
    found = []
    for start, stop in zip(refreshes, [*refreshes[1:], steps[-1] + 1], strict=True):
        inside = [age for step, age in zip(steps, ages, strict=True) if start <= step < stop]
        if len(inside) > 1:
            found.append((start, inside[-1]))
    return found


def claims(summary: AgingSummary) -> tuple[Claim, ...]:
    """What the paper says on the effect of T and what we add, and whether it held."""
    ways, fixed = summary.ways, summary.fixed
    later = ways.loc[list(fixed[1:])]
    usual, growing = ways.loc[summary.usual], ways.loc["growing T"]
    # two standard errors of a mean over as many solutions of the solver as the way has refreshes
    slack = 2.0 * summary.noise / np.sqrt(later.refreshes * summary.runs)
    first, last = slack.iloc[0], slack.iloc[-1]
    rising = ways.aged[list(fixed)].pct_change().iloc[1:] > -slack
    lost = summary.lost("growing T") - summary.lost(summary.usual)
    paper = (
        Claim(
            "the less frequently the strata are updated, the greater the estimator variance",
            bool(rising.all() and later.aged.iloc[-1] > 1.0 + last),
            f"mean over the run above strata made anew every {fixed[0].removeprefix('T = ')} steps, "
            f"{_listed(summary, 'aged')}; a longer T may be lower by {100.0 * first:.2f} to "
            f"{100.0 * last:.2f} %, two standard errors of the solver's randomness",
        ),
        Claim(
            "strata become worse over time, and so the estimator variance increases until they are updated",
            bool((later.before > 1.0 - slack).all() and later.before.iloc[-1] > 1.0 + last),
            f"just before a refresh {_listed(summary, 'before')} above new strata on the same features",
        ),
        Claim(
            "this effect is strongest towards the start of training",
            bool((later.early > later.late).all()),
            f"the same in the first and the second half of the run, {_listed(summary, 'early', 'late')}",
        ),
        Claim(
            "an increasing schedule for T could save computation with negligible detriment, taken as at most "
            f"{100.0 * LOST:.0f} % more lost of what refreshing gains than with {summary.usual}, and less than with as "
            "many refreshes at equal distances",
            bool(
                growing.refreshes < usual.refreshes and lost <= LOST and growing.aged < ways.aged[_evenly("growing T")]
            ),
            f"{growing.refreshes:.0f} refreshes instead of {usual.refreshes:.0f}; lost "
            + ", ".join(
                f"{100.0 * summary.lost(name):.1f} % ({name})"
                for name in ("growing T", _evenly("growing T"), *fixed[1:])
            ),
        ),
    )
    even = {name: ways.aged[_evenly(name)] for name in POLICIES}
    ours = Claim(
        "each policy ages less than as many refreshes at equal distances",
        all(bool(ways.aged[name] < aged) for name, aged in even.items()),
        ", ".join(
            f"{_percent(ways.aged[name])} against {_percent(aged)} ({name}, {ways.refreshes[name]:.3g} refreshes)"
            for name, aged in even.items()
        ),
        source="ours",
    )
    return (*paper, ours)


def _listed(summary: AgingSummary, *fields: str) -> str:
    """Numbers of all T but the smallest."""
    shown = summary.ways.loc[list(summary.fixed[1:]), list(fields)]
    return ", ".join(f"{' and '.join(map(_percent, row))} ({name})" for name, *row in shown.itertuples())


def _percent(ratio: float) -> str:
    return f"{100.0 * (ratio - 1.0):+.1f} %".replace("-0.0", "+0.0")


def _draw(figure: Figure, runs: Sequence[Aging], summary: AgingSummary) -> None:
    through, aging, cost = figure.subplots(1, 3)
    steps, fixed = runs[0].steps, summary.fixed
    others = [name for name in summary.ways.index if name.startswith(("min-sum", "ordered"))]
    _plot(through, steps, [run.uniform for run in runs], "uniform", BLACK, "--")
    for name in (*reversed(fixed), *others):
        _plot(through, steps, [run.traces[name].variances for run in runs], name, _look(name, summary)[0])
    through.set_ylabel(f"Var(μ̂), source domain, k = {BATCH_SIZE}")
    through.set_title("through training", loc="left", fontsize=11, fontweight="bold")
    fresh = [run.traces[fixed[0]].variances for run in runs]
    for name in (NEVER, *reversed(fixed[1:])):
        ages = [
            [100.0 * (v / f - 1.0) for v, f in zip(run.traces[name].variances, new, strict=True)]
            for run, new in zip(runs, fresh, strict=True)
        ]
        _plot(aging, steps, ages, name, _look(name, summary)[0], ":" if name == NEVER else "-")
    aging.set_ylabel(f"aged by: % above strata with {fixed[0]}")
    aging.set_title("what is due to age", loc="left", fontsize=11, fontweight="bold")
    for axes in (through, aging):
        axes.set_xlabel("training step")
        axes.set_xlim(0, steps[-1])
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]), top=1.1 * axes.get_ylim()[1])
    through.set_ylim(bottom=0.0)
    _draw_cost(cost, summary)
    for axes, place in ((through, "lower right"), (aging, "upper left"), (cost, "upper right")):
        axes.legend(fontsize=9, frameon=False, loc=place)
        style_axes(axes)
    figure.tight_layout(w_pad=2.0)


def _plot(axes: Axes, steps: list[int], series: list[list[float]], name: str, colour: str, dashes: str = "-") -> None:
    """The mean over runs."""
    means = [fmean(values) for values in zip(*series, strict=True)]
    axes.plot(steps, means, color=colour, linestyle=dashes, linewidth=1.5, label=name)


def _look(name: str, summary: AgingSummary) -> tuple[str, str]:
    """Colour and marker of a way."""
    if name in summary.fixed:
        return _SHADES[summary.fixed.index(name)], "o"
    return _OURS[name.split(",")[0]]


def _draw_cost(axes: Axes, summary: AgingSummary) -> None:
    """Refreshes against mean age, each policy joined to as many refreshes at equal distances; lower is better."""
    refreshes, age = summary.ways.refreshes, 100.0 * (summary.ways.aged - 1.0)
    fixed = [NEVER, *reversed(summary.fixed)]
    axes.plot(refreshes[fixed], age[fixed], color=GREY, linewidth=1.0)
    for number, name in enumerate(fixed):
        colour, marker = _look(name, summary)
        place, offset = (refreshes[name], age[name]), (5, 5 + 11 * (number % 2))  # in turns: they are close
        axes.plot(*place, marker, color=colour, markersize=7, markeredgecolor="white")
        axes.annotate(name, place, offset, textcoords="offset points", fontsize=8.5, color=INK)
    for name in POLICIES:
        colour, marker = _look(name, summary)
        x, y = [refreshes[name]] * 2, [age[name], age[_evenly(name)]]
        axes.plot(x, y, color=colour, linewidth=1.2)
        axes.plot(x[:1], y[:1], marker, color=colour, markersize=9, markeredgecolor="white", label=name)
        axes.plot(x[1:], y[1:], marker, color=colour, markersize=7, markerfacecolor="white", label=_evenly(name))
    axes.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.7, 3.0 * refreshes[summary.fixed[0]])
    axes.set_ylim(bottom=min(0.0, 1.2 * age[[*fixed, *POLICIES, *map(_evenly, POLICIES)]].min()))
    axes.set_xlabel("refreshes in the run (log scale)")
    axes.set_ylabel("aged by, mean of the run, %")
    axes.set_title("what a refresh buys", loc="left", fontsize=11, fontweight="bold")
