"""min-sum against the paper's solver: variance and time, exact and low-rank path.

    python benchmarks/solvers.py [--data ../shared/data] [--repeats 5] [--quick | --full]

Exact path: both get the same kernel matrix, only the solver is timed. Low-rank path at n = 14,000: everything
from features to labels is timed, the kernel matrix for the paper's solver and all of `stratify` for ours. The paper's
solver takes seconds to a minute there; whole domains on the exact path are run with --full only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import interleaved, markdown, real_features, synthetic, write_results
from torch import Tensor

from vardass import CoralKernel, Kernel, RBFMixture, stratify
from vardass.solvers.labels import SizeLimits
from vardass.solvers.stratification import solve
from vardass.view import ExactView

KERNELS: dict[str, Kernel] = {
    "mixture": RBFMixture(),
    "rbf, median scale": RBFMixture((1.0,), scale="median"),
    "coral": CoralKernel(),
}
SIZES = (8, 32, 128, 256)


def exact_problem(x: Tensor, kernel: Kernel) -> ExactView:
    matrix = torch.empty(len(x), len(x))
    for rows, block in kernel.blocks(x):
        matrix[rows] = block
    return ExactView(matrix)


def exact_cell(problem: ExactView, k: int, repeats: int) -> dict[str, Any]:
    limits = SizeLimits.of(problem.n, k)

    def run(solver: str) -> Any:
        return solve(problem, k, solver=solver, limits=limits, generator=torch.Generator().manual_seed(0))

    for solver in ("dynamic-kmeans", "min-sum"):  # compiles
        stratify(synthetic(300, 4), 8, solver=solver)
    seconds, found = interleaved({s: (lambda s=s: run(s)) for s in ("dynamic-kmeans", "min-sum")}, repeats)
    one = problem.objective(torch.zeros(problem.n, dtype=torch.int64), 1)
    return cell(k, one, found["dynamic-kmeans"].objective, found["min-sum"].objective, seconds)


def low_rank_cell(x: Tensor, kernel: Kernel, truth: ExactView, k: int, repeats: int) -> dict[str, Any]:
    limits = SizeLimits.of(len(x), k)

    def paper() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        problem = exact_problem(x, kernel)
        return solve(problem, k, solver="dynamic-kmeans", limits=limits, generator=generator).labels

    def ours() -> Tensor:
        return stratify(x, k, kernel=kernel).labels

    stratify(x[:2_500], k, kernel=kernel)  # compiles
    seconds, found = interleaved({"dynamic-kmeans": paper, "min-sum": ours}, repeats)
    one = truth.objective(torch.zeros(len(x), dtype=torch.int64), 1)
    values = [truth.objective(found[name], k) for name in ("dynamic-kmeans", "min-sum")]
    return cell(k, one, *values, seconds)


def cell(k: int, one: float, paper: float, ours: float, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "k": k,
        "paper": k * paper / one,
        "min_sum": k * ours / one,
        "variance_ratio": ours / paper,
        "paper_ms": 1e3 * seconds["dynamic-kmeans"],
        "min_sum_ms": 1e3 * seconds["min-sum"],
        "speed": seconds["dynamic-kmeans"] / seconds["min-sum"],
    }


def table(cells: list[dict[str, Any]]) -> str:
    header = [
        "data",
        "n",
        "kernel",
        "k",
        "paper",
        "min-sum",
        "variance ratio",
        "paper ms",
        "min-sum ms",
        "times faster",
    ]
    rows = [
        [
            c["data"],
            str(c["n"]),
            c["kernel"],
            str(c["k"]),
            f"{c['paper']:.4f}",
            f"{c['min_sum']:.4f}",
            f"{c['variance_ratio']:.4f}",
            f"{c['paper_ms']:.1f}",
            f"{c['min_sum_ms']:.1f}",
            f"{c['speed']:.1f}",
        ]
        for c in cells
    ]
    return markdown(header, rows)


def summary(name: str, cells: list[dict[str, Any]]) -> str:
    ratios = [c["variance_ratio"] for c in cells]
    speeds = [c["speed"] for c in cells]
    return (
        f"**{name}**: {len(cells)} cells; variance ratio median {median(ratios):.4f}, worst {max(ratios):.4f}; "
        f"times faster median {median(speeds):.1f}, least {min(speeds):.1f}, most {max(speeds):.1f}; "
        f"cells at least 10 times faster: {sum(s >= 10 for s in speeds)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "../../shared/data")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="n = 1,000 only")
    parser.add_argument("--full", action="store_true", help="whole domains on the exact path too")
    arguments = parser.parse_args()
    small: list[dict[str, Any]] = []
    large: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    sets = {**real_features(arguments.data), "synthetic": synthetic(14_000, 512)}
    for data, features in sets.items():
        shuffled = features[torch.randperm(len(features), generator=torch.Generator().manual_seed(0))]
        whole_domain = arguments.full or (data == "synthetic" and not arguments.quick)
        for x in (shuffled[:1000], shuffled) if whole_domain else (shuffled[:1000],):
            for name, kernel in KERNELS.items():
                fitted = kernel.fit(x)
                problem = exact_problem(x, fitted)
                is_small = len(x) == 1000
                for k in SIZES:
                    labels = {"data": data, "n": len(x), "kernel": name}
                    if is_small or arguments.full:
                        found = {**labels, **exact_cell(problem, k, arguments.repeats if is_small else 1)}
                        (small if is_small else large).append(found)
                        print(data, len(x), name, k, f"{found['variance_ratio']:.4f} {found['speed']:.1f}", flush=True)
                    if data == "synthetic" and not is_small:
                        whole.append({**labels, **low_rank_cell(x, fitted, problem, k, 1)})
                        print("  whole", f"{whole[-1]['variance_ratio']:.4f} {whole[-1]['speed']:.1f}", flush=True)
    parts = [("Exact path, n = 1,000", small), ("Exact path, whole domain", large)]
    parts.append(("Low-rank path, features included", whole))
    tables = ["Variance is relative to uniform draws. A ratio below 1 means that min-sum has the lower variance."]
    for name, cells in parts:
        if cells:
            tables += [f"## {name}", summary(name, cells), table(cells)]
    both = small + large
    tables.insert(1, summary("All exact cells", both))
    write_results(
        "solvers", "min-sum against the paper's solver", tables, {"small": small, "large": large, "whole": whole}
    )


if __name__ == "__main__":
    main()
