"""How fast the noise of a batch falls with its size k and with the number of samples n, and the exponents.

The variance of the mean embedding, E|μ̂ - μ|², over pools of n samples: exact for uniform draws and for strata, from
batches for balanced and ordered ones, and for kernel thinning (goodpoints; a coreset, not an unbiased batch) its
squared error. Kernels: a smooth one (Gaussian) and a rough one (Laplace, whose kink at z = z' is that of the energy
distance), in the unit square and, for the rough one, on normal data in 20 dimensions. Lines are fitted to logarithms.

    pip install cython && pip install --no-deps --no-build-isolation goodpoints
    python benchmarks/rate.py
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import RESULTS, markdown, write_results
from torch import Tensor

from vardass.analysis.sampler_noise import variance_report
from vardass.kernels import FunctionKernel, Kernel, RBFMixture, as_kernel, fitted_kernel
from vardass.plots import new_figure, save_figure, style_axes
from vardass.samplers import BalancedBatchSampler, OrderedBatchSampler, StratifiedBatchSampler, UniformBatchSampler

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
POOLS = (512, 1024, 2048, 4096, 8192)
FIXED_K, FIXED_N = 64, 8192
FIT_FROM = 16  # smaller batches are not yet on the line
METHODS = ("uniform", "strata", "kernel thinning", "balanced", "ordered")


def laplace(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x - y|), rough at x = y as the energy distance is; features are scaled to a median distance of 1."""
    return torch.cdist(x, y).neg_().exp_()


KERNELS: dict[str, Kernel | str] = {
    "rbf": RBFMixture((1.0,), scale="median"),
    "laplace": FunctionKernel(laplace),
}
SETTINGS = (("square", 2, "rbf"), ("square", 2, "laplace"), ("normal", 20, "laplace"))


def pool(law: str, d: int, n: int, seed: int) -> Tensor:
    """Samples (n, d), scaled to a median distance of about 1."""
    generator = torch.Generator().manual_seed(seed)
    if law == "square":
        return torch.rand(n, d, generator=generator, dtype=torch.float64) / 0.512
    return torch.randn(n, d, generator=generator, dtype=torch.float64) / math.sqrt(2.0 * d)


def samplers(k: int, kernel: Kernel | str, seed: int) -> dict[str, Callable[[int], Any]]:
    return {
        "uniform": lambda n: UniformBatchSampler(n, k, replacement=True, seed=seed),
        "strata": lambda n: StratifiedBatchSampler(n, k, kernel=kernel, seed=seed),
        "balanced": lambda n: BalancedBatchSampler(n, k, kernel=kernel, seed=seed),
        "ordered": lambda n: OrderedBatchSampler(n, k, kernel=kernel, seed=seed),
    }


def measured(x: Tensor, k: int, kernel: Kernel | str, batches: int, seed: int) -> dict[str, float]:
    """The variances of one pool."""
    report = variance_report(samplers(k, kernel, seed), x, kernel=kernel, batches=batches, seed=seed)
    exact = {row.name: row.exact_variance for row in report.rows}
    return {row.name: row.variance.value if exact[row.name] is None else exact[row.name] for row in report.rows}


def thinned(x: Tensor, sizes: tuple[int, ...], kernel: Kernel | str, seed: int) -> dict[int, float]:
    """Squared error of the coreset of each size that goodpoints finds; empty without the package."""
    try:
        from goodpoints import kt
    except ImportError:
        return {}
    matrix = fitted_kernel(as_kernel(kernel), x).square_matrix(x).numpy()
    mean = matrix.mean(1)
    errors = {}
    for k in sizes:
        rows = kt.thin_K(matrix, matrix, round(math.log2(len(x) / k)), seed=seed)
        errors[k] = float(matrix[rows][:, rows].mean() - 2.0 * mean[rows].mean() + mean.mean())
    return errors


def slope(points: dict[int, list[float]]) -> tuple[float, float] | None:
    """Exponent of the line through the logarithms of the means, and its standard error from the scatter about it."""
    pairs = [(math.log(size), math.log(statistics.mean(values))) for size, values in points.items() if values]
    if len(pairs) < 3:
        return None
    x, y = zip(*pairs)
    line = statistics.linear_regression(x, y)
    scatter = sum((v - line.slope * u - line.intercept) ** 2 for u, v in pairs) / (len(pairs) - 2)
    spread = sum((u - statistics.mean(x)) ** 2 for u in x)
    return line.slope, math.sqrt(scatter / spread)


