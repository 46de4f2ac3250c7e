"""Strata of features in many files: as good as in memory, the same however they are made, and safe to stop."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import refused
from vardass import stratify
from vardass.cli import main
from vardass.errors import VardassError
from vardass.kernels import RBFMixture, fitted_kernel
from vardass.samplers import StratifiedBatchSampler
from vardass.shards import ShardDataset, ShardStrata, stratify_shards
from vardass.solvers.rule import Rule, Totals, draw_rows, fit_rule
from vardass.variance import stratified_variance
from vardass.view import LowRankView

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SIZES = (70, 700, 230, 200)
N, D, K, SAMPLE = sum(SIZES), 6, 8, 500
KERNEL = RBFMixture(scale="median")


def clusters(n, d=D, seed=0):
    """Twelve clusters whose sizes differ by up to a hundred times."""
    numbers = np.random.default_rng(seed)
    centres = 2.0 * np.random.default_rng(99).standard_normal((12, d))
    shares = 1.5 ** -np.arange(12.0)
    chosen = numbers.choice(12, n, p=shares / shares.sum())
    return (centres[chosen] + 0.7 * numbers.standard_normal((n, d))).astype(np.float32)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr("vardass.shards.files._PART_ROWS", 100)


def write_parquet(path, x, *, lists=True, **others):
    if lists:
        table = pa.table({"id": np.arange(len(x)), "z": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), D)})
    else:
        table = pa.table({f"f{i}": column for i, column in enumerate(x.T)})
    pq.write_table(table, path, row_group_size=40, **others)


def write_npy(path, x):
    np.save(path, x)


@pytest.fixture
def features(tmp_path):
    """Four Parquet files in a folder of their own, with their rows in one array."""
    folder = tmp_path / "features"
    folder.mkdir()
    x = clusters(N)
    for i, rows in enumerate(np.split(x, np.cumsum(SIZES)[:-1])):
        write_parquet(folder / f"{i}.parquet", rows)
    return folder, x


def run(folder, out, **options):
    return stratify_shards(f"{folder}/*.*", K, out=out, **{"kernel": KERNEL, "sample": SAMPLE, **options})


# what is computed


def low_rank(n, r=4):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, r, generator=generator, dtype=torch.float64)
    return LowRankView(features, torch.rand(n, generator=generator, dtype=torch.float64))


def test_totals_give_the_objective_of_all_pairs():
    problem, labels = low_rank(40), torch.arange(40) % 3
    totals = Totals.zero(3, 4)
    for rows in (slice(0, 15), slice(15, 40)):
        part = Totals.zero(3, 4)
        part.add(LowRankView(problem.features[rows], problem.residual[rows]), labels[rows])
        totals.add_totals(part)
    expected = whole = 0.0
    for i in range(40):
        for j in range(40):
            if i != j:
                apart = (problem.features[i] - problem.features[j]).square().sum()
                distance = 0.5 * float(apart + problem.residual[i] + problem.residual[j])
                whole += distance
                expected += distance * bool(labels[i] == labels[j])
    assert totals.objective() == pytest.approx(expected, rel=1e-12)
    assert totals.together().objective() == pytest.approx(whole, rel=1e-12)


def test_scores_are_what_a_row_adds_to_a_stratum():
    problem, labels = low_rank(30), torch.arange(30) % 3
    sums = torch.stack([problem.features[labels == h].sum(0) for h in range(3)])
    sizes = torch.bincount(labels).double()
    spread = torch.stack([problem.diag[labels == h].sum() for h in range(3)])
    new = low_rank(5)
    rule = Rule(None, None, None, sizes, sums, spread)
    for i in range(5):
        apart = (new.features[i] - problem.features).square().sum(1) + new.residual[i] + problem.residual
        expected = torch.stack([apart[labels == h].sum() for h in range(3)])
        assert torch.allclose(rule.scores(new, slice(i, i + 1))[0] + spread, expected)
        assert int(rule.assign(new)[i]) == int(expected.argmin())


def test_prices_keep_the_shares_of_the_sample_among_new_rows():
    sample, new = torch.randn(22_500, 32, generator=torch.Generator().manual_seed(0)).split((2500, 20_000))
    kernel = KERNEL.fit(sample)  # most of its variance is out of reach, so sizes matter most
    sampled = fit_rule(sample, np.arange(len(sample)), 32, kernel, rank=None, seed=0)
    rule, labels = sampled.rule, sampled.labels
    problem = rule.embed(new)

    def judge(rule):
        found = rule.assign(problem)
        shares = torch.bincount(found, minlength=32) / len(new)
        return problem.objective(found, 32), float((shares / rule.shares).clamp_min(1e-3).log().std())

    value, off = judge(rule)
    totals = Totals.zero(*rule.sums.shape)
    totals.add(rule.embed(sample), labels)
    without, far_off = judge(replace(rule, prices=(totals.spread / len(sample)).float()))
    assert off < 0.2 < 0.6 < far_off
    assert value < 0.8 * without


@pytest.mark.parametrize("kernel", [KERNEL, "coral", "linear", "energy"], ids=["mmd", "coral", "linear", "energy"])
def test_variance_is_near_that_of_all_rows_in_memory(tmp_path, kernel):
    x = clusters(20_000)
    np.save(tmp_path / "x.npy", x)
    fitted = fitted_kernel(kernel, torch.from_numpy(x))
    found = stratify_shards(tmp_path / "x.npy", 16, out=tmp_path / "out", kernel=fitted, sample=5000)
    exact = stratified_variance(x, torch.from_numpy(found.labels), kernel=fitted)
    assert exact < 1.03 * stratified_variance(x, stratify(x, 16, kernel=fitted).labels, kernel=fitted)
    assert found.variance == pytest.approx(exact, abs=5 * found.variance_stderr + 1e-4 * exact)
    assert found.sizes.tolist() == np.bincount(found.labels, minlength=16).tolist()
    assert found.reduction > 1.5


def test_sample_of_all_rows_gives_the_strata_of_stratify(features, tmp_path):
    folder, x = features
    found = run(folder, tmp_path / "out", sample=N)
    assert found.labels.tolist() == stratify(x, K, kernel=KERNEL).labels.tolist()


def test_every_row_is_in_the_sample_with_the_same_probability():
    counts = np.zeros(50)
    for seed in range(2000):
        rows = draw_rows(50, 10, seed, 0)
        assert (np.diff(rows) > 0).all()
        counts[rows] += 1
    assert ((counts - 400) ** 2 / 320).sum() < 100  # chi-squared with 49 degrees of freedom, seven deviations
    assert draw_rows(50, 10, 0, 0).tolist() != draw_rows(50, 10, 0, 1).tolist()
    assert draw_rows(7, 10, -1, 0).tolist() == list(range(7))


# how it is made does not matter


def test_files_of_any_kind_get_the_same_labels(features, tmp_path):
    folder, x = features
    labels = run(folder, tmp_path / "out").labels
    assert labels.dtype == np.int32
    for name, write in (
        ("npy", write_npy),
        ("parquet", lambda path, rows: write_parquet(path, rows, lists=False)),
        ("npy", lambda path, rows: np.save(path, rows.astype(np.float64))),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        for i, rows in enumerate(np.split(x, np.cumsum(SIZES)[:-1])):
            write(tmp_path / name / f"{i}.{name}", rows)
        found = run(tmp_path / name, tmp_path / f"{name}-{write.__name__}")
        # other blocks round otherwise, which decides for a row at a border
        assert (found.labels != labels).mean() < 0.01


def test_labels_are_beside_the_rows(features, tmp_path):
    folder, _ = features
    (folder / "b").mkdir()
    np.save(folder / "b" / "0.npy", clusters(30, seed=2))
    np.save(folder / "b" / "1.npy", np.empty((0, D), np.float32))
    found = stratify_shards(f"{folder}/**/*.*", K, out=tmp_path / "out", kernel=KERNEL, sample=SAMPLE)
    names = [str(path.relative_to(tmp_path / "out" / "labels")) for path in found.labels_files]
    assert names == ["0.parquet", "1.parquet", "2.parquet", "3.parquet", "b/0.npy", "b/1.npy"]
    assert found.rows == (*SIZES, 30, 0)
    parts = [pq.read_table(path)["stratum"].to_numpy() for path in found.labels_files[:4]]
    parts += [np.load(path) for path in found.labels_files[4:]]
    assert [len(part) for part in parts] == [*SIZES, 30, 0]
    assert np.concatenate(parts).tolist() == found.labels.tolist()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["labels", "manifest.json", "strata.json"]
    again = ShardStrata.load(tmp_path / "out")
    assert again.strata().sizes.tolist() == found.sizes.tolist()


def test_any_number_of_workers_finds_the_same(features, tmp_path):
    folder, _ = features
    one = run(folder, tmp_path / "one", workers=1)
    two = run(folder, tmp_path / "two", workers=2)
    assert one.labels.tolist() == two.labels.tolist()
    assert (one.variance, one.uniform_variance) == (two.variance, two.uniform_variance)


@pytest.mark.slow
def test_ray_finds_the_same(features, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    folder, _ = features
    expected = run(folder, tmp_path / "local").labels.tolist()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for workers in (1, 2):
            found = run(folder, tmp_path / f"ray-{workers}", engine="ray", workers=workers)
            assert found.labels.tolist() == expected
        bad = clusters(50)
        bad[7, 2] = np.nan
        np.save(folder / "bad.npy", bad)
        with refused(folder / "bad.npy", "NaN", "1 of 50 rows", "row 8"):
            run(folder, tmp_path / "bad", engine="ray")
    finally:
        ray.shutdown()


# stopped and started again


def stop_after(parts):
    """Progress that interrupts the pass."""

    def report(fraction, message):
        nonlocal parts
        if "left" in message:
            parts -= 1
            if not parts:
                raise KeyboardInterrupt

    return report


def test_interrupted_it_goes_on_to_the_same_labels(features, tmp_path):
    folder, _ = features
    expected = run(folder, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out", progress=stop_after(3))
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "work").glob("*.[np][pt]*")}
    assert len(done) == 4  # three parts and the rule
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out", progress=stop_after(2))
    assert done.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "work").iterdir()}.items()
    found = run(folder, tmp_path / "out")
    assert found.labels.tolist() == expected.labels.tolist()
    assert found.variance == expected.variance
    assert run(folder, tmp_path / "out").labels.tolist() == expected.labels.tolist()


def test_killed_it_goes_on_to_the_same_labels(features, tmp_path):
    folder, _ = features
    program = f"""
