"""What SECURITY.md says of the files that are read."""

import ast
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import conftest
import vardass
from model_files import change_model
from sweep_yaml import changed, load
from vardass.adapt import load_model
from vardass.adapt.pretrained import backbone_from_config
from vardass.cli import main
from vardass.data import load_task
from vardass.lab.record import Record, RunSpec

SAFE = {"np.load": ("allow_pickle", False), "torch.load": ("weights_only", True)}


def test_no_reader_unpickles():
    """np.load and torch.load say at each call that they do not; nothing else that unpickles is imported."""
    seen = dict.fromkeys(SAFE, 0)
    for path in Path(vardass.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & {"pickle", "joblib", "cloudpickle", "dill"}, path
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in SAFE:
                seen[called] += 1
                option, value = SAFE[called]
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get(option) == str(value), f"{path}:{node.lineno}"
    assert all(seen.values())


# --- names of code in files -----------------------------------------------------------------------------

MARK = "ran"
# importing it, and calling what it holds, leaves a file behind
MODULE = f"""
from pathlib import Path
from torch import nn
from vardass.adapt.algorithms import ERM
from vardass.data import load_task
from vardass.kernels import LinearKernel
from vardass.samplers import UniformBatchSampler
Path(__file__).with_name("{MARK}").touch()
def network(input_shape):
    return nn.Linear(input_shape[0], 3)
class Rule(ERM):
    pass
class Drawn(UniformBatchSampler):
    pass
class Product(LinearKernel):
    pass
def load(task, root=None):
    return load_task("watch", task)
"""
PARTS = {
    "network": {"network": "parts_of_others:network"},
    "algorithm": {"algorithm": "parts_of_others:Rule"},
    "algorithm with an addition": {"algorithm": "parts_of_others:Rule+els"},
    "sampler": {"sampler": "parts_of_others:Drawn"},
    "kernel of the loss": {"algorithm_options": {"kernel": "parts_of_others:Product"}},
    "kernel of the strata": {"sampler_options": {"kernel": "parts_of_others:Product"}},
}


@pytest.fixture
def others(tmp_path, monkeypatch):
    """Folder of a module on the import path, with a function that says whether it was imported."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "parts_of_others.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda: (tmp_path / "lib" / MARK).exists()
    sys.modules.pop("parts_of_others", None)


def command(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def refused(capsys, *arguments):
    code, err = command(capsys, *arguments)
    assert code == 2, err
    assert err.count("\n") == 1
    assert "names code to be imported and run" in err
    assert "--trust-code" in err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on watch with a network, and files of its features."""
    folder = tmp_path_factory.mktemp("run")
    paths = ("--dataset", "watch", "--task", "left-A->right-B", "--out", folder / "run", "--steps", 2)
    assert main([str(part) for part in ("train", *paths, "--algorithm", "erm", "--sampler", "uniform")]) == 0
    task = load_task("watch", "left-A->right-B", standardised=False)
    for name, domain in (("a", task.sources[0]), ("b", task.target)):
        labels = np.array(task.class_names)[domain.reveal().known_labels().numpy()]
        np.savez(folder / f"{name}.npz", x=domain.dataset.tensor.numpy(), labels=labels)
    return folder


def with_settings(run, out, **settings):
    """A copy of the run's folder whose model says it was made with other settings."""
    shutil.copytree(run / "run", out)
    return change_model(out, lambda about, weights: about["config"].update(settings))


def test_a_model_cannot_run_a_command(run, tmp_path, capsys):
    mark = tmp_path / MARK
    arguments = {"arguments": {"args": ["touch", str(mark)]}}
    model = with_settings(run, tmp_path / "copy", network="subprocess:Popen", network_options=arguments)
    refused(capsys, "predict", model, run / "b.npz")
    refused(capsys, "evaluate", model, run / "b.npz")
    refused(capsys, "evaluate", model)
    refused(capsys, "doctor", run / "a.npz", run / "b.npz", "--model", model)
    with conftest.refused("'subprocess:Popen'", "trust_code=True"):
        load_model(model)
    # not even if the file is trusted: this makes no module
    code, err = command(capsys, "predict", model, run / "b.npz", "--trust-code")
    assert (code, "not a subclass of torch.nn" in err) == (2, True)
    time.sleep(0.1)
    assert not mark.exists()


@pytest.mark.parametrize("settings", PARTS.values(), ids=PARTS)
def test_code_that_a_file_names_is_not_imported_unless_trusted(settings, run, others, tmp_path, capsys):
    model = with_settings(run, tmp_path / "copy", **settings)
    refused(capsys, "predict", model, run / "b.npz")
    for name, text in (("s.json", json.dumps(settings)), ("s.yaml", yaml.safe_dump(settings))):
        (tmp_path / name).write_text(text)
        paths = ("--source", run / "a.npz", "--target", run / "b.npz", "--out", tmp_path / "out")
        refused(capsys, "adapt", *paths, "--config", tmp_path / name)
    (tmp_path / "copy" / "config.json").write_text(json.dumps(settings))
    refused(capsys, "adapt", *paths, "--config", tmp_path / "copy")
    assert not others()


def test_code_that_a_sweep_names_is_not_imported_unless_trusted(others, tmp_path, capsys):
    code = "parts_of_others:"
    for content in (
        changed(algorithms=[f"{code}Rule"]),
        changed(algorithms=[{"name": f"{code}Rule+els"}]),
        changed(algorithms=[{"name": "mmd", "options": {"kernel": f"{code}Product"}}]),
        changed(algorithms=[{"name": "mmd", "samplers": [f"{code}Drawn"]}]),
        changed(samplers=[{"name": "stratified", "options": {"kernel": f"{code}Product"}}]),
        changed(settings={"network": f"{code}network"}),
        changed(overrides={"network": f"{code}network"}),
        changed(grid={"network": ["mlp", f"{code}network"]}),
        changed(search={"size": 2, "space": {"network": {"choice": ["mlp", f"{code}network"]}}}),
        changed(data=f"{code}load"),
        changed(data=[{"dataset": f"{code}load", "tasks": ["left-A->right-B"]}]),
        changed(data=[{"dataset": "watch", "settings": {"network": f"{code}network"}}]),
    ):
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
        refused(capsys, "sweep", tmp_path / "sweep.yaml", "--out", tmp_path / "out")
    assert not others()
    entry = {"dataset": "watch", "name": "a:b", "tasks": ["left-A->right-B"]}
    content = changed(name="c:d", data=[entry], algorithms=[{"name": "erm", "label": "e:f"}])
    assert load(tmp_path, content).name == "c:d"  # texts for people are no code
    assert load(tmp_path, changed(algorithms=[f"{code}Rule"]), trust_code=True).runs()
    assert others()


def test_the_data_set_of_a_run_is_code_too(run, others, tmp_path, capsys):
    folder = shutil.copytree(run / "run", tmp_path / "copy")
    data = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps({**data, "dataset": "parts_of_others:load"}))
    refused(capsys, "evaluate", folder)
    assert not others()
    assert command(capsys, "evaluate", folder, "--trust-code") == (0, "")
    assert others()


