"""Refresh: policies by hand-computed schedules, features against the model, the bank against a plain loop."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from vardass.adapt.run_folder import flatten_state, load_checkpoint, save_checkpoint, unflatten_state
from vardass.errors import InputError
from vardass.kernels import CoralKernel, LinearKernel, RBFMixture
from vardass.refresh import (
    DriftRefresh,
    EpochRefresh,
    FeatureBank,
    GrowingRefresh,
    NeverRefresh,
    Refresher,
    RefreshEvery,
    RefreshPolicy,
    TimeAccount,
    VarianceRefresh,
    extract_features,
    strata_spread,
)
from vardass.refresh.feature_bank import _last_occurrence
from vardass.samplers import with_weights
from vardass.solvers import stratify
from vardass.strata import Strata
from vardass.variance import stratified_variance, uniform_variance


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def steps_due(policy: RefreshPolicy, until: int) -> list[int]:
    return [step for step in range(until) if policy.due(step)]


# --- policies by time ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RefreshEvery(100), [0, 100, 200, 300]),
        (RefreshEvery(100, start=50), [50, 150, 250, 350]),
        (RefreshEvery(150, start=7), [7, 157, 307]),
        (EpochRefresh(120), [0, 120, 240, 360]),
        (EpochRefresh(60, epochs=3, start=60), [60, 240]),
        (NeverRefresh(), []),
        # intervals 10, 15, 22.5, 33.75, 50.6, 75.9, 113.9, each rounded down
        (GrowingRefresh(10, 1.5, 1000), [0, 10, 25, 47, 80, 130, 205, 318]),
        (GrowingRefresh(10, 1.5, None), [0, 10, 25, 47, 80, 130, 205, 318]),
        (GrowingRefresh(10, 2.0, 70), [0, 10, 30, 70, 140, 210, 280, 350]),
        (GrowingRefresh(10, 2.0, 70, start=3), [3, 13, 33, 73, 143, 213, 283, 353]),
        (GrowingRefresh(100, 3.0, 100), [0, 100, 200, 300]),
        (GrowingRefresh(1, 1.3, 2), [0, 1, 2, 3, *range(5, 400, 2)]),
    ],
    ids=repr,
)
def test_schedules(policy: RefreshPolicy, expected: list[int]) -> None:
    assert steps_due(policy, 400) == expected


@given(
    first=st.integers(1, 30),
    factor=st.floats(1.01, 4.0),
    extra=st.integers(0, 50),
    steps=st.lists(st.integers(0, 500), max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_growing_schedule_is_a_function_of_the_step(first: int, factor: float, extra: int, steps: list[int]) -> None:
    longest = first + extra
    asked = GrowingRefresh(first, factor, longest)
    answers = [asked.due(step) for step in steps]  # in any order
    expected, at, interval = set(), 0, float(first)
    while at <= 500:
        expected.add(at)
        at += min(longest, math.floor(interval))
        interval *= factor
    assert answers == [step in expected for step in steps]


def test_growing_schedule_far_out_is_quick_and_does_not_overflow() -> None:
    policy = GrowingRefresh(10, 2.0, 70)
    assert policy.due(70 * 10**12)
    assert not policy.due(70 * 10**12 + 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RefreshEvery(0), "period must be at least 1, got 0"),
        (lambda: RefreshEvery(1.5), "period must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (lambda: RefreshEvery(5).due(-1), "step must be at least 0, got -1"),
        (lambda: NeverRefresh().due(True), "step must be a whole number"),
        (lambda: GrowingRefresh(10, 1.0), r"factor must be above 1, got 1.0; RefreshEvery\(10\)"),
        (lambda: GrowingRefresh(10, 1.5, 5), "longest=5 is below first=10"),
        (lambda: DriftRefresh(threshold=0.0), "threshold must be positive, got 0.0"),
        (lambda: DriftRefresh(shortest=10, longest=5), "longest must be at least 10, got 5"),
        (lambda: DriftRefresh().observe(drift=1.0, scale=-1.0), "scale must not be negative, got -1.0"),
        (lambda: DriftRefresh().observe(drift=torch.ones(2)), r"one number, got shape \(2,\)"),
        (lambda: VarianceRefresh(tolerance=-0.1), "tolerance must not be negative, got -0.1"),
        (lambda: VarianceRefresh().observe(variance=math.nan), "variance must be finite"),
    ],
)
def test_bad_policies(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_readable_repr() -> None:
    assert repr(RefreshEvery(100)) == "RefreshEvery(period=100, start=0)"
    assert repr(EpochRefresh(7)) == "EpochRefresh(steps_per_epoch=7, epochs=1, start=0)"
    assert repr(NeverRefresh()) == "NeverRefresh()"
    assert repr(DriftRefresh()) == "DriftRefresh(threshold=0.3, shortest=25, longest=1000, window=10, start=0)"


# --- policies by observation --------------------------------------------------------------------------


def drive(policy: RefreshPolicy, until: int, **values: Callable[[int], float]) -> list[int]:
    """Observe ``value(steps since the last refresh)`` at every step, then ask."""
    due, last = [], 0
    for step in range(until):
        policy.observe(**{name: value(step - last) for name, value in values.items()})
        if policy.due(step):
            due.append(step)
            last = step
    return due


def test_drift_triggers_at_the_threshold_and_not_without_drift() -> None:
    # mean of the last 4 of 0.01 t exceeds 0.3 first at t = 32 (0.305)
    policy = DriftRefresh(0.3, shortest=5, longest=200, window=4)
    assert drive(policy, 110, drift=lambda t: 0.01 * t) == [0, 32, 64, 96]
    still = DriftRefresh(0.3, shortest=5, longest=200, window=4)
    assert drive(still, 500, drift=lambda t: 0.0) == [0, 200, 400]
    wild = DriftRefresh(0.3, shortest=25, longest=200)
    assert drive(wild, 101, drift=lambda t: 1e9) == [0, 25, 50, 75, 100]


def test_drift_is_divided_by_the_scale_and_nan_says_nothing() -> None:
    policy = DriftRefresh(0.3, shortest=1, longest=99, window=3)
    assert policy.due(0)
    policy.observe(drift=torch.tensor(8.0), scale=40.0)
    policy.observe(drift=math.nan)
    assert policy.drift == pytest.approx(0.2)
    assert not policy.due(1)
    policy.observe(drift=torch.tensor(20.0), scale=40.0)  # (0.2 + 0.5) / 2
    assert policy.drift == pytest.approx(0.35)
    assert policy.due(2)
    assert math.isnan(policy.drift)
    policy.observe(drift=torch.tensor(1.0), scale=0.0)  # strata of equal samples: any movement is too much
    assert policy.due(3)


def test_drift_window_forgets_the_oldest() -> None:
    policy = DriftRefresh(window=2)
    for value in (100.0, 1.0, 3.0):
        policy.observe(drift=value)
    assert policy.drift == 2.0


def test_variance_triggers_on_its_rise_since_the_last_refresh() -> None:
    policy = VarianceRefresh(0.2, shortest=2, longest=1000)
    # the first number after a refresh, 1.01, is the reference: 1.01 * 1.2 = 1.212 < 1.22
    assert drive(policy, 70, variance=lambda t: 1 + 0.01 * t) == [0, 22, 44, 66]
    falling = VarianceRefresh(0.2, shortest=2, longest=40)
    assert drive(falling, 100, variance=lambda t: 1 / (1 + t)) == [0, 40, 80]
    zero = VarianceRefresh(0.2, shortest=2, longest=40)
    assert zero.due(0)
    zero.observe(variance=0.0)
    assert zero.rise == 0.0
    assert not zero.due(5)
    zero.observe(variance=1e-9)
    assert zero.due(6)


@pytest.mark.parametrize("make", [DriftRefresh, VarianceRefresh])
def test_observing_policies_answer_each_step_once(make: Callable[..., Any]) -> None:
    policy = make(shortest=2, longest=4, start=3)
    assert [step for step in range(12) if policy.due(step)] == [3, 7, 11]
    assert policy.due(11)  # two samplers may ask
    assert policy.last_step == 11
    with pytest.raises(InputError, match=r"step=2 comes before the last refresh at step=11"):
        policy.due(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RefreshEvery(10),
        lambda: EpochRefresh(10),
        lambda: GrowingRefresh(3),
        NeverRefresh,
        lambda: DriftRefresh(0.5, shortest=2, longest=30, window=3),
        lambda: VarianceRefresh(0.3, shortest=2, longest=30),
    ],
)
def test_policy_state_round_trip(make: Callable[[], RefreshPolicy]) -> None:
    noise = normal(100).abs().tolist()

    def run(policy: RefreshPolicy, begin: int, end: int) -> list[int]:
        due = []
        for step in range(begin, end):
            policy.observe(drift=noise[step], variance=1 + noise[step])
            due += [step] if policy.due(step) else []
        return due

    whole, first, second = make(), make(), make()
    expected = run(whole, 0, 100)
    due = run(first, 0, 41)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert due + run(second, 41, 100) == expected


def test_policy_refuses_other_states() -> None:
    with pytest.raises(InputError, match="policy='RefreshEvery', this policy policy='DriftRefresh'"):
        DriftRefresh().load_state_dict(RefreshEvery(3).state_dict())
    with pytest.raises(InputError, match="version=99, this policy version=1"):
        DriftRefresh().load_state_dict({**DriftRefresh().state_dict(), "version": 99})
    broken = DriftRefresh().state_dict()
    del broken["recent"]
    with pytest.raises(InputError, match=r"lacks \['recent'\]"):
        DriftRefresh().load_state_dict(broken)


# --- spread -------------------------------------------------------------------------------------------


def test_spread_of_raw_features_is_exact() -> None:
    x = normal(40, 3, dtype=torch.float64) + 50.0
    labels = torch.arange(40) % 7 * 10  # any numbers
    spread = strata_spread(x, labels)
    within = sum(float((x[labels == h] - x[labels == h].mean(0)).square().sum()) for h in labels.unique()) / 40
    assert spread.within == pytest.approx(within, rel=1e-10)
    assert spread.variance == pytest.approx(stratified_variance(x, labels, kernel="linear"), rel=1e-10)
    one = strata_spread(x, torch.zeros(40, dtype=torch.long))
    assert one.variance == pytest.approx(uniform_variance(x, 1, kernel="linear"), rel=1e-10)


@pytest.mark.parametrize("kernel", [RBFMixture(), CoralKernel(), LinearKernel()], ids=repr)
def test_spread_in_a_kernel_is_unbiased(kernel: Any) -> None:
    x = normal(30, 2, dtype=torch.float64)
    labels = torch.tensor([0] * 1 + [1] * 2 + [2] * 9 + [3] * 18)[torch.randperm(30, generator=torch.Generator())]
    exact = stratified_variance(x, labels, kernel=kernel)
    draws = np.array([strata_spread(x, labels, kernel=kernel, seed=seed).variance for seed in range(400)])
    stderr = draws.std() / 20
    assert abs(draws.mean() - exact) < 4 * stderr
    assert stderr < 0.05 * exact  # or the bound above would say nothing
    assert strata_spread(x, labels, kernel=kernel, seed=3) == strata_spread(x, labels, kernel=kernel, seed=3)


def test_spread_of_pairs_and_singletons_has_no_noise() -> None:
    x = normal(6, 2, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 2, 3, 3])
    for seed in range(3):
        spread = strata_spread(x, labels, kernel="mmd", seed=seed)
        assert spread.variance == pytest.approx(stratified_variance(x, labels, kernel="mmd"), rel=1e-6)


# --- extract_features ---------------------------------------------------------------------------------


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def reference(model: nn.Module, x: Tensor) -> Tensor:
    flags = [module.training for module in model.modules()]
    model.eval()
    with torch.no_grad():
        z: Tensor = model(x)
    for module, flag in zip(model.modules(), flags):
        module.training = flag
    return z


class Mappings(Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.x[index], "label": torch.tensor(index)}


class Weighted(Dataset[Any]):
    """As a wrapper that cannot be indexed sample by sample."""

    weights_attached = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("a weight belongs to a batch")


class Stream(IterableDataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Any:
        return iter(self.x)


X = normal(23, 5)
Y = torch.arange(23)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (X, {}),
        (list(X), {}),
        (TensorDataset(X), {}),
        (TensorDataset(X, Y, Y), {}),
        (TensorDataset(Y, X), {"key": 1}),
        (TensorDataset(Y, X), {"select": lambda batch: batch[1]}),
        (Mappings(X), {"key": "image"}),
        (Mappings(X), {"select": lambda batch: batch["image"]}),
        (Weighted(TensorDataset(X, Y)), {}),
        (TensorDataset(X, Y), {"forward": lambda model, x: model(x)}),
        (TensorDataset(X, Y), {"num_workers": 2}),
        (DataLoader(TensorDataset(X, Y), batch_size=4), {}),
        ([(X[:10], Y[:10]), (X[10:], Y[10:])].__iter__(), {}),
        (Stream(X), {}),
    ],
)
def test_features_equal_the_model_in_evaluation_mode(data: Any, options: dict[str, Any]) -> None:
    model = network()
    z = extract_features(model, data, batch_size=4, **options)
    assert z.shape == (23, 3)
    assert z.dtype == torch.float32
    assert not z.requires_grad
    torch.testing.assert_close(z, reference(model, X))


def test_features_of_the_real_weight_wrapper() -> None:
    z = extract_features(network(), with_weights(TensorDataset(X, Y)), batch_size=6)
    torch.testing.assert_close(z, reference(network(), X))


def test_training_flags_come_back_one_by_one() -> None:
    model = network().train()
    model[1].eval()  # a frozen batch norm
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    statistics = model[1].running_mean.clone()
    extract_features(model, X)
    assert [module.training for module in model.modules()] == before
    assert torch.equal(model[1].running_mean, statistics)

    def broken(model: Any, x: Tensor) -> Tensor:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        extract_features(model, X, forward=broken)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_train_mode_is_an_option() -> None:
    model = network().train()
    z = extract_features(model, X, eval_mode=False)
    assert float((z - reference(network(), X)).abs().max()) > 1e-3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_random_state_is_left_alone(num_workers: int) -> None:
    model, before = network(), torch.random.get_rng_state()
    extract_features(model, TensorDataset(X), batch_size=4, num_workers=num_workers)
    FeatureBank(23).fill(model, TensorDataset(X), num_workers=num_workers)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_mixed_precision_is_close_and_returns_float32() -> None:
    model, exact = network(), reference(network(), X)
    seen: list[torch.dtype] = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        z: Tensor = model(x)
        seen.append(z.dtype)
        return z

    z = extract_features(model, X, autocast_dtype=torch.bfloat16, forward=forward)
    assert seen == [torch.bfloat16]
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, exact, atol=0.03, rtol=0.03)
    assert not torch.equal(z, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(extract_features(model, X), exact)  # full precision also inside a region
        extract_features(model, X, autocast_dtype=torch.bfloat16)
        model(X).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_out_device_dtype_and_progress() -> None:
    calls: list[tuple[float, str]] = []
    z = extract_features(
        nn.Identity(),
        X,
        batch_size=10,
        dtype=torch.float64,
        out_device="meta",
        progress=lambda share, text: calls.append((share, text)),
    )
    assert (z.dtype, z.device.type) == (torch.float64, "meta")
    assert [share for share, _ in calls] == [10 / 23, 20 / 23, 1.0]
    assert calls[0][1] == "features of 10 of 23 samples"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: extract_features(nn.Identity(), X[:0]), "no samples"),
        (lambda: extract_features(nn.Identity(), TensorDataset(X[:0])), "no samples"),
        (lambda: extract_features(nn.Identity(), iter([])), "no samples"),
        (lambda: extract_features(nn.Identity(), normal(4, 2, 3, 3)), r"got \(4, 2, 3, 3\); flatten"),
        (lambda: extract_features(nn.Identity(), normal(4)), r"got \(4,\); flatten"),
        (lambda: extract_features(lambda x: (x, x), X), r"got tuple; pick one"),
        (lambda: extract_features(lambda x: x[:2], X), "2 rows of features for 23 samples"),
        (lambda: extract_features(lambda x: x[:, : len(x)], X[:, :], batch_size=4), "gave 3 features after 4"),
        (lambda: extract_features(nn.Identity(), Mappings(X)), r"keys \['image', 'label'\], got key=None"),
        (lambda: extract_features(nn.Identity(), Mappings(X), key="x"), r"got key='x'"),
        (lambda: extract_features(nn.Identity(), X, key="x"), "needs samples that are mappings, got Tensor"),
        (lambda: extract_features(nn.Identity(), TensorDataset(X), key=3), "has 1 parts, got key=3"),
        (lambda: extract_features(nn.Identity(), 3), "got int"),
        (lambda: extract_features(nn.Identity(), X, batch_size=0), "batch_size must be at least 1, got 0"),
        (
            lambda: extract_features(nn.Identity(), DataLoader(TensorDataset(X), 4, shuffle=True)),
            "draws with RandomSampler",
        ),
        (
            lambda: extract_features(nn.Identity(), DataLoader(TensorDataset(X), batch_sampler=[[1], [0]])),
            "draws with list",
        ),
        (
            lambda: extract_features(nn.Identity(), DataLoader(TensorDataset(X), 4, drop_last=True)),
            "20 of 23 samples",
        ),
    ],
)
def test_bad_passes(run: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run()


# --- bank ---------------------------------------------------------------------------------------------


def test_bank_follows_a_plain_loop() -> None:
    bank, rows, steps = FeatureBank(10), torch.zeros(10, 3), [-1] * 10
    for step in range(12):
        indices = torch.randint(10, (6,), generator=torch.Generator().manual_seed(step))
        z = normal(6, 3, seed=step).requires_grad_()
        bank.update(indices, z, step=step * 2)
        for i, row in zip(indices.tolist(), z.detach()):  # in order: the last of equal indices counts
            rows[i], steps[i] = row, step * 2
    assert torch.equal(bank.features(), rows)
    assert not bank.features().requires_grad
    assert bank.updated_at.tolist() == steps
    assert bank.ages(30).tolist() == [30 - step for step in steps]
    assert bank.last_step == 22


@given(st.lists(st.integers(0, 6), max_size=40))
@settings(max_examples=60, deadline=None)
def test_last_occurrence(numbers: list[int]) -> None:
    expected = [max(i for i, other in enumerate(numbers) if other == number) for number in numbers]
    assert _last_occurrence(torch.tensor(numbers, dtype=torch.long)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bank_takes_any_dtype(dtype: torch.dtype) -> None:
    bank = FeatureBank(3, dtype=torch.bfloat16)
    bank.update(np.array([2, 0, 1]), torch.tensor([[1.0], [2.0], [3.0]], dtype=dtype))
    assert bank.features().dtype == torch.bfloat16
    assert bank.features().flatten().tolist() == [2.0, 3.0, 1.0]
    bank.update([1], np.array([[7.0]]))
    assert bank.features().flatten().tolist() == [2.0, 7.0, 1.0]


def test_bank_keeps_its_memory() -> None:
    bank = FeatureBank(5)
    bank.fill(nn.Identity(), X[:5])
    address = bank.features().data_ptr()
    bank.update([1, 3], normal(2, 5))
    bank.fill(nn.Identity(), X[:5], budget=2)
    bank.load_state_dict(bank.state_dict())
    assert bank.features().data_ptr() == address


def test_stale_rows_are_the_longest_unrenewed() -> None:
    bank = FeatureBank(6)
    assert bank.stale_rows(6).tolist() == [0, 1, 2, 3, 4, 5]
    bank.update([4, 1], normal(2, 2))
    bank.update([0, 2], normal(2, 2))
    bank.update([4], normal(1, 2))
    assert bank.stale_rows(5).tolist() == [3, 5, 1, 0, 2]
    assert bank.updated_at.tolist() == [1, 0, 1, -1, 2, -1]
    assert bank.filled == pytest.approx(4 / 6)
    assert repr(bank) == "FeatureBank(n=6, d=2, filled=0.667, device='cpu')"
    with pytest.raises(InputError, match="count must be between 0 and 6, got 7"):
        bank.stale_rows(7)


class Counting(nn.Module):
    """Doubles its input and remembers the rows it saw, which their first column names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x[:, 0].long().tolist()
        return 2 * x


