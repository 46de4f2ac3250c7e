"""Pictures of the troubleshooting guide: a kernel that becomes the identity, what shrinking features do to the loss."""

import matplotlib.pyplot as plt
import torch

import vardass
from vardass import RBFMixture

K = 32
normal = torch.Generator().manual_seed(0)
z = torch.randn(400, 16, generator=normal)
plane = torch.randn(2, 16, generator=normal) / 2**0.5
flat = torch.randn(400, 2, generator=normal) @ plane + 0.02 * torch.randn(400, 16, generator=normal)

sizes = [0.1 * 2**step for step in range(10)]
kernels = {"the paper's five bandwidths": RBFMixture(), "the same, scale='median'": RBFMixture(scale="median")}
_, axes = plt.subplots(figsize=(7, 3.2), num="identity")
for place, (label, kernel) in enumerate(kernels.items(), 1):
    found = [vardass.stratify(size * flat, K, kernel=kernel, bound=True) for size in sizes]
    axes.plot(sizes, [one.variance / one.uniform_variance for one in found], f"C{place}", label=label)
    floor = [one.bound.variance / one.uniform_variance for one in found]
    axes.plot(sizes, floor, f"C{place}:", label="no strata go below" if place == 1 else None)
axes.set(xscale="log", xlabel="size of the features (standard deviation of each of 16)", ylim=(0, 1.05))
axes.set_ylabel("variance left by strata\n(uniform batches: 1)")
axes.legend(loc="center right")

shrinking = [step / 20 for step in range(41)]
other = torch.randn(400, 16, generator=normal)
_, axes = plt.subplots(figsize=(7, 3.2), num="collapse")
losses = {8: [], 32: [], 128: []}
whole = []
for factor in shrinking:
    whole.append(float(vardass.mmd2(factor * z, factor * other)))
    kernel = RBFMixture()
    for b, values in losses.items():
        excess = sum((5.0 - float(kernel.matrix(factor * part).mean())) / b for part in (z, other))
        values.append(whole[-1] + excess)
for place, (b, values) in enumerate(losses.items(), 1):
    axes.plot(shrinking, values, f"C{place}", label=f"mean over uniform batches of {b}")
axes.plot(shrinking, whole, "C0--", label="all data: nothing to align")
axes.set(xlabel="features multiplied by", ylabel="MMD²", ylim=(0, None))
axes.legend()
