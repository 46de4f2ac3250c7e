"""Labels that solvers start from: bisection, kernel k-means++, random equal strata, given ones; and limits on sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import refused
from solver_problems import exact, gen, linear, points, sizes_of
from vardass.solvers.labels import (
    Distances,
    SizeLimits,
    _leading_axes,
    bisection_labels,
    kernel_kmeanspp,
    nearest_seed_labels,
    random_balanced_labels,
    repair_sizes,
    start_labels,
    within_limits,
)
from vardass.view import LowRankView

# --- bisection --------------------------------------------------------------------------------------------


def cloud(n: int, r: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, r, generator=gen(seed), dtype=dtype) / torch.arange(1, r + 1, dtype=dtype)


def test_sizes_differ_by_at_most_one_for_every_n_and_k() -> None:
    for n in range(1, 41):
        for k in range(1, n + 1):
            sizes = sizes_of(bisection_labels(cloud(n, 3, n), k), k)
            assert int(sizes.min()) == n // k
            assert int(sizes.max()) == -(-n // k)


@pytest.mark.parametrize(("n", "k"), [(1000, 7), (1000, 333), (997, 64), (5000, 1000)])
def test_sizes_differ_by_at_most_one_for_larger_n(n: int, k: int) -> None:
    sizes = sizes_of(bisection_labels(cloud(n, 6, dtype=torch.float32), k), k)
    assert int(sizes.max() - sizes.min()) <= 1


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10_000), st.data())
def test_importance_leaves_no_stratum_empty(n: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    r = data.draw(st.sampled_from([1, 2, 5, 40]))
    x = cloud(n, r, seed)
    if data.draw(st.booleans()):
        x = x[torch.arange(n) % max(1, n // 4)]  # duplicates
    kind = data.draw(st.sampled_from(["random", "zeros", "one point has it all", "constant"]))
    importance = torch.rand(n, generator=gen(seed), dtype=x.dtype).pow(8)
    if kind == "zeros":
        importance = torch.zeros_like(importance)
    elif kind == "one point has it all":
        importance = torch.zeros_like(importance)
        importance[seed % n] = 1.0
    elif kind == "constant":
        importance = torch.ones_like(importance)
    assert int(sizes_of(bisection_labels(x, k, importance=importance), k).min()) >= 1


def test_strata_hold_equal_amounts_of_importance() -> None:
    n, k = 4000, 8
    x = cloud(n, 2)
    importance = x[:, 0].exp()
    labels = bisection_labels(x, k, importance=importance)
    amounts = torch.zeros(k, dtype=x.dtype).index_add_(0, labels, importance)
    assert float(amounts.max() / amounts.min()) < 1.05
    assert float(sizes_of(labels, k).max() / sizes_of(labels, k).min()) > 3.0
    plain = bisection_labels(x, k)
    held = torch.zeros(k, dtype=x.dtype).index_add_(0, plain, importance)
    assert float(held.max() / held.min()) > 3.0


def test_one_dimension_is_cut_into_intervals() -> None:
    x = cloud(60, 1)
    labels = bisection_labels(x, 7)
    in_order = labels[x[:, 0].argsort()]
    assert int((in_order[1:] != in_order[:-1]).sum()) == 6


def test_separate_groups_of_equal_size_are_found() -> None:
    centres = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 40.0], [100.0, 40.0]])
    group = torch.randperm(80, generator=gen()) % 4
    x = centres[group] + torch.randn(80, 2, generator=gen(1))
    labels = bisection_labels(x, 4)
    pairs = {(int(g), int(h)) for g, h in zip(group, labels, strict=True)}
    assert len(pairs) == 4  # groups and strata are the same up to names


def test_start_is_far_better_than_random_strata() -> None:
    x = cloud(500, 8)
    problem = LowRankView(x - x.mean(0), x.new_zeros(500))
    start = problem.objective(bisection_labels(x, 20), 20)
    assert start < 0.5 * problem.objective(random_balanced_labels(500, 20, 0), 20)


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("x", [torch.ones(12, 3), torch.zeros(12, 1)], ids=["constant", "zero"])
def test_constant_features(x: Tensor, importance: bool) -> None:
    labels = bisection_labels(x, 5, importance=torch.zeros(12) if importance else None)
    assert int(sizes_of(labels, 5).min()) >= 1


@pytest.mark.parametrize("importance", [False, True])
def test_as_many_strata_as_points(importance: bool) -> None:
    x = cloud(33, 4)
    labels = bisection_labels(x, 33, importance=torch.rand(33, generator=gen()) if importance else None)
    assert sorted(labels.tolist()) == list(range(33))


def test_one_stratum() -> None:
    assert bisection_labels(cloud(9, 2), 1).tolist() == [0] * 9


def test_only_the_first_32_columns_count() -> None:
    x = cloud(50, 40)
    labels = bisection_labels(x, 6)
    changed = x.clone()
    changed[:, 32:] = torch.randn(50, 8, generator=gen(5), dtype=x.dtype)
    assert torch.equal(labels, bisection_labels(changed, 6))
    changed[:, :32] = torch.randn(50, 32, generator=gen(6), dtype=x.dtype)
    assert not torch.equal(labels, bisection_labels(changed, 6))


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e10, 1e30])
def test_scale_does_not_matter(scale: float) -> None:
    x = cloud(100, 5, dtype=torch.float32)
    assert torch.equal(bisection_labels(x * scale, 7), bisection_labels(x, 7))


def test_parts_are_cut_at_their_share_across_their_leading_axes() -> None:
    x = cloud(300, 4)
    importance = torch.rand(300, generator=gen(), dtype=x.dtype)
    cuts = {}

    def cut(rows: Tensor, strata: int, first: int) -> None:  # one part after the other, by an eigensolver
        if strata == 1:
            cuts.update(dict.fromkeys(rows.tolist(), first))
            return
        axis = torch.linalg.eigh(torch.cov(x[rows].T)).eigenvectors[:, -1]
        axis = axis * axis[x[rows].var(0).argmax()].sign()
        rows, left = rows[(x[rows] @ axis).argsort()], strata // 2
        reached = importance[rows].cumsum(0)
        count = min(max(int((reached < reached[-1] * left / strata).sum()), left), len(rows) - (strata - left))
        cut(rows[:count], left, first)
        cut(rows[count:], strata - left, first + left)

    cut(torch.arange(300), 11, 0)
    found = bisection_labels(x, 11, importance=importance)
    expected = torch.tensor([cuts[i] for i in range(300)])
    assert int((found != expected).sum()) <= 6  # the power method is not run to its end


def test_input_is_left_alone_and_the_result_is_a_function_of_it() -> None:
    x = cloud(64, 3)
    before = x.clone()
    assert torch.equal(bisection_labels(x, 8), bisection_labels(x, 8))
    assert torch.equal(x, before)


def test_leading_axes_are_the_first_eigenvectors() -> None:
    x = torch.randn(6, 200, 5, generator=gen(), dtype=torch.float64) * torch.tensor([1.0, 3.0, 1.5, 0.5, 1.0])
    axes = torch.nn.functional.normalize(torch.from_numpy(_leading_axes(list(x.numpy()))), dim=1)
    centred = x - x.mean(1, keepdim=True)
    expected = torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors[..., -1]
    assert float((axes * expected).sum(1).abs().min()) > 0.9999
    assert not _leading_axes([np.ones((4, 3))]).any()


# --- seeds ------------------------------------------------------------------------------------------------


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
    problem = exact(x) if data.draw(st.booleans()) else LowRankView(x, torch.zeros(n))
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


@pytest.mark.parametrize("init", ["bisection", "kmeans++", "random"])
def test_every_start_is_within_the_limits(init: str) -> None:
    for problem in (exact(points(40)), linear(points(40))):
        for limits in (SizeLimits(1, 40), SizeLimits(4, 7), SizeLimits.of(40, 7, equal=True)):
            assert limits.hold(sizes_of(start_labels(problem, 7, init, limits=limits, generator=gen()), 7))


def test_given_labels_are_repaired_only_where_they_must_be() -> None:
    problem = linear(points(30))
    good = torch.arange(30) % 4
    assert within_limits(problem, good, 4, SizeLimits(2, 30)) is good
    repaired = within_limits(problem, torch.zeros(30, dtype=torch.int64), 4, SizeLimits(2, 30))
    assert int(sizes_of(repaired, 4).min()) == 2
    assert problem.objective(repaired, 4) < problem.objective(torch.zeros(30, dtype=torch.int64), 4)


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
    return labels, Distances(linear(points(n, 2, seed)), labels, k), limits


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
    distances = Distances(linear(x), labels, 3)
    assert repair_sizes(labels, distances, SizeLimits(1, 6)).tolist() == [0, 0, 0, 2, 1, 1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"k": 11}, ("k=11", "batch_size")),
        ({"k": 3, "min_size": 4}, ("min_size=4", "k=3", "min_size to 3", "k to 2")),
        ({"k": 3, "max_size": 3}, ("max_size=3", "k=3", "max_size to 4", "k to 4")),
        ({"k": 3, "equal": True, "max_size": 3}, ("equal=True", "k=3", "min_size=1", "max_size=3")),
    ],
)
def test_impossible_limits_are_named(options: dict[str, int], named: tuple[str, ...]) -> None:
    with refused(*named, "n=10"):
        SizeLimits.of(10, **options)  # type: ignore[arg-type]
