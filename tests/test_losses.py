import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import rbf_kernel
from torch import Tensor

from conftest import gen, refused
from loss_batches import LOSSES, normal, some_weights
from vardass.kernels import (
    PAPER_GAMMAS,
    CoralKernel,
    EnergyKernel,
    FunctionKernel,
    RBFMixture,
)
from vardass.losses import DOMAINBED_GAMMAS, CORALLoss, MMDLoss, coral, mmd2

CORAL_PRESETS = ("paper", "domainbed", "deep-coral")


@pytest.fixture
def batches() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batches of unequal size with their weights."""
    return 0.5 * normal(7, 3, 1), 0.7 * normal(5, 3, 2) + 0.4, some_weights(7, 3), some_weights(5, 4)


# --- the formulas of others, as plain sums ---------------------------------------------------------------


def mean_of_kernels(a: Tensor, b: Tensor, gammas: tuple[float, ...]) -> float:
    """(1 / (n m)) Σ_ij Σ_γ exp(-γ |a_i - b_j|²)."""
    total = 0.0
    for p in a.tolist():
        for q in b.tolist():
            d2 = sum((u - v) ** 2 for u, v in zip(p, q, strict=True))
            total += sum(math.exp(-gamma * d2) for gamma in gammas)
    return total / (len(a) * len(b))


def domainbed_mmd(x: Tensor, y: Tensor, gammas: tuple[float, ...]) -> float:
    """DomainBed's MMD: mean kernel within x, within y, less twice that between them."""
    return mean_of_kernels(x, x, gammas) + mean_of_kernels(y, y, gammas) - 2 * mean_of_kernels(x, y, gammas)


def mean_squared_gaps(x: Tensor, y: Tensor, ddof: int) -> tuple[float, float]:
    """Mean over the d entries of the squared gap of means, and over the d² entries of that of covariances."""
    d = x.shape[1]
    means = [[math.fsum(column) / len(z) for column in z.T.tolist()] for z in (x, y)]

    def covariance(z: Tensor, mean: list[float], a: int, b: int) -> float:
        return math.fsum((row[a] - mean[a]) * (row[b] - mean[b]) for row in z.tolist()) / (len(z) - ddof)

    of_means = math.fsum((p - q) ** 2 for p, q in zip(*means, strict=True)) / d
    gaps = [covariance(x, means[0], a, b) - covariance(y, means[1], a, b) for a in range(d) for b in range(d)]
    return of_means, math.fsum(gap**2 for gap in gaps) / d**2


def domainbed_coral(x: Tensor, y: Tensor) -> float:
    """DomainBed's CORAL: both mean squared gaps, covariances over n - 1."""
    return sum(mean_squared_gaps(x, y, ddof=1))


def deep_coral(x: Tensor, y: Tensor) -> float:
    """Sun and Saenko 2016, equation 1: a quarter of the mean squared gap of the covariances over n - 1."""
    return mean_squared_gaps(x, y, ddof=1)[1] / 4


def plain_coral(x: Tensor, y: Tensor) -> float:
    """The sum, not the mean, of the squared gaps of the covariances over n."""
    return mean_squared_gaps(x, y, ddof=0)[1] * x.shape[1] ** 2


def paper_covariance(z: Tensor, sizes: list[int]) -> Tensor:
    """Section 2.3: strata sizes as weights, divided by n - 1."""
    n = sum(sizes)
    mean = sum((s * row for s, row in zip(sizes, z)), torch.zeros(z.shape[1], dtype=z.dtype)) / n
    return sum(
        (s * torch.outer(row - mean, row - mean) for s, row in zip(sizes, z)),
        torch.zeros(z.shape[1], z.shape[1], dtype=z.dtype),
    ) / (n - 1)


# --- MMD: values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "gammas"), [(None, PAPER_GAMMAS), ("paper", PAPER_GAMMAS), ("domainbed", DOMAINBED_GAMMAS)]
)
def test_mmd_without_weights_is_domainbeds(batches, preset, gammas):
    x, y, _, _ = batches
    assert float(mmd2(x, y, preset=preset)) == pytest.approx(domainbed_mmd(x, y, gammas), rel=1e-10)


