"""Options of a run: learning rates, refresh policies, precision, cached embeddings, what is logged and shown."""

from __future__ import annotations

import gc
import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import refused
from test_trainer import DROPOUT, SPLITS, Stop, assert_same_run, config, resumable
from vardass.adapt import pretrained
from vardass.adapt.batches import Inputs
from vardass.adapt.config import RunConfig
from vardass.adapt.model import final_report, load_model, outputs
from vardass.adapt.trainer import Trainer
from vardass.cli import main
from vardass.data import Domain, Task, TaskSplits, TensorInputs, split_task
from vardass.data.embedding_tasks import embedding_task, standardise_task

CPU = torch.device("cpu")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

# --- learning rates -----------------------------------------------------------------------------------------


def rates(trainer: Trainer) -> list[list[float]]:
    """Learning rates of all parameter groups in each step."""
    seen: list[list[float]] = []
    update = trainer.algorithm.update

    def spy(*args: Any, **options: Any) -> Any:
        seen.append([group["lr"] for optimiser in trainer.optimisers.values() for group in optimiser.param_groups])
        return update(*args, **options)

    trainer.algorithm.update = spy  # type: ignore[method-assign]
    trainer.run()
    return seen


def test_rates_follow_the_schedule() -> None:
    settings = config(sampler="uniform", steps=4, lr=0.5)
    assert rates(Trainer(settings, SPLITS)) == [[0.5]] * 4
    cosine = rates(Trainer(settings.changed(lr_schedule="cosine"), SPLITS))
    expected = [0.5, 0.25 * (1 + math.cos(math.pi / 4)), 0.25, 0.25 * (1 - math.cos(math.pi / 4))]
    assert [rate for (rate,) in cosine] == pytest.approx(expected)
    inverse = rates(Trainer(settings.changed(lr_schedule="inverse", algorithm="dann"), SPLITS))
    assert inverse == [pytest.approx([0.5 * (1 + 0.001 * step) ** -0.75] * 2) for step in range(4)]


def test_parts_have_rates_of_their_own() -> None:
    options = {"hidden": [8], "bottleneck": 5}
    factors = {"featuriser": 0.0, "discriminator": 2.0}
    settings = config(
        algorithm="dann", sampler="uniform", optimiser_options={"lr_multipliers": factors}, network_options=options
    )
    trainer = Trainer(settings.changed(lr_schedule="cosine"), SPLITS)
    before = {name: value.clone() for name, value in trainer.algorithm.named_parameters()}
    assert rates(trainer)[0] == [0.0, 1e-3, 2e-3]
    for name, value in trainer.algorithm.named_parameters():
        assert torch.equal(value, before[name]) == name.startswith("network.featuriser."), name
    with refused("lr_multipliers", "'discriminator'", "'featuriser'"):
        Trainer(config(optimiser_options={"lr_multipliers": factors}), SPLITS)
    with refused("lr_multipliers", "'featurizer'", "'featuriser'"):
        RunConfig(optimiser_options={"lr_multipliers": {"featurizer": 0.1}})


def test_betas_of_adam() -> None:
    def betas(**changes: Any) -> Any:
        return Trainer(config(**changes), SPLITS).optimisers["network"].param_groups[0]["betas"]

    alternating = {"algorithm": "dann", "algorithm_options": {"adversary": "alternating"}}
    assert (betas(), betas(**alternating)) == ((0.9, 0.999), (0.5, 0.9))
    assert betas(optimiser_options={"betas": (0.8, 0.95)}, **alternating) == (0.8, 0.95)
    with refused("two numbers", [0.9], field="betas"):
        RunConfig(optimiser_options={"betas": [0.9]})
    with refused("optimiser 'sgd'", "'betas'", "momentum"):
        RunConfig(optimiser="sgd", optimiser_options={"betas": [0.9, 0.99]})


def test_the_discriminator_may_have_rate_and_decay_of_its_own() -> None:
    changes = {"algorithm": "dann", "lr": 1e-3, "weight_decay": 0.1}
    factors = {"lr_multipliers": {"discriminator": 2.0}}
    own = {"discriminator_lr": 1e-2, "discriminator_weight_decay": 0.0}
    trainer = Trainer(config(**changes, optimiser_options={**factors, **own}), SPLITS)
    found = {name: optimiser.param_groups[0] for name, optimiser in trainer.optimisers.items()}
    assert (found["network"]["lr"], found["network"]["weight_decay"]) == (1e-3, 0.1)
    assert (found["discriminator"]["lr"], found["discriminator"]["weight_decay"]) == (2e-2, 0.0)
    shared = Trainer(config(**changes, optimiser_options=factors), SPLITS).optimisers["discriminator"].param_groups[0]
    assert (shared["lr"], shared["weight_decay"]) == (2e-3, 0.1)
    with refused("discriminator_lr is 0.01", "'mmd'"):
        Trainer(config(algorithm="mmd", optimiser_options={"discriminator_lr": 1e-2}), SPLITS)


