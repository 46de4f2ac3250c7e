"""Classes of the batches of two domains, with and without alignment."""

import matplotlib.pyplot as plt
import torch

import vardass

generator = torch.Generator().manual_seed(0)
centres = 4 * torch.eye(3, 8)
domains = {"source": torch.tensor([240, 90, 30]), "target": torch.tensor([40, 120, 200])}
labels = {name: torch.repeat_interleave(sizes) for name, sizes in domains.items()}
features = {name: centres[y] + torch.randn(len(y), 8, generator=generator) for name, y in labels.items()}
logits = features["target"] @ centres.T  # what a network that has learnt the source would say

aligned = vardass.align_classes(labels["source"], logits, strata=12)
figure, panels = plt.subplots(1, 2, figsize=(8, 2.6), num="class-alignment", sharey=True)
for axes, title, groups in zip(panels, ("plain", "align_classes"), (None, aligned.by_domain)):
    for place, name in enumerate(domains):
        sampler = vardass.BalancedBatchSampler(len(features[name]), 12, seed=place, endless=True)
        sampler.refresh(features[name], **(groups[name] if groups else {}))
        shares = torch.zeros(3)
        for _, batch in zip(range(100), sampler):
            weights = torch.tensor(batch.weights or [1 / 12] * 12)
            shares.index_add_(0, labels[name][list(batch)], weights / 100)
        left = 0.0
        for number, share in enumerate(shares.tolist()):
            axes.barh(place, share, left=left, color=f"C{number + 1}", height=0.6)
            axes.text(left + share / 2, place, f"{share:.2f}", ha="center", va="center", color="white", fontsize=9)
            left += share
    axes.set_title(title, fontfamily="monospace" if groups else None, fontweight="normal")
    axes.set_yticks([0, 1], domains)
    axes.set_xlabel("weight of each class in a batch, by true class")
    axes.grid(False)
panels[0].invert_yaxis()
