"""Training with refreshes and draws in another process: repeatable, and resumed bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from vardass.adapt import RunConfig, Trainer
from vardass.adapt.batches import _in_background
from vardass.data import load_task, split_task
from vardass.data.splits import TaskSplits
from vardass.errors import InputError
from vardass.samplers import BackgroundSampler, StratifiedBatchSampler

STEPS = 36


@pytest.fixture(scope="module")
def splits() -> TaskSplits:
    return split_task(load_task("watch", "left-A->right-B"), seed=0)


def config(sampler: str = "stratified", **settings: object) -> RunConfig:
    given = {"steps": STEPS, "refresh_every": 12, "eval_every": 18, "checkpoint_every": 18, "batch_size": 8, **settings}
    return RunConfig.from_dict({"sampler": sampler, "background": True, **given})


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in trainer.algorithm.parameters()])


@pytest.mark.parametrize("sampler", ["vardass", "ordered", "balanced", "kmeans++"])
def test_a_resumed_run_is_the_uninterrupted_one(splits: TaskSplits, tmp_path: Path, sampler: str) -> None:
    whole = Trainer(config(sampler), splits)
    whole.run()
    Trainer(config(sampler, steps=18), splits, tmp_path / "run").run()
    resumed = Trainer(config(sampler), splits, tmp_path / "run")
    resumed.run(resume=True)
    assert torch.equal(weights(whole), weights(resumed))


def test_new_strata_apply_later_than_without_it(splits: TaskSplits) -> None:
    trainer = Trainer(config(), splits)
    stream = trainer.streams["source"]
    assert isinstance(stream.sampler, BackgroundSampler)
    assert stream.sampler.ahead == 3
    result = trainer.run()
    # strata of step 24 arrived; the log is of those in use at the refresh
    assert stream.sampler.strata is not None
    assert result.metrics[-1]["source/reduction"] > 1.0
    alone = Trainer(config(background=False), splits)
    alone.run()
    assert not torch.equal(weights(trainer), weights(alone))


def test_uniform_batches_need_no_process(splits: TaskSplits) -> None:
    trainer, alone = Trainer(config("uniform"), splits), Trainer(config("uniform", background=False), splits)
    assert not isinstance(trainer.streams["source"].sampler, BackgroundSampler)
    trainer.run()
    alone.run()
    assert torch.equal(weights(trainer), weights(alone))


def test_several_processes_are_refused() -> None:
    class Two:
        count = 2

    with pytest.raises(InputError, match="devices=1"):
        _in_background(StratifiedBatchSampler(20, 4, endless=True), config(), Two())  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["drift", "variance"])
def test_policies_that_measure_new_strata_are_refused(splits: TaskSplits, policy: str) -> None:
    with pytest.raises(InputError, match=r"background=True.*background=False"):
        Trainer(config(refresh_every=policy), splits)


def test_no_thread_is_left_behind(splits: TaskSplits, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    Trainer(config(steps=14), splits, tmp_path / "run").run()
    assert set(threading.enumerate()) <= before
