"""Groups with shares, and the same classes in both domains: unbiased for the mixture that they state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import refused
from sampler_cases import cloud, gen, taken
from vardass import view
from vardass.kernels import as_kernel
from vardass.refresh import Refresher, RefreshEvery
from vardass.samplers import (
    BalancedBatchSampler,
    MinibatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    align_classes,
    task_weights,
)
from vardass.solvers import stratify_groups
from vardass.solvers.grouped import share_out
from vardass.strata import Strata

MAKERS: dict[str, Callable[..., Any]] = {
    "stratified": StratifiedBatchSampler,
    "ordered": OrderedBatchSampler,
    "balanced": BalancedBatchSampler,
}
each_maker = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())

GROUPS = torch.tensor([0] * 12 + [1] * 6 + [-1] * 4 + [2] * 2)  # no share is given to group 2
SHARES = [0.375, 0.625, 0.0]


def mixture(values: Tensor, groups: Tensor = GROUPS, shares: Any = SHARES) -> Tensor:
    """Σ_c share_c (mean of ``values`` over class c)."""
    total = torch.zeros(values.shape[1:], dtype=torch.float64)
    for group, share in enumerate(shares):
        if share > 0:
            total += share * values[groups == group].double().mean(0)
    return total


# --- strata ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_all_draws_from_strata_with_shares_have_the_mean_and_the_variance_that_are_stated(kernel: str) -> None:
    x = cloud(9).double()
    groups, shares = torch.tensor([0, 1, 0, 0, -1, 1, 0, 1, 2]), torch.tensor([0.2, 0.8, 0.0])
    strata = stratify_groups(x, 4, groups, shares=shares, kernel=kernel)
    assert (strata.labels < 0).tolist() == ((groups < 0) | (groups == 2)).tolist()
    assert float(strata.exact_weights.sum()) == pytest.approx(1.0, abs=1e-12)
    matrix = as_kernel(kernel).fit(x[strata.labels >= 0]).matrix(x)
    values, vectors = torch.linalg.eigh(matrix)
    phi = vectors * values.clamp_min(0.0).sqrt()  # rows with these inner products
    members = [strata.members(h).tolist() for h in range(4)]
    drawn = torch.stack([strata.exact_weights @ phi[list(rows)] for rows in itertools.product(*members)])
    whole = mixture(phi, groups, shares.tolist())
    torch.testing.assert_close(drawn.mean(0), whole)
    assert strata.variance == pytest.approx(float((drawn - whole).square().sum(1).mean()), rel=1e-9)
    each = torch.tensor([shares[g] / (groups == g).sum() if g >= 0 else 0.0 for g in groups.tolist()]).double()
    spread = float(each @ (phi - whole).square().sum(1))
    assert strata.uniform_variance == pytest.approx(spread / 4, rel=1e-6)


def test_a_sampled_variance_of_the_mixture_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = torch.arange(200) % 3 - 1
    options: dict[str, Any] = {"shares": [0.9, 0.1], "kernel": "rbf"}
    exact = stratify_groups(cloud(200), 6, groups, **options)
    monkeypatch.setattr(view, "EXACT_LIMIT", 0)
    sampled = stratify_groups(cloud(200), 6, groups, **options)
    stderr = sampled.info["uniform_stderr"]
    assert 0 < stderr < 0.02 * exact.uniform_variance
    assert abs(sampled.uniform_variance - exact.uniform_variance) < 4 * stderr


def test_strata_are_allotted_by_shares_as_far_as_samples_go() -> None:
    found = share_out(torch.tensor([100, 10, 2]), 10, shares=torch.tensor([0.2, 0.4, 0.4]).double())
    assert found.tolist() == [3, 5, 2]
    x = cloud(24)
    strata = stratify_groups(x, 8, GROUPS, shares=SHARES)
    assert [len(strata.labels[g == GROUPS].unique()) for g in (0, 1)] == [3, 5]


def test_strata_with_shares_are_saved_and_read(tmp_path: Any) -> None:
    strata = stratify_groups(cloud(24), 6, GROUPS, shares=SHARES, kernel="rbf")
    for again in (Strata.from_dict(strata.to_dict()), Strata.load(strata.save(tmp_path / "strata.npz"))):
        assert torch.equal(again.labels, strata.labels)
        assert torch.equal(again.exact_weights, strata.exact_weights)


def test_the_spread_of_strata_with_shares_is_their_variance() -> None:
    x = cloud(24).double()
    strata = stratify_groups(x, 6, GROUPS, shares=SHARES, kernel="linear")
    parts = [x[strata.labels == stratum] for stratum in range(6)]
    within = torch.stack([(part - part.mean(0)).square().sum(1).mean() for part in parts])
    assert float(within @ strata.exact_weights.square()) == pytest.approx(strata.variance, rel=1e-6)


# --- samplers --------------------------------------------------------------------------------------------


@each_maker
def test_batches_are_unbiased_for_the_mixture_and_keep_its_shares(maker: Callable[..., MinibatchSampler]) -> None:
    # strata of 6 and 3 samples; a plan of 6 rows has each member equally often, so its mean is that of all draws
    options: dict[Any, dict[str, Any]] = {
        StratifiedBatchSampler: {"replacement": False, "equal": True},
        OrderedBatchSampler: {"plan_rows": 6, "equal": True},
        BalancedBatchSampler: {},
    }
    groups, shares = GROUPS.clone(), [0.5, 0.5, 0.0]
    sampler = maker(24, 4, kernel="rbf", groups=groups, shares=shares, seed=3, **options[maker])
    z = cloud(24)
    sampler.refresh(z)
    values = torch.randn(24, 5, dtype=torch.float64, generator=gen(5))
    batches = taken(sampler, 6)
    means, of_the_task = [], []
    for rows, weights in batches:
        w = torch.tensor(weights, dtype=torch.float64)
        assert set(groups[rows].tolist()) == {0, 1}
        of_the_task.append(task_weights(w, groups[rows], torch.bincount(groups + 1)[1:]) @ values[rows])
        for group in (0, 1):
            assert float(w[groups[rows] == group].sum()) == pytest.approx(0.5, abs=1e-12)
        means.append(w @ values[rows])
    torch.testing.assert_close(torch.stack(means).mean(0), mixture(values, groups, shares))
    drawn = (groups == 0) | (groups == 1)
    torch.testing.assert_close(torch.stack(of_the_task).mean(0), values[drawn].mean(0))  # as if there were no shares


@each_maker
def test_random_batches_have_the_mean_of_the_mixture(maker: Callable[..., MinibatchSampler]) -> None:
    sampler = maker(24, 5, kernel="rbf", groups=GROUPS, shares=SHARES, seed=1)
    sampler.refresh(cloud(24))
    values = torch.randn(24, 3, dtype=torch.float64, generator=gen(6))
    found = []
    for seed in range(300):  # independent plans
        chunk = sampler.sample_batches(1, seed=seed)
        assert chunk.weights is not None
        found.append(chunk.weights @ values[chunk.rows[0]])
    means = torch.stack(found)
    stderr = means.std(0) / len(found) ** 0.5
    assert bool(((means.mean(0) - mixture(values)).abs() < 4 * stderr + 1e-12).all())


@each_maker
def test_groups_are_replaced_at_a_refresh_and_are_part_of_the_state(maker: Callable[..., MinibatchSampler]) -> None:
    z, fresh = cloud(24), torch.arange(24) % 2
    sampler, twin = (maker(24, 4, kernel="rbf", endless=True, seed=2) for _ in range(2))
    stream = iter(sampler)
    sampler.refresh(z)
    taken(stream, 3)
    sampler.refresh(z, groups=fresh, shares=[0.9, 0.1])
    twin.load_state_dict(sampler.state_dict())
    ahead, other = taken(stream, 9), iter(twin)
    assert taken(other, 9) == ahead
    assert all(sum(w for i, w in zip(rows, ws, strict=True) if fresh[i]) == pytest.approx(0.1) for rows, ws in ahead)
    for each in (sampler, twin):  # they stay if nothing is said of them, and shares may change alone
        each.refresh(cloud(24, seed=1))
    assert taken(stream, 9) == taken(other, 9)
    sampler.refresh(z, shares=[0.5, 0.5])
    rows, ws = taken(stream, 1)[0]
    assert sum(w for i, w in zip(rows, ws, strict=True) if fresh[i]) == pytest.approx(0.5)


@each_maker
def test_groups_of_zeros_are_as_good_as_none(maker: Callable[..., MinibatchSampler]) -> None:
    z = cloud(24)
    plain, grouped = (maker(24, 4, kernel="rbf", seed=2) for _ in range(2))
    plain.refresh(z)
    grouped.refresh(z, groups=GROUPS, shares=SHARES)
    grouped.refresh(z, groups=torch.zeros(24, dtype=torch.int64))
    plain.refresh(z)
    assert taken(plain) == taken(grouped)


@each_maker
def test_groups_that_cannot_be_used_leave_the_stream_as_it_was(maker: Callable[..., MinibatchSampler]) -> None:
    z = cloud(24)
    sampler, untouched = (maker(24, 4, kernel="rbf", groups=GROUPS, shares=SHARES, seed=2) for _ in range(2))
    for each in (sampler, untouched):
        each.refresh(z)
    bad: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"groups": torch.arange(24), "shares": [1.0] * 24}, ("24 groups", "24 strata", "k=4", "batch_size")),
        ({"groups": GROUPS, "shares": [0.5, 0.5]}, ("groups", "2 shares", "-1..1", "-1..2")),
        ({"groups": GROUPS, "shares": [0.5, 0.5, 0.0, 1.0]}, ("groups", [3], "shares", 0)),
        ({"groups": GROUPS, "shares": [0.5, -0.5, 0.0]}, ("shares", "negative", [0.5, -0.5, 0.0])),
        ({"groups": GROUPS, "shares": [0.0, 0.0, 0.0]}, ("shares", "positive sum", [0.0, 0.0, 0.0])),
        ({"shares": [1.0]}, ("groups", "1 shares", "-1..0", "-1..2")),
    ]
    for given, named in bad:
        with refused(*named):
            sampler.refresh(z, **given)
    assert taken(sampler) == taken(untouched)
    with refused("groups=None", [1.0], "groups="):
        maker(24, 4, shares=[1.0])


def test_coupled_rows_are_close_to_the_mean_of_the_mixture_not_of_the_data() -> None:
    z = torch.randn(400, 4, generator=gen(1)) + 3.0 * (torch.arange(400) % 2)[:, None]
    groups, shares = torch.arange(400) % 2, [0.8, 0.2]
    whole = mixture(z, groups, shares)

    def distance(maker: Callable[..., MinibatchSampler]) -> float:
        sampler = maker(400, 16, kernel="linear", groups=groups, shares=shares)
        sampler.refresh(z)
        chunk = sampler.sample_batches(100)
        assert chunk.weights is not None
        means = torch.einsum("tkd,k->td", z[chunk.rows].double(), chunk.weights)
        return float((means - whole).square().sum(1).mean())

    strata = distance(StratifiedBatchSampler)
    assert distance(OrderedBatchSampler) < 0.1 * strata
    assert distance(BalancedBatchSampler) < 0.1 * strata


def test_a_refresher_asks_for_groups_at_each_refresh() -> None:
    samplers = {name: StratifiedBatchSampler(24, 4, kernel="rbf", seed=i) for i, name in enumerate("st")}
    asked = []

    def groups(step: int) -> dict[str, dict[str, Any]]:
        asked.append(step)
        return {"s": {"groups": GROUPS, "shares": SHARES}} if step else {}

    refresher = Refresher(RefreshEvery(2), samplers, {name: lambda: cloud(24) for name in "st"}, groups=groups)
    for step in range(4):
        refresher.step(step)
        assert (samplers["s"].groups is not None) == (step >= 2)
    assert asked == [0, 2]
    assert samplers["t"].groups is None
    wrong = Refresher(RefreshEvery(2), samplers, {name: lambda: cloud(24) for name in "st"}, groups=lambda _: {"a": {}})
    with refused(["a"], ["s", "t"]):
        wrong.step(0)


# --- classes of both domains -------------------------------------------------------------------------------


def logits_of(classes: list[int], count: int, sureness: float = 4.0) -> Tensor:
    return sureness * torch.nn.functional.one_hot(torch.tensor(classes), count).double()


def test_both_domains_have_the_same_classes_in_each_batch() -> None:
    labels = torch.tensor([0] * 30 + [1] * 6 + [2] * 4)
    logits = logits_of([0] * 5 + [1] * 25 + [2] * 10, 3)
    guess = logits.argmax(1)
    aligned = align_classes(labels, logits, strata=9)
    assert aligned.is_aligned
    for maker in MAKERS.values():
        samplers = [maker(40, 9, kernel="rbf", seed=i) for i in (0, 1)]
        for sampler, given in zip(samplers, aligned, strict=True):
            sampler.refresh(cloud(40), **given)
        for source, target in zip(*samplers, strict=True):
            assert labels[source].tolist() == guess[target].tolist()
            for group in range(3):
                for batch, classes in ((source, labels), (target, guess)):
                    weights = torch.tensor(batch.weights)
                    assert float(weights[classes[batch] == group].sum()) == pytest.approx(1 / 3)


def test_unsure_samples_are_in_no_class() -> None:
    logits = torch.cat([logits_of([0] * 10 + [1] * 10, 2), logits_of([0] * 5, 2, sureness=0.1)])
    aligned = align_classes(torch.arange(20) % 2, logits, strata=4, confidence=0.9)
    assert aligned.target["groups"].tolist() == [0] * 10 + [1] * 10 + [-1] * 5
    assert align_classes(torch.arange(20) % 2, logits, strata=4).target["groups"][20:].tolist() == [0] * 5


def test_a_class_that_vanishes_keeps_a_floor_in_the_source_and_is_not_asked_of_the_target() -> None:
    labels, logits = torch.arange(30) % 3, logits_of([0] * 15 + [1] * 15, 3)
    aligned = align_classes(labels, logits, strata=6, floor=0.1)
    assert aligned.source["shares"].tolist() == pytest.approx([1 / 2.1, 1 / 2.1, 0.1 / 2.1])
    assert aligned.target["shares"].tolist() == pytest.approx([0.5, 0.5, 0.0])
    dropped = align_classes(labels, logits, strata=6, floor=0.0)
    for domain in dropped:
        assert domain["shares"].tolist() == pytest.approx([0.5, 0.5, 0.0])
    for given in (aligned, dropped):
        for seed, groups in enumerate(given):
            sampler = StratifiedBatchSampler(30, 6, kernel="rbf", seed=seed)
            sampler.refresh(cloud(30), **groups)
            assert len(next(iter(sampler))) == 6


def test_few_pseudo_labels_do_not_stand_for_a_class() -> None:
    labels = torch.arange(30) % 3
    for few, share in ((0, 0.1), (1, 0.25), (2, 0.5), (4, 1.0), (9, 1.0)):
        logits = logits_of([0] * 15 + [1] * 15 + [2] * few, 3)
        found = align_classes(labels, logits, strata=12, floor=0.1).source["shares"]
        assert found.tolist() == pytest.approx([1 / (2 + share), 1 / (2 + share), share / (2 + share)])


def test_a_network_that_knows_half_of_the_classes_is_not_followed() -> None:
    labels = torch.arange(40) % 4
    assert not align_classes(labels, logits_of([0, 1] * 20, 4), strata=8).is_aligned
    assert not align_classes(labels, logits_of([0, 1] * 19 + [2, 3], 4), strata=80).is_aligned  # 1 of 20 rows each
    assert align_classes(labels, logits_of([0, 1] * 19 + [2, 2], 4), strata=8).is_aligned
    # classes that the source has not count neither way
    assert align_classes(labels % 2, logits_of([0, 1] * 20, 4), strata=8).is_aligned


@pytest.mark.parametrize(
    ("counts", "aligned"),
    [([172, 28], False), ([171, 29], True), ([170, 10, 10, 10], True), ([191, 3, 3, 3], False)],
)
def test_a_target_on_one_side_of_the_boundary_is_not_followed(counts: list[int], aligned: bool) -> None:
    """Pseudo-labels of less than 1.5 classes, by the exponential of their entropy; four are enough for a class."""
    logits = logits_of([label for label, count in enumerate(counts) for _ in range(count)], len(counts))
    labels = torch.arange(100) % len(counts)
    assert align_classes(labels, logits, strata=8).is_aligned is aligned


def test_more_classes_than_strata_are_joined_by_how_often_they_are_confused() -> None:
    # five classes for three strata; 1 is confused with 3, and 0 with 4
    pairs = {0: 4, 4: 0, 1: 3, 3: 1, 2: 2}
    guesses = [c for c in range(5) for _ in range(8)]
    logits = logits_of(guesses, 5) + 0.9 * logits_of([pairs[c] for c in guesses], 5)
    labels = torch.arange(50) % 5
    aligned = align_classes(labels, logits, strata=3)
    groups = [aligned.source["groups"][:5].tolist(), aligned.target["groups"][::8].tolist()]
    assert groups[0] == groups[1]
    joint = groups[0]
    assert joint[0] == joint[4] != joint[1] == joint[3] != joint[2] != joint[0]
    shares = aligned.source["shares"]
    assert shares.tolist() == pytest.approx(aligned.target["shares"].tolist())
    assert [float(shares[joint[c]]) for c in (0, 1, 2)] == pytest.approx([0.4, 0.4, 0.2])
    sampler = StratifiedBatchSampler(50, 3, kernel="rbf")
    sampler.refresh(cloud(50), **aligned.source)
    for batch in sampler:
        assert sorted(joint[int(labels[i])] for i in batch) == sorted(set(joint))


@pytest.mark.parametrize("options", [{"confidence": 0.99}, {"min_size": 4}], ids=["all unsure", "too few"])
def test_where_no_aligned_batch_can_be_made_there_are_no_groups(options: dict[str, Any]) -> None:
    aligned = align_classes(torch.arange(20) % 2, logits_of([0, 1] * 4, 2, sureness=2.0), strata=8, **options)
    assert not aligned.is_aligned
    for count, given in zip((20, 8), aligned, strict=True):
        assert given["groups"].tolist() == [0] * count
        assert "shares" not in given


def test_small_classes_are_left_out_where_strata_have_a_least_size() -> None:
    labels = torch.tensor([0] * 10 + [1] * 10 + [2])
    aligned = align_classes(labels, logits_of([0] * 9 + [1] * 9 + [2] * 2, 3), strata=4, min_size=2)
    for given in aligned:
        assert given["shares"].tolist() == pytest.approx([0.5, 0.5, 0.0])
    sampler = OrderedBatchSampler(21, 4, kernel="rbf", min_size=2)
    sampler.refresh(cloud(21), **aligned.source)
    assert 20 not in {i for batch in sampler for i in batch}


@pytest.mark.parametrize(
    ("given", "field", "named"),
    [
        ({"source_labels": torch.tensor([0, 3])}, None, ("source_labels", "0..3", "target_logits", "2 columns")),
        ({"confidence": 1.5}, "confidence", ("at most 1", 1.5)),
        ({"floor": -0.1}, "floor", ("at least 0", -0.1)),
        ({"strata": 0}, "strata", (1, 0)),
    ],
)
def test_input_that_cannot_be_used(given: dict[str, Any], field: str | None, named: tuple[Any, ...]) -> None:
    usual = {"source_labels": torch.tensor([0, 1]), "target_logits": torch.eye(2), "strata": 2}
    with refused(*named, field=field):
        align_classes(**{**usual, **given})
