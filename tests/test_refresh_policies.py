"""Refresh policies by hand-computed schedules and observations."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vardass.errors import InputError
from vardass.refresh import (
    DriftRefresh,
    GrowingRefresh,
    RefreshEvery,
    RefreshPolicy,
)


def steps_due(policy: RefreshPolicy, until: int) -> list[int]:
    return [step for step in range(until) if policy.due(step)]


# --- by time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RefreshEvery(100), [0, 100, 200, 300]),
        (RefreshEvery(100, start=50), [50, 150, 250, 350]),
        (RefreshEvery(150, start=7), [7, 157, 307]),
        (RefreshEvery(0), []),
        (RefreshEvery(0, start=5), []),
        # intervals 10, 15, 22.5, 33.75, 50.6, 75.9, 113.9, each rounded down
        (GrowingRefresh(10, 1.5, 1000), [0, 10, 25, 47, 80, 130, 205, 318]),
        (GrowingRefresh(10, 1.5, None), [0, 10, 25, 47, 80, 130, 205, 318]),
        (GrowingRefresh(10, 2.0, 70), [0, 10, 30, 70, 140, 210, 280, 350]),
        (GrowingRefresh(10, 2.0, 70, start=3), [3, 13, 33, 73, 143, 213, 283, 353]),
        (GrowingRefresh(100, 3.0, 100), [0, 100, 200, 300]),
        (GrowingRefresh(1, 1.3, 2), [0, 1, 2, 3, *range(5, 400, 2)]),
    ],
    ids=repr,
)
def test_schedules(policy: RefreshPolicy, expected: list[int]) -> None:
    assert steps_due(policy, 400) == expected


@given(
    first=st.integers(1, 30),
    factor=st.floats(1.01, 4.0),
    extra=st.integers(0, 50),
    steps=st.lists(st.integers(0, 500), max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_growing_schedule_is_a_function_of_the_step(first: int, factor: float, extra: int, steps: list[int]) -> None:
    longest = first + extra
    asked = GrowingRefresh(first, factor, longest)
    answers = [asked.due(step) for step in steps]  # in any order
    expected, at, interval = set(), 0, float(first)
    while at <= 500:
        expected.add(at)
        at += min(longest, math.floor(interval))
        interval *= factor
    assert answers == [step in expected for step in steps]


def test_growing_schedule_far_out_is_quick_and_does_not_overflow() -> None:
    policy = GrowingRefresh(10, 2.0, 70)
    assert policy.due(70 * 10**12)
    assert not policy.due(70 * 10**12 + 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RefreshEvery(-1), "period must be at least 0, got -1; 0 never refreshes"),
        (lambda: RefreshEvery(1.5), "period must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (lambda: RefreshEvery(5).due(-1), "step must be at least 0, got -1"),
        (lambda: RefreshEvery(0).due(True), "step must be a whole number"),
        (lambda: GrowingRefresh(10, 1.0), r"factor must be above 1, got 1.0; RefreshEvery\(10\)"),
        (lambda: GrowingRefresh(10, 1.5, 5), "longest must be at least 10, got 5; it is not below first=10"),
        (lambda: DriftRefresh(threshold=0.0), "threshold must be positive, got 0.0"),
        (lambda: DriftRefresh(shortest=10, longest=5), "longest must be at least 10, got 5"),
        (lambda: DriftRefresh().observe(drift=torch.ones(2)), r"one number, got shape \(2,\)"),
    ],
)
def test_bad_policies(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_readable_repr() -> None:
    assert repr(RefreshEvery(100)) == "RefreshEvery(period=100, start=0)"
    assert repr(DriftRefresh()) == "DriftRefresh(threshold=0.3, shortest=25, longest=1000, window=10, start=0)"


# --- by observation --------------------------------------------------------------------------------


def drive(policy: RefreshPolicy, until: int, drift: Callable[[int], float]) -> list[int]:
    """Observe ``drift(steps since the last refresh)`` at every step, then ask."""
    due, last = [], 0
    for step in range(until):
        policy.observe(drift(step - last))
        if policy.due(step):
            due.append(step)
            last = step
    return due


def test_drift_triggers_at_the_threshold_and_not_without_drift() -> None:
    # mean of the last 4 of 0.01 t exceeds 0.3 first at t = 32 (0.305)
    policy = DriftRefresh(0.3, shortest=5, longest=200, window=4)
    assert drive(policy, 110, drift=lambda t: 0.01 * t) == [0, 32, 64, 96]
    still = DriftRefresh(0.3, shortest=5, longest=200, window=4)
    assert drive(still, 500, drift=lambda t: 0.0) == [0, 200, 400]
    wild = DriftRefresh(0.3, shortest=25, longest=200)
    assert drive(wild, 101, drift=lambda t: 1e9) == [0, 25, 50, 75, 100]


def test_drift_is_averaged_and_nan_says_nothing() -> None:
    policy = DriftRefresh(0.3, shortest=1, longest=99, window=3)
    assert policy.due(0)
    policy.observe(drift=torch.tensor(8.0) / 40.0)
    policy.observe(drift=math.nan)
    assert policy.drift == pytest.approx(0.2)
    assert not policy.due(1)
    policy.observe(drift=torch.tensor(20.0) / 40.0)  # (0.2 + 0.5) / 2
    assert policy.drift == pytest.approx(0.35)
    assert policy.due(2)
    assert math.isnan(policy.drift)
    policy.observe(drift=torch.tensor(1.0) / 0.0)  # strata of equal samples: any movement is too much
    assert policy.due(3)


def test_drift_window_forgets_the_oldest() -> None:
    policy = DriftRefresh(window=2)
    for value in (100.0, 1.0, 3.0):
        policy.observe(drift=value)
    assert policy.drift == 2.0


def test_a_policy_that_observes_answers_each_step_once() -> None:
    policy = DriftRefresh(shortest=2, longest=4, start=3)
    assert [step for step in range(12) if policy.due(step)] == [3, 7, 11]
    assert policy.due(11)  # two samplers may ask
    with pytest.raises(InputError, match=r"step=2 comes before the last refresh at step=11"):
        policy.due(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RefreshEvery(10),
        lambda: GrowingRefresh(3),
        lambda: RefreshEvery(0),
        lambda: DriftRefresh(0.5, shortest=2, longest=30, window=3),
    ],
)
def test_policy_state_round_trip(make: Callable[[], RefreshPolicy]) -> None:
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).abs().tolist()

    def run(policy: RefreshPolicy, begin: int, end: int) -> list[int]:
        due = []
        for step in range(begin, end):
            policy.observe(drift=noise[step])
            due += [step] if policy.due(step) else []
        return due

    whole, first, second = make(), make(), make()
    expected = run(whole, 0, 100)
    due = run(first, 0, 41)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert due + run(second, 41, 100) == expected


def test_policy_refuses_other_states() -> None:
    with pytest.raises(InputError, match="policy='RefreshEvery', this policy policy='DriftRefresh'"):
        DriftRefresh().load_state_dict(RefreshEvery(3).state_dict())
    with pytest.raises(InputError, match="version=99, this policy version=1"):
        DriftRefresh().load_state_dict({**DriftRefresh().state_dict(), "version": 99})
    broken = DriftRefresh().state_dict()
    del broken["recent"]
    with pytest.raises(InputError, match=r"but not \['recent'\]"):
        DriftRefresh().load_state_dict(broken)
