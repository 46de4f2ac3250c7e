"""Figure 3: losses of assignments against their definition and brute force, and claims from the numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quick_figures import quick, select
from vardass.paper.figures import draw_figure
from vardass.paper.figures.figure3 import (
    Effort,
    losses_of,
    random_problem,
    single_moves,
    trials_of_budget,
)
from vardass.paper.interior_point import relaxed_objective
from vardass.paper.kmeans import greedy_assignment

DOUBLE = torch.float64
TINY = Effort(problems=1, trials=(1, 10), parallel=(1, 10), fixed_trials=10, runs=10, repeats=3)


def loss_by_definition(distances: Tensor, labels: Tensor) -> float:
    """Σ_j |S_j| Σ_{i in S_j} D_ij, one term at a time."""
    total = 0.0
    for i, a in enumerate(labels.tolist()):
        total += float(distances[i, a]) * sum(b == a for b in labels.tolist())
    return total


def test_single_moves_end_where_no_move_helps() -> None:
    generator = torch.Generator().manual_seed(0)
    distances = torch.rand(9, 3, dtype=DOUBLE, generator=generator) + 0.2
    start = distances.argmin(1)
    found = single_moves(distances, start)
    least = loss_by_definition(distances, found)
    assert least < loss_by_definition(distances, start)
    for i, j in itertools.product(range(9), range(3)):
        moved = found.clone()
        moved[i] = j
        assert loss_by_definition(distances, moved) >= least - 1e-9
    whole = (torch.tensor(labels) for labels in itertools.product(range(3), repeat=9))
    optimum = min(_fast_loss(distances, labels) for labels in whole)
    assert optimum <= least <= 1.05 * optimum  # close to the best of all 3⁹ assignments


def _fast_loss(distances: Tensor, labels: Tensor) -> float:
    member = torch.nn.functional.one_hot(labels, 3).double()
    return float(member.sum(0) @ (member * distances).sum(0))


def test_figure_3_losses_are_those_of_the_assignments() -> None:
    generator = torch.Generator().manual_seed(0)
    distances = random_problem(generator)
    assert distances.shape == (100, 16)
    state = generator.get_state()
    rows, split = losses_of(distances, 0, TINY, generator)
    losses = {(row.panel, row.method, row.trials, row.parallel): row.loss for row in rows}
    nearest = distances.argmin(1)
    assert losses["a", "unweighted", 0, 0] == pytest.approx(loss_by_definition(distances, nearest), rel=1e-12)
    generator.set_state(state)  # the first greedy runs: three of one trial
    runs = [greedy_assignment(distances, trials=1, parallel=10, generator=generator) for _ in range(3)]
    mean = sum(loss_by_definition(distances, labels) for labels in runs) / 3
    assert losses["b", "Algorithm 2", 1, 10] == pytest.approx(mean, rel=1e-12)
    assert losses["a", "Algorithm 2, then single moves", 0, 0] <= losses["b", "Algorithm 2", 10, 10]
    assert losses["a", "interior point, relaxed", 0, 0] < losses["a", "interior point, rounded", 0, 0]
    assert 0.0 <= split <= 1.0


def test_relaxed_value_is_the_loss_where_nothing_is_split() -> None:
    distances = torch.rand(7, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 1, 2, 0, 0, 1])
    whole = torch.nn.functional.one_hot(labels, 3).double()
    assert relaxed_objective(distances, whole) == pytest.approx(loss_by_definition(distances, labels), rel=1e-12)
    one_point = torch.ones(1, 2, dtype=DOUBLE)
    assert relaxed_objective(one_point, 0.5 * one_point) == 0.5  # both whole assignments cost 1


def test_budget_counts_sequential_steps() -> None:
    scale = Effort(problems=1, trials=(1,), parallel=(1,), fixed_trials=100, runs=1, repeats=1)
    assert [trials_of_budget(p, scale) for p in (1, 2, 10, 20)] == [10, 20, 100, 200]  # of 100, 50, 10 and 5 steps


def test_figure_3_verdicts_follow_the_rows() -> None:
    result = quick(3)
    fixed = [row for row in select(result) if row["method"] != "interior point, relaxed"]
    for problem in range(3):
        of_problem = [row for row in fixed if row["problem"] == problem]
        best = min(float(row["loss"]) for row in of_problem)
        for row in of_problem:
            assert row["excess_percent"] == pytest.approx(100.0 * (float(row["loss"]) / best - 1.0), abs=1e-9)

    def mean(**values: str | int) -> float:
        found = [float(row["excess_percent"]) for row in select(result, **values)]
        assert len(found) == 3
        return sum(found) / 3

    by_trials = [mean(panel="b", trials=trials) for trials in (1, 10, 100, 1000)]
    assert by_trials == sorted(by_trials, reverse=True)
    plain, inner, poor, average, budget, integral, local, moves = result.claims
    assert plain.held == (mean(panel="a", method="unweighted") > by_trials[-1])
    assert inner.held == (mean(panel="a", method="interior point, rounded") > by_trials[-1])
    steps = {p: mean(panel="c", method="fixed steps", parallel=p) for p in (1, 10)}
    assert budget.held == (steps[10] < steps[1])
    single = [mean(panel="c", method="one trial", parallel=p) for p in (1, 2, 5, 10, 20)]
    assert average.held == (single == sorted(single))
    assert poor.held == ((100.0 + by_trials[0]) / (100.0 + by_trials[-1]) > 1.05)
    assert not integral.held
    after, before = select(result, method="Algorithm 2, then single moves"), select(result, panel="b", trials=1000)
    lowered = [float(a["loss"]) < float(b["loss"]) for a, b in zip(after, before, strict=True)]
    assert local.held == (not all(lowered))
    pairs = zip(select(result, method="single moves"), before, strict=True)
    assert moves.held == all(float(a["loss"]) < float(b["loss"]) for a, b in pairs)


def test_figure_3_shows_its_panels_in_the_papers_order_and_dots_without_stems() -> None:
    drawn = draw_figure(quick(3))
    panels = {axes.get_title(loc="left")[1]: axes for axes in drawn.axes}
    places = [(-round(axes.get_position().y0, 2), axes.get_position().x0) for _, axes in sorted(panels.items())]
    assert sorted(panels) == ["a", "b", "c"]
    assert places == sorted(places)  # row by row, from the left
    marks = [line for line in panels["a"].lines if len(set(line.get_ydata())) == 1]
    assert marks
    assert all(line.get_linestyle() == "None" for line in marks)
    assert [row["seconds"] > 0.0 for row in select(quick(3), panel="b")] == [True] * 12
