"""Hugging Face Trainer: one loader for both domains, strata in its checkpoints.

    pip install 'vardass[huggingface]'

`trainer.train(resume_from_checkpoint=True)` goes on with the very next batch, given `ignore_data_skip=True`.
"""

import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader
from transformers import Trainer, TrainingArguments
from watch import classes, report, target, x, y

import vardass
from vardass.integrations.checkpoints import CheckpointedSampler
from vardass.integrations.pairs import PairBatchSampler
from vardass.integrations.transformers import RefreshCallback

K = 16


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(78, 64), nn.ReLU())
        self.head = nn.Linear(64, classes)

    def forward(self, x, labels, weight):
        z = self.net(x)
        task = cross_entropy(self.head(z[:K]), labels[:K], reduction="none") @ weight[:K]
        return {"loss": task + vardass.mmd2(z[:K], z[K:], weights_x=weight[:K], weights_y=weight[K:])}


source_rows = [{"x": row, "labels": label} for row, label in zip(x, y)]
target_rows = [{"x": row, "labels": torch.tensor(-1)} for row in target]  # labels unknown
both = ConcatDataset([source_rows, target_rows])
sides = (vardass.OrderedBatchSampler(len(part), K, endless=True, seed=seed) for seed, part in enumerate((x, target)))
pairs = PairBatchSampler(*sides, batches=60)
arguments = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=2, learning_rate=3e-3, ignore_data_skip=True,
                              use_cpu=True, save_steps=75, disable_tqdm=True, report_to=[])  # fmt: skip
sampler = CheckpointedSampler(pairs, prepared_for=arguments.world_size)


class AdaptingTrainer(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(DataLoader(vardass.with_weights(both), batch_sampler=sampler))


torch.manual_seed(0)
model = Adapted()
refresher = vardass.Refresher(
    vardass.RefreshEvery(50), pairs, lambda: vardass.extract_features(model.net, both, key="x")
)
trainer = AdaptingTrainer(model, arguments, train_dataset=both, callbacks=[RefreshCallback(refresher, sampler)])
trainer.train()
with torch.no_grad():
    report(model.head(model.net(target)).argmax(1), "Trainer")