def run(repeats: int, batches: int) -> list[dict[str, Any]]:
    """Values by setting, axis, method and size, one for each pool."""
    results = []
    for law, d, name in SETTINGS:
        for axis, sizes in (("k", SIZES), ("n", POOLS)):
            values: dict[str, dict[int, list[float]]] = {method: {size: [] for size in sizes} for method in METHODS}
            for seed in range(repeats):
                for size in sizes:
                    n, k = (FIXED_N, size) if axis == "k" else (size, FIXED_K)
                    x = pool(law, d, n, seed)
                    for method, value in measured(x, k, KERNELS[name], batches, seed).items():
                        values[method][size].append(value)
                    if axis == "n":
                        for value in thinned(x, (k,), KERNELS[name], seed).values():
                            values["kernel thinning"][size].append(value)
                    print(law, d, name, axis, size, seed, f"{time.process_time():.0f} s", flush=True)
                if axis == "k":
                    for size, value in thinned(pool(law, d, FIXED_N, seed), sizes, KERNELS[name], seed).items():
                        values["kernel thinning"][size].append(value)
            results.append({"data": f"{law}, d = {d}", "kernel": name, "axis": axis, "values": values})
    return results


def title(one: dict[str, Any]) -> str:
    return f"{one['kernel']}, {one['data']}"


def tables(results: list[dict[str, Any]]) -> list[str]:
    written = []
    for axis, text in (("k", f"against k, n = {FIXED_N:,}"), ("n", f"against n, k = {FIXED_K}")):
        of_axis = [one for one in results if one["axis"] == axis]
        rows = []
        for method in METHODS:
            cells = [method]
            for one in of_axis:
                points = {size: v for size, v in one["values"][method].items() if axis == "n" or size >= FIT_FROM}
                line = slope(points)
                cells.append("-" if line is None else f"{line[0]:.2f} ± {line[1]:.2f}")
            rows.append(cells)
        written += [f"## Exponents {text}", markdown(["", *map(title, of_axis)], rows)]
    for one in results:
        rows = []
        for size in one["values"]["uniform"]:
            cells = [str(size)]
            for method in METHODS:
                values = one["values"][method][size]
                error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
                cells.append(f"{statistics.mean(values):.3g} ± {error:.1g}" if values else "-")
            rows.append(cells)
        written += [f"## {title(one)}: variance by {one['axis']}", markdown([one["axis"], *METHODS], rows)]
    return written


def figure(results: list[dict[str, Any]]) -> None:
    """Variance against k, one panel for each setting."""
    panels = [one for one in results if one["axis"] == "k"]
    drawing = new_figure(4.0 * len(panels), 3.6)
    drawing.set_layout_engine("constrained")
    axes = drawing.subplots(1, len(panels))
    for axis, one in zip(axes, panels):
        for method, marker in zip(METHODS, "os^Dv"):
            points = {k: statistics.mean(values) for k, values in one["values"][method].items() if values}
            line = slope({k: [value] for k, value in points.items() if k >= FIT_FROM})
            label = method if line is None else f"{method}, {line[0]:.2f}"
            axis.loglog(points.keys(), points.values(), marker=marker, markersize=4, linewidth=1.2, label=label)
        style_axes(axis)
        axis.set(title=title(one), xlabel="batch size k")
        axis.legend(fontsize=7, title="exponent of k", title_fontsize=7)
    axes[0].set_ylabel("E|μ̂ - μ|²")
    save_figure(drawing, RESULTS / "rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="pools of each size")
    parser.add_argument("--batches", type=int, default=64, help="from each sampler and pool")
    parser.add_argument("--draw", action="store_true", help="only write page and figure from results/rate.json again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.draw:
        sys.argv.remove("--draw")  # the page names the command that measured
        results = json.loads((RESULTS / "rate.json").read_text())
        for one in results:
            one["values"] = {m: {int(size): v for size, v in by.items()} for m, by in one["values"].items()}
    else:
        results = run(options.repeats, options.batches)
    figure(results)
    method = (
        f"E|μ̂ - μ|², mean ± standard error over {options.repeats} pools: exact for *uniform* (with replacement) and "
        f"*strata* (min-sum), over {options.batches} batches of each pool for *balanced* and *ordered*, the squared "
        f"error of one coreset of each pool for *kernel thinning* (goodpoints, target kernel). Exponents: least "
        f"squares on logarithms (k from {FIT_FROM} on), ± from the scatter about the line."
    )
    write_results(
        "rate", "Noise against batch size", [method, "![Variance against k](rate.png)", *tables(results)], results
    )


if __name__ == "__main__":
    main()
