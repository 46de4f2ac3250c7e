"""The paper's formulas against simulation, exact integers and SciPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import refused
from vardass.paper.theory import (
    lemma1_variance,
    log_expected_error,
    log_stirling2,
    log_worst_case_error,
    spearman,
    theorem1_variance,
    theorem4,
)

DOUBLE = torch.float64


def random_covariance(r: int, seed: int, scale: float = 1.0) -> Tensor:
    root = torch.randn(r, r, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return scale * root @ root.T


def variance_and_error(values: Tensor) -> tuple[float, float]:
    """Sample variance and its standard error."""
    squared = (values - values.mean()).square()
    return float(values.var()), float(squared.std()) / math.sqrt(len(values))


# Lemma 1 and Theorem 1


@pytest.mark.parametrize("r", [1, 2, 5])
def test_lemma_1_matches_gaussian_vectors(r: int) -> None:
    generator = torch.Generator().manual_seed(r)
    cov_s, cov_t = random_covariance(r, 10 + r), random_covariance(r, 20 + r, 0.5)
    m = 2 + torch.randn(r, dtype=DOUBLE, generator=generator)
    count = 200_000
    s = torch.randn(count, r, dtype=DOUBLE, generator=generator) @ torch.linalg.cholesky(cov_s).T
    t = torch.randn(count, r, dtype=DOUBLE, generator=generator) @ torch.linalg.cholesky(cov_t).T
    simulated, error = variance_and_error((m + s - t).square().sum(1))
    expected = float(lemma1_variance(m, cov_s, cov_t))
    assert abs(simulated - expected) < 5 * error
    assert error < 0.03 * expected
    # neither term alone would do
    total = cov_s + cov_t
    assert abs(simulated - 2 * float((total @ total).trace())) > 5 * error
    assert abs(simulated - 4 * float(m @ total @ m)) > 5 * error


def test_lemma_1_matches_minibatches_that_are_nearly_gaussian() -> None:
    """The variance of |μ̂_s - μ̂_t|² over real batches of 100 rows, where the lemma is an approximation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(500, 3, dtype=DOUBLE, generator=generator)
    y = torch.rand(400, 3, dtype=DOUBLE, generator=generator) * 1.5
    k, count = 100, 5000
    batch_x = x[torch.randint(500, (count, k), generator=generator)].mean(1)
    batch_y = y[torch.randint(400, (count, k), generator=generator)].mean(1)
    simulated, error = variance_and_error((batch_x - batch_y).square().sum(1))
    cov_s, cov_t = (torch.cov(z.T, correction=0) / k for z in (x, y))
    expected = float(lemma1_variance(x.mean(0) - y.mean(0), cov_s, cov_t))
    assert abs(simulated - expected) < 5 * error + 0.01 * expected


def test_lemma_1_broadcasts_over_many_covariances() -> None:
    covariances = torch.stack([random_covariance(3, seed) for seed in range(7)])
    m, zero = torch.ones(3, dtype=DOUBLE), torch.zeros(3, 3, dtype=DOUBLE)
    values = lemma1_variance(m, covariances, zero)
    assert values.shape == (7,)
    for value, covariance in zip(values, covariances):
        torch.testing.assert_close(value, lemma1_variance(m, covariance, zero))
    single = lemma1_variance(np.ones(3), covariances[0].float(), zero.numpy())
    assert single.dtype == DOUBLE
    assert lemma1_variance(m.float(), covariances.float(), zero.float()).dtype == torch.float32


def test_lemma_1_counts_the_sum_of_both_covariances() -> None:
    m, cov = torch.ones(3, dtype=DOUBLE), random_covariance(3, 0)
    torch.testing.assert_close(lemma1_variance(m, cov, cov), lemma1_variance(m, 2 * cov, 0 * cov))
    assert float(lemma1_variance(m, 0 * cov, 0 * cov)) == 0.0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), d=st.integers(1, 6), sigma2=st.floats(0.0, 10.0))
