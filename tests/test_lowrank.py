"""Low-rank kernel features with the exact diagonal, against the full kernel matrix."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from vardass.kernels import (
    CoralKernel,
    FunctionKernel,
    Kernel,
    LinearKernel,
    RBFMixture,
    fitted_kernel,
)
from vardass.lowrank import _fit, fit_feature_map
from vardass.solvers.labels import random_balanced_labels
from vardass.view import ExactView, LowRankView

module = importlib.import_module("vardass.lowrank")


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cloud(n: int, d: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=gen(seed), dtype=dtype)


def skewed(n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of very unequal length, as CORAL's kernel makes them more so."""
    return cloud(n, d, 0, dtype) * cloud(n, 1, 1, dtype).exp()


def zero(x: Tensor, y: Tensor) -> Tensor:
    return x.new_zeros(len(x), len(y))


QUADRATIC = FunctionKernel(lambda x, y: (1.0 + x @ y.T) ** 2)
WIDE = cloud(40, 30)  # too wide for CORAL's explicit features
NYSTROM = {
    "mmd": (RBFMixture(), cloud(40)),
    "rbf": (RBFMixture(gammas=(0.1,)), cloud(40)),
    "coral": (CoralKernel(), WIDE),
    "function": (QUADRATIC, cloud(40)),
}
each_nystrom = pytest.mark.parametrize(("kernel", "x"), NYSTROM.values(), ids=NYSTROM.keys())
each_rounds = pytest.mark.parametrize("rounds", [2, 1])


# --- exactness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "columns"), [(LinearKernel(), 5), (CoralKernel(), 15)], ids=["linear", "coral"])
def test_explicit_features_are_exact_and_have_no_residual(kernel: Kernel, columns: int) -> None:
    x = cloud(50, 5) + 3.0
    kernel = kernel.fit(x)
    feature_map = fit_feature_map(x, kernel, rank=64, generator=gen())
    assert feature_map.landmarks is None
    features, residual = feature_map(x)
    assert features.shape == (50, columns)
    assert not residual.any()
    torch.testing.assert_close(features @ features.T, kernel.matrix(x))
    low_rank = LowRankView.of(x, kernel, generator=gen())
    torch.testing.assert_close(low_rank.features.mean(0), torch.zeros(columns, dtype=x.dtype))
    spread = low_rank.features.var(0)
    assert bool((spread[1:] <= spread[:-1] * (1 + 1e-9)).all())  # columns by falling variance
    assert low_rank.captured == 1.0


@each_nystrom
@each_rounds
def test_all_points_as_landmarks_reproduce_the_kernel(kernel: Kernel, x: Tensor, rounds: int) -> None:
    kernel = kernel.fit(x)
    feature_map = _fit(x, kernel, 40, 40, rounds, gen()).feature_map
    features, residual = feature_map(x)
    matrix = kernel.matrix(x)
    scale = float(matrix.abs().max())
    assert features.shape[1] <= 40
    assert float((features @ features.T + residual.diag() - matrix).abs().max()) < 1e-10 * scale
    assert float(residual.max()) < 1e-10 * scale


@each_nystrom
@each_rounds
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_the_diagonal_is_exact_at_any_rank(kernel: Kernel, x: Tensor, rounds: int, rank: int) -> None:
    kernel = kernel.fit(x)
    feature_map = _fit(x, kernel, rank, None, rounds, gen()).feature_map
    features, residual = feature_map(x)
    assert features.shape == (40, rank)
    assert float(residual.min()) >= 0.0
    assert float(residual.max()) > 0.0
    torch.testing.assert_close(features.square().sum(1) + residual, kernel.diag(x))


@each_nystrom
def test_full_rank_objective_equals_the_exact_one(kernel: Kernel, x: Tensor) -> None:
    kernel = kernel.fit(x)
    low_rank = LowRankView.of(x, kernel, rank=40, generator=gen())
    full = ExactView(kernel.matrix(x))
    for k in (1, 3, 10, 40):
        labels = random_balanced_labels(40, k, k)
        scale = full.objective(torch.zeros_like(labels), 1)
        assert low_rank.objective(labels, k) == pytest.approx(full.objective(labels, k), abs=1e-9 * scale)


