"""Algorithms 1 and 2, Lloyd, and what holds for every baseline solver."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from torch import Tensor

from conftest import refused
from solver_problems import SOLVERS, exact, gen, greedy_cost, linear, points, run, sizes_of
from vardass.paper import kmeans as kmeans_module
from vardass.paper.kmeans import _greedy_in_order, greedy_assignment, kernel_kmeans
from vardass.solvers.labels import SizeLimits, random_balanced_labels, start_labels
from vardass.view import ExactView, LowRankView, View

each_solver = pytest.mark.parametrize("solver", SOLVERS)

# --- Algorithm 2 ------------------------------------------------------------------------------------------


def literal_greedy(distances: Tensor, order: list[int], parallel: int) -> list[int]:
    """Algorithm 2 word for word; p rows at a time see the same sizes."""
    n, k = distances.shape
    sizes, labels = [0] * k, [-1] * n
    tiny = torch.finfo(distances.dtype).tiny  # of strata at distance 0 the emptiest is taken
    for start in range(0, n, parallel):
        rows = order[start : start + parallel]
        picks = [min(range(k), key=lambda j: max(float(distances[i, j]), tiny) * (sizes[j] + 1)) for i in rows]
        for i, j in zip(rows, picks, strict=True):
            labels[i] = j
            sizes[j] += 1
    return labels


@pytest.mark.parametrize(("n", "k", "parallel"), [(30, 4, 1), (31, 4, 10), (7, 3, 20), (25, 1, 4), (12, 12, 5)])
@pytest.mark.parametrize("zeros", [False, True])
def test_greedy_equals_the_literal_algorithm(n: int, k: int, parallel: int, zeros: bool) -> None:
    distances = torch.rand(n, k, generator=gen(n), dtype=torch.float64)
    if zeros:
        distances = (distances * 3).floor()  # many ties, many at distance 0
        distances[0] = 0.0
    orders = torch.stack([torch.randperm(n, generator=gen(t)) for t in range(5)])
    picked, costs = _greedy_in_order(distances, orders, parallel)
    for t in range(5):
        order = orders[t].tolist()
        expected = literal_greedy(distances, order, parallel)
        assert picked[t].tolist() == [expected[i] for i in order]
        assert float(costs[t]) == pytest.approx(greedy_cost(distances, torch.tensor(expected)), abs=1e-12)


@pytest.mark.parametrize("step_numbers", [1, 60, 2**18])
def test_greedy_keeps_the_cheapest_trial(monkeypatch: pytest.MonkeyPatch, step_numbers: int) -> None:
    monkeypatch.setattr(kmeans_module, "_STEP_NUMBERS", step_numbers)  # trials in one or in many batches
    distances = torch.rand(40, 5, generator=gen(0), dtype=torch.float64)
    generator = gen(3)
    costs = [
        greedy_cost(distances, torch.tensor(literal_greedy(distances, order.tolist(), 4)))
        for order in (torch.randperm(40, generator=generator) for _ in range(13))
    ]
    assert max(costs) > min(costs)
    labels = greedy_assignment(distances, trials=13, parallel=4, generator=gen(3))
    assert greedy_cost(distances, labels) == pytest.approx(min(costs))


def test_greedy_forbids_infinite_distances() -> None:
    distances = torch.rand(20, 3, generator=gen(0))
    distances[:, 1] = torch.inf
    assert 1 not in greedy_assignment(distances, trials=100, parallel=10, generator=gen(0)).tolist()


# --- Algorithm 1 ------------------------------------------------------------------------------------------


def test_incumbent_never_rises_and_beats_its_start() -> None:
    problem, limits = exact(points(120)), SizeLimits(1, 120)
    for seed in range(4):
        start = start_labels(problem, 8, "kmeans++", limits=limits, generator=gen(seed))
        seen: list[float] = []
        solution = run(
            "dynamic-kmeans",
            problem,
            8,
            limits=limits,
            labels=start,
            seed=1,
            progress=lambda _, message, seen=seen: seen.append(float(message.split()[-1])),
        )
        assert seen == sorted(seen, reverse=True)
        assert len(seen) == solution.n_iter
        assert solution.objective == pytest.approx(seen[-1], rel=1e-5)
        assert solution.objective < 0.95 * problem.objective(start, 8)
        assert solution.converged


@pytest.mark.parametrize("patience", [1, 4])
def test_dynamic_kmeans_waits_for_patience_at_an_optimum(patience: int) -> None:
    x = torch.cat([points(10), points(10, seed=1) + 1000.0])
    labels = torch.arange(20) // 10
    solution = run("dynamic-kmeans", linear(x), 2, limits=SizeLimits(1, 20), labels=labels, patience=patience)
    assert torch.equal(solution.labels, labels)
    assert (solution.n_iter, solution.converged) == (patience, True)


def test_dynamic_kmeans_stops_after_patience_or_max_iter() -> None:
    problem = exact(points(60))
    best = run("dynamic-kmeans", problem, 4, limits=SizeLimits(1, 60), seed=0)
    limits = SizeLimits(1, 60)
    again = run("dynamic-kmeans", problem, 4, limits=limits, labels=best.labels, seed=0, max_iter=1)
    assert (again.n_iter, again.converged) == (1, False)
    assert again.objective <= best.objective
    still = run("dynamic-kmeans", problem, 4, limits=limits, labels=best.labels, seed=0, patience=1)
    assert still.converged
    none = run("dynamic-kmeans", problem, 4, limits=limits, labels=best.labels, max_iter=0)
    assert torch.equal(none.labels, best.labels)


def test_dynamic_kmeans_is_better_than_unweighted_kmeans() -> None:
    problem = exact(points(200, 4))
    limits = SizeLimits(1, 200)
    ours = run("dynamic-kmeans", problem, 16, limits=limits, trials=100)
    assert ours.objective < run("kernel-kmeans", problem, 16, limits=limits).objective


# --- Lloyd ------------------------------------------------------------------------------------------------


def inertia(view: View, labels: Tensor, k: int) -> float:
    """The k-means cost Σ_i |φ_i - μ_{a_i}|²."""
    return float(view.centroid_distances(labels, k).gather(1, labels[:, None]).sum())


def blobs(n: int, k: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    x, y = make_blobs(n, 4, centers=k, cluster_std=spread, random_state=0)
    return torch.from_numpy(x), torch.from_numpy(y).long()


@pytest.mark.parametrize("problem", [linear(points(150)), exact(points(150))], ids=["features", "kernel"])
def test_lloyd_is_monotone_in_inertia(problem: View) -> None:
    limits = SizeLimits(1, 150)
    labels = random_balanced_labels(150, 9, 4)
    values = []
    while True:
        values.append(inertia(problem, labels, 9))
        solution = kernel_kmeans(problem, 9, limits=limits, labels=labels, max_iter=1, tol=0.0)
        if torch.equal(solution.labels, labels):
            break
        labels = solution.labels
    assert len(values) > 3
    assert all(b < a for a, b in itertools.pairwise(values))
    at_once = kernel_kmeans(problem, 9, limits=limits, labels=random_balanced_labels(150, 9, 4), max_iter=500, tol=0.0)
    assert torch.equal(at_once.labels, labels)
    assert at_once.converged


def test_lloyd_matches_scikit_learn_from_the_same_centres() -> None:
    x, _ = blobs(300, 6, spread=3.0)
    start = random_balanced_labels(300, 6, 0)
    centres = torch.stack([x[start == h].mean(0) for h in range(6)])
    theirs = KMeans(6, init=centres.numpy(), n_init=1, max_iter=500, tol=0.0).fit(x.numpy())
    ours = kernel_kmeans(linear(x), 6, limits=SizeLimits(1, 300), labels=start, max_iter=500, tol=0.0)
    # their first iteration assigns to these centres, ours to the same means
    assert np.array_equal(ours.labels.numpy(), theirs.labels_)
    assert inertia(linear(x), ours.labels, 6) == pytest.approx(theirs.inertia_)


def test_lloyd_finds_separate_blobs_as_well_as_scikit_learn() -> None:
    x, _ = blobs(400, 5, spread=0.5)
    runs = [run("kernel-kmeans", linear(x), 5, limits=SizeLimits(1, 400), seed=s) for s in range(5)]
    best = min(inertia(linear(x), r.labels, 5) for r in runs)
    theirs = KMeans(5, n_init=5, random_state=0).fit(x.numpy())
    assert best <= 1.02 * theirs.inertia_


def test_lloyd_drops_an_iteration_that_limits_made_worse() -> None:
    problem, limits = linear(points(60)), SizeLimits.of(60, 7, equal=True)
    for seed in range(10):
        values = []
        for max_iter in range(8):
            labels = run("kernel-kmeans", problem, 7, limits=limits, seed=seed, max_iter=max_iter).labels
            values.append(inertia(problem, labels, 7))
        assert values == sorted(values, reverse=True)


def test_lloyd_takes_no_negative_tolerance() -> None:
    with refused(0, "-1.0", field="tol"):
        run("kernel-kmeans", linear(points(10)), 2, limits=SizeLimits(1, 10), tol=-1.0)


# --- every solver -----------------------------------------------------------------------------------------


@each_solver
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_stratum_is_empty_and_limits_hold(solver: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 18))
    k = data.draw(st.integers(1, n))
    copies = data.draw(st.integers(1, n))  # distinct points; 1 means all coincide
    x = points(n, 2, seed=n, dtype=torch.float32)[torch.arange(n) % copies]
    kind = data.draw(st.sampled_from(["free", "min", "max", "equal"]))
    limits = SizeLimits.of(
        n,
        k,
        min_size=n // k if kind == "min" else 1,
        max_size=-(-n // k) if kind == "max" else None,
        equal=kind == "equal",
    )
    problem = exact(x) if data.draw(st.booleans()) else linear(x)
    solution = run(solver, problem, k, limits=limits, seed=data.draw(st.integers(0, 99)))
    assert solution.labels.shape == (n,)
    assert limits.hold(sizes_of(solution.labels, k))
    assert solution.objective == pytest.approx(problem.objective(solution.labels, k))


@each_solver
def test_limits_are_honoured_where_they_bind(solver: str) -> None:
    problem = linear(points(60))
    free = sizes_of(run(solver, problem, 7, limits=SizeLimits(1, 60)).labels, 7)
    assert int(free.min()) < 6
    assert int(free.max()) > 10
    for limits in (SizeLimits.of(60, 7, min_size=6, max_size=10), SizeLimits.of(60, 7, equal=True)):
        assert limits.hold(sizes_of(run(solver, problem, 7, limits=limits).labels, 7))


@each_solver
def test_one_stratum_and_one_point_in_each(solver: str) -> None:
    problem = exact(points(12))
    whole = run(solver, problem, 1, limits=SizeLimits.of(12, 1))
    assert whole.labels.tolist() == [0] * 12
    single = run(solver, problem, 12, limits=SizeLimits.of(12, 12))
    assert sorted(single.labels.tolist()) == list(range(12))
    assert single.objective == pytest.approx(0.0, abs=1e-9)


@each_solver
def test_same_seed_same_strata(solver: str) -> None:
    problem = exact(points(50))
    runs = [run(solver, problem, 6, limits=SizeLimits(1, 50), seed=s) for s in (3, 3, 4, 5, 6)]
    assert torch.equal(runs[0].labels, runs[1].labels)
    assert any(not torch.equal(runs[0].labels, other.labels) for other in runs[2:])
    state = torch.random.get_rng_state()
    run(solver, problem, 6, limits=SizeLimits(1, 50), seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is not touched


@each_solver
def test_exact_and_full_rank_problems_give_the_same_strata(solver: str) -> None:
    x = points(40)
    x = x - x.mean(0)
    limits = SizeLimits(1, 40)
    low_rank = run(solver, LowRankView(x, x.new_zeros(40)), 5, limits=limits, seed=2)
    full = run(solver, ExactView(x @ x.T), 5, limits=limits, seed=2)
    assert torch.equal(low_rank.labels, full.labels)
    assert low_rank.objective == pytest.approx(full.objective)
    assert low_rank.n_iter == full.n_iter


@each_solver
def test_constant_features_cost_nothing(solver: str) -> None:
    solution = run(solver, linear(torch.ones(15, 2)), 4, limits=SizeLimits(1, 15))
    assert solution.objective == 0.0
    assert solution.converged
    assert int(sizes_of(solution.labels, 4).min()) >= 1


def test_never_worse_than_the_start() -> None:
    problem = exact(points(40))
    for seed in range(5):
        start = run("dynamic-kmeans", problem, 5, limits=SizeLimits(1, 40), seed=seed).labels
        before = start.clone()
        solution = run("dynamic-kmeans", problem, 5, limits=SizeLimits(1, 40), labels=start, seed=seed, max_iter=2)
        assert solution.objective <= problem.objective(start, 5)
        assert torch.equal(start, before)


def test_more_iterations_never_make_it_worse_where_limits_bind() -> None:
    problem, limits = exact(points(40)), SizeLimits.of(40, 6, equal=True)
    for seed in range(4):
        values = [run("dynamic-kmeans", problem, 6, limits=limits, seed=seed, max_iter=m).objective for m in range(6)]
        assert values == sorted(values, reverse=True)


@each_solver
def test_a_start_with_empty_strata_is_repaired(solver: str) -> None:
    problem = linear(points(30))
    start = torch.zeros(30, dtype=torch.int64)
    solution = run(solver, problem, 4, limits=SizeLimits(2, 30), labels=start)
    assert int(sizes_of(solution.labels, 4).min()) >= 2
    assert solution.objective < problem.objective(start, 4)


def test_progress_reports_a_fraction_and_a_message() -> None:
    for solver in SOLVERS:
        seen: list[tuple[float, str]] = []
        run(
            solver,
            exact(points(40)),
            5,
            limits=SizeLimits(1, 40),
            progress=lambda fraction, message, seen=seen: seen.append((fraction, message)),
        )
        assert seen
        assert all(0.0 < fraction <= 1.0 and message.startswith("iteration") for fraction, message in seen)