def test_theorem_1_is_lemma_1_for_an_isotropic_source(seed: int, d: int, sigma2: float) -> None:
    m = torch.randn(d, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    cov_t = random_covariance(d, seed)
    isotropic = sigma2 * torch.eye(d, dtype=DOUBLE)
    torch.testing.assert_close(
        theorem1_variance(sigma2 * d, m, cov_t),
        lemma1_variance(m, isotropic, cov_t),
        rtol=1e-12,
        atol=1e-12,
    )


def test_theorem_1_increases_with_the_variance_of_the_mean_embedding() -> None:
    v = torch.linspace(0.0, 5.0, 50, dtype=DOUBLE)
    for m, cov_t in [
        (torch.randn(4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)), random_covariance(4, 1)),
        (torch.zeros(4, dtype=DOUBLE), torch.zeros(4, 4, dtype=DOUBLE)),
    ]:
        values = theorem1_variance(v, m, cov_t)
        assert values.shape == v.shape
        assert bool((values.diff() > 0).all())


def test_figure_1_surrogate_is_monotone_in_one_dimension_and_nearly_so_in_more() -> None:
    for d in (1, 4):
        scales = torch.logspace(-2, 1, 200, dtype=DOUBLE)
        covariances = torch.stack([random_covariance(d, seed, float(s)) for seed, s in enumerate(scales)])
        loss = lemma1_variance(torch.ones(d, dtype=DOUBLE), covariances, torch.zeros(d, d, dtype=DOUBLE))
        rho = spearman(loss, covariances.diagonal(dim1=1, dim2=2).sum(1))
        assert rho == 1.0 if d == 1 else 0.9 < rho < 1.0


# Theorems 2 and 3


def exact_stirling2(n: int, k: int) -> int:
    return sum((-1) ** j * math.comb(k, j) * (k - j) ** n for j in range(k + 1)) // math.factorial(k)


def test_stirling_known_values() -> None:
    known = {(4, 2): 7, (5, 3): 25, (10, 5): 42525, (7, 6): 21, (3, 3): 1, (9, 1): 1, (1, 1): 1}
    for (n, k), count in known.items():
        assert exact_stirling2(n, k) == count
        assert math.exp(log_stirling2(n, k)) == pytest.approx(count, rel=1e-13)


def test_stirling_equals_exact_integers() -> None:
    for n in range(1, 41):
        for k in range(1, n + 1):
            assert log_stirling2(n, k) == pytest.approx(math.log(exact_stirling2(n, k)), rel=1e-13, abs=1e-13)


@pytest.mark.parametrize(("n", "k"), [(2000, 50), (300, 150), (300, 151), (300, 290), (14_000, 128)])
def test_stirling_of_large_numbers(n: int, k: int) -> None:
    assert log_stirling2(n, k) == pytest.approx(math.log(exact_stirling2(n, k)), rel=1e-12)


@pytest.mark.parametrize("rho", [-1.0, 0.0, 0.5, 0.99])
@pytest.mark.parametrize(("n", "k"), [(3, 2), (5, 3), (10, 4)])
def test_errors_equal_the_direct_formulas(n: int, k: int, rho: float) -> None:
    p, growth = exact_stirling2(n, k), 0.3
    worst = growth * math.sqrt(p * (p * p - 1) / 6 * (1 - rho))
    expected = growth * math.sqrt((p * p - 1) / 6 * (1 - rho))
    assert math.exp(log_worst_case_error(n, k, rho, growth)) == pytest.approx(worst, rel=1e-12)
    assert math.exp(log_expected_error(n, k, rho, growth)) == pytest.approx(expected, rel=1e-12)


def test_errors_vanish_for_perfect_correlation_or_a_single_partition() -> None:
    for error in (log_worst_case_error, log_expected_error):
        assert error(100, 8, 1.0, 2.0) == -math.inf
        assert error(6, 6, 0.0, 2.0) == -math.inf
        assert math.isfinite(error(14_000, 128, 0.99, 1e-6))


