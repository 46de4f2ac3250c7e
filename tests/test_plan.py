"""Plans: swaps inside columns keep what makes batches unbiased, and bring every row to the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from conftest import gen
from vardass import lowrank
from vardass.errors import VardassWarning
from vardass.kernels import RBFMixture, as_kernel
from vardass.samplers import BalancedBatchSampler, OrderedBatchSampler, StratifiedBatchSampler, plan
from vardass.samplers.plan import _match, couple_rows, cycle_table, row_errors
from vardass.strata import Strata
from vardass.variance import stratified_variance

SMOOTH = RBFMixture(gammas=(0.1,))


@pytest.fixture(scope="module", params=["torch", "compiled"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every law of a plan holds for both backends."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(plan, "compiled_loops", lambda tensor: None)
        yield request.param


def centred(n: int, r: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(n, r, generator=gen(seed), dtype=dtype).exp()
    return x - x.mean(0)


def strata_of(sizes: list[int], seed: int = 0) -> Strata:
    labels = torch.repeat_interleave(torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=gen(seed))]
    return Strata(labels, k=len(sizes), variance=0.0, uniform_variance=0.0)


def random_weights(k: int, seed: int = 0) -> Tensor:
    weights = torch.rand(k, generator=gen(seed), dtype=torch.float64) + 0.1
    return weights / weights.sum()


def random_table(rows: int, k: int, n: int, seed: int = 0) -> Tensor:
    return torch.randint(n, (rows, k), generator=gen(seed))


def energy(table: Tensor, features: Tensor, weights: Tensor) -> float:
    """Σ_t |E_t|², one row at a time."""
    return sum(float((weights[:, None] * features[row]).sum(0).square().sum()) for row in table)


shapes = st.tuples(st.integers(1, 12), st.integers(1, 7), st.integers(1, 20), st.integers(0, 1000))


# --- tables -------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), rows=st.integers(1, 25), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_members_of_a_stratum_occur_equally_often_to_within_one(sizes: list[int], rows: int, seed: int) -> None:
    strata = strata_of(sizes, seed)
    table = cycle_table(strata, rows, gen(seed))
    assert table.shape == (rows, len(sizes))
    for h, size in enumerate(sizes):
        assert bool((strata.labels[table[:, h]] == h).all())
        counts = torch.bincount(table[:, h], minlength=strata.n)[strata.members(h)]
        assert int(counts.min()) >= rows // size
        assert int(counts.max()) <= -(-rows // size)
        for start in range(0, rows, size):  # in every cycle, not only at the end
            cycle = table[start : start + size, h]
            assert len(cycle.unique()) == len(cycle)


def test_the_remainder_of_a_cycle_is_any_subset_equally_often() -> None:
    strata = strata_of([5, 3])
    members = strata.members(0).tolist()
    counts = dict.fromkeys(itertools.combinations(sorted(members), 2), 0)
    for seed in range(1500):
        table = cycle_table(strata, 7, gen(seed))  # one cycle of five and two more
        counts[tuple(sorted(table[5:, 0].tolist()))] += 1
    assert len(counts) == 10
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_all_remainders_average_to_the_mean_exactly() -> None:
    # Σ over all choices of the remainder of each column: every member of a stratum occurs equally often
    sizes, rows = [4, 3], 5
    strata = strata_of(sizes)
    weights = strata.sizes.double() / strata.n
    values = torch.randn(strata.n, 4, generator=gen(1), dtype=torch.float64)
    means = []
    for first, second in itertools.product(itertools.combinations(range(4), 1), itertools.combinations(range(3), 2)):
        columns = [
            torch.cat([strata.members(h).repeat(rows // sizes[h]), strata.members(h)[list(rest)]])
            for h, rest in ((0, first), (1, second))
        ]
        table = torch.stack(columns, 1)
        coupled = couple_rows(table, values - values.mean(0), weights, rounds=10, generator=gen())
        means.append(row_errors(coupled, values, weights).mean(0))
    torch.testing.assert_close(torch.stack(means).mean(0), values.mean(0), rtol=1e-12, atol=1e-14)


# --- swaps --------------------------------------------------------------------------------------------------


@given(shape=shapes)
@settings(max_examples=60, deadline=None)
def test_columns_keep_their_members_and_the_total_never_rises(shape: tuple[int, int, int, int]) -> None:
    rows, k, n, seed = shape
    features, weights = centred(n, seed=seed), random_weights(k, seed)
    table = random_table(rows, k, n, seed)
    before = table.clone()
    coupled = couple_rows(table, features, weights, rounds=12, generator=gen(seed))
    assert torch.equal(table, before)
    assert torch.equal(coupled.sort(0).values, table.sort(0).values)
    assert energy(coupled, features, weights) <= energy(table, features, weights) * (1 + 1e-12)
    # so the mean of any function over the rows is what it was
    values = torch.randn(n, generator=gen(seed + 1), dtype=torch.float64)
    assert float((values[coupled] @ weights).mean()) == pytest.approx(float((values[table] @ weights).mean()))


@given(shape=shapes)
@settings(max_examples=60, deadline=None)
def test_each_column_books_what_it_changes(shape: tuple[int, int, int, int]) -> None:
    rows, k, n, seed = shape
    features, weights = centred(n, seed=seed), random_weights(k, seed)
    table = random_table(rows, k, n, seed)
    errors = row_errors(table, features, weights)
    total = energy(table, features, weights)
    size = max(1, rows // 2)
    for h in range(k):
        groups = torch.randperm(rows, generator=gen(seed + h))[: rows // size * size].view(-1, size)
        _match(table[:, h], features, weights[h], errors, groups, is_placed=True)
        torch.testing.assert_close(errors, row_errors(table, features, weights), rtol=1e-9, atol=1e-12)
        after = energy(table, features, weights)
        assert after <= total * (1 + 1e-12)
        total = after


def test_row_errors_are_weighted_means() -> None:
    features, weights, table = centred(9), random_weights(4), random_table(6, 4, 9)
    expected = torch.stack([sum((weights[h] * features[row[h]] for h in range(4)), torch.zeros(3)) for row in table])
    torch.testing.assert_close(row_errors(table, features, weights), expected)


@pytest.mark.parametrize("seed", range(10))
def test_a_column_ends_where_no_exchange_helps(seed: int) -> None:
    rows, k = 7, 4
    features, weights, table = centred(12, seed=seed), random_weights(k, seed), random_table(rows, k, 12, seed)
    errors = row_errors(table, features, weights)
    _match(table[:, 2], features, weights[2], errors, torch.randperm(rows, generator=gen(seed))[None], is_placed=True)
    end = energy(table, features, weights)
    for a, b in itertools.combinations(range(rows), 2):
        swapped = table.clone()
        swapped[[a, b], 2] = table[[b, a], 2]
        assert energy(swapped, features, weights) >= end * (1 - 1e-6)


def all_arrangements(table: Tensor) -> Tensor:
    """Every way to permute the columns of a (3, 3) table, the first one held: (36, 3, 3)."""
    orders = [torch.tensor(order) for order in itertools.permutations(range(3))]
    return torch.stack(
        [torch.stack([table[:, 0], table[p, 1], table[q, 2]], 1) for p, q in itertools.product(orders, orders)]
    )


def test_tiny_plans_come_close_to_the_best_arrangement() -> None:
    gaps = []
    for seed in range(40):
        features, weights, table = centred(9, 2, seed), random_weights(3, seed), torch.arange(9).view(3, 3).T
        energies = torch.stack([row_errors(t, features, weights).square().sum() for t in all_arrangements(table)])
        coupled = couple_rows(table, features, weights, rounds=32, generator=gen(seed))
        reached = energy(coupled, features, weights)
        best, mean = float(energies.min()), float(energies.mean())
        assert best * (1 - 1e-12) <= reached
        gaps.append((reached - best) / (mean - best))
    # the share of what arranging can gain that exchanges miss
    assert sum(gap < 1e-9 for gap in gaps) >= 32
    assert sum(gaps) / len(gaps) < 0.02
    assert max(gaps) < 0.2


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1)])
def test_a_single_row_or_column_has_nothing_to_swap(shape: tuple[int, int]) -> None:
    table = random_table(*shape, n=7)
    coupled = couple_rows(table, centred(7), random_weights(shape[1]), rounds=5, generator=gen())
    assert torch.equal(coupled.sort(0).values, table.sort(0).values)
    if shape[0] == 1:
        assert torch.equal(coupled, table)


def test_no_rounds_leave_the_table_alone() -> None:
    table = random_table(6, 4, 9)
    assert torch.equal(couple_rows(table, centred(9), random_weights(4), rounds=0, generator=gen()), table)


def test_equal_features_and_no_features_are_left_alone() -> None:
    table = random_table(6, 4, 9)
    coupled = couple_rows(table, torch.zeros(9, 2), random_weights(4), rounds=20, generator=gen())
    assert torch.equal(coupled, table)


def test_the_same_generator_gives_the_same_plan_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    features, weights, table = centred(50, 4), random_weights(5), random_table(131, 5, 50)  # three groups
    first = couple_rows(table, features, weights, rounds=16, generator=gen(1))
    assert torch.equal(first, couple_rows(table, features, weights, rounds=16, generator=gen(1)))
    assert not torch.equal(first, couple_rows(table, features, weights, rounds=16, generator=gen(2)))
    monkeypatch.setattr(plan, "_NUMBERS", 100)  # a few rows at a time
    assert torch.equal(first, couple_rows(table, features, weights, rounds=16, generator=gen(1)))


def test_single_precision_does_as_well() -> None:
    features, weights, table = centred(80, 6), random_weights(8), random_table(40, 8, 80)
    double = energy(couple_rows(table, features, weights, rounds=48, generator=gen()), features, weights)
    single = couple_rows(table, features.float(), weights, rounds=48, generator=gen())
    assert energy(single, features, weights) < 1.3 * double
    assert double < 0.2 * energy(table, features, weights)


def test_the_search_ends_when_it_gains_little() -> None:
    features, weights, table = centred(300), random_weights(8), random_table(60, 8, 300)
    after = [couple_rows(table, features, weights, rounds=r, generator=gen(), tol=0.0) for r in (1, 2, 40)]
    energies = [energy(found, features, weights) for found in after]
    assert energies[0] > energies[1] > energies[2]
    # orders are drawn for all rounds at the beginning, so that the first two are the same ones
    ended = couple_rows(table, features, weights, rounds=40, generator=gen(), tol=1.0)
    assert torch.equal(ended, after[1])
    # what the features miss of a row is more than the error that the first round left
    missed = 1.01 * energies[0] / 60 / float(weights.square().sum())
    ended = couple_rows(table, features, weights, rounds=40, generator=gen(), tol=0.0, residual=missed)
    assert torch.equal(ended, after[0])
    ended = couple_rows(table, features, weights, rounds=40, generator=gen(), tol=0.0, residual=0.9 * missed)
    assert not torch.equal(ended, after[0])


def test_a_table_that_no_sweep_improves_is_kept() -> None:
    # every row has mean zero, which a sweep that builds the rows anew need not find again
    features = torch.tensor([[-3.0], [-2.0], [-1.0], [1.0], [2.0], [3.0]])
    table, weights = torch.tensor([[0, 5, 2, 3], [1, 4, 1, 4], [2, 3, 0, 5]]), torch.full((4,), 0.25)
    for seed in range(20):
        coupled = couple_rows(table, features, weights, rounds=1, generator=gen(seed))
        assert energy(coupled, features, weights) == 0.0


# --- the variance of plans ----------------------------------------------------------------------------------


def plan_variance(rows: Tensor, weights: Tensor, phi: Tensor) -> float:
    """Mean squared distance of the rows' mean embedding from the whole one."""
    return float(row_errors(rows, phi - phi.mean(0), weights).square().sum(1).mean())


