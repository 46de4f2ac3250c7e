"""Scaling of columns: by a reference, and robustly by the sources of a task."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch

from conftest import refused
from model_files import change_model
from vardass.cli import main
from vardass.data import Domain, Task, TensorInputs, load_task, standardise
from vardass.data.embedding_tasks import embedding_task, standardise_task
from vardass.data.from_paths import preparation
from vardass.errors import VardassWarning
from vardass.scaling import robust_scale, scale_columns


def test_standardise_uses_the_reference():
    x = torch.tensor([[0.0, 5.0], [2.0, 5.0]])
    assert standardise(x).tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert standardise(torch.tensor([[4.0, 6.0]]), reference=x).tolist() == [[3.0, 1.0]]


def test_a_constant_column_has_no_deviation_even_where_its_mean_is_rounded():
    x = torch.full((1000, 1), 0.1)
    assert 0.0 < float(x.std(0, correction=0)) < 1e-6  # what is left by rounding
    assert float(standardise(x).abs().max()) < 1e-6
    assert robust_scale(x, torch.tensor([[0.1]] * 19 + [[0.5]]))["deviation"] == [1.0]


def task_of(source, target):
    def domain(name, x):
        return Domain(name, TensorInputs(x), torch.arange(len(x)) % 2, ("a", "b"))

    return Task("t", (domain("s1", source[::2]), domain("s2", source[1::2])), domain("t", target))


def draw(*deviations, n=40, seed=0):
    noise = torch.randn(n, len(deviations), generator=torch.Generator().manual_seed(seed))
    return standardise(noise) * torch.tensor(deviations) + 5.0


def test_columns_are_scaled_by_the_sources_together():
    source, target = draw(1.0, 2.0, 4.0), draw(2.0, 2.0, 2.0, seed=1)
    task = standardise_task(task_of(source, target))
    scale = task.target.dataset.scale
    both = torch.cat([part.dataset.tensor for part in task.sources])
    assert torch.allclose(both.mean(0), torch.zeros(3), atol=1e-5)
    assert torch.allclose(both.std(0, correction=0), torch.ones(3), atol=1e-5)
    assert torch.allclose(task.target.dataset.tensor, standardise(target, reference=source), atol=1e-5)
    assert scale["deviation"] == pytest.approx([1.0, 2.0, 4.0], rel=1e-5)


def test_what_hardly_varies_in_the_sources_does_not_tower_in_the_target():
    source = draw(2.0, 2.0, 1e-4, 0.0, 0.1)
    target = draw(2.0, 2.0, 2.0, 2.0, 2.0, seed=1)
    task = standardise_task(task_of(source, target))
    scale = task.target.dataset.scale
    # 1e-4 and 0 are below 1 % of the distance that 36 of 40 target values keep from their median
    reach = (target - target.median(0).values).abs().sort(0).values[35].tolist()
    assert scale["deviation"] == pytest.approx([2.0, 2.0, reach[2], reach[3], 0.1], rel=1e-4)
    assert float(task.target.dataset.tensor.abs().max()) == 8.0  # cut
    assert scale["clip"] == 8.0
    constant = standardise_task(task_of(torch.ones(8, 2), torch.full((4, 2), 3.0)))
    assert float(constant.sources[0].dataset.tensor.abs().max()) == 0.0
    assert constant.target.dataset.tensor.unique().tolist() == [2.0]


def test_columns_may_have_different_units():
    units = torch.tensor([5e4, 1.0, 1e-3])
    source, target = draw(1.0, 1.0, 1.0) * units, draw(1.5, 1.5, 1.5, seed=1) * units
    target[3, 2] = 1e6  # a single absurd value leaves its column as it is
    with pytest.warns(VardassWarning, match=r"t has 1e\+06 in column 2"):
        task = standardise_task(task_of(source, target))
    assert task.target.dataset.scale["deviation"] == pytest.approx(units.tolist(), rel=1e-3)


def test_values_that_are_absurd_are_told_with_their_place():
    target = draw(1.0, 1.0, seed=1)
    target[7, 1] = 1e30
    far = r"t has 1e\+30 in column 1 \(from 0\) of row 8 \(row 1 = first data row\), .*e\+.* cut to 8, as are 0 more"
    with pytest.warns(VardassWarning, match=far) as told:
        task = standardise_task(task_of(draw(1.0, 1.0), target))
    assert len(told) == 1
    assert float(task.target.dataset.tensor[7, 1]) == 8.0


def columns_told(tmp_path, source, target):
    """Warnings of a task between two tables of columns by name."""
    for name, columns in (("a", source), ("b", target)):
        rows = zip(*columns.values(), ["yes", "no"] * 20)
        lines = [",".join([*columns, "labels"]), *(",".join(map(str, row)) for row in rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        task = embedding_task(tmp_path / "a.csv", tmp_path / "b.csv", standardise=False)
    assert len(task.target) == 40
    return [str(each.message) for each in found]


def usual(seed):
    return np.random.default_rng(seed).normal(size=40).round(3).tolist()


COUNTED, SHUFFLED = list(range(1000, 1040)), [(7 * i) % 40 for i in range(40)]


@pytest.mark.parametrize(
    ("name", "source", "target", "what"),
    [
        ("number", COUNTED, COUNTED, "look like ids"),
        ("number", COUNTED[::-1], [3 * i for i in COUNTED], "look like ids"),
        ("patient_id", SHUFFLED, [i % 5 for i in SHUFFLED], "look like ids"),
        ("sampleId", SHUFFLED, SHUFFLED, "look like ids"),
        ("number", SHUFFLED, SHUFFLED, None),
        ("width", SHUFFLED, SHUFFLED, None),
        ("acid", usual(2), usual(3), None),
        ("gap", usual(2), [100.0 + x for x in usual(3)], "do not overlap"),
        ("flat", [1] * 40, usual(3), "constant in the sources"),
        ("flat", [0] * 40, [0] * 40, None),
        ("word", [0] * 40, [0] * 37 + [1, 2, 3], None),  # a word that few texts have, and none of the sources
    ],
)
def test_columns_that_are_no_measurements_are_named_once(tmp_path, name, source, target, what):
    told = columns_told(tmp_path, {"f0": usual(0), name: source}, {"f0": usual(1), name: target})
    if what is None:
        assert told == []
        return
    (message,) = told
    assert all(part in message for part in (what, repr(name), "1 of 2 columns"))
    assert len(message) <= 400


@pytest.mark.filterwarnings("always")
def test_absurd_values_are_told_when_predicting(trained, tmp_path, capsys):
    with np.load(trained / "a.npz") as file:
        x, labels = file["z"], file["labels"]
    np.savez(tmp_path / "a.npz", z=x, labels=labels)
    np.savez(tmp_path / "b.npz", z=x)
    paths = ("--source", tmp_path / "a.npz", "--target", tmp_path / "b.npz", "--out", tmp_path / "run")
    assert main([str(part) for part in ("adapt", *paths, "--steps", 2, "--batch-size", 8)]) == 0
    assert "warning" not in capsys.readouterr().err
    x[3, 0] = -1e30
    np.savez(tmp_path / "b.npz", z=x)
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "b.npz")]) == 0
    assert "b.npz has -1e+30 in column 0 (from 0) of row 4 (" in capsys.readouterr().err


def test_later_samples_are_scaled_alike_from_what_was_stored():
    target = draw(50.0, 1.0, seed=1)
    task = standardise_task(task_of(draw(1.0, 3.0), target))
    scale = task.target.dataset.scale
    stored = json.loads(json.dumps(preparation(task.target)))["scale"]
    assert stored == scale
    assert torch.equal(scale_columns(target, stored), task.target.dataset.tensor)
    old = {"mean": [5.0, 5.0], "deviation": [1.0, 1.0]}  # without clip: a run of before
    assert float(scale_columns(target, old).abs().max()) > 50


def test_a_task_is_scaled_once_and_only_if_it_holds_vectors(tmp_path):
    task = standardise_task(task_of(draw(1.0), draw(1.0)))
    with refused("'s1'", "standardised already"):
        standardise_task(task)
    np.savez(tmp_path / "a.npz", z=draw(1.0, 2.0).numpy(), labels=np.arange(40) % 2)
    np.savez(tmp_path / "b.npz", z=draw(1.0, 2.0).numpy() + 1e4, labels=np.arange(40) % 2)
    with pytest.warns(VardassWarning, match="b has 1.* in column 0 .* of row .* 79 more such values"):
        loaded = load_task("embeddings", "a->b", tmp_path)
    assert preparation(loaded.target)["scale"]["clip"] == 8.0
    assert loaded.target.dataset.tensor.unique().tolist() == [8.0]


def test_train_scales_what_its_loader_scales_and_can_be_told_not_to(tmp_path, capsys):
    raw = {name: draw(1.0, 200.0, seed=seed) for seed, name in enumerate(("a", "b"))}
    for name, x in raw.items():
        np.savez(tmp_path / f"{name}.npz", z=x.numpy(), labels=np.arange(40) % 2)
    mine = ("--dataset", "embeddings", "--task", "a->b", "--root", tmp_path)
    watch = ("--dataset", "watch", "--task", "left-A->right-B")
    for place, (data, *flags) in enumerate(
        [(mine,), (mine, "--standardise"), (mine, "--no-standardise"), (watch,), (watch, "--no-standardise")]
    ):
        out = tmp_path / f"run{place}"
        command = ("train", *data, *flags, "--steps", 1, "--batch-size", 8, "--out", out)
        assert main([str(part) for part in command]) == 0
        scale = json.loads((out / "data.json").read_text())["scale"]
        assert (scale is None) == ("--no-standardise" in flags)
        if scale and data is mine:
            assert scale["mean"] == pytest.approx(raw["a"].mean(0).tolist(), rel=1e-4)
    capsys.readouterr()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled")
    for seed, name in enumerate(("a", "b")):
        np.savez(folder / f"{name}.npz", z=draw(1.0, 200.0, seed=seed).numpy(), labels=np.arange(40) % 2)
    paths = ("--source", folder / "a.npz", "--target", folder / "b.npz", "--out", folder / "run")
    assert main([str(part) for part in ("adapt", *paths, "--steps", 2, "--batch-size", 8)]) == 0
    return folder


@pytest.fixture
def scaled_run(trained, tmp_path):
    """Files and a run whose inputs were scaled, to be changed."""
    return shutil.copytree(trained, tmp_path / "scaled")


def predicted(capsys, folder):
    code = main(["predict", str(folder / "run"), str(folder / "b.npz")])
    captured = capsys.readouterr()
    return code, captured.out or captured.err


def test_a_model_scales_its_inputs_without_another_file(scaled_run, capsys):
    (scaled_run / "run/data.json").unlink()
    assert predicted(capsys, scaled_run) == (0, (scaled_run / "run/predictions.csv").read_text())
    assert main(["evaluate", str(scaled_run / "run"), str(scaled_run / "b.npz")]) == 0
    doctor = ("doctor", scaled_run / "a.npz", scaled_run / "b.npz", "--model", scaled_run / "run", "--batch-size", "8")
    assert main([str(part) for part in doctor]) == 0
    assert "inputs: scaled robustly" in capsys.readouterr().out


@pytest.mark.parametrize("reading", [None, {}])
def test_a_model_that_does_not_say_how_inputs_are_scaled_is_refused(scaled_run, capsys, reading):
    change_model(scaled_run / "run", lambda about, weights: {**about, "reading": reading})
    code, said = predicted(capsys, scaled_run)
    assert code == 2
    assert "is not a model that can be used: its reading" in said


def test_a_damaged_file_of_data_is_not_to_be_removed(scaled_run, capsys):
    (scaled_run / "run/data.json").write_text('{"scale": ')
    code, said = predicted(capsys, scaled_run)
    assert code == 2
    assert "data.json is damaged" in said
    assert "remove" not in said


def test_weights_that_are_not_finite_predict_nothing(scaled_run, capsys):
    def spoil(about, weights):
        weights[next(iter(weights))][0] = float("nan")

    change_model(scaled_run / "run", spoil)
    code, said = predicted(capsys, scaled_run)
    assert code == 2
    assert "model.safetensors are not finite, so the model predicts nothing" in said


def test_numbers_that_overflow_are_no_prediction(scaled_run, capsys):
    def enlarge(about, weights):
        for name in weights:
            weights[name] = weights[name] * 1e30

    change_model(scaled_run / "run", enlarge)
    code, said = predicted(capsys, scaled_run)
    assert code == 2
    assert "train again" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"class_names": 5}, "class_names: input should be a valid list, got 5"),
        ({"class_names": []}, "class_names: list should have at least 1 item"),
        ({"data_kind": "sound"}, "data_kind: input should be 'features', 'image' or 'audio', got 'sound'"),
        ({"input_shape": [4.5]}, "input_shape.0: input should be a valid integer"),
        ({"backbone": {"config": {}}}, "backbone.library: field required"),
        (
            {"reading": {"scale": {"mean": [0.0], "deviation": [1.0]}}},
            "1 means and 1 deviations, its samples have shape",
        ),
        ({"reading": {"scale": {"mean": [None, 0.0], "deviation": [1.0, 1.0]}}}, "reading.scale.mean.0: input should"),
    ],
)
def test_a_model_whose_description_makes_no_sense_is_refused(scaled_run, capsys, change, said):
    change_model(scaled_run / "run", lambda about, weights: about.update(change))
    code, found = predicted(capsys, scaled_run)
    assert code == 2
    assert "model.safetensors is not a model that can be used: its " in found
    assert said in found
    change_model(scaled_run / "run", lambda about, weights: [1])
    assert "it was not written by this version of vardass" in predicted(capsys, scaled_run)[1]
