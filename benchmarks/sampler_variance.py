"""Noise of the minibatch discrepancy under each sampler, on real features (k = 32 and 128, MMD and CORAL).

Four data sets, five pairs of domains; each with its standardised features and with the 64 hidden features of a
small network trained on source labels and the loss. For every cell the variance of the loss over batches is
compared with that of uniform draws and with the paper's strata, and the mean embedding is checked for bias.

    python benchmarks/sampler_variance.py --data ../shared/data --out benchmarks/results/sampler_variance.md

With ``--add paired stream`` only these samplers, and uniform, are measured and put beside those of the last run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import HERE, RESULTS, markdown
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from vardass.analysis.sampler_noise import variance_report
from vardass.data import standardise, watch_domains
from vardass.files import atomic_write
from vardass.kernels import as_kernel
from vardass.losses import StreamWeights, coral, mmd2
from vardass.paper.paired_sampler import PairedBatchSampler
from vardass.samplers import (
    BalancedBatchSampler,
    IndexBatch,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
)
from vardass.samplers.plan import PLAN_RANK, plan_features

OURS = ("ordered", "balanced")
SAMPLERS = ("uniform", "paper", "strata", "equal", *OURS, "paired", "stream")
WARM = 100  # batches that running statistics have seen before batches are measured
TO_PAPER, TO_UNIFORM = 1 / 5, 1 / 50
WEIGHT = {"mmd": 1.0, "coral": 0.1}  # of the loss in training
BATCH, RAMP = 64, 200


class Pair(NamedTuple):
    """Inputs and labels of two domains, and features to use as they are; target labels only give the accuracy."""

    x: Tensor
    y: Tensor
    labels: Tensor
    target_labels: Tensor
    raw_x: Tensor
    raw_y: Tensor


def pacs(folder: Path, source: str, target: str) -> Pair:
    with np.load(folder / "pacs" / "pacs_effnetlite0.npz") as file:
        x, y = (torch.from_numpy(file[f"feat_{name}"].astype(np.float32)) for name in (source, target))
        labels = [torch.from_numpy(file[f"y_{name}"].astype(np.int64)) for name in (source, target)]
    x, y = standardise(x), standardise(y, reference=x)
    return Pair(x, y, *labels, x, y)


def digits(folder: Path) -> Pair:
    with np.load(folder / "digits" / "digits.npz") as file:
        mnist, usps = (torch.from_numpy(file[f"{name}_train_x"]).float() for name in ("mnist", "usps"))
        labels = [torch.from_numpy(file[f"{name}_train_y"].astype(np.int64)) for name in ("mnist", "usps")]
    mnist = interpolate(mnist[:, None, 4:24, 4:24], size=(16, 16), mode="bilinear", antialias=True)
    # one mean and deviation for all pixels: those at the border hardly vary
    mean, spread = mnist.mean(), mnist.std()
    x, y = (mnist.flatten(1) - mean) / spread, (usps.flatten(1) - mean) / spread
    return Pair(x, y, *labels, x, y)


def watch(_: Path) -> Pair:
    domains = watch_domains()
    (x, labels), (y, target_labels) = domains["left-A"], domains["right-B"]
    x, y = standardise(x), standardise(y, reference=x)
    return Pair(x, y, labels, target_labels, x, y)


def amazon(folder: Path) -> Pair:
    counts, labels = [], []
    with np.load(folder / "amazon_reviews" / "amazon_reviews.npz") as file:
        for name in ("books_train", "kitchen_train"):
            data, indices, starts = (file[f"{name}_{part}"] for part in ("data", "indices", "indptr"))
            dense = np.zeros((len(starts) - 1, 5000), dtype=np.float32)
            dense[np.repeat(np.arange(len(dense)), np.diff(starts)), indices.astype(np.int64)] = np.log1p(
                data.astype(np.float32)
            )
            counts.append(torch.from_numpy(dense))
            labels.append(torch.from_numpy(file[f"{name}_y"].astype(np.int64)))
    projection = torch.randn(5000, 256, generator=torch.Generator().manual_seed(0)) / 16.0
    raw = [z @ projection for z in counts]
    return Pair(
        standardise(counts[0]),
        standardise(counts[1], reference=counts[0]),
        *labels,
        standardise(raw[0]),
        standardise(raw[1], reference=raw[0]),
    )


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "PACS art-cartoon": lambda folder: pacs(folder, "art_painting", "cartoon"),
    "PACS photo-sketch": lambda folder: pacs(folder, "photo", "sketch"),
    "digits mnist-usps": digits,
    "watch leftA-rightB": watch,
    "reviews books-kitchen": amazon,
}


def train(pair: Pair, loss: str, steps: int, seed: int) -> tuple[nn.Module, float]:
    """A featuriser in-128-64 trained with Adam on source labels and the loss, and its target accuracy in %."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        featuriser = nn.Sequential(nn.Linear(pair.x.shape[1], 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        head = nn.Linear(64, int(pair.labels.max()) + 1)
    optimiser = torch.optim.Adam([*featuriser.parameters(), *head.parameters()], lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        i = torch.randint(len(pair.x), (BATCH,), generator=generator)
        j = torch.randint(len(pair.y), (BATCH,), generator=generator)
        z_x, z_y = featuriser(pair.x[i]), featuriser(pair.y[j])
        gap = mmd2(z_x, z_y) if loss == "mmd" else coral(z_x, z_y)
        total = cross_entropy(head(z_x), pair.labels[i]) + WEIGHT[loss] * min(1.0, step / RAMP) * gap
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
    with torch.no_grad():
        right = head(featuriser(pair.y)).argmax(1) == pair.target_labels
    return featuriser, 100.0 * float(right.float().mean())


class Stream:
    """Uniform batches of one domain with the weights of `StreamWeights`, as a sampler that knows the features."""

    def __init__(self, n: int, k: int, kernel: str, seed: int) -> None:
        self.batches = iter(UniformBatchSampler(n, k, replacement=True, endless=True, seed=seed))
        self.weights = StreamWeights(kernel)

    def refresh(self, features: Tensor) -> None:
        self.features = features
        for _ in itertools.islice(self, WARM):
            pass

    def __iter__(self) -> Iterator[IndexBatch]:
        for batch in self.batches:
            batch.weights = self.weights(self.features[batch]).tolist()
            yield batch


def samplers(k: int, kernel: str) -> dict[str, Any]:
    seeds = itertools.count(1)
    return {
        "uniform": lambda n: UniformBatchSampler(n, k, replacement=True),
        "paper": lambda n: StratifiedBatchSampler(n, k, kernel=kernel, solver="dynamic-kmeans"),
        "strata": lambda n: StratifiedBatchSampler(n, k, kernel=kernel),
        "equal": lambda n: StratifiedBatchSampler(n, k, kernel=kernel, equal=True),
        "ordered": lambda n: OrderedBatchSampler(n, k, kernel=kernel),
        "balanced": lambda n: BalancedBatchSampler(n, k, kernel=kernel),
        "paired": [partial(PairedBatchSampler, batch_size=k, role=r, kernel=kernel) for r in ("source", "target")],
        "stream": lambda n: Stream(n, k, kernel, next(seeds)),
    }


class Task(NamedTuple):
    pair: str
    featuriser: str  # "raw" or "trained"
    loss: str
    k: int


def run(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """One cell, in a process of its own with one thread."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    pair = PAIRS[task.pair](options.data)
    cell: dict[str, Any] = {**task._asdict(), "accuracy": None}
    more: dict[str, Any] = {"gradient_batches": 0}
    x, y = pair.raw_x, pair.raw_y
    if task.featuriser == "trained":
        model, cell["accuracy"] = train(pair, task.loss, options.steps, options.seed)
        with torch.no_grad():
            x, y = model(pair.x), model(pair.y)
        more = {"gradient_batches": options.gradient_batches}
        if options.gradient_batches:
            more |= {"model": model, "source_inputs": pair.x, "target_inputs": pair.y}
    wanted = samplers(task.k, task.loss)
    if options.add:
        wanted = {name: wanted[name] for name in ("uniform", *options.add)}
    report = variance_report(wanted, x, y, kernel=task.loss, batches=options.batches, seed=options.seed, **more)
    cell["report"] = report.to_dict()
    if not options.add:
        cell |= limits((x, y), task.loss)
    cell["seconds"] = time.perf_counter() - started
    return cell


def limits(domains: Iterable[Tensor], kernel: str) -> dict[str, float]:
    """What a plan cannot see of the variance, and how much larger than the mean κ(z, z) gets; the worse domain."""
    missed, largest = [], []
    for x in domains:
        fitted = as_kernel(kernel).fit(x)
        features = plan_features(x, fitted, PLAN_RANK, generator=torch.Generator().manual_seed(1))
        missed.append(1.0 - features.captured)
        squares = fitted.diag(x)
        largest.append(float(squares.max() / squares.mean()))
    return {"missed": max(missed), "largest": max(largest)}


def relative(cell: dict[str, Any], sampler: str, to: str, measure: str = "loss_variance") -> float | None:
    values = cell["report"]["samplers"]
    if values[sampler][measure] is None or not values[to][measure]:
        return None
    return float(values[sampler][measure] / values[to][measure])


def median(cells: Iterable[dict[str, Any]], sampler: str, to: str, measure: str = "loss_variance") -> float | None:
    found = [ratio for ratio in (relative(cell, sampler, to, measure) for cell in cells) if ratio is not None]
    return statistics.median(found) if found else None


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def cell_table(cells: list[dict[str, Any]]) -> str:
    header = ["domains", "features", "loss", "k", "samples", "Var uniform"]
    header += [*SAMPLERS[1:], "ordered / paper", "balanced / paper"]
    header += ["missed by plan", "largest / mean", "reached by"]
    rows = []
    for cell in cells:
        values = cell["report"]["samplers"]
        to_uniform = [show(relative(cell, name, "uniform")) for name in SAMPLERS[1:]]
        to_paper = [show(relative(cell, name, "paper")) for name in OURS]
        rows.append(
            [
                cell["pair"],
                cell["featuriser"],
                cell["loss"],
                str(cell["k"]),
                "+".join(map(str, cell["report"]["sizes"])),
                show(values["uniform"]["loss_variance"]),
                *to_uniform,
                *to_paper,
                f"{cell['missed']:.2f}",
                f"{cell['largest']:.1f}",
                ", ".join(name for name in OURS if reached(cell, name)) or "none",
            ]
        )
    return markdown(header, rows)


def reached(cell: dict[str, Any], name: str) -> bool:
    to_paper, to_uniform = relative(cell, name, "paper"), relative(cell, name, "uniform")
    return to_paper is not None and to_uniform is not None and to_paper <= TO_PAPER and to_uniform <= TO_UNIFORM


def detail_table(cells: list[dict[str, Any]]) -> str:
    header = ["domains", "features", "loss", "k", "target accuracy %"]
    header += [f"Var(μ̂) {name}" for name in ("paper", *OURS)]
    header += [f"bias {name}" for name in ("uniform", "paper", *OURS)]
    header += [f"gradient {name}" for name in ("paper", *OURS)]
    header += [f"refresh s {name}" for name in ("paper", *OURS)]
    header += [f"batch ms {name}" for name in OURS]
    rows = []
    for cell in cells:
        values = cell["report"]["samplers"]
        accuracy = "-" if cell["accuracy"] is None else f"{cell['accuracy']:.1f}"
        row = [cell["pair"], cell["featuriser"], cell["loss"], str(cell["k"]), accuracy]
        row += [show(relative(cell, name, "uniform", "variance")) for name in ("paper", *OURS)]
        row += [f"{values[name]['bias_ratio']:.2f}" for name in ("uniform", "paper", *OURS)]
        row += [show(relative(cell, name, "uniform", "gradient_mse")) for name in ("paper", *OURS)]
        row += [f"{values[name]['refresh_seconds']:.2f}" for name in ("paper", *OURS)]
        row += [f"{1e3 * values[name]['batch_seconds']:.2g}" for name in OURS]
        rows.append(row)
    return markdown(header, rows)


def median_table(cells: list[dict[str, Any]]) -> str:
    groups = {"trained features (the requirement)": [c for c in cells if c["featuriser"] == "trained"]}
    groups["all cells"] = cells
    groups["raw features"] = [c for c in cells if c["featuriser"] == "raw"]
    trained = groups["trained features (the requirement)"]
    for loss in ("mmd", "coral"):
        for k in sorted({c["k"] for c in cells}):
            groups[f"trained, {loss}, k = {k}"] = [c for c in trained if c["loss"] == loss and c["k"] == k]
    rows = []
    for name, group in groups.items():
        if not group:
            continue
        row = [name, str(len(group))]
        row += [show(median(group, sampler, "uniform")) for sampler in ("paper", *OURS)]
        row += [show(median(group, sampler, "paper")) for sampler in OURS]
        row += [show(median(group, sampler, "paper", "gradient_mse")) for sampler in OURS]
        row += [f"{sum(reached(cell, sampler) for cell in group)}/{len(group)}" for sampler in OURS]
        rows.append(row)
    header = ["median over", "cells", "paper / uniform", *(f"{name} / uniform" for name in OURS)]
    header += [*(f"{name} / paper" for name in OURS), *(f"gradient MSE, {name} / paper" for name in OURS)]
    header += [f"cells reached, {name}" for name in OURS]
    return markdown(header, rows)


def sampler_table(cells: list[dict[str, Any]]) -> str:
    """A row for each sampler, relative to uniform: medians, and the bias in the worst cell."""
    trained = [cell for cell in cells if cell["featuriser"] == "trained"]
    raw = [cell for cell in cells if cell["featuriser"] == "raw"]
    rows = []
    for name in SAMPLERS:
        ratios = [relative(cell, name, "uniform") or 0.0 for cell in trained]
        row = [name, show(median(trained, name, "uniform")), show(max(ratios, default=None))]
        row += [show(median(raw, name, "uniform")), show(median(trained, name, "uniform", "gradient_mse"))]
        row += [show(median(group, name, "uniform", "loss_bias")) for group in (trained, raw)]
        row.append(f"{max(cell['report']['samplers'][name]['bias_ratio'] for cell in cells):.2f}")
        rows.append(row)
    header = ["sampler", "Var(loss), trained", "its worst cell", "Var(loss), raw", "gradient MSE, trained"]
    header += ["excess of the loss, trained", "excess, raw", "largest bias of μ̂"]
    return markdown(header, rows)


def document(cells: list[dict[str, Any]], options: argparse.Namespace, seconds: float) -> str:
    worst = max(cell["report"]["samplers"][name]["bias_ratio"] for cell in cells for name in OURS)
    lines = [
        "# Variance of the minibatch discrepancy, by sampler",
        "",
        f"Command: `{options.command}`",
        f"({seconds:.0f} s with {options.jobs} processes of one thread, torch {torch.__version__}).",
        "",
        "Variance of the loss (V-statistic of MMD² with the paper's mixture, or the paper's CORAL) over "
        f"{options.batches} independent pairs of a source and a target batch. *uniform* draws with replacement, "
        "*paper* is `StratifiedBatchSampler(solver='dynamic-kmeans')`, *strata* the same with `min-sum`. "
        "*raw* features are standardised on the source (reviews: 256 random projections of log1p counts); *trained* "
        f"are the 64 ReLU features of a network in-128-64 after {options.steps} steps of Adam on source labels and "
        f"the loss (weights {WEIGHT}, batch {BATCH}, uniform).",
        "",
        f"Asked for, in the median: at most {TO_PAPER:g} of *paper* and {TO_UNIFORM:g} of *uniform*.",
        "",
        "## Medians",
        "",
        median_table(cells),
        "",
        "## Every sampler, relative to uniform",
        "",
        "Medians over cells. *equal* is `StratifiedBatchSampler(equal=True)`, the default of `vardass adapt`. *paired* "
        "are two `PairedBatchSampler`, whose batches are taken in step. *stream* are uniform draws with the weights of "
        f"`StreamWeights` after {WARM} batches, and not independent of one another. *Excess of the loss*: its mean "
        "minus the loss of all data, relative to uniform batches; the V-statistic exceeds it by the variance of μ̂. "
        "Bias of μ̂ as below, in the worst cell.",
        "",
        sampler_table(cells),
        "",
        "## Every cell: Var(loss) relative to uniform, and to paper",
        "",
        f"*missed by plan*: share of the variance of μ̂ outside the {PLAN_RANK} kernel features that plans look at, in "
        "the worse domain. It is high where the kernel is close to the identity on the features (the mixture on "
        "hundreds of standardised columns), and no plan on these features can cancel it. *largest / mean*: of κ(z, z) "
        "in the worse domain. Where it is not small against k, a single sample spoils each batch that it is in if all "
        "weights are "
        "1/k, as in *balanced*; strata give it a small weight.",
        "",
        cell_table(cells),
        "",
        "## Mean embedding, bias, gradient and time",
        "",
        "Var(μ̂) and the mean squared error of the gradient (of all network weights) are relative to uniform. Bias is "
        "|mean of μ̂ - μ| over its root mean square for independent unbiased batches: 1 or less, give or take its "
        f"noise, means unbiased (largest for ordered and balanced: {worst:.2f}).",
        "",
        detail_table(cells),
        "",
    ]
    return "\n".join(lines)


def joined(cells: list[dict[str, Any]], file: Path) -> tuple[list[dict[str, Any]], str]:
    """The cells of an earlier run with the samplers of these beside theirs, and its command."""
    record = json.loads(file.read_text())
    before, key = record["cells"], Task._fields
    new = {tuple(cell[name] for name in key): cell["report"]["samplers"] for cell in cells}
    for cell in before:
        mine = new.get(tuple(cell[name] for name in key))
        theirs = cell["report"]["samplers"]
        if mine is None or abs(mine["uniform"]["loss_variance"] / theirs["uniform"]["loss_variance"] - 1.0) > 0.05:
            raise SystemExit(f"{file} is of other features or options; run the whole benchmark")
        cell["report"]["samplers"] = theirs | {name: mine[name] for name in mine if name != "uniform"}
    return before, record["options"]["command"]


def write(cells: list[dict[str, Any]], options: argparse.Namespace, seconds: float) -> None:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    record = {"options": settings, "torch": torch.__version__, "seconds": seconds, "cells": cells}
    with atomic_write(options.out) as file:
        file.write(document(cells, options, seconds).encode())
    with atomic_write(options.out.with_suffix(".json")) as file:
        file.write(json.dumps(record, indent=1, allow_nan=False).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=HERE / "../../shared/data", help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=RESULTS / "sampler_variance.md")
    parser.add_argument("--batches", type=int, default=256)
    parser.add_argument(
        "--gradient-batches", type=int, default=64, help="trained features only; 0 leaves gradients out"
    )
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--only", default="", help="pairs of domains whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", nargs="+", choices=SAMPLERS[1:], help="measure these only, beside those of --out")
    options = parser.parse_args()
    options.command = shlex.join(["python", os.path.relpath(sys.argv[0], HERE.parent), *sys.argv[1:]])
    tasks = [
        Task(pair, featuriser, loss, k)
        for pair in PAIRS
        if options.only in pair
        for featuriser in ("trained", "raw")
        for loss in ("mmd", "coral")
        for k in options.sizes
    ]
    if not tasks:
        parser.error(f"--only {options.only!r} matches none of {', '.join(PAIRS)}")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes: two pools of threads would fight over the cores
    started = time.perf_counter()
    done: dict[Task, dict[str, Any]] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        # the largest first, so that no process waits for a long one at the end
        order = sorted(tasks, key=lambda task: ("digits" not in task.pair, -task.k))
        running = {pool.submit(run, task, options): task for task in order}
        for future in as_completed(running):
            task = running[future]
            done[task] = cell = future.result()
            names = options.add or SAMPLERS[1:]
            ratios = ", ".join(f"{name} {show(relative(cell, name, 'uniform'))}" for name in names)
            name = f"{task.pair}, {task.featuriser}, {task.loss}, k = {task.k}"
            print(f"[{len(done)}/{len(tasks)}] {name}: {ratios} x uniform ({cell['seconds']:.0f} s)", flush=True)
    cells = [done[task] for task in tasks]
    seconds = time.perf_counter() - started
    if options.add:
        cells, command = joined(cells, options.out.with_suffix(".json"))
        options.command = f"{command}`, then `{options.command}"
    write(cells, options, seconds)
    print("\n" + document(cells, options, seconds))
    print(f"written: {options.out}, {options.out.with_suffix('.json')}")


if __name__ == "__main__":
    main()