def test_domainbed_has_seven_bandwidths():
    assert DOMAINBED_GAMMAS == (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)


@pytest.mark.parametrize(
    ("kernel", "reference"),
    [
        (RBFMixture((0.3,)), lambda a, b: rbf_kernel(a, b, gamma=0.3)),
        (RBFMixture((0.3, 2.0), scale=4.0), lambda a, b: rbf_kernel(a, b, 0.3 / 4) + rbf_kernel(a, b, 0.5)),
        ("linear", lambda a, b: a @ b.T),
        (lambda a, b: (a @ b.T) ** 2, lambda a, b: (a @ b.T) ** 2),
    ],
    ids=["rbf", "mixture", "linear", "callable"],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_weighted_mmd_against_sklearn_kernels(batches, kernel, reference, needs_grad):
    x, y, w_x, w_y = batches
    a, b, u, v = (t.numpy() for t in batches)
    expected = u @ reference(a, a) @ u + v @ reference(b, b) @ v - 2 * u @ reference(a, b) @ v
    value = mmd2(x.requires_grad_(needs_grad), y, weights_x=w_x, weights_y=w_y, kernel=kernel)
    assert float(value.detach()) == pytest.approx(float(expected), rel=1e-9)


def test_mmd_by_hand():
    x, y = torch.tensor([[0.0]]), torch.tensor([[2.0]])
    assert float(mmd2(x, y, kernel="rbf")) == pytest.approx(2 - 2 * math.exp(-4))
    assert float(mmd2(x, y, preset="paper")) == pytest.approx(10 - 2 * sum(math.exp(-4 * g) for g in PAPER_GAMMAS))
    # x = {0, 1} with weights 1/4, 3/4 against y = {1}: 2 (1/4)² (1 - e^-1)
    two = mmd2(torch.tensor([[0.0], [1.0]]), torch.ones(1, 1), weights_x=[0.25, 0.75], kernel="rbf")
    assert float(two) == pytest.approx(2 * 0.25**2 * (1 - math.exp(-1)), rel=1e-5)
    # U: the only pairs left are (0, 1) in x and (0, 3) in y
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]])
    cross = (1 + math.exp(-9) + math.exp(-1) + math.exp(-4)) / 4
    u = mmd2(x, y, kernel="rbf", estimator="unbiased")
    assert float(u) == pytest.approx(math.exp(-1) + math.exp(-9) - 2 * cross, rel=1e-5)


def test_u_statistic_is_the_double_sum_over_distinct_pairs(batches):
    x, y, _, _ = batches

    def k(a: Tensor, b: Tensor) -> float:
        d2 = float((a - b).square().sum())
        return sum(math.exp(-g * d2) for g in PAPER_GAMMAS)

    def within(z: Tensor) -> float:
        pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j]
        return sum(k(z[i], z[j]) for i, j in pairs) / len(pairs)

    cross = sum(k(x[i], y[j]) for i in range(7) for j in range(5)) / 35
    value = mmd2(x, y, estimator="unbiased")
    assert float(value) == pytest.approx(within(x) + within(y) - 2 * cross, rel=1e-10)


@pytest.mark.parametrize("weights", [None, [0.3, 0.7]])
def test_expectation_over_all_draws(weights):
    """All pairs of draws, with replacement: U is unbiased, V exceeds MMD² by the two variances."""
    population_x, population_y = normal(4, 2, 5), normal(3, 2, 6) + 0.5
    w = None if weights is None else np.array(weights)
    options = {"weights_x": w, "weights_y": w, "kernel": "rbf"}
    draws = [
        (population_x[list(i)], population_y[list(j)])
        for i in itertools.product(range(4), repeat=2)
        for j in itertools.product(range(3), repeat=2)
    ]
    truth = float(mmd2(population_x, population_y, kernel="rbf"))
    if weights is None:
        mean_u = np.mean([float(mmd2(x, y, estimator="unbiased", kernel="rbf")) for x, y in draws])
        assert mean_u == pytest.approx(truth, rel=1e-10)

    def variance(z: Tensor) -> float:
        share = sum(w**2 for w in weights or [0.5, 0.5])
        return share * (1 - rbf_kernel(z.numpy(), gamma=1.0).mean())

    mean_v = np.mean([float(mmd2(x, y, **options)) for x, y in draws])
    assert mean_v == pytest.approx(truth + variance(population_x) + variance(population_y), rel=1e-10)


