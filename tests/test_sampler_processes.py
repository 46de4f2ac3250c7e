"""Samplers under several processes: each gets its share once, however the processes became known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.utils.data import DataLoader

from conftest import refused
from sampler_cases import MAKERS, ONCE, K, N, cloud, each_once, each_sampler, indices, made, taken
from vardass.errors import VardassWarning
from vardass.samplers import IndexBatch, MinibatchSampler, UniformBatchSampler, base

# --- told at once --------------------------------------------------------------------------------------------


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


# --- found late -----------------------------------------------------------------------------------------------


class Group:
    """Stands in for a process group of two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch

    def join(self, rank: int | None) -> None:
        self.patch.setattr(base, "process_group", lambda: None if rank is None else (2, rank))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


@each_sampler
def test_shares_found_late_are_those_told_at_once(name: str, group: Group) -> None:
    expected = [taken(made(name, num_replicas=2, rank=rank)) for rank in range(2)]
    called, found = [], []
    for rank in range(2):
        sampler = made(name)
        sampler.shard(2, rank)
        called.append(taken(sampler))
        group.join(rank)
        sampler = made(name)
        assert len(DataLoader(range(N), batch_sampler=sampler)) == len(expected[rank])
        assert sampler.num_replicas == 1  # nothing is fixed before the first batch
        found.append(taken(sampler))
        group.join(None)
        assert (sampler.num_replicas, sampler.rank) == (2, rank)
    assert called == found == expected


def test_every_process_gets_the_same_batches_only_if_that_is_said(group: Group) -> None:
    alone = taken(made("stratified"))
    group.join(1)
    assert taken(made("stratified", num_replicas=1)) == alone
    assert taken(made("stratified")) != alone
    sampler = made("stratified")
    sampler.shard(1, 0)
    assert taken(sampler) == alone


def test_a_stream_is_shared_out_once() -> None:
    sampler = UniformBatchSampler(N, K, num_replicas=2, rank=1)
    sampler.shard(2, 1)  # as it is
    with refused("rank=1 of num_replicas=2", "rank=0 of 2"):
        sampler.shard(2, 0)
    begun = UniformBatchSampler(N, K)
    next(iter(begun))
    with refused("1 batches of epoch 0", "shard(2, 0)"):
        begun.shard(2, 0)
    begun.shard(1, 0)
    with refused("6 batches", "num_replicas=7", "batch_size"):
        UniformBatchSampler(N, K).shard(7, 0)
    with refused(0, 1, 2, field="rank"):
        UniformBatchSampler(N, K).shard(2, 2)


class Shard:
    """Shares out batches as Accelerate's BatchSamplerShard does, which `prepare` puts around a batch sampler."""

    def __init__(self, batch_sampler: MinibatchSampler, process_index: int) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, 2, process_index

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self) -> Iterator[IndexBatch]:
        for place, batch in enumerate(self.batch_sampler):
            if place % self.num_processes == self.process_index:
                yield batch


def test_batches_that_a_library_shares_out_are_not_shared_out_again(group: Group) -> None:
    alone = taken(made("ordered"))
    for rank in range(2):
        group.join(rank)
        sampler = made("ordered")
        sampler.shard(1, 0)
        shard = Shard(sampler, rank)
        assert len(shard) == len(alone) // 2
        assert taken(shard) == alone[rank::2]
        assert len(shard) == len(alone) // 2


def test_a_process_group_that_comes_too_late_is_named(group: Group) -> None:
    sampler = made("balanced")
    stream = iter(sampler)
    next(stream)
    group.join(1)
    with pytest.warns(VardassWarning, match=r"process group of 2, but this BalancedBatchSampler began without it"):
        sampler.refresh(cloud(seed=1))
    sampler.refresh(cloud(seed=2))  # once is enough
    assert len(taken(stream)) == N // K - 1


def test_a_state_finds_the_processes_it_was_saved_with(group: Group) -> None:
    states, rest = [], []
    for rank in range(2):
        group.join(rank)
        sampler = made("ordered")
        stream = iter(sampler)
        next(stream)
        states.append(sampler.state_dict())
        rest.append(taken(stream))
    for rank in range(2):
        group.join(rank)
        sampler = MAKERS["ordered"]()
        sampler.load_state_dict(states[0])
        assert taken(sampler) == rest[rank]
    group.join(None)
    with refused("num_replicas=2", "num_replicas=1"):
        MAKERS["ordered"]().load_state_dict(states[0])


def in_process(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        torch.save({name: taken(made(name)) for name in ("stratified", "balanced")}, f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_of_a_real_group_get_different_batches(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(in_process, (str(tmp_path),), nprocs=2)
    streams = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in ("stratified", "balanced"):
        assert [stream[name] for stream in streams] == [
            taken(made(name, num_replicas=2, rank=rank)) for rank in range(2)
        ]
