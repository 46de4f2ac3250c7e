"""``vardass evaluate`` as a user runs it: embeddings, images, known data sets, and input that it must refuse."""

import csv
import json
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from vardass.adapt import classification_scores, evaluate_run
from vardass.adapt.scores import Evaluation
from vardass.cli import main
from vardass.cli.terminal import save_picture
from vardass.data import load_task, load_watch
from vardass.errors import VardassWarning
from vardass.plots import evaluation_figure

CLASSES = np.array(["cat", "dog", "emu"])
QUICK = ("--steps", 20, "--batch-size", 8, "--eval-every", 10, "--refresh-every", 10, "--device", "cpu")


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def done(capsys, *arguments):
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return out


def refused(capsys, *arguments):
    code, out, err = run(capsys, "evaluate", *arguments)
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def clusters(seed, shift, n=60):
    generator = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    return (generator.normal(size=(n, 4)) + 2.0 * np.eye(4)[labels] + shift).astype(np.float32), labels


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Files of embeddings and the run between two of them."""
    folder = tmp_path_factory.mktemp("embeddings")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, seed, shift in (("clinic", 0, 0.0), ("home", 1, 0.5), ("street", 2, 0.9)):
        x, y = clusters(seed, shift)
        np.savez(folder / f"{name}.npz", x=x, labels=CLASSES[y])
    paths = "--source", folder / "clinic.npz", "--target", folder / "home.npz", "--out", folder / "run"
    assert main([str(argument) for argument in ("adapt", *paths, *QUICK)]) == 0
    torch.set_num_threads(before)
    return folder


def test_two_files_are_two_domains(place, tmp_path, capsys):
    out = tmp_path / "scores"
    shown = done(capsys, "evaluate", place / "run", place / "home.npz", f"far={place / 'street.npz'}", "--out", out)
    found = json.loads((out / "evaluation.json").read_text())
    assert list(found["domains"]) == ["home", "far"]
    assert found["class_names"] == list(CLASSES)
    assert found["overall"]["n"] == 120
    # the run itself measured the same, so features were scaled as in training
    said = json.loads((place / "run" / "result.json").read_text())["target_accuracy"]
    assert found["domains"]["home"]["accuracy"] == said
    rows = table(out / "samples.csv")
    assert [row["domain"] for row in rows] == ["home"] * 60 + ["far"] * 60
    assert [row["label"] for row in rows] == [*CLASSES[np.arange(60) % 3]] * 2
    right = [row["label"] == row["class"] for row in rows]
    assert found["overall"]["accuracy"] == np.mean(right)
    predicted = {row["sample"]: (row["class"], row["confidence"]) for row in table(place / "run" / "predictions.csv")}
    assert {row["sample"]: (row["class"], row["confidence"]) for row in rows[:60]} == predicted
    home, far, overall = (np.array(part["confusion"]) for part in (*found["domains"].values(), found["overall"]))
    assert (home + far == overall).all()
    assert np.trace(overall) == sum(right)
    with Image.open(out / "evaluation.png") as picture:
        assert picture.width > 1200
    assert (out / "evaluation.svg").exists()
    assert f"{100 * np.mean(right):.1f} %" in shown
    assert "recall far" in shown
    same = evaluate_run(place / "run", {"home": place / "home.npz", "far": place / "street.npz"}, device="cpu")
    assert json.loads(json.dumps(same.to_dict())).items() <= found.items()
    # an older evaluation is replaced
    done(capsys, "evaluate", place / "run", place / "street.npz", "--out", out)
    assert list(json.loads((out / "evaluation.json").read_text())["domains"]) == ["street"]


def test_without_data_it_takes_what_the_run_kept_out(place, capsys):
    found = json.loads(done(capsys, "evaluate", place / "run", "--json"))
    assert list(found["domains"]) == ["clinic", "home"]
    assert (found["domains"]["clinic"]["n"], found["domains"]["home"]["n"]) == (12, 60)
    said = json.loads((place / "run" / "result.json").read_text())
    assert found["domains"]["home"]["accuracy"] == said["target_accuracy"]
    assert found["written"] == []
    assert "held out of training; of the target all, adapted to without labels" in found["measured_on"]


def test_a_source_of_the_run_is_told_apart(place, capsys):
    code, _, err = run(capsys, "evaluate", place / "run", place / "clinic.npz")
    assert code == 0
    assert "warning: " in err
    assert "trained on most of its samples" in err
    with pytest.warns(VardassWarning, match="too good"):
        evaluate_run(place / "run", place / "clinic.npz")


def test_a_folder_of_domains(place, tmp_path, capsys):
    for name in ("home", "street"):
        (tmp_path / f"{name}.npz").write_bytes((place / f"{name}.npz").read_bytes())
    found = json.loads(done(capsys, "evaluate", place / "run", tmp_path, "--json"))
    assert list(found["domains"]) == ["home", "street"]
    named = json.loads(done(capsys, "evaluate", place / "run", f"all={tmp_path}", "--json"))
    assert list(named["domains"]) == ["all/home", "all/street"]
    twice = place / "street.npz", tmp_path / "street.npz"
    found = json.loads(done(capsys, "evaluate", place / "run", *twice, "--json"))
    assert list(found["domains"]) == [str(path) for path in twice]
    shown = done(capsys, "evaluate", place / "run", f"all={twice[0]}", twice[1])
    assert "all domains" in shown


def test_missing_classes_are_said_and_left_out(place, tmp_path, capsys):
    x, y = clusters(5, 0.5)
    np.savez(tmp_path / "dogs.npz", x=x[y == 1], labels=CLASSES[y[y == 1]])
    shown = done(capsys, "evaluate", place / "run", tmp_path / "dogs.npz")
    assert "dogs has no samples of 2 of 3 classes: 'cat', 'emu'; they are left out of the balanced accuracy" in shown
    cat = next(line for line in shown.splitlines() if line.startswith("cat"))
    assert "–" in cat
    found = json.loads(done(capsys, "evaluate", place / "run", tmp_path / "dogs.npz", "--json"))
    assert found["overall"]["balanced_accuracy"] == found["overall"]["accuracy"]
    assert found["overall"]["classes"]["cat"]["recall"] is None


def test_other_names_of_arrays_and_other_files(place, tmp_path, capsys):
    x, y = clusters(1, 0.5)
    np.savez(tmp_path / "a.npz", z=x, wide=np.zeros((60, 9)), y=CLASSES[y])
    np.save(tmp_path / "b.npy", x)
    np.save(tmp_path / "b.labels.npy", CLASSES[y])
    lines = ["f0,f1,f2,f3,labels", *(",".join([*map(repr, map(float, row)), CLASSES[k]]) for row, k in zip(x, y))]
    (tmp_path / "c.csv").write_text("\n".join(lines))
    home = json.loads(done(capsys, "evaluate", place / "run", place / "home.npz", "--json"))["overall"]
    options = {"a.npz": ("--key", "z", "--labels", "y"), "b.npy": (), "c.csv": ()}
    for name, more in options.items():
        found = json.loads(done(capsys, "evaluate", place / "run", tmp_path / name, *more, "--json"))
        assert found["overall"] == home
    (tmp_path / "a.npz").unlink()
    found = json.loads(done(capsys, "evaluate", place / "run", tmp_path, "--json"))
    assert list(found["domains"]) == ["b", "c"]  # labels beside an .npy file are no domain


def test_bad_data_are_refused_in_one_line(place, tmp_path, capsys):
    x, y = clusters(3, 0.5)
    broken = x.copy()
    broken[3, 1] = np.nan
    files = {
        "bare": ({"x": x}, "no array 'labels'"),
        "wide": ({"x": np.hstack([x, x]), "labels": CLASSES[y]}, "has 8 features"),
        "yak": (
            {"x": x, "labels": np.array(["ape", "yak"])[y % 2]},
            "has the classes 'ape', 'yak', which the model lacks (it has 'cat', 'dog', 'emu')",
        ),
        "nan": ({"x": broken, "labels": CLASSES[y]}, "beyond float32 in 1 of 60 rows, the first in row 4 ("),
        "empty": ({"x": x[:0], "labels": CLASSES[y[:0]]}, "so no numbers"),
        "short": ({"x": x, "labels": CLASSES[y][:5]}, "(5,) for 60 rows"),
        "half": ({"x": x, "labels": y + 0.5}, "no whole number"),
    }
    for name, (arrays, message) in files.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        assert message in refused(capsys, place / "run", tmp_path / f"{name}.npz")
    home = place / "home.npz"
    assert "nothing at" in refused(capsys, place / "run", tmp_path / "none.npz")
    (tmp_path / "nothing").mkdir()
    assert "no image or sound file" in refused(capsys, place / "run", tmp_path / "nothing")
    assert "two domains are called" in refused(capsys, place / "run", home, home)
    assert "two domains are called 'a'" in refused(capsys, place / "run", f"a={home}", f"a={place / 'street.npz'}")
    assert "neither a path nor NAME=PATH" in refused(capsys, place / "run", f"={home}")
    assert "no array 'q'" in refused(capsys, place / "run", home, "--key", "q")
    assert "no model at" in refused(capsys, tmp_path / "none", home)
    assert "no model at" in refused(capsys, tmp_path, home)
    assert "not a whole safetensors file" in refused(capsys, home, home)


def test_folders_to_write_to_are_checked_first(place, tmp_path, capsys):
    home = place / "home.npz"
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused(capsys, place / "run", home, "--out", tmp_path / "file")
    (tmp_path / "samples.csv").write_text("mine")
    err = refused(capsys, place / "run", home, "--out", tmp_path)
    assert "samples.csv" in err
    assert "not as vardass evaluate wrote it" in err
    assert (tmp_path / "samples.csv").read_text() == "mine"
    assert not (tmp_path / "evaluation.json").exists()


def test_data_that_changed_or_are_not_known_must_be_named(place, tmp_path, capsys):
    other = tmp_path / "run"
    other.mkdir()
    for name in ("model.safetensors", "data.json"):
        (other / name).write_bytes((place / "run" / name).read_bytes())
    about = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps({**about, "target_samples": 61}))
    assert "were changed since" in refused(capsys, other)
    (other / "data.json").write_text(json.dumps({**about, "splits": "names"}))
    assert "split by an older version; name data" in refused(capsys, other)
    (other / "data.json").unlink()
    assert "name data" in refused(capsys, other)


def test_a_run_on_a_known_data_set(tmp_path, capsys):
    out = tmp_path / "run"
    task = ("--dataset", "watch", "--task", "left-A+left-B->right-B", "--algorithm", "mmd")
    done(capsys, "train", *task, "--out", out, *QUICK)
    found = json.loads(done(capsys, "evaluate", out, "--json"))
    assert list(found["domains"]) == ["left-A", "left-B", "right-B"]
    assert "of the target those not trained on" in found["measured_on"]
    said = json.loads((out / "result.json").read_text())
    assert found["domains"]["right-B"]["accuracy"] == said["target_accuracy"]
    sources = [found["domains"][name] for name in ("left-A", "left-B")]
    held_out = sum(part["n"] * part["accuracy"] for part in sources) / sum(part["n"] for part in sources)
    assert held_out == pytest.approx(said["selected"]["source_accuracy"])
    # a file of the same windows, not standardised
    data = load_watch()
    rows = (data.side == 1) & (data.subject > 5)
    names = np.array(data.class_names)[data.labels[rows]]
    np.savez(tmp_path / "all.npz", x=data.features[rows].numpy(), labels=names)
    read = evaluate_run(out, tmp_path / "all.npz", device="cpu")
    made = evaluate_run(out, load_task("watch", "left-A+left-B->right-B").target, device="cpu")
    assert read.overall.n == int(rows.sum())
    torch.testing.assert_close(read.probabilities["all"], made.probabilities["right-B"], atol=1e-5, rtol=0)
    assert torch.equal(read.labels["all"], made.labels["right-B"])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(2)
    for domain, dim in (("day", 1.0), ("night", 0.6)):
        for number, name in enumerate(("blue", "red")):
            inside = folder / "data" / domain / name
            inside.mkdir(parents=True)
            for sample in range(10):
                pixels = generator.integers(0, 60, size=(16, 16, 3))
                pixels[..., 2 - 2 * number] += 180
                Image.fromarray((dim * pixels).astype(np.uint8)).save(inside / f"{sample}.png")
    data = folder / "data"
    paths = "--source", data / "day", "--target", data / "night", "--out", folder / "run", "--size", 16
    assert main([str(argument) for argument in ("adapt", *paths, *QUICK)]) == 0
    task = "--dataset", "images", "--root", data, "--task", "day->night", "--data-option", "size=16"
    assert main([str(argument) for argument in ("train", *task, "--out", folder / "trained", *QUICK)]) == 0
    return folder


def test_folders_of_images(pictures, tmp_path, capsys):
    night = pictures / "data" / "night"
    out = tmp_path / "scores"
    done(capsys, "evaluate", pictures / "run", night, "--out", out, "--workers", 1)
    found = json.loads((out / "evaluation.json").read_text())
    said = json.loads((pictures / "run" / "result.json").read_text())["target_accuracy"]
    assert found["overall"]["accuracy"] == said
    assert table(out / "samples.csv")[0]["sample"] == (night / "blue" / "0.png").as_posix()
    with pytest.warns(VardassWarning, match="too good"):
        both = evaluate_run(pictures / "run", pictures / "data", device="cpu")
    assert list(both.domains) == ["day", "night"]
    for name in ("run", "trained"):
        found = json.loads(done(capsys, "evaluate", pictures / name, "--json"))
        test = json.loads((pictures / name / "result.json").read_text())["target_accuracy"]
        assert found["domains"]["night"]["accuracy"] == test
    done(capsys, "evaluate", pictures / "trained", "--out", out)
    for row in table(out / "samples.csv"):
        assert row["sample"].startswith((pictures / "data" / row["domain"] / row["label"]).as_posix())


def test_bad_folders_of_images_are_refused(pictures, place, tmp_path, capsys):
    night = pictures / "data" / "night"
    inside = night / "scores"
    assert "is inside the data" in refused(capsys, pictures / "run", night, "--out", inside)
    assert not inside.exists()
    assert "0 class folders, but labels are needed" in refused(capsys, pictures / "run", night / "blue")
    assert "trained on images" in refused(capsys, pictures / "run", place / "home.npz")
    assert "trained on embeddings" in refused(capsys, place / "run", night)
    (tmp_path / "green").mkdir()
    (tmp_path / "green" / "0.png").write_bytes((night / "blue" / "0.png").read_bytes())
    assert "has the classes 'green', which the model lacks" in refused(capsys, pictures / "run", tmp_path)
    (tmp_path / "green").rename(tmp_path / "blue")
    (tmp_path / "blue" / "0.png").write_bytes(b"no picture")
    for workers in (0, 1):
        assert "0.png" in refused(capsys, pictures / "run", tmp_path, "--workers", workers)


# --- the picture ----------------------------------------------------------------------------------------


def fake(classes, domains, *, missing=(), names=None):
    generator = torch.Generator().manual_seed(classes)
    names = names or [f"class {number}" for number in range(classes)]
    known = torch.tensor([number for number in range(classes) if number not in missing])
    probabilities, labels = {}, {}
    for number in range(domains):
        labels[f"domain {number}"] = y = known[torch.randint(len(known), (200,), generator=generator)]
        logits = torch.randn(200, classes, generator=generator) + 3.0 * torch.eye(classes)[y]
        probabilities[f"domain {number}"] = logits.double().softmax(1)
    scores = {name: classification_scores(p, labels[name], classes=names) for name, p in probabilities.items()}
    whole = torch.cat(list(probabilities.values())), torch.cat(list(labels.values()))
    return Evaluation(classification_scores(*whole, classes=names), scores, probabilities, labels)


@pytest.mark.parametrize(("classes", "domains"), [(2, 1), (7, 2), (20, 9), (65, 4), (150, 1)])
def test_labels_of_the_picture_do_not_overlap(classes, domains):
    found = fake(classes, domains, missing=(1,) if classes > 2 else ())
    figure = evaluation_figure(found, title="$a_ run$")
    figure.canvas.draw()
    matrix = figure.axes[0]
    for axis, side in ((matrix.xaxis, "width"), (matrix.yaxis, "height")):
        labels = axis.get_ticklabels()
        assert len(labels) == classes if classes <= 70 else 35 <= len(labels) <= 75
        boxes = [label.get_window_extent() for label in labels]
        order = "x0" if side == "width" else "y0"
        boxes.sort(key=lambda box: getattr(box, order))
        for one, other in pairwise(boxes):
            assert getattr(one, order) + getattr(one, side) <= getattr(other, order) + 1.0
    numbers = [text.get_text() for text in matrix.texts]
    counts = [f"{count}" for row in found.overall.confusion.tolist() for count in row if count]
    assert numbers == (counts if classes <= 20 else [])
    # nothing is cut off
    whole = figure.get_tightbbox()
    assert whole.x0 >= -0.05
    assert whole.x1 <= figure.get_size_inches()[0] + 0.05
    assert whole.y0 >= -0.05


def test_the_picture_shows_recalls_and_bins(capsys):
    found = fake(4, 2, missing=(2,), names=["a", "$b$", "c" * 40, "d"])
    figure = evaluation_figure(found, title="run")
    matrix, recalls, bins = figure.axes
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["a", r"\$b\$", "c" * 9 + "…" + "c" * 8, "d"]
    drawn = {line.get_label(): line.get_xdata() for line in recalls.lines}
    np.testing.assert_array_equal(drawn["domain 1"], found.domains["domain 1"].recall)
    np.testing.assert_array_equal(drawn["all"], found.overall.recall)
    assert [text.get_text() for text in recalls.texts] == ["no samples"]
    full = found.overall.reliability.counts > 0
    np.testing.assert_array_equal(bins.lines[-1].get_ydata(), found.overall.reliability.accuracy[full])
    shares = matrix.images[0].get_array()
    np.testing.assert_allclose(shares[0], found.overall.confusion[0] / found.overall.support[0])


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert save_picture(lambda: pytest.fail("a figure was drawn"), tmp_path / "figure", "evaluate") == []
