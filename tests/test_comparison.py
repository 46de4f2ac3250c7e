"""Two data sets: values against the losses, the variance against its definition, level and coverage by simulation."""

import json
import math
from itertools import combinations

import numpy as np
import pytest
import torch

from conftest import refused
from test_cli import refused as refused_by_command
from test_cli import run
from vardass.analysis import permutation_test
from vardass.analysis.comparison import compare
from vardass.analysis.permutation_test import _PERMUTED_BLOCKS, Blocks
from vardass.kernels import FunctionKernel, LinearKernel, RBFMixture
from vardass.losses import coral, mmd2

KERNEL = RBFMixture((0.3, 1.0))


def two_sets(n, m, d=3, *, seed=0, shift=0.0, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=dtype)
    return x, scale * torch.randn(m, d, generator=generator, dtype=dtype) + shift


def true_mmd2(d, shift, scale, gammas=KERNEL.gammas):
    """MMD² of N(0, 1) and N(shift, scale²) in d equal columns."""

    def mean(gamma, variance, gap):
        wide = 1.0 + 2.0 * gamma * variance
        return wide ** (-d / 2) * math.exp(-gamma * d * gap**2 / wide)

    parts = ((2.0, 0.0, 1.0), (2.0 * scale**2, 0.0, 1.0), (1.0 + scale**2, shift, -2.0))
    return sum(sign * mean(gamma, variance, gap) for gamma in gammas for variance, gap, sign in parts)


def unbiased_coral(x, y):
    """|R|² = E[((z_1 - z_2)ᵀ(z_3 - z_4))²] / 4 over all quadruples of distinct rows, and the unbiased <R_x, R_y>."""

    def square(z):
        rows = torch.cartesian_prod(*[torch.arange(len(z))] * 4)
        distinct = torch.stack([rows[:, a] != rows[:, b] for a, b in combinations(range(4), 2)]).all(0)
        i, j, k, m = rows[distinct].T
        products = z @ z.T
        return (products[i, k] - products[i, m] - products[j, k] + products[j, m]).square().mean() / 4.0

    return float(square(x) + square(y) - 2.0 * (torch.cov(x.T) * torch.cov(y.T)).sum())


# values


@pytest.mark.parametrize("options", [{}, {"rank": 6}], ids=["all pairs", "low rank"])
def test_values_are_those_of_the_losses(options):
    x, y = two_sets(20, 31, shift=0.4, scale=1.2)
    found = compare(x, y, kernel=KERNEL, permutations=0, **options)
    assert found["mmd"].value == pytest.approx(float(mmd2(x, y, kernel=KERNEL, estimator="unbiased")), abs=1e-12)
    assert found["coral"].value == pytest.approx(unbiased_coral(x, y), abs=1e-12)
    assert found["coral"].v_statistic == pytest.approx(float(coral(x, y, correction="batch")), abs=1e-12)
    assert found["mmd"].p_value is None
    if not options:
        assert found["mmd"].v_statistic == pytest.approx(float(mmd2(x, y, kernel=KERNEL)), abs=1e-12)
        assert found["mmd"].computing_stderr == 0.0


def test_an_explicit_kernel_is_exact_at_low_rank():
    x, y = two_sets(300, 200, shift=0.2)
    found = compare(x, y, kernel="linear", loss="mmd", permutations=0, rank=2)["mmd"]
    assert found.value == pytest.approx(float(mmd2(x, y, kernel="linear", estimator="unbiased")), abs=1e-12)
    assert found.computing_stderr == 0.0


def test_low_rank_is_unbiased_for_all_pairs_and_knows_its_error():
    """With far too low a rank: over seeds the value has the mean of all pairs and the spread that is reported."""
    x, y = two_sets(200, 1500, 8, shift=0.15, dtype=torch.float32)
    exact = compare(x, y, kernel=KERNEL, loss="mmd", permutations=0)["mmd"].value
    found = [compare(x, y, kernel=KERNEL, loss="mmd", permutations=0, rank=2, seed=s)["mmd"] for s in range(12)]
    values = torch.tensor([each.value for each in found])
    errors = torch.tensor([each.computing_stderr for each in found])
    assert abs(float(values.mean()) - exact) < 4.0 * float(errors.mean()) / 12**0.5
    assert 0.5 < float(values.std() / errors.mean()) < 1.8
    assert float(errors.mean()) < 0.5 * found[0].stderr  # of which it is a part