# --- resumption ---------------------------------------------------------------------------------------------

RESUMED: dict[str, dict[str, Any]] = {
    "cosine": {
        "lr_schedule": "cosine",
        "optimiser_options": {"lr_multipliers": {"head": 3.0}, "betas": [0.5, 0.9]},
        "sampler": "uniform",
    },
    "strata": {"refresh_every": 3, "sampler": "stratified"},
    "classes": {"class_shares": "source", "sampler": "stratified", "batch_size": 14},
    "half": {"precision": "16-mixed", "sampler": "uniform", "algorithm": "dann"},
    "cached": {"cache_embeddings": True, "network_options": {**DROPOUT, "freeze_backbone": True, "bottleneck": 4}},
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    settings = resumable().changed(**RESUMED[name])
    whole = Trainer(settings, SPLITS)
    whole.run()
    assert Trainer(settings, SPLITS, tmp_path).run(progress=Stop(7)).step == 7
    second = Trainer(settings, SPLITS, tmp_path)
    second.run(resume=True)
    assert_same_run(whole, second)
    if "refresh_every" in RESUMED[name]:
        assert whole.streams["source"].sampler._refreshes > 2


def test_a_schedule_that_ends_with_the_run_fixes_its_length(tmp_path: Path) -> None:
    settings = resumable(sampler="uniform", lr_schedule="cosine", steps=4)
    Trainer(settings, SPLITS, tmp_path).run()
    with refused("steps=4", "steps=6"):
        Trainer(settings.changed(steps=6), SPLITS, tmp_path).run(resume=True)


# --- refreshes and strata -----------------------------------------------------------------------------------


def refresh_steps(**changes: Any) -> list[int]:
    trainer = Trainer(config(steps=12, eval_every=12, **changes), SPLITS)
    found: list[int] = []
    add = trainer.history.add_refresh

    def spy(log: Any) -> None:
        found.extend([] if log is None else [log["step"]])
        add(log)

    trainer.history.add_refresh = spy  # type: ignore[method-assign]
    trainer.run()
    return found


def test_policies_say_when_to_refresh() -> None:
    assert refresh_steps(refresh_every=5) == [0, 5, 10]
    assert refresh_steps(refresh_every="growing") == [0, 10]
    assert refresh_steps(refresh_every=0) == []
    assert RunConfig().refresh_every == "growing"
    with refused("'growin'", "'growing'", field="refresh_every"):
        RunConfig(refresh_every="growin")


@pytest.mark.parametrize("sampler", ["stratified", "vardass", "ordered"])
def test_strata_within_classes_keep_the_class_shares(sampler: str) -> None:
    trainer = Trainer(config(sampler=sampler, class_shares="source", batch_size=14, algorithm="coral"), SPLITS)
    trainer.run()
    labels = SPLITS.source_train.known_labels()
    strata = trainer.streams["source"].sampler.strata  # type: ignore[attr-defined]
    for stratum in range(strata.k):
        assert len(labels[strata.labels == stratum].unique()) == 1
    assert trainer.streams["target"].sampler.groups is None  # type: ignore[attr-defined]
    with refused("'uniform'", "class_shares='source'", "stratified", field="sampler"):
        config(sampler="uniform", class_shares="source")


# --- precision ----------------------------------------------------------------------------------------------


def test_half_precision_scales_the_loss_and_leaves_out_steps_that_overflow() -> None:
    settings = config(precision="16-mixed", sampler="uniform", algorithm="dann", steps=3, optimiser="sgd", lr=0.1)
    trainer, full = Trainer(settings, SPLITS), Trainer(settings.changed(precision="32-true"), SPLITS)
    trainer.scaler._init_scale = 2.0**4
    trainer.run()
    full.run()
    assert trainer.scaler.state_dict()["scale"] == 2.0**4
    overflowing = Trainer(settings, SPLITS)
    before = {name: value.detach().clone() for name, value in overflowing.algorithm.named_parameters()}
    for name in ("network.head.weight", "discriminator.0.weight"):
        half, whole = (run.algorithm.get_parameter(name).detach() - before[name] for run in (trainer, full))
        assert 0.0 < float((half - whole).norm()) < 0.15 * float(whole.norm()), name
    overflowing.scaler._init_scale = 2.0**127
    overflowing.run()
    assert all(torch.equal(value, before[name]) for name, value in overflowing.algorithm.named_parameters())
    assert overflowing.scaler.state_dict()["scale"] == 2.0**124


# --- cached embeddings --------------------------------------------------------------------------------------

FROZEN: dict[str, Any] = {
    "network": "conv",
    "network_options": {"widths": [4, 8], "freeze_backbone": True, "bottleneck": 6, "dropout": 0.2},
    "steps": 12,
    "eval_every": 4,
    "refresh_every": 4,
    "batch_size": 8,
    "lr": 0.01,
    "device": "cpu",
}


def image_splits(count: int = 60) -> TaskSplits:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2

    def domain(name: str) -> Domain:
        pixels = torch.rand(count, 3, 16, 16, generator=generator) * 0.5 + 0.4 * labels[:, None, None, None]
        return Domain(name, TensorInputs(pixels), labels, ("dark", "bright"), kind="image")

    return split_task(Task("images", (domain("s"),), domain("t")), seed=0)


@pytest.mark.filterwarnings("ignore:k-means on inputs:vardass.errors.VardassWarning")
@pytest.mark.parametrize("changes", [{"algorithm": "mmd"}, {"algorithm": "cdan+sdat", "sampler": "kmeans-inputs"}])
def test_cached_embeddings_change_nothing_but_the_time(changes: dict[str, Any], tmp_path: Path) -> None:
    splits = image_splits()
    settings = RunConfig(**{**FROZEN, **changes, "cache_embeddings": True})
    cached, plain = Trainer(settings, splits, tmp_path), Trainer(settings.changed(cache_embeddings=False), splits)
    calls: list[int] = []
    assert cached.backbone is not None
    cached.backbone.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    told: list[str] = []
    result = cached.run(progress=lambda share, message: told.append(message))
    other = plain.run()
    assert sum(calls) == sum(len(part) for part in (splits.source_train, splits.source_val)) + sum(
        len(part) for part in (splits.target_unlabelled, splits.target_val)
    )
    assert told[0].startswith("embeddings of ")
    assert "step 1 of 12" in " ".join(told)
    for name, value in other.algorithm.state_dict().items():
        torch.testing.assert_close(result.algorithm.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    assert final_report(result, splits)["source_accuracy"] == final_report(other, splits)["source_accuracy"]
    # the model takes images again
    inputs = Inputs(splits.target_test, CPU)
    model, about = load_model(tmp_path)
    assert about["input_shape"] == [3, 16, 16]
    assert torch.equal(outputs(model, inputs)[1], outputs(result.algorithm, inputs)[1])


def test_embeddings_are_cached_only_where_they_stay_the_same() -> None:
    splits = image_splits()

    def backbone(cache: bool | str, **changes: Any) -> Any:
        return Trainer(RunConfig(**{**FROZEN, **changes, "cache_embeddings": cache}), splits).backbone

    assert backbone("auto") is not None
    assert backbone(False) is None
    trained = {"network_options": {"widths": [4, 8]}}
    for changes, named in (
        (trained, ("trained", "freeze_backbone=True")),
        ({"augment": "source"}, ("augmented",)),
        ({"algorithm": "arm"}, ("ARM", "context")),
    ):
        assert backbone("auto", **changes) is None
        with refused("cache_embeddings=True", "'auto'", *named):
            backbone(True, **changes)


# --- what is logged and shown -------------------------------------------------------------------------------


def test_tensorboard_files_hold_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = resumable(tensorboard=True, lr_schedule="inverse")
    Trainer(settings, SPLITS, tmp_path).run(progress=Stop(7))
    result = Trainer(settings, SPLITS, tmp_path).run(resume=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for tag, key in (
        ("loss/total", "loss/total"),
        ("score/source_accuracy", "source_accuracy"),
        ("source/reduction", "source/reduction"),
    ):
        read = [(event.step, event.value) for event in events.Scalars(tag)]
        assert read == [(line["step"], pytest.approx(line[key], rel=1e-6)) for line in result.metrics], tag
    assert events.Scalars("lr/network")[-1].value == pytest.approx(1e-3 * (1 + 0.001 * 14) ** -0.75, rel=1e-6)
    assert {"seconds/training", "seconds/solver"} <= set(events.Tags()["scalars"])
    with refused("tensorboard=True", "out=None"):
        Trainer(settings, SPLITS)


def test_tensorboard_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with refused("tensorboard=True", "pip install tensorboard"):
        Trainer(resumable(tensorboard=True), SPLITS, tmp_path)


def test_a_terminal_sees_step_loss_variance_and_time(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vardass", "train", "--dataset", "watch", "--task", "left-A->right-B"]
    command += ["--out", str(tmp_path / "run"), "--steps", "400", "--sampler", "vardass", "--device", "cpu", "--json"]
    leader, follower = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    text = " ".join(shown.decode().split())
    for part in ("left 0:00:00", "of 400", "loss ", "variance reduced ", "solver "):
        assert part in text, part
    summary = json.loads(out)  # the bar is not in the way of what a program reads
    assert summary["steps"] == 400
    assert 0.0 <= summary["target_accuracy"] <= 1.0
    assert str(tmp_path / "run/model.safetensors") in summary["written"]


# --- the command line ---------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name, shift in (("clinic", 0.0), ("home", 1.0)):
        labels = np.arange(60) % 3
        x = generator.normal(size=(60, 4)) + 6.0 * np.eye(4)[labels] + shift
        np.savez(tmp_path / f"{name}.npz", x=(x * [1, 100, 0.01, 1] + 7).astype(np.float32), labels=labels)
    return tmp_path


def command(folder: Path, out: str, *more: object) -> int:
    given = ("adapt", "--source", folder / "clinic.npz", "--target", folder / "home.npz", "--out", folder / out)
    quick = ("--steps", 30, "--batch-size", 8, "--eval-every", 10, "--sampler", "uniform", "--device", "cpu")
    return main([str(part) for part in (*given, *quick, *more)])


def test_options_of_the_command_reach_the_run(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--target-batch-size", 4, "--precision", "bf16-mixed", "--tensorboard", "--json", "--set")
    assert command(tables, "run", *more, "lr_schedule=cosine", "--selection", "source-accuracy") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["competing"] == 3  # 10, 20 and 30: the penalty has its full strength from step 6 on
    assert summary["selected_step"] == max(summary["equal_steps"])
    assert summary["steps"] == 30
    assert summary["selected"]["source_accuracy"] == summary["score"]
    assert sum(summary["predicted"].values()) == 60
    settings = json.loads((tables / "run/config.json").read_text())
    wanted = {"target_batch_size": 4, "precision": "bf16-mixed", "tensorboard": True, "lr_schedule": "cosine"}
    assert wanted.items() <= settings.items()
    assert settings["devices"] == 1
    assert list((tables / "run/tensorboard").iterdir())
    for wrong, said in (
        (("--set", "lr_shedule=cosine"), "'lr_schedule'"),
        (("--precision", "8-bit"), "32-true"),
        (("--devices", "many"), "devices"),
        (("--set", "selection=oracle"), "vardass train"),
    ):
        assert command(tables, "other", *wrong) == 2
        assert said in capsys.readouterr().err


def test_standardised_columns_are_scaled_alike_when_predicting(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = standardise_task(embedding_task(tables / "clinic.npz", tables / "home.npz", standardise=False))
    scale = task.target.dataset.scale
    expected = embedding_task(tables / "clinic.npz", tables / "home.npz")
    for mine, theirs in ((task.sources[0], expected.sources[0]), (task.target, expected.target)):
        torch.testing.assert_close(mine.dataset.tensor, theirs.dataset.tensor)  # type: ignore[attr-defined]
    assert len(scale["mean"]) == 4
    assert command(tables, "run", "--steps", 100, "--lr", 0.01, "--json") == 0
    assert json.loads(capsys.readouterr().out)["score"] > 0.9
    again = ("predict", tables / "run", tables / "home.npz", "--out", tables / "p.csv")
    assert main([str(part) for part in again]) == 0
    assert (tables / "p.csv").read_bytes() == (tables / "run/predictions.csv").read_bytes()
    capsys.readouterr()
    assert json.loads((tables / "run/data.json").read_text())["scale"] == scale
    assert command(tables, "run", "--no-standardise", "--resume", "--steps", 120) == 2
    said = capsys.readouterr().err
    assert f"has scale of columns with mean {scale['mean'][0]:.6g}, ..., this one none (--no-standardise)" in said
    assert "same data" in said
    assert command(tables, "raw", "--no-standardise", "--steps", 2) == 0
    assert json.loads((tables / "raw/data.json").read_text())["scale"] is None
    with refused("'s'", "image", "embeddings"):
        standardise_task(Task("images", (image_domain("s"),), image_domain("t")))


def image_domain(name: str) -> Domain:
    return Domain(name, TensorInputs(torch.zeros(4, 1, 8, 8)), torch.arange(4) % 2, ("a", "b"), kind="image")


# --- pretrained networks ------------------------------------------------------------------------------------


def test_a_backbone_is_taken_from_disk_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(source: str, **options: Any) -> nn.Module:
        asked.append(options)
        if options and not on_disk:
            raise OSError("not downloaded")
        return nn.Identity()

    on_disk = True
    assert isinstance(pretrained._from_disk_or_hub(load, "a/b", False), nn.Identity)
    assert asked == [{"local_files_only": True}]
    on_disk = False
    monkeypatch.setattr(pretrained, "_answers", lambda address: True)
    pretrained._from_disk_or_hub(load, "a/b", False)
    assert asked[-1] == {}
    with pytest.raises(OSError, match="not downloaded"):
        pretrained._from_disk_or_hub(load, "a/b", True)
    monkeypatch.setattr(pretrained, "_answers", lambda address: False)
    with pytest.raises(OSError, match="cannot be reached"):
        pretrained._from_disk_or_hub(load, "a/b", False)
    assert asked[-1] == {"local_files_only": True}  # nobody waited for the hub


def test_an_address_that_does_not_answer_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "getproxies", dict)
    assert not pretrained._answers("http://127.0.0.1:9", seconds=0.5)
    monkeypatch.setattr(pretrained, "getproxies", lambda: {"https": "http://proxy"})
    assert pretrained._answers("https://nowhere.invalid")


# --- memory -------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_memory_stays_flat_over_ten_thousand_steps(tmp_path: Path) -> None:
    settings = config(sampler="stratified", steps=10_000, eval_every=500, refresh_every=100, checkpoint_every=2000)
    found: dict[int, tuple[int, int]] = {}

    def watch(share: float, message: str) -> None:
        step = int(message.split()[1])
        if step % 2000 == 0:
            gc.collect()
            found[step] = (resident_bytes(), sum(isinstance(item, Tensor) for item in gc.get_objects()))

    Trainer(settings, SPLITS, tmp_path).run(progress=watch)
    print({step: (f"{memory / 2**20:.1f} MiB", tensors) for step, (memory, tensors) in found.items()})
    assert found[10_000][0] - found[2000][0] < 5 * 2**20
    assert found[10_000][1] <= found[2000][1]


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "named"),
    [
        ({"steps": 0}, "steps", (0, 1)),
        ({"target_batch_size": 2.5}, "target_batch_size", (2.5,)),
        ({"optimiser": "sgdd"}, "optimiser", ("'sgdd'", "'sgd'")),
        ({"device": "abacus"}, "device", ("'abacus'", "cuda:1")),
        ({"refresh_every": "drifts"}, "refresh_every", ("'drifts'", "growing")),
        ({"feature_source": "files"}, "feature_source", ("'files'", "bank", "full")),
        ({"class_shares": "uniform", "algorithm": "erm"}, "class_shares", ("'uniform'", "'erm'", "'none'")),
        ({"class_shares": "source", "regression": True}, "class_shares", ("'source'", "regression=True", "'none'")),
        ({"selection": "source-r2"}, "selection", ("'source-r2'", "regression=False", "source-accuracy")),
    ],
)
def test_an_error_names_the_setting(settings: dict[str, Any], field: str, named: Any) -> None:
    with refused(*named, field=field):
        RunConfig(**settings)
    if len(settings) == 1 and field != "selection":  # which others it goes with is another question
        with refused(*named, field=field):
            RunConfig.checked(field, settings[field])


def test_a_run_has_few_settings() -> None:
    assert len(RunConfig.model_fields) <= 35


def test_the_first_pass_over_the_samples_is_told() -> None:
    told: list[tuple[float, str]] = []
    settings = config(sampler="vardass", steps=2)
    Trainer(settings, SPLITS).run(progress=lambda share, message: told.append((share, message)))
    total = len(SPLITS.source_train) + len(SPLITS.target_unlabelled)
    assert [message for share, message in told if share == 0.0][-1] == f"features of {total:,} of {total:,} samples"
    assert told[-1][1].startswith("step 2 of 2")
