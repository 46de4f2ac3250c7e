"""How strata age: one training run, watched by strata that are refreshed at different times.

All ways to refresh are watched on the features of one and the same run, so they differ in nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vardass.adapt.batches import algorithm_kernel
from vardass.errors import InputError
from vardass.figures.base import Progress
from vardass.figures.small_network import small_trainer, source_features
from vardass.kernels import Kernel, as_kernel
from vardass.refresh import RefreshPolicy, strata_spread
from vardass.refresh.strata_spread import feature_distances
from vardass.samplers import OrderedBatchSampler
from vardass.samplers.base import derive_seed
from vardass.solvers import stratify
from vardass.strata import Strata

__all__ = ["Aging", "Gram", "Trace", "Watch", "Way", "follow_training"]

_PLAN_RANK = 64  # as many columns as the features of the small network have
_PLANNED = 128  # batches that stand for a plan: one table of it
_MAKERS = ("dynamic-kmeans", "min-sum", "ordered")


@dataclass(frozen=True)
class Way:
    """A way to draw, and when it is refreshed.

    Attributes
    ----------
    name : str
        Of the curve.
    policy : callable
        Makes the policy.
    maker : {"dynamic-kmeans", "min-sum", "ordered"}
        Solver of the strata; ``"ordered"`` makes strata with min-sum and couples the draws.
    """

    name: str
    policy: Callable[[], RefreshPolicy]
    maker: str = "dynamic-kmeans"

    def __post_init__(self) -> None:
        if self.maker not in _MAKERS:
            raise InputError(f"maker must be one of {', '.join(_MAKERS)}, got {self.maker!r}")


@dataclass
class Trace:
    """What became of one way in one run.

    Attributes
    ----------
    variances : list of float
        Var(μ̂) on the features of each probed step.
    refreshes : list of int
        Steps of the refreshes.
    seconds : float
        Spent on strata or plans of the source domain; strata that another way has made already take none.
    maker : str
        Of the way.
    """

    variances: list[float] = field(default_factory=list)
    refreshes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    maker: str = "dynamic-kmeans"


@dataclass(frozen=True)
class Aging:
    """One training run.

    Attributes
    ----------
    steps : list of int
        Probed steps; step t is the state after t updates.
    uniform : list of float
        Var(μ̂) of k uniform draws with replacement at each of them.
    traces : dict of str to Trace
        By name of the way.
    seconds : dict of str to float
        ``"training"``: of all steps; ``"features"`` and ``"solver"``: of one refresh of both domains.
    """

    steps: list[int]
    uniform: list[float]
    traces: dict[str, Trace]
    seconds: dict[str, float]


class Gram:
    """The kernel matrix of all samples, from which many designs are measured exactly.

    Parameters
    ----------
    features : Tensor of shape (n, d)
        All samples of one domain.
    kernel : Kernel
        Fitted.
    """

    def __init__(self, features: Tensor, kernel: Kernel) -> None:
        self.n = len(features)
        self.matrix = kernel.matrix(features).double()
        self.inner = self.matrix.mean(1)  # <φ_i, μ>

    def uniform(self, k: int) -> float:
        """Var(μ̂) of k uniform draws with replacement."""
        return float(self.matrix.diagonal().mean() - self.inner.mean()) / k

    def stratified(self, cells: StratumPairs) -> float:
        """Var(μ̂) = Σ_h (|S_h| Σ_{i in S_h} κ_ii - Σ_{i,j in S_h} κ_ij) / n² of one draw from each stratum (eq. 7)."""
        within = self.matrix.flatten()[cells.pairs].sum()
        return max(0.0, float(self.matrix.diagonal() @ cells.sizes - within)) / self.n**2

    def drawn(self, rows: Tensor, weights: Tensor) -> float:
        """Mean of |μ̂ - μ|² over batches ``rows`` (b, k) with ``weights`` (k,)."""
        squares = self.matrix[rows[:, :, None], rows[:, None, :]] @ weights @ weights
        return float((squares - 2.0 * self.inner[rows] @ weights).mean() + self.inner.mean())


class StratumPairs:
    """Which entries of a kernel matrix lie within strata, and the size of each row's stratum."""

    def __init__(self, strata: Strata) -> None:
        labels = strata.labels
        self.pairs = (labels[:, None] == labels).flatten().nonzero()[:, 0]
        self.sizes = strata.sizes[labels].double()
        self.labels = labels


