"""Figure 5: variance of the estimator through training, for different times T between refreshes.

The paper follows one run on Humpbacks with k = 32 and a learning rate of 1e-4. Here it is a small network on the
smart-watch data that comes with the package, with the same k and learning rate. The features of all source samples are
recorded every few steps of one run, and every way to refresh is followed on them afterwards, so that ways differ in
nothing else. The variance of the present strata on the present features is exact, between refreshes too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean, geometric_mean, median
from typing import TYPE_CHECKING

from torch import Tensor

from vardass.errors import InputError
from vardass.figures.base import Cell, Claim, FigureResult
from vardass.figures.network_features import Gram, small_trainer, source_features
from vardass.kernels import Kernel, as_kernel
from vardass.plots import BLACK, BLUE, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, dress
from vardass.refresh import (
    DriftRefresh,
    GrowingRefresh,
    RefreshEvery,
    RefreshPolicy,
    VarianceRefresh,
    strata_spread,
)
from vardass.refresh.strata_spread import feature_distances
from vardass.samplers import OrderedBatchSampler
from vardass.samplers.base import derive_seed
from vardass.solvers import stratify
from vardass.validate import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure5"]

BATCH_SIZE = 32
KEPT = 0.95
"""A schedule that keeps this share of the variance reduction does negligible harm."""

_EVERY = 5  # steps between recorded features
_MAKERS = ("dynamic-kmeans", "min-sum", "ordered")
_PLAN_RANK = 64  # as many columns as the features of the small network have
_PLANNED = 128  # batches that stand for a plan: one table of it
# from dark to light as T grows
_SHADES = ("#3B0F52", "#3F4C8A", "#21828E", "#4DB56A", "#C9BC1F")
_OURS = {
    "min-sum": (BLUE, "s"),
    "ordered": (VERMILION, "D"),
    "growing T": (ORANGE, "^"),
    "on drift": (SKY, "v"),
    "on variance": (PURPLE, "X"),
}


def figure5(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Follow Var(μ̂) of the source domain through training, for fixed T, growing T and T by observation.

    Parameters
    ----------
    seed : int
        Of the first run; each further run has the next one.
    quick : bool
        One run of 60 steps with T = 10, 20, 40 and ten times the learning rate instead of two of 2,000 with the
        paper's T.
    progress : callable
        Called as ``progress(fraction, message)``.

    Returns
    -------
    FigureResult
        Columns ``seed``, ``step``, ``batches`` (the way to draw), ``variance``, ``relative_to_uniform`` and
        ``refreshes`` so far.
    """
    steps, runs = (60, 1) if quick else (2000, 2)
    periods = (10, 20, 40) if quick else (10, 50, 100, 500, 1000)
    usual, lr = (20, 1e-3) if quick else (100, 1e-4)
    found: list[Aging] = []
    for run in range(runs):

        def report(share: float, message: str, run: int = run) -> None:
            progress((run + share) / runs, f"run {run + 1} of {runs}, {message}")

        record = record_training(seed + run, steps=steps, lr=lr, progress=report)
        found.append(follow(_ways(periods, usual), record, progress=report))
    summary = summarise(found, periods, usual)
    return FigureResult(
        number=5,
        title="variance of the estimator through training, by time between refreshes",
        caption=(
            f"A small network learns the watch task left-A->right-B with MMD, k = {BATCH_SIZE} and a learning rate of "
            f"{lr:g}, {steps:,} steps with the paper's strata and T = 100 (runs: {runs}). All curves are of the same "
            "runs: the variance of the present strata on the present features of the source domain, every "
            f"{_EVERY} steps (ordered: measured on {_PLANNED} planned batches)."
        ),
        columns=("seed", "step", "batches", "variance", "relative_to_uniform", "refreshes"),
        rows=[(seed + run, *row) for run, aging in enumerate(found) for row in _rows(aging)],
        claims=claims(summary),
        draw=lambda figure: _draw(figure, found, summary),
        size=(13.0, 5.4),
        settings={"seed": seed, "quick": quick, "steps": steps, "runs": runs, "k": 32, "lr": lr, "periods": periods},
    )


@dataclass(frozen=True)
class Way:
    """A way to draw, and when it is refreshed.

    Attributes
    ----------
    name : str
        Of the curve.
    policy : callable
        Makes the policy, which must be due at step 0.
    maker : {"dynamic-kmeans", "min-sum", "ordered"}
        Solver of the strata; ``"ordered"`` makes strata with min-sum and couples the draws.
    """

    name: str
    policy: Callable[[], RefreshPolicy]
    maker: str = "dynamic-kmeans"

    def __post_init__(self) -> None:
        if self.maker not in _MAKERS:
            raise InputError(f"maker must be one of {', '.join(_MAKERS)}, got {self.maker!r}")


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
        Way("on variance", VarianceRefresh),
    ]


