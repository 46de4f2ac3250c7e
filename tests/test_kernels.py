import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import linear_kernel, rbf_kernel
from torch import Tensor

from conftest import refused
from vardass import kernels
from vardass.kernels import (
    PAPER_GAMMAS,
    CoralKernel,
    EnergyKernel,
    FunctionKernel,
    Kernel,
    LinearKernel,
    RBFMixture,
    as_kernel,
    fitted_kernel,
    squared_distances,
)


def normal(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x / x.norm(dim=1, keepdim=True)) @ (y / y.norm(dim=1, keepdim=True)).T


KERNELS: dict[str, Kernel] = {
    "mixture": RBFMixture(),
    "median": RBFMixture(scale="median"),
    "coral": CoralKernel(),
    "linear": LinearKernel(),
    "energy": EnergyKernel(),
    "function": FunctionKernel(cosine),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return KERNELS[request.param]


@pytest.fixture
def x() -> Tensor:
    """Rows with a duplicate and a near-duplicate."""
    rows = normal(70, 3, 1) + 0.5
    return torch.cat([rows, rows[:1], rows[1:2] + 1e-6])


# --- the contract of every kernel ------------------------------------------------------------------------


def test_symmetric_and_positive_semidefinite(kernel, x):
    k = kernel.fit(x).matrix(x)
    assert k.shape == (72, 72)
    torch.testing.assert_close(k, k.T)
    eigenvalues = torch.linalg.eigvalsh(k)
    assert float(eigenvalues[0]) > -1e-10 * float(eigenvalues[-1])


def test_diag_is_the_diagonal(kernel, x):
    fitted = kernel.fit(x)
    torch.testing.assert_close(fitted.diag(x), fitted.matrix(x).diagonal())
    torch.testing.assert_close(fitted.diag(x[:1]), fitted.matrix(x[:1]).diagonal())


def test_cross_matrix_is_a_block_of_the_whole(kernel, x):
    fitted = kernel.fit(x)
    whole = fitted.matrix(x)
    torch.testing.assert_close(fitted.matrix(x[:20], x[20:]), whole[:20, 20:])
    torch.testing.assert_close(fitted.matrix(x, x), whole)


def test_blocks_are_the_matrix(kernel, x, monkeypatch):
    fitted = kernel.fit(x)
    for max_bytes, y in ((1, None), (10_000, x[:30]), (10_000, None), (10**9, x[:30])):  # row by row to at once
        monkeypatch.setattr(kernels, "_BLOCK_BYTES", max_bytes)
        blocks = list(fitted.blocks(x, y))
        expected_rows = max(1, max_bytes // (4 * 8 * (72 if y is None else 30)))
        assert len(blocks[0][1]) == min(72, expected_rows)
        assert [i for rows, _ in blocks for i in range(72)[rows]] == list(range(72))
        torch.testing.assert_close(torch.cat([block for _, block in blocks]), fitted.matrix(x, y))


def test_explicit_features_reproduce_the_matrix(kernel, x):
    fitted = kernel.fit(x)
    features = fitted.explicit_features(x)
    if features is None:
        assert not isinstance(kernel, CoralKernel | LinearKernel)
    else:
        torch.testing.assert_close(features @ features.T, fitted.matrix(x))


def test_dtype_and_device_follow_the_input(kernel, x):
    for dtype in (torch.float32, torch.float64):
        z = x.to(dtype)
        fitted = kernel.fit(z)
        for result in (fitted.matrix(z), fitted.matrix(z, z[:4]), fitted.diag(z), fitted.explicit_features(z)):
            if result is not None:
                assert result.dtype == dtype
                assert result.device == z.device


def test_half_precision_is_computed_in_single(kernel, x):
    half = x.to(torch.float16 if kernel.is_fitted else torch.bfloat16)
    fitted = kernel.fit(half)
    exact = kernel.fit(half.double())
    for result, reference in (
        (fitted.matrix(half), exact.matrix(half.double())),
        (fitted.matrix(half, half[:5]), exact.matrix(half.double(), half[:5].double())),
        (fitted.diag(half), exact.diag(half.double())),
        (fitted.explicit_features(half), exact.explicit_features(half.double())),
    ):
        if reference is None:
            assert result is None
        else:
            assert result.dtype == torch.float32
            torch.testing.assert_close(result.double(), reference, rtol=1e-4, atol=1e-5)


def test_autocast_changes_nothing(kernel, x):
    x = x.float()
    fitted = kernel.fit(x)
    plain = fitted.matrix(x), fitted.matrix(x, x[:9]), fitted.diag(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = fitted.matrix(x), fitted.matrix(x, x[:9]), fitted.diag(x)
    for a, b in zip(plain, cast):
        assert torch.equal(a, b)


def test_differentiable_in_both_arguments(kernel):
    x, y = normal(4, 2, 3).requires_grad_(), normal(3, 2, 4).requires_grad_()
    fitted = kernel.fit(torch.cat([x, y]).detach())
    assert torch.autograd.gradcheck(lambda a: fitted.matrix(a), (x,))
    assert torch.autograd.gradcheck(lambda a, b: fitted.matrix(a, b), (x, y))
    torch.testing.assert_close(fitted.matrix(x), fitted.matrix(x.detach()))


def test_fit_returns_a_copy_and_needs_no_gradient(kernel, x):
    before = repr(kernel), kernel.is_fitted
    fitted = kernel.fit(x.clone().requires_grad_())
    assert fitted.is_fitted
    assert (repr(kernel), kernel.is_fitted) == before
    assert not fitted.matrix(x).requires_grad


def test_state_is_what_fit_took(kernel, x):
    """A checkpoint of the state gives the fitted kernel back, whatever the kernel takes from data."""
    fitted = kernel.fit(x)
    again = kernel.with_state(fitted.state())
    assert again.is_fitted
    assert torch.equal(again.matrix(x), fitted.matrix(x))
    assert bool(fitted.state()) == (not kernel.is_fitted)
    assert kernel.with_state(kernel.state()).is_fitted == kernel.is_fitted


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 12), d=st.integers(1, 5), seed=st.integers(0, 999), name=st.sampled_from(list(KERNELS)))
def test_contract_at_any_small_size(n, d, seed, name):
    x = normal(n, d, seed)
    fitted = KERNELS[name].fit(x)
    k = fitted.matrix(x)
    assert k.shape == (n, n)
    assert bool(torch.isfinite(k).all())
    torch.testing.assert_close(k.diagonal(), fitted.diag(x))


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "reference"),
    [
        (RBFMixture((0.7,)), lambda a, b: rbf_kernel(a, b, gamma=0.7)),
        (RBFMixture((0.7,), scale=5.0), lambda a, b: rbf_kernel(a, b, gamma=0.14)),
        (RBFMixture(), lambda a, b: sum(rbf_kernel(a, b, gamma=g) for g in PAPER_GAMMAS)),
        (LinearKernel(), linear_kernel),
    ],
    ids=["rbf", "scaled", "mixture", "linear"],
)
def test_equal_to_sklearn(kernel, reference):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        x, y = normal(30, 4, 1, dtype), normal(20, 4, 2, dtype)
        for a, b in ((x, y), (x, None)):
            expected = torch.from_numpy(reference(a.double().numpy(), (a if b is None else b).double().numpy()))
            torch.testing.assert_close(kernel.matrix(a, b).double(), expected, rtol=tolerance, atol=tolerance)


