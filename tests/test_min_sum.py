"""Min-sum descent against brute force: optimum over all partitions, exact deltas, limits, block paths."""

from __future__ import annotations

import importlib
import itertools
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vardass.kernels import RBFMixture
from vardass.solvers.labels import SizeLimits, random_balanced_labels, within_limits
from vardass.solvers.min_sum import _STATES, _move_many, _Part, min_sum
from vardass.solvers.stratification import solve, stratify
from vardass.view import ExactView, LowRankView, View

module = importlib.import_module("vardass.solvers.min_sum")


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cloud(n: int, d: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Skewed, so that strata of equal size are not the natural ones."""
    return torch.randn(n, d, generator=gen(seed), dtype=dtype).exp()


def exact(x: Tensor) -> ExactView:
    return ExactView(RBFMixture(gammas=(0.1, 1.0)).matrix(x))


def linear(x: Tensor) -> LowRankView:
    return LowRankView(x - x.mean(0), x.new_zeros(len(x)))


def with_residual(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> LowRankView:
    residual = torch.rand(n, generator=gen(seed + 1), dtype=dtype)
    return LowRankView(cloud(n, 4, seed, dtype), residual)


PROBLEMS = {"exact": lambda n, seed: exact(cloud(n, 3, seed)), "low-rank": with_residual}
each_problem = pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())


def distances(problem: View) -> Tensor:
    """d_ij for all pairs, with 0 for a point and itself."""
    if isinstance(problem, LowRankView):
        squared = torch.cdist(problem.features, problem.features).square()
        pairs = squared + problem.residual[:, None] + problem.residual
    else:
        assert isinstance(problem, ExactView)
        pairs = problem.diag[:, None] + problem.diag - 2.0 * problem.matrix
    return pairs.fill_diagonal_(0.0)


def pair_sum(problem: View, labels: Tensor) -> float:
    """½ Σ d_ij over pairs within strata, one pair at a time."""
    d = distances(problem)
    return sum(float(d[i, j]) for i, j in itertools.combinations(range(len(d)), 2) if labels[i] == labels[j])


def sizes_of(labels: Tensor, k: int) -> Tensor:
    return torch.bincount(labels, minlength=k)


def random_labels(n: int, k: int, seed: int) -> Tensor:
    """Uneven strata, none empty."""
    labels = torch.randint(k, (n,), generator=gen(seed))
    labels[torch.randperm(n, generator=gen(seed + 1))[:k]] = torch.arange(k)
    return labels


# --- the optimum over all partitions ----------------------------------------------------------------------


@lru_cache
def partitions(n: int, k: int) -> Tensor:
    """All partitions of n points into k strata: (count, n)."""
    found: list[list[int]] = []

    def extend(labels: list[int], used: int) -> None:
        if len(labels) == n:
            found.append(labels)
            return
        for h in range(min(used + 1, k)):
            new = max(used, h + 1)
            if new + n - len(labels) - 1 >= k:
                extend([*labels, h], new)

    extend([], 0)
    return torch.tensor(found)


def optimum(problem: View, k: int, limits: SizeLimits) -> float:
    one_hot = torch.nn.functional.one_hot(partitions(problem.n, k), k).double()
    allowed = ((one_hot.sum(1) >= limits.low) & (one_hot.sum(1) <= limits.high)).all(1)
    one_hot = one_hot[allowed]
    return 0.5 * float((one_hot * (distances(problem) @ one_hot)).sum((1, 2)).min())


def test_the_enumeration_is_complete() -> None:
    assert [len(partitions(6, k)) for k in range(1, 7)] == [1, 31, 90, 65, 15, 1]  # Stirling numbers
    problem = with_residual(6)
    best = min(pair_sum(problem, p) for p in partitions(6, 3))
    assert optimum(problem, 3, SizeLimits(1, 6)) == pytest.approx(best)
    assert optimum(problem, 3, SizeLimits(2, 2)) >= best


@pytest.mark.parametrize(("n", "k", "equal"), [(8, 2, False), (8, 3, False), (9, 4, False), (8, 2, True), (9, 3, True)])
def test_optimal_or_close_on_tiny_problems(n: int, k: int, equal: bool) -> None:
    limits = SizeLimits.of(n, k, equal=equal)
    single, best_of_12 = [], []
    for seed in range(24):
        problem = exact(cloud(n, 2, seed)) if seed % 2 else with_residual(n, seed)
        generator = gen(seed)
        found = [
            solve(problem, k, init="kmeans++", limits=limits, generator=generator, tol=0.0).objective for _ in range(12)
        ]
        lowest = optimum(problem, k, limits)
        assert min(found) >= lowest * (1 - 1e-9)
        single.append(found[0] / lowest - 1)
        best_of_12.append(min(found) / lowest - 1)
    share = np.mean(np.array(single) < 1e-9)
    share_of_12 = np.mean(np.array(best_of_12) < 1e-9)
    assert share >= 0.5
    assert share_of_12 >= 0.95
    assert share_of_12 > share
    assert max(best_of_12) <= 0.02
    assert np.mean(single) <= 0.06


@each_problem
@pytest.mark.parametrize(
    "limits", [SizeLimits(1, 12), SizeLimits(4, 4), SizeLimits(3, 5)], ids=["free", "equal", "some"]
)
def test_no_single_move_and_at_limits_no_exchange_is_left(make, limits: SizeLimits) -> None:
    n, k = 12, 3
    for seed in range(20):
        problem = make(n, seed)
        start = random_balanced_labels(n, k, seed)
        labels = min_sum(problem, k, limits=limits, labels=start, tol=0.0).labels
        reached = problem.objective(labels, k)
        others = []
        for i, h in itertools.product(range(n), range(k)):
            other = labels.clone()
            other[i] = h
            if limits.hold(sizes_of(other, k)):
                others.append(other)
        sizes = sizes_of(labels, k)
        bound = {h for h in range(k) if limits.low > 1 and int(sizes[h]) in (limits.low, limits.high)}
        for i, j in itertools.combinations(range(n), 2):
            if {int(labels[i]), int(labels[j])} & bound:
                other = labels.clone()
                other[i], other[j] = labels[j], labels[i]
                others.append(other)
        assert min(problem.objective(other, k) for other in others) >= reached * (1 - 1e-9)


def test_an_exchange_is_made_where_no_move_pays() -> None:
    problem = linear(torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)[:, None])
    start = torch.tensor([0, 1, 0, 1])
    scores, own = _STATES[type(problem)](problem, start, 2).scores(slice(0, 4))
    assert torch.equal(own, scores.amin(0))
    found = min_sum(problem, 2, limits=SizeLimits(2, 2), labels=start)
    assert found.objective == 0.0


# --- exact deltas -----------------------------------------------------------------------------------------


@each_problem
def test_scores_are_the_sums_of_distances_before_and_after_moves(make) -> None:
    n, k = 15, 4
    problem = make(n, 2)
    state = _STATES[type(problem)](problem, random_labels(n, k, 0), k)
    d = distances(problem)
    for step in range(4):
        one_hot = torch.nn.functional.one_hot(state.labels, k).double()
        expected = d @ one_hot
        for rows in (slice(0, n), slice(3, 9)):
            scores, own = state.scores(rows)
            scores = scores.scatter(0, state.labels[None, rows], own[None])
            torch.testing.assert_close(scores.T, expected[rows])
        rows = torch.randperm(n, generator=gen(step))[:5]
        target = (state.labels[rows] + torch.randint(1, k, (5,), generator=gen(step))) % k
        state.move(rows, state.labels[rows], target)
        assert torch.equal(state.labels[rows], target)
    torch.testing.assert_close(state.sizes, sizes_of(state.labels, k).double())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), moved=st.integers(1, 14), k=st.integers(2, 6))
def test_interaction_makes_the_change_of_many_moves_exact(seed: int, moved: int, k: int) -> None:
    n = 14
    problem = with_residual(n, seed)
    labels = random_labels(n, k, seed)
    state = _STATES[type(problem)](problem, labels, k)
    scores, own = state.scores(slice(0, n))
    rows = torch.randperm(n, generator=gen(seed))[:moved]
    source = labels[rows]
    target = (source + torch.randint(1, k, (moved,), generator=gen(seed))) % k
    gain = own[rows] - scores[target, rows]
    interaction = state.interaction(rows, source, target)
    after = labels.clone()
    after[rows] = target
    change = pair_sum(problem, after) - pair_sum(problem, labels)
    scale = problem.objective(labels, k) + problem.objective(after, k)
    assert interaction - float(gain.sum()) == pytest.approx(change, abs=1e-9 * scale)

    both = (torch.nn.functional.one_hot(target, k) - torch.nn.functional.one_hot(source, k)).double()
    pairs = distances(problem)[rows][:, rows] * (both @ both.T)
    assert interaction == pytest.approx(0.5 * float(pairs.sum()), abs=1e-9 * scale)


@each_problem
def test_the_state_knows_j(make) -> None:
    n, k = 15, 4
    problem = make(n, 3)
    state = _STATES[type(problem)](problem, random_labels(n, k, 1), k)
    rows = torch.tensor([3, 8, 11])
    state.move(rows, state.labels[rows], (state.labels[rows] + 1) % k)
    assert state.objective() == pytest.approx(pair_sum(problem, state.labels))


def part_of(problem: View, labels: Tensor, k: int, rows: slice) -> _Part:
    state = _STATES[type(problem)](problem, labels, k)
    scores, own = state.scores(rows)
    scores = scores.scatter(0, labels[None, rows], own[None])
    return _Part(
        scores.numpy(),
        problem.block(rows).numpy(),
        problem.diag[rows].numpy(),
        labels[rows].numpy(),
        state.sizes.numpy(),
    )


@each_problem
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 5), kind=st.sampled_from(["free", "limits", "equal"]))
def test_moves_and_exchanges_of_a_part_lower_j_by_what_they_say(make, seed: int, k: int, kind: str) -> None:
    n, rows = 16, slice(2, 13)
    problem = make(n, seed)
    labels = random_balanced_labels(n, k, seed)
    limits = SizeLimits.of(n, k) if kind == "free" else SizeLimits.of(n, k, equal=True)
    if kind == "limits":
        limits = SizeLimits(max(1, limits.low - 1), limits.high + 1)
    before = problem.objective(labels, k)
    part = part_of(problem, labels, k, rows)
    for improve in (lambda: part.move_points(limits, 0.0, 0.0), lambda: part.swap_points(np.ones(k, bool), 0.0)):
        decrease = improve()
        labels = labels.clone()
        labels[rows] = torch.from_numpy(part.labels)
        after = problem.objective(labels, k)
        assert decrease >= 0.0
        assert before - after == pytest.approx(decrease, abs=1e-9 * before)
        assert sizes_of(labels, k).tolist() == part.sizes.tolist()
        assert limits.hold(sizes_of(labels, k))
        np.testing.assert_allclose(part.scores, part_of(problem, labels, k, rows).scores, atol=1e-9 * before)
        before = after


@each_problem
def test_one_exchange_changes_j_by_the_formula(make) -> None:
    """ΔJ = W_ib - W_ia + W_ja - W_jb - 2 d_ij for i in a, j in b; `swap_points` takes the best."""
    n, k = 10, 3
    for seed in range(10):
        problem = make(n, seed)
        labels = random_labels(n, k, seed)
        part = part_of(problem, labels, k, slice(0, n))
        w, d, before = part.scores.copy(), distances(problem), pair_sum(problem, labels)
        changes = []
        for i, j in itertools.combinations(range(n), 2):
            a, b = int(labels[i]), int(labels[j])
            if a != b:
                other = labels.clone()
                other[i], other[j] = b, a
                change = pair_sum(problem, other) - before
                formula = w[b, i] - w[a, i] + w[a, j] - w[b, j] - 2.0 * float(d[i, j])
                assert formula == pytest.approx(change, abs=1e-9 * before)
                changes.append(change)
        noise = 1e-12 * before
        assert (part.swap_points(np.ones(k, bool), noise) > 0.0) == (min(changes) < -noise)


@each_problem
@pytest.mark.parametrize("k", [1, 3, 15])
def test_objective_is_the_sum_over_pairs(make, k: int) -> None:
    problem = make(15, 4)
    labels = random_balanced_labels(15, k, 1)
    found = min_sum(problem, k, limits=SizeLimits(1, 15), labels=labels)
    assert problem.objective(labels, k) == pytest.approx(pair_sum(problem, labels), abs=1e-9)
    assert found.objective == pytest.approx(pair_sum(problem, found.labels), abs=1e-9)
    if k == 15:
        assert found.objective == pytest.approx(0.0, abs=1e-9)


# --- never worse, never empty, within limits --------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[View, int, SizeLimits]:
    n = draw(st.integers(1, 30))
    k = draw(st.integers(1, n))
    seed = draw(st.integers(0, 10_000))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    x = cloud(n, draw(st.sampled_from([1, 1, 3])), seed, dtype)
    kind = draw(st.sampled_from(["distinct", "duplicates", "constant"]))
    if kind != "distinct":
        x = x[torch.arange(n) % (1 if kind == "constant" else max(1, n // 3))]
    if draw(st.booleans()):
        limits = SizeLimits.of(n, k, equal=True)
    else:
        low = draw(st.integers(1, n // k))
        high = draw(st.integers(max(low, -(-n // k)), n + 2))
        limits = SizeLimits.of(n, k, min_size=low, max_size=high)
    residual = torch.rand(n, generator=gen(seed), dtype=dtype)
    problem = draw(st.sampled_from([exact(x), linear(x), LowRankView(x, residual)]))
    return problem, k, limits


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 100))
def test_never_worse_never_empty_and_within_limits(case: tuple[View, int, SizeLimits], seed: int) -> None:
    problem, k, limits = case
    start = random_balanced_labels(problem.n, k, seed)
    before = start.clone()
    found = min_sum(problem, k, limits=limits, labels=start)
    assert torch.equal(start, before)
    assert limits.hold(sizes_of(found.labels, k))
    assert int(sizes_of(found.labels, k).min()) >= 1
    at_start = problem.objective(start, k)
    rounding = 20 * torch.finfo(problem.diag.dtype).eps * problem.n * float(problem.diag.abs().sum())
    assert found.objective <= at_start + rounding
    assert found.objective == pytest.approx(problem.objective(found.labels, k), rel=1e-5, abs=rounding)
    again = min_sum(problem, k, limits=limits, labels=start)
    assert torch.equal(found.labels, again.labels)


def test_limits_bind() -> None:
    problem = linear(cloud(60))
    start = random_balanced_labels(60, 7, 0)
    free = sizes_of(min_sum(problem, 7, limits=SizeLimits(1, 60), labels=start).labels, 7)
    assert int(free.min()) < 5
    assert int(free.max()) > 11
    for limits in (SizeLimits.of(60, 7, min_size=6), SizeLimits.of(60, 7, max_size=10)):
        held = min_sum(problem, 7, limits=limits, labels=start)
        assert limits.hold(sizes_of(held.labels, 7))
        assert held.objective < problem.objective(start, 7)


@pytest.mark.parametrize("equal", [False, True])
def test_exact_and_full_rank_paths_are_the_same_descent(equal: bool) -> None:
    for seed in range(5):
        x = cloud(50, 4, seed)
        x = x - x.mean(0)
        limits = SizeLimits.of(50, 6, equal=equal)
        start = random_balanced_labels(50, 6, seed)
        full = min_sum(ExactView(x @ x.T), 6, limits=limits, labels=start)
        low_rank = min_sum(LowRankView(x, x.new_zeros(50)), 6, limits=limits, labels=start)
        assert torch.equal(full.labels, low_rank.labels)
        assert full.n_iter == low_rank.n_iter
        assert full.objective == pytest.approx(low_rank.objective, rel=1e-12)


def test_constant_points_end_after_one_pass_and_cost_nothing() -> None:
    start = random_balanced_labels(20, 4, 0)
    found = min_sum(linear(torch.ones(20, 2)), 4, limits=SizeLimits(1, 20), labels=start)
    assert (found.objective, found.n_iter, found.converged) == (0.0, 1, True)


def test_warm_start_after_drift_is_never_worse_and_soon_done() -> None:
    x = cloud(300, 5)
    limits = SizeLimits(1, 300)
    first = min_sum(exact(x), 12, limits=limits, labels=random_balanced_labels(300, 12, 0))
    for step, size in enumerate((0.001, 0.05, 0.3)):
        moved = exact(x + size * torch.randn(300, 5, generator=gen(step), dtype=x.dtype))
        again = min_sum(moved, 12, limits=limits, labels=first.labels)
        assert again.objective <= moved.objective(first.labels, 12)
        kept = float((again.labels == first.labels).double().mean())
        assert kept > (0.95 if size == 0.001 else 0.3)  # a small drift moves few points


# --- blocks of a large problem ----------------------------------------------------------------------------


def large(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> LowRankView:
    x = cloud(n, 6, seed, dtype)
    return LowRankView(x - x.mean(0), 0.2 * torch.rand(n, generator=gen(seed), dtype=dtype))


@pytest.mark.parametrize("k", [3, 40, 100])
def test_many_moves_at_once_lower_j_by_what_they_say(k: int) -> None:
    problem = large(2600, 0, torch.float64)
    # random strata are all alike and every point would go to the same one: start from a rough solution
    labels = solve(problem, k, limits=SizeLimits(1, 2600), generator=gen(), max_passes=0).labels
    state = _STATES[type(problem)](problem, labels, k)
    block = slice(100, 2600)
    scores, own = state.scores(block)
    before = problem.objective(labels, k)
    decrease = _move_many(state, block, scores, own - scores.amin(0), 0.0, SizeLimits(1, 2600))
    assert decrease > 0.0
    assert before - problem.objective(state.labels, k) == pytest.approx(decrease, abs=1e-9 * before)
    assert torch.equal(state.labels[:100], labels[:100])
    assert int((state.labels != labels).sum()) > 128
    assert int(sizes_of(state.labels, k).min()) >= 1


def test_many_moves_at_once_do_not_empty_a_stratum_that_all_want_to_leave() -> None:
    # two places; strata 2 and 3 hold points of both, and each of those points gains by going home
    groups = [(0.0, 0, 900), (1.0, 1, 900), (0.0, 3, 350), (1.0, 3, 350), (0.0, 2, 1), (1.0, 2, 1)]
    x = torch.cat([torch.full((count, 1), place, dtype=torch.float64) for place, _, count in groups])
    labels = torch.cat([torch.full((count,), label) for _, label, count in groups])
    problem = LowRankView(x, x.new_zeros(len(x)))
    state = _STATES[type(problem)](problem, labels, 4)
    scores, own = state.scores(slice(0, len(x)))
    gain = own - scores.amin(0)
    assert int((gain > 0).sum()) == 702
    assert bool((gain[labels == 2] > 0).all())
    assert _move_many(state, slice(0, len(x)), scores, gain, 0.0, SizeLimits(1, len(x))) > 0.0
    assert int(sizes_of(state.labels, 4).min()) >= 1
    found = min_sum(problem, 4, limits=SizeLimits(1, len(x)), labels=labels)
    assert int(sizes_of(found.labels, 4).min()) >= 1
    assert found.objective == 0.0


def test_many_moves_leave_a_settled_block_alone() -> None:
    problem = large(2000, 0, torch.float64)
    labels = min_sum(problem, 8, limits=SizeLimits(1, 2000), labels=random_balanced_labels(2000, 8, 0), tol=0.0).labels
    state = _STATES[type(problem)](problem, labels, 8)
    scores, own = state.scores(slice(0, 2000))
    assert _move_many(state, slice(0, 2000), scores, own - scores.amin(0), 0.0, SizeLimits(1, 2000)) == 0.0
    assert torch.equal(state.labels, labels)


@pytest.mark.parametrize(("n", "k"), [(1500, 20), (5600, 40), (2500, 300)])
def test_large_blocks_are_monotone_and_as_good_as_small_ones(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = large(n)
    start = random_balanced_labels(n, k, 0)
    others = [start, *(random_balanced_labels(n, k, seed) for seed in range(1, 5))]
    compiled = [min_sum(problem, k, limits=SizeLimits(1, n), labels=other).objective for other in others]
    monkeypatch.setattr(module, "compiled_loops", lambda tensor: None)  # which has no blocks
    calls = []

    def counted(*args: object) -> float:
        decrease: float = _move_many(*args)  # type: ignore[arg-type]
        calls.append(decrease)
        return decrease

    monkeypatch.setattr(module, "_move_many", counted)
    seen: list[float] = []
    found = min_sum(
        problem,
        k,
        limits=SizeLimits(1, n),
        labels=start,
        progress=lambda _, message: seen.append(float(message.split()[-1])),
    )
    assert max(calls) > 0.0  # the path under test was taken
    assert min(calls) >= 0.0
    assert [problem.objective(start, k), *seen] == sorted([problem.objective(start, k), *seen], reverse=True)
    assert seen[-1] == pytest.approx(found.objective, rel=1e-4)
    assert int(sizes_of(found.labels, k).min()) >= 1
    plain = [min_sum(problem, k, limits=SizeLimits(1, n), labels=other).objective for other in others]
    assert sum(compiled) <= 1.02 * sum(plain)  # from random starts either may end in the better optimum

    limits = SizeLimits(1, n)
    starts = [
        solve(problem, k, init=init, limits=limits, generator=gen(), max_passes=0) for init in ("bisection", "kmeans++")
    ]
    by_large = [min_sum(problem, k, limits=limits, labels=good.labels).objective for good in starts]
    assert by_large[0] < 0.8 * starts[0].objective
    monkeypatch.setattr(module._LowRankState, "block_rows", lambda state: 512)
    by_small = [min_sum(problem, k, limits=limits, labels=good.labels).objective for good in starts]
    assert sum(by_large) <= 1.02 * sum(by_small)


@pytest.mark.parametrize(("n", "k"), [(900, 16), (5600, 40)])
def test_limits_that_no_stratum_reaches_cost_nothing(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exchange is tried, blocks are as large as without limits, and the strata are the same."""
    problem = large(n)
    start = random_balanced_labels(n, k, 0)
    free = min_sum(problem, k, limits=SizeLimits(1, n), labels=start)
    smallest, largest = int(sizes_of(free.labels, k).min()), int(sizes_of(free.labels, k).max())
    assert smallest > 2
    swaps: list[bool] = []
    swap_points = _Part.swap_points

    def counted(part: _Part, at_limit: np.ndarray, noise: float) -> float:
        swaps.append(bool(at_limit.any()))
        return swap_points(part, at_limit, noise)

    monkeypatch.setattr(_Part, "swap_points", counted)
    limited = min_sum(problem, k, limits=SizeLimits(2, n - 1), labels=start)
    assert torch.equal(limited.labels, free.labels)
    assert not any(swaps)
    min_sum(problem, k, limits=SizeLimits(2, (smallest + largest) // 2), labels=start)
    assert any(swaps)  # where a limit binds, exchanges are tried


def test_many_moves_at_once_keep_the_limits() -> None:
    n, k = 5600, 40
    problem = large(n)
    start = solve(problem, k, limits=SizeLimits(1, n), generator=gen(), max_passes=0).labels
    for limits in (SizeLimits(60, n), SizeLimits(1, 300), SizeLimits(60, 300)):
        labels = within_limits(problem, start, k, limits)
        found = min_sum(problem, k, limits=limits, labels=labels)
        assert limits.hold(sizes_of(found.labels, k))
        assert found.objective < problem.objective(labels, k)


def test_blocks_with_exchanges_keep_sizes_and_lower_j() -> None:
    n, k = 1300, 13
    problem = large(n)
    start = random_balanced_labels(n, k, 0)
    limits = SizeLimits.of(n, k, equal=True)
    found = min_sum(problem, k, limits=limits, labels=start, max_passes=4)
    assert sizes_of(found.labels, k).tolist() == [100] * 13
    free = min_sum(problem, k, limits=SizeLimits(1, n), labels=start)
    assert free.objective < found.objective < 0.7 * problem.objective(start, k)


def test_an_exact_problem_of_several_blocks_is_improved_in_all_of_them() -> None:
    n, k = 1500, 20
    problem = exact(cloud(n, 4, dtype=torch.float32))
    start = random_balanced_labels(n, k, 0)
    found = min_sum(problem, k, limits=SizeLimits(1, n), labels=start)
    changed = found.labels != start
    assert float(changed[:1024].double().mean()) > 0.5
    assert float(changed[1024:].double().mean()) > 0.5
    assert found.objective == pytest.approx(problem.objective(found.labels, k), rel=1e-4)
    assert found.objective < 0.9 * problem.objective(start, k)


# --- stopping and progress --------------------------------------------------------------------------------


def test_progress_and_the_pass_limit() -> None:
    problem = exact(cloud(200))
    start = random_balanced_labels(200, 10, 0)
    seen: list[tuple[float, str]] = []
    found = min_sum(
        problem,
        10,
        limits=SizeLimits(1, 200),
        labels=start,
        tol=0.0,
        progress=lambda fraction, message: seen.append((fraction, message)),
    )
    assert found.converged
    assert len(seen) == found.n_iter >= 2
    assert [fraction for fraction, _ in seen] == [(i + 1) / 100 for i in range(found.n_iter)]
    assert all(message.startswith(f"pass {i + 1}, objective ") for i, (_, message) in enumerate(seen))
    one = min_sum(problem, 10, limits=SizeLimits(1, 200), labels=start, tol=0.0, max_passes=1)
    assert (one.n_iter, one.converged) == (1, False)
    assert found.objective <= one.objective < problem.objective(start, 10)
    none = min_sum(problem, 10, limits=SizeLimits(1, 200), labels=start, max_passes=0)
    assert torch.equal(none.labels, start)
    loose = min_sum(problem, 10, limits=SizeLimits(1, 200), labels=start, tol=0.9)
    assert (loose.n_iter, loose.converged) == (1, True)


def test_points_of_many_samples_are_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 3000, 10
    problem, limits = linear(cloud(n)), SizeLimits.of(n, k, equal=True)
    labels = random_balanced_labels(n, k, gen())
    exchanged = min_sum(problem, k, limits=limits, labels=labels).objective
    monkeypatch.setattr(module, "EXCHANGED", n - 1)
    left = min_sum(problem, k, limits=limits, labels=labels)
    assert limits.hold(torch.bincount(left.labels, minlength=k))
    assert exchanged < 0.5 * left.objective  # from random strata exchanges are all that can be done


# --- exchanges where strata are small ---------------------------------------------------------------------


def test_an_exchange_frees_points_that_no_move_can(monkeypatch: pytest.MonkeyPatch) -> None:
    x, stuck = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    assert stratify(x, 2, kernel="linear", warm_start=stuck).variance == 0.0
    monkeypatch.setattr(module, "_SMALL", 0)
    assert stratify(x, 2, kernel="linear", warm_start=stuck).variance > 0.0


def test_exchanges_come_nearer_to_the_best_of_all_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SizeLimits.of(8, 4)

    def excess() -> float:
        total = 0.0
        for seed in range(20):
            problem = exact(cloud(8, seed=seed))
            best = optimum(problem, 4, limits)
            found = solve(problem, 4, limits=limits, generator=gen()).objective
            assert found >= best * (1 - 1e-9)
            total += found / best - 1.0
        return total

    exchanged = excess()
    monkeypatch.setattr(module, "_SMALL", 0)
    assert exchanged < 0.5 * excess()


@pytest.mark.parametrize("compiled", [True, False])
def test_small_strata_are_as_good_as_equal_ones(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(module, "compiled_loops", lambda tensor: None)
    kernel, spread = RBFMixture(scale="median"), torch.arange(1, 17).float().rsqrt()
    found = equal = moved = again = 0.0
    for seed in range(3):
        generator = gen(seed)
        centres = 1.5 * torch.randn(10, 16, generator=generator)
        x = spread * (torch.randn(200, 16, generator=generator) + centres[torch.arange(200) % 10])
        found += stratify(x, 25, kernel=kernel).variance
        equal += stratify(x, 25, kernel=kernel, equal=True).variance
        large = stratify(x, 12, kernel=kernel).labels
        with monkeypatch.context() as patch:
            patch.setattr(module, "_SMALL", 0)
            by_moves = stratify(x, 25, kernel=kernel)
            assert torch.equal(stratify(x, 12, kernel=kernel).labels, large)  # more than 16 points each
        moved += by_moves.variance
        again += stratify(x, 25, kernel=kernel, warm_start=by_moves).variance
    assert found <= equal
    assert max(found, again) < 0.99 * moved
