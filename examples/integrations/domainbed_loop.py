"""DomainBed: loaders of balanced batches in place of `InfiniteDataLoader`, in a loop like its `train.py`.

DomainBed itself is not needed: `Algorithm` has the `featurizer`, `classifier` and `update` of those there.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from watch import classes, domains, report, target, x, y

import vardass
from vardass.data import standardise

hparams = {"batch_size": 16, "mmd_gamma": 1.0, "lr": 3e-3}
raw, _ = domains["left-A"]
others, their_labels = domains["left-B"]
in_splits = [TensorDataset(x, y), TensorDataset(standardise(others, reference=raw), their_labels)]
uda_splits = [TensorDataset(target, torch.zeros(len(target)))]


class Algorithm(nn.Module):
    """MMD between the union of the sources and the target; `MMD` of DomainBed compares pairs of sources."""

    def __init__(self):
        super().__init__()
        self.featurizer = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU())
        self.classifier = nn.Linear(64, classes)
        self.optimizer = torch.optim.Adam(self.parameters(), hparams["lr"])

    def update(self, minibatches, unlabeled=None):
        z = self.featurizer(torch.cat([inputs for inputs, _ in minibatches]))
        task = cross_entropy(self.classifier(z), torch.cat([labels for _, labels in minibatches]))
        penalty = vardass.mmd2(z, self.featurizer(torch.cat(unlabeled)), preset="domainbed")
        self.optimizer.zero_grad()
        (task + hparams["mmd_gamma"] * penalty).backward()
        self.optimizer.step()
        return {"loss": task.item(), "penalty": penalty.item()}


torch.manual_seed(0)
algorithm = Algorithm()
# --8<-- [start:loaders]
envs = [*in_splits, *uda_splits]
samplers = [
    vardass.BalancedBatchSampler(len(env), hparams["batch_size"], kernel="mmd", endless=True, seed=seed)
    for seed, env in enumerate(envs)  # different seeds: equal ones would draw the same positions
]
loaders = [DataLoader(env, batch_sampler=sampler, num_workers=0) for env, sampler in zip(envs, samplers)]
train_loaders, uda_loaders = loaders[: len(in_splits)], loaders[len(in_splits) :]
refresher = vardass.Refresher(
    vardass.RefreshEvery(50),
    samplers,
    [lambda env=env: vardass.extract_features(algorithm.featurizer, env) for env in envs],
)
# --8<-- [end:loaders]
train_minibatches_iterator, uda_minibatches_iterator = zip(*train_loaders), zip(*uda_loaders)
# --8<-- [start:loop]
for step in range(200):
    refresher.step(step)  # the only new line of the loop, before the batches are drawn
    minibatches = list(next(train_minibatches_iterator))
    unlabeled = [inputs for inputs, _ in next(uda_minibatches_iterator)]
    algorithm.update(minibatches, unlabeled)
# --8<-- [end:loop]
with torch.no_grad():
    report(algorithm.classifier(algorithm.featurizer(target)).argmax(1), "DomainBed")
