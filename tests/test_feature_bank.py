"""The feature bank against a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vardass.errors import InputError
from vardass.kernels import CoralKernel, LinearKernel, RBFMixture
from vardass.refresh import FeatureBank
from vardass.refresh.feature_bank import _last_occurrence
from vardass.solvers import stratify
from vardass.variance import stratified_variance, uniform_variance


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


X = normal(23, 5)


def test_bank_follows_a_plain_loop() -> None:
    bank, rows, steps = FeatureBank(10), torch.zeros(10, 3), [-1] * 10
    for step in range(12):
        indices = torch.randint(10, (6,), generator=torch.Generator().manual_seed(step))
        z = normal(6, 3, seed=step).requires_grad_()
        bank.update(indices, z, step=step * 2)
        for i, row in zip(indices.tolist(), z.detach()):  # in order: the last of equal indices counts
            rows[i], steps[i] = row, step * 2
    assert torch.equal(bank.features(), rows)
    assert not bank.features().requires_grad
    assert bank.updated_at.tolist() == steps
    assert bank.ages(30).tolist() == [30 - step for step in steps]
    assert bank.last_step == 22


@given(st.lists(st.integers(0, 6), max_size=40))
@settings(max_examples=60, deadline=None)
def test_last_occurrence(numbers: list[int]) -> None:
    expected = [max(i for i, other in enumerate(numbers) if other == number) for number in numbers]
    assert _last_occurrence(torch.tensor(numbers, dtype=torch.long)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bank_takes_any_dtype(dtype: torch.dtype) -> None:
    bank = FeatureBank(3, dtype=torch.bfloat16)
    bank.update(np.array([2, 0, 1]), torch.tensor([[1.0], [2.0], [3.0]], dtype=dtype))
    assert bank.features().dtype == torch.bfloat16
    assert bank.features().flatten().tolist() == [2.0, 3.0, 1.0]
    bank.update([1], np.array([[7.0]]))
    assert bank.features().flatten().tolist() == [2.0, 7.0, 1.0]


def test_bank_keeps_its_memory() -> None:
    bank = FeatureBank(5)
    bank.fill(nn.Identity(), X[:5])
    address = bank.features().data_ptr()
    bank.update([1, 3], normal(2, 5))
    bank.fill(nn.Identity(), X[:5], budget=2)
    bank.load_state_dict(bank.state_dict())
    assert bank.features().data_ptr() == address


def test_stale_rows_are_the_longest_unrenewed() -> None:
    bank = FeatureBank(6)
    assert bank.stale_rows(6).tolist() == [0, 1, 2, 3, 4, 5]
    bank.update([4, 1], normal(2, 2))
    bank.update([0, 2], normal(2, 2))
    bank.update([4], normal(1, 2))
    assert bank.stale_rows(5).tolist() == [3, 5, 1, 0, 2]
    assert bank.updated_at.tolist() == [1, 0, 1, -1, 2, -1]
    assert bank.filled == pytest.approx(4 / 6)
    assert repr(bank) == "FeatureBank(n=6, d=2, filled=0.667, device='cpu')"
    with pytest.raises(InputError, match="count must be between 0 and 6, got 7"):
        bank.stale_rows(7)


class Counting(nn.Module):
    """Doubles its input and remembers the rows it saw, which their first column names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x[:, 0].long().tolist()
        return 2 * x


NUMBERED = torch.stack([torch.arange(12.0), torch.ones(12)], 1)


