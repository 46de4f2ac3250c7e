"""Predict a number when sensors drift: the target's readings are shifted, and only the source is labelled."""

import torch

from vardass.adapt import RunConfig, Trainer, final_report
from vardass.data import Domain, Task, split_task


def readings(name: str, drift: float, seed: int) -> Domain:
    """Eight sensors that measure two hidden causes of a quantity in mg/l."""
    generator = torch.Generator().manual_seed(seed)
    causes = torch.randn(600, 2, generator=generator)
    gains, offsets = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).split([2, 1])
    x = causes @ gains + drift * offsets + 0.3 * torch.randn(600, 8, generator=generator)
    y = 100.0 + 20.0 * (torch.sin(2.0 * causes[:, 0]) + causes[:, 1])
    return Domain(name, x, y, ["mg/l"], regression=True)


task = Task("drift", (readings("last year", 0.0, seed=1),), readings("this year", 1.2, seed=2))
splits = split_task(task, seed=0)
for algorithm in ("erm", "coral", "mmd"):
    config = RunConfig.recommended(regression=True, algorithm=algorithm, steps=400)
    found = final_report(Trainer(config, splits).run(), splits)
    print(f"{algorithm:5} target R²: {found['target_r2']:.3f}, error {found['target_rmse']:.1f} mg/l")