NUMBERED = torch.stack([torch.arange(12.0), torch.ones(12)], 1)


@pytest.mark.parametrize("data", [NUMBERED, TensorDataset(NUMBERED, torch.arange(12))], ids=["tensor", "dataset"])
def test_fill_computes_only_the_rows_asked_for(data: Any) -> None:
    bank, model = FeatureBank(12), Counting()
    assert bank.fill(model, data, rows=[7, 2, 5], batch_size=2) == 3
    assert model.seen == [7, 2, 5]
    assert bank.filled == 0.25
    assert bank.fill(model, data, budget=4, batch_size=3) == 4  # never filled rows come first
    assert model.seen[3:] == [0, 1, 3, 4]
    assert bank.fill(model, data, budget=6) == 6
    assert model.seen[7:] == [6, 8, 9, 10, 11, 2]  # rows of one pass in order
    assert torch.equal(bank.features(), 2 * NUMBERED)
    assert bank.fill(model, data, rows=[]) == bank.fill(model, data, budget=0) == 0
    assert len(model.seen) == 13
    assert bank.fill(model, data) == 12
    assert model.seen[13:] == list(range(12))


def test_repeated_partial_fills_go_round() -> None:
    bank, model = FeatureBank(12), Counting()
    for _ in range(6):
        bank.fill(model, NUMBERED, budget=4, step=0)
    assert model.seen == [*range(12), *range(12)]


