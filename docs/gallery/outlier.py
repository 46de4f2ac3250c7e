"""CORAL with outliers: ordered against balanced.

Three of 600 samples move away from all others. CORAL's kernel weighs a sample by the square of its squared length, so
they soon carry most of the second moments. Balanced batches give each sample the weight 1/32: a batch has an outlier,
and far too much of it, or none. Strata give outliers strata of their own with small weights, so each batch has the
right amount of them: where the balanced curve rises, take an ordered or stratified sampler.
"""

import matplotlib.pyplot as plt
import torch

import vardass
from vardass.kernels import CoralKernel

near = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
towards = torch.nn.functional.normalize(near[:3], dim=1)
distances = [0, 5, 10, 20, 40]
samplers = {
    "stratified": lambda n: vardass.StratifiedBatchSampler(n, 32, kernel=CoralKernel()),
    "ordered": lambda n: vardass.OrderedBatchSampler(n, 32, kernel=CoralKernel()),
    "balanced": lambda n: vardass.BalancedBatchSampler(n, 32, kernel=CoralKernel()),
}
curves = {name: [] for name in samplers}
for distance in distances:
    z = near.clone()
    z[:3] += distance * towards
    report = vardass.variance_report(
        {"uniform": lambda n: vardass.UniformBatchSampler(n, 32), **samplers}, z, kernel=CoralKernel(), batches=200
    )
    means = {row.name: row.variance.value for row in report.rows}
    for name, curve in curves.items():
        curve.append(means[name] / means["uniform"])

figure, axes = plt.subplots(figsize=(7.5, 3.4))
for place, (name, curve) in enumerate(curves.items(), start=1):
    axes.semilogy(distances, curve, "o-", color=f"C{place}", label=name)
axes.axhline(1, color="C0", linewidth=1, label="uniform")
axes.set_xlabel("distance of three outliers")
axes.set_ylabel("variance of the batch's second\nmoments, relative to uniform")
axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()
