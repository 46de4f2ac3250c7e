"""``vardass doctor``, its picture, and its short form at the end of a run."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from vardass import diagnose
from vardass.cli import main
from vardass.plots import diagnosis_figure


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    generator = np.random.default_rng(0)
    for name, shift, share in (("clinic", 0.0, 0.5), ("home", 1.0, 0.8)):
        labels = (generator.random(200) < share).astype(int)
        x = generator.normal(size=(200, 4)) + 4.0 * labels[:, None] + shift
        np.savez(folder / f"{name}.npz", x=x.astype(np.float32), labels=np.array(["no", "yes"])[labels])
    return folder


def run(capsys, *arguments):
    code = main([str(part) for part in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_doctor_on_files_says_what_to_use_and_draws_it(files, capsys):
    data = ("doctor", files / "clinic.npz", files / "home.npz", "--batch-size", 8, "--warm-up", 20)
    code, out, _ = run(capsys, *data, "--out", files / "d", "--rows", 150)
    assert code == 0
    for words in ("200 and 200 samples (150 and 150 looked at), batches of 8, 25 an epoch", "γ=0.1", "cross-entropy"):
        assert words in out
    assert out.startswith("use\n  sampler: ")
    for topic in ("sampler", "estimator", "batch size", "class alignment", "scaling", "inputs"):
        assert f"\n  {topic}: " in out
    found = json.loads((files / "d/doctor.json").read_text())
    assert len(found["advice"]) == 5
    assert found["adapt"]["separation"] > 0.5
    assert found["adapt"]["settings"].startswith("stratified batches of 8, ")
    assert (
        f"\nvardass adapt\n  settings: {found['adapt']['settings']}\n  adaptation: {found['adapt']['expected']}" in out
    )
    assert found["classes"]["distance"]["value"] > 0.1
    image = Image.open(files / "d/doctor.png").convert("L")
    assert image.size[0] > 1500
    assert np.asarray(image).std() > 10
    code, out, _ = run(capsys, *data[:-1], 0, "--loss", "coral", "--penalty", 0.5, "--json")
    found = json.loads(out)
    assert (code, found["loss"], found["penalty"], found["written"]) == (0, "coral", 0.5, [])


@pytest.mark.parametrize("apart", [True, False])
def test_doctor_says_what_adapt_will_find_in_the_source(tmp_path, capsys, apart):
    generator = np.random.default_rng(1)
    labels = np.arange(120) % 2
    for name in ("a", "b"):
        x = generator.normal(size=(120, 4)) + 4.0 * apart * labels[:, None]
        np.savez(tmp_path / f"{name}.npz", x=x.astype(np.float32), labels=labels)
    data = (tmp_path / "a.npz", tmp_path / "b.npz")
    found = json.loads(run(capsys, "doctor", *data, "--batch-size", 8, "--warm-up", 0, "--json")[1])["adapt"]
    run(capsys, "adapt", "--source", data[0], "--target", data[1], "--out", tmp_path / "run", "--steps", 5)
    choice = json.loads((tmp_path / "run" / "result.json").read_text())["choice"]
    assert found["separation"] == pytest.approx(choice["evidence"]["separation"], abs=1e-9)
    assert (found["separation"] >= 0.5) == apart
    assert ("will keep the source-only model" in found["expected"]) == (not apart)
    if not apart:
        assert choice["model"] == "source-only"


@pytest.mark.parametrize("values", [np.zeros((120, 4)), np.tile(np.arange(200.0), (120, 1))])
def test_a_constant_source_does_not_stop_the_outlook(tmp_path, capsys, values):
    generator = np.random.default_rng(1)
    np.savez(tmp_path / "a.npz", x=values, labels=np.arange(120) % 2)
    np.savez(tmp_path / "b.npz", x=generator.normal(size=values.shape))
    code, out, err = run(capsys, "doctor", tmp_path / "a.npz", tmp_path / "b.npz", "--batch-size", 8, "--json")
    assert code == 0, err
    assert json.loads(out)["adapt"]["separation"] <= 0.0


def test_doctor_on_a_run_and_the_run_itself(files, capsys):
    data = ("--source", files / "clinic.npz", "--target", files / "home.npz")
    settings = ("--steps", 60, "--batch-size", 8, "--algorithm", "mmd", "--penalty", 2)
    assert run(capsys, "adapt", *data, *settings, "--out", files / "run", "--no-standardise")[0] == 0
    settings = ("--steps", 600, *settings[2:])
    code, out, _ = run(capsys, "adapt", *data, *settings, "--out", files / "long")
    assert code == 0
    if json.loads((files / "long/result.json").read_text())["choice"]["model"] == "vote":  # else there is no loss
        assert "| doctor | of the mean MMD" in (files / "long/report.md").read_text()
    # 60 steps of 8 samples: a two-hundredth of them, thrice, is too few to look at
    assert "finite-batch bias" not in (files / "run/report.md").read_text()
    code, out, _ = run(capsys, "doctor", files / "clinic.npz", files / "home.npz", "--model", files / "long", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["loss"], found["sizes"]) == ("mmd", [200, 200])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--loss", "cmd"), "mmd, coral"),
        (("--warm-up", -1), "--warm-up must be at least 0, got -1"),
        (("--model", "nowhere"), "there is no model at nowhere"),
        (("--batch-size", 300), "300"),
        (("--rows", 1), "--rows must be at least 2, got 1"),
        (("--out", "clinic.npz"), "is a file; name a folder"),
        (("--key", "z"), "'z'"),
    ],
)
def test_bad_input_is_one_line(files, capsys, monkeypatch, change, message):
    monkeypatch.chdir(files)
    code, _, err = run(capsys, "doctor", "clinic.npz", "home.npz", "--warm-up", 2, *change)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_picture_has_what_was_measured():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    small = diagnosis_figure(diagnose(x, x + 1.0, loss="coral", batch_size=8, gradient=False), title="t")
    assert len(small.axes) == 1
    whole = diagnosis_figure(diagnose(x, x + 1.0, labels=torch.arange(60) % 3, batch_size=8), title="t")
    titles = [axes.get_title(loc="left") for axes in whole.axes]
    assert titles == [
        "mean loss of a batch",
        "size of gradients",
        "variance by bandwidth, share",
        "shares of classes (target: pseudo-labels)",
    ]
