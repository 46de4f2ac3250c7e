"""Why a strong penalty collapses features.

Source and target are halves of one sample, so there is nothing to adapt, and the MMD² of all data is next to nothing
at every scale of the features. The mean loss of uniform batches of 32 is not: it is the variance of both batch means,
which grows with the scale. A network that minimises it shrinks its features. Better batches pay a little less for
that, the unbiased estimate nothing. Under a strong penalty the reward wins over the task, and all features become one.
"""

import matplotlib.pyplot as plt
import torch

import vardass

z = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)) / 4
source, target = z[:1000], z[1000:]
scales = torch.logspace(-1, 1, 9)


def mean_loss(sampler, scale, **options):
    x, y = scale * source, scale * target
    pair = [sampler(1000, 32, endless=True, seed=seed) for seed in (0, 1)]
    for one, features in zip(pair, (x, y)):
        one.refresh(features)
    losses = [
        vardass.mmd2(x[s], y[t], weights_x=s.weights, weights_y=t.weights, **options)
        for _, s, t in zip(range(60), *pair)
    ]
    return torch.stack(losses).mean().item()


lines = {
    "uniform": (vardass.UniformBatchSampler, {}),
    "stratified": (vardass.StratifiedBatchSampler, {}),
    "balanced": (vardass.BalancedBatchSampler, {}),
    "uniform, unbiased": (vardass.UniformBatchSampler, {"estimator": "unbiased"}),
}
figure, axes = plt.subplots(figsize=(7.5, 3.4))
for place, (name, (sampler, options)) in enumerate(lines.items()):
    axes.semilogx(scales, [mean_loss(sampler, scale, **options) for scale in scales], color=f"C{place}", label=name)
full = [vardass.mmd2(scale * source, scale * target).item() for scale in scales]
axes.semilogx(scales, full, color="C8", linestyle="--", label="all data")
axes.set_xlabel("scale of the features; the network may choose it")
axes.set_ylabel("mean MMD² of a batch")
axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()
