"""k-means++ and k-DPP batches against the probabilities of all sequences and of all subsets.

The reference is enumeration: every ordered tuple of k-means++ seeds, and for the k-DPP det(L_S) of every subset of
size k, in double precision.
"""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from vardass.kernels import RBFMixture, as_kernel
from vardass.paper.diverse_samplers import (
    DPPBatchSampler,
    KMeansPlusPlusBatchSampler,
    _log_elementary_symmetric,
    _MassTable,
)


def points(n, d=3, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fitted(cls, x, k, **options):
    sampler = cls(len(x), k, **options)
    sampler.refresh(x)
    return sampler


def subset_probabilities(matrix, k):
    """det(L_S) / Σ_S det(L_S), over all subsets of size k."""
    subsets = list(combinations(range(len(matrix)), k))
    dets = torch.stack([torch.linalg.det(matrix[list(s)][:, list(s)]) for s in subsets]).clamp_min(0.0)
    return dict(zip(subsets, (dets / dets.sum()).tolist(), strict=True))


def sequence_probabilities(matrix, k):
    """Probability of each ordered k-tuple under k-means++ seeding."""
    diag = matrix.diagonal()
    distances = (diag[:, None] + diag - 2 * matrix).clamp_min(0.0)
    result = {}
    for sequence in permutations(range(len(matrix)), k):
        probability = 1 / len(matrix)
        for step in range(1, k):
            nearest = distances[list(sequence[:step])].min(0).values
            probability *= float(nearest[sequence[step]] / nearest.sum())
        result[sequence] = probability
    return result


def p_value(drawn, probabilities):
    """Chi-square p-value of drawn outcomes; an outcome that cannot happen gives 0."""
    counts = Counter(drawn)
    possible = {key: p for key, p in probabilities.items() if p > 1e-12}
    if set(counts) - set(possible):
        return 0.0
    observed = [counts[key] for key in possible]
    total = sum(observed)
    return chisquare(observed, [p * total / sum(possible.values()) for p in possible.values()]).pvalue


def as_subsets(rows):
    return [tuple(sorted(row)) for row in rows.tolist()]


# --- elementary symmetric polynomials ---------------------------------------------------------------------


def exact_polynomials(values, k):
    """e_0..e_k by exact arithmetic."""
    result = [1] + [0] * k
    for value in values:
        for degree in range(k, 0, -1):
            result[degree] += value * result[degree - 1]
    return result


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_log_polynomials_equal_integer_arithmetic_for_every_prefix(values):
    k = len(values)
    table = _log_elementary_symmetric(torch.tensor(values, dtype=torch.float64).log(), k)
    assert table.shape == (k + 1, k + 1)
    for m in range(k + 1):
        expected = torch.tensor(exact_polynomials(values[:m], k), dtype=torch.float64)
        torch.testing.assert_close(table[:, m].exp(), expected, rtol=1e-12, atol=0.0)


def test_log_polynomials_neither_overflow_nor_cancel():
    values = torch.logspace(6, -12, 2000, dtype=torch.float64)
    table = _log_elementary_symmetric(values.log(), 128)
    assert not table.isnan().any()
    last = table[:, -1]
    assert last[128] > 710  # its exponential is beyond double precision
    shift = 110  # every double of this size is a whole multiple of 2^-110
    whole = [int(Fraction(v) * 2**shift) for v in values.tolist()]
    exact = exact_polynomials(whole, 128)
    for degree in (1, 2, 64, 128):
        expected = math.log(exact[degree]) - degree * shift * math.log(2)
        assert float(last[degree]) == pytest.approx(expected, abs=1e-9)


# --- k-DPP against brute force ----------------------------------------------------------------------------

DPP_CASES = [("rbf", 0), ("rbf", 6), ("mmd", 0), ("mmd", 6), ("linear", 5)]


def dpp_case(kernel, dtype=torch.float64):
    """Six points of unlike spread; the linear kernel has rank 5, so that one subset size is at its limit."""
    x = points(6, d=5, seed=3) * torch.tensor([0.2, 0.5, 1.0, 1.0, 1.5, 2.0], dtype=torch.float64)[:, None]
    x = (0.6 * x).to(dtype)
    return x, as_kernel(kernel).fit(x).matrix(x.double())


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(("kernel", "kernel_rank"), DPP_CASES)
def test_dpp_draws_every_subset_as_often_as_its_determinant(kernel, kernel_rank, k):
    x, matrix = dpp_case(kernel)
    sampler = fitted(DPPBatchSampler, x, k, kernel=kernel, kernel_rank=kernel_rank)
    drawn = as_subsets(sampler.sample_batches(6000).rows)
    expected = subset_probabilities(matrix, k)
    assert p_value(drawn, expected) > 1e-3
    uniform = dict.fromkeys(expected, 1 / len(expected))
    assert p_value(drawn, uniform) < 1e-9  # so the first line can fail


def inclusion_probabilities(matrix, k):
    """Of each sample to be in a batch: Σ_m v_m² λ_m e_{k-1}(the other eigenvalues) / e_k."""
    values, vectors = torch.linalg.eigh(matrix)
    vectors, logs = vectors[:, values > 1e-14], values[values > 1e-14].log()
    whole = _log_elementary_symmetric(logs, k)[k, -1]
    others = (torch.cat([logs[:m], logs[m + 1 :]]) for m in range(len(logs)))
    rest = torch.stack([_log_elementary_symmetric(other, k - 1)[k - 1, -1] for other in others])
    return vectors.square() @ (logs + rest - whole).exp()


def test_inclusion_probabilities_are_those_of_all_subsets():
    _, matrix = dpp_case("rbf")
    expected = torch.zeros(6, dtype=torch.float64)
    for subset, probability in subset_probabilities(matrix, 3).items():
        expected[list(subset)] += probability
    torch.testing.assert_close(inclusion_probabilities(matrix, 3), expected, rtol=0.0, atol=1e-9)


def test_dpp_order_of_a_batch_is_that_of_the_projection_draws():
    """The first pick alone has probability (inclusion probability) / k; ordered pairs are symmetric."""
    x, matrix = dpp_case("rbf")
    drawn = [tuple(row) for row in fitted(DPPBatchSampler, x, 2, kernel="rbf").sample_batches(6000).rows.tolist()]
    expected = {}
    for (i, j), probability in subset_probabilities(matrix, 2).items():
        expected[i, j] = expected[j, i] = probability / 2
    assert p_value(drawn, expected) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kernel_rank", [0, 80])
def test_dpp_frequencies_match_for_an_ill_conditioned_kernel(kernel_rank, dtype):
    x = points(300, d=2, seed=1, dtype=dtype)
    kernel = RBFMixture(gammas=(0.3,))
    values = torch.linalg.eigvalsh(kernel.matrix(x.double()))
    assert values[-1] / values[0].abs() > 1e12
    sampler = fitted(DPPBatchSampler, x, 20, kernel=kernel, kernel_rank=kernel_rank)
    rows = sampler.sample_batches(2000).rows
    assert all(len(set(row)) == 20 for row in rows.tolist())
    marginals = inclusion_probabilities(kernel.matrix(x.double()), 20)
    assert float(marginals.sum()) == pytest.approx(20.0, abs=1e-4)
    frequency = torch.bincount(rows.flatten(), minlength=300) / 2000
    stderr = (marginals * (1 - marginals) / 2000).sqrt().clamp_min(1e-3)
    assert float(((frequency - marginals) / stderr).abs().max()) < 4.5
    assert float(((frequency - 20 / 300) / stderr).abs().max()) > 9.0


def test_dpp_is_the_same_for_a_scaled_kernel():
    x = points(40)
    drawn = [
        fitted(DPPBatchSampler, x, 6, kernel=lambda a, b, c=c: c * RBFMixture((0.5,)).matrix(a, b))
        .sample_batches(8)
        .rows
        for c in (1.0, 2.0**60, 2.0**-60)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


# --- k-means++ against brute force ------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "dtype"), [(2, torch.float32), (3, torch.float64)])
@pytest.mark.parametrize(("kernel", "kernel_rank"), [("linear", 0), ("linear", 5), ("rbf", 0), ("rbf", 5)])
def test_kmeanspp_draws_every_sequence_as_often_as_it_should(kernel, kernel_rank, k, dtype):
    x = points(5, d=2, seed=6, dtype=dtype) * (1.0 if kernel == "linear" else 0.4)
    matrix = as_kernel(kernel).fit(x).matrix(x.double())
    sampler = fitted(KMeansPlusPlusBatchSampler, x, k, kernel=kernel, kernel_rank=kernel_rank)
    drawn = [tuple(row) for row in sampler.sample_batches(6000).rows.tolist()]
    expected = sequence_probabilities(matrix, k)
    assert p_value(drawn, expected) > 1e-3
    uniform = dict.fromkeys(expected, 1 / len(expected))
    assert p_value(drawn, uniform) < 1e-9


def test_kmeanspp_low_rank_distances_keep_the_exact_diagonal():
    """d_ij = |φ_i - φ_j|² + r_i + r_j: points that few columns confuse stay apart by what these miss of them."""
    x = points(60, d=8, seed=2)
    x[1] = x[0]
    exact = RBFMixture().matrix(x)
    distances = {}
    for columns in (2, 20, 60):
        table = fitted(KMeansPlusPlusBatchSampler, x, 2, kernel="mmd", kernel_rank=columns)._table
        assert table.shape[1] <= columns + 2
        features, diag = table[:, :-2], table[:, -2]
        distances[columns] = diag[:, None] + diag - 2 * features @ features.T
        residual = diag - features.square().sum(1)
        assert float(residual.min()) > -1e-9
        assert float(distances[columns][0, 1]) == pytest.approx(float(residual[0] + residual[1]), abs=1e-9)
    off = ~torch.eye(60, dtype=torch.bool)
    errors = [float((d - (10 - 2 * exact))[off].abs().mean()) for d in distances.values()]
    assert errors[2] < 1e-5 < errors[1] < errors[0]
    # without the residual the mean distance would be far too small at two columns
    assert float(distances[2][off].mean()) == pytest.approx(float((10 - 2 * exact)[off].mean()), rel=0.25)


@given(
    values=st.lists(st.integers(0, 3), min_size=2, max_size=12),
    share=st.floats(0.0, 1.0),
    kernel_rank=st.sampled_from([0, 4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_kmeanspp_takes_copies_only_when_nothing_else_is_left(values, share, kernel_rank, dtype, seed):
    n = len(values)
    k = 1 + int(share * (n - 1))
    x = torch.tensor(values, dtype=dtype)[:, None] * torch.tensor([0.3, 1.7, -0.9], dtype=dtype) + 0.1
    sampler = fitted(KMeansPlusPlusBatchSampler, x, k, kernel="linear", kernel_rank=kernel_rank, seed=seed)
    for row in sampler.sample_batches(20).rows.tolist():
        assert len(set(row)) == k
        assert len({values[i] for i in row}) == min(k, len(set(values)))


def test_kmeanspp_is_uniform_among_copies():
    x = torch.cat([torch.zeros(4, 2), torch.ones(1, 2)])
    sampler = fitted(KMeansPlusPlusBatchSampler, x, 3, kernel="rbf")
    drawn = as_subsets(sampler.sample_batches(3000).rows)
    # the odd one out is in every batch, the other two are any pair of copies
    assert p_value(drawn, {(i, j, 4): 1 / 6 for i, j in combinations(range(4), 2)}) > 1e-3
    same = fitted(KMeansPlusPlusBatchSampler, torch.zeros(5, 2), 3, kernel="rbf")
    drawn = [tuple(row) for row in same.sample_batches(6000).rows.tolist()]
    assert p_value(drawn, dict.fromkeys(permutations(range(5), 3), 1 / 60)) > 1e-3


def test_mass_table_draws_in_proportion_over_many_blocks():
    masses = torch.zeros(1000, dtype=torch.float64)
    masses[torch.tensor([0, 127, 128, 500, 999])] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    table = _MassTable(6000, 1000, masses)
    table.mass.copy_(masses.expand(6000, -1))
    generator = torch.Generator().manual_seed(0)
    levels = torch.rand(6, 6000, 2, dtype=torch.float64, generator=generator)
    first = table.draw(levels[0])
    expected = {i: float(masses[i]) / 15 for i in (0, 127, 128, 500, 999)}
    assert p_value(first.tolist(), expected) > 1e-3
    picks = torch.stack([first, *(table.draw(levels[step]) for step in range(1, 6))], dim=1)
    # five have mass; the sixth is any other of the thousand
    assert {tuple(sorted(row)) for row in picks[:, :5].tolist()} == {(0, 127, 128, 500, 999)}
    assert all(len(set(row)) == 6 for row in picks.tolist())
    assert len(set(picks[:, 5].tolist())) > 900


def test_mass_table_never_draws_a_sample_without_mass():
    masses = torch.zeros(400, dtype=torch.float32)
    masses[[130, 140]] = 1e-3
    for level, expected in ((0.0, 130), (1.0 - 2.0**-53, 140)):
        table = _MassTable(2, 400, masses)
        table.mass.copy_(masses.expand(2, -1))
        levels = torch.full((2, 2), level, dtype=torch.float64)
        assert table.draw(levels).tolist() == [expected] * 2


@pytest.mark.parametrize("kernel_rank", [0, 40])
def test_kmeanspp_takes_rounding_errors_for_copies(kernel_rank):
    """Once all twelve places are in the batch, the others are copies and equally likely."""
    places = 3 * points(12, d=40, seed=4, dtype=torch.float32)
    x = torch.cat([places, places])
    sampler = fitted(KMeansPlusPlusBatchSampler, x, 13, kernel="linear", kernel_rank=kernel_rank)
    rows = sampler.sample_batches(2000).rows % 12
    assert (rows[:, :12].sort(1).values == torch.arange(12)).all()
    assert p_value(rows[:, 12].tolist(), dict.fromkeys(range(12), 1 / 12)) > 1e-3


def test_kmeanspp_runs_through_many_copies():
    batch = next(iter(fitted(KMeansPlusPlusBatchSampler, torch.zeros(300, 1), 300)))
    assert sorted(batch) == list(range(300))


# --- bias -------------------------------------------------------------------------------------------------


def imbalanced():
    """Nine samples in a small crowd, three scattered; the function is the share of the latter."""
    x = 0.05 * points(12, d=2, seed=8)
    x[9:] += torch.tensor([[3.0, 0.0], [0.0, 3.0], [-3.0, 0.0]], dtype=torch.float64)
    return x, torch.tensor([0.0] * 9 + [1.0] * 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("cls", "enumerate_batches"),
    [(KMeansPlusPlusBatchSampler, sequence_probabilities), (DPPBatchSampler, subset_probabilities)],
)
def test_batch_means_are_biased_towards_rare_samples(cls, enumerate_batches):
    x, scattered = imbalanced()
    matrix = RBFMixture((1.0,)).matrix(x)
    batches = enumerate_batches(matrix, 3)
    chance = torch.tensor(list(batches.values()), dtype=torch.float64)
    members = torch.tensor(list(batches))
    assert float(chance.sum()) == pytest.approx(1.0)
    exact = float(chance @ scattered[members].mean(1))
    assert exact > 0.5  # a quarter of the samples
    # the mean embedding itself: |E μ̂ - μ|² against the variance of a uniform draw of three
    weight = torch.zeros(12, dtype=torch.float64).index_add_(0, members.flatten(), chance.repeat_interleave(3) / 3)
    gap = weight - 1 / 12
    variance = float(matrix.diagonal().mean() - matrix.mean()) / 3
    assert float(gap @ matrix @ gap) > 0.5 * variance
    rows = fitted(cls, x, 3, kernel="rbf").sample_batches(3000).rows
    means = scattered[rows].mean(1)
    assert float(means.mean()) == pytest.approx(exact, abs=4 * float(means.std()) / 3000**0.5)
    assert float(means.mean()) - float(scattered.mean()) > 0.2
