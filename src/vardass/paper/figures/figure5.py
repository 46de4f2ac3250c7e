"""Figure 5: variance of the estimator through training, for different times T between refreshes.

The paper follows one run on Humpbacks; here it is a small network on the smart-watch data, with the same k and learning
rate. The features of all source samples are recorded every few steps of one run, and every way to refresh is followed
on them afterwards, so that ways differ in nothing else. In training the features spread, and the variance of every way
to draw grows with them. How much strata have aged is therefore their variance next to that of new strata on the same
features, and policies are compared with refreshes of the same number at equal distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from torch import Tensor

from vardass.kernels import Kernel, as_kernel
from vardass.paper.figures import Claim, FigureResult
from vardass.paper.figures.figure4 import small_trainer, source_features
from vardass.plots import BLACK, BLUE, GREY, INK, ORANGE, VERMILION, style_axes
from vardass.refresh import GrowingRefresh, RefreshEvery, RefreshPolicy
from vardass.samplers import OrderedBatchSampler
from vardass.samplers.base import derive_seed
from vardass.solvers import stratify
from vardass.validate import Progress, silent
from vardass.view import ExactView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure5"]

BATCH_SIZE = 32
LOST = 0.05  # a schedule does negligible harm where it loses no more than this share of what refreshing gains
NEVER = "never again"
GROWING = "growing T"
EVENLY = "growing T, evenly"  # as many refreshes at equal distances

_EVERY = 5  # steps between recorded features
_STRATA = "dynamic-kmeans"  # the paper's solver
_PLAN_RANK = 64  # as many columns as the features of the small network have
_PLANNED = 128  # batches that stand for a plan: one table of it
# from dark to light as T grows
_SHADES = ("#3B0F52", "#3F4C8A", "#21828E", "#4DB56A", "#C9BC1F")
_OURS = {
    "min-sum": (BLUE, "s"),
    "ordered": (VERMILION, "D"),
    "growing T": (ORANGE, "^"),
    NEVER: (GREY, "o"),
}


def figure5(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Follow Var(μ̂) of the source domain through training, for fixed T, growing T and T by observation."""
    steps, runs = (60, 1) if quick else (2000, 2)
    periods = (10, 20, 40) if quick else (10, 50, 100, 500, 1000)
    usual, lr = (20, 1e-3) if quick else (100, 1e-4)
    found = []
    for run in range(runs):

        def report(share: float, message: str, run: int = run) -> None:
            progress((run + share) / runs, f"run {run + 1} of {runs}, {message}")

        history = record_training(seed + run, steps=steps, lr=lr, progress=report)
        found.append(follow(_ways(history, periods, usual), history, progress=report))
    numbers = pd.concat(found, ignore_index=True)
    fixed = [f"T = {period}" for period in periods]
    return FigureResult(
        number=5,
        title="variance of the estimator through training, by time between refreshes",
        caption=(
            f"A small network learns the watch task left-A->right-B with MMD, k = {BATCH_SIZE} and a learning rate of "
            f"{lr:g}, {steps:,} steps with the paper's strata and T = 100 (runs: {runs}). All curves are of the same "
            "runs: the variance of the present strata on the present features of the source domain, every "
            f"{_EVERY} steps (ordered: measured on {_PLANNED} planned batches). Aged by: variance above that of "
            f"strata made anew every {periods[0]} steps, on the same features. A growing T stands next to as many "
            "refreshes at equal distances."
        ),
        numbers=numbers,
        claims=claims(numbers, fixed, f"T = {usual}"),
        draw=lambda figure: _draw(figure, numbers, fixed),
        size=(13.0, 5.4),
        settings={"seed": seed, "quick": quick, "steps": steps, "runs": runs, "k": 32, "lr": lr, "periods": periods},
    )


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

    def places(self, policy: RefreshPolicy) -> list[int]:
        """Where a policy refreshes: at the recorded step that follows one at which it is due."""
        before = [-1, *self.steps]
        return [
            place for place, step in enumerate(self.steps) if any(map(policy.due, range(before[place] + 1, step + 1)))
        ]


