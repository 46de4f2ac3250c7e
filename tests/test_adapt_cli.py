import csv
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

import vardass.adapt
from vardass.adapt.strata_updater import StrataUpdater
from vardass.cli import adapt as adapt_module
from vardass.cli import main
from vardass.data import Domain, Task
from vardass.data.from_paths import find_kind, task_from_paths
from vardass.data.images import small_size
from vardass.data.registry import DATASETS
from vardass.errors import InputError, VardassWarning
from vardass.files import is_locked, locked

CLASSES = np.array(["cat", "dog", "emu"])
QUICK = ("--steps", 30, "--batch-size", 8, "--eval-every", 10, "--refresh-every", 10, "--device", "cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def clusters(seed, *, shift, n=60):
    """Three clusters far apart, moved by a domain shift that leaves each nearest to its own."""
    generator = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    x = generator.normal(scale=0.3, size=(n, 4)) + 3.0 * np.eye(4)[labels] + shift
    return x.astype(np.float32), labels


@pytest.fixture
def files(tmp_path):
    x, y = clusters(0, shift=0.0)
    np.savez(tmp_path / "clinic.npz", x=x, labels=CLASSES[y])
    x, y = clusters(1, shift=0.5)
    np.savez(tmp_path / "home.npz", x=x, labels=CLASSES[y])
    (tmp_path / "bare").mkdir()
    np.savez(tmp_path / "bare" / "home.npz", x=x)
    return tmp_path


@pytest.fixture
def folders(tmp_path):
    generator = np.random.default_rng(2)
    for domain, dim in (("day", 1.0), ("night", 0.6)):
        for place, name in enumerate(("blue", "red")):
            folder = tmp_path / domain / name
            folder.mkdir(parents=True)
            for number in range(12):
                pixels = generator.integers(0, 60, size=(16, 16, 3))
                pixels[..., 2 - 2 * place] += 180
                Image.fromarray((dim * pixels).astype(np.uint8)).save(folder / f"{number}.png")
    return tmp_path


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def done(capsys, *arguments):
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return " ".join(out.split())


def refused(capsys, folder, *arguments):
    """A command that must fail: code 2, one line on stderr, no file made or changed."""
    before = snapshot(folder)
    code, out, err = run(capsys, *arguments)
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert snapshot(folder) == before
    return err


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def adapt(source, target, out, *more):
    return ("adapt", "--source", source, "--target", target, "--out", out, *QUICK, *more)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_adapt_embeddings_writes_everything(files, capsys):
    out = files / "run"
    shown = done(capsys, *adapt(files / "clinic.npz", files / "home.npz", out, "--sampler", "ordered"))
    rows = table(out / "predictions.csv")
    assert [row["sample"] for row in rows] == [str(row) for row in range(60)]
    right = np.mean([row["class"] == CLASSES[place % 3] for place, row in enumerate(rows)])
    assert right > 0.8
    assert all(1 / 3 - 1e-6 <= float(row["confidence"]) <= 1 for row in rows)
    assert f"target accuracy {100 * right:.1f} % of all 60 samples (labels read only now" in shown
    assert "source validation accuracy" in shown
    assert "target entropy" in shown
    assert "chosen by information-maximisation" in shown
    assert "drawing" in shown
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [10, 20, 30]
    report = (out / "report.md").read_text()
    assert "| cat |" in report
    model, about = vardass.adapt.load_model(out)
    assert list(about["class_names"]) == list(CLASSES)
    assert model.num_classes == 3


def test_renamed_files_give_the_same_run(files, capsys):
    done(capsys, *adapt(files / "clinic.npz", files / "home.npz", files / "run"))
    renamed = ((files / old).rename(files / new) for old, new in (("clinic.npz", "z.npz"), ("home.npz", "a.npz")))
    done(capsys, *adapt(*renamed, files / "renamed"))
    first, second = files / "run", files / "renamed"
    assert (first / "predictions.csv").read_bytes() == (second / "predictions.csv").read_bytes()
    weights = [vardass.adapt.load_model(out)[0].state_dict() for out in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_target_labels_change_nothing_but_the_last_number(files, capsys):
    done(capsys, *adapt(files / "clinic.npz", files / "home.npz", files / "labelled"))
    shown = done(capsys, *adapt(files / "clinic.npz", files / "bare" / "home.npz", files / "bare_run"))
    assert "target accuracy not known, the target has no labels" in shown
    assert (files / "labelled/predictions.csv").read_bytes() == (files / "bare_run/predictions.csv").read_bytes()
    assert (files / "labelled/model.safetensors").read_bytes() == (files / "bare_run/model.safetensors").read_bytes()


def test_npy_files_with_labels_beside_them(tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 1)):
        x, y = clusters(seed, shift=0.5 * seed)
        np.save(tmp_path / f"{name}.npy", x)
        np.save(tmp_path / f"{name}.labels.npy", y)
    more = ("--algorithm", "coral", "--penalty", 0.5, "--sampler", "balanced", "--network-option", "hidden=(16,)")
    assert "% of all 60 samples" in done(
        capsys, *adapt(tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "run", *more)
    )
    config = json.loads((tmp_path / "run/config.json").read_text())
    early = config["steps"] // 8
    assert config["algorithm_options"] == {"penalty": 0.5, "delay": early, "ramp": early, "confusion": 0.3}
    assert config["class_shares"] == "uniform"
    done(capsys, "predict", tmp_path / "run", tmp_path / "b.npy", "--out", tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "run/predictions.csv").read_bytes()


def test_csv_labels_are_no_features(tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 1)):
        x, y = clusters(seed, shift=0.5 * seed)
        lines = [
            ",".join([*(f"{value:.5f}" for value in row), CLASSES[label]]) for row, label in zip(x, y, strict=True)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["p,q,r,s,labels", *lines]) + "\n")
    done(capsys, *adapt(tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "run", "--sampler", "uniform"))
    done(capsys, "predict", tmp_path / "run", tmp_path / "b.csv", "--out", tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "run/predictions.csv").read_bytes()


