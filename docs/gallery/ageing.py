"""How strata age, and when to refresh them.

A network is trained on smart-watch data, and every twentieth step the variance of its batch means is measured with the
strata as they are: never made again, every 100 steps, or at growing intervals. Features move most at the beginning, so
refreshes there pay most, and later ones hardly: a growing interval spends them where they count.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import vardass
from vardass.data import standardise, watch_domains
from vardass.kernels import RBFMixture
from vardass.refresh import GrowingRefresh, RefreshEvery
from vardass.variance import stratified_variance, uniform_variance

x, labels = watch_domains()["left-A"]
x = standardise(x)
torch.manual_seed(0)
featuriser, classifier = nn.Sequential(nn.Linear(78, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 7)
optimiser = torch.optim.Adam([*featuriser.parameters(), *classifier.parameters()], lr=1e-3)
policies = {"never again": RefreshEvery(0), "every 100 steps": RefreshEvery(100), "growing": GrowingRefresh()}
strata, counts, curves = {}, dict.fromkeys(policies, 0), {name: [] for name in policies}
steps = range(401)
for step in steps:
    due = [name for name, policy in policies.items() if step == 0 or policy.due(step)]
    if due or step % 20 == 0:
        z = featuriser(x).detach()
        kernel = RBFMixture(scale="median").fit(z)
    for name in due:
        strata[name] = vardass.stratify(z, k=32, kernel=kernel, warm_start=strata.get(name))
        counts[name] += 1
    for name, curve in curves.items() if step % 20 == 0 else ():
        left = stratified_variance(z, strata[name].labels, kernel=kernel)
        curve.append(left / uniform_variance(z, 32, kernel=kernel))
    optimiser.zero_grad()
    nn.functional.cross_entropy(classifier(featuriser(x)), labels).backward()
    optimiser.step()

figure, axes = plt.subplots(figsize=(7.5, 3.4))
for place, (name, curve) in enumerate(curves.items(), start=1):
    refreshes = "" if counts[name] == 1 else f", {counts[name]} refreshes"
    axes.plot(steps[::20], curve, color=f"C{place}", label=name + refreshes)
axes.set_xlabel("step")
axes.set_ylabel("variance, relative to uniform")
axes.set_ylim(bottom=0)
axes.legend()
plt.show()
