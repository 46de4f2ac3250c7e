"""Wall clock of training with each sampler, relative to uniform batches: ``python benchmarks/overhead.py``.

Whole runs of 3,000 steps of every sampler would take a day on two cores, so each part is measured where it is cheap:

- *training* and *features*: steps of trainers with each sampler, one of each in turn, with what a step pays for weights
  and the feature bank; medians of training, means of features, which the bank writes 64 batches at a time.
- *solver* and *drawing*: all refreshes and all batches of 3,000 steps of both domains, on the features that the trained
  network gives, with T = 100 and with the default policy, whose refreshes grow apart; nothing is extrapolated.

The ratio is that of 3,000 steps, their refreshes and draws, and the pass that fills the bank, to 3,000 uniform steps
and their draws. The paper: 3.5 to 17.6 times the time of uniform batches.

``--settings large`` times whole runs instead, of the settings of ``vardass adapt`` on 200,000 samples: there the first
refreshes are most of a short run, and nothing is left to take apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from common import HERE, interleaved, markdown, write_results
from torch import Tensor, nn

from vardass.adapt import RunConfig, Trainer
from vardass.adapt.strata_updater import make_policy
from vardass.data import Domain, Task, load_task, split_task
from vardass.data.domains import TensorInputs
from vardass.data.splits import TaskSplits
from vardass.samplers.registry import make_sampler

SAMPLERS = {"VaRDASS": "vardass", "min-sum": "stratified", "ordered": "ordered", "balanced": "balanced"}
POLICIES: dict[str, dict[str, Any]] = {"T = 100": {"refresh_every": 100}, "default": {}}
STEPS = 3000
BATCH = 32
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
TITLES = {"wall": "Wall clock", "cpu": "Seconds of one core"}
PARTS = ("training", "features", "solver", "drawing")


class ResNet18(nn.Module):
    """ResNet-18 of transformers from its configuration, with random weights: images to 512 features."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel

        widths = [64, 128, 256, 512]
        self.body = ResNetModel(ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=widths, layer_type="basic"))

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.body(x).pooler_output
        return pooled.flatten(1)


@dataclass(frozen=True)
class Setting:
    """Data, network, and how many steps of each trainer are timed."""

    title: str
    splits: Callable[[Path], TaskSplits]
    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    network: Callable[[], nn.Module] | None = None


def watch(data: Path) -> TaskSplits:
    return split_task(load_task("watch", "left-A->right-B"), seed=0)


def pacs(pixels: int) -> Callable[[Path], TaskSplits]:
    """Photos and paintings, enlarged from 32 x 32 where more pixels are asked for."""

    def make(data: Path) -> TaskSplits:
        arrays = np.load(data / "pacs/pacs_img32.npz")

        def domain(name: str) -> Domain:
            x = torch.from_numpy(arrays[f"img_{name}"]).permute(0, 3, 1, 2).float() / 255.0
            x = x.repeat_interleave(pixels // 32, 2).repeat_interleave(pixels // 32, 3)
            labels = torch.from_numpy(arrays[f"y_{name}"].astype("i8"))
            return Domain(name, TensorInputs(x), labels, tuple(map(str, arrays["classes"])), kind="image")

        return split_task(Task("photo->art", (domain("photo"),), domain("art_painting")), seed=0)

    return make


SETTINGS = {
    "mlp": Setting("watch, MLP on 78 features", watch, 400),
    "conv": Setting("PACS 32 x 32, small convolutional net", pacs(32), 96, {"network": "conv"}),
    "resnet": Setting("PACS at 64 x 64, ResNet-18", pacs(64), 6, network=ResNet18),
}


LARGE = "large"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", nargs="*", default=[*SETTINGS, LARGE], choices=[*SETTINGS, LARGE])
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "shared/data")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: seconds of one core, if it is busy")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for key in asked.settings:
        clock = CLOCKS[asked.clock]
        table, numbers = whole_runs(clock) if key == LARGE else measure(SETTINGS[key], asked.data, clock)
        write_results(
            f"overhead_{key}", f"{TITLES[asked.clock]} of training, relative to uniform batches", [table], numbers
        )


