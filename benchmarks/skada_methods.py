"""skada's deep methods with uniform and with balanced batches: same network, steps, optimiser and seeds.

    python benchmarks/skada_methods.py DATA OUT.csv

DATA holds `digits/digits.npz` and `office_home/office_home_resnet18.npz`; the watch windows come with the package.
skada's default options, Adam with 3e-3, 300 steps of 32 + 32 samples, one hidden layer of 64 units; `source` is
DeepCoral with reg=0. Rows are written as they come, one seed after the other.
"""

import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from skada.deep import DAN, MCC, DeepCoral, DeepJDOT
from torch import nn
from torch.utils.data import DataLoader

import vardass
from vardass.data import standardise, watch_domains
from vardass.integrations.pairs import PairBatchSampler

BATCH, STEPS, SEEDS = 32, 300, 5
METHODS = {"source": partial(DeepCoral, reg=0.0), "DeepCoral": DeepCoral, "DAN": DAN, "MCC": MCC, "DeepJDOT": DeepJDOT}
SAMPLERS = {"uniform": vardass.UniformBatchSampler, "balanced": vardass.BalancedBatchSampler}


def tasks(root):
    watch = watch_domains()
    yield "watch left-A > right-B", watch["left-A"], watch["right-B"]
    yield "watch right-A > left-B", watch["right-A"], watch["left-B"]
    digits = np.load(root / "digits/digits.npz")
    usps, semeion = (
        (digits[f"{name}_x"].reshape(-1, 256)[:2000] / digits[f"{name}_x"].max(), digits[f"{name}_y"][:2000])
        for name in ("usps_train", "semeion")
    )
    yield "digits usps > semeion", usps, semeion
    yield "digits semeion > usps", semeion, usps
    office = np.load(root / "office_home/office_home_resnet18.npz")
    art, clipart, product, real = (
        (office[f"feat_{name}"], office[f"y_{name}"]) for name in ("Art", "Clipart", "Product", "Real_World")
    )
    yield "office-home art > clipart", art, clipart
    yield "office-home product > real world", product, real


class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Linear(width, 64), nn.ReLU()), nn.Linear(64, classes)

    def forward(self, x, sample_weight=None):
        return self.head(self.features(x))


def accuracy(method, sampler, source, target, seed):
    x, y, aim, truth = (torch.as_tensor(np.asarray(part)) for part in (*source, *target))
    x, aim = x.float(), aim.float()
    x, aim = standardise(x), standardise(aim, reference=x)
    rows, domain = torch.cat([x, aim]).numpy(), np.repeat([1, -2], [len(x), len(aim)])
    labels = np.concatenate([y.numpy(), np.full(len(aim), -1)])
    sides = (sampler(len(part), BATCH, endless=True, seed=10 * seed + i) for i, part in enumerate((x, aim)))
    pairs = PairBatchSampler(*sides, batches=STEPS)
    pairs.refresh(torch.from_numpy(rows))
    torch.manual_seed(seed)
    options = {"layer_name": "features", "optimizer": torch.optim.Adam, "lr": 3e-3, "max_epochs": 1}
    net = method(Net(x.shape[1], int(y.max()) + 1), **options, train_split=None, verbose=0)
    net.set_params(iterator_train=lambda dataset, batch_size, **options: DataLoader(dataset, batch_sampler=pairs))
    net.fit(rows, labels, sample_domain=domain)
    guess = net.predict(aim.numpy(), sample_domain=np.full(len(aim), -2))
    return float((guess == truth.numpy()).mean())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pairs_of_domains = list(tasks(Path(sys.argv[1])))
    with open(sys.argv[2], "w") as out:
        out.write("task,method,sampler,seed,accuracy\n")
        for seed in range(SEEDS):
            for name, source, target in pairs_of_domains:
                for method in METHODS:
                    for sampler in SAMPLERS:
                        value = accuracy(METHODS[method], SAMPLERS[sampler], source, target, seed)
                        out.write(f"{name},{method},{sampler},{seed},{value:.4f}\n")
                        out.flush()