def test_many_rows_are_streamed_and_their_blocks_permuted():
    x, y = two_sets(5000, 300, 4, shift=0.3, dtype=torch.float32)
    found = compare(x, y, kernel=KERNEL, permutations=199)
    assert found["mmd"].low <= true_mmd2(4, 0.3, 1.0) <= found["mmd"].high
    assert found["mmd"].p_value == pytest.approx(1 / 200)
    plugged_in = coral(x.double(), y.double(), correction="batch")
    assert found["coral"].v_statistic == pytest.approx(float(plugged_in), rel=1e-3)
    assert found["coral"].p_value > 0.01
    assert "blocks" in found["mmd"].test
    assert "rank 128" in found["mmd"].method
    assert found["mmd"].test.endswith(", on 128 kernel features")
    assert "features" not in found["coral"].test  # four columns have ten products: none are left out


def test_covariances_of_many_columns_are_approximated_in_the_test_and_it_says_so():
    x, y = two_sets(1500, 700, 30, dtype=torch.float32)
    found = compare(x, y, loss="coral", permutations=9)["coral"]
    assert found.test == "permutations of rows, with covariances approximated by 128 features"
    assert found.method == "the moments of all rows"


def test_equal_seeds_give_equal_results_and_input_is_left_alone():
    x, y = two_sets(600, 100, dtype=torch.float32)
    before = x.clone()
    first, second, other = (compare(x, y, permutations=49, seed=s, rank=8) for s in (1, 1, 2))
    assert first == second
    assert first != other
    assert torch.equal(x, before)
    assert compare(x.numpy(), y.numpy(), permutations=49, seed=1, rank=8) == first
    assert compare(y, x, permutations=0)["coral"].value == pytest.approx(first["coral"].value, rel=1e-6, abs=1e-9)


def test_the_default_kernel_follows_the_scale_of_the_data():
    x, y = two_sets(60, 60, 5, shift=0.5)
    small, large = compare(x, y, permutations=0), compare(1000.0 * x, 1000.0 * y, permutations=0)
    assert large["mmd"].value == pytest.approx(small["mmd"].value, rel=1e-9)
    assert not any("identity" in note for note in large.notes)
    assert any("identity" in note for note in compare(1000.0 * x, 1000.0 * y, kernel="mmd", permutations=0).notes)


# the variance of U


def test_the_variance_is_that_of_hoeffdings_decomposition():
    """Its parts are unbiased: with the linear kernel they are known for Gaussian data."""
    n, m, d, gap = 12, 9, 2, 1.5
    stderrs, values = [], []
    for seed in range(600):
        x, y = two_sets(n, m, d, seed=seed, shift=gap)
        found = compare(x, y, kernel=LinearKernel(), loss="mmd", permutations=0)["mmd"]
        stderrs.append(found.stderr**2)
        values.append(found.value)
    # Σ is the identity and g(x) = -gapᵀx: Var g = d gap², |Σ|² = d
    first = 4.0 * d * gap**2 * (1 / n + 1 / m)
    second = 2.0 * d / (n * (n - 1)) + 2.0 * d / (m * (m - 1)) + 4.0 * d / (n * m)
    assert np.var(values) == pytest.approx(first + second, rel=0.2)
    assert np.mean(stderrs) == pytest.approx(first + second, rel=0.06)
    assert np.mean(values) == pytest.approx(d * gap**2, abs=4 * np.std(values) / 600**0.5)


@pytest.mark.parametrize(
    ("loss", "n", "m", "shift", "scale"),
    [
        ("mmd", 60, 60, 0.2, 1.2),
        ("mmd", 200, 60, 0.25, 1.0),
        ("coral", 60, 60, 0.0, 1.3),
    ],
)
def test_intervals_cover_where_normal_ones_are_too_low(loss, n, m, shift, scale):
    """Where a difference is of a few standard errors, value ± 1.96 of them misses it upwards in one of ten samples."""
    truth = true_mmd2(3, shift, scale) if loss == "mmd" else 3 * (1.0 - scale**2) ** 2
    covered, normal, repeats = 0, 0, 250
    for seed in range(repeats):
        x, y = two_sets(n, m, seed=seed, shift=shift, scale=scale)
        result = compare(x, y, kernel=KERNEL, loss=loss, permutations=0)[loss]
        covered += result.low <= truth <= result.high
        normal += abs(result.value - truth) <= 1.96 * result.stderr
    assert normal / repeats < 0.91
    assert covered / repeats >= 0.94