def test_theorem_2_bounds_the_error_of_every_ranking() -> None:
    """With f = K rank, the error K (l - 1) of a random ranking g stays within the bound."""
    n, k, growth = 4, 3, 2.0  # p = 6
    p = exact_stirling2(n, k)
    f = torch.arange(p, dtype=DOUBLE)
    tight = 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        g = torch.randperm(p, generator=generator).double()
        rho = spearman(f, g)
        error = growth * float(f[g.argmin()])
        bound = math.exp(log_worst_case_error(n, k, rho, growth))
        assert error <= bound + 1e-9
        tight = max(tight, error / bound if bound else 0.0)
    assert tight > 0.5


def test_theorem_2_needs_the_displacement_of_the_surrogates_best() -> None:
    """δ_i = rank(g of the i-th best on f) - i: for i = l it is 1 - l, for i = 1 it may be anything."""
    g = torch.tensor([2.0, 3.0, 1.0])  # ranks on g of the best, second and third on f
    displacement = g - torch.arange(1.0, 4.0)
    rank = int(g.argmin()) + 1  # l
    assert (rank, float(displacement[rank - 1])) == (3, 1 - 3)
    assert float(displacement[0]) == 1 != rank - 1
    # growth of at most K(i - j) also for i < j leaves exactly K
    for steps, any_order in (((2.0, 2.0), True), ((1.0, 2.0), False)):
        f = [0.0, steps[0], sum(steps)]
        pairs = [(i, j) for i in range(3) for j in range(3)]
        assert all(f[i] - f[j] <= 2.0 * (i - j) for i, j in pairs if i >= j)
        assert all(f[i] - f[j] <= 2.0 * (i - j) for i, j in pairs) == any_order


def test_theorem_3_is_an_equality_only_for_growth_of_exactly_k() -> None:
    g = torch.tensor([2.0, 1.0, 4.0, 3.0, 6.0, 5.0], dtype=DOUBLE)  # all displacements are 1: homogeneous, p = 6
    expected = math.exp(log_expected_error(4, 3, spearman(torch.arange(6, dtype=DOUBLE), g), 2.0))
    assert expected == pytest.approx(2.0)
    for steps, error in (([2.0] * 5, 2.0), ([0.5] + [2.0] * 4, 0.5)):
        f = torch.tensor([0.0, *steps]).cumsum(0)
        assert float(f.diff().max()) == 2.0
        assert float(f[g.argmin()] - f[0]) == error <= expected * (1 + 1e-12)


# Theorem 4

STRATA = [
    ([0.0, 1.0, -2.0], [1.0, 0.5, 2.0], [1, 2, 3]),  # n = 6, γ = 1.2
    ([5.0, 5.0], [1.0, 3.0], [2, 2]),
    ([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.0, 0.4], [1, 4, 2, 9]),
]


def matrices(variances: list[float], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, float]:
    n = sum(sizes)
    a = torch.diag(torch.tensor(sizes, dtype=DOUBLE) / n)
    c = torch.eye(len(sizes), dtype=DOUBLE) - torch.ones_like(a) @ a
    return a, c, torch.diag(torch.tensor(variances, dtype=DOUBLE)), n / (n - 1)


@pytest.mark.parametrize(("means", "variances", "sizes"), STRATA)
def test_theorem_4_equals_the_matrix_formulas(means: list[float], variances: list[float], sizes: list[int]) -> None:
    a, c, sigma, gamma = matrices(variances, sizes)
    mu = torch.tensor(means, dtype=DOUBLE)
    acs = a @ c @ sigma
    mean_term = float(4 * mu @ a @ c @ sigma @ a @ c @ mu)
    trace = float((acs @ acs).trace())
    result = theorem4(means, variances, sizes)
    assert result.var_r == pytest.approx(gamma**2 * (2 * trace + mean_term), rel=1e-12)
    assert result.var_r_as_printed == pytest.approx(gamma**2 * (trace + mean_term), rel=1e-12)
    known = 2 * float((a @ sigma @ a @ sigma).trace()) + mean_term
    assert result.var_r_known_mean == pytest.approx(known, rel=1e-12)
    third = known + 2 * float((a @ a @ sigma).trace()) ** 2 - 4 * float((a @ a @ a @ sigma @ sigma).trace())
    assert result.var_r == pytest.approx(gamma**2 * third, rel=1e-12)


