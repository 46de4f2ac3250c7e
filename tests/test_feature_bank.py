"""The feature bank against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from conftest import normal, refused
from vardass.refresh import FeatureBank
from vardass.refresh.feature_bank import _last_occurrence

X = normal(23, 5)


def test_bank_follows_a_plain_loop() -> None:
    bank, rows = FeatureBank(10), torch.zeros(10, 3)
    bank.fill(nn.Identity(), rows)
    for step in range(12):
        indices = torch.randint(10, (6,), generator=torch.Generator().manual_seed(step))
        z = normal(6, 3, seed=step).requires_grad_()
        bank.update(indices, z)
        for i, row in zip(indices.tolist(), z.detach()):  # in order: the last of equal indices counts
            rows[i] = row
    assert torch.equal(bank.features(), rows)
    assert not bank.features().requires_grad


@given(st.lists(st.integers(0, 6), max_size=40))
@settings(max_examples=60, deadline=None)
def test_last_occurrence(numbers: list[int]) -> None:
    expected = [max(i for i, other in enumerate(numbers) if other == number) for number in numbers]
    assert _last_occurrence(torch.tensor(numbers, dtype=torch.long)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bank_takes_any_dtype(dtype: torch.dtype) -> None:
    bank = FeatureBank(3)
    bank.update(np.array([2, 0, 1]), torch.tensor([[1.0], [2.0], [3.0]], dtype=dtype))
    assert bank.features().dtype == torch.float32
    assert bank.features().flatten().tolist() == [2.0, 3.0, 1.0]
    bank.update([1], np.array([[7.0]]))
    assert bank.features().flatten().tolist() == [2.0, 7.0, 1.0]


def test_bank_keeps_its_memory() -> None:
    bank = FeatureBank(5)
    bank.fill(nn.Identity(), X[:5])
    address = bank.features().data_ptr()
    bank.update([1, 3], normal(2, 5))
    bank.fill(nn.Identity(), X[:5])
    assert bank.features().data_ptr() == address


def test_fill_restores_flags_after_a_failure_and_reports_progress() -> None:
    bank, model = FeatureBank(23), nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    shares: list[float] = []
    bank.fill(model, TensorDataset(X, torch.arange(23)), batch_size=12, progress=lambda share, _: shares.append(share))
    assert shares == [12 / 23, 1.0]
    with torch.no_grad():
        torch.testing.assert_close(bank.features(), model[2](model[0](X)))  # without dropout
    with refused("8 columns", "d=3"):
        bank.fill(model, X, forward=lambda model, x: model[0](x))
    assert all(module.training for module in model.modules())


def test_refresh_before_features_exist() -> None:
    bank = FeatureBank(4)
    with refused("0 of n=4 rows", "bank.fill(model, dataset)"):
        bank.features()
    bank.update([1], normal(1, 2))
    with refused("1 of n=4 rows", "bank.fill(model, dataset)"):
        bank.features()


@pytest.mark.parametrize(
    ("run", "field", "named"),
    [
        (lambda: FeatureBank(0), "n", (1, 0)),
        (lambda: FeatureBank(3, device="gpu"), None, ("device 'gpu'", "'cpu'")),
        (lambda: FeatureBank(3, device="cuda:99"), None, ("device 'cuda:99'", "'cpu'")),
        (lambda: FeatureBank(3).update([0, 3], X[:2]), None, ("index 3", "0..2", "n=3")),
        (lambda: FeatureBank(3).update([0, -1], X[:2]), None, ("index -1", "0..2", "n=3")),
        (lambda: FeatureBank(3).update([0], X[:2]), None, ("1 indices", "2 rows")),
        (lambda: FeatureBank(3).update([0.0, 1.0], X[:2]), None, ("indices", "torch.float32")),  # type: ignore[list-item]
        (lambda: FeatureBank(2).update([[0], [1]], X[:2]), None, ("indices", "(2, 1)")),  # type: ignore[list-item]
        (lambda: FeatureBank(3).update([0], normal(1, 2, 2)), "features", ("(n, d)", "(1, 2, 2)")),
        (lambda: FeatureBank(3).fill(nn.Identity(), X), None, ("23 samples", "n=3")),
    ],
)
def test_bad_bank_use(run: Callable[[], Any], field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        run()


def test_bank_resumes_from_a_file(tmp_path: Path) -> None:
    bank = FeatureBank(23)
    bank.fill(nn.Identity(), X)
    bank.update([8], X[:1])
    torch.save(bank.state_dict(), tmp_path / "bank.pt")
    other = FeatureBank(23)
    other.load_state_dict(torch.load(tmp_path / "bank.pt", weights_only=True))
    for one in (bank, other):
        one.update([22], X[:1])
    assert torch.equal(other.features(), bank.features())
    other.load_state_dict(FeatureBank(23).state_dict())
    with refused("0 of n=23 rows"):
        other.features()


def test_bank_refuses_other_states() -> None:
    bank = FeatureBank(3)
    bank.update([0], X[:1])
    with refused("n=3, d=5", "n=4, d=None"):
        FeatureBank(4).load_state_dict(bank.state_dict())
    narrow = FeatureBank(3)
    narrow.update([0], X[:1, :2])
    with refused("n=3, d=5", "n=3, d=2"):
        narrow.load_state_dict(bank.state_dict())
    with refused("'rows'", "'is_known'", "FeatureBank.state_dict"):
        bank.load_state_dict({"rows": None})


@pytest.mark.parametrize("look", [1, 5, 200])
def test_kept_batches_are_those_of_updates(look: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bank, other = FeatureBank(20), FeatureBank(20)
    for step in range(150):
        rows = torch.randint(20, (1 + step % 6,), generator=generator)  # some of them twice
        z = torch.randn(len(rows), 3, generator=generator)
        bank.keep(rows, z)
        other.update(rows, z)
        if step % look == look - 1:
            kept, updated = bank.state_dict(), other.state_dict()
            assert kept.keys() == updated.keys()
            for name, value in updated.items():
                same = torch.equal(kept[name], value) if isinstance(value, torch.Tensor) else kept[name] == value
                assert same, name
    bank.keep(torch.arange(20), torch.ones(20, 3))
    assert bank.features().eq(1).all()
    bank.keep(torch.tensor([4]), torch.zeros(1, 3))
    assert bank.features()[4].eq(0).all()
    bank.keep(torch.tensor([4]), torch.zeros(1, 4))
    with refused("4 columns", "d=3"):
        bank.features()
