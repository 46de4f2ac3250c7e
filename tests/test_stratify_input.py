"""What `stratify` takes and refuses: features of any type, kernels of any kind, numbers at the edge of float32."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import refused
from vardass.bounds import nearest_neighbour_bound
from vardass.errors import VardassWarning
from vardass.kernels import CoralKernel, FunctionKernel, Kernel, LinearKernel, RBFMixture
from vardass.samplers import BalancedBatchSampler, StratifiedBatchSampler
from vardass.solvers import stratify, stratify_groups
from vardass.variance import stratified_variance, uniform_variance


def cloud(n: int, d: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Skewed, so that strata of equal size are not the natural ones."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype).exp()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_size": 2.5}, (2.5,)),
        ({"max_size": 30.5}, (30.5,)),
        ({"max_passes": -1}, (0, -1)),
        ({"tol": -1.0}, (0, -1.0)),
        ({"tol": float("nan")}, (0, "nan")),
        ({"init": None}, (40, "NoneType")),
        ({"warm_start": "random"}, (40, "str")),
    ],
)
def test_more_bad_arguments_are_named(options, named):
    with refused(*named, field=next(iter(options))):
        stratify(cloud(40), 5, **options)


def test_unsigned_labels():
    start = torch.arange(40) % 5
    for dtype in (np.uint8, np.uint32, np.uint64):
        assert torch.equal(stratify(cloud(40), 5, init=start.numpy().astype(dtype), max_passes=0).labels, start)


@pytest.mark.parametrize(("kernel", "scale"), [("coral", 1e10), ("linear", 1e20)])
@pytest.mark.parametrize("rank", [0, 16])
def test_an_overflow_is_named(kernel, scale, rank):
    x = cloud(60, 30, dtype=torch.float32) * scale
    with refused("torch.float32", f"{x.abs().max():.3g}", "float64"):
        stratify(x, 5, kernel=kernel, rank=rank)


def test_linear_kernel_in_float32_far_from_the_origin():
    x = (cloud(200, 8).clamp_max(6.0) * 64).round() / 64
    far = stratify((x + 1e4).float(), 10, kernel="linear")
    assert far.variance == pytest.approx(stratified_variance(x, far.labels, kernel="linear"), rel=1e-4)
    assert far.variance <= 1.02 * stratify(x, 10, kernel="linear").variance


@pytest.mark.parametrize("rank", [1, 4])
def test_a_poor_rank_does_not_make_a_warm_start_worse(rank):
    x = cloud(400, 8)
    good = stratify(x, 10, restarts=5)
    assert stratify(x, 10, warm_start=good, rank=rank).variance <= good.variance * (1 + 1e-9)


@pytest.mark.parametrize("rank", [0, 12])
def test_a_function_may_compute_in_another_precision(rank):
    x = cloud(60, dtype=torch.float32)
    strata = stratify(x, 6, kernel=lambda a, b: torch.exp(-torch.cdist(a.double(), b.double(), p=1.0)), rank=rank)
    assert strata.variance <= 1.02 * stratify(x, 6, kernel=laplacian, rank=rank).variance


def test_saving_to_a_folder(tmp_path):
    with refused(tmp_path, "it is a folder"):
        stratify(cloud(40), 5).save(tmp_path)


# --- types of features -------------------------------------------------------------------------------------


HALF = cloud(60, 3, dtype=torch.float32).to(torch.bfloat16)
INPUTS = {
    "float16": HALF.to(torch.float16),
    "bfloat16": HALF,
    "float64": HALF.double(),
    "numpy": HALF.float().numpy(),
    "numpy float64": HALF.double().numpy(),
    "requires grad": HALF.float().requires_grad_(),
    "not contiguous": HALF.float().T.contiguous().T,
}


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("rank", [0, 8])
def test_types_of_input(x: Any, rank: int) -> None:
    strata = stratify(x, 6, rank=rank)
    reference = stratify(HALF.float(), 6, rank=rank)
    assert strata.variance == pytest.approx(reference.variance, rel=0.05)
    assert strata.variance == pytest.approx(stratified_variance(x, strata.labels, kernel="mmd"), rel=1e-5)
    assert strata.labels.dtype == torch.int64


def test_whole_numbers_and_read_only_arrays() -> None:
    array = np.random.default_rng(0).integers(0, 255, size=(40, 5)).astype(np.uint8)
    expected = stratify(array.astype(np.float32), 5, kernel="linear")
    array.flags.writeable = False
    for x in (array, torch.from_numpy(array.astype(np.int64)), array.astype(np.uint32)):
        assert torch.equal(stratify(x, 5, kernel="linear").labels, expected.labels)


# --- kernels ----------------------------------------------------------------------------------------------


def variance_by_pairs(x: Tensor, labels: Tensor, kernel: Kernel) -> float:
    """Σ_h |S_h|/n² Σ_{i in S_h} |φ_i - μ_h|² by a loop over pairs, for a fitted kernel."""
    matrix, total = kernel.matrix(x), 0.0
    for i, j in itertools.combinations(range(len(x)), 2):
        if labels[i] == labels[j]:
            total += float(matrix[i, i] + matrix[j, j] - 2.0 * matrix[i, j])
    return total / len(x) ** 2


def laplacian(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(x, y, p=1.0))


@pytest.mark.parametrize("rank", [0, 12])
def test_a_function_is_a_kernel(rank: int) -> None:
    x = cloud(60)
    by_function = stratify(x, 6, kernel=lambda a, b: torch.exp(-torch.cdist(a, b).square()), rank=rank)
    by_name = stratify(x, 6, kernel="rbf", rank=rank)
    assert torch.equal(by_function.labels, by_name.labels)
    assert by_function.variance == pytest.approx(by_name.variance, rel=1e-9)


@pytest.mark.parametrize("rank", [0, 12])
def test_a_function_may_have_learnable_parameters(rank: int) -> None:
    rate = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    strata = stratify(cloud(60), 6, kernel=lambda x, y: torch.exp(-rate * torch.cdist(x, y, p=1.0)), rank=rank)
    assert torch.equal(strata.labels, stratify(cloud(60), 6, kernel=laplacian, rank=rank).labels)


def test_objects_and_names_agree() -> None:
    x = cloud(60)
    for name, kernel in {"mmd": RBFMixture(), "coral": CoralKernel(), "linear": LinearKernel()}.items():
        assert torch.equal(stratify(x, 6, kernel=name).labels, stratify(x, 6, kernel=kernel).labels)
    assert stratify(x, 6, kernel=RBFMixture(scale="median")).kernel != stratify(x, 6).kernel


@pytest.mark.parametrize("kernel", [RBFMixture(scale="median"), CoralKernel()], ids=["median", "coral"])
def test_a_fitted_kernel_is_one_kernel_everywhere(kernel: Kernel) -> None:
    """Fitted to other data: whatever takes it must use it so, and report the same numbers."""
    x = cloud(40)
    fitted = kernel.fit(3.0 * x + 1.0)
    pairs = stratify(x, 20, kernel=fitted, equal=True)
    expected = variance_by_pairs(x, pairs.labels, fitted)
    assert expected != pytest.approx(stratified_variance(x, pairs.labels, kernel=kernel), rel=0.1)
    drawn = StratifiedBatchSampler(40, 20, kernel=fitted, equal=True)
    drawn.refresh(x)
    assert drawn.strata is not None
    for value in (
        pairs.variance,
        stratified_variance(x, pairs.labels, kernel=fitted),
        drawn.strata.variance,
    ):
        assert value == pytest.approx(expected, rel=1e-9)
    low_rank = stratify(x, 20, kernel=fitted, rank=30)
    assert low_rank.variance == pytest.approx(variance_by_pairs(x, low_rank.labels, fitted), rel=1e-9)
    one = uniform_variance(x, 1, kernel=fitted)
    for value in (
        stratify(x, 1, kernel=fitted).variance,
        stratify_groups(x, 2, torch.arange(40) % 2, kernel=fitted).uniform_variance * 2,
        nearest_neighbour_bound(x, 1, kernel=fitted).variance,
    ):
        assert value == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize(
    ("kernel", "field", "named"),
    [
        (lambda x, y: x @ y.T + x[:, :1], None, ("symmetric", "f(x, y)", "f(y, x).T")),
        (lambda x, y: torch.full((len(x), len(y)), float("nan")), None, ("kernel function", "NaN")),
        (lambda x, y: x @ y.T / 0.0, None, ("kernel function", "NaN")),
        (lambda x, y: x.sum(), None, ("(40, 40)", "()")),
        (lambda x, y: (x @ y.T).numpy(), None, ("(40, 40)", "ndarray")),
        ("gaussian", "kernel", ("'gaussian'", "rbf")),
        (None, None, ("kernel", "NoneType")),
        (7, None, ("kernel", "int")),
    ],
)
def test_bad_kernels_are_named(kernel: Any, field: str | None, named: tuple[str, ...]) -> None:
    with refused(*named, field=field):
        stratify(cloud(40), 5, kernel=kernel)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_kernel_that_is_not_positive_semi_definite_warns_once_where_it_was_called(rank: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strata = stratify(cloud(60), 5, kernel=lambda x, y: 3.0 - torch.cdist(x, y), rank=rank)
    assert [w.category for w in caught] == [VardassWarning]
    assert "not positive semi-definite" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert int(strata.sizes.min()) >= 1


def test_good_kernels_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stratify(cloud(60), 5, kernel=laplacian)
        stratify(cloud(60), 5, kernel=FunctionKernel(lambda x, y: x @ y.T))
        stratify(torch.arange(60.0)[:, None], 5, kernel=lambda x, y: x @ y.T)  # rank one


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"k": 41}, None, ("k=41", "n=40", "batch_size")),
        ({"k": 0}, "k", (1, 0)),
        ({"k": -3}, "k", (1, -3)),
        ({"k": 5.0}, "k", (5.0,)),
        ({"k": "5"}, "k", ("'5'",)),
        ({"k": True}, "k", (True,)),
        ({"k": None}, "k", (None,)),
        ({"min_size": 9}, None, ("min_size=9", "k=5", 45, "n=40", 8, 4)),
        ({"max_size": 7}, None, ("max_size=7", "k=5", 35, "n=40", 8, 6)),
        ({"min_size": 8, "max_size": 6}, None, ("max_size=6", "k=5", 30, "n=40")),
        ({"min_size": 0}, "min_size", (1, 0)),
        ({"equal": True, "max_size": 7}, None, ("equal=True", "max_size=7", "n=40", "k=5")),
        ({"solver": "k-means"}, "solver", ("'k-means'", "'kmeans'")),
        ({"init": "pca"}, "init", ("'pca'", "bisection")),
        ({"restarts": 0}, "restarts", (1, 0)),
        ({"restarts": 1.5}, "restarts", (1.5,)),
        ({"rank": -1}, "rank", (0, -1)),
        ({"rank": 2.5}, "rank", (2.5,)),
        ({"trials": 9}, None, ("solver 'min-sum'", "'trials'", "max_passes", "tol")),
        ({"solver": "kmeans", "max_passes": 9}, None, ("solver 'kmeans'", "'max_passes'", "max_iter")),
        ({"solver": "dynamic-kmeans", "trials": 0}, "trials", (1, 0)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_named(options: dict[str, Any], field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        stratify(cloud(40), **{"k": 5, **options})


def test_bad_rows_are_named() -> None:
    x = cloud(40)
    x[7, 1] = float("nan")
    x[[12, 30], 0] = float("inf")
    with refused("3 of 40 rows", "rows 7, 12, 30", field="features"):
        stratify(x, 5)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (torch.zeros(0, 3), ("(0, 3)",)),
        (torch.zeros(4, 0), ("(4, 0)",)),
        (torch.zeros(4, 3, 2), ("(n, d)", "(4, 3, 2)")),
        (torch.zeros(4, 3, dtype=torch.complex64), ("torch.complex64",)),
        (torch.zeros(4, 3, dtype=torch.bool), ("torch.bool",)),
        (np.array([["a"], ["b"]]), ("<U1",)),
    ],
    ids=["no rows", "no columns", "3-d", "complex", "bool", "text"],
)
def test_bad_features_are_named(x: Any, named: tuple[str, ...]) -> None:
    with refused(*named, field="features"):
        stratify(x, 1)


# --- whatever numpy and torch can hold -------------------------------------------------------------------------


ARRAYS = {
    "negative strides": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "big-endian": lambda x: x.astype(">f8"),
    "long double": lambda x: x.astype(np.longdouble),
    "nested list": lambda x: x.tolist(),
    "read-only": lambda x: np.broadcast_to(x, x.shape),
}


@pytest.mark.parametrize("convert", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_of_any_make(convert: Any) -> None:
    x = cloud(40).numpy()
    expected = stratify(x, 5, kernel="linear")
    assert torch.equal(stratify(convert(x), 5, kernel="linear").labels, expected.labels)
    assert stratified_variance(convert(x), expected.labels, kernel="linear") == pytest.approx(expected.variance)


def test_labels_of_any_make() -> None:
    x, start = cloud(40), np.arange(40) % 5
    for labels in (start[::-1][::-1], np.ascontiguousarray(start[::-1])[::-1], start.astype(">i4"), start.tolist()):
        assert stratify(x, 5, init=labels, max_passes=0).labels.tolist() == start.tolist()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls them a prototype, and obsolete
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    QUANTISED = torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ([[1.0, 2.0], [3.0]], ("rows of one length", "list")),
        (torch.eye(4).to_sparse(), ("dense", "torch.sparse_coo", ".to_dense()")),
        (NESTED, ("dense", "nested", ".to_dense()")),
        (torch.ones(4, 2, device="meta"), ("device meta",)),
        (QUANTISED, ("torch.qint8", ".dequantize()")),
        (np.ma.masked_greater(np.eye(4), 0.5), ("4 masked values", ".filled(...)")),
        (object(), ("object",)),
        ({"a": 1}, ("dict",)),
    ],
    ids=["ragged", "sparse", "nested", "meta", "quantised", "masked", "object", "mapping"],
)
def test_what_is_no_array_is_named(features: Any, named: tuple[str, ...]) -> None:
    with refused(*named, field="features"):
        stratify(features, 1)


@pytest.mark.parametrize("seed", ["a", 1.7, True, [3], 2**64, -(2**63) - 1])
def test_bad_seeds_are_named(seed: Any) -> None:
    with refused(repr(seed), field="seed"):
        stratify(cloud(40), 5, seed=seed)


def test_good_seeds() -> None:
    x = cloud(40)
    for one, other in ((None, 0), (np.int64(7), 7)):
        assert torch.equal(stratify(x, 5, seed=one).labels, stratify(x, 5, seed=other).labels)
    stratify(x, 5, seed=2**64 - 1)


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("kernel", ["mmd", RBFMixture(scale="median"), "coral", "linear", "energy"], ids=str)
def test_features_too_large_for_a_kernel(kernel: Any, rank: int) -> None:
    x = cloud(60, 30, dtype=torch.float32) * 1e30
    top = f"{x.abs().max():.3g}"
    for use in (
        lambda: stratify(x, 5, kernel=kernel, rank=rank),
        lambda: uniform_variance(x, 5, kernel=kernel),
        lambda: nearest_neighbour_bound(x, 5, kernel=kernel),
        lambda: BalancedBatchSampler(60, 8, kernel=kernel).refresh(x),
    ):
        with refused(top, "torch.float32", "float64"):
            use()
    with refused("torch.float64", f"{x.double().abs().max() * 1e140:.3g}"):
        stratify(x.double() * 1e140, 5, kernel=kernel, rank=rank)


def test_features_too_large_for_kmeans() -> None:
    with refused("solver 'kmeans'", "torch.float32", "float64"):
        stratify(cloud(60, 3, dtype=torch.float32) * 1e30, 5, kernel=laplacian, solver="kmeans")