def test_embeddings_in_double_precision(tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 1)):
        x, y = clusters(seed, shift=0.5 * seed)
        np.savez(tmp_path / f"{name}.npz", x=x.astype(np.float64), labels=y)
    done(capsys, *adapt(tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "run"))
    done(capsys, "predict", tmp_path / "run", tmp_path / "b.npz", "--out", tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "run/predictions.csv").read_bytes()
    np.savez(tmp_path / "large.npz", x=1e300 * x.astype(np.float64), labels=y)
    command = adapt(tmp_path / "large.npz", tmp_path / "b.npz", tmp_path / "other")
    assert "have NaN, infinite values or ones beyond float32 in" in refused(capsys, tmp_path, *command)


def test_adapt_image_folders_and_predict(folders, capsys):
    out = folders / "run"
    more = ("--size", 16, "--network-option", "widths=(8,16)", "--sampler", "vardass", "--lr", 0.01)
    shown = done(capsys, *adapt(folders / "day", folders / "night", out, *more))
    assert "conv" in shown
    rows = {row["sample"]: (row["class"], row["confidence"]) for row in table(out / "predictions.csv")}
    assert len(rows) == 24
    assert np.mean([name.split("/")[0] == predicted for name, (predicted, _) in rows.items()]) > 0.8
    text = run(capsys, "predict", out, folders / "night")[1]
    again = {row["sample"]: (row["class"], row["confidence"]) for row in csv.DictReader(text.splitlines())}
    assert again == rows


def test_train_on_watch_and_list_tasks(tmp_path, capsys):
    listed = run(capsys, "tasks", "--dataset", "watch")[1].split()
    assert "left-A->right-B" in listed
    assert len(listed) == 12
    assert "office-home" in run(capsys, "tasks")[1]
    command = ("train", "--dataset", "watch", "--task", "left-A->right-B", "--sampler", "uniform", "--steps", 20)
    shown = done(capsys, *command, "--algorithm", "coral", "--out", tmp_path / "run")
    assert "samples that were not trained on (labels read only now" in shown
    assert len(table(tmp_path / "run/predictions.csv")) == 489  # 40 % of the target
    oracle = done(capsys, *command, "--selection", "oracle", "--out", tmp_path / "oracle")
    assert "BY TARGET LABELS" in oracle


@contextmanager
def stopping_bar():
    def progress(share, message):
        if share >= 0.5:
            raise KeyboardInterrupt

    yield progress


