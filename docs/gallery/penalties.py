"""Which penalties work, by method.

From the sweeps behind [what adapts](../../benchmarks/results/adaptation.md), batches of 32, first repeat: mean target
accuracy against the penalty λ, on each data set, for uniform batches, balanced ones, and the run of `vardass adapt`:
strata of equal size, a penalty that sets in later, and then the same classes on both sides.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

records = Path(__file__).parents[2] / "benchmarks" / "results" / "adaptation.jsonl.gz"
methods = {"uniform": "uniform", "balanced": "balanced", "equal, schedule, classes": "vardass adapt"}
accuracy = defaultdict(list)
with gzip.open(records, "rt") as file:
    for run in map(json.loads, file):
        if run["batch"] == 32 and run["repeat"] == 0 and run["arm"] in methods and run["loss"] != "erm":
            accuracy[run["loss"], run["data"], run["arm"], run["penalty"]].append(run["accuracy"])
penalties = sorted({penalty for *_, penalty in accuracy})
names = sorted({data for _, data, *_ in accuracy})

figure, panels = plt.subplots(2, len(names), figsize=(11, 4), sharex=True)
for row, loss in zip(panels, ("mmd", "coral")):
    for axes, data in zip(row, names):
        for arm, method in methods.items():
            means = [np.mean(accuracy[loss, data, arm, penalty] or np.nan) for penalty in penalties]
            axes.plot(penalties, means, "o-", label=method, markersize=4)
        axes.set_title(f"{data}, {loss.upper()}", fontsize=9)
        axes.set_xscale("log")
        axes.set_xticks(penalties, [f"{penalty:g}" for penalty in penalties])
        axes.minorticks_off()
        axes.tick_params(labelsize=8)
panels[0, 0].legend(fontsize=7, frameon=False)
figure.supxlabel("penalty λ", fontsize=10)
figure.supylabel("target accuracy, %", fontsize=10)
figure.tight_layout()
plt.show()
