"""One domain through its kernel, in three forms: every quantity against brute force on explicit features."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from solver_problems import exact, gen, low_rank_with_residual, points
from vardass.kernels import RBFMixture
from vardass.paper.kmeans import centroid_objective
from vardass.solvers import labels as labels_module
from vardass.solvers.labels import Distances, random_balanced_labels
from vardass.variance import true_objective
from vardass.view import EXACT_LIMIT, ExactView, KernelView, LowRankView, View

N = 20


def explicit_features(view: View) -> Tensor:
    """Features with exactly the view's inner products, residual directions included."""
    if isinstance(view, LowRankView):
        return torch.cat([view.features, view.residual.sqrt().diag()], 1)
    values, vectors = torch.linalg.eigh(view.in_full().matrix)
    return vectors * values.clamp_min(0.0).sqrt()


VIEWS = {
    "exact": exact(points(N)),
    "low-rank": low_rank_with_residual(N),
    "kernel": KernelView(points(N), RBFMixture(gammas=(0.1, 1.0))),
}
each_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())


@each_view
@pytest.mark.parametrize("k", [1, 3, 20])
def test_objective_is_the_sum_over_pairs(view: View, k: int) -> None:
    labels = random_balanced_labels(N, k, 5)
    phi = explicit_features(view)
    pairs = sum(
        float((phi[i] - phi[j]).square().sum())
        for i, j in itertools.combinations(range(N), 2)
        if labels[i] == labels[j]
    )
    assert view.objective(labels, k) == pytest.approx(pairs, rel=1e-9, abs=1e-9)
    distances = view.centroid_distances(labels, k)
    assert centroid_objective(distances, labels) == pytest.approx(pairs, rel=1e-9, abs=1e-9)
    if k == 1:
        assert view.whole == pytest.approx(pairs, rel=1e-9)


@each_view
def test_centroid_distances_match_explicit_means(view: View) -> None:
    labels = torch.randint(3, (N,), generator=gen(2))
    labels[labels == 2] = 3  # stratum 2 is empty
    phi = explicit_features(view)
    distances = view.centroid_distances(labels, 4)
    for h in (0, 1, 3):
        expected = (phi - phi[labels == h].mean(0)).square().sum(1)
        torch.testing.assert_close(distances[:, h], expected)
    assert torch.isinf(distances[:, 2]).all()