def test_unfitted_kernels_are_fitted_on_both_batches_at_each_call(batches):
    x, y, _, _ = batches
    joint = torch.cat([x, y])
    for kernel in (RBFMixture(scale="median"), RBFMixture(scale="mean"), CoralKernel()):
        results = []
        for chosen in (kernel, kernel.fit(joint)):
            a = x.clone().requires_grad_()
            value = mmd2(a, y, kernel=chosen)
            value.backward()
            results.append((value.detach(), a.grad))
        torch.testing.assert_close(results[0], results[1])  # the same gradient: none flows into the fit
        assert not kernel.is_fitted
    scaled = mmd2(100 * x, 100 * y, kernel=RBFMixture(scale="median"))
    torch.testing.assert_close(scaled, mmd2(x, y, kernel=RBFMixture(scale="median")))


def test_one_kernel_evaluation(batches):
    x, y, _, _ = batches
    shapes = []

    def function(a: Tensor, b: Tensor) -> Tensor:
        shapes.append((len(a), len(b)))
        return a @ b.T

    mmd2(x, y, kernel=FunctionKernel(function))
    assert shapes == [(12, 12)]


# --- CORAL: values ---------------------------------------------------------------------------------------


def test_coral_presets_without_weights_are_the_textbook(batches):
    x, y, _, _ = batches
    assert float(coral(x, y, preset="domainbed")) == pytest.approx(domainbed_coral(x, y), rel=1e-10)
    assert float(coral(x, y, preset="deep-coral")) == pytest.approx(deep_coral(x, y), rel=1e-10)
    assert float(coral(x, y)) == pytest.approx(plain_coral(x, y), rel=1e-10)


def test_coral_paper_covariance_divides_by_population_minus_one(batches):
    x, y, _, _ = batches
    sizes_x, sizes_y = [3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8]
    value = coral(
        x,
        y,
        weights_x=torch.tensor(sizes_x) / 25,
        weights_y=torch.tensor(sizes_y) / 27,
        population_x=25,
        population_y=27,
    )
    gap = paper_covariance(x, sizes_x) - paper_covariance(y, sizes_y)
    torch.testing.assert_close(value, gap.square().sum(), rtol=1e-6, atol=0)


def test_coral_conventions_differ_by_their_factors(batches):
    """Equal strata: the paper's 1/(n-1) is DomainBed's 1/(b-1) times (b-1)/b n/(n-1)."""
    x, y = batches[0][:5], batches[1]
    batch, none = coral(x, y, correction="batch"), coral(x, y, correction="none")
    paper = coral(x, y, population_x=100, population_y=100)
    torch.testing.assert_close(none, batch * (4 / 5) ** 2)
    torch.testing.assert_close(paper, none * (100 / 99) ** 2)
    torch.testing.assert_close(coral(x, y, population_x=5, population_y=5), batch)
    torch.testing.assert_close(coral(x, y, correction="batch", normalization="d2"), batch / 9)
    torch.testing.assert_close(coral(x, y, correction="batch", normalization="4d2"), batch / 36)
    mean_gap = (x.mean(0) - y.mean(0)).square().sum()
    torch.testing.assert_close(coral(x, y, include_mean=True), none + mean_gap)
    with_mean = coral(x, y, preset="deep-coral", include_mean=True)
    torch.testing.assert_close(with_mean, deep_coral(x, y) + mean_gap / 3)


def test_coral_by_hand():
    x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    assert float(coral(x, y)) == 9.0  # variances 1 and 4
    assert float(coral(x, y, preset="deep-coral")) == 9.0  # 2 and 8, and a quarter of 36
    assert float(coral(x, y, preset="domainbed")) == 37.0  # and the means 1 and 2
    # weights 1/4, 3/4: variance 3/4; and 1 / (1 - Σ w²) is 8/3
    assert float(coral(x, y[:1], weights_x=[0.25, 0.75])) == pytest.approx(0.75**2)
    batch = coral(x, torch.zeros(2, 1), weights_x=[0.25, 0.75], correction="batch")
    assert float(batch) == pytest.approx(2.0**2)


