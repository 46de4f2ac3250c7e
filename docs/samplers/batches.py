"""What a batch of each sampler is, on points in the plane."""

import matplotlib.pyplot as plt
import torch

import vardass
from vardass.kernels import RBFMixture
from vardass.paper.diverse_samplers import DPPBatchSampler, KMeansPlusPlusBatchSampler
from vardass.paper.paired_sampler import PairedBatchSampler

K, BATCHES = 12, 300
normal = torch.Generator().manual_seed(1)
centres = torch.tensor([[-2.0, 0.6], [0.3, -1.0], [1.6, 1.2], [4.2, -1.8]])
spread = torch.tensor([[0.5, 0.7], [0.9, 0.35], [0.4, 0.4], [0.15, 0.15]])
shares = torch.tensor([170, 120, 80, 8])
blob = torch.repeat_interleave(shares)
z = centres[blob] + spread[blob] * torch.randn(len(blob), 2, generator=normal)
kernel = RBFMixture(scale="median")
options = {"kernel": kernel, "endless": True, "seed": 0}


def show(label, sampler):
    batches = [batch for _, batch in zip(range(BATCHES), sampler)]
    weights = [torch.tensor(batch.weights or [1 / K] * K) for batch in batches]
    means = torch.stack([w @ z[list(batch)] for batch, w in zip(batches, weights)])
    _, (left, right) = plt.subplots(1, 2, figsize=(8, 3.1), num=label, width_ratios=[1.5, 1])
    strata = getattr(sampler, "strata", None)
    labels = strata.labels if strata else getattr(sampler, "plan_labels", None)
    colours = "C0" if labels is None else [f"C{1 + int(each) % 9}" for each in labels]
    left.scatter(*z.T, s=9, c=colours, alpha=0.45, linewidths=0)
    left.scatter(*z[list(batches[0])].T, s=900 * weights[0], facecolors="none", edgecolors="#1c1f23", linewidths=1.4)
    drawn = "circles: one batch, area: weight"
    left.set_title(drawn if labels is None else f"colours: strata; {drawn}", fontweight="normal")
    right.scatter(*means.T, s=9, color="C1", alpha=0.6, linewidths=0)
    right.scatter(*z.mean(0), marker="+", s=160, color="#1c1f23", linewidths=1.6)
    error = (means - z.mean(0)).square().sum(1).mean().sqrt()
    right.set_title(f"means of {BATCHES} batches; error {error:.2f}", fontweight="normal")
    right.set(xlim=(-1.6, 2.4), ylim=(-1.4, 1.6))
    for axes in (left, right):
        axes.set_aspect("equal")
        axes.grid(False)
        axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)


samplers = {
    "uniform": vardass.UniformBatchSampler(len(z), K, endless=True),
    "stratified": vardass.StratifiedBatchSampler(len(z), K, **options),
    "paper": vardass.StratifiedBatchSampler(len(z), K, solver="dynamic-kmeans", **options),
    "ordered": vardass.OrderedBatchSampler(len(z), K, **options),
    "balanced": vardass.BalancedBatchSampler(len(z), K, **options),
    "kmeans-plus-plus": KMeansPlusPlusBatchSampler(len(z), K, **options),
    "dpp": DPPBatchSampler(len(z), K, **options),
}
for label, sampler in samplers.items():
    sampler.refresh(z)
    show(label, sampler)

sampler = PairedBatchSampler(len(z), K, role="source", **options)
sampler.refresh(z, other=z[blob < 3] + torch.tensor([0.8, 0.5]))
show("paired", sampler)
