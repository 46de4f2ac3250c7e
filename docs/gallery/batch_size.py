"""Variance against the batch size: theory and draws.

Lines are exact variances of the mean embedding of a batch of k smart-watch windows; dots are measured on 300 batches.
Uniform batches follow 1/k. One draw from each of k strata falls faster, because more strata are also tighter ones. For
ordered and balanced batches no formula is known, so they have dots only.
"""

import matplotlib.pyplot as plt

import vardass
from vardass.data import standardise, watch_domains
from vardass.kernels import RBFMixture

z = standardise(watch_domains()["left-A"][0])
kernel = RBFMixture([1.0], scale="median").fit(z)
samplers = {
    "uniform": lambda n, k: vardass.UniformBatchSampler(n, k, replacement=True),
    "stratified": lambda n, k: vardass.StratifiedBatchSampler(n, k, kernel=kernel),
    "ordered": lambda n, k: vardass.OrderedBatchSampler(n, k, kernel=kernel),
    "balanced": lambda n, k: vardass.BalancedBatchSampler(n, k, kernel=kernel),
}
sizes = (4, 8, 16, 32, 64)
exact, drawn = {name: [] for name in samplers}, {name: [] for name in samplers}
for k in sizes:
    makers = {name: lambda n, make=make, k=k: make(n, k) for name, make in samplers.items()}
    for row in vardass.variance_report(makers, z, kernel=kernel, batches=300).rows:
        exact[row.name].append(row.exact_variance)
        drawn[row.name].append(row.variance.value)

figure, axes = plt.subplots(figsize=(7.5, 3.6))
for place, name in enumerate(samplers):
    if exact[name][0] is not None:
        axes.loglog(sizes, exact[name], color=f"C{place}")
    axes.loglog(sizes, drawn[name], "o", color=f"C{place}", label=name)
axes.set_xticks(sizes, sizes)
axes.minorticks_off()
axes.set_xlabel("k, samples in a batch")
axes.set_ylabel("E|μ̂ - μ|²")
axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()
