"""Refreshes and draws in another process: the same stream as without it, whatever happens on the way."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from itertools import islice

import pytest
import torch

from vardass import BalancedBatchSampler, OrderedBatchSampler, StratifiedBatchSampler, UniformBatchSampler
from vardass.errors import InputError, VardassError
from vardass.samplers import BackgroundSampler

N, K, AHEAD = 96, 8, 5
MAKERS = {
    "stratified": lambda: StratifiedBatchSampler(N, K, seed=1, endless=True),
    "ordered": lambda: OrderedBatchSampler(N, K, seed=1, endless=True, plan_rows=16),
    "balanced": lambda: BalancedBatchSampler(N, K, seed=1, endless=True),
}


def features(seed: int) -> torch.Tensor:
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(seed))


def stream(sampler: BackgroundSampler, steps: int = 40, period: int = 13) -> list[tuple[list[int], list[float] | None]]:
    batches = iter(sampler)
    found = []
    for step in range(steps):
        if step % period == 0:
            sampler.refresh(features(step))
        batch = next(batches)
        found.append((list(batch), None if batch.weights is None else list(batch.weights)))
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_another_thread_gives_the_stream_of_this_one(name: str) -> None:
    apart = BackgroundSampler(MAKERS[name](), ahead=AHEAD)
    here = BackgroundSampler(MAKERS[name](), ahead=AHEAD, in_process=True)
    assert stream(apart) == stream(here)
    apart.close()


def test_the_stream_is_that_of_the_sampler_with_refreshes_moved_by_what_was_asked_for() -> None:
    # by hand: 5 uniform batches are asked for before the refresh of step 0, which comes with 5 more
    plain = MAKERS["stratified"]()
    batches = iter(plain)
    expected = [list(next(batches)) for _ in range(AHEAD)]
    plain.refresh(features(0))
    expected += [list(next(batches)) for _ in range(AHEAD)]
    found = stream(BackgroundSampler(MAKERS["stratified"](), ahead=AHEAD, in_process=True), steps=10, period=100)
    assert [indices for indices, _ in found] == expected
    assert [weights is None for _, weights in found] == [True] * AHEAD + [False] * AHEAD


def test_strata_in_use_are_those_that_the_weights_belong_to() -> None:
    sampler = BackgroundSampler(MAKERS["stratified"](), ahead=AHEAD, in_process=True)
    batches = iter(sampler)
    for step in range(60):
        if step % 20 == 0:
            sampler.refresh(features(step))
        batch = next(batches)
        if batch.weights is None:
            assert sampler.strata is None
        else:
            assert sampler.strata is not None
            assert sampler.strata.labels[list(batch)].tolist() == list(range(K))
            assert batch.weights == pytest.approx((sampler.strata.sizes / N).tolist())
    assert sampler.position == 60


def test_features_may_change_after_they_were_handed_over() -> None:
    z = features(0)
    apart, here = (BackgroundSampler(MAKERS["ordered"](), ahead=AHEAD) for _ in range(2))
    apart.refresh(z)
    here.refresh(z.clone())
    z.zero_()
    assert [list(batch) for batch in islice(apart, 12)] == [list(batch) for batch in islice(here, 12)]
    apart.close()
    here.close()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("at", [3, 14, 22])
def test_a_restored_stream_goes_on_bit_for_bit(name: str, at: int) -> None:
    whole = stream(BackgroundSampler(MAKERS[name](), ahead=AHEAD, in_process=True))
    first = BackgroundSampler(MAKERS[name](), ahead=AHEAD)
    batches = iter(first)
    found = []
    for step in range(len(whole)):
        if step == at:
            state = first.state_dict()
            first.close()
            first = BackgroundSampler(MAKERS[name](), ahead=AHEAD)
            first.load_state_dict(state)
            batches = iter(first)
        if step % 13 == 0:
            first.refresh(features(step))
        batch = next(batches)
        found.append((list(batch), None if batch.weights is None else list(batch.weights)))
    assert found == whole
    first.close()


def test_a_closed_stream_goes_on_when_asked() -> None:
    whole = stream(BackgroundSampler(MAKERS["balanced"](), ahead=AHEAD, in_process=True), steps=30, period=100)
    sampler = BackgroundSampler(MAKERS["balanced"](), ahead=AHEAD)
    sampler.refresh(features(0))
    found = [list(batch) for batch in islice(sampler, 11)]
    sampler.close()
    sampler.close()
    found += [list(batch) for batch in islice(sampler, 19)]
    assert found == [indices for indices, _ in whole]
    sampler.close()


def test_balanced_epochs_visit_each_sample_once() -> None:
    sampler = BackgroundSampler(MAKERS["balanced"](), ahead=AHEAD, in_process=True)
    batches = iter(sampler)
    rows = []
    for step in range(3 * N // K):
        if step % 7 == 0:
            sampler.refresh(features(step))
        rows.append(list(next(batches)))
    for epoch in range(3):
        part = rows[epoch * N // K : (epoch + 1) * N // K]
        assert sorted(index for row in part for index in row) == list(range(N))


def test_features_that_cannot_be_used_are_refused() -> None:
    sampler = BackgroundSampler(MAKERS["stratified"](), ahead=AHEAD)
    with pytest.raises(InputError, match=r"95 rows.*n=96"):
        sampler.refresh(features(0)[:95])
    with pytest.raises(InputError, match="endless=True"):
        BackgroundSampler(UniformBatchSampler(N, K))
    with pytest.raises(InputError, match="keys"):
        sampler.load_state_dict({"n": 3})
    with pytest.raises(InputError, match="type NoneType"):
        sampler.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs a MinibatchSampler, got RandomSampler"):
        BackgroundSampler(torch.utils.data.RandomSampler(range(N)))  # type: ignore[arg-type]
    sampler.close()


def test_an_error_in_the_other_thread_arrives_here() -> None:
    sampler = BackgroundSampler(StratifiedBatchSampler(N, K, endless=True, min_size=50), ahead=AHEAD)
    sampler.refresh(features(0))
    with pytest.raises(InputError, match="min_size=50"):
        list(islice(sampler, 20))
    sampler.close()


def test_samplers_without_features_stay_without() -> None:
    sampler = BackgroundSampler(UniformBatchSampler(N, K, seed=3, endless=True), ahead=AHEAD, in_process=True)
    assert not sampler.needs_features
    sampler.refresh(features(0))
    assert [list(b) for b in islice(sampler, 9)] == [
        list(b) for b in islice(UniformBatchSampler(N, K, seed=3, endless=True), 9)
    ]


@pytest.mark.parametrize("in_process", [True, False])
def test_copies_and_pickles_go_on_by_themselves(in_process: bool) -> None:
    sampler = BackgroundSampler(MAKERS["ordered"](), ahead=AHEAD, in_process=in_process)
    sampler.refresh(features(0))
    list(islice(sampler, 3))
    twins = [copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    expected = [list(batch) for batch in islice(sampler, 12)]
    for twin in twins:
        assert twin.is_refreshing
        assert [list(batch) for batch in islice(twin, 12)] == expected
        assert not twin.is_refreshing
        assert twin.position == 15
        twin.close()
    sampler.close()


def test_a_lost_stream_goes_on_from_a_state() -> None:
    sampler = BackgroundSampler(MAKERS["stratified"](), ahead=AHEAD)
    sampler.refresh(features(0))
    list(islice(sampler, 7))
    state = sampler.state_dict()
    expected = [list(batch) for batch in islice(sampler, 9)]
    sampler.refresh(features(0), groups=torch.zeros(N + 1))
    with pytest.raises(InputError, match="groups"):
        sampler.close()
    # it must not begin anew in silence
    with pytest.raises(VardassError, match="load a state"):
        next(iter(sampler))
    sampler.load_state_dict(state)
    assert [list(batch) for batch in islice(sampler, 9)] == expected
    sampler.close()


def test_a_state_of_a_closed_stream_starts_no_thread() -> None:
    sampler = BackgroundSampler(MAKERS["ordered"](), ahead=AHEAD)
    assert sampler.state_dict()["position"] == 0
    assert sampler._thread is None
    list(islice(sampler, 3))
    sampler.close()
    other = BackgroundSampler(MAKERS["ordered"](), ahead=AHEAD, in_process=True)
    other.load_state_dict(sampler.state_dict())
    assert sampler._thread is None
    assert [list(b) for b in islice(sampler, 8)] == [list(b) for b in islice(other, 8)]
    sampler.close()


_SCRIPT = """
import torch
from vardass import StratifiedBatchSampler
from vardass.samplers import BackgroundSampler

sampler = BackgroundSampler(StratifiedBatchSampler(4000, 8, endless=True), ahead=4)
next(iter(sampler))
sampler.refresh(torch.randn(4000, 64))
sampler.refresh(torch.randn(4000, 64))
"""


def test_a_script_that_ends_without_close_ends() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
