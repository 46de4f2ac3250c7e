"""A discrepancy sees class shares.

Both domains have the same four classes, and each class has the same features in both: there is nothing to adapt. Only
the shares of the classes in the target change, from equal to very unequal. MMD² rises all the same, and a network that
minimises it would have to move samples into wrong classes. With `align_classes` both batches hold the same classes, by
label and by prediction, and what is left is the small excess of any batch.
"""

import matplotlib.pyplot as plt
import torch

import vardass

generator = torch.Generator().manual_seed(0)
centres = 1.5 * torch.eye(4, 8)
n, k = 480, 32


def domain(shares):
    labels = torch.multinomial(shares, n, replacement=True, generator=generator)
    return centres[labels] + 0.4 * torch.randn(n, 8, generator=generator), labels


def mean_loss(source, target, groups):
    samplers = [vardass.BalancedBatchSampler(n, k, endless=True, seed=seed) for seed in (0, 1)]
    for sampler, features, of_classes in zip(samplers, (source, target), groups):
        sampler.refresh(features, **of_classes)
    losses = [
        vardass.mmd2(source[s], target[t], weights_x=s.weights, weights_y=t.weights)
        for _, s, t in zip(range(40), *samplers)
    ]
    return torch.stack(losses).mean().item()


source, labels = domain(torch.full((4,), 0.25))
largest = [0.25, 0.4, 0.55, 0.7, 0.85]
plain, aligned = [], []
for share in largest:
    rest = (1 - share) / 3
    target, _ = domain(torch.tensor([share, rest, rest, rest]))
    logits = target @ centres.T  # as of a network that has learnt the source
    classes = vardass.align_classes(labels, logits, strata=k)
    plain.append(mean_loss(source, target, ({}, {})))
    aligned.append(mean_loss(source, target, (classes.source, classes.target)))

figure, axes = plt.subplots(figsize=(7, 3.2))
axes.plot(largest, plain, "o-", color="C2", label="balanced batches")
axes.plot(largest, aligned, "o-", color="C3", label="with align_classes")
axes.set_xlabel("share of the largest class in the target; 0.25 in the source")
axes.set_ylabel("mean MMD² of a batch")
axes.set_ylim(bottom=0)
axes.legend()
plt.show()
