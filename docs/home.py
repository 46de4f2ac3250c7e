"""Noise of the loss on smart-watch data, and accuracy as the demo's records have it."""

import csv
from collections import defaultdict
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import vardass
from vardass.data import standardise, watch_domains
from vardass.kernels import RBFMixture

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
domains = watch_domains()
(x, _), (y, _) = domains["left-A"], domains["right-B"]  # other wrist, other people
x, y = standardise(x), standardise(y, reference=x)

kernel = RBFMixture(scale="median").fit(torch.cat([x, y]))

_, noise = plt.subplots(figsize=(5, 3.4), num="home-noise")
full = vardass.mmd2(x, y, kernel=kernel).item()
samplers = {"uniform": vardass.UniformBatchSampler, "balanced": partial(vardass.BalancedBatchSampler, kernel=kernel)}
for colour, (name, kind) in zip(("C0", "C1"), samplers.items()):
    source, target = kind(len(x), 32, endless=True, seed=0), kind(len(y), 32, endless=True, seed=1)
    source.refresh(x)
    target.refresh(y)
    values = [vardass.mmd2(x[s], y[t], kernel=kernel).item() for _, s, t in zip(range(120), source, target)]
    noise.plot(values, color=colour, linewidth=1.2)
    noise.text(122, np.mean(values), name, color=colour, va="center")
noise.axhline(full, color="C2", linewidth=1.2, linestyle="--", zorder=3)
noise.text(122, full - 0.005, "all data", color="C2", va="top")
noise.set(xlim=(0, 160), ylim=(0, None), xlabel="batch")
noise.set_xticks(range(0, 121, 30))
noise.set_title("MMD² of one batch after the other")

_, accuracy = plt.subplots(figsize=(5, 3.4), num="home-accuracy")
runs = defaultdict(list)
with (RESULTS / "demo_training.csv").open() as file:
    for row in csv.DictReader(file):
        runs[row["algorithm"], row["sampler"], row["repeat"]].append(100 * float(row["target_accuracy"]))
repeats = sorted({repeat for *_, repeat in runs})
names = {"uniform": "uniform", "vardass": "the paper's", "ordered": "ordered", "balanced": "balanced"}
for place, (loss, colour) in enumerate((("mmd", "C3"), ("coral", "C4"))):
    for row, sampler in enumerate(names):
        means = [np.mean(runs[loss, sampler, repeat]) for repeat in repeats]
        error = np.std(means, ddof=1) / len(means) ** 0.5
        label = loss.upper() if row == 0 else None
        at = row + 0.24 * (place - 0.5)
        accuracy.errorbar(np.mean(means), at, xerr=error, fmt="o", color=colour, markersize=5, label=label)
alone = np.mean([runs["erm", "uniform", repeat] for repeat in repeats])
accuracy.axvline(alone, color="C0", linewidth=1.2, linestyle=":")
accuracy.text(alone + 0.3, 3.45, "source\nonly", color="C0", fontsize=9, va="bottom")
accuracy.set_yticks(range(len(names)), names.values())
accuracy.set(ylim=(3.5, -0.5), xlabel="target accuracy, %; bars: standard error")
accuracy.legend(loc="center left", bbox_to_anchor=(0.04, 0.45))
accuracy.set_title("Training with batches of 8")
