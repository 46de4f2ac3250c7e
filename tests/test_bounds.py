"""The lower bound against all partitions of a few points and naive sums."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vardass.bounds as bounds
from conftest import refused
from vardass.bounds import nearest_neighbour_bound as bound
from vardass.kernels import CoralKernel, Kernel, LinearKernel, RBFMixture, as_kernel

KERNELS = ["mmd", "rbf", "coral", "linear", "energy"]
SLACK = 1 + 1e-9  # rounding of the reference


def points(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distances(x: Tensor, kernel: str | Kernel) -> Tensor:
    fitted = as_kernel(kernel).fit(x)
    matrix = fitted.matrix(x)
    return (fitted.diag(x)[:, None] + fitted.diag(x) - 2 * matrix).clamp_min(0).fill_diagonal_(0)


def objective(d: Tensor, labels: Tensor) -> Tensor:
    """J of one partition (n,) or of many (p, n)."""
    same = labels[..., :, None] == labels[..., None, :]
    return (d * same).sum((-2, -1)) / 2


@cache
def partitions(n: int, k: int) -> Tensor:
    """All partitions of n points into exactly k strata, as labels in order of first appearance: (p, n)."""
    grown = [[0]]
    for _ in range(n - 1):
        grown = [[*p, h] for p in grown for h in range(min(max(p) + 2, k))]
    return torch.tensor([p for p in grown if max(p) == k - 1])


def optimum(d: Tensor, k: int, low: int = 1, high: int | None = None) -> float:
    labels = partitions(len(d), k)
    sizes = torch.nn.functional.one_hot(labels, k).sum(1)
    fits = (sizes >= low).all(1) & (sizes <= (high or len(d))).all(1)
    return float(objective(d, labels[fits]).min())


def scaled(bound: bounds.LowerBound, n: int) -> float:
    """The bound on J = n² Var."""
    return bound.variance * n**2


def nearest(x: Tensor, kernel: str | Kernel, kept: int, rows: Tensor | None = None) -> list[Tensor]:
    """Sorted distances of ``rows``, by default all, to their ``kept`` nearest others, in blocks."""
    numbers = torch.arange(len(x)) if rows is None else rows
    return list(bounds._nearest(bounds._view(x, kernel), numbers, kept))


def test_partitions_are_all_counted() -> None:
    assert [len(partitions(7, k)) for k in range(1, 8)] == [1, 63, 301, 350, 140, 21, 1]  # Stirling numbers


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_partition_goes_below(kernel: str) -> None:
    for n, d, seed in [(6, 1, 0), (7, 2, 1), (8, 3, 2)]:
        x = points(n, d, seed)
        for k in range(1, n + 1):
            result = bound(x, k, kernel=kernel)
            assert 0 <= scaled(result, n) <= optimum(distances(x, kernel), k) * SLACK
            assert result.stderr == 0


def test_fewer_strata_do_not_go_below_either() -> None:
    x = points(7, 2, 3)
    d = distances(x, "mmd")
    for k in range(2, 6):
        assert scaled(bound(x, k), 7) <= min(optimum(d, j) for j in range(1, k + 1)) * SLACK


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_stratum_is_exact_and_n_strata_give_zero(kernel: str) -> None:
    x = points(40, 3, 4)
    total = float(distances(x, kernel).sum()) / 2
    assert scaled(bound(x, 1, kernel=kernel), 40) == pytest.approx(total, rel=1e-10)
    assert bound(x, 40, kernel=kernel).variance == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_random_partitions_of_sixty_points(kernel: str) -> None:
    x = points(60, 4, 5)
    d = distances(x, kernel)
    generator = torch.Generator().manual_seed(6)
    for k in (2, 7, 25):
        labels = torch.stack([torch.randperm(60, generator=generator) % k for _ in range(50)])
        centres = x[torch.randperm(60, generator=generator)[:k]]
        nearest = torch.cdist(x, centres).argmin(1)
        best = min(float(objective(d, labels).min()), float(objective(d, nearest)))
        assert 0.1 * best <= scaled(bound(x, k, kernel=kernel), 60) <= best * SLACK


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), theta=st.floats(0, 100), k=st.integers(1, 6), kernel=st.sampled_from(KERNELS))
def test_every_multiplier_gives_a_valid_bound(seed: int, theta: float, k: int, kernel: str) -> None:
    x = points(6, 2, seed)
    minima = bounds._row_minima(nearest(x, kernel, 5), theta, 1, 6)
    assert float(minima.sum()) - theta * k <= optimum(distances(x, kernel), k) * SLACK + 1e-12


@pytest.mark.parametrize(("n", "k"), [(12, 4), (13, 4), (14, 4), (15, 4), (11, 7)])
def test_nearest_neighbour_bound_is_tight_for_equidistant_points(n: int, k: int) -> None:
    x = torch.eye(n, dtype=torch.float64)  # all d_ij = 2: sizes as equal as can be are best
    small, extra = divmod(n, k)
    best = (k - extra) * small * (small - 1) + extra * (small + 1) * small
    assert scaled(bound(x, k, kernel="linear"), n) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("low", "high"), [(1, None), (2, None), (1, 3), (2, 3), (2, 4)])
def test_size_limits_are_honoured(low: int, high: int | None) -> None:
    raised = 0
    for seed in range(6):
        x = points(8, 2, 20 + seed)
        x[0] += 5  # best left alone, or with few others
        d = distances(x, "linear")
        limited = bound(x, 3, kernel="linear", min_size=low, max_size=high)
        free = bound(x, 3, kernel="linear")
        assert scaled(limited, 8) <= optimum(d, 3, low, high) * SLACK
        assert limited.variance >= free.variance * (1 - 1e-9)
        raised += limited.variance > free.variance * 1.001
    assert raised or (low, high) == (1, None)


def naive_minimum(row: Tensor, own: int, theta: float, low: int, high: int) -> float:
    others = sorted(float(v) for j, v in enumerate(row) if j != own)
    return min(sum(others[: m - 1]) / 2 + theta / m for m in range(low, high + 1))


@pytest.mark.parametrize("kernel", KERNELS)
def test_row_minima_match_a_naive_loop(kernel: str) -> None:
    x = points(25, 3, 11)
    d = distances(x, kernel)
    rows = torch.tensor([3, 24, 0, 11])
    blocks = nearest(x, kernel, 24, rows)
    for theta, low, high in [(0.0, 1, 25), (0.7, 1, 25), (30.0, 2, 9), (1e4, 3, 25)]:
        expected = [naive_minimum(d[i], i, theta, low, high) for i in rows.tolist()]
        found = bounds._row_minima(blocks, theta, low, high)
        assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kernel", ["mmd", "linear", "coral"])
def test_the_multiplier_is_the_best(kernel: str) -> None:
    x, n = points(150, 4, 12), 150
    for k in (3, 12, 60):
        blocks, high = nearest(x, kernel, n - k), n - k + 1
        best = bounds._best_theta(blocks, n, k, 1, high)

        def value(theta: float) -> float:
            return float(bounds._row_minima(blocks, theta, 1, high).sum()) - theta * k  # noqa: B023

        scan = [value(best * factor) for factor in np.geomspace(0.2, 5, 15)]
        assert value(best) >= max(scan) * (1 - 1e-5)
        assert min(scan) < 0.9 * value(best)
        assert scaled(bound(x, k, kernel=kernel), n) == pytest.approx(value(best), rel=1e-9)


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_cutting_off_distances_never_raises_a_minimum(kernel: str) -> None:
    x = points(120, 2, 13)
    x[:60] *= 0.01  # a dense half, where large strata are cheap and the cut is felt
    whole = nearest(x, kernel, 119)
    felt = 0
    for theta in (0.0, 0.1, 3.0, 100.0, 1e5):
        exact = bounds._row_minima(whole, theta, 1, 120)
        for kept in (1, 5, 30, 80):
            cut = bounds._row_minima(nearest(x, kernel, kept), theta, 1, 120)
            assert bool((cut <= exact * SLACK).all())
            # where the best size is among those kept nothing is lost
            sums = bounds._sums(whole[0]) / 2 + theta / torch.arange(1, 121)
            inside = sums.argmin(1) + 1 <= kept
            assert torch.allclose(cut[inside], exact[inside], rtol=1e-9)
            felt += int((cut < exact * 0.999).sum())
    assert felt > 0


def test_cut_off_distances_with_duplicates_are_finite() -> None:
    blocks = nearest(torch.zeros(50, 2), "rbf", 4)
    for theta in (0.0, 1.0):
        found = bounds._row_minima(blocks, theta, 1, 50)
        assert found.tolist() == pytest.approx([theta / 50] * 50)


@pytest.fixture(scope="module")
def cloud() -> Tensor:
    centres = points(8, 6, 14) * 2
    return centres[torch.arange(1500) % 8] + points(1500, 6, 15)


def test_sampled_rows_estimate_the_bound_without_bias(cloud: Tensor) -> None:
    kernel, n, k = RBFMixture(scale=10.0), 1500, 30
    blocks = nearest(cloud, kernel, n - k)
    theta = bounds._best_theta(blocks, n, k, 1, n - k + 1)
    minima = bounds._row_minima(blocks, theta, 1, n - k + 1)
    exact = bound(cloud, k, kernel=kernel)
    assert scaled(exact, n) == pytest.approx(float(minima.sum()) - theta * k, rel=1e-9)
    errors = []
    for seed in range(8):
        result = bound(cloud, k, kernel=kernel, rows=100, seed=seed)
        assert 0 < result.stderr < 0.05 * result.variance
        errors.append((result.variance - exact.variance) / result.stderr)
    # a θ that fits 100 rows costs the average a little, so the bound may be low but not high
    assert max(errors) < 4
    assert min(errors) > -4.5
    assert abs(np.mean(errors)) < 4 / 8**0.5
    assert np.std(errors) > 0.4  # the standard error is not inflated


def test_standard_error_matches_the_spread_at_a_fixed_multiplier(
    cloud: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, n, k = RBFMixture(scale=10.0), 1500, 30
    blocks = nearest(cloud, kernel, n - k)
    theta = bounds._best_theta(blocks, n, k, 1, n - k + 1)
    minima = bounds._row_minima(blocks, theta, 1, n - k + 1)
    exact = (float(minima.sum()) - theta * k) / n**2
    monkeypatch.setattr(bounds, "_best_theta", lambda *_: theta)
    results = [bound(cloud, k, kernel=kernel, rows=40, seed=s) for s in range(25)]
    scores = np.array([(r.variance - exact) / r.stderr for r in results])
    assert np.abs(scores).max() < 4
    assert abs(scores.mean()) < 4 / 25**0.5
    assert 0.6 < scores.std() < 1.5


def test_sampling_follows_the_seed(cloud: Tensor) -> None:
    first, again, other = (bound(cloud, 20, rows=20, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    generator = torch.Generator().manual_seed(1)
    assert bound(cloud, 20, rows=20, seed=generator) == first


def test_large_inputs_are_sampled_and_small_ones_are_not() -> None:
    x = points(2060, 2, 16).float()
    sampled = bound(x, 50, kernel="rbf")
    whole = bound(x, 50, kernel="rbf", rows=5000)
    assert sampled.stderr > 0
    assert whole.stderr == 0
    assert abs(sampled.variance - whole.variance) < 4 * sampled.stderr


def test_blocks_of_rows_and_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = points(90, 3, 17)
    whole = {kernel: bound(x, 9, kernel=kernel).variance for kernel in KERNELS}
    monkeypatch.setattr(bounds, "_BLOCK_BYTES", 20_000)
    monkeypatch.setattr(bounds, "_TILE_BYTES", 3_000)
    for kernel, variance in whole.items():
        assert bound(x, 9, kernel=kernel).variance == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_samples_give_zero(kernel: str) -> None:
    for k in (1, 3, 20):
        assert bound(torch.full((20, 3), 2.5), k, kernel=kernel).variance == pytest.approx(0, abs=1e-12)
    three = torch.eye(3).repeat(5, 1)  # three distinct samples: three strata suffice
    assert bound(three, 3, kernel=kernel).variance <= 1e-6
    assert bound(three, 2, kernel=kernel).variance > 1e-3


def test_a_common_offset_in_single_precision_changes_little() -> None:
    x = points(60, 4, 18).float()
    plain = bound(x, 6, kernel="linear").variance
    assert bound(x + 100, 6, kernel="linear").variance == pytest.approx(plain, rel=1e-4)


def test_distances_are_never_negative() -> None:
    x = 1e5 + 1e-7 * points(50, 5, 24)  # differences below the rounding of the kernel
    plain = LinearKernel().matrix(x)
    assert float((plain.diagonal()[:, None] + plain.diagonal() - 2 * plain).min()) < 0
    assert float(nearest(x, "linear", 49)[0].min()) >= 0


def test_no_graph_is_built() -> None:
    enabled = []

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        enabled.append(torch.is_grad_enabled())
        return a @ b.T

    bound(points(10, 2, 25), 3, kernel=kernel)
    assert enabled
    assert not any(enabled)


def test_inputs_of_every_kind_agree() -> None:
    x = points(30, 3, 19)
    expected = bound(x, 5).variance
    assert bound(x.numpy(), 5).variance == expected
    assert bound(x.float(), 5).variance == pytest.approx(expected, rel=1e-5)
    assert bound(x.clone().requires_grad_(), 5).variance == expected
    weight = torch.ones(3, 3, requires_grad=True)  # a user's function may hold single precision and gradients
    user = bound(x.float(), 5, kernel=lambda a, b: (a @ weight) @ (b @ weight).T)
    assert user.variance == pytest.approx(bound(x @ weight.detach().double(), 5, kernel="linear").variance, rel=1e-4)


def test_a_fitted_kernel_is_used_as_it_is() -> None:
    x = points(20, 2, 21)
    shifted = CoralKernel().fit(x + 3)
    assert bound(x, 3, kernel=shifted).variance != pytest.approx(bound(x, 3, kernel="coral").variance, rel=0.01)
    assert bound(x, 3, kernel=CoralKernel().fit(x)) == bound(x, 3, kernel="coral")
    assert bound(x, 3, kernel=RBFMixture(scale="median")).variance > 0


def test_order_of_samples_does_not_matter() -> None:
    x = points(30, 3, 22)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert bound(x[order], 4).variance == pytest.approx(bound(x, 4).variance, rel=1e-6)


def test_a_single_sample() -> None:
    assert bound(torch.ones(1, 2), 1).variance == 0


def test_bad_k_and_features() -> None:
    x = points(5, 2, 0)
    with refused("n=5", "6", field="k"):
        bound(x, 6)
    with refused("n=5", "0", field="k"):
        bound(x, 0)
    with refused("'nope'", "coral", field="kernel"):
        bound(x, 2, kernel="nope")
    with refused("NaN", "4 of 4", field="features"):
        bound(torch.full((4, 2), torch.nan), 2)


def test_bad_options() -> None:
    x = points(10, 2, 0)
    with refused("min_size", 4, 3, "n=10", "k=3", field="min_size"):
        bound(x, 3, min_size=4)
    with refused("max_size", 3, 4, "n=10", "k=3", field="max_size"):
        bound(x, 3, max_size=3)
    with refused(1, 2, field="rows"):
        bound(x, 3, rows=1)


def test_many_columns_cost_no_more_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little memory there is for a tile, the kernel sees many columns at a time, and all pairs once."""
    calls = []

    class Counting(LinearKernel):
        def matrix(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            calls.append((len(x), len(x if y is None else y)))
            return super().matrix(x, y)

    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    plain = bound(x, 8, kernel=Counting())
    assert calls == [(60, 60)]
    calls.clear()
    monkeypatch.setattr(bounds, "_TILE_BYTES", 1)  # as a million columns of features would leave it
    assert bound(x, 8, kernel=Counting()).variance == pytest.approx(plain.variance)
    assert calls == [(60, 32), (60, 28)]