def record_training(seed: int, *, steps: int, lr: float, progress: Progress) -> FeatureHistory:
    """Train the small network with MMD and the paper's strata (T = 100), and record its source domain."""
    trainer = small_trainer("left-A->right-B", seed=seed, steps=steps, lr=lr, sampler="vardass", period=100)
    kernel = as_kernel(trainer.algorithm.kernel)
    history = FeatureHistory([0], [source_features(trainer)], kernel, trainer.config.batch_size, seed)

    def after_step(share: float, message: str) -> None:
        progress(0.5 * share, f"step {trainer.step} of {steps}")
        if trainer.step < steps and trainer.step % _EVERY == 0:
            history.steps.append(trainer.step)
            history.features.append(source_features(trainer))

    trainer.run(progress=after_step)
    return history


class Way(NamedTuple):
    """A way to draw, and at which recorded steps it is refreshed, the first of them among these."""

    name: str
    places: list[int]
    maker: str = _STRATA  # solver of the strata, or "ordered"


def _ways(history: FeatureHistory, periods: Sequence[int], usual: int) -> list[Way]:
    """The paper's strata at each period; others, next to the paper's at the ``usual`` one; a growing T."""
    at = {period: history.places(RefreshEvery(period)) for period in (*periods, usual)}
    growing = history.places(GrowingRefresh())
    return [
        *(Way(f"T = {period}", at[period]) for period in periods),
        *(Way(f"{maker}, T = {usual}", at[usual], maker) for maker in ("min-sum", "ordered")),
        Way(GROWING, growing),
        Way(NEVER, [0]),
        Way(EVENLY, evenly_spaced(len(growing), len(history.steps))),
    ]


