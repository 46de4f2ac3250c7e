"""Every sample arrives with the weight of the strata that it was drawn from, however far ahead it was asked for."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from conftest import refused
from vardass.errors import VardassWarning
from vardass.samplers import (
    BalancedBatchSampler,
    IndexBatch,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
    with_weights,
)
from vardass.strata import Strata

N, K = 60, 5


def cloud(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)).mul(1.5).exp()


class Indices(Dataset[Any]):
    """Samples that say which they are, in the shapes that datasets have."""

    def __init__(self, form: str = "pair") -> None:
        self.form = form

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        if self.form == "dict":
            return {"index": index, "x": torch.tensor([float(index)])}
        if self.form == "tensor":
            return torch.tensor([float(index)])
        if self.form == "list":
            return [index, index + 1]
        return index, torch.tensor([float(index)])


class Together(Indices):
    """Fetches a batch at once, and only that way."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples of this dataset come together")

    def __getitems__(self, batch: list[int]) -> list[Any]:
        assert isinstance(batch, list)
        return [super(Together, self).__getitem__(index) for index in batch]


LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "two workers": {"num_workers": 2, "prefetch_factor": 4},
    "persistent workers": {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
}
each_loader = pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS.keys())


class Drawn:
    """Which strata the batches of a stream were drawn from."""

    def __init__(self, sampler: StratifiedBatchSampler) -> None:
        self.sampler = sampler
        self.starts: list[tuple[int, Strata | None]] = [(0, sampler.strata)]

    def refresh(self, seed: int) -> None:
        self.sampler.refresh(cloud(seed))
        self.starts.append((self.sampler.position, self.sampler.strata))

    def strata(self, batch: int) -> Strata | None:
        return [strata for start, strata in self.starts if start <= batch][-1]


def weights_of(strata: Strata | None, indices: Tensor) -> Tensor:
    if strata is None:
        return torch.full((len(indices),), 1.0 / K)
    return (strata.sizes[strata.labels[indices]].double() / strata.n).float()


@each_loader
@pytest.mark.parametrize("make", [StratifiedBatchSampler, OrderedBatchSampler])
def test_weights_are_those_of_the_strata_that_the_batch_was_drawn_from(make: Any, options: dict[str, Any]) -> None:
    sampler = make(N, K, kernel="rbf", batches=40, seed=2)
    loader = DataLoader(with_weights(Indices()), batch_sampler=sampler, pin_memory=False, **options)
    for _ in range(2):  # the second epoch reuses persistent workers
        drawn, late = Drawn(sampler), 0
        count = 0
        for index, _, weight in loader:
            expected = weights_of(drawn.strata(count), index)
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0.0)
            assert float(weight.sum()) == pytest.approx(1.0, abs=1e-5)
            late += not torch.allclose(weight, weights_of(sampler.strata, index))
            if count in (3, 6, 20):
                drawn.refresh(seed=count)
            count += 1
        assert count == 40
        # looked up at arrival, weights would have been wrong where batches were asked for ahead
        assert late == 0 if options["num_workers"] == 0 else late >= 8
        assert len({start for start, _ in drawn.starts}) == 4


@each_loader
def test_given_strata_with_no_weight_in_common_change_over_at_the_next_draw(options: dict[str, Any]) -> None:
    sampler = StratifiedBatchSampler(N, 2, batches=30)
    old, new = (torch.arange(N) >= first for first in (20, 7))
    sampler.use(Strata(old.long(), k=2, variance=0.0, uniform_variance=0.0))
    loader = DataLoader(with_weights(Indices()), batch_sampler=sampler, **options)
    weights, asked = [], 0
    for count, (_, _, weight) in enumerate(loader):
        weights.append([round(float(w) * N) for w in weight])
        if count == 9:
            asked = sampler.position
            sampler.use(Strata(new.long(), k=2, variance=0.0, uniform_variance=0.0))
    # the loader keeps 2 workers busy with 4 batches each, beyond the ten that have arrived
    assert asked == (10 if options["num_workers"] == 0 else 18)
    assert weights == [[20, 40]] * asked + [[7, 53]] * (30 - asked)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["pair", "dict", "tensor", "list"])
@pytest.mark.parametrize("dataset", [Indices, Together])
def test_samples_of_any_form_end_with_their_weight(dataset: Any, form: str, workers: int) -> None:
    sampler = StratifiedBatchSampler(N, K, kernel="rbf", batches=3)
    sampler.refresh(cloud(0))
    loader = DataLoader(with_weights(dataset(form)), batch_sampler=sampler, num_workers=workers)
    for batch in loader:
        if form == "dict":
            assert list(batch) == ["index", "x", "weight"]
            index, weight = batch["index"], batch["weight"]
        elif form == "tensor":
            x, weight = batch
            assert x.shape == (K, 1)
            index = x[:, 0].long()
        elif form == "list":
            index, following, weight = batch
            assert torch.equal(following, index + 1)
        else:
            index, x, weight = batch
            assert torch.equal(x[:, 0].long(), index)
        assert weight.dtype == torch.float32
        assert weight.shape == (K,)
        torch.testing.assert_close(weight, weights_of(sampler.strata, index), rtol=1e-6, atol=0.0)


