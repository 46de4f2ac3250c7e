"""Policy, sources and samplers together; the spread of strata; where the seconds go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader

from conftest import normal, refused
from vardass.errors import VardassWarning
from vardass.refresh import FeatureBank, Refresher, RefreshEvery, RefreshPolicy, Timer
from vardass.samplers import (
    BalancedBatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
)
from vardass.solvers import stratify
from vardass.strata import Strata
from vardass.variance import stratified_variance

# --- seconds ---------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_parts_sum_to_the_total_also_when_nested() -> None:
    clock = Clock()
    timer = Timer(clock=clock, device=torch.device("cpu"))
    with timer("training"):
        clock.now += 5
        with timer("features"):
            clock.now += 2
            with timer("training"):
                clock.now += 1
        clock.now += 3
    clock.now += 50  # belongs to nobody

    def fail() -> None:
        with timer("solver"):
            clock.now += 4
            raise RuntimeError("no solution")

    with pytest.raises(RuntimeError, match="no solution"):
        fail()
    with timer("features"):
        clock.now += 5
    assert timer.seconds == {"training": 9.0, "features": 7.0, "solver": 4.0}


def test_a_timer_resumes() -> None:
    timer, other = Timer(), Timer()
    timer.add("drawing", 2.5)
    other.load_state_dict(timer.state_dict())
    other.add("drawing", 0.5)
    assert other.seconds == {"drawing": 3.0}
    with refused("keys []", "'seconds'", "Timer.state_dict"):
        other.load_state_dict({})


# --- refresher -------------------------------------------------------------------------------------


class StrataSampler:
    """Keeps strata of one kernel, as the real samplers do."""

    def __init__(self, n: int, kernel: Any = "mmd", k: int = 4) -> None:
        self.n, self.kernel, self.k = n, kernel, k
        self.strata: Strata | None = None
        self.refreshes = 0

    def refresh(self, features: Tensor) -> None:
        self.strata = stratify(features, self.k, kernel=self.kernel)
        self.refreshes += 1


class Uniform:
    n = 60
    needs_features = False

    def refresh(self, features: Tensor) -> None:
        raise AssertionError("uniform draws need no refresh")


def test_refresher_refreshes_all_that_need_it_and_logs() -> None:
    clock = Clock()
    bank, x = FeatureBank(60), normal(60, 3)

    def never() -> Tensor:
        raise AssertionError("these features are not needed")

    def slowly() -> Tensor:
        clock.now += 2
        return normal(30, 3)

    samplers = {"source": StrataSampler(60), "target": StrataSampler(30, "coral"), "extra": Uniform()}
    refresher = Refresher(
        RefreshEvery(5),
        samplers,
        {"source": bank, "target": slowly, "extra": never},
        timer=Timer(clock=clock),
    )
    with refused("0 of n=60 rows", "bank.fill(model, dataset)"):
        refresher.step(0)
    bank.fill(nn.Identity(), x)
    logs = [refresher.step(step) for step in range(11)]
    assert [log["step"] for log in logs if log is not None] == [0, 5, 10]
    assert samplers["source"].refreshes == 3
    log = logs[5]
    assert log is not None
    assert log["target/seconds_features"] == 2.0
    assert log["source/seconds_features"] == 0.0
    assert log["source/variance"] == pytest.approx(
        stratified_variance(x, samplers["source"].strata.labels, kernel="mmd"), rel=1e-5
    )
    assert log["source/reduction"] == pytest.approx(log["source/uniform_variance"] / log["source/variance"])
    assert not [key for key in log if key.startswith("extra")]
    assert all(isinstance(value, int | float) for value in log.values())
    assert refresher.timer.seconds["features"] == 6.0


def test_refresher_without_anything_to_do() -> None:
    assert Refresher(RefreshEvery(1), [Uniform()], [FeatureBank(60)]).step(0) is None
    assert Refresher(RefreshEvery(0), StrataSampler(60), FeatureBank(60)).step(0) is None


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (lambda: Refresher(RefreshEvery(0), {"a": Uniform()}, {"b": FeatureBank(60)}), ("['a']", "['b']")),
        (lambda: Refresher(RefreshEvery(0), Uniform(), FeatureBank(6)), ("'0'", "n=60", "n=6")),
        (lambda: Refresher(10, Uniform(), FeatureBank(60)), ("policy", 10, "RefreshEvery(100)")),
        (lambda: Refresher(RefreshEvery(0), StrataSampler(60), normal(60, 3)), ("'0'", "Tensor", "FeatureBank")),
        (lambda: Refresher(RefreshEvery(0), StrataSampler(60), nn.Identity()), ("'0'", "Identity", "FeatureBank")),
        (
            lambda: Refresher(RefreshEvery(0), DataLoader(range(60), batch_size=4), list),
            ("'0'", "DataLoader", "refresh(features)"),
        ),
        (
            lambda: Refresher(RefreshEvery(0), Uniform(), FeatureBank(60)).load_state_dict({}),
            ("keys []", "'timer'", "'seen'", "Refresher.state_dict"),
        ),
    ],
)
def test_bad_refreshers(run: Callable[[], Any], named: tuple[Any, ...]) -> None:
    with refused(*named):
        run()


@pytest.mark.parametrize(
    "owner",
    [
        Refresher(RefreshEvery(0), Uniform(), FeatureBank(60)),
        FeatureBank(60),
        Timer(),
        StratifiedBatchSampler(60, 4),
    ],
)
@pytest.mark.parametrize("state", [None, [1], "state"])
def test_states_that_are_no_dictionaries_are_named(owner: Any, state: Any) -> None:
    with refused(type(state).__name__, f"{type(owner).__name__}.state_dict"):
        owner.load_state_dict(state)


def test_equal_seeds_of_two_domains_are_named() -> None:
    def refresher(**seeds: int) -> Refresher:
        samplers = {name: StratifiedBatchSampler(60, 4, seed=seed) for name, seed in seeds.items()}
        return Refresher(RefreshEvery(0), samplers, dict.fromkeys(samplers, FeatureBank(60)))

    with pytest.warns(VardassWarning, match=r"'source' and 'target' have the same n=60 and seed=0.*another seed"):
        refresher(source=0, target=0)
    refresher(source=0, target=1)


# --- several processes --------------------------------------------------------------------------------


def samplers_of_all_kinds() -> dict[str, Any]:
    return {
        "stratified": StratifiedBatchSampler(60, 4, seed=1, endless=True),
        "ordered": OrderedBatchSampler(60, 4, seed=2, endless=True, plan_rows=16),
        "balanced": BalancedBatchSampler(60, 4, seed=3, endless=True),
    }


def stream_with_refreshes(samplers: dict[str, Any], policy: RefreshPolicy, noise: float) -> dict[str, Any]:
    """Batches of some steps, with features as a process that is off by ``noise`` computes them."""
    refresher = Refresher(
        policy, samplers, {name: lambda: normal(60, 3) + noise * normal(60, 3, seed=5) for name in samplers}
    )
    streams = {name: iter(sampler) for name, sampler in samplers.items()}
    found: dict[str, Any] = {name: [] for name in samplers}
    for step in range(12):
        log = refresher.step(step)
        if log is not None and "stratified/variance" in log:
            found.setdefault("variance", []).append(log["stratified/variance"])
        for name, stream in streams.items():
            batch = next(stream)
            found[name].append((list(batch), batch.weights))
    return found


def in_process(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        found = stream_with_refreshes(samplers_of_all_kinds(), RefreshEvery(5), noise=float(rank))
        other = Refresher(RefreshEvery(1), StratifiedBatchSampler(60, 4), lambda: normal(60 + (rank == 0), 3))
        with refused("61 rows", "n=60"):  # on both, and nobody waits
            other.step(0)
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def test_strata_are_those_of_the_first_process(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(in_process, (str(tmp_path),), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert found[0]["variance"] == found[1]["variance"]
    for rank in range(2):
        samplers = samplers_of_all_kinds()
        for sampler in samplers.values():
            sampler.shard(2, rank)
        alone = stream_with_refreshes(samplers, RefreshEvery(5), noise=0.0)
        for name in samplers:
            assert found[rank][name] == alone[name], name


# --- features that stand still ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [StratifiedBatchSampler, OrderedBatchSampler, BalancedBatchSampler])
def test_a_sampler_whose_features_stand_still_is_left_alone(make: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(600, 3, generator=generator)
    features = {"still": z, "moving": z.clone()}
    samplers = {name: make(600, 8, seed=seed, endless=True) for seed, name in enumerate(features)}
    refresher = Refresher(
        RefreshEvery(1), samplers, {name: partial(features.get, name) for name in features}, min_movement=1e-3
    )
    first = refresher.step(0)
    assert first is not None
    streams = {name: iter(sampler) for name, sampler in samplers.items()}
    drawn = [next(streams["still"]) for _ in range(3)]
    alone = make(600, 8, seed=0, endless=True)
    alone.refresh(z)
    spread = float((z - z.mean(0)).square().mean())
    noise = torch.randn(z.shape, generator=generator)
    features["still"] = z + (0.8e-3 * spread) ** 0.5 * noise
    features["moving"] = z + (1.3e-3 * spread) ** 0.5 * noise
    log = refresher.step(1)
    assert log is not None
    assert log["still/seconds_solver"] == 0.0 < log["moving/seconds_solver"]
    assert "skipped" in refresher.timer.seconds
    assert [sampler.state_dict()["refreshes"] for sampler in samplers.values()] == [1, 2]
    drawn += [next(streams["still"]) for _ in range(3)]  # the plan goes on
    assert drawn == list(islice(alone, 6))
    # movement is that since the last refresh, not since the last question, and a copy of the state knows it too
    other = Refresher(RefreshEvery(1), samplers, refresher.sources, min_movement=1e-3)
    other.load_state_dict(refresher.state_dict())
    features["still"] = z + (1.3e-3 * spread) ** 0.5 * noise
    other.step(2)
    assert [sampler.state_dict()["refreshes"] for sampler in samplers.values()] == [2, 2]


def test_what_stands_still_is_refreshed_where_more_than_features_counts() -> None:
    z = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    always = Refresher(RefreshEvery(1), StratifiedBatchSampler(60, 4), lambda: z)
    grouped = Refresher(
        RefreshEvery(1),
        StratifiedBatchSampler(60, 4),
        lambda: z,
        groups=lambda _: {"0": {"groups": (z[:, 0] > 0).long()}},
        min_movement=1,
    )
    without = Refresher(RefreshEvery(1), StratifiedBatchSampler(60, 4), lambda: z, min_movement=1)
    for refresher in (always, grouped, without):
        refresher.step(0)
        if refresher is without:  # a state of an earlier version
            refresher.load_state_dict({**refresher.state_dict(), "seen": {}})
        refresher.step(1)
        assert "skipped" not in refresher.timer.seconds
        assert refresher.samplers["0"].state_dict()["refreshes"] == 2
    with refused(0, -0.1, field="min_movement"):
        Refresher(RefreshEvery(1), StratifiedBatchSampler(60, 4), lambda: z, min_movement=-0.1)
