"""A plain PyTorch loop for domain adaptation; the lines marked (1), (2), (3) add low-variance batches.

python examples/three_lines.py            # about 10 s on a CPU
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
source = TensorDataset(standardise(x), labels)
target = TensorDataset(standardise(y, reference=x))  # without labels, which only the last line uses

torch.manual_seed(0)
featuriser = nn.Sequential(nn.Linear(78, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
classifier = nn.Linear(64, 7)
optimiser = torch.optim.Adam([*featuriser.parameters(), *classifier.parameters()], lr=1e-3)


def loader_for(dataset, seed):
    # (1) each batch resembles the whole data set; weights, which are equal here, come with every batch
    sampler = vardass.BalancedBatchSampler(len(dataset), batch_size=8, kernel="mmd", endless=True, seed=seed)
    return DataLoader(vardass.with_weights(dataset), batch_sampler=sampler), sampler


(source_loader, source_sampler), (target_loader, target_sampler) = loader_for(source, 0), loader_for(target, 1)
refresh = vardass.RefreshEvery(100)

for step, ((xs, ys, ws), (xt, wt)) in enumerate(zip(source_loader, target_loader)):
    if step == steps:
        break
    if refresh.due(step):  # (3) strata from the current features
        source_sampler.refresh(vardass.extract_features(featuriser, source))
        target_sampler.refresh(vardass.extract_features(featuriser, target))
    zs, zt = featuriser(xs), featuriser(xt)
    # (2) both losses use the weights
    loss = cross_entropy(classifier(zs), ys, reduction="none") @ ws + vardass.mmd2(zs, zt, weights_x=ws, weights_y=wt)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

with torch.no_grad():
    guess = classifier(featuriser(target.tensors[0])).argmax(1)
print(f"target accuracy after {steps} steps: {(guess == y_labels).double().mean():.3f}")
