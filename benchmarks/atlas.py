"""Target accuracy by penalty, batch size, sampler and estimator: short runs, equal in all else, with paired seeds.

    python benchmarks/atlas.py ../shared/data --seeds 0 1 2 --out benchmarks/results/atlas.jsonl   # continues
    python benchmarks/atlas_report.py benchmarks/results/atlas.jsonl                                # figure and tables

The runs of one seed (all penalties and all tasks of a data set) train side by side as one network with a leading axis
of runs: steps of networks this small are overhead, and are paid for once. Samplers, kernels, strata and class alignment
are the package's; the losses are written out below for that leading axis, and `--check` compares them with its own.

Network: 128 - 64 with ReLU on frozen features, or two strided convolutions and 64 units on images; the discrepancy acts
on the 64. Adam 1e-3, weight decay 1e-4, no target label but in the final count. A fifth of the source is held out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, amazon_words
from torch import Tensor
from torch.nn import functional as F

import vardass
from vardass.data.scaling import scale_columns
from vardass.losses import CORALLoss
from vardass.samplers.base import derive_seed
from vardass.samplers.registry import make_sampler

PENALTIES = {"mmd": (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0), "coral": (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)}
BATCHES = (8, 32, 128)
GAMMAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
REFRESHES = (0, 50, 100, 200, 300, 450, 600, 800, 1000, 1250, 1500, 2000, 2500)
RANK = 64  # of the kernel features that strata are made from
MOST = 2000  # samples of a domain


@dataclass(frozen=True)
class Method:
    """How batches are drawn, and how their loss is used."""

    sampler: str = "uniform"
    estimator: str = "v"  # "u", or "reference": against the batches before
    ramp: float = 0.0  # share of the steps over which the penalty rises to its value, after the first 100
    # of the discrepancy's pull on source features, in parts of the task's: so much at 32 samples, in proportion below
    limit: float | None = None
    # batches of both domains have all classes alike from when the predicted shares of the target differ by so much
    classes: float | None = None


METHODS = {
    "uniform": Method(),
    "min-sum": Method("stratified"),
    "ordered": Method("ordered"),
    "balanced": Method("balanced"),
    "uniform, unbiased": Method(estimator="u"),
    "balanced, reference": Method("balanced", "reference"),
    "uniform, limited": Method(ramp=0.2, limit=1.0),
    "balanced, limited": Method("balanced", ramp=0.2, limit=1.0),
    "aligned, limited": Method("balanced", ramp=0.2, limit=1.0, classes=0.0),
    "recommended": Method("balanced", ramp=0.2, limit=1.0, classes=0.2),
}
FIRST_ALIGNED = (
    100  # step from which pseudo-labels are trusted; adapted ones have the source's class shares, whatever the truth
)


# --- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One pair of domains; inputs (n, ...) of one task, scaled by its source."""

    name: str
    source: Tensor
    source_labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor
    target: Tensor
    target_labels: Tensor