@pytest.mark.parametrize("weights", [None, [0.2, 0.8]])
def test_batch_correction_makes_the_covariance_unbiased(weights):
    """All pairs of draws of a scalar; against a constant y, CORAL is the squared variance estimate."""
    population = torch.tensor([0.0, 1.0, 3.0, 7.0], dtype=torch.float64)
    constant = torch.zeros(2, 1, dtype=torch.float64)
    values = [
        coral(population[list(i)][:, None], constant, weights_x=weights, correction="batch")
        for i in itertools.product(range(4), repeat=2)
    ]
    assert float(torch.stack(values).sqrt().mean()) == pytest.approx(float(population.var(correction=0)))


@pytest.mark.parametrize("preset", CORAL_PRESETS)
def test_wide_coral_equals_the_definition(preset):
    """More columns than rows take another route, through the (m, m) Gram matrix."""
    x, y = normal(6, 40, 1), 1.5 * normal(4, 40, 2) + 0.3
    textbook = {"paper": plain_coral, "domainbed": domainbed_coral, "deep-coral": deep_coral}[preset]
    assert float(coral(x, y, preset=preset)) == pytest.approx(textbook(x, y), rel=1e-10)


# --- weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["mmd", *CORAL_PRESETS])
def test_equal_weights_are_no_weights(batches, loss):
    x, y, _, _ = batches
    equal = {"weights_x": torch.full((7,), 1 / 7), "weights_y": np.full(5, 0.2)}
    if loss in CORAL_PRESETS:
        with_weights, without = coral(x, y, preset=loss, **equal), coral(x, y, preset=loss)
    else:
        with_weights, without = mmd2(x, y, **equal), mmd2(x, y)
    torch.testing.assert_close(with_weights, without, rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    counts_x=st.lists(st.integers(0, 4), min_size=2, max_size=6).filter(any),
    counts_y=st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any),
    d=st.integers(1, 30),
)
def test_weights_are_multiplicities(counts_x, counts_y, d):
    x, y = normal(len(counts_x), d, 1), normal(len(counts_y), d, 2) + 0.2
    m_x, m_y = torch.tensor(counts_x), torch.tensor(counts_y)
    weights = {"weights_x": m_x.double() / m_x.sum(), "weights_y": m_y.double() / m_y.sum()}
    many_x, many_y = x.repeat_interleave(m_x, 0), y.repeat_interleave(m_y, 0)
    near = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(mmd2(x, y, **weights), mmd2(many_x, many_y), **near)
    for include_mean in (False, True):
        options = {"include_mean": include_mean}
        torch.testing.assert_close(coral(x, y, **weights, **options), coral(many_x, many_y, **options), **near)


def test_a_row_of_no_weight_does_not_count(batches):
    x, y, w_x, w_y = batches
    extra = torch.cat([x, 50 + x[:1]])
    padded = torch.cat([w_x, torch.zeros(1)])
    for loss in (
        lambda a, w: mmd2(a, y, weights_x=w, weights_y=w_y),
        lambda a, w: coral(a, y, weights_x=w, weights_y=w_y, preset="domainbed"),
    ):
        torch.testing.assert_close(loss(extra, padded), loss(x, w_x))


def test_rounded_weights_do_no_harm_far_from_the_origin(batches):
    x, y, w_x, w_y = batches
    sloppy = {"weights_x": w_x * 1.0005, "weights_y": w_y * 0.9995}
    exact = {"weights_x": w_x, "weights_y": w_y}
    for preset in CORAL_PRESETS:
        expected = coral(x, y, preset=preset, **exact)
        torch.testing.assert_close(coral(x + 1e3, y + 1e3, preset=preset, **sloppy), expected, rtol=1e-6, atol=0)


