"""How much noise each sampler leaves, on the features of a network trained on the source.

python examples/compare_samplers.py       # about 15 s on a CPU
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import vardass
from vardass.data import standardise, watch_domains

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batches", type=int, default=300)
arguments = parser.parse_args()

domains = watch_domains()
(x, labels), (y, y_labels) = domains["left-A"], domains["right-B"]  # other wrist, other people
x, y = standardise(x), standardise(y, reference=x)

torch.manual_seed(0)
featuriser = nn.Sequential(nn.Linear(78, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
classifier = nn.Linear(64, 7)
optimiser = torch.optim.Adam([*featuriser.parameters(), *classifier.parameters()], lr=1e-3)
for rows, _ in zip(vardass.UniformBatchSampler(len(x), 32, endless=True), range(arguments.steps)):
    loss = cross_entropy(classifier(featuriser(x[rows])), labels[rows])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

k = {"batch_size": 32, "kernel": "mmd"}
report = vardass.variance_report(
    {
        "uniform": lambda n: vardass.UniformBatchSampler(n, 32),
        "VaRDASS (paper)": lambda n: vardass.StratifiedBatchSampler(n, solver="dynamic-kmeans", **k),
        "stratified": lambda n: vardass.StratifiedBatchSampler(n, **k),
        "ordered": lambda n: vardass.OrderedBatchSampler(n, **k),
        "balanced": lambda n: vardass.BalancedBatchSampler(n, **k),
    },
    featuriser(x).detach(),
    featuriser(y).detach(),
    kernel="mmd",
    batches=arguments.batches,
    gradient_batches=0,
)
print(report)
quiet = min((row for row in report.rows), key=lambda row: row.loss_variance.value)
print(f"least noise in the loss: {quiet.name}")
with torch.no_grad():
    guess = classifier(featuriser(y)).argmax(1)
print(f"target accuracy without adaptation: {(guess == y_labels).double().mean():.3f}")
