"""Two samplers that order their batches together: columns stay permutations, discrepancies come to that of all data."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sampler_cases import gen, taken
from test_trainer import SPLITS, Stop, assert_same_run, resumable
from vardass.adapt.trainer import Trainer
from vardass.errors import InputError
from vardass.refresh import Refresher, RefreshEvery
from vardass.samplers import BackgroundSampler, SwapOrderedBatchSampler
from vardass.samplers.swap_ordered import match_discrepancies

SIZES, BATCHES = (70, 90), (8, 6)


def domains(seed: int = 0) -> list[Tensor]:
    return [torch.randn(n, 4, generator=gen(seed + i)) + 0.3 * i for i, n in enumerate(SIZES)]


def pair(**options: Any) -> list[SwapOrderedBatchSampler]:
    usual = {"kernel": "rbf", "plan_rows": 30, "seed": 4, "endless": True, **options}
    return [
        SwapOrderedBatchSampler(SIZES[i], BATCHES[i], role=role, other_batch_size=BATCHES[1 - i], **usual)
        for i, role in enumerate(("source", "target"))
    ]


def refresh(samplers: list[Any], z: list[Tensor]) -> None:
    for i, sampler in enumerate(samplers):
        sampler.refresh(z[i], other=z[1 - i])


def discrepancies(samplers: list[Any], z: list[Tensor], count: int) -> Tensor:
    """MMD² with a linear kernel of ``count`` pairs of batches that are drawn in step."""
    found = []
    for source, target in itertools.islice(zip(*samplers, strict=True), count):
        means = [torch.tensor(b.weights) @ z[i][list(b)] for i, b in enumerate((source, target))]
        found.append((means[0] - means[1]).square().sum())
    return torch.stack(found)


def test_a_plan_of_few_rows_is_never_worse_and_is_compared_with_all_orders() -> None:
    phi = torch.randn(8, 2, dtype=torch.float64, generator=gen(1))
    table = torch.tensor([[0, 2, 4, 6], [1, 3, 5, 7]])
    weights = torch.tensor([0.5, 0.5, -0.3, -0.7], dtype=torch.float64)
    goal = float((phi[:4].mean(0) - phi[4:].mean(0)).square().sum())

    def misses(rows: Tensor) -> float:
        gaps = torch.stack([weights @ phi[row] for row in rows])
        return float((gaps.square().sum(1) - goal).square().sum())

    every = []
    for flips in itertools.product((False, True), repeat=4):
        rows = table.clone()
        for column, flip in enumerate(flips):
            rows[:, column] = table[:, column].flip(0) if flip else table[:, column]
        every.append(misses(rows))
    found = match_discrepancies(table, phi, weights, goal, rounds=20, generator=gen(0))
    assert torch.equal(found.sort(0).values, table)
    assert min(every) - 1e-12 <= misses(found) < misses(table)
    for column in range(4):  # no single swap is left that helps
        again = found.clone()
        again[:, column] = found[:, column].flip(0)
        assert misses(again) >= misses(found) - 1e-12
    assert torch.equal(match_discrepancies(table, phi, weights, goal, rounds=0, generator=gen(0)), table)


def test_discrepancies_of_batches_come_to_that_of_all_data() -> None:
    z = domains()
    goal = (z[0].mean(0) - z[1].mean(0)).square().sum()
    away = []
    for rounds in (0, 16):
        samplers = pair(kernel="linear", swap_rounds=rounds)
        refresh(samplers, z)
        away.append(float((discrepancies(samplers, z, 60) - goal).abs().mean()))
    assert away[1] < 0.15 * away[0]
    # it is the pair that is ordered: with another target batch the discrepancy is as noisy as the strata leave it
    samplers = pair(kernel="linear")
    refresh(samplers, z)
    next(iter(samplers[1]))
    shifted = [samplers[0], itertools.islice(samplers[1], 1, None)]
    assert float((discrepancies(shifted, z, 25) - goal).abs().mean()) > 0.3 * away[0]


def test_each_window_is_a_permutation_within_strata_and_each_batch_unbiased() -> None:
    z = domains()
    samplers = pair(plan_rows=24, min_size=3)
    refresh(samplers, z)
    for sampler in samplers:
        strata = sampler.strata
        assert strata is not None
        assert int(strata.sizes.min()) >= 3
        rows = torch.tensor([batch for batch, _ in taken(sampler, 24)])
        for h in range(strata.k):
            counts = torch.bincount(rows[:, h], minlength=sampler.n)
            assert set(counts.nonzero().flatten().tolist()) <= set(strata.members(h).tolist())
            inside = counts[strata.members(h)]
            assert int(inside.max()) - int(inside.min()) <= 1
        weights = taken(sampler, 1)[0][1]
        assert weights == pytest.approx((strata.sizes / strata.n).tolist())
    values = torch.randn(SIZES[0], dtype=torch.float64, generator=gen(7))
    means = []
    for seed in range(150):
        chunk = samplers[0].sample_batches(1, seed=seed)
        assert chunk.weights is not None
        means.append(chunk.weights @ values[chunk.rows[0]])
    found = torch.stack(means)
    assert abs(float(found.mean() - values.mean())) < 4 * float(found.std()) / 150**0.5


def test_the_least_size_of_a_stratum_is_half_of_the_mean_unless_set() -> None:
    samplers = pair()
    refresh(samplers, domains())
    for sampler, n, k in zip(samplers, SIZES, BATCHES, strict=True):
        assert sampler.strata is not None
        assert int(sampler.strata.sizes.min()) >= n // (2 * k)


def test_a_restored_pair_goes_on_in_step() -> None:
    z = domains()
    samplers = pair()
    streams = [iter(sampler) for sampler in samplers]
    refresh(samplers, z)
    for stream in streams:
        taken(stream, 17)
    twins = pair()
    for sampler, twin in zip(samplers, twins, strict=True):
        twin.load_state_dict(sampler.state_dict())
    others = [iter(twin) for twin in twins]
    ahead = [taken(stream, 40) for stream in streams]  # into the second window
    assert [taken(stream, 40) for stream in others] == ahead
    for each in (samplers, twins):
        refresh(each, domains(seed=5))
    assert [taken(stream, 5) for stream in others] == [taken(stream, 5) for stream in streams]
    with pytest.raises(InputError, match="role"):
        pair()[0].load_state_dict({**samplers[0].state_dict(), "settings": {"role": "target"}})


def test_draws_of_the_two_are_independent_before_they_are_ordered_together() -> None:
    pairs = [SwapOrderedBatchSampler(50, 5, role=role, seed=1, kernel="rbf") for role in ("source", "target")]
    assert taken(pairs[0]) != taken(pairs[1])
    for sampler in pairs:
        sampler.refresh(torch.randn(50, 3, generator=gen(2)))  # without the other domain
    strata = [sampler.strata for sampler in pairs]
    assert all(each is not None for each in strata)
    assert taken(pairs[0]) != taken(pairs[1])


def test_a_refresher_does_not_mind_their_common_seed_and_hands_them_the_other_domain() -> None:
    z = [each[:70] for each in domains()]
    samplers = {
        role: SwapOrderedBatchSampler(70, 5, role=role, seed=1, kernel="rbf", endless=True)
        for role in ("source", "target")
    }

    def other(step: int) -> dict[str, Any]:
        return {"source": {"other": z[1]}, "target": {"other": z[0]}}

    background = {name: BackgroundSampler(each, ahead=2, in_process=True) for name, each in samplers.items()}
    sources = {"source": lambda: z[0], "target": lambda: z[1]}
    refresher = Refresher(RefreshEvery(5), background, sources, groups=other)  # a warning would be an error
    refresher.step(0)
    assert all(sampler._features is not None for sampler in samplers.values())


def test_features_that_do_not_fit_are_refused() -> None:
    sampler = pair()[0]
    z = domains()
    with pytest.raises(InputError, match="features have 4 columns, those of the other domain 2"):
        sampler.refresh(z[0], other=z[1][:, :2])
    with pytest.raises(InputError, match="unknown role 'both'"):
        SwapOrderedBatchSampler(10, 2, role="both")
    with pytest.raises(InputError, match="unknown solver"):
        SwapOrderedBatchSampler(10, 2, solver="fastest")


OTHERWISE: list[dict[str, Any]] = [
    {"feature_source": "full", "algorithm_options": {"estimator": "reference"}},
    {"target_batch_size": 4, "background": True, "feature_source": "full"},
]


@pytest.mark.parametrize("changes", [{}, *OTHERWISE])
def test_a_run_orders_both_domains_together_and_resumes(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = resumable(sampler="swap-ordered", sampler_options={"solver": "min-sum", "plan_rows": 4}, **changes)
    whole = Trainer(settings, SPLITS)
    assert whole.streams["source"].sampler.seed == whole.streams["target"].sampler.seed  # type: ignore[attr-defined]
    whole.run()
    if "background" not in changes:
        samplers: list[Any] = [whole.streams[name].sampler for name in ("source", "target")]
        assert torch.equal(samplers[0]._features, samplers[1]._features)
        assert torch.equal(samplers[0].strata.labels, samplers[1]._other_strata.labels)
        assert samplers[0].position == samplers[1].position
    assert Trainer(settings, SPLITS, tmp_path).run(progress=Stop(7)).step == 7
    resumed = Trainer(settings, SPLITS, tmp_path)
    resumed.run(resume=True)
    assert_same_run(whole, resumed)