def test_intervals_are_normal_where_a_difference_is_large():
    x, y = two_sets(800, 700, shift=1.5)
    for result in compare(x, 1.5 * y, kernel=KERNEL, permutations=0).results:
        for end, sign in ((result.low, -1.0), (result.high, 1.0)):
            assert end - result.value == pytest.approx(sign * 1.96 * result.stderr, rel=0.15)


def test_intervals_reach_zero_where_sets_are_alike():
    """There the part of first order vanishes: without that of second order half of these would miss."""
    reach = [compare(*two_sets(30, 50, seed=s), kernel=KERNEL, permutations=0) for s in range(100)]
    for loss in ("mmd", "coral"):
        assert sum(each[loss].low == 0.0 for each in reach) >= 93
        assert all(0.0 <= each[loss].low <= each[loss].high for each in reach)
    values = [each["mmd"].value for each in reach]
    assert np.mean([each["mmd"].stderr ** 2 for each in reach]) == pytest.approx(np.var(values), rel=0.5)


# the test


@pytest.mark.parametrize("loss", ["mmd", "coral"])
def test_p_value_is_that_of_all_relabellings(loss):
    x, y = two_sets(5, 4, 2, seed=3, shift=0.9, scale=1.5)
    z = torch.cat([x, y])

    def statistic(rows):
        rest = [i for i in range(9) if i not in rows]
        a, b = z[list(rows)], z[rest]
        return float(mmd2(a, b, kernel=KERNEL) if loss == "mmd" else coral(a, b, correction="batch"))

    values = [statistic(rows) for rows in combinations(range(9), 5)]
    true_p = sum(value >= statistic(range(5)) - 1e-12 for value in values) / len(values)
    assert 0.02 < true_p < 0.9
    found = compare(x, y, kernel=KERNEL, loss=loss, permutations=9999, seed=1)[loss].p_value
    assert found == pytest.approx(true_p, abs=4 * math.sqrt(true_p * (1 - true_p) / 9999) + 1e-4)


@pytest.mark.parametrize("options", [{}, {"rank": 5}], ids=["all pairs", "low rank"])
def test_the_level_is_kept(options):
    """Rejections at 10 % in 400 tests without a difference: 40 expected, 6 the standard deviation."""
    rejected = {"mmd": 0, "coral": 0}
    for seed in range(400):
        x, y = two_sets(14, 9, 2, seed=seed)
        found = compare(x, y, kernel=KERNEL, permutations=19, seed=seed, **options)
        for loss in rejected:
            rejected[loss] += found[loss].p_value <= 0.1
    assert all(20 <= count <= 60 for count in rejected.values()), rejected


def test_the_level_is_kept_by_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(permutation_test, "_PERMUTED_BLOCKS", 24)
    monkeypatch.setattr(permutation_test, "_LEAST_BLOCKS", 6)
    rejected = {"mmd": 0, "coral": 0}
    for seed in range(300):
        x, y = two_sets(70, 41, 2, seed=seed)
        found = compare(x, y, kernel=KERNEL, permutations=19, seed=seed, rank=5)
        assert "blocks of 5 rows" in found["mmd"].test
        for loss in rejected:
            rejected[loss] += found[loss].p_value <= 0.1
    assert all(14 <= count <= 46 for count in rejected.values()), rejected  # 30 expected, 5.2 the standard deviation


def test_coral_looks_at_covariances_and_mmd_at_means_too():
    x, y = two_sets(80, 120, shift=1.0)
    moved = compare(x, y, permutations=199)
    assert moved["mmd"].p_value < 0.01
    assert moved["coral"].p_value > 0.05
    x, y = two_sets(80, 120, scale=1.6)
    assert compare(x, y, permutations=199, loss="coral")["coral"].p_value < 0.01


def test_low_rank_statistics_are_those_of_rows_where_the_map_is_explicit():
    x, y = two_sets(30, 20, 4, shift=0.3, scale=1.2)
    by_rows = compare(x, y, loss="coral", permutations=199, seed=5)["coral"]
    by_features = compare(x, y, loss="coral", permutations=199, seed=5, rank=3)["coral"]
    assert by_features.p_value == pytest.approx(by_rows.p_value, abs=0.15)  # other permutations of one statistic
    assert by_features.value == by_rows.value