class _Follower:
    """Strata or plan of one way, as old as its policy lets them get."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.policy = way.policy()
        self.trace = Trace(maker=way.maker)
        self.strata: StratumPairs | None = None
        self.plan: tuple[Tensor, Tensor] | None = None
        self.seen: Tensor | None = None  # features of the last refresh
        self.scale = 1.0


class Watch:
    """Follow strata of several ways on features that change.

    Parameters
    ----------
    ways : sequence of Way
        What to follow; each must be due at step 0.
    k : int
        Batch size.
    kernel : Kernel or name
        Of Var(μ̂).
    every : int
        Steps between probes. Policies that go by drift or variance are told and asked at probes only.
    seed : int
        Of the solvers; ways of one solver that are refreshed at the same step get the same strata.
    """

    def __init__(self, ways: Sequence[Way], k: int, *, kernel: Kernel | str, every: int, seed: int) -> None:
        self.followers = [_Follower(way) for way in ways]
        self.k, self.kernel, self.every, self.seed = k, as_kernel(kernel), every, seed
        self.steps: list[int] = []
        self.uniform: list[float] = []
        self._made: dict[str, StratumPairs] = {}

    def at(self, step: int, features: Callable[[], Tensor]) -> None:
        """Look at the state after ``step`` updates; ``features`` gives its (n, d), and is called only if needed."""
        probed = step % self.every == 0
        due = [f for f in self.followers if f.policy.observes is None and f.policy.due(step)]
        if not probed and not due:
            return
        z = features()
        kernel = self.kernel.fit(z)
        self._made = {}
        for follower in due:
            self._refresh(follower, z, step, kernel)
        if not probed:
            return
        gram = Gram(z, kernel)
        uniform = gram.uniform(self.k)
        for follower in self.followers:
            if follower.policy.observes is not None:
                self._ask(follower, z, step, kernel, gram, uniform)
            follower.trace.variances.append(self._variance(follower, gram))
        self.steps.append(step)
        self.uniform.append(uniform)

    def _ask(self, follower: _Follower, z: Tensor, step: int, kernel: Kernel, gram: Gram, uniform: float) -> None:
        """Tell a policy how old its strata have become, and let it choose."""
        policy = follower.policy
        if follower.seen is not None:
            # the mean over all samples is what the drift of a weighted batch estimates
            drift = float(feature_distances(z, follower.seen, kernel).mean())
            policy.observe(drift=drift, scale=follower.scale, variance=self._variance(follower, gram) / uniform)
        if policy.due(step):
            self._refresh(follower, z, step, kernel)
            policy.observe(variance=self._variance(follower, gram) / uniform)  # what later ones are compared with

    def _variance(self, follower: _Follower, gram: Gram) -> float:
        if follower.plan is not None:
            return gram.drawn(*follower.plan)
        if follower.strata is None:
            raise InputError(f"the policy of {follower.way.name!r} has made no strata yet; let it start at step 0")
        return gram.stratified(follower.strata)

    def _refresh(self, follower: _Follower, z: Tensor, step: int, kernel: Kernel) -> None:
        began = time.perf_counter()
        maker, seed = follower.way.maker, derive_seed(self.seed, step)
        if maker == "ordered":
            sampler = OrderedBatchSampler(len(z), self.k, kernel=kernel, plan_rank=_PLAN_RANK, seed=seed)
            sampler.refresh(z)
            chunk = sampler.sample_batches(_PLANNED)
            assert chunk.weights is not None
            follower.plan = chunk.rows, chunk.weights.double()
        else:
            if maker not in self._made:
                self._made[maker] = StratumPairs(stratify(z, self.k, kernel=kernel, solver=maker, seed=seed))
            follower.strata = self._made[maker]
        follower.trace.seconds += time.perf_counter() - began
        follower.trace.refreshes.append(step)
        if follower.policy.observes is not None and follower.strata is not None:
            follower.seen = z
            follower.scale = strata_spread(z, follower.strata.labels, kernel=kernel).within


def follow_training(
    ways: Sequence[Way],
    *,
    seed: int,
    steps: int,
    every: int,
    lr: float = 1e-4,
    task: str = "left-A->right-B",
    progress: Progress | None = None,
) -> Aging:
    """Train the small network with MMD and the paper's strata (T = 100), and watch its source domain.

    Parameters
    ----------
    ways : sequence of Way
        Each is due at step 0.
    seed : int
        Of split, weights, batches and solvers.
    steps, every : int
        Length of the run and steps between probes; step 0 is probed, the last one is not.
    lr, task
        As for `small_trainer`.
    progress : callable, optional
        ``progress(share_done, message)``.
    """
    trainer = small_trainer(task, seed=seed, steps=steps, lr=lr, sampler="vardass", period=100)
    kernel = algorithm_kernel(trainer.algorithm)
    watch = Watch(ways, trainer.config.batch_size, kernel=kernel, every=every, seed=seed)

    def after_step(share: float, message: str) -> None:
        if trainer.step < steps:
            watch.at(trainer.step, lambda: source_features(trainer))
        if progress is not None:
            progress(share, f"step {trainer.step} of {steps}")

    watch.at(0, lambda: source_features(trainer))
    trainer.run(progress=after_step)
    spent, refreshes = trainer.account.seconds, -(-steps // 100)
    seconds = {
        "training": spent["training"] + spent["drawing"],
        "features": spent["features"] / refreshes,
        "solver": spent["solver"] / refreshes,
    }
    return Aging(watch.steps, watch.uniform, {f.way.name: f.trace for f in watch.followers}, seconds)
