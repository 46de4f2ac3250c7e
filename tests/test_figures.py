"""Figures 1 to 3: their numbers against brute force, their files, and the command."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vardass.errors import InputError
from vardass.figures import Claim, FigureResult, make_figure, write_figure
from vardass.figures.assignment import (
    AssignmentProblem,
    Scale,
    fixed_distance_rows,
    random_problem,
    relaxed_value,
    single_moves,
    solver_rows,
    trials_of_budget,
)
from vardass.figures.exact import (
    StratumMoments,
    coral_variances,
    lognormal_moments,
    mmd_variance,
    normal_moments,
)
from vardass.figures.figure1 import COVARIANCES, of_partitions, rho_text
from vardass.figures.figure2 import strata_moments
from vardass.figures.populations import all_partitions, random_covariances, shaken_labels
from vardass.kernels import LinearKernel
from vardass.solvers.dynamic_kmeans import greedy_assignment
from vardass.theory import lemma1_variance, log_stirling2, spearman, theorem4
from vardass.variance import stratified_variance, uniform_variance

DOUBLE = torch.float64


@functools.cache
def quick(number: int) -> FigureResult:
    return make_figure(number, quick=True)


def all_draws(x: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Every batch of one draw from each stratum (b, k, d) and its probability (b,); all are equally likely."""
    members = [[i for i in range(len(x)) if int(labels[i]) == h] for h in range(k)]
    picks = torch.tensor(list(itertools.product(*members)))
    return x[picks], torch.full((len(picks),), 1.0 / len(picks), dtype=DOUBLE)


def total_variance(values: Tensor, probability: Tensor) -> float:
    """Sum over entries of the variance of ``values`` (b, ...)."""
    flat = values.flatten(1) if values.ndim > 1 else values[:, None]
    mean = probability @ flat
    return float(probability @ (flat - mean).square().sum(1))


def skewed_points(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).exp()


# exact variances


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(3, 8), d=st.integers(1, 3), data=st.data())
def test_variances_are_those_over_all_draws(seed: int, n: int, d: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, min(n, 4)))
    x = skewed_points(n, d, seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    labels = torch.randint(k, (n,), generator=torch.Generator().manual_seed(seed + 1))
    labels[order[:k]] = torch.arange(k)
    sizes = torch.bincount(labels, minlength=k).double()
    shift = torch.linspace(-1.0, 2.0, d, dtype=DOUBLE)
    batches, probability = all_draws(x, labels, k)
    moments = StratumMoments.of_points(x, labels, k)
    means = torch.einsum("bkd,k->bd", batches, sizes / n)
    loss = (means - (x.mean(0) - shift)).square().sum(1)
    expected = total_variance(loss, probability)
    assert float(mmd_variance(moments, sizes / n, shift)) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    around = [batches - means[:, None], batches - x.mean(0)]
    r_hat, r_known = (torch.einsum("bki,bkj,k->bij", z, z, sizes) for z in around)
    target, surrogate = coral_variances(moments, sizes)
    assert float(target) == pytest.approx(total_variance(r_hat / (n - 1), probability), rel=1e-9, abs=1e-12)
    assert float(surrogate) == pytest.approx(total_variance(r_known / n, probability), rel=1e-9, abs=1e-12)


def test_scalar_normal_strata_are_theorem_4() -> None:
    means, variances, sizes = [0.0, 1.0, -2.0, 0.5], [1.0, 0.5, 2.0, 0.0], [1, 2, 3, 5]
    moments = normal_moments(
        torch.tensor(means, dtype=DOUBLE)[:, None], torch.tensor(variances, dtype=DOUBLE)[:, None, None]
    )
    target, surrogate = coral_variances(moments, torch.tensor(sizes, dtype=DOUBLE))
    theorem = theorem4(means, variances, sizes)
    assert float(target) == pytest.approx(theorem.var_r, rel=1e-12)
    assert float(surrogate) == pytest.approx(theorem.var_r_known_mean, rel=1e-12)


@pytest.mark.parametrize("distribution", ["normal", "lognormal"])
def test_moments_match_simulation(distribution: str) -> None:
    generator = torch.Generator().manual_seed(0)
    d, count = 3, 400_000
    mean = 0.3 * torch.randn(d, dtype=DOUBLE, generator=generator)
    root = 0.25 * torch.randn(d, d, dtype=DOUBLE, generator=generator)
    function = normal_moments if distribution == "normal" else lognormal_moments
    moments = function(mean, root @ root.T)
    z = mean + torch.randn(count, d, dtype=DOUBLE, generator=generator) @ root.T
    z = z if distribution == "normal" else z.exp()
    x = z - moments.mean
    square = x.square().sum(1)
    for exact, sample in (
        (moments.mean, z),
        (moments.cov.flatten(), (x[:, :, None] * x[:, None, :]).flatten(1)),
        (moments.third, square[:, None] * x),
        (moments.fourth[None], square.square()[:, None]),
    ):
        error = sample.std(0) / math.sqrt(count)
        assert bool(((sample.mean(0) - exact).abs() < 5 * error).all())
        assert bool((error < 0.05 * exact.abs().max().clamp_min(0.02)).all())


# populations


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 2), (6, 3), (7, 7), (7, 1)])
def test_all_partitions_are_there_once(n: int, k: int) -> None:
    rows = all_partitions(n, k)
    assert len(rows) == round(math.exp(log_stirling2(n, k)))
    as_sets = {frozenset(frozenset(i for i in range(n) if row[i] == h) for h in range(k)) for row in rows.tolist()}
    assert len(as_sets) == len(rows)
    assert all(frozenset() not in partition for partition in as_sets)


