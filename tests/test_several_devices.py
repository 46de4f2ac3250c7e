"""Runs on several devices: the same losses and weights as on one, and one set of files."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import refused
from test_trainer import DROPOUT, SPLITS, Stop, config, loaded_splits
from vardass.adapt.config import RunConfig
from vardass.adapt.devices import Processes, count_devices
from vardass.adapt.model import load_model
from vardass.adapt.run_folder import RunFolder
from vardass.adapt.trainer import Trainer
from vardass.errors import VardassError

TESTS = str(Path(__file__).parent)
# SGD, as Adam does not notice gradients of another scale, and turns the rounding of those near 0 into whole steps
SHARED: dict[str, Any] = {
    "steps": 8,
    "eval_every": 4,
    "refresh_every": 3,
    "target_batch_size": 4,
    "optimiser": "sgd",
    "lr": 0.01,
}
SAME: dict[str, dict[str, Any]] = {
    "erm": {"algorithm": "erm", "sampler": "uniform", "optimiser": "adam"},
    "mmd": {"algorithm": "mmd", "sampler": "vardass"},
    "confusion": {"algorithm": "mmd", "sampler": "uniform", "algorithm_options": {"confusion": 0.5}},
    "coral": {"algorithm": "coral", "sampler": "stratified", "refresh_every": 3, "lr_schedule": "cosine"},
    "alternating": {
        "algorithm": "dann",
        "sampler": "uniform",
        "algorithm_options": {"adversary": "alternating", "grad_penalty": 0.1},
    },
    "dann": {"algorithm": "dann", "sampler": "kmeans++"},
    "cdan": {"algorithm": "cdan+e+sdat", "sampler": "vardass", "feature_source": "full"},
    "mcc": {"algorithm": "mcc", "sampler": "kmeans-inputs"},
    "arm": {"algorithm": "arm", "sampler": "vardass", "algorithm_options": {"support_size": 3}},
    "loader": {"algorithm": "mmd", "sampler": "vardass", "workers": 1},
}
# plans follow the rounding of features, and layers with random numbers or statistics see parts of a batch
DIFFERENT: dict[str, dict[str, Any]] = {
    "ordered": {"algorithm": "coral", "sampler": "ordered"},
    "balanced": {"algorithm": "dann", "sampler": "balanced", "refresh_every": 3},
    "half": {"algorithm": "mmd", "sampler": "uniform", "precision": "16-mixed"},
    "noisy": {"algorithm": "mmd", "network_options": {**DROPOUT, "bottleneck": 5}, "precision": "bf16-mixed"},
}


FIRST_OF_TWO = Processes(0, 2), torch.device("cpu"), False


def shared(**changes: Any) -> RunConfig:
    return config(**{**SHARED, **changes})


def plain_state(trainer: Trainer) -> dict[str, Any]:
    """Weights, and the batches that are drawn next."""
    drawn = {name: stream.draw().rows for name, stream in trainer.streams.items()}
    for stream in trainer.streams.values():
        stream.close()
    return {"weights": dict(trainer.algorithm.state_dict()), "drawn": drawn, "metrics": trainer.history.metrics}


def work(rank: int, folder: str, port: int) -> None:
    """One of two processes that go through all runs."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for name, changes in {**SAME, **DIFFERENT}.items():
        splits = loaded_splits() if name == "loader" else SPLITS
        trainer = Trainer(shared(**changes, devices=2), splits)
        trainer.run()
        torch.save(plain_state(trainer), f"{folder}/{name}-{rank}.pt")
    torch.distributed.destroy_process_group()
    assert "torch.utils.tensorboard" not in sys.modules


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of both processes after each run, as files NAME-RANK.pt."""
    folder = tmp_path_factory.mktemp("pair")
    script = f"""
        import socket, sys
        sys.path.insert(0, {TESTS!r})
        import test_several_devices
        from torch import multiprocessing
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        work = test_several_devices.work
        multiprocessing.start_processes(work, args=({str(folder)!r}, port), nprocs=2, start_method="fork")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=False, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def states(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in (0, 1)]


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("name", [*SAME, *DIFFERENT])
def test_both_processes_have_the_same_weights_and_draw_the_same_batches(name: str, pair: Path) -> None:
    first, second = states(pair, name)
    assert_same(first["weights"], second["weights"])
    assert_same(first["drawn"], second["drawn"])
    assert [line["score"] for line in first["metrics"]] == [line["score"] for line in second["metrics"]]


