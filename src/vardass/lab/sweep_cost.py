"""What a sweep will need: time and memory, from a few steps that are measured on this machine.

Nothing is taken from elsewhere. For each algorithm and network a training step, for each network a pass without
gradient, for each data set the loading of some files, and for each sampler a refresh and a batch are timed, on one
thread as in a sweep. A network that would have to be fetched is measured with random weights of its architecture.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, log, prod
from statistics import median
from typing import Any

import torch

from vardass.adapt.algorithms import Batch, make_algorithm
from vardass.adapt.batches import in_memory
from vardass.adapt.config import RunConfig
from vardass.adapt.devices import pick_device
from vardass.adapt.networks import make_network
from vardass.adapt.optimisation import make_optimisers, plain_backward
from vardass.adapt.strata_updater import make_policy
from vardass.data.domains import find_sample
from vardass.data.file_dataset import FileDataset
from vardass.data.images import may_crop
from vardass.data.registry import load_task
from vardass.data.splits import TaskSplits, split_task
from vardass.errors import InputError
from vardass.lab.record import RunSpec
from vardass.processes import count_cpus
from vardass.samplers.registry import find_sampler, make_sampler
from vardass.solvers.stratification import BASELINE_EXACT_LIMIT

__all__ = ["Estimate", "estimate"]

_STEP_SAMPLES = 4  # of each domain in a measured step, where samples are large; else those of a run
_LARGE = 4096  # numbers in a sample
_PASS_SAMPLES = 8
_FILES = 8
_SAMPLER_ROWS = 4096  # beyond the sizes up to which samplers other than the paper's use full matrices
_ENOUGH = 0.1  # seconds after which a measurement is not repeated
_SHOWN = 5  # of what could not be measured
_TASKS_KEPT = 2  # in a worker's memory, see run.py
_RANDOM = {"resnet18": "resnet18-random"}  # the same architecture, without a download
_PARTS = ("training", "evaluation", "features", "strata", "drawing")


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a sweep.

    Attributes
    ----------
    seconds : dict of str to dict of str to float
        By data and part of a run: ``"training"``, ``"evaluation"``, ``"features"`` (passes for refreshes),
        ``"strata"`` and ``"drawing"``; of one process that does all runs.
    memory : float
        Bytes of the largest run.
    shared : float
        Bytes of shared memory that the caches of one process take at most.
    jobs : int
        Runs at a time.
    left_out : list of str
        What could not be measured, and why.
    """

    seconds: dict[str, dict[str, float]]
    memory: float
    shared: float
    jobs: int
    left_out: list[str] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Seconds of one process that does all runs."""
        return sum(sum(parts.values()) for parts in self.seconds.values())

    def describe(self) -> str:
        """The estimate in a few lines, with how it was made."""
        unknown = [f"  left out: {each}" for each in self.left_out[:_SHOWN]]
        if len(self.left_out) > _SHOWN:
            unknown.append(f"  and {len(self.left_out) - _SHOWN} more")
        if not self.seconds:
            return "\n".join(["time and memory cannot be estimated", *unknown])
        jobs = f"{self.jobs} at a time"
        lines = [f"time    about {_time(self.total / self.jobs)} with {jobs}, {_time(self.total)} in one process"]
        for name, parts in self.seconds.items():
            whole = sum(parts.values()) or 1.0
            shares = ", ".join(f"{part} {parts[part] / whole:.0%}" for part in _PARTS if parts[part] >= 0.005 * whole)
            lines.append(f"  {name}: {_time(whole)} ({shares})")
        memory = (
            f"memory  about {_bytes(self.memory)} for the largest run, {_bytes(self.jobs * self.memory)} with {jobs}"
        )
        lines.append(memory)
        if self.shared:
            lines.append(f"  and of /dev/shm for caches up to {_bytes(self.jobs * self.shared)}")
        lines.append(
            f"measured on this machine, one thread: a step of each algorithm, with {_STEP_SAMPLES} + {_STEP_SAMPLES} "
            f"samples where they are large, a pass, {_FILES} files, and each sampler on at most {_SAMPLER_ROWS:,} "
            "samples, taken to grow with the square of their number; networks have random weights"
        )
        return "\n".join([*lines, *unknown])


def estimate(runs: list[RunSpec], *, jobs: int | None = None) -> Estimate:
    """Estimate the time and memory of ``runs`` by measuring what they do a few times.

    Parameters
    ----------
    runs : list of RunSpec
        Runs of a sweep.
    jobs : int, optional
        Runs at a time; default: the number of CPUs.

    Notes
    -----
    Times of steps and passes are taken to grow with the number of samples. A sampler is measured on a power of two of
    samples near the run's, at most 4,096, and its times are taken to grow with their square, which is the order of the
    paper's solver and more than that of the others. Files are loaded beside the training by as many processes as a run
    has workers, and once where they are cached. The memory is that of this process after the measurements, and the
    kernel matrix of the paper's solver on the larger domain, where it uses one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = _Measured()
        seconds: dict[str, Counter[str]] = {}
        matrix, shared = 0.0, 0.0
        left_out: dict[str, None] = {}
        for run in runs:
            try:
                data = measured.data(run)
                parts = _seconds(run, data, measured)
            except InputError as error:
                left_out[f"{run.data_name} {run.task}: {error}".splitlines()[0]] = None
                continue
            seconds.setdefault(run.data_name, Counter()).update(parts)
            matrix = max(matrix, _matrix_bytes(run, data))
            shared = max(shared, data.cache_bytes if run.data_options.get("cache") else 0.0)
    finally:
        torch.set_num_threads(threads)
    found = {name: {part: float(parts[part]) for part in _PARTS} for name, parts in seconds.items()}
    return Estimate(found, _largest_so_far() + matrix, _TASKS_KEPT * shared, jobs or count_cpus(), list(left_out))


