"""k-means++ and k-DPP batches against brute force, and their streams."""

import math
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from vardass.errors import InputError
from vardass.kernels import RBFMixture, as_kernel
from vardass.samplers import DPPBatchSampler, KMeansPlusPlusBatchSampler
from vardass.samplers.diverse import _log_elementary_symmetric, _MassTable

BOTH = pytest.mark.parametrize("cls", [KMeansPlusPlusBatchSampler, DPPBatchSampler])


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

DPP_CASES = [("rbf", 0), ("rbf", 6), ("polynomial", 0), ("polynomial", 6), ("linear", 5)]


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize(("kernel", "kernel_rank"), DPP_CASES)
def test_dpp_inclusion_probabilities_are_exact(kernel, kernel_rank, k, dtype):
    x, matrix = dpp_case(kernel, dtype)
    sampler = fitted(DPPBatchSampler, x, k, kernel=kernel, kernel_rank=kernel_rank)
    expected = torch.zeros(6, dtype=torch.float64)
    for subset, probability in subset_probabilities(matrix, k).items():
        expected[list(subset)] += probability
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(sampler.inclusion_probabilities(), expected, rtol=0.0, atol=tolerance)


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
    marginals = sampler.inclusion_probabilities()
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [2, 3])
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


# --- what both promise ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("kernel_rank", [0, 64])
def test_batches_hold_distinct_samples_and_no_weights(cls, kernel_rank):
    x = points(200, d=6, dtype=torch.float32)
    sampler = fitted(cls, x, 16, kernel_rank=kernel_rank)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 12
    for batch in batches:
        assert len(batch) == len(set(batch)) == 16
        assert all(0 <= i < 200 for i in batch)
        assert batch.weights is None


@BOTH
@pytest.mark.parametrize("kernel_rank", [0, 12])
def test_a_batch_of_all_samples(cls, kernel_rank):
    sampler = fitted(cls, points(12), 12, kernel="rbf", kernel_rank=kernel_rank, batches=3)
    assert [sorted(batch) for batch in sampler] == [list(range(12))] * 3
    assert sorted(next(iter(fitted(cls, torch.ones(1, 2), 1)))) == [0]


@BOTH
def test_uniform_without_repeats_until_the_first_refresh(cls):
    sampler = cls(5, 2, batches=64)
    batches = list(sampler)
    assert all(len(set(batch)) == 2 and batch.weights is None for batch in batches)
    drawn = as_subsets(sampler.sample_batches(4000).rows)
    assert p_value(drawn, dict.fromkeys(combinations(range(5), 2), 0.1)) > 1e-3


def test_unfitted_dpp_has_uniform_inclusion_probabilities():
    assert DPPBatchSampler(10, 4).inclusion_probabilities().tolist() == [0.4] * 10


@BOTH
def test_same_seed_same_stream_and_another_seed_another(cls):
    x = points(80, d=4)

    def stream(seed):
        sampler = fitted(cls, x, 8, seed=seed)
        return [list(batch) for _ in range(2) for batch in sampler]

    assert stream(0) == stream(0)
    assert stream(0) != stream(1)
    first, second = stream(0)[:10], stream(0)[10:]
    assert first != second
    sampler = fitted(cls, x, 8)
    sampler.set_epoch(1)
    assert [list(batch) for batch in sampler] == second


@BOTH
def test_endless_stream_goes_on_past_a_chunk_with_new_batches(cls):
    sampler = fitted(cls, points(30), 3, endless=True)
    stream = iter(sampler)
    batches = [tuple(next(stream)) for _ in range(150)]
    assert batches[:64] != batches[64:128]
    with pytest.raises(TypeError, match="endless"):
        len(sampler)