def test_resumed_run_equals_an_uninterrupted_one(files, capsys, monkeypatch):
    whole, halves = files / "whole", files / "halves"
    done(capsys, *adapt(files / "clinic.npz", files / "home.npz", whole))
    command = adapt(files / "clinic.npz", files / "home.npz", halves)
    with monkeypatch.context() as patch:
        patch.setattr(adapt_module, "progress_bar", stopping_bar)
        code, _, err = run(capsys, *command)
    assert code == 130
    assert "stopped after step 22 of 30; all is saved in" in err  # of 30 and as many of the source-only model
    assert not (halves / "predictions.csv").exists()
    assert "--resume" in refused(capsys, files, *command)
    other = adapt(files / "clinic.npz", files / "bare" / "home.npz", halves, "--resume")
    assert "same data" in refused(capsys, files, *other)
    done(capsys, *command, "--resume")
    for name in ("predictions.csv", "model.safetensors"):
        assert (halves / name).read_bytes() == (whole / name).read_bytes()
    code, _, err = run(capsys, *command, "--resume")
    assert (code, err) == (0, f"nothing left to do: the run in {halves} has done all of its 30 steps\n")
    assert (halves / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize("algorithm", ["mmd", "coral"])
def test_a_run_is_resumed_with_more_steps(files, capsys, algorithm):
    data, fixed = (files / "clinic.npz", files / "home.npz"), ("--algorithm", algorithm, "--seed", 3)
    done(capsys, *adapt(*data, files / "run", *fixed, "--steps", 40))
    done(capsys, *adapt(*data, files / "run", *fixed, "--steps", 80, "--resume"))
    # when the penalty rises is what suits the 40 steps that the run was begun with
    begun = json.loads((files / "run/config.json").read_text())
    assert (begun["algorithm_options"]["ramp"], begun["class_options"]["start"]) == (5, 15)
    options = ("--option", "delay=5", "--option", "ramp=5", "--class-option", "early=5", "--class-option", "start=15")
    done(capsys, *adapt(*data, files / "whole", *fixed, "--steps", 80, *options))
    assert (files / "run/predictions.csv").read_bytes() == (files / "whole/predictions.csv").read_bytes()
    code, _, err = run(capsys, *adapt(*data, files / "run", *fixed, "--steps", 90, "--resume", "--option", "ramp=9"))
    assert code == 2
    assert "resume with the same settings" in err


def test_ctrl_c_saves_and_says_how_to_go_on(files):
    command = adapt(files / "clinic.npz", files / "home.npz", files / "run", "--sampler", "uniform")
    arguments = [sys.executable, "-m", "vardass", *map(str, command), "--steps", "1000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
    metrics = files / "run/metrics.jsonl"
    try:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "--resume continues" in err
    assert "Traceback" not in err
    assert (files / "run/checkpoint.pt").exists()


def test_strata_may_have_another_kernel_than_the_loss(files, capsys):
    command = adapt(files / "clinic.npz", files / "home.npz", files / "run", "--sampler", "stratified")
    assert "kernel must be" in refused(capsys, files, *command, "--sampler-option", "kernel=3")
    done(capsys, *command, "--sampler-option", "kernel=linear")


def test_names_that_are_unknown_get_the_nearest(files, capsys):
    clinic, home, out = files / "clinic.npz", files / "home.npz", files / "run"
    assert "'coral'" in refused(capsys, files, *adapt(clinic, home, out, "--algorithm", "corral"))
    assert "'balanced'" in refused(capsys, files, *adapt(clinic, home, out, "--sampler", "balansed"))
    assert "'penalty'" in refused(capsys, files, *adapt(clinic, home, out, "--option", "penalti=2"))
    assert "'embeddings'" in refused(capsys, files, *adapt(clinic, home, out, "--kind", "embedings"))
    assert "'conv'" in refused(capsys, files, *adapt(clinic, home, out, "--network", "convv"))
    assert "'hidden': 3" in refused(capsys, files, *adapt(clinic, home, out, "--network-option", "hidden=3"))
    assert "--root is not" in refused(capsys, files, "train", "--dataset", "office-home", "--task", "A-C", "--out", out)
    assert "key=value" in refused(capsys, files, *adapt(clinic, home, out, "--option", "penalty"))
    assert "differ" in refused(capsys, files, *adapt(clinic, home, out, "--option", "penalty=2", "--penalty", 1))
    assert "vardass train" in refused(capsys, files, *adapt(clinic, home, out, "--selection", "oracle"))
    assert "watch" in refused(capsys, files, "tasks", "--dataset", "watsch")
    assert "--root" in refused(capsys, files, "tasks", "--dataset", "images")
    unknown_task = ("train", "--dataset", "watch", "--task", "left-A->right-C", "--out", out)
    assert "right-B" in refused(capsys, files, *unknown_task)


def test_options_of_other_data_are_refused(files, folders, capsys):
    tables = files / "clinic.npz", files / "home.npz", files / "run"
    pictures = folders / "day", folders / "night", files / "run"
    for data, option, said in (
        (tables, ("--size", 16), "--size is for images, the data are embeddings"),
        (tables, ("--channels", 1), "--channels is for images"),
        (tables, ("--cache",), "--cache is for images and sounds"),
        (pictures, ("--key", "x"), "--key is for embeddings, the data are images"),
        (pictures, ("--standardize",), "--standardise is for embeddings"),
    ):
        assert said in refused(capsys, files, *adapt(*data, *option))
    watch = ("train", "--dataset", "watch", "--task", "left-A->right-B", "--root", files, "--out", files / "run")
    assert "watch is not read from a folder" in refused(capsys, files, *watch)


def test_hidden_class_folders_are_told(folders, capsys):
    (folders / "day/red").rename(folders / "day/.red")
    (folders / "day/.notes").mkdir()
    (folders / "day/green").mkdir()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folders / "day/green/0.png")
    with pytest.warns(VardassWarning, match=r"day has hidden folders with image files, '\.red', which are not read"):
        task = task_from_paths([folders / "day"], folders / "night/blue", "image")
    assert task.class_names == ("blue", "green")


def test_data_that_do_not_fit(files, folders, capsys):
    clinic, home, out = files / "clinic.npz", files / "home.npz", files / "run"
    assert "labels" in refused(capsys, files, *adapt(files / "bare" / "home.npz", clinic, out))
    x, y = clusters(3, shift=0.0)
    np.savez(files / "zoo.npz", x=x, labels=np.array(["cat", "dog", "yak"])[y])
    code, _, err = run(capsys, *adapt(clinic, files / "zoo.npz", files / "open"))  # labels of a target only score
    assert code == 0
    assert "yak" in err
    np.savez(files / "pets.npz", x=x, labels=np.array(["dog"] * len(x)))
    said = refused(capsys, files, *adapt(files / "pets.npz", files / "bare" / "home.npz", out))
    assert "all samples of the source 'pets' are of 1 class, 'dog'" in said
    np.savez(files / "wide.npz", x=np.hstack([x, x]))
    assert "width" in refused(capsys, files, *adapt(clinic, files / "wide.npz", out))
    assert "images" in refused(capsys, files, *adapt(folders / "day", home, out))
    assert "nothing at" in refused(capsys, files, *adapt(files / "absent", home, out))
    assert "class folders" in refused(capsys, files, *adapt(folders / "day/red", folders / "night", out))
    (files / "night/green").mkdir()
    (files / "night/green/1.png").write_bytes((files / "night/red/1.png").read_bytes())
    code, _, err = run(capsys, *adapt(folders / "day", folders / "night", files / "open2"))
    assert code == 0
    assert "'green'" in err
    assert "inside the data" in refused(capsys, files, *adapt(folders / "day", folders / "day/red", files / "day/run"))
    absent = f"cuda:{torch.cuda.device_count()}"
    assert "torch sees" in refused(capsys, files, *adapt(clinic, home, out, "--device", absent))
    (files / "loop").symlink_to(files / "loop")
    assert "symbolic links form a loop; choose another" in refused(capsys, files, *adapt(clinic, home, files / "loop"))
    (files / "notes").mkdir()
    (files / "notes/mine.txt").write_text("keep")
    assert "mine.txt" in refused(capsys, files, *adapt(clinic, home, files / "notes"))


def test_predict_refuses_other_data(files, folders, capsys):
    done(capsys, *adapt(files / "clinic.npz", files / "home.npz", files / "run", "--sampler", "uniform"))
    assert "no model" in refused(capsys, files, "predict", files / "bare", files / "home.npz")
    assert "trained on embeddings" in refused(capsys, files, "predict", files / "run", folders / "day")
    np.savez(files / "wide.npz", x=np.ones((5, 9), np.float32))
    assert "9 features" in refused(capsys, files, "predict", files / "run", files / "wide.npz")
    (files / "rows.csv").write_text("a,b,c,d\n1,2,3,4\n")
    same = ("predict", files / "run", files / "rows.csv", "--out", files / "rows.csv")
    assert "the input" in refused(capsys, files, *same)
    for name in ("home.npz", "other.npz", "table"):
        if name != "home.npz":
            (files / name).write_bytes(b"mine")
        other = ("predict", files / "run", files / "home.npz", "--out", files / name)
        assert "give it a name that ends with .csv" in refused(capsys, files, *other)


def test_one_run_at_a_time_writes_to_a_folder(files, capsys):
    command = adapt(files / "clinic.npz", files / "home.npz", files / "run", "--sampler", "uniform")
    (files / "run").mkdir()
    with locked(files / "run"):
        code, _, err = run(capsys, *command)
        assert code == 2
        assert f"another run is using {files / 'run'}: process {os.getpid()} on" in err
        assert {path.name for path in (files / "run").iterdir()} == {"lock", "holder.json"}
    looked = []
    with pytest.MonkeyPatch.context() as patch:
        # still locked when the last files are written
        patch.setattr(adapt_module, "_show", lambda *_: looked.append(is_locked(files / "run")))
        assert run(capsys, *command)[0] == 0
    assert looked == [True]
    assert not is_locked(files / "run")


def test_temporary_files_of_a_killed_run_are_removed(files, capsys, monkeypatch):
    command = adapt(files / "clinic.npz", files / "home.npz", files / "run", "--sampler", "uniform")
    (files / "run").mkdir()
    (files / "run/.checkpoint.pt.k1ll3d_x.vardass-tmp").write_bytes(
        b"half"
    )  # killed while its first checkpoint was written
    monkeypatch.setattr(adapt_module, "progress_bar", stopping_bar)
    assert run(capsys, *command)[0] == 130
    assert not list((files / "run").glob(".*-tmp"))
    (files / "run/.model.safetensors.k1ll3d_x.vardass-tmp").write_bytes(b"half")
    monkeypatch.undo()
    done(capsys, *command, "--resume")
    assert not list((files / "run").glob(".*-tmp"))


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_image_is_named_in_one_line(folders, capsys, workers):
    damaged = folders / "day/red/3.png"
    damaged.write_bytes(b"no image")
    command = adapt(folders / "day", folders / "night", folders / "run", "--size", 16, "--workers", workers)
    code, _, err = run(capsys, *command)
    assert code == 2
    assert str(damaged) in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert {path.name for path in (folders / "run").iterdir()} <= {*adapt_module._LEFT_BY_A_RUN}
    if workers == 0:
        Image.fromarray(np.full((16, 16, 3), (240, 0, 0), np.uint8)).save(damaged)
        assert run(capsys, *command, "--steps", 2)[0] == 0  # a run without checkpoint is in nobody's way


def test_kind_of_data_is_seen(files, folders):
    assert find_kind([files / "clinic.npz", files / "home.npz"], None) == "features"
    assert find_kind([folders / "day"], None) == "image"
    (files / "sounds").mkdir()
    (files / "sounds/a.wav").write_bytes(b"")
    assert find_kind([files / "sounds"], None) == "audio"
    (files / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        find_kind([files / "empty"], None)
    assert str(files / "empty") in str(caught.value)
    assert not task_from_paths([files / "clinic.npz"], files / "bare/home.npz", "features").target.has_labels


def test_adapt_package_has_the_trainer_and_the_papers_rivals_on_request():
    code = (
        "import sys, vardass.adapt as a; assert 'vardass.adapt.trainer' not in sys.modules; "
        "assert all(getattr(a, name) is not None for name in a.__all__); assert 'Trainer' in dir(a); "
        "assert not [name for name in sys.modules if name.startswith(('vardass.paper', 'vardass.lab'))]; "
        "assert a.algorithm_options('dann') and 'vardass.paper.adversarial' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with pytest.raises(AttributeError, match="Trainr"):
        vardass.adapt.Trainr  # noqa: B018


class Stop(Exception):
    """Raised in place of training."""


def test_data_sets_of_the_paper_have_its_network_unless_told_otherwise(folders, monkeypatch):
    """A tiny Office-Home: what would be trained, without a download."""
    styles = {"Art": "day", "Clipart": "night", "Product": "day", "Real World": "night"}
    for style, domain in styles.items():
        for label in range(65):
            place = folders / "office" / style / f"class{label:02}"
            place.mkdir(parents=True)
            for number in range(5):
                (place / f"{number}.png").symlink_to(folders / domain / "red" / f"{number}.png")
    monkeypatch.setattr(adapt_module, "preprocessing_of", lambda *_: None)
    seen = []

    def stop(config, *_, **__):
        seen.append(config)
        raise Stop

    monkeypatch.setattr(adapt_module, "_run", stop)
    command = (
        "train",
        "--dataset",
        "office-home",
        "--task",
        "A-C",
        "--root",
        folders / "office",
        "--out",
        folders / "x",
    )
    for more in ((), ("--network", "conv", "--augment", "none")):
        with pytest.raises(Stop):
            main([str(part) for part in (*command, *more)])
    assert (seen[0].network, seen[0].augment, seen[0].lr, seen[0].steps) == ("resnet18", "source", 5e-5, 3000)
    assert (seen[1].network, seen[1].augment, seen[1].lr) == ("conv", "none", 1e-3)
    networks = {name: DATASETS[name].settings.get("network") for name in DATASETS}
    assert {name for name, network in networks.items() if network == "resnet18"} == {
        "camelyon17",
        "spawrious",
        "office-home",
    }


def test_small_data_on_a_cpu_get_few_steps_and_no_more_pixels_than_they_have(tmp_path):
    def task(n, kind):
        x = torch.zeros(n, 3, 32, 32) if kind == "image" else torch.zeros(n, 4)
        domains = [Domain(name, x, torch.arange(n) % 2, ("a", "b"), kind=kind) for name in ("s", "t")]
        return Task("s->t", (domains[0],), domains[1])

    def steps(n, kind="image", **settings):
        given = {"network": "conv", "device": "cpu", **settings}
        return adapt_module.recommended_for(task(n, kind), given, tmp_path, resume=False).steps

    assert (steps(300), steps(640), steps(64_000)) == (600, 1200, 3000)
    assert steps(300, "features", network="mlp") == 3000
    assert steps(300, steps=7) == 7
    frozen = {"network": "owner/name", "network_options": {"freeze_backbone": True}, "cache_embeddings": "auto"}
    assert steps(300, **frozen) == 3000
    made = adapt_module.recommended_for(task(300, "image"), frozen, tmp_path, resume=False)
    assert made.network_options == {"bottleneck": 256, "freeze_backbone": True}  # else nothing could be adapted
    (tmp_path / "config.json").write_text('{"steps": 50}')
    resumed = adapt_module.recommended_for(task(300, "image"), {"device": "cpu"}, tmp_path, resume=True)
    assert (resumed.steps, resumed.algorithm_options["ramp"]) == (50, 6)
    for side, wanted in ((16, 32), (40, 40), (300, 64)):
        folder = tmp_path / str(side)
        folder.mkdir()
        Image.new("RGB", (side, side + 9)).save(folder / "a.png")
        assert small_size([folder]) == wanted


def test_a_model_that_predicts_one_class_is_called_so(files, capsys):
    x, y = clusters(1, shift=0.5)
    np.savez(files / "far.npz", x=x + np.array([40.0, 0, 0, 0], dtype=np.float32), labels=CLASSES[y])
    out = files / "one"
    command = adapt(files / "clinic.npz", files / "far.npz", out, "--algorithm", "erm", "--no-standardise")
    code = main([str(part) for part in command])
    said = capsys.readouterr()
    assert code == 0
    assert "warning: 100 % of the predictions are 'cat', but 35 % of the source's labels" in said.err
    assert "most often cat, 100.0 %" in " ".join(said.out.split())
    assert "do not trust the model" in (out / "report.md").read_text()
    # erm has no penalty, and a table no pretrained network
    assert "--penalty" not in said.err
    assert "pretrained" not in said.err
    assert "--algorithm that adapts" in said.err


@pytest.mark.parametrize(("seconds", "told"), [(100.0, True), (5.0, False)])
def test_time_to_go_is_told_before_the_first_pass_over_files(folders, capsys, monkeypatch, seconds, told):
    notes = []
    monkeypatch.setattr("vardass.cli.adapt.seconds_needed", lambda config, splits: seconds)
    monkeypatch.setattr("vardass.cli.adapt.note", notes.append)
    begin, seen = StrataUpdater.begin, []

    def looked(updater, progress=None):
        seen.append(list(notes))
        begin(updater, progress)

    monkeypatch.setattr("vardass.adapt.strata_updater.StrataUpdater.begin", looked)
    command = adapt(folders / "day", folders / "night", folders / "timed", "--steps", "2")
    assert main([str(part) for part in command]) == 0
    assert ["about" in note for note in seen[0]] == ([True] if told else [])


def test_classes_that_differ_in_capitals_or_decimals_with_commas_are_named(tmp_path, capsys):
    for name, cells, label in (("a", "0.5", "cat"), ("b", "0.5", "Cat"), ("c", "0,5", "cat")):
        rows = "".join(f"{cells};{i};{label if i % 2 else 'dog'}\n" for i in range(40))
        (tmp_path / f"{name}.csv").write_text("x;y;labels\n" + rows)
    for source, target, part in (("a", "b", "'Cat' and 'cat' differ in capitals"), ("c", "b", "decimals with a point")):
        assert main(list(map(str, adapt(tmp_path / f"{source}.csv", tmp_path / f"{target}.csv", tmp_path / "o")))) == 2
        message = capsys.readouterr().err
        assert part in message
        assert len(message) <= 400


def test_the_summary_says_how_many_features_were_read(tmp_path, capsys):
    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        rows = "".join(f"{x:.3f},{y:.3f},{'ab'[i % 2]}\n" for i, (x, y) in enumerate(draw.normal(size=(60, 2))))
        (tmp_path / f"{name}.csv").write_text("height,weight,kind\n" + rows)
    command = adapt(tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "run", "--labels", "kind", "--steps", "2")
    assert main(list(map(str, command))) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "features 2, from 'height' to 'weight'" in shown
    assert "lower = more confident" in shown


@pytest.mark.parametrize("kind", ["embeddings", "images"])
def test_small_networks_run_on_one_thread(kind, files, folders, tmp_path, monkeypatch):
    """Threads of small operations wait for one another on a machine that others use too."""
    threads = []
    whole = adapt_module.Trainer.run

    def run_and_look(self, **options):
        threads.append(torch.get_num_threads())
        return whole(self, **options)

    monkeypatch.setattr(adapt_module.Trainer, "run", run_and_look)
    torch.set_num_threads(2)
    if kind == "embeddings":
        command = adapt(files / "clinic.npz", files / "home.npz", tmp_path / "run", "--steps", 2)
    else:
        command = adapt(folders / "day", folders / "night", tmp_path / "run", "--steps", 2, "--size", 16)
    assert main([str(part) for part in command]) == 0
    assert set(threads) == {1 if kind == "embeddings" else 2}
    assert torch.get_num_threads() == 2


def test_predictions_replace_no_file_of_another_kind(files, capsys):
    out = files / "run"
    assert main([*map(str, adapt(files / "clinic.npz", files / "home.npz", out))]) == 0
    own = (out / "predictions.csv").read_text()
    (files / "notes.csv").write_text("mine\n")
    for name, message in (
        ("run/predictions.csv", "not as vardass predict wrote it"),
        ("notes.csv", "not as vardass predict wrote it"),
    ):
        assert main(["predict", str(out), str(files / "clinic.npz"), "--out", str(files / name)]) == 2
        assert message in capsys.readouterr().err
    assert (out / "predictions.csv").read_text() == own
    assert (files / "notes.csv").read_text() == "mine\n"
    for _ in range(2):  # its own may be replaced
        assert main(["predict", str(out), str(files / "clinic.npz"), "--out", str(files / "new.csv")]) == 0


def test_one_file_for_both_domains_and_batches_larger_than_a_domain_are_named(files, capsys):
    assert main([*map(str, adapt(files / "home.npz", files / "home.npz", files / "run"))]) == 2
    assert "home.npz is both source and target" in capsys.readouterr().err
    np.savez(files / "few.npz", x=np.eye(6, 4, dtype=np.float32))
    few = adapt(files / "clinic.npz", files / "few.npz", files / "run", "--batch-size", "9")
    assert main([*map(str, few)]) == 2
    said = "batches of 9 are larger than the target, which has 5 samples to train on (without those held out)"
    assert said in capsys.readouterr().err
