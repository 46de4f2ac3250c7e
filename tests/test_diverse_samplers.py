"""Streams of k-means++ and k-DPP batches: what both promise, their memory, and what they refuse."""

import subprocess
import sys
import warnings
from itertools import combinations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from conftest import refused
from test_diverse_probabilities import as_subsets, fitted, p_value, points
from vardass.paper import diverse_samplers as diverse
from vardass.paper.diverse_samplers import DPPBatchSampler, KMeansPlusPlusBatchSampler

BOTH = pytest.mark.parametrize("cls", [KMeansPlusPlusBatchSampler, DPPBatchSampler])


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
def test_low_rank_is_said_once_unless_it_was_asked_for(cls, monkeypatch):
    monkeypatch.setattr(diverse, "EXACT_LIMIT", 50)
    x = points(60, d=4)

    def told(**options):
        sampler = cls(60, 4, **options)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                sampler.refresh(x)
        return [(str(each.message), each.filename) for each in seen]

    ((message, place),) = told()
    assert "above 50 it works on" in message
    assert "kernel_rank=0 for the full matrix" in message
    assert place == __file__
    assert told(kernel_rank=0) == told(kernel_rank=16) == []


@BOTH
def test_uniform_without_repeats_until_the_first_refresh(cls):
    sampler = cls(5, 2, batches=64)
    batches = list(sampler)
    assert all(len(set(batch)) == 2 and batch.weights is None for batch in batches)
    drawn = as_subsets(sampler.sample_batches(4000).rows)
    assert p_value(drawn, dict.fromkeys(combinations(range(5), 2), 0.1)) > 1e-3


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
from vardass.paper.diverse_samplers import DPPBatchSampler, KMeansPlusPlusBatchSampler
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
    with refused("batch_size=9", "n=8"):
        cls(8, 9)
    with refused(-1, 0, field="kernel_rank"):
        cls(8, 2, kernel_rank=-1)
    with refused("'cosine'", "linear", field="kernel"):
        cls(8, 2, kernel="cosine")
    with refused("7 rows", "n=8"):
        cls(8, 2).refresh(points(7))
    for kernel_rank in (0, 4):
        sampler = cls(8, 2, kernel=lambda a, b: torch.full((len(a), len(b)), torch.nan), kernel_rank=kernel_rank)
        with refused("FunctionKernel", "NaN", "torch.float64"):
            sampler.refresh(points(8))


def test_state_of_another_sampler_is_refused():
    state = fitted(KMeansPlusPlusBatchSampler, points(8), 2).state_dict()
    with refused("'KMeansPlusPlusBatchSampler'", "'DPPBatchSampler'"):
        DPPBatchSampler(8, 2).load_state_dict(state)


@pytest.mark.parametrize("kernel_rank", [0, 16])
def test_dpp_refuses_a_kernel_of_too_low_rank(kernel_rank):
    x = points(50, d=7)
    sampler = DPPBatchSampler(50, 8, kernel="linear", kernel_rank=kernel_rank)
    with refused("batch_size=8", "rank 7", "LinearKernel", "50 samples"):
        sampler.refresh(x)
    fitted(DPPBatchSampler, x, 7, kernel="linear", kernel_rank=kernel_rank)
    copies = points(5).repeat(10, 1)
    with refused("batch_size=8", "rank 5", "RBFMixture", "50 samples"):
        fitted(DPPBatchSampler, copies, 8, kernel="rbf", kernel_rank=kernel_rank)
    rows = fitted(DPPBatchSampler, copies, 5, kernel="rbf", kernel_rank=kernel_rank).sample_batches(50).rows
    assert (rows % 5).sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 50  # never two copies


def test_dpp_names_kernel_rank_where_that_is_the_limit():
    sampler = DPPBatchSampler(60, 20, kernel="mmd", kernel_rank=12)
    with refused("batch_size=20", "rank 12", "kernel_rank"):
        sampler.refresh(points(60))


def test_dpp_keeps_its_last_good_features_when_a_refresh_fails():
    x = points(30)
    sampler = fitted(DPPBatchSampler, x, 6, kernel="rbf")
    before = sampler.sample_batches(20).rows
    with refused("batch_size=6", "rank 1"):
        sampler.refresh(torch.ones(30, 3))
    assert torch.equal(sampler.sample_batches(20).rows, before)


def test_dpp_refuses_a_kernel_that_is_not_positive_semi_definite():
    with refused("eigenvalues", "positive semi-definite", "RBFMixture"):
        fitted(DPPBatchSampler, points(20), 3, kernel=lambda a, b: torch.cdist(a, b))