@pytest.mark.parametrize(("n", "m"), [(10, 7), (4096, 5), (30_000, 20_000), (100, 200_000), (50_001, 300)])
def test_blocks_are_equal_and_what_is_left_stays(n, m):
    generator = torch.Generator().manual_seed(0)
    blocks = Blocks.of(n, m, generator)
    assert blocks.of_x + blocks.of_y <= max(_PERMUTED_BLOCKS, 2 * min(n, m))
    for labels, first, last in ((blocks.labels[:n], 0, blocks.of_x), (blocks.labels[n:], blocks.of_x, blocks.of_y)):
        last = last if first == 0 else first + last
        counts = torch.bincount(labels, minlength=blocks.count)
        assert (counts[first:last] == blocks.size).all()
    members = blocks.permuted(20, generator)
    assert (members[:, : blocks.of_x + blocks.of_y].sum(1) == blocks.of_x).all()
    if not blocks.is_plain:
        assert (members[:, -2] == 1).all()
        assert (members[:, -1] == 0).all()
    assert len({tuple(row.tolist()) for row in members}) > 15


# edges and bad input


def test_rows_that_are_all_alike():
    found = compare(torch.ones(20, 3), torch.ones(30, 3), permutations=19)
    for result in found.results:
        assert (result.value, result.low, result.relative) == (0.0, 0.0, 0.0)
        assert result.high < 1e-7
        assert result.p_value == 1.0
    assert len(found.notes) == 2


def test_a_constant_column_changes_nothing():
    x, y = two_sets(30, 30)
    wide = [torch.cat([z, torch.full((30, 1), 7.0, dtype=z.dtype)], 1) for z in (x, y)]
    for loss in ("mmd", "coral"):
        value = compare(x, y, kernel=KERNEL, permutations=0)[loss].value
        assert compare(*wide, kernel=KERNEL, permutations=0)[loss].value == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "field", "named"),
    [
        ({"y": torch.zeros(10, 4)}, None, ("x", "y", "columns", 3, 4)),
        ({"x": torch.zeros(1, 3)}, None, ("x", "4 rows", 1)),
        ({"x": torch.full((9, 3), math.nan)}, "x", ("NaN", "9 of 9")),
        ({"loss": "dann"}, "loss", ("'dann'", "both, mmd, coral")),
        ({"kernel": "cosine"}, "kernel", ("'cosine'", "linear")),
        ({"permutations": -1}, "permutations", (0, -1)),
        ({"confidence": 1.0}, "confidence", ("below 1", "1.0", 0.95)),
        ({"confidence": 0.0}, "confidence", ("at least 0.001", "0.0", 0.95)),
        ({"rank": 0}, "rank", ("between 1 and 2048", 0)),
        ({"seed": "a"}, "seed", ("whole number", "'a'")),
        (
            {"x": 1e30 * torch.eye(9, 3), "kernel": "linear"},
            None,
            ("LinearKernel()", "torch.float32", "1e+30", "float64"),
        ),
        ({"x": 1e12 * torch.eye(9, 3), "loss": "coral"}, None, ("coral", "torch.float32", "1e+12", "float64")),
        ({"kernel": FunctionKernel(lambda a, b: (a @ b.T) / 0.0), "loss": "mmd"}, None, ("mmd", "torch.float32")),
    ],
)
def test_bad_input_is_refused(change, field, named):
    x, y = two_sets(9, 10, dtype=torch.float32)
    options = {"x": x, "y": y, **change}
    with refused(*named, field=field):
        compare(options.pop("x"), options.pop("y"), **options)


def test_records_are_plain():
    found = compare(*two_sets(9, 10), permutations=9)
    assert [row["loss"] for row in found.to_dict()["results"]] == ["mmd", "coral"]
    with refused("'linear'", "mmd, coral", field="loss"):
        found["linear"]


# the command


@pytest.fixture
def files(tmp_path):
    x, y = two_sets(40, 50, shift=0.8, dtype=torch.float32)
    np.save(tmp_path / "a.npy", x.numpy())
    np.savez(tmp_path / "b.npz", z=y.numpy(), other=y[:, :2].numpy(), labels=np.arange(50))
    lines = [f"{u},{v},{w},dog" for u, v, w in y.tolist()]
    (tmp_path / "b.csv").write_text("\n".join(["p,q,r,labels", *lines]) + "\n")
    return tmp_path


