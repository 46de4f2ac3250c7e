"""Features of a whole data set against the model itself, whatever form the data have."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from conftest import normal, refused
from vardass.refresh import FeatureBank, extract_features
from vardass.samplers import with_weights


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def reference(model: nn.Module, x: Tensor) -> Tensor:
    flags = [module.training for module in model.modules()]
    model.eval()
    with torch.no_grad():
        z: Tensor = model(x)
    for module, flag in zip(model.modules(), flags):
        module.training = flag
    return z


class Mappings(Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.x[index], "label": torch.tensor(index)}


class Stream(IterableDataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Any:
        return iter(self.x)


X = normal(23, 5)
Y = torch.arange(23)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (X, {}),
        (list(X), {}),
        (TensorDataset(X), {}),
        (TensorDataset(X, Y, Y), {}),
        (TensorDataset(Y, X), {"key": 1}),
        (Mappings(X), {"key": "image"}),
        (with_weights(TensorDataset(X, Y)), {}),
        (with_weights(with_weights(TensorDataset(X, Y))), {}),
        (TensorDataset(X, Y), {"forward": lambda model, x: model(x)}),
        (TensorDataset(X, Y), {"num_workers": 2}),
        (DataLoader(TensorDataset(X, Y), batch_size=4), {}),
        ([(X[:10], Y[:10]), (X[10:], Y[10:])].__iter__(), {}),
        (Stream(X), {}),
    ],
)
def test_features_equal_the_model_in_evaluation_mode(data: Any, options: dict[str, Any]) -> None:
    model = network()
    z = extract_features(model, data, batch_size=4, **options)
    assert z.shape == (23, 3)
    assert z.dtype == torch.float32
    assert not z.requires_grad
    torch.testing.assert_close(z, reference(model, X))


def test_training_flags_come_back_one_by_one() -> None:
    model = network().train()
    model[1].eval()  # a frozen batch norm
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    statistics = model[1].running_mean.clone()
    extract_features(model, X)
    assert [module.training for module in model.modules()] == before
    assert torch.equal(model[1].running_mean, statistics)

    def broken(model: Any, x: Tensor) -> Tensor:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        extract_features(model, X, forward=broken)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_random_state_is_left_alone(num_workers: int) -> None:
    model, before = network(), torch.random.get_rng_state()
    extract_features(model, TensorDataset(X), batch_size=4, num_workers=num_workers)
    FeatureBank(23).fill(model, TensorDataset(X), num_workers=num_workers)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_mixed_precision_is_close_and_returns_float32() -> None:
    model, exact = network(), reference(network(), X)
    seen: list[torch.dtype] = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        z: Tensor = model(x)
        seen.append(z.dtype)
        return z

    z = extract_features(model, X, autocast_dtype=torch.bfloat16, forward=forward)
    assert seen == [torch.bfloat16]
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, exact, atol=0.03, rtol=0.03)
    assert not torch.equal(z, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(extract_features(model, X), exact)  # full precision also inside a region
        extract_features(model, X, autocast_dtype=torch.bfloat16)
        model(X).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_another_precision_get_inputs_of_it(dtype: torch.dtype) -> None:
    model, exact = network().to(dtype), reference(network(), X)
    for data in (X, TensorDataset(X, Y)):
        z = extract_features(model, data)
        assert z.dtype == torch.float32
        torch.testing.assert_close(z, exact, atol=0.05, rtol=0.05)
    bank = FeatureBank(23)
    bank.fill(model, X)
    torch.testing.assert_close(bank.features(), z)
    table = nn.Sequential(nn.Embedding(23, 4), nn.Flatten()).to(dtype)
    assert extract_features(table, Y[:, None]).shape == (23, 4)  # whole numbers stay what they are


def test_out_device_dtype_and_progress() -> None:
    calls: list[tuple[float, str]] = []
    z = extract_features(
        nn.Identity(),
        X,
        batch_size=10,
        dtype=torch.float64,
        out_device="meta",
        progress=lambda share, text: calls.append((share, text)),
    )
    assert (z.dtype, z.device.type) == (torch.float64, "meta")
    assert [share for share, _ in calls] == [10 / 23, 20 / 23, 1.0]
    assert calls[0][1] == "features of 10 of 23 samples"


@pytest.mark.parametrize(
    ("run", "field", "named"),
    [
        (lambda: extract_features(nn.Identity(), X[:0]), None, ("samples", 0)),
        (lambda: extract_features(nn.Identity(), TensorDataset(X[:0])), None, ("samples", 0)),
        (lambda: extract_features(nn.Identity(), iter([])), None, ("samples", 0)),
        (lambda: extract_features(nn.Identity(), normal(4, 2, 3, 3)), None, ("(batch, d)", (4, 2, 3, 3), "forward")),
        (lambda: extract_features(nn.Identity(), normal(4)), None, ("(batch, d)", (4,), "forward")),
        (lambda: extract_features(lambda x: (x, x), X), None, ("(batch, d)", "tuple", "forward")),
        (lambda: extract_features(lambda x: x[:2], X), None, ("2 rows", "23 samples")),
        (
            lambda: extract_features(lambda x: x[:, : len(x)], X[:, :], batch_size=4),
            None,
            ("3 features", 4, "earlier samples"),
        ),
        (lambda: extract_features(nn.Identity(), Mappings(X)), None, (["image", "label"], "key=None", "key=...")),
        (lambda: extract_features(nn.Identity(), Mappings(X), key="x"), None, (["image", "label"], "key='x'")),
        (lambda: extract_features(nn.Identity(), X, key="x"), None, ("key='x'", "mappings", "Tensor")),
        (lambda: extract_features(nn.Identity(), TensorDataset(X), key=3), None, ("1 parts", "key=3")),
        (lambda: extract_features(nn.Identity(), 3), None, ("data", "tensor", "int")),
        (lambda: extract_features(nn.Identity(), X, batch_size=0), "batch_size", (1, 0)),
        (
            lambda: extract_features(nn.Identity(), DataLoader(TensorDataset(X), 4, shuffle=True)),
            None,
            ("order", "RandomSampler", "shuffle=False"),
        ),
        (
            lambda: extract_features(nn.Identity(), DataLoader(TensorDataset(X), batch_sampler=[[1], [0]])),
            None,
            ("order", "list", "shuffle=False"),
        ),
        (
            lambda: extract_features(nn.Identity(), DataLoader(TensorDataset(X), 4, drop_last=True)),
            None,
            ("20 of 23", "drops"),
        ),
    ],
)
def test_bad_passes(run: Callable[[], Any], field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        run()


class Interrupted(Dataset[Tensor]):
    """Ctrl-C reaches a worker with each sample."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return X[index]


def test_workers_do_not_see_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    assert torch.equal(extract_features(nn.Flatten(), Interrupted(), num_workers=1), X)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert capfd.readouterr().err == ""