# --- invariances -----------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(shift=st.floats(-100, 100), seed=st.integers(0, 1000))
def test_translation_rotation_and_order_change_nothing(shift, seed):
    x, y, w_x = normal(6, 4, seed), normal(4, 4, seed + 1) + 0.5, some_weights(6, seed)
    rotation = torch.linalg.qr(normal(4, 4, seed + 2))[0]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    for loss in (mmd2, LOSSES["mmd u"], coral):
        value = loss(x, y, weights_x=w_x)
        near = {"rtol": 1e-8, "atol": 1e-10}
        torch.testing.assert_close(loss(x + shift, y + shift, weights_x=w_x), value, **near)
        torch.testing.assert_close(loss(x @ rotation, y @ rotation, weights_x=w_x), value, **near)
        torch.testing.assert_close(loss(x[order], y, weights_x=w_x[order]), value, **near)
        torch.testing.assert_close(loss(y, x, weights_y=w_x), value, **near)


def test_a_batch_is_at_no_distance_from_itself():
    x, w = normal(6, 3), some_weights(6)
    for loss in (mmd2, coral):
        assert abs(float(loss(x, x, weights_x=w, weights_y=w))) < 1e-14
        assert float(loss(x, 2 * x, weights_x=w, weights_y=w)) > 1e-3
    for seed in range(20):  # rounding must not leave the Gram route below zero
        wide = normal(6, 100, seed)
        assert 0.0 <= float(coral(wide, wide)) < 1e-10


# --- modules ---------------------------------------------------------------------------------------------


def test_modules_equal_the_functions(batches):
    x, y, w_x, w_y = batches
    weights = {"weights_x": w_x, "weights_y": w_y}
    assert torch.equal(MMDLoss(estimator="unbiased")(x, y), mmd2(x, y, estimator="unbiased"))
    for options in (
        {},
        {"preset": "domainbed"},
        {"kernel": "coral"},
        {"kernel": RBFMixture(scale="mean")},
    ):
        assert torch.equal(MMDLoss(**options)(x, y, w_x, w_y), mmd2(x, y, **weights, **options))
        assert torch.equal(MMDLoss(**options)(x, y), mmd2(x, y, **options))
    for options in (
        {},
        {"population_x": 50, "population_y": 60},
        {"preset": "domainbed", "correction": "none"},
        {"preset": "deep-coral", "include_mean": True, "normalization": "none"},
    ):
        assert torch.equal(CORALLoss(**options)(x, y, w_x, w_y), coral(x, y, **weights, **options))
        assert torch.equal(CORALLoss(**options)(x, y), coral(x, y, **options))


def test_modules_name_their_options():
    assert repr(MMDLoss(kernel="linear")) == "MMDLoss(kernel=LinearKernel(), estimator='v')"
    assert repr(CORALLoss(population_x=9, population_y=8)) == (
        "CORALLoss(include_mean=False, correction='population', normalization='none', population_x=9, population_y=8)"
    )
    assert not list(MMDLoss().parameters())


# --- errors ----------------------------------------------------------------------------------------------

X, Y = torch.zeros(3, 2), torch.zeros(4, 2)


@pytest.mark.parametrize("loss", [mmd2, coral, MMDLoss(), CORALLoss()])
@pytest.mark.parametrize(
    ("x", "y", "field", "named"),
    [
        (torch.zeros(3, 5), Y, None, ("(3, 5)", "(4, 2)", ".flatten(1)")),
        (torch.zeros(3), Y, None, ("(3,)", "(4, 2)", ".flatten(1)")),
        (X, torch.zeros(4, 2, 2), None, ("(3, 2)", "(4, 2, 2)", ".flatten(1)")),
        (torch.zeros(0, 2), Y, None, ("at least one row", "(0, 2)", "(4, 2)")),
        (torch.zeros(3, 0), torch.zeros(4, 0), None, ("(3, 0)", "(4, 0)")),
        (np.zeros((3, 2)), Y, None, ("x", "ndarray", "torch.as_tensor")),
        (X, Y.long(), None, ("y", "torch.int64", ".float()")),
        (X, Y.to_sparse(), "y", ("torch.sparse_coo", ".to_dense()")),
        (X, Y.to("meta"), None, ("x is on cpu", "y on meta")),
    ],
)
def test_batches_that_do_not_fit(loss, x, y, field, named):
    with refused(*named, field=field):
        loss(x, y)