def test_random_covariances_are_what_they_are_called() -> None:
    generator = torch.Generator().manual_seed(0)
    for kind in COVARIANCES:
        cov = random_covariances(200, 5, kind, generator)
        assert bool((torch.linalg.eigvalsh(cov) > -1e-12).all())
        off = cov - torch.diag_embed(cov.diagonal(dim1=1, dim2=2))
        assert bool(off.any()) == (kind != "diagonal")
        trace = cov.diagonal(dim1=1, dim2=2).sum(1)
        assert (float(trace.max() / trace.min()) > 20.0) == (kind == "full, scaled")


def test_shaken_labels_go_from_the_best_to_random_ones() -> None:
    best = torch.arange(60) % 4
    rows = shaken_labels(best, 4, 11, torch.Generator().manual_seed(0))
    kept = (rows == best).double().mean(1)
    assert torch.equal(rows[0], best)
    assert 0.1 < float(kept[-1]) < 0.45
    assert float(kept[5]) == pytest.approx(0.5 + 0.5 / 4, abs=0.2)
    assert all(len(row.unique()) == 4 for row in rows)


# figure 1


def test_figure_1_points_equal_enumeration_of_all_draws() -> None:
    x = skewed_points(6, 2, 3)
    m = torch.tensor([0.5, -1.0], dtype=DOUBLE)
    partitions = all_partitions(6, 3)
    surrogate, target, exact = of_partitions(x, m, partitions, 3)
    for i in (0, 17, len(partitions) - 1):
        labels = partitions[i]
        batches, probability = all_draws(x, labels, 3)
        means = torch.einsum("bkd,k->bd", batches, torch.bincount(labels).double() / 6)
        assert float(surrogate[i]) == pytest.approx(total_variance(means, probability), rel=1e-9, abs=1e-12)
        assert float(surrogate[i]) == pytest.approx(
            stratified_variance(x, labels, kernel="linear"), rel=1e-9, abs=1e-12
        )
        loss = (means - (x.mean(0) - m)).square().sum(1)
        assert float(exact[i]) == pytest.approx(total_variance(loss, probability), rel=1e-9, abs=1e-12)
        cov = torch.cov(means.T, correction=0)
        lemma = 2.0 * float((cov @ cov).trace()) + 4.0 * float(m @ cov @ m)
        assert float(target[i]) == pytest.approx(lemma, rel=1e-9, abs=1e-12)


def test_figure_1_numbers_verdicts_and_words_agree() -> None:
    result = quick(1)
    first = result.claims[0]
    for d in (1, 4, 16, 64):
        for population in (*COVARIANCES, "partitions"):
            found = result.select(population=population, d=d)
            assert len(found) == 60
            rho = spearman(*(torch.tensor([row[name] for row in found]) for name in ("target", "surrogate")))
            assert rho_text(rho) in result.text()
            assert (rho == 1.0) == (d == 1)
    assert first.held
    assert "ρ = 1" in first.paper
    diagonal, scaled, full = result.claims[1:4]
    assert "0.99" in diagonal.paper
    rhos = [
        spearman(
            *(torch.tensor([row[n] for row in result.select(population="full", d=d)]) for n in ("target", "surrogate"))
        )
        for d in (4, 16, 64)
    ]
    assert full.held == (min(rhos) > 0.99)
    assert rho_text(min(rhos)) in full.evidence
    assert not full.held
    assert scaled.held == (float(scaled.evidence.split()[2]) > 0.99)


