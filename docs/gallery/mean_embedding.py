"""How far a batch is from the whole.

The distance |μ̂ - μ| between the mean embedding of a batch of 32 and that of all data, over 400 batches of smart-watch
windows, as a share of batches below each value. Strata move the whole curve to the left; batches that are planned
together move it further, because the errors of their draws cancel. Ordered and balanced batches are hardly different.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import vardass
from vardass.data import standardise, watch_domains
from vardass.kernels import RBFMixture

z = standardise(watch_domains()["left-A"][0])
kernel = RBFMixture([1.0], scale="median").fit(z)
matrix = kernel.matrix(z)
toward_all, whole = matrix.mean(1), matrix.mean()


def distance(batch):
    weights = torch.tensor(batch.weights or [1 / len(batch)] * len(batch), dtype=matrix.dtype)
    rows = list(batch)
    squared = weights @ matrix[rows][:, rows] @ weights - 2 * weights @ toward_all[rows] + whole
    return squared.clamp_min(0).sqrt().item()


options = {"kernel": kernel, "endless": True}
samplers = {
    "uniform": vardass.UniformBatchSampler(len(z), 32, endless=True),
    "the paper's strata": vardass.StratifiedBatchSampler(len(z), 32, solver="dynamic-kmeans", **options),
    "stratified": vardass.StratifiedBatchSampler(len(z), 32, **options),
    "ordered": vardass.OrderedBatchSampler(len(z), 32, **options),
    "balanced": vardass.BalancedBatchSampler(len(z), 32, **options),
}
figure, axes = plt.subplots(figsize=(7.5, 3.4))
for place, (name, sampler) in enumerate(samplers.items()):
    sampler.refresh(z)
    distances = np.sort([distance(batch) for _, batch in zip(range(400), sampler)])
    axes.plot(distances, np.linspace(0, 100, len(distances)), color=f"C{place}", label=name)
axes.set_xlabel("distance of a batch's mean embedding from that of all data")
axes.set_ylabel("batches below, %")
axes.set_xlim(left=0)
axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()