def test_fill_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("vardass.refresh.feature_bank.time.perf_counter", lambda: next(clock))
    bank, model = FeatureBank(12), Counting()
    bank.update([0, 1, 2], normal(3, 2))
    assert bank.fill(model, NUMBERED, seconds=2.0, batch_size=4) == 8  # one second a batch
    assert model.seen == [3, 4, 5, 6, 7, 8, 9, 10]
    assert bank.fill(model, NUMBERED, seconds=50.0, batch_size=4) == 12
    assert bank.fill(model, NUMBERED, rows=[4, 3, 2], seconds=0.5, batch_size=1) == 1
    assert model.seen[-1] == 4


def test_fill_restores_flags_after_a_failure_and_reports_progress() -> None:
    bank, model = FeatureBank(23), network().train()
    shares: list[float] = []
    bank.fill(model, X, batch_size=12, step=5, progress=lambda share, _: shares.append(share))
    assert shares == [12 / 23, 1.0]
    torch.testing.assert_close(bank.features(), reference(model, X))
    assert bank.updated_at.unique().tolist() == [5]
    bank.fill(model, X, budget=3)  # no step passes between the last update and this
    assert bank.last_step == 5
    with pytest.raises(InputError, match=r"8 columns, the bank holds d=3"):
        bank.fill(model, X, forward=lambda model, x: model[0](x))
    assert all(module.training for module in model.modules())


