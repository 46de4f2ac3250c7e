"""Strata and batches against what a sceptic would use instead: variance, CPU time and memory, by n.

    python benchmarks/sceptic.py [--largest 10000000] [--minutes 25] [--cpu-limit 100] [--keep]

Everything runs on one thread, each cell in a process of its own: peak memory is what it took beyond the features.
Rivals that are not installed are listed, not installed: pip install --no-deps faiss-cpu goodpoints
k-means-constrained six ortools immutabledict DPPy, into an environment beside the one of the tests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from common import RESULTS, markdown, peak_gigabytes, synthetic, write_results
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

import vardass
from vardass import BalancedBatchSampler, OrderedBatchSampler, RBFMixture, stratify
from vardass.analysis.coresets import coreset
from vardass.data import load_watch, standardise
from vardass.kernels import Kernel
from vardass.shards import stratify_shards
from vardass.variance import stratified_variance, uniform_variance
from vardass.view import KernelView

D = 64
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
EXACT = 10_000  # rows up to which all pairs are summed; beyond, each row is compared with one of its stratum
MEASURED = 1_000_000  # rows that the variance is measured on
BATCHES = 64
Labels = NDArray[np.integer] | Tensor


class Rival(NamedTuple):
    """What is compared: ``make(x, k, kernel, seed)`` up to ``largest`` rows; ``package`` and ``module`` it needs."""

    name: str
    package: str
    module: str
    largest: int
    make: Callable[[Tensor, int, Kernel, int], Any]


# --- strata ---


def kmeans(kind: str) -> Callable[..., Labels]:
    def make(x: Tensor, k: int, kernel: Kernel, seed: int) -> Labels:
        import sklearn.cluster

        options = {} if kind == "BisectingKMeans" else {"n_init": 1}
        found: Labels = getattr(sklearn.cluster, kind)(k, random_state=seed, **options).fit_predict(x.numpy())
        return found

    return make


def constrained(x: Tensor, k: int, kernel: Kernel, seed: int) -> Labels:
    from k_means_constrained import KMeansConstrained

    n = len(x)
    found: Labels = KMeansConstrained(k, size_min=n // k, size_max=-(-n // k), n_init=1, random_state=seed).fit_predict(
        x.numpy()
    )
    return found


def by_faiss(x: Tensor, k: int, kernel: Kernel, seed: int) -> Labels:
    import faiss

    means = faiss.Kmeans(x.shape[1], k, seed=seed, min_points_per_centroid=1)  # trains on up to 256 k rows
    means.train(x.numpy())
    found: Labels = means.index.search(x.numpy(), 1)[1][:, 0]
    return found


def strata(**options: Any) -> Callable[..., Labels]:
    return lambda x, k, kernel, seed: stratify(x, k, kernel=kernel, seed=seed, **options).labels


def from_file(x: Tensor, k: int, kernel: Kernel, seed: int) -> Labels:
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", x.numpy())
        return stratify_shards(f"{folder}/x.npy", k, kernel=kernel, seed=seed, out=f"{folder}/strata").labels


STRATA = [
    Rival("MiniBatchKMeans", "scikit-learn", "sklearn", 10_000_000, kmeans("MiniBatchKMeans")),
    Rival("Kmeans of faiss", "faiss-cpu", "faiss", 10_000_000, by_faiss),
    Rival("dynamic-kmeans, the paper's", "vardass", "vardass", 10_000, strata(solver="dynamic-kmeans")),
    Rival("`stratify`", "vardass", "vardass", 1_000_000, strata()),
    Rival("`stratify`, equal", "vardass", "vardass", 10_000, strata(equal=True)),
    Rival("`stratify_shards`, from a file", "vardass", "vardass", 10_000_000, from_file),
    Rival("KMeans", "scikit-learn", "sklearn", 1_000_000, kmeans("KMeans")),
    Rival("BisectingKMeans", "scikit-learn", "sklearn", 1_000_000, kmeans("BisectingKMeans")),
    Rival("KMeansConstrained, equal", "k-means-constrained", "k_means_constrained", 1_000, constrained),
]


def variances(x: Tensor, labels: Labels, k: int, kernel: Kernel) -> float:
    """Variance of one draw from each stratum, relative to that of k uniform draws."""
    step = -(-len(x) // MEASURED)  # rows are in random order
    x, found = x[::step], torch.as_tensor(labels).long()[::step]
    if len(x) <= EXACT:
        return stratified_variance(x, found, kernel=kernel) / uniform_variance(x, k, kernel=kernel)
    view, generator = KernelView(x, kernel.fit(x)), torch.Generator().manual_seed(0)
    shares = torch.bincount(found).double() / len(x)
    inside = spread_to_partners(view, found, generator) @ shares[found]
    return k * float(inside / spread_to_partners(view, torch.zeros_like(found), generator).sum())


def spread_to_partners(view: KernelView, labels: Tensor, generator: torch.Generator) -> Tensor:
    """½ |φ_i - φ_j|² (m - 1) / m for a random other j of the m rows of i's stratum: its mean is the stratum's σ²."""
    order = labels.argsort(stable=True)
    sizes = torch.bincount(labels)
    size, start = sizes[labels[order]], (sizes.cumsum(0) - sizes)[labels[order]]
    hop = 1 + (torch.rand(view.n, dtype=torch.float64, generator=generator) * (size - 1)).long()
    partner = torch.empty_like(order)
    partner[order] = order[start + (torch.arange(view.n) - start + hop) % size]
    rows = torch.arange(view.n).split(100_000)
    squared = torch.cat([view.pair_distances(part, partner[part]).double() for part in rows])
    return 0.5 * squared * (1.0 - 1.0 / sizes[labels])


# --- one set of rows ---

Rows = tuple[Tensor, Tensor | None]
"""Rows (b, m), one set in each, and their weights (m,) if they are not 1 / m."""


def herding(x: Tensor, m: int, kernel: Kernel, seed: int) -> Rows:
    """Kernel herding: each row is the best for the mean with those before it; a row may come twice."""
    matrix = kernel.square_matrix(x)
    mean_row, chosen, total = matrix.mean(1), [], torch.zeros(len(x))
    for count in range(1, m + 1):
        chosen.append(int((mean_row - total / count).argmax()))
        total += matrix[chosen[-1]]
    return torch.tensor([chosen]), None


def thinning(x: Tensor, m: int, kernel: Kernel, seed: int) -> Rows:
    from goodpoints import kt

    matrix = kernel.square_matrix(x).double().numpy()
    rounds = (len(x) // m).bit_length() - 1
    return torch.as_tensor(kt.thin_K(matrix, matrix, rounds, seed=seed))[None], None


def by_dppy(x: Tensor, m: int, kernel: Kernel, seed: int) -> Rows:
    from dppy.finite_dpps import FiniteDPP

    process = FiniteDPP("likelihood", L=kernel.square_matrix(x).double().numpy())
    draws = [process.sample_exact_k_dpp(m, random_state=seed + 1000 * i) for i in range(BATCHES // 16)]
    return torch.tensor(draws), None


def batches(kind: Any) -> Callable[..., Rows]:
    def make(x: Tensor, m: int, kernel: Kernel, seed: int) -> Rows:
        sampler = kind(len(x), m, kernel=kernel, seed=seed)
        sampler.refresh(x)
        chunk = sampler.sample_batches(BATCHES)
        return chunk.rows, chunk.weights

    return make


def representatives(weights: bool) -> Callable[..., Rows]:
    def make(x: Tensor, m: int, kernel: Kernel, seed: int) -> Rows:
        found = coreset(x, m, kernel=kernel, weights=weights, seed=seed)
        return found.indices[None], found.weights if weights else None

    return make


SETS = [
    Rival("k-DPP", "DPPy", "dppy", 2_048, by_dppy),
    Rival("herding", "vardass", "vardass", 4_096, herding),
    Rival("kernel thinning", "goodpoints", "goodpoints", 4_096, thinning),
    Rival("`OrderedBatchSampler`, weighted", "vardass", "vardass", 4_096, batches(OrderedBatchSampler)),
    Rival("`BalancedBatchSampler`", "vardass", "vardass", 4_096, batches(BalancedBatchSampler)),
    Rival("`coreset(weights=False)`", "vardass", "vardass", 4_096, representatives(False)),
    Rival("`coreset`, weighted", "vardass", "vardass", 4_096, representatives(True)),
]


def set_errors(x: Tensor, rows: Rows, m: int, kernel: Kernel) -> float:
    """|μ - Σ w φ|², mean over sets, relative to its mean for m uniform draws."""
    indices, weights = rows
    w = torch.full((m,), 1.0 / m, dtype=torch.float64) if weights is None else weights.double()
    totals = torch.cat([block.double().mean(1) for _, block in kernel.blocks(x)])
    errors = [float(w @ kernel.matrix(x[one]).double() @ w - 2.0 * w @ totals[one] + totals.mean()) for one in indices]
    return mean(errors) / uniform_variance(x, m, kernel=kernel)


# --- cells, each in a process ---


def features(data: str, n: int) -> Tensor:
    if data == "synthetic":
        return synthetic(n, D)
    rows = torch.randperm(len(load_watch().features), generator=torch.Generator().manual_seed(0))[:n]
    return standardise(load_watch().features)[rows]


def run_cell(rival: Rival, judge: Callable[..., float], data: str, n: int, k: int, seeds: int, limit: int) -> Any:
    """Numbers of a cell, or a text where it did not come to an end."""
    context = multiprocessing.get_context("fork")  # imports are paid once; nothing was computed before
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_cell, args=(rival, judge, data, n, k, seeds, limit, theirs))
    process.start()
    theirs.close()
    try:
        found = mine.recv()
    except EOFError:
        process.join()
        return f"> {limit} s of CPU" if process.exitcode == -signal.SIGXCPU else "failed"
    process.join()
    return found


def _cell(
    rival: Rival, judge: Callable[..., float], data: str, n: int, k: int, seeds: int, limit: int, pipe: Any
) -> None:
    import_module(rival.module)
    torch.set_num_threads(1)
    threadpool_limits(1)
    x = features(data, n)
    kernel = RBFMixture(scale="median").fit(x)
    rival.make(x[: min(n, 3_000)], min(k, 32), kernel, 0) if rival.package == "vardass" else None  # compiles
    seconds, cpu, values, before = [], [], [], peak_gigabytes()
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + limit * seeds, -1))
    peak = before
    for seed in range(seeds):
        start, start_cpu = time.perf_counter(), time.process_time()
        found = rival.make(x, k, kernel, seed)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
        peak = peak_gigabytes()
        resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))
        values.append(judge(x, found, k, kernel))
    pipe.send({"seconds": mean(seconds), "cpu": mean(cpu), "gigabytes": peak - before, "values": values})


def installed(package: str) -> str | None:
    try:
        return vardass.__version__ if package == "vardass" else version(package)
    except PackageNotFoundError:
        return None


def compare(
    title: str, rivals: list[Rival], judge: Callable[..., float], cells: list[tuple[str, int, int]], options: Any
) -> tuple[str, list[dict[str, Any]]]:
    rows, entries = [], []
    path = RESULTS / "sceptic.json"
    kept = json.loads(path.read_text())[title] if options.keep and path.exists() else []
    for data, n, k in cells:
        for rival in rivals:
            if n > rival.largest or (number := installed(rival.package)) is None:
                continue
            entry = {"data": data, "n": n, "k": k, "rival": rival.name, "package": rival.package, "version": number}
            seeds = 3 if n <= 5_000 and rival.package != "DPPy" else 1
            found: Any = next((one for one in kept if one.items() >= entry.items() and "values" in one), None)
            if found is None and time.monotonic() > options.until:
                found = "not run"
            elif found is None:
                found = run_cell(rival, judge, data, n, k, seeds, options.cpu_limit)
            if isinstance(found, str):
                entry["ended"] = found
                numbers = [found, "", ""]
            else:
                entry |= found
                values = found["values"]
                value = f"{mean(values):.4f}"
                if len(values) > 1:
                    value += f" ± {stdev(values) / len(values) ** 0.5:.4f}"
                numbers = [value, f"{found['cpu']:.2f}", f"{found['gigabytes']:.2f}"]
            entries.append(entry)
            rows.append([data, f"{n:,}", str(k), rival.name, f"{rival.package} {number}", *numbers])
            print(title, *rows[-1], flush=True)
    header = ["data", "n", "k", "", "version", "of uniform's variance", "CPU s", "GB"]
    return markdown(header, rows), entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    parser.add_argument("--minutes", type=float, default=25.0, help="no cell begins after that")
    parser.add_argument("--cpu-limit", type=int, default=100, help="seconds of CPU that a run may take")
    parser.add_argument("--keep", action="store_true", help="leave cells of the results file as they are")
    options = parser.parse_args()
    options.until = time.monotonic() + 60.0 * options.minutes
    sets, set_entries = compare(
        "sets", SETS, set_errors, [("watch", 2_048, 32), ("synthetic", 2_048, 32), ("synthetic", 4_096, 128)], options
    )
    sizes = [n for n in SIZES if n <= options.largest]
    cells = [("synthetic", n, k) for n in sizes for k in (16, 128) if n == 10_000 or k == 128]
    parts, entries = compare("strata", STRATA, variances, cells, options)
    missing = sorted({rival.package for rival in STRATA + SETS if installed(rival.package) is None})
    tables = [
        "RBF mixture scaled by the median distance, one thread; k-means and its kin see the features, as they have no "
        "kernel. CPU seconds and peak memory beyond the features are those of a run, kernel matrix included. ± is the "
        "standard error over three seeds; without it there was one. "
        + ("Some cells are of an earlier start of the command (`--keep`). " if options.keep else "")
        + (f"Not installed: {', '.join(missing)}." if missing else ""),
        "## Strata: variance of one draw from each",
        "Ten Gaussian blobs of 64 columns. Beyond 10,000 rows the variance is estimated from one partner of each row.",
        parts,
        "## One set of k rows: squared distance of its mean embedding from that of all rows",
        "Mean over 64 batches (one seed and 4 of DPPy) for what draws batches.",
        sets,
    ]
    write_results("sceptic", "Variance against time and memory", tables, {"strata": entries, "sets": set_entries})


if __name__ == "__main__":
    main()
