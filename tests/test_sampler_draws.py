"""Batches are unbiased, and each sample comes once where that is promised."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from conftest import refused
from sampler_cases import (
    MAKERS,
    QUICK,
    K,
    N,
    cloud,
    each_once,
    each_sampler,
    each_strata,
    gen,
    indices,
    made,
    round_length,
    taken,
    visits_once,
)
from vardass.samplers import (
    BalancedBatchSampler,
    MinibatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
    stratified,
)
from vardass.strata import Strata

# --- unbiased --------------------------------------------------------------------------------------------


def any_function(n: int = N) -> Tensor:
    """Values that no sampler has heard of."""
    return torch.randn(n, 5, generator=gen(99), dtype=torch.float64).exp()


def batch_means(rows: Tensor, weights: Tensor | None, values: Tensor) -> Tensor:
    return values[rows].mean(1) if weights is None else torch.einsum("tkr,k->tr", values[rows], weights)


@pytest.mark.parametrize("name", ["stratified", "stratified, k-means", "stratified, classes"])
def test_independent_draws_are_unbiased_over_all_levels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # every draw takes the member at which a uniform number falls: a grid of numbers that is a multiple of each
    # stratum's size visits each member with exactly its probability
    sampler = made(name)
    assert isinstance(sampler, StratifiedBatchSampler)
    assert sampler.strata is not None
    grid = math.lcm(*sampler.strata.sizes.tolist())

    def levels(rows: int, columns: int, **_: Any) -> Tensor:
        return ((torch.arange(grid).double() + 0.5) / grid)[:, None].expand(-1, columns)

    monkeypatch.setattr(torch, "rand", levels)
    chunk = sampler._make_chunk(0, gen())
    for column in range(K):
        members = sampler.strata.members(column)
        assert torch.bincount(chunk.rows[:, column], minlength=N)[members].tolist() == [grid // len(members)] * len(
            members
        )
    means = batch_means(chunk.rows, chunk.weights, any_function())
    torch.testing.assert_close(means.mean(0), any_function().mean(0), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", ["stratified", "stratified, classes"])
def test_all_batches_of_a_design_average_to_the_whole(name: str) -> None:
    sampler = made(name)
    assert isinstance(sampler, StratifiedBatchSampler)
    assert sampler.strata is not None
    every = torch.tensor(list(itertools.product(*(sampler.strata.members(h).tolist() for h in range(K)))))
    weights = torch.tensor(next(iter(sampler)).weights, dtype=torch.float64)
    means = batch_means(every, weights, any_function())
    torch.testing.assert_close(means.mean(0), any_function().mean(0), rtol=1e-12, atol=0.0)
    assert set(map(tuple, sampler.sample_batches(300).rows.tolist())) <= set(map(tuple, every.tolist()))


@pytest.mark.parametrize("coupled", [False, True])
def test_a_plan_of_whole_cycles_averages_to_the_whole(coupled: bool) -> None:
    n, rows = 24, 12  # strata of 6 or 12 members: each occurs equally often
    options: dict[str, Any] = {"kernel": "rbf", "equal": True}
    sampler: StratifiedBatchSampler
    if coupled:
        sampler = OrderedBatchSampler(n, 4, plan_rows=rows, **options)
    else:
        sampler = StratifiedBatchSampler(n, 4, replacement=False, **options)
    sampler.refresh(cloud(n))
    chunk = sampler._make_chunk(0, gen(3))
    whole = chunk.rows[: len(chunk.rows) // rows * rows]
    means = batch_means(whole, chunk.weights, any_function(n))
    torch.testing.assert_close(means.mean(0), any_function(n).mean(0), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("balanced", [True, False])
def test_epochs_over_all_remainders_average_to_the_whole(
    drop_last: bool, balanced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = 11, 4
    values = any_function(n)
    randperm = torch.randperm
    kept, left_out = [], []
    for shift in range(n):  # every sample is in the remainder for exactly 3 of 11 shifts

        def rotated(count: int, shift: int = shift, **options: Any) -> Tensor:
            return torch.arange(n).roll(shift) if count == n else randperm(count, **options)

        monkeypatch.setattr(torch, "randperm", rotated)
        sampler: MinibatchSampler = (
            BalancedBatchSampler(n, k, drop_last=drop_last, **QUICK)
            if balanced
            else UniformBatchSampler(n, k, drop_last=drop_last)
        )
        sampler.refresh(cloud(n))
        means = [values[batch].mean(0) for batch in sampler]
        kept.append(torch.stack(means[:2]).mean(0))
        left_out += means[2:]
    torch.testing.assert_close(torch.stack(kept).mean(0), values.mean(0), rtol=1e-12, atol=0.0)
    assert len(left_out) == (0 if drop_last else n)
    if left_out:
        torch.testing.assert_close(torch.stack(left_out).mean(0), values.mean(0), rtol=1e-12, atol=0.0)


@each_sampler
def test_every_sample_is_as_likely_as_its_weight_says_at_any_position(name: str) -> None:
    sampler = made(name)
    epochs = 200
    counts = torch.zeros(2, N, dtype=torch.float64)
    expected = torch.full((N,), K / N, dtype=torch.float64)
    strata = getattr(sampler, "strata", None)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = taken(sampler, 4)
        counts[0].index_add_(0, torch.tensor(batches[0][0]), torch.ones(K, dtype=torch.float64))
        counts[1].index_add_(0, torch.tensor(batches[3][0]), torch.ones(K, dtype=torch.float64))
    if strata is not None:
        expected = (K / strata.k / strata.sizes.double()[strata.labels]).masked_fill(strata.labels < 0, 0.0)
    # draws of one batch are from strata, or distinct: at least as even as independent ones
    error = (epochs * expected * (1.0 - expected / K)).clamp_min(1e-9).sqrt()
    assert float(((counts - epochs * expected) / error).abs().max()) < 4.5
    torch.testing.assert_close(counts.sum(1), torch.full((2,), epochs * K, dtype=torch.float64))


def test_stratum_draws_pass_a_chi_square_test() -> None:
    sampler = StratifiedBatchSampler(N, K, kernel="rbf", endless=True)
    sampler.refresh(cloud())
    assert sampler.strata is not None
    rows = torch.tensor([list(batch) for batch in itertools.islice(sampler, 5000)])
    for column in range(K):
        members = sampler.strata.members(column)
        seen = torch.bincount(rows[:, column], minlength=N)
        assert int(seen[members].sum()) == len(rows)
        assert stats.chisquare(seen[members].numpy()).pvalue > 1e-4
    # draws from different strata are independent
    first, second = (torch.unique(rows[:, column], return_inverse=True)[1] for column in (0, 1))
    table = torch.bincount(first * (int(second.max()) + 1) + second).view(int(first.max()) + 1, -1)
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-4


@each_strata
def test_weights_sum_to_one_and_are_the_shares_of_the_strata(name: str) -> None:
    sampler = made(name)
    assert isinstance(sampler, StratifiedBatchSampler)
    assert sampler.strata is not None
    for batch in sampler:
        assert sum(batch.weights) == pytest.approx(1.0, abs=1e-12)
        strata = sampler.strata.labels[batch]
        assert strata.tolist() == list(range(sampler.strata.k))
        share = sampler.strata.sizes.double()[strata] / N
        torch.testing.assert_close(torch.tensor(batch.weights, dtype=torch.float64), share)


@each_sampler
def test_batches_are_uniform_before_the_first_refresh(name: str) -> None:
    sampler = MAKERS[name](endless=True)
    batches = taken(sampler, 400)
    assert all(weights is None for _, weights in batches)
    counts = torch.bincount(torch.tensor([i for batch, _ in batches for i in batch]), minlength=N)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("name", ["cycling, classes", "ordered, classes"])
def test_draws_without_replacement_are_distinct(name: str) -> None:
    for batch in itertools.islice(made(name, endless=True), 300):
        assert len(set(batch)) == K


def test_large_strata_are_gone_through_before_a_sample_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stratified, "_DRAWS", 8)
    labels = torch.cat([torch.zeros(30, dtype=torch.int64), torch.ones(10, dtype=torch.int64)])
    sampler = StratifiedBatchSampler(40, 2, replacement=False, endless=True)
    sampler.use(Strata(labels, k=2, variance=0.0, uniform_variance=0.0))
    rows = torch.tensor([list(batch) for batch in itertools.islice(sampler, 60)])
    for start in (0, 30):
        assert sorted(rows[start : start + 30, 0].tolist()) == list(range(30))
    for start in range(0, 60, 10):
        assert sorted(rows[start : start + 10, 1].tolist()) == list(range(30, 40))


def test_strata_of_classes_keep_their_proportions() -> None:
    classes = torch.tensor([0] * 18 + [1] * 6 + [2] * 2)
    for maker in (StratifiedBatchSampler, OrderedBatchSampler):
        sampler = maker(N, 13, kernel="rbf", groups=classes)
        sampler.refresh(cloud())
        for batch in sampler:
            assert torch.bincount(classes[batch]).tolist() == [9, 3, 1]
            weights = torch.tensor(batch.weights, dtype=torch.float64)
            in_class = torch.zeros(3, dtype=torch.float64).index_add_(0, classes[batch], weights)
            torch.testing.assert_close(in_class, torch.bincount(classes).double() / N)


def test_balanced_batches_are_closer_to_the_whole_than_uniform_ones_and_balance_classes() -> None:
    n, k = 240, 12
    z = torch.randn(n, 4, generator=gen(1))
    classes = torch.randint(3, (n,), generator=gen(2))
    shares = torch.bincount(classes).double() / n

    def spread(sampler: MinibatchSampler) -> tuple[float, float]:
        sampler.refresh(z)
        rows = sampler.sample_batches(200).rows
        counts = torch.nn.functional.one_hot(classes[rows]).double().mean(1)
        features = float((z[rows].mean(1) - z.mean(0)).square().sum(1).mean())
        return features, float((counts - shares).square().sum(1).mean())

    plain = spread(UniformBatchSampler(n, k))
    balanced = spread(BalancedBatchSampler(n, k, kernel="linear"))
    with_classes = spread(BalancedBatchSampler(n, k, kernel="linear", groups=classes))
    assert balanced[0] < 0.02 * plain[0]
    assert with_classes[0] < 0.1 * plain[0]
    assert with_classes[1] < 0.1 * balanced[1]


# --- each sample once ------------------------------------------------------------------------------------


@each_once
def test_an_epoch_visits_each_sample_once(name: str) -> None:
    sampler = made(name)
    seen = []
    for _ in range(3):
        assert len(taken(sampler)) == len(sampler)
        batches = taken(sampler)
        assert [len(batch) for batch, _ in batches[:6]] == [K] * 6
        visits_once(name, indices_ := [i for batch, _ in batches for i in batch])
        seen.append(indices_)
    assert seen[0] != seen[1] != seen[2]


@each_once
@pytest.mark.parametrize("left", [0, 1, N // K])
def test_a_refresh_in_mid_epoch_keeps_the_visits(name: str, left: int) -> None:
    sampler = made(name)
    stream = iter(sampler)
    seen = indices(stream, round_length(name) - left)
    for seed in range(2):  # the second one finds nothing drawn since the first
        sampler.refresh(cloud(seed=seed))
    sampler.sample_batches(3)  # does not move the stream
    seen += indices(stream)
    visits_once(name, seen)
    visits_once(name, indices(sampler))


@each_once
@pytest.mark.parametrize("rounds", [0.5, 1.0, 1.5])
def test_an_endless_stream_goes_round(name: str, rounds: float) -> None:
    sampler = made(name, endless=True)
    length = round_length(name)
    position = int(rounds * length)
    stream = iter(sampler)
    seen = taken(stream, position)
    sampler.refresh(cloud(seed=1))
    seen += taken(stream, 3 * length - position)
    for start in range(0, 3 * length, length):
        visits_once(name, [i for batch, _ in seen[start : start + length] for i in batch])


@each_once
@pytest.mark.parametrize("rounds", [1, 2])
def test_more_batches_than_samples_allow_go_round(name: str, rounds: int) -> None:
    sampler = made(name, batches=20)
    length = round_length(name)
    stream = iter(sampler)
    seen = taken(stream, rounds * length)
    sampler.refresh(cloud(seed=1))
    seen += taken(stream)
    assert len(seen) == len(sampler) == 20
    visits_once(name, [i for batch, _ in seen[length : 2 * length] for i in batch])


@pytest.mark.parametrize("name", ["uniform", "balanced"])
def test_every_sample_is_left_out_equally_often(name: str) -> None:
    sampler = made(name)
    epochs = 250
    out = torch.zeros(N, dtype=torch.int64)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen = torch.ones(N, dtype=torch.int64)
        seen[indices(sampler)] = 0
        out += seen
    assert int(out.sum()) == epochs * (N % K)
    # 2 of 26 without replacement: the variances are a little smaller than a multinomial's
    statistic = float((out - epochs * 2 / N).square().sum() / (epochs * 2 / N)) * (N - 1) / (N - 2)
    assert 1e-4 < stats.chi2(N - 1).sf(statistic) < 1 - 1e-4


def test_batches_from_each_group_are_uniform_within_it() -> None:
    groups = torch.tensor([5] * 3 + [-1] * 9)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    sampler = UniformBatchSampler(12, 4, replacement=True, from_each=groups, seed=0)
    chunk = sampler.sample_batches(20_000)
    assert ((groups[chunk.rows] == 5).sum(1) == 2).all()
    assert chunk.weights is None
    share = chunk.rows.flatten().bincount(minlength=12) / 40_000
    expected = torch.where(groups == 5, 1 / 3, 1 / 9)
    assert (share - expected).abs().max() < 0.01
    with refused("batch_size=5", "2 groups", "batch_size=4"):
        UniformBatchSampler(12, 5, replacement=True, from_each=groups)
    with refused("from_each", "replacement=False", "replacement=True"):
        UniformBatchSampler(12, 4, from_each=groups)


# --- many samples ---------------------------------------------------------------------------------------------

MANY = 2**24 + 1000  # above 2**24 single precision skips every other number


@pytest.mark.parametrize("replacement", [True, False])
def test_uniform_draws_reach_every_sample_of_many(replacement: bool) -> None:
    sampler = UniformBatchSampler(MANY, 2**18, replacement=replacement, seed=0)
    tracemalloc.start()  # of lists; tensors are not counted
    stream = iter(sampler)
    last = torch.cat([(batch := torch.tensor(next(stream)))[batch >= 2**24] for _ in range(2)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6  # bytes: some batches of 10 MB, not an epoch of 64
    share = len(last) / 2**19
    assert abs(share - 1000 / MANY) < 4 * (1000 / MANY / 2**19) ** 0.5
    assert 0.25 < float((last % 2).double().mean()) < 0.75
    if not replacement:
        assert len(last.unique()) == len(last)


def test_strata_of_many_samples_are_drawn_from_to_the_last_one() -> None:
    labels = torch.arange(MANY) // 2**22  # the fifth stratum is what is above 2**24
    strata = Strata(labels, k=5, variance=0.0, uniform_variance=0.0)
    for replacement in (True, False):
        sampler = StratifiedBatchSampler(MANY, 5, seed=0, replacement=replacement)
        sampler.use(strata)
        drawn = torch.tensor(list(itertools.islice(iter(sampler), 2000)))
        assert torch.equal(labels[drawn], torch.arange(5).expand(2000, 5))
        last = drawn[:, 4]
        assert len(last.unique()) > 800  # of 1000; 865 expected of 2000 independent draws
        assert 0.4 < float((last % 2).double().mean()) < 0.6
