"""A refresh and 100 batches of `ordered` and `balanced`, against version 0.1.0: ``python benchmarks/refresh.py``.

The old version is taken from the repository's history and runs in processes of its own, with the same interpreter; old
and new are asked in turn. Both get the same features of two domains (64 columns, MMD kernel). ``first`` is the first
refresh of a new sampler, ``next`` one on features that moved by a tenth of their deviation, as in training. Compiling
(kept on disk) is no part of the times: each process does everything once before. Seconds are those of one domain, by
the wall clock and of one core, and the batches of both versions are compared by the error of their mean embedding and
by the variance of the MMD² loss, under the exact kernel.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

OLD = "9108c14"
VERSIONS = ("0.1.0", "now")
BATCHES = 100
STAGES = ("first", "next")
CLOCKS = ("wall", "cpu")
SPEED = {"wall": "wall_speed", "cpu": "speed"}  # names of the ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="samplers of each kind and version")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 14_000])
    parser.add_argument("--batch", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 0], help="0: as many as torch takes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work()
        return
    from common import markdown, write_results

    data: dict[str, Any] = {f"{threads or 'all'} threads": [] for threads in asked.threads}
    with tempfile.TemporaryDirectory() as folder:
        sources = {"0.1.0": old_sources(Path(folder)), "now": Path(__file__).parents[1] / "src"}
        tables = []
        for threads in asked.threads:
            workers = {name: Worker(sources[name], threads, Path(folder) / f"{name}.npz") for name in VERSIONS}
            found = data[f"{threads or 'all'} threads"]
            for n in asked.sizes:
                for k in asked.batch:
                    for sampler in ("ordered", "balanced"):
                        for row in compare(workers, Path(folder), sampler, n, k, asked.repeats):
                            found.append(row)
                            print(*as_text(row), flush=True)
            tables.append(f"## {threads or 'All'} threads\n\n" + markdown(HEADER, [as_text(row) for row in found]))
            for worker in workers.values():
                worker.close()
    rows = [row for found in data.values() for row in found]
    slowest = [min(row[name] for row in rows) for name in SPEED.values()]
    variance = mean(row["variance_ratio"] for row in rows)
    text = (
        f"Times in ms for one domain: refresh and {BATCHES} batches; medians of {asked.repeats}. Least ratio of wall "
        f"clock {slowest[0]:.1f}, of CPU times {slowest[1]:.1f}. Variances are new / old, with their standard errors; "
        f"that of the loss is {variance:.3f} on average."
    )
    write_results("refresh", "A refresh and 100 batches, against version 0.1.0", [text, *tables], data)


HEADER = ["sampler", "n", "batch", "refresh", "0.1.0, CPU", "now, CPU", "times faster", "0.1.0, wall", "now, wall"]
HEADER += ["times faster", "error of the mean embedding", "variance of the loss"]


def as_text(row: dict[str, Any]) -> list[str]:
    cells = [row["sampler"], f"{row['n']:,}", str(row["k"]), row["stage"]]
    for clock in ("cpu", "wall"):
        cells += [*(f"{1e3 * row[f'{clock} {name}']:.1f}" for name in VERSIONS), f"{row[SPEED[clock]]:.1f}"]
    return cells + [f"{row[key]:.3f} ± {row[f'{key}_stderr']:.3f}" for key in ("error_ratio", "variance_ratio")]


def old_sources(folder: Path) -> Path:
    """The package as it was, taken from the history."""
    archive = subprocess.run(
        ["git", "archive", OLD, "src"], cwd=Path(__file__).parents[1], capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


# --- a process with one version ----------------------------------------------------------------------------


class Worker:
    """A process that imports the package from ``source`` and leaves its batches in the file ``out``."""

    def __init__(self, source: Path, threads: int, out: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source)}
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment.pop(name, None)
            if threads:
                environment[name] = str(threads)
        command = [sys.executable, __file__, "--worker"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.out = out

    def ask(self, **task: Any) -> dict[str, Any]:
        """Seconds by stage and clock; the batches are loaded with them."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({**task, "out": str(self.out)}), file=self.process.stdin, flush=True)
        seconds: dict[str, Any] = json.loads(self.process.stdout.readline())
        with np.load(self.out) as arrays:
            return {**seconds, **arrays}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work() -> None:
    """Answer tasks from standard input: refresh samplers of two domains twice and draw batches each time."""
    import torch

    from vardass import BalancedBatchSampler, OrderedBatchSampler

    kinds: dict[str, Any] = {"ordered": OrderedBatchSampler, "balanced": BalancedBatchSampler}
    for line in sys.stdin:
        task = json.loads(line)
        seconds = {stage: dict.fromkeys(CLOCKS, 0.0) for stage in STAGES}
        arrays: dict[str, Any] = {}
        domains = {name: torch.from_numpy(value) for name, value in np.load(task["features"]).items()}
        for place, domain in enumerate(("x", "y")):
            began = now()
            sampler = kinds[task["sampler"]](
                len(domains[domain]), task["k"], kernel="mmd", seed=2 * task["seed"] + place, endless=True
            )
            stream = iter(sampler)
            for stage in STAGES:
                sampler.refresh(domains[f"{domain} {stage}"])
                batches = list(islice(stream, BATCHES))
                ended = now()
                for clock in CLOCKS:
                    seconds[stage][clock] += (ended[clock] - began[clock]) / 2
                arrays[f"{domain} {stage} rows"] = np.array(batches)
                weights = batches[0].weights
                arrays[f"{domain} {stage} weights"] = np.full(task["k"], 1 / task["k"]) if weights is None else weights
                began = now()
        np.savez(task["out"], **arrays)
        print(json.dumps(seconds), flush=True)