@each_view
def test_any_part_of_the_distances_is_that_of_the_whole(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.randint(3, (N,), generator=gen(2))
    labels[labels == 2] = 3  # stratum 2 is empty
    whole = view.centroid_distances(labels, 4)
    monkeypatch.setattr(labels_module, "_TABLE_NUMBERS", 12)  # three rows at a time
    parts = Distances(view, labels, 4)
    assert parts.table is None
    torch.testing.assert_close(torch.cat([parts.rows(block) for block in parts.blocks()]), whole)
    torch.testing.assert_close(parts.rows(torch.tensor([5, 0, 19])), whole[[5, 0, 19]])
    torch.testing.assert_close(torch.stack([parts.column(h) for h in range(4)], 1), whole)
    nearest, own = parts.nearest(labels)
    assert torch.equal(nearest, whole.argmin(1))
    torch.testing.assert_close(own, whole.gather(1, labels[:, None])[:, 0])


@each_view
def test_values_are_those_of_the_kernel_matrix(view: View) -> None:
    phi = explicit_features(view)
    matrix = phi @ phi.T
    rows, other = torch.tensor([4, 0, 17]), torch.tensor([5, 1, 2])
    torch.testing.assert_close(view.diag, matrix.diagonal())
    torch.testing.assert_close(view.columns(rows), matrix[:, rows])
    torch.testing.assert_close(view.columns(rows, slice(3, 12)), matrix[3:12, rows])
    torch.testing.assert_close(view.block(rows), matrix[rows][:, rows])
    torch.testing.assert_close(view.in_full().matrix, matrix)
    torch.testing.assert_close(view.pair_distances(rows, other), (phi[rows] - phi[other]).square().sum(1))
    torch.testing.assert_close(view.mean_products(rows), matrix[rows][:, rows].mean(1))
    right = torch.randn(N, 2, generator=gen(7), dtype=torch.float64)
    torch.testing.assert_close(view.multiply(right), matrix @ right)


@each_view
def test_sums_over_strata_and_weighted_sums(view: View) -> None:
    phi = explicit_features(view)
    matrix = phi @ phi.T
    labels = random_balanced_labels(N, 4, 1)
    one_hot = torch.nn.functional.one_hot(labels).double()
    torch.testing.assert_close(view.stratum_sums(labels, 4), matrix @ one_hot)
    torch.testing.assert_close(view.within(labels, 4), (one_hot.T @ matrix @ one_hot).diagonal())
    rows, weights = torch.tensor([4, 0, 17]), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    others = torch.tensor([1, 2, 19])
    combined = view.combine(rows, weights)[None]
    torch.testing.assert_close(view.products(combined, others)[:, 0], matrix[others][:, rows] @ weights)


@each_view
def test_means_spread_and_errors_of_batches(view: View) -> None:
    phi = explicit_features(view)
    mean = phi.mean(0)
    torch.testing.assert_close(view.row_means, phi @ mean)
    expected = (phi - mean).square().sum(1)
    if not isinstance(view, LowRankView):  # which leaves out what a residual adds to the mean, 1 / n of it
        torch.testing.assert_close(view.spread, expected)
    assert float(view.spread.sum()) == pytest.approx(float(expected.sum()), rel=0.06)
    rows, weights = torch.tensor([[4, 0, 17], [3, 3, 9]]), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    errors = torch.stack([(weights @ phi[batch] - mean).square().sum() for batch in rows])
    torch.testing.assert_close(view.batch_errors(rows, weights), errors)


def test_the_form_of_features_has_their_distances_at_any_rank() -> None:
    x, kernel = points(60, 4), RBFMixture(gammas=(0.1, 1.0))
    matrix = kernel.matrix(x)
    distances = matrix.diagonal()[:, None] + matrix.diagonal() - 2.0 * matrix
    i, j = torch.triu_indices(60, 60, 1)
    for found in (LowRankView.of(x, kernel, 60, generator=gen()), ExactView.of(x, kernel)):
        torch.testing.assert_close(found.pair_distances(i, j), distances[i, j], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("form", ["low-rank", "kernel"])
def test_the_true_objective_is_exact_for_few_points_and_has_an_honest_error_for_many(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, kernel = points(300, 4), RBFMixture(gammas=(0.1, 1.0))
    truth = KernelView(x, kernel)
    seen = LowRankView.of(x, kernel, 16, generator=gen()) if form == "low-rank" else truth
    labels = random_balanced_labels(300, 6, 0)
    expected = truth.objective(labels, 6)
    assert len(x) <= EXACT_LIMIT
    assert true_objective(seen, truth, labels, 6, gen()) == (pytest.approx(expected, rel=1e-12), 0.0)
    monkeypatch.setattr("vardass.view.EXACT_LIMIT", 0)
    found = [true_objective(seen, truth, labels, 6, gen(seed)) for seed in range(30)]
    scores = torch.tensor([(value - expected) / error for value, error in found])
    assert float(scores.abs().max()) < 5.0
    assert 0.6 < float(scores.square().mean().sqrt()) < 1.5


def test_the_mean_over_all_pairs() -> None:
    kernel = RBFMixture(gammas=(1.0,))
    for n in (40, 700):  # all rows in one block, and random blocks of 512
        x = points(n, 3)
        view = KernelView(x, kernel)
        features = torch.randn(n, 2, generator=gen(1), dtype=torch.float64)
        residual = kernel.diag(x) - features.square().sum(1)
        mean, error = view.pair_mean(features, residual, gen())
        expected = float(kernel.matrix(x).mean())
        assert (error == 0.0) == (n == 40)
        assert abs(mean - expected) <= max(5.0 * error, 1e-12)
        torch.testing.assert_close(view.mean_to_all(x[:3]), kernel.matrix(x[:3], x).mean(1))
