"""Shared by the benchmarks: timing of interleaved alternatives, real data, and results files."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass import table
from vardass.files import atomic_write

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def interleaved(
    alternatives: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of each alternative, timed in turn so that a busy machine hits all alike, and last results."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for name, run in alternatives.items():
            start = clock()
            results[name] = run()
            seconds[name].append(clock() - start)
    return {name: median(values) for name, values in seconds.items()}, results


def real_features(folder: Path) -> dict[str, Tensor]:
    """The largest domain of each real data set: EfficientNet features, window statistics, pixels, word counts."""
    pacs = np.load(folder / "pacs/pacs_effnetlite0.npz")["feat_sketch"].astype("f4")
    digits = np.load(folder / "digits/digits.npz")["mnist_train_x"]
    digits = digits.reshape(len(digits), -1).astype("f4") / 255.0
    amazon = amazon_counts(np.load(folder / "amazon_reviews/amazon_reviews.npz"), "kitchen")
    from vardass.data import load_watch, standardise

    return {
        "PACS sketch": torch.from_numpy(pacs),
        "MNIST": torch.from_numpy(digits),
        "Amazon kitchen": amazon,
        "watch": standardise(load_watch().features),
    }


def amazon_counts(data: Any, domain: str, columns: int = 256) -> Tensor:
    """log(1 + counts) of the reviews of one domain through a fixed random projection: (n, columns)."""
    projection = torch.randn(5000, columns, generator=torch.Generator().manual_seed(0)) / columns**0.5
    return torch.from_numpy(amazon_words(data, domain, ("train", "test"))) @ projection


def amazon_words(data: Any, domain: str, splits: Sequence[str]) -> NDArray[np.float32]:
    """log(1 + counts) of 5,000 words in the reviews of one domain: (n, 5000)."""
    parts = []
    for split in splits:
        values, indices, indptr = (data[f"{domain}_{split}_{name}"] for name in ("data", "indices", "indptr"))
        dense = np.zeros((len(indptr) - 1, 5000), dtype="f4")
        rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        dense[rows, indices.astype("i8")] = np.log1p(values.astype("f4"))
        parts.append(dense)
    return np.concatenate(parts)


def synthetic(n: int, d: int, seed: int = 0) -> Tensor:
    """Ten anisotropic Gaussian blobs whose j-th coordinate has variance 1 / j: (n, d)."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.arange(1, d + 1).float().rsqrt()
    centres = torch.randn(10, d, generator=generator) * spread * 1.5
    return torch.randn(n, d, generator=generator) * spread + centres[torch.randint(10, (n,), generator=generator)]


def peak_gigabytes() -> float:
    """Peak resident memory of this process; getrusage would also count what was inherited at the fork."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 2**20 if found else float("nan")


def write_results(name: str, title: str, tables: list[str], data: Any) -> None:
    """Write results/NAME.md, with the command and the machine, and results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    command = "python " + " ".join([os.path.relpath(sys.argv[0], HERE.parent), *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads, Python "
    machine += platform.python_version()
    text = f"# {title}\n\nMade by `{command}` ({machine}).\n\n" + "\n\n".join(tables) + "\n"
    with atomic_write(RESULTS / f"{name}.md") as file:
        file.write(text.encode())
    with atomic_write(RESULTS / f"{name}.json") as file:
        file.write((json.dumps(data, indent=1) + "\n").encode())
    print(text)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table of texts that may have marks of their own."""
    return table.markdown(header, rows, right=False, quoted=True)