@pytest.mark.parametrize("data", [NUMBERED, TensorDataset(NUMBERED, torch.arange(12))], ids=["tensor", "dataset"])
def test_fill_computes_only_the_rows_asked_for(data: Any) -> None:
    bank, model = FeatureBank(12), Counting()
    assert bank.fill(model, data, rows=[7, 2, 5], batch_size=2) == 3
    assert model.seen == [7, 2, 5]
    assert bank.filled == 0.25
    assert bank.fill(model, data, budget=4, batch_size=3) == 4  # never filled rows come first
    assert model.seen[3:] == [0, 1, 3, 4]
    assert bank.fill(model, data, budget=6) == 6
    assert model.seen[7:] == [6, 8, 9, 10, 11, 2]  # rows of one pass in order
    assert torch.equal(bank.features(), 2 * NUMBERED)
    assert bank.fill(model, data, rows=[]) == bank.fill(model, data, budget=0) == 0
    assert len(model.seen) == 13
    assert bank.fill(model, data) == 12
    assert model.seen[13:] == list(range(12))


def test_repeated_partial_fills_go_round() -> None:
    bank, model = FeatureBank(12), Counting()
    for _ in range(6):
        bank.fill(model, NUMBERED, budget=4, step=0)
    assert model.seen == [*range(12), *range(12)]


def test_fill_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("vardass.refresh.feature_bank.time.perf_counter", lambda: next(clock))
    bank, model = FeatureBank(12), Counting()
    bank.update([0, 1, 2], normal(3, 2))
    assert bank.fill(model, NUMBERED, seconds=2.0, batch_size=4) == 8  # one second a batch
    assert model.seen == [3, 4, 5, 6, 7, 8, 9, 10]
    assert bank.fill(model, NUMBERED, seconds=50.0, batch_size=4) == 12
    assert bank.fill(model, NUMBERED, rows=[4, 3, 2], seconds=0.5, batch_size=1) == 1
    assert model.seen[-1] == 4


def test_fill_restores_flags_after_a_failure_and_reports_progress() -> None:
    bank, model = FeatureBank(23), nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    shares: list[float] = []
    bank.fill(model, X, batch_size=12, step=5, progress=lambda share, _: shares.append(share))
    assert shares == [12 / 23, 1.0]
    with torch.no_grad():
        torch.testing.assert_close(bank.features(), model[2](model[0](X)))  # without dropout
    assert bank.updated_at.unique().tolist() == [5]
    bank.fill(model, X, budget=3)  # no step passes between the last update and this
    assert bank.last_step == 5
    with pytest.raises(InputError, match=r"8 columns, the bank holds d=3"):
        bank.fill(model, X, forward=lambda model, x: model[0](x))
    assert all(module.training for module in model.modules())


def test_refresh_before_features_exist() -> None:
    bank = FeatureBank(4)
    with pytest.raises(InputError, match=r"0 of n=4 rows; call bank.fill\(model, dataset\)"):
        bank.features()
    with pytest.raises(InputError, match="0 of n=4"):
        bank.features(missing="sample")
    bank.update([1], normal(1, 2))
    with pytest.raises(InputError, match=r"1 of n=4 rows.* or accept missing='sample'"):
        bank.features()


def test_missing_rows_can_take_those_of_others() -> None:
    bank, z = FeatureBank(200), normal(100, 2)
    bank.update(torch.arange(0, 200, 2), z)
    features = bank.features(missing="sample", seed=1).clone()
    assert torch.equal(features[::2], z)
    donors = (features[1::2, None] == z).all(2)
    assert bool((donors.sum(1) == 1).all())  # each is some known row
    assert int(donors.any(0).sum()) > 40  # and they differ
    assert bank.filled == 0.5  # still unknown
    assert torch.equal(bank.features(missing="sample", seed=1), features)
    bank.update(torch.arange(1, 200, 2), z)
    assert torch.equal(bank.features()[1::2], z)


