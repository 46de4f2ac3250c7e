"""The noise of a loss, by sampler.

MMD² between a source and a target batch of 32 samples, 400 times for each sampler, on smart-watch data after a short
training on the source. The line across is its value on all data. With uniform batches the loss scatters widely and is
too high: it exceeds MMD² by the variance of both batch means, which the other samplers make small.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import vardass
from vardass.data import standardise, watch_domains

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

samplers = {
    "uniform": lambda n, seed: vardass.UniformBatchSampler(n, 32, endless=True, seed=seed),
    "stratified": lambda n, seed: vardass.StratifiedBatchSampler(n, 32, endless=True, seed=seed),
    "balanced": lambda n, seed: vardass.BalancedBatchSampler(n, 32, endless=True, seed=seed),
    "ordered": lambda n, seed: vardass.OrderedBatchSampler(n, 32, endless=True, seed=seed),
}
figure, axes = plt.subplots(figsize=(7.5, 3.4))
full = vardass.mmd2(zs, zt).item()
for place, make in enumerate(samplers.values()):
    source, target = make(len(zs), 0), make(len(zt), 1)
    source.refresh(zs)
    target.refresh(zt)
    pairs = zip(range(400), source, target)
    values = [vardass.mmd2(zs[s], zt[t], weights_x=s.weights, weights_y=t.weights).item() for _, s, t in pairs]
    jitter = np.random.default_rng(place).uniform(-0.3, 0.3, len(values))
    axes.scatter(values, place + jitter, s=7, color=f"C{place}", alpha=0.6, linewidths=0)
    axes.text(max(values), place + 0.05, f"   standard deviation {np.std(values):.4f}", va="center", fontsize=9)
axes.axvline(full, color="C8", linewidth=1, zorder=0)
axes.set_yticks(range(len(samplers)), samplers)
axes.invert_yaxis()
axes.grid(False, axis="y")
axes.set_xlabel("MMD² of one pair of batches; line: of all data")
axes.set_xlim(right=1.25 * axes.get_xlim()[1])
plt.show()
