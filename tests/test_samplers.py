"""Streams of batches: unbiased, each sample once where promised, seeded, saved, shared out and refreshed."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from vardass.errors import InputError
from vardass.samplers import (
    BalancedBatchSampler,
    IndexBatch,
    MinibatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
    ordered,
    stratified,
    uniform,
    with_weights,
)
from vardass.samplers.base import derive_seed
from vardass.solvers import stratify
from vardass.strata import Strata

N, K = 26, 4  # K does not divide N
CLASSES = torch.arange(N) % 3

Maker = Callable[..., MinibatchSampler]
QUICK = {"kernel": "rbf", "swap_rounds": 3}

MAKERS: dict[str, Maker] = {
    "uniform": lambda **o: UniformBatchSampler(N, K, **o),
    "uniform, tail": lambda **o: UniformBatchSampler(N, K, drop_last=False, **o),
    "uniform, replacement": lambda **o: UniformBatchSampler(N, K, replacement=True, **o),
    "stratified": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", **o),
    "stratified, two draws": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", draws_per_stratum=2, **o),
    "stratified, classes": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", groups=CLASSES, **o),
    "cycling": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", replacement=False, **o),
    "cycling, two draws": lambda **o: StratifiedBatchSampler(
        N, K, kernel="rbf", replacement=False, draws_per_stratum=2, **o
    ),
    "k-means": lambda **o: StratifiedBatchSampler(N, K, kernel="rbf", solver="kmeans", **o),
    "ordered": lambda **o: OrderedBatchSampler(N, K, plan_rows=5, **QUICK, **o),
    "ordered, two draws": lambda **o: OrderedBatchSampler(N, K, plan_rows=5, draws_per_stratum=2, **QUICK, **o),
    "ordered, classes": lambda **o: OrderedBatchSampler(N, K, plan_rows=5, groups=CLASSES, **QUICK, **o),
    "balanced": lambda **o: BalancedBatchSampler(N, K, **QUICK, **o),
    "balanced, tail": lambda **o: BalancedBatchSampler(N, K, drop_last=False, **QUICK, **o),
    "balanced, classes": lambda **o: BalancedBatchSampler(N, K, groups=CLASSES, **QUICK, **o),
}
ONCE = [name for name in MAKERS if name.startswith("balanced") or name in ("uniform", "uniform, tail")]
STRATA = [name for name in MAKERS if name.startswith(("stratified", "cycling", "k-means", "ordered"))]
LEARNING = [name for name in MAKERS if not name.startswith("uniform")]

each_sampler = pytest.mark.parametrize("name", MAKERS)
each_once = pytest.mark.parametrize("name", ONCE)
each_strata = pytest.mark.parametrize("name", STRATA)
each_learning = pytest.mark.parametrize("name", LEARNING)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cloud(n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, generator=gen(seed)).exp()


def made(name: str, **options: Any) -> MinibatchSampler:
    sampler = MAKERS[name](**options)
    sampler.refresh(cloud())
    return sampler


def taken(batches: Iterable[IndexBatch], count: int | None = None) -> list[tuple[list[int], Any]]:
    return [(list(batch), batch.weights) for batch in itertools.islice(batches, count)]


def indices(batches: Iterable[IndexBatch], count: int | None = None) -> list[int]:
    return [index for batch, _ in taken(batches, count) for index in batch]


def use_small_chunks() -> None:
    """Let streams come to the end of a chunk within a few batches."""
    stratified._DRAWS = uniform._DRAWS = 24


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stratified, uniform):
        monkeypatch.setattr(module, "_DRAWS", module._DRAWS)  # to be put back
    use_small_chunks()


# --- unbiased -----------------------------------------------------------------------------------------------


def any_function(n: int = N) -> Tensor:
    """Values that no sampler has heard of."""
    return torch.randn(n, 5, generator=gen(99), dtype=torch.float64).exp()


def batch_means(rows: Tensor, weights: Tensor | None, values: Tensor) -> Tensor:
    return values[rows].mean(1) if weights is None else torch.einsum("tkr,k->tr", values[rows], weights)


@pytest.mark.parametrize("name", ["stratified", "stratified, two draws", "stratified, classes", "k-means"])
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
        members = sampler.strata.members(column // sampler.draws_per_stratum)
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


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_plan_of_whole_cycles_averages_to_the_whole(draws: int, coupled: bool) -> None:
    n, rows = 24, 12  # strata of 6 or 12 members: each occurs equally often
    options: dict[str, Any] = {"kernel": "rbf", "equal": True, "draws_per_stratum": draws}
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
        expected = K / strata.k / strata.sizes.double()[strata.labels]
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
        assert strata.tolist() == sorted(list(range(sampler.strata.k)) * sampler.draws_per_stratum)
        share = sampler.strata.sizes.double()[strata] / N / sampler.draws_per_stratum
        torch.testing.assert_close(torch.tensor(batch.weights, dtype=torch.float64), share)


@each_sampler
def test_batches_are_uniform_before_the_first_refresh(name: str) -> None:
    sampler = MAKERS[name](endless=True)
    batches = taken(sampler, 400)
    assert all(weights is None for _, weights in batches)
    counts = torch.bincount(torch.tensor([i for batch, _ in batches for i in batch]), minlength=N)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("name", ["cycling", "cycling, two draws", "ordered, two draws"])
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


# --- each sample once ---------------------------------------------------------------------------------------


def once(sampler: MinibatchSampler, seen: list[int], full: int = N // K) -> None:
    tail = N % K if not getattr(sampler, "drop_last", True) else 0
    assert len(seen) == len(set(seen)) == full * K + tail


@each_once
def test_an_epoch_visits_each_sample_once(name: str) -> None:
    sampler = made(name)
    seen = []
    for _ in range(3):
        assert len(taken(sampler)) == len(sampler)
        batches = taken(sampler)
        assert [len(batch) for batch, _ in batches[:6]] == [K] * 6
        once(sampler, indices_ := [i for batch, _ in batches for i in batch])
        seen.append(indices_)
    assert seen[0] != seen[1] != seen[2]


@each_once
@pytest.mark.parametrize("position", [0, 1, 5, 6, 7])
def test_a_refresh_in_mid_epoch_keeps_the_visits(name: str, position: int) -> None:
    sampler = made(name)
    stream = iter(sampler)
    seen = indices(stream, position)
    for seed in range(2):  # the second one finds nothing drawn since the first
        sampler.refresh(cloud(seed=seed))
    sampler.sample_batches(3)  # does not move the stream
    seen += indices(stream)
    once(sampler, seen)
    once(sampler, indices(sampler))


@each_once
@pytest.mark.parametrize("position", [3, 6, 7, 9, 12])
def test_an_endless_stream_goes_round(name: str, position: int) -> None:
    sampler = made(name, endless=True)
    round_length = N // K + (not getattr(sampler, "drop_last", True))
    stream = iter(sampler)
    seen = taken(stream, position)
    sampler.refresh(cloud(seed=1))
    seen += taken(stream, 3 * round_length - position)
    for start in range(0, 3 * round_length, round_length):
        once(sampler, [i for batch, _ in seen[start : start + round_length] for i in batch])


@each_once
@pytest.mark.parametrize("position", [6, 7, 12, 14])
def test_more_batches_than_samples_allow_go_round(name: str, position: int) -> None:
    sampler = made(name, batches=20)
    round_length = N // K + (not getattr(sampler, "drop_last", True))
    stream = iter(sampler)
    seen = taken(stream, position)
    sampler.refresh(cloud(seed=1))
    seen += taken(stream)
    assert len(seen) == len(sampler) == 20
    once(sampler, [i for batch, _ in seen[round_length : 2 * round_length] for i in batch])


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


# --- the stream ---------------------------------------------------------------------------------------------


@each_sampler
def test_same_seed_same_stream(name: str) -> None:
    first, second = made(name, seed=7), made(name, seed=7)
    assert taken(first) == taken(second)
    assert taken(first) == taken(second)  # the next epoch too
    assert taken(made(name, seed=8)) != taken(made(name, seed=7))


@each_sampler
def test_set_epoch_chooses_the_epoch(name: str) -> None:
    sampler = made(name)
    epochs = [taken(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    sampler.set_epoch(1)
    assert taken(sampler) == epochs[1]
    sampler.set_epoch(0)
    next(iter(sampler))
    sampler.set_epoch(0)  # once more from its start
    assert taken(sampler) == epochs[0]


@each_sampler
def test_leaving_an_epoch_starts_the_next_one(name: str) -> None:
    sampler, other = made(name), made(name)
    for _ in sampler:
        break
    assert sampler.epoch == 0
    other.set_epoch(1)
    assert taken(sampler) == taken(other)


@each_sampler
def test_length(name: str) -> None:
    sampler = MAKERS[name]()
    assert len(sampler) == len(taken(sampler)) == len(DataLoader(range(N), batch_sampler=sampler))
    assert len(taken(MAKERS[name](batches=3))) == len(MAKERS[name](batches=3)) == 3
    endless = MAKERS[name](endless=True)
    with pytest.raises(TypeError, match="endless=False"):
        len(endless)
    assert len(taken(endless, 50)) == 50


@each_sampler
def test_sample_batches_does_not_move_the_stream(name: str) -> None:
    sampler, other = made(name, endless=True), made(name, endless=True)
    stream, other_stream = iter(sampler), iter(other)
    for _ in range(4):
        sampled = sampler.sample_batches(11, seed=1)
        assert sampled.rows.shape == (11, K)
        assert taken(stream, 3) == taken(other_stream, 3)
    assert torch.equal(sampler.sample_batches(11, seed=1).rows, sampled.rows)
    assert not torch.equal(sampler.sample_batches(11, seed=2).rows, sampled.rows)


def test_sample_batches_at_the_end_of_an_epoch() -> None:
    sampler = made("balanced")
    taken(iter(sampler), 6)
    sampler.refresh(cloud(seed=1))
    rows = sampler.sample_batches(12).rows
    assert len(rows) == 12
    assert len(set(rows[:6].flatten().tolist())) == 24


@each_learning
def test_a_refresh_applies_from_the_next_batch_on(name: str) -> None:
    sampler, other = made(name, endless=True), made(name, endless=True)
    stream, other_stream = iter(sampler), iter(other)
    assert taken(stream, 3) == taken(other_stream, 3)
    sampler.refresh(cloud(seed=5))
    assert taken(stream, 30) != taken(other_stream, 30)


def test_seeds_of_related_streams_are_unrelated() -> None:
    seeds = [derive_seed(*parts) for parts in itertools.product(range(6), repeat=4)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)
    ones = torch.tensor([[seed >> bit & 1 for bit in range(63)] for seed in seeds]).double().mean(0)
    assert float((ones - 0.5).abs().max()) < 0.07  # 5 standard errors


# --- state --------------------------------------------------------------------------------------------------

STOPS = (0, 5, 7)


def streams_with_states(name: str, **options: Any) -> tuple[list[dict[str, Any]], list[list[tuple[list[int], Any]]]]:
    """States after some batches, the last one with a refresh before it, and what came next."""
    states, rest = [], []
    for stop in STOPS:
        sampler = made(name, seed=3, **options)
        stream = iter(sampler)
        taken(stream, stop)
        if stop == STOPS[-1]:
            sampler.refresh(cloud(seed=1))
            taken(stream, 2)
        states.append(sampler.state_dict())
        rest.append(taken(stream, 25))
    return states, rest


def go_on(name: str, state: dict[str, Any], **options: Any) -> list[tuple[list[int], Any]]:
    sampler = MAKERS[name](seed=0, **options)
    sampler.load_state_dict(state)
    return taken(sampler, 25)


def go_on_in_new_process(states_file: str, streams_file: str) -> None:
    use_small_chunks()
    states = torch.load(states_file, weights_only=True)
    streams = {name: [go_on(name, state, endless=True) for state in states[name]] for name in MAKERS}
    torch.save(streams, streams_file)


@pytest.mark.usefixtures("small_chunks")
def test_states_restored_in_a_new_process_continue_the_stream(tmp_path: Path) -> None:
    expected = {name: streams_with_states(name, endless=True) for name in MAKERS}
    torch.save({name: states for name, (states, _) in expected.items()}, tmp_path / "states.pt")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_samplers; "
        f"test_samplers.go_on_in_new_process({str(tmp_path / 'states.pt')!r}, {str(tmp_path / 'streams.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    streams = torch.load(tmp_path / "streams.pt", weights_only=True)
    for name, (_, rest) in expected.items():
        assert streams[name] == rest, name
        assert all(len(stream) == 25 for stream in rest)


@each_sampler
@pytest.mark.parametrize("stop", [0, 2, 6])
def test_a_restored_epoch_ends_where_it_would_have(name: str, stop: int) -> None:
    sampler, other = made(name), MAKERS[name]()
    stream = iter(sampler)
    taken(stream, stop)
    other.load_state_dict(sampler.state_dict())
    other.set_epoch(0)  # as a loop over epochs does: the epoch that was restored goes on
    assert taken(other) == taken(stream)
    assert taken(other) == taken(sampler)
    assert (sampler.epoch, other.epoch) == (2, 2)


@each_once
def test_a_state_between_refresh_and_batch_keeps_the_visits(name: str) -> None:
    sampler, other = made(name), MAKERS[name]()
    seen = indices(iter(sampler), 3)
    sampler.refresh(cloud(seed=1))
    other.load_state_dict(sampler.state_dict())
    once(other, seen + indices(other))


@each_learning
def test_a_restored_sampler_refreshes_as_the_first_would_have(name: str) -> None:
    sampler, other = made(name, endless=True), MAKERS[name](endless=True)
    stream = iter(sampler)
    taken(stream, 3)
    other.load_state_dict(sampler.state_dict())
    for each in (sampler, other):
        each.refresh(cloud(seed=4))
    assert taken(stream, 12) == taken(other, 12)


def plain(loader: Iterable[Any], count: int | None = None) -> list[tuple[list[int], list[float]]]:
    return [(index.tolist(), weight.tolist()) for index, weight in itertools.islice(loader, count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["uniform", "stratified", "ordered", "balanced, tail"])
def test_stateful_loader_resumes_in_mid_epoch(name: str, workers: int, tmp_path: Path) -> None:
    def loader(sampler: MinibatchSampler) -> StatefulDataLoader:
        return StatefulDataLoader(with_weights(range(N)), batch_sampler=sampler, num_workers=workers)

    sampler = made(name, batches=12)
    first = loader(sampler)
    batches = iter(first)
    plain(batches, 2)
    sampler.refresh(cloud(seed=1))
    plain(batches, 6)  # past what was asked for before the refresh
    torch.save(first.state_dict(), tmp_path / "loader.pt")
    rest = plain(batches)
    assert len(rest) == 4

    second = loader(MAKERS[name](batches=12))
    second.load_state_dict(torch.load(tmp_path / "loader.pt", weights_only=True))
    assert plain(second) == rest
    assert plain(second) == plain(first)  # the next epoch


# --- several processes --------------------------------------------------------------------------------------


@each_sampler
def test_processes_share_out_the_stream(name: str) -> None:
    alone = taken(made(name))
    for replicas in (2, 3):
        shares = [taken(made(name, num_replicas=replicas, rank=rank)) for rank in range(replicas)]
        rounds = len(alone) // replicas
        assert [len(share) for share in shares] == [rounds] * replicas
        together = [batch for batches in zip(*shares, strict=True) for batch in batches]
        if name in ONCE:  # the same chunk, whatever the number of processes
            assert together == alone[: rounds * replicas]
        seen = [{tuple(batch) for batch, _ in share} for share in shares]
        assert not set.intersection(*seen)


@each_once
def test_processes_visit_disjoint_samples_across_a_refresh(name: str) -> None:
    samplers = [made(name, num_replicas=2, rank=rank, endless=True) for rank in range(2)]
    streams = [iter(sampler) for sampler in samplers]
    seen: Counter[int] = Counter()
    for turn in range(3):
        for stream, sampler in zip(streams, samplers, strict=True):
            seen.update(indices(stream, 1))
            sampler.refresh(cloud(seed=turn))
    assert set(seen.values()) == {1}
    assert len(seen) >= 24
    assert samplers[0].state_dict()["position"] == samplers[1].state_dict()["position"] == 3


@each_once
def test_processes_stay_together_when_an_endless_stream_goes_round(name: str) -> None:
    # 6 or 7 batches a round: the seventh has no partner and is left out
    samplers = [made(name, num_replicas=2, rank=rank, endless=True) for rank in range(2)]
    shares = [taken(sampler, 9) for sampler in samplers]
    for start in (0, 3, 6):
        seen = [i for share in shares for batch, _ in share[start : start + 3] for i in batch]
        assert len(seen) == len(set(seen)) == 24


@each_sampler
def test_a_state_serves_every_process(name: str) -> None:
    samplers = [made(name, num_replicas=2, rank=rank, endless=True) for rank in range(2)]
    streams = [iter(sampler) for sampler in samplers]
    for stream in streams:
        taken(stream, 2)
    restored = MAKERS[name](num_replicas=2, rank=1, endless=True)
    restored.load_state_dict(samplers[0].state_dict())
    assert taken(restored, 10) == taken(streams[1], 10)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [UniformBatchSampler, StratifiedBatchSampler, OrderedBatchSampler, BalancedBatchSampler]
)
def test_batches_larger_than_the_data_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match=r"batch_size=9 needs at least 9 samples, got n=8; lower batch_size"):
        make(8, 9)
    with pytest.raises(InputError, match=r"rank must be between 0 and 1, got 2"):
        make(8, 2, num_replicas=2, rank=2)
    with pytest.raises(InputError, match=r"an epoch of 4 batches is too short for num_replicas=5.*set batches"):
        make(8, 2, num_replicas=5)


@pytest.mark.parametrize("make", [UniformBatchSampler, BalancedBatchSampler])
def test_more_processes_than_batches_without_replacement_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match=r"n=8 samples make 4 batches.*num_replicas=5 processes; lower batch_size"):
        make(8, 2, num_replicas=5, batches=10)
    assert len(taken(UniformBatchSampler(8, 2, replacement=True, num_replicas=5, batches=10))) == 2


@each_learning
@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.randn(N + 1, 3), rf"features have {N + 1} rows.*n={N} samples; pass the features of the whole"),
        (None, rf"None where the features of n={N} samples belong; extract them first"),
        (torch.full((N, 3), torch.nan), rf"NaN or infinite values in {N} of {N} rows.*drop these rows"),
    ],
)
def test_features_that_cannot_be_used_leave_the_stream_alone(name: str, features: Any, message: str) -> None:
    sampler, other = made(name), made(name)
    stream, other_stream = iter(sampler), iter(other)
    taken(stream, 2), taken(other_stream, 2)
    with pytest.raises(InputError, match=message):
        sampler.refresh(features)
    assert taken(stream) == taken(other_stream)
    assert taken(sampler) == taken(other)


@pytest.mark.parametrize("maker", [StratifiedBatchSampler, OrderedBatchSampler])
def test_a_refresh_that_fails_halfway_leaves_the_stream_alone(maker: Any) -> None:
    # the class labels ask for more strata than there are once the features come
    sampler, other = (maker(N, K, kernel="rbf", groups=CLASSES, draws_per_stratum=2) for _ in range(2))
    stream, other_stream = iter(sampler), iter(other)
    taken(stream, 2), taken(other_stream, 2)
    with pytest.raises(InputError, match="3 groups need at least 3 strata, got k=2; raise batch_size"):
        sampler.refresh(cloud())
    assert taken(stream) == taken(other_stream)


def test_a_plan_that_fails_leaves_the_strata_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, other = made("ordered"), made("ordered")

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError("no features of this kernel")

    monkeypatch.setattr(ordered, "plan_features", refuse)
    with pytest.raises(InputError, match="no features"):
        sampler.refresh(cloud(seed=3))
    monkeypatch.undo()
    assert taken(sampler) == taken(other)


def test_uniform_batches_ignore_features() -> None:
    sampler, other = MAKERS["uniform"](), MAKERS["uniform"]()
    stream = iter(sampler)
    first = taken(stream, 2)
    sampler.refresh(cloud())
    assert first + taken(stream) == taken(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": "OtherSampler"}, r"sampler='OtherSampler', this sampler sampler='BalancedBatchSampler'"),
        ({"version": 99}, r"version=99, this sampler version=1"),
        ({"n": N + 1}, rf"n={N + 1}, this sampler n={N}"),
        ({"batch_size": 5}, rf"batch_size=5, this sampler batch_size={K}"),
        ({"num_replicas": 2}, r"num_replicas=2, this sampler num_replicas=1"),
    ],
)
def test_states_of_other_samplers_are_refused(change: dict[str, Any], message: str) -> None:
    sampler, other = made("balanced"), made("balanced")
    with pytest.raises(InputError, match=message + "; make the sampler with the same arguments or start anew"):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert taken(sampler) == taken(other)


def test_states_that_are_not_complete_are_refused() -> None:
    sampler = made("ordered")
    with pytest.raises(InputError, match=r"keys \['a'\], but not \['sampler', .*OrderedBatchSampler.state_dict\(\)"):
        sampler.load_state_dict({"a": 1})
    two_draws = made("stratified, two draws")
    with pytest.raises(InputError, match=rf"n={N}, k=4, the sampler needs n={N}, k=2 .*with that k"):
        two_draws.load_state_dict(made("stratified").state_dict())


def test_strata_smaller_than_the_draws_are_refused() -> None:
    labels = torch.tensor([0] + [1] * (N - 1))
    strata = Strata(labels, k=2, variance=0.0, uniform_variance=0.0)
    for maker, options in ((StratifiedBatchSampler, {"replacement": False}), (OrderedBatchSampler, {})):
        sampler = maker(N, 6, draws_per_stratum=3, **options)
        with pytest.raises(InputError, match=r"a stratum has 1 samples.*draws_per_stratum=3.*min_size=3 or draw with"):
            sampler.use(strata)
        sampler.refresh(torch.cat([torch.full((1, 2), 50.0), torch.zeros(N - 1, 2)]))  # would like to be alone
        assert sampler.strata is not None
        assert int(sampler.strata.sizes.min()) >= 3
        again = maker(N, 6, draws_per_stratum=3, min_size=1, kernel="linear", **options)
        with pytest.raises(InputError, match=r"a stratum has 1 samples"):
            again.refresh(torch.cat([torch.full((1, 2), 50.0), torch.zeros(N - 1, 2)]))
    independent = StratifiedBatchSampler(N, 6, draws_per_stratum=3)
    independent.use(strata)
    next_batch = next(iter(independent))
    assert next_batch[:3] == [0, 0, 0]


def test_given_strata_are_used_and_must_fit() -> None:
    z = cloud()
    sampler = StratifiedBatchSampler(N, K, kernel="rbf")
    with pytest.raises(InputError, match=rf"n={N}, k=5, the sampler needs n={N}, k={K}"):
        sampler.use(stratify(z, 5))
    strata = stratify(z, K, kernel="rbf")
    sampler.use(strata)
    assert next(iter(sampler)).weights == pytest.approx(strata.weights.tolist())
    uncoupled = OrderedBatchSampler(N, K)
    uncoupled.use(strata)  # without features there is nothing to couple
    assert next(iter(uncoupled)).weights == pytest.approx(strata.weights.tolist())


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"batch_size=8 is not a multiple of draws_per_stratum=3; use batch_size=6"):
        StratifiedBatchSampler(N, 8, draws_per_stratum=3)
    for maker in (StratifiedBatchSampler, BalancedBatchSampler):
        with pytest.raises(InputError, match=rf"groups must have shape \({N},\).* got \(5,\)"):
            maker(N, K, groups=torch.arange(5))
    with pytest.raises(InputError, match="plan_rows must be at least 2, got 1"):
        OrderedBatchSampler(N, K, plan_rows=1)
    with pytest.raises(InputError, match="epoch must be at least 0, got -1"):
        UniformBatchSampler(N, K).set_epoch(-1)
    with pytest.raises(InputError, match="count must be at least 1, got 0"):
        UniformBatchSampler(N, K).sample_batches(0)