def sizes_that_divide(rows: int) -> Strata:
    return strata_of([size for size in (2, 3, 4, 6, 12) if rows % size == 0], seed=3)


def test_whole_cycles_start_at_the_variance_of_the_strata_and_fall() -> None:
    strata, rows = sizes_that_divide(12), 12
    phi = torch.randn(strata.n, 4, generator=gen(5), dtype=torch.float64).exp()
    weights = strata.sizes.double() / strata.n
    exact = stratified_variance(phi, strata.labels, kernel="linear")
    start, end = [], []
    for seed in range(400):
        table = cycle_table(strata, rows, gen(seed))
        start.append(plan_variance(table, weights, phi))
        coupled = couple_rows(table, phi - phi.mean(0), weights, rounds=4, generator=gen(seed))
        end.append(plan_variance(coupled, weights, phi))
        assert end[-1] <= start[-1] * (1 + 1e-12)
    before, after = torch.tensor(start), torch.tensor(end)
    assert abs(float(before.mean()) - exact) < 4.5 * float(before.std()) / 400**0.5
    assert float(after.mean()) < 0.5 * exact


@pytest.mark.parametrize(
    ("kernel", "share"), [("linear", 0.06), (SMOOTH, 0.4), ("coral", 0.25), ("rbf", 0.87)], ids=str
)
def test_ordered_batches_have_less_variance_than_their_strata(kernel: Any, share: float) -> None:
    n, k = 200, 8
    z = torch.randn(n, 3, generator=gen(2))
    ordered = OrderedBatchSampler(n, k, kernel=kernel)
    plain = StratifiedBatchSampler(n, k, kernel=kernel, replacement=False)
    ordered.refresh(z)
    plain.refresh(z)
    assert ordered.strata is not None
    assert plain.strata is not None
    assert torch.equal(ordered.strata.labels, plain.strata.labels)
    fitted = as_kernel(kernel).fit(z)
    gram = fitted.matrix(z.double())
    exact = stratified_variance(z, ordered.strata.labels, kernel=fitted)

    def measured(sampler: StratifiedBatchSampler) -> float:
        rows, weights = sampler.sample_batches(1024)[:2]
        assert weights is not None
        own = torch.einsum("a,tab,b->t", weights, gram[rows[:, :, None], rows[:, None, :]], weights)
        cross = gram.mean(0)[rows] @ weights
        return float((own - 2 * cross + gram.mean()).mean())

    assert measured(plain) == pytest.approx(exact, rel=0.15)
    assert measured(ordered) < share * exact