def evenly_spaced(count: int, recorded: int) -> list[int]:
    """As many of the recorded steps, in equal distances."""
    return [i * recorded // count for i in range(count)]


def follow(ways: Sequence[Way], history: FeatureHistory, *, progress: Progress = silent) -> pd.DataFrame:
    """Var(μ̂) of uniform draws and of all ``ways`` through a recorded run; the first one is taken for fresh."""
    rows: list[tuple[object, ...]] = []
    made: dict[str, tuple[Tensor, ...]] = {}
    refreshes = dict.fromkeys(("uniform", *(way.name for way in ways)), 0)
    for place, (step, z) in enumerate(zip(history.steps, history.features, strict=True)):
        progress(0.5 + 0.5 * place / len(history.steps), f"strata at step {step}")
        view = ExactView(history.kernel.fit(z).matrix(z).double())
        uniform = view.whole / (history.k * view.n**2)
        variances = {"uniform": uniform}
        for name, places, maker in ways:
            if place in places:
                made[name] = history.make(maker, place)
                refreshes[name] += 1
            drawn, is_plan = made[name], maker == "ordered"
            inside = view.batch_errors(*drawn).mean() if is_plan else view.objective(drawn[0], history.k) / view.n**2
            variances[name] = float(inside)
        fresh = variances[ways[0].name]
        rows += [
            (history.seed, step, name, v, v / uniform, v / fresh, refreshes[name]) for name, v in variances.items()
        ]
    columns = ["seed", "step", "batches", "variance", "relative_to_uniform", "relative_to_fresh", "refreshes"]
    return pd.DataFrame(rows, columns=columns)


def summarise(numbers: pd.DataFrame) -> pd.DataFrame:
    """A row for each way, over all runs.

    ``refreshes`` is their mean number in a run; ``aged`` the geometric mean over recorded steps of Var(μ̂) over that of
    the freshest strata; ``before`` the same just before a refresh, over the intervals between refreshes that have more
    than one recorded step, of which those of ``early`` and ``late`` begin in the first and in the second half.
    """
    ways = numbers[numbers.batches != "uniform"]
    runs = ways.groupby(["batches", "seed"], sort=False)
    columns = {"start": ("step", "first"), "age": ("relative_to_fresh", "last"), "recorded": ("step", "size")}
    intervals = ways.groupby(["batches", "seed", "refreshes"], sort=False).agg(**columns)
    ends = intervals[intervals.recorded > 1]
    early = ends.start < numbers.step.max() / 2
    ages = {
        "aged": ways.set_index("batches").relative_to_fresh,
        "before": ends.age,
        "early": ends.age[early],
        "late": ends.age[~early],
    }
    means = {name: np.exp(np.log(age).groupby("batches", sort=False).mean()) for name, age in ages.items()}
    refreshes = runs.refreshes.last().groupby("batches", sort=False).mean()
    return pd.DataFrame({"refreshes": refreshes, **means}).loc[refreshes.index]


def solver_noise(numbers: pd.DataFrame, freshest: str) -> float:
    """From second differences between strata of the smallest T that follow each other, which leave out trends."""
    new = numbers[numbers.batches == freshest].groupby(["seed", "refreshes"]).relative_to_uniform.first()
    changes = np.log(new).groupby("seed").transform(lambda logs: logs.diff().diff()).abs()
    return float(changes.median()) / (0.6745 * math.sqrt(6.0))


def lost(ways: pd.DataFrame, name: str) -> float:
    """Share of what refreshing gains, from strata that are never made again to fresh ones, that a way loses."""
    gained = ways.aged[NEVER] - 1.0
    return float((ways.aged[name] - 1.0) / gained) if gained > 0.0 else math.nan


def claims(numbers: pd.DataFrame, fixed: Sequence[str], usually: str) -> tuple[Claim, ...]:
    """What the paper says on the effect of T and what we add, and whether it held."""
    ways = summarise(numbers)
    later = ways.loc[list(fixed[1:])]
    usual, growing = ways.loc[usually], ways.loc[GROWING]
    # two standard errors of a mean over as many solutions of the solver as the way has refreshes
    slack = 2.0 * solver_noise(numbers, fixed[0]) / np.sqrt(later.refreshes * numbers.seed.nunique())
    first, last = slack.iloc[0], slack.iloc[-1]
    rising = ways.aged[list(fixed)].pct_change().iloc[1:] > -slack

    def listed(*columns: str) -> str:
        shown = later[list(columns)].itertuples()
        return ", ".join(f"{' and '.join(map(_percent, row))} ({name})" for name, *row in shown)

    return (
        Claim(
            "the less frequently the strata are updated, the greater the estimator variance",
            bool(rising.all() and later.aged.iloc[-1] > 1.0 + last),
            f"mean over the run above strata made anew every {fixed[0].removeprefix('T = ')} steps, {listed('aged')}; "
            f"a longer T may be lower by {100.0 * first:.2f} to {100.0 * last:.2f} %, two standard errors of the "
            "solver's randomness",
        ),
        Claim(
            "strata become worse over time, and so the estimator variance increases until they are updated",
            bool((later.before > 1.0 - slack).all() and later.before.iloc[-1] > 1.0 + last),
            f"just before a refresh {listed('before')} above new strata on the same features",
        ),
        Claim(
            "this effect is strongest towards the start of training",
            bool((later.early > later.late).all()),
            f"the same in the first and the second half of the run, {listed('early', 'late')}",
        ),
        Claim(
            "an increasing schedule for T could save computation with negligible detriment, taken as at most "
            f"{100.0 * LOST:.0f} % more lost of what refreshing gains than with {usually}, and less than with as "
            "many refreshes at equal distances",
            bool(
                growing.refreshes < usual.refreshes
                and lost(ways, GROWING) - lost(ways, usually) <= LOST
                and growing.aged < ways.aged[EVENLY]
            ),
            f"{growing.refreshes:.0f} refreshes instead of {usual.refreshes:.0f}; lost "
            + ", ".join(f"{100.0 * lost(ways, name):.1f} % ({name})" for name in (GROWING, EVENLY, *fixed[1:])),
        ),
    )


def _percent(ratio: float) -> str:
    return f"{100.0 * (ratio - 1.0):+.1f} %".replace("-0.0", "+0.0")


def _draw(figure: Figure, numbers: pd.DataFrame, fixed: Sequence[str]) -> None:
    through, aging, cost = figure.subplots(1, 3)
    means = numbers.groupby(["step", "batches"])[["variance", "relative_to_fresh"]].mean().unstack()
    looks = {name: (shade, "o") for name, shade in zip(fixed, _SHADES, strict=False)}
    looks |= {name: _OURS[name.split(",")[0]] for name in numbers.batches.unique() if name.split(",")[0] in _OURS}
    others = [name for name in looks if name.startswith(("min-sum", "ordered"))]
    through.plot(means.variance["uniform"], color=BLACK, linestyle="--", linewidth=1.5, label="uniform")
    for name in (*reversed(fixed), *others):
        through.plot(means.variance[name], color=looks[name][0], linewidth=1.5, label=name)
    through.set_ylabel(f"Var(μ̂), source domain, k = {BATCH_SIZE}")
    through.set_title("through training", loc="left", fontsize=11, fontweight="bold")
    for name in (NEVER, *reversed(fixed[1:])):
        aged = 100.0 * (means.relative_to_fresh[name] - 1.0)
        aging.plot(aged, color=looks[name][0], linestyle=":" if name == NEVER else "-", linewidth=1.5, label=name)
    aging.set_ylabel(f"aged by: % above strata with {fixed[0]}")
    aging.set_title("what is due to age", loc="left", fontsize=11, fontweight="bold")
    for axes in (through, aging):
        axes.set_xlabel("training step")
        axes.set_xlim(0, numbers.step.max())
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]), top=1.1 * axes.get_ylim()[1])
    through.set_ylim(bottom=0.0)
    _draw_cost(cost, summarise(numbers), fixed, looks)
    for axes, place in ((through, "lower right"), (aging, "upper left"), (cost, "upper right")):
        axes.legend(fontsize=9, frameon=False, loc=place)
        style_axes(axes)
    figure.tight_layout(w_pad=2.0)


