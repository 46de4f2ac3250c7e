"""Figure 3: how good Algorithm 2 is, against the interior-point method, the unweighted assignment and single moves.

As in the paper n = 100, k = 16 and the input is Euclidean distances between random embeddings: (a) 10 rows at once and
10⁵ trials against two alternatives, (b) 1 to 10⁵ trials with 10 rows at once, (c) 1 to 20 rows at once with 100 trials.
The paper's Humpbacks embeddings are not published, so embeddings are smart-watch windows, and it shows one problem
where here ten are averaged. Two panels are added: (d) whole solvers, where the stratum means follow the assignment, and
(e) what the time buys, since the paper argues with a time budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vardass.data import load_watch, standardise
from vardass.paper.figures import Claim, FigureResult
from vardass.paper.interior_point import relaxed_solution
from vardass.paper.theory import spearman
from vardass.plots import BLACK, BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION, style_axes
from vardass.solvers import stratify
from vardass.solvers.kmeans import centroid_objective, greedy_assignment
from vardass.validate import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure3"]

POINTS, STRATA = 100, 16
PARALLEL = 10
POOR = 5.0
"""Per cent above the best of all trials from which a single run counts as the paper's "poor"."""

_GREEDY, _AFTER = "Algorithm 2", "Algorithm 2, then single moves"
_MOVES, _RELAXED = "single moves", "interior point, relaxed"
_PAPER, _OURS, _BOUND = "dynamic-kmeans", "min-sum", "lower bound"
_METHODS = {
    "unweighted": ("unweighted (nearest centre)", GREY, "D"),
    _GREEDY: ("Algorithm 2", PURPLE, "o"),
    "interior point, rounded": ("interior point, rounded", ORANGE, "P"),
    _MOVES: ("single moves (ours)", BLUE, "s"),
    _RELAXED: ("interior point, relaxed\n(splits points)", ORANGE, "P"),
}
_SOLVERS = {
    "kernel-kmeans": ("k-means (unweighted)", GREY, "D"),
    "interior-point": ("Algorithm 1 with\ninterior point", ORANGE, "P"),
    _PAPER: ("Algorithm 1 with\nAlgorithm 2 (paper)", PURPLE, "o"),
    _OURS: ("min-sum (ours)", BLUE, "s"),
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
    # trials to average over in all: a number of T trials is repeated ``runs`` / T times, at least once and at most
    # ``repeats`` times
    runs: int
    repeats: int  # see above

    def repeats_of(self, trials: int) -> int:
        """Repetitions to average over."""
        return max(1, min(self.repeats, self.runs // trials))


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
    """One loss."""

    panel: str  # where it is shown, and of what
    problem: int
    method: str
    trials: int  # of Algorithm 2; 0 where they have no meaning
    parallel: int
    loss: float  # Σ_i D_{i,a_i} |S_{a_i}| in panels a to c, Var(μ̂) in d; the mean where trials were repeated
    seconds: float  # of one run, CPU time on one thread: other work on the machine does not count
    # of the loss above the best assignment found for the problem or, in d, above a lower bound
    excess_percent: float = 0.0


def figure3(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Measure the greedy assignment of Algorithm 2."""
    scale = QUICK if quick else FULL
    generator = torch.Generator().manual_seed(seed)
    rows: list[MeasuredLoss] = []
    splits = []
    for number in range(scale.problems):
        progress(number / scale.problems, f"problem {number + 1} of {scale.problems}")
        points, distances = random_problem(generator)
        if number == 0:  # compiled loops are made before the clock runs
            greedy_assignment(distances, trials=1, parallel=PARALLEL, generator=0)
            solver_rows(points, number, seed)
        fixed, split = fixed_distance_rows(distances, number, scale, generator)
        whole = solver_rows(points, number, seed + number)
        splits.append(split)
        rows += _above(fixed, min(row.loss for row in fixed if row.method != _RELAXED))
        rows += _above(whole, next(row.loss for row in whole if row.method == _BOUND))
    return FigureResult(
        number=3,
        title="the greedy assignment of Algorithm 2 against alternatives",
        caption=(
            f"Means over {scale.problems} problems of n = {POINTS} smart-watch windows and k = {STRATA} centres, in "
            "per cent above the best assignment found for the problem; in (d) above what no partition can go below. "
            "The interior-point method is the package's, not the paper's commercial one. Seconds are CPU time of "
            "one run. Panels (d) and (e) are not in the paper."
        ),
        columns=MeasuredLoss._fields,
        rows=list(rows),
        claims=_claims(rows, scale, splits),
        draw=lambda figure: _draw(figure, rows, scale),
        size=(13.0, 7.8),
        settings={"seed": seed, "quick": quick, "n": POINTS, "k": STRATA, "problems": scale.problems},
    )


def _above(rows: Sequence[MeasuredLoss], reference: float) -> list[MeasuredLoss]:
    return [row._replace(excess_percent=100.0 * (row.loss / reference - 1.0)) for row in rows]


def random_problem(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points (100, 78) and their Euclidean distances D (100, 16) to centres, all windows of the right wrist.

    D is not squared, as in the paper's text. The paper takes random embeddings of its Humpbacks data, which are not
    published.
    """
    data = load_watch()
    features = standardise(data.features[data.side == 1].double())
    rows = torch.randperm(len(features), generator=generator)[: POINTS + STRATA]
    points, centres = features[rows[:POINTS]], features[rows[POINTS:]]
    return points, torch.cdist(points, centres)


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


def relaxed_value(distances: Tensor, shares: Tensor) -> float:
    """Value of equation 16 at ``shares`` U (n, k): Σ_j (Σ_i U_ij) (Σ_i D_ij U_ij)."""
    return float(shares.sum(0) @ (distances * shares).sum(0))


def trials_of_budget(parallel: int, scale: Effort) -> int:
    """Trials that take as many sequential steps as ``fixed_trials`` with ten rows at once."""
    return max(1, scale.fixed_trials * -(-POINTS // PARALLEL) // -(-POINTS // parallel))


def fixed_distance_rows(
    distances: Tensor, number: int, scale: Effort, generator: torch.Generator
) -> tuple[list[MeasuredLoss], float]:
    """Panels a to c for one problem, and the share of points that the relaxed solution splits between strata."""
    rows: list[MeasuredLoss] = []

    def add(panel: str, name: str, run: Callable[[], Tensor], trials: int = 0, parallel: int = 0) -> Tensor:
        clock = time.process_time()
        found = [run() for _ in range(scale.repeats_of(trials) if trials else 1)]
        seconds = (time.process_time() - clock) / len(found)
        loss = fmean(centroid_objective(distances, labels) for labels in found)
        rows.append(MeasuredLoss(panel, number, name, trials, parallel, loss, seconds))
        return found[-1]

    def greedy(panel: str, name: str, trials: int, parallel: int) -> Tensor:
        def run() -> Tensor:
            return greedy_assignment(distances, trials=trials, parallel=parallel, generator=generator)

        return add(panel, name, run, trials, parallel)

    nearest = add("a", "unweighted", lambda: distances.argmin(1))
    add("a", _MOVES, lambda: single_moves(distances, nearest))
    clock = time.process_time()
    shares = relaxed_solution(distances)
    seconds = time.process_time() - clock
    rows.append(MeasuredLoss("a", number, _RELAXED, 0, 0, relaxed_value(distances, shares), seconds))
    rounded = shares.argmax(1)
    rounded_loss = centroid_objective(distances, rounded)
    rows.append(MeasuredLoss("a", number, "interior point, rounded", 0, 0, rounded_loss, seconds))
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


def solver_rows(points: Tensor, number: int, seed: int) -> list[MeasuredLoss]:
    """Panel d for one problem: Var(μ̂) of whole solvers on the points, and what no partition can go below."""
    rows: list[MeasuredLoss] = []
    for solver in _SOLVERS:
        clock = time.process_time()
        strata = stratify(points, STRATA, kernel="linear", solver=solver, seed=seed)
        rows.append(MeasuredLoss("d", number, solver, 0, 0, strata.variance, time.process_time() - clock))
    certified = stratify(points, STRATA, kernel="linear", solver=_OURS, seed=seed, certify=True)
    assert certified.bound is not None
    return [*rows, MeasuredLoss("d", number, _BOUND, 0, 0, certified.bound.variance, 0.0)]


def _values(rows: Sequence[MeasuredLoss], panel: str, method: str) -> list[float]:
    """Excess of a method of panel a or d, by problem."""
    return [row.excess_percent for row in rows if (row.panel, row.method) == (panel, method)]


def _line(rows: Sequence[MeasuredLoss], panel: str, method: str, y: str = "excess_percent") -> dict[int, list[float]]:
    """Values of one line by its x, trials in panel b and parallel rows in c; one for each problem."""
    line: dict[int, list[float]] = {}
    for row in rows:
        if (row.panel, row.method) == (panel, method):
            line.setdefault(row.trials if panel == "b" else row.parallel, []).append(getattr(row, y))
    return line


def _claims(rows: Sequence[MeasuredLoss], scale: Effort, splits: Sequence[float]) -> tuple[Claim, ...]:
    greedy, after, moves = (_values(rows, "a", name) for name in (_GREEDY, _AFTER, _MOVES))
    single, final = fmean(_line(rows, "b", _GREEDY)[1]), fmean(greedy)
    poor = 100.0 * ((100.0 + single) / (100.0 + final) - 1.0)
    average = {parallel: fmean(values) for parallel, values in _line(rows, "c", "one trial").items()}
    trend = spearman(list(average), list(average.values()))  # type: ignore[arg-type]
    last = scale.parallel[-1]
    budget = {parallel: fmean(values) for parallel, values in _line(rows, "c", "fixed steps").items()}
    best = min((p for p in budget if p > 1), key=lambda p: budget[p])
    lowered = _wins(after, greedy)
    steps = scale.fixed_trials * POINTS // PARALLEL
    return (
        Claim(
            f"a single run of Algorithm 2 is likely to give a poor solution, taken as more than {POOR:g} % above the "
            "best of all trials",
            poor > POOR,
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
            budget[PARALLEL] < budget[1],
            f"in {steps:,} steps {budget[1]:.1f} % with one row at once, {budget[PARALLEL]:.1f} % with the paper's "
            f"{PARALLEL}, and {budget[best]:.1f} % with {best}, the best number above one",
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
            f"{final:.1f} to {fmean(after):.1f} % above the best found",
        ),
        _lower("single moves from the unweighted start end lower than Algorithm 2", moves, greedy),
        _lower(
            "min-sum finds strata of less variance than Algorithm 1",
            _values(rows, "d", _OURS),
            _values(rows, "d", _PAPER),
        ),
    )


def _lower(statement: str, ours: Sequence[float], papers: Sequence[float]) -> Claim:
    wins = _wins(ours, papers)
    evidence = f"lower on {wins} of {len(ours)} problems, on average {fmean(ours):.1f} % and {fmean(papers):.1f} %"
    return Claim(statement, wins == len(ours), evidence, source="ours")


def _wins(ours: Sequence[float], others: Sequence[float]) -> int:
    return sum(a < b for a, b in zip(ours, others, strict=True))


def _draw(figure: Figure, rows: Sequence[MeasuredLoss], scale: Effort) -> None:
    panels = figure.subplot_mosaic("aabbcc;dddeee")
    titles = {
        "a": f"(a) fixed distances, {scale.trials[-1]:,} trials",
        "b": f"(b) {PARALLEL} rows at once",
        "c": "(c) more rows at once",
        "d": "(d) whole solvers",
        "e": "(e) what the time buys",
    }
    for name, title in titles.items():
        panels[name].set_title(title, loc="left", fontsize=11, fontweight="bold")
    _compare(panels["a"], rows, "a", _METHODS)
    panels["a"].set_xlabel("loss, % above the best found (linear up to 1)")
    _compare(panels["d"], rows, "d", _SOLVERS)
    panels["d"].set_xlabel("Var(μ̂), % above what no partition can go below (linear up to 1)")
    _curve(panels["b"], _line(rows, "b", _GREEDY), "Algorithm 2", PURPLE, "o")
    steps = scale.fixed_trials * POINTS // PARALLEL
    for name, (text, colour, marker) in _LINES.items():
        label = text.format(trials=scale.fixed_trials, steps=steps)
        _curve(panels["c"], _line(rows, "c", name), label, colour, marker)
    moves = fmean(_values(rows, "a", _MOVES))
    for axes in (panels["b"], panels["c"]):
        axes.axhline(moves, color=BLUE, linewidth=1.6, linestyle="--")
        axes.text(0.02, moves, "single moves (ours)", transform=axes.get_yaxis_transform(), color=BLUE, va="bottom")
        axes.set_ylabel("loss, % above the best found")
        style_axes(axes)
    panels["b"].set_xscale("log")
    panels["b"].set_ylim(bottom=0.0)
    panels["b"].set_xlabel("random trials")
    highest = max(max(values) for values in _line(rows, "c", "one trial").values())
    panels["c"].set_yscale("log")
    panels["c"].set_ylim(moves / 1.6, 20.0 * highest)
    panels["c"].set_yticks([1, 10, 100], ["1", "10", "100"])
    panels["c"].set_xticks([1, 5, 10, 15, 20])
    panels["c"].set_xlabel("rows assigned at once")
    panels["c"].legend(fontsize=9, frameon=False, loc="upper left", borderaxespad=0.0)
    _draw_time(panels["e"], rows, scale)
    figure.tight_layout(h_pad=2.0, w_pad=1.5)


def _curve(axes: Axes, line: dict[int, list[float]], label: str, colour: str, marker: str) -> None:
    """Mean over problems, with a band from the lowest to the highest."""
    x = list(line)
    low, high = [min(values) for values in line.values()], [max(values) for values in line.values()]
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(x, [fmean(values) for values in line.values()], color=colour, marker=marker, markersize=4.5, label=label)


def _compare(axes: Axes, rows: Sequence[MeasuredLoss], panel: str, looks: dict[str, tuple[str, str, str]]) -> None:
    """One line for each method: a small dot for each problem, a large one for the mean, its number and seconds."""
    axes.set_xscale("symlog", linthresh=1.0)  # from below zero to a hundred per cent
    for place, (name, (_, colour, marker)) in enumerate(looks.items()):
        values = _values(rows, panel, name)
        mean, seconds = fmean(values), fmean(row.seconds for row in rows if (row.panel, row.method) == (panel, name))
        axes.plot(values, [place] * len(values), "o", color=colour, markersize=4, markeredgewidth=0, alpha=0.5)
        axes.plot([mean], [place], marker, color=colour, markersize=9, markeredgecolor="white")
        spent = f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000.0 * seconds:.2g} ms"
        text = f"{mean:.1f} %, {spent}".replace("-", "−")
        axes.annotate(text, (mean, place), (0, 9), textcoords="offset points", ha="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(looks)), [text for text, *_ in looks.values()], fontsize=9.5)
    axes.set_ylim(len(looks) - 0.5, -0.7)
    axes.set_xlim(-1.0, 300.0)
    axes.set_xticks([0, 1, 3, 10, 30, 100], ["0", "1", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.axvline(0.0, color=BLACK, linewidth=1.0)
    axes.tick_params(axis="y", length=0)
    style_axes(axes, grid="x")
    axes.spines["left"].set_visible(False)


def _draw_time(axes: Axes, rows: Sequence[MeasuredLoss], scale: Effort) -> None:
    """Loss against seconds: further down and further left is better."""
    for panel, method, colour, marker, label in (
        ("b", _GREEDY, PURPLE, "o", f"Algorithm 2, {PARALLEL} rows at once, 1 to {scale.trials[-1]:,} trials"),
        ("c", "fixed trials", GREEN, "^", f"Algorithm 2, {scale.fixed_trials} trials, 1 to {scale.parallel[-1]} rows"),
    ):
        seconds, excess = (_line(rows, panel, method, y) for y in ("seconds", "excess_percent"))
        x, y = ([fmean(values) for values in line.values()] for line in (seconds, excess))
        axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.2, label=label)
    for name in ("interior point, rounded", _MOVES):
        text, colour, marker = _METHODS[name]
        spent = fmean(row.seconds for row in rows if (row.panel, row.method) == ("a", name))
        axes.plot([spent], [fmean(_values(rows, "a", name))], marker, color=colour, markersize=9, label=text)
    axes.set_xscale("log")
    axes.set_ylim(0.0, 1.5 * axes.get_ylim()[1])  # room for the legend
    axes.set_xlabel("CPU seconds on one thread")
    axes.set_ylabel("loss, % above the best found")
    axes.legend(fontsize=9, frameon=False, loc="upper right")
    style_axes(axes)