def test_papers_mixture():
    """Section 3: five bandwidths, summed, so κ(z, z) = 5."""
    assert RBFMixture().gammas == (0.001, 0.01, 0.1, 1.0, 10.0)
    k = as_kernel("mmd").matrix(torch.tensor([[0.0], [2.0]]))
    assert float(k[0, 0]) == 5.0
    assert float(k[0, 1]) == pytest.approx(sum(math.exp(-4 * g) for g in PAPER_GAMMAS))


def test_coral_kernel_is_the_product_of_centred_outer_products(x):
    fitted = CoralKernel().fit(x)
    centred = x - x.mean(0)
    outer = (centred[:, :, None] * centred[:, None, :]).flatten(1)
    torch.testing.assert_close(fitted.matrix(x), outer @ outer.T)
    torch.testing.assert_close(fitted.explicit_features(x) @ fitted.explicit_features(x).T, outer @ outer.T)
    # the mean of the features is the covariance, so its squared norm is that of the covariance
    covariance = torch.from_numpy(np.cov(x.numpy().T, ddof=0))
    torch.testing.assert_close(fitted.matrix(x).mean(), covariance.square().sum())


def test_explicit_features_stay_narrow():
    assert CoralKernel().fit(normal(3, 22)).explicit_features(normal(3, 22)).shape == (3, 253)
    assert CoralKernel().fit(normal(3, 23)).explicit_features(normal(3, 23)) is None
    assert LinearKernel().explicit_features(normal(3, 256)).shape == (3, 256)
    assert LinearKernel().explicit_features(normal(3, 257)) is None


@pytest.mark.parametrize(("scale", "statistic"), [("median", np.median), ("mean", np.mean)])
def test_scale_from_the_data(scale, statistic):
    x = normal(7, 3, 5)  # 21 pairs: an odd number has one median
    pairs = [float((x[i] - x[j]).square().sum()) for i in range(7) for j in range(i)]
    fitted = RBFMixture((1.0,), scale=scale).fit(x)
    assert fitted.fitted_scale == pytest.approx(statistic(pairs))
    expected = rbf_kernel(x.numpy(), gamma=1 / statistic(pairs))
    torch.testing.assert_close(fitted.matrix(x), torch.from_numpy(expected))
    # another fit takes the scale anew
    assert fitted.fit(10 * x).fitted_scale == pytest.approx(100 * statistic(pairs))
    torch.testing.assert_close(fitted.fit(10 * x).matrix(10 * x), fitted.matrix(x))