def test_refresh_before_features_exist() -> None:
    bank = FeatureBank(4)
    with pytest.raises(InputError, match=r"0 of n=4 rows; call bank.fill\(model, dataset\)"):
        bank.features()
    with pytest.raises(InputError, match="0 of n=4"):
        bank.features(missing="sample")
    bank.update([1], normal(1, 2))
    with pytest.raises(InputError, match=r"1 of n=4 rows.* or accept missing='sample'"):
        bank.features()


def test_missing_rows_can_take_those_of_others() -> None:
    bank, z = FeatureBank(200), normal(100, 2)
    bank.update(torch.arange(0, 200, 2), z)
    features = bank.features(missing="sample", seed=1).clone()
    assert torch.equal(features[::2], z)
    donors = (features[1::2, None] == z).all(2)
    assert bool((donors.sum(1) == 1).all())  # each is some known row
    assert int(donors.any(0).sum()) > 40  # and they differ
    assert bank.filled == 0.5  # still unknown
    assert torch.equal(bank.features(missing="sample", seed=1), features)
    bank.update(torch.arange(1, 200, 2), z)
    assert torch.equal(bank.features()[1::2], z)


def test_unseen_rows_sampled_beat_unseen_rows_at_the_mean() -> None:
    x = normal(20, 8, seed=1)[torch.arange(400) % 20] * 2 + 0.5 * normal(400, 8)
    bank = FeatureBank(400)
    seen = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:200]
    bank.update(seen, x[seen])
    at_mean = x[seen].mean(0).repeat(400, 1)
    at_mean[seen] = x[seen]
    true = [
        stratified_variance(x, stratify(z, 16, kernel="mmd").labels, kernel="mmd")
        for z in (bank.features(missing="sample"), at_mean)
    ]
    uniform = uniform_variance(x, 16, kernel="mmd")
    assert true[0] < uniform < true[1]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: FeatureBank(0), "n must be at least 1, got 0"),
        (lambda: FeatureBank(3, dtype=torch.int32), "floating-point type, got torch.int32"),
        (lambda: FeatureBank(3).update([0, 3], X[:2]), r"index 3 is outside 0..2"),
        (lambda: FeatureBank(3).update([0, -1], X[:2]), r"index -1 is outside 0..2"),
        (lambda: FeatureBank(3).update([0], X[:2]), "1 indices for 2 rows"),
        (lambda: FeatureBank(3).update([0.0, 1.0], X[:2]), "got torch.float32"),  # type: ignore[list-item]
        (lambda: FeatureBank(2).update([[0], [1]], X[:2]), r"of shape \(2, 1\)"),  # type: ignore[list-item]
        (lambda: FeatureBank(3, d=4).update([0, 1], X[:2]), "5 columns, the bank holds d=4"),
        (lambda: FeatureBank(3).update([0], normal(1, 2, 2)), r"got \(1, 2, 2\)"),
        (lambda: FeatureBank(3).fill(nn.Identity(), X), "23 samples, the bank n=3"),
        (lambda: FeatureBank(3).fill(nn.Identity(), iter([1])), "by index, got list_iterator"),
        (lambda: FeatureBank(23).fill(nn.Identity(), X, rows=[1], budget=2), "1 rows and budget=2"),
        (lambda: FeatureBank(23).fill(nn.Identity(), X, budget=24), "between 0 and 23, got 24"),
        (lambda: FeatureBank(23).fill(nn.Identity(), X, seconds=0.0), "seconds must be positive, got 0.0"),
        (lambda: FeatureBank(23).features(missing="mean"), "'error' or 'sample', got 'mean'"),
        (lambda: FeatureBank(23).drift([0], X[:1], kernel="coral"), "takes a parameter from the data"),
    ],
)
def test_bad_bank_use(run: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run()


@pytest.mark.parametrize("kernel", [None, RBFMixture(), CoralKernel().fit(X), LinearKernel()], ids=repr)
def test_drift_by_hand(kernel: Any) -> None:
    bank = FeatureBank(23)
    bank.fill(nn.Identity(), X)
    rows, new, w = [4, 9, 0], X[[4, 9, 0]] + normal(3, 5, seed=5), torch.tensor([0.5, 0.3, 0.2])
    expected = 0.0
    for i, z, weight in zip(rows, new.double(), w.tolist()):
        pair = torch.stack([X[i].double(), z])
        gram = pair @ pair.T if kernel is None else kernel.matrix(pair)
        expected += weight * float(gram[0, 0] + gram[1, 1] - 2 * gram[0, 1])
    assert float(bank.drift(rows, new, kernel=kernel, weights=w)) == pytest.approx(expected, rel=1e-4)
    equal = bank.drift(rows, new, kernel=kernel)
    each = [float(bank.drift([i], new[j : j + 1], kernel=kernel)) for j, i in enumerate(rows)]
    assert float(equal) == pytest.approx(sum(each) / 3, rel=1e-4)
    assert float(bank.drift(rows, X[rows], kernel=kernel)) == pytest.approx(0.0, abs=1e-3)


def test_drift_counts_rows_that_still_are_what_the_strata_were_made_from() -> None:
    bank = FeatureBank(4)
    assert math.isnan(float(bank.drift([0], torch.zeros(1, 1))))
    bank.update([0, 1, 2], torch.zeros(3, 1))
    assert float(bank.drift([0, 3], torch.ones(2, 1))) == 1.0  # row 3 is unknown
    bank.mark()
    bank.update([0], torch.full((1, 1), 9.0))
    assert float(bank.drift([0, 1], torch.tensor([[5.0], [2.0]]))) == 4.0  # row 0 is newer than the strata
    assert math.isnan(float(bank.drift([0], torch.ones(1, 1))))
    bank.mark()
    assert float(bank.drift([0], torch.tensor([[5.0]]))) == 16.0


def test_bank_resumes_from_a_file(tmp_path: Path) -> None:
    bank = FeatureBank(23)
    bank.update([3, 5], X[:2], step=4)
    bank.fill(nn.Identity(), X, budget=15)
    bank.mark()
    bank.update([8], X[:1], step=6)
    torch.save(bank.state_dict(), tmp_path / "bank.pt")
    other = FeatureBank(23)
    other.load_state_dict(torch.load(tmp_path / "bank.pt", weights_only=True))
    for one in (bank, other):
        one.update([22], X[:1])
    assert torch.equal(other.features(missing="sample"), bank.features(missing="sample"))
    assert torch.equal(other.updated_at, bank.updated_at)
    assert other.updated_at[22] == 7
    assert torch.equal(other.stale_rows(23), bank.stale_rows(23))
    rows = list(range(23))
    assert torch.equal(other.drift(rows, X + 1), bank.drift(rows, X + 1))
    empty = FeatureBank(23)
    other.load_state_dict(empty.state_dict())
    assert other.filled == 0.0


def test_bank_refuses_other_states() -> None:
    bank = FeatureBank(3)
    bank.update([0], X[:1])
    with pytest.raises(InputError, match="n=3, d=5, the bank n=4, d=None"):
        FeatureBank(4).load_state_dict(bank.state_dict())
    with pytest.raises(InputError, match="n=3, d=5, the bank n=3, d=2"):
        FeatureBank(3, d=2).load_state_dict(bank.state_dict())
    with pytest.raises(InputError, match="version 2"):
        bank.load_state_dict({**bank.state_dict(), "bank": 2})
    with pytest.raises(InputError, match="version None"):
        bank.load_state_dict({"rows": None})


# --- accounting ---------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_parts_sum_to_the_total_also_when_nested() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)
    with account("training"):
        clock.now += 5
        with account("features"):
            clock.now += 2
            with account("training"):
                clock.now += 1
        clock.now += 3
    clock.now += 50  # belongs to nobody

    def fail() -> None:
        with account("solver"):
            clock.now += 4
            raise RuntimeError("no solution")

    with pytest.raises(RuntimeError, match="no solution"):
        fail()
    with account("features"):
        clock.now += 5
    assert account.seconds == {"training": 9.0, "features": 7.0, "solver": 4.0}
    assert account.counts == {"training": 2, "features": 2, "solver": 1}
    assert account.total == 20.0
    assert account.share() == {"training": 0.45, "features": 0.35, "solver": 0.2}
    assert account.as_dict() == {"seconds/training": 9.0, "seconds/features": 7.0, "seconds/solver": 4.0}
    lines = account.report().splitlines()
    assert [line.split() for line in lines] == [
        ["part", "seconds", "share", "times", "each"],
        ["training", "9.000", "45.0%", "2", "4.5"],
        ["features", "7.000", "35.0%", "2", "3.5"],
        ["solver", "4.000", "20.0%", "1", "4"],
        ["total", "20.000"],
    ]
    assert len({len(line) for line in lines[1:4]}) == 1


def test_account_of_a_loader_resume_and_reset() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock, device="cpu")

    def slow() -> Any:
        for item in "ab":
            clock.now += 1
            yield item

    for item in account.iterate("drawing", slow()):
        assert item in "ab"
        clock.now += 10
    account.add("drawing", 0.5, count=0)
    assert account.seconds == {"drawing": 2.5}
    other = TimeAccount()
    other.load_state_dict(account.state_dict())
    other.add("solver", 2.5)
    assert other.share() == {"drawing": 0.5, "solver": 0.5}
    other.reset()
    assert (other.total, other.share(), other.seconds) == (0, {}, {})
    with pytest.raises(InputError, match="must not be negative, got -1"):
        other.add("solver", -1.0)
    with pytest.raises(InputError, match="needs 'seconds' and 'counts'"):
        other.load_state_dict({})


