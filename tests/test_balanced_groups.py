"""Balanced batches of several groups: each group's own rows are balanced, in batches or in sets of one group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from conftest import gen, refused
from vardass.samplers import BalancedBatchSampler, UniformBatchSampler, planned
from vardass.samplers.plan import match_rows, share_rests


def grouped(counts: list[int], d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Skewed groups far apart, in random order, with labels that are neither 0-based nor consecutive."""
    groups = torch.repeat_interleave(torch.tensor(counts))
    groups = groups[torch.randperm(len(groups), generator=gen(seed))]
    return torch.randn(len(groups), d, generator=gen(seed + 1)).exp() + 3.0 * groups[:, None], 7 * groups - 3


def refreshed(x: Tensor, batch_size: int, **options: Any) -> BalancedBatchSampler:
    sampler = BalancedBatchSampler(len(x), batch_size, **{"kernel": "linear", **options})
    sampler.refresh(x)
    return sampler


counts_of_groups = st.lists(st.integers(2, 40), min_size=2, max_size=5)


# --- coverage -----------------------------------------------------------------------------------------------


@given(counts=counts_of_groups, batch_size=st.integers(1, 12), seed=st.integers(0, 100), moved=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_sample_once_and_every_group_in_its_share(
    counts: list[int], batch_size: int, seed: int, moved: bool
) -> None:
    batch_size = min(batch_size, sum(counts))
    n = sum(counts) // batch_size * batch_size
    x, groups = grouped(counts, seed=seed)
    sampler = refreshed(x, batch_size, groups=groups, seed=seed)
    batches = []
    for batch in sampler:
        batches.append(list(batch))
        if moved and len(batches) == 2:
            sampler.refresh(x.flip(1))
    visited = list(itertools.chain(*batches))
    assert len(visited) == len(set(visited)) == n
    for name in groups.unique() if n == len(x) or not moved else ():  # a refresh draws the remainder again
        in_batch = [int((groups[batch] == name).sum()) for batch in batches]
        total = sum(in_batch)
        assert set(in_batch) <= {total // len(batches), -(-total // len(batches))}


def test_many_batches_are_planned_in_parts_with_the_shares_of_the_whole() -> None:
    x, groups = grouped([1500, 700, 5])
    sampler = refreshed(x, 7, groups=groups)
    batches = [list(batch) for batch in sampler]
    assert len(batches) == 315 > 2 * 128
    assert sorted(itertools.chain(*batches)) == list(range(2205))
    for name, low in ((-3, 4), (4, 2), (11, 0)):
        assert {int((groups[batch] == name).sum()) for batch in batches} == {low, low + 1}


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=6), rows=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_rests_fill_rows_of_one_size_without_a_group_twice(counts: list[int], rows: int, seed: int) -> None:
    counts[0] += -sum(counts) % rows
    rests = share_rests(torch.tensor(counts), rows, gen(seed))
    assert rests.shape == (rows, sum(count % rows for count in counts) // rows)
    assert all(len(row.unique()) == len(row) for row in rests)
    assert [int((rests == g).sum()) for g in range(len(counts))] == [count % rows for count in counts]


def test_every_sample_is_as_likely_in_any_batch() -> None:
    x, groups = grouped([7, 5])
    table = torch.zeros(12, 4)
    for seed in range(250):
        for t, batch in enumerate(refreshed(x, 3, groups=groups, seed=seed)):
            table[list(batch), t] += 1
    assert bool((table.sum(1) == 250).all())
    assert min(stats.chisquare(row.tolist()).pvalue for row in table) > 1e-4


# --- balance ------------------------------------------------------------------------------------------------


def test_rows_are_matched_within_their_kind_until_hardly_an_exchange_helps() -> None:
    better = 0
    for seed in range(40):
        units, errors = torch.randn(2, 6, 3, generator=gen(seed), dtype=torch.float64)
        two = torch.tensor([True] * 2 + [False] * 4)
        kinds, row_kinds = (two[torch.randperm(6, generator=gen(seed + i))] for i in (1, 2))
        start = errors.clone()
        order = match_rows(units, errors, kinds, row_kinds)
        assert sorted(order.tolist()) == list(range(6))
        assert torch.equal(kinds[order], row_kinds)
        torch.testing.assert_close(errors, start + units[order])
        for a, b in itertools.combinations(range(6), 2):
            other = order.clone()
            other[[a, b]] = order[[b, a]]
            if row_kinds[a] == row_kinds[b]:
                better += float((start + units[other]).square().sum()) < float(errors.square().sum()) - 1e-9
    assert better <= 2


def errors_within(x: Tensor, groups: Tensor, batches: Iterable[Any]) -> dict[int, float]:
    """Mean squared distance of the mean of each group's rows in a batch from the mean of the group."""
    errors: dict[int, list[float]] = {int(name): [] for name in groups.unique()}
    for batch in batches:
        rows = torch.tensor(list(batch))
        for name in groups[rows].unique():
            apart = x[rows[groups[rows] == name]].mean(0) - x[groups == name].mean(0)
            errors[int(name)].append(float(apart.square().sum()))
    return {name: sum(values) / max(1, len(values)) for name, values in errors.items()}


@pytest.mark.parametrize("counts", [[800, 400], [640, 320, 240], [903, 297]])
def test_each_group_is_balanced_as_by_a_sampler_of_its_own(counts: list[int]) -> None:
    x, groups = grouped(counts, d=12)
    batch_size = 60
    share = {7 * g - 3: round(count * batch_size / sum(counts)) for g, count in enumerate(counts)}
    batches = itertools.islice(refreshed(x, batch_size, groups=groups, endless=True), 100)
    together = errors_within(x, groups, batches)
    uniform = errors_within(x, groups, itertools.islice(UniformBatchSampler(len(x), batch_size, endless=True), 100))
    for name, k in share.items():
        members = (groups == name).nonzero().flatten()
        alone = refreshed(x[members], k, endless=True)
        expected = errors_within(x[members], groups[members], itertools.islice(alone, 100))[name]
        assert together[name] < 1.1 * expected
        assert together[name] < 0.3 * uniform[name]


def test_several_groups_together_are_close_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, groups = grouped([120] * 8)
    no_group = torch.zeros_like(groups)

    def error() -> float:
        batches = itertools.islice(refreshed(x, 16, endless=True, groups=groups), 120)
        return errors_within(x, no_group, batches)[0]

    uniform = errors_within(x, no_group, itertools.islice(UniformBatchSampler(len(x), 16, endless=True), 120))[0]
    matched = error()
    assert matched < 0.02 * uniform
    monkeypatch.setattr(planned, "match_rows", lambda units, *options: torch.arange(len(units)))
    assert matched < 0.6 * error()


# --- sets ---------------------------------------------------------------------------------------------------


@given(counts=counts_of_groups, size=st.integers(1, 6), many=st.integers(1, 3), fitted=st.booleans())
@settings(max_examples=60, deadline=None)
def test_sets_are_of_one_group_and_no_group_loses_more_than_a_rest(
    counts: list[int], size: int, many: int, fitted: bool
) -> None:
    counts = [max(count, size) for count in counts]
    x, groups = grouped(counts)
    sets = sum(count // size for count in counts)
    many = min(many, sets)
    sampler = BalancedBatchSampler(len(x), size * many, groups=groups, set_size=size, kernel="linear")
    if fitted:
        sampler.refresh(x)
    batches = [torch.tensor(batch).view(many, size) for batch in sampler]
    assert len(batches) == len(sampler) == sets // many
    drawn = torch.cat(batches)
    assert len(drawn.unique()) == drawn.numel()
    assert all(len(groups[row].unique()) == 1 for row in drawn)
    for name, count in zip(groups.unique(), counts, strict=True):
        left = count // size - int((groups[drawn[:, 0]] == name).sum())
        assert 0 <= left <= sets % many


def test_a_refresh_in_mid_epoch_goes_on_with_the_sets_that_are_left() -> None:
    x, groups = grouped([23, 41, 12])
    sampler = refreshed(x, 10, groups=groups, set_size=5)
    visited = []
    for batch in sampler:
        visited += batch
        sampler.refresh(x + len(visited))
    assert len(visited) == len(set(visited)) == 70
    again = [index for _ in range(3) for batch in sampler for index in batch]
    assert len(again) == 210


def test_a_long_stream_of_sets_goes_round() -> None:
    x, groups = grouped([23, 41, 12])
    sampler = refreshed(x, 10, groups=groups, set_size=5, batches=25)
    batches = [torch.tensor(batch) for batch in sampler]
    assert len(batches) == 25
    counts = torch.bincount(torch.cat(batches), minlength=76)
    assert int(counts.max()) <= 4
    assert sampler.sample_batches(9).rows.shape == (9, 10)


def test_sets_are_as_close_to_their_group_as_batches_of_a_sampler_of_its_own() -> None:
    x, groups = grouped([480, 320], d=8)
    sampler = refreshed(x, 32, groups=groups, set_size=16, endless=True)
    sets = [row for batch in itertools.islice(sampler, 75) for row in torch.tensor(batch).view(2, 16)]
    together = errors_within(x, groups, sets)
    for name in (-3, 4):
        members = (groups == name).nonzero().flatten()
        alone = refreshed(x[members], 16, endless=True)
        expected = errors_within(x[members], groups[members], itertools.islice(alone, 75))[name]
        assert together[name] == pytest.approx(expected, rel=0.25)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"groups": [1] * 20}, "groups", ("20 samples", "group 1", "empty")),
        ({"groups": [0] * 19 + [5]}, "groups", ("group 5", "one sample", "merge")),
        ({"groups": [0] * 12 + [1] * 8, "shares": [0.0, 1.0]}, "shares", ("8 samples", "share 1", "10 samples")),
        ({"groups": [0] * 20, "shares": [0.5, 0.5]}, None, ("groups [1]", "no samples")),
        ({"groups": [0] * 17 + [1] * 3, "set_size": 5}, "set_size", ("group 1", "3 samples", "set_size=5")),
        ({"groups": [0, 1] * 10, "set_size": 4}, "batch_size", ("batch_size=10", "set_size=4", "batch_size=8")),
        ({"groups": [0] * 14 + [1] * 6, "set_size": 5, "batch_size": 20}, "batch_size", ("3 sets", "set_size=5", "4")),
        ({"groups": [0, 1] * 10, "set_size": 5, "drop_last": False}, "drop_last", ("set_size=5", "drop_last=False")),
        ({"groups": [0, 1] * 10, "set_size": 5, "shares": [0.5, 0.5]}, "set_size", ("set_size=5", "shares")),
        ({"set_size": 5}, "set_size", ("set_size=5", "groups=None")),
    ],
)
def test_groups_that_cannot_be_balanced(options: dict[str, Any], field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        BalancedBatchSampler(20, options.pop("batch_size", 10), **options)


def test_sets_keep_their_groups() -> None:
    x, groups = grouped([10, 10])
    sampler = refreshed(x, 10, groups=groups, set_size=5)
    with refused("set_size=5", "new groups", field="groups"):
        sampler.refresh(x, groups=1 - groups)