@pytest.mark.parametrize(("means", "variances", "sizes"), STRATA)
def test_the_order_of_centring_in_theorem_4_is_right_as_printed(
    means: list[float], variances: list[float], sizes: list[int]
) -> None:
    """μᵀ AC Σ AC μ = (μ - μ_s)ᵀ A Σ A (μ - μ_s), since AC = CᵀAC is symmetric."""
    a, c, sigma, _ = matrices(variances, sizes)
    mu = torch.tensor(means, dtype=DOUBLE)
    torch.testing.assert_close(a @ c, (a @ c).T)
    torch.testing.assert_close(a @ c, c.T @ a @ c)
    centred = mu - (a @ mu).sum()
    torch.testing.assert_close(c @ mu, centred)
    torch.testing.assert_close(mu @ a @ c @ sigma @ a @ c @ mu, centred @ a @ sigma @ a @ centred)


@pytest.mark.parametrize(("means", "variances", "sizes"), STRATA)
def test_theorem_4_as_derived_matches_simulation_and_as_printed_does_not(
    means: list[float], variances: list[float], sizes: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    count, n = 400_000, sum(sizes)
    size = torch.tensor(sizes, dtype=DOUBLE)
    z = torch.randn(count, len(sizes), dtype=DOUBLE, generator=generator)
    z = z * torch.tensor(variances, dtype=DOUBLE).sqrt() + torch.tensor(means, dtype=DOUBLE)
    batch_mean = z @ size / n
    r_hat = (z - batch_mean[:, None]).square() @ size / (n - 1)
    true_mean = float(torch.tensor(means, dtype=DOUBLE) @ size / n)
    r_known = (z - true_mean).square() @ size / n

    result = theorem4(means, variances, sizes)
    simulated, error = variance_and_error(r_hat)
    assert abs(simulated - result.var_r) < 5 * error
    assert abs(simulated - result.var_r_as_printed) > 5 * error
    gamma = n / (n - 1)
    for power in (0, 1, 4):  # only γ² belongs to the division by n - 1
        assert abs(simulated - result.var_r * gamma ** (power - 2)) > 5 * error
    simulated, error = variance_and_error(r_known)
    assert abs(simulated - result.var_r_known_mean) < 5 * error


def test_theorem_4_does_not_depend_on_a_common_offset() -> None:
    means, variances, sizes = STRATA[0]
    shifted = theorem4([m + 1e6 for m in means], variances, sizes)
    assert shifted.var_r == pytest.approx(theorem4(means, variances, sizes).var_r, rel=1e-8)


def test_figure_2_surrogate_ranks_like_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.arange(1, 9)
    results = [
        theorem4(
            torch.randn(8, dtype=DOUBLE, generator=generator),
            torch.rand(8, dtype=DOUBLE, generator=generator) * 3,
            sizes,
        )
        for _ in range(300)
    ]
    target = torch.tensor([r.var_r for r in results])
    surrogate = torch.tensor([r.var_r_known_mean for r in results])
    assert spearman(target, surrogate) > 0.97


# Spearman


@settings(max_examples=50, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.integers(-3, 3), st.floats(-10, 10).map(lambda v: round(v, 1))), min_size=2, max_size=30
    )
)
def test_spearman_equals_scipy(pairs: list[tuple[int, float]]) -> None:
    a, b = (np.array(column) for column in zip(*pairs))
    if len(set(a)) == 1 or len(set(b)) == 1:
        return
    assert spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-12)


