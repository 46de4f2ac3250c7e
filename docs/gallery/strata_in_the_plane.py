"""Strata depend on the kernel.

The same 400 points, cut into 9 strata for three losses; the cross is their mean. A linear kernel only cares for the
mean of a batch, so strata are cells of the plane. The MMD kernel looks at neighbours and cuts dense regions more
finely. CORAL's kernel compares second moments around the mean: points on opposite sides of it share a stratum, the many
near it, which hardly count, are one large stratum, and the far ones get small strata. Use the kernel of your loss.
"""

import matplotlib.pyplot as plt
import torch

import vardass
from vardass.kernels import CoralKernel, LinearKernel, RBFMixture

normal = torch.Generator().manual_seed(0)
centres = torch.tensor([[-1.5, -0.8], [1.2, 1.0], [1.6, -1.4]])
blob = torch.repeat_interleave(torch.tensor([200, 130, 70]))
z = centres[blob] + 0.6 * torch.randn(len(blob), 2, generator=normal)

kernels = {"linear": LinearKernel(), "MMD": RBFMixture(scale="median"), "CORAL": CoralKernel()}
figure, panels = plt.subplots(1, 3, figsize=(9, 3.2))
for axes, (name, kernel) in zip(panels, kernels.items()):
    strata = vardass.stratify(z, k=9, kernel=kernel)
    axes.scatter(*z.T, s=12, c=[f"C{int(label) + 1}" for label in strata.labels], linewidths=0, alpha=0.8)
    axes.scatter(*z.mean(0), marker="+", s=120, color="#1c1f23", linewidths=1.6)
    axes.set_title(f"{name}: variance 1/{strata.reduction:.0f}", fontweight="normal")
    axes.set_aspect("equal")
    axes.grid(False)
    axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
plt.show()