def test_figure_1_says_what_larger_diagonal_variances_give() -> None:
    """The sentence's ρ at 2Σ, from Lemma 1 itself on the covariances that were drawn."""
    generator = torch.Generator().manual_seed(0)
    cov = random_covariances(50, 4, "diagonal", generator)
    m, zero = torch.ones(4, dtype=DOUBLE), torch.zeros(4, 4, dtype=DOUBLE)
    g = cov.diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(lemma1_variance(m, 2 * cov, zero), 4 * lemma1_variance(m, cov, zero) - 8 * g)
    result = quick(1)
    doubled = []
    for d in (4, 16, 64):
        found = result.select(population="diagonal", d=d)
        target, surrogate = (torch.tensor([row[n] for row in found], dtype=DOUBLE) for n in ("target", "surrogate"))
        doubled.append(spearman(4 * target - 8 * surrogate, surrogate))
    assert f"twice as large give {rho_text(min(doubled))} to {rho_text(max(doubled))}" in result.text()


def test_figure_1_diagonal_covariances_have_the_surrogate_inside_the_target() -> None:
    """With m = 1 the target is 2 Σ v² + 4 Σ v, so that 4 times the surrogate is a lower bound on it."""
    for row in quick(1).select(population="diagonal", d=16):
        assert row["target"] > 4.0 * row["surrogate"]  # type: ignore[operator]


# figure 2


def test_figure_2_rows_are_the_variances_of_simulated_batches() -> None:
    """Draw batches from the strata of one plotted point and recompute R̂ and R̂' from their definitions."""
    sizes = torch.arange(1, 9, dtype=DOUBLE)
    n, d, count = 36, 2, 100_000
    means, covariances = (t[0] for t in _strata_of_first_point(d))
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(count, 8, d, dtype=DOUBLE, generator=generator)
    z = means + torch.einsum("hij,bhj->bhi", torch.linalg.cholesky(covariances), noise)
    batch_mean = torch.einsum("bhi,h->bi", z, sizes) / n
    mean = (sizes[:, None] * means).sum(0) / n
    moments = normal_moments(means, covariances)
    for value, centre, divisor in zip(coral_variances(moments, sizes), (batch_mean[:, None], mean), (n - 1, n)):
        x = z - centre
        r = torch.einsum("bhi,bhj,h->bij", x, x, sizes).flatten(1) / divisor
        squares = (r - r.mean(0)).square().sum(1)
        error = float(squares.std()) / math.sqrt(count)
        assert abs(float(squares.mean()) - float(value)) < 5 * error
        assert error < 0.02 * float(value)


def _strata_of_first_point(d: int) -> tuple[Tensor, Tensor]:
    from vardass.figures.populations import random_strata

    return random_strata(1, 8, d, torch.Generator().manual_seed(0), scaled=False)


def test_figure_2_numbers_verdicts_and_words_agree() -> None:
    result = quick(2)
    lowest = {"scaled": 1.0, "one scale": 1.0}
    for distribution in ("normal", "lognormal"):
        for d in (1, 2, 8, 32):
            for population in lowest:
                found = result.select(distribution=distribution, d=d, population=population)
                rho = spearman(*(torch.tensor([row[name] for row in found]) for name in ("target", "surrogate")))
                assert f"{rho_text(rho)} (d = {d})" in result.text()
                lowest[population] = min(lowest[population], rho)
    for claim, rho in zip(result.claims, lowest.values(), strict=True):
        assert claim.held == (rho > 0.99)
        assert rho_text(rho) in claim.evidence


def test_figure_2_first_panel_is_theorem_4() -> None:
    generator = torch.Generator().manual_seed(0)
    moments = strata_moments("normal", 60, 1, generator, scaled=True)
    found = quick(2).select(distribution="normal", d=1, population="scaled")
    for i in (0, 30, 59):
        theorem = theorem4(moments.mean[i, :, 0], moments.cov[i, :, 0, 0], torch.arange(1, 9))
        assert found[i]["target"] == pytest.approx(theorem.var_r, rel=1e-10)
        assert found[i]["surrogate"] == pytest.approx(theorem.var_r_known_mean, rel=1e-10)


# figure 3

TINY = Scale(problems=1, trials=(1, 10), parallel=(1, 10), fixed_trials=10, runs=10, repeats=3)


def loss_by_definition(distances: Tensor, labels: Tensor) -> float:
    """Σ_j |S_j| Σ_{i in S_j} D_ij, one term at a time."""
    total = 0.0
    for i, a in enumerate(labels.tolist()):
        total += float(distances[i, a]) * sum(b == a for b in labels.tolist())
    return total


