import subprocess
import sys

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from conftest import refused
from vardass.data import (
    DATASETS,
    FrontEnd,
    folder_domain,
    folder_task,
    load_task,
    split_task,
    task_names,
)
from vardass.data.registry import find_dataset
from vardass.errors import InputError, VardassWarning
from vardass.paper import datasets
from vardass.paper.datasets import BACKGROUNDS, environments


def picture(path, value=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(path)


def sound(path, n=400):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(n).normal(0, 0.1, n), 4000)


FRONT = FrontEnd(rate=4000, seconds=0.1, fft_size=128, hop=64, bands=8)


def test_importing_the_data_is_light():
    heavy = "PIL kornia soundfile pyarrow sklearn scipy pandas"
    code = f"import sys, vardass.data; print([m for m in '{heavy}'.split() if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ---- names


def test_registry_has_every_data_set_with_its_tasks():
    assert list(DATASETS) == [
        *("watch", "images", "audio", "embeddings", "camelyon17", "humpbacks", "spawrious", "office-home")
    ]
    counts = {name: len(task_names(name)) for name in DATASETS}
    assert counts["watch"] == counts["office-home"] == 12
    assert (counts["spawrious"], counts["humpbacks"], counts["camelyon17"]) == (6, 4, 6)
    assert {"C-A", "A-C", "R-P", "P-R"} < set(task_names("office-home"))
    assert task_names("Office_Home") == task_names("office-home")


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        (("ofice-home", "A-C"), {}, ("'ofice-home'", "'office-home'")),
        (("office-home", "A-D", "."), {}, ("office-home", "'A-D'", "'A-R'")),
        (("spawrious", "O2O-eazy", "."), {}, ("'O2O-eazy'", "'O2O-easy'")),
        (("watch", "left-A"), {}, ("watch", "'left-A'", "'left-B->left-A'")),
        (("watch", "left-A->right-C"), {}, ("watch", "'right-C'", "'right-B'")),
        (("watch", "left-A->left-A"), {}, ("watch", "'left-A->left-A'", "twice")),
        (("watch", "left-A->left-B"), {"standardized": False}, ("'standardized'", "'standardised'")),
        (("camelyon17", "hospital-7", "."), {}, ("camelyon17", "'hospital-7'", "'hospital-4'")),
    ],
)
def test_unknown_names_give_the_nearest(arguments, options, named):
    with refused(*named):
        load_task(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("watch", None), ("task", None, "task_names('watch')")),
        (("office-home", 3, "."), ("task", 3, "task_names('office-home')")),
        ((None, "a->b"), ("data set", None, "watch")),
        (("office-home", "A-C", 5), ("root", 5, "path")),
        (("audio", "a->b", 5), ("root", 5, "path")),
    ],
)
def test_what_is_no_name_or_path_is_refused(arguments, named):
    with refused(*named):
        load_task(*arguments)


@pytest.mark.parametrize(
    ("dataset", "task", "layout", "origin"),
    [
        ("camelyon17", "hospital-2", "patches/patient_004_node_4", "wilds.stanford.edu"),
        ("spawrious", "M2M-hard", "spawrious224/0/<background>/<class>", "aengusl/spawrious"),
        ("office-home", "A-C", "Real World/<class>", "officeHomeDataset"),
        ("humpbacks", "1", "humpbacks/<program>/<class>", "not published"),
    ],
)
def test_a_missing_data_set_says_what_is_expected_and_where_it_is(tmp_path, dataset, task, layout, origin):
    for root in (None, tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError) as error:
            load_task(dataset, task, root)
        said = str(error.value)  # of a long one the middle is left out
        assert layout in said or " ... " in said
        assert origin in said
        assert "root is None" in str(error.value) or str(tmp_path) in str(error.value)


# ---- a user's own data set, by its name

