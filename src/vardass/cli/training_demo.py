"""The demo's training: a small network, adapted from one watch domain to another with each way to draw."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vardass.data import standardise, watch_domains
from vardass.losses import coral, mmd2
from vardass.samplers import (
    BalancedBatchSampler,
    MinibatchSampler,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
)
from vardass.samplers.base import derive_seed

__all__ = ["BATCH_SIZE", "LAMBDA", "PAIRS", "PERIOD", "WAYS", "Job", "Noise", "Run", "Way", "run_jobs", "train"]

# other wrist, other people
PAIRS = (("left-A", "right-B"), ("left-B", "right-A"), ("right-A", "left-B"), ("right-B", "left-A"))
BATCH_SIZE = 8
LAMBDA = 1.0  # at the end: it grows linearly from 0
PERIOD = 100  # steps between refreshes, the paper's T
_PROBE_EVERY, _PROBE_BATCHES = 400, 64


@dataclass(frozen=True)
class Way:
    """A way to draw batches, the estimator of MMD² and the losses to use it with."""

    sampler: type[MinibatchSampler] | None  # None trains on the source alone
    options: dict[str, Any] = field(default_factory=dict)
    estimator: str = "v"
    losses: tuple[str, ...] = ("mmd", "coral")


_PLAN = {"plan_rank": 64}  # as many columns as the features have: more cost time and gain little here
WAYS = {
    "source only": Way(None, losses=("none",)),
    "uniform": Way(UniformBatchSampler),
    "uniform, U-statistic": Way(UniformBatchSampler, estimator="u", losses=("mmd",)),
    "VaRDASS (paper)": Way(StratifiedBatchSampler, {"solver": "dynamic-kmeans"}),
    "min-sum strata": Way(StratifiedBatchSampler),
    "ordered": Way(OrderedBatchSampler, _PLAN),
    "balanced": Way(BalancedBatchSampler, _PLAN),
}


@dataclass(frozen=True)
class Job:
    """One training: all that its result depends on, with a name of `WAYS` and one of its losses."""

    way: str
    loss: str
    source: str
    target: str
    seed: int
    steps: int
    batch_size: int = BATCH_SIZE


@dataclass(frozen=True)
class Noise:
    """Variance of the discrepancy, and squared error around that of all samples, at one state of the network."""

    step: int
    variance: float
    error: float
    uniform_variance: float
    uniform_error: float


@dataclass(frozen=True)
class Run:
    """What came of a job: target accuracy of the last network, noise on the way, seconds spent on batches."""

    job: Job
    accuracy: float
    noise: tuple[Noise, ...]
    sampling_seconds: float


def run_jobs(jobs: Sequence[Job], *, processes: int | None = None, done: Callable[[int], object] = int) -> list[Run]:
    """Train all jobs, by default on all CPUs; results, in order, are the same for any number of processes."""
    workers = min(processes or os.cpu_count() or 1, len(jobs))
    context = multiprocessing.get_context("spawn")  # a fork may hang once torch has started threads
    with ProcessPoolExecutor(workers, context, _start_worker) as pool:
        futures = [pool.submit(train, job) for job in jobs]
        try:
            for count, future in enumerate(as_completed(futures), 1):
                future.result()  # a failure ends the demo at once
                done(count)
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _start_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of it and stops the workers


def train(job: Job) -> Run:
    """Train one network; target labels are read only at the end."""
    way = WAYS[job.way]
    x, labels, y, target_labels = _pair(job.source, job.target)
    featuriser, head = _network(job.seed, x.shape[1])
    optimiser = torch.optim.Adam([*featuriser.parameters(), *head.parameters()], lr=1e-3, fused=True)
    samplers = _samplers(way, job, len(x), len(y))
    streams = [iter(sampler) for sampler in samplers]
    noise, sampling = [], 0.0
    for step in range(job.steps):
        began = time.perf_counter()
        if step % PERIOD == 0 and samplers[0].needs_features:
            with torch.no_grad():
                for sampler, inputs in zip(samplers, (x, y)):
                    sampler.refresh(featuriser(inputs))
        batches = [next(stream) for stream in streams]
        sampling += time.perf_counter() - began
        if way.sampler is not None and step % _PROBE_EVERY == PERIOD // 2:  # strata at half their age
            noise.append(_probe(step, way, job, samplers, featuriser(x), featuriser(y)))
        rows, target_rows = (torch.tensor(batch) for batch in batches)
        w, w_target = (None if batch.weights is None else torch.tensor(batch.weights) for batch in batches)
        z, z_target = featuriser(torch.cat([x[rows], y[target_rows]])).split(job.batch_size)
        task = cross_entropy(head(z), labels[rows], reduction="none")
        loss = task.mean() if w is None else task @ w
        if way.sampler is not None:
            strength = LAMBDA * (step + 1) / job.steps
            loss = loss + strength * _discrepancy(way, job.loss, z, z_target, w, w_target)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    with torch.no_grad():
        accuracy = float((head(featuriser(y)).argmax(1) == target_labels).double().mean())
    return Run(job, accuracy, tuple(noise), sampling)


@cache
def _pair(source: str, target: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    domains = watch_domains()
    (x, labels), (y, target_labels) = domains[source], domains[target]
    return standardise(x), labels, standardise(y, reference=x), target_labels


def _network(seed: int, width: int) -> tuple[nn.Module, nn.Module]:
    """The same start for the same seed, whatever the sampler; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()), nn.Linear(64, 7)


def _samplers(way: Way, job: Job, *sizes: int) -> list[MinibatchSampler]:
    kind: Any = way.sampler or UniformBatchSampler
    options = {**way.options, **({"kernel": job.loss} if kind.needs_features else {})}
    seeds = [derive_seed(job.seed, side) for side in range(len(sizes))]
    return [kind(n, job.batch_size, seed=seed, endless=True, **options) for n, seed in zip(sizes, seeds)]


def _discrepancy(way: Way, loss: str, z: Tensor, z_target: Tensor, w: Tensor | None, w_target: Tensor | None) -> Tensor:
    if loss == "mmd":
        return mmd2(z, z_target, weights_x=w, weights_y=w_target, preset="paper", estimator=way.estimator)
    return coral(z, z_target, weights_x=w, weights_y=w_target, preset="paper")


def _probe(step: int, way: Way, job: Job, samplers: list[MinibatchSampler], z: Tensor, z_target: Tensor) -> Noise:
    """Draw many batches with the network held still."""
    uniform = WAYS["uniform"]
    full = _discrepancy(uniform, job.loss, z, z_target, None, None).detach()
    numbers = []
    for used, given in ((way, samplers), (uniform, _samplers(uniform, job, len(z), len(z_target)))):
        a, b = (_fresh_epoch(sampler).sample_batches(_PROBE_BATCHES, seed=step) for sampler in given)
        w, w_target = (None if part.weights is None else part.weights.float() for part in (a, b))
        pairs = zip(a.rows, b.rows)
        with torch.no_grad():
            values = torch.stack([_discrepancy(used, job.loss, z[i], z_target[j], w, w_target) for i, j in pairs])
        numbers += [float(values.var()), float((values - full).square().mean())]
    return Noise(step, *numbers)


def _fresh_epoch(sampler: MinibatchSampler) -> MinibatchSampler:
    """A copy at the start of an epoch: what is left of the present one is no fair sample of all batches."""
    sampler = copy.deepcopy(sampler)
    sampler.set_epoch(0)
    return sampler