def test_the_residual_keeps_the_size_penalty_that_few_features_miss() -> None:
    x = cloud(200, 10)
    kernel = RBFMixture()
    full = ExactView(kernel.matrix(x))
    low_rank = LowRankView.of(x, kernel, rank=20, generator=gen())
    without = LowRankView(low_rank.features, torch.zeros_like(low_rank.residual))
    labels = random_balanced_labels(200, 5, 0)
    true = full.objective(labels, 5)
    assert low_rank.objective(labels, 5) == pytest.approx(true, rel=0.03)
    assert without.objective(labels, 5) < 0.7 * true


# --- how much is captured ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [RBFMixture(), CoralKernel()], ids=["mmd", "coral"])
def test_captured_is_the_share_of_the_variance_in_features_and_rank_helps(kernel: Kernel) -> None:
    x = cloud(300, 24)
    kernel = kernel.fit(x)
    found = []
    for rank in (1, 4, 16, 64, 256):
        low_rank = LowRankView.of(x, kernel, rank, landmarks=300, generator=gen())
        inside = float(low_rank.features.square().sum())
        whole = inside + float(low_rank.residual.sum())
        assert low_rank.captured == pytest.approx(inside / whole)
        found.append(low_rank.captured)
    assert found == sorted(found)
    assert found[-1] > 2 * found[1]
    assert 0.0 <= found[0] < found[-1] <= 1.0


def test_captured_at_full_rank_is_all_of_the_uniform_variance() -> None:
    x = cloud(60)
    low_rank = LowRankView.of(x, RBFMixture(), 60, generator=gen())
    assert low_rank.captured == pytest.approx(1.0, abs=1e-9)
    matrix = RBFMixture().matrix(x)
    scatter = float(matrix.diagonal().sum() - matrix.mean() * 60)
    assert float(low_rank.features.square().sum()) == pytest.approx(scatter)


def test_nothing_to_capture_counts_as_all() -> None:
    assert LowRankView(torch.zeros(3, 2), torch.zeros(3)).captured == 1.0


def test_random_pivots_beat_uniform_landmarks_on_a_skewed_kernel() -> None:
    x = skewed(600, 48)
    kernel = CoralKernel().fit(x)

    def held(rounds: int, seed: int) -> float:
        _, residual = _fit(x, kernel, 32, None, rounds, gen(seed)).feature_map(x)
        return 1.0 - float(residual.sum() / kernel.diag(x).sum())

    for rounds in (2, 1):
        assert min(held(rounds, seed) for seed in range(3)) > 0.9
    for seed in range(3):
        picks = torch.randperm(600, generator=gen(seed))[:64]
        columns = kernel.matrix(x, x[picks])
        inside = (columns @ torch.linalg.pinv(columns[picks], hermitian=True) * columns).sum()
        assert float(inside / kernel.diag(x).sum()) < 0.2


def test_pivots_are_distinct_and_end_with_the_rank_of_the_kernel() -> None:
    x = cloud(50)
    chosen = module._random_pivots(x, RBFMixture(), 20, gen(), rounds=2)
    assert len(set(chosen.tolist())) == 20
    # places of five points each that the kernel can hardly tell apart
    close = (10.0 * cloud(20, 2)).repeat(5, 1) + 1e-3 * cloud(100, 2, 1)
    for seed in range(10):
        chosen = module._random_pivots(close, RBFMixture(gammas=(1.0,)), 60, gen(seed), rounds=2)
        assert len(set(chosen.tolist())) == len(chosen)
    # (1 + <x, y>)² on 3 columns has rank 10, so the first of two rounds misses nothing
    assert len(module._random_pivots(x, QUADRATIC, 50, gen(), rounds=2)) == 25
    feature_map = fit_feature_map(x, QUADRATIC, 50, generator=gen())
    assert feature_map.transform.shape[1] == 10