@dataclass(frozen=True)
class Record:
    """Features of all samples of one domain through a training run.

    Attributes
    ----------
    steps : list of int
        Step t is the state after t updates.
    features : list of Tensor of shape (n, d)
        At each of these steps.
    kernel : Kernel
        Of Var(μ̂), fitted anew to the features of each step.
    k : int
        Batch size.
    seed : int
        Of the solvers.
    """

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


def record_training(seed: int, *, steps: int, lr: float, progress: Progress) -> Record:
    """Train the small network with MMD and the paper's strata (T = 100), and record its source domain.

    Parameters
    ----------
    seed : int
        Of split, weights, batches and solvers.
    steps : int
        Length of the run; its last state is not recorded.
    lr : float
        Learning rate.
    progress : callable
        Called as ``progress(fraction, message)``, up to one half.
    """
    trainer = small_trainer("left-A->right-B", seed=seed, steps=steps, lr=lr, sampler="vardass", period=100)
    kernel = as_kernel(trainer.algorithm.kernel)
    record = Record([0], [source_features(trainer)], kernel, trainer.config.batch_size, seed)

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
    """One training run.

    Attributes
    ----------
    steps : list of int
        Recorded steps.
    uniform : list of float
        Var(μ̂) of k uniform draws with replacement at each of them.
    traces : dict of str to Trace
        By name of the way.
    """

    steps: list[int]
    uniform: list[float]
    traces: dict[str, Trace]


def follow(ways: Sequence[Way], record: Record, *, progress: Progress) -> Aging:
    """Var(μ̂) of all ``ways`` through a recorded run.

    A refresh that is due between two recorded steps is made at the second. Policies that go by drift or variance are
    told the exact ones, and asked, at recorded steps only.
    """
    followers = [_Follower(way, record) for way in ways]
    uniform = []
    for place, (step, z) in enumerate(zip(record.steps, record.features, strict=True)):
        progress(0.5 + 0.5 * place / len(record.steps), f"strata at step {step}")
        kernel = record.kernel.fit(z)
        gram = Gram(z, kernel)
        uniform.append(gram.uniform(record.k))
        for follower in followers:
            follower.at(place, gram, kernel, uniform[-1])
    return Aging(record.steps, uniform, {follower.way.name: follower.trace for follower in followers})


class _Follower:
    """Strata or plan of one way, as old as its policy lets them get."""

    def __init__(self, way: Way, record: Record) -> None:
        self.way, self.record = way, record
        self.policy = way.policy()
        self.trace = Trace()
        self.made: tuple[Tensor, ...] | None = None
        self.refreshed = -1  # place of the last refresh
        self.scale = 1.0

    def at(self, place: int, gram: Gram, kernel: Kernel, uniform: float) -> None:
        """Refresh if it is due, and measure."""
        step, policy = self.record.steps[place], self.policy
        if policy.observes is not None and self.made is not None:
            z, old = self.record.features[place], self.record.features[self.refreshed]
            # the mean over all samples is what the drift of a weighted batch estimates
            drift = float(feature_distances(z, old, kernel).mean())
            policy.observe(drift=drift, scale=self.scale, variance=self._variance(gram) / uniform)
        before = self.record.steps[place - 1] if place > 0 and policy.observes is None else step - 1
        if any(policy.due(due) for due in range(before + 1, step + 1)):
            self._refresh(place, kernel)
            if policy.observes is not None:  # what later variances are compared with
                policy.observe(variance=self._variance(gram) / uniform)
        self.trace.variances.append(self._variance(gram))

    def _refresh(self, place: int, kernel: Kernel) -> None:
        self.made, self.refreshed = self.record.make(self.way.maker, place), place
        self.trace.refreshes.append(self.record.steps[place])
        if self.policy.observes is not None:
            self.scale = strata_spread(self.record.features[place], self.made[0], kernel=kernel).within

    def _variance(self, gram: Gram) -> float:
        if self.made is None:
            raise InputError(f"the policy of {self.way.name!r} has made no strata yet; let it start at step 0")
        return gram.stratified(*self.made) if len(self.made) == 1 else float(gram.drawn(*self.made).mean())


def _rows(aging: Aging) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for place, (step, uniform) in enumerate(zip(aging.steps, aging.uniform, strict=True)):
        rows.append((step, "uniform", uniform, 1.0, 0))
        for name, trace in aging.traces.items():
            variance = trace.variances[place]
            rows.append((step, name, variance, variance / uniform, sum(r <= step for r in trace.refreshes)))
    return rows