def _seconds(run: RunSpec, data: _Data, measured: _Measured) -> dict[str, float]:
    config = RunConfig.from_dict(run.config)
    step, uses_target, width = measured.step(config, data)
    one_pass = measured.one_pass(config, data)
    load = data.load / max(config.workers, 1)
    cached = bool(run.data_options.get("cache"))
    again = 0.0 if cached else load  # of a sample that was loaded before
    batches = [config.batch_size * (data.sources if config.batch_per_source else 1)]
    if uses_target:
        batches.append(config.target_batch_size or config.batch_size)
    # crops of the source are taken from the file each time
    loading = (
        batches[0] * (load if config.augment != "none" and may_crop(data.inputs) else again) + sum(batches[1:]) * again
    )
    training = config.steps * max(step * sum(batches), loading) + (data.count * load if cached else 0.0)
    evaluations = ceil(config.steps / config.eval_every)
    held_out = evaluations * data.held_out + data.tested
    sizes = data.trained[: len(batches)]
    found = {"training": training, "evaluation": held_out * (one_pass + again)}
    refreshes = 0
    if measured.sampler(config, sizes[0], batches[0], width)[2]:
        refreshes = 1 if find_sampler(config.sampler).of_inputs else _refreshes(config)
    passes = 0 if config.feature_source == "bank" or find_sampler(config.sampler).of_inputs else refreshes
    found["features"] = passes * sum(sizes) * (one_pass + again)
    if config.class_shares not in ("none", "source"):  # predictions for the target
        found["features"] += refreshes * sizes[-1] * (one_pass + again)
    found["strata"] = found["drawing"] = 0.0
    for size, batch in zip(sizes, batches):
        refresh, drawing, _ = measured.sampler(config, size, batch, width)
        found["strata"] += refreshes * refresh
        found["drawing"] += config.steps * drawing
    return found


def _refreshes(config: RunConfig) -> int:
    policy = make_policy(config)
    if policy.observes is not None or config.refresh_every == 0:
        return 1 + (config.steps - 1) // 100 if policy.observes is not None else 1  # how often is not known before
    return sum(policy.due(step) for step in range(config.steps))


def _matrix_bytes(run: RunSpec, data: _Data) -> float:
    rank = run.config["sampler_options"].get("rank")
    largest = max(data.trained)
    full = run.config["sampler"] == "vardass" and (rank == 0 or (rank is None and largest <= BASELINE_EXACT_LIMIT))
    return 4.0 * largest**2 if full else 0.0


class _Data:
    """A task: the numbers of its samples, what one of them is, and how long its file takes to load."""

    def __init__(self, run: RunSpec) -> None:
        options = {name: value for name, value in run.data_options.items() if name != "cache"}
        task = load_task(run.dataset, run.task, run.root, **options)
        splits: TaskSplits = split_task(
            task, seed=run.split_seed, holdout=run.holdout, unlabelled_fraction=run.unlabelled_fraction
        )
        self.inputs = splits.source_train.dataset
        self.classes = len(task.class_names)
        self.sources = len(task.sources)
        self.trained = [len(splits.source_train), len(splits.target_unlabelled)]
        self.held_out = len(splits.source_val) + len(splits.target_val)
        self.tested = len(splits.target_test) + len(splits.source_val)
        self.count = sum(self.trained) + self.held_out + len(splits.target_test)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self.inputs[0].shape)

    @cached_property
    def load(self) -> float:
        """Seconds to load a sample that is not in memory."""
        if in_memory(self.inputs) is not None:
            return 0.0
        places = torch.linspace(0, self.trained[0] - 1, _FILES).long().tolist()
        return _timed(lambda: [self.inputs[place] for place in places]) / _FILES

    @cached_property
    def cache_bytes(self) -> float:
        """Of all samples as a cache keeps them."""
        files, place = find_sample(self.inputs, 0)
        return float(self.count * files.decode(place).nbytes) if isinstance(files, FileDataset) else 0.0


