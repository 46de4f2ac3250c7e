"""Refresh policies by hand-computed schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refused
from vardass.refresh import GrowingRefresh, RefreshEvery, RefreshPolicy


def steps_due(policy: RefreshPolicy, until: int) -> list[int]:
    return [step for step in range(until) if policy.due(step)]


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
    ("make", "field", "named"),
    [
        (lambda: RefreshEvery(-1), "period", (0, -1)),
        (lambda: RefreshEvery(1.5), "period", (1.5,)),  # type: ignore[arg-type]
        (lambda: RefreshEvery(5).due(-1), "step", (0, -1)),
        (lambda: RefreshEvery(0).due(True), "step", (True,)),
        (lambda: GrowingRefresh(10, 1.0), None, ("factor", 1.0, "RefreshEvery(10)")),
        (lambda: GrowingRefresh(10, 1.5, 5), "longest", (5, "first=10")),
    ],
)
def test_bad_policies(make: Callable[[], Any], field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        make()


def test_readable_repr() -> None:
    assert repr(RefreshEvery(100)) == "RefreshEvery(period=100, start=0)"
    assert repr(GrowingRefresh()) == "GrowingRefresh(first=10, factor=1.5, longest=1000, start=0)"
