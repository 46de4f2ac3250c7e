"""Batches of both domains from one data set; states that know what has arrived."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import vardass
from conftest import refused
from sampler_cases import cloud
from vardass.errors import VardassWarning
from vardass.integrations import checkpoints
from vardass.integrations.checkpoints import CheckpointedSampler
from vardass.integrations.pairs import PairBatchSampler
from vardass.samplers import base

N_SOURCE, N_TARGET = 44, 30


def features(seed: int = 0) -> Any:
    return torch.randn(N_SOURCE + N_TARGET, 3, generator=torch.Generator().manual_seed(seed))


def pairs(**options: Any) -> PairBatchSampler:
    made = PairBatchSampler(
        vardass.OrderedBatchSampler(N_SOURCE, 4, endless=True, seed=0),
        vardass.BalancedBatchSampler(N_TARGET, 3, endless=True, seed=1),
        **options,
    )
    made.refresh(features())
    return made


def plain(batches: Any) -> list[Any]:
    return [(list(batch), batch.weights) for batch in batches]


def test_both_sides_are_the_streams_of_their_samplers() -> None:
    alone = vardass.OrderedBatchSampler(N_SOURCE, 4, endless=True, seed=0)
    alone.refresh(features()[:N_SOURCE])
    other = vardass.BalancedBatchSampler(N_TARGET, 3, endless=True, seed=1)
    other.refresh(features()[N_SOURCE:])
    sampler = pairs()
    assert len(sampler) == 11  # the source's; the target's ten go round
    found = [*sampler, *sampler]
    assert len(found) == 22
    for batch, left, right in zip(found, alone, other, strict=False):
        assert list(batch) == [*left, *(N_SOURCE + index for index in right)]
        assert batch.weights == [*left.weights, *[1 / 3] * 3]
        assert sum(batch.weights[: sampler.source_size]) == pytest.approx(1.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_arrive_with_the_samples_of_either_side(workers: int) -> None:
    data = ConcatDataset([TensorDataset(torch.arange(N_SOURCE)), TensorDataset(-torch.arange(N_TARGET))])
    sampler = pairs()
    expected = plain(copy.deepcopy(sampler))
    loader = DataLoader(vardass.with_weights(data), batch_sampler=sampler, num_workers=workers)
    for (x, w), (indices, weights) in zip(loader, expected, strict=True):
        assert x[:4].tolist() == indices[:4]
        assert x[4:].tolist() == [N_SOURCE - index for index in indices[4:]]
        assert w.tolist() == pytest.approx(weights)


@pytest.mark.parametrize("stop", [0, 1, 10, 11, 12, 21])
def test_pairs_resume_in_and_after_an_epoch(stop: int) -> None:
    whole = pairs(batches=11)
    expected = plain([*whole, *whole, *whole])
    sampler = pairs(batches=11)
    seen = 0
    while seen < stop:
        for _ in sampler:
            seen += 1
            if seen == stop:
                break
    states = sampler.state_dict()
    restored = PairBatchSampler(
        vardass.OrderedBatchSampler(N_SOURCE, 4, endless=True, seed=0),
        vardass.BalancedBatchSampler(N_TARGET, 3, endless=True, seed=1),
    )
    restored.load_state_dict(states)
    rest = plain(restored)
    assert len(rest) == -stop % 11 if stop else 11  # nothing after the last batch of an epoch
    rest += plain(restored)
    assert rest == expected[stop : stop + len(rest)]


def test_pairs_are_shared_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for rank in range(2):
        sampler = pairs()
        sampler.shard(2, rank)
        assert len(sampler) == 5
        shares.append(plain(sampler))
    assert [len(share) for share in shares] == [5, 5]
    found = []
    for rank in range(2):
        sampler = pairs()
        monkeypatch.setattr(base, "process_group", lambda rank=rank: (2, rank))
        found.append(plain(sampler))
        monkeypatch.setattr(base, "process_group", lambda: None)
    assert found == shares
    assert not [one for one, other in zip(*shares, strict=True) if one[0] == other[0]]


def test_torchdata_stays_exact() -> None:
    data = vardass.with_weights(ConcatDataset([TensorDataset(torch.arange(N_SOURCE + N_TARGET))]))

    def loader() -> Any:
        return StatefulDataLoader(data, batch_sampler=pairs(), num_workers=2)

    one = loader()
    expected = [x.tolist() for _ in range(2) for x, _ in one]
    for stop in (3, 11):
        again = loader()
        for place, _ in enumerate(again, 1):
            if place == stop:
                break
        state = again.state_dict()
        fresh = loader()
        fresh.load_state_dict(state)
        rest = [x.tolist() for x, _ in fresh]
        rest = rest or [x.tolist() for x, _ in fresh]  # torchdata counts the end of an epoch as an epoch of its own
        assert rest == expected[stop : stop + len(rest)]
        assert rest


def test_what_cannot_be_paired_is_named() -> None:
    ends = vardass.UniformBatchSampler(20, 4)
    endless = vardass.UniformBatchSampler(20, 4, endless=True)
    with refused("target", "endless=True"):
        PairBatchSampler(endless, ends)
    with pytest.warns(VardassWarning, match=r"'source' and 'target' have the same n=20 and seed=0"):
        PairBatchSampler(endless, vardass.UniformBatchSampler(20, 4, endless=True))
    with refused("3 rows", "n=74"):
        pairs().refresh(features()[:3])
    with refused("7 batches", 11):
        pairs().load_state_dict(pairs(batches=7).state_dict())
    with refused("keys []", "'batches'", "'position'", "PairBatchSampler.state_dict"):
        pairs().load_state_dict({})
    with refused("2 batches", "3 processes", "batches"):
        pairs(batches=2).shard(3, 0)


# --- what has arrived -----------------------------------------------------------------------------------------


def make(name: str) -> Any:
    if name == "pairs":
        return pairs()
    sampler = vardass.OrderedBatchSampler(N_SOURCE, 4, seed=0)
    sampler.refresh(cloud(n=N_SOURCE))
    return sampler


def asking_ahead(sampler: CheckpointedSampler, ahead: int) -> Any:
    """The batches of a loader that asks ``ahead`` of them early."""
    asked: list[Any] = []
    for batch in sampler:
        asked.append(batch)
        if len(asked) > ahead:
            yield asked.pop(0)
    yield from asked


def train(sampler: CheckpointedSampler, steps: int, *, ahead: int) -> list[Any]:
    """So many steps of a loop that asks ``ahead`` batches early, as Accelerate's loader or workers do; it refreshes."""

    seen: list[Any] = []
    while len(seen) < steps:
        for batch in sampler.follow(asking_ahead(sampler, ahead)):
            seen.append((list(batch), batch.weights))
            if batch[0] % 3 == 0:  # depends on what was seen
                n = sampler.inner.n
                sampler.inner.refresh(features(batch[1]) if n > N_SOURCE else features(batch[1])[:n])
            if len(seen) == steps:
                break
    return seen


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("name", ["ordered", "pairs"])
def test_a_state_is_that_of_training_however_far_ahead_the_loader_is(name: str, ahead: int) -> None:
    expected = train(CheckpointedSampler(make(name)), 24, ahead=ahead)
    for stop in (1, 7, 10, 11):
        sampler = CheckpointedSampler(make(name))
        seen = train(sampler, stop, ahead=ahead)
        file = io.BytesIO()
        torch.save(sampler.state_dict(), file)
        file.seek(0)
        restored = CheckpointedSampler(make(name))
        restored.load_state_dict(torch.load(file))
        assert seen + train(restored, 24 - stop, ahead=ahead) == expected, stop


