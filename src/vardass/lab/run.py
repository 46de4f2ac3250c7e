"""One run of a sweep, from its specification to its record; killed at any moment, it resumes from its checkpoint."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vardass
from vardass.adapt.batches import Inputs
from vardass.adapt.config import RunConfig
from vardass.adapt.model import RunResult, final_report
from vardass.adapt.networks import preprocessing_of
from vardass.adapt.run_folder import RunFolder
from vardass.adapt.selection import outputs
from vardass.adapt.strata_updater import make_policy
from vardass.adapt.trainer import Trainer
from vardass.data.domains import Domain, Task
from vardass.data.registry import image_options, load_task
from vardass.data.splits import TaskSplits, split_task
from vardass.errors import InputError
from vardass.files import HOLDER_FILE, LOCK_FILE, locked, plain, remove_temporary, write_text
from vardass.lab.record import Record, RunSpec, versions
from vardass.lab.store import LOG_FILE, PROGRESS_FILE, RECORD_FILE, empty, read_progress, run_label
from vardass.losses import coral, mmd2

__all__ = ["DISCREPANCY_SAMPLES", "Stopped", "execute", "seconds_of"]

DISCREPANCY_SAMPLES = 2048
"""Held-out samples of each domain, evenly spaced, that the record's discrepancies are measured on at most."""

_TASKS_KEPT = 2  # in memory, for the runs that follow on the same data
_RESULTS = ("target_accuracy", "source_accuracy", "target_samples", "selected_step", "score")
_PROGRESS_SECONDS = 1.0
_TIMED_STEPS = 10
_LOCK_SECONDS = 60.0  # an orphan of a killed sweep exits within moments, its loading processes a little later


class Stopped(Exception):
    """The run was asked to stop, and has written a checkpoint."""


def execute(
    spec: RunSpec, folder: Path, *, attempt: int = 1, wall_before: float = 0.0, stop: Callable[[], bool] | None = None
) -> Record:
    """Do a run and write its record to ``folder``, which is locked meanwhile.

    A run that was killed resumes from its checkpoint, bit for bit. What the run prints goes to ``log.txt``. Times
    include those of earlier attempts, ``wall_before`` those that the folder does not know of. `Stopped` is raised on
    Ctrl-C, or if ``stop``, which is called after each step, returns True.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another one") from error
    with locked(folder, wait=_LOCK_SECONDS, work="run"):
        remove_temporary(folder)
        if (folder / RECORD_FILE).exists():
            return Record.from_json((folder / RECORD_FILE).read_text(encoding="utf-8"))
        with _captured(folder / LOG_FILE):
            try:
                return _run(spec, folder, attempt, wall_before, stop)
            except Stopped:
                raise
            except BaseException:
                traceback.print_exc()
                raise


def _run(spec: RunSpec, folder: Path, attempt: int, wall_before: float, stop: Callable[[], bool] | None) -> Record:
    clock = _Clock(spec, folder, wall_before)
    config = RunConfig(**spec.config)
    splits = _splits(spec, config)
    trainer = _trainer(config, splits, folder)
    # the trainer keeps what these have beyond the account in a checkpoint
    trainer.account.load_state_dict({"seconds": clock.seconds})

    def after_step(share: float, message: str) -> None:
        clock.note(trainer)
        if stop is not None and stop():
            raise KeyboardInterrupt

    if not clock.file.exists():
        clock.note(trainer, now=True)
    result = trainer.run(resume=True, progress=after_step)
    clock.note(trainer, now=True)
    if result.interrupted:
        raise Stopped(f"after step {result.step} of {config.steps}")
    report = final_report(result, splits)
    record = Record(
        spec=spec,
        status="finished",
        result=plain({**{name: report[name] for name in _RESULTS}, **_discrepancies(result, splits)}),
        curve=plain(result.metrics),
        seconds=plain(result.seconds),
        wall=clock.wall(),
        attempts=attempt,
        environment=_environment(str(trainer.device)),
        version=vardass.__version__,
    )
    write_text(folder / RECORD_FILE, record.to_json() + "\n")
    return record


def seconds_of(spec: RunSpec) -> float:
    """How long a run will take, from what its first steps, its first refresh and an evaluation take."""
    whole = RunConfig(**spec.config)
    config = whole.changed(steps=min(_TIMED_STEPS, whole.steps), eval_every=_TIMED_STEPS)
    splits = _splits(spec, config)
    Trainer(config.changed(steps=1), splits).run()  # whatever is compiled on first use does not count
    spent = Trainer(config, splits).run().seconds
    policy = make_policy(whole)
    refreshes = max(1, sum(map(policy.due, range(whole.steps))))
    passes = 1 if whole.feature_source == "bank" else refreshes
    times = {"features": passes, "solver": refreshes, "evaluation": math.ceil(whole.steps / whole.eval_every)}
    return sum(seconds * times.get(part, whole.steps / config.steps) for part, seconds in spent.items())


def _splits(spec: RunSpec, config: RunConfig) -> TaskSplits:
    wanted = preprocessing_of(config.network, config.network_options)
    options = json.dumps({**image_options(spec.dataset, wanted), **spec.data_options}, sort_keys=True)
    task = _task(spec.dataset, spec.task, spec.root, options)
    splits = split_task(task, seed=spec.split_seed, holdout=spec.holdout, unlabelled_fraction=spec.unlabelled_fraction)
    if config.selection == "oracle":
        splits.target_val.reveal()
    return splits


@lru_cache(maxsize=_TASKS_KEPT)
def _task(dataset: str, task: str, root: str | None, options: str) -> Task:
    return load_task(dataset, task, root, **json.loads(options))


def _trainer(config: RunConfig, splits: TaskSplits, folder: Path) -> Trainer:
    """A trainer that resumes from the folder's checkpoint, which is removed if it is damaged or of other settings."""
    before = RunFolder(folder)
    if before.has_checkpoint:
        try:
            print(f"resuming from step {before.load(config, resume=True)['step']}")
        except InputError as error:
            if isinstance(error.__cause__, OSError | ModuleNotFoundError):
                raise  # the checkpoint may be whole
            print(f"starting from the beginning, as the checkpoint cannot be used: {error}")
            empty(folder, keep=(LOG_FILE, LOCK_FILE, HOLDER_FILE, PROGRESS_FILE))
    target = splits.target_test
    # as in DomainBed's records: a copy is revealed, what the run sees stays hidden
    known = target.subset(torch.arange(len(target))).reveal() if len(target) and target.has_labels else None
    return Trainer(config, splits, folder, observed=known)


