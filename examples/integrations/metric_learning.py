"""pytorch-metric-learning: balanced batches, which need no weights, for its loss and for the discrepancy.

pip install pytorch-metric-learning
"""

import torch
from pytorch_metric_learning import losses, miners
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from watch import report, target, x, y

import vardass

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(78, 64), nn.ReLU(), nn.Linear(64, 32))
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
data = {"source": TensorDataset(x, y), "target": TensorDataset(target)}
samplers = {
    name: vardass.BalancedBatchSampler(len(data[name]), 32, endless=True, seed=seed) for seed, name in enumerate(data)
}
loaders = [DataLoader(data[name], batch_sampler=samplers[name]) for name in data]
triplet, miner = losses.TripletMarginLoss(margin=0.2), miners.MultiSimilarityMiner()
sources = {name: lambda name=name: vardass.extract_features(net, data[name]) for name in data}
refresher = vardass.Refresher(vardass.RefreshEvery(50), samplers, sources)

refresher.step(0)
for step, ((xs, ys), (xt,)) in enumerate(zip(*loaders), 1):
    zs, zt = net(xs), net(xt)
    loss = triplet(zs, ys, miner(zs, ys)) + vardass.mmd2(zs, zt)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    refresher.step(step)
    if step == 120:
        break

with torch.no_grad():
    nearest = torch.cdist(net(target), net(x)).argmin(1)
report(y[nearest], "pytorch-metric-learning")
