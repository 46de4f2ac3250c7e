"""Your own sampler: bands along the main direction of the features, one sample from each. Takes a second."""

import torch

import vardass
from vardass.samplers import Chunk, MinibatchSampler


class BandSampler(MinibatchSampler):
    bands = None  # until the first refresh

    def _fit(self, features):
        centred = (features - features.mean(0)).cpu()
        along = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[0]
        self.bands = list(along.argsort().tensor_split(self.batch_size))

    def _make_chunk(self, rounds, generator):
        bands = self.bands or [torch.arange(self.n)] * self.batch_size
        drawn = [band[torch.randint(len(band), (64 * self.num_replicas,), generator=generator)] for band in bands]
        weights = None if self.bands is None else torch.tensor([len(band) / self.n for band in bands])
        return Chunk(torch.stack(drawn, dim=1), weights)  # 64 batches for each process

    def _extra_state(self):
        return {"bands": self.bands}

    def _load_extra_state(self, state):
        self.bands = state["bands"]


z = torch.randn(500, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([4.0, 1.0, 1.0, 1.0])
vardass.Refresher(vardass.RefreshEvery(100), BandSampler(500, 8), lambda: z).step(0)  # works like the built-in samplers
samplers = {"uniform": lambda n: vardass.UniformBatchSampler(n, 8), "bands": lambda n: BandSampler(n, 8)}
print(vardass.variance_report(samplers, z, kernel="linear"))