import os, signal
import vardass.shards.files as files
from vardass.kernels import RBFMixture
from vardass.shards import stratify_shards
files._PART_ROWS = 100
def die(fraction, message):
    if message.startswith("3"):
        os.kill(os.getpid(), signal.SIGKILL)
stratify_shards({f"{folder}/*.*"!r}, {K}, out={str(tmp_path / "out")!r}, kernel=RBFMixture(scale="median"),
                sample={SAMPLE}, progress=die)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "out" / "work").glob("part-*.npz"))
    assert run(folder, tmp_path / "out").labels.tolist() == run(folder, tmp_path / "whole").labels.tolist()


def test_other_settings_do_not_go_on(features, tmp_path):
    folder, _ = features
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out", progress=stop_after(1))
    with refused(tmp_path / "out", "seed=0", "now it is 1"):
        run(folder, tmp_path / "out", seed=1)
    with refused(tmp_path / "out", "sample=500", "now it is 400"):
        run(folder, tmp_path / "out", sample=400)
    np.save(folder / "4.npy", clusters(30))
    with refused(tmp_path / "out", "4 files", f"{folder / '4.npy'} not among them"):
        run(folder, tmp_path / "out")
    for names, part in (("012", f"{folder / '3.parquet'} among them"), ("3210", "another order")):
        with refused(tmp_path / "out", "4 files", part):
            stratify_shards(
                [folder / f"{name}.parquet" for name in names],
                K,
                out=tmp_path / "out",
                kernel=KERNEL,
                sample=SAMPLE,
            )


