"""Trainer beside a plain PyTorch loop with the same losses, interleaved: ``python benchmarks/loop.py``.

CPU seconds of one thread for 800 steps on the watch data with the MLP; medians of five runs of each in turn. The loops
draw uniform batches from epochs and evaluate nothing; the trainer makes its usual eight evaluations, or only the last.
The settings of adapt have the class confusion as a third loss, and refreshes.
"""

import time

import torch
from common import interleaved, markdown, write_results
from torch.nn.functional import cross_entropy

from vardass import mmd2
from vardass.adapt import RunConfig, Trainer, make_network
from vardass.adapt.algorithms.mcc import class_confusion
from vardass.adapt.batches import Inputs
from vardass.data import load_task, split_task

SPLITS = split_task(load_task("watch", "left-A->right-B"), seed=0)
STEPS, BATCH = 800, 32


def plain(confusion: float = 0.0) -> None:
    config, device = RunConfig(), torch.device("cpu")
    inputs = [Inputs(domain, device).data for domain in (SPLITS.source_train, SPLITS.target_unlabelled)]
    labels = SPLITS.source_train.known_labels()
    network = make_network("mlp", tuple(inputs[0].shape[1:]), len(SPLITS.source_train.class_names))
    optimiser = torch.optim.Adam(network.parameters(), lr=config.lr)
    batches = [iter(()), iter(())]
    for _ in range(STEPS):
        rows = []
        for domain, x in enumerate(inputs):
            batch = next(batches[domain], None)
            if batch is None:
                batches[domain] = iter(torch.randperm(len(x))[: len(x) // BATCH * BATCH].view(-1, BATCH))
                batch = next(batches[domain])
            rows.append(batch)
        z_s, z_t = (network.features(x[batch]) for x, batch in zip(inputs, rows))
        loss = cross_entropy(network.head(z_s), labels[rows[0]]) + mmd2(z_s, z_t)
        if confusion:
            loss = loss + confusion * class_confusion(network.head(z_t))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def run(settings: RunConfig) -> None:
    Trainer(settings, SPLITS).run()


if __name__ == "__main__":
    torch.set_num_threads(1)
    uniform = RunConfig(steps=STEPS, batch_size=BATCH, sampler="uniform")
    adapt = RunConfig.recommended(steps=STEPS, batch_size=BATCH)
    runs = {  # each with the loop that has the same losses
        "plain loop": (plain, "plain loop"),
        "Trainer, uniform": (lambda: run(uniform), "plain loop"),
        "Trainer, uniform, evaluated once": (lambda: run(uniform.changed(eval_every=STEPS)), "plain loop"),
        "plain loop with confusion": (lambda: plain(0.3), "plain loop with confusion"),
        "settings of adapt": (lambda: run(adapt), "plain loop with confusion"),
    }
    calls = {name: call for name, (call, _) in runs.items()}
    for call in calls.values():
        call()  # compiled loops are read from disk
    seconds, _ = interleaved(calls, 5, time.process_time)
    ratios = {name: seconds[name] / seconds[loop] for name, (_, loop) in runs.items()}
    rows = [[name, f"{seconds[name]:.2f}", f"{ratio:.2f}"] for name, ratio in ratios.items()]
    table = markdown(["run", "CPU seconds", "time / loop with the same losses"], rows)
    write_results("loop", f"{STEPS} steps on the watch data, MLP", [table], {"seconds": seconds, "ratios": ratios})