def test_unseen_rows_sampled_beat_unseen_rows_at_the_mean() -> None:
    x = normal(20, 8, seed=1)[torch.arange(400) % 20] * 2 + 0.5 * normal(400, 8)
    bank = FeatureBank(400)
    seen = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:200]
    bank.update(seen, x[seen])
    at_mean = x[seen].mean(0).repeat(400, 1)
    at_mean[seen] = x[seen]
    true = [
        stratified_variance(x, stratify(z, 16, kernel="mmd").labels, kernel="mmd")
        for z in (bank.features(missing="sample"), at_mean)
    ]
    uniform = uniform_variance(x, 16, kernel="mmd")
    assert true[0] < uniform < true[1]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: FeatureBank(0), "n must be at least 1, got 0"),
        (lambda: FeatureBank(3, dtype=torch.int32), "floating-point type, got torch.int32"),
        (lambda: FeatureBank(3, dtype="float32"), "floating-point type, got 'float32'; use torch.float32"),
        (lambda: FeatureBank(3, device="gpu"), r"device 'gpu' cannot be used \(.*\); use 'cpu'"),
        (lambda: FeatureBank(3, device="cuda:99"), r"device 'cuda:99' cannot be used"),
        (lambda: FeatureBank(3).update([0, 3], X[:2]), r"index 3 is outside 0..2"),
        (lambda: FeatureBank(3).update([0, -1], X[:2]), r"index -1 is outside 0..2"),
        (lambda: FeatureBank(3).update([0], X[:2]), "1 indices for 2 rows"),
        (lambda: FeatureBank(3).update([0.0, 1.0], X[:2]), "got torch.float32"),  # type: ignore[list-item]
        (lambda: FeatureBank(2).update([[0], [1]], X[:2]), r"of shape \(2, 1\)"),  # type: ignore[list-item]
        (lambda: FeatureBank(3, d=4).update([0, 1], X[:2]), "5 columns, the bank holds d=4"),
        (lambda: FeatureBank(3).update([0], normal(1, 2, 2)), r"got \(1, 2, 2\)"),
        (lambda: FeatureBank(3).fill(nn.Identity(), X), "23 samples, the bank n=3"),
        (lambda: FeatureBank(3).fill(nn.Identity(), iter([1])), "by index, got list_iterator"),
        (lambda: FeatureBank(23).fill(nn.Identity(), X, rows=[1], budget=2), "1 rows and budget=2"),
        (lambda: FeatureBank(23).fill(nn.Identity(), X, budget=24), "between 0 and 23, got 24"),
        (lambda: FeatureBank(23).fill(nn.Identity(), X, seconds=0.0), "seconds must be positive, got 0.0"),
        (lambda: FeatureBank(23).features(missing="mean"), "'error' or 'sample', got 'mean'"),
        (lambda: FeatureBank(23).drift([0], X[:1], kernel="coral"), "takes a parameter from the data"),
    ],
)
def test_bad_bank_use(run: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run()


@pytest.mark.parametrize("kernel", [None, RBFMixture(), CoralKernel().fit(X), LinearKernel()], ids=repr)
def test_drift_by_hand(kernel: Any) -> None:
    bank = FeatureBank(23)
    bank.fill(nn.Identity(), X)
    rows, new, w = [4, 9, 0], X[[4, 9, 0]] + normal(3, 5, seed=5), torch.tensor([0.5, 0.3, 0.2])
    expected = 0.0
    for i, z, weight in zip(rows, new.double(), w.tolist()):
        pair = torch.stack([X[i].double(), z])
        gram = pair @ pair.T if kernel is None else kernel.matrix(pair)
        expected += weight * float(gram[0, 0] + gram[1, 1] - 2 * gram[0, 1])
    assert float(bank.drift(rows, new, kernel=kernel, weights=w)) == pytest.approx(expected, rel=1e-4)
    equal = bank.drift(rows, new, kernel=kernel)
    each = [float(bank.drift([i], new[j : j + 1], kernel=kernel)) for j, i in enumerate(rows)]
    assert float(equal) == pytest.approx(sum(each) / 3, rel=1e-4)
    assert float(bank.drift(rows, X[rows], kernel=kernel)) == pytest.approx(0.0, abs=1e-3)


def test_drift_counts_rows_that_still_are_what_the_strata_were_made_from() -> None:
    bank = FeatureBank(4)
    assert math.isnan(float(bank.drift([0], torch.zeros(1, 1))))
    bank.update([0, 1, 2], torch.zeros(3, 1))
    assert float(bank.drift([0, 3], torch.ones(2, 1))) == 1.0  # row 3 is unknown
    bank.mark()
    bank.update([0], torch.full((1, 1), 9.0))
    assert float(bank.drift([0, 1], torch.tensor([[5.0], [2.0]]))) == 4.0  # row 0 is newer than the strata
    assert math.isnan(float(bank.drift([0], torch.ones(1, 1))))
    bank.mark()
    assert float(bank.drift([0], torch.tensor([[5.0]]))) == 16.0


def test_bank_resumes_from_a_file(tmp_path: Path) -> None:
    bank = FeatureBank(23)
    bank.update([3, 5], X[:2], step=4)
    bank.fill(nn.Identity(), X, budget=15)
    bank.mark()
    bank.update([8], X[:1], step=6)
    torch.save(bank.state_dict(), tmp_path / "bank.pt")
    other = FeatureBank(23)
    other.load_state_dict(torch.load(tmp_path / "bank.pt", weights_only=True))
    for one in (bank, other):
        one.update([22], X[:1])
    assert torch.equal(other.features(missing="sample"), bank.features(missing="sample"))
    assert torch.equal(other.updated_at, bank.updated_at)
    assert other.updated_at[22] == 7
    assert torch.equal(other.stale_rows(23), bank.stale_rows(23))
    rows = list(range(23))
    assert torch.equal(other.drift(rows, X + 1), bank.drift(rows, X + 1))
    empty = FeatureBank(23)
    other.load_state_dict(empty.state_dict())
    assert other.filled == 0.0


def test_bank_refuses_other_states() -> None:
    bank = FeatureBank(3)
    bank.update([0], X[:1])
    with pytest.raises(InputError, match="n=3, d=5, the bank n=4, d=None"):
        FeatureBank(4).load_state_dict(bank.state_dict())
    with pytest.raises(InputError, match="n=3, d=5, the bank n=3, d=2"):
        FeatureBank(3, d=2).load_state_dict(bank.state_dict())
    with pytest.raises(InputError, match="version 2"):
        bank.load_state_dict({**bank.state_dict(), "bank": 2})
    with pytest.raises(InputError, match="version None"):
        bank.load_state_dict({"rows": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("look", [1, 5, 200])
def test_kept_batches_are_those_of_updates(look: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bank, other = FeatureBank(20, dtype=dtype), FeatureBank(20, dtype=dtype)
    for step in range(150):
        rows = torch.randint(20, (1 + step % 6,), generator=generator)  # some of them twice
        z = torch.randn(len(rows), 3, generator=generator)
        bank.keep(rows, z, step)
        other.update(rows, z, step)
        assert bank.last_step == other.last_step
        if step == 70:
            bank.mark()
            other.mark()
        if step % look == look - 1:
            kept, updated = bank.state_dict(), other.state_dict()
            assert kept.keys() == updated.keys()
            for name, value in updated.items():
                same = torch.equal(kept[name], value) if isinstance(value, torch.Tensor) else kept[name] == value
                assert same, name
    assert torch.equal(bank.stale_rows(20), other.stale_rows(20))
    assert torch.equal(bank.updated_at, other.updated_at)
    bank.keep(torch.arange(20), torch.ones(20, 3), 150)
    assert bank.features().eq(1).all()
    bank.keep(torch.tensor([4]), torch.zeros(1, 3), 151)
    assert float(bank.drift([4], torch.ones(1, 3))) != float(bank.drift([4], torch.zeros(1, 3)))
    bank.keep(torch.tensor([4]), torch.zeros(1, 4), 152)
    with pytest.raises(InputError, match="4 columns, the bank holds d=3"):
        bank.features()