# --- the map ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "d"), [(RBFMixture(), 6), (CoralKernel(), 30), (CoralKernel(), 6), (LinearKernel(), 6)]
)
def test_the_map_treats_unseen_points_as_seen_ones(kernel: Kernel, d: int) -> None:
    x = cloud(80, d)
    kernel = kernel.fit(x)
    feature_map = fit_feature_map(x[:50], kernel, 16, generator=gen())
    features, residual = feature_map(x)
    for rows in (slice(0, 50), slice(50, 80), slice(79, 80)):
        some, rest = feature_map(x[rows])
        torch.testing.assert_close(some, features[rows])
        torch.testing.assert_close(rest, residual[rows])
    torch.testing.assert_close(features.square().sum(1) + residual, kernel.diag(x))
    twin, _ = feature_map(x[50:51])  # a copy of a seen point lands where the point is
    torch.testing.assert_close(twin[0], features[50])


@pytest.mark.parametrize(("kernel", "d"), [(RBFMixture(), 6), (LinearKernel(), 6)])
def test_blocks_do_not_change_the_map(kernel: Kernel, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = cloud(80, d)
    feature_map = fit_feature_map(x, kernel, 16, generator=gen())
    whole = feature_map(x)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)
    torch.testing.assert_close(feature_map(x), whole)


def test_landmarks_come_from_a_sample_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAMPLE", 30)
    monkeypatch.setattr(module, "_PER_LANDMARK", 1)
    x = cloud(200, 4)
    feature_map = fit_feature_map(x, RBFMixture(), 25, generator=gen())
    assert feature_map.landmarks is not None
    assert 1 < len(feature_map.landmarks) <= 50
    assert bool((feature_map.landmarks[:, None] == x).all(2).any(1).all())
    features, residual = feature_map(x)
    torch.testing.assert_close(features.square().sum(1) + residual, x.new_full((200,), 5.0))
    explicit = LowRankView.of(x, LinearKernel(), generator=gen())
    torch.testing.assert_close(explicit.features.square().sum(), (x - x.mean(0)).square().sum())


def test_wide_coral_takes_memory_for_landmarks_not_for_d_squared() -> None:
    x = cloud(300, 512, dtype=torch.float32)
    kernel = CoralKernel().fit(x)
    assert kernel.explicit_features(x) is None
    feature_map = fit_feature_map(x, kernel, 32, generator=gen())
    assert feature_map.landmarks is not None
    assert feature_map.landmarks.shape == (64, 512)
    assert feature_map.transform.shape == (64, 32)
    low_rank = LowRankView.of(x, kernel, 32, generator=gen())
    assert low_rank.features.shape == (300, 32)
    assert low_rank.residual.shape == (300,)


def test_the_default_is_twice_as_many_landmarks_as_columns() -> None:
    feature_map = fit_feature_map(cloud(100, 10), RBFMixture(), 12, generator=gen())
    assert feature_map.landmarks is not None
    assert len(feature_map.landmarks) == 24
    feature_map = fit_feature_map(cloud(100, 10), RBFMixture(), 12, landmarks=12, generator=gen())
    assert feature_map.transform.shape == (12, 12)


# --- hard input -------------------------------------------------------------------------------------------


@each_rounds
def test_rank_above_n(rounds: int) -> None:
    low_rank = LowRankView.of(cloud(9), RBFMixture(), 128, rounds=rounds, generator=gen())
    assert low_rank.features.shape == (9, 9)
    assert low_rank.captured == pytest.approx(1.0)
    single = LowRankView.of(cloud(1), RBFMixture(), 128, rounds=rounds, generator=gen())
    assert single.features.shape == (1, 1)
    assert not single.features.any()


@each_rounds
def test_a_zero_kernel(rounds: int) -> None:
    x = cloud(20, dtype=torch.float32)
    low_rank = LowRankView.of(x, FunctionKernel(zero), 8, rounds=rounds, generator=gen())
    assert low_rank.features.shape == (20, 1)
    assert not low_rank.features.any()
    assert not low_rank.residual.any()
    assert low_rank.captured == 1.0


