"""Exact variances against the enumeration of every possible batch, in double precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import refused
from vardass.kernels import CoralKernel, FunctionKernel, Kernel, LinearKernel, RBFMixture
from vardass.variance import (
    stratified_variance,
    uniform_variance,
)

KERNELS: dict[str, Kernel] = {
    "mmd": RBFMixture(),
    "coral": CoralKernel(),
    "linear": LinearKernel(),
    "rbf-median": RBFMixture(gammas=(1.0,), scale="median"),
}
TOLERANCE = 1e-10


def points(n: int = 6, d: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return KERNELS[request.param]


Draws = Iterator[tuple[float, Tensor]]  # (probability, coefficient of each φ_i in μ̂)


def coefficients(n: int, indices: tuple[int, ...], weights: list[float]) -> Tensor:
    c = torch.zeros(n, dtype=torch.float64)
    for i, w in zip(indices, weights):
        c[i] += w
    return c


def uniform_draws(n: int, k: int, replacement: bool) -> Draws:
    batches = list(itertools.product(range(n), repeat=k) if replacement else itertools.permutations(range(n), k))
    for batch in batches:
        yield 1 / len(batches), coefficients(n, batch, [1 / k] * k)


def stratified_draws(labels: list[int], q: int, replacement: bool) -> Draws:
    n = len(labels)
    strata = [[i for i in range(n) if labels[i] == h] for h in sorted(set(labels))]
    inside = [list(itertools.product(s, repeat=q) if replacement else itertools.permutations(s, q)) for s in strata]
    probability = 1 / math.prod(len(options) for options in inside)
    for parts in itertools.product(*inside):
        weights = [len(s) / n / q for s in strata for _ in range(q)]
        yield probability, coefficients(n, tuple(itertools.chain(*parts)), weights)


def enumerate_variance(x: Tensor, kernel: Kernel, draws: Draws) -> float:
    """E|μ̂ - μ|² by the kernel trick, having checked that μ̂ is unbiased whatever the kernel."""
    probability, c = zip(*draws)
    p, c = torch.tensor(probability, dtype=torch.float64), torch.stack(c)
    n = len(x)
    torch.testing.assert_close(p @ c, torch.full((n,), 1 / n, dtype=torch.float64))
    gram = kernel.fit(x).matrix(x)
    error = c - 1 / n
    return float(p @ ((error @ gram) * error).sum(1))


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_uniform_equals_enumeration(kernel: Kernel, k: int, replacement: bool) -> None:
    x = points()
    expected = enumerate_variance(x, kernel, uniform_draws(6, k, replacement))
    assert expected > 0.01
    assert abs(uniform_variance(x, k, kernel=kernel, replacement=replacement) - expected) < TOLERANCE


@pytest.mark.parametrize(
    ("labels", "q", "replacement"),
    [
        ([0, 1, 1, 2, 2, 2], 1, True),
        ([0, 1, 1, 2, 2, 2], 1, False),
        ([0, 1, 1, 2, 2, 2], 2, True),
        ([5, 5, -3, -3, -3, 5, -3], 2, True),
        ([5, 5, -3, -3, -3, 5, -3], 2, False),
        ([0, 0, 0, 0], 3, False),
    ],
)
def test_stratified_equals_enumeration(kernel: Kernel, labels: list[int], q: int, replacement: bool) -> None:
    x = points(len(labels))
    expected = enumerate_variance(x, kernel, stratified_draws(labels, q, replacement))
    assert expected > 1e-3
    got = stratified_variance(x, torch.tensor(labels), kernel=kernel, draws_per_stratum=q, replacement=replacement)
    assert abs(got - expected) < TOLERANCE


def test_a_full_draw_without_replacement_has_no_variance(kernel: Kernel) -> None:
    x = points()
    assert uniform_variance(x, 6, kernel=kernel, replacement=False) == 0.0
    assert uniform_variance(x, 5, kernel=kernel, replacement=False) > 0.0
    assert uniform_variance(x[:1], 1, kernel=kernel, replacement=False) == 0.0


def test_one_stratum_for_each_row_has_no_variance(kernel: Kernel) -> None:
    x = points(300, 30)
    for dtype in (torch.float32, torch.float64):
        assert stratified_variance(x.to(dtype), torch.arange(300), kernel=kernel) == 0.0
        assert stratified_variance(x.to(dtype), torch.arange(300), kernel=kernel, replacement=False) == 0.0


def test_one_stratum_is_one_uniform_draw(kernel: Kernel) -> None:
    x = points(300)
    expected = uniform_variance(x, 1, kernel=kernel)
    assert stratified_variance(x, torch.full((300,), 7), kernel=kernel) == expected
    assert expected > 0.1


def test_constant_features_have_no_variance(kernel: Kernel) -> None:
    x = torch.full((400, 3), 1e3, dtype=torch.float64) + torch.pi
    fitted = CoralKernel(mean=torch.zeros(3)) if isinstance(kernel, CoralKernel) else kernel
    size = float(fitted.fit(x).diag(x).max()) if not isinstance(kernel, CoralKernel) else 1e13
    labels = torch.arange(400) % 3
    assert uniform_variance(x, 1, kernel=fitted) <= 1e-14 * size
    assert stratified_variance(x, labels, kernel=fitted) <= 1e-14 * size


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 40), k=st.integers(1, 8), name=st.sampled_from(list(KERNELS)))
def test_rows_and_stratum_numbers_can_be_permuted(seed: int, n: int, k: int, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = points(n, 3, seed)
    labels = torch.randint(k, (n,), generator=generator)
    order = torch.randperm(n, generator=generator)
    kernel = KERNELS[name].fit(x)
    expected = stratified_variance(x, labels, kernel=kernel)
    assert stratified_variance(x[order], labels[order], kernel=kernel) == pytest.approx(expected, abs=1e-12)
    renamed = torch.randperm(k, generator=generator)[labels] * 10 - 3
    assert stratified_variance(x, renamed, kernel=kernel) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 60), k=st.integers(1, 8))
def test_variance_is_the_clustering_objective_over_n_squared(seed: int, n: int, k: int) -> None:
    """Σ_h Σ_{i<j in h} |φ_i - φ_j|² / n², the identity behind the solvers."""
    x = points(n, 2, seed)
    labels = torch.randint(k, (n,), generator=torch.Generator().manual_seed(seed))
    gram = RBFMixture().matrix(x)
    distances = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    objective = float((distances * (labels[:, None] == labels)).sum()) / 2
    assert stratified_variance(x, labels, kernel="mmd") == pytest.approx(objective / n**2, abs=1e-12)


def scatter_by_features(phi: Tensor, labels: Tensor) -> float:
    """Σ_h |S_h| Σ_{i in h} |φ_i - μ_h|² / n², stratum by stratum."""
    total = 0.0
    for h in labels.unique():
        inside = phi[labels == h]
        total += len(inside) * float((inside - inside.mean(0)).square().sum())
    return total / len(phi) ** 2


@pytest.mark.parametrize("name", ["coral", "linear"])
def test_strata_of_all_sizes_agree_with_explicit_features(name: str) -> None:
    x = points(1400, 4)
    centred = x - x.mean(0)
    phi = x if name == "linear" else (centred[:, :, None] * centred[:, None, :]).flatten(1)
    # below, at and above the size that is packed
    sizes = torch.tensor([1] * 40 + [3] * 70 + [255, 1, 256, 257, 381])
    labels = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    assert len(labels) == 1400
    labels = labels[torch.randperm(1400, generator=torch.Generator().manual_seed(0))]
    got = stratified_variance(x, labels, kernel=KERNELS[name])
    assert got == pytest.approx(scatter_by_features(phi, labels), rel=1e-11)
    assert uniform_variance(x, 1, kernel=KERNELS[name]) == pytest.approx(
        scatter_by_features(phi, torch.zeros(1400)), rel=1e-11
    )


def test_kernel_evaluations_and_memory_are_bounded() -> None:
    calls: list[tuple[int, int]] = []

    def counted(a: Tensor, b: Tensor) -> Tensor:
        calls.append((len(a), len(b)))
        return a @ b.T

    n = 6000
    x = points(n, 2)
    kernel = FunctionKernel(counted)
    labels = torch.cat([torch.zeros(1000, dtype=torch.long), 1 + torch.arange(n - 1000) // 2])
    got = stratified_variance(x, labels, kernel=kernel)
    sizes = torch.bincount(labels)
    assert sum(a * b for a, b in calls) <= int(sizes.square().sum()) + 256 * n < n * n / 4
    assert len(calls) < 60  # 2501 strata
    assert got == pytest.approx(scatter_by_features(x, labels), rel=1e-10)

    calls.clear()
    got = uniform_variance(x, 1, kernel=kernel)
    assert sum(a * b for a, b in calls) == n * n
    assert max(a * b for a, b in calls) * x.element_size() <= 64 * 2**20
    assert len(calls) > 10
    assert got == pytest.approx(float(x.var(0, correction=0).sum()), rel=1e-10)


@pytest.mark.parametrize("n", [200, 1000])
def test_float32_kernels_are_summed_in_double_precision(n: int) -> None:
    """κ = 1 + 2⁻²⁰ [i = j] is exact in float32, but its row sums n + 2⁻²⁰ are not."""
    kernel = FunctionKernel(lambda a, b: 1.0 + 2.0**-20 * (a == b.T))
    x = torch.arange(n, dtype=torch.float32)
    expected = 2.0**-20 * (1 - 1 / n)
    assert uniform_variance(x, 1, kernel=kernel) == pytest.approx(expected, rel=1e-6)


def test_float32_features_give_nearly_the_same_variance(kernel: Kernel) -> None:
    x = points(800, 5) + 1.0
    labels = torch.arange(800) % 20
    expected = stratified_variance(x, labels, kernel=kernel)
    assert stratified_variance(x.float(), labels, kernel=kernel) == pytest.approx(expected, rel=1e-5)
    expected = uniform_variance(x, 8, kernel=kernel)
    assert uniform_variance(x.float(), 8, kernel=kernel) == pytest.approx(expected, rel=1e-5)


def test_an_unfitted_kernel_takes_its_mean_from_the_features_and_a_fitted_one_keeps_it() -> None:
    x = points()
    assert uniform_variance(x, 1, kernel="coral") == uniform_variance(x, 1, kernel=CoralKernel().fit(x))
    other = CoralKernel(mean=torch.ones(2, dtype=torch.float64))
    assert uniform_variance(x, 1, kernel=other) != pytest.approx(uniform_variance(x, 1, kernel="coral"), rel=1e-3)


def test_numpy_and_integer_labels_of_any_width() -> None:
    x, labels = points(), [0, 0, 1, 1, 2, 2]
    expected = stratified_variance(x, torch.tensor(labels), kernel="mmd")
    for dtype in (np.int32, np.uint8, np.uint32, np.int64):
        assert stratified_variance(x.numpy(), np.array(labels, dtype), kernel="mmd") == expected
    assert stratified_variance(x, torch.tensor(labels, dtype=torch.int16), kernel="mmd") == expected


@pytest.mark.parametrize(
    ("call", "field", "named"),
    [
        (lambda: uniform_variance(points(), 0, kernel="mmd"), "k", ("at least 1", 0, "6 rows")),
        (lambda: uniform_variance(points(), 2.0, kernel="mmd"), "k", (2.0,)),
        (lambda: uniform_variance(points(), 7, kernel="mmd", replacement=False), "k", ("1 and 6", 7, "6 rows")),
        (lambda: uniform_variance(points(), 1, kernel="nope"), "kernel", ("'nope'", "rbf")),
        (lambda: uniform_variance(torch.full((2, 2), torch.nan), 1, kernel="mmd"), "features", ("NaN", "2 of 2 rows")),
        (lambda: stratified_variance(points(), [0, 1], kernel="mmd"), "labels", ("(6,)", "(2,)")),
        (lambda: stratified_variance(points(), [[0]] * 6, kernel="mmd"), "labels", ("(6,)", "(6, 1)")),
        (lambda: stratified_variance(points(), [0.5] * 6, kernel="mmd"), "labels", ("whole numbers", "torch.float64")),
        (lambda: stratified_variance(points(), ["a"] * 6, kernel="mmd"), "labels", ("whole numbers", "<U1")),
        (
            lambda: stratified_variance(points(), torch.ones(6), kernel="mmd"),
            "labels",
            ("whole numbers", "torch.float32"),
        ),
        (
            lambda: stratified_variance(points(), torch.ones(6) > 0, kernel="mmd"),
            "labels",
            ("whole numbers", "torch.bool"),
        ),
        (
            lambda: stratified_variance(points(), [0] * 6, kernel="mmd", draws_per_stratum=0),
            "draws_per_stratum",
            ("at least 1", 0),
        ),
        (
            lambda: stratified_variance(
                points(), [0, 1, 1, 1, 1, 1], kernel="mmd", draws_per_stratum=2, replacement=False
            ),
            "draws_per_stratum",
            ("1 and 1", 2, "smallest stratum"),
        ),
    ],
)
def test_bad_input_is_refused(call: object, field: str, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        call()  # type: ignore[operator]
