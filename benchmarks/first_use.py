"""CPU seconds that the first use of each sampler takes where nothing is compiled yet, and where all is.

    python benchmarks/first_use.py

Each of the repeats is a new process with an empty folder for compiled code, in which the samplers follow one another;
then another process finds what was kept. Imports of torch and numba are not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from statistics import median

from common import markdown, write_results

REPEATS = 3
SIZES = (1000, 5000)
KINDS = ("StratifiedBatchSampler", "OrderedBatchSampler", "BalancedBatchSampler")
PROGRAM = """
import json, resource, sys
import numba, torch
from vardass import samplers
torch.set_num_threads(1)

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

n, seconds = int(sys.argv[1]), []
z = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))
for name in sys.argv[2:]:
    start = cpu()
    sampler = getattr(samplers, name)(n, 32)
    sampler.refresh(z)
    next(iter(sampler))
    seconds.append(cpu() - start)
print(json.dumps(seconds))
"""


def first_use(n: int, folder: str) -> list[float]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
    command = [sys.executable, "-c", PROGRAM, str(n), *KINDS]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def main() -> None:
    cells, rows = [], []
    for n in SIZES:
        found: dict[str, list[list[float]]] = {"compiled": [], "kept": []}
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as folder:
                for state in found.values():
                    state.append(first_use(n, folder))
        for state, runs in found.items():
            each = [median(values) for values in zip(*runs, strict=True)]
            together = median(sum(run) for run in runs)
            cells.append({"n": n, "state": state, "seconds": dict(zip(KINDS, each, strict=True)), "together": together})
            rows.append([f"{n:,}", state, *(f"{value:.2f}" for value in (*each, together))])
    header = ["n", "loops are", *(name.removesuffix("BatchSampler").lower() for name in KINDS), "together"]
    note = (
        f"CPU seconds of a refresh and one batch of 32, one sampler after the other; medians of {REPEATS} processes. "
    )
    note += (
        f"{os.getloadavg()[1]:.1f} processes were running on average: beside others the same work takes more CPU time."
    )
    write_results(
        "first_use", "First use of the samplers, with and without compiling", [note, markdown(header, rows)], cells
    )


if __name__ == "__main__":
    main()