def test_wrapped_datasets_of_torch() -> None:
    inner = TensorDataset(torch.arange(2 * N), torch.arange(2 * N) % 2)
    subset = Subset(inner, list(range(0, 2 * N, 2)))
    sampler = StratifiedBatchSampler(N, K, kernel="rbf", batches=3)
    sampler.refresh(cloud(0))
    assert len(with_weights(subset)) == N
    for x, y, weight in DataLoader(with_weights(subset), batch_sampler=sampler):
        assert y.tolist() == [0] * K
        torch.testing.assert_close(weight, weights_of(sampler.strata, x // 2), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_without_weights_give_one_over_the_batch_size(workers: int) -> None:
    for sampler in (
        UniformBatchSampler(N, 8, drop_last=False),
        UniformBatchSampler(N, 8, replacement=True),
        BalancedBatchSampler(N, 8, drop_last=False),
    ):
        sampler.refresh(cloud(0))
        loader = DataLoader(with_weights(Indices()), batch_sampler=sampler, num_workers=workers)
        weights = [weight for _, _, weight in loader]
        assert [len(weight) for weight in weights] == [len(batch) for batch in sampler]
        for weight in weights:
            torch.testing.assert_close(weight, torch.full_like(weight, 1.0 / len(weight)))


def test_batches_without_weights_are_uniform_and_said_to_be() -> None:
    sampler = StratifiedBatchSampler(N, K, kernel="rbf", batches=3)
    sampler.refresh(cloud(0))
    padded = [list(batch) for batch in sampler]  # as a wrapper makes that fills up the last batch
    for loader in (
        DataLoader(with_weights(Indices()), batch_size=7, shuffle=True),
        DataLoader(Subset(with_weights(Indices()), range(N)), batch_sampler=sampler),
        DataLoader(with_weights(Indices()), batch_sampler=padded),
    ):
        with pytest.warns(VardassWarning, match=r"plain indices came without weights.*wrap the data set last") as said:
            batches = list(loader)
        assert len(said) == 1
        for index, _, weight in batches:
            torch.testing.assert_close(weight, torch.full((len(index),), 1.0 / len(index)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_sampler_in_the_place_of_a_sampler_is_refused(workers: int) -> None:
    loader = DataLoader(with_weights(Indices()), sampler=UniformBatchSampler(N, K), num_workers=workers)
    with refused("asks for 1 batches", "DataLoader(..., batch_sampler=sampler)", "sampler="):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Indices, Together])
def test_an_ordinary_loader_takes_the_batches_as_plain_indices(dataset: Any, workers: int) -> None:
    sampler = BalancedBatchSampler(N, K)
    sampler.refresh(cloud(0))
    seen: list[int] = []
    for index, x in DataLoader(dataset(), batch_sampler=sampler, num_workers=workers):
        assert torch.equal(x[:, 0].long(), index)
        seen += index.tolist()
    assert sorted(seen) == list(range(N))
    weighted = StratifiedBatchSampler(N, K)
    weighted.refresh(cloud(0))
    assert len(list(DataLoader(dataset(), batch_sampler=weighted, num_workers=workers))) == N // K


def test_a_single_sample_has_no_weight() -> None:
    data = with_weights(Indices())
    with refused("sample 3", "batch_sampler=...", "with_weights"):
        data[3]
    with refused("sample 0", "batch_sampler=...", "with_weights"):
        next(iter(DataLoader(data, batch_size=None)))


def test_what_is_no_dataset_is_refused() -> None:
    class Sized(IterableDataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for data, kind in (((i for i in range(3)), "generator"), ({"x": torch.zeros(3)}, "dict"), (Sized(), "Sized")):
        with refused("__getitem__", "__len__", kind):
            with_weights(data)


def test_a_key_named_weight_is_not_overwritten() -> None:
    data = with_weights([{"x": 1, "weight": 70.0}])
    with refused("'weight'", ["x", "weight"]):
        data.__getitems__(IndexBatch([0]))


def batch_of(indices: Iterable[int], weights: Sequence[float] | None) -> IndexBatch:
    batch = IndexBatch(indices)
    batch.weights = weights
    return batch


def test_slices_keep_their_share_of_the_weights() -> None:
    batch = batch_of([5, 6, 7, 8], [0.1, 0.2, 0.3, 0.4])
    for part in (slice(0, 2), slice(None, None, -1), slice(1, None, 2), slice(4, 9)):
        picked = batch[part]
        assert type(picked) is IndexBatch
        assert list(picked) == list(batch)[part]
        assert picked.weights == [0.1, 0.2, 0.3, 0.4][part]
    assert batch[2] == 7
    assert type(batch[-1]) is int
    assert batch_of([1, 2, 3], None)[1:].weights is None
    halves = [with_weights("abcdefghi").__getitems__(batch[part]) for part in (slice(0, 2), slice(2, 4))]
    assert [(x, round(float(w), 6)) for x, w in itertools.chain(*halves)] == [
        ("f", 0.1),
        ("g", 0.2),
        ("h", 0.3),
        ("i", 0.4),
    ]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_keep_the_weights(protocol: int) -> None:
    for batch in (batch_of([4, 2], [0.75, 0.25]), batch_of([4, 2], None)):
        for twin in (pickle.loads(pickle.dumps(batch, protocol)), copy.copy(batch), copy.deepcopy(batch)):
            assert type(twin) is IndexBatch
            assert (list(twin), twin.weights) == ([4, 2], batch.weights)


def test_weights_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        with_weights(range(4)).__getitems__(batch_of([0, 1, 2], [0.5, 0.5]))


def test_weights_are_numpy_scalars_that_collate_to_float32() -> None:
    (x, weight) = with_weights(range(3)).__getitems__(batch_of([2], [0.5]))[0]
    assert x == 2
    assert isinstance(weight, np.float32)
    assert torch.utils.data.default_collate([(x, weight), (x, weight)])[1].dtype == torch.float32


def test_a_sampler_of_more_samples_than_the_data_set_has_is_named() -> None:
    loader = DataLoader(with_weights(TensorDataset(torch.zeros(5, 1))), batch_sampler=UniformBatchSampler(20, 10))
    with refused("sample", "has 5", "n=len(dataset)"):
        next(iter(loader))
