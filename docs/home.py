"""Noise of the loss on smart-watch data, and accuracy as the demo's records have it."""

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import vardass
from vardass.data import standardise, watch_domains

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
domains = watch_domains()
(x, labels), (y, _) = domains["left-A"], domains["right-B"]  # other wrist, other people
x, y = standardise(x), standardise(y, reference=x)

torch.manual_seed(0)
featuriser, classifier = nn.Sequential(nn.Linear(78, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 7)
optimiser = torch.optim.Adam([*featuriser.parameters(), *classifier.parameters()], lr=1e-3)
for _ in range(200):
    optimiser.zero_grad()
    nn.functional.cross_entropy(classifier(featuriser(x)), labels).backward()
    optimiser.step()
with torch.no_grad():
    zs, zt = featuriser(x), featuriser(y)

figure, (noise, accuracy) = plt.subplots(1, 2, figsize=(9, 3.4), num="home", width_ratios=[1.25, 1])
for colour, kind in (("C0", vardass.UniformBatchSampler), ("C1", vardass.BalancedBatchSampler)):
    source, target = kind(len(zs), 32, endless=True, seed=0), kind(len(zt), 32, endless=True, seed=1)
    source.refresh(zs)
    target.refresh(zt)
    values = [vardass.mmd2(zs[s], zt[t]).item() for _, s, t in zip(range(120), source, target)]
    noise.plot(values, color=colour, linewidth=1.2)
    noise.text(122, np.mean(values), kind.__name__.removesuffix("BatchSampler").lower(), color=colour, va="center")
noise.axhline(vardass.mmd2(zs, zt).item(), color="C2", linewidth=1.2, linestyle="--", zorder=3)
noise.text(122, vardass.mmd2(zs, zt).item() - 0.005, "all data", color="C2", va="top")
noise.set(xlim=(0, 152), ylim=(0, None), xlabel="batch")
noise.set_xticks(range(0, 121, 30))
noise.set_title("MMD² of one batch after the other")

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