def measure(setting: Setting, data: Path, timer: Callable[[], float]) -> tuple[str, dict[str, Any]]:
    splits = setting.splits(data)
    trainers = {name: begun(setting, splits, name) for name in ("uniform", *SAMPLERS.values())}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for _ in range(setting.steps):
        for name, trainer in trainers.items():
            trainer.account._clock = timer
            before = dict(trainer.account.seconds)
            trainer._one_step()
            after = trainer.account.seconds
            seconds[name].append({part: after.get(part, 0.0) - before.get(part, 0.0) for part in PARTS})
    middle = {part: mean if part == "features" else median for part in PARTS}
    step = {name: {part: middle[part](one[part] for one in found) for part in PARTS} for name, found in seconds.items()}
    sizes = [len(stream.inputs) for stream in trainers["uniform"].streams.values()]
    start = timer()
    features = {name: trainers["balanced"].strata.all_features(name) for name in trainers["balanced"].streams}
    first_pass = timer() - start
    uniform, _ = replayed(step["uniform"], "uniform", {}, features, timer)
    base = sum(uniform[part] for part in PARTS)
    rows = [["uniform", "", "1.00", "", *(f"{1000 * uniform[part]:.2f}" for part in PARTS)]]
    found: dict[str, Any] = {"uniform": uniform}
    for title, name in SAMPLERS.items():
        for policy, options in POLICIES.items():
            cost, refreshes = replayed(step[name], name, options, features, timer)
            cost["features"] += first_pass / STEPS
            ratio = sum(cost.values()) / base
            found[f"{title}, {policy}"] = {**cost, "ratio": ratio, "refreshes": refreshes}
            rows.append(
                [title, policy, f"{ratio:.2f}", str(refreshes), *(f"{1000 * cost[part]:.2f}" for part in PARTS)]
            )
    header = ["sampler", "policy", "time / uniform", "refreshes", *(f"{part}, ms a step" for part in PARTS)]
    title = (
        f"## {setting.title}\n\nn = {sizes[0]:,} and {sizes[1]:,}, batch {BATCH} of each, MMD; {setting.steps} steps "
        f"of each trainer in turn, refreshes and draws of {STEPS:,} steps."
    )
    return title + "\n\n" + markdown(header, rows), found


def whole_runs(timer: Callable[[], float], n: int = 200_000, d: int = 256, steps: int = 300, repeats: int = 3) -> Any:
    """Runs of ``RunConfig.recommended`` and the same with uniform batches, in turn, on ten blobs in each domain."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, d, generator=generator)

    def domain(name: str, shift: float) -> Domain:
        labels = torch.randint(10, (n,), generator=generator)
        x = centres[labels] + torch.randn(n, d, generator=generator) + shift
        return Domain(name, TensorInputs(x), labels, tuple(f"class {c}" for c in range(10)))

    splits = split_task(Task("blobs", (domain("source", 0.0),), domain("target", 0.3)), seed=0)
    parts: dict[str, dict[str, list[float]]] = {"uniform": {}, "vardass adapt": {}}

    def run(name: str) -> None:
        chosen = {"sampler": "uniform"} if name == "uniform" else {}
        trainer = Trainer(RunConfig.recommended(steps=steps, batch_size=BATCH, **chosen), splits)
        trainer.account._clock = timer
        trainer.run()
        for part, spent in trainer.account.seconds.items():
            parts[name].setdefault(part, []).append(spent)

    run("vardass adapt")  # compiles
    parts["vardass adapt"].clear()
    seconds, _ = interleaved({name: (lambda name=name: run(name)) for name in parts}, repeats, timer)
    shown = {name: {part: median(values) for part, values in found.items()} for name, found in parts.items()}
    header = ["run", "time / uniform", "seconds", *PARTS, "the rest"]
    rows, found = [], {}
    for name, spent in seconds.items():
        named = [shown[name].get(part, 0.0) for part in PARTS]
        found[name] = {"seconds": spent, "ratio": spent / seconds["uniform"], "parts": shown[name]}
        rows.append(
            [name, f"{found[name]['ratio']:.2f}", *(f"{one:.1f}" for one in (spent, *named, spent - sum(named)))]
        )
    title = (
        f"## Whole runs on large data\n\n{n:,} samples of {d} features in each domain, {steps} steps, batches of "
        f"{BATCH}, MMD; median of {repeats} runs of each in turn. The rest is mostly evaluation."
    )
    return title + "\n\n" + markdown(header, rows), found


def begun(setting: Setting, splits: TaskSplits, sampler: str) -> Trainer:
    """A trainer after a few steps, so that strata are in use and everything is compiled."""
    config = RunConfig(steps=3, eval_every=3, selection="last", batch_size=BATCH, sampler=sampler, **setting.options)
    trainer = Trainer(config, splits, network=None if setting.network is None else setting.network())
    trainer.run()
    trainer.algorithm.train()
    return trainer


def replayed(
    step: dict[str, float],
    name: str,
    options: dict[str, Any],
    features: dict[str, Tensor],
    timer: Callable[[], float],
) -> tuple[dict[str, float], int]:
    """Seconds of a ``step`` by part, with its share of the refreshes and draws of 3,000 steps, and the refreshes.

    Features move by a tenth of their deviation between refreshes, so that none finds what it started from.
    """
    policy = make_policy(RunConfig(steps=STEPS, sampler=name, **options))
    due = [step for step in range(STEPS) if policy.due(step)]
    found = dict(step)
    for seed, x in enumerate(features.values()):
        sampler = make_sampler(name, len(x), BATCH, kernel="mmd", seed=seed)
        batches = iter(sampler)
        generator = torch.Generator().manual_seed(seed)
        moves = 0.1 * x.std(0) * torch.randn(x.shape, generator=generator)
        for place, start in enumerate(due):
            stop = due[place + 1] if place + 1 < len(due) else STEPS
            moved = x + moves * (place % 2)
            begun = timer()
            if sampler.needs_features:
                sampler.refresh(moved)
            refreshed = timer()
            for _ in range(start, stop):
                next(batches)
            found["solver"] += (refreshed - begun) / STEPS
            found["drawing"] += (timer() - refreshed) / STEPS
    return found, len(due)


if __name__ == "__main__":
    main()