# --- refresher ----------------------------------------------------------------------------------------


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
        account=TimeAccount(clock=clock),
    )
    with pytest.raises(InputError, match="0 of n=60 rows"):
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
    assert refresher.account.seconds["features"] == 6.0
    assert refresher.account.counts == {"features": 7, "solver": 6}


def test_refresher_without_anything_to_do() -> None:
    assert Refresher(RefreshEvery(1), [Uniform()], [FeatureBank(60)]).step(0) is None
    assert Refresher(NeverRefresh(), StrataSampler(60), FeatureBank(60)).step(0) is None


def moving(policy: RefreshPolicy, speed: float, steps: int, kernel: Any = "mmd") -> tuple[list[int], Refresher]:
    """Train on features that wander, alike in distribution at all times, and return the steps of refresh."""
    x, direction = normal(60, 3), normal(60, 3, seed=1)
    bank, sampler = FeatureBank(60), StrataSampler(60, kernel)
    bank.fill(nn.Identity(), x)
    refresher = Refresher(policy, {"source": sampler}, {"source": bank})
    due = [0] if refresher.step(0) else []
    for step in range(1, steps):
        rows = torch.randint(60, (8,), generator=torch.Generator().manual_seed(step))
        z = math.cos(speed * step) * x + math.sin(speed * step) * direction
        refresher.observe("source", rows, z[rows], step=step)
        if policy.observes == "variance":
            refresher.measure()
        due += [step] if refresher.step(step) else []
    return due, refresher


