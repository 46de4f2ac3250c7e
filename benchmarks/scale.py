"""min-sum on many points, its growth with n and peak memory; the cost of losses, of drawing and of plans.

All times are those of one CPU, by one thread: they mean the same on a busy machine.

python benchmarks/scale.py [--largest 1000000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from itertools import islice
from typing import Any

import torch
from common import interleaved, markdown, peak_gigabytes, synthetic, write_results
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler

from vardass import Strata, coral, mmd2, stratify
from vardass.samplers import BalancedBatchSampler, OrderedBatchSampler, StratifiedBatchSampler

K = 128
GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0)


def one_size(n: int) -> None:
    """Run in its own process, so that peak memory is that of this size."""
    x = synthetic(n, 64)
    before = peak_gigabytes()
    stratify(x[:5_000], K, rank=128)  # compiles, or reads what was compiled
    start = time.process_time()
    strata = stratify(x, K, rank=128)
    seconds = time.process_time() - start
    print(seconds, before, peak_gigabytes(), strata.info["n_iter"], strata.variance / strata.uniform_variance)


def growth(largest: int, repeats: int) -> tuple[str, list[list[float]]]:
    sizes = [n for n in (10_000, 100_000, 1_000_000) if n <= largest]
    runs: dict[int, list[list[float]]] = {n: [] for n in sizes}
    for _ in range(repeats):
        for n in sizes:
            output = subprocess.run(
                [sys.executable, __file__, "--one-size", str(n)], check=True, capture_output=True, text=True
            ).stdout
            runs[n].append([float(value) for value in output.split()])
    rows, data, last = [], [], 0.0
    for n in sizes:
        seconds, before, peak, passes, relative = sorted(runs[n])[len(runs[n]) // 2]
        ratio = f"{seconds / last:.1f}" if last else ""
        rows.append(
            [f"{n:,}", f"{seconds:.2f}", ratio, f"{passes:.0f}", f"{relative:.4f}", f"{before:.2f}", f"{peak:.2f}"]
        )
        data.append([n, seconds, passes, relative, before, peak])
        last = seconds
    header = ["n", "CPU seconds", "times the row above", "passes", "variance / uniform", "GB before", "GB peak"]
    return markdown(header, rows), data


def textbook_mmd(x: Tensor, y: Tensor) -> Tensor:
    def gram(a: Tensor, b: Tensor) -> Tensor:
        d2 = (a.square().sum(1)[:, None] + b.square().sum(1) - 2.0 * a @ b.T).clamp_min(1e-30)
        total = torch.zeros_like(d2)
        for gamma in GAMMAS:
            total = total + torch.exp(d2 * -gamma)
        return total

    return gram(x, x).mean() + gram(y, y).mean() - 2.0 * gram(x, y).mean()


def textbook_coral(x: Tensor, y: Tensor) -> Tensor:
    def covariance(z: Tensor) -> Tensor:
        z = z - z.mean(0)
        return z.T @ z / (len(z) - 1)

    return (covariance(x) - covariance(y)).square().sum()


def losses(repeats: int) -> tuple[str, list[Any]]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.full((128,), 1 / 128)
    rows, data = [], []
    for d in (64, 512):
        x = torch.randn(128, d, generator=generator).mul_(d**-0.5).requires_grad_()
        y = torch.randn(128, d, generator=generator).mul_(d**-0.5).requires_grad_()
        runs = {
            "textbook MMD": lambda x=x, y=y: textbook_mmd(x, y).backward(),
            "mmd2": lambda x=x, y=y: mmd2(x, y).backward(),
            "mmd2, weighted": lambda x=x, y=y: mmd2(x, y, weights_x=weights, weights_y=weights).backward(),
            "textbook CORAL": lambda x=x, y=y: textbook_coral(x, y).backward(),
            "coral, weighted": lambda x=x, y=y: coral(x, y, weights_x=weights, weights_y=weights).backward(),
        }
        seconds, _ = interleaved(runs, 60 * repeats, time.process_time)
        for name, value in seconds.items():
            base = seconds["textbook MMD" if "MMD" in name or "mmd" in name else "textbook CORAL"]
            rows.append([str(d), name, f"{1e3 * value:.2f}", f"{value / base:.2f}"])
            data.append([d, name, value, value / base])
    return markdown(["d", "forward and backward, batch 128", "CPU ms", "of the textbook loss"], rows), data


def drawing(repeats: int) -> tuple[str, dict[str, float]]:
    n, take = 1_000_000, 2_000
    stratified = StratifiedBatchSampler(n, K, endless=True)
    stratified.use(Strata(torch.arange(n) % K, K, 0.0, 0.0))

    def consume(batches: Any) -> None:
        for _ in islice(batches, take):
            pass

    random = BatchSampler(RandomSampler(range(n), generator=torch.Generator().manual_seed(0)), K, drop_last=True)

    def whole_epoch() -> float:
        start = time.process_time()
        count = sum(1 for _ in random)
        return (time.process_time() - start) / count

    _, found = interleaved({"torch": whole_epoch}, repeats)
    seconds, _ = interleaved({"stratified": lambda: consume(stratified)}, 3 * repeats, time.process_time)
    per_batch = {"torch": 1e6 * found["torch"], "stratified": 1e6 * seconds["stratified"] / take}
    text = (
        f"n = 1,000,000, k = {K}: torch's `BatchSampler(RandomSampler)` {per_batch['torch']:.1f} µs a batch over an "
        f"epoch, `StratifiedBatchSampler` {per_batch['stratified']:.1f} µs, ratio "
        f"{per_batch['stratified'] / per_batch['torch']:.2f}."
    )
    return text, per_batch


def plans(repeats: int) -> tuple[str, list[Any]]:
    rows, data = [], []
    for n, k in ((14_000, 32), (14_000, 128), (100_000, 32)):
        x = synthetic(n, 64)
        for kind in (OrderedBatchSampler, BalancedBatchSampler):
            sampler = kind(n, k, kernel="mmd")

            def run(sampler: Any = sampler, x: Tensor = x) -> None:
                sampler.refresh(x)
                next(iter(sampler))

            run()  # compiles, or reads what was compiled
            seconds, _ = interleaved({"plan": run}, repeats, time.process_time)
            rows.append([f"{n:,}", str(k), kind.__name__, f"{seconds['plan']:.2f}"])
            data.append([n, k, kind.__name__, seconds["plan"]])
    return markdown(["n", "k", "sampler", "CPU seconds for refresh and plan"], rows), data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one-size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one_size:
        one_size(arguments.one_size)
        return
    data: dict[str, Any] = {}
    tables: list[str] = []
    for title, (text, values) in (
        ("Losses", losses(arguments.repeats)),
        ("Drawing a batch", drawing(arguments.repeats)),
        ("Plans", plans(arguments.repeats)),
        (f"Growth with n (d = 64, k = {K}, rank 128)", growth(arguments.largest, arguments.repeats)),
    ):
        tables += [f"## {title}", text]
        data[title] = values
        print(title, text, sep="\n", flush=True)
    write_results("scale", "Cost at scale", tables, data)


if __name__ == "__main__":
    main()
