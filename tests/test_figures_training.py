"""Figures 4 and 5: the variances they show are the true ones, and the words follow the numbers."""

import csv
import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from vardass.errors import InputError
from vardass.figures import aging_findings
from vardass.figures.aging import Aging, Gram, StratumPairs, Trace, Watch, Way
from vardass.figures.aging_findings import Summary, claims, intervals, summarise
from vardass.figures.base import render
from vardass.figures.batch_sizes import KERNEL, METHODS, Point, measure, measure_coupled, of_method
from vardass.figures.figure4 import _claims as claims_of_figure4
from vardass.figures.figure4 import figure4
from vardass.figures.figure5 import figure5
from vardass.kernels import RBFMixture
from vardass.refresh import DriftRefresh, NeverRefresh, RefreshEvery, VarianceRefresh
from vardass.samplers.base import derive_seed
from vardass.solvers import stratify
from vardass.strata import Strata
from vardass.variance import stratified_variance, uniform_variance

RBF = RBFMixture(gammas=(0.5,), scale=1.0)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def points(n=6, d=3, seed=0):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def strata_of(labels):
    labels = torch.tensor(labels)
    return Strata(labels, k=int(labels.max()) + 1, variance=0.0, uniform_variance=0.0)


def squared_error(kernel, rows, weights):
    """|Σ w φ(z) - mean φ|² from the whole kernel matrix, by the definition."""
    coefficients = torch.full((len(kernel),), -1.0 / len(kernel), dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        coefficients[row] += weight
    return float(coefficients @ kernel @ coefficients)


# --- the variance of given designs --------------------------------------------------------------------


def test_stratified_variance_is_the_mean_over_all_batches():
    z, strata = points(), strata_of([0, 0, 0, 1, 1, 2])
    kernel = RBF.matrix(z)
    weights = [len(strata.members(h)) / 6 for h in range(3)]
    batches = list(itertools.product(*(strata.members(h).tolist() for h in range(3))))
    expected = sum(squared_error(kernel, batch, weights) for batch in batches) / len(batches)
    shown = Gram(z, RBF).stratified(StratumPairs(strata))
    assert shown == pytest.approx(expected, rel=1e-12)
    assert shown == pytest.approx(stratified_variance(z, strata.labels, kernel=RBF), rel=1e-12)


def test_uniform_variance_is_the_mean_over_all_batches_and_the_closed_form():
    z = points(n=4)
    kernel = RBF.matrix(z)
    expected = sum(squared_error(kernel, batch, [1 / 3] * 3) for batch in itertools.product(range(4), repeat=3)) / 4**3
    assert Gram(z, RBF).uniform(3) == pytest.approx(expected, rel=1e-12)
    assert Gram(z, RBF).uniform(3) == pytest.approx(uniform_variance(z, 3, kernel=RBF), rel=1e-12)


def test_drawn_batches_are_measured_by_the_definition():
    z = points()
    rows, weights = torch.tensor([[0, 3, 5], [2, 2, 4]]), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    expected = sum(squared_error(RBF.matrix(z), batch, weights) for batch in rows) / 2
    assert Gram(z, RBF).drawn(rows, weights) == pytest.approx(expected, rel=1e-12)


def test_strata_of_one_sample_each_have_no_variance():
    assert Gram(points(), RBF).stratified(StratumPairs(strata_of([0, 1, 2, 3, 4, 5]))) == pytest.approx(0, abs=1e-15)


# --- strata that age ----------------------------------------------------------------------------------


def moving(step):
    """Points on their way from one cloud to another, as features in training."""
    return points(40, seed=0) + 0.2 * step * points(40, seed=1)


def watch_of(ways, *, every=1, steps=9):
    watch = Watch(ways, 5, kernel=RBF, every=every, seed=3)
    for step in range(steps):
        watch.at(step, lambda step=step: moving(step))
    return watch


def test_at_a_refresh_the_curve_is_the_variance_that_the_solver_reports():
    ways = [Way("paper", partial(RefreshEvery, 4)), Way("ours", partial(RefreshEvery, 3), "min-sum")]
    paper, ours = watch_of(ways).followers
    assert (paper.trace.refreshes, ours.trace.refreshes) == ([0, 4, 8], [0, 3, 6])
    for follower, solver in ((paper, "dynamic-kmeans"), (ours, "min-sum")):
        for step in follower.trace.refreshes:
            found = stratify(moving(step), 5, kernel=RBF, solver=solver, seed=derive_seed(3, step))
            assert follower.trace.variances[step] == pytest.approx(found.variance, rel=1e-9)


def test_between_refreshes_the_old_strata_are_measured_on_the_new_features():
    watch = watch_of([Way("paper", partial(RefreshEvery, 4))])
    (follower,) = watch.followers
    old = stratify(moving(4), 5, kernel=RBF, solver="dynamic-kmeans", seed=derive_seed(3, 4))
    expected = stratified_variance(moving(7), old.labels, kernel=RBF)
    assert follower.trace.variances[7] == pytest.approx(expected, rel=1e-12)
    assert watch.uniform == pytest.approx([uniform_variance(moving(s), 5, kernel=RBF) for s in range(9)], rel=1e-12)


def test_refreshes_between_probes_count_and_take_the_features_of_their_own_step():
    (follower,) = watch_of([Way("paper", partial(RefreshEvery, 4))], every=3).followers
    assert follower.trace.refreshes == [0, 4, 8]
    old = stratify(moving(4), 5, kernel=RBF, solver="dynamic-kmeans", seed=derive_seed(3, 4))
    assert len(follower.trace.variances) == 3
    assert follower.trace.variances[2] == pytest.approx(
        stratified_variance(moving(6), old.labels, kernel=RBF), rel=1e-12
    )


def test_ordered_batches_have_less_variance_than_their_strata():
    ways = [Way("ordered", partial(RefreshEvery, 100), "ordered"), Way("strata", partial(RefreshEvery, 100), "min-sum")]
    ordered, strata = watch_of(ways, steps=1).followers
    assert ordered.trace.variances[0] < 0.8 * strata.trace.variances[0]


def test_policies_that_observe_are_told_and_refresh_when_their_limit_is_passed():
    ways = [
        Way("drift", partial(DriftRefresh, threshold=0.2, shortest=1, window=1)),
        Way("variance", partial(VarianceRefresh, tolerance=0.05, shortest=1)),
        Way("patient", partial(DriftRefresh, threshold=1e6, shortest=1, window=1)),
        Way("once", partial(RefreshEvery, 100)),
    ]
    watch = watch_of(ways)
    drift, variance, patient, once = watch.followers
    assert len(drift.trace.refreshes) > 1
    assert patient.trace.refreshes == once.trace.refreshes == [0]
    assert patient.trace.variances == once.trace.variances
    # it is asked before it is measured: never more than the tolerance above the last refresh
    ratio = [v / u for v, u in zip(variance.trace.variances, watch.uniform, strict=True)]
    for step in range(9):
        last = max(refresh for refresh in variance.trace.refreshes if refresh <= step)
        assert ratio[step] <= 1.05 * ratio[last]
    assert len(variance.trace.refreshes) > 1


def test_a_way_without_strata_and_an_unknown_maker_are_refused():
    with pytest.raises(InputError, match="'never' has made no strata"):
        watch_of([Way("never", NeverRefresh)])
    with pytest.raises(InputError, match="got 'k-median'"):
        Way("x", RefreshEvery, "k-median")


# --- what the numbers say -----------------------------------------------------------------------------


def test_intervals_go_from_a_refresh_to_the_last_probe_before_the_next():
    steps = [0, 5, 10, 15, 20]
    trace = Trace([1.0, 2.0, 4.0, 1.0, 3.0], [0, 12])
    fresh = Trace([1.0, 1.0, 2.0, 1.0, 1.0], [0, 5, 10, 15, 20])
    first, second = intervals(steps, trace, fresh)
    assert (first.start, first.rise, first.excess) == (0, 4.0, 2.0)
    assert (second.start, second.rise, second.excess) == (12, 3.0, 3.0)


def made_up(growth, late=1.0):
    """A run in which strata of age a have 1 + growth * a of the fresh variance, by ``late`` times that later on."""
    steps = list(range(0, 400, 5))
    names = {"T = 10": 10, "T = 50": 50, "T = 100": 100, "on drift": 50, "on variance": 400, "growing T": 200}

    def trace(period):
        values = [0.5 * (1.0 + growth * (s % period) * (late if s >= 200 else 1.0)) for s in steps]
        return Trace(values, list(range(0, 400, period)), seconds=1.0)

    traces = {name: trace(period) for name, period in names.items()}
    return Aging(steps, [1.0] * len(steps), traces, {"training": 4.0, "features": 0.0, "solver": 0.1})


def held(growth, late=1.0):
    return [claim.held for claim in claims(summarise([made_up(growth, late)], (10, 50, 100), 100))]


def test_claims_follow_the_numbers():
    assert held(1e-3, late=0.1) == [True, True, True, True]
    assert held(1e-3, late=3.0) == [True, True, False, False]  # the growing one refreshes too rarely late
    assert held(0.0)[:3] == [False, False, False]
    assert held(-1e-4)[:2] == [False, False]


def test_summary_has_means_counts_and_shares():
    summary = summarise([made_up(1e-3)], (10, 50, 100), 100)
    cell = summary.cells["T = 100"]
    assert isinstance(summary, Summary)
    assert cell.refreshes == 4
    assert cell.relative == pytest.approx(50.0 * (1 + 1e-3 * 47.5))
    assert cell.rise == pytest.approx(1.095)
    assert cell.excess == pytest.approx(1.095 / 1.005)
    assert cell.share == pytest.approx(100 * 0.4 / 4.4)
    assert summary.noise == 0.0
    run = made_up(1e-3)
    run.traces["T = 100"].maker = "min-sum"  # not what the run trained with: its own second, for both domains
    assert summarise([run], (10, 50, 100), 100).cells["T = 100"].share == pytest.approx(100 * 2.0 / 6.0)
    assert set(summary.others) == {"on drift", "on variance", "growing T"}


def test_noise_of_the_solver_is_seen_through_a_trend():
    run = made_up(0.0)
    generator = torch.Generator().manual_seed(0)
    shaken = [0.5 * math.exp(0.02 * float(torch.randn((), generator=generator)) - step / 500.0) for step in run.steps]
    run = replace(run, traces={"T = 10": Trace(shaken, list(run.steps))})
    assert aging_findings._noise([run], "T = 10") == pytest.approx(0.02, rel=0.3)


def points_of_figure4(paper):
    """Made-up points in which the paper's solver has the given share of the variance of uniform draws."""
    shares = {"uniform": 1.0, METHODS[0].name: 0.6, METHODS[1].name: 0.5}
    rows = []
    for k, share in zip((2, 4, 128, 256), paper, strict=True):
        rows += [Point(k, name, value / k, value, 0.0) for name, value in {**shares, METHODS[2].name: share}.items()]
        rows.append(Point(k, "lower bound", 0.001 / k, 0.001, 0.0))
    return rows


def test_claims_of_figure4_follow_the_numbers():
    gap, lowest, small, overlap, fifty = claims_of_figure4(points_of_figure4((0.4, 0.3, 0.1, 0.02)))
    assert [claim.held for claim in (gap, lowest, small, overlap, fifty)] == [True, True, True, False, True]
    assert "50-fold" in fifty.evidence
    assert "1e+03-fold" in fifty.evidence
    gap, lowest, *_, fifty = claims_of_figure4(points_of_figure4((0.3, 0.55, 0.1, 0.05)))
    assert (gap.held, lowest.held, fifty.held) == (False, False, False)
    assert "3 of 4" in lowest.evidence


# --- the figures --------------------------------------------------------------------------------------


def test_points_of_figure4_are_those_of_the_solvers():
    z = points(60, 4).float()
    found, bounds = measure(z, [4, 8], seeds=[0, 1])
    kernel = KERNEL.fit(z)
    assert [p.method for p in found[:5]] == ["uniform", *(method.name for method in METHODS)]
    assert of_method(found, "uniform")[1].variance == pytest.approx(uniform_variance(z, 8, kernel=kernel))
    solved = [stratify(z, 8, kernel=kernel, solver="kmeans", seed=seed).labels for seed in (0, 1)]
    expected = sum(stratified_variance(z, labels, kernel=kernel) for labels in solved) / 2
    assert of_method(found, "k-means")[1].variance == pytest.approx(expected, rel=1e-6)
    for k, bound in zip((4, 8), bounds, strict=True):
        assert all(bound <= p.variance for p in found if p.k == k)
    coupled = measure_coupled(z, 8, seed=0, batches=64)
    assert [p.method for p in coupled] == ["ordered (ours)", "balanced (ours)"]
    assert all(0.0 < p.stderr < p.variance < of_method(found, "min-sum (ours)")[1].variance for p in coupled)


@pytest.fixture(scope="module")
def once():
    """Each quick figure of seed 1, and the shares of progress that it reported."""
    found = {}
    for figure in (figure4, figure5):
        seen = []
        result = figure(seed=1, quick=True, progress=lambda share, message, seen=seen: seen.append(share))
        found[figure] = result, seen
    return found


@pytest.mark.parametrize("figure", [figure4, figure5])
def test_the_same_seed_gives_the_same_bytes_and_leaves_the_global_random_state_alone(figure, once):
    state = torch.get_rng_state()
    torch.manual_seed(99)
    shaken = torch.get_rng_state()
    first, again = once[figure][0], figure(seed=1, quick=True)
    assert torch.equal(torch.get_rng_state(), shaken)
    torch.set_rng_state(state)
    assert first.to_csv().encode() == again.to_csv().encode()
    assert first.claims == again.claims


@pytest.mark.parametrize("figure", [figure4, figure5])
def test_figures_draw_every_curve_and_report_progress(figure, once):
    result, seen = once[figure]
    assert seen == sorted(seen)
    assert 0.0 <= seen[0] < seen[-1] <= 1.0
    rows = list(csv.DictReader(result.to_csv().splitlines()))
    drawn = render(result)
    assert len(drawn.axes) == (2 if figure is figure4 else 3)
    names = {row["method" if figure is figure4 else "batches"] for row in rows} - {"lower bound"}
    legends = [*drawn.legends, *(axes.get_legend() for axes in drawn.axes)]
    assert {text.get_text() for legend in legends if legend is not None for text in legend.get_texts()} == names


def test_figure5_depends_on_the_seed_and_its_curves_start_alike(once):
    result = once[figure5][0]
    start = {row["batches"]: row for row in result.select(step=0)}
    # all of the paper's strata are the same ones at first
    assert start["T = 10"]["variance"] == start["T = 40"]["variance"] == start["growing T"]["variance"]
    assert start["min-sum, T = 20"]["variance"] < start["uniform"]["variance"]
    assert result.select(step=55, batches="T = 20")[0]["refreshes"] == 3
    assert result.to_csv() != figure5(seed=2, quick=True).to_csv()
