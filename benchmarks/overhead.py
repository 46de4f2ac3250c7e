"""Wall clock of training with each sampler, relative to uniform batches: ``python benchmarks/overhead.py``.

Same network, data, steps and losses; runs take turns in one process. `bank`: features come from the training batches.
`background`: refreshes and draws in another process. `full`: a forward pass over all samples at each refresh, as the
paper does it. The paper: 3.5 to 17.6 times the time of uniform batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from common import markdown, write_results

from vardass.adapt import RunConfig, Trainer
from vardass.data import Domain, Task, load_task, split_task
from vardass.data.domains import TensorInputs
from vardass.data.splits import TaskSplits

WAYS: dict[str, dict[str, Any]] = {
    "uniform": {"sampler": "uniform"},
    "VaRDASS, bank": {"sampler": "vardass"},
    "VaRDASS, bank, background": {"sampler": "vardass", "background": True},
    "VaRDASS, full": {"sampler": "vardass", "feature_source": "full"},
    "min-sum, bank": {"sampler": "stratified"},
    "min-sum, bank, background": {"sampler": "stratified", "background": True},
    "ordered, bank": {"sampler": "ordered"},
    "ordered, bank, background": {"sampler": "ordered", "background": True},
    "balanced, bank": {"sampler": "balanced"},
    "balanced, bank, background": {"sampler": "balanced", "background": True},
}


@dataclass(frozen=True)
class Setting:
    """Data, network and length of the runs."""

    title: str
    splits: Callable[[], TaskSplits]
    steps: int
    repeats: int
    options: dict[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = tuple(WAYS)


def watch() -> TaskSplits:
    return split_task(load_task("watch", "left-A->right-B"), seed=0)


def images(n: int, pixels: int) -> Callable[[], TaskSplits]:
    """Random images: the time of a step does not depend on what they show."""

    def make() -> TaskSplits:
        generator = torch.Generator().manual_seed(0)

        def domain(name: str, shift: float) -> Domain:
            labels = torch.randint(7, (n,), generator=generator)
            x = torch.rand(n, 3, pixels, pixels, generator=generator) * 0.5 + shift + labels[:, None, None, None] / 28
            return Domain(name, TensorInputs(x), labels, tuple("abcdefg"), kind="image")

        task = Task("a->b", (domain("a", 0.0),), domain("b", 0.25))
        return split_task(task, seed=0)

    return make


SETTINGS = {
    "mlp": Setting("watch, MLP on 78 features, n = 936 and 489, batch 32", watch, 1000, 3),
    "conv": Setting(
        "images 32 x 32, small convolutional net, n = 1,920 and 960, batch 32",
        images(2400, 32),
        200,
        2,
        {"network": "conv"},
        ("uniform", "VaRDASS, bank", "VaRDASS, bank, background", "VaRDASS, full", "ordered, bank", "balanced, bank"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the background process has the other core
    for key in asked.settings:
        table, numbers = measure(SETTINGS[key])
        write_results(f"overhead_{key}", "Wall clock of training, relative to uniform batches", [table], numbers)


def measure(setting: Setting) -> tuple[str, dict[str, Any]]:
    splits = setting.splits()
    seconds: dict[str, list[float]] = {name: [] for name in setting.ways}
    parts: dict[str, dict[str, float]] = {}
    for _ in range(setting.repeats):
        for name in setting.ways:
            # without evaluations: they cost the same for all, and would make the ratios smaller
            config = RunConfig(
                steps=setting.steps, eval_every=setting.steps, selection="last", **setting.options, **WAYS[name]
            )
            trainer = Trainer(config, splits)
            start = time.perf_counter()
            result = trainer.run()
            seconds[name].append(time.perf_counter() - start)
            parts[name] = result.seconds
    base = seconds["uniform"]
    rows = []
    for name, values in seconds.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        shares = [f"{1000 * parts[name].get(part, 0.0) / setting.steps:.2f}" for part in PARTS]
        rows.append([name, f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", *shares])
    header = ["", "time / uniform", "least to most", *(f"{part}, ms a step" for part in PARTS)]
    title = f"## {setting.title}\n\n{setting.steps} steps, T = 100, {setting.repeats} runs of each, taking turns; MMD."
    return title + "\n\n" + markdown(header, rows), {"seconds": seconds, "parts": parts}


PARTS = ("training", "features", "solver", "drawing")

if __name__ == "__main__":
    main()
