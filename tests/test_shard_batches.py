"""Batches over many files: each row drawn with its exact probability, few row groups read, and exactly resumed."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from conftest import refused
from vardass.samplers import StratifiedBatchSampler
from vardass.shards import ShardBatches, ShardBatchSampler, ShardDataset, ShardStrata

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def made(folder, labels, group_rows, files=3, d=2):
    """Strata of rows in Parquet files of unequal size, given by their labels; and the rows."""
    n, k = len(labels), int(labels.max()) + 1
    x = np.random.default_rng(5).normal(size=(n, d)).astype(np.float32)
    cuts = np.linspace(0, n, files + 1).astype(int)[1:-1] + np.arange(files - 1)
    (folder / "labels").mkdir(parents=True)
    paths, sizes = [], []
    for i, (rows, mine) in enumerate(zip(np.split(x, cuts), np.split(labels, cuts))):
        paths.append(folder / f"{i}.parquet")
        pq.write_table(pa.table(dict(zip("abcdefgh", rows.T))), paths[-1], row_group_size=group_rows)
        np.save(folder / "labels" / f"{i}.npy", mine.astype(np.int32))
        sizes.append(len(rows))
    strata = ShardStrata(
        folder=folder,
        files=tuple(paths),
        labels_files=tuple(folder / "labels" / f"{i}.npy" for i in range(files)),
        rows=tuple(sizes),
        d=d,
        sizes=torch.from_numpy(np.bincount(labels, minlength=k)),
        variance=1.0,
        uniform_variance=2.0,
        variance_stderr=0.0,
        uniform_stderr=0.0,
        solver="made",
        kernel="made",
        info={},
    )
    return strata, x


def orders():
    """The same orders of row groups for each beginning: probabilities are exact given the orders."""
    return torch.Generator().manual_seed(0)


TINY = np.array([0, 1, 1, 2, 2, 2, 1, 2, 0, 2, 1, 2])  # sizes 2, 4 and 6


@pytest.mark.parametrize("cursors", [1, 2, 3])
def test_each_row_has_the_exact_probability_by_enumeration(tmp_path, cursors):
    """All beginnings of the cursors on a grid that 2, 4 and 6 divide, at each of many batches, over two laps."""
    strata, x = made(tmp_path, TINY, group_rows=2)
    sampler = ShardBatchSampler(strata, cursors=cursors)
    grid = (torch.arange(12, dtype=torch.float64) + 0.37) / 12
    step = torch.arange(2 * cursors * 4 + 1)
    # (12, batches, strata); a row depends on one cursor only, so they need not be enumerated together
    drawn = torch.stack([sampler._draw(step, begin.expand(cursors), orders()) for begin in grid])
    weights = strata.sizes.double() / strata.n
    for t, h in itertools.product(range(len(step)), range(3)):
        rows, counts = drawn[:, t, h].unique(return_counts=True)
        assert rows.tolist() == np.flatnonzero(h == TINY).tolist()
        assert set(counts.tolist()) == {12 // int(strata.sizes[h])}
    means = (weights[None, None, :, None] * torch.from_numpy(x).double()[drawn]).sum(2)
    assert torch.allclose(means.mean(0), torch.from_numpy(x).double().mean(0).expand(len(step), -1), atol=1e-12)


def test_with_a_cursor_for_each_stratum_rows_are_independent(tmp_path):
    strata, _ = made(tmp_path, TINY, group_rows=2)
    sampler = ShardBatchSampler(strata, cursors=3)
    grid = ((torch.arange(12, dtype=torch.float64) + 0.37) / 12).tolist()
    step = torch.tensor([0, 5])
    drawn = torch.stack(
        [sampler._draw(step, torch.tensor(begin), orders()) for begin in itertools.product(grid, repeat=3)]
    )
    for t in range(2):
        triples, counts = drawn[:, t].unique(dim=0, return_counts=True)
        assert len(triples) == 2 * 4 * 6
        assert set(counts.tolist()) == {12**3 // 48}


def test_an_epoch_of_equal_strata_meets_each_row_once(tmp_path):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 25))
    strata, _ = made(tmp_path, labels, group_rows=7)
    rows = [row for batch in ShardBatchSampler(strata, cursors=1) for row in batch]
    assert sorted(rows) == list(range(100))
    assert rows != list(ShardBatchSampler(strata, cursors=1, seed=1))


@pytest.fixture
def spread(tmp_path):
    """40 row groups of 50 rows, 16 strata all over them."""
    labels = np.random.default_rng(1).integers(16, size=2000)
    return made(tmp_path, labels, group_rows=50, files=4)


def test_batches_are_weighted_rows_of_each_stratum_and_read_few_groups(spread):
    strata, x = spread
    dataset = ShardDataset(strata.files, kept_groups=1)
    batches = ShardBatches(dataset, ShardBatchSampler(strata, cursors=2), ahead=16)
    sampler = ShardBatchSampler(strata, cursors=2)
    count = 0
    for (rows, weights), batch in zip(batches, sampler, strict=True):
        assert strata.labels[list(batch)].tolist() == list(range(16))
        assert np.array_equal(rows.numpy(), x[list(batch)])
        assert torch.allclose(weights, (strata.sizes / strata.n).float())
        count += 1
    assert count == 2000 // 16
    naive = ShardDataset(strata.files, kept_groups=1)
    uniform = StratifiedBatchSampler(strata.n, strata.k)
    uniform.use(strata.strata())
    for batch in uniform:
        naive.rows(batch)
    assert dataset.groups_read < naive.groups_read / 10


def test_the_mean_of_batches_is_the_mean_of_the_rows(spread):
    """The Monte-Carlo check of the stream itself, over seeds: each is one independent draw."""
    strata, x = spread
    weights = (strata.sizes / strata.n).double()
    means = []
    for seed in range(400):
        batch = next(iter(ShardBatchSampler(strata, cursors=2, seed=seed)))
        means.append(weights @ torch.from_numpy(x).double()[list(batch)])
    found = torch.stack(means)
    error = (found.mean(0) - torch.from_numpy(x).double().mean(0)) / (found.std(0) / math.sqrt(len(means)))
    assert error.abs().max() < 4


def rows_of(batches):
    return [tuple(x[:, 0].tolist()) for x, _ in batches]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (1, 2), (2, 2)])
def test_ranks_and_workers_share_out_one_stream(spread, ranks, workers):
    strata, _ = spread
    whole = rows_of(ShardBatches(ShardDataset(strata.files), ShardBatchSampler(strata, batches=24)))
    assert len(set(whole)) == 24
    found = []
    for rank in range(ranks):
        batches = ShardBatches(
            ShardDataset(strata.files), ShardBatchSampler(strata, batches=24), ahead=4, num_replicas=ranks, rank=rank
        )
        found.append(rows_of(DataLoader(batches, batch_size=None, num_workers=workers)))
    assert {len(mine) for mine in found} == {24 // ranks}
    assert sorted(row for mine in found for row in mine) == sorted(whole)


def test_an_endless_stream_draws_new_orders(tmp_path):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 25))
    strata, _ = made(tmp_path, labels, group_rows=7)
    stream = iter(ShardBatchSampler(strata, cursors=1, endless=True))
    first, second = ([list(next(stream)) for _ in range(25)] for _ in range(2))
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(100))


def test_epochs_differ_and_can_be_chosen(spread):
    strata, _ = spread
    batches = ShardBatches(ShardDataset(strata.files), ShardBatchSampler(strata, batches=6))
    first, second = rows_of(batches), rows_of(batches)
    assert first != second
    fresh = ShardBatches(ShardDataset(strata.files), ShardBatchSampler(strata, batches=6))
    fresh.set_epoch(1)
    assert rows_of(fresh) == second


@pytest.mark.parametrize("given", [1, 5, 8, 11])
def test_a_stream_that_was_stopped_goes_on_exactly(spread, given):
    strata, _ = spread

    def make():
        return ShardBatches(ShardDataset(strata.files), ShardBatchSampler(strata, batches=12, seed=3), ahead=4)

    whole = rows_of(make())
    stopped = make()
    assert rows_of(itertools.islice(stopped, given)) == whole[:given]
    state = pickle.loads(pickle.dumps(stopped.state_dict()))
    again = make()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert rows_of(again) == whole[given:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_exactly(spread, workers):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    strata, _ = spread

    def make():
        batches = ShardBatches(ShardDataset(strata.files), ShardBatchSampler(strata, batches=20), ahead=3)
        return loaders.StatefulDataLoader(batches, batch_size=None, num_workers=workers)

    whole = rows_of(make())
    loader = make()
    running = iter(loader)
    assert rows_of(itertools.islice(running, 7)) == whole[:7]
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    assert rows_of(again) == whole[7:]


def test_what_does_not_fit_is_refused(spread, tmp_path):
    strata, _ = spread
    other, _ = made(tmp_path / "other", np.roll(strata.labels, 1), group_rows=50, files=4)
    state = ShardBatchSampler(strata).state_dict()
    with refused(f"strata={state['settings']['strata']}", "this sampler strata"):
        ShardBatchSampler(other).load_state_dict(state)
    with refused("cursors=8", "cursors=4"):
        ShardBatchSampler(strata, cursors=4).load_state_dict(state)
    with refused("1,000 rows", "2,000"):
        ShardBatches(ShardDataset(strata.files), StratifiedBatchSampler(1000, 16))
    with refused(0, 1, field="cursors"):
        ShardBatchSampler(strata, cursors=0)
    np.save(strata.labels_files[2], np.zeros(3, np.int32))
    with refused(strata.labels_files[2], "(3,)", "501 rows"):
        ShardBatchSampler(strata)
    strata.files[1].unlink()
    with refused(strata.files[1]):
        ShardBatchSampler(strata)


def test_files_without_rows_do_no_harm(tmp_path):
    strata, x = made(tmp_path, np.tile(np.arange(3), 20), group_rows=4)
    pq.write_table(pq.read_table(strata.files[0]).slice(0, 0), tmp_path / "none.parquet")
    np.save(tmp_path / "labels" / "none.npy", np.empty(0, np.int32))
    files = (strata.files[0], tmp_path / "none.parquet", *strata.files[1:])
    labels = (strata.labels_files[0], tmp_path / "labels" / "none.npy", *strata.labels_files[1:])
    rows = (strata.rows[0], 0, *strata.rows[1:])
    more = ShardStrata(**{**vars(strata), "files": files, "labels_files": labels, "rows": rows})
    dataset = ShardDataset(more.files)
    for batch in ShardBatchSampler(more, cursors=2):
        assert more.labels[list(batch)].tolist() == [0, 1, 2]
        assert np.array_equal(dataset.rows(batch).numpy(), x[list(batch)])
