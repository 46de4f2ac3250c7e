"""Numbers instead of classes: loss, scores and units, training that adapts, and what cannot be."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch import Tensor, nn

from conftest import refused
from test_trainer import Stop, assert_same_run, named_part
from vardass.adapt import Algorithm, Batch, Network, RunConfig, Trainer, final_report, load_model, make_algorithm
from vardass.adapt.algorithms import ALGORITHM_NAMES
from vardass.adapt.algorithms.registry import find_algorithm
from vardass.adapt.regression import Units, regression_scores, squared_error
from vardass.cli import main
from vardass.data import Domain, Task, split_task, unite
from vardass.data.embedding_tasks import read_labelled
from vardass.lab.record import RunSpec

GAINS = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
DRIFT = torch.tensor([1.5, -1.0, 0.5, 1.0, 0.0, -1.2])


def data(seed: int, *, drift: float = 0.0, n: int = 300, outputs: int = 1) -> tuple[Tensor, Tensor]:
    """Six readings of two hidden causes, and numbers around 1,000 that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    causes = torch.randn(n, 2, generator=generator)
    x = causes @ GAINS + drift * DRIFT + 0.3 * torch.randn(n, 6, generator=generator)
    first = torch.sin(2.0 * causes[:, 0]) + causes[:, 1]
    return x, torch.stack([1000.0 + 50.0 * first, causes[:, 0]], 1)[:, :outputs].double()


def task(*, drift: float = 1.0, outputs: int = 1, **changes: Any) -> Task:
    names = ["price", "size"][:outputs]
    source, target = (
        Domain(name, *data(seed, drift=moved, outputs=outputs, **changes), names, regression=True)
        for name, seed, moved in (("here", 1, 0.0), ("there", 2, drift))
    )
    return Task("move", (source,), target)


SPLITS = split_task(task(), seed=0)


def config(**changes: Any) -> RunConfig:
    return RunConfig.recommended(
        **{"regression": True, "steps": 300, "network_options": {"hidden": [32, 16]}} | changes
    )


def algorithm(name: str, outputs: int = 2, **options: Any) -> Algorithm:
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, outputs), input_shape=(6,))
    return make_algorithm(name, network, outputs, regression=True, **options).double()


# --- loss, scores, units --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["weighted", "plain"])
@pytest.mark.parametrize("name", ["erm", "dann"])
def test_the_loss_is_that_of_a_loop(name: str, weighting: str) -> None:
    rule = algorithm(name, task_weighting=weighting)
    x, y = torch.randn(4, 6).double(), torch.randn(4, 2).double()
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    outputs = rule.network(x).detach()
    expected = 0.0
    for i in range(4):
        error = sum((float(outputs[i, j]) - float(y[i, j])) ** 2 for j in range(2)) / 2
        expected += error * (float(weights[i]) if weighting == "weighted" else 1 / 4)
    found = rule.losses(Batch(x, y, weights), Batch(x), 0)["task"].detach()
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_gradients_of_the_loss() -> None:
    outputs = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: squared_error(z, y), outputs)
    with refused("(5, 3)", "(5,)"):
        squared_error(outputs, y[:, 0])


