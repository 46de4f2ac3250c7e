"""Figure 3: how good Algorithm 2 is, against the interior-point method, the unweighted assignment and single moves.

As in the paper n = 100, k = 16 and the input is Euclidean distances between random embeddings: (a) 10 rows at once and
10⁵ trials against two alternatives, (b) 1 to 10⁵ trials with 10 rows at once, (c) 1 to 20 rows at once with 100 trials.
The paper's Humpbacks embeddings are not published, so embeddings are smart-watch windows, and it shows one problem
where here ten are averaged. Panel (d) is an addition: whole solvers, where the stratum means follow the assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vardass.data import load_watch, standardise
from vardass.figures.base import Cell, Claim, FigureResult
from vardass.plots import BLACK, BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION, dress
from vardass.solvers import stratify
from vardass.solvers.dynamic_kmeans import centroid_objective, greedy_assignment
from vardass.solvers.interior_point import relaxed_solution
from vardass.theory import spearman
from vardass.validate import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure3"]

POINTS, STRATA = 100, 16
PARALLEL = 10
PAPER, OURS = "dynamic-kmeans", "min-sum"
SOLVERS = ("kernel-kmeans", "interior-point", PAPER, OURS)
POOR = 5.0
"""Per cent above the best of all trials from which a single run counts as the paper's "poor"."""

_AFTER = "Algorithm 2, then single moves"
_METHODS = {
    "unweighted": ("unweighted (nearest centre)", GREY),
    "Algorithm 2": ("Algorithm 2", PURPLE),
    "interior point, rounded": ("interior point, rounded", ORANGE),
    "single moves": ("single moves (ours)", BLUE),
    "interior point, relaxed": ("interior point, relaxed\n(splits points)", ORANGE),
}
_SOLVERS = {
    "kernel-kmeans": ("k-means (unweighted)", GREY),
    "interior-point": ("Algorithm 1 with\ninterior point", ORANGE),
    "dynamic-kmeans": ("Algorithm 1 with\nAlgorithm 2 (paper)", PURPLE),
    "min-sum": ("min-sum (ours)", BLUE),
}
_LINES = {
    "one trial": ("average trial", VERMILION, "^"),
    "fixed trials": ("best of {trials} trials", PURPLE, "o"),
    "fixed steps": ("best of as many trials as {steps:,} steps allow", GREEN, "s"),
}

Row = tuple[str, int, str, int, int, float]
"""Panel, problem, method, trials, parallel, loss."""

