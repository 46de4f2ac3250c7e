"""What figures 4 and 5 share: features of a small network on the watch data."""

from __future__ import annotations

from torch import Tensor

from vardass.adapt.config import RunConfig
from vardass.adapt.trainer import Trainer
from vardass.data import load_task, split_task
from vardass.refresh import extract_features

__all__ = ["small_trainer", "source_features"]


def small_trainer(
    task: str, *, seed: int, steps: int, lr: float, sampler: str = "uniform", period: int = 100
) -> Trainer:
    """A trainer of the default small network with MMD and k = 32, in memory.

    Parameters
    ----------
    task : str
        Of the watch data, such as ``"left-A->right-B"``.
    seed : int
        Of split, weights and batches.
    steps, lr
        Length of the run and learning rate of Adam.
    sampler, period
        How batches are drawn, and T, steps between refreshes from a pass over all samples.
    """
    config = RunConfig(
        algorithm="mmd",
        sampler=sampler,
        steps=steps,
        batch_size=32,
        lr=lr,
        refresh_every=period,
        feature_source="full",
        eval_every=steps,
        device="cpu",
        seed=seed,
    )
    return Trainer(config, split_task(load_task("watch", task), seed=seed))


def source_features(trainer: Trainer) -> Tensor:
    """Features (n, d) of all source samples that the run trains on, as the network is now."""
    data = trainer.streams["source"].inputs.data
    return extract_features(trainer.algorithm, data, forward=lambda model, x: model.features(x))