def test_balanced_epochs_beat_strata_of_equal_size() -> None:
    n, k = 256, 8
    z = torch.randn(n, 3, generator=gen(2))
    balanced = BalancedBatchSampler(n, k, kernel=SMOOTH)
    strata = StratifiedBatchSampler(n, k, kernel=SMOOTH, equal=True)
    for sampler in (balanced, strata):
        sampler.refresh(z)
    values, vectors = torch.linalg.eigh(SMOOTH.matrix(z.double()))
    root = vectors * values.clamp_min(0).sqrt()
    even = torch.full((k,), 1.0 / k, dtype=torch.float64)
    coupled = plan_variance(balanced.sample_batches(320).rows, even, root)
    assert strata.strata is not None
    assert coupled < 0.3 * strata.strata.variance


# --- epochs that are planned in parts -----------------------------------------------------------------------


def in_parts(monkeypatch: pytest.MonkeyPatch, n: int, k: int, rows: int = 3, **options: Any) -> BalancedBatchSampler:
    """A sampler of which at most ``rows`` batches are planned together."""
    monkeypatch.setattr("vardass.samplers.planned._ROWS", rows)
    sampler = BalancedBatchSampler(n, k, kernel="rbf", **options)
    sampler.refresh(torch.randn(n, 3, generator=gen(4)))
    return sampler


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_parts_of_an_epoch_visit_each_sample_once(
    monkeypatch: pytest.MonkeyPatch, replicas: int, drop_last: bool
) -> None:
    n, k = 71, 4
    options: dict[str, Any] = {"drop_last": drop_last, "num_replicas": replicas}
    samplers = [in_parts(monkeypatch, n, k, rank=rank, **options) for rank in range(replicas)]
    for _ in range(2):  # epochs
        batches = [list(sampler) for sampler in samplers]
        assert [len(each) for each in batches] == [len(sampler) for sampler in samplers]
        visited = [index for each in batches for batch in each for index in batch]
        total = n // k + (not drop_last)
        assert len(set(visited)) == len(visited) == min(n, total // replicas * replicas * k)


def test_every_sample_is_as_likely_in_every_batch_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    n, k, draws = 14, 2, 600
    counts = torch.zeros(n // k, n)
    for seed in range(draws):
        for place, batch in enumerate(in_parts(monkeypatch, n, k, rows=2, seed=seed)):
            counts[place, list(batch)] += 1
    for row in counts:
        assert stats.chisquare(row.tolist()).pvalue > 1e-4


def test_a_part_has_the_mean_of_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = in_parts(monkeypatch, 1600, 8, rows=50)
    assert sampler._features is not None
    strata = torch.arange(1600).view(8, 200)
    random, chosen = [], []
    for seed in range(20):
        shuffled = strata.gather(1, torch.rand(8, 200, generator=gen(seed)).argsort(1))
        for found, part in ((random, shuffled[:, :50]), (chosen, sampler._first_part(shuffled, gen(seed)))):
            assert part.shape == (8, 50)
            assert bool((part // 200 == torch.arange(8)[:, None]).all())
            found.append(float(sampler._features[part.flatten(), :32].mean(0).square().sum()))
    assert sum(chosen) < 0.05 * sum(random)


@pytest.mark.parametrize("position", range(1, 11))
def test_an_epoch_in_parts_resumes_and_refreshes_anywhere(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    n, k = 70, 6
    sampler = in_parts(monkeypatch, n, k)
    stream = iter(sampler)
    before = [next(stream) for _ in range(position)]
    state = sampler.state_dict()
    after = list(stream)
    other = in_parts(monkeypatch, n, k)
    other.load_state_dict(state)
    assert list(other) == after
    other.load_state_dict(state)
    other.refresh(torch.randn(n, 3, generator=gen(5)))
    visited = [index for batch in before + list(other) for index in batch]
    assert len(visited) == n // k * k == len(set(visited))


@pytest.mark.parametrize("sampler", [OrderedBatchSampler, BalancedBatchSampler])
def test_plans_are_not_spent_on_telling_landmarks_from_other_samples(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """<μ̂, μ> is what a loss sees first. Where landmarks stand out of their neighbours it is noisier."""
    x = 0.6 * torch.randn(700, 48, generator=gen(3))
    x[:, :3] += 2.0 * torch.randn(700, 3, generator=gen(4))
    kernel = RBFMixture()
    along = kernel.matrix(x).double().mean(0)

    def noise() -> float:
        batches = sampler(700, 32, kernel=kernel, seed=1, batches=400)
        batches.refresh(x)
        means = [along[list(b)] @ torch.tensor(getattr(b, "weights", None) or [1 / 32] * 32).double() for b in batches]
        return float(torch.stack(means).var())

    found = noise()
    with monkeypatch.context() as patch:
        fit = lowrank._fit
        patch.setattr(lowrank, "_fit", lambda *given, leave_one_out: fit(*given, leave_one_out=False))
        assert found < 0.8 * noise()


def test_features_that_are_all_alike_are_said_and_give_random_batches() -> None:
    sampler = BalancedBatchSampler(40, 4, seed=0)
    with pytest.warns(VardassWarning, match="all 40 samples are alike .* batches are random, as none are better"):
        sampler.refresh(torch.ones(40, 3))
    assert sorted(index for batch in sampler for index in batch) == list(range(40))
