"""Your own data set, two moons at different angles: passed as objects here, by its name in YAML and commands.

PYTHONPATH=examples vardass train --dataset own_dataset:load --task "0->30" --data-option noise=0.1 --out run
"""

import torch
from sklearn.datasets import make_moons
from torch.utils.data import TensorDataset

from vardass.adapt import RunConfig, Trainer, final_report
from vardass.data import Domain, Task, split_task


def moons(angle: int, noise: float) -> Domain:
    x, y = (torch.as_tensor(part) for part in make_moons(600, noise=noise, random_state=angle))
    turn = torch.tensor(angle).deg2rad()
    rotation = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()]).view(2, 2)
    return Domain.from_dataset(f"{angle} degrees", TensorDataset(x.float() @ rotation, y), ("upper", "lower"))


def load(task: str, root: object = None, *, noise: float = 0.1) -> Task:
    source, target = (moons(int(angle), noise) for angle in task.split("->"))
    return Task(task, (source,), target)


if __name__ == "__main__":
    splits = split_task(load("0->30"), seed=0)
    result = Trainer(RunConfig(algorithm="mmd", sampler="ordered", steps=300, eval_every=100), splits).run()
    print(f"target accuracy after 300 steps: {final_report(result, splits)['target_accuracy']:.3f}")