@pytest.mark.parametrize("kernel", ["mmd", "coral"])
def test_drift_of_moving_features_triggers_and_of_resting_ones_does_not(kernel: str) -> None:
    def policy() -> DriftRefresh:
        return DriftRefresh(0.3, shortest=5, longest=60, window=3)

    assert moving(policy(), 0.0, 130, kernel)[0] == [0, 60, 120]
    slow, fast = moving(policy(), 0.01, 130, kernel)[0], moving(policy(), 0.1, 130, kernel)[0]
    assert len(fast) > len(slow) > 3
    assert min(b - a for a, b in pairwise(fast)) >= 5


def test_variance_of_moving_features_triggers_and_of_resting_ones_does_not() -> None:
    def policy() -> VarianceRefresh:
        return VarianceRefresh(0.1, shortest=5, longest=60)

    due, refresher = moving(policy(), 0.0, 130)
    assert due == [0, 60, 120]
    strata = refresher.samplers["source"].strata
    assert refresher.measure() == pytest.approx(strata.variance / strata.uniform_variance, rel=0.25)
    fast = moving(policy(), 0.05, 130)[0]
    assert len(fast) > 3
    assert min(b - a for a, b in pairwise(fast)) >= 5


def test_refresher_resumes() -> None:
    _, refresher = moving(DriftRefresh(0.3, shortest=5, longest=60), 0.02, 50)
    other = Refresher(DriftRefresh(0.3, shortest=5, longest=60), refresher.samplers, refresher.sources)
    other.load_state_dict(refresher.state_dict())
    batch = (torch.arange(8), normal(8, 3))
    bank = refresher.sources["source"]
    assert isinstance(bank, FeatureBank)
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in bank.state_dict().items()}
    refresher.observe("source", *batch)
    bank.load_state_dict(state)
    other.observe("source", *batch)
    assert isinstance(refresher.policy, DriftRefresh)
    assert isinstance(other.policy, DriftRefresh)
    assert other.policy.drift == pytest.approx(refresher.policy.drift, rel=1e-6)
    assert other.policy.last_step == refresher.policy.last_step
    assert other.account.counts == refresher.account.counts
    with pytest.raises(InputError, match=r"samplers \['source'\], here are \['0'\]"):
        Refresher(DriftRefresh(), StrataSampler(60), bank).load_state_dict(refresher.state_dict())


