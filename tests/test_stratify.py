"""The front `stratify`: exact variance, invariances, limits, starts, and clear errors."""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import refused
from vardass.errors import VardassWarning
from vardass.kernels import Kernel, LinearKernel, RBFMixture, as_kernel
from vardass.solvers import SOLVERS, stratify
from vardass.solvers.labels import bisection_labels
from vardass.strata import Strata
from vardass.variance import stratified_variance, uniform_variance
from vardass.view import LowRankView

front = importlib.import_module("vardass.solvers.stratification")
view = importlib.import_module("vardass.view")

QUICK: dict[str, dict[str, Any]] = {solver: {} for solver in SOLVERS}
QUICK["dynamic-kmeans"] = {"trials": 5, "max_iter": 5}
each_solver = pytest.mark.parametrize("solver", QUICK)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cloud(n: int, d: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Skewed, so that strata of equal size are not the natural ones."""
    return torch.randn(n, d, generator=gen(seed), dtype=dtype).exp()


def blobs(n: int, d: int, seed: int, groups: int = 6, spread: float = 3.0) -> Tensor:
    """Groups of unequal size in random order."""
    centres = spread * torch.randn(groups, d, generator=gen(seed))
    shares = 0.6 ** torch.arange(groups).double()
    group = torch.multinomial(shares, n, replacement=True, generator=gen(seed))
    return centres[group] + torch.randn(n, d, generator=gen(seed + 1))


def same_partition(a: Tensor, b: Tensor) -> bool:
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    return len(pairs) == len(set(a.tolist())) == len(set(b.tolist()))


# --- the variance that is reported ------------------------------------------------------------------------


def variance_by_enumeration(x: Tensor, labels: Tensor, kernel: Kernel) -> float:
    """E|μ̂ - μ|² over every possible batch of one draw from each stratum."""
    n = len(x)
    matrix = kernel.fit(x).matrix(x)
    strata = [(labels == h).nonzero().flatten().tolist() for h in labels.unique()]
    total = 0.0
    for batch in itertools.product(*strata):
        weights = torch.full((n,), -1.0 / n, dtype=x.dtype)
        for i, stratum in zip(batch, strata, strict=True):
            weights[i] += len(stratum) / n
        total += float(weights @ matrix @ weights)
    return total / math.prod(len(stratum) for stratum in strata)


@pytest.mark.parametrize(
    ("solver", "kernel"),
    [(solver, kernel) for solver in QUICK for kernel in ("mmd", "coral")]
    + [("min-sum", kernel) for kernel in ("linear", "rbf")],
)
def test_variance_equals_the_enumeration_of_all_batches(solver: str, kernel: str) -> None:
    x = cloud(9, 2)
    strata = stratify(x, 4, kernel=kernel, solver=solver, **QUICK[solver])
    expected = variance_by_enumeration(x, strata.labels, as_kernel(kernel))
    assert strata.variance == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert strata.variance == pytest.approx(stratified_variance(x, strata.labels, kernel=kernel), rel=1e-9, abs=1e-12)
    assert strata.uniform_variance == pytest.approx(uniform_variance(x, 4, kernel=kernel), rel=1e-9)
    assert (strata.variance_stderr, strata.info["path"]) == (0.0, "features" if solver == "kmeans" else "exact")


@each_solver
@pytest.mark.parametrize("rank", [0, 4])
def test_one_stratum_is_one_uniform_draw(solver: str, rank: int) -> None:
    x = cloud(30)
    strata = stratify(x, 1, solver=solver, rank=rank, **QUICK[solver])
    assert strata.labels.tolist() == [0] * 30
    one_draw = uniform_variance(x, 1, kernel="mmd")
    assert strata.variance == pytest.approx(one_draw, rel=1e-9)
    assert strata.uniform_variance == pytest.approx(one_draw, rel=1e-9 if rank == 0 else 0.02)


@each_solver
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 0), (torch.float64, 4)])
def test_a_stratum_for_each_sample_has_no_variance(solver: str, dtype: torch.dtype, rank: int) -> None:
    strata = stratify(cloud(20, dtype=dtype), 20, solver=solver, rank=rank, **QUICK[solver])
    assert sorted(strata.labels.tolist()) == list(range(20))
    assert strata.variance == pytest.approx(0.0, abs=1e-7)
    assert strata.uniform_variance > 0.01
    assert strata.info["n_iter"] == 0  # nothing is looked for


def test_smallest_problems() -> None:
    one = stratify(torch.tensor([[3.0]]), 1)
    assert (one.n, one.k, one.variance, one.uniform_variance, one.reduction) == (1, 1, 0.0, 0.0, 1.0)
    two = stratify(torch.tensor([[3.0], [4.0]]), 2)
    assert sorted(two.labels.tolist()) == [0, 1]
    assert two.variance == 0.0


def test_what_is_returned() -> None:
    strata = stratify(cloud(100), 8, kernel="coral")
    assert isinstance(strata, Strata)
    assert (strata.n, strata.k, strata.solver) == (100, 8, "min-sum")
    assert strata.kernel == "CoralKernel()"
    assert strata.bound is None
    assert strata.reduction > 1.0
    assert strata.info["converged"] is True
    assert strata.info["n_iter"] >= 1
    seconds = [value for key, value in strata.info.items() if key.startswith("seconds_")]
    assert len(seconds) == 4
    assert min(seconds) >= 0.0


# --- invariances ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 32])
def test_order_of_rows_does_not_matter_where_groups_are_clear(rank: int) -> None:
    x = blobs(200, 4, 0, groups=5, spread=40.0)
    kernel = RBFMixture(gammas=(1e-3, 1e-2))
    strata = stratify(x, 5, kernel=kernel, rank=rank, restarts=3)
    for seed in range(3):
        order = torch.randperm(200, generator=gen(seed))
        other = stratify(x[order], 5, kernel=kernel, rank=rank, restarts=3)
        assert same_partition(other.labels, strata.labels[order])
        assert other.variance == pytest.approx(strata.variance, rel=1e-4)


def test_order_of_rows_hardly_matters_elsewhere() -> None:
    x = cloud(300, 6)
    found = [stratify(x[torch.randperm(300, generator=gen(s))], 16).variance for s in range(5)]
    assert max(found) <= 1.02 * min(found)


@pytest.mark.parametrize("kernel", ["mmd", "rbf", "coral", "linear", "energy"])
def test_translation(kernel: str) -> None:
    x = (cloud(120, 4) * 1024).round() / 1024
    strata = stratify(x, 10, kernel=kernel)
    moved = stratify(x + 64.0, 10, kernel=kernel)
    assert moved.variance == pytest.approx(strata.variance, rel=0.02)
    assert moved.uniform_variance == pytest.approx(strata.uniform_variance, rel=1e-9)
    assert moved.variance == pytest.approx(stratified_variance(x, moved.labels, kernel=kernel), rel=1e-9)


@pytest.mark.parametrize("rank", [0, 16])
def test_float32_far_from_the_origin(rank: int) -> None:
    x = (cloud(200, 8).clamp_max(6.0) * 1024).round() / 1024
    far = stratify((x + 1e3).float(), 10, rank=rank)
    assert far.variance == pytest.approx(stratified_variance(x, far.labels, kernel="mmd"), rel=1e-4)
    assert far.variance <= 1.02 * stratify(x, 10, rank=rank).variance


@pytest.mark.parametrize("kernel", ["coral", "linear"])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scale_of_a_homogeneous_kernel(kernel: str, scale: float) -> None:
    x = cloud(200, 8, dtype=torch.float32)
    power = 4 if kernel == "coral" else 2
    strata, scaled = stratify(x, 10, kernel=kernel), stratify(x * scale, 10, kernel=kernel)
    assert scaled.variance == pytest.approx(strata.variance * scale**power, rel=0.02)


@each_solver
def test_duplicates(solver: str) -> None:
    distinct = cloud(10)
    x = distinct[torch.arange(50) % 10]
    strata = stratify(x, 10, kernel="linear", solver=solver, restarts=8, **QUICK[solver])
    assert int(strata.sizes.min()) >= 1
    assert strata.variance <= 0.02 * strata.uniform_variance
    crowded = stratify(x, 25, solver=solver, **QUICK[solver])
    assert int(crowded.sizes.min()) >= 1
    assert crowded.variance <= crowded.uniform_variance


def test_duplicates_in_their_own_strata_have_no_variance() -> None:
    x = cloud(10)[torch.arange(50) % 10]
    for kernel in ("mmd", "linear", "coral"):
        strata = stratify(x, 10, kernel=kernel, restarts=5)
        assert same_partition(strata.labels, torch.arange(50) % 10)
        assert strata.variance == pytest.approx(0.0, abs=1e-12)


@each_solver
@pytest.mark.parametrize(("kernel", "rank"), [("mmd", 0), ("coral", 8), ("linear", 0)])
def test_constant_features(solver: str, kernel: str, rank: int) -> None:
    """One stratum of all but a few would be as good in variance, and useless once the features change."""
    with pytest.warns(VardassWarning, match=r"all 22 samples are alike to .*; look for collapsed features"):
        strata = stratify(torch.full((22, 3), 0.3), 4, kernel=kernel, solver=solver, rank=rank, **QUICK[solver])
    assert sorted(strata.sizes.tolist()) == [5, 5, 6, 6]
    assert strata.variance == pytest.approx(0.0, abs=1e-6)
    assert strata.uniform_variance == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("rank", [0, 32])
def test_features_that_differ_by_no_more_than_rounding(rank: int) -> None:
    noise = torch.randn(200, 8, generator=gen())
    with pytest.warns(VardassWarning, match=r"differ from their mean by up to .*e-05 in features of up to 1;"):
        strata = stratify(torch.ones(200, 8) + 1e-5 * noise, 8, rank=rank)
    assert strata.sizes.tolist() == [25] * 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, kernel in (
            (torch.ones(200, 8) + 1e-2 * noise, "mmd"),
            (torch.ones(200, 8) + 1e-5 * noise, "linear"),  # centred, so that these differences are seen
            (torch.ones(200, 8).double() + 1e-5 * noise, "mmd"),
            (torch.cat([torch.ones(199, 8), torch.zeros(1, 8)]), "mmd"),  # one that differs
        ):
            assert stratify(x, 8, kernel=kernel, rank=rank).reduction > 1.2
        stratify(torch.ones(5, 2), 5)
        stratify(torch.ones(5, 2), 1)


def test_collapsed_features_keep_a_warm_start() -> None:
    good = stratify(cloud(60), 6)
    with pytest.warns(VardassWarning, match="alike"):
        assert torch.equal(stratify(torch.ones(60, 3), 6, warm_start=good).labels, good.labels)


@each_solver
def test_one_dimension(solver: str) -> None:
    x = cloud(60, 1)
    strata = stratify(x[:, 0], 6, kernel="linear", solver=solver, **QUICK[solver])
    assert torch.equal(strata.labels, stratify(x, 6, kernel="linear", solver=solver, **QUICK[solver]).labels)
    assert strata.reduction > 4.0


def test_one_dimension_by_min_sum_is_cut_into_intervals() -> None:
    x = cloud(80, 1)
    labels = stratify(x, 7, kernel="linear").labels[x[:, 0].argsort()]
    assert int((labels[1:] != labels[:-1]).sum()) == 6


@pytest.mark.parametrize("kernel", ["mmd", "coral", "linear", "energy"])
@pytest.mark.parametrize("rank", [0, 8])
def test_input_is_left_alone(kernel: str, rank: int) -> None:
    x = cloud(60, 30)
    before = x.clone()
    stratify(x, 6, kernel=kernel, rank=rank, bound=True)
    assert torch.equal(x, before)


def test_same_seed_same_strata() -> None:
    x = cloud(300, 5)
    state = torch.random.get_rng_state()
    for options in ({}, {"rank": 16}, {"init": "kmeans++"}, {"solver": "dynamic-kmeans", "trials": 5}):
        runs = [stratify(x, 12, seed=seed, **options) for seed in (5, 5, gen(5), 6)]  # type: ignore[arg-type]
        assert torch.equal(runs[0].labels, runs[1].labels)
        assert torch.equal(runs[0].labels, runs[2].labels)
        assert not torch.equal(runs[0].labels, runs[3].labels)
        assert runs[0].uniform_variance == runs[1].uniform_variance
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is not touched


# --- solvers and limits -----------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> tuple[Tensor, int, dict[str, Any]]:
    n = draw(st.integers(1, 24))
    k = draw(st.integers(1, n))
    x = cloud(n, draw(st.sampled_from([1, 3])), draw(st.integers(0, 999)), torch.float32)
    copies = draw(st.sampled_from([1, 2, n]))
    options: dict[str, Any] = {
        "rank": draw(st.sampled_from([0, 0, 3])),
        "kernel": draw(st.sampled_from(["mmd", "coral"])),
    }
    if draw(st.booleans()):
        options["equal"] = True
    else:
        options["min_size"] = draw(st.integers(1, n // k))
        options["max_size"] = draw(st.none() | st.integers(max(options["min_size"], -(-n // k)), n + 3))
    return x[torch.arange(n) // copies], k, options


@each_solver
@pytest.mark.filterwarnings("ignore:all .* samples are alike")
@settings(max_examples=25, deadline=None)
@given(requests())
def test_limits_are_honoured_and_no_stratum_is_empty(solver: str, request_: tuple[Tensor, int, dict[str, Any]]) -> None:
    x, k, options = request_
    n = len(x)
    strata = stratify(x, k, solver=solver, **options, **QUICK[solver])
    low, high = int(strata.sizes.min()), int(strata.sizes.max())
    assert low >= 1
    if options.get("equal"):
        assert (low, high) == (n // k, -(-n // k))
    else:
        assert low >= options["min_size"]
        assert high <= (options["max_size"] or n)
    assert strata.variance >= 0.0


@each_solver
def test_limits_bind_and_cost_variance(solver: str) -> None:
    x = cloud(80)
    free = stratify(x, 8, kernel="linear", solver=solver, **QUICK[solver])
    assert free.sizes.max() > 12
    assert free.sizes.min() < 8
    low = stratify(x, 8, kernel="linear", solver=solver, min_size=8, **QUICK[solver])
    assert int(low.sizes.min()) >= 8
    high = stratify(x, 8, kernel="linear", solver=solver, max_size=12, **QUICK[solver])
    assert int(high.sizes.max()) <= 12
    equal = stratify(x, 8, kernel="linear", solver=solver, equal=True, **QUICK[solver])
    assert equal.sizes.tolist() == [10] * 8
    if solver == "min-sum":
        assert free.variance < low.variance < equal.variance
        assert free.variance < high.variance < equal.variance


def test_ordinary_kmeans_looks_at_the_features_and_reports_the_kernel() -> None:
    x = cloud(80)
    found = {kernel: stratify(x, 8, solver="kmeans", kernel=kernel) for kernel in ("linear", "mmd", "coral")}
    for kernel, strata in found.items():
        assert torch.equal(strata.labels, found["linear"].labels)
        assert strata.variance == pytest.approx(stratified_variance(x, strata.labels, kernel=kernel), rel=1e-9)
    assert torch.equal(stratify(x, 8, solver="kernel-kmeans", kernel="linear").labels, found["linear"].labels)
    assert not torch.equal(stratify(x, 8, solver="kernel-kmeans").labels, found["linear"].labels)


DATA = {
    "blobs mmd": (blobs(300, 16, 0), "mmd", 8),
    "blobs coral": (blobs(300, 16, 1), "coral", 32),
    "blobs rbf": (blobs(300, 8, 2), RBFMixture(gammas=(0.05,)), 16),
    "skewed mmd": (cloud(300, 16, 3, torch.float32), "mmd", 32),
    "skewed coral": (cloud(300, 16, 4, torch.float32), "coral", 8),
    "flat mmd": (blobs(300, 2, 5), "mmd", 32),
}


@pytest.mark.parametrize(("x", "kernel", "k"), DATA.values(), ids=DATA.keys())
def test_min_sum_is_no_worse_than_the_paper(x: Tensor, kernel: Any, k: int) -> None:
    ours = stratify(x, k, kernel=kernel)
    paper = stratify(x, k, kernel=kernel, solver="dynamic-kmeans")
    plain = stratify(x, k, kernel=kernel, solver="kmeans")
    assert ours.variance <= 1.005 * paper.variance
    assert ours.variance < ours.uniform_variance
    assert ours.variance < plain.variance


@pytest.mark.parametrize(
    ("solver", "options", "n_iter"),
    [
        ("min-sum", {"max_passes": 1, "tol": 0.0}, 1),
        ("min-sum", {"max_passes": 50, "tol": 10.0}, 1),
        ("dynamic-kmeans", {"max_iter": 2, "trials": 3, "parallel": 4, "patience": 5}, 2),
        ("kmeans", {"max_iter": 2, "tol": 0.0}, 2),
        ("kernel-kmeans", {"max_iter": 2, "tol": 0.0}, 2),
    ],
)
def test_options_reach_the_solver(solver: str, options: dict[str, Any], n_iter: int) -> None:
    assert stratify(cloud(100), 8, solver=solver, init="random", **options).info["n_iter"] == n_iter


def test_progress_is_called() -> None:
    for solver in SOLVERS:
        seen: list[tuple[float, str]] = []
        stratify(
            cloud(60),
            6,
            solver=solver,
            progress=lambda fraction, message, seen=seen: seen.append((fraction, message)),
            **QUICK[solver],
        )
        assert seen
        assert all(0.0 <= fraction <= 1.0 and message for fraction, message in seen)


# --- low rank ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["mmd", "coral"])
def test_sampled_variance_is_within_four_standard_errors(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "EXACT_LIMIT", 0)
    monkeypatch.setattr(view, "_PAIRS", 2000)
    x = blobs(400, 30, 0).double()
    true_uniform = uniform_variance(x, 12, kernel=kernel)
    for seed in range(6):
        strata = stratify(x, 12, kernel=kernel, rank=24, seed=seed)
        true = stratified_variance(x, strata.labels, kernel=kernel)
        assert 0.0 < strata.variance_stderr < 0.1 * true
        assert abs(strata.variance - true) <= 4 * strata.variance_stderr
        uniform_error = strata.info["uniform_stderr"]
        assert 0.0 < uniform_error < 0.1 * true_uniform
        assert abs(strata.uniform_variance - true_uniform) <= 4 * uniform_error


def test_sampled_variance_has_an_honest_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "EXACT_LIMIT", 0)
    monkeypatch.setattr(view, "_PAIRS", 500)
    x = blobs(200, 30, 0).double()
    labels = stratify(x, 8).labels
    true = stratified_variance(x, labels, kernel="mmd")
    scores = []
    for seed in range(40):
        strata = stratify(x, 8, rank=16, init=labels, max_passes=0, seed=seed)
        assert torch.equal(strata.labels, labels)
        scores.append((strata.variance - true) / strata.variance_stderr)
    assert abs(np.mean(scores)) < 4 / math.sqrt(40)
    assert 0.6 < np.std(scores) < 1.5


def test_low_rank_variance_is_exact_where_that_is_affordable() -> None:
    x = blobs(400, 30, 0)
    strata = stratify(x, 12, rank=24)
    assert strata.variance_stderr == 0.0
    assert strata.variance == pytest.approx(stratified_variance(x, strata.labels, kernel="mmd"), rel=1e-6)
    assert strata.info["path"] == "low-rank"
    assert strata.info["rank"] == 24
    assert strata.info["captured"] + strata.info["irreducible"] == pytest.approx(1.0)


@pytest.mark.parametrize("kernel", ["mmd", "coral"])
def test_low_rank_strata_are_nearly_as_good(kernel: str) -> None:
    x = blobs(500, 30, 1)
    exact = stratify(x, 16, kernel=kernel)
    assert stratify(x, 16, kernel=kernel, rank=96).variance <= 1.03 * exact.variance


def test_the_path_follows_the_size_unless_rank_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "EXACT_LIMIT", 50)
    monkeypatch.setattr(front, "BASELINE_EXACT_LIMIT", 60)

    def path(n: int, **options: Any) -> str:
        return str(stratify(cloud(n), 4, **options).info["path"])

    assert [path(50), path(51), path(51, rank=0), path(50, rank=8)] == ["exact", "low-rank", "exact", "low-rank"]
    for solver in ("dynamic-kmeans", "kernel-kmeans"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [path(60, solver=solver), path(61, solver=solver, rank=8)] == ["exact", "low-rank"]
        with pytest.warns(VardassWarning, match=rf"{solver}.* for 61 samples .*above 60.*not the published.*rank=0"):
            assert path(61, solver=solver) == "low-rank"


def test_the_papers_solver_is_exact_on_the_papers_largest_domain() -> None:
    largest = 20_276  # training samples of Spawrious' two sources together
    assert largest <= front.BASELINE_EXACT_LIMIT
    assert 4 * front.BASELINE_EXACT_LIMIT**2 == 4 * 2**30  # bytes, as documented


@each_solver
def test_every_solver_takes_the_low_rank_path(solver: str) -> None:
    x = blobs(150, 30, 0)
    strata = stratify(x, 6, solver=solver, rank=12, **QUICK[solver])
    assert strata.info["path"] == ("features" if solver == "kmeans" else "low-rank")
    assert strata.variance == pytest.approx(stratified_variance(x, strata.labels, kernel="mmd"), rel=1e-5)


# --- starts -----------------------------------------------------------------------------------------------


@each_solver
@pytest.mark.parametrize("init", ["auto", "bisection", "kmeans++", "random"])
def test_every_start(solver: str, init: str) -> None:
    x = cloud(60, 4)
    for rank in (0, 8):
        strata = stratify(x, 6, kernel="linear", solver=solver, init=init, rank=rank, **QUICK[solver])
        assert strata.variance < strata.uniform_variance


def test_starts_differ_and_labels_are_a_start() -> None:
    x = cloud(200, 5)
    starts = {init: stratify(x, 10, init=init, max_passes=0).labels for init in ("bisection", "kmeans++", "random")}
    assert len({tuple(labels.tolist()) for labels in starts.values()}) == 3
    auto = stratify(x, 10, max_passes=0)
    assert torch.equal(auto.labels, starts["bisection"])
    for labels in (starts["random"], starts["random"].numpy(), starts["random"].int(), starts["random"].tolist()):
        assert torch.equal(stratify(x, 10, init=labels, max_passes=0).labels, starts["random"])


def test_equal_strata_start_from_an_even_bisection() -> None:
    x = cloud(70, 5)
    phi = LowRankView.of(x, LinearKernel(), generator=gen()).features
    start = stratify(x, 9, kernel="linear", rank=5, equal=True, max_passes=0)
    assert torch.equal(start.labels, bisection_labels(phi, 9))


def test_a_start_outside_the_limits_is_repaired() -> None:
    x = cloud(40)
    for warm_start in (torch.zeros(40, dtype=torch.int64), torch.arange(40) // 39):
        strata = stratify(x, 5, warm_start=warm_start, min_size=4, max_size=12)
        assert int(strata.sizes.min()) >= 4
        assert int(strata.sizes.max()) <= 12


@each_solver
@pytest.mark.parametrize("rank", [0, 40])
def test_a_warm_start_is_never_made_worse(solver: str, rank: int) -> None:
    x = cloud(80, 4)
    good = stratify(x, 8, restarts=4)
    for drift in (0.0, 0.02, 0.5):
        moved = x + drift * torch.randn(80, 4, generator=gen(1), dtype=x.dtype)
        before = stratified_variance(moved, good.labels, kernel="mmd")
        for warm_start in (good, good.labels, good.labels.numpy()):
            after = stratify(moved, 8, solver=solver, warm_start=warm_start, rank=rank, **QUICK[solver])
            assert after.variance <= before * (1 + (1e-9 if rank == 0 else 0.01))


def test_a_warm_start_is_used() -> None:
    x = cloud(200, 5)
    good = stratify(x, 10)
    again = stratify(x, 10, warm_start=good)
    assert same_partition(again.labels, good.labels)
    start = stratify(x, 10, init="random", max_passes=0)
    assert torch.equal(stratify(x, 10, warm_start=start, max_passes=0).labels, start.labels)


@pytest.mark.parametrize("rank", [0, 24])
@pytest.mark.parametrize("equal", [False, True])
def test_restarts_help(rank: int, equal: bool) -> None:
    ratios = []
    for seed in range(6):
        x = cloud(80, 3, seed)
        once = stratify(x, 8, rank=rank, equal=equal, seed=seed)
        best = stratify(x, 8, rank=rank, equal=equal, seed=seed, restarts=6)
        ratios.append(best.variance / once.variance)
    assert max(ratios) <= (1 + 1e-9 if rank == 0 else 1.01)
    assert np.mean(ratios) < 0.997


def test_restarts_begin_with_the_warm_start() -> None:
    x = cloud(80)
    best = stratify(x, 8, restarts=20)
    again = stratify(x, 8, warm_start=best, restarts=3, seed=7)
    assert again.variance <= best.variance * (1 + 1e-9)


def test_restarts_after_the_first_leave_the_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vardass.solvers.min_sum._SMALL", 0)  # an exchange would free the points
    x, trap = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    assert stratify(x, 2, kernel="linear", warm_start=trap).variance == 0.125  # no single move gets out of it
    assert stratify(x, 2, kernel="linear", warm_start=trap, restarts=3).variance == 0.0


@pytest.mark.parametrize(
    ("warm_start", "named"),
    [
        (torch.zeros(39, dtype=torch.int64), ("(39,)", "n=40")),
        (torch.zeros(40, 1, dtype=torch.int64), ("(40, 1)", "n=40")),
        (torch.zeros(40), ("whole numbers", "0..4")),
        (np.zeros(40), ("whole numbers", "0..4")),
        (torch.full((40,), 5), ("whole numbers", "0..4")),
        (torch.full((40,), -1), ("whole numbers", "0..4")),
        (stratify(cloud(40), 4), ("k=4", "k=5")),
        (stratify(cloud(41), 5), ("(41,)", "n=40")),
    ],
    ids=["n", "shape", "float", "numpy float", "too large", "negative", "strata of other k", "strata of other n"],
)
@pytest.mark.parametrize("name", ["warm_start", "init"])
def test_bad_starts_are_named(name: str, warm_start: Any, named: tuple[str, ...]) -> None:
    with refused(name, *named):
        stratify(cloud(40), 5, **{name: warm_start})


# --- bounds -----------------------------------------------------------------------------------------------


@each_solver
@pytest.mark.parametrize(
    ("limits", "kernel"),
    [({}, "mmd"), ({"min_size": 4}, "linear"), ({"max_size": 9}, "mmd"), ({"equal": True}, "linear")],
    ids=str,
)
def test_no_strata_are_below_the_bound(solver: str, limits: dict[str, Any], kernel: str) -> None:
    for seed in range(3):
        strata = stratify(cloud(50, 2, seed), 7, kernel=kernel, solver=solver, bound=True, **limits, **QUICK[solver])
        assert strata.bound is not None
        assert strata.bound.stderr == 0.0
        assert 0.0 < strata.bound.variance <= strata.variance * (1 + 1e-9)
        assert strata.gap is not None
        assert strata.gap >= -1e-9


def test_limits_raise_the_bound() -> None:
    x = cloud(60, 2)
    free = stratify(x, 6, kernel="linear", bound=True)
    equal = stratify(x, 6, kernel="linear", equal=True, bound=True)
    assert free.bound is not None
    assert equal.bound is not None
    assert equal.bound.variance > 1.2 * free.bound.variance


def test_given_kernel_features_take_the_place_of_computed_ones() -> None:
    x = cloud(2500, 6, dtype=torch.float32)
    kernel = RBFMixture()
    found = LowRankView.of(x, kernel, 20, generator=gen(5))
    strata = stratify(x, 16, kernel=kernel, kernel_features=found)
    assert strata.info["rank"] <= 20
    labels = stratify(x, 16, kernel=kernel).labels
    assert strata.variance == pytest.approx(stratified_variance(x, strata.labels, kernel=kernel), rel=0.01)
    assert strata.variance < 1.02 * stratified_variance(x, labels, kernel=kernel)
    # the full matrix and an own rank need none
    assert stratify(x[:100], 4, kernel_features=LowRankView(x[:100], x[:100, 0])).info["path"] == "exact"
    assert stratify(x, 4, rank=30, kernel_features=found).info["rank"] == 30
    with refused("kernel_features", 2500, 100):
        stratify(x[:100], 4, kernel_features=found)
