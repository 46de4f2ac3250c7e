"""Labels of files of embeddings, and tasks made of such files."""

import numpy as np
import pytest
import torch

from conftest import refused
from vardass.adapt import RunConfig, Trainer
from vardass.adapt.model import load_model, save_model
from vardass.data import embedding_task, load_task, split_task, task_names
from vardass.data.embedding_tasks import read_labelled
from vardass.data.from_paths import domain_from_path
from vardass.errors import VardassWarning


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
    features, found, _ = read_labelled(path, labels=key)
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
    features, found, _ = read_labelled(tmp_path / "a.parquet", labels="labels")
    assert features.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert found.tolist() == ["u", "v"]


def test_embeddings_of_a_folder_and_of_one_file(tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    for name in ("a", "b", "c"):
        np.savez(tmp_path / f"{name}.npz", z=x, labels=np.arange(6) % 2)
    assert len(task_names("embeddings", tmp_path)) == 6
    task = load_task("embeddings", "a+b->c", tmp_path)
    assert [source.name for source in task.sources] == ["a", "b"]
    assert torch.allclose(task.target.dataset.tensor.std(0, correction=0), torch.ones(3))
    assert task.target.labels.tolist() == [0, 1] * 3
    assert load_task("embeddings", "a->c", tmp_path, target_labelled=False).target.labels is None
    np.savez(tmp_path / "all.npz", x_p=x, y_p=np.arange(6) % 2, x_q=x + 1, y_q=np.arange(6) % 2)
    names = {"key": "x_{domain}", "labels": "y_{domain}", "standardise": False}
    one = load_task("embeddings", "p->q", tmp_path / "all.npz", **names)
    assert torch.equal(one.target.dataset.tensor, torch.from_numpy(x + 1))
    with refused("all.npz", None, "key='x_{domain}'"):
        load_task("embeddings", "p->q", tmp_path / "all.npz")


def test_bad_embeddings(tmp_path):
    x = np.zeros((4, 2), np.float32)
    np.savez(tmp_path / "s.npz", z=x, labels=[0, 1, 0, 1], short=[1, 2], half=[0.5, 1, 1, 1])
    np.savez(tmp_path / "t.npz", z=x, labels=[0, 1, 0, 5])
    np.savez(tmp_path / "wide.npz", z=np.zeros((4, 3)), labels=[0, 1, 0, 1])
    source = tmp_path / "s.npz"
    with pytest.warns(VardassWarning, match="1 of 4 samples of domain 't'.*'5'"):
        embedding_task(source, tmp_path / "t.npz", target_labelled=True)
    with refused({"s": 2, "wide": 3}):
        embedding_task(source, tmp_path / "wide.npz")
    with refused("'y'", "s.npz", "'z'", "'labels'", "--labels"):
        read_labelled(source, labels="y")
    with refused("'short'", "s.npz", (2,), "4 rows"):
        read_labelled(source, labels="short")
    with refused("'half'", "s.npz", 0.5, "row 1", "--regression"):
        read_labelled(source, labels="half")
    np.save(tmp_path / "n.npy", x)
    with refused("'gone.npy'", tmp_path / "n.npy", "--labels"):
        read_labelled(tmp_path / "n.npy", labels="gone.npy")
    (tmp_path / "c.csv").write_text("a,b\n1,2\n")
    with refused("'labels'", tmp_path / "c.csv", "'a'", "'b'", "--labels"):
        read_labelled(tmp_path / "c.csv", labels="labels")
    with refused("'labels'", tmp_path / "c.csv", "'a'", "'b'", "--labels"):
        read_labelled(tmp_path / "c.csv", labels="labels", columns="a,b")
    with refused("no file", tmp_path / "gone.csv"):
        read_labelled(tmp_path / "gone.csv", labels="labels")


def test_labels_are_never_features(tmp_path):
    (tmp_path / "c.csv").write_text("f0,labels,f1\n1,0,2\n3,1,4\n")
    for columns in ("*", "0:", "f0,labels,f1", None):
        features, found, _ = read_labelled(tmp_path / "c.csv", labels="labels", columns=columns)
        assert features.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert found.tolist() == [0, 1]


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_file_of_labels_alone_has_no_features(tmp_path, ending):
    write(tmp_path / f"a{ending}", np.zeros((2, 2), np.float32), np.array([0, 1]))
    with refused(tmp_path / f"a{ending}", "'labels'", "features"):
        read_labelled(tmp_path / f"a{ending}", labels="labels", columns="labels")


@pytest.mark.parametrize("ending", [".npz", ".npy", ".csv", ".parquet"])
def test_whether_there_are_labels(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    write(path, np.zeros((2, 2), np.float32), np.array([0, 1]))
    name = "labels.npy" if ending == ".npy" else "labels"
    assert read_labelled(path, labels=name).labels.tolist() == [0, 1]
    other = "other.npy" if ending == ".npy" else "other"
    assert read_labelled(path, labels=other, optional=True).labels is None


@pytest.mark.parametrize("ending", [".npz", ".npy", ".csv", ".parquet"])
def test_a_label_without_text_is_no_class(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    write(path, np.arange(8, dtype=np.float32).reshape(4, 2), np.array(["cow", " ", "ant", ""]))
    with refused(path, "labels", "empty", "row 2", "2 of 4"):
        read_labelled(path, labels="labels.npy" if ending == ".npy" else "labels")


@pytest.mark.parametrize("ending", [".npz", ".csv", ".parquet"])
def test_a_missing_label_column_is_told_with_all_that_could_be_it(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    numbers = {f"f{place}": np.arange(3.0) for place in range(9)}
    texts = {"site": np.array(["x", "y", "x"]), "diagnosis": np.array(["ill", "well", "ill"])}
    if ending == ".npz":
        np.savez(path, **{**numbers, **texts})
    else:
        import pandas as pd

        table = pd.DataFrame({**numbers, **texts})
        table.to_csv(path, index=False) if ending == ".csv" else table.to_parquet(path)
    with refused(path, "'labels'", "'f0'", "'site'", "'diagnosis'", "--labels"):
        read_labelled(path, labels="labels")


def _tables(folder):
    """The same 60 rows as a table, with the columns in reverse order, and with one column under another name."""
    generator = np.random.default_rng(0)
    kinds = np.array(["pear", "plum"])[np.arange(60) % 2]
    x = generator.normal(size=(60, 4)) + 3.0 * (np.arange(60) % 2)[:, None] * [1, 0, 0, -1]
    names = ["f0", "f1", "f2", "f3"]
    for name, order, titles in (
        ("a", range(4), names),
        ("turned", range(3, -1, -1), names[::-1]),
        ("renamed", range(4), ["f0", "f1", "g2", "f3"]),
    ):
        rows = [",".join([*titles, "kind"])]
        rows += [",".join([*(f"{x[i, j]:.5f}" for j in order), kinds[i]]) for i in range(60)]
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
    np.save(folder / "plain.npy", x.astype("f4"))


def test_columns_of_tables_belong_together_by_name(tmp_path):
    _tables(tmp_path)
    task = embedding_task(tmp_path / "a.csv", tmp_path / "turned.csv", labels="kind", standardise=False)
    assert torch.equal(task.target.dataset.tensor, task.sources[0].dataset.tensor)
    scaled = embedding_task(tmp_path / "a.csv", tmp_path / "turned.csv", labels="kind")
    assert scaled.target.dataset.column_names == ["f0", "f1", "f2", "f3"]
    with refused("a.csv", "renamed.csv", "'f2'", "'g2'", "--columns 0:8"):
        embedding_task(tmp_path / "a.csv", tmp_path / "renamed.csv", labels="kind")
    places = embedding_task(tmp_path / "a.csv", tmp_path / "renamed.csv", labels="kind", columns="0:4")
    assert places.target.dataset.column_names is None  # by number: whatever their names
    plain = embedding_task(tmp_path / "a.csv", tmp_path / "plain.npy", labels="kind", standardise=False)
    assert torch.allclose(plain.target.dataset.tensor, task.sources[0].dataset.tensor, atol=1e-4)


def test_a_model_reads_columns_by_their_names(tmp_path):
    _tables(tmp_path)
    task = embedding_task(tmp_path / "a.csv", tmp_path / "turned.csv", labels="kind")
    config = RunConfig(algorithm="erm", sampler="uniform", steps=30, device="cpu")
    result = Trainer(config, split_task(task, seed=0)).run()
    save_model(result, tmp_path / "model.safetensors", task.target, input_shape=(4,))
    _, about = load_model(tmp_path / "model.safetensors")
    data = {"labels": "kind", **about["reading"]}
    first, other, plain = (domain_from_path(tmp_path / n, about, data) for n in ("a.csv", "turned.csv", "plain.npy"))
    assert torch.equal(first.dataset.tensor, other.dataset.tensor)
    assert torch.allclose(first.dataset.tensor, plain.dataset.tensor, atol=1e-4)  # no names: places
    with refused("'f2'", tmp_path / "renamed.csv", "'g2'", "--columns"):
        domain_from_path(tmp_path / "renamed.csv", about, data)


def test_an_unnamed_column_that_counts_the_rows_is_refused_in_tasks_too(tmp_path):
    for name in "ab":
        rows = [",f0,kind", *(f"{i},{i % 3}.5,{'xy'[i % 2]}" for i in range(6))]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    with refused(tmp_path / "a.csv", "--columns 1:"):
        embedding_task(tmp_path / "a.csv", tmp_path / "b.csv", labels="kind")


def test_columns_of_one_name_are_refused_unless_places_count(tmp_path):
    _tables(tmp_path)
    text = (tmp_path / "a.csv").read_text()
    (tmp_path / "twice.csv").write_text(text.replace("f3", "f0", 1))
    for source, target in (("twice.csv", "turned.csv"), ("a.csv", "twice.csv")):
        with refused(tmp_path / "twice.csv", "'f0'", "--columns 0:8"):
            embedding_task(tmp_path / source, tmp_path / target, labels="kind")
    places = embedding_task(tmp_path / "twice.csv", tmp_path / "a.csv", labels="kind", columns="0:4")
    assert torch.equal(places.target.dataset.tensor, places.sources[0].dataset.tensor)