def _discrepancies(result: RunResult, splits: TaskSplits) -> dict[str, float | None]:
    """MMD² with the paper's kernel (equation 2) and CORAL (section 2.3) of the chosen model's held-out features.

    ``coral_relative`` is CORAL over the mean of |R_s|² and |R_t|², as noisy batches shrink features.
    """
    if not len(splits.source_val) or not len(splits.target_test):
        return dict.fromkeys(("mmd2", "coral", "coral_relative"))
    x, y = (_features(result, domain) for domain in (splits.source_val, splits.target_test))
    with torch.no_grad():
        gap = float(coral(x, y))
        size = sum(float(torch.cov(z.double().T, correction=0).square().sum()) for z in (x, y)) / 2.0
        return {"mmd2": float(mmd2(x, y)), "coral": gap, "coral_relative": gap / size if size else None}


def _features(result: RunResult, domain: Domain) -> Tensor:
    # sources are united one after the other: evenly spaced rows have their share of each
    count = min(len(domain), DISCREPANCY_SAMPLES)
    rows = torch.linspace(0, len(domain) - 1, count, dtype=torch.float64).round().long()
    inputs = Inputs(domain.subset(rows), next(result.algorithm.parameters()).device)
    return outputs(result.algorithm, inputs, **result.config.pass_options)[0]


@lru_cache(maxsize=8)
def _environment(device: str) -> dict[str, Any]:
    return {
        **versions(),
        "platform": platform.platform(),
        "machine": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    }


class _Clock:
    """Time and progress of a run in a small file, so that a killed attempt counts too."""

    def __init__(self, spec: RunSpec, folder: Path, wall_before: float) -> None:
        self.file = folder / PROGRESS_FILE
        before = read_progress(folder)
        self.started = time.perf_counter()
        self.before = wall_before if before is None else before.wall
        self.seconds: dict[str, float] = {} if before is None else dict(before.seconds)
        self.label = run_label(spec)
        self._written = 0.0

    def wall(self) -> float:
        """Seconds of all attempts until now."""
        return self.before + time.perf_counter() - self.started

    def note(self, trainer: Trainer, *, now: bool = False) -> None:
        """Write the file, at most once a second; without waiting for the disk, as it may be a second old anyway."""
        if not now and time.perf_counter() - self._written < _PROGRESS_SECONDS:
            return
        self._written = time.perf_counter()
        content = {
            "label": self.label,
            "step": trainer.step,
            "steps": trainer.config.steps,
            "wall": self.wall(),
            "seconds": trainer.account.seconds,
        }
        beside = self.file.with_suffix(".tmp")
        beside.write_text(json.dumps(content), encoding="utf-8")
        os.replace(beside, self.file)


@contextmanager
def _captured(log: Path) -> Iterator[None]:
    """Send all that is printed to the end of a file, by native code too."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    with open(log, "a", encoding="utf-8", buffering=1) as file:
        try:
            for number in saved:
                os.dup2(file.fileno(), number)
            with redirect_stdout(file), redirect_stderr(file):
                yield
        finally:
            file.flush()
            for number, copy in saved.items():
                os.dup2(copy, number)
                os.close(copy)