def test_scale_of_many_rows_is_that_of_a_part():
    x = normal(4000, 3, 6)
    fitted = RBFMixture(scale="mean").fit(x)
    assert fitted.fitted_scale == pytest.approx(6.0, rel=0.1)  # E|z - z'|² = 2 d
    assert fitted.fitted_scale == RBFMixture(scale="mean").fit(x[::4]).fitted_scale


@pytest.mark.parametrize("x", [torch.ones(4, 2), torch.ones(1, 2)], ids=["equal rows", "one row"])
def test_no_distances_count_as_scale_one(x):
    fitted = RBFMixture(scale="median").fit(x)
    assert fitted.fitted_scale == 1.0
    assert float(fitted.matrix(x).min()) == 5.0


def test_diagonal_of_distances_is_exactly_zero():
    x = normal(50, 20, 7, torch.float32) + 300
    for z in (x, x.clone().requires_grad_()):
        assert not bool(squared_distances(z).diagonal().any())
        assert bool((squared_distances(z) >= 0.0).all())


# --- float32 ---------------------------------------------------------------------------------------------


def exact_distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([(y.double() - row).square().sum(1) for row in x.double()])


def exact_mixture(x: Tensor, y: Tensor, gammas: tuple[float, ...] = PAPER_GAMMAS) -> Tensor:
    d2 = exact_distances(x, y)
    return torch.stack([torch.exp(-gamma * d2) for gamma in gammas]).sum(0)


def spread(d: int, offset: float) -> Tensor:
    return normal(90, d, 1, torch.float32) + offset * normal(1, d, 2, torch.float32).sign()


def near_duplicates(d: int, offset: float) -> Tensor:
    x = spread(d, offset)
    return torch.cat([x, x + 1e-3 * normal(90, d, 3, torch.float32), x[:5]])


def tight_clusters(d: int, offset: float) -> Tensor:
    centres = 3 * normal(6, d, 4, torch.float32) + offset
    return centres.repeat_interleave(30, 0) + 0.02 * normal(180, d, 5, torch.float32)


def worst(k: Tensor, exact: Tensor) -> float:
    return float(((k.double() - exact).abs() / exact.clamp_min(1e-6)).max())


CLOUDS = (spread, near_duplicates, tight_clusters)
OFFSETS = (0.0, 10.0, 100.0, 1000.0)
# every pair of cloud, offset and dimension
FAR = [(CLOUDS[(i + j) % 3], d, offset) for i, d in enumerate((2, 64, 256)) for j, offset in enumerate(OFFSETS)]


@pytest.mark.parametrize(("make", "d", "offset"), FAR)
def test_float32_mixture_far_from_the_origin(make: Callable[[int, float], Tensor], d, offset, monkeypatch):
    x = make(d, offset)
    exact = exact_mixture(x, x)
    kernel = RBFMixture()
    assert worst(kernel.matrix(x), exact) < 1e-4
    assert worst(kernel.matrix(x[:40], x[30:]), exact[:40, 30:]) < 1e-4
    monkeypatch.setattr(kernels, "_BLOCK_BYTES", 20_000)
    blocks = torch.cat([block for _, block in kernel.blocks(x)])
    assert worst(blocks, exact) < 1e-4


@pytest.mark.parametrize(("d", "offset"), [(2, 1000.0), (64, 100.0), (256, 1000.0), (256, 0.0)])
def test_float32_mixture_with_gradient_far_from_the_origin(d, offset):
    x = spread(d, offset).requires_grad_()
    assert worst(RBFMixture().matrix(x).detach(), exact_mixture(x.detach(), x.detach())) < 1e-4


@pytest.mark.parametrize(("d", "gap"), [(2, 1000.0), (64, 100.0), (64, 1000.0), (256, 100.0), (256, 1000.0)])
def test_float32_mixture_of_two_groups_far_apart(d, gap):
    x = torch.cat([normal(50, d, 1, torch.float32), normal(50, d, 2, torch.float32) + gap])
    assert worst(RBFMixture().matrix(x), exact_mixture(x, x)) < 1e-4


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_float32_coral_kernel_far_from_the_origin(offset):
    x = spread(16, offset)
    k, exact = CoralKernel().fit(x).matrix(x), CoralKernel().fit(x.double()).matrix(x.double())
    assert float((k.double() - exact).abs().max() / exact.max()) < 1e-4


