"""Which penalties work, by method.

From the 2,876 runs of the atlas, batches of 32: the penalties λ at which a method's mean target accuracy is within two
points of the best that any shown method reaches with any λ (seed 0, which all methods have). A long bar needs no
tuning; no bar: the method never gets there. Uniform batches have a narrow range or none. The recommended run of
`vardass adapt` has a wide one mostly, but none on digits with CORAL.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

records = Path(__file__).parents[2] / "benchmarks" / "results" / "atlas.jsonl.gz"
methods = ("uniform", "min-sum", "balanced", "recommended")
names = {"watch": "smart-watch", "pacs": "PACS", "digits": "digits", "amazon": "Amazon reviews"}
penalties = (0.1, 0.3, 1.0, 3.0, 10.0)  # those that all methods have
accuracy = defaultdict(list)
with gzip.open(records, "rt") as file:
    for run in map(json.loads, file):
        if run["batch"] == 32 and run["seed"] == 0 and run["penalty"] in penalties:
            accuracy[run["loss"], run["data"], run["method"], run["penalty"]].append(run["target"])

figure, panels = plt.subplots(2, 4, figsize=(9, 4), sharex=True, sharey=True)
for row, loss in zip(panels, ("mmd", "coral")):
    for axes, (data, name) in zip(row, names.items()):
        means = {
            method: [np.mean(accuracy[loss, data, method, penalty] or np.nan) for penalty in penalties]
            for method in methods
        }
        enough = np.nanmax(list(means.values())) - 2
        for place, method in enumerate(methods):
            good = [penalty for penalty, mean in zip(penalties, means[method]) if mean >= enough]
            colour = f"C{place}"
            axes.plot(good, [place] * len(good), "o-", color=colour, linewidth=6, markersize=6, alpha=0.8)
        axes.set_title(f"{name}, {loss.upper()}", fontsize=9)
        axes.set_xscale("log")
        axes.set_yticks(range(len(methods)), methods)
        axes.set_ylim(len(methods) - 0.5, -0.5)
figure.supxlabel("penalty λ", fontsize=10)
plt.show()