def test_spearman_limits_and_ties() -> None:
    x = torch.tensor([3.0, -1.0, 7.0, 0.5])
    assert spearman(x, x.exp()) == 1.0
    assert spearman(x, -x) == -1.0
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    large = torch.tensor([2**30, 2**30 + 1, 2**30 + 2])
    assert spearman(large, torch.tensor([0.0, 1.0, 2.0])) == 1.0
    assert spearman(large.numpy(), np.array([2, 1, 0])) == -1.0


EYE = torch.eye(2)
ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "field", "named"),
    [
        (lambda: lemma1_variance(torch.tensor(1.0), EYE, EYE), None, ("mean difference", "(..., 1)", "()")),
        (lambda: lemma1_variance(torch.tensor([1, 2]), EYE, EYE), None, ("mean difference", "floats", "torch.int64")),
        (lambda: lemma1_variance(ONES * torch.nan, EYE, EYE), None, ("mean difference", "NaN")),
        (lambda: lemma1_variance(ONES, torch.eye(3), EYE), None, ("cov_s", "(..., 2, 2)", "(3, 3)")),
        (lambda: lemma1_variance(ONES, EYE, EYE.long()), None, ("cov_t", "floats", "torch.int64")),
        (lambda: lemma1_variance(ONES, EYE, EYE * torch.inf), None, ("cov_t", "infinite")),
        (lambda: lemma1_variance(ONES, EYE + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), EYE), None, ("asymmetry 1",)),
        (lambda: lemma1_variance(ONES, -EYE, EYE), None, ("cov_s", "lowest variance of -1")),
        (lambda: theorem1_variance(1.0, torch.ones(3, 2), EYE), None, ("m", "cov_t", "(3, 2)", "(2, 2)")),
        (lambda: theorem1_variance(-1.0, ONES, EYE), None, ("variance_mu", 0, -1.0)),
        (lambda: theorem1_variance(math.nan, ONES, EYE), None, ("variance_mu", 0, "nan")),
        (lambda: theorem1_variance(1.0, ONES, EYE.expand(4, 2, 2)), None, ("m", "cov_t", "(2,)", "(4, 2, 2)")),
        (lambda: theorem1_variance(1.0, ONES, torch.eye(3)), None, ("cov_t", "(..., 2, 2)", "(3, 3)")),
        (lambda: log_stirling2(3, 4), "k", ("1 and 3", 4)),
        (lambda: log_stirling2(0, 1), "n", (1, 0)),
        (lambda: log_stirling2(3, 0), "k", ("1 and 3", 0)),
        (lambda: log_stirling2(3.0, 1), "n", (3.0,)),
        (lambda: log_worst_case_error(5, 2, 1.1, 1.0), None, ("rho", "-1 and 1", 1.1)),
        (lambda: log_expected_error(5, 2, math.nan, 1.0), None, ("rho", "-1 and 1", "nan")),
        (lambda: log_expected_error(5, 2, 0.5, 0.0), None, ("growth", "positive", 0.0)),
        (lambda: log_worst_case_error(5, 2, 0.5, math.inf), None, ("growth", "finite", "inf")),
        (lambda: theorem4([1.0, 2.0], [1.0], [1, 1]), None, ("means, variances and sizes", "2, 1 and 2")),
        (lambda: theorem4([1.0, 2.0], [1.0, -1.0], [1, 1]), None, ("variances", 0, -1.0)),
        (lambda: theorem4([1.0, 2.0], [1.0, 1.0], [2, 0]), None, ("sizes", "smallest of 0.0", "sum of 2.0")),
        (lambda: theorem4([1.0], [1.0], [1]), None, ("sizes", "smallest of 1.0", "sum of 1.0")),
        (lambda: theorem4([[1.0]], [1.0], [1]), None, ("means", "one dimension", "(1, 1)")),
        (lambda: theorem4([math.nan, 1.0], [1.0, 1.0], [1, 1]), "means", ("NaN", "1 of 2 rows")),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call: object, field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        call()  # type: ignore[operator]