def test_start_that_failed_before_any_work_does_not_count(features, tmp_path):
    folder, x = features
    np.save(folder / "4.npy", np.full((30, D), np.nan))
    with refused(folder / "4.npy", "NaN", "30 of 30 rows", "row 1"):
        run(folder, tmp_path / "out", sample=N)
    np.save(folder / "4.npy", x[:30])
    assert run(folder, tmp_path / "out").n == N + 30


def test_full_disk_leaves_what_was_done(features, tmp_path, monkeypatch):
    folder, _ = features
    savez, left = np.savez, [2]

    def fail(file, **arrays):
        left[0] -= 1
        if left[0] == 0:
            file.write(b"half of it")
            raise OSError(28, "No space left on device")
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", fail)
    with refused(tmp_path / "out", "No space left on device", "start again"):
        run(folder, tmp_path / "out")
    monkeypatch.setattr(np, "savez", savez)
    names = {path.name for path in (tmp_path / "out" / "work").iterdir()} - {"lock"}
    assert names == {"rule.pt", "part-000000.npz"}  # and nothing half written
    assert run(folder, tmp_path / "out").labels.tolist() == run(folder, tmp_path / "whole").labels.tolist()


def test_worker_that_dies_is_named_and_the_next_start_goes_on(features, tmp_path, monkeypatch):
    folder, _ = features
    expected = run(folder, tmp_path / "whole").labels.tolist()
    left = [2]

    def kill(fraction, message):
        left[0] -= "left" in message
        if left[0] == 0:
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    # one row group is a part, so that there is work left when the worker dies
    monkeypatch.setattr("vardass.shards.files._PART_ROWS", 1)
    with pytest.raises(VardassError, match=r"one of 2 workers died.*start again to resume"):
        run(folder, tmp_path / "out", workers=2, progress=kill)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "work").glob("part-*.npz")}
    assert done
    found = run(folder, tmp_path / "out")
    assert (np.array(found.labels) != np.array(expected)).mean() < 0.01  # other blocks round otherwise