def test_reading_records_imports_nothing(others, tmp_path):
    spec = RunSpec("parts_of_others:load", "t", "d", {"algorithm": "parts_of_others:Rule"}, {"algorithm": "x"})
    assert Record.from_json(Record(spec, "finished").to_json()).spec == spec
    assert not others()


def test_what_a_user_types_is_trusted(run, others, tmp_path, capsys):
    paths = ("--dataset", "watch", "--task", "left-A->right-B", "--out", tmp_path / "out", "--steps", 2)
    typed = ("train", *paths, "--algorithm", "parts_of_others:Rule", "--sampler", "uniform")
    assert command(capsys, *typed)[0] == 0
    assert others()
    refused(capsys, "predict", tmp_path / "out", run / "b.npz")  # the folder of a run is no more trusted than another
    assert command(capsys, "predict", tmp_path / "out", run / "b.npz", "--trust-code")[0] == 0


def test_a_backbone_of_a_model_names_no_code_of_a_hub():
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config |= {"intermediate_size": 8, "image_size": 8, "patch_size": 4}
    evil = {"auto_map": {"AutoModel": "evil/repo--code.Model"}, "attn_implementation": "evil/kernel"}
    weights = {str(number): torch.zeros(500) for number in range(4)}
    built = backbone_from_config({"library": "transformers", "config": {**config, **evil}}, weights)
    assert type(built.model) is transformers.ViTModel
    assert not hasattr(built.model.config, "auto_map")
    assert built.model.config._attn_implementation != "evil/kernel"
