"""Figure 3: how good Algorithm 2 is, against the interior-point method, the unweighted assignment and single moves.

As in the paper n = 100, k = 16 and the input is Euclidean distances between random embeddings: (a) 10 rows at once and
10⁵ trials against two alternatives, (b) 1 to 10⁵ trials with 10 rows at once, (c) 1 to 20 rows at once with 100 trials.
The paper shows one problem with unpublished embeddings; here ten problems with smart-watch windows are averaged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from vardass.data import load_watch, standardise
from vardass.paper.figures import Claim, FigureResult
from vardass.paper.interior_point import relaxed_objective, relaxed_solution
from vardass.paper.kmeans import centroid_objective, greedy_assignment
from vardass.paper.theory import spearman
from vardass.plots import BLACK, BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION, style_axes
from vardass.validate import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure3"]

POINTS, STRATA = 100, 16
PARALLEL = 10
POOR = 5.0  # per cent above the best of all trials from which a single run counts as the paper's "poor"

_GREEDY, _AFTER = "Algorithm 2", "Algorithm 2, then single moves"
_MOVES, _RELAXED = "single moves", "interior point, relaxed"
_NEAREST, _ROUNDED = "unweighted", "interior point, rounded"
_METHODS = {
    _NEAREST: ("unweighted (nearest centre)", GREY, "D"),
    _GREEDY: ("Algorithm 2", PURPLE, "o"),
    _ROUNDED: ("interior point, rounded", ORANGE, "P"),
    _MOVES: ("single moves (ours)", BLUE, "s"),
    _RELAXED: ("interior point, relaxed\n(splits points)", ORANGE, "P"),
}
_LINES = {
    "one trial": ("average trial", VERMILION, "^"),
    "fixed trials": ("best of {trials} trials", PURPLE, "o"),
    "fixed steps": ("best of the trials that\n{steps:,} steps allow", GREEN, "s"),
}


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    problems: int  # random problems
    trials: tuple[int, ...]  # numbers of trials of Algorithm 2 in panel b; the last one is that of panel a
    parallel: tuple[int, ...]  # rows assigned at once in panel c
    fixed_trials: int  # trials in panel c
    runs: int  # T trials are repeated ``runs`` / T times, at least once
    repeats: int  # and at most so often

    @property
    def steps(self) -> int:
        """Sequential steps of ``fixed_trials`` with ten rows at once."""
        return self.fixed_trials * POINTS // PARALLEL


FULL = Effort(
    problems=10,
    trials=(1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    parallel=tuple(range(1, 21)),
    fixed_trials=100,
    runs=30_000,
    repeats=20,
)
QUICK = Effort(
    problems=3, trials=(1, 10, 100, 1000), parallel=(1, 2, 5, 10, 20), fixed_trials=100, runs=1000, repeats=10
)


class MeasuredLoss(NamedTuple):
    panel: str
    problem: int
    method: str
    trials: int  # of Algorithm 2; 0 where they have no meaning
    parallel: int
    loss: float  # Σ_i D_{i,a_i} |S_{a_i}|; the mean where trials were repeated
    seconds: float  # of one run, CPU time on one thread: other work on the machine does not count


def figure3(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Measure the greedy assignment of Algorithm 2."""
    scale = QUICK if quick else FULL
    generator = torch.Generator().manual_seed(seed)
    rows, splits = [], []
    for number in range(scale.problems):
        progress(number / scale.problems, f"problem {number + 1} of {scale.problems}")
        distances = random_problem(generator)
        if number == 0:  # compiled loops are made before the clock runs
            greedy_assignment(distances, trials=1, parallel=PARALLEL, generator=torch.Generator())
        found, split = losses_of(distances, number, scale, generator)
        rows += found
        splits.append(split)
    numbers = pd.DataFrame(rows)
    best = numbers[numbers.method != _RELAXED].groupby("problem").loss.min()
    numbers["excess_percent"] = 100.0 * (numbers.loss / numbers.problem.map(best) - 1.0)
    return FigureResult(
        number=3,
        title="the greedy assignment of Algorithm 2 against alternatives",
        caption=(
            f"Means over {scale.problems} problems of n = {POINTS} smart-watch windows and k = {STRATA} centres, in "
            "per cent above the best assignment found for the problem. The interior-point method is the package's, not "
            "the paper's commercial one. Seconds are CPU time of one run."
        ),
        numbers=numbers,
        claims=_claims(numbers, scale, splits),
        draw=lambda figure: _draw(figure, numbers, scale),
        size=(15.0, 4.6),
        settings={"seed": seed, "quick": quick, "n": POINTS, "k": STRATA, "problems": scale.problems},
    )


