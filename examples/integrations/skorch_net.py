"""skorch: its loader takes the pair sampler, a callback refreshes, and `get_loss` is weighted.

pip install skorch
"""

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from watch import classes, report, target, x, y

import vardass
from vardass.integrations.pairs import PairBatchSampler

both = ConcatDataset([TensorDataset(x, y), TensorDataset(target, torch.full((len(target),), -1))])
sides = (vardass.OrderedBatchSampler(len(part), 16, endless=True, seed=seed) for seed, part in enumerate((x, target)))
pairs = PairBatchSampler(*sides, batches=60)
k = pairs.source_size


def loader(dataset, batch_size, **options):
    return DataLoader(vardass.with_weights(dataset), batch_sampler=pairs, collate_fn=collate)


def collate(samples):
    inputs, labels, weights = torch.utils.data.default_collate(samples)
    return inputs, (labels, weights)  # skorch expects pairs


class Refresh(Callback):
    step = 0

    def on_train_begin(self, net, **kwargs):
        self.refresher = vardass.Refresher(
            vardass.RefreshEvery(50), pairs, lambda: vardass.extract_features(net.module_[0], both)
        )
        self.refresher.step(0)

    def on_batch_end(self, net, training, **kwargs):
        self.step += 1
        self.refresher.step(self.step)


class Adapted(NeuralNet):
    def get_loss(self, y_pred, y_true, X=None, training=False):
        labels, weights = y_true
        z = self.module_[0](X)
        task = cross_entropy(y_pred[:k], labels[:k], reduction="none") @ weights[:k]
        return task + vardass.mmd2(z[:k], z[k:], weights_x=weights[:k], weights_y=weights[k:])


torch.manual_seed(0)
module = nn.Sequential(nn.Sequential(nn.Linear(78, 64), nn.ReLU()), nn.Linear(64, classes))
net = Adapted(module, nn.CrossEntropyLoss, optimizer=torch.optim.Adam, lr=3e-3, max_epochs=2, iterator_train=loader,
              train_split=None, callbacks=[Refresh()], verbose=0)  # fmt: skip
net.fit(both)
with torch.no_grad():
    report(net.module_(target).argmax(1), "skorch")
