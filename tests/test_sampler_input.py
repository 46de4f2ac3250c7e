"""What samplers refuse, and that it leaves their streams alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import refused
from sampler_cases import MAKERS, K, N, cloud, made, taken
from vardass.errors import InputError
from vardass.kernels import RBFMixture
from vardass.paper.diverse_samplers import DPPBatchSampler, KMeansPlusPlusBatchSampler
from vardass.paper.paired_sampler import PairedBatchSampler
from vardass.registry import declared_options
from vardass.samplers import (
    BalancedBatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
    planned,
)
from vardass.samplers.registry import SAMPLER_NAMES, find_sampler
from vardass.solvers import stratify


@pytest.mark.parametrize(
    "make", [UniformBatchSampler, StratifiedBatchSampler, OrderedBatchSampler, BalancedBatchSampler]
)
def test_batches_larger_than_the_data_are_refused(make: Any) -> None:
    with refused("batch_size=9", "n=8"):
        make(8, 9)
    with refused(2, 0, 1, field="rank"):
        make(8, 2, num_replicas=2, rank=2)
    with refused("4 batches", "num_replicas=5", "batch_size", "batches"):
        make(8, 2, num_replicas=5)


@pytest.mark.parametrize(
    "make", [UniformBatchSampler, StratifiedBatchSampler, OrderedBatchSampler, BalancedBatchSampler]
)
def test_one_call_makes_any_sampler(make: Any) -> None:
    sampler = make(N, batch_size=K, kernel="mmd", seed=0)
    sampler.refresh(cloud())
    assert len(next(iter(sampler))) == K
    with refused("'nope'", "mmd", field="kernel"):
        make(N, K, kernel="nope")


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"min_size": 7}, None, ("min_size=7", "k=4", 28, "n=26", 6)),
        ({"max_size": 6}, None, ("max_size=6", "k=4", 24, "n=26", 7)),
        ({"min_size": "2"}, "min_size", ("'2'",)),
    ],
)
def test_sizes_that_no_strata_can_have_are_refused_before_the_first_refresh(
    options: Any, field: str | None, named: Any
) -> None:
    with refused(*named, field=field):
        StratifiedBatchSampler(N, K, **options)


@pytest.mark.parametrize("make", [UniformBatchSampler, BalancedBatchSampler])
def test_more_processes_than_batches_without_replacement_are_refused(make: Any) -> None:
    with refused("n=8", "batch_size=2", "num_replicas=5"):
        make(8, 2, num_replicas=5, batches=10)
    assert len(taken(UniformBatchSampler(8, 2, replacement=True, num_replicas=5, batches=10))) == 2


@pytest.mark.parametrize(
    ("name", "features", "field", "named"),
    [
        ("stratified", torch.ones(N + 1, 3), None, ("features", f"{N + 1} rows", f"n={N}")),
        ("ordered", None, "features", ("NoneType",)),
        ("uniform", torch.ones(N + 1, 3), None, ("features", f"{N + 1} rows", f"n={N}")),  # as of all other samplers
        ("balanced", torch.full((N, 3), torch.nan), "features", ("NaN", f"{N} of {N} rows")),
    ],
)
def test_features_that_cannot_be_used_leave_the_stream_alone(name: str, features: Any, field: Any, named: Any) -> None:
    sampler, other = made(name), made(name)
    stream, other_stream = iter(sampler), iter(other)
    taken(stream, 2), taken(other_stream, 2)
    with refused(*named, field=field):
        sampler.refresh(features)
    assert taken(stream) == taken(other_stream)
    assert taken(sampler) == taken(other)


@pytest.mark.parametrize("maker", [StratifiedBatchSampler, OrderedBatchSampler])
def test_a_refresh_that_fails_halfway_leaves_the_stream_alone(maker: Any) -> None:
    # the class labels ask for more strata than there are once the features come
    sampler, other = (maker(N, K, kernel="rbf", groups=torch.arange(N) % 5) for _ in range(2))
    stream, other_stream = iter(sampler), iter(other)
    taken(stream, 2), taken(other_stream, 2)
    with refused("5 groups", "k=4", "batch_size"):
        sampler.refresh(cloud())
    assert taken(stream) == taken(other_stream)


def test_a_plan_that_fails_leaves_the_strata_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, other = made("ordered"), made("ordered")

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError("no features of this kernel")

    monkeypatch.setattr(planned, "plan_features", refuse)
    with refused("no features of this kernel"):
        sampler.refresh(cloud(seed=3))
    monkeypatch.undo()
    assert taken(sampler) == taken(other)


def test_uniform_batches_ignore_features() -> None:
    sampler, other = MAKERS["uniform"](), MAKERS["uniform"]()
    stream = iter(sampler)
    first = taken(stream, 2)
    sampler.refresh(cloud())
    assert first + taken(stream) == taken(other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampler": "OtherSampler"}, ("sampler='OtherSampler'", "sampler='BalancedBatchSampler'")),
        ({"version": 99}, ("version=99", "version=2")),
        ({"n": N + 1}, (f"n={N + 1}", f"n={N}")),
        ({"batch_size": 5}, ("batch_size=5", f"batch_size={K}")),
        ({"num_replicas": 2}, ("num_replicas=2", "num_replicas=1")),
    ],
)
def test_states_of_other_samplers_are_refused(change: dict[str, Any], named: Any) -> None:
    sampler, other = made("balanced"), made("balanced")
    with refused("the state", *named):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert taken(sampler) == taken(other)


def test_states_that_are_not_complete_are_refused() -> None:
    sampler = made("ordered")
    with refused("'a'", "'sampler'", "'epoch'", "OrderedBatchSampler.state_dict"):
        sampler.load_state_dict({"a": 1})
    for state in (None, [1], "state"):
        with refused(type(state).__name__, "OrderedBatchSampler.state_dict"):
            sampler.load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"extra": None}, {"chunk": 5}, {"settings": [1]}])
def test_states_with_damaged_parts_are_refused(change: dict[str, Any]) -> None:
    sampler, other = made("ordered"), made("ordered")
    with refused(type(*change.values()).__name__, "OrderedBatchSampler.state_dict"):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert taken(sampler) == taken(other)


@pytest.mark.parametrize("key", ["seed", "epoch", "position", "refreshes", "base"])
def test_states_of_which_a_number_is_none_are_refused(key: str) -> None:
    sampler, other = made("ordered"), made("ordered")
    for value in ("3", None, 1.5):
        if (key, value) == ("seed", None):
            continue
        with refused(repr(value), field=key if key == "seed" else f"{key} of the state"):
            sampler.load_state_dict({**sampler.state_dict(), key: value})
    assert taken(sampler) == taken(other)


# another value than the default for each option of any sampler
OTHER: dict[str, Any] = {
    "batches": 5,
    "drop_last": False,
    "equal": True,
    "from_each": [0] * N,
    "init": "kmeans++",
    "kernel": RBFMixture((2.0,)),
    "kernel_rank": 3,
    "max_iter": 7,
    "max_passes": 2,
    "max_size": N,
    "min_size": 2,
    "other_batch_size": K + 1,
    "parallel": 1,
    "patience": 2,
    "plan_rank": 5,
    "plan_rows": 7,
    "replacement": True,
    "restarts": 2,
    "role": "target",
    "set_size": 2,
    "solver": "kernel-kmeans",
    "swap_rounds": 1,
    "tol": 0.5,
    "trials": 3,
}
RESTORED = ("groups", "shares")  # by the state
SET_BY_CALLER = ("seed", "endless", "num_replicas", "rank", "warm_start", "progress")
REPORTED = ("bound",)  # of strata: they change nothing
SET_BY_SAMPLER = {
    UniformBatchSampler: ("kernel",),  # which it has no use for
    StratifiedBatchSampler: ("kernel_features",),
    OrderedBatchSampler: ("kernel_features", "replacement"),
    PairedBatchSampler: ("other_batch_size",),  # must be batch_size
}
OF_GREEDY = {"trials", "parallel", "patience", "max_iter"}
SAMPLERS = {find_sampler(name).kind for name in SAMPLER_NAMES}


def passed_on(kind: Any) -> list[str]:
    if not issubclass(kind, StratifiedBatchSampler):
        return []
    return [name for solver in ("min-sum", "dynamic-kmeans") for name in kind.passed_on(solver)]


EACH_OPTION = sorted(
    (
        (kind, option)
        for kind in SAMPLERS
        for option in {*declared_options(kind), *passed_on(kind)}
        if option not in (*RESTORED, *REPORTED, *SET_BY_CALLER, *SET_BY_SAMPLER.get(kind, ()))
    ),
    key=str,
)


@pytest.mark.parametrize(("kind", "option"), EACH_OPTION, ids=lambda part: getattr(part, "__name__", part))
def test_states_of_other_settings_are_refused(kind: Any, option: str) -> None:
    with_strata = issubclass(kind, StratifiedBatchSampler)
    base: dict[str, Any] = {"solver": "dynamic-kmeans"} if with_strata and option in OF_GREEDY else {}
    if option == "from_each":
        base = {"replacement": True}
    if option == "set_size":
        base = {"groups": torch.arange(N) % 2}
    value = not kind(N, K).replacement if option == "replacement" else OTHER[option]
    plain, other = kind(N, K, **base), kind(N, K, **base, **{option: value})
    setting = "strata_options" if with_strata and option not in declared_options(kind) else option
    for one, two in ((plain, other), (other, plain)):
        with refused(f"the state has {setting}", f"this sampler {setting}"):
            two.load_state_dict(one.state_dict())
    kind(N, K, **base, **{option: value}).load_state_dict(other.state_dict())


def test_options_of_a_sampler_of_ones_own_are_compared_too() -> None:
    class Strided(UniformBatchSampler):
        def __init__(self, n: int, batch_size: int, *, stride: int = 1, table: Any = None, **options: Any) -> None:
            super().__init__(n, batch_size, **options)
            self.stride, self.table = stride, table

    state = Strided(N, K, stride=2, table=torch.zeros(3)).state_dict()
    Strided(N, K, stride=2, table=torch.ones(3)).load_state_dict(state)  # objects are not compared
    with refused("stride=2", "stride=1"):
        Strided(N, K, table=torch.zeros(3)).load_state_dict(state)


def test_a_function_is_the_same_kernel_in_another_process() -> None:
    def mine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y.T

    state = StratifiedBatchSampler(N, K, kernel=mine).state_dict()
    assert "0x" not in str(state["settings"])
    StratifiedBatchSampler(N, K, kernel=mine).load_state_dict(state)


def test_given_strata_are_used_and_must_fit() -> None:
    z = cloud()
    sampler = StratifiedBatchSampler(N, K, kernel="rbf")
    with refused("k=5", f"k={K}", f"n={N}"):
        sampler.use(stratify(z, 5))
    strata = stratify(z, K, kernel="rbf")
    sampler.use(strata)
    assert next(iter(sampler)).weights == pytest.approx(strata.weights.tolist())
    with refused("strata", "Tensor", "stratify"):
        sampler.use(strata.labels)  # type: ignore[arg-type]
    uncoupled = OrderedBatchSampler(N, K)
    uncoupled.use(strata)  # without features there is nothing to couple
    assert next(iter(uncoupled)).weights == pytest.approx(strata.weights.tolist())


@pytest.mark.parametrize("seed", [1.7, None, "a", True])
def test_seeds_are_whole_numbers(seed: Any) -> None:
    with refused(repr(seed), field="seed"):
        UniformBatchSampler(N, K, seed=seed)


def test_seeds_that_would_be_the_same_to_torch_are_refused() -> None:
    with refused(2**64 + 3, "2**64", field="seed"):
        UniformBatchSampler(N, K, seed=2**64 + 3)  # would draw as seed 3 does


@pytest.mark.parametrize(
    ("make", "options", "field", "named"),
    [
        (StratifiedBatchSampler, {"kernel": "mdm"}, "kernel", ("'mdm'", "'mmd'")),
        (OrderedBatchSampler, {"kernel": "mdm"}, "kernel", ("'mdm'", "'mmd'")),
        (BalancedBatchSampler, {"kernel": "corall"}, "kernel", ("'corall'", "'coral'")),
        (DPPBatchSampler, {"kernel": "mdm"}, "kernel", ("'mdm'", "mmd")),
        (StratifiedBatchSampler, {"solver": "minsum"}, "solver", ("'minsum'", "'min-sum'")),
        (StratifiedBatchSampler, {"min_sise": 2}, None, ("StratifiedBatchSampler", "'min_sise'", "'min_size'")),
        (OrderedBatchSampler, {"trials": 2}, None, ("OrderedBatchSampler", "'min-sum'", "'trials'")),
        (StratifiedBatchSampler, {"kernel_rank": -1}, "kernel_rank", (-1, 0)),
    ],
)
def test_typos_are_found_where_the_sampler_is_made(make: Any, options: dict[str, Any], field: Any, named: Any) -> None:
    with refused(*named, field=field):
        make(N, K, **options)
    StratifiedBatchSampler(N, K, solver="dynamic-kmeans", trials=2, restarts=2, init="random")


def test_strata_of_low_rank_features() -> None:
    full, low = StratifiedBatchSampler(N, K), StratifiedBatchSampler(N, K, kernel_rank=3)
    for sampler in (full, low):
        sampler.refresh(cloud())
    assert full.strata is not None
    assert low.strata is not None
    assert (full.strata.info["path"], low.strata.info["path"], low.strata.info["rank"]) == ("exact", "low-rank", 3)


@pytest.mark.parametrize("make", [StratifiedBatchSampler, OrderedBatchSampler, BalancedBatchSampler])
@pytest.mark.parametrize("kernel", ["mmd", "coral", "linear"])
def test_features_that_overflow_are_refused(make: Any, kernel: str) -> None:
    features = cloud() * 1e30
    sampler, other = (make(N, K, kernel=kernel) for _ in range(2))
    with refused(f"{features.abs().max():.3g}", "torch.float32", "float64"):
        sampler.refresh(features)
    assert taken(sampler) == taken(other)


def test_fitted_kernels_stay_as_they_are() -> None:
    z = cloud()
    fitted = RBFMixture((1.0,), scale="median").fit(z * 100)
    same = RBFMixture((1.0,), scale=fitted.fitted_scale)
    for make in (OrderedBatchSampler, BalancedBatchSampler, DPPBatchSampler, KMeansPlusPlusBatchSampler):
        one, other = make(N, K, kernel=fitted), make(N, K, kernel=same)
        for sampler in (one, other):
            sampler.refresh(z)
        assert taken(one) == taken(other), make


def test_options_that_do_not_fit_are_refused() -> None:
    with refused("replacement=True", "ordered batches"):
        OrderedBatchSampler(N, 8, replacement=True)
    for maker in (StratifiedBatchSampler, BalancedBatchSampler):
        with refused(f"({N},)", "(5,)", field="groups"):
            maker(N, K, groups=torch.arange(5))
    with refused(1, 2, field="plan_rows"):
        OrderedBatchSampler(N, K, plan_rows=1)
    with refused(-1, 0, field="epoch"):
        UniformBatchSampler(N, K).set_epoch(-1)
    with refused(0, 1, field="count"):
        UniformBatchSampler(N, K).sample_batches(0)


def test_a_state_of_the_other_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = OrderedBatchSampler(N, K).state_dict()
    monkeypatch.setattr("vardass.samplers.base.has_numba", lambda: not state["settings"]["numba"])
    with refused("numba=True", "numba=False"):
        OrderedBatchSampler(N, K).load_state_dict(state)
    UniformBatchSampler(N, K).load_state_dict(UniformBatchSampler(N, K).state_dict())  # its batches need no loops
    assert "numba" not in UniformBatchSampler(N, K).state_dict()["settings"]
