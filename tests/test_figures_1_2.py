"""Figures 1 and 2: exact variances against enumeration and simulation, populations, and claims from the numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quick_figures import quick, rho, select
from vardass.paper.figures import draw_figure
from vardass.paper.figures.figure1 import (
    COVARIANCES,
    StratumMoments,
    mmd_variance,
    of_partitions,
    random_covariances,
    rho_text,
    shaken_labels,
)
from vardass.paper.figures.figure2 import (
    coral_variances,
    lognormal_moments,
    normal_moments,
    random_strata,
    strata_moments,
)
from vardass.paper.theory import theorem4
from vardass.variance import stratified_variance

DOUBLE = torch.float64


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
    partitions = torch.tensor([[0, 0, 0, 0, 1, 2], [0, 1, 0, 2, 1, 1], [0, 1, 2, 2, 2, 2]])
    surrogate, target, exact = of_partitions(x, m, partitions, 3)
    for i, labels in enumerate(partitions):
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


def test_figure_1_verdicts_follow_the_rows() -> None:
    result = quick(1)
    assert all(rho(result, population=name, d=1) == 1.0 for name in (*COVARIANCES, "partitions"))
    lowest = {
        name: min(rho(result, population=name, d=d) for d in (4, 16, 64)) for name in (*COVARIANCES, "partitions")
    }
    assert all(len(select(result, population=name, d=d)) == 60 for name in lowest for d in (1, 4, 16, 64))
    held = [claim.held for claim in result.claims[:4]]
    assert held == [lowest[name] > 0.99 for name in ("diagonal", "full, scaled", "full", "partitions")]
    assert not lowest["full"] > 0.99
    assert rho_text(lowest["full"]) in result.claims[2].evidence


def test_figure_1_diagonal_covariances_have_the_surrogate_inside_the_target() -> None:
    """With m = 1 the target is 2 Σ v² + 4 Σ v, so that 4 times the surrogate is a lower bound on it."""
    for row in select(quick(1), population="diagonal", d=16):
        assert row["target"] > 4.0 * row["surrogate"]  # type: ignore[operator]


# figure 2


def test_figure_2_rows_are_the_variances_of_simulated_batches() -> None:
    """Draw batches from the strata of one plotted point and recompute R̂ and R̂' from their definitions."""
    sizes = torch.arange(1, 9, dtype=DOUBLE)
    n, d, count = 36, 2, 100_000
    means, covariances = (t[0] for t in random_strata(1, 8, d, torch.Generator().manual_seed(0), scaled=False))
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


def test_figure_2_verdicts_follow_the_rows() -> None:
    result = quick(2)
    *papers, size = result.claims
    for claim, population in zip(papers, ("scaled", "one scale"), strict=True):
        cases = itertools.product(("normal", "lognormal"), (1, 2, 8, 32))
        lowest = min(rho(result, distribution=name, d=d, population=population) for name, d in cases)
        assert claim.held == (lowest > 0.99)
        assert rho_text(lowest) in claim.evidence
    ratios = sorted(float(row["target"]) / float(row["surrogate"]) for row in select(result))
    low, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.05, 0.95))
    assert size.held == (low >= 0.9 and high <= 1.1)


def test_figure_2_shows_the_ratio_below_each_panel() -> None:
    result = quick(2)
    axes = draw_figure(result).axes
    assert len(axes) == 16
    for row, distribution in ((1, "normal"), (3, "lognormal")):
        for column, d in enumerate((1, 2, 8, 32)):
            shown = torch.cat([torch.tensor(line.get_ydata()) for line in axes[4 * row + column].lines[:2]])
            found = [*select(result, distribution=distribution, d=d)]
            expected = [float(r["target"]) / float(r["surrogate"]) for r in found]
            assert shown.tolist() == pytest.approx(expected, rel=1e-12)
            low, high = axes[4 * row + column].get_ylim()
            assert low == 0.0
            assert high > max(expected)


def test_figure_2_first_panel_is_theorem_4() -> None:
    generator = torch.Generator().manual_seed(0)
    moments = strata_moments("normal", 60, 1, generator, scaled=True)
    found = select(quick(2), distribution="normal", d=1, population="scaled")
    for i in (0, 30, 59):
        theorem = theorem4(moments.mean[i, :, 0], moments.cov[i, :, 0, 0], torch.arange(1, 9))
        assert found[i]["target"] == pytest.approx(theorem.var_r, rel=1e-10)
        assert found[i]["surrogate"] == pytest.approx(theorem.var_r_known_mean, rel=1e-10)


def test_rho_is_never_rounded_up_to_one() -> None:
    assert [rho_text(rho) for rho in (1.0, 0.99999, 0.98765, -0.5)] == ["1 exactly", "0.9999", "0.9876", "-0.5000"]
