"""When the strata of a refresh reach the batches of a background sampler."""

import matplotlib.pyplot as plt
import torch

import vardass
from vardass.samplers import BackgroundSampler

z = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
figure, axes = plt.subplots(figsize=(8, 1.9), num="background")
for place, background in enumerate((False, True)):
    sampler = vardass.StratifiedBatchSampler(200, 8, endless=True)
    sampler = BackgroundSampler(sampler, ahead=8, in_process=True) if background else sampler
    stream, version, seen = iter(sampler), {}, []
    for step in range(48):
        if step in (4, 26):
            sampler.refresh(z)
        weights = next(stream).weights
        seen.append(0 if weights is None else version.setdefault(id(sampler.strata), len(version) + 1))
    axes.scatter(range(48), [place] * 48, c=[f"C{number}" for number in seen], marker="s", s=64, linewidths=0)
for step in (4, 26):
    axes.axvline(step - 0.5, color="#1c1f23", linewidth=1, linestyle="--", zorder=0)
axes.set_yticks([0, 1], ["sampler", "BackgroundSampler,\nahead=8"])
axes.set_ylim(1.6, -0.6)
axes.set_xlabel("batch; dashed: refresh. Grey: uniform batches, then one colour for each refresh")
axes.grid(False)
