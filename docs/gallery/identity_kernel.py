"""Where no sampler helps: a kernel that is nearly the identity.

Smart-watch windows under a Gaussian kernel exp(-γ |z - z'|²), with γ from far too small to far too large. For a large γ
every sample is alike only to itself, and no partition saves much. For a small one the kernel is nearly linear, and
strata remove much of the variance, more of them more. The dashed line is at one over the median squared distance, the
unit of `RBFMixture(scale="median")`.
"""

import matplotlib.pyplot as plt
import torch

import vardass
from vardass.data import standardise, watch_domains
from vardass.kernels import RBFMixture

z = standardise(watch_domains()["left-A"][0])[::2]
typical = torch.pdist(z).square().median().item()
gammas = torch.logspace(-2.5, 1.5, 13) / typical

figure, axes = plt.subplots(figsize=(7.5, 3.4))
for place, k in enumerate((8, 32, 128), start=1):
    left = [1 / vardass.stratify(z, k=k, kernel=RBFMixture([gamma.item()])).reduction for gamma in gammas]
    axes.loglog(gammas * typical, left, color=f"C{place}", label=f"k = {k}")
axes.axvline(1, color="C0", linewidth=1, linestyle="--")
axes.axhline(1, color="C0", linewidth=1)
axes.set_xlabel("γ · median squared distance")
axes.set_ylabel("variance, relative to uniform")
axes.set_yticks((0.2, 0.5, 1), (0.2, 0.5, 1))
axes.minorticks_off()
axes.legend(loc="lower right")
plt.show()
