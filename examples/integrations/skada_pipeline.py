"""skada: MMDAdapter in its pipeline, and balanced batches for its own DeepCORAL.

pip install 'vardass[sklearn]' skada skorch
"""

import numpy as np
import torch
from skada import make_da_pipeline
from skada.deep import DeepCoral
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader
from watch import classes, report, target, x, y

import vardass
from vardass.integrations.pairs import PairBatchSampler
from vardass.integrations.sklearn import MMDAdapter

X = np.concatenate([x, target])
labels = np.concatenate([y, np.full(len(target), -1)])  # skada's mask
domain = np.repeat([1, -2], [len(x), len(target)])  # negative: target

pipeline = make_da_pipeline(StandardScaler(), MMDAdapter(steps=150, lr=3e-3))
pipeline.fit(X, labels, sample_domain=domain)
report(torch.from_numpy(pipeline.predict(target.numpy())), "an MMDAdapter in skada")

# its losses accept no weights, and balanced batches need none
sides = (vardass.BalancedBatchSampler(len(part), 16, endless=True, seed=seed) for seed, part in enumerate((x, target)))
pairs = PairBatchSampler(*sides, batches=60)
pairs.refresh(torch.from_numpy(X))
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Linear(78, 64), nn.ReLU()), nn.Linear(64, classes)

    def forward(self, x, sample_weight=None):
        return self.head(self.features(x))


net = DeepCoral(Net(), layer_name="features", reg=1.0, optimizer=torch.optim.Adam, lr=3e-3, max_epochs=2,
                train_split=None, verbose=0)  # fmt: skip
net.set_params(iterator_train=lambda dataset, batch_size, **options: DataLoader(dataset, batch_sampler=pairs))
net.fit(X, labels, sample_domain=domain)
guess = net.predict(target.numpy(), sample_domain=np.full(len(target), -2))
report(torch.from_numpy(guess), "balanced batches for skada's DeepCORAL")