def test_batches_under_way_keep_their_strata() -> None:
    def made() -> CheckpointedSampler:
        return CheckpointedSampler(vardass.StratifiedBatchSampler(N_SOURCE, 4, seed=0))

    sampler, restored = made(), made()
    sampler.refresh(cloud(n=N_SOURCE))
    asked = iter(sampler)
    expected = [next(asked) for _ in range(3)]
    restored.load_state_dict(sampler.state_dict())  # none has arrived
    for batch, again in zip(expected, restored, strict=False):
        assert (list(batch), batch.weights) == (list(again), again.weights)
    for state in (None, sampler.inner.state_dict()):
        with refused(type(state).__name__ if state is None else "'under_way'", "CheckpointedSampler.state_dict"):
            made().load_state_dict(state)  # type: ignore[arg-type]


def test_workers_of_a_plain_loader() -> None:
    data = TensorDataset(torch.arange(N_SOURCE))

    def seen(sampler: CheckpointedSampler, steps: int) -> list[Any]:
        found: list[Any] = []
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
        while len(found) < steps:
            for (x,) in sampler.follow(loader):
                found.append(x.tolist())
                if len(found) == steps:
                    break
        return found

    expected = seen(CheckpointedSampler(make("ordered")), 22)
    first = CheckpointedSampler(make("ordered"))
    begun = seen(first, 9)
    second = CheckpointedSampler(make("ordered"))
    second.load_state_dict(first.state_dict())
    assert begun + seen(second, 13) == expected