def now() -> dict[str, float]:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


# --- what both gave ----------------------------------------------------------------------------------------


def compare(
    workers: dict[str, Worker], folder: Path, sampler: str, n: int, k: int, repeats: int
) -> list[dict[str, Any]]:
    """One row for each stage."""
    import torch
    from common import synthetic

    domains = {}
    for place, domain in enumerate(("x", "y")):
        features = synthetic(n, 64, seed=place)
        step = torch.randn(features.shape, generator=torch.Generator().manual_seed(place))
        domains |= {domain: features, f"{domain} first": features, f"{domain} next": features + 0.1 * step}
    path = folder / "features.npz"
    np.savez(path, **{name: value.numpy() for name, value in domains.items()})
    task = {"features": str(path), "sampler": sampler, "k": k}
    for worker in workers.values():
        worker.ask(**task, seed=repeats)  # compiles
    found: dict[str, list[Any]] = {name: [] for name in VERSIONS}
    for seed in range(repeats):
        for name, worker in workers.items():
            found[name].append(worker.ask(**task, seed=seed))
    rows = []
    for stage in STAGES:
        row: dict[str, Any] = {"sampler": sampler, "n": n, "k": k, "stage": stage}
        for clock in CLOCKS:
            for name in VERSIONS:
                row[f"{clock} {name}"] = median(one[stage][clock] for one in found[name])
            row[SPEED[clock]] = row[f"{clock} 0.1.0"] / row[f"{clock} now"]
        rows.append({**row, **quality({d: domains[f"{d} {stage}"] for d in ("x", "y")}, stage, found)})
    return rows


def quality(domains: dict[str, Any], stage: str, found: dict[str, list[Any]]) -> dict[str, float]:
    """New / old: mean error of the mean embedding of ``x``, and variance of the loss, with standard errors."""
    import torch

    from vardass import mmd2
    from vardass.analysis.batch_noise import embedding_errors
    from vardass.kernels import as_kernel
    from vardass.samplers import Chunk

    def batches(of: list[Any], domain: str) -> Chunk:
        rows = torch.from_numpy(np.concatenate([one[f"{domain} {stage} rows"] for one in of]))
        weights = np.concatenate([np.tile(one[f"{domain} {stage} weights"], (BATCHES, 1)) for one in of])
        return Chunk(rows, torch.from_numpy(weights))

    kernel = as_kernel("mmd")
    drawn = {name: {domain: batches(found[name], domain) for domain in domains} for name in VERSIONS}
    embedding = embedding_errors(
        domains["x"], kernel, [drawn[name]["x"] for name in VERSIONS], max_columns=2**30, seed=0
    )
    groups = len(found["now"])  # one of each sampler, whose batches depend on one another
    errors = [one.view(groups, BATCHES).mean(1) for one in embedding.errors]
    variances = []
    for name in VERSIONS:
        x, y = drawn[name]["x"], drawn[name]["y"]
        losses = [
            mmd2(domains["x"][a], domains["y"][b], weights_x=u, weights_y=v, kernel=kernel)
            for a, u, b, v in zip(x.rows, x.weights.float(), y.rows, y.weights.float())
        ]
        values = torch.stack(losses).double()
        variances.append((values - values.mean()).square().view(groups, BATCHES).mean(1))
    result = {}
    for key, (old, new) in {"error_ratio": errors, "variance_ratio": variances}.items():
        result[key] = float(new.mean() / old.mean())
        noise = sum(float(one.var() / one.mean().square()) for one in (old, new)) / groups
        result[f"{key}_stderr"] = result[key] * noise**0.5
    return result


if __name__ == "__main__":
    main()
