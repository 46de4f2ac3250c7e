"""Comparison and coresets of rows in many files: as in memory, the same for any workers, bad files named."""

import csv
import json
import os

import numpy as np
import pytest
import torch

import conftest
from test_cli import refused, run
from vardass.analysis.comparison import compare
from vardass.analysis.coresets import coreset
from vardass.analysis.sums import add_sums, row_sums
from vardass.kernels import RBFMixture
from vardass.lowrank import fit_feature_map
from vardass.shards import compare_shards, coreset_shards

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N, M, D, SAMPLE = 3000, 2600, 4, 1500


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("vardass.shards.files._PART_ROWS", 700)
    monkeypatch.setattr("vardass.lowrank.RANDOM_BLOCKS", 16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three .npy files with rows of x, two Parquet files with rows of y and a column of labels; a fitted kernel."""
    folder = tmp_path_factory.mktemp("data")
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(N, D)).astype(np.float32)
    y = (1.1 * numbers.normal(size=(M, D)) + 0.15).astype(np.float32)
    for i, rows in enumerate(np.array_split(x, 3)):
        np.save(folder / f"x{i}.npy", rows)
    np.save(folder / "x9.npy", np.empty((0, D), np.float32))  # without rows, which is fine
    for i, rows in enumerate(np.array_split(y, 2)):
        table = pa.table({**{f"f{j}": column for j, column in enumerate(rows.T)}, "labels": ["a"] * len(rows)})
        pq.write_table(table, folder / f"y{i}.parquet", row_group_size=300)
    return folder, x, y, RBFMixture(scale="median").fit(torch.from_numpy(x[:500]))


def compared(folder, **options):
    options = {"sample": SAMPLE, "permutations": 49, "leave_out": ["labels"], **options}
    return compare_shards(f"{folder}/x*.npy", f"{folder}/y*.parquet", **options)


def test_sums_add_up_and_are_those_of_loops(data):
    _, x, _, kernel = data
    z = torch.from_numpy(x[:60]).double()
    feature_map = fit_feature_map(z, kernel, 8, generator=torch.Generator().manual_seed(0))
    centre = z[0] + 0.1
    found = add_sums([row_sums(z[:25], feature_map, centre), row_sums(z[25:], feature_map, centre)])
    features, u = feature_map.features(z), z - centre
    expected = {
        "count": torch.tensor(60.0).double(),
        "features": features.sum(0),
        "lengths": sum(f @ f for f in features),
        "diagonal": kernel.diag(z).sum(),
        "rows": u.sum(0),
        "products": sum(torch.outer(v, v) for v in u),
        "cubes": sum((v @ v) * v for v in u),
        "fourths": sum((v @ v) ** 2 for v in u),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-10), name


def test_comparison_agrees_with_that_in_memory(data):
    folder, x, y, kernel = data
    whole, parts = compare(x, y, kernel=kernel, permutations=49), compared(folder, kernel=kernel)
    assert (parts.n, parts.m, parts.d) == (N, M, D)
    for loss in ("mmd", "coral"):
        ours, theirs = parts[loss], whole[loss]
        error = ours.computing_stderr + theirs.computing_stderr
        assert ours.value == pytest.approx(theirs.value, rel=1e-4, abs=4.0 * error)
        assert ours.stderr == pytest.approx(theirs.stderr, rel=0.15)
        assert ours.relative == pytest.approx(theirs.relative, rel=0.02, abs=4.0 * error)
        assert ours.p_value == theirs.p_value == 0.02
        assert "of random samples of 1,500 and 1,500 rows" in ours.test
    assert compared(folder, kernel=kernel, sample=N) == whole  # a sample of all rows


@pytest.mark.parametrize("weights", [True, False])
def test_representatives_are_for_the_mean_of_all_rows(data, weights):
    folder, x, _, kernel = data
    found, places = coreset_shards(f"{folder}/x*.npy", 20, sample=SAMPLE, kernel=kernel, weights=weights)
    for (path, row), index in zip(places, found.indices.tolist(), strict=True):
        assert np.array_equal(np.load(path)[row], x[index])
    z = torch.from_numpy(x).double()
    mean = torch.cat([kernel.matrix(block, z).mean(1) for block in z.split(1000)])
    chosen, w = z[found.indices], found.weights
    truth = float(w @ kernel.matrix(chosen) @ w - 2.0 * w @ mean[found.indices] + mean.mean())
    assert found.n == N
    assert found.error == pytest.approx(truth, rel=0.05, abs=4.0 * found.error_stderr)
    assert 0.0 < found.error_stderr < 0.5 * found.error
    assert found.spread == pytest.approx(float(kernel.diag(z).mean() - mean.mean()), rel=0.01)
    assert found.error < 0.5 * found.uniform_error
    whole = coreset(x, 20, kernel=kernel, weights=weights)
    assert found.error < 1.5 * whole.error  # from a sample nearly as good as from all rows
    every, _ = coreset_shards(f"{folder}/x*.npy", 20, sample=N, kernel=kernel, weights=weights)
    assert torch.equal(every.indices, whole.indices)


# bad files


def changed(path):
    def progress(fraction, message):
        if "left" in message:
            os.utime(path, ns=(1, 1))

    return progress


@pytest.mark.parametrize(
    ("name", "write", "named"),
    [
        ("x3.npy", lambda path: np.save(path, np.zeros((9, D + 1), np.float32)), (f"{D + 1} columns", D, "--columns")),
        ("x3.npy", lambda path: path.write_bytes(b""), ("0 bytes",)),
        ("x3.npy", lambda path: np.save(path, np.full((9, D), np.nan)), ("NaN", "row 1")),
        ("x3.npy", lambda path: np.save(path, np.zeros(9)), ("(9,)", "(n, d)")),
    ],
    ids=["columns", "empty", "nan", "shape"],
)
def test_bad_files_are_named(data, tmp_path, name, write, named):
    _, x, _, _ = data
    np.save(tmp_path / "x0.npy", x[:900])
    write(tmp_path / name)
    for work in (
        lambda: coreset_shards(f"{tmp_path}/*.npy", 5, sample=400),
        lambda: compare_shards(f"{tmp_path}/*.npy", tmp_path / "x0.npy", sample=400, permutations=0),
    ):
        with conftest.refused(tmp_path / name, *named):
            work()


def test_a_file_that_changes_in_between_is_named(data, tmp_path):
    _, x, _, _ = data
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", x[:900])
    with conftest.refused(tmp_path / "1.npy", "changed"):
        coreset_shards(f"{tmp_path}/*.npy", 5, sample=400, progress=changed(tmp_path / "1.npy"))
    np.save(tmp_path / "0.npy", x[:2])
    with conftest.refused(tmp_path / "0.npy", "2 rows", 4):
        compare_shards(tmp_path / "0.npy", tmp_path / "1.npy")


# workers


def small(folder, **options):
    options = {"sample": 600, **options}
    compared = compare_shards(f"{folder}/x*.npy", f"{folder}/x0.npy", permutations=0, **options)
    found, places = coreset_shards(f"{folder}/x*.npy", 5, **options)
    return compared, found.indices.tolist(), found.weights.tolist(), found.error, places


def test_the_order_in_which_parts_are_done_changes_nothing(data, monkeypatch):
    folder = data[0]
    expected = small(folder)

    def backwards(function, shared, parts, **options):
        return [(i, function(shared, parts[i])) for i in reversed(range(len(parts)))]

    monkeypatch.setattr("vardass.shards.files.each", backwards)
    assert small(folder) == expected


def test_two_workers_find_the_same(data):
    assert small(data[0], workers=2) == small(data[0])


# the commands


def test_commands_take_patterns(data, tmp_path, capsys):
    folder, x, _, _ = data
    sets = (f"{folder}/x*.npy", f"{folder}/y*.parquet")
    options = ("--permutations", 19, "--workers", 1)
    record = json.loads(run(capsys, "compare", *sets, *options, "--json")[1])
    assert (record["n"], record["m"], record["d"]) == (N, M, D)
    code, out, err = run(capsys, "compare", *sets, *options, "--sample", 800)
    assert (code, err) == (0, "")
    assert "of random samples of 800 and 800 rows" in " ".join(out.split())
    target = tmp_path / "chosen.csv"
    code, out, err = run(capsys, "coreset", sets[0], "-m", 6, "--sample", 900, "--workers", 1, "--out", target)
    assert (code, err) == (0, "")
    assert "3,000 rows, 6 representatives" in out
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert [list(row) for row in rows] == [["row", "weight", "path"]] * 6
    assert all(np.load(row["path"])[int(row["row"])] in x for row in rows)
    for command, part in (
        (("compare", *sets, "--standardise"), "--standardise is for one file"),
        (("coreset", sets[0], "-m", 3, "--ids", "id", "--out", target), "--ids is for one file"),
        (("compare", f"{tmp_path}/*.npy", sets[0]), "no file matches"),
    ):
        assert part in refused(capsys, tmp_path, *command)
