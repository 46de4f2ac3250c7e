"""The discrepancy of the whole batch on several processes, under DDP, FSDP and Fabric.

torchrun --nproc-per-node 2 several_processes.py [ddp] [fsdp] [fabric]
"""

import sys
from functools import partial

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from watch import classes, report, target, x, y

import vardass
from vardass.processes import gather_rows


class Adapted(nn.Module):
    """Returns features and logits from one call, because DDP and FSDP see no other calls."""

    def __init__(self):
        super().__init__()
        self.featuriser, self.head = nn.Sequential(nn.Linear(78, 64), nn.ReLU()), nn.Linear(64, classes)

    def forward(self, inputs):
        z = self.featuriser(inputs)
        return z, self.head(z)


# --8<-- [start:loss]
def loss_of_all(model, source, goal, gather=gather_rows):
    """Task loss of this process's rows, and MMD² of the rows of all processes."""
    (inputs, labels, weights), (others, _, their_weights) = source, goal
    z, logits = model(torch.cat([inputs, others]))
    task = cross_entropy(logits[: len(labels)], labels, reduction="none") @ weights
    count = distributed.get_world_size()  # weights of each process sum to 1
    parts = (z[: len(labels)], z[len(labels) :], weights / count, their_weights / count)
    z_s, z_t, w_s, w_t = (gather(part) for part in parts)
    return task + vardass.mmd2(z_s, z_t, weights_x=w_s, weights_y=w_t)


# --8<-- [end:loss]


def loaders_and_refresher(model):
    """Each process takes its share of one stream; the strata are those of the first."""
    data = {"source": TensorDataset(x, y), "target": TensorDataset(target, torch.full((len(target),), -1))}
    samplers = {
        name: vardass.StratifiedBatchSampler(len(part), 16, endless=True, seed=seed)  # the same seed on every process
        for seed, (name, part) in enumerate(data.items())
    }

    def features_of(rows):
        return vardass.extract_features(lambda inputs: model(inputs)[0], rows)

    sources = {name: partial(features_of, part.tensors[0]) for name, part in data.items()}
    refresher = vardass.Refresher(vardass.RefreshEvery(50), samplers, sources)
    loaders = [DataLoader(vardass.with_weights(data[name]), batch_sampler=samplers[name]) for name in data]
    return loaders, refresher


def train(model, backward, optimiser, steps=150, **options):
    loaders, refresher = loaders_and_refresher(model)
    refresher.step(0)
    for step, (source, goal) in enumerate(zip(*loaders), start=1):
        optimiser.zero_grad()
        backward(loss_of_all(model, source, goal, **options))
        optimiser.step()
        refresher.step(step)
        if step == steps:
            return model


# --8<-- [start:ddp]
def with_ddp():
    model = nn.parallel.DistributedDataParallel(Adapted())
    return train(model, torch.Tensor.backward, torch.optim.Adam(model.parameters(), 3e-3))


# --8<-- [end:ddp]


# --8<-- [start:fsdp]
def with_fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))  # "cuda" on GPUs
    model = fully_shard(Adapted(), mesh=mesh)
    return train(model, torch.Tensor.backward, torch.optim.Adam(model.parameters(), 3e-3))


# --8<-- [end:fsdp]


# --8<-- [start:fabric]
def with_fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=distributed.get_world_size(), strategy="ddp")
    fabric.launch()
    module = Adapted()
    model, optimiser = fabric.setup(module, torch.optim.Adam(module.parameters(), 3e-3))
    # no setup_dataloaders: the samplers distribute batches themselves
    return train(
        model, fabric.backward, optimiser, gather=lambda part: fabric.all_gather(part, sync_grads=True).flatten(0, 1)
    )


# --8<-- [end:fabric]

if __name__ == "__main__":
    distributed.init_process_group("gloo")  # "nccl" on GPUs
    for name in sys.argv[1:] or ("ddp", "fsdp", "fabric"):
        torch.manual_seed(0)
        model = {"ddp": with_ddp, "fsdp": with_fsdp, "fabric": with_fabric}[name]()
        with torch.no_grad():
            guess = model(target)[1].argmax(1)
        if distributed.get_rank() == 0:
            report(guess, name)
    distributed.destroy_process_group()
