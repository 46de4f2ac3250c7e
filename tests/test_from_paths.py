"""What a run stores about its data is how predict reads more of them."""

import json

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from conftest import refused
from vardass.cli import main
from vardass.data import FrontEnd, folder_domain, load_task
from vardass.data.from_paths import domain_from_path, preparation

FRONT = {"rate": 2000, "seconds": 0.15, "fft_size": 256, "hop": 16, "bands": 16, "low": 0}


@pytest.fixture
def sounds(tmp_path):
    draw = np.random.default_rng(0)
    for name in ("bay/call", "bay/noise", "reef/call", "reef/noise"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(6):
            soundfile.write(tmp_path / name / f"{i}.wav", draw.normal(0, 0.1, 300), 2000)
    return tmp_path


def test_a_front_end_from_the_command_line_is_stored_and_used_by_predict(sounds, capsys):
    data = ["--dataset", "audio", "--task", "bay->reef", "--root", str(sounds), "--data-option", f"front_end={FRONT}"]
    training = ["--algorithm", "erm", "--sampler", "uniform", "--steps", "2", "--batch-size", "4"]
    assert main(["train", *data, *training, "--out", str(sounds / "run")]) == 0
    stored = json.loads((sounds / "run/data.json").read_text())
    assert FrontEnd.of(stored["front_end"]) == FrontEnd(**FRONT)
    capsys.readouterr()
    assert main(["predict", str(sounds / "run"), str(sounds / "reef")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 12
    assert main(["train", *data[:-1], "front_end={'rat': 1}", *training, "--out", str(sounds / "other")]) == 2
    assert "did you mean 'rate'" in capsys.readouterr().err


def test_files_are_read_again_as_a_run_read_them(tmp_path, sounds):
    pixels = np.random.default_rng(0).integers(0, 255, (9, 9, 3), dtype=np.uint8)
    (tmp_path / "pictures").mkdir()
    Image.fromarray(pixels).save(tmp_path / "pictures/a.png")
    first = folder_domain(tmp_path / "pictures", class_names=("x",), size=4, interpolation="bicubic")
    about = {"data_kind": "image", "input_shape": [3, 4, 4], "class_names": ["x"]}
    again = domain_from_path(tmp_path / "pictures", about, json.loads(json.dumps(preparation(first))))
    assert torch.equal(again.dataset[0], first.dataset[0])
    assert not torch.equal(domain_from_path(tmp_path / "pictures", about, {}).dataset[0], first.dataset[0])

    heard = load_task("audio", "bay->reef", sounds, front_end=FRONT).target
    about = {"data_kind": "audio", "input_shape": list(heard.dataset[0].shape), "class_names": ["call", "noise"]}
    again = domain_from_path(sounds / "reef", about, json.loads(json.dumps(preparation(heard))))
    assert torch.equal(again.dataset[0], heard.dataset[0])
    with refused(sounds / "reef", "audio", "images"):
        domain_from_path(sounds / "reef", {**about, "data_kind": "image"}, {})