@dataclass(frozen=True)
class WaySummary:
    """One way to refresh, over all runs.

    Attributes
    ----------
    relative : float
        Mean of Var(μ̂) over the recorded steps, % of uniform draws.
    refreshes : float
        Mean number in a run.
    rise : float
        Var(μ̂) just before a refresh over that just after the one before it, geometric mean over intervals.
    excess : float
        Var(μ̂) just before a refresh over that of strata made anew every few steps (the smallest T), likewise.
    early, late : float
        ``excess`` of the intervals that begin in the first and in the second half of the run.
    """

    relative: float
    refreshes: float
    rise: float
    excess: float
    early: float
    late: float


@dataclass(frozen=True)
class Summary:
    """All ways over all runs.

    Attributes
    ----------
    ways : dict of str to WaySummary
        By name of the way.
    fixed, usual
        Names: of the paper's strata with fixed T, the smallest first; the usual one of these.
    runs : int
        Number of runs.
    noise : float
        Relative standard deviation of Var(μ̂) between solutions that the solver finds for much the same features.
    """

    ways: dict[str, WaySummary]
    fixed: tuple[str, ...]
    usual: str
    runs: int
    noise: float


def summarise(runs: Sequence[Aging], periods: Sequence[int], usual: int) -> Summary:
    """Numbers of each way over all runs; the excess is over the first of ``periods``."""
    fixed = tuple(f"T = {period}" for period in periods)
    ways = {name: _summarise_way(runs, name, fixed[0]) for name in runs[0].traces}
    return Summary(ways, fixed, f"T = {usual}", len(runs), solver_noise(runs, fixed[0]))


def solver_noise(runs: Sequence[Aging], freshest: str) -> float:
    """From second differences between strata of the smallest T that follow each other, which leave out trends."""
    changes = []
    for run in runs:
        trace = run.traces[freshest]
        known = zip(run.steps, trace.variances, run.uniform, strict=True)
        new = [math.log(variance / uniform) for step, variance, uniform in known if step in trace.refreshes]
        changes += [abs(after - 2.0 * now + before) for before, now, after in zip(new, new[1:], new[2:], strict=False)]
    return median(changes) / (0.6745 * math.sqrt(6.0))


def _summarise_way(runs: Sequence[Aging], name: str, freshest: str) -> WaySummary:
    shares = [v / u for run in runs for v, u in zip(run.traces[name].variances, run.uniform, strict=True)]
    ends = [end for run in runs for end in intervals(run.steps, run.traces[name], run.traces[freshest])]
    middle = runs[0].steps[-1] / 2
    return WaySummary(
        relative=100.0 * fmean(shares),
        refreshes=fmean(len(run.traces[name].refreshes) for run in runs),
        rise=_mean_ratio(end.rise for end in ends),
        excess=_mean_ratio(end.excess for end in ends),
        early=_mean_ratio(end.excess for end in ends if end.start < middle),
        late=_mean_ratio(end.excess for end in ends if end.start >= middle),
    )


@dataclass(frozen=True)
class Interval:
    """From one refresh to the last recorded step before the next: how much worse the strata became."""

    start: int
    rise: float
    excess: float


def intervals(steps: Sequence[int], trace: Trace, fresh: Trace) -> list[Interval]:
    """Intervals between refreshes with at least two recorded steps, the last one to the end of the run."""
    found = []
    for start, stop in zip(trace.refreshes, [*trace.refreshes[1:], steps[-1] + 1], strict=True):
        inside = [place for place, step in enumerate(steps) if start <= step < stop]
        if len(inside) > 1:
            first, last = inside[0], inside[-1]
            rise = trace.variances[last] / trace.variances[first]
            found.append(Interval(start, rise, trace.variances[last] / fresh.variances[last]))
    return found


def _mean_ratio(ratios: Iterable[float]) -> float:
    values = list(ratios)
    return geometric_mean(values) if values else math.nan