def test_single_moves_end_where_no_move_helps() -> None:
    generator = torch.Generator().manual_seed(0)
    distances = torch.rand(9, 3, dtype=DOUBLE, generator=generator) + 0.2
    start = distances.argmin(1)
    found = single_moves(distances, start)
    least = loss_by_definition(distances, found)
    assert least < loss_by_definition(distances, start)
    for i, j in itertools.product(range(9), range(3)):
        moved = found.clone()
        moved[i] = j
        assert loss_by_definition(distances, moved) >= least - 1e-9
    whole = (torch.tensor(labels) for labels in itertools.product(range(3), repeat=9))
    optimum = min(_fast_loss(distances, labels) for labels in whole)
    assert optimum <= least <= 1.05 * optimum  # close to the best of all 3⁹ assignments


def _fast_loss(distances: Tensor, labels: Tensor) -> float:
    member = torch.nn.functional.one_hot(labels, 3).double()
    return float(member.sum(0) @ (member * distances).sum(0))


def test_figure_3_losses_are_those_of_the_assignments() -> None:
    generator = torch.Generator().manual_seed(0)
    problem = random_problem(generator)
    assert problem.distances.shape == (100, 16)
    state = generator.get_state()
    rows, split = fixed_distance_rows(problem, 0, TINY, generator)
    losses = {(panel, method, trials, parallel): loss for panel, _, method, trials, parallel, loss in rows}
    nearest = problem.distances.argmin(1)
    assert losses["a", "unweighted", 0, 0] == pytest.approx(loss_by_definition(problem.distances, nearest), rel=1e-12)
    generator.set_state(state)  # the first greedy runs: three of one trial
    runs = [greedy_assignment(problem.distances, trials=1, parallel=10, generator=generator) for _ in range(3)]
    mean = sum(loss_by_definition(problem.distances, labels) for labels in runs) / 3
    assert losses["b", "Algorithm 2", 1, 10] == pytest.approx(mean, rel=1e-12)
    assert losses["a", "Algorithm 2, then single moves", 10, 10] <= losses["b", "Algorithm 2", 10, 10]
    assert losses["a", "interior point, relaxed", 0, 0] < losses["a", "interior point, rounded", 0, 0]
    assert 0.0 <= split <= 1.0


def test_relaxed_value_is_the_loss_where_nothing_is_split() -> None:
    distances = torch.rand(7, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 1, 2, 0, 0, 1])
    whole = torch.nn.functional.one_hot(labels, 3).double()
    assert relaxed_value(distances, whole) == pytest.approx(loss_by_definition(distances, labels), rel=1e-12)
    one_point = torch.ones(1, 2, dtype=DOUBLE)
    assert relaxed_value(one_point, 0.5 * one_point) == 0.5  # both whole assignments cost 1


def test_budget_counts_sequential_steps() -> None:
    scale = Scale(problems=1, trials=(1,), parallel=(1,), fixed_trials=100, runs=1, repeats=1)
    assert [trials_of_budget(p, scale) for p in (1, 2, 10, 20)] == [10, 20, 100, 200]  # of 100, 50, 10 and 5 steps


def test_figure_3_solvers_stay_between_bound_and_uniform() -> None:
    problem = random_problem(torch.Generator().manual_seed(0))
    rows = {method: loss for _, _, method, _, _, loss in solver_rows(problem, 0, 0)}
    uniform = uniform_variance(problem.points, 16, kernel=LinearKernel())
    bound = rows.pop("lower bound")
    assert len(rows) == 4
    assert all(bound <= loss < uniform for loss in rows.values())
    assert rows["min-sum"] < rows["kernel-kmeans"]