def test_a_process_group_needs_to_know_who_shares_out(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = plain(CheckpointedSampler(make("ordered")))
    for rank in range(2):
        for module in (base, checkpoints):
            monkeypatch.setattr(module, "process_group", lambda rank=rank: (2, rank))
        with refused("prepared_for=accelerator.num_processes", "shard(num_replicas, rank)"):
            iter(CheckpointedSampler(make("ordered")))
        prepared = CheckpointedSampler(make("ordered"), prepared_for=2)
        assert plain(prepared) == everything  # the library takes its share of them
        with refused("loader of 2", "rank=0 of 2", "prepared_for"):
            prepared.shard(2, 0)
        wrapped = CheckpointedSampler(make("ordered"))
        wrapped.shard(2, rank)
        assert len(wrapped) == len(everything) // 2
        assert plain(wrapped.follow(iter(wrapped))) == everything[rank::2][: len(everything) // 2]
        assert len(wrapped) == len(everything) // 2
    with refused("rank=1 of 2", "rank=0 of 2"):
        wrapped.shard(2, 0)
    with refused("11 batches", "num_replicas=100"):
        CheckpointedSampler(make("ordered")).shard(100, 0)


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("name", ["ordered", "pairs"])
def test_the_state_of_one_process_is_that_of_each(name: str, ahead: int) -> None:
    """Processes whose workers ask ahead resume from what the first one saved."""

    def run(sampler: CheckpointedSampler, first: int, last: int) -> list[Any]:
        seen: list[Any] = []
        while first + len(seen) < last:
            for batch in sampler.follow(asking_ahead(sampler, ahead)):
                seen.append((list(batch), batch.weights))
                if (first + len(seen)) % 5 == 0:
                    sampler.inner.refresh(cloud(n=sampler.inner.n, seed=first + len(seen)))
                if first + len(seen) == last:
                    break
        return seen

    def made(rank: int) -> CheckpointedSampler:
        sampler = CheckpointedSampler(make(name))
        sampler.shard(3, rank)
        return sampler

    expected = [run(made(rank), 0, 17) for rank in range(3)]
    assert all(one != two for one, two in itertools.combinations(expected, 2))
    for stop in (1, 4, 5, 9):
        samplers = [made(rank) for rank in range(3)]
        begun = [run(sampler, 0, stop) for sampler in samplers]
        state = samplers[0].state_dict()
        for rank in range(3):
            restored = made(rank)
            restored.load_state_dict(state)
            assert begun[rank] + run(restored, stop, 17) == expected[rank], (stop, rank)
    with refused("3 processes", "here are 1"):
        CheckpointedSampler(make(name)).load_state_dict(state)


def test_libraries_find_no_epoch_to_set() -> None:
    sampler = CheckpointedSampler(make("ordered"))  # Lightning and Accelerate look for both
    assert not hasattr(sampler, "sampler")
    assert not hasattr(sampler, "set_epoch")


def test_arrivals_are_noted_once() -> None:
    sampler = CheckpointedSampler(make("ordered"))
    loader = DataLoader(TensorDataset(torch.arange(N_SOURCE)), batch_sampler=sampler)
    batches = sampler.follow(loader)
    next(batches)
    with refused("1 batches", "0 are under way"):
        sampler.arrived()