MODULE = """
import torch
from torch.utils.data import TensorDataset
from vardass.data import DatasetInfo, Domain, Task

def load(task, root=None, *, shift=1.0):
    names = task.split("->")
    pairs = [TensorDataset(torch.zeros(6, 2) + i * shift, torch.arange(6) % 2) for i in range(2)]
    source, target = (Domain.from_dataset(name, pair, ("no", "yes")) for name, pair in zip(names, pairs))
    return Task(task, (source,), target)

def anything(task, root, **options):
    return options

MINE = DatasetInfo("mine", "two clouds", "", "made here", load, lambda root: ("a->b", "b->a"))
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "clouds_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "clouds_of_mine"
    sys.modules.pop("clouds_of_mine", None)


def test_a_users_own_data_set_is_loaded_by_its_name(own_module):
    for name in ("load", "MINE"):
        task = load_task(f"{own_module}:{name}", "a->b", shift=3)
        assert (task.name, task.sources[0].name, task.target.name) == ("a->b", "a", "b")
        assert float(task.target.dataset[0][0]) == 3.0
        with refused(f"{own_module}:{name}", "shfit", "shift"):
            load_task(f"{own_module}:{name}", "a->b", shfit=3)
    assert task_names(f"{own_module}:MINE") == ("a->b", "b->a")
    assert task_names(f"{own_module}:load") == ()
    assert find_dataset(f"{own_module}:MINE").name == f"{own_module}:MINE"  # the name that loads it


def test_what_is_no_data_set_is_refused(own_module):
    with refused("clouds_of_mine:anything", "dict", "x", "Task"):
        load_task(f"{own_module}:anything", "x", some=1, options=2)
    with refused("clouds_of_mine:__name__", "DatasetInfo"):
        load_task(f"{own_module}:__name__", "x")
    with refused("subprocess:Popen", "DatasetInfo"):
        load_task("subprocess:Popen", "x")
    with refused("nowhere:load", "nowhere", "PYTHONPATH"):
        task_names("nowhere:load")


# ---- embedded


def test_watch_tasks():
    task = load_task("watch", "left-A->right-B")
    assert [source.name for source in task.sources] == ["left-A"]
    assert task.target.name == "right-B"
    x = task.sources[0].dataset.tensor
    assert float(x.mean(0).abs().max()) < 0.02  # scaled by the source, then cut
    assert float(task.target.dataset.tensor.mean(0).abs().max()) > 0.1
    raw = load_task("watch", "left-A->right-B", standardised=False)
    assert float(raw.sources[0].dataset.tensor.mean(0).abs().max()) > 0.1
    cut, plain = (load_task("watch", "left-B->right-A", clip=clip).target.dataset.tensor for clip in (True, False))
    assert float(plain.abs().max()) > 30
    assert torch.equal(cut, plain.clamp(-8.0, 8.0))
    several = load_task("watch", "left-A+left-B->right-A")
    parts = split_task(several, seed=0)
    assert parts.source_train.domain_ids.unique().tolist() == [0, 1]
    assert len(parts.source_train) + len(parts.source_val) == sum(len(source) for source in several.sources)


# ---- camelyon17


@pytest.fixture(scope="module")
def camelyon(tmp_path_factory):
    root = tmp_path_factory.mktemp("wilds")
    folder = root / "camelyon17_v1.0"
    rows = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for hospital in range(5):
        for i in range(12):
            patient, node, x, y = f"{hospital * 20 + 4:03d}", hospital % 2, 32 * i, 64 * i
            rows.append(f"{len(rows) - 1},{patient},{node},{x},{y},{i % 2},{hospital * 10},{hospital},0")
            case = f"patient_{patient}_node_{node}"
            picture(folder / "patches" / case / f"patch_{case}_x_{x}_y_{y}.png", value=hospital * 20 + i)
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")
    return root


def values(domain):
    return [round(float(domain.dataset[i][0, 0, 0]) * 255) for i in range(len(domain))]


def test_camelyon_hospitals_and_labels(camelyon):
    task = load_task("camelyon17", "hospital-2", camelyon, per_hospital=None, size=4)
    assert [source.name for source in task.sources] == [f"hospital-{i}" for i in (0, 1, 3, 4)]
    assert task.target.name == "hospital-2"
    assert task.class_names == ("normal", "tumor")
    assert values(task.target) == list(range(40, 52))
    assert task.target.labels.tolist() == [0, 1] * 6
    wilds = load_task("camelyon17", "wilds", camelyon / "camelyon17_v1.0", per_hospital=None, size=4)
    assert [source.name for source in wilds.sources] == ["hospital-0", "hospital-3", "hospital-4"]


def test_camelyon_subset_rule(camelyon):
    def kept(task="hospital-2", **options):
        loaded = load_task("camelyon17", task, camelyon, per_hospital=5, size=4, **options)
        return {domain.name: values(domain) for domain in (*loaded.sources, loaded.target)}

    first = kept()
    assert {name: len(rows) for name, rows in first.items()} == dict.fromkeys(first, 5)
    for name, rows in first.items():
        hospital = int(name[-1])
        assert rows == sorted(set(rows))
        assert set(rows) <= set(range(hospital * 20, hospital * 20 + 12))
    assert kept() == first
    assert kept("hospital-0")["hospital-2"] == first["hospital-2"]  # the subset does not depend on the task
    offsets = {tuple(row - int(name[-1]) * 20 for row in rows) for name, rows in first.items()}
    assert len(offsets) > 1  # hospitals are drawn independently


def test_camelyon_bad_files(camelyon, tmp_path):
    with refused("per_hospital", "hospital 0", 12, 2800, None):
        load_task("camelyon17", "hospital-2", camelyon)
    (tmp_path / "metadata.csv").write_text("patient,node\n1,2\n")
    with refused(tmp_path / "metadata.csv", "x_coord"):
        load_task("camelyon17", "hospital-2", tmp_path)
    text = (camelyon / "camelyon17_v1.0" / "metadata.csv").read_text()
    (tmp_path / "metadata.csv").write_text(text)
    with refused("metadata.csv", "patch_patient_004_node_0_x_0_y_0.png"):
        load_task("camelyon17", "hospital-2", tmp_path, per_hospital=None)
    (tmp_path / "metadata.csv").write_text(text.replace("004,0,32", "004,0,??"))
    with refused("line 3", tmp_path / "metadata.csv", "??"):
        load_task("camelyon17", "hospital-2", tmp_path)


# ---- spawrious

DOGS = ("bulldog", "dachshund", "labrador", "corgi")


@pytest.mark.parametrize(
    ("task", "train", "test", "filler"),
    [
        ("O2O-easy", "desert jungle dirt snow", "dirt snow desert jungle", "beach"),
        ("O2O-medium", "mountain beach dirt jungle", "jungle dirt beach snow", "desert"),
        ("O2O-hard", "jungle mountain snow desert", "mountain snow desert jungle", "beach"),
    ],
)
def test_one_to_one_backgrounds(task, train, test, filler):
    parts = environments(task)
    for i, (own, other) in enumerate(((3072, 96), (2756, 412))):
        rows = parts[f"train-{i + 1}"]
        assert {(dog, place): n for _, place, dog, n in rows} == {
            **{(dog, place): own for dog, place in zip(DOGS, train.split())},
            **{(dog, filler): other for dog in DOGS},
        }
        assert {group for group, *_ in rows} == {str(i)}
    wanted = {(group, place, dog, None) for dog, place in zip(DOGS, test.split()) for group in "01"}
    assert set(parts["test"]) == wanted
    assert len(parts["test"]) == 8


@pytest.mark.parametrize(
    ("task", "train", "test"),
    [
        ("M2M-easy", "desert mountain dirt jungle", "dirt jungle mountain desert"),
        ("M2M-medium", "beach snow mountain desert", "desert mountain beach snow"),
        ("M2M-hard", "dirt jungle snow beach", "snow beach dirt jungle"),
    ],
)
def test_many_to_many_backgrounds(task, train, test):
    parts = environments(task)
    a, b, c, d = train.split()
    assert [(dog, place, n) for _, place, dog, n in parts["train-1"]] == list(zip(DOGS, (a, b, c, d), [3168] * 4))
    assert [(dog, place, n) for _, place, dog, n in parts["train-2"]] == list(zip(DOGS, (b, a, d, c), [3168] * 4))
    e, f, g, h = test.split()
    assert {(dog, place) for _, place, dog, _ in parts["test"]} == {
        (dog, place) for dog, pair in zip(DOGS, ((e, f), (e, f), (g, h), (g, h))) for place in pair
    }
    assert {group for rows in parts.values() for group, *_ in rows} == {"0"}


@pytest.mark.parametrize("task", BACKGROUNDS)
def test_the_presets_numbers_are_the_papers_18664(task):
    parts = environments(task, 1167)
    training = sum(count for name in ("train-1", "train-2") for *_, count in parts[name])
    assert training + 1166 * len(parts["test"]) == 18_664


def test_spawrious_files(tmp_path):
    for group in "01":
        for place in ("beach", "desert", "dirt", "jungle", "mountain", "snow"):
            for dog in DOGS:
                for i in range(10):
                    picture(tmp_path / "spawrious224" / group / place / dog / f"{place}_{i:02d}.png")
    task = load_task("spawrious", "o2o_easy", tmp_path, per_class=10, size=4)
    assert task.name == "O2O-easy"
    assert task.class_names == ("bulldog", "corgi", "dachshund", "labrador")
    assert [source.name for source in task.sources] == ["train-1", "train-2"]
    assert [len(source) for source in task.sources] == [40, 40]
    assert len(task.target) == 80
    assert not any(domain.dataset.crops for domain in (*task.sources, task.target))
    for i, own in ((0, 9), (1, 8)):
        paths = [path for path in task.sources[i].dataset.paths if "/corgi/" in path]
        assert sum("/snow/" in path for path in paths) == own
        assert sum("/beach/" in path for path in paths) == 10 - own
        assert all(f"/spawrious224/{i}/" in path for path in paths)
        dogs = [path.split("/")[-2] for path in task.sources[i].dataset.paths]
        assert [task.class_names[label] for label in task.sources[i].labels.tolist()] == dogs
    many = load_task("spawrious", "M2M-hard", tmp_path / "spawrious224", per_class=10, test_per_folder=3, size=4)
    assert [len(domain) for domain in (*many.sources, many.target)] == [40, 40, 24]
    with refused("8 folders", "desert/bulldog", "10 of 19"):
        load_task("spawrious", "O2O-easy", tmp_path, per_class=20)
    (tmp_path / "spawrious224/0/snow/corgi/snow_03.png").unlink()
    (tmp_path / "spawrious224/0/desert/bulldog/desert_00.png").unlink()
    with pytest.raises(InputError) as error:  # one message for all
        load_task("spawrious", "O2O-easy", tmp_path, per_class=11)
    assert "2 folders" in str(error.value)
    assert "0/desert/bulldog has 9 of 10" in str(error.value)
    load_task("spawrious", "O2O-easy", tmp_path, per_class=10, size=4)


# ---- office-home, humpbacks, folders


def test_office_home(tmp_path, monkeypatch):
    classes = ["Alarm_Clock", "Bike", "Table"]
    for place in ("Art", "Clipart", "Product", "Real World"):
        for i, name in enumerate(classes):
            for j in range(i + 1):
                picture(tmp_path / "OfficeHomeDataset_10072016" / place / name / f"{j:05d}.jpg")
    (tmp_path / "OfficeHomeDataset_10072016" / "Art" / ".DS_Store").write_bytes(b"")
    with refused("Art", "3 classes", 65):
        load_task("office-home", "A-R", tmp_path)
    monkeypatch.setattr(datasets, "_OFFICE_HOME_CLASSES", 3)
    task = load_task("office-home", "A-R", tmp_path, size=4)
    assert (task.sources[0].name, task.target.name) == ("Art", "Real World")
    assert task.class_names == tuple(classes)
    assert task.target.labels.tolist() == [0, 1, 1, 2, 2, 2]
    assert load_task("office-home", "a-c", tmp_path).name == "A-C"


def test_humpbacks(tmp_path):
    for program in ("north", "east", "south", "west"):
        for name in ("background", "humpback"):
            for i in range(3):
                sound(tmp_path / program / name / f"{i}.wav")
    assert task_names("humpbacks", tmp_path) == ("east", "north", "south", "west")
    task = load_task("humpbacks", "south", tmp_path, front_end=FRONT)
    assert [source.name for source in task.sources] == ["east", "north", "west"]
    assert task.class_names == ("background", "humpback")
    assert task.target.kind == "audio"
    assert task.target.dataset[0].shape == FRONT.shape
    by_name = load_task("humpbacks", "1", tmp_path, front_end={"rate": 2000, "seconds": 0.1, "bands": 6, "low": 0})
    assert by_name.target.name == "east"
    assert by_name.target.dataset[0].shape[:2] == (1, 6)
    sound(tmp_path / "fifth" / "humpback" / "0.wav")
    with refused(tmp_path, "5 program", "fifth", 4, "audio"):
        load_task("humpbacks", "1", tmp_path)


@pytest.fixture
def folders(tmp_path):
    for domain in ("photo", "art"):
        for name in ("cat", "dog"):
            for i in range(3):
                picture(tmp_path / domain / name / f"{i}.PNG")
    for i in range(4):
        picture(tmp_path / "field" / f"{i}.png")
    return tmp_path


def test_folders_with_a_flat_target(folders):
    task = folder_task(folders / "photo", folders / "field", size=4)
    assert task.name == "photo->field"
    assert task.class_names == ("cat", "dog")
    assert task.sources[0].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert task.target.labels is None
    assert len(task.target) == 4
    pair = load_task("images", "photo+art->field", folders, size=4)
    assert [source.name for source in pair.sources] == ["photo", "art"]
    assert "art->photo" in task_names("images", folders)
    assert load_task("images", "photo->art", folders, size=4).target.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert load_task("images", "photo->art", folders, size=4, target_labelled=False).target.labels is None


def test_targets_may_lack_classes_and_sources_complete_each_other(folders):
    picture(folders / "one" / "dog" / "0.png")
    picture(folders / "two" / "cat" / "0.png")
    assert folder_task(folders / "photo", folders / "one").target.labels.tolist() == [1]
    task = folder_task([folders / "one", folders / "two"], folders / "field")
    assert [source.labels.tolist() for source in task.sources] == [[1], [0]]
    assert task.class_names == ("cat", "dog")


def test_bad_folders(folders):
    picture(folders / "zoo" / "zebra" / "0.png")
    with pytest.warns(VardassWarning, match="zebra"):  # labels of a target only score
        assert folder_task(folders / "photo", folders / "zoo").target.labels is None
    (folders / "hollow" / "cat").mkdir(parents=True)
    with refused("hollow/cat", "0 image files"):
        folder_domain(folders / "hollow")
    (folders / "bare").mkdir()
    (folders / "bare" / "notes.txt").write_text("x")
    with refused("bare", "0 of 1", ".png"):
        folder_domain(folders / "bare")
    with refused("field", "4 image files", "0 class folders"):
        folder_task(folders / "field", folders / "photo")
    picture(folders / "photo" / "loose.png")
    with refused("photo", "1 image files", "loose.png", "2 class folders"):
        folder_domain(folders / "photo")
    for make in (lambda: folder_domain(folders / "gone"), lambda: folder_task(folders / "gone", folders / "art")):
        with refused("no folder", folders / "gone"):
            make()
    for make, named in (
        (lambda: folder_domain(None), ("root", None)),
        (lambda: folder_task(None, folders), ("source", None)),
        (lambda: task_names("images", 5), ("root", 5)),
    ):
        with refused("path", *named):
            make()
    with refused("video", "image", "audio", field="kind"):
        folder_domain(folders, kind="video")
    with refused("bare", "0 folders", "at least 2"):
        load_task("images", "a->b", folders / "bare")


def test_audio_folders(tmp_path):
    for name in ("call", "noise"):
        sound(tmp_path / "bay" / name / "0.wav")
    sound(tmp_path / "reef" / "x.flac")
    task = load_task("audio", "bay->reef", tmp_path, front_end=FRONT)
    assert task.target.dataset[0].shape == FRONT.shape
    assert task.target.labels is None
    with refused("bay/call", "0 image files", ".png"):
        load_task("images", "bay->reef", tmp_path)
