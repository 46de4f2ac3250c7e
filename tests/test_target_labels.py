"""Labels of the target: blank ones, classes that the source lacks, and a few that are trained on."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import normal, refused
from vardass.adapt import evaluate_run
from vardass.adapt.selection import label_scores
from vardass.cli import main
from vardass.data import Domain, Task, split_task
from vardass.data.domains import known_rows
from vardass.data.embedding_tasks import read_labelled
from vardass.data.from_paths import folder_task
from vardass.data.splits import TARGET_SHARE, learn_from_target
from vardass.errors import VardassWarning

CLASSES = ["cat", "dog", "emu"]
QUICK = ("--steps", 30, "--batch-size", 8, "--eval-every", 10, "--refresh-every", 10, "--device", "cpu")


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, " ".join(said.err.split())


def result_of(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out), err


def table(path, x, labels):
    rows = [",".join(map(str, row)) for row in [["a", "b", "c", "labels"], *([*x, y] for x, y in zip(x, labels))]]
    path.write_text("\n".join(rows) + "\n")
    return path


def clusters(seed, n=60):
    y = np.arange(n) % 3
    x = np.random.default_rng(seed).normal(scale=0.3, size=(n, 3)) + 3.0 * np.eye(3)[y]
    return x.round(3).tolist(), [CLASSES[label] for label in y]


@pytest.fixture
def files(tmp_path):
    x, y = clusters(0)
    table(tmp_path / "a.csv", x, y)
    return tmp_path


def target(folder, labels, name="b.csv"):
    return table(folder / name, clusters(1)[0][: len(labels)], labels)


def adapt(folder, *more):
    return "adapt", "--source", folder / "a.csv", "--target", folder / "b.csv", "--out", folder / "run", *QUICK, *more


# --- labels that are blank ---


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (["cow", "", "ant"], ["cow", "", "ant"]),
        (["3", "", "10"], ["3", "", "10"]),
        (["3.0", "", "1.0"], ["3", "", "1"]),
    ],
)
def test_blank_labels_are_unknown_where_they_may_be(tmp_path, cells, classes):
    path = table(tmp_path / "t.csv", np.eye(3).tolist(), cells)
    assert read_labelled(path, labels="labels", blanks=True).labels.tolist() == classes
    with refused(path, "labels", "row 2", field=None):
        read_labelled(path, labels="labels")


@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_numbers_that_are_nan_or_null_are_unknown(tmp_path, ending):
    path = tmp_path / f"t.{ending}"
    if ending == "npz":
        np.savez(path, x=np.eye(3), labels=[2.0, np.nan, 1.0])
    else:
        import pandas as pd

        pd.DataFrame({"f": [0.0, 1.0, 2.0], "labels": [2.0, None, 1.0]}).to_parquet(path)
    assert read_labelled(path, labels="labels", blanks=True).labels.tolist() == ["2", "", "1"]
    numbers = read_labelled(path, labels="labels", blanks=True, regression=True).labels
    assert np.isnan(numbers).tolist() == [[False], [True], [False]]


def test_a_column_without_any_label_is_none(tmp_path):
    path = table(tmp_path / "t.csv", np.eye(3).tolist(), ["", " ", ""])
    assert read_labelled(path, labels="labels", blanks=True).labels is None
    assert read_labelled(path, labels="labels", blanks=True, regression=True).labels is None


def test_wrong_labels_beside_blank_ones_are_found_in_their_row(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, x=np.eye(4), labels=[np.nan, 1.0, 2.5, 0.0])
    with refused(path, "2.5", "row 3"):
        read_labelled(path, labels="labels", blanks=True)


def test_a_source_without_some_labels_is_refused():
    x = torch.zeros(3, 2)
    with refused("1 of 3", "'t'"):
        Task("t", (Domain("a", x, [0, -1, 1], ["x", "y"]),), Domain("b", x, None, ["x", "y"]))
    with refused("1 of 3", "'t'"):
        numbers = Domain("a", x, [0.5, np.nan, 1.0], ["y"], regression=True)
        Task("t", (numbers,), Domain("b", x, None, ["y"], regression=True))


def test_unknown_labels_are_left_out_of_scores():
    outputs = normal(40, 3, seed=0)
    labels = torch.arange(40) % 4 - 1
    known = labels >= 0
    assert torch.equal(known_rows(labels), known)
    assert label_scores(outputs, labels) == label_scores(outputs[known], labels[known])
    numbers = normal(40, 1, seed=1).double()
    numbers[::4] = torch.nan
    known = ~numbers[:, 0].isnan()
    assert label_scores(outputs[:, :1], numbers) == label_scores(outputs[known, :1], numbers[known])


def test_a_part_without_any_known_label_has_none():
    domain = Domain("b", torch.zeros(4, 2), [-1, 0, -1, 1], ["x", "y"])
    assert domain.labelled().known_labels().tolist() == [0, 1]
    assert not domain.subset(torch.tensor([0, 2])).has_labels
    assert not Domain("b", torch.zeros(2, 2), [-1, -1], ["x", "y"]).has_labels


def test_adapt_and_evaluate_score_the_samples_with_a_label(files, capsys):
    labels = clusters(1)[1]
    target(files, [label if row % 4 else "" for row, label in enumerate(labels)])
    found, err = result_of(capsys, *adapt(files))
    assert "45 of 60" in found["measured_on"]
    assert "source lacks" not in err
    with (files / "run" / "predictions.csv").open() as file:
        predictions = [row["class"] for row in csv.DictReader(file)]
    assert len(predictions) == 60
    right = [p == y for row, (p, y) in enumerate(zip(predictions, labels)) if row % 4]
    assert found["target_accuracy"] == pytest.approx(sum(right) / 45)
    scores = evaluate_run(files / "run", files / "b.csv")
    assert (scores.overall.n, scores.overall.accuracy) == (45, pytest.approx(sum(right) / 45))
    assert result_of(capsys, "evaluate", files / "run", files / "b.csv", "--out", files / "s")[0]["overall"]["n"] == 45
    assert len((files / "s" / "samples.csv").read_text().splitlines()) == 46


def test_a_regression_scores_the_numbers_that_are_there(files, capsys):
    x = clusters(0)[0]
    table(files / "a.csv", x, [round(row[0], 3) for row in x])
    target(files, [row[0] if i % 3 else "" for i, row in enumerate(clusters(1)[0])])
    found, _ = result_of(capsys, *adapt(files, "--regression"))
    assert "40 of 60" in found["measured_on"]
    assert found["target_r2"] is not None
    assert evaluate_run(files / "run", files / "b.csv").overall.n == 40


# --- classes that one domain lacks ---


def test_classes_that_the_source_lacks_are_told_once_and_not_scored(files, capsys):
    labels = clusters(1)[1]
    target(files, ["yak" if row < 12 else label for row, label in enumerate(labels)])
    found, err = result_of(capsys, *adapt(files))
    assert err.count("12 of 60") == 1
    assert "'yak'" in err
    assert "48 of 60" in found["measured_on"]
    _, err = result_of(capsys, "evaluate", files / "run", files / "b.csv")
    assert "12 of 60" in err
    code, _, err = run(capsys, "evaluate", files / "run", target(files, ["yak"] * 9, "c.csv"))
    assert code == 2
    assert "'yak'" in err


def test_classes_that_the_target_lacks_are_told(files, capsys):
    target(files, ["cat", "", "cat", ""] * 8)
    found, _ = result_of(capsys, *adapt(files))
    assert found["measured_on"].endswith("'dog', 'emu'")


def test_folders_with_further_classes(tmp_path):
    for name in ("a/cat", "a/dog", "b/cat", "b/yak"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    with pytest.warns(VardassWarning, match=r"2 of 4 .* lacks \('yak'"):
        task = folder_task(tmp_path / "a", tmp_path / "b", size=8)
    assert task.class_names == ("cat", "dog")
    assert task.target.known_labels().tolist() == [0, 0, -1, -1]


# --- a few labels to train on ---


def few(count=3, n=60):
    source = Domain("a", normal(n, 2, seed=1), torch.arange(n) % 3, CLASSES)
    labels = torch.full((n,), -1)
    labels[:count] = torch.arange(count) % 3
    return Task("t", (source,), Domain("b", normal(n, 2, seed=2), labels, CLASSES))


@pytest.mark.parametrize("count", [1, 3, 59])
def test_labelled_target_samples_join_the_source_as_often_as_it_takes(count):
    task = few(count)
    before = split_task(task, seed=0, unlabelled_fraction=1.0)
    after = learn_from_target(before, task.target)
    own = len(before.source_train)
    copies = after.source_train.subset(torch.arange(own, len(after.source_train)))
    share = len(copies) / len(after.source_train)
    assert abs(share - TARGET_SHARE) <= 0.05 or (count == 59 and len(copies) == count)
    rows = [task.target.dataset[row].tolist() for row in range(count)]
    assert [copies.dataset[i].tolist() for i in range(len(copies))] == rows * (len(copies) // count)
    assert copies.known_labels().tolist() == (torch.arange(count) % 3).tolist() * (len(copies) // count)
    assert set(copies.domain_ids.tolist()) == {1}
    assert after.source_val is before.source_val
    assert torch.equal(after.source_train.domain_ids[:own], before.source_train.domain_ids)


def test_one_labelled_target_sample_is_trained_on_and_not_scored(files, capsys):
    labels = clusters(1)[1]
    target(files, [*labels[:1], *[""] * 59])
    found, _ = result_of(capsys, *adapt(files, "--target-labels"))
    assert found["target_accuracy"] is None
    assert len((files / "run" / "predictions.csv").read_text().splitlines()) == 61
    assert json.loads((files / "run" / "data.json").read_text())["target_labels"] == 1
    own, _ = result_of(capsys, "evaluate", files / "run")
    assert list(own["domains"]) == ["a"]
    target(files, [*labels[:2], *[""] * 58])
    code, _, err = run(capsys, *adapt(files, "--target-labels", "--resume"))
    assert code == 2
    assert "--target-labels 1" in err


def test_labels_to_train_on_change_the_model(files, capsys):
    labels = clusters(1)[1]
    moved = dict(zip(CLASSES, [*CLASSES[1:], CLASSES[0]]))
    target(files, [moved[label] if row < 30 else "" for row, label in enumerate(labels)])
    models = []
    for more in ((), ("--target-labels",)):
        out = ("--out", files / f"run{len(models)}")
        result_of(capsys, *adapt(files, *more), *out)
        models.append((files / f"run{len(models)}" / "predictions.csv").read_text())
    assert models[0] != models[1]


@pytest.mark.parametrize("labels", [["cat", "dog", "emu"] * 4, [""] * 12, ["yak"] * 12])
def test_target_labels_need_some_and_not_all(files, capsys, labels):
    target(files, labels)
    code, _, err = run(capsys, *adapt(files, "--target-labels"))
    assert code == 2
    assert f"{12 if 'cat' in labels else 0} of the 12" in err
    assert not (files / "run").exists()


def test_target_labels_of_folders_are_not_supported(tmp_path, capsys):
    for name in ("a/cat", "a/dog", "b"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / name / "0.png")
    data = ("--source", tmp_path / "a", "--target", tmp_path / "b", "--out", tmp_path / "run")
    code, _, err = run(capsys, "adapt", *data, "--target-labels")
    assert code == 2
    assert "--target-labels" in err
    assert "is for embeddings" in err


# --- domains of which there is little to see ---


def test_fewer_target_samples_than_classes(files, capsys):
    target(files, ["cat", ""])
    code, _, err = run(capsys, *adapt(files))
    assert code == 2
    assert "2 samples" in err
    found, _ = result_of(capsys, *adapt(files, "--holdout", 0, "--target-batch-size", 2))
    assert sum(found["predicted"].values()) == 2
    assert found["measured_on"].endswith("'dog', 'emu'")


@pytest.mark.parametrize("name", ["a.csv", "b.csv"])
def test_constant_columns_in_one_domain(files, capsys, name):
    for file in ("a.csv", "b.csv"):
        x, y = clusters(3)
        table(files / file, [[1.0, 2.0, 3.0]] * 60 if file == name else x, y)
    found, _ = result_of(capsys, *adapt(files))
    assert sum(found["predicted"].values()) == 60
    assert found["choice"]["model"] == "source-only"
