"""Losses within torch.compile, and what would make a GPU wait: no value may be read on the host within a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loss_batches import LOSSES, normal, some_weights
from test_trainer import SPLITS, config
from vardass.adapt import Trainer
from vardass.losses import CORALLoss, MMDLoss, mmd2

COMPILED: dict[str, Callable[..., Tensor]] = {
    **LOSSES,
    "mmd linear": lambda x, y, **w: mmd2(x, y, kernel="linear", **w),
    "MMDLoss": MMDLoss(kernel="rbf"),
    "CORALLoss": CORALLoss(preset="domainbed", population_x=50, population_y=60, correction="population"),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_with_the_value_and_gradient_of_the_plain_loss(name: str, weighted: bool) -> None:
    x, y = normal(16, 8, 1, torch.float32).requires_grad_(), normal(12, 8, 2, torch.float32) + 0.3
    w = {"weights_x": some_weights(16), "weights_y": some_weights(12)} if weighted else {}
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b, w: COMPILED[name](a, b, **w), fullgraph=True, backend="aot_eager")
    plain, traced = COMPILED[name](x, y, **w), compiled(x, y, w)
    torch.testing.assert_close(traced, plain, rtol=1e-5, atol=1e-6)
    slopes = [torch.autograd.grad(value, x)[0] for value in (plain, traced)]
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-4, atol=1e-6)


# --- what makes a GPU wait ------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Count what a GPU would have to be waited for: values on the host, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Count copies to the host, which are no operation where the tensor is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cpu", "numpy", "tolist", "item") or (name == "to" and "cpu" in args[1:2]):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the branches of a GPU."""
    for module in ("validate", "kernels", "losses.coral", "losses.stream_weights"):
        monkeypatch.setattr(import_module(f"vardass.{module}"), "is_readable", lambda x: False)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_read_and_copy_nothing_to_the_host(name: str, weighted: bool) -> None:
    x, y = normal(16, 8, 1, torch.float32).requires_grad_(), normal(12, 8, 2, torch.float32)
    weights = {"weights_x": some_weights(16), "weights_y": some_weights(12)} if weighted else {}
    with Reads() as reads, Copies() as copies:
        LOSSES[name](x, y, **weights).backward()
    assert not reads.counts + copies.counts


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": "uniform"},
        {"sampler": "vardass"},
        {"sampler": "balanced", "algorithm": "coral", "network_options": {"dropout": 0.5}},
        {"sampler": "ordered", "class_shares": "uniform", "class_options": {"start": 0}},
        {"sampler": "uniform", "algorithm_options": {"stream_weights": True, "confusion": 0.5}},
        {"sampler": "uniform", "algorithm": "coral", "algorithm_options": {"stream_weights": True}},
        {"sampler": "stratified", "algorithm": "mcc"},
        {"sampler": "stratified", "algorithm": "cdan"},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values() if isinstance(value, str)),
)
def test_a_step_reads_no_value(changes: dict[str, Any]) -> None:
    trainer = Trainer(config(steps=2, **changes), SPLITS)
    trainer.run()  # strata, plans and running statistics are there
    with Reads() as reads, Copies() as copies:
        draws = {name: stream.draw() for name, stream in trainer.streams.items()}
        source, target = (draw.batch for draw in trainer.strata.completed(draws).values())
        trainer.algorithm.losses(source, target, 2)["total"].backward()
        trainer.strata.after_step(draws, trainer.algorithm.computed)
    assert not reads.counts + copies.counts


def test_the_counts_notice() -> None:
    x = normal(3, 2)
    with Reads() as reads, Copies() as copies:
        x[x.argmax() // 2].sum().item()
        (x > 0).nonzero().to("cpu").tolist()
    assert reads.counts == {"_local_scalar_dense": 2, "nonzero": 1}
    assert copies.counts == {"item": 1, "to": 1, "tolist": 1}