@BOTH
@pytest.mark.parametrize("kernel_rank", [0, 40])
def test_state_restored_in_mid_epoch_continues_the_stream(cls, kernel_rank):
    x = points(150, d=4, dtype=torch.float32)
    options = {"kernel_rank": kernel_rank, "batches": 100, "seed": 5}
    sampler = fitted(cls, x, 6, **options)
    stream = iter(sampler)
    for _ in range(10):
        next(stream)
    state = sampler.state_dict()
    rest = [list(batch) for batch in stream]  # goes past the chunk that the state holds
    after = [list(batch) for batch in sampler]
    other = cls(150, 6, **options)
    other.load_state_dict(state)
    assert [list(batch) for batch in other] == rest
    assert [list(batch) for batch in other] == after
    unfitted = cls(150, 6, **options)
    other.load_state_dict(unfitted.state_dict())
    assert [list(batch) for batch in other] == [list(batch) for batch in unfitted]


_CONTINUE = """
import sys, torch
from vardass.samplers import DPPBatchSampler, KMeansPlusPlusBatchSampler
torch.set_num_threads(1)
for cls, path in zip((KMeansPlusPlusBatchSampler, DPPBatchSampler), sys.argv[1:]):
    sampler = cls(150, 6, batches=100)
    sampler.load_state_dict(torch.load(path, weights_only=True))
    print([list(batch) for batch in sampler])
"""


