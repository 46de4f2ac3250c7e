"""Strata of rows in many Parquet files: seconds, peak memory, growth with n, and quality beside `stratify`.

python benchmarks/shards.py --folder FOLDER [--rows 10000000] [--keep]
python benchmarks/shards.py --folder FOLDER --draws   row groups that batches read, and what it costs in variance

Rows are float16 (n, 128), a mixture of 2,000 clusters whose sizes have heavy tails. Twice the rows, each of
them two times, are measured too. The files take 512 bytes a row and are deleted at the end; those that are there are
not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import markdown, write_results
from numpy.typing import NDArray

from vardass import stratify
from vardass.files import atomic_write
from vardass.kernels import RBFMixture
from vardass.samplers import StratifiedBatchSampler
from vardass.shards import ShardBatches, ShardBatchSampler, ShardDataset, stratify_shards
from vardass.variance import stratified_variance

D, K, CLUSTERS, FILES = 128, 256, 2_000, 40
SUBSET = 100_000
SAMPLES = (16_384, 32_768, 65_536)


def rows(n: int, seed: int) -> NDArray[np.float16]:
    """Clusters of unequal width, whose j-th coordinate has variance in proportion to 1 / j: (n, 128)."""
    shape = np.random.default_rng(7)
    shares = shape.pareto(1.2, CLUSTERS) + 0.05
    spread = (1.0 / np.sqrt(np.arange(1, D + 1))).astype(np.float32)
    centres = shape.standard_normal((CLUSTERS, D), dtype=np.float32) * spread
    widths = (0.2 + 0.5 * shape.random(CLUSTERS)).astype(np.float32)
    numbers = np.random.default_rng([1, seed])
    cluster = numbers.choice(CLUSTERS, n, p=shares / shares.sum())
    x = numbers.standard_normal((n, D), dtype=np.float32) * spread
    return (x * widths[cluster, None] + centres[cluster]).astype(np.float16)


def write(folder: Path, each: int) -> list[Path]:
    """40 files, and a copy of each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [folder / f"part-{i:03d}.parquet" for i in range(2 * FILES)]
    for i, path in enumerate(files[:FILES]):
        if not path.exists():
            values = pa.FixedSizeListArray.from_arrays(pa.array(rows(each, i).reshape(-1)), D)
            table = pa.table({"id": pa.array(np.arange(each)), "features": values})
            with atomic_write(path) as file:
                pq.write_table(table, file, row_group_size=65_536, use_dictionary=False)
    for path, copy in zip(files, files[FILES:]):
        shutil.copyfile(path, copy)
    return files


def resident(pid: int) -> float:
    """Gigabytes that a process and its descendants have in memory, shared pages counted for each."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{one}/status").read_text())
            waiting += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except OSError:  # it has ended
            continue
        total += int(found[1]) if found else 0
    return total / 2**20


def cpu_seconds() -> float:
    """Seconds of CPU that processes which have ended took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(files: list[Path], out: Path, workers: int) -> dict[str, Any]:
    """Run the command, and look at its memory five times a second."""
    command = [sys.executable, "-m", "vardass", "stratify", *map(str, files), "--k", str(K), "--scale", "median"]
    command += ["--workers", str(workers), "--out", str(out), "--json"]
    load, start, peak, used = os.getloadavg()[0], time.perf_counter(), 0.0, cpu_seconds()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.2)
        seconds = time.perf_counter() - start
        assert process.stdout is not None
        record = json.loads(process.stdout.read())
    loads = [round(load, 1), round(os.getloadavg()[0], 1)]
    return {
        "n": record["n"],
        "seconds": seconds,
        "cpu": cpu_seconds() - used,
        "gigabytes": peak,
        "load": loads,
        "parts": record["seconds"],
    } | {name: record[name] for name in ("variance", "variance_stderr", "uniform_variance", "min_size", "max_size")}


def quality(folder: Path) -> list[dict[str, float]]:
    """Exact variances of the first 100,000 rows: in memory, and from samples of them."""
    x = rows(SUBSET, 0)
    np.save(folder / "subset.npy", x)
    features = torch.from_numpy(x).float()
    kernel = RBFMixture(scale="median").fit(features)
    whole = stratified_variance(features, stratify(x, K, kernel=kernel).labels, kernel=kernel)
    found = []
    for sample in SAMPLES:
        strata = stratify_shards(
            folder / "subset.npy", K, out=folder / f"subset-{sample}", kernel=kernel, sample=sample
        )
        exact = stratified_variance(features, torch.from_numpy(strata.labels), kernel=kernel)
        found.append(
            {
                "sample": sample,
                "reported": strata.variance,
                "stderr": strata.variance_stderr,
                "exact": exact,
                "whole": whole,
                "excess": exact / whole - 1.0,
            }
        )
    return found


