"""Strata within groups: none crosses a group, shares are in proportion, and the variance is that of the whole."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import refused
from vardass import view
from vardass.kernels import CoralKernel, RBFMixture, as_kernel
from vardass.solvers import grouped, stratify
from vardass.solvers.grouped import share_out, stratify_groups
from vardass.strata import Strata
from vardass.variance import stratified_variance, uniform_variance


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grouped_cloud(counts: list[int], d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Groups far apart, in random order, with labels that are neither 0-based nor consecutive."""
    labels = torch.repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=gen(seed))]
    x = torch.randn(len(labels), d, generator=gen(seed + 1), dtype=torch.float64) + 2.0 * labels[:, None]
    return x, 7 * labels - 3


KERNELS: dict[str, Any] = {
    "mmd": "mmd",
    "coral": "coral",
    "linear": "linear",
    "median": RBFMixture(gammas=(0.5, 2.0), scale="median"),
    "function": lambda x, y: torch.exp(-torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())


@each_kernel
@pytest.mark.parametrize("rank", [0, 24])
def test_no_stratum_crosses_a_group_and_the_variance_is_exact(kernel: Any, rank: int) -> None:
    x, groups = grouped_cloud([40, 21, 9])
    strata = stratify_groups(x, 14, groups, kernel=kernel, rank=rank)
    assert (strata.n, strata.k) == (70, 14)
    for h in range(14):
        assert len(groups[strata.members(h)].unique()) == 1
    for name, share in ((-3, 8), (4, 4), (11, 2)):
        assert len(strata.labels[groups == name].unique()) == share
    # under the kernel of all samples: CORAL's mean and a median scale are not each group's own
    fitted = as_kernel(kernel).fit(x)
    assert strata.variance == pytest.approx(stratified_variance(x, strata.labels, kernel=fitted), rel=1e-9)
    assert strata.uniform_variance == pytest.approx(uniform_variance(x, 14, kernel=fitted), rel=1e-9)
    assert strata.variance < strata.uniform_variance
    assert (strata.solver, strata.kernel) == ("min-sum", repr(fitted))
    assert strata.info["groups"] == 3
    assert strata.info["path"] == ("low-rank" if rank else "exact")


def test_strata_of_each_group_are_found_under_the_kernel_of_all_samples() -> None:
    # around the mean of all samples the far group is spread along one axis; around its own mean it is a ball
    x, groups = grouped_cloud([30, 30], d=2, seed=4)
    x = x + 8.0 * (groups > 0)[:, None]
    whole = CoralKernel().fit(x)
    strata = stratify_groups(x, 8, groups, kernel="coral")
    own = torch.empty_like(strata.labels)
    for g, name in enumerate((-3, 4)):
        members = groups == name
        own[members] = stratify(x[members], 4, kernel="coral").labels + 4 * g
    assert strata.variance < 0.9 * stratified_variance(x, own, kernel=whole)


def test_one_group_is_plain_stratification() -> None:
    x, _ = grouped_cloud([50])
    alone = stratify(x, 6, kernel="rbf")
    strata = stratify_groups(x, 6, torch.full((50,), 9), kernel="rbf")
    assert torch.equal(strata.labels, alone.labels)
    assert strata.variance == pytest.approx(alone.variance)
    assert strata.uniform_variance == pytest.approx(alone.uniform_variance)


def test_a_group_for_each_sample_leaves_no_variance() -> None:
    x, _ = grouped_cloud([12])
    strata = stratify_groups(x, 12, np.arange(12), kernel="rbf")
    assert sorted(strata.labels.tolist()) == list(range(12))
    assert strata.variance == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("options", [{"solver": "kmeans"}, {"solver": "dynamic-kmeans", "trials": 3}, {"equal": True}])
def test_options_reach_the_solver(options: dict[str, Any]) -> None:
    x, groups = grouped_cloud([40, 21, 9])
    strata = stratify_groups(x, 14, groups, kernel="rbf", **options)
    assert strata.solver == options.get("solver", "min-sum")
    assert strata.variance == pytest.approx(stratified_variance(x, strata.labels, kernel="rbf"), rel=1e-9)
    if "equal" in options:
        sizes = [strata.sizes[strata.labels[groups == name].unique()] for name in (-3, 4, 11)]
        assert all(int(size.max() - size.min()) <= 1 for size in sizes)
    with refused("'min-sum'", "'wrong'", "max_passes"):
        stratify_groups(x, 14, groups, wrong=1)


def test_the_same_seed_gives_the_same_strata_in_any_input() -> None:
    x, groups = grouped_cloud([30, 20])
    first = stratify_groups(x, 10, groups, kernel="rbf", solver="kmeans", seed=1)
    second = stratify_groups(x.numpy(), 10, groups.numpy(), kernel="rbf", solver="kmeans", seed=1)
    assert torch.equal(first.labels, second.labels)
    assert repr(Strata.from_dict(first.to_dict())) == repr(first)


# --- shares -------------------------------------------------------------------------------------------------


def shares_of(counts: list[int], k: int, **options: int) -> torch.Tensor:
    found = torch.tensor(counts)
    return share_out(found, k, found.double() / found.sum(), **options)


@given(counts=st.lists(st.integers(1, 200), min_size=1, max_size=12), data=st.data())
@settings(max_examples=200, deadline=None)
def test_shares_sum_to_k_and_give_each_group_one(counts: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(len(counts), sum(counts)))
    shares = shares_of(counts, k)
    assert int(shares.sum()) == k
    assert all(1 <= share <= count for share, count in zip(shares.tolist(), counts, strict=True))
    exact = [count * k / sum(counts) for count in counts]
    if min(exact) >= 1.0:  # nobody is lifted to one at the cost of others
        assert all(abs(share - ideal) < 1.0 for share, ideal in zip(shares.tolist(), exact, strict=True))
    # a larger group never has fewer
    by_size = sorted(zip(counts, shares.tolist(), strict=True))
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(by_size) if a[0] < b[0])


