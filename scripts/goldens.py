"""Digests of what a change of form must not change: batches, runs, a resumed run, run ids and table texts.

    python scripts/goldens.py > before.json      # then change, and compare on the same machine
    python scripts/goldens.py before.json        # names what differs, and fails

Numbers differ between machines, so the digests are not kept in the repository.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from vardass.adapt import RunConfig, Trainer
from vardass.adapt.algorithms import ALGORITHM_NAMES
from vardass.data import load_task, split_task
from vardass.lab.spec import load_sweep
from vardass.samplers.registry import SAMPLER_NAMES, find_sampler, make_sampler

TASK = "left-A->right-B"
RESULTS = Path(__file__).parent.parent / "results"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=float).encode()).hexdigest()[:16]


def batches(name: str, kernel: str) -> str:
    z = torch.randn(600, 8, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 2.0, 8)
    sampler = make_sampler(name, len(z), 16, kernel=kernel, seed=3)
    seen = []
    stream = iter(sampler)
    for step in range(200):
        if step in (20, 120):
            sampler.refresh(z + 0.01 * step)
        batch = next(stream)
        seen.append([list(map(int, batch)), None if batch.weights is None else list(map(float, batch.weights))])
    return digest(seen)


def numbers(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = ("task", "mmd", "coral", "source_accuracy", "target_entropy", "score", "best_step")
    return [{name: line[name] for name in kept if name in line} for line in metrics]


def run(**settings: Any) -> str:
    splits = split_task(load_task("watch", TASK), seed=0)
    settings = {"steps": 60, "eval_every": 20, **settings}
    return digest(numbers(Trainer(RunConfig(**settings), splits).run().metrics))


def resumed() -> str:
    splits = split_task(load_task("watch", TASK), seed=0)
    config = RunConfig.recommended(steps=60, eval_every=20, checkpoint_every=10)
    with tempfile.TemporaryDirectory() as folder:
        first = Trainer(config, splits, folder)

        def stop(share: float, message: str) -> None:
            if share > 0.5:
                raise KeyboardInterrupt

        first.run(progress=stop)
        return digest(numbers(Trainer(config, splits, folder).run(resume=True).metrics))


def command(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "vardass", *words], capture_output=True, text=True, check=False)
    return digest([done.returncode, done.stdout])


def run_ids(preset: str) -> str:
    return digest([one.run_id for one in load_sweep(preset).runs()])


def collect() -> dict[str, str]:
    found = {}
    for name in SAMPLER_NAMES:
        if not find_sampler(name).kind.plans_both_domains:
            for kernel in ("mmd", "coral"):
                found[f"batches {name} {kernel}"] = batches(name, kernel)
        found[f"run {name}"] = run(sampler=name, refresh_every=20)
    for name in ALGORITHM_NAMES:
        found[f"algorithm {name}"] = run(algorithm=name)
    found["recommended"] = digest(
        numbers(Trainer(RunConfig.recommended(steps=160), split_task(load_task("watch", TASK), seed=0)).run().metrics)
    )
    found["resumed"] = resumed()
    for preset in ("watch-quick", "demo"):
        found[f"run ids {preset}"] = run_ids(preset)
    for folder in ("samplers", "algorithms", "refresh"):
        found[f"tables {folder}"] = command("tables", str(RESULTS / folder), "--table", "all")
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = collect()
    if len(sys.argv) < 2:
        print(json.dumps(found, indent=1))
        return
    before = json.loads(Path(sys.argv[1]).read_text())
    changed = [name for name in before | found if before.get(name) != found.get(name)]
    print("\n".join(changed) or "nothing has changed")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