def test_second_start_in_one_folder_is_refused(features, tmp_path):
    folder, _ = features
    told = []

    def again(fraction, message):
        if "left" in message and not told:
            with refused("another stratify", tmp_path / "out" / "work", f"process {os.getpid()}"):
                run(folder, tmp_path / "out")
            told.append(message)

    run(folder, tmp_path / "out", progress=again)
    assert told


def test_columns_in_another_order_are_refused(tmp_path):
    x = clusters(60)
    for name, order in (("a", range(D)), ("b", reversed(range(D)))):
        pq.write_table(pa.table({f"f{i}": x[:, i] for i in order}), tmp_path / f"{name}.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    with refused(*paths, "'f5', 'f4', 'f3'", "'f0', 'f1', 'f2'", "--columns"):
        stratify_shards(paths, 4, out=tmp_path / "out")
    columns = ",".join(f"f{i}" for i in range(D))
    found = stratify_shards(paths, 4, out=tmp_path / "out", columns=columns)
    assert found.n == 120
    rows = ShardDataset(paths, columns=columns).rows([3, 63])
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("change", ["touched", "longer", "gone"])
def test_file_that_changes_in_between_is_named(features, tmp_path, change):
    folder, x = features
    victim = folder / "3.parquet"

    def meddle(fraction, message):
        if "left" in message and victim.exists() and victim.stat().st_mtime_ns != 1:
            if change == "touched":
                os.utime(victim, ns=(1, 1))
            elif change == "longer":
                write_parquet(victim, x[:240])
                os.utime(victim, ns=(1, 1))
            else:
                victim.unlink()

    part = "is gone" if change == "gone" else "has changed"
    for progress in (meddle, None):  # during the pass, and at the next start
        with refused(f"{victim} {part}"):
            run(folder, tmp_path / "out", progress=progress)


# bad input


def test_nan_is_named_by_file_and_row(features, tmp_path):
    folder, x = features
    bad = x[:230].copy()
    bad[201, 3] = np.inf
    write_parquet(folder / "2.parquet", bad)
    for sample in (10, SAMPLE):  # found in the pass, or in the sample
        with refused(folder / "2.parquet", "NaN", "row 202"):
            run(folder, tmp_path / str(sample), sample=sample)


@pytest.mark.parametrize(
    ("name", "write", "named"),
    [
        ("x.parquet", lambda path: path.write_bytes(b""), ("0 bytes",)),
        ("x.parquet", lambda path: path.write_bytes(b"PAR1 and no more"), ("damaged",)),
        ("x.npy", lambda path: np.save(path, np.array([["a", "b"]])), ("<U1", "real numbers")),
        ("x.npy", lambda path: np.save(path, np.zeros(5)), ("(5,)", "(n, d)")),
        ("x.npy", lambda path: np.save(path, np.zeros((5, 3))), ("3 columns", 6, "--columns")),
        ("x.parquet", lambda path: write_npy(path.open("wb"), np.zeros((5, D))), (".parquet", ".npy")),
        ("x.parquet", lambda path: pq.write_table(pa.table({"name": ["a"]}), path), ("'name'", "string", "--columns")),
        ("x.parquet", lambda path: pq.write_table(pa.table({"z": [[1.0, 2.0], [1.0]]}), path), ("'z'", "length")),
        ("x.csv", lambda path: path.write_text("1,2\n"), (".csv", ".npy and .parquet")),
    ],
)
def test_bad_shard_is_named(features, tmp_path, name, write, named):
    folder, _ = features
    write(folder / name)
    with refused(folder / name, *named):
        run(folder, tmp_path / "out")


def test_other_bad_input(features, tmp_path):
    folder, _ = features
    out = tmp_path / "out"
    with refused(f"{folder}/*.npy"):
        stratify_shards(f"{folder}/*.npy", K, out=out)
    with refused(folder / "0.parquet", "twice"):
        stratify_shards([folder / "0.parquet"] * 2, K, out=out)
    with refused(8, 7, field="sample"):
        run(folder, out, sample=7)
    with refused(out, "vardass stratify"):
        ShardStrata.load(out)
    with refused(folder, "no strata", "--out"):
        run(folder, folder)
    with refused("'dask'", "local, ray", field="engine"):
        run(folder, out, engine="dask")
    np.save(tmp_path / "none.npy", np.empty((0, 3)))
    with refused("1 files", tmp_path / "none.npy"):
        stratify_shards(tmp_path / "none.npy", 2, out=tmp_path / "o")


# the command


def test_command_takes_patterns_and_several_files(features, tmp_path, capsys):
    folder, _ = features
    common = ["--k", str(K), "--sample", str(SAMPLE), "--scale", "median", "--workers", "1"]
    assert main(["stratify", f"{folder}/*.parquet", *common, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["n"], record["d"], record["k"]) == (N, D, K)
    found = ShardStrata.load(tmp_path / "features.strata")
    assert record["variance"] == found.variance
    files = [str(path) for path in sorted(folder.iterdir())]
    assert main(["stratify", *files, *common, "--out", str(tmp_path / "other")]) == 0
    text = capsys.readouterr().out
    assert "1,200 samples, 6 features, 8 strata" in text
    assert ShardStrata.load(tmp_path / "other").labels.tolist() == found.labels.tolist()
    assert main(["stratify", *files, *common, "--equal"]) == 2
    assert "--equal is for one file" in capsys.readouterr().err


def test_one_large_file_is_read_in_parts(tmp_path, capsys, monkeypatch):
    np.save(tmp_path / "x.npy", clusters(300))
    monkeypatch.setattr("vardass.cli.embeddings.is_large", lambda path: True)
    monkeypatch.setattr("vardass.data.embedding_files.BLOCK_ROWS", 64)
    monkeypatch.setattr("vardass.processes.count_cpus", lambda: 1)
    assert main(["stratify", str(tmp_path / "x.npy"), "--k", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["info"]["parts"] == 5
    assert np.load(tmp_path / "x.strata" / "labels" / "x.npy").shape == (300,)


# rows for samplers


def test_dataset_gives_rows_by_their_number(features, monkeypatch):
    folder, x = features
    np.save(folder / "4.npy", x[:30])
    x = np.concatenate([x, x[:30]])
    dataset = ShardDataset(f"{folder}/*.*", kept_groups=2)
    assert len(dataset) == len(x)
    rows = [5, N + 3, 0, N - 1, 69, 70, 5, -1]
    assert np.array_equal(torch.stack(dataset.__getitems__(rows)).numpy(), x[rows])
    assert np.array_equal(dataset[100].numpy(), x[100])
    with pytest.raises(IndexError, match=f"row {len(x)} of"):
        dataset[len(x)]
    reads = []
    read = "vardass.shards.files.read_groups"
    monkeypatch.setattr(read, lambda path, groups, **_: reads.append(groups) or [x[70:110]])
    fresh = ShardDataset(folder / "1.parquet")
    fresh.__getitems__(list(range(40)) * 2)
    assert reads == [range(0, 1)]  # once for all rows of a group
    fresh[3]
    assert len(reads) == 1
    os.utime(folder / "1.parquet", ns=(1, 1))
    with refused(folder / "1.parquet", "changed"):
        fresh[50]


def test_sampler_over_files_has_exact_weights_and_resumes(features, tmp_path):
    folder, x = features
    found = run(folder, tmp_path / "out")

    def make():
        sampler = StratifiedBatchSampler(found.n, found.k, seed=3, endless=True)
        sampler.use(found.strata())
        return sampler

    sampler = make()
    batches = iter(sampler)
    first = [next(batches) for _ in range(3)]
    for batch in first:
        assert found.labels[list(batch)].tolist() == list(range(K))
        assert batch.weights == pytest.approx((found.sizes / N).tolist())
    state = sampler.state_dict()
    expected = [list(next(batches)) for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(state)
    again = iter(resumed)
    assert [list(next(again)) for _ in range(3)] == expected
    dataset = ShardDataset(found.files)
    assert np.array_equal(torch.stack(dataset.__getitems__(expected[0])).numpy(), x[expected[0]])
