"""Weights of a stream: the least of their problem, within its bounds, with less noise and a bias that is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from conftest import refused
from vardass.data import standardise, watch_domains
from vardass.kernels import CoralKernel, RBFMixture
from vardass.losses import CORALLoss, StreamWeights, coral, mmd2
from vardass.losses.stream_weights import _Fourier, _in_capped_simplex, matching_weights

KERNELS = ("mmd", "coral", "linear")


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(count: int, *, rows: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    generator = gen(seed)
    for _ in range(count):
        yield torch.randn(rows, 3, generator=generator, dtype=dtype).exp()


def assert_within_bounds(w: Tensor, effective_size: float, most: float) -> None:
    n = len(w)
    assert float(w.sum()) == pytest.approx(1.0, abs=1e-6)
    assert float(w.min()) >= 0.0
    assert float(w.max()) <= most / n + 1e-6
    assert float(w.square().sum()) <= 1.0 / (effective_size * n) + 1e-6


@pytest.mark.parametrize(("effective_size", "most"), [(0.85, 4.0), (0.5, 1.5), (0.3, 8.0)])
@pytest.mark.parametrize("seed", range(4))
def test_weights_are_the_least_that_scipy_finds(effective_size: float, most: float, seed: int) -> None:
    n = 9
    phi = torch.randn(n, 3, generator=gen(seed), dtype=torch.float64).exp() - 2.0
    a = (phi @ phi.T).numpy()
    w = matching_weights(torch.from_numpy(a), effective_size=effective_size, most=most)
    assert_within_bounds(w, effective_size, most)
    found = minimize(
        lambda v: v @ a @ v,
        np.full(n, 1.0 / n),
        jac=lambda v: 2 * a @ v,
        method="SLSQP",
        bounds=[(0.0, most / n)] * n,
        constraints=[
            {"type": "eq", "fun": lambda v: v.sum() - 1.0},
            {"type": "ineq", "fun": lambda v: 1.0 / (effective_size * n) - v @ v},
        ],
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert found.success
    even = a.mean()
    assert float(w.numpy() @ a @ w.numpy()) <= found.fun + 2e-3 * even
    closer = matching_weights(torch.from_numpy(a), effective_size=effective_size, most=most, steps=2000).numpy()
    assert closer @ a @ closer == pytest.approx(found.fun, abs=1e-5 * even)


def test_nearest_weights_below_a_limit_are_those_of_a_plain_search() -> None:
    for seed in range(20):
        v = torch.randn(7, generator=gen(seed), dtype=torch.float64)
        low, high = -3.0, 3.0
        for _ in range(100):  # the sum falls with the shift
            middle = (low + high) / 2
            low, high = (middle, high) if float((v - middle).clamp(0.0, 0.3).sum()) > 1.0 else (low, middle)
        torch.testing.assert_close(_in_capped_simplex(v, 0.3), (v - low).clamp(0.0, 0.3))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_keep_to_their_bounds_and_lower_the_error(kernel: str, dtype: torch.dtype) -> None:
    weights = StreamWeights(kernel, effective_size=0.7)
    for step, z in enumerate(batches(30, dtype=dtype)):
        w = weights(z.requires_grad_())
        assert w.dtype == dtype
        assert not w.requires_grad
        assert_within_bounds(w, 0.7, 4.0)
        if step == 0 and kernel != "coral":  # whose mean is matched about the mean only
            torch.testing.assert_close(w, torch.full_like(w, 1 / 16))
    assert float(w.square().sum()) > 1.2 / 16


def test_the_first_batch_has_equal_weights_and_so_has_one_with_nothing_to_gain() -> None:
    for kernel in KERNELS:
        weights = StreamWeights(kernel)
        same = torch.ones(5, 2)
        for w in (weights(same), weights(same), StreamWeights(kernel, effective_size=1.0)(torch.randn(5, 2))):
            torch.testing.assert_close(w, torch.full((5,), 0.2))
        assert StreamWeights(kernel)(torch.randn(1, 2, generator=gen())).tolist() == [1.0]


def test_running_moments_are_those_of_all_rows_with_their_decayed_weights() -> None:
    """Batches of different sizes; a row counts 2^(-age / half-life)."""
    weights = StreamWeights("coral", half_life=3.0)
    seen = [torch.randn(n, 4, generator=gen(n), dtype=torch.float64) + n for n in (5, 9, 2, 7)]
    for z in seen:
        weights(z)
    counts = torch.cat([torch.full((len(z),), 0.5 ** (age / 3.0)) for age, z in zip((3, 2, 1, 0), seen)]).double()
    rows, share = torch.cat(seen), counts / counts.sum()
    mean = share @ rows
    assert weights._statistics is not None
    torch.testing.assert_close(weights._statistics.running["mean"], mean)
    covariance = ((rows - mean) * share[:, None]).T @ (rows - mean)
    torch.testing.assert_close(weights._statistics.running["covariance"], covariance)


def test_inner_products_are_those_of_the_kernels_own_feature_map() -> None:
    z = torch.randn(6, 3, generator=gen(1), dtype=torch.float64)
    of = CORALLoss(preset="domainbed").kernel(3)
    weights = StreamWeights(of, half_life=2.0)
    for batch in (z + 1.0, z * 2.0):
        weights(batch)
    statistics = weights._statistics
    assert statistics is not None
    products = statistics.add(z, 0.0)
    mean, covariance = statistics.running["mean"], statistics.running["covariance"]
    x = z - mean
    phi = torch.cat([of.scale**0.5 * (x[:, :, None] * x[:, None] - covariance).flatten(1), of.mean_scale**0.5 * x], 1)
    torch.testing.assert_close(products, phi @ phi.T)


def test_fourier_features_have_the_mixtures_values() -> None:
    kernel = RBFMixture((0.05, 0.5), scale=2.0)
    z = torch.randn(10, 3, generator=gen(2), dtype=torch.float64)
    statistics = _Fourier(kernel, 3, 0, 40_000)
    statistics.follow(z)
    features = statistics._features(z)
    values = torch.einsum("gif,gjf->ij", features, features)
    torch.testing.assert_close(values, kernel.matrix(z), atol=0.03, rtol=0.0)
    assert float((values.diagonal() - 2.0).abs().max()) < 1e-6


@pytest.mark.parametrize("kernel", ["mmd", "coral"])
def test_noise_of_the_loss_falls_to_less_than_a_third_on_real_features(kernel: str) -> None:
    domains = watch_domains()
    x = standardise(domains["left-A"][0])
    y = standardise(domains["right-B"][0], reference=domains["left-A"][0])
    to_few = torch.randn(x.shape[1], 16, generator=gen(3)) / x.shape[1] ** 0.5  # a layer, so that samples are near
    x, y = (x @ to_few).relu(), (y @ to_few).relu()
    loss = mmd2 if kernel == "mmd" else coral
    whole, generator = float(loss(x, y)), gen(0)
    source, target = StreamWeights(kernel), StreamWeights(kernel)
    even, weighted = [], []
    for step in range(220):
        s, t = (z[torch.randint(len(z), (32,), generator=generator)] for z in (x, y))
        w, v = source(s), target(t)
        if step >= 40:
            even.append(float(loss(s, t)))
            weighted.append(float(loss(s, t, weights_x=w, weights_y=v)))
    assert np.var(weighted) < 0.3 * np.var(even)
    # the V-statistic's excess over the loss of all data falls with the variance
    assert whole < np.mean(weighted) < np.mean(even)


def test_the_mean_is_unbiased_once_running_statistics_have_converged() -> None:
    """The weighted mean of what is matched: its bias is within its noise, which is far below that of equal weights."""
    centre = math.exp(0.5)
    weights = StreamWeights("linear", half_life=2000.0, effective_size=0.6)
    for z in batches(1500, seed=1, rows=64):
        weights(z)
    assert weights._statistics is not None
    running = weights._statistics.running["mean"]
    off = (running - centre).norm()  # what is left of the noise of 96,000 rows
    assert float(off) < 0.03
    even, found = [], []
    for z in batches(600, seed=2, rows=32):
        w = weights(z)
        even.append(z.mean(0) - centre)
        found.append(w @ z - centre)
    deviations, before = torch.stack(found), torch.stack(even)
    assert float(deviations.square().sum(1).mean()) < 0.1 * float(before.square().sum(1).mean())
    noise = float(before.std(0).norm()) / 600**0.5
    assert float(deviations.mean(0).norm()) < 3 * noise + float(off)


def test_statistics_of_moving_features_lag_by_the_half_life() -> None:
    """Features that move by 0.1 in each step: the running mean is behind by 0.1 (1/α - 1), α = 1 - 2^(-1/h)."""
    for half_life in (5.0, 20.0):
        weights = StreamWeights("linear", half_life=half_life)
        for step in range(400):
            weights(torch.full((8, 1), 0.1 * step, dtype=torch.float64))
        assert weights._statistics is not None
        lag = 0.1 * 399 - float(weights._statistics.running["mean"])
        assert lag == pytest.approx(0.1 * (1 / (1 - 0.5 ** (1 / half_life)) - 1), rel=1e-3)


@pytest.mark.parametrize("kernel", ["mmd", "coral", RBFMixture(scale="median")])
def test_a_restored_one_goes_on_exactly(kernel: Any, tmp_path: Any) -> None:
    first = StreamWeights(kernel, half_life=4.0, seed=3)
    for z in batches(6):
        first(z)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = StreamWeights(kernel, half_life=4.0, seed=3)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for z in batches(5, seed=9):
        assert torch.equal(first(z), second(z))
    assert second.batches == 11
    fresh = StreamWeights(kernel, half_life=4.0, seed=3)
    second.load_state_dict(fresh.state_dict())
    z = next(batches(1))
    assert torch.equal(second(z), fresh(z))


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        generator = gen(4)
        while True:
            yield torch.randn(3, generator=generator)


def test_batches_of_an_iterable_data_set_get_weights() -> None:
    weights = StreamWeights()
    for _, z in zip(range(10), DataLoader(Endless(), batch_size=12)):
        w = weights(z)
    assert_within_bounds(w, 0.85, 4.0)
    assert float(mmd2(z, z + 1.0, weights_x=w, weights_y=w)) > 0.0


def test_half_precision_and_another_dtype_are_taken_as_they_come() -> None:
    weights = StreamWeights()
    z = torch.randn(8, 3, generator=gen())
    assert weights(z.half()).dtype == torch.float32
    assert weights(z.double()).dtype == torch.float64
    assert weights(z.numpy()).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kernel": lambda x, y: x @ y.T}, ("FunctionKernel", "RBFMixture", "CoralKernel", "LinearKernel")),
        ({"half_life": 0.0}, ("half_life", 0.5, 0.0)),
        ({"effective_size": 1.5}, ("effective_size", "at most 1", 1.5)),
        ({"seed": "x"}, ("seed", "'x'")),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], named: tuple[Any, ...]) -> None:
    with refused(*named, field=None if "kernel" in options else next(iter(options))):
        StreamWeights(**options)


def test_batches_and_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    weights = StreamWeights(CoralKernel())
    z = torch.randn(6, 3, generator=gen())
    weights(z)
    before = weights.state_dict()
    with refused("a batch has 2 columns", 3):
        weights(z[:, :2])
    with refused("1 of 6 rows", "rows 4", field="features"):
        weights(z.index_fill(0, torch.tensor([4]), float("nan")))
    with refused("half_life=3.0", "half_life=20.0"):
        weights.load_state_dict(StreamWeights(CoralKernel(), half_life=3.0).state_dict())
    with refused("int", "StreamWeights.state_dict"):
        weights.load_state_dict(3)  # type: ignore[arg-type]
    with refused("'settings'", "'batches'", "StreamWeights.state_dict"):
        weights.load_state_dict({"settings": {}})
    after = weights.state_dict()
    assert after["batches"] == before["batches"] == 1
    assert all(torch.equal(after["statistics"][name], before["statistics"][name]) for name in before["statistics"])
