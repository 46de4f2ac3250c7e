"""Lightning: two loaders, a weighted loss, and one callback that refreshes, shards, logs and resumes.

    pip install 'vardass[lightning]'

`trainer.fit(model, loaders, ckpt_path="last")` goes on with the very next batch; with several devices add
`use_distributed_sampler=False` to the trainer.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from watch import classes, report, target, x, y

import vardass
from vardass.integrations.lightning import RefreshCallback


class Adapted(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(78, 64), nn.ReLU())
        self.head = nn.Linear(64, classes)

    def training_step(self, batch, batch_idx):
        (xs, ys, ws), (xt, wt) = batch
        zs, zt = self.net(xs), self.net(xt)
        return cross_entropy(self.head(zs), ys, reduction="none") @ ws + vardass.mmd2(
            zs, zt, weights_x=ws, weights_y=wt
        )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


torch.manual_seed(0)
model = Adapted()
data = {"source": TensorDataset(x, y), "target": TensorDataset(target)}
samplers = {
    name: vardass.OrderedBatchSampler(len(data[name]), 16, batches=60, seed=seed) for seed, name in enumerate(data)
}
sources = {name: lambda name=name: vardass.extract_features(model.net, data[name]) for name in data}
callback = RefreshCallback(vardass.Refresher(vardass.RefreshEvery(50), samplers, sources))
loaders = [DataLoader(vardass.with_weights(data[name]), batch_sampler=samplers[name]) for name in data]
trainer = pl.Trainer(max_epochs=2, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
trainer.fit(model, loaders)
with torch.no_grad():
    report(model.head(model.net(target)).argmax(1), "Lightning")