Excess = dict[tuple[str, str, int, int], list[float]]
"""By panel, method, trials and parallel: per cent above the reference, one for each problem."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes
    ----------
    problems : int
        Random problems.
    trials : tuple of int
        Numbers of trials of Algorithm 2 in panel b; the last one is that of panel a.
    parallel : tuple of int
        Rows assigned at once in panel c.
    fixed_trials : int
        Trials in panel c.
    runs : int
        Trials to average over in all: a number of T trials is repeated ``runs`` / T times, at least once and at most
        ``repeats`` times.
    repeats : int
        See above.
    """

    problems: int
    trials: tuple[int, ...]
    parallel: tuple[int, ...]
    fixed_trials: int
    runs: int
    repeats: int

    def repeats_of(self, trials: int) -> int:
        """Repetitions to average over."""
        return max(1, min(self.repeats, self.runs // trials))


FULL = Scale(
    problems=10,
    trials=(1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    parallel=tuple(range(1, 21)),
    fixed_trials=100,
    runs=30_000,
    repeats=20,
)
QUICK = Scale(
    problems=3, trials=(1, 10, 100, 1000), parallel=(1, 2, 5, 10, 20), fixed_trials=100, runs=1000, repeats=10
)


def figure3(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Measure the greedy assignment of Algorithm 2.

    Parameters
    ----------
    seed : int
        Of all random numbers.
    quick : bool
        Three problems instead of ten and 10³ trials instead of 10⁵.
    progress : callable
        Called as ``progress(fraction, message)``.

    Returns
    -------
    FigureResult
        Columns ``panel``, ``problem``, ``method``, ``trials``, ``parallel`` (0 where they have no meaning), ``loss``
        (Σ_i D_{i,a_i} |S_{a_i}| in panels a to c, Var(μ̂) in d; the mean where trials were repeated) and
        ``excess_percent`` above the best assignment found for the problem or, in d, above a lower bound.
    """
    scale = QUICK if quick else FULL
    generator = torch.Generator().manual_seed(seed)
    rows: list[tuple[Cell, ...]] = []
    excess: Excess = {}
    splits = []
    for number in range(scale.problems):
        progress(number / scale.problems, f"problem {number + 1} of {scale.problems}")
        problem = random_problem(generator)
        fixed, split = fixed_distance_rows(problem, number, scale, generator)
        splits.append(split)
        whole = solver_rows(problem, number, seed + number)
        best = min(loss for _, _, method, *_, loss in fixed if method != "interior point, relaxed")
        bound = next(loss for _, _, method, *_, loss in whole if method == "lower bound")
        for part, reference in ((fixed, best), (whole, bound)):
            for row in part:
                panel, _, method, trials, parallel, loss = row
                percent = 100.0 * (loss / reference - 1.0)
                rows.append((*row, percent))
                excess.setdefault((panel, method, trials, parallel), []).append(percent)
    return FigureResult(
        number=3,
        title="the greedy assignment of Algorithm 2 against alternatives",
        caption=(
            f"Means over {scale.problems} problems of n = {POINTS} smart-watch windows and k = {STRATA} centres, in "
            "per cent above the best assignment found for the problem; in (d), which is not in the paper, above what "
            "no partition can go below. The interior-point method is the package's, not the paper's commercial one."
        ),
        columns=("panel", "problem", "method", "trials", "parallel", "loss", "excess_percent"),
        rows=rows,
        claims=_claims(excess, scale, splits),
        draw=lambda figure: _draw(figure, excess, scale),
        size=(10.0, 7.4),
        settings={"seed": seed, "quick": quick, "n": POINTS, "k": STRATA, "problems": scale.problems},
    )


@dataclass(frozen=True, eq=False)
class AssignmentProblem:
    """Points and their Euclidean distances to the centres of 16 strata.

    Attributes
    ----------
    points : Tensor of shape (100, 78)
        Standardised smart-watch windows.
    distances : Tensor of shape (100, 16)
        D, not squared, as in the paper's text.
    """

    points: Tensor
    distances: Tensor


def random_problem(generator: torch.Generator) -> AssignmentProblem:
    """Draw 116 windows of the right wrist: 100 points and 16 centres.

    The paper takes random embeddings of its Humpbacks data, which are not published.
    """
    data = load_watch()
    features = standardise(data.features[data.side == 1].double())
    rows = torch.randperm(len(features), generator=generator)[: POINTS + STRATA]
    points, centres = features[rows[:POINTS]], features[rows[POINTS:]]
    return AssignmentProblem(points, torch.cdist(points, centres))


def single_moves(distances: Tensor, labels: Tensor) -> Tensor:
    """Make the best move of one point until none lowers Σ_i D_{i,a_i} |S_{a_i}|: the rule of min-sum with D fixed.

    Parameters
    ----------
    distances : Tensor of shape (n, k)
        D.
    labels : Tensor of shape (n,)
        Where to start.

    Returns
    -------
    Tensor of shape (n,)
        Strata that no single move improves.
    """
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


def trials_of_budget(parallel: int, scale: Scale) -> int:
    """Trials that take as many sequential steps as ``fixed_trials`` with ten rows at once."""
    return max(1, scale.fixed_trials * -(-POINTS // PARALLEL) // -(-POINTS // parallel))


def fixed_distance_rows(
    problem: AssignmentProblem, number: int, scale: Scale, generator: torch.Generator
) -> tuple[list[Row], float]:
    """Panels a to c for one problem, and the share of points that the relaxed solution splits between strata."""
    distances = problem.distances
    nearest = distances.argmin(1)
    shares = relaxed_solution(distances)
    rounded = shares.argmax(1)
    fixed = {
        "unweighted": nearest,
        "interior point, rounded": rounded,
        "single moves": single_moves(distances, nearest),
        "interior point, then single moves": single_moves(distances, rounded),
    }
    rows: list[Row] = [
        ("a", number, name, 0, 0, centroid_objective(distances, labels)) for name, labels in fixed.items()
    ]
    rows.append(("a", number, "interior point, relaxed", 0, 0, relaxed_value(distances, shares)))

    def greedy(panel: str, name: str, trials: int, parallel: int) -> Tensor:
        found = [
            greedy_assignment(distances, trials=trials, parallel=parallel, generator=generator)
            for _ in range(scale.repeats_of(trials))
        ]
        losses = [centroid_objective(distances, labels) for labels in found]
        rows.append((panel, number, name, trials, parallel, sum(losses) / len(losses)))
        return found[-1]

    for trials in scale.trials:
        labels = greedy("b", "Algorithm 2", trials, PARALLEL)
    improved = single_moves(distances, labels)
    rows.append(
        ("a", number, "Algorithm 2, then single moves", trials, PARALLEL, centroid_objective(distances, improved))
    )
    for parallel in scale.parallel:
        greedy("c", "one trial", 1, parallel)
        greedy("c", "fixed trials", scale.fixed_trials, parallel)
        greedy("c", "fixed steps", trials_of_budget(parallel, scale), parallel)
    split = float((shares.amax(1) < 0.99).double().mean())
    return rows, split


def solver_rows(problem: AssignmentProblem, number: int, seed: int) -> list[Row]:
    """Panel d for one problem: Var(μ̂) of whole solvers on the points, and what no partition can go below."""
    rows: list[Row] = []
    for solver in SOLVERS:
        strata = stratify(
            problem.points, STRATA, kernel="linear", solver=solver, seed=seed, certify=solver == SOLVERS[-1]
        )
        rows.append(("d", number, solver, 0, 0, strata.variance))
        if strata.bound is not None:
            rows.append(("d", number, "lower bound", 0, 0, strata.bound.variance))
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _of_method(excess: Excess, scale: Scale, method: str) -> list[float]:
    """What panel a shows for ``method``."""
    if method == "Algorithm 2":
        return excess["b", method, scale.trials[-1], PARALLEL]
    return excess["a", method, 0, 0]


def _line(excess: Excess, panel: str, method: str) -> dict[int, list[float]]:
    """Excesses of one line by its x: trials in panel b, parallel rows in c."""
    found = {key: values for key, values in excess.items() if key[:2] == (panel, method)}
    return {(trials if panel == "b" else parallel): values for (_, _, trials, parallel), values in found.items()}


def _wins(ours: Sequence[float], others: Sequence[float]) -> int:
    return sum(a < b for a, b in zip(ours, others, strict=True))


def _claims(excess: Excess, scale: Scale, splits: Sequence[float]) -> tuple[Claim, ...]:
    best_of_trials, moves = (_of_method(excess, scale, name) for name in ("Algorithm 2", "single moves"))
    single, final = _mean(excess["b", "Algorithm 2", 1, PARALLEL]), _mean(best_of_trials)
    poor = 100.0 * ((100.0 + single) / (100.0 + final) - 1.0)
    average = {parallel: _mean(values) for parallel, values in _line(excess, "c", "one trial").items()}
    trend = spearman(list(average), list(average.values()))  # type: ignore[arg-type]
    last = scale.parallel[-1]
    budget = {parallel: _mean(values) for parallel, values in _line(excess, "c", "fixed steps").items()}
    best = min((p for p in budget if p > 1), key=lambda p: budget[p])
    after = _mean(excess["a", _AFTER, scale.trials[-1], PARALLEL])
    lowered = _wins(excess["a", _AFTER, scale.trials[-1], PARALLEL], best_of_trials)
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
            f"{final:.1f} to {after:.1f} % above the best found",
        ),
        _lower("single moves from the unweighted start end lower than Algorithm 2", moves, best_of_trials),
        _lower(
            "min-sum finds strata of less variance than Algorithm 1", excess["d", OURS, 0, 0], excess["d", PAPER, 0, 0]
        ),
    )


def _lower(statement: str, ours: Sequence[float], papers: Sequence[float]) -> Claim:
    wins = _wins(ours, papers)
    evidence = f"lower on {wins} of {len(ours)} problems, on average {_mean(ours):.1f} % and {_mean(papers):.1f} %"
    return Claim(statement, wins == len(ours), evidence, source="ours")


def _draw(figure: Figure, excess: Excess, scale: Scale) -> None:
    (a, b), (d, c) = figure.subplots(2, 2)
    moves = _mean(_of_method(excess, scale, "single moves"))
    _compare(a, {text: (_of_method(excess, scale, name), colour) for name, (text, colour) in _METHODS.items()})
    _compare(d, {text: (excess["d", name, 0, 0], colour) for name, (text, colour) in _SOLVERS.items()})
    a.set_xlabel("loss, % above the best assignment found")
    d.set_xlabel("Var(μ̂), % above what no partition can go below")
    _curve(b, _line(excess, "b", "Algorithm 2"), "Algorithm 2", PURPLE, "o")
    steps = scale.fixed_trials * POINTS // PARALLEL
    for name, (text, colour, marker) in _LINES.items():
        _curve(c, _line(excess, "c", name), text.format(trials=scale.fixed_trials, steps=steps), colour, marker)
    for axes in (b, c):
        axes.axhline(moves, color=BLUE, linewidth=1.6, linestyle="--")
        axes.text(0.02, moves, "single moves (ours)", transform=axes.get_yaxis_transform(), color=BLUE, va="bottom")
        axes.set_ylabel("loss, % above the best found")
        dress(axes)
    b.set_xscale("log")
    b.set_ylim(bottom=0.0)
    b.set_xlabel("random trials")
    c.set_yscale("log")
    c.set_ylim(moves / 1.6, 12.0 * max(max(values) for values in _line(excess, "c", "one trial").values()))
    c.set_yticks([1, 10, 100], ["1", "10", "100"])
    c.set_xticks([1, 5, 10, 15, 20])
    c.set_xlabel("rows assigned at once")
    c.legend(fontsize=9.5, frameon=False, loc="upper left", borderaxespad=0.0)
    titles = {
        a: f"(a) fixed distances, {scale.trials[-1]:,} trials",
        b: f"(b) {PARALLEL} rows at once",
        c: "(c) more rows at once",
        d: "(d) whole solvers",
    }
    for axes, title in titles.items():
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    figure.tight_layout(h_pad=2.0, w_pad=2.0)


def _curve(axes: Axes, line: dict[int, list[float]], label: str, colour: str, marker: str) -> None:
    """Mean over problems, with a band from the lowest to the highest."""
    x = list(line)
    low, high = [min(values) for values in line.values()], [max(values) for values in line.values()]
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(x, [_mean(values) for values in line.values()], color=colour, marker=marker, markersize=4.5, label=label)


def _compare(axes: Axes, groups: dict[str, tuple[list[float], str]]) -> None:
    """One line for each group: a small dot for each problem, a large one for the mean, and its number."""
    axes.set_xscale("symlog", linthresh=1.0)  # from below zero to a hundred per cent
    for place, (values, colour) in enumerate(groups.values()):
        mean = _mean(values)
        axes.plot([0.0, mean], [place, place], color=colour, linewidth=2.2)
        axes.plot(values, [place] * len(values), "|", color=colour, markersize=12, markeredgewidth=1.3, alpha=0.7)
        axes.plot([mean], [place], "o", color=colour, markersize=8.5, markeredgecolor="white")
        text = f"{mean:.1f} %".replace("-", "−")
        axes.annotate(text, (mean, place), (0, 9), textcoords="offset points", ha="center", fontsize=9.5, color=INK)
    axes.set_yticks(range(len(groups)), list(groups), fontsize=9.5)
    axes.set_ylim(len(groups) - 0.5, -0.7)
    axes.set_xlim(-1.0, 200.0)
    axes.set_xticks([0, 1, 3, 10, 30, 100], ["0", "1", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.axvline(0.0, color=BLACK, linewidth=1.0)
    axes.tick_params(axis="y", length=0)
    dress(axes, grid="x")
    axes.spines["left"].set_visible(False)
