"""Representatives: the error by its definition, all subsets of few rows, weights by their conditions, other choices."""

import csv
import json
from itertools import combinations

import numpy as np
import pytest
import torch

from conftest import refused
from test_cli import refused as refused_by_command
from test_cli import run
from vardass.analysis.coresets import LARGEST, _Search, coreset, simplex_minimum
from vardass.kernels import LinearKernel, RBFMixture, fitted_kernel
from vardass.variance import uniform_variance
from vardass.view import ExactView, LowRankView

KERNEL = RBFMixture(scale="median")


def clusters(n, d=6, *, count=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    centres = 3.0 * torch.randn(count, d, generator=generator, dtype=dtype)
    which = torch.randint(count, (n,), generator=generator)
    return centres[which] + torch.randn(n, d, generator=generator, dtype=dtype)


def centred_matrix(x, kernel=KERNEL):
    """Inner products of φ - μ, so that the error of weights w on rows S is wᵀK_SS w."""
    matrix = fitted_kernel(kernel, x).square_matrix(x).double()
    means = matrix.mean(0)
    return matrix - means[:, None] - means + means.mean()


def error_of(matrix, rows, weights=None):
    rows = torch.as_tensor(rows)
    w = torch.full((len(rows),), 1.0 / len(rows), dtype=torch.float64) if weights is None else weights
    return float(w @ matrix[rows][:, rows] @ w)


def herding(matrix, size):
    """Each next row makes the error of all so far, of equal weight, smallest."""
    chosen = []
    for count in range(1, size + 1):
        total = matrix[:, chosen].sum(1) if chosen else torch.zeros(len(matrix), dtype=matrix.dtype)
        errors = (2.0 * total + matrix.diagonal()) / count**2
        errors[chosen] = torch.inf
        chosen.append(int(errors.argmin()))
    return chosen


def kmeans_plus_plus(x, size, generator):
    chosen = [int(torch.randint(len(x), (1,), generator=generator))]
    while len(chosen) < size:
        nearest = torch.cdist(x, x[chosen]).square().min(1).values
        chosen.append(int(torch.multinomial(nearest, 1, generator=generator)))
    return chosen


# the error


@pytest.mark.parametrize("weights", [True, False])
def test_the_error_is_that_of_its_definition(weights):
    x = clusters(80)
    found = coreset(x, 7, weights=weights)
    assert found.error == pytest.approx(error_of(centred_matrix(x), found.indices, found.weights), rel=1e-9)
    assert found.error_stderr == 0.0
    assert found.uniform_error == pytest.approx(uniform_variance(x, 7, kernel=KERNEL, replacement=False), rel=1e-9)
    assert float(found.weights.sum()) == pytest.approx(1.0)
    assert float(found.weights.min()) >= 0.0
    assert len(set(found.indices.tolist())) == 7
    assert found.indices.tolist() == sorted(found.indices.tolist())


def test_uniform_error_is_the_mean_over_all_subsets():
    x = clusters(9)
    found = coreset(x, 3)
    errors = [error_of(centred_matrix(x), rows) for rows in combinations(range(9), 3)]
    assert found.uniform_error == pytest.approx(np.mean(errors), rel=1e-9)
    # so many distinct draws have the same error on average
    same = found.spread / found.worth * (9 - found.worth) / 8
    assert same == pytest.approx(found.error, rel=1e-9)


def test_low_rank_errors_are_those_of_the_true_kernel():
    x = clusters(1500, dtype=torch.float32)
    matrix = centred_matrix(x)
    found = coreset(x, 20, rank=12)
    assert 0.0 < found.error_stderr < 0.05 * found.error
    truth = error_of(matrix, found.indices, found.weights)
    assert found.error == pytest.approx(truth, abs=4.0 * found.error_stderr)
    assert found.spread == pytest.approx(float(matrix.diagonal().mean()), abs=4.0 * found.error_stderr)
    assert coreset(x[:400], 20, rank=12).error_stderr == 0.0  # few enough to sum all pairs


def test_an_explicit_kernel_needs_no_estimate():
    x = clusters(1000)
    found = coreset(x, 10, kernel="linear", rank=4)
    assert found.error_stderr == 0.0
    weighted_mean = (found.weights[:, None] * x[found.indices]).sum(0)
    assert found.error == pytest.approx(float((x.mean(0) - weighted_mean).square().sum()), abs=1e-9)


# the choice


@pytest.mark.parametrize("seed", range(8))
def test_equal_weights_come_near_the_best_of_all_subsets(seed):
    x = clusters(11, 2, count=3, seed=seed)
    matrix = centred_matrix(x)
    for size in (2, 3, 4):
        best = min(error_of(matrix, rows) for rows in combinations(range(11), size))
        found = coreset(x, size, weights=False)
        assert best * (1 - 1e-9) <= found.error <= 1.25 * best


def test_most_tiny_cases_are_solved_to_the_optimum():
    solved = 0
    for seed in range(20):
        x = clusters(10, 2, count=3, seed=seed)
        matrix = centred_matrix(x)
        best = min(error_of(matrix, rows) for rows in combinations(range(10), 3))
        solved += coreset(x, 3, weights=False).error <= best * (1 + 1e-9)
    assert solved >= 14


@pytest.mark.parametrize("size", [5, 30])
@pytest.mark.parametrize("rank", [None, 128])
def test_nothing_else_is_better(size, rank):
    """Uniform draws on average, k-means++ and herding, each with optimal weights too."""
    x = clusters(600, seed=1)
    matrix = centred_matrix(x)
    generator = torch.Generator().manual_seed(0)
    found, equal = coreset(x, size, rank=rank), coreset(x, size, rank=rank, weights=False)

    def optimal(rows):
        start = torch.full((size,), 1.0 / size, dtype=torch.float64)
        block = matrix[rows][:, rows]
        return error_of(matrix, rows, simplex_minimum(block, torch.zeros_like(start), start))

    drawn = [torch.randperm(600, generator=generator)[:size] for _ in range(20)]
    spread_out = [kmeans_plus_plus(x, size, generator) for _ in range(20)]
    greedy = herding(matrix, size)
    assert found.error < 0.7 * found.uniform_error
    assert equal.error < 0.7 * equal.uniform_error
    assert found.error < min(optimal(rows) for rows in drawn)
    assert found.error < min(optimal(rows) for rows in spread_out)
    assert found.error < 1.02 * optimal(greedy)
    assert equal.error < 1.02 * error_of(matrix, greedy)
    assert found.error < 1.02 * equal.error


def test_all_pairs_choose_better_than_columns():
    """Up to 8,192 rows all pairs are looked at."""
    sets = [torch.randn(3000, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    ratios = [coreset(x, 32).error / coreset(x, 32, rank=128).error for x in sets]
    assert sum(ratios) / 3 < 0.98  # single ones are 0.94 to 0.98, by rounding alone


def test_many_rows():
    x = clusters(9_000, dtype=torch.float32)
    found = coreset(x, 40)
    assert found.error < 0.5 * found.uniform_error
    assert found.worth > 80


@pytest.mark.parametrize("weights", [True, False])
def test_more_representatives_than_columns_do_not_fool_the_features(weights):
    """Among 1,500 rows without clusters, in 16 columns: free choices would end above uniform draws."""
    x = torch.randn(1500, 16, generator=torch.Generator().manual_seed(0))
    found = coreset(x, 300, rank=100, weights=weights)
    assert found.error < 0.8 * found.uniform_error


def test_equal_seeds_give_equal_representatives():
    x = clusters(3000, dtype=torch.float32)
    first, second = (coreset(x, 10, seed=3) for _ in range(2))
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(first.weights, second.weights)
    assert torch.equal(coreset(x.numpy(), 10, seed=3).indices, first.indices)


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("free", [False, True])
def test_no_exchange_raises_the_error_and_each_knows_it(low_rank, free):
    generator = torch.Generator().manual_seed(0)
    matrix = centred_matrix(clusters(60))
    residual = 0.1 * torch.rand(60, generator=generator, dtype=torch.float64)
    features = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    problem = LowRankView(features - features.mean(0), residual) if low_rank else ExactView(matrix)
    truth = problem.features @ problem.features.T + residual.diag() if low_rank else matrix
    search = _Search(problem, torch.arange(6), torch.full((6,), 1 / 6, dtype=torch.float64))
    started = search.error
    for turn in range(30):
        before = search.error
        search.exchange(turn % 6, torch.randperm(60, generator=generator)[: 60 if turn % 2 else 20], free=free)
        assert search.error <= before
        assert search.error == pytest.approx(error_of(truth, search.chosen, search.weights), rel=1e-9)
        assert len(set(search.chosen.tolist())) == 6
        assert float(search.weights.sum()) == pytest.approx(1.0)
    assert search.error < 0.5 * started


# weights


def test_weights_fulfil_the_conditions_of_the_minimum():
    """Slopes are equal where weights are positive and not lower where they are 0."""
    generator = torch.Generator().manual_seed(0)
    zeros = 0
    for _ in range(30):
        root = torch.randn(12, 8, generator=generator, dtype=torch.float64)  # of rank 8: many minima
        matrix, linear = root @ root.T, torch.randn(12, generator=generator, dtype=torch.float64)
        w = simplex_minimum(matrix, linear, torch.full((12,), 1 / 12, dtype=torch.float64))
        slope = matrix @ w - linear
        level = float(slope[w > 1e-9].mean())
        assert torch.allclose(slope[w > 1e-9], torch.tensor(level, dtype=torch.float64), atol=1e-6)
        assert float(slope.min()) >= level - 1e-6
        assert float(w.min()) >= 0.0
        assert float(w.sum()) == pytest.approx(1.0)
        zeros += int((w == 0).sum())
    assert zeros > 50  # the limits were at work


def test_optimal_weights_are_those_of_a_grid():
    x = clusters(30, 2)
    matrix = centred_matrix(x)[:3, :3]
    w = simplex_minimum(matrix, torch.zeros(3).double(), torch.full((3,), 1 / 3).double())
    grid = [(a / 200, b / 200, 1 - (a + b) / 200) for a in range(201) for b in range(201 - a)]
    values = [float(torch.tensor(g).double() @ matrix @ torch.tensor(g).double()) for g in grid]
    assert float(w @ matrix @ w) <= min(values) + 1e-12
    assert np.allclose(w, grid[int(np.argmin(values))], atol=0.01)


# edges and bad input


def test_the_best_single_row_and_all_rows():
    x = clusters(50)
    one = coreset(x, 1)
    assert one.indices.tolist() == [int(centred_matrix(x).diagonal().argmin())]
    assert one.weights.tolist() == [1.0]
    every = coreset(x, 50)
    assert every.indices.tolist() == list(range(50))
    assert every.error == pytest.approx(0.0, abs=1e-12)
    assert every.uniform_error == 0.0
    alone = coreset(x[:1], 1)
    assert (alone.error, alone.uniform_error) == (pytest.approx(0.0, abs=1e-12), 0.0)


def test_rows_that_are_all_alike():
    found = coreset(torch.ones(40, 3), 4)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert len(set(found.indices.tolist())) == 4
    assert float(found.weights.sum()) == pytest.approx(1.0)


def test_copies_of_a_row_do_no_harm():
    x = clusters(30).repeat(4, 1)
    assert coreset(x, 10).error <= 1.3 * coreset(x[:30], 10).error


@pytest.mark.parametrize(
    ("change", "field", "named"),
    [
        ({"size": 0}, "size", ("between 1 and 20", 0, "20 rows")),
        ({"size": 21}, "size", ("between 1 and 20", 21, "20 rows")),
        ({"size": 2.5}, "size", ("whole number", 2.5)),
        ({"features": torch.full((20, 2), torch.nan)}, "features", ("NaN", "20 of 20")),
        ({"features": torch.zeros(0, 2)}, "features", ("one row", (0, 2))),
        ({"kernel": "cosine"}, "kernel", ("'cosine'", "linear")),
        ({"weights": "no"}, "weights", ("true", "false", "'no'")),
        ({"rank": 0}, "rank", ("between 1 and 2048", 0)),
        ({"kernel": LinearKernel}, None, ("kernel", "class LinearKernel", "LinearKernel()")),
        ({"features": 1e30 * torch.eye(20, 2), "kernel": "linear"}, None, ("LinearKernel()", "torch.float32", "1e+30")),
    ],
)
def test_bad_input_is_refused(change, field, named):
    options = {"features": clusters(20, 2), "size": 3, **change}
    with refused(*named, field=field):
        coreset(options.pop("features"), options.pop("size"), **options)


def test_a_coreset_has_an_upper_limit():
    with refused(LARGEST, LARGEST + 1, field="size"):
        coreset(torch.arange(LARGEST + 10.0), LARGEST + 1)


# the command


@pytest.fixture
def file(tmp_path):
    x = clusters(60, 3).float().numpy()
    names = np.array(["dog", "cat", "bird"])[np.arange(60) % 3]
    np.savez(tmp_path / "z.npz", x=x, labels=names, ids=1000 + np.arange(60))
    lines = [f"{a:.6g},{b:.6g},{c:.6g},{name}" for (a, b, c), name in zip(x.tolist(), names)]
    (tmp_path / "z.csv").write_text("\n".join(["p,q,r,animal", *lines]) + "\n")
    np.save(tmp_path / "z.npy", x)
    return tmp_path / "z.npz"


def test_the_command_writes_what_the_function_finds(file, capsys):
    code, out, err = run(capsys, "coreset", file, "--size", 8, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    expected = coreset(np.load(file)["x"], 8)
    assert record["indices"] == expected.indices.tolist()
    assert record["error"] == expected.error
    assert record["ids"] == [1000 + row for row in record["indices"]]
    with np.load(file.with_name("z.coreset.npz")) as written:
        assert written["indices"].tolist() == record["indices"]
        assert np.allclose(written["weights"], record["weights"])
        assert written["labels"].tolist() == [["dog", "cat", "bird"][row % 3] for row in record["indices"]]
        assert json.loads(str(written["meta"]))["error"] == expected.error
    code, out, err = run(capsys, "coreset", file, "--size", 8)  # an older result is replaced
    assert (code, err) == (0, "")
    for part in ("60 rows, 3 columns, 8 representatives", "uniform draws", "as good as", "median", "z.coreset.npz"):
        assert part in out


def test_the_command_writes_text(file, capsys):
    out = file.with_name("chosen.csv")
    source = file.with_suffix(".csv")
    options = ("--size", 5, "--labels", "animal", "--no-weights", "--out", out)
    assert run(capsys, "coreset", source, *options)[0] == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [list(row) for row in rows] == [["row", "weight", "labels"]] * 5
    assert all(row["labels"] == ["dog", "cat", "bird"][int(row["row"]) % 3] for row in rows)
    assert all(float(row["weight"]) == 0.2 for row in rows)
    assert run(capsys, "coreset", source, *options)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.npy", "--size", 3), "no file at"),
        (("z.npy", "--size", 61), "between 1 and 60, got 61"),
        (("z.npy", "--size", 0), "got 0"),
        (("z.npy",), "Missing option"),
        (("bad.npy", "--size", 3), "features of bad.npy have NaN"),
        (("z.npy", "--size", 3, "--kernel", "cosine"), "unknown kernel 'cosine'"),
        (("z.npy", "--size", 3, "--out", "z.txt"), "change its ending"),
        (("z.npz", "--size", 3, "--out", "z.npz"), "is the input file"),
        (("z.npy", "--size", 3, "--out", "z.npz"), "not as vardass coreset wrote it"),
        (("z.npy", "--size", 3, "--out", "z.csv"), "not as vardass coreset wrote it"),
        (("z.npy", "--size", 3, "--out", "none/c.npz"), "there is no folder"),
        (("z.npz", "--size", 3, "--labels", "breed"), "no array or column 'breed' for --labels"),
        (("z.npz", "--size", 3, "--ids", "x"), "no table of numbers"),
        (("z.csv", "--size", 3), "column 'animal' is string"),
    ],
)
def test_the_command_refuses_in_one_line(file, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(file.parent)
    np.save("bad.npy", np.full((9, 2), np.nan))
    assert message in refused_by_command(capsys, file.parent, "coreset", *arguments)
