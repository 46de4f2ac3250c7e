"""geomloss on single cells: sets of one cell type, shuffled or balanced, for a model trained by energy distance.

pip install vardass torch geomloss h5py; pip install --no-deps scanpy  (its wheel holds the 700 cells)
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import h5py
import pandas as pd
import torch
from geomloss import SamplesLoss
from torch import nn

import vardass

file = h5py.File(Path(find_spec("scanpy").submodule_search_locations[0]) / "datasets/10x_pbmc68k_reduced.h5ad")
cells, kind = torch.tensor(file["obsm"]["X_pca"]), torch.tensor(file["obs"]["bulk_labels"]).long()
kinds = kind.bincount()
control = cells[kind == kinds.argmax()]  # dendritic cells, which the model turns into those of any other type
is_target = (kinds[kind] >= 16) & (kind != kinds.argmax())
cells, kind = cells[is_target], kind[is_target].unique(return_inverse=True)[1]
names, energy = int(kind.max()) + 1, SamplesLoss("energy", backend="tensorized")


def train(balanced, set_size, seed, steps, sets=4):
    """Energy distance of the trained model's cells from all cells of each type, and the noise of its loss."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(50 + names, 128), nn.ELU(), nn.Linear(128, 50))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    targets = vardass.BalancedBatchSampler(
        len(cells), sets * set_size, groups=kind, set_size=set_size, kernel="energy", endless=True, seed=seed
    )
    sources = vardass.BalancedBatchSampler(
        len(control), sets * set_size, groups=[0] * len(control), set_size=set_size, kernel="energy", endless=True,
        seed=seed + 100,
    )  # fmt: skip
    if balanced:  # before a refresh sets are shuffled and cut
        targets.refresh(cells)
        sources.refresh(control)

    def made(rows, name):  # both (..., rows)
        return rows + model(torch.cat([rows, nn.functional.one_hot(name, names).float()], -1))

    def loss(drawn, aim):
        shape = (sets, set_size)
        return energy(made(control[drawn].view(*shape, -1), kind[aim].view(shape)), cells[aim].view(*shape, -1))

    def far():
        with torch.no_grad():
            values = [
                energy(made(control, torch.full((len(control),), g)), cells[kind == g]) for g in range(names)
            ]  # fmt: skip
        return torch.stack(values)

    for _, drawn, aim in zip(range(steps), sources, targets):
        optimiser.zero_grad()
        loss(drawn, aim).mean().backward()
        optimiser.step()
    error, all_cells = [], far()
    for _, drawn, aim in zip(range(50), sources, targets):
        with torch.no_grad():
            error.append(loss(drawn, aim) - all_cells[kind[aim][::set_size]])
    error = torch.cat(error)
    return {"energy": float(all_cells.mean()), "excess": float(error.mean()), "deviation": float(error.std())}


seeds, steps = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (1, 60)
rows = [
    {"set_size": size, "sets": name, "seed": seed, **train(name == "balanced", size, seed, steps)}
    for size in (8, 16)
    for name in ("shuffled", "balanced")
    for seed in range(seeds)
]
results = pd.DataFrame(rows)
print(results.groupby(["set_size", "sets"])[["energy", "excess", "deviation"]].mean().round(3).to_string())
if len(sys.argv) > 3:
    results.round(5).to_csv(sys.argv[3], index=False)