@each_rounds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "kernel", [RBFMixture(), CoralKernel(), LinearKernel(), QUADRATIC], ids=lambda k: type(k).__name__
)
def test_constant_features(kernel: Kernel, dtype: torch.dtype, rounds: int) -> None:
    x = torch.full((20, 3), 0.7, dtype=dtype)
    low_rank = LowRankView.of(x, kernel.fit(x), 8, rounds=rounds, generator=gen())
    small = 1e-5 if dtype == torch.float32 else 1e-12
    assert float(low_rank.features.abs().max()) < small
    assert float(low_rank.residual.max()) < small
    assert float(low_rank.residual.min()) >= 0.0
    assert 0.0 <= low_rank.captured <= 1.0


@pytest.mark.parametrize("kernel", [RBFMixture(), CoralKernel()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_float32_is_stable_far_from_the_origin(kernel: Kernel, offset: float) -> None:
    # multiples of 2^-10 below 8: the offset is added without rounding
    x = (cloud(150, 30) * 1024).round().clamp(-8192, 8192) / 1024
    shifted = (x + offset).float()
    double, single = kernel.fit(x), kernel.fit(shifted)
    features, residual = fit_feature_map(shifted, single, 24, generator=gen())(shifted)
    assert features.dtype == residual.dtype == torch.float32
    scale = float(double.diag(x).max())
    diag = features.double().square().sum(1) + residual
    assert float((diag - double.diag(x)).abs().max()) < 1e-4 * scale
    far = LowRankView.of(shifted, single, 24, generator=gen())
    near = LowRankView.of(x, double, 24, generator=gen())
    assert far.captured == pytest.approx(near.captured, rel=0.1)


@each_rounds
def test_same_generator_same_features(rounds: int) -> None:
    x = cloud(100, 5)
    state = torch.random.get_rng_state()
    runs = [LowRankView.of(x, RBFMixture(), 8, rounds=rounds, generator=gen(s)) for s in (3, 3, 4)]
    assert torch.equal(runs[0].features, runs[1].features)
    assert torch.equal(runs[0].residual, runs[1].residual)
    assert not torch.equal(runs[0].residual, runs[2].residual)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is not touched


@pytest.mark.parametrize("kernel", ["mmd", "rbf", "coral", "linear", "energy"])
def test_columns_come_by_falling_variance(kernel: str) -> None:
    """Bisection looks at the first columns. The largest second moment is mostly that of the mean, which goes."""
    x = 0.3 * torch.randn(500, 30, generator=gen(1), dtype=torch.float64) + 0.2
    fitted = fitted_kernel(kernel, x)
    low_rank = LowRankView.of(x, fitted, 24, generator=gen())
    variances = low_rank.features.var(0)
    assert bool((variances[1:] <= variances[:-1] * (1 + 1e-9)).all())


@pytest.mark.parametrize("rank", [2, 5, 12])
@pytest.mark.parametrize("kernel", ["mmd", "rbf"])
def test_the_columns_hold_all_of_the_mean_that_landmarks_span(kernel: str, rank: int) -> None:
    """However few they are: <φ(z), μ> is then what all landmarks would say."""
    x = 0.3 * cloud(120, 5) + 0.5
    fitted = fitted_kernel(kernel, x)
    feature_map = fit_feature_map(x, fitted, rank, landmarks=40, generator=gen())
    assert feature_map.landmarks is not None
    features, _ = feature_map(x)
    assert features.shape[1] == rank
    columns = fitted.matrix(x, feature_map.landmarks)
    inverse = torch.linalg.inv(fitted.matrix(feature_map.landmarks))
    means = columns @ inverse @ columns.mean(0)
    torch.testing.assert_close(features @ features.mean(0), means, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("kernel", "d"), [("mmd", 4), ("rbf", 4), ("coral", 30)])
@pytest.mark.parametrize("n", [60, 2000], ids=["all rows sampled", "a sample of rows"])
def test_a_landmark_is_seen_through_the_other_landmarks(kernel: str, d: int, n: int) -> None:
    """Against features on the span of the others, for each landmark anew."""
    x = cloud(n, d)
    fitted = fitted_kernel(kernel, x)
    found = LowRankView.of(x, fitted, 12, landmarks=12, generator=gen())
    points = fit_feature_map(
        x, fitted, 12, landmarks=12, generator=gen()
    ).landmarks  # the same generator, the same ones
    assert points is not None
    rows = [int((x == point).all(1).nonzero()) for point in points]
    one, other = [row for row in range(n) if row not in rows][:2]
    apart = found.features[one] - found.features[other]  # differences, of which the centring is no part

    def inner(points: Tensor, row: int) -> float:
        """<P φ(z), P (φ(one) - φ(other))> with P on the span of ``points``."""
        through = fitted.matrix(x[[row]], points) @ torch.linalg.inv(fitted.matrix(points))
        to_both = (through @ fitted.matrix(points, x[[one, other]])).flatten()
        return float(to_both[0] - to_both[1])

    for place, row in enumerate(rows):
        others = torch.cat([points[:place], points[place + 1 :]])
        through = fitted.matrix(x[[row]], others) @ torch.linalg.inv(fitted.matrix(others))
        held = float(through @ fitted.matrix(others, x[[row]]))
        assert float(found.residual[row]) == pytest.approx(float(fitted.diag(x[[row]])) - held, rel=1e-6)
        expected = inner(others, row) - inner(points, one)
        assert float((found.features[row] - found.features[one]) @ apart) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_landmarks_that_occur_twice_hold_each_other() -> None:
    """Then the matrix of the landmarks is singular, and nothing of a landmark is its own."""
    x = cloud(40, 4).repeat(4, 1)
    kernel = RBFMixture()
    found = LowRankView.of(x, kernel, 16, landmarks=64, generator=gen())
    copies = found.features.view(4, 40, 16)
    points = fit_feature_map(x, kernel, 16, landmarks=64, generator=gen()).landmarks
    assert points is not None
    times = (x[:40, None] == points).all(2).sum(1)
    assert bool((times >= 2).any())
    torch.testing.assert_close(copies[:, times >= 2], copies[:1, times >= 2].expand(4, -1, -1), atol=1e-6, rtol=0)


def test_no_landmark_is_left_out_where_most_rows_are_landmarks() -> None:
    x = cloud(40)
    kernel = RBFMixture()
    for landmarks, same in ((21, True), (20, False)):
        raw, residual = fit_feature_map(x, kernel, landmarks, landmarks=landmarks, generator=gen())(x)
        found = LowRankView.of(x, kernel, landmarks, landmarks=landmarks, generator=gen())
        assert torch.allclose(found.residual, residual) == same
        raw = raw - raw.mean(0)
        assert torch.allclose(found.features @ found.features.T, raw @ raw.T) == same


@pytest.mark.parametrize("negligible", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("rank", [None, 1, 8, 30])
def test_leading_columns_keep_the_diagonal(rank: int | None, negligible: float) -> None:
    whole = LowRankView.of(cloud(200, 6), RBFMixture(), 48, generator=gen())
    less = whole.leading(rank, negligible=negligible)
    kept = less.features.shape[1]
    assert torch.equal(less.features, whole.features[:, :kept])
    torch.testing.assert_close(
        less.features.square().sum(1) + less.residual, whole.features.square().sum(1) + whole.residual
    )
    if rank is not None:
        assert kept <= rank
    elif negligible == 0.0:
        assert kept == whole.features.shape[1]
    held = whole.features.square().sum(0)
    if rank is None and kept > 8:  # no eight more could go
        assert float(held[kept - 8 :].sum()) > negligible * float(held.sum())
    if rank is None:
        assert float(held[kept:].sum()) <= negligible * float(held.sum())