@pytest.mark.parametrize("gammas", [(1.0,), (1000.0,), (1e-3, 1e3)])
def test_float32_single_bandwidths(gammas):
    x = near_duplicates(32, 100.0)
    assert worst(RBFMixture(gammas).matrix(x), exact_mixture(x, x, gammas)) < 1e-4


# --- names, functions, errors ----------------------------------------------------------------------------


def test_names():
    assert as_kernel("mmd") == RBFMixture(PAPER_GAMMAS)
    assert as_kernel("rbf") == RBFMixture((1.0,))
    assert isinstance(as_kernel("coral"), CoralKernel)
    kernel = RBFMixture((2.0,))
    assert as_kernel(kernel) is kernel
    assert as_kernel(cosine) == FunctionKernel(cosine)


@pytest.mark.parametrize(
    ("argument", "field", "named"),
    [
        ("gauss", "kernel", ("'gauss'", "mmd", "linear")),
        (3.0, None, ("kernel", "float")),
        (None, None, ("kernel", "NoneType")),
    ],
)
def test_as_kernel_errors(argument, field, named):
    with refused(*named, field=field):
        as_kernel(argument)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x, y: (x @ y.T).sum(1), "(5,)"),
        (lambda x, y: y @ x.T, "(3, 5)"),
        (lambda x, y: (x @ y.T).numpy(), "ndarray"),
    ],
)
def test_function_kernel_with_a_wrong_result(function, got):
    with refused("(5, 3)", "5 and 3 rows", got):
        as_kernel(function).matrix(normal(5, 2), normal(3, 2))


def test_function_kernel_diagonal_needs_no_full_matrix():
    sizes = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x) * len(y))
        return x @ y.T

    x = normal(200, 3)
    torch.testing.assert_close(FunctionKernel(function).diag(x), x.square().sum(1))
    assert max(sizes) <= 64 * 64


@pytest.mark.parametrize("kernel", [CoralKernel(), RBFMixture(scale="median")])
def test_unfitted(kernel):
    assert not kernel.is_fitted
    for evaluate in (kernel.matrix, kernel.diag):
        with refused(kernel, "kernel.fit(features)"):
            evaluate(normal(3, 2))


def test_state_of_another_kernel():
    with refused("LinearKernel", "mean"):
        LinearKernel().with_state(CoralKernel().fit(normal(3, 2)).state())


def test_a_fitted_kernel_is_used_as_it_is_and_another_one_fitted(x):
    fitted = RBFMixture(scale="median").fit(10 * x)
    assert fitted_kernel(fitted, x) is fitted
    assert fitted_kernel(RBFMixture(scale="median"), x) == RBFMixture(scale="median").fit(x)
    torch.testing.assert_close(fitted_kernel("coral", x).state()["mean"], x.mean(0))
    assert fitted_kernel("linear", x) == LinearKernel()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RBFMixture(()), ("gammas", "()")),
        (lambda: RBFMixture((1.0, 0.0)), ("gammas", "(1.0, 0.0)")),
        (lambda: RBFMixture(scale="mode"), ("scale", "'mode'", "'median'", "'mean'")),
        (lambda: RBFMixture(scale=-1.0), ("scale", -1.0)),
    ],
)
def test_bad_parameters(make, named):
    with refused(*named):
        make()


# --- energy ----------------------------------------------------------------------------------------------


def test_the_energy_kernel_is_what_its_definition_says() -> None:
    x, y, base = normal(7, 3, 1), normal(5, 3, 2), normal(1, 3, 3)[0]
    kernel = EnergyKernel(base)
    for i, j in np.ndindex(7, 5):
        expected = (x[i] - base).norm() + (y[j] - base).norm() - (x[i] - y[j]).norm()
        assert float(kernel.matrix(x, y)[i, j]) == pytest.approx(float(expected))
    torch.testing.assert_close(kernel.paired(x[:5], y), kernel.matrix(x[:5], y).diagonal())
    torch.testing.assert_close(kernel.paired_distances(x[:5], y), 2.0 * (x[:5] - y).norm(dim=1))


def test_large_energy_matrices_agree_with_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([normal(40, 6, 1), normal(2, 6, 1)]).float() + 100.0  # two rows twice
    kernel = EnergyKernel().fit(x)
    small = kernel.matrix(x), kernel.matrix(x[:9], x)
    monkeypatch.setattr(kernels, "_BATCH_PAIRS", 0)
    large = kernel.matrix(x), kernel.matrix(x[:9], x)
    assert all(float((a - b).abs().max()) < 1e-5 for a, b in zip(large, small))


def test_energies_that_overflow_are_refused() -> None:
    with refused("EnergyKernel()", "torch.float32", "float64"):
        fitted_kernel("energy", 1e30 * normal(5, 2, dtype=torch.float32))
