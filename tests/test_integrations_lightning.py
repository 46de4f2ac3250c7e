"""Lightning's trainer: shares of two processes, refreshes and their log, and resumed runs that are the whole one."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vardass
from conftest import refused

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

from vardass.integrations.checkpoints import CheckpointedSampler  # noqa: E402
from vardass.integrations.lightning import RefreshCallback  # noqa: E402

N_SOURCE, N_TARGET, K = 120, 80, 4  # epochs of 30 and 20 batches: the shorter one goes round again in each
QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "accelerator": "cpu",
}


class Adapted(lightning.LightningModule):
    """BatchNorm, so that the strata of two processes would differ; keeps the batches that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (xs, ys, rows, ws), (xt, target_rows, wt) = batch
        self.seen.append((rows.tolist(), ws.tolist(), target_rows.tolist()))
        zs, zt = self.net(xs), self.net(xt)
        task = nn.functional.cross_entropy(self.head(zs), ys, reduction="none") @ ws
        return task + vardass.mmd2(zs, zt, weights_x=ws, weights_y=wt)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Recorder(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if any(name.startswith("vardass") for name in metrics):
            self.logged.append((step, metrics))


def parts(bank: bool = False, workers: int = 0) -> tuple[Adapted, RefreshCallback, Any]:
    g = torch.Generator().manual_seed(0)
    xs, xt = torch.randn(N_SOURCE, 5, generator=g), torch.randn(N_TARGET, 5, generator=g) + 1
    data = {
        "source": TensorDataset(xs, (xs[:, 0] > 0).long(), torch.arange(N_SOURCE)),
        "target": TensorDataset(xt, torch.arange(N_TARGET)),
    }
    samplers: dict[str, Any] = {
        "source": vardass.OrderedBatchSampler(N_SOURCE, K, seed=0),
        "target": vardass.BalancedBatchSampler(N_TARGET, K, seed=1),
    }
    if workers:
        samplers = {name: CheckpointedSampler(sampler) for name, sampler in samplers.items()}
    model = Adapted()
    sources: dict[str, Any] = {
        name: lambda name=name: vardass.extract_features(model.net, data[name]) for name in samplers
    }
    if bank:
        sources["target"] = vardass.FeatureBank(N_TARGET)
        sources["target"].fill(model.net, data["target"])
    callback = RefreshCallback(vardass.Refresher(vardass.RefreshEvery(7), samplers, sources))
    loaders = [
        DataLoader(vardass.with_weights(data[name]), batch_sampler=samplers[name], num_workers=workers) for name in data
    ]
    return model, callback, CombinedLoader(loaders, "max_size_cycle")


def fit(
    *, folder: Path | None = None, ckpt_path: Path | None = None, bank: bool = False, workers: int = 0, **options: Any
) -> tuple[Adapted, RefreshCallback]:
    """Train; with a folder the last step, or the end of the last epoch, is kept there as a checkpoint."""
    model, callback, loaders = parts(bank, workers)
    callbacks: list[Any] = [callback]
    if folder is not None:
        steps = options.get("max_steps")
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=steps, save_top_k=1, filename="last"))
    trainer = lightning.Trainer(
        callbacks=callbacks, enable_checkpointing=folder is not None, **{**QUIET, "max_epochs": 3, **options}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's: of few workers, and of a loader without a state of its own
        trainer.fit(model, loaders, ckpt_path=ckpt_path)
    return model, callback


@pytest.fixture(scope="module")
def whole() -> Adapted:
    return fit()[0]


@pytest.mark.parametrize(
    "stops",
    [[{"max_steps": 40}], [{"max_epochs": 1}], [{"max_steps": 17}, {"max_steps": 50}], [{"max_epochs": 2}]],
    ids=["mid-epoch", "epoch-end", "twice", "second-epoch-end"],
)
def test_a_resumed_run_is_the_whole_one(stops: list[dict[str, int]], whole: Adapted, tmp_path: Path) -> None:
    seen: list[Any] = []
    checkpoint = None
    for place, stop in enumerate(stops):
        model, _ = fit(folder=tmp_path / str(place), ckpt_path=checkpoint, **stop)
        checkpoint = tmp_path / str(place) / "last.ckpt"
        seen += model.seen
    model, _ = fit(ckpt_path=checkpoint)
    seen += model.seen
    assert len(whole.seen) == 90
    assert [place for place, (one, other) in enumerate(zip(seen, whole.seen, strict=True)) if one != other] == []
    for name, value in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("stop", [{"max_steps": 22}, {"max_epochs": 1}], ids=["after-a-refresh", "epoch-end"])
def test_workers_that_ask_ahead_lose_no_batch(stop: dict[str, int], tmp_path: Path) -> None:
    whole, _ = fit(workers=1, max_epochs=2)
    begun, _ = fit(workers=1, folder=tmp_path, **stop)
    resumed, _ = fit(workers=1, ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert len(whole.seen) == 60
    assert begun.seen + resumed.seen == whole.seen


def test_batches_come_from_strata_and_epochs_roll_over(whole: Adapted) -> None:
    assert all(len(set(weights)) > 1 for _, weights, _ in whole.seen)  # from the first batch on
    turns = [[i for _, _, rows in whole.seen[first : first + 20] for i in rows] for first in (0, 30, 60)]
    assert all(sorted(turn) == list(range(N_TARGET)) for turn in turns)  # an epoch of the target, and then a part
    assert len({tuple(turn) for turn in turns}) == 3


def test_the_report_is_logged() -> None:
    logger = Recorder()
    fit(logger=logger, max_epochs=1)
    assert [step for step, _ in logger.logged] == [0, 7, 14, 21, 28]
    for _, metrics in logger.logged:
        assert metrics["vardass/source/variance"] < metrics["vardass/source/uniform_variance"]
        assert "vardass/target/seconds_solver" in metrics


def test_a_bank_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    _, before = fit(folder=tmp_path, bank=True, max_steps=9)
    _, after = fit(ckpt_path=tmp_path / "last.ckpt", bank=True, max_steps=9)  # loads, and has nothing to do
    banks = [callback.refresher.sources["target"].state_dict() for callback in (before, after)]
    assert torch.equal(banks[0]["rows"], banks[1]["rows"])
    assert after.step == 9
    assert after.refresher.timer.seconds == before.refresher.timer.seconds


def test_what_would_go_wrong_is_refused() -> None:
    endless = vardass.UniformBatchSampler(20, 4, endless=True)
    with refused("'0'", "endless", "endless=False"):
        RefreshCallback(vardass.Refresher(vardass.RefreshEvery(3), endless, lambda: torch.zeros(20, 2)))
    with refused("refresher", "Refresher", "UniformBatchSampler", "vardass.Refresher(policy, samplers, sources)"):
        RefreshCallback(endless)  # type: ignore[arg-type]
    _, callback, _ = parts()
    shared = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False)
    with refused("2 processes", "use_distributed_sampler=False"):
        callback.on_fit_start(shared, Adapted())


# --- two processes --------------------------------------------------------------------------------------------


class Keep(lightning.Callback):
    """Writes what each process has seen."""

    def __init__(self, folder: Path, callback: RefreshCallback) -> None:
        self.folder, self.callback = folder, callback

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        found = {"seen": pl_module.seen, "strata": self.callback.refresher.samplers["source"].strata.labels}
        torch.save(found, self.folder / f"{trainer.global_rank}.pt")


def two_processes(folder: Path) -> None:
    """Two epochs of 15 batches for each process; the same, stopped after 20 and resumed."""

    def run(name: str, *, checkpoint: Path | None = None, **options: Any) -> None:
        (folder / name).mkdir()
        model, callback, loaders = parts()
        keep = ModelCheckpoint(folder / name, every_n_train_steps=options.get("max_steps"), filename="last")
        options = {"max_epochs": 2, **QUIET, **options}
        callbacks = [callback, Keep(folder / name, callback), keep]
        trainer = lightning.Trainer(
            devices=2, strategy="ddp_fork", use_distributed_sampler=False, callbacks=callbacks, **options
        )
        trainer.fit(model, loaders, ckpt_path=checkpoint)

    run("whole")
    run("begun", max_steps=20)
    run("resumed", checkpoint=folder / "begun" / "last.ckpt")


def test_two_processes_share_batches_and_strata_and_resume(tmp_path: Path) -> None:
    command = "import sys, pathlib, test_integrations_lightning as t; t.two_processes(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        name: [torch.load(tmp_path / name / f"{rank}.pt") for rank in range(2)]
        for name in ("whole", "begun", "resumed")
    }
    first, second = found["whole"]
    assert torch.equal(first["strata"], second["strata"])
    assert len(first["seen"]) == len(second["seen"]) == 30
    assert all(one[0] != other[0] for one, other in zip(first["seen"], second["seen"]))
    # the target's epoch of 20 batches is 10 for each process: together they visit each sample once
    for begin in (0, 15):
        rows = [i for rank in (first, second) for seen in rank["seen"][begin : begin + 10] for i in seen[2]]
        assert sorted(rows) == list(range(N_TARGET))
    for rank in range(2):
        assert found["begun"][rank]["seen"] + found["resumed"][rank]["seen"] == found["whole"][rank]["seen"]
