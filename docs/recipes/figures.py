"""Uniform beside balanced batches at equal cost, as the programs of the recipes measured them."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def compare(name, file, across, batches, measures, logarithmic=False):
    """A panel for each measure: its mean and standard error over seeds, for each kind of batch."""
    table = pd.read_csv(results / file)
    figure, panels = plt.subplots(1, len(measures), figsize=(7.5, 2.9), num=name)
    for panel, (measure, title) in zip(panels, measures.items()):
        for number, kind in enumerate(batches):
            groups = table[table[batches_of(table)] == kind].groupby(across)[measure]
            panel.errorbar(
                groups.mean().index, groups.mean(), groups.sem(), color=f"C{number}", marker="o", capsize=3, label=kind
            )
        panel.set_title(title)
        panel.set_xlabel(across)
        if logarithmic:
            panel.set_xscale("log", base=2)
            panel.set_xticks(values := sorted(table[across].unique()), values)
    panels[0].legend()
    return figure


def batches_of(table):
    return next(column for column in ("batches", "sets") if column in table)


compare(
    "causal",
    "recipe_causal.csv",
    "penalty",
    ("uniform", "balanced arms"),
    {"pehe": "error of the effects, PEHE / sd(y)", "excess": "excess of the penalty in a batch"},
)
compare(
    "cells",
    "recipe_cells.csv",
    "set_size",
    ("shuffled", "balanced"),
    {"energy": "energy distance after training", "excess": "excess of the loss in a set"},
    logarithmic=True,
)
compare(
    "flow",
    "recipe_flow.csv",
    "batch",
    ("uniform", "balanced"),
    {"bias": "bias of the transport cost", "distance": "W2 of the samples from the data"},
    logarithmic=True,
)
plt.show()