def claims(summary: Summary) -> tuple[Claim, ...]:
    """The paper's statements on the effect of T, and whether they held."""
    ways, fixed = summary.ways, summary.fixed
    later = [ways[name] for name in fixed[1:]]
    usual, growing = ways[summary.usual], ways["growing T"]
    kept = (100.0 - growing.relative) / (100.0 - usual.relative)
    # two standard errors of a mean over as many solutions of the solver as the rarer of the two has refreshes
    slack = [2.0 * summary.noise / math.sqrt(way.refreshes * summary.runs) for way in later]
    ratios = [b.relative / a.relative for a, b in pairwise([ways[name] for name in fixed])]
    over_all = later[-1].relative / ways[fixed[0]].relative
    means = ", ".join(f"{ways[name].relative:.2f} % ({name})" for name in fixed)

    def listed(*fields: str) -> str:
        texts = [" and ".join(_percent(getattr(way, field)) for field in fields) for way in later]
        return ", ".join(f"{text} ({name})" for text, name in zip(texts, fixed[1:], strict=True))

    return (
        Claim(
            "the less frequently the strata are updated, the greater the estimator variance",
            all(ratio > 1.0 - s for ratio, s in zip(ratios, slack, strict=True)) and over_all > 1.0 + slack[-1],
            f"mean over the run, relative to uniform, {means}; allowing a longer T to be lower by "
            f"{100.0 * slack[0]:.2f} to {100.0 * slack[-1]:.2f} % of these, two standard errors of the solver's "
            "randomness, and asking the longest to be higher than the shortest by more than that",
        ),
        Claim(
            "strata become worse over time, and so the estimator variance increases until they are updated",
            all(way.rise > 1.0 for way in later) and later[-1].excess > 1.0 + slack[-1],
            f"from refresh to refresh {listed('rise')}, of which due to the age of the strata {listed('excess')}",
        ),
        Claim(
            "this effect is strongest towards the start of training",
            all(way.early > way.late for way in later),
            "excess over fresh strata just before a refresh, first half and second half of the run, "
            + listed("early", "late"),
        ),
        Claim(
            "an increasing schedule for T could save computation with negligible detriment",
            growing.refreshes < usual.refreshes and kept >= KEPT,
            f"the growing schedule keeps {100.0 * kept:.1f} % of the reduction of {summary.usual} with "
            f"{growing.refreshes:.0f} refreshes instead of {usual.refreshes:.0f}",
        ),
    )


def _percent(ratio: float) -> str:
    return f"{100.0 * (ratio - 1.0):+.1f} %".replace("-0.0", "+0.0")


def _draw(figure: Figure, runs: Sequence[Aging], summary: Summary) -> None:
    absolute, relative, cost = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.15, 1.15, 1.0)})
    steps = runs[0].steps
    absolute.plot(steps, _mean([r.uniform for r in runs]), color=BLACK, linestyle="--", linewidth=1.6, label="uniform")
    for name in reversed(summary.fixed):
        variances = _mean([run.traces[name].variances for run in runs])
        absolute.plot(steps, variances, color=_look(name, summary)[0], linewidth=1.5, label=name)
    absolute.set_ylabel("Var(μ̂), source domain, k = 32")
    absolute.set_title("the paper's strata", loc="left", fontsize=11, fontweight="bold")
    for name in (summary.usual, *(name for name in summary.ways if name not in summary.fixed)):
        shares = [[100.0 * v / u for v, u in zip(run.traces[name].variances, run.uniform, strict=True)] for run in runs]
        relative.plot(steps, _mean(shares), color=_look(name, summary)[0], linewidth=1.5, label=name)
    relative.set_ylabel("Var(μ̂), % of uniform")
    relative.set_title("other strata, other times", loc="left", fontsize=11, fontweight="bold")
    for axes in (absolute, relative):
        axes.set_xlabel("training step")
        axes.set_xlim(0, steps[-1])
        dress(axes)
    absolute.legend(fontsize=9, frameon=False, loc="lower right")
    relative.legend(fontsize=9, frameon=False, loc="upper right")
    _draw_cost(cost, summary)
    figure.tight_layout(w_pad=2.0)


def _mean(series: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*series, strict=True)]


def _look(name: str, summary: Summary) -> tuple[str, str]:
    """Colour and marker of a way."""
    if name in summary.fixed:
        return _SHADES[summary.fixed.index(name)], "o"
    return _OURS[name.split(",")[0]]


def _draw_cost(axes: Axes, summary: Summary) -> None:
    """Refreshes against mean variance: further down and further left is better."""
    fixed = [summary.ways[name] for name in summary.fixed]
    axes.plot([way.refreshes for way in fixed], [way.relative for way in fixed], color=GREY, linewidth=1.0, zorder=1)
    for name, way in summary.ways.items():
        colour, marker = _look(name, summary)
        axes.plot([way.refreshes], [way.relative], marker, color=colour, markersize=8.5, markeredgecolor="white")
        side, offset = ("left", (4, 6)) if name in summary.fixed else ("center", (0, -16))
        if name == "on variance":  # beside the mark: it often is at that of the longest T
            side, offset = "left", (11, -4)
        shown = name.removeprefix("T = ") if name in summary.fixed[:-1] else name
        place = (way.refreshes, way.relative)
        axes.annotate(shown, place, offset, textcoords="offset points", fontsize=8.5, color=INK, ha=side)
    axes.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(way.refreshes for way in summary.ways.values()) / 1.6, fixed[0].refreshes * 1.9)
    axes.set_xlabel("refreshes in the run (log scale)")
    axes.set_ylabel("mean Var(μ̂) of the run, % of uniform")
    axes.set_title("what a refresh buys", loc="left", fontsize=11, fontweight="bold")
    axes.margins(y=0.12)
    dress(axes)
