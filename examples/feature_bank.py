"""The loop of three_lines.py, with strata from the features that training computes anyway.

A feature bank keeps the features of each training batch, so a refresh needs no extra forward pass.

    python examples/feature_bank.py           # about 10 s on a CPU
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import vardass
from vardass.data import standardise, watch_domains

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600)
steps = parser.parse_args().steps

domains = watch_domains()
(x, labels), (y, y_labels) = domains["left-A"], domains["right-B"]  # other wrist, other people
inputs = {"source": standardise(x), "target": standardise(y, reference=x)}
data = {  # samples carry their position in the data set, which the bank needs
    "source": TensorDataset(inputs["source"], labels, torch.arange(len(x))),
    "target": TensorDataset(inputs["target"], torch.arange(len(y))),
}

torch.manual_seed(0)
featuriser = nn.Sequential(nn.Linear(78, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
classifier = nn.Linear(64, 7)
optimiser = torch.optim.Adam([*featuriser.parameters(), *classifier.parameters()], lr=1e-3)

samplers = {
    name: vardass.OrderedBatchSampler(len(dataset), batch_size=8, kernel="mmd", endless=True, seed=seed)
    for seed, (name, dataset) in enumerate(data.items())
}
loaders = [DataLoader(vardass.with_weights(data[name]), batch_sampler=samplers[name]) for name in data]
banks = {name: vardass.FeatureBank(len(dataset)) for name, dataset in data.items()}
for name, bank in banks.items():
    bank.fill(featuriser, inputs[name])  # the only full pass, so that every row is known at the first refresh
refresher = vardass.Refresher(vardass.RefreshEvery(100), samplers, banks)

refreshes = 0
for step, ((xs, ys, rows, ws), (xt, target_rows, wt)) in enumerate(zip(*loaders)):
    if step == steps:
        break
    refreshes += refresher.step(step) is not None
    zs, zt = featuriser(xs), featuriser(xt)
    banks["source"].update(rows, zs)
    banks["target"].update(target_rows, zt)
    loss = cross_entropy(classifier(zs), ys, reduction="none") @ ws + vardass.mmd2(zs, zt, weights_x=ws, weights_y=wt)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

print(f"{refreshes} refreshes, seconds: { {part: round(s, 2) for part, s in refresher.timer.seconds.items()} }")
with torch.no_grad():
    guess = classifier(featuriser(inputs["target"])).argmax(1)
print(f"target accuracy after {steps} steps: {(guess == y_labels).double().mean():.3f}")