def random_problem(generator: torch.Generator) -> Tensor:
    """Euclidean distances D (100, 16) of points to centres, all windows of the right wrist.

    D is not squared, as in the paper's text.
    """
    data = load_watch()
    features = standardise(data.features[data.side == 1].double())
    rows = torch.randperm(len(features), generator=generator)[: POINTS + STRATA]
    return torch.cdist(features[rows[:POINTS]], features[rows[POINTS:]])


def single_moves(distances: Tensor, labels: Tensor) -> Tensor:
    """Make the best move of one point until none lowers Σ_i D_{i,a_i} |S_{a_i}|: the rule of min-sum with D fixed."""
    n, k = distances.shape
    labels = labels.clone()
    rows = torch.arange(n)
    noise = 1e-12 * float(distances.sum()) * n
    while True:
        member = torch.nn.functional.one_hot(labels, k).to(distances)
        sizes, sums = member.sum(0), (member * distances).sum(0)
        own = distances[rows, labels]
        saved = sums[labels] + (sizes[labels] - 1.0) * own  # n s - (n - 1)(s - D)
        change = sums + (sizes + 1.0) * distances - saved[:, None]  # (n + 1)(s + D) - n s
        change[rows, labels] = 0.0
        best = int(change.argmin())
        if float(change.view(-1)[best]) >= -noise:
            return labels
        labels[best // k] = best % k


def trials_of_budget(parallel: int, scale: Effort) -> int:
    """Trials that take as many sequential steps as ``fixed_trials`` with ten rows at once."""
    return max(1, scale.steps // -(-POINTS // parallel))


def losses_of(
    distances: Tensor, number: int, scale: Effort, generator: torch.Generator
) -> tuple[list[MeasuredLoss], float]:
    """All losses of one problem, and the share of points that the relaxed solution splits between strata."""
    rows: list[MeasuredLoss] = []

    def add(panel: str, name: str, run: Callable[[], Tensor], trials: int = 0, parallel: int = 0) -> Tensor:
        repeats = max(1, min(scale.repeats, scale.runs // trials)) if trials else 1
        clock = time.process_time()
        found = [run() for _ in range(repeats)]
        seconds = (time.process_time() - clock) / repeats
        loss = fmean(centroid_objective(distances, labels) for labels in found)
        rows.append(MeasuredLoss(panel, number, name, trials, parallel, loss, seconds))
        return found[-1]

    def greedy(panel: str, name: str, trials: int, parallel: int) -> Tensor:
        def run() -> Tensor:
            return greedy_assignment(distances, trials=trials, parallel=parallel, generator=generator)

        return add(panel, name, run, trials, parallel)

    nearest = add("a", _NEAREST, lambda: distances.argmin(1))
    add("a", _MOVES, lambda: single_moves(distances, nearest))
    clock = time.process_time()
    shares = relaxed_solution(distances)
    seconds = time.process_time() - clock
    rounded = shares.argmax(1)
    losses = {_RELAXED: float(relaxed_objective(distances, shares))}
    losses[_ROUNDED] = centroid_objective(distances, rounded)
    rows += [MeasuredLoss("a", number, name, 0, 0, loss, seconds) for name, loss in losses.items()]
    add("a", "interior point, then single moves", lambda: single_moves(distances, rounded))
    for trials in scale.trials:
        labels = greedy("b", _GREEDY, trials, PARALLEL)
    rows.append(rows[-1]._replace(panel="a"))
    add("a", _AFTER, lambda: single_moves(distances, labels))
    for parallel in scale.parallel:
        greedy("c", "one trial", 1, parallel)
        greedy("c", "fixed trials", scale.fixed_trials, parallel)
        greedy("c", "fixed steps", trials_of_budget(parallel, scale), parallel)
    return rows, float((shares.amax(1) < 0.99).double().mean())


def _line(numbers: pd.DataFrame, panel: str, method: str) -> pd.DataFrame:
    """Mean, least and greatest excess over problems by its x: trials in panel b, parallel rows in c."""
    own = numbers[(numbers.panel == panel) & (numbers.method == method)]
    return own.groupby("trials" if panel == "b" else "parallel").excess_percent.agg(["mean", "min", "max"])


def _claims(numbers: pd.DataFrame, scale: Effort, splits: Sequence[float]) -> tuple[Claim, ...]:
    compared = numbers[numbers.panel == "a"]
    excess = compared.pivot(index="problem", columns="method", values="excess_percent")
    means, seconds = excess.mean(), compared.groupby("method").seconds.mean()
    sooner = "less" if seconds[_ROUNDED] < seconds[_GREEDY] else "more"
    poor = 100.0 * ((100.0 + _line(numbers, "b", _GREEDY)["mean"][1]) / (100.0 + means[_GREEDY]) - 1.0)
    average, budget = (_line(numbers, "c", name)["mean"] for name in ("one trial", "fixed steps"))
    trend = spearman(torch.tensor(average.index), torch.tensor(average.to_numpy()))
    last, best = scale.parallel[-1], min(scale.parallel[1:], key=lambda p: float(budget[p]))
    lowered, wins, plain, inner = (
        int((excess[name] < excess[_GREEDY]).sum()) for name in (_AFTER, _MOVES, _NEAREST, _ROUNDED)
    )
    return (
        Claim(
            "Algorithm 2 ends lower than the assignment to the closest centroid, panel (a)",
            plain == 0,
            f"on {scale.problems - plain} of {scale.problems} problems; {means[_GREEDY]:.1f} % above the best found, "
            f"the other {means[_NEAREST]:.1f} %",
            source="ours",
        ),
        Claim(
            "Algorithm 2 ends as low as the interior point's solution, panel (a)",
            inner < scale.problems / 2.0,
            f"the interior point's, rounded, is lower on {inner} of {scale.problems} problems, {means[_ROUNDED]:.1f} % "
            f"above the best found, in {sooner} time",
            source="ours",
        ),
        Claim(
            f"a single run of Algorithm 2 is likely to give a poor solution, taken as more than {POOR:g} % above the "
            "best of all trials",
            bool(poor > POOR),
            f"an average run is {poor:.1f} % above the best of {scale.trials[-1]:,}",
        ),
        Claim(
            "the average solution is worse the more rows are assigned at once",
            trend > 0.9,
            f"{average[1]:.1f} % with one row, {average[PARALLEL]:.1f} % with {PARALLEL}, {average[last]:.1f} % with "
            f"{last}, rank correlation {trend:.2f}",
        ),
        Claim(
            "assigning rows at once allows more trials in a given time and so improves the best solution, with time "
            "taken as the number of steps one after another",
            bool(budget[PARALLEL] < budget[1]),
            f"in {scale.steps:,} steps {budget[1]:.1f} % with one row at once, {budget[PARALLEL]:.1f} % with the "
            f"paper's {PARALLEL}, and {budget[best]:.1f} % with {best}, the best number above one",
        ),
        Claim(
            "the relaxed program always has integer solutions",
            max(splits) == 0.0,
            f"{100.0 * min(splits):.0f} to {100.0 * max(splits):.0f} % of the points are split between strata at the "
            "interior point's solution",
        ),
        Claim(
            "Algorithm 2 can find a local minimum, taken as one that no move of a single point lowers",
            lowered < scale.problems,
            f"on {lowered} of {scale.problems} problems moves of single points lower its best solution further, from "
            f"{means[_GREEDY]:.1f} to {means[_AFTER]:.1f} % above the best found",
        ),
        Claim(
            "single moves from the unweighted start end lower than Algorithm 2",
            wins == scale.problems,
            f"lower on {wins} of {scale.problems} problems, on average {means[_MOVES]:.1f} % and "
            f"{means[_GREEDY]:.1f} %",
            source="ours",
        ),
    )


def _draw(figure: Figure, numbers: pd.DataFrame, scale: Effort) -> None:
    methods, trials, rows = figure.subplots(1, 3)
    titles = f"(a) {scale.trials[-1]:,} trials", f"(b) {PARALLEL} rows at once", "(c) more rows at once"
    for axes, title in zip((methods, trials, rows), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    own = numbers[numbers.panel == "a"]
    _compare(methods, own)
    _curve(trials, _line(numbers, "b", _GREEDY), "Algorithm 2", PURPLE, "o")
    for name, (text, colour, marker) in _LINES.items():
        label = text.format(trials=scale.fixed_trials, steps=scale.steps)
        _curve(rows, _line(numbers, "c", name), label, colour, marker)
    moves = float(own[own.method == _MOVES].excess_percent.mean())
    for axes in (trials, rows):
        axes.axhline(moves, color=BLUE, linewidth=1.6, linestyle="--")
        axes.text(0.02, moves, "single moves (ours)", transform=axes.get_yaxis_transform(), color=BLUE, va="bottom")
        axes.set_ylabel("loss, % above the best found")
        style_axes(axes)
    trials.set_xscale("log")
    trials.set_ylim(bottom=0.0)
    trials.set_xlabel("random trials")
    rows.set_yscale("log")
    rows.set_ylim(moves / 1.6, 20.0 * _line(numbers, "c", "one trial")["max"].max())
    rows.set_yticks([1, 10, 100], ["1", "10", "100"])
    rows.set_xticks([1, 5, 10, 15, 20])
    rows.set_xlabel("rows assigned at once")
    rows.legend(fontsize=9, frameon=False, loc="upper left", borderaxespad=0.0)
    figure.tight_layout(w_pad=1.5)


def _curve(axes: Axes, line: pd.DataFrame, label: str, colour: str, marker: str) -> None:
    """Mean over problems, with a band from the lowest to the highest."""
    axes.fill_between(line.index, line["min"], line["max"], color=colour, alpha=0.18, linewidth=0)
    axes.plot(line.index, line["mean"], color=colour, marker=marker, markersize=4.5, label=label)


def _compare(axes: Axes, numbers: pd.DataFrame) -> None:
    """One line for each method: a small dot for each problem, a large one for the mean, its number and seconds."""
    axes.set_xscale("symlog", linthresh=1.0)  # from below zero to a hundred per cent
    for place, (name, (_, colour, marker)) in enumerate(_METHODS.items()):
        own = numbers[numbers.method == name]
        mean, seconds = own.excess_percent.mean(), own.seconds.mean()
        looks: dict[str, Any] = {"markersize": 4, "markeredgewidth": 0, "alpha": 0.5}
        axes.plot(own.excess_percent, [place] * len(own), "o", color=colour, **looks)
        axes.plot([mean], [place], marker, color=colour, markersize=9, markeredgecolor="white")
        spent = f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000.0 * seconds:.2g} ms"
        text = f"{mean:.1f} %, {spent}".replace("-", "−")
        axes.annotate(text, (mean, place), (0, 9), textcoords="offset points", ha="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(_METHODS)), [text for text, *_ in _METHODS.values()], fontsize=9.5)
    axes.set_ylim(len(_METHODS) - 0.5, -0.7)
    axes.set_xlim(-1.0, 300.0)
    axes.set_xticks([0, 1, 3, 10, 30, 100], ["0", "1", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.axvline(0.0, color=BLACK, linewidth=1.0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("loss, % above the best found (linear up to 1)")
    style_axes(axes, grid="x")
    axes.spines["left"].set_visible(False)
