"""Accelerate: one loader for both domains, and a sampler that is part of `accelerator.save_state`.

    pip install 'vardass[huggingface]'; accelerate launch accelerate_loop.py

Each process gets its share of the batches, and the strata of the first.
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from watch import classes, report, target, x, y

import vardass
from vardass.integrations.checkpoints import CheckpointedSampler
from vardass.integrations.pairs import PairBatchSampler


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(78, 64), nn.ReLU()), nn.Linear(64, classes)

    def forward(self, x):
        z = self.net(x)
        return z, self.head(z)  # both from the prepared model, which averages gradients over processes


both = ConcatDataset([TensorDataset(x, y), TensorDataset(target, torch.full((len(target),), -1))])
sides = (vardass.OrderedBatchSampler(len(part), 16, endless=True, seed=seed) for seed, part in enumerate((x, target)))
pairs = PairBatchSampler(*sides, batches=60)
accelerator = Accelerator(cpu=True)
# its state is that of the last batch that arrived; Accelerate distributes the batches over the processes
sampler = CheckpointedSampler(pairs, prepared_for=accelerator.num_processes)
torch.manual_seed(0)
model = Adapted()
net = model.net
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
refresher = vardass.Refresher(vardass.RefreshEvery(50), pairs, lambda: vardass.extract_features(net, both))

loader = DataLoader(vardass.with_weights(both), batch_sampler=sampler)
model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
accelerator.register_for_checkpointing(sampler, refresher)
step, k = 0, pairs.source_size
refresher.step(step)
for _ in range(2):
    for inputs, labels, weights in sampler.follow(loader):
        z, logits = model(inputs)
        task = cross_entropy(logits[:k], labels[:k], reduction="none") @ weights[:k]
        loss = task + vardass.mmd2(z[:k], z[k:], weights_x=weights[:k], weights_y=weights[k:])
        accelerator.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        refresher.step(step)
        if step == 75:
            accelerator.save_state(tempfile.mkdtemp())  # load_state continues with the next batch and these strata
with torch.no_grad():
    report(model(target)[1].argmax(1), "Accelerate")
