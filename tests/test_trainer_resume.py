"""Interrupted, killed and continued runs are the same as whole ones, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import refused
from test_trainer import SPLITS, Stop, assert_same_run, config, flat, loaded_splits, resumable
from vardass.adapt.config import RunConfig
from vardass.adapt.model import final_report, load_model
from vardass.adapt.run_folder import RunFolder, load_checkpoint
from vardass.adapt.trainer import Trainer
from vardass.data import Domain, Task, TaskSplits, TensorInputs, split_task

RESUMED = [
    {"algorithm": "mmd", "sampler": "vardass"},
    {"algorithm": "mmd", "sampler": "stratified", "algorithm_options": {"confusion": 0.3}},
    {"algorithm": "cdan+sdat", "sampler": "ordered", "feature_source": "full"},
    {"algorithm": "mmd", "sampler": "uniform", "algorithm_options": {"stream_weights": True}},
    {"algorithm": "coral", "sampler": "balanced", "algorithm_options": {"stream_weights": True}},
    {"algorithm": "coral", "sampler": "balanced", "optimiser": "sgd", "lr": 1e-4},
    {"algorithm": "dann", "sampler": "dpp", "algorithm_options": {"adversary": "alternating"}},
    {"algorithm": "mcc", "sampler": "kmeans++", "selection": "information-maximisation"},
    {"algorithm": "arm", "sampler": "kmeans-inputs"},
    {"algorithm": "erm", "sampler": "uniform", "target_batch_size": 3},
]


@pytest.mark.parametrize("changes", RESUMED, ids=lambda changes: f"{changes['algorithm']}-{changes['sampler']}")
def test_a_resumed_run_is_the_same_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = resumable(**changes)
    whole = Trainer(settings, SPLITS, tmp_path / "whole")
    whole.run()
    first = Trainer(settings, SPLITS, tmp_path / "parts").run(progress=Stop(7))
    assert (first.step, first.interrupted) == (7, True)
    torch.manual_seed(99)  # another process has other global random numbers
    second = Trainer(settings, SPLITS, tmp_path / "parts")
    result = second.run(resume=True)
    assert (result.step, result.interrupted) == (15, False)
    assert_same_run(whole, second)
    lines = [
        [flat(json.loads(line)) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    assert lines[0] == lines[1]
    assert [line["/step"] for line in lines[0]] == [5, 10, 15]


def test_another_seed_is_another_run() -> None:
    runs = [Trainer(resumable(seed=seed), SPLITS) for seed in (0, 1)]
    for run in runs:
        run.run()
    with pytest.raises(AssertionError):
        assert_same_run(*runs)


def test_dropout_is_new_in_every_step_and_global_randomness_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    states: list[Tensor] = []
    trainer = Trainer(resumable(steps=2), SPLITS)
    trainer.algorithm.network.dropout.register_forward_hook(
        lambda module, args, z: states.append(torch.get_rng_state()) if module.training else None
    )
    trainer.run()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(states[0], states[2])


def test_a_loader_gives_the_same_run_as_memory() -> None:
    runs = [Trainer(config(sampler="ordered"), splits) for splits in (SPLITS, loaded_splits())]
    for run in runs:
        run.run()
    assert not isinstance(runs[1].streams["source"].inputs.data, Tensor)
    assert_same_run(*runs)


def test_batches_that_workers_prepare_ahead_survive_an_interruption(tmp_path: Path) -> None:
    settings = resumable(workers=1, steps=9, refresh_every=3, eval_every=9, eval_batch_size=64)
    whole = Trainer(settings, loaded_splits())
    whole.run()
    Trainer(settings, loaded_splits(), tmp_path).run(progress=Stop(4))
    meta = load_checkpoint(tmp_path / "checkpoint.pt")
    assert len(meta["state"]["streams"]["source"]["pending"]) > 0
    second = Trainer(settings, loaded_splits(), tmp_path)
    second.run(resume=True)
    assert_same_run(whole, second)


@pytest.mark.parametrize("splits", [SPLITS, loaded_splits()], ids=["memory", "loader"])
def test_a_run_goes_on_in_the_same_process_without_a_folder(splits: TaskSplits) -> None:
    whole, parts = Trainer(resumable(), splits), Trainer(resumable(), splits)
    whole.run()
    assert parts.run(progress=Stop(7)).interrupted
    with refused("step 7", "resume=True"):
        parts.run()
    parts.run(resume=True)
    assert_same_run(whole, parts)


def test_resuming_where_nothing_was_saved_yet_begins(tmp_path: Path) -> None:
    RunFolder(tmp_path).begin(resumable())
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    whole, begun = Trainer(resumable(), SPLITS), Trainer(resumable(), SPLITS, tmp_path)
    whole.run()
    begun.run(resume=True)
    assert_same_run(whole, begun)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_augmented_images_in_half_precision_resume_too(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2

    def domain(name: str) -> Domain:
        pixels = torch.rand(40, 3, 16, 16, generator=generator) * 0.5 + 0.4 * labels[:, None, None, None]
        return Domain(name, TensorInputs(pixels), labels, ("dark", "bright"), kind="image")

    splits = split_task(Task("images", (domain("s"),), domain("t")), seed=0)
    settings = RunConfig(
        algorithm="dann",
        sampler="stratified",
        network="conv",
        network_options={"widths": [4, 8]},
        steps=4,
        batch_size=4,
        refresh_every=2,
        eval_every=2,
        augment="source",
        precision="bf16-mixed",
        selection="source-accuracy",
        device="cpu",
    )
    whole, plain = Trainer(settings, splits), Trainer(settings.changed(augment="none"), splits)
    whole.run()
    plain.run()
    Trainer(settings, splits, tmp_path).run(progress=Stop(3))
    resumed = Trainer(settings, splits, tmp_path)
    report = final_report(resumed.run(resume=True), splits)
    assert_same_run(whole, resumed)
    assert report["source_accuracy"] == resumed.choice.score
    with pytest.raises(AssertionError):
        assert_same_run(whole, plain)


def test_a_killed_run_loses_only_the_steps_since_its_checkpoint(tmp_path: Path) -> None:
    settings = resumable()
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_trainer import SPLITS, Trainer, resumable

        def kill(share, message):
            if message.startswith("step 11 of"):
                os.kill(os.getpid(), signal.SIGKILL)

        Trainer(resumable(), SPLITS, {str(tmp_path / "killed")!r}).run(progress=kill)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    metrics = tmp_path / "killed" / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [5, 10]
    with metrics.open("a") as file:
        file.write('{"step": 11, "half a li')  # as if it had died while writing
    meta = load_checkpoint(tmp_path / "killed" / "checkpoint.pt")
    assert meta["state"]["step"] == 8
    whole, resumed = Trainer(settings, SPLITS), Trainer(settings, SPLITS, tmp_path / "killed")
    whole.run()
    resumed.run(resume=True)
    assert_same_run(whole, resumed)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [5, 10, 15]


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(resumable(), SPLITS, tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    seen: list[str] = []

    def press(share: float, message: str) -> None:
        if not message.startswith("features"):  # of the first pass
            seen.append(message)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    result = trainer.run(progress=press)
    assert (result.step, result.interrupted, result.score) == (3, True, None)
    assert signal.getsignal(signal.SIGINT) is handler
    said = capsys.readouterr().err
    assert "stopped after step 3 of 15" in said
    assert str(tmp_path) in said
    assert "resume it to continue" in said
    meta = load_checkpoint(tmp_path / "checkpoint.pt")
    assert meta["state"]["step"] == 3


def test_a_second_ctrl_c_stops_at_once() -> None:
    def press(share: float, message: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = Trainer(resumable(), SPLITS)

    def interrupted_update(*args: Any, **options: Any) -> Any:
        press(0.0, "")

    trainer.algorithm.update = interrupted_update  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.step == 0


def test_a_run_that_is_over_can_be_made_longer(tmp_path: Path) -> None:
    Trainer(resumable(steps=6), SPLITS, tmp_path).run()
    longer, whole = Trainer(resumable(steps=10, eval_every=5), SPLITS, tmp_path), Trainer(resumable(steps=10), SPLITS)
    assert longer.run(resume=True).step == 10
    whole.run()
    assert torch.equal(longer.algorithm.network.head.weight, whole.algorithm.network.head.weight)  # type: ignore[arg-type]


def test_a_folder_in_use_and_other_settings_are_refused(tmp_path: Path) -> None:
    Trainer(resumable(steps=4), SPLITS, tmp_path).run()
    with refused(tmp_path, "already holds a run", "resume"):
        Trainer(resumable(steps=4), SPLITS, tmp_path).run()
    with refused(tmp_path, "lr=0.001", "lr=0.5"):
        Trainer(resumable(steps=8, lr=0.5), SPLITS, tmp_path).run(resume=True)
    with refused("lr=0.001", "lr=0.5"):  # defaults of options may follow from it
        Trainer(resumable(steps=8, lr=0.5, algorithm_options={"penalty": 2.0}), SPLITS, tmp_path).run(resume=True)
    with refused(tmp_path, "algorithm_options={'penalty': None}", "algorithm_options={'penalty': 2.0}"):
        Trainer(resumable(steps=8, algorithm_options={"penalty": 2.0}), SPLITS, tmp_path).run(resume=True)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-5])
    with refused(path, f"{path.stat().st_size} bytes"):
        Trainer(resumable(steps=8), SPLITS, tmp_path).run(resume=True)


@pytest.mark.parametrize("failing", [2, 3], ids=["on the way", "at the end"])
def test_a_full_disk_leaves_the_checkpoint_before_it_and_a_model(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(steps=9, eval_every=3, checkpoint_every=3)
    whole = Trainer(settings, SPLITS)
    whole.run()
    saves = []

    def save(content: Any, file: Any) -> None:
        saves.append(content)
        if len(saves) == failing:
            try:
                raise OSError(28, "No space left on device")
            except OSError:
                raise RuntimeError("[enforce fail at inline_container.cc:672]")  # noqa: B904, as torch does
        torch_save(content, file)

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", save)
    with refused(tmp_path / "checkpoint.pt", "No space left on device", "resume"):
        Trainer(settings, SPLITS, tmp_path).run()
    assert load_checkpoint(tmp_path / "checkpoint.pt")["state"]["step"] == 3 * (failing - 1)
    model, about = load_model(tmp_path)
    assert about["step"] <= 3 * failing
    if failing == 3:  # trained to the end: only the checkpoint is lost
        for name, value in whole.run(resume=True).algorithm.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
    assert [path.name for path in tmp_path.glob(".*")] == [".vardass.json"]
    resumed = Trainer(settings, SPLITS, tmp_path)
    resumed.run(resume=True)
    assert_same_run(whole, resumed)