def _draw_cost(axes: Axes, ways: pd.DataFrame, fixed: Sequence[str], looks: dict[str, tuple[str, str]]) -> None:
    """Refreshes against mean age, a growing T joined to as many at equal distances; lower is better."""
    refreshes, age = ways.refreshes, 100.0 * (ways.aged - 1.0)
    joined = [NEVER, *reversed(fixed)]
    axes.plot(refreshes[joined], age[joined], color=GREY, linewidth=1.0)
    for number, name in enumerate(joined):
        colour, marker = looks[name]
        place, offset = (refreshes[name], age[name]), (5, 5 + 11 * (number % 2))  # in turns: they are close
        axes.plot(*place, marker, color=colour, markersize=7, markeredgecolor="white")
        axes.annotate(name, place, offset, textcoords="offset points", fontsize=8.5, color=INK)
    colour, marker = looks[GROWING]
    x, y = [refreshes[GROWING]] * 2, [age[GROWING], age[EVENLY]]
    axes.plot(x, y, color=colour, linewidth=1.2)
    axes.plot(x[:1], y[:1], marker, color=colour, markersize=9, markeredgecolor="white", label=GROWING)
    axes.plot(x[1:], y[1:], marker, color=colour, markersize=7, markerfacecolor="white", label=EVENLY)
    axes.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.7, 3.0 * refreshes[fixed[0]])
    axes.set_ylim(bottom=min(0.0, 1.2 * age[[*joined, GROWING, EVENLY]].min()))
    axes.set_xlabel("refreshes in the run (log scale)")
    axes.set_ylabel("aged by, mean of the run, %")
    axes.set_title("what a refresh buys", loc="left", fontsize=11, fontweight="bold")
