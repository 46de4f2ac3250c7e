"""What all solvers stand on: the objective in its two forms, and limits on sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solver_problems import exact, gen, linear, low_rank_with_residual, points, sizes_of
from vardass.errors import InputError
from vardass.solvers import problem as problem_module
from vardass.solvers.dynamic_kmeans import centroid_objective
from vardass.solvers.problem import Distances, ExactProblem, LowRankProblem, Problem
from vardass.solvers.sizes import SizeLimits, repair_sizes
from vardass.solvers.starts import random_balanced_labels


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
def test_any_part_of_the_distances_is_that_of_the_whole(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.randint(3, (20,), generator=gen(2))
    labels[labels == 2] = 3  # stratum 2 is empty
    whole = problem.centroid_distances(labels, 4)
    monkeypatch.setattr(problem_module, "_TABLE_NUMBERS", 12)  # three rows at a time
    parts = problem.distances(labels, 4)
    torch.testing.assert_close(torch.cat([parts.rows(block) for block in parts.blocks()]), whole)
    torch.testing.assert_close(parts.rows(torch.tensor([5, 0, 19])), whole[[5, 0, 19]])
    torch.testing.assert_close(torch.stack([parts.column(h) for h in range(4)], 1), whole)
    nearest, own = parts.nearest(labels)
    assert torch.equal(nearest, whole.argmin(1))
    torch.testing.assert_close(own, whole.gather(1, labels[:, None])[:, 0])


@each_problem
def test_views_agree_with_the_kernel_matrix(problem: Problem) -> None:
    phi = explicit_features(problem)
    matrix = phi @ phi.T
    rows = torch.tensor([4, 0, 17])
    torch.testing.assert_close(problem.diag, matrix.diagonal())
    torch.testing.assert_close(problem.columns(rows), matrix[:, rows])
    torch.testing.assert_close(problem.columns(rows, slice(3, 12)), matrix[3:12, rows])
    torch.testing.assert_close(problem.block(rows), matrix[rows][:, rows])
    labels = random_balanced_labels(20, 4, 1)
    one_hot = torch.nn.functional.one_hot(labels).double()
    torch.testing.assert_close(problem.stratum_sums(labels, 4), matrix @ one_hot)
    torch.testing.assert_close(problem.within(labels, 4), (one_hot.T @ matrix @ one_hot).diagonal())


# --- size limits ------------------------------------------------------------------------------------------


@st.composite
def labellings(draw: st.DrawFn) -> tuple[Tensor, Distances, SizeLimits]:
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
    return labels, linear(points(n, 2, seed)).distances(labels, k), limits


@settings(max_examples=150, deadline=None)
@given(labellings())
def test_repair_honours_limits_and_leaves_good_labels_alone(case: tuple[Tensor, Distances, SizeLimits]) -> None:
    labels, distances, limits = case
    k = distances.k
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
    distances = linear(x).distances(labels, 3)
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
