"""How often the intervals of `compare` cover the true MMD² and CORAL, and how often its test rejects equal sets.

The columns of both sets are independent, so the truth is a product of integrals over one column. The normal interval,
the value ± 1.96 standard errors cut at 0, is taken from the same comparisons.

    python benchmarks/interval_coverage.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from common import markdown, write_results
from numpy.typing import NDArray
from scipy import stats

from vardass.analysis.comparison import LOSS_NAMES, compare
from vardass.kernels import RBFMixture

SIZES = ((60, 60), (300, 60), (150, 150))
PERMUTATIONS = 99


class Law(NamedTuple):
    """Distribution of a column."""

    name: str = "normal"  # or "t" with 5 degrees of freedom, or "exponential"
    shift: float = 0.0
    scale: float = 1.0

    def draw(self, n: int, d: int, generator: np.random.Generator) -> NDArray[np.float64]:
        if self.name == "t":
            z = generator.standard_t(5, (n, d))
        else:
            z = generator.standard_normal((n, d)) if self.name == "normal" else generator.standard_exponential((n, d))
        return self.shift + self.scale * z

    @property
    def exact(self) -> Any:
        kinds = {"normal": stats.norm, "exponential": stats.expon}
        options = {"loc": self.shift, "scale": self.scale}
        return stats.t(5, **options) if self.name == "t" else kinds[self.name](**options)

    def nodes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Points and weights of a quadrature, dense in the tails."""
        points, weights = np.polynomial.legendre.leggauss(200)
        angle = (points + 1.0) * np.pi / 4.0
        return self.exact.ppf(np.sin(angle) ** 2), weights * np.pi / 2.0 * np.sin(angle) * np.cos(angle)


CASES = {
    "equal": (Law(), Law()),
    "shift": (Law(), Law(shift=0.5)),
    "scale": (Law(), Law(scale=1.4)),
    "small shift and scale": (Law(), Law(shift=0.12, scale=1.1)),
    "heavy tails, scale": (Law("t"), Law("t", scale=1.5)),
    "skewed, shift and scale": (Law("exponential"), Law("exponential", shift=0.4, scale=1.3)),
}


def truth(first: Law, second: Law, d: int, rates: list[float]) -> dict[str, float]:
    """MMD² and CORAL of the two laws."""

    def mean(a: Law, b: Law, rate: float) -> float:
        (x, of_x), (y, of_y) = a.nodes(), b.nodes()
        return float(of_x @ np.exp(-rate * (x[:, None] - y) ** 2) @ of_y) ** d

    pairs = ((first, first, 1.0), (second, second, 1.0), (first, second, -2.0))
    mmd = sum(sign * mean(a, b, rate) for rate in rates for a, b, sign in pairs)
    return {"mmd": mmd, "coral": d * float(first.exact.var() - second.exact.var()) ** 2}


def cell(d: int, case: str, sizes: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    """One entry for each loss."""
    first, second = CASES[case]
    kernel = RBFMixture((0.1, 1.0), scale=2.0 * d)
    true = truth(first, second, d, kernel.rates)
    counts = {loss: {"covered": 0, "normal": 0, "rejected": 0} for loss in true}
    widths: dict[str, list[float]] = {loss: [] for loss in true}
    signal: dict[str, list[float]] = {loss: [] for loss in true}
    for seed in range(repeats):
        generator = np.random.default_rng([seed, d, *sizes, list(CASES).index(case)])
        x, y = (law.draw(n, d, generator) for law, n in zip((first, second), sizes))
        comparison = compare(x, y, kernel=kernel, permutations=PERMUTATIONS if case == "equal" else 0, seed=seed)
        for loss, value in true.items():
            result = comparison[loss]
            low, high = (max(0.0, result.value + sign * 1.96 * result.stderr) for sign in (-1.0, 1.0))
            counts[loss]["covered"] += result.low <= value + 1e-12 and value <= result.high + 1e-12
            counts[loss]["normal"] += low <= value + 1e-12 and value <= high + 1e-12
            counts[loss]["rejected"] += result.p_value is not None and result.p_value <= 0.05
            widths[loss].append((result.high - result.low) / max(high - low, 1e-12))
            signal[loss].append(value / result.stderr)
    return [
        {
            "loss": loss,
            "d": d,
            "case": case,
            "n": sizes[0],
            "m": sizes[1],
            "signal": statistics.median(signal[loss]),
            "width": statistics.median(widths[loss]),
            **{name: count / repeats for name, count in counts[loss].items()},
        }
        for loss in true
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=400, help="comparisons in each cell")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    cells = []
    for d in (2, 20):
        for case in CASES:
            for sizes in SIZES:
                cells += cell(d, case, sizes, repeats)
            print(d, case, f"{time.process_time():.0f} s", flush=True)
    rows = []
    for one in cells:
        row = [LOSS_NAMES[one["loss"]], one["case"], str(one["d"]), f"{one['n']} + {one['m']}", f"{one['signal']:.1f}"]
        row += [f"{one['normal']:.3f}", f"{one['covered']:.3f}", f"{one['width']:.2f}"]
        rows.append([*row, f"{one['rejected']:.3f}" if one["case"] == "equal" else ""])
    header = ["", "difference", "d", "rows", "truth / σ", "normal", "covers", "width", "rejects equal sets"]
    differ = [one for one in cells if one["case"] != "equal"]
    error = (0.95 * 0.05 / repeats) ** 0.5
    rejected = [one["rejected"] for one in cells if one["case"] == "equal"]
    text = (
        f"Intervals at 95 %, {repeats} comparisons in each row, so an entry near 0.95 has a standard error of "
        f"{error:.3f}. *normal* is the coverage of value ± 1.96 σ cut at 0, *covers* that of the interval of "
        f"`compare`, *width* its median width over that of the normal one, and *rejects equal sets* the share of "
        f"permutation tests at 5 % ({PERMUTATIONS} permutations) that find a difference where there is none."
    )
    least = min(differ, key=lambda one: one["covered"])
    summary = (
        f"With a difference: normal {min(one['normal'] for one in differ):.3f} to "
        f"{max(one['normal'] for one in differ):.3f}, `compare` {least['covered']:.3f} to "
        f"{max(one['covered'] for one in differ):.3f}; the least is {LOSS_NAMES[least['loss']]}, {least['case']}, "
        f"d = {least['d']}, {least['n']} + {least['m']} rows. Type-I error {min(rejected):.3f} to {max(rejected):.3f}, "
        f"{statistics.mean(rejected):.3f} in the mean."
    )
    write_results("coverage", "Coverage of the intervals of `compare`", [text, summary, markdown(header, rows)], cells)


if __name__ == "__main__":
    main()