@pytest.mark.parametrize("name", SAME)
def test_two_processes_train_as_one_does(name: str, pair: Path) -> None:
    alone = Trainer(shared(**SAME[name]), loaded_splits() if name == "loader" else SPLITS)
    start = {key: value.clone() for key, value in alone.algorithm.state_dict().items()}
    alone.run()
    expected, got = plain_state(alone), states(pair, name)[0]
    for key, value in expected["weights"].items():
        torch.testing.assert_close(got["weights"][key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    moved = max(float((value - start[key]).abs().max()) for key, value in expected["weights"].items())
    assert moved > 1e-3  # the bounds above tell training from standing still
    assert_same(got["drawn"], expected["drawn"])
    for line, other in zip(got["metrics"], expected["metrics"], strict=True):
        assert line["loss/total"] == pytest.approx(other["loss/total"], rel=1e-4)
        assert line["source_accuracy"] == pytest.approx(other["source_accuracy"], abs=0.06)


# --- started by the trainer ---------------------------------------------------------------------------------


def test_a_run_starts_processes_and_their_result_comes_back(tmp_path: Path) -> None:
    settings = shared(devices=2, sampler="vardass", device="cpu", checkpoint_every=3)
    said: list[tuple[float, str]] = []
    trainer = Trainer(settings, SPLITS, tmp_path)
    result = trainer.run(progress=lambda share, message: said.append((share, message)))
    alone = Trainer(settings.changed(devices=1), SPLITS).run()
    assert (result.step, result.interrupted, trainer.step) == (8, False, 8)
    assert result.score == pytest.approx(alone.score, rel=1e-4)  # sums over the batch are rounded in another order
    for key, value in alone.algorithm.state_dict().items():
        torch.testing.assert_close(result.algorithm.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8]
    assert lines == result.metrics
    model, _ = load_model(tmp_path)
    assert_same(dict(model.state_dict()), dict(result.algorithm.state_dict()))
    assert said[-1][0] == 1.0
    assert said[-1][1].startswith("step 8 of 8, loss")


def test_an_interrupted_run_on_two_devices_goes_on_on_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = shared(devices=2, device="cpu", steps=4000, eval_every=2000, sampler="uniform")
    first = Trainer(settings, SPLITS, tmp_path).run(progress=Stop(1))
    assert first.interrupted
    assert 1 <= first.step < 4000
    assert f"stopped after step {first.step} of 4000" in capsys.readouterr().err
    second = Trainer(settings.changed(devices=1, steps=first.step + 5), SPLITS, tmp_path).run(resume=True)
    assert second.step == first.step + 5


def test_an_error_in_a_process_is_told_as_it_is() -> None:
    settings = shared(devices=2, device="cpu", sampler="uniform", optimiser="sgd", lr=1e30)
    with pytest.raises(VardassError, match=r"^the loss is not finite at step"):
        Trainer(settings, SPLITS).run()


def test_failing_progress_is_raised_after_the_processes_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(shared(devices=2, device="cpu"), SPLITS)
    state = {**trainer.state_dict(), "step": 3}

    class Running:
        def __init__(self, function: Any, given: Any, *, nprocs: int, join: bool) -> None:
            self.make_trainer, *_, self.messages, self.stop = given
            for share in (0.5, 0.6):
                self.messages.put((share, "half"))

        def join(self, timeout: float) -> bool:
            if not self.stop.is_set():
                return False
            assert self.messages.empty()  # it is read on, or a process that writes would wait for ever
            settings, _, folder = self.make_trainer.args
            RunFolder(folder).save(settings, state)
            return True

    calls = []

    def fail(share: float, message: str) -> None:
        calls.append(share)
        raise ValueError(message)

    monkeypatch.setattr("vardass.adapt.devices.spawn", Running)
    with pytest.raises(ValueError, match="half"):
        trainer.run(progress=fail)
    assert (trainer.step, calls) == (3, [0.5])


def test_interrupt_while_embedding_waits_for_the_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(share: float, message: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vardass.adapt.trainer.join_processes", lambda config: FIRST_OF_TWO)
    trainer = Trainer(shared(sampler="uniform"), SPLITS)
    monkeypatch.setattr(trainer, "_start", lambda resume, progress: progress(0.5, "embedding"))
    monkeypatch.setattr(trainer.strata, "before_step", lambda step, stop: (stop, None))
    result = trainer.run(progress=interrupt)
    assert (result.step, result.interrupted) == (0, True)


# --- settings -----------------------------------------------------------------------------------------------


def test_several_devices_need_gpus_and_batches_that_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("vardass.adapt.trainer.join_processes", lambda config: FIRST_OF_TWO)
        with refused("5 samples", "2 processes", "batch_size"):
            Trainer(shared(batch_size=5), SPLITS)
    with refused("device='cuda:1'", "devices=2", "CUDA_VISIBLE_DEVICES", field="devices"):
        Trainer(shared(device="cuda:1", devices=2), SPLITS)
    with refused("devices=99", f"{torch.cuda.device_count()} GPUs", "device='cpu'", field="devices"):
        Trainer(shared(device="cuda", devices=99), SPLITS)
    with refused("devices=2", "device='mps'", "devices=1", field="devices"):
        Trainer(shared(device="mps", devices=2), SPLITS)
    assert count_devices(RunConfig(devices="auto", device="cpu")) == 1
    for wrong, known in ((0, "at least 1"), ("all", "auto")):
        with refused(repr(wrong), known, field="devices"):
            RunConfig(devices=wrong)