@pytest.mark.parametrize("shape", [(20,), (20, 1), (20, 3)])
def test_scores_are_those_of_scikit_learn(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    truth, noise = (torch.randn(*shape, generator=generator).double() for _ in range(2))
    if len(shape) > 1:
        truth *= torch.tensor([1.0, 10.0, 0.1])[: shape[1]]
    predicted = truth + 0.5 * noise
    expected = {
        "rmse": root_mean_squared_error(truth.numpy(), predicted.numpy()),
        "mae": mean_absolute_error(truth.numpy(), predicted.numpy()),
        "r2": r2_score(truth.numpy(), predicted.numpy()),
    }
    assert regression_scores(predicted, truth) == pytest.approx(expected, rel=1e-12)


def test_scores_of_a_constant_truth() -> None:
    constant = torch.full((4, 1), 2.0)
    assert regression_scores(constant, constant) == {"rmse": 0.0, "mae": 0.0, "r2": 1.0}
    assert regression_scores(constant + 1.0, constant) == {"rmse": 1.0, "mae": 1.0, "r2": 0.0}
    with refused("1 of 2 rows", "rows 1", field="predictions"):
        regression_scores(torch.tensor([1.0, torch.nan]), torch.zeros(2))
    with refused("2 columns for 3 samples", "the truth 1"):
        regression_scores(torch.zeros(3, 2), torch.zeros(3))


def test_units_are_taken_back() -> None:
    y = torch.tensor([[1.0e6, -3.0], [1.1e6, 5.0], [0.7e6, 4.0]]).double()
    units = Units(2)
    units.fit(y, ["a", "b"])
    scaled = units.scaled(y)
    assert scaled.mean(0).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert scaled.std(0, correction=0).tolist() == pytest.approx([1.0, 1.0], rel=1e-6)
    torch.testing.assert_close(units(scaled).double(), y, rtol=1e-6, atol=0.0)
    for constant in (0.1, 0.0, 2024.0):
        with refused("'b' of 3 samples", f"mean {constant:g} and deviation 0"):
            units.fit(torch.cat([y[:, :1], torch.full((3, 1), constant).double()], 1), ["a", "b"])
    with refused("'b' of 3 samples", "mean 1e+09", "subtract a constant"):
        units.fit(1e9 + y[:, 1:], ["b"])


def test_predictions_follow_the_units() -> None:
    """Another unit for the numbers is another unit for the predictions, and nothing else."""
    x, y = data(1)
    found = []
    for factor, offset in ((1.0, 0.0), (0.25, 700.0)):
        here = Domain("here", x, factor * y + offset, ["y"], regression=True)
        moved = Task("units", (here,), Domain("there", x + DRIFT, None, ["y"], regression=True))
        run = Trainer(config(steps=20, selection="last"), split_task(moved, seed=0)).run()
        found.append((run.algorithm.predict(x).detach().double() - offset) / factor)
    torch.testing.assert_close(found[0], found[1], rtol=0.0, atol=0.05)  # of numbers with deviation 60


# --- training -------------------------------------------------------------------------------------------------


def test_adapting_pays() -> None:
    """Where readings have moved, MMD and CORAL have less than 0.6 of the squared error of the source alone."""
    splits = split_task(task(drift=1.5, n=600), seed=0)
    for seed in range(2):
        error = {}
        for name in ("erm", "mmd", "coral"):
            report = final_report(Trainer(config(algorithm=name, seed=seed, network_options={}), splits).run(), splits)
            error[name] = report["target_rmse"] ** 2
            assert report["source_r2"] > 0.7
            assert report["target_samples"] == 240
        assert max(error["mmd"], error["coral"]) < 0.6 * error["erm"]


RESUMED = [
    {"algorithm": "mmd", "sampler": "stratified"},
    {"algorithm": "coral", "sampler": "balanced"},
    {"algorithm": "dann", "sampler": "ordered"},
    {"algorithm": "arm", "sampler": "uniform"},
]


@pytest.mark.parametrize("changes", RESUMED, ids=lambda changes: str(changes["algorithm"]))
def test_a_resumed_run_is_the_same_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    splits = split_task(task(outputs=2), seed=0)
    settings = config(steps=15, eval_every=5, refresh_every=4, checkpoint_every=5, batch_size=16, **changes)
    whole = Trainer(settings, splits, tmp_path / "whole")
    whole.run()
    assert Trainer(settings, splits, tmp_path / "parts").run(progress=Stop(7)).step == 7
    torch.manual_seed(99)
    second = Trainer(settings, splits, tmp_path / "parts")
    result = second.run(resume=True)
    assert_same_run(whole, second)
    model, about = load_model(tmp_path / "parts")
    x, _ = data(7)
    assert torch.equal(model.predict(x), result.algorithm.predict(x))
    assert about["class_names"] == ["price", "size"]
    assert about["config"].regression


def test_the_model_is_the_latest_that_source_errors_cannot_tell_from_the_best() -> None:
    result = Trainer(config(algorithm="erm", steps=40, eval_every=10, lr=0.03), SPLITS).run()
    scores = {line["step"]: line["source_r2"] for line in result.metrics}
    assert max(scores, key=lambda step: scores[step]) in result.equal_steps
    assert result.selected_step == max(result.equal_steps)
    assert result.score == scores[result.selected_step]
    x = SPLITS.source_val
    predicted = result.algorithm.predict(torch.stack([x.dataset[i] for i in range(len(x))]))
    assert r2_score(x.known_labels().numpy(), predicted.detach().numpy()) == pytest.approx(result.score, rel=1e-6)


def test_labels_of_the_target_are_not_read() -> None:
    whole = task()
    other = Task("move", whole.sources, Domain("there", whole.target.dataset, None, ["price"], regression=True))
    runs = [Trainer(config(steps=15), split_task(one, seed=0)).run() for one in (whole, other)]
    x, _ = data(7)
    assert torch.equal(*(run.algorithm.predict(x) for run in runs))
    assert final_report(runs[1], split_task(other, seed=0))["target_r2"] is None


def test_the_oracle_has_the_targets_r2() -> None:
    splits = split_task(task(), seed=0)
    splits.target_val.reveal()
    result = Trainer(config(steps=10, eval_every=5, selection="oracle"), splits).run()
    val = splits.target_val
    predicted = result.algorithm.predict(torch.stack([val.dataset[i] for i in range(len(val))])).detach()
    assert result.score == pytest.approx(r2_score(val.known_labels().numpy(), predicted.numpy()), rel=1e-6)


# --- what cannot be -------------------------------------------------------------------------------------------


def test_rules_of_classes_are_refused_by_name() -> None:
    plain = [name for name in ALGORITHM_NAMES if "+" not in name]
    works = [name for name in plain if find_algorithm(name).takes_regression]
    with refused("'cdan'", f"use {', '.join(works[:-1])} or {works[-1]}"):
        RunConfig(regression=True, algorithm="cdan+els")
    assert set(plain) - set(works) == {"cdan", "mcc"}
    with refused("'mcc'", "regression", "erm"):
        algorithm("mcc")

    class Own(Algorithm):
        name, uses_target = "own", False

    with refused("'own'", "regression", "takes_regression = True"):
        Trainer(RunConfig(regression=True), SPLITS, algorithm=Own)


REFUSED: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = [
    ({"class_shares": "uniform"}, "class_shares", ("'uniform'", "regression=True", "'none'")),
    ({"class_shares": "source"}, "class_shares", ("'source'", "regression=True", "'none'")),
    (
        {"selection": "source-accuracy"},
        "selection",
        ("'source-accuracy'", "regression=True", "source-r2, last, oracle"),
    ),
    (
        {"regression": False, "selection": "source-r2"},
        "selection",
        ("'source-r2'", "regression=False", "source-accuracy"),
    ),
    ({"algorithm_options": {"regression": True}}, "algorithm_options", ("regression=True",)),
    ({"network_options": {"regression": True}}, "network_options", ("regression=True",)),
    ({"regression": "yes"}, "regression", ("true", "false", "'yes'")),
]


@pytest.mark.parametrize(("changes", "field", "named"), REFUSED, ids=lambda case: str(case)[:40])
def test_settings_that_do_not_go_together(changes: dict[str, Any], field: str, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        RunConfig(**{"regression": True} | changes)


def test_recommended_settings_align_no_classes() -> None:
    assert RunConfig.recommended(regression=True).class_shares == "none"
    assert RunConfig.recommended(regression=True).selection == "source-r2"
    assert RunConfig.recommended(regression=True).algorithm_options["ramp"] == 100
    assert (RunConfig().regression, RunConfig().selection) == (False, "information-maximisation")
    assert RunConfig.model_json_schema()["properties"]["selection"]["default"] == "information-maximisation"


def test_settings_and_labels_must_agree() -> None:
    with refused("numbers", "regression=False", "regression=True"):
        Trainer(RunConfig(), SPLITS)
    classes = Domain("here", torch.randn(40, 6), torch.arange(40) % 2, ("a", "b"))
    moved = Domain("there", torch.randn(40, 6), None, ("a", "b"))
    with refused("classes", "regression=True", "regression=False"):
        Trainer(config(), split_task(Task("t", (classes,), moved), seed=0))
    with refused("'there'", "'here'", "regression=True"):
        Task("t", (classes,), named_part(SPLITS.target_test, torch.arange(3), "there"))
    plain = make_algorithm("erm", Network(nn.Identity(), nn.Linear(6, 2)), 2)
    with refused("ERM", "regression=True", "regression=False"):
        Trainer(config(), split_task(task(outputs=2), seed=0), algorithm=plain)


LABELS = "labels of domain 'd'"
DOMAINS: list[tuple[Any, dict[str, Any], str | None, tuple[Any, ...]]] = [
    (torch.tensor([1.0, 2.0, -torch.inf]), {}, LABELS, ("1 of 3 rows", "rows 2")),
    (np.array(["a", "b", "c"]), {}, LABELS, ("real numbers", "<U1")),
    (torch.tensor([True, False, True]), {}, LABELS, ("real numbers", "torch.bool")),
    (torch.zeros(2), {}, LABELS, ("(3,)", "(3, m)", "(2,)")),
    (torch.zeros(3, 2), {}, None, (LABELS, "2 columns", "1 names", "'y'")),
    (torch.zeros(3, 0), {}, LABELS, ("(3,)", "(3, m)", "(3, 0)")),
    (np.array([0.5, 1.5, 2.5]), {"regression": False}, None, (LABELS, "floats", "regression=True")),
    (torch.zeros(3), {"regression": 1}, "regression", ("true", "false", 1)),
]


@pytest.mark.parametrize(("labels", "changes", "field", "named"), DOMAINS, ids=range(len(DOMAINS)))
def test_labels_that_are_no_numbers(
    labels: Any, changes: dict[str, Any], field: str | None, named: tuple[Any, ...]
) -> None:
    with refused(*named, field=field):
        Domain("d", torch.zeros(3, 2), labels, ["y"], **{"regression": True} | changes)


def test_domains_of_numbers() -> None:
    one = Domain("one", torch.zeros(3, 2), np.array([1, 2, 3]), ["y"], regression=True)
    two = Domain("two", torch.ones(2, 2), torch.tensor([[0.5], [1.5]]), ["y"], regression=True)
    both = unite([one, two])
    assert both.regression
    assert both.known_labels().tolist() == [[1.0], [2.0], [3.0], [0.5], [1.5]]
    cut = both.subset(torch.tensor([3, 0])).hide_labels()
    assert cut.reveal().known_labels().tolist() == [[0.5], [1.0]]
    with refused("'two'", "'z'", "'y'"):
        Task("t", (one,), Domain("two", torch.zeros(3, 2), None, ["z"], regression=True))
    with refused("'two'", "no labels"):
        Task("t", (Domain("two", torch.zeros(3, 2), None, ["y"], regression=True),), one)


class Pairs(torch.utils.data.Dataset[Any]):
    """Items of other libraries: an input and a number, or several."""

    def __init__(self, labels: list[Any]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2), self.labels[index]


def test_data_sets_of_pairs() -> None:
    tensors = torch.utils.data.TensorDataset(torch.zeros(2, 2), torch.tensor([0.5, 1.5]))
    several = Pairs([torch.tensor([0.5, 1.0]), np.array([1.5, 2.0])])
    for dataset, names, expected in (
        (tensors, ["y"], [[0.5], [1.5]]),
        (Pairs([0.5, 1.5]), ["y"], [[0.5], [1.5]]),
        (several, ["y", "z"], [[0.5, 1.0], [1.5, 2.0]]),
    ):
        found = Domain.from_dataset("pairs", dataset, names, regression=True)
        assert found.known_labels().tolist() == expected
    with refused("real numbers", "<U3", field="labels of domain 'pairs'"):
        Domain.from_dataset("pairs", Pairs(["cat"]), ["y"], regression=True)
    with refused("labels of domain 'pairs'", "floats", "regression=True"):
        Domain.from_dataset("pairs", tensors, ["y"])


class Plain(Algorithm):
    """A rule of one's own that needs no class probabilities."""

    name, uses_target, takes_regression = "plain", False, True

    def losses(self, source: Batch, target: Batch | None, step: int) -> dict[str, Tensor]:
        return {"total": self.task_loss(self.features(source.x), source)}


def test_a_rule_of_ones_own_may_say_that_it_can() -> None:
    plain = RunConfig(regression=True, steps=5)
    assert Trainer(plain, SPLITS, algorithm=Plain).run().score is not None
    network = Network(nn.Identity(), nn.Linear(6, 1))
    assert Trainer(plain, SPLITS, algorithm=Plain(network, 1, regression=True)).run().score is not None


def test_names_of_old_runs_stay() -> None:
    """A run without the setting is one that predicts classes; one that predicts numbers has another name."""
    given = {"dataset": "watch", "task": "t", "data_name": "watch", "cell": {}}
    settings = RunConfig().to_dict()
    before = {name: value for name, value in settings.items() if name != "regression"}
    numbers = {**settings, "regression": True}
    names = [RunSpec(**given, config=one).run_id for one in (before, settings, numbers)]
    assert names[0] == names[1] != names[2]


# --- files and commands ---------------------------------------------------------------------------------------

QUICK = ("--regression", "--steps", 30, "--batch-size", 16, "--eval-every", 10, "--device", "cpu")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, seed, drift in (("here", 1, 0.0), ("there", 2, 1.0)):
        x, y = (part.numpy() for part in data(seed, drift=drift, n=120, outputs=2))
        np.savez(tmp_path / f"{name}.npz", x=x, labels=y[:, 0])
        np.savez(tmp_path / f"{name}_pair.npz", x=x, labels=y)
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            rows = [[*row, price] for row, price in zip(x.tolist(), y[:, 0].tolist(), strict=True)]
            csv.writer(file).writerows([[*(f"f{i}" for i in range(6)), "price"], *rows])
    return tmp_path


def call(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def test_a_run_from_files_to_predictions(files: Path, capsys: Any) -> None:
    run = files / "run"
    assert call("adapt", "--source", files / "here.npz", "--target", files / "there.npz", *QUICK, "--out", run) == 0
    shown = capsys.readouterr().out
    assert "source validation R², RMSE, MAE" in shown
    assert "accuracy" not in shown
    found = json.loads((run / "result.json").read_text())
    rows = list(csv.reader((run / "predictions.csv").read_text().splitlines()))
    assert rows[0] == ["sample", "labels"]
    predicted = np.array([float(row[1]) for row in rows[1:]])
    truth = np.load(files / "there.npz")["labels"]
    assert found["target_r2"] == pytest.approx(r2_score(truth, predicted), abs=1e-6)
    assert found["target_rmse"] == pytest.approx(root_mean_squared_error(truth, predicted), rel=1e-5)
    assert found["predicted"]["labels"]["mean"] == pytest.approx(predicted.mean(), rel=1e-6)
    assert "Predicted numbers of the target" in (run / "report.md").read_text()

    assert call("predict", run, files / "there.npz") == 0
    assert capsys.readouterr().out == (run / "predictions.csv").read_text()
    assert call("evaluate", run, files / "there.npz", "--out", files / "scores") == 0
    assert "RMSE" in capsys.readouterr().out
    scores = json.loads((files / "scores" / "evaluation.json").read_text())
    assert scores["domains"]["there"]["r2"] == pytest.approx(found["target_r2"], abs=1e-6)
    assert scores["overall"]["mae"] == pytest.approx(np.abs(truth - predicted).mean(), rel=1e-5)
    assert (files / "scores" / "evaluation.png").stat().st_size > 10_000
    assert len((files / "scores" / "samples.csv").read_text().splitlines()) == len(truth) + 1
    assert call("evaluate", run, "--json") == 0  # what was held out, and the target
    assert list(json.loads(capsys.readouterr().out)["domains"]) == ["here", "there"]
    assert call("report", run) == 0
    page = (run / "report.html").read_text()
    assert "R², %" in page
    assert "accuracy, %" not in page
    repeat = ("adapt", "--source", files / "here.npz", "--target", files / "there.npz", *QUICK, "--out", run)
    assert call(*repeat, "--resume") == 0
    capsys.readouterr()
    assert call("doctor", files / "here.npz", files / "there.npz", "--model", run, "--rows", 64) == 0
    assert call("doctor", files / "here.npz", files / "there.npz", "--regression", "--warm-up", 5, "--rows", 64) == 0


def test_two_numbers_and_columns_of_tables(files: Path, capsys: Any) -> None:
    pair = ("--source", files / "here_pair.npz", "--target", files / "there_pair.npz")
    assert call("adapt", *pair, *QUICK, "--algorithm", "coral", "--out", files / "pair") == 0
    assert (files / "pair" / "predictions.csv").read_text().startswith("sample,labels_0,labels_1\n0,")
    table = ("--source", files / "here.csv", "--target", files / "there.csv", "--labels", "price")
    assert call("adapt", *table, *QUICK, "--algorithm", "erm", "--out", files / "table") == 0
    assert (files / "table" / "predictions.csv").read_text().startswith("sample,price\n0,")
    capsys.readouterr()
    assert call("adapt", *pair[:3], files / "there.npz", *QUICK, "--out", files / "odd") == 2
    assert "labels of domain 'there' have 1 columns, but 2 names" in capsys.readouterr().err


def test_train_on_a_folder_of_files(files: Path, capsys: Any) -> None:
    given = ("--dataset", "embeddings", "--root", files, "--task", "here_pair->there_pair")
    (files / "here.csv").unlink()
    (files / "there.csv").unlink()
    assert call("train", *given, *QUICK, "--json", "--out", files / "run") == 0
    assert json.loads(capsys.readouterr().out)["target_rmse"] > 0
    assert call("train", "--dataset", "watch", "--task", "left-A->right-B", *QUICK, "--out", files / "w") == 2
    assert "labels of the source are classes" in capsys.readouterr().err


BAD: dict[str, tuple[Any, str]] = {
    "nan": (lambda y: np.where(np.arange(120) == 7, np.nan, y), "in 1 of 120 rows, the first in row 8 (row 1 = first"),
    "inf": (lambda y: np.where(np.arange(120) == 7, np.inf, y), "NaN, infinite values"),
    "names": (lambda y: np.where(y > 1000, "high", "low"), "leave --regression out to predict classes"),
    "gap": (
        lambda y: np.where(np.arange(120) == 7, "n/a", y.astype(str)),
        "have 'n/a' where a number is expected in 1 of 120 cells, the first in row 8 (row 1 = first data row); correct",
    ),
    "flags": (lambda y: y > 1000, "leave --regression out"),
    "constant": (lambda y: np.full(120, 0.1), "have mean 0.1 and deviation"),
    "short": (lambda y: y[:7], "must have shape (120,) or (120, m)"),
    "cube": (lambda y: np.zeros((120, 2, 2)), "got (120, 2, 2)"),
}


@pytest.mark.parametrize("case", BAD)
def test_labels_in_files_that_cannot_be_learnt(case: str, files: Path, capsys: Any) -> None:
    change, message = BAD[case]
    found = np.load(files / "here.npz")
    np.savez(files / "bad.npz", x=found["x"], labels=change(found["labels"]))
    assert (
        call("adapt", "--source", files / "bad.npz", "--target", files / "there.npz", *QUICK, "--out", files / "o") == 2
    )
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_one_column_is_as_good_as_none(files: Path) -> None:
    found = np.load(files / "here.npz")
    np.savez(files / "column.npz", x=found["x"], labels=found["labels"][:, None])
    same = [read_labelled(files / f"{name}.npz", labels="labels", regression=True) for name in ("here", "column")]
    assert torch.equal(same[0][0], same[1][0])
    assert (same[0][1] == same[1][1]).all()
    assert same[0][1].shape == (120, 1)


@pytest.mark.parametrize("ending", ["npz", "csv"])
def test_numbers_without_the_setting_are_named(ending: str, files: Path, capsys: Any) -> None:
    labels = {"npz": "labels", "csv": "price"}[ending]
    given = ("--source", files / f"here.{ending}", "--target", files / f"there.{ending}", "--labels", labels)
    assert call("adapt", *given, "--out", files / "run") == 2
    assert "are 120 real numbers such as 957.975; give --regression to predict numbers" in capsys.readouterr().err
    assert not (files / "run").exists()


def test_few_fractions_are_names_of_classes_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("f0,f1,dose\n" + "".join(f"{i},1,{i % 3 + 0.5}\n" for i in range(30)))
    _, values, _ = read_labelled(tmp_path / "a.csv", labels="dose")
    assert sorted(set(values.tolist())) == ["0.5", "1.5", "2.5"]
    _, numbers, _ = read_labelled(tmp_path / "a.csv", labels="dose", regression=True)
    assert numbers[:3, 0].tolist() == [0.5, 1.5, 2.5]


def test_a_cell_that_is_missing_is_shown(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("f0,price\n1,2.5\n2,none\n3,1.5\n")
    with refused("'price'", tmp_path / "a.csv", "'none'", "1 of 3 cells", "row 2", "--labels"):
        read_labelled(tmp_path / "a.csv", labels="price", regression=True)


def test_what_else_is_refused(files: Path, capsys: Any) -> None:
    given = ("--source", files / "here.npz", "--target", files / "there.npz", *QUICK, "--out", files / "o")
    for more, message in (
        (("--algorithm", "cdan"), "use erm, mmd, coral, dann or arm"),
        (("--class-shares", "uniform"), "--class-shares uniform needs classes"),
        (("--selection", "source-accuracy"), "use one of source-r2, last, oracle"),
        (("--holdout", 0), "split with holdout above 0, or choose by 'last'"),
    ):
        assert call("adapt", *given, *more) == 2
        assert message in capsys.readouterr().err
    (files / "pictures" / "cat").mkdir(parents=True)
    (files / "pictures" / "cat" / "a.png").write_bytes(b"")
    shutil.copytree(files / "pictures", files / "sketches")
    pictures = ("--source", files / "pictures", "--target", files / "sketches")
    assert call("adapt", *pictures, *QUICK, "--out", files / "o") == 2
    assert "images in class folders, which are no numbers" in capsys.readouterr().err
    sweep = files / "sweep.yaml"
    sweep.write_text("settings: {regression: true}\ndata: [{dataset: watch}]\nalgorithms: [erm]\nsamplers: [uniform]\n")
    assert call("sweep", sweep, "--out", files / "s") == 2
    assert "regression cannot be set here; tables of a sweep hold accuracies" in capsys.readouterr().err
    mine = f"{{dataset: embeddings, root: {files}, tasks: all, options: {{regression: true}}}}"
    sweep.write_text(f"data: [{mine}]\nalgorithms: [erm]\nsamplers: [uniform]\n")
    assert call("sweep", sweep, "--out", files / "s") == 2
    assert "options: regression cannot be set here" in capsys.readouterr().err