def test_figure_3_numbers_verdicts_and_words_agree() -> None:
    result = quick(3)
    fixed = [row for row in result.select() if row["panel"] != "d" and row["method"] != "interior point, relaxed"]
    for problem in range(3):
        of_problem = [row for row in fixed if row["problem"] == problem]
        best = min(float(row["loss"]) for row in of_problem)
        for row in of_problem:
            assert row["excess_percent"] == pytest.approx(100.0 * (float(row["loss"]) / best - 1.0), abs=1e-9)

    def mean(**values: str | int) -> float:
        found = [float(row["excess_percent"]) for row in result.select(**values)]
        assert len(found) == 3
        return sum(found) / 3

    assert f"unweighted {mean(panel='a', method='unweighted'):.1f} %" in result.text()
    assert f"min-sum {mean(panel='d', method='min-sum'):.1f} %" in result.text()
    by_trials = [mean(panel="b", trials=trials) for trials in (1, 10, 100, 1000)]
    assert by_trials == sorted(by_trials, reverse=True)
    poor, average, budget, integral, local = result.claims
    steps = {p: mean(panel="c", method="fixed steps", parallel=p) for p in (1, 10)}
    assert budget.held == (steps[10] < steps[1])
    assert f"{steps[10]:.1f} %" in budget.evidence
    single = {p: mean(panel="c", method="one trial", parallel=p) for p in (1, 2, 5, 10, 20)}
    assert average.held == (list(single.values()) == sorted(single.values()))
    assert poor.held == ((100.0 + by_trials[0]) / (100.0 + by_trials[-1]) > 1.05)
    assert not integral.held
    lowered = [
        a["loss"] < b["loss"]  # type: ignore[operator]
        for a, b in zip(
            result.select(method="Algorithm 2, then single moves"), result.select(panel="b", trials=1000), strict=True
        )
    ]
    assert local.held == (not all(lowered))
    assert f"on {sum(lowered)} of 3" in local.evidence


def test_an_equal_problem_gives_equal_rows() -> None:
    problem = random_problem(torch.Generator().manual_seed(2))
    twin = AssignmentProblem(problem.points.clone(), problem.distances.clone())
    rows = [fixed_distance_rows(p, 0, TINY, torch.Generator().manual_seed(5)) for p in (problem, twin)]
    assert rows[0] == rows[1]


# files


@pytest.mark.parametrize("number", [1, 2, 3])
def test_files_are_whole_and_the_same_again(number: int, tmp_path: Path) -> None:
    result = quick(number)
    written = write_figure(result, tmp_path / "one", provenance={"command": "vardass figure"})
    assert [path.name for path in written] == [f"figure{number}.{e}" for e in ("png", "svg", "csv", "md", "json")]
    png, svg, table, text, record = (path.read_bytes() for path in written)
    again = make_figure(number, quick=True)
    assert again.to_csv().encode() == table
    assert again.text() == result.text()
    assert make_figure(number, quick=True, seed=1).to_csv().encode() != table
    second = write_figure(again, tmp_path / "two")
    assert second[1].read_bytes() == svg
    assert b"<dc:date>" not in svg
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert (width, height) == tuple(round(150 * inches) for inches in result.size)
    assert 20_000 < len(png) < 1_000_000
    rows = list(csv.reader(io.StringIO(table.decode())))
    assert tuple(rows[0]) == result.columns
    assert len(rows) == 1 + len(result.rows)
    assert all(sentence in text.decode() for sentence in (*result.sentences, *map(str, result.claims)))
    details = json.loads(record)
    assert details["settings"]["seed"] == 0
    assert details["command"] == "vardass figure"
    assert [claim["held"] for claim in details["claims"]] == [claim.held for claim in result.claims]


def test_a_verdict_is_part_of_the_words() -> None:
    assert str(Claim("a is b", True, "1 = 1")) == "Held: a is b. Measured: 1 = 1."
    assert str(Claim("a is b", False, "1 < 2")).startswith("Did not hold: a is b.")


def test_rho_is_never_rounded_up_to_one() -> None:
    assert [rho_text(rho) for rho in (1.0, 0.99999, 0.98765, -0.5)] == ["1 exactly", "0.9999", "0.9876", "-0.5000"]


def test_bad_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no figure 6; choose one of 1, 2, 3, 4, 5"):
        make_figure(6)
    with pytest.raises(InputError, match="seed must be a whole number of at least 0, got -1"):
        make_figure(1, seed=-1)
    with pytest.raises(InputError, match="no column 'x'; it has population"):
        quick(1).select(x=1)
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(InputError, match="cannot make the folder"):
        write_figure(quick(1), taken / "folder")


def test_the_command_writes_files_and_says_what_they_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vardass.cli.figure import figure

    figure("2", out=tmp_path / "out", seed=3, quick=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Figure 2: ")
    assert make_figure(2, seed=3, quick=True).text() in printed
    assert str(tmp_path / "out" / "figure2.csv") in printed
    record = json.loads((tmp_path / "out" / "figure2.json").read_text())
    assert record["command"].endswith("--seed 3 --quick")
    assert record["seconds"] > 0
    for bad in ("0", "6", "one", "1.0"):
        with pytest.raises(InputError, match=f"no figure '{bad}'; choose one of 1, 2, 3, 4, 5, all"):
            figure(bad, out=tmp_path)
