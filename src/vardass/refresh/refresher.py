"""Policy, feature sources and samplers of a training loop in one object, and the seconds that they take."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vardass.errors import InputError, VardassWarning
from vardass.processes import from_first, is_first_process, process_group
from vardass.refresh.feature_bank import FeatureBank
from vardass.refresh.policies import RefreshPolicy
from vardass.validate import ArrayLike, as_features, check_number, check_state, check_tensor, reading, some_rows

FeatureSource: TypeAlias = "FeatureBank | Callable[[], ArrayLike]"


class Timer:
    """Add up the ``seconds`` spent in named parts of a run.

    Parts may be nested: time counts for the innermost one only. A CUDA ``device`` is synchronised at the beginning and
    end of each part, as calls only queue its work. ``clock()`` gives seconds.
    """

    def __init__(self, *, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Charge the seconds of a ``with`` block to ``part``."""
        self._charge()
        self._open.append(part)
        self.add(part, 0.0)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def add(self, part: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self.seconds[part] = self.seconds.get(part, 0.0) + float(seconds)

    def _charge(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @property
    def total(self) -> float:
        """Seconds in all parts."""
        return sum(self.seconds.values())

    def state_dict(self) -> dict[str, Any]:
        """The seconds of each part."""
        return {"seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the seconds of an earlier run."""
        check_state(state, self, ("seconds",))
        with reading("the state of this Timer", "pass what its state_dict() gave"):
            seconds = {part: check_number(spent, part, low=0.0) for part, spent in state["seconds"].items()}
        self.seconds = {**dict.fromkeys(self._open, 0.0), **seconds}


class Refresher:
    """Refresh samplers from feature sources when a policy says so.

    Parameters
    ----------
    policy : RefreshPolicy
        When to refresh.
    samplers : sampler, or sequence or mapping of them
        Names are the keys of the mapping, else "0", "1", ...; a sampler whose ``needs_features`` is False is skipped,
        and its features are not computed.
    sources : source, or sequence or mapping of the same length or names
        A `FeatureBank`, or a function without arguments that returns (n, d) features.
    groups : callable, optional
        ``groups(step)`` is called before each refresh, under a process group by the first process only. It maps names
        of samplers to extra arguments of their ``refresh``, for example ``align_classes(...).by_domain``.
    timer : Timer, optional
        Records the seconds, in the parts "features" and "solver".
    broadcast : bool
        Under a ``torch.distributed`` process group the first process decides, makes the strata and sends them to the
        others, whose own might differ by rounding; every process must call `step`. False disables this.
    min_movement : float
        Skip a sampler whose features have moved by less than this share of their spread since its last refresh,
        Σ |z - z'|² / Σ |z - z̄|² over up to 512 samples, unless there are new ``groups``. At 0.001 the
        variance of the losses was up to 4 % above that of a new plan, at 0.01 up to 21 %.

    Examples
    --------
    >>> from vardass import RefreshEvery, StratifiedBatchSampler
    >>> refresher = Refresher(RefreshEvery(2), StratifiedBatchSampler(50, 4), lambda: torch.arange(150.0).view(50, 3))
    >>> [step for step in range(5) if refresher.step(step)]
    [0, 2, 4]
    """

    def __init__(
        self,
        policy: RefreshPolicy,
        samplers: Any,
        sources: FeatureSource | Sequence[FeatureSource] | Mapping[str, FeatureSource],
        *,
        groups: Callable[[int], Mapping[str, Mapping[str, ArrayLike]]] | None = None,
        timer: Timer | None = None,
        broadcast: bool = True,
        min_movement: float = 0.0,
    ) -> None:
        if not isinstance(policy, RefreshPolicy):
            raise InputError(
                f"policy must be a RefreshPolicy, got {policy!r}; pass RefreshEvery(100) to refresh every 100 steps"
            )
        self.policy = policy
        self.samplers: dict[str, Any] = _named(samplers)
        self.sources: dict[str, FeatureSource] = _named(sources)
        self.timer = Timer() if timer is None else timer
        if self.samplers.keys() != self.sources.keys():
            raise InputError(
                f"samplers are named {sorted(self.samplers)}, sources {sorted(self.sources)}; "
                "give each sampler the source of its data set"
            )
        self.groups, self.broadcast = groups, broadcast
        self.min_movement = check_number(min_movement, "min_movement", low=0.0, remedy="try 0.001")
        for name, sampler in self.samplers.items():
            if getattr(sampler, "needs_features", True) and not callable(getattr(sampler, "refresh", None)):
                raise InputError(
                    f"sampler {name!r} is of type {type(sampler).__name__}, which has no refresh(features); pass "
                    "the batch sampler itself, not its loader"
                )
        for name, source in self.sources.items():
            if isinstance(source, nn.Module) or not (isinstance(source, FeatureBank) or callable(source)):
                raise InputError(
                    f"the source of sampler {name!r} is of type {type(source).__name__}; pass a FeatureBank, or a "
                    "function such as lambda: extract_features(model, data)"
                )
            n = getattr(self.samplers[name], "n", None)
            if isinstance(source, FeatureBank) and n is not None and n != source.n:
                raise InputError(f"sampler {name!r} has n={n}, its bank n={source.n}; use the same data set")
        warn_of_equal_seeds(self.samplers)
        self._seen: dict[str, Tensor] = {}  # some rows of the features that samplers were refreshed from

    def step(self, step: int, *, now: bool = False) -> dict[str, Any] | None:
        """Refresh all samplers if the policy says so after ``step`` batches, or if ``now`` is True.

        Returns numbers for a logger, None if there was no refresh: ``"step"``, and for each sampler
        ``"<name>/seconds_features"``, ``"<name>/seconds_solver"`` and, where it has new strata, ``"<name>/variance"``,
        ``"<name>/uniform_variance"`` and ``"<name>/reduction"``.
        """
        log: dict[str, Any] = {"step": step}
        if now or self.policy.due(step):
            groups = self._new_groups(step)
            for name, sampler in self.samplers.items():
                if getattr(sampler, "needs_features", True):
                    log.update(self._refresh(name, sampler, groups.get(name, {})))
        return None if len(log) == 1 else log

    @property
    def _is_shared(self) -> bool:
        return self.broadcast and process_group() is not None

    def _new_groups(self, step: int) -> Mapping[str, Mapping[str, ArrayLike]]:
        if self.groups is None or (self._is_shared and not is_first_process()):
            return {}
        with self.timer("features"):
            found = self.groups(step)
        if not found.keys() <= self.samplers.keys():
            raise InputError(f"groups(step) returned {sorted(found)}, samplers are named {sorted(self.samplers)}")
        return found

    def _refresh(self, name: str, sampler: Any, groups: Mapping[str, ArrayLike]) -> dict[str, Any]:
        source = self.sources[name]
        before = dict(self.timer.seconds)
        with self.timer("features"):
            features = source.features() if isinstance(source, FeatureBank) else source()
            skipped = self._stands_still(name, features) and not groups
            if self.min_movement and self._is_shared:  # rounding differs between processes
                skipped = bool(from_first(lambda: skipped))
        if skipped:
            self.timer.add("skipped", 0.0)
            spent = self.timer.seconds["features"] - before.get("features", 0.0)
            return {f"{name}/seconds_features": spent, f"{name}/seconds_solver": 0.0}
        with self.timer("solver"):
            if self._is_shared:
                _refresh_all_processes(sampler, features, groups)
            else:
                sampler.refresh(features, **groups)
        if self.min_movement:
            self._seen[name] = some_rows(as_features(features, check_finite=False), 512).clone()
        parts = ("features", "solver")
        log = {f"{name}/seconds_{part}": self.timer.seconds[part] - before.get(part, 0.0) for part in parts}
        strata = getattr(sampler, "strata", None)
        for key in () if strata is None else ("variance", "uniform_variance", "reduction"):
            log[f"{name}/{key}"] = float(getattr(strata, key))
        return log

    def _stands_still(self, name: str, features: ArrayLike) -> bool:
        seen = self._seen.get(name)
        if not self.min_movement or seen is None:
            return False
        z = some_rows(as_features(features, check_finite=False), 512)
        if z.shape != seen.shape:
            return False
        spread = (z - z.mean(0)).double().square().sum()
        return bool((z - seen.to(z)).double().square().sum() < self.min_movement * spread)

    def state_dict(self) -> dict[str, Any]:
        """State of the timer, and features to detect movement; samplers and banks have their own state."""
        return {"timer": self.timer.state_dict(), "seen": dict(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where ``state`` was taken."""
        check_state(state, self, self.state_dict())
        self.timer.load_state_dict(state["timer"])
        with reading("the state of this Refresher", "pass what its state_dict() gave"):
            self._seen = {name: check_tensor(x, "seen", (None, None)) for name, x in state["seen"].items()}


def _refresh_all_processes(sampler: Any, features: ArrayLike, groups: Mapping[str, ArrayLike]) -> None:
    """Refresh ``sampler`` from the features of the first process, and let the others have what it found."""
    if not hasattr(sampler, "fitted_state"):  # the same features give the same strata
        features, groups = from_first(lambda: (as_features(features), dict(groups)))
        sampler.refresh(features, **groups)
        return

    def made() -> Any:
        sampler.refresh(features, **groups)
        return sampler.fitted_state()

    message = from_first(made)
    if not is_first_process():
        sampler.use_fitted_state(message)


def warn_of_equal_seeds(samplers: Mapping[str, Any]) -> None:
    """Warn of samplers by name that draw in step, unless that is how they plan both domains together."""
    seen: dict[Any, str] = {}
    for name, sampler in samplers.items():
        if hasattr(sampler, "seed") and hasattr(sampler, "n") and not getattr(sampler, "plans_both_domains", False):
            other = seen.setdefault((type(sampler), sampler.n, sampler.seed), name)
            if other != name:
                warnings.warn(
                    f"samplers {other!r} and {name!r} have the same n={sampler.n} and seed={sampler.seed}: their "
                    "draws move in step and are not independent; give one of them another seed",
                    VardassWarning,
                    stacklevel=3,
                )


def _named(items: Any) -> dict[str, Any]:
    if isinstance(items, Mapping):
        return dict(items)
    if isinstance(items, list | tuple):
        return {str(place): item for place, item in enumerate(items)}
    return {"0": items}
