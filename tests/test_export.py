"""``vardass export``: the program of torch gives what ``predict`` gives, from samples as a user has them."""

import json

import pytest
import torch

from conftest import refused
from vardass.adapt import RunConfig, Trainer, load_model
from vardass.adapt.batches import Inputs
from vardass.adapt.model import export_model
from vardass.adapt.run_folder import reading_of
from vardass.adapt.selection import outputs
from vardass.cli import main
from vardass.data import Domain, Task, split_task
from vardass.data.embedding_tasks import standardise_task

QUICK = {"steps": 3, "batch_size": 8, "sampler": "uniform", "eval_every": 3, "device": "cpu"}


def task(kind):
    """Two domains of embeddings far from unit scale, of numbers, or of pictures."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 16, 16) if kind == "image" else (5,)

    def domain(name):
        x = torch.rand(40, *shape, generator=generator)
        labels = torch.arange(40) % 3 if kind != "numbers" else 1000.0 + 50.0 * torch.rand(40, generator=generator)
        names = ("price",) if kind == "numbers" else ("cat", "dog", "emu")
        kinds = {"kind": "image"} if kind == "image" else {"regression": kind == "numbers"}
        return Domain(name, x if kind == "image" else 100.0 * x + 30.0, labels, names, **kinds)

    made = Task("a->b", (domain("a"),), domain("b"))
    return made if kind == "image" else standardise_task(made)


@pytest.mark.parametrize(("kind", "network"), [("classes", "mlp"), ("numbers", "mlp"), ("image", "conv")])
def test_the_program_gives_what_predict_gives(kind, network, tmp_path, capsys):
    whole = task(kind)
    config = RunConfig(network=network, algorithm="mmd", regression=kind == "numbers", **QUICK)
    Trainer(config, split_task(whole, seed=0), tmp_path).run()
    assert main(["export", str(tmp_path)]) == 0
    assert "model.pt2" in capsys.readouterr().out
    program = torch.export.load(tmp_path / "model.pt2").module()
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["input_shape"] == ([3, 16, 16] if kind == "image" else [5])
    assert about.get("classes", about.get("numbers")) == list(whole.class_names)
    model, facts = load_model(tmp_path)
    if kind == "image":
        assert facts["preprocessing"]["size"] == [16, 16]
    _, found = outputs(model, Inputs(whole.target, torch.device("cpu")))
    wanted = found if kind == "numbers" else found.softmax(1)
    samples = whole.target.dataset.tensor
    scale = reading_of(tmp_path, facts).get("scale")
    if scale:  # back to what a user has
        samples = samples * torch.tensor(scale["deviation"]) + torch.tensor(scale["mean"])
    for rows in (slice(0, 1), slice(0, 40)):  # any batch size
        torch.testing.assert_close(program(samples[rows]), wanted[rows], rtol=1e-6, atol=1e-6)


def test_a_context_of_the_batch_is_refused(tmp_path):
    Trainer(RunConfig(algorithm="arm", network="mlp", **QUICK), split_task(task("classes"), seed=0), tmp_path).run()
    model, about = load_model(tmp_path)
    with refused("'arm'", "8 samples", "algorithm"):
        export_model(model, about, {}, tmp_path / "m.pt2")
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "m.onnx")]) == 2