@pytest.mark.parametrize("loss", [mmd2, coral])
@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"weights_x": torch.ones(4) / 4}, ("(3,)", "(4,)")),
        ({"weights_y": torch.ones(4)}, ("sum to 1", 4)),
        ({"weights_x": [1.5, -0.5, 0.0]}, ("negative", "stratum size / n")),
        ({"weights_y": [float("nan"), 0.0, 0.0, 0.0]}, ("finite", "stratum size / n")),
    ],
)
def test_weights_that_do_not_fit(loss, weights, named):
    with refused(*named, field=next(iter(weights))):
        loss(X, Y, **weights)


def test_pairs_need_two_rows():
    for options, got in (
        ({"x": X[:1]}, "1 of 1 for weights_x"),
        ({"y": Y[:1]}, "1 of 1 for weights_y"),
        ({"weights_y": [0.0, 1.0, 0.0, 0.0]}, "1 of 4 for weights_y"),
    ):
        with refused("correction='batch'", "2 rows", got):
            coral(**{"x": X, "y": Y, "correction": "batch", **options})


def test_one_row_is_enough_otherwise():
    assert float(mmd2(X[:1], Y[:1])) == 0.0
    assert float(coral(X[:1], Y[:1])) == 0.0


@pytest.mark.parametrize("make", [lambda **k: mmd2(X, Y, **k), MMDLoss])
@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"estimator": "w"}, "estimator", ("'w'", "v, unbiased")),
        ({"preset": "deep"}, "preset", ("'deep'", "paper, domainbed")),
        ({"preset": "paper", "kernel": "rbf"}, None, ("preset='paper'", "kernel='rbf'")),
        ({"kernel": "gauss"}, "kernel", ("'gauss'", "rbf")),
        ({"kernel": 3}, None, ("kernel", "int")),
    ],
)
def test_mmd_options(make, options, field, named):
    with refused(*named, field=field):
        make(**options)


@pytest.mark.parametrize("make", [lambda **k: coral(X, Y, **k), CORALLoss])
@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"preset": "deep"}, "preset", ("'deep'", "deep-coral")),
        ({"correction": "n"}, "correction", ("'n'", "none, batch, population")),
        ({"normalization": "d"}, "normalization", ("'d'", "'d2'", "4d2")),
        ({"correction": "population"}, None, ("correction='population'", "population_x=None", "population_y=None")),
        ({"population_x": 9}, None, ("correction='population'", "population_x=9", "population_y=None")),
        ({"preset": "domainbed", "population_x": 9, "population_y": 9}, None, ("correction='batch'", "population_x=9")),
        ({"population_x": 1, "population_y": 9}, "population_x", ("at least 2", 1)),
        ({"population_x": 9, "population_y": 2.5}, "population_y", (2.5,)),
    ],
)
def test_coral_options(make, options, field, named):
    with refused(*named, field=field):
        make(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_may_be_off_by_the_rounding_of_their_type(dtype):
    for b in (12, 24, 36, 48, 100):
        x, y, w = normal(b, 3, 1), normal(b, 3, 2), some_weights(b)
        uniform = torch.full((b,), 1 / b, dtype=dtype)
        torch.testing.assert_close(mmd2(x, y, weights_x=uniform, weights_y=uniform), mmd2(x, y), rtol=1e-9, atol=1e-12)
        rounded = mmd2(x, y, weights_x=w.to(dtype))
        torch.testing.assert_close(rounded, mmd2(x, y, weights_x=w), rtol=0.05, atol=0.02)
    off = torch.full((b,), 1.03 / b).to(dtype)
    with refused("sum to 1", f"{float(off.double().sum()):.6g}", field="weights_x"):
        mmd2(x, y, weights_x=off)


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ("uniform", ("real numbers", "str")),
        ([[0.5], [0.25, 0.25]], ("rows of one length", "list")),
        (torch.tensor([True, False, False]), ("real numbers", "torch.bool")),
        (torch.full((3,), 1 / 3).to_sparse(), ("dense", "torch.sparse_coo", ".to_dense()")),
        ([0.2, 0.2, 0.09], ("sum to 1", 0.49, "split_batches=True", "split_batches=False")),
    ],
    ids=["name", "ragged", "bool", "sparse", "half a batch"],
)
def test_weights_that_are_none(weights, named):
    for loss in (mmd2, coral):
        with refused(*named, field="weights_x"):
            loss(X, Y, weights_x=weights)


