"""Runs with pretrained backbones and image files: saved whole, prepared as the backbone wants, cropped from files."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from test_networks import RECIPE, tiny_resnet
from test_trainer import Stop, assert_same_run
from vardass.adapt import RunConfig, Trainer, load_model
from vardass.adapt.batches import Inputs
from vardass.adapt.pretrained import transformers_model
from vardass.adapt.selection import outputs
from vardass.adapt.trainer import seconds_needed
from vardass.cli import main
from vardass.data import Domain, ImageDataset, Task, TaskSplits, TensorInputs, split_task
from vardass.data.domains import parts_of
from vardass.data.images import augment, normalise
from vardass.errors import VardassWarning
from vardass.lab.record import RunSpec
from vardass.lab.run import execute

CPU = torch.device("cpu")
LABELS = torch.arange(24) % 2


def image_splits(folder: Path | None = None) -> TaskSplits:
    generator = np.random.default_rng(0)

    def domain(name: str) -> Domain:
        pixels = generator.integers(0, 128, (24, 40, 48, 3)) + 100 * LABELS.numpy()[:, None, None, None]
        if folder is None:
            tensor = torch.from_numpy(pixels[:, :32, :32]).permute(0, 3, 1, 2).float() / 255
            return Domain(name, TensorInputs(tensor), LABELS, ("dark", "bright"), kind="image")
        paths = [folder / f"{name}{i}.png" for i in range(24)]
        for path, image in zip(paths, pixels.astype(np.uint8), strict=True):
            Image.fromarray(image).save(path)
        return Domain(name, ImageDataset(paths, 32), LABELS, ("dark", "bright"), kind="image")

    return split_task(Task("images", (domain("s"),), domain("t")), seed=0)


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tiny_resnet().save_pretrained(tmp_path / "backbone")
    (tmp_path / "backbone" / "preprocessor_config.json").write_text(json.dumps(RECIPE))
    return tmp_path / "backbone"


def test_a_backbone_is_loaded_without_a_report_and_what_it_lacks_is_a_warning(
    backbone: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = backbone / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "classifier.1.bias": torch.zeros(3)}, file, {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers_model(str(backbone), (3, 32, 32))
    assert capfd.readouterr() == ("", "")
    lost = next(name for name in weights if name.endswith("weight"))
    save_file({name: value for name, value in weights.items() if name != lost}, file, {"format": "pt"})
    with pytest.warns(VardassWarning, match=lost):
        transformers_model(str(backbone), (3, 32, 32))


def test_the_estimate_of_a_run_leaves_the_run_as_it_is() -> None:
    splits = image_splits()
    config = settings(network="conv", sampler="stratified", steps=1000)
    state = torch.get_rng_state()
    seconds = seconds_needed(config, splits)
    assert torch.equal(torch.get_rng_state(), state)
    assert 0.0 < seconds < math.inf
    # all but the passes over samples grows with the steps
    assert seconds_needed(config.changed(steps=100_000), splits) > 5 * seconds
    for changes in ({"algorithm": "erm"}, {"batch_size": 12, "target_batch_size": 2}, {"batch_per_source": True}):
        assert seconds_needed(config.changed(**changes), splits) > 0.0


def settings(**changes: Any) -> RunConfig:
    given = {"steps": 4, "batch_size": 4, "eval_every": 2, "checkpoint_every": 2, "refresh_every": 2, "device": "cpu"}
    return RunConfig(**{**given, **changes})


FROZEN = {"freeze_backbone": True, "bottleneck": 5, "local_files_only": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": "arm", "algorithm_options": {"support_size": 4}},
        {"network_options": FROZEN, "cache_embeddings": True},
    ],
    ids=["tuned", "widened", "cached"],
)
def test_a_saved_run_predicts_with_nothing_but_its_folder(
    changes: dict[str, Any], backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    splits = image_splits()
    result = Trainer(settings(network=str(backbone), **changes), splits, tmp_path / "run").run()
    expected = outputs(result.algorithm, Inputs(splits.target_test, CPU))[1]
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    shutil.rmtree(backbone)

    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("the backbone was loaded")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", refuse)
    model, about = load_model(tmp_path / "elsewhere")
    assert torch.equal(outputs(model, Inputs(splits.target_test, CPU))[1], expected)
    assert about["preprocessing"]["mean"] == RECIPE["image_mean"]
    assert about["preprocessing"]["interpolation"] == "bicubic"
    assert model.network.preprocessing == result.algorithm.network.preprocessing


def test_training_and_evaluation_normalise_as_the_backbone_says(backbone: Path) -> None:
    splits = image_splits()
    trainer = Trainer(settings(network=str(backbone), sampler="uniform"), splits)
    preprocessing = trainer.algorithm.network.preprocessing
    seen: list[torch.Tensor] = []
    trainer.algorithm.network.featuriser.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    draw = trainer.streams["source"].draw()
    pixels = trainer.streams["source"].inputs.data[draw.rows]
    assert torch.equal(draw.batch.x, normalise(pixels, preprocessing))
    assert not torch.equal(draw.batch.x, normalise(pixels))
    outputs(trainer.algorithm, Inputs(splits.target_test, CPU))
    target = torch.stack([splits.target_test.dataset[i] for i in range(len(splits.target_test))])
    assert torch.equal(seen[-1], normalise(target, preprocessing))


def test_rates_follow_the_network(backbone: Path) -> None:
    assert settings(network=str(backbone)).lr == settings(network="resnet18").lr == settings(network="a/b").lr == 5e-5
    assert settings().lr == settings(network="conv").lr == settings(network="resnet18-random").lr == 1e-3
    assert settings(network="resnet18", network_options={"freeze_backbone": True}).lr == 1e-3
    assert settings().changed(network="resnet18").lr == 5e-5
    assert settings(lr=0.1).changed(network="resnet18").lr == 0.1


AUGMENTED: dict[str, Any] = {
    "network": "conv",
    "network_options": {"widths": [4]},
    "augment": "source",
    "sampler": "uniform",
    "steps": 6,
    "checkpoint_every": 6,
}


def test_the_target_is_augmented_only_if_asked(tmp_path: Path) -> None:
    for splits in (image_splits(), image_splits(tmp_path)):
        for augmented in ("source", "both"):
            trainer = Trainer(settings(**{**AUGMENTED, "augment": augmented}), splits)
            for name, stream in trainer.streams.items():
                draw = stream.draw(augment_seed=trainer._augment_seed(name))
                data = stream.inputs.data
                plain = normalise(torch.stack([data[int(row)] for row in draw.rows]))
                assert torch.equal(draw.batch.x, plain) == (name == "target" and augmented == "source")
                stream.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_crops_of_files_are_new_in_each_step_and_resumed(workers: int, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    splits = image_splits(tmp_path / "images")
    config = settings(**AUGMENTED, workers=workers)
    whole = Trainer(config, splits)
    whole.run()
    Trainer(config, splits, tmp_path / "run").run(progress=Stop(3))
    resumed = Trainer(config, splits, tmp_path / "run")
    resumed.run(resume=True)
    assert_same_run(whole, resumed)
    stream = Trainer(config.changed(batch_size=len(splits.source_train), target_batch_size=4), splits).streams["source"]
    first, second = (stream.draw(augment_seed=1) for _ in range(2))
    stream.close()
    assert sorted(first.rows.tolist()) == sorted(second.rows.tolist())
    for place, row in enumerate(first.rows.tolist()):
        again = second.rows.tolist().index(row)
        assert not torch.equal(first.batch.x[place], second.batch.x[again])


def test_images_that_may_not_be_cropped_are_mirrored_and_recoloured_only(tmp_path: Path) -> None:
    splits = image_splits(tmp_path)
    stream = Trainer(settings(**AUGMENTED), splits).streams["source"]
    for files in parts_of(splits.source_train.dataset):
        assert isinstance(files, ImageDataset)
        files.crops = False
    whole = Trainer(settings(**AUGMENTED), splits).streams["source"]
    cropped, kept = (each.draw(augment_seed=1) for each in (stream, whole))
    assert cropped.rows.tolist() == kept.rows.tolist()
    data = splits.source_train.dataset
    plain = torch.stack([data[int(row)] for row in kept.rows])
    assert torch.equal(kept.batch.x, augment(plain, seed=1, crop=False))
    assert not torch.equal(kept.batch.x, cropped.batch.x)


def test_commands_and_sweeps_decode_images_as_the_backbone_wants(
    backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (backbone / "preprocessor_config.json").write_text(json.dumps({**RECIPE, "size": 40, "resample": 3}))
    for domain in ("day", "night"):
        for i, kind in enumerate(("dark", "bright")):
            folder = tmp_path / "data" / domain / kind
            folder.mkdir(parents=True)
            for j in range(6):
                pixels = np.random.default_rng(j).integers(0, 128, (50, 60, 3)) + 100 * i
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{j}.png")
    common = f"--network {backbone} --algorithm erm --sampler uniform --steps 2 --batch-size 4 --device cpu".split()
    data = tmp_path / "data"
    runs = {
        "adapt": ["--source", f"{data}/day", "--target", f"{data}/night"],
        "train": ["--dataset", "images", "--root", str(data), "--task", "day->night"],
    }
    for command, arguments in runs.items():
        out = tmp_path / command
        assert main([command, *arguments, *common, "--out", str(out)]) == 0, capsys.readouterr().err
        assert json.loads((out / "data.json").read_text())["interpolation"] == "bicubic"
        assert tuple(load_model(out / "model.safetensors")[1]["input_shape"]) == (3, 40, 40)
    predicted = tmp_path / "again.csv"
    assert main(["predict", str(tmp_path / "adapt"), str(data / "night"), "--out", str(predicted)]) == 0
    assert predicted.read_text() == (tmp_path / "adapt/predictions.csv").read_text()
    assert main(["adapt", *runs["adapt"], *common, "--size", "36", "--out", str(tmp_path / "small")]) == 0
    assert tuple(load_model(tmp_path / "small/model.safetensors")[1]["input_shape"]) == (3, 36, 36)  # said last

    config = settings(network=str(backbone), algorithm="erm", sampler="uniform").to_dict()
    cell = {"algorithm": "erm", "sampler": "uniform"}
    spec = RunSpec("images", "day->night", "images", config, cell, root=str(data))
    execute(spec, tmp_path / "record")
    assert tuple(load_model(tmp_path / "record/model.safetensors")[1]["input_shape"]) == (3, 40, 40)