@pytest.mark.parametrize("kernel", ["coral", RBFMixture(scale="median"), "linear"])
def test_drift_after_a_resume_is_that_of_the_kernel_at_the_refresh(kernel: Any, tmp_path: Path) -> None:
    def policy() -> DriftRefresh:
        return DriftRefresh(1e9, shortest=5, longest=10**6, window=3)

    _, refresher = moving(policy(), 0.05, 40, kernel)
    bank = refresher.sources["source"]
    assert isinstance(bank, FeatureBank)
    tensors, tree = flatten_state({"refresher": refresher.state_dict(), "bank": bank.state_dict()})
    save_checkpoint(tmp_path / "file", tensors, {"tree": tree})
    tensors, meta = load_checkpoint(tmp_path / "file")
    state = unflatten_state(tensors, meta["tree"])

    def resumed(saved: dict[str, Any]) -> float:
        copy = FeatureBank(60)
        copy.load_state_dict(state["bank"])
        other = Refresher(policy(), refresher.samplers, {"source": copy})
        other.load_state_dict(saved)
        other.load_state_dict(other.state_dict())  # a second kill, before any step
        return drift_of_next(other)

    def drift_of_next(one: Refresher) -> float:
        one.observe("source", torch.arange(60), normal(60, 3, seed=2))
        assert isinstance(one.policy, DriftRefresh)
        return one.policy.drift

    without = {key: value for key, value in state["refresher"].items() if key != "kernels"}
    found, anew = resumed(state["refresher"]), resumed(without)
    assert found == drift_of_next(refresher)
    assert (anew == found) == (kernel == "linear"), "by now the bank's rows give another kernel"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: Refresher(NeverRefresh(), {"a": Uniform()}, {"b": FeatureBank(60)}), r"\['a'\], sources \['b'\]"),
        (lambda: Refresher(NeverRefresh(), Uniform(), FeatureBank(6)), "n=60, its bank n=6"),
        (lambda: Refresher(NeverRefresh(), Uniform(), lambda: X).observe("0", [0], X[:1]), "there are none"),
        (lambda: Refresher(NeverRefresh(), Uniform(), FeatureBank(60)).load_state_dict({}), r"the state has \[\]"),
    ],
)
def test_bad_refreshers(run: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run()
