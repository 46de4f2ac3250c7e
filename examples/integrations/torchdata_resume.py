"""torchdata: workers load ahead, and the loader's state is that of the last batch that arrived.

pip install torchdata
"""

import torch
from torch.utils.data import ConcatDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from watch import target, x, y

import vardass
from vardass.integrations.pairs import PairBatchSampler

both = ConcatDataset([TensorDataset(x, y), TensorDataset(target, torch.full((len(target),), -1))])


def make_loader():
    sides = (
        vardass.OrderedBatchSampler(len(part), 16, endless=True, seed=seed) for seed, part in enumerate((x, target))
    )
    pairs = PairBatchSampler(*sides, batches=20)
    return StatefulDataLoader(vardass.with_weights(both), batch_sampler=pairs, num_workers=2), pairs


loader, pairs = make_loader()
pairs.refresh(torch.cat([x, target]))
state, rest = None, []
for step, (_, labels, weights) in enumerate(loader, 1):
    if step > 7:
        rest.append((labels, weights))
    if step == 7:
        state = loader.state_dict()  # save this in the checkpoint; it contains the sampler and its strata

again, _ = make_loader()  # in a new process
again.load_state_dict(state)
same = [torch.equal(a, c) and torch.equal(b, d) for (a, b), (_, c, d) in zip(rest, again, strict=True)]
print(f"{sum(same)} of {len(same)} batches after the restart are those of the run that was not interrupted")
