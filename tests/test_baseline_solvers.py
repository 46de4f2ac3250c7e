"""Seeding, Algorithms 1 and 2, Lloyd, interior point, and the problem and size contracts under them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import RBFMixture
from vardass.solvers import dynamic_kmeans as dynamic_module
from vardass.solvers.dynamic_kmeans import (
    _greedy_in_order,
    centroid_objective,
    dynamic_kmeans,
    greedy_assignment,
)
from vardass.solvers.interior_point import (
    MAX_STRATA,
    MAX_VARIABLES,
    interior_point,
    interior_point_assignment,
    relaxed_solution,
)
from vardass.solvers.lloyd import inertia, kernel_kmeans
from vardass.solvers.problem import ExactProblem, LowRankProblem, Problem
from vardass.solvers.seeding import (
    kernel_kmeanspp,
    nearest_seed_labels,
    random_balanced_labels,
    start_labels,
)
from vardass.solvers.sizes import SizeLimits, repair_sizes
from vardass.solvers.solution import Solution

Solver = Callable[..., Solution]


def few_trials(problem: Problem, k: int, **options: object) -> Solution:
    return dynamic_kmeans(problem, k, trials=8, **options)  # type: ignore[arg-type]


SOLVERS = {"dynamic-kmeans": few_trials, "kernel-kmeans": kernel_kmeans, "interior-point": interior_point}
each_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(n: int, d: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A skewed cloud, so that strata of equal size are not the natural ones."""
    x = torch.randn(n, d, generator=gen(seed), dtype=dtype)
    return x.exp()


def exact(x: Tensor) -> ExactProblem:
    return ExactProblem(RBFMixture(gammas=(0.1, 1.0)).matrix(x))


def linear(x: Tensor) -> LowRankProblem:
    return LowRankProblem(x - x.mean(0), x.new_zeros(len(x)))


def low_rank_with_residual(n: int = 20, seed: int = 3) -> LowRankProblem:
    x = points(n, 4, seed)
    return LowRankProblem(x, torch.rand(n, generator=gen(seed + 1), dtype=x.dtype))


def sizes_of(labels: Tensor, k: int) -> Tensor:
    return torch.bincount(labels, minlength=k)


def greedy_cost(distances: Tensor, labels: Tensor) -> float:
    """Equation 16 at a one-hot U."""
    u = torch.nn.functional.one_hot(labels, distances.shape[1]).to(distances)
    return float((u * distances * u.sum(0)).sum())


# --- the problem ------------------------------------------------------------------------------------------


def explicit_features(problem: Problem) -> Tensor:
    """Features with exactly the problem's inner products, residual directions included."""
    if isinstance(problem, LowRankProblem):
        return torch.cat([problem.features, problem.residual.sqrt().diag()], 1)
    assert isinstance(problem, ExactProblem)
    values, vectors = torch.linalg.eigh(problem.matrix)
    return vectors * values.clamp_min(0.0).sqrt()


each_problem = pytest.mark.parametrize(
    "problem", [exact(points(20)), low_rank_with_residual()], ids=["exact", "low-rank"]
)


@each_problem
@pytest.mark.parametrize("k", [1, 3, 20])
def test_objective_is_the_sum_over_pairs(problem: Problem, k: int) -> None:
    labels = random_balanced_labels(20, k, 5)
    phi = explicit_features(problem)
    pairs = sum(
        float((phi[i] - phi[j]).square().sum())
        for i, j in itertools.combinations(range(20), 2)
        if labels[i] == labels[j]
    )
    assert problem.objective(labels, k) == pytest.approx(pairs, rel=1e-9, abs=1e-9)
    distances = problem.centroid_distances(labels, k)
    assert centroid_objective(distances, labels) == pytest.approx(pairs, rel=1e-9, abs=1e-9)


@each_problem
def test_centroid_distances_match_explicit_means(problem: Problem) -> None:
    labels = torch.randint(3, (20,), generator=gen(2))
    labels[labels == 2] = 3  # stratum 2 is empty
    phi = explicit_features(problem)
    distances = problem.centroid_distances(labels, 4)
    for h in (0, 1, 3):
        expected = (phi - phi[labels == h].mean(0)).square().sum(1)
        torch.testing.assert_close(distances[:, h], expected)
    assert torch.isinf(distances[:, 2]).all()


