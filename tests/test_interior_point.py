"""The baseline of the paper's Figure 3: the relaxed program of equation 16, against scipy and the best assignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, minimize
from torch import Tensor

from solver_problems import gen, greedy_cost, points
from vardass.paper.interior_point import relaxed_solution


def relaxed_cost(distances: Tensor, u: Tensor) -> float:
    return float(u.sum(0) @ (distances * u).sum(0))


def test_relaxation_is_not_integral() -> None:
    distances = torch.ones(1, 2)
    u = relaxed_solution(distances)
    torch.testing.assert_close(u, torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    assert relaxed_cost(distances.double(), u) == pytest.approx(0.5)
    assert {greedy_cost(distances, torch.tensor([j])) for j in (0, 1)} == {1.0}


def test_relaxed_solution_with_a_known_minimum() -> None:
    # one point: Σ_j D_j U_j² is least at U_j proportional to 1 / D_j
    distances = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    expected = torch.tensor([[4.0, 2.0, 1.0]], dtype=torch.float64) / 7.0
    torch.testing.assert_close(relaxed_solution(distances), expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(("n", "k"), [(6, 2), (6, 3), (40, 5), (100, 16)])
@pytest.mark.parametrize("seed", [0, 1])
def test_relaxed_solution_is_feasible_and_stationary(n: int, k: int, seed: int) -> None:
    x = points(n, 3, seed)
    distances = torch.cdist(x, x[:k]).square()
    distances /= distances.mean()
    u = relaxed_solution(distances)
    assert bool((u > 0.0).all())
    torch.testing.assert_close(u.sum(1), torch.ones(n, dtype=u.dtype))
    # at a local minimum no entry with mass has a larger gradient than another of its row
    gradient = (distances * u).sum(0) + distances * u.sum(0)
    excess = gradient - gradient.min(1, keepdim=True).values
    assert float((u * excess).max()) < 1e-4 * float(gradient.mean())
    assert relaxed_cost(distances, u) <= greedy_cost(distances, distances.argmin(1))


def scipy_relaxed(distances: Tensor, start: Tensor) -> Tensor:
    """A local minimum of the same program by scipy's sequential quadratic programming, from ``start`` (n, k)."""
    n, k = distances.shape
    d = distances.numpy()

    def value(flat: np.ndarray) -> float:
        u = flat.reshape(n, k)
        return float(u.sum(0) @ (d * u).sum(0))

    def gradient(flat: np.ndarray) -> np.ndarray:
        u = flat.reshape(n, k)
        return ((d * u).sum(0) + d * u.sum(0)).ravel()

    rows = LinearConstraint(np.kron(np.eye(n), np.ones(k)), 1.0, 1.0)
    found = minimize(
        value,
        start.numpy().ravel(),
        jac=gradient,
        bounds=Bounds(0.0, 1.0),
        constraints=rows,
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert found.status in (0, 8)  # 8: no direction goes down any more, which rounding decides at a minimum
    assert np.allclose(rows.A @ found.x, 1.0)
    return torch.from_numpy(found.x.reshape(n, k))


@pytest.mark.parametrize(("n", "k"), [(1, 3), (5, 2), (12, 3), (20, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_relaxed_solution_is_a_minimum_by_scipys_measure(n: int, k: int, seed: int) -> None:
    """The program is not convex: from our solution scipy must find nothing lower, and no far better one from 1/k."""
    x = points(n, 3, seed)
    distances = torch.cdist(x, torch.randn(k, 3, generator=gen(seed), dtype=x.dtype)).square()
    distances /= distances.mean()
    ours = relaxed_solution(distances)
    value = relaxed_cost(distances, ours)
    assert relaxed_cost(distances, scipy_relaxed(distances, ours)) >= value * (1.0 - 1e-6)
    uniform = torch.full_like(distances, 1.0 / k)
    assert value <= 1.02 * relaxed_cost(distances, scipy_relaxed(distances, uniform))


def best_assignment_cost(distances: Tensor) -> float:
    n, k = distances.shape
    labels = torch.tensor(list(itertools.product(range(k), repeat=n)))
    own = distances[torch.arange(n), labels]
    sizes = torch.nn.functional.one_hot(labels, k).sum(1)
    return float((own * sizes.gather(1, labels)).sum(1).min())


@pytest.mark.parametrize("k", [2, 3])
def test_rounded_solution_is_close_to_the_best_assignment(k: int) -> None:
    ratios = []
    for seed in range(20):
        x = torch.randn(6, 3, generator=gen(seed), dtype=torch.float64)
        distances = torch.cdist(x, torch.randn(k, 3, generator=gen(100 + seed), dtype=torch.float64)).square()
        best = best_assignment_cost(distances)
        relaxed = relaxed_cost(distances, relaxed_solution(distances))
        rounded = greedy_cost(distances, relaxed_solution(distances).argmax(1))
        assert relaxed <= rounded * (1.0 + 1e-6)
        ratios.append(rounded / best)
    # a local minimum, rounded: no guarantee, but never far from the optimum here
    assert min(ratios) == pytest.approx(1.0)
    assert max(ratios) < 1.35
    assert float(np.mean(ratios)) < 1.06
