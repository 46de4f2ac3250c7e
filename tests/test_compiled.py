"""Compiled loops against their plain twins: the same result where the order is fixed, else the same quality."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vardass import RBFMixture, backend, kernels
from vardass.kernels import as_kernel
from vardass.samplers import plan
from vardass.solvers import labels, stratify
from vardass.solvers.labels import SizeLimits, random_balanced_labels
from vardass.view import ExactView, LowRankView

pytest.importorskip("numba")
min_sum = importlib.import_module("vardass.solvers.min_sum")
dynamic_kmeans = importlib.import_module("vardass.paper.kmeans")


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clouds(n: int, d: int = 16, seed: int = 0) -> Tensor:
    generator = gen(seed)
    centres = torch.randn(7, d, generator=generator)
    return centres[torch.randint(7, (n,), generator=generator)] + 0.5 * torch.randn(n, d, generator=generator)


@pytest.mark.parametrize(
    ("n", "k", "rows", "kernel"), [(600, 16, 64, "mmd"), (600, 16, 64, "coral"), (900, 48, 40, "mmd")]
)
def test_coupled_plans_are_as_good(n: int, k: int, rows: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = clouds(n)
    strata = stratify(features, k, kernel=kernel)
    weights = strata.weights.float()
    phi = plan.plan_features(features, as_kernel(kernel).fit(features), 64, generator=gen()).features

    def residual() -> float:
        found = []
        for seed in range(3):
            table = plan.cycle_table(strata, rows, gen(seed))
            coupled = plan.couple_rows(table, phi, weights, rounds=48, generator=gen(seed))
            assert torch.equal(coupled.sort(0).values, table.sort(0).values)  # each column keeps its members
            found.append(float(plan.row_errors(coupled, phi, weights).square().sum()))
        return float(np.mean(found))

    compiled = residual()
    monkeypatch.setattr(plan, "compiled_loops", lambda tensor: None)
    assert compiled < 1.05 * residual()


@pytest.mark.parametrize(("rows", "k", "size"), [(10, 12, 10), (21, 5, 7), (2, 3, 2), (9, 4, 1)])
def test_coupling_leaves_the_errors_of_its_table(rows: int, k: int, size: int) -> None:
    phi = clouds(60).double() - clouds(60).double().mean(0)
    table = torch.randint(60, (rows, k), generator=gen())
    weights = torch.full((k,), 1.0 / k, dtype=torch.float64)
    shapes = ((rows, 16), (16, size), (size, size))
    errors, *buffers = (torch.zeros(shape).double().numpy() for shape in shapes)
    coupled = table.clone()
    for turn in range(3):
        known = (coupled, phi, phi.square().sum(1), weights, torch.randperm(rows, generator=gen(turn)))
        arrays = (*(array.numpy() for array in known), errors, *buffers, np.zeros((2, size), np.int64))
        backend.compiled_loops(phi).couple_rows(*arrays, turn > 0)
        np.testing.assert_allclose(errors, plan.row_errors(coupled, phi, weights))
    coupled = plan.couple_rows(table, phi, weights, rounds=3, generator=gen())
    first = float(plan.row_errors(table, phi, weights).square().sum())
    assert float(plan.row_errors(coupled, phi, weights).square().sum()) <= first * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("n", "k", "options"),
    [
        (500, 12, {}),
        (500, 12, {"min_size": 20, "max_size": 60}),
        (330, 33, {"equal": True}),
        (900, 16, {"rank": 32}),
        (300, 10, {"solver": "dynamic-kmeans", "trials": 7, "parallel": 3}),
        (300, 10, {"solver": "dynamic-kmeans", "parallel": 301}),
    ],
)
def test_strata_are_the_same(
    n: int, k: int, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = clouds(n).to(dtype)
    compiled = stratify(features, k, **options)
    for module in (min_sum, dynamic_kmeans):
        monkeypatch.setattr(module, "compiled_loops", lambda tensor: None)
    plain = stratify(features, k, **options)
    # sums of floats are taken in the same order, but not rounded at the same places
    assert compiled.variance == pytest.approx(plain.variance, rel=1e-9 if dtype == torch.float64 else 2e-2)
    if dtype == torch.float64:
        assert torch.equal(compiled.labels, plain.labels)


def test_only_plain_floats_on_a_cpu_are_compiled() -> None:
    assert backend.compiled_loops(torch.zeros(1)) is not None
    assert backend.compiled_loops(torch.zeros(1, dtype=torch.float64)) is not None
    assert backend.compiled_loops(torch.zeros(1, dtype=torch.bfloat16)) is None
    assert backend.compiled_loops(torch.zeros(1, device="meta")) is None


def test_importing_the_package_does_not_import_numba() -> None:
    code = "import sys, vardass; assert 'numba' not in sys.modules and 'vardass.compiled' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("n", "k", "options"), [(2500, 16, {}), (2500, 16, {"min_size": 100}), (2500, 300, {})])
def test_sequential_moves_are_as_good_as_those_of_blocks(
    n: int, k: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = clouds(n)
    problem = LowRankView.of(features, RBFMixture(), 32, generator=gen())
    limits = SizeLimits.of(n, k, **options)
    start = random_balanced_labels(n, k, 0)
    compiled = min_sum.min_sum(problem, k, limits=limits, labels=start)
    assert limits.hold(torch.bincount(compiled.labels, minlength=k))
    assert compiled.objective == pytest.approx(problem.objective(compiled.labels, k), rel=1e-4)
    monkeypatch.setattr(min_sum, "compiled_loops", lambda tensor: None)
    plain = min_sum.min_sum(problem, k, limits=limits, labels=start)
    assert compiled.objective <= 1.005 * plain.objective < problem.objective(start, k)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("copies", [1, 40])
def test_seeds_are_those_of_torch(exact: bool, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features = clouds(10 if copies > 1 else 400).double().repeat(copies, 1)  # with copies every distance gets 0
    problem = ExactView(features @ features.T) if exact else LowRankView(features, torch.rand(400).double())
    compiled = [labels.kernel_kmeanspp(problem, 30, gen(seed)) for seed in range(5)]
    monkeypatch.setattr(labels, "compiled_loops", lambda tensor: None)
    for seed, found in enumerate(compiled):
        assert len(set(found.tolist())) == 30
        if exact and copies > 1:
            continue  # distances of copies are rounding, which differs
        assert torch.equal(found, labels.kernel_kmeanspp(problem, 30, gen(seed)))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_compiled_mixture_is_the_sum_of_gaussians(scale: float) -> None:
    x = torch.randn(90, 7, generator=gen()) * scale + 5.0
    y = torch.cat([x[:5], x[5:10] + 1e-4 * scale, torch.randn(70, 7, generator=gen(1)) * scale + 5.0])
    x[20] *= 100.0  # an outlier, which moves the mean
    kernel = RBFMixture((0.01, 0.3, 10.0))
    assert len(x) * len(y) >= kernels._COMPILED_PAIRS
    distances = (x.double()[:, None] - y.double()).square().sum(2)
    expected = sum(torch.exp(-rate * distances) for rate in kernel.rates)
    torch.testing.assert_close(kernel.matrix(x, y).double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(kernel.matrix(x).diagonal(), torch.full((90,), 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_centred_matrix_has_the_same_distances(dtype: torch.dtype) -> None:
    matrix = RBFMixture().matrix(clouds(150).to(dtype))
    centred = matrix.clone()
    ExactView.centred(centred)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(centred.mean(0), torch.zeros(150, dtype=dtype), atol=tolerance, rtol=0)
    apart = [m.diagonal()[:, None] + m.diagonal() - 2 * m for m in (matrix, centred)]
    torch.testing.assert_close(*apart, atol=tolerance, rtol=0)


def test_rank_follows_the_strata_and_the_spectrum() -> None:
    x = clouds(2500)
    ranks = [stratify(x, k).info["rank"] for k in (8, 32, 128)]
    assert ranks == sorted(ranks)
    assert ranks[0] <= 33
    assert ranks[1] <= 65
    assert stratify(x, 8, kernel="rbf", rank=20).info["rank"] == 20


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)


CENTRE = "_compiled().centre(np.zeros((3, 3)), np.zeros(3), np.zeros(3)); "


def test_it_is_known_whether_loops_were_compiled_or_found_on_disk(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np; from vardass.backend import _compiled, were_compiled; before = were_compiled(); "
        f"sys.stderr.isatty = lambda: True; {CENTRE}print(before, were_compiled())"
    )
    for known, said in (("False True", "compiling on first use"), ("False False", "")):
        found = run(program, NUMBA_CACHE_DIR=str(tmp_path))
        assert found.stdout.strip() == known
        assert said in found.stderr
        assert bool(said) == bool(found.stderr)


@pytest.mark.parametrize("writable", [True, False])
def test_a_package_that_cannot_be_written_to_works(writable: bool, tmp_path: Path) -> None:
    """What is compiled goes to the user's folder, and nowhere where that cannot be written to either."""
    places = "InTreeCacheLocator" if writable else "CacheLocator"
    program = (
        "import numpy as np; from numba.core import caching\n"
        "def refuse(self): raise OSError('read-only')\n"
        "for name, place in vars(caching).items():\n"
        f"    if '{places}' in name: place.ensure_cache_path = refuse\n"
        "from vardass.backend import _compiled\n"
        f"{CENTRE}print(_compiled().centre.stats.cache_path)"
    )
    shown = run(program, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), NUMBA_CACHE_DIR="").stdout.strip()
    assert (str(tmp_path) in shown) == writable
    assert writable or shown == "None"


def test_warmup_compiles_all_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    from vardass.cli.stratify import warmup

    warmup()
    loops = backend._compiled()
    assert loops is not None
    for name in loops.__all__:
        precisions = {str(array.dtype) for signature in getattr(loops, name).signatures for array in signature[:1]}
        single = name in ("gaussian_mixture", "squared_norms")
        assert precisions >= ({"float32"} if single else {"float32", "float64"}) or name == "couple_rows", name