def write_groups(folder: Path, x: NDArray[np.float32], labels: NDArray[np.int32]) -> tuple[list[Path], list[Path]]:
    """20 files with row groups of 4,096 rows, and their labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{i:02d}.parquet" for i in range(20)]
    for path, rows, mine in zip(files, np.array_split(x, 20), np.array_split(labels, 20)):
        values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), x.shape[1])
        pq.write_table(pa.table({"features": values}), path, row_group_size=4096, use_dictionary=False)
        np.save(path.with_suffix(".npy"), mine)
    return files, [path.with_suffix(".npy") for path in files]


def draws(folder: Path, n: int = 1_000_000, k: int = 128, batches: int = 256, seeds: int = 40) -> None:
    """Row groups read for each batch, and the variance of its mean beside that of independent draws."""
    folder.mkdir(parents=True, exist_ok=True)
    x = np.ascontiguousarray(rows(n, 0)[:, :64], dtype=np.float32)
    if not (folder / "x.npy").exists():
        np.save(folder / "x.npy", x)
    kernel = RBFMixture(scale="median")
    strata = stratify_shards(folder / "x.npy", k, out=folder / "strata", kernel=kernel, sample=2**14)
    weights = (strata.sizes / n).double()
    known: list[dict[str, Any]] = []
    for name, order in (("shuffled", np.arange(n)), ("sorted", np.argsort(x[:, 0]))):
        files, labels = write_groups(folder / name, x[order], strata.labels[order])
        lengths = tuple(len(part) for part in np.array_split(order, 20))
        here = replace(strata, files=tuple(files), labels_files=tuple(labels), rows=lengths)
        mine = torch.from_numpy(x[order])
        for cursors, ahead in ((None, 0), (None, 64), (k, 64), (8, 64), (1, 64)):
            if cursors is None:
                sampler: Any = StratifiedBatchSampler(n, k, endless=True)
                sampler.use(here.strata())
            else:
                sampler = ShardBatchSampler(here, cursors=cursors, endless=True)
            dataset = ShardDataset(files)
            count = batches if ahead else 8
            used = time.process_time()
            if ahead:
                for _ in islice(ShardBatches(dataset, sampler, ahead=ahead), count):
                    pass
            else:
                for batch in islice(sampler, count):
                    dataset.rows(batch)
            used = time.process_time() - used
            row = {"files": name, "cursors": cursors, "ahead": ahead, "groups": dataset.groups_read / count}
            known.append({**row, "milliseconds": 1e3 * used / count})
            if ahead:
                drawn = torch.cat([sampler.sample_batches(32, seed=seed).rows for seed in range(seeds)])
                means = torch.stack([weights @ mine[batch].double() for batch in drawn])
                known[-1]["variance"] = float(means.var(0).sum())
            print(known[-1], flush=True)
    independent = {row["files"]: row["variance"] for row in reversed(known) if row["cursors"] is None and row["ahead"]}
    table = [
        [
            row["files"],
            "independent" if row["cursors"] is None else f"{row['cursors']} cursor{'s' * (row['cursors'] > 1)}",
            f"{row['ahead']} batches ahead" if row["ahead"] else "batch by batch",
            f"{row['groups']:.3g}",
            f"{row['milliseconds']:.3g}",
            f"{row['variance'] / independent[row['files']]:.2f}" if "variance" in row else "",
        ]
        for row in known
    ]
    header = ["files", "draws", "read", "row groups a batch", "ms of CPU a batch", "variance / independent"]
    text = (
        f"{n:,} rows of 64 float32 numbers in 20 Parquet files with row groups of 4,096 (260 of them), shuffled or "
        f"sorted by the first column; k = {k}, 16 row groups kept. {batches} batches, 8 where each is read by itself. "
        f"Variance of the weighted mean of a batch, over {32 * seeds:,} batches of {seeds} streams."
    )
    write_results("shard_batches", "Batches over many files", [text, markdown(header, table)], {"rows": known})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the files")
    parser.add_argument("--draws", action="store_true", help="measure batches instead of strata")
    options = parser.parse_args()
    if options.draws:
        draws(options.folder)
        return
    folder = options.folder / "features"
    folder.mkdir(parents=True, exist_ok=True)
    files = write(folder, options.rows // FILES)
    runs = [
        measured(files[:count], options.folder / f"strata-{count}", options.workers) for count in (FILES, 2 * FILES)
    ]
    known = quality(options.folder)
    table = [
        [
            f"{run['n']:,}",
            f"{run['seconds']:.0f}",
            f"{run['cpu']:.0f}",
            *(f"{run['parts'][name]:.0f}" for name in ("sample", "pass", "write")),
            f"{run['gigabytes']:.2f}",
            f"{run['variance'] / run['uniform_variance']:.4f} ± {run['variance_stderr'] / run['uniform_variance']:.4f}",
            f"{run['min_size']:,} to {run['max_size']:,}",
            f"{run['load'][0]}, {run['load'][1]}",
        ]
        for run in runs
    ]
    header = [
        "n",
        "seconds",
        "of CPU",
        "sample",
        "pass",
        "write",
        "GB peak",
        "variance / uniform",
        "sizes",
        "load before, after",
    ]
    clock, cpu = (runs[1][name] / runs[0][name] for name in ("seconds", "cpu"))
    beside = [
        [
            f"{one['sample']:,}",
            f"{one['exact']:.3e}",
            f"{one['reported']:.3e} ± {one['stderr']:.0e}",
            f"{one['whole']:.3e}",
            f"{100 * one['excess']:+.1f} %",
        ]
        for one in known
    ]
    import pyarrow

    tables = [
        f"Rows of {D} float16 numbers in {FILES} and {2 * FILES} Parquet files, k = {K}, `--scale median`, "
        f"{options.workers} workers, pyarrow {pyarrow.__version__}. Memory is the sum over processes. The load is the "
        "number of running processes in the minute before, ours included at the end.",
        markdown(header, table),
        f"Twice the rows take {cpu:.2f} times the CPU time, and {clock:.2f} times as long by the clock, which other "
        "work disturbs.",
        f"## Beside `stratify` on the first {SUBSET:,} rows\n\nExact variances, all pairs summed, beside what the pass "
        "reports; `stratify` sees all rows.",
        markdown(["sample", "variance", "reported", "of `stratify`", "above it"], beside),
    ]
    write_results("shards", "Rows that do not fit in memory", tables, {"runs": runs, "quality": known})
    if not options.keep:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