# --- energy distance ----------------------------------------------------------------------------------------


def energy_distance(x: Tensor, y: Tensor, w_x: Tensor, w_y: Tensor) -> float:
    def mean(a: Tensor, b: Tensor, u: Tensor, v: Tensor) -> float:
        return sum(float(u[i] * v[j] * (a[i] - b[j]).norm()) for i in range(len(a)) for j in range(len(b)))

    return 2.0 * mean(x, y, w_x, w_y) - mean(x, x, w_x, w_x) - mean(y, y, w_y, w_y)


@pytest.mark.parametrize("far", [0.0, 1e4])
def test_mmd_with_the_energy_kernel_is_the_energy_distance(far: float) -> None:
    x, y = (torch.randn(n, 3, generator=gen(n), dtype=torch.float64) + far for n in (6, 9))
    w_x, w_y = (torch.rand(n, generator=gen(n), dtype=torch.float64) for n in (6, 9))
    w_x, w_y = w_x / w_x.sum(), w_y / w_y.sum()
    expected = energy_distance(x, y, w_x, w_y)
    assert float(mmd2(x, y, weights_x=w_x, weights_y=w_y, kernel="energy")) == pytest.approx(expected, rel=1e-9)
    # the base point does not matter
    other = EnergyKernel(torch.full((3,), far + 5.0))
    assert float(mmd2(x, y, weights_x=w_x, weights_y=w_y, kernel=other)) == pytest.approx(expected, rel=1e-9)
    pairs = [mmd2(x, y, kernel=kernel, estimator="unbiased") for kernel in ("energy", other)]
    torch.testing.assert_close(*pairs)


def test_the_unbiased_energy_distance_leaves_out_pairs_of_a_row_with_itself() -> None:
    x, y = (torch.randn(n, 2, generator=gen(n), dtype=torch.float64) for n in (5, 7))
    inner = [torch.cdist(z, z).sum() / (len(z) * (len(z) - 1)) for z in (x, y)]
    expected = 2.0 * torch.cdist(x, y).mean() - inner[0] - inner[1]
    torch.testing.assert_close(mmd2(x, y, kernel="energy", estimator="unbiased"), expected)


def test_mmd_with_the_energy_kernel_is_twice_the_loss_of_geomloss() -> None:
    geomloss = pytest.importorskip("geomloss", reason="compared where geomloss is installed")
    x, y = (torch.randn(n, 4, generator=gen(n), dtype=torch.float64) for n in (30, 20))
    theirs = geomloss.SamplesLoss("energy", backend="tensorized")(x, y)
    # geomloss takes no distance as less than 1e-4, not even that of a point from itself
    torch.testing.assert_close(mmd2(x, y, kernel="energy"), 2.0 * theirs, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coinciding_points_have_a_finite_gradient(dtype: torch.dtype) -> None:
    x = torch.randn(6, 3, generator=gen(), dtype=dtype)
    x = torch.cat([x, x[:2], x.mean(0, keepdim=True)]).requires_grad_()  # two rows twice, and the base point
    y = torch.cat([x.detach()[:3], torch.randn(4, 3, generator=gen(1), dtype=dtype)])
    (gradient,) = torch.autograd.grad(mmd2(x, y, kernel="energy"), x)
    assert bool(torch.isfinite(gradient).all())
    # no coordinate's unit vectors can add up to more
    assert float(gradient.norm(dim=1).max()) <= 4.0 / len(x) + 1e-5
    (same,) = torch.autograd.grad(mmd2(x, x.detach(), kernel="energy"), x)
    assert float(same.abs().max()) < 1e-6