@each_problem
def test_views_agree_with_the_kernel_matrix(problem: Problem) -> None:
    phi = explicit_features(problem)
    matrix = phi @ phi.T
    rows = torch.tensor([4, 0, 17])
    torch.testing.assert_close(problem.diag, matrix.diagonal())
    torch.testing.assert_close(problem.columns(rows), matrix[:, rows])
    torch.testing.assert_close(problem.block(rows), matrix[rows][:, rows])
    labels = random_balanced_labels(20, 4, 1)
    one_hot = torch.nn.functional.one_hot(labels).double()
    torch.testing.assert_close(problem.stratum_sums(labels, 4), matrix @ one_hot)
    torch.testing.assert_close(problem.within(labels, 4), (one_hot.T @ matrix @ one_hot).diagonal())


# --- size limits ------------------------------------------------------------------------------------------


@st.composite
def labellings(draw: st.DrawFn) -> tuple[Tensor, Tensor, SizeLimits]:
    k = draw(st.integers(1, 6))
    n = draw(st.integers(k, 24))
    seed = draw(st.integers(0, 10_000))
    if draw(st.booleans()):
        limits = SizeLimits.of(n, k, equal=True)
    else:
        low = draw(st.integers(1, n // k))
        limits = SizeLimits.of(n, k, min_size=low, max_size=draw(st.integers(max(low, -(-n // k)), n)))
    used = draw(st.integers(1, k))  # strata from ``used`` on are empty
    labels = torch.randint(used, (n,), generator=gen(seed))
    return labels, linear(points(n, 2, seed)).centroid_distances(labels, k), limits


@settings(max_examples=150, deadline=None)
@given(labellings())
def test_repair_honours_limits_and_leaves_good_labels_alone(case: tuple[Tensor, Tensor, SizeLimits]) -> None:
    labels, distances, limits = case
    k = distances.shape[1]
    before = labels.clone()
    repaired = repair_sizes(labels, distances, limits)
    sizes = sizes_of(repaired, k)
    assert limits.hold(sizes)
    assert torch.equal(labels, before)
    old = sizes_of(labels, k)
    if limits.hold(old):
        assert torch.equal(repaired, labels)
    needed = (limits.low - old).clamp_min(0).sum() + (old - limits.high).clamp_min(0).sum()
    assert int((repaired != labels).sum()) <= int(needed)


def test_repair_fills_an_empty_stratum_with_the_farthest_point() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [50.0], [100.0], [101.0]])
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    distances = linear(x).centroid_distances(labels, 3)
    assert repair_sizes(labels, distances, SizeLimits(1, 6)).tolist() == [0, 0, 0, 2, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 11}, "k=11 strata need at least 11 samples, got n=10"),
        ({"k": 3, "min_size": 4}, "lower min_size to 3"),
        ({"k": 3, "max_size": 3}, "raise max_size to 4"),
        ({"k": 3, "min_size": 3, "max_size": 2}, "below min_size"),
        ({"k": 3, "min_size": 0}, "at least 1"),
        ({"k": 3, "equal": True, "max_size": 3}, "leave both out"),
    ],
)
def test_impossible_limits_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SizeLimits.of(10, **options)  # type: ignore[arg-type]


# --- seeding ----------------------------------------------------------------------------------------------


def test_kmeanspp_draws_with_the_right_probabilities() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0], [3.5]], dtype=torch.float64)
    d = torch.cdist(x, x).square()
    expected = {
        (i, j, h): 0.25 * float(d[i, j] / d[i].sum()) * float(near[h] / near.sum())
        for i, j, h in itertools.permutations(range(4), 3)
        for near in [torch.minimum(d[i], d[j])]
    }
    assert sum(expected.values()) == pytest.approx(1.0)
    problem, generator, draws = linear(x), gen(1), 3000
    counts = dict.fromkeys(expected, 0)
    for _ in range(draws):
        counts[tuple(kernel_kmeanspp(problem, 3, generator).tolist())] += 1
    statistic = sum((counts[c] - draws * p) ** 2 / (draws * p) for c, p in expected.items())
    assert statistic < 49.7  # 99.9 % point of chi-square with 23 degrees of freedom


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.data())
def test_seeds_are_distinct_and_own_their_strata_even_among_duplicates(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    values = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    x = torch.tensor(values, dtype=torch.float32)[:, None] * 0.1 + 0.7
    problem = exact(x) if data.draw(st.booleans()) else LowRankProblem(x, torch.zeros(n))
    seeds = kernel_kmeanspp(problem, k, 7)
    assert len(set(seeds.tolist())) == k
    labels = nearest_seed_labels(problem, seeds)
    assert labels[seeds].tolist() == list(range(k))
    if k >= len(set(values)):  # every distinct value must have been found
        assert {values[i] for i in seeds.tolist()} == set(values)


def test_seed_labels_are_the_nearest() -> None:
    x = points(40)
    seeds = kernel_kmeanspp(linear(x), 6, 0)
    assert torch.equal(nearest_seed_labels(linear(x), seeds), torch.cdist(x, x[seeds]).argmin(1))


def test_random_labels_are_balanced() -> None:
    labels = random_balanced_labels(23, 5, 0)
    assert sorted(sizes_of(labels, 5).tolist()) == [4, 4, 5, 5, 5]
    assert not torch.equal(labels, random_balanced_labels(23, 5, 1))


@pytest.mark.parametrize(
    ("k", "labels", "limits", "message"),
    [
        (11, None, SizeLimits(1, 10), "k must be between 1 and 10, got 11"),
        (3, torch.zeros(9, dtype=torch.int64), SizeLimits(1, 10), r"shape \(10,\)"),
        (3, torch.zeros(10), SizeLimits(1, 10), "int64"),
        (3, torch.full((10,), 3), SizeLimits(1, 10), r"0\.\.2 for k=3"),
        (3, None, SizeLimits(4, 10), "cannot hold n=10"),
        (3, None, SizeLimits(1, 3), "cannot hold n=10"),
    ],
)
def test_bad_starts_are_named(k: int, labels: Tensor | None, limits: SizeLimits, message: str) -> None:
    with pytest.raises(InputError, match=message):
        start_labels(linear(points(10)), k, limits, labels, gen())


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
    orders = torch.stack([torch.randperm(n, generator=gen(t)) for t in range(5)], 1)
    picked, costs = _greedy_in_order(distances, orders, parallel)
    for t in range(5):
        order = orders[:, t].tolist()
        expected = literal_greedy(distances, order, parallel)
        assert picked[:, t].tolist() == [expected[i] for i in order]
        assert float(costs[t]) == pytest.approx(greedy_cost(distances, torch.tensor(expected)), abs=1e-12)


@pytest.mark.parametrize("step_numbers", [1, 60, 2**18])
def test_greedy_keeps_the_cheapest_trial(monkeypatch: pytest.MonkeyPatch, step_numbers: int) -> None:
    monkeypatch.setattr(dynamic_module, "_STEP_NUMBERS", step_numbers)  # trials in one or in many batches
    distances = torch.rand(40, 5, generator=gen(0), dtype=torch.float64)
    generator = gen(3)
    costs = [
        greedy_cost(distances, torch.tensor(literal_greedy(distances, order.tolist(), 4)))
        for order in (torch.randperm(40, generator=generator) for _ in range(13))
    ]
    assert max(costs) > min(costs)
    labels = greedy_assignment(distances, trials=13, parallel=4, generator=3)
    assert greedy_cost(distances, labels) == pytest.approx(min(costs))


def test_greedy_forbids_infinite_distances_and_rejects_nan() -> None:
    distances = torch.rand(20, 3, generator=gen(0))
    distances[:, 1] = torch.inf
    assert 1 not in greedy_assignment(distances, generator=0).tolist()
    with pytest.raises(InputError, match="negative or NaN"):
        greedy_assignment(torch.tensor([[0.1, float("nan")]]))
    with pytest.raises(InputError, match="trials must be at least 1, got 0"):
        greedy_assignment(torch.rand(2, 2), trials=0)
    with pytest.raises(InputError, match=r"shape \(n, k\)"):
        greedy_assignment(torch.rand(3))


# --- Algorithm 1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [few_trials, interior_point], ids=["dynamic-kmeans", "interior-point"])
def test_incumbent_never_rises_and_beats_its_start(solver: Solver) -> None:
    problem, limits = exact(points(120)), SizeLimits(1, 120)
    for seed in range(4):
        start = start_labels(problem, 8, limits, None, gen(seed))
        seen: list[float] = []
        solution = solver(
            problem,
            8,
            limits=limits,
            labels=start,
            generator=1,
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
    solution = few_trials(linear(x), 2, limits=SizeLimits(1, 20), labels=labels, patience=patience)
    assert torch.equal(solution.labels, labels)
    assert (solution.n_iter, solution.converged) == (patience, True)


def test_dynamic_kmeans_stops_after_patience_or_max_iter() -> None:
    problem = exact(points(60))
    best = few_trials(problem, 4, limits=SizeLimits(1, 60), generator=0)
    limits = SizeLimits(1, 60)
    again = few_trials(problem, 4, limits=limits, labels=best.labels, generator=0, max_iter=1)
    assert (again.n_iter, again.converged) == (1, False)
    assert again.objective <= best.objective
    still = few_trials(problem, 4, limits=limits, labels=best.labels, generator=0, patience=1)
    assert still.converged
    none = few_trials(problem, 4, limits=limits, labels=best.labels, max_iter=0)
    assert torch.equal(none.labels, best.labels)


def test_dynamic_kmeans_is_better_than_unweighted_kmeans() -> None:
    problem = exact(points(200, 4))
    limits = SizeLimits(1, 200)
    assert dynamic_kmeans(problem, 16, limits=limits).objective < kernel_kmeans(problem, 16, limits=limits).objective


# --- Lloyd ------------------------------------------------------------------------------------------------


def blobs(n: int, k: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    x, y = make_blobs(n, 4, centers=k, cluster_std=spread, random_state=0)
    return torch.from_numpy(x), torch.from_numpy(y).long()


@pytest.mark.parametrize("problem", [linear(points(150)), exact(points(150))], ids=["features", "kernel"])
def test_lloyd_is_monotone_in_inertia(problem: Problem) -> None:
    limits = SizeLimits(1, 150)
    labels = random_balanced_labels(150, 9, 4)
    values = []
    while True:
        values.append(inertia(problem.centroid_distances(labels, 9), labels))
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
    distances = linear(x).centroid_distances(ours.labels, 6)
    assert inertia(distances, ours.labels) == pytest.approx(theirs.inertia_)


def test_lloyd_finds_separate_blobs_as_well_as_scikit_learn() -> None:
    x, _ = blobs(400, 5, spread=0.5)
    runs = [kernel_kmeans(linear(x), 5, limits=SizeLimits(1, 400), generator=s) for s in range(5)]
    best = min(inertia(linear(x).centroid_distances(r.labels, 5), r.labels) for r in runs)
    theirs = KMeans(5, n_init=5, random_state=0).fit(x.numpy())
    assert best <= 1.02 * theirs.inertia_


def test_lloyd_drops_an_iteration_that_limits_made_worse() -> None:
    problem, limits = linear(points(60)), SizeLimits.of(60, 7, equal=True)
    for seed in range(10):
        values = []
        for max_iter in range(8):
            labels = kernel_kmeans(problem, 7, limits=limits, generator=seed, max_iter=max_iter).labels
            values.append(inertia(problem.centroid_distances(labels, 7), labels))
        assert values == sorted(values, reverse=True)


def test_lloyd_takes_no_negative_tolerance() -> None:
    with pytest.raises(InputError, match="tol must not be negative, got -1"):
        kernel_kmeans(linear(points(10)), 2, limits=SizeLimits(1, 10), tol=-1.0)


# --- interior point ---------------------------------------------------------------------------------------


def relaxed_cost(distances: Tensor, u: Tensor) -> float:
    return float(u.sum(0) @ (distances * u).sum(0))


def test_relaxation_is_not_integral() -> None:
    distances = torch.ones(1, 2)
    u = relaxed_solution(distances)
    torch.testing.assert_close(u, torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    assert relaxed_cost(distances.double(), u) == pytest.approx(0.5)
    assert {greedy_cost(distances, torch.tensor([j])) for j in (0, 1)} == {1.0}


def test_relaxed_solution_with_a_known_minimum() -> None:
    # one point: Σ_j D_j U_j² is least at U_j proportional to 1 / D_j
    distances = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    expected = torch.tensor([[4.0, 2.0, 1.0]], dtype=torch.float64) / 7.0
    torch.testing.assert_close(relaxed_solution(distances), expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(("n", "k"), [(6, 2), (6, 3), (40, 5), (100, 16)])
@pytest.mark.parametrize("seed", [0, 1])
def test_relaxed_solution_is_feasible_and_stationary(n: int, k: int, seed: int) -> None:
    x = points(n, 3, seed)
    distances = torch.cdist(x, x[:k]).square()
    distances /= distances.mean()
    u = relaxed_solution(distances)
    assert bool((u > 0.0).all())
    torch.testing.assert_close(u.sum(1), torch.ones(n, dtype=u.dtype))
    # at a local minimum no entry with mass has a larger gradient than another of its row
    gradient = (distances * u).sum(0) + distances * u.sum(0)
    excess = gradient - gradient.min(1, keepdim=True).values
    assert float((u * excess).max()) < 1e-4 * float(gradient.mean())
    assert relaxed_cost(distances, u) <= greedy_cost(distances, distances.argmin(1))


def best_assignment_cost(distances: Tensor) -> float:
    n, k = distances.shape
    labels = torch.tensor(list(itertools.product(range(k), repeat=n)))
    own = distances[torch.arange(n), labels]
    sizes = torch.nn.functional.one_hot(labels, k).sum(1)
    return float((own * sizes.gather(1, labels)).sum(1).min())


@pytest.mark.parametrize("k", [2, 3])
def test_rounded_solution_is_close_to_the_best_assignment(k: int) -> None:
    ratios = []
    for seed in range(20):
        x = torch.randn(6, 3, generator=gen(seed), dtype=torch.float64)
        distances = torch.cdist(x, torch.randn(k, 3, generator=gen(100 + seed), dtype=torch.float64)).square()
        best = best_assignment_cost(distances)
        relaxed = relaxed_cost(distances, relaxed_solution(distances))
        rounded = greedy_cost(distances, interior_point_assignment(distances))
        assert relaxed <= rounded * (1.0 + 1e-6)
        ratios.append(rounded / best)
    # a local minimum, rounded: no guarantee, but never far from the optimum here
    assert min(ratios) == pytest.approx(1.0)
    assert max(ratios) < 1.35
    assert float(np.mean(ratios)) < 1.06


def test_interior_point_refuses_large_problems_and_bad_distances() -> None:
    with pytest.raises(InputError, match=f"n \\* k up to {MAX_VARIABLES}.*n={MAX_VARIABLES}, k=2"):
        relaxed_solution(torch.zeros(1).expand(MAX_VARIABLES, 2))
    problem = linear(points(MAX_STRATA + 1))
    with pytest.raises(InputError, match=f"k up to {MAX_STRATA}.*min-sum"):
        interior_point(problem, MAX_STRATA + 1, limits=SizeLimits(1, 1))
    with pytest.raises(InputError, match="finite and not negative"):
        relaxed_solution(torch.tensor([[1.0, torch.inf]]))
    with pytest.raises(InputError, match=r"shape \(n, k\)"):
        relaxed_solution(torch.ones(3))


# --- every solver -----------------------------------------------------------------------------------------


@each_solver
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_stratum_is_empty_and_limits_hold(solver: Solver, data: st.DataObject) -> None:
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
    solution = solver(problem, k, limits=limits, generator=data.draw(st.integers(0, 99)))
    assert solution.labels.shape == (n,)
    assert limits.hold(sizes_of(solution.labels, k))
    assert solution.objective == pytest.approx(problem.objective(solution.labels, k))


@each_solver
def test_limits_are_honoured_where_they_bind(solver: Solver) -> None:
    problem = linear(points(60))
    free = sizes_of(solver(problem, 7, limits=SizeLimits(1, 60)).labels, 7)
    assert int(free.min()) < 6
    assert int(free.max()) > 10
    for limits in (SizeLimits.of(60, 7, min_size=6, max_size=10), SizeLimits.of(60, 7, equal=True)):
        assert limits.hold(sizes_of(solver(problem, 7, limits=limits).labels, 7))


@each_solver
def test_one_stratum_and_one_point_in_each(solver: Solver) -> None:
    problem = exact(points(12))
    whole = solver(problem, 1, limits=SizeLimits.of(12, 1))
    assert whole.labels.tolist() == [0] * 12
    single = solver(problem, 12, limits=SizeLimits.of(12, 12))
    assert sorted(single.labels.tolist()) == list(range(12))
    assert single.objective == pytest.approx(0.0, abs=1e-9)


@each_solver
def test_same_seed_same_strata(solver: Solver) -> None:
    problem = exact(points(50))
    runs = [solver(problem, 6, limits=SizeLimits(1, 50), generator=s) for s in (3, 3, 4, 5, 6)]
    assert torch.equal(runs[0].labels, runs[1].labels)
    assert any(not torch.equal(runs[0].labels, other.labels) for other in runs[2:])
    state = torch.random.get_rng_state()
    solver(problem, 6, limits=SizeLimits(1, 50), generator=0)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is not touched


@each_solver
def test_exact_and_full_rank_problems_give_the_same_strata(solver: Solver) -> None:
    x = points(40)
    x = x - x.mean(0)
    limits = SizeLimits(1, 40)
    low_rank = solver(LowRankProblem(x, x.new_zeros(40)), 5, limits=limits, generator=2)
    full = solver(ExactProblem(x @ x.T), 5, limits=limits, generator=2)
    assert torch.equal(low_rank.labels, full.labels)
    assert low_rank.objective == pytest.approx(full.objective)
    assert low_rank.n_iter == full.n_iter


@each_solver
def test_constant_features_cost_nothing(solver: Solver) -> None:
    solution = solver(linear(torch.ones(15, 2)), 4, limits=SizeLimits(1, 15))
    assert solution.objective == 0.0
    assert solution.converged
    assert int(sizes_of(solution.labels, 4).min()) >= 1


@pytest.mark.parametrize("name", ["dynamic-kmeans", "interior-point"])
def test_never_worse_than_the_start(name: str) -> None:
    problem = exact(points(40))
    for seed in range(5):
        start = SOLVERS["dynamic-kmeans"](problem, 5, limits=SizeLimits(1, 40), generator=seed).labels
        before = start.clone()
        solution = SOLVERS[name](problem, 5, limits=SizeLimits(1, 40), labels=start, generator=seed, max_iter=2)
        assert solution.objective <= problem.objective(start, 5)
        assert torch.equal(start, before)


@pytest.mark.parametrize("name", ["dynamic-kmeans", "interior-point"])
def test_more_iterations_never_make_it_worse_where_limits_bind(name: str) -> None:
    problem, limits = exact(points(40)), SizeLimits.of(40, 6, equal=True)
    for seed in range(4):
        values = [SOLVERS[name](problem, 6, limits=limits, generator=seed, max_iter=m).objective for m in range(6)]
        assert values == sorted(values, reverse=True)


@each_solver
def test_a_start_with_empty_strata_is_repaired(solver: Solver) -> None:
    problem = linear(points(30))
    start = torch.zeros(30, dtype=torch.int64)
    solution = solver(problem, 4, limits=SizeLimits(2, 30), labels=start)
    assert int(sizes_of(solution.labels, 4).min()) >= 2
    assert solution.objective < problem.objective(start, 4)


def test_progress_reports_a_fraction_and_a_message() -> None:
    for solver in SOLVERS.values():
        seen: list[tuple[float, str]] = []
        solver(
            exact(points(40)),
            5,
            limits=SizeLimits(1, 40),
            progress=lambda fraction, message, seen=seen: seen.append((fraction, message)),
        )
        assert seen
        assert all(0.0 < fraction <= 1.0 and message.startswith("iteration") for fraction, message in seen)
