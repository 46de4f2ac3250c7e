"""Streams of batches: seeded, saved and restored, shared out between processes, refreshed on the way."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from conftest import refused
from sampler_cases import (
    MAKERS,
    K,
    N,
    cloud,
    each_learning,
    each_once,
    each_sampler,
    indices,
    made,
    taken,
    use_small_chunks,
    visits_once,
)
from vardass import validate
from vardass.samplers import (
    MinibatchSampler,
    stratified,
    uniform,
    with_weights,
)
from vardass.samplers.base import derive_seed


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stratified, uniform):
        monkeypatch.setattr(module, "_DRAWS", module._DRAWS)  # to be put back
    use_small_chunks()


# --- the stream ------------------------------------------------------------------------------------------


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


# --- state -----------------------------------------------------------------------------------------------


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
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_sampler_streams; "
        f"test_sampler_streams.go_on_in_new_process({str(tmp_path / 'states.pt')!r}, {str(tmp_path / 'streams.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    streams = torch.load(tmp_path / "streams.pt", weights_only=True)
    for name, (_, rest) in expected.items():
        assert streams[name] == rest, name
        assert all(len(stream) == 25 for stream in rest)


@each_sampler
@pytest.mark.parametrize("stop", [0, 2])
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
    visits_once(name, seen + indices(other))


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
@pytest.mark.parametrize("name", ["uniform", "stratified", "ordered", "balanced, tail, classes"])
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["uniform, tail", "ordered"])
def test_stateful_loader_resumes_after_the_last_batch(name: str, workers: int) -> None:
    data = range(N)

    def loader(sampler: MinibatchSampler) -> StatefulDataLoader:
        return StatefulDataLoader(with_weights(data), batch_sampler=sampler, num_workers=workers)

    first = loader(made(name))
    batches = iter(first)
    plain(batches, len(first))
    second = loader(MAKERS[name]())
    second.load_state_dict(first.state_dict())
    assert plain(second) == plain(batches) == []  # it counts epochs itself
    assert plain(second) == plain(first) != []


@each_sampler
def test_a_state_of_the_last_batch_resumes_at_the_end_of_its_epoch(name: str) -> None:
    sampler, other, counting, ahead = made(name), *(MAKERS[name]() for _ in range(3))
    stream = iter(sampler)
    taken(stream, len(sampler))
    for each in (other, counting, ahead):
        each.load_state_dict(sampler.state_dict())
    counting.set_epoch(0)  # as a loop over epochs does that goes on with the one it was in
    assert taken(stream) == taken(other) == taken(counting) == []
    following = taken(sampler)
    counting.set_epoch(1)
    ahead.set_epoch(1)  # a loop that goes on with the next one
    assert taken(other) == taken(counting) == taken(ahead) == following
    assert other.epoch == 2


@each_sampler
def test_copies_go_on_where_the_stream_is(name: str) -> None:
    sampler = made(name)
    stream = iter(sampler)
    taken(stream, 2)
    twins = [copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    rest = taken(stream)
    assert all(taken(twin) == rest for twin in twins)


# --- loaders --------------------------------------------------------------------------------------------------


@each_sampler
@pytest.mark.parametrize("endless", [False, True])
def test_two_loaders_over_one_sampler_are_refused(name: str, endless: bool) -> None:
    sampler = made(name, endless=endless)
    loaders = [DataLoader(range(N), batch_sampler=sampler) for _ in range(2)]
    both = zip(*loaders)
    next(both)
    with refused(type(sampler).__name__, "another seed"):
        next(both)


def test_one_loader_may_begin_again() -> None:
    sampler = made("uniform")
    loader = DataLoader(range(N), batch_sampler=sampler, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    batches = iter(loader)  # the first one is still there while this is made
    assert len(list(batches)) == len(sampler)


# --- how a refresh is computed ----------------------------------------------------------------------------------


@each_learning
def test_a_refresh_uses_one_thread_and_leaves_the_setting_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = MAKERS[name](endless=True)
    seen: list[int] = []

    def noted(method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(torch.get_num_threads())
            return method(*args, **options)

        return call

    for method in ("_fit", "_make_chunk"):
        monkeypatch.setattr(sampler, method, noted(getattr(sampler, method)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sampler.refresh(cloud())
        next(iter(sampler))
        with refused("NaN"):
            sampler.refresh(torch.full((N, 3), torch.nan))
        assert torch.get_num_threads() == 2
        assert seen == [1, 1]
    finally:
        torch.set_num_threads(before)


@each_learning
def test_a_refresh_scans_for_nan_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = MAKERS[name]()
    scans: list[int] = []
    scan = validate._require_finite
    monkeypatch.setattr(validate, "_require_finite", lambda x, *args: (scans.append(len(x)), scan(x, *args))[1])
    sampler.refresh(cloud())
    assert scans == [N]
