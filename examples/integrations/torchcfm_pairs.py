"""torchcfm: flow matching on minibatch optimal transport, from noise to eight Gaussians.

pip install vardass torch pot; pip install --no-deps torchcfm  (torchdyn, which it asks for, is not needed here)
"""

import math
import sys

import ot
import pandas as pd
import torch
from torch import nn
from torchcfm import ExactOptimalTransportConditionalFlowMatcher

import vardass

N = 2000


def eight_gaussians(generator):
    angle = torch.randint(8, (N,), generator=generator) * math.pi / 4
    return 5 * torch.stack([angle.cos(), angle.sin()], 1) + math.sqrt(0.1) * torch.randn(N, 2, generator=generator)


def cost(x, y):
    return float(ot.emd2([], [], torch.cdist(x, y).square().double().numpy(), numItermax=10**6))


def flow(kind, batch_size, seed, steps):
    generator = torch.Generator().manual_seed(seed)
    noise, data = torch.randn(N, 2, generator=generator), eight_gaussians(generator)
    sides = [kind(N, batch_size, kernel="energy", endless=True, seed=2 * seed + side) for side in (0, 1)]
    for sampler, rows in zip(sides, (noise, data)):
        sampler.refresh(rows)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 64), nn.SELU(), nn.Linear(64, 64), nn.SELU(), nn.Linear(64, 2))
    optimiser, matcher = torch.optim.Adam(model.parameters(), lr=3e-3), ExactOptimalTransportConditionalFlowMatcher()
    costs = []
    for step, first, second in zip(range(steps), *sides):
        x0, x1 = noise[first], data[second]
        if step % 10 == 0:
            costs.append(cost(x0, x1))
        t, x, velocity = matcher.sample_location_and_conditional_flow(x0, x1)
        optimiser.zero_grad()
        (model(torch.cat([x, t[:, None]], 1)) - velocity).square().mean().backward()
        optimiser.step()
    start, fresh = torch.randn(N, 2, generator=generator), eight_gaussians(generator)
    x, energy = start, 0.0
    with torch.no_grad():
        for i in range(50):
            v = model(torch.cat([x, torch.full((N, 1), i / 50)], 1))
            x, energy = x + v / 50, energy + float(v.square().sum(1).mean()) / 50
    costs = torch.tensor(costs)
    optimum = cost(noise, data)
    # energy of the paths, above that of the straight ones of the transport of all rows; distance of what they reach
    return {
        "bias": float(costs.mean()) - optimum,
        "deviation": float(costs.std()),
        "path energy": energy / optimum - 1,
        "distance": cost(x, fresh) ** 0.5,
    }


SAMPLERS = {"uniform": vardass.UniformBatchSampler, "balanced": vardass.BalancedBatchSampler}
seeds, steps = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (1, 200)
results = pd.DataFrame(
    {"batch": size, "batches": name, "seed": seed, **flow(kind, size, seed, steps)}
    for size in (16, 64)
    for name, kind in SAMPLERS.items()
    for seed in range(seeds)
)
print(results.drop(columns="seed").groupby(["batch", "batches"]).mean().round(3).to_string())
if len(sys.argv) > 3:
    results.round(5).to_csv(sys.argv[3], index=False)
