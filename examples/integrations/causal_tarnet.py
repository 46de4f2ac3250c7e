"""causallib: a TARNet with a balance penalty on ACIC-16, with uniform batches and with batches balanced in each arm.

pip install vardass torch; pip install --no-deps causallib  (of which only the data are needed)
"""

import sys
from itertools import pairwise

import pandas as pd
import torch
from causallib.datasets import load_acic16
from torch import nn

import vardass

PENALTIES, BATCH = (0.0, 0.3, 1.0, 3.0), 100
SAMPLERS = {
    "uniform": lambda arm, seed: vardass.UniformBatchSampler(len(arm), BATCH, endless=True, seed=seed),
    "balanced arms": lambda arm, seed: vardass.BalancedBatchSampler(
        len(arm), BATCH, groups=arm, kernel="linear", endless=True, seed=seed
    ),
}


def mlp(*widths):
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ELU())]
    return nn.Sequential(*layers)


def tarnet(data, sampler, penalty, seed, steps):
    """Error of the estimated effects (PEHE / sd of y), and excess of the batches' penalty over that of all rows."""
    x, arm, y = data["x"], data["arm"], data["y"]
    torch.manual_seed(seed)
    body, heads = mlp(x.shape[1], 100, 50), nn.ModuleList(nn.Sequential(mlp(50, 50), nn.Linear(50, 1)) for _ in "01")
    optimiser = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=1e-3, weight_decay=1e-4)
    sampler, treated = SAMPLERS[sampler](arm, seed), arm == 1
    batches = iter(sampler)
    for step in range(steps):
        if step % 100 == 0:
            sampler.refresh(body(x).detach())
        rows = next(batches)
        z, t = body(x[rows]), treated[rows]
        guess = torch.where(t, heads[1](z)[:, 0], heads[0](z)[:, 0])
        balance = vardass.mmd2(z[t], z[~t], kernel="linear")
        optimiser.zero_grad()
        (nn.functional.mse_loss(guess, y[rows]) + penalty * balance).backward()
        optimiser.step()
    with torch.no_grad():
        z = body(x)
        effect = (heads[1](z) - heads[0](z))[:, 0]
    sampler.refresh(z)
    drawn = [(z[rows], treated[rows]) for _, rows in zip(range(100), batches)]
    penalties = torch.stack([vardass.mmd2(rows[t], rows[~t], kernel="linear") for rows, t in drawn])
    excess = penalties.mean() - vardass.mmd2(z[treated], z[~treated], kernel="linear")
    return float((effect - data["effect"]).square().mean().sqrt()), float(excess / z.var(0).sum())


def acic16(instance):
    task = load_acic16(instance)
    x = torch.tensor(task.X.to_numpy(dtype="float32"))
    y, outcomes = (torch.tensor(part.to_numpy(dtype="float32")) for part in (task.y, task.po))
    return {
        "x": (x - x.mean(0)) / x.std(0).clamp_min(1e-6),
        "arm": torch.tensor(task.a.to_numpy()).long(),
        "y": (y - y.mean()) / y.std(),
        "effect": (outcomes[:, 1] - outcomes[:, 0]) / y.std(),
    }


instances, steps = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (1, 100)
rows = []
for instance in range(1, instances + 1):
    data = acic16(instance)
    for penalty in PENALTIES:
        for sampler in SAMPLERS:
            pehe, excess = tarnet(data, sampler, penalty, instance, steps)
            rows.append({"instance": instance, "penalty": penalty, "batches": sampler, "pehe": pehe, "excess": excess})
results = pd.DataFrame(rows)
print(results.groupby(["penalty", "batches"])[["pehe", "excess"]].mean().round(3).to_string())
if len(sys.argv) > 3:
    results.round(5).to_csv(sys.argv[3], index=False)