def test_state_saved_to_a_file_continues_in_a_new_process(tmp_path):
    paths, rests = [], []
    for cls in (KMeansPlusPlusBatchSampler, DPPBatchSampler):
        sampler = fitted(cls, points(150, d=4), 6, batches=100)
        stream = iter(sampler)
        for _ in range(30):
            next(stream)
        paths.append(str(tmp_path / f"{cls.__name__}.pt"))
        torch.save(sampler.state_dict(), paths[-1])
        rests.append(str([list(batch) for batch in stream]))
    done = subprocess.run(
        [sys.executable, "-c", _CONTINUE, *paths], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines() == rests


@BOTH
def test_two_processes_share_one_stream(cls):
    x = points(90, d=4)
    samplers = [fitted(cls, x, 5, num_replicas=2, rank=rank) for rank in (0, 1)]
    streams = [[list(batch) for batch in sampler] for sampler in samplers]
    assert len(streams[0]) == len(streams[1]) == 9
    assert not {tuple(batch) for batch in streams[0]} & {tuple(batch) for batch in streams[1]}
    fresh = fitted(cls, x, 5, num_replicas=2, rank=0)
    next(iter(fresh))
    rows = fresh.state_dict()["chunk"]["rows"].tolist()
    assert rows == [batch for pair in zip(*streams, strict=True) for batch in pair]


@BOTH
def test_refresh_in_mid_epoch_takes_over_at_the_next_batch(cls):
    near, far = torch.zeros(40, 3), torch.zeros(40, 3)
    near[:4], far[-4:] = 5 * torch.eye(4, 3) + 1, 5 * torch.eye(4, 3) + 1
    noise = 1e-3 * points(40, dtype=torch.float32)
    sampler = cls(40, 4, kernel="rbf", batches=20)
    sampler.refresh(near + noise)
    stream = iter(sampler)
    before = [set(next(stream)) for _ in range(8)]
    sampler.refresh(far + noise)
    after = [set(batch) for batch in stream]
    assert len(after) == 12
    assert sum(len(batch & set(range(4))) for batch in before) >= 3 * 8 - 2
    assert sum(len(batch & set(range(36, 40))) for batch in after) >= 3 * 12 - 2
    assert sum(len(batch & set(range(4))) for batch in after) <= 12


@BOTH
def test_works_as_a_batch_sampler(cls):
    x = points(48, d=4, dtype=torch.float32)
    sampler, twin = (fitted(cls, x, 8) for _ in range(2))
    loader = DataLoader(TensorDataset(torch.arange(48)), batch_sampler=sampler)
    assert [batch.tolist() for (batch,) in loader] == [list(batch) for batch in twin]


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


# --- memory -----------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


@BOTH
def test_low_rank_path_never_holds_more_than_a_few_numbers_a_sample(cls):
    largest = []
    for n in (9000, 18000):
        sampler = cls(n, 8, kernel="mmd", kernel_rank=32)
        x = points(n, d=4, dtype=torch.float32)
        with LargestTensor() as seen:
            sampler.refresh(x)
            sampler.sample_batches(16)
        largest.append(seen.numbers / n)
    # batches drawn together, or landmarks in a block of kernel rows
    assert max(largest) <= 128
    assert largest[1] <= 1.01 * largest[0]
    held = sum(t.numel() for t in tree_leaves(sampler.state_dict()["extra"]) if isinstance(t, torch.Tensor))
    assert held <= 35 * 18000


@BOTH
def test_low_rank_path_is_taken_beyond_2048_samples(cls):
    x = points(2100, d=4, dtype=torch.float32)
    sampler = fitted(cls, x, 8)
    tensors = [t for t in tree_leaves(sampler.state_dict()["extra"]) if isinstance(t, torch.Tensor)]
    assert max(t.numel() for t in tensors) <= 2100 * 258
    batch = next(iter(sampler))
    assert len(set(batch)) == 8


# --- bad input --------------------------------------------------------------------------------------------


@BOTH
def test_bad_arguments_are_refused(cls):
    with pytest.raises(InputError, match=r"batch_size=9 .* n=8"):
        cls(8, 9)
    with pytest.raises(InputError, match=r"kernel_rank must be at least 0, got -1"):
        cls(8, 2, kernel_rank=-1)
    with pytest.raises(InputError, match="unknown kernel"):
        cls(8, 2, kernel="cosine")
    with pytest.raises(InputError, match=r"7 rows.*n=8"):
        cls(8, 2).refresh(points(7))
    for kernel_rank in (0, 4):
        sampler = cls(8, 2, kernel=lambda a, b: torch.full((len(a), len(b)), torch.nan), kernel_rank=kernel_rank)
        with pytest.raises(InputError, match=r"NaN or infinite values .*scale the features"):
            sampler.refresh(points(8))


def test_state_of_another_sampler_is_refused():
    state = fitted(KMeansPlusPlusBatchSampler, points(8), 2).state_dict()
    with pytest.raises(InputError, match=r"KMeansPlusPlusBatchSampler.*DPPBatchSampler"):
        DPPBatchSampler(8, 2).load_state_dict(state)


@pytest.mark.parametrize("kernel_rank", [0, 16])
def test_dpp_refuses_a_kernel_of_too_low_rank(kernel_rank):
    x = points(50, d=7)
    sampler = DPPBatchSampler(50, 8, kernel="linear", kernel_rank=kernel_rank)
    with pytest.raises(InputError, match=r"batch_size=8 .* rank 7 .*lower batch_size"):
        sampler.refresh(x)
    fitted(DPPBatchSampler, x, 7, kernel="linear", kernel_rank=kernel_rank)
    copies = points(5).repeat(10, 1)
    with pytest.raises(InputError, match=r"batch_size=8 .* rank 5 "):
        fitted(DPPBatchSampler, copies, 8, kernel="rbf", kernel_rank=kernel_rank)
    rows = fitted(DPPBatchSampler, copies, 5, kernel="rbf", kernel_rank=kernel_rank).sample_batches(50).rows
    assert (rows % 5).sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 50  # never two copies


def test_dpp_names_kernel_rank_where_that_is_the_limit():
    sampler = DPPBatchSampler(60, 20, kernel="mmd", kernel_rank=12)
    with pytest.raises(InputError, match=r"batch_size=20 .* rank 12 .*raise kernel_rank"):
        sampler.refresh(points(60))


def test_dpp_keeps_its_last_good_features_when_a_refresh_fails():
    x = points(30)
    sampler = fitted(DPPBatchSampler, x, 6, kernel="rbf")
    before = sampler.inclusion_probabilities()
    with pytest.raises(InputError, match="rank 1"):
        sampler.refresh(torch.ones(30, 3))
    assert torch.equal(sampler.inclusion_probabilities(), before)


def test_dpp_refuses_a_kernel_that_is_not_positive_semi_definite():
    with pytest.raises(InputError, match=r"eigenvalues from -.*positive semi-definite"):
        fitted(DPPBatchSampler, points(20), 3, kernel=lambda a, b: torch.cdist(a, b))
