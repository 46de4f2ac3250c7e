"""Quadruplets: what their variance is, that assignments are good, and that no sample is favoured."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from conftest import refused
from sampler_cases import gen, taken
from test_trainer import SPLITS, Stop, assert_same_run, resumable
from vardass.adapt.trainer import Trainer
from vardass.paper.paired_sampler import PairedBatchSampler
from vardass.refresh import Refresher, RefreshEvery

SIZES, K = (70, 90), 6


def domains(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(n, 4, generator=gen(seed + i), dtype=dtype) + 0.3 * i for i, n in enumerate(SIZES)]


def both(sizes: tuple[int, int] = SIZES, batch_size: int = K, **options: Any) -> list[PairedBatchSampler]:
    usual = {"kernel": "rbf", "plan_rows": 30, "seed": 4, "endless": True, **options}
    return [PairedBatchSampler(n, batch_size, role=r, **usual) for n, r in zip(sizes, ("source", "target"))]


def refresh(samplers: list[Any], z: list[Tensor]) -> None:
    for i, sampler in enumerate(samplers):
        sampler.refresh(z[i], other=z[1 - i])


def gaps(samplers: list[Any], z: list[Tensor], count: int) -> Tensor:
    """Difference of the means (count, 4) of batches that are taken in step."""
    steps = itertools.islice(zip(*samplers, strict=True), count)
    return torch.stack([z[0][list(source)].mean(0) - z[1][list(target)].mean(0) for source, target in steps])


def test_variance_of_a_batch_of_quadruplets_is_the_formula_of_the_module() -> None:
    """Every batch that K of Q quadruplets can make, in double precision."""
    z = [each[:8] for each in domains(dtype=torch.float64)]
    samplers = both((8, 8), 4, kernel="linear")
    refresh(samplers, z)
    plans = [sampler._make_chunk(0, gen(3)).rows.view(-1, 2) for sampler in samplers]
    assert [sorted(plan.flatten().tolist()) for plan in plans] == [list(range(8))] * 2
    d = z[0][plans[0]].mean(1) - z[1][plans[1]].mean(1)
    q, k = len(d), 2
    centre = z[0].mean(0) - z[1].mean(0)
    torch.testing.assert_close(d.mean(0), centre)  # the plan holds all samples
    batches = torch.stack([d[list(chosen)].mean(0) for chosen in itertools.combinations(range(q), k)])
    torch.testing.assert_close(batches.mean(0), centre)
    formula = (q - k) / (k * (q - 1)) * (d - centre).square().sum(1).mean()
    torch.testing.assert_close((batches - centre).square().sum(1).mean(), formula)


@pytest.mark.parametrize("m", [40, 300])
def test_assignments_come_close_to_those_of_scipy(m: int) -> None:
    a, b = torch.randn(m, 5, generator=gen(1)), torch.randn(m, 5, generator=gen(2)).exp()
    a, b = a - a.mean(0), b - b.mean(0)

    def value(i: Any, j: Any) -> float:
        return float((a[i] + b[j]).square().sum())

    i, j = both()[0]._assigned(a, b, gen(0))
    assert sorted(i.tolist()) == sorted(j.tolist()) == list(range(m))
    rows, columns = linear_sum_assignment((a[:, None] + b).square().sum(2).numpy())
    best, random = value(rows, torch.from_numpy(columns)), value(torch.arange(m), torch.arange(m))
    assert best - 1e-3 <= value(i, j) < best + 0.05 * (random - best)


def test_pairs_of_a_few_samples_are_those_of_all_assignments() -> None:
    phi = torch.randn(6, 2, generator=gen(5), dtype=torch.float64)
    sampler = both((6, 6), 2)[0]
    every = [float((phi[:3] + phi[3:][list(order)]).square().sum()) for order in itertools.permutations(range(3))]
    i, j = sampler._assigned(phi[:3], phi[3:], gen(0))
    found = float((phi[:3][i] + phi[3:][j]).square().sum())
    assert min(every) - 1e-12 <= found < np.median(every)


def test_quadruplets_are_drawn_together_and_no_sample_comes_twice_in_a_plan() -> None:
    samplers = both()
    refresh(samplers, domains())
    rows = min(SIZES) // K  # of a plan
    for sampler in samplers:
        seen = [index for batch, weights in taken(sampler, rows) for index in batch if weights is None]
        assert len(seen) == len(set(seen)) == rows * K


def test_pairs_cancel_within_a_domain_and_quadruplets_across() -> None:
    z = domains()
    whole = z[0].mean(0) - z[1].mean(0)
    errors = {}
    for name, rounds, other in (("random", 0, True), ("pairs", 4, False), ("quadruplets", 4, True)):
        samplers = both(kernel="linear", swap_rounds=rounds)
        if other:
            refresh(samplers, z)
        else:
            for sampler, features in zip(samplers, z, strict=True):
                sampler.refresh(features)
        errors[name] = float((gaps(samplers, z, 220) - whole).square().sum(1).mean())
    assert errors["pairs"] < 0.5 * errors["random"]
    assert errors["quadruplets"] < 0.5 * errors["pairs"]
    # it is the two in step that cancel: with another target batch only the pairs' own cancelling is left
    samplers = both(kernel="linear")
    refresh(samplers, z)
    next(iter(samplers[1]))
    shifted = [samplers[0], itertools.islice(samplers[1], 1, None)]
    assert float((gaps(shifted, z, 200) - whole).square().sum(1).mean()) > 2 * errors["quadruplets"]


def test_every_sample_is_as_likely_as_any_other_in_any_place() -> None:
    z = [torch.randn(n, 2, generator=gen(n)).exp() for n in (9, 13)]  # sizes that the batch does not divide
    draws = 1200
    for role, n in (("source", 9), ("target", 13)):
        sampler = both((9, 13), 4, kernel="linear")[role == "target"]
        refresh([sampler], [z[0], z[1]] if role == "source" else [z[1], z[0]])
        first = torch.cat([sampler.sample_batches(1, seed=seed).rows for seed in range(draws)])
        for place in range(4):
            counts = torch.bincount(first[:, place], minlength=n).double()
            chi2 = float(((counts - draws / n).square() / (draws / n)).sum())
            assert chi2 < n - 1 + 4.5 * (2 * (n - 1)) ** 0.5


def test_a_restored_pair_goes_on_in_step() -> None:
    z = domains()
    samplers = both()
    streams = [iter(sampler) for sampler in samplers]
    refresh(samplers, z)
    for stream in streams:
        taken(stream, 7)
    twins = both()
    for sampler, twin in zip(samplers, twins, strict=True):
        twin.load_state_dict(sampler.state_dict())
    others = [iter(twin) for twin in twins]
    ahead = [taken(stream, 20) for stream in streams]  # into the second plan
    assert [taken(stream, 20) for stream in others] == ahead
    for each in (samplers, twins):
        refresh(each, domains(seed=5))
    assert [taken(stream, 5) for stream in others] == [taken(stream, 5) for stream in streams]


def test_draws_of_the_two_differ_before_they_are_planned_together() -> None:
    samplers = both((50, 50))
    assert taken(samplers[0], 5) != taken(samplers[1], 5)
    for sampler in samplers:
        sampler.refresh(torch.randn(50, 3, generator=gen(2)))  # without the other domain
    assert taken(samplers[0], 5) != taken(samplers[1], 5)


def test_a_refresher_hands_them_the_other_domain() -> None:
    z = domains()
    samplers = dict(zip(("source", "target"), both(), strict=True))
    sources = {"source": lambda: z[0], "target": lambda: z[1]}
    other = {"source": {"other": z[1]}, "target": {"other": z[0]}}
    Refresher(RefreshEvery(5), samplers, sources, groups=lambda step: other).step(0)
    assert [sampler._sizes for sampler in samplers.values()] == [list(SIZES)] * 2


def test_batches_that_cannot_be_cut_into_quadruplets_are_refused() -> None:
    with refused("batch_size=5", "batch_size=6"):
        PairedBatchSampler(20, 5)
    with refused("batch_size=6", "other_batch_size=4"):
        PairedBatchSampler(20, 6, other_batch_size=4)
    with refused("4 columns", 2):
        both()[0].refresh(domains()[0], other=domains()[1][:, :2])


@pytest.mark.parametrize("changes", [{}, {"feature_source": "full"}])
def test_a_run_plans_both_domains_together_and_resumes(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = resumable(sampler="paired", sampler_options={"plan_rows": 4}, **changes)
    whole = Trainer(settings, SPLITS)
    whole.run()
    if not changes:
        samplers: list[Any] = [whole.streams[name].sampler for name in ("source", "target")]
        assert samplers[0].seed == samplers[1].seed
        assert torch.equal(samplers[0]._features, samplers[1]._features)
        assert samplers[0].position == samplers[1].position
    assert Trainer(settings, SPLITS, tmp_path).run(progress=Stop(7)).step == 7
    resumed = Trainer(settings, SPLITS, tmp_path)
    resumed.run(resume=True)
    assert_same_run(whole, resumed)