class _Measured:
    """Measurements, each made once."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def _once(self, key: list[Any], make: Callable[[], Any]) -> Any:
        text = json.dumps(key, sort_keys=True)
        if text not in self._known:
            self._known[text] = make()
        return self._known[text]

    def data(self, run: RunSpec) -> _Data:
        """The task of a run; its splits have the same sizes in all repeats."""
        key = [run.dataset, run.task, run.root, run.data_options, run.holdout, run.unlabelled_fraction]
        found: _Data = self._once(key, lambda: _Data(run))
        return found

    def step(self, config: RunConfig, data: _Data) -> tuple[float, bool, int]:
        """Seconds of a training step for each sample in it, whether the target is used, and columns of features."""
        rows = _STEP_SAMPLES if prod(data.shape) > _LARGE else _power_of_two(config.batch_size)

        def make() -> tuple[float, bool, int]:
            device = pick_device(config.device)
            network = self._network(config, data).to(device)
            algorithm = make_algorithm(config.algorithm, network, data.classes, **config.algorithm_options).to(device)
            optimisers = make_optimisers(config, algorithm)
            batch = Batch(
                torch.rand(rows, *data.shape, device=device), torch.arange(rows, device=device) % data.classes
            )
            numbers = iter(range(10))

            def update() -> None:
                target = batch._replace(y=None) if algorithm.uses_target else None
                algorithm.update(batch, target, next(numbers), optimisers=optimisers, backward=plain_backward)
                _wait(device)

            update()  # the first one makes the optimisers' state
            used = rows * (2 if algorithm.uses_target else 1)
            return _timed(update) / used, algorithm.uses_target, network.feature_dim

        # numbers, such as λ, are many and change little; kinds, such as that of an adversary, may change what is done
        options = {name: value for name, value in config.algorithm_options.items() if isinstance(value, str | bool)}
        key = ["step", rows, config.algorithm, options, *self._architecture(config), data.shape, data.classes]
        found: tuple[float, bool, int] = self._once(key, make)
        return found

    def one_pass(self, config: RunConfig, data: _Data) -> float:
        """Seconds of a pass without gradient for each sample."""

        def make() -> float:
            device = pick_device(config.device)
            network = self._network(config, data).to(device).eval()
            x = torch.rand(_PASS_SAMPLES, *data.shape, device=device)

            @torch.no_grad()
            def go() -> None:
                network(x)
                _wait(device)

            go()
            return _timed(go) / _PASS_SAMPLES

        found: float = self._once(["pass", *self._architecture(config), data.shape, data.classes], make)
        return found

    def sampler(self, config: RunConfig, n: int, batch_size: int, width: int) -> tuple[float, float, bool]:
        """Seconds of a refresh and of a batch, and whether the sampler needs features at all."""
        # samples and strata are of many numbers: some stand for all
        size = 4 ** ceil(log(max(batch_size, 2), 4))
        rows = max(size, min(2 ** round(log(n, 2)), _SAMPLER_ROWS))

        def make() -> tuple[float, float, bool]:
            kernel = "coral" if config.algorithm.startswith("coral") else "mmd"
            sampler = make_sampler(config.sampler, rows, size, **{"kernel": kernel, **config.sampler_options})
            refresh = 0.0
            if sampler.needs_features:
                z = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
                refresh = _timed(lambda: sampler.refresh(z))
            batches = iter(sampler)
            next(batches)
            return refresh, _timed(lambda: [next(batches) for _ in range(10)]) / 10, bool(sampler.needs_features)

        kind = config.algorithm.startswith("coral")
        key = ["sampler", config.sampler, config.sampler_options, kind, rows, size, width]
        refresh, drawing, needs = self._once(key, make)
        growth = (n / rows) ** 2 if needs else 1.0
        return refresh * growth, drawing * growth, needs

    def _network(self, config: RunConfig, data: _Data) -> Any:
        name, options = self._architecture(config)
        return make_network(name, data.shape, data.classes, **options)

    def _architecture(self, config: RunConfig) -> tuple[str, dict[str, Any]]:
        options = {name: value for name, value in config.network_options.items() if name != "dropout"}
        return _RANDOM.get(config.network, config.network), options


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _timed(work: Callable[[], object]) -> float:
    """Seconds of ``work``, the median of at most three times."""
    found: list[float] = []
    while len(found) < 3 and sum(found) < _ENOUGH:
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return median(found)


def _largest_so_far() -> float:
    """Bytes of memory that this process has had at most; 0 on systems that do not say."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0.0
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(seconds: float) -> str:
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}" if size < 3600 else f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86400:,.1f} days"


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
