"""Measurements behind Figure 3: ways to assign points to strata at fixed distances, and whole solvers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vardass.data import load_watch, standardise
from vardass.solvers import stratify
from vardass.solvers.dynamic_kmeans import centroid_objective, greedy_assignment
from vardass.solvers.interior_point import relaxed_solution

__all__ = [
    "AssignmentProblem",
    "Scale",
    "fixed_distance_rows",
    "random_problem",
    "relaxed_value",
    "single_moves",
    "solver_rows",
    "trials_of_budget",
]

POINTS, STRATA = 100, 16
PARALLEL = 10
SOLVERS = ("kernel-kmeans", "interior-point", "dynamic-kmeans", "min-sum")

Row = tuple[str, int, str, int, int, float]
"""Panel, problem, method, trials, parallel, loss."""


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