def make_tasks(
    domains: dict[str, tuple[np.ndarray, np.ndarray]], pairs: list[tuple[str, str]], scale: bool, others: bool
) -> list[Task]:
    """Tasks of some pairs of domains, or of all the others."""
    tasks = []
    if others:
        pairs = [pair for pair in itertools.permutations(domains, 2) if pair not in pairs]
    for a, b in pairs:
        (xs, ys), (xt, yt) = (_at_most(*domains[name]) for name in (a, b))
        rows = np.random.default_rng(0).permutation(len(xs))
        kept, held = rows[len(rows) // 5 :], rows[: len(rows) // 5]
        tensor = lambda x: torch.as_tensor(np.ascontiguousarray(x), dtype=torch.float32)  # noqa: E731
        parts = [tensor(xs[kept]), tensor(xs[held]), tensor(xt)]
        if scale:
            deviation = parts[0].std(0)
            deviation = torch.where(deviation < 0.01 * deviation.median(), deviation.median(), deviation)
            fitted = {"mean": parts[0].mean(0).tolist(), "deviation": deviation.tolist(), "clip": 8.0}
            parts = [scale_columns(part, fitted) for part in parts]
        labels = [torch.as_tensor(y.astype("i8")) for y in (ys[kept], ys[held], yt)]
        tasks.append(Task(f"{a} -> {b}", parts[0], labels[0], parts[1], labels[1], parts[2], labels[2]))
    return tasks


def _at_most(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(0).permutation(len(x))[:MOST]
    return x[rows], y[rows]


def watch(folder: Path, others: bool) -> list[Task]:
    """Wrist x group of people (every second person): 78 statistics of each window."""
    data = np.load(folder / "watch_exercise/watch_windows.npz")
    w = data["X"].astype("f4")
    parts = [w.mean(1), w.std(1), w.min(1), w.max(1), np.abs(np.diff(w, axis=1)).mean(1)]
    parts.append(np.abs(np.fft.rfft(w - w.mean(1, keepdims=True), axis=1))[:, 1:9].reshape(len(w), -1))
    features = np.concatenate(parts, 1)
    first = np.isin(data["subject"], np.unique(data["subject"])[::2])
    domains = {
        f"{'left' if side == 0 else 'right'}-{name}": (
            features[rows & (data["side"] == side)],
            data["y"][rows & (data["side"] == side)],
        )
        for side, (name, rows) in itertools.product((0, 1), (("A", first), ("B", ~first)))
    }
    return make_tasks(
        domains,
        [("left-A", "right-B"), ("left-B", "right-A"), ("right-A", "left-B"), ("right-B", "left-A")],
        scale=True,
        others=others,
    )


def pacs(folder: Path, others: bool) -> list[Task]:
    """Pooled features (1280) of EfficientNet-lite0."""
    data = np.load(folder / "pacs/pacs_effnetlite0.npz")
    domains = {
        d: (data[f"feat_{d}"].astype("f4"), data[f"y_{d}"]) for d in ("art_painting", "cartoon", "photo", "sketch")
    }
    pairs = [("art_painting", "cartoon"), ("cartoon", "photo"), ("photo", "art_painting"), ("art_painting", "sketch")]
    return make_tasks(domains, pairs, scale=True, others=others)


def amazon(folder: Path, others: bool) -> list[Task]:
    """log(1 + counts) of 5,000 words on their 200 main axes over all four domains (no labels)."""
    data = np.load(folder / "amazon_reviews/amazon_reviews.npz")
    names = ("books", "dvd", "electronics", "kitchen")
    counts = {name: amazon_words(data, name, ("train",)) for name in names}
    words = torch.from_numpy(np.concatenate([counts[name] for name in names]))
    axes = torch.linalg.eigh((words - words.mean(0)).T @ (words - words.mean(0))).eigenvectors[:, -200:]
    domains = {name: ((torch.from_numpy(counts[name]) @ axes).numpy(), data[f"{name}_train_y"]) for name in names}
    return make_tasks(
        domains,
        [("books", "electronics"), ("kitchen", "dvd"), ("electronics", "books"), ("dvd", "kitchen")],
        scale=True,
        others=others,
    )


def digits(folder: Path, others: bool) -> list[Task]:
    """Images of 16 x 16, as the 64 patches of 3 x 3 that the first convolution (stride 2) sees; trained end to end."""
    data = np.load(folder / "digits/digits.npz")

    def patches(images: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(images.astype("f4") / 255.0)[:, None]
        if x.shape[-1] != 16:
            x = F.interpolate(x[..., 4:24, 4:24], size=(16, 16), mode="bilinear", antialias=True)
        return F.unfold(x, 3, padding=1, stride=2).transpose(1, 2).numpy()

    domains = {
        "mnist": (patches(data["mnist_train_x"][:MOST]), data["mnist_train_y"][:MOST]),
        "usps": (patches(data["usps_train_x"][:MOST]), data["usps_train_y"][:MOST]),
        "semeion": (patches(data["semeion_x"]), data["semeion_y"]),
    }
    pairs = [("mnist", "usps"), ("usps", "mnist"), ("semeion", "usps"), ("mnist", "semeion")]
    return make_tasks(domains, pairs, scale=False, others=others)


DATA: dict[str, Callable[[Path, bool], list[Task]]] = {"watch": watch, "pacs": pacs, "digits": digits, "amazon": amazon}
STEPS = {"watch": 1500, "pacs": 800, "digits": 800, "amazon": 1000}


# --- networks side by side ------------------------------------------------------------------------


class Networks:
    """R networks with a leading axis, each initialised from a seed of its own."""

    def __init__(self, shape: tuple[int, ...], classes: int, seeds: list[int]) -> None:
        self.is_image = len(shape) == 2
        numbered = torch.arange(1.0, 65.0).view(1, 1, 8, 8)  # 0 is the padding
        self.patches = F.unfold(numbered, 3, padding=1, stride=2)[0].T.flatten().long()
        sizes = [(9, 16), (16 * 9, 32), (32 * 16, 64)] if self.is_image else [(shape[0], 128), (128, 64)]
        self.weights, self.biases = [], []
        for layer, (fan_in, fan_out) in enumerate([*sizes, (64, classes)]):
            bound = fan_in**-0.5
            drawn = []
            for seed in seeds:
                generator = torch.Generator().manual_seed(derive_seed(seed, layer))
                drawn.append((torch.rand(fan_in + 1, fan_out, generator=generator) * 2 - 1) * bound)
            table = torch.stack(drawn)
            self.weights.append(table[:, :-1].clone().requires_grad_())
            self.biases.append(table[:, -1:].clone().requires_grad_())

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def features(self, x: Tensor, runs: slice = slice(None)) -> Tensor:
        """Features (R, b, 64) of inputs (R, b, ...)."""
        r, b = x.shape[:2]
        dense = lambda i, z: torch.baddbmm(self.biases[i][runs], z, self.weights[i][runs]).relu()  # noqa: E731
        if not self.is_image:
            return dense(1, dense(0, x))
        z = dense(0, x.reshape(r, b * 64, 9)).reshape(r, b, 64, 16)
        z = F.pad(z, (0, 0, 1, 0))[:, :, self.patches].reshape(r, b * 16, 144)  # five times faster than F.unfold here
        return dense(2, dense(1, z).reshape(r, b, 512))

    def logits(self, z: Tensor, runs: slice = slice(None)) -> Tensor:
        return torch.baddbmm(self.biases[-1][runs], z, self.weights[-1][runs])


# --- losses of R pairs of batches -----------------------------------------------------------------


def mixture(x: Tensor, y: Tensor) -> Tensor:
    """The paper's kernel between rows: (R, a, h) and (R, b, h) to (R, a, b)."""
    d2 = squared_distances(x, y)
    return sum(torch.exp((-g * d2).clamp_min(-80.0)) for g in GAMMAS)  # type: ignore[return-value]


def mmd(x: Tensor, y: Tensor, a: Tensor, b: Tensor, estimator: str) -> Tensor:
    signed = torch.cat([a, -b], 1)
    pairs = signed[:, :, None] * signed[:, None]
    if estimator == "u":
        n = a.shape[1]
        pairs[:, :n, :n] /= (1 - a.square().sum(1))[:, None, None]
        pairs[:, n:, n:] /= (1 - b.square().sum(1))[:, None, None]
    joint = torch.cat([x, y], 1)
    eye = torch.eye(joint.shape[1], dtype=torch.bool)
    matrix = mixture(joint, joint).masked_fill(eye, 0.0 if estimator == "u" else float(len(GAMMAS)))
    return (pairs * matrix).sum((1, 2))


def moments(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    mean = (w[:, :, None] * z).sum(1, keepdim=True)
    centred = z - mean
    scaled = w / (1 - w.square().sum(1, keepdim=True))
    return mean[:, 0], torch.bmm((centred * scaled[:, :, None]).transpose(1, 2), centred)


def coral(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    (mx, cx), (my, cy) = moments(x, a), moments(y, b)
    return (mx - my).square().mean(1) + (cx - cy).square().mean((1, 2))


Recent = list[tuple[Tensor, Tensor]]  # features (R, b, 64) and weights (R, b) of the batches before


def coral_reference(x: Tensor, y: Tensor, a: Tensor, b: Tensor, recent_x: Recent, recent_y: Recent) -> Tensor:
    """Gradient of CORAL against the moments of recent batches, as a form that is linear in the batch."""
    (mx, cx), (my, cy) = (moments(*joined(recent)) for recent in (recent_x, recent_y))

    def side(z: Tensor, w: Tensor, mean: Tensor) -> Tensor:
        centred = z - mean[:, None]
        by_mean = 2 * (centred * (mx - my)[:, None]).mean(2)
        by_spread = 2 * (torch.bmm(centred, cx - cy) * centred).sum(2) / z.shape[2] ** 2
        return (w * (by_mean + by_spread)).sum(1)

    return side(x, a, mx) - side(y, b, my)


def mmd_reference(x: Tensor, y: Tensor, a: Tensor, b: Tensor, recent_x: Recent, recent_y: Recent) -> Tensor:
    """Gradient of 2 Σ a f(x) - 2 Σ b f(y), f the witness function of recent batches, as a form linear in x and y."""
    with torch.no_grad():
        z, w = torch.cat([x, y], 1), torch.cat([a, -b], 1)
        (rows_x, w_x), (rows_y, w_y) = joined(recent_x), joined(recent_y)
        bank = torch.cat([rows_x, rows_y], 1)
        d2 = squared_distances(z, bank)
        slope = sum(torch.exp((-g * d2).clamp_min(-80.0)).mul_(-g) for g in GAMMAS) * torch.cat([w_x, -w_y], 1)[:, None]
        pull = 4 * w[:, :, None] * (slope.sum(2, keepdim=True) * z - torch.bmm(slope, bank))
    return (pull * torch.cat([x, y], 1)).sum((1, 2))


def joined(recent: Recent) -> tuple[Tensor, Tensor]:
    return torch.cat([z for z, _ in recent], 1), torch.cat([w for _, w in recent], 1) / len(recent)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    return (x.square().sum(2)[:, :, None] + y.square().sum(2)[:, None] - 2 * torch.bmm(x, y.transpose(1, 2))).clamp_min(
        0
    )


# --- training -------------------------------------------------------------------------------------


def streams(kind: str, loss: str, n: int, batch: int, seed: int) -> Any:
    options: dict[str, Any] = {}
    if kind != "uniform":
        options = {"kernel": "mmd" if loss == "mmd" else CORALLoss(preset="domainbed").kernel(64)}
        options |= {"plan_rank" if kind == "balanced" else "kernel_rank": RANK}
    return make_sampler(kind, n, batch, seed=seed, **options)


def draws(iterator: Iterator[Any], count: int, batch: int) -> tuple[Tensor, Tensor]:
    """The next batches as indices and weights (count, batch)."""
    taken = list(itertools.islice(iterator, count))
    even = [1 / batch] * batch
    return torch.tensor(taken), torch.tensor([even if part.weights is None else list(part.weights) for part in taken])


def train(
    tasks: list[Task],
    data: str,
    loss: str,
    batch: int,
    method: str,
    seed: int,
    steps: int,
    penalties: tuple[float, ...],
) -> list[dict[str, Any]]:
    """Train all penalties on all tasks with one seed; a record for each run."""
    how = METHODS[method]
    kind, estimator, ramp = how.sampler, how.estimator, how.ramp
    per_task = len(penalties)
    owners = [t for t in range(len(tasks)) for _ in penalties]
    classes = int(max(t.source_labels.max() for t in tasks)) + 1
    networks = Networks(tuple(tasks[0].source.shape[1:]), classes, [derive_seed(seed, t) for t in owners])
    adam = torch.optim.Adam(networks.parameters, 1e-3, weight_decay=1e-4, fused=True)
    strength = torch.tensor(penalties).repeat(len(tasks))
    inputs, starts = {}, {}
    for side in ("source", "target"):
        parts = [getattr(task, side) for task in tasks]
        inputs[side] = torch.cat(parts)
        offsets = [0, *itertools.accumulate(len(part) for part in parts)]
        starts[side] = torch.tensor([offsets[t] for t in owners])[:, None]
    labels = torch.cat([task.source_labels for task in tasks])
    samplers = {
        side: [streams(kind, loss, len(getattr(tasks[t], side)), batch, derive_seed(seed, t, number)) for t in owners]
        for number, side in enumerate(("source", "target"))
    }
    iterators = {side: [iter(s) for s in samplers[side]] for side in samplers}
    ends = [*(r for r in REFRESHES[1:] if r < steps), steps]
    marks: dict[int, list[float]] = {}
    since: dict[int, int] = {}  # step from which the batches of a run are aligned
    done = 0
    is_bank = estimator == "reference"
    recent: dict[str, Recent] = {"source": [], "target": []}
    memory = max(2, min(8, 128 // batch))  # batches
    for end in ends:
        banks: dict[str, list[Tensor]] = {}
        if kind != "uniform":
            for side in samplers:
                banks[side] = [
                    all_features(networks, getattr(task, side), slice(t * per_task, (t + 1) * per_task))
                    for t, task in enumerate(tasks)
                ]
            for r, t in enumerate(owners) if kind != "uniform" else ():
                z = {side: banks[side][t][r % per_task] for side in samplers}
                given: dict[str, Any] = {"source": {}, "target": {}}
                if how.classes is not None and done >= FIRST_ALIGNED:
                    logits = networks.logits(z["target"][None], slice(r, r + 1))[0].detach()
                    shares = [
                        torch.bincount(y, minlength=classes) / len(y)
                        for y in (tasks[t].source_labels, logits.argmax(1))
                    ]
                    since.setdefault(r, done) if (shares[0] - shares[1]).abs().sum() / 2 >= how.classes else None
                    if r in since:
                        aligned = vardass.align_classes(tasks[t].source_labels, logits, strata=batch)
                        given = {"source": aligned.source, "target": aligned.target}
                for side in samplers:
                    samplers[side][r].refresh(z[side], **given[side])
        drawn = {side: [draws(it, end - done, batch) for it in iterators[side]] for side in samplers}
        rows = {side: torch.stack([d[0] for d in drawn[side]], 1) for side in drawn}  # (steps, R, b)
        weights = {side: torch.stack([d[1] for d in drawn[side]], 1) for side in drawn}
        for step in range(end - done):
            i, j = (rows[side][step] + starts[side] for side in ("source", "target"))
            a, b = weights["source"][step], weights["target"][step]
            x, y = networks.features(inputs["source"][i]), networks.features(inputs["target"][j])
            entropy = F.cross_entropy(networks.logits(x).flatten(0, 1), labels[i].flatten(), reduction="none").view_as(
                a
            )
            if is_bank and recent["source"]:
                gap = (mmd_reference if loss == "mmd" else coral_reference)(
                    x, y, a, b, recent["source"], recent["target"]
                )
            else:
                gap = mmd(x, y, a, b, estimator) if loss == "mmd" else coral(x, y, a, b)
            if how.limit is not None:
                task_pull = torch.autograd.grad((a * entropy).sum(), x, retain_graph=True)[0].flatten(1).norm(dim=1)
                gap_pull = torch.autograd.grad(gap.sum(), x, retain_graph=True)[0].flatten(1).norm(dim=1) * strength
                gap = gap * (min(1.0, batch / 32) * how.limit * task_pull / gap_pull.clamp_min(1e-12)).clamp_max(1.0)
            risen = 1.0 if ramp == 0.0 else min(1.0, max(0.0, (done + step - FIRST_ALIGNED) / (ramp * steps)))
            objective = (a * entropy).sum(1) + risen * strength * torch.where(strength > 0, gap, 0.0)
            adam.zero_grad()
            objective.sum().backward()
            adam.step()
            for side, z, w in (("source", x, a), ("target", y, b)) if is_bank else ():
                recent[side] = [*recent[side], (z.detach(), w)][-memory:]
        done = end
        if done >= steps / 2:
            marks[done] = [r["target"] for r in measure(networks, tasks, per_task, loss, brief=True)]
    records = measure(networks, tasks, per_task, loss, brief=False)
    for r, record in enumerate(records):
        record |= {
            "data": data,
            "loss": loss,
            "batch": batch,
            "method": method,
            "seed": seed,
            "steps": steps,
            "penalty": penalties[r % per_task],
        }
        if how.classes is not None:
            record["aligned_since"] = since.get(r)
        record["course"] = {str(mark): values[r] for mark, values in marks.items()}
    return records


def all_features(networks: Networks, x: Tensor, runs: slice, block: int = 512) -> Tensor:
    count = len(networks.biases[0][runs])
    with torch.no_grad():
        return torch.cat([networks.features(part.expand(count, *part.shape), runs) for part in x.split(block)], 1)


def measure(networks: Networks, tasks: list[Task], per_task: int, loss: str, *, brief: bool) -> list[dict[str, Any]]:
    found = []
    for t, task in enumerate(tasks):
        runs = slice(t * per_task, (t + 1) * per_task)
        with torch.no_grad():
            z = all_features(networks, task.target, runs)
            right = 100 * (networks.logits(z, runs).argmax(2) == task.target_labels).float().mean(1)
            rows = [{"task": task.name, "target": round(float(v), 3)} for v in right]
            if not brief:
                held = all_features(networks, task.held_out, runs)
                source = 100 * (networks.logits(held, runs).argmax(2) == task.held_out_labels).float().mean(1)
                spread = z.var(1).sum(1).sqrt()
                for r, row in enumerate(rows):
                    row |= {
                        "held_out": len(task.held_out),
                        "source": round(float(source[r]), 3),
                        "spread": round(float(spread[r]), 4),
                    }
        found += rows
    return found


def check() -> None:
    """The losses above against the package's."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 8, 64, generator=g).mul(0.3) for _ in range(2))
    a, b = (torch.rand(3, 8, generator=g).softmax(1) for _ in range(2))
    for r in range(3):
        own, theirs = mmd(x, y, a, b, "v")[r], vardass.mmd2(x[r], y[r], weights_x=a[r], weights_y=b[r])
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)
        own = coral(x, y, a, b)[r]
        torch.testing.assert_close(
            own, vardass.coral(x[r], y[r], weights_x=a[r], weights_y=b[r], preset="domainbed"), rtol=1e-4, atol=1e-6
        )
    banks = [[(torch.randn(3, 40, 64, generator=g).mul(0.3), torch.full((3, 40), 1 / 40))] for _ in range(2)]
    for form, package in (
        (mmd_reference, vardass.mmd2),
        (coral_reference, lambda *z, **o: vardass.coral(*z, preset="domainbed", **o)),
    ):
        given = [z.clone().requires_grad_() for z in (x, y)]
        own = torch.autograd.grad(form(*given, a, b, *banks).sum(), given)
        for r in range(3):
            given = [z[r].clone().requires_grad_() for z in (x, y)]
            options = {
                "weights_x": a[r],
                "weights_y": b[r],
                "bank_x": banks[0][0][0][r],
                "bank_y": banks[1][0][0][r],
                "estimator": "reference",
            }
            theirs = torch.autograd.grad(package(*given, **options), given)
            for mine, its in zip(own, theirs):
                torch.testing.assert_close(mine[r], its, rtol=2e-3, atol=1e-6)
    print("the losses are the package's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=RESULTS / "atlas.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--losses", nargs="+", default=list(PENALTIES), choices=list(PENALTIES))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--penalties", type=float, nargs="+", help="some of the usual ones")
    parser.add_argument("--steps", type=int, help="instead of the usual number, to see whether runs have converged")
    parser.add_argument("--others", action="store_true", help="pairs of domains that no setting was chosen on")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        return check()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    known = set()
    if args.out.exists():
        for line in args.out.read_text().splitlines():
            r = json.loads(line)
            known.add((r["data"], r["loss"], r["batch"], r["method"], r["seed"], r["steps"]))
    loaded: dict[str, list[Task]] = {}
    for seed, batch, method, loss, data in itertools.product(
        args.seeds, args.batches, args.methods, args.losses, args.data
    ):
        steps = args.steps or STEPS[data]
        if (data, loss, batch, method, seed, steps) in known:
            continue
        if data not in loaded:
            loaded[data] = DATA[data](args.folder, args.others)
        start = time.process_time()
        penalties = tuple(args.penalties or PENALTIES[loss])
        records = train(loaded[data], data, loss, batch, method, seed, steps, penalties)
        seconds = time.process_time() - start
        with args.out.open("a") as file:
            for record in records:
                file.write(json.dumps({**record, "seconds": round(seconds / len(records), 2), "commit": commit}) + "\n")
        best = {p: np.mean([r["target"] for r in records if r["penalty"] == p]) for p in penalties}
        print(
            data,
            loss,
            batch,
            method,
            seed,
            f"{seconds:.0f} s",
            " ".join(f"{p:g}:{v:.1f}" for p, v in best.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