@pytest.mark.parametrize(
    ("counts", "k", "shares"),
    [
        ([50, 30, 20], 10, [5, 3, 2]),
        ([500, 1, 1], 8, [6, 1, 1]),  # small groups take from the large one
        ([1, 1, 1], 3, [1, 1, 1]),
        ([10], 7, [7]),
        ([2, 98], 98, [2, 96]),
    ],
)
def test_shares_of_some_groups(counts: list[int], k: int, shares: list[int]) -> None:
    assert shares_of(counts, k).tolist() == shares


def test_shares_leave_room_for_the_smallest_size() -> None:
    assert shares_of([7, 9], 6, min_size=2).tolist() == [3, 3]
    assert shares_of([3, 3, 20], 8, min_size=3).tolist() == [1, 1, 6]
    x, groups = grouped_cloud([3, 3, 20])
    strata = stratify_groups(x, 8, groups, kernel="rbf", min_size=3)
    assert int(strata.sizes.min()) == 3


# --- warm start ---------------------------------------------------------------------------------------------


def test_a_warm_start_is_used_and_never_made_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    x, groups = grouped_cloud([40, 21, 9])
    first = stratify_groups(x, 14, groups, kernel="rbf")
    moved = x + 0.2 * torch.randn(x.shape, generator=gen(9), dtype=x.dtype)
    starts: list[Any] = []

    def spied(*args: Any, **options: Any) -> Strata:
        starts.append(options["warm_start"])
        return stratify(*args, **options)

    monkeypatch.setattr(grouped, "stratify", spied)
    for warm in (first, first.labels, first.labels.numpy()):
        starts.clear()
        again = stratify_groups(moved, 14, groups, kernel="rbf", warm_start=warm, max_passes=1)
        for name, start in zip((-3, 4, 11), starts, strict=True):
            labels = first.labels[groups == name]
            assert torch.equal(start, labels - labels.min())
        before = stratified_variance(moved, first.labels, kernel="rbf")
        assert again.variance <= before * (1 + 1e-9)


def test_a_warm_start_that_crosses_groups_is_left_out() -> None:
    x, groups = grouped_cloud([30, 20])
    cold = stratify_groups(x, 10, groups, kernel="rbf")
    crossing = stratify(x, 10, kernel="rbf", equal=True).labels.flip(0)
    for warm in (crossing, stratify(x, 9, kernel="rbf")):
        strata = stratify_groups(x, 10, groups, kernel="rbf", warm_start=warm)
        assert all(len(groups[strata.members(h)].unique()) == 1 for h in range(10))
        assert strata.variance <= 1.1 * cold.variance


# --- many samples -------------------------------------------------------------------------------------------


def test_the_uniform_variance_of_many_samples_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    x, groups = grouped_cloud([400, 300])
    exact = uniform_variance(x, 10, kernel="rbf")
    monkeypatch.setattr(view, "EXACT_LIMIT", 0)
    strata = stratify_groups(x, 10, groups, kernel="rbf")
    error = strata.info["uniform_stderr"]
    assert 0.0 < error < 0.02 * exact
    assert abs(strata.uniform_variance - exact) < 4.0 * error


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"k": 2}, None, ("3 groups", "k=2", "batch_size")),
        ({"k": 71}, "k", ("between 1 and 70", 71)),
        ({"groups": torch.arange(5)}, "groups", ((70,), (5,))),
        ({"groups": torch.zeros(70)}, "groups", ("whole numbers", "torch.float32")),
        ({"min_size": 10}, None, ("9 samples", "min_size=10", "groups")),
        ({"min_size": 6}, None, ("3 groups", "10 strata", "min_size=6", "k=14", "batch_size")),
        ({"warm_start": torch.arange(5)}, None, ("warm_start", (5,), "n=70")),
        ({"warm_start": torch.full((70,), 77)}, None, ("warm_start", "0..13")),
        ({"bound": True}, None, ("bound", "groups", "stratify")),
        ({"kernel": lambda x, y: x[:, :1] - y[:, :1].T}, None, ("kernel", "symmetric", "(f + f.T) / 2")),
        ({"solver": "best"}, "solver", ("'best'", "min-sum")),
    ],
)
def test_bad_input(options: dict[str, Any], field: str | None, named: tuple[Any, ...]) -> None:
    x, groups = grouped_cloud([40, 21, 9])
    given_groups = options.pop("groups", groups)
    with refused(*named, field=field):
        stratify_groups(x, options.pop("k", 14), given_groups, **options)


@pytest.mark.parametrize("within_groups", [False, True])
def test_many_equal_strata_follow_the_features(within_groups: bool) -> None:
    """Beyond the samples whose points are exchanged no point can move, so a warm start must not be the end."""
    z = torch.randn(33_000, 4, generator=torch.Generator().manual_seed(0))
    turned = z @ torch.diag(torch.tensor([0.1, 3.0, 0.1, 3.0]))
    classes = torch.arange(33_000) % 2

    def strata(x: Tensor, before: Strata | None = None) -> Strata:
        if within_groups:
            return stratify_groups(x, 8, classes, equal=True, warm_start=before)
        return stratify(x, 8, equal=True, warm_start=before)

    first, fresh = strata(z), strata(turned)
    renewed = strata(turned, first)
    assert renewed.variance == pytest.approx(fresh.variance, rel=1e-3)
    assert float((renewed.labels == first.labels).double().mean()) < 0.9
    assert strata(turned, fresh).variance <= fresh.variance * (1 + 1e-6)