def test_the_command_prints_what_the_function_finds(files, capsys):
    arguments = ("compare", files / "a.npy", files / "b.npz", "--key", "z", "--permutations", 49)
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    x, y = np.load(files / "a.npy"), np.load(files / "b.npz")["z"]
    assert record["results"] == compare(x, y, permutations=49).to_dict()["results"]
    assert (record["n"], record["m"], record["d"], record["standardised"]) == (40, 50, 3, False)
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    for part in (
        "a.npy: 40 rows; b.npz: 50; 3 columns",
        "median",
        "95 % interval",
        "the sets differ, p = 0.02",
        "MMD²",
    ):
        assert part in out
    assert run(capsys, "compare", files / "a.npy", files / "b.csv", "--loss", "coral")[0] == 0  # labels are left out


def test_the_command_scales_columns_over_both_files(files, capsys):
    np.save(files / "wide.npy", np.load(files / "a.npy") * [1.0, 100.0, 0.01] + 5.0)
    y = np.load(files / "b.npz")["z"]
    np.save(files / "b.npy", y)
    np.save(files / "wide_b.npy", y * [1.0, 100.0, 0.01] + 5.0)
    options = ("--standardise", "--permutations", 0, "--json")
    plain = json.loads(run(capsys, "compare", files / "a.npy", files / "b.npy", *options)[1])
    wide = json.loads(run(capsys, "compare", files / "wide.npy", files / "wide_b.npy", *options)[1])
    for one, other in zip(plain["results"], wide["results"]):
        assert one["value"] == pytest.approx(other["value"], rel=1e-4)


def test_files_of_one_name_are_told_apart_by_their_folders(files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    for name, rows in (("one", 40), ("two", 30)):
        (files / name).mkdir()
        for part in range(2):
            np.save(files / name / f"{part}.npy", np.load("a.npy")[part:rows:2])
    _, out, _ = run(capsys, "compare", "one/*.npy", "two/*.npy", "--permutations", 0)
    assert out.startswith("one/*.npy: 40 rows; two/*.npy: 30; 3 columns")
    _, out, _ = run(capsys, "compare", "one/0.npy", "two/0.npy", "--permutations", 0)
    assert out.startswith("one/0.npy: 20 rows; two/0.npy: 15; 3 columns")


def test_a_value_below_zero_is_explained(files, capsys):
    x, _ = two_sets(60, 4)
    np.save(files / "even.npy", x[::2])
    np.save(files / "odd.npy", x[1::2])
    _, out, _ = run(capsys, "compare", files / "even.npy", files / "odd.npy", "--permutations", 0, "--loss", "mmd")
    value = compare(x[::2], x[1::2], permutations=0)["mmd"].value
    assert value < 0.0
    assert f"{value:.4g}" in out
    assert "mmd: the value is an unbiased estimate, below 0 by chance" in " ".join(out.split())
    assert not compare(*two_sets(40, 50, shift=0.8), loss="mmd", permutations=0).notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.npy", "missing.npy"), "no file at"),
        (("a.npy", "narrow.npy"), "3 and 2"),
        (("a.npy", "one.npy"), "at least 4 rows, got 1"),
        (("a.npy", "bad.npy"), "features of bad.npy have NaN"),
        (("a.npy", "b.npz"), "choose one with --key z"),
        (("a.npy", "a.npy", "--key", "z"), "key 'z' is for .npz files"),
        (("a.npy", "."), "give a .npy, .npz, .csv or .parquet file"),
        (("a.npy", "a.npy", "--kernel", "cosine"), "unknown kernel 'cosine'"),
        (("a.npy", "a.npy", "--loss", "l2"), "unknown --loss 'l2'"),
        (("a.npy", "a.npy", "--permutations", "-1"), "permutations must be at least 0, got -1"),
        (("a.npy", "a.npy", "--confidence", "95"), "below 1, got 95"),
        (("a.npy", "a.npy", "--kernel", "linear", "--scale", "median"), "--scale are for --kernel mmd or rbf"),
    ],
)
def test_the_command_refuses_in_one_line(files, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    x = np.load("a.npy")
    np.save("narrow.npy", x[:, :2])
    np.save("one.npy", x[:1])
    np.save("bad.npy", np.where(x > 1.0, np.nan, x))
    assert message in refused_by_command(capsys, files, "compare", *arguments)
