"""Figure 4: variance of the estimator against the batch size, for the paper's solver and its three ablations.

The paper takes 1,000 feature embeddings of Humpbacks and an RBF kernel with unit bandwidth. Here they are features of
a small network trained on the smart-watch data, in the unit of their median distance; beside it stands the unit
bandwidth on the distances as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vardass.adapt.config import RunConfig
from vardass.adapt.trainer import Trainer
from vardass.bounds import nearest_neighbour_bound
from vardass.data import load_task, split_task
from vardass.kernels import RBFMixture
from vardass.paper.figures import Claim, FigureResult, Value
from vardass.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, style_axes
from vardass.refresh import extract_features
from vardass.samplers import BalancedBatchSampler, OrderedBatchSampler
from vardass.samplers.base import MinibatchSampler, derive_seed
from vardass.solvers import stratify
from vardass.validate import Progress, as_generator
from vardass.view import ExactView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["KERNEL", "OURS", "PAPER", "PLANNED", "RAW", "SOLVERS", "Point", "figure4"]

KERNEL = RBFMixture(gammas=(1.0,), scale="median")
"""Unit bandwidth, for distances in the unit of their median: raw ones are far above 1, where exp(-d²) is 0."""
RAW = RBFMixture(gammas=(1.0,))
"""The paper's unit bandwidth, for distances as they are."""

PAPER, OURS = "VaRDASS (paper)", "min-sum (ours)"
SOLVERS = {"k-means": "kmeans", "kernel k-means": "kernel-kmeans", PAPER: "dynamic-kmeans", OURS: "min-sum"}
"""Solvers of the strata, by the names of their curves."""
PLANNED = {"ordered (ours)": OrderedBatchSampler, "balanced (ours)": BalancedBatchSampler}
"""Samplers whose batches are planned together, so that their variance has no closed form."""

_NO_REPEATS, _BOUND = "uniform, no repeats", "lower bound"
_LOOKS = {
    "uniform": (BLACK, "", "--"),
    _NO_REPEATS: (GREY, "", ":"),
    "k-means": (ORANGE, "s", "-"),
    "kernel k-means": (GREEN, "D", "-"),
    PAPER: (PURPLE, "^", "-"),
    OURS: (BLUE, "o", "-"),
    "ordered (ours)": (VERMILION, "v", "-"),
    "balanced (ours)": (SKY, "P", "-"),
}
_PAPERS_K, _PAPERS_FOLD = 256, 50.0
_SAME = 0.05  # variances that differ by less overlap in a plot of decades
_MOST = 0.75
"""Share of the seeds in which something must show: 15 of 20, where a sign test has p = 0.04."""


@dataclass(frozen=True)
class Point:
    """Var(μ̂) of one way to draw at one batch size."""

    k: int  # batch size
    method: str  # name of the way
    variances: tuple[float, ...]  # one for each seed; a single one where nothing is random
    uniform: float  # Var(μ̂) of k uniform draws
    unit: str = "median"  # unit of distances, in which the bandwidth is 1

    @property
    def folds(self) -> list[float]:
        """How many times less variance than uniform draws, by seed."""
        return [self.uniform / max(variance, 1e-300) for variance in self.variances]

    def row(self) -> dict[str, Value]:
        """What is drawn: the mean, its standard error and the band of the middle 80 % of seeds."""
        mean = fmean(self.variances)
        low, high = np.quantile(self.variances, [0.1, 0.9]).tolist()
        return {
            "unit": self.unit,
            "k": self.k,
            "method": self.method,
            "variance": mean,
            "relative_to_uniform": mean / self.uniform,
            "stderr": stderr(self.variances),
            "low": low,
            "high": high,
            "seeds": len(self.variances),
        }


def stderr(values: Sequence[float]) -> float:
    """Standard error of the mean, from the deviation with n - 1; 0 for a single value, which is exact."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def figure4(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Measure Var(μ̂) against k for uniform draws, k-means, kernel k-means and Algorithm 1, and for ours."""
    n, steps, repeats, batches = (160, 30, 3, 32) if quick else (1000, 1000, 20, 64)
    ks = (4, 8, 32) if quick else (2, 4, 8, 16, 32, 64, 128, 256)
    progress(0.0, "features")
    features = trained_features(n, seed=seed, steps=steps)
    seeds = range(seed, seed + repeats)

    def halves(start: float) -> Progress:
        return lambda share, message: progress(start + share / 2, message)

    points = measure(features, ks, seeds=seeds, batches=batches, progress=halves(0.0))
    raw = measure(features, ks, seeds=seeds, batches=batches, progress=halves(0.5), unit="raw")
    rows = [point.row() for point in (*points, *raw)]
    return FigureResult(
        number=4,
        title="variance of the estimator against batch size",
        caption=(
            f"{n:,} features of a small network after {steps:,} steps of MMD on the smart-watch data (source: left "
            "wrist, all people; the paper's are features of whale calls), Gaussian kernel with unit bandwidth in the "
            "unit of the median distance (left and middle), and on distances as they are, whose median is "
            f"{float(torch.pdist(features).median()):.3g} (right). Means over {repeats} seeds of the solvers, bands "
            "from 10 to 90 % of them; the variance of each is exact, of ordered and balanced measured on "
            f"{batches} batches."
        ),
        columns=tuple(rows[0]),
        rows=[tuple(row.values()) for row in rows],
        claims=(*claims(points), raw_claim(points, raw)),
        draw=lambda figure: _draw(figure, points, raw),
        size=(15.0, 5.4),
        settings={"seed": seed, "quick": quick, "n": n, "sizes": ks, "solver_seeds": repeats, "batches": batches},
    )


def trained_features(n: int, *, seed: int, steps: int) -> Tensor:
    """Features (n, d) of samples of the left wrist, drawn from those that a small network was trained on."""
    trainer = small_trainer("left-A+left-B->right-A", seed=seed, steps=steps, lr=1e-3)
    trainer.run()
    z = source_features(trainer)
    return z[torch.randperm(len(z), generator=as_generator(derive_seed(seed, 4)))[:n]]


def measure(
    features: Tensor, ks: Sequence[int], *, seeds: Sequence[int], batches: int, progress: Progress, unit: str = "median"
) -> list[Point]:
    """Var(μ̂) of every way to draw, for each k."""
    kernel = {"median": KERNEL, "raw": RAW}[unit].fit(features)
    view, n = ExactView(kernel.matrix(features).double()), len(features)
    points: list[Point] = []
    for place, k in enumerate(ks):
        progress(place / len(ks), f"k = {k}")
        uniform = view.uniform_variance(k)

        def add(method: str, variances: Sequence[float], k: int = k, uniform: float = uniform) -> None:
            points.append(Point(k, method, tuple(variances), uniform, unit))

        add("uniform", [uniform])
        add(_NO_REPEATS, [uniform * (n - k) / (n - 1)])
        for name, solver in SOLVERS.items():
            add(name, [stratify(features, k, kernel=kernel, solver=solver, seed=seed).variance for seed in seeds])
        for name, kind in PLANNED.items():
            plans = [_plan(kind(n, k, kernel=kernel, seed=seed), features, batches) for seed in seeds]
            add(name, [float(view.batch_errors(*plan).mean()) for plan in plans])
        add(_BOUND, [nearest_neighbour_bound(features, k, kernel=kernel, rows=n).variance])
    return points


def _plan(sampler: MinibatchSampler, features: Tensor, batches: int) -> tuple[Tensor, Tensor]:
    """Rows (batches, k) and weights (k,) of a sampler's first batches."""
    sampler.refresh(features)
    chunk = sampler.sample_batches(batches)
    k = chunk.rows.shape[1]
    return chunk.rows, torch.full((k,), 1.0 / k) if chunk.weights is None else chunk.weights


def of_method(points: Sequence[Point], method: str) -> list[Point]:
    """The points of one method, by batch size."""
    return [point for point in points if point.method == method]


def claims(points: Sequence[Point]) -> tuple[Claim, ...]:
    """What is said of the figure, and in how many seeds ``points`` bear it out."""
    curves = {name: of_method(points, name) for name in ("k-means", "kernel k-means", PAPER)}
    plain, kernelised, paper = curves.values()
    sizes, seeds = [point.k for point in paper], len(paper[0].variances)
    rising = {
        name: min(sum(b > a for a, b in zip(now.folds, after.folds, strict=True)) for now, after in pairwise(curve))
        for name, curve in curves.items()
    }
    lowest = [
        sum(p <= min(rest) for p, *rest in zip(*(point.variances for point in at_k), strict=True))
        for at_k in zip(paper, plain, kernelised, strict=True)
    ]
    ratios = [
        [a / b for a, b in zip(x.variances, y.variances, strict=True)] for x, y in zip(plain, kernelised, strict=True)
    ]
    half = len(sizes) // 2
    better = [k for k, ratio in zip(sizes[:half], ratios, strict=False) if _most(r > 1.0 + _SAME for r in ratio)]
    shown = ", ".join(f"{_with_error(ratio)} (k = {k})" for ratio, k in zip(ratios, sizes, strict=True))
    # of means: single runs scatter by more than this, so that even the same solver twice would not pass run by run
    overlap = fmean(plain[-1].variances) / fmean(kernelised[-1].variances)
    found = [
        *(
            Claim(
                f"the gap between uniform and stratified sampling increases with k, for {name}",
                count >= _MOST * seeds,
                f"from each k to the next in at least {count} of {seeds} seeds; times less variance: "
                + ", ".join(f"{_with_error(point.folds)} (k = {point.k})" for point in curves[name]),
            )
            for name, count in rising.items()
        ),
        Claim(
            "Algorithm 1 has less variance than its three ablations",
            min(lowest) >= _MOST * seeds and all(min(point.folds) > 1.0 for point in paper),
            f"lowest of the four in at least {min(lowest)} of {seeds} seeds at every k",
            source="ours",
        ),
        Claim(
            "kernel k-means has less variance than linear k-means for small k",
            2 * len(better) > half,
            f"more than {100 * _SAME:.0f} % less in {100 * _MOST:.0f} % of the seeds at {len(better)} of the {half} "
            f"smaller batch sizes; variance of linear over kernel k-means {shown}",
        ),
        Claim(
            f"kernel and linear k-means more or less overlap for large k, taken as means within {100 * _SAME:.0f} %",
            abs(overlap - 1.0) <= _SAME,
            f"mean variance of linear over that of kernel k-means {overlap:.3f} for k = {sizes[-1]}, standard "
            f"errors {_error_percent(plain[-1])} and {_error_percent(kernelised[-1])}",
        ),
    ]
    if _PAPERS_K in sizes:
        folds, most = (of_method(points, name)[sizes.index(_PAPERS_K)].folds for name in (PAPER, _BOUND))
        low, high = _PAPERS_FOLD / 2.0, _PAPERS_FOLD * 2.0
        found.append(
            Claim(
                "the reduction in variance is around 50-fold for k = 256",
                _most(low <= fold <= high for fold in folds),
                f"{_with_error(folds)}-fold ({low:.0f} to {high:.0f} would count as around 50); no partition of these "
                f"features can reach more than {most[0]:.3g}-fold",
            )
        )
    return tuple(found)


def raw_claim(points: Sequence[Point], raw: Sequence[Point]) -> Claim:
    """Whether strata gain less where the bandwidth is 1 in the unit of the features themselves."""
    median, unit = (of_method(found, PAPER) for found in (points, raw))
    most = of_method(raw, _BOUND)
    return Claim(
        "unit bandwidth on distances as they are leaves strata less to gain than in the unit of the median distance",
        all(fmean(a.folds) < fmean(b.folds) for a, b in zip(unit, median, strict=True)),
        "times less variance of VaRDASS: "
        + ", ".join(
            f"{_with_error(a.folds)} against {fmean(b.folds):.3g}, no partition above {c.folds[0]:.3g} (k = {a.k})"
            for a, b, c in zip(unit, median, most, strict=True)
        ),
        source="ours",
    )


def _most(seeds: Iterable[bool]) -> bool:
    return fmean(seeds) >= _MOST


def _error_percent(point: Point) -> str:
    return f"{100.0 * stderr(point.variances) / fmean(point.variances):.1f} %"


def _with_error(values: Sequence[float]) -> str:
    """Mean over seeds and its standard error."""
    return f"{fmean(values):.3g} ± {stderr(values):.1g}"


def _draw(figure: Figure, points: Sequence[Point], raw: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator

    absolute, relative, unscaled = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.0, 1.15, 1.15)})
    _draw_curves(absolute, points, relative=False)
    _draw_curves(relative, points, relative=True)
    _draw_curves(unscaled, raw, relative=True)
    absolute.set_title("bandwidth: the median distance", fontsize=10.5)
    relative.set_title("bandwidth: the median distance", fontsize=10.5)
    unscaled.set_title("bandwidth: 1, as in the paper", fontsize=10.5)
    for axes in (relative, unscaled):
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))  # the right one may span less than a decade
        axes.yaxis.set_major_formatter("{x:g}")
    absolute.set_ylabel("Var(μ̂), variance of the minibatch mean embedding")
    relative.set_ylabel("Var(μ̂) relative to uniform draws")
    relative.annotate(
        "out of reach of strata\nwith independent draws",
        (points[0].k * 1.1, relative.get_ylim()[0] * 1.15),
        color=GREY,
        fontsize=9.5,
        va="bottom",
    )
    figure.tight_layout(rect=(0.0, 0.0, 0.87, 1.0), w_pad=2.0)
    figure.legend(*relative.get_legend_handles_labels(), loc="center right", fontsize=10, frameon=False)


def _draw_curves(axes: Axes, points: Sequence[Point], *, relative: bool) -> None:
    """Every method against k with its band, and a shaded region below the bound."""

    def curve(name: str, column: str) -> list[float]:
        found = of_method(points, name)
        return [float(point.row()[column]) / (point.uniform if relative else 1.0) for point in found]

    sizes = [point.k for point in of_method(points, _BOUND)]
    for name, (colour, marker, dashes) in _LOOKS.items():
        if not of_method(points, name):
            continue
        axes.fill_between(sizes, curve(name, "low"), curve(name, "high"), color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            sizes,
            curve(name, "variance"),
            color=colour,
            marker=marker,
            linestyle=dashes,
            linewidth=1.7,
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.6,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    floor = [max(value, low) for value in curve(_BOUND, "variance")]
    axes.fill_between(sizes, floor, low, color="#DDDDDD", linewidth=0, zorder=0)
    axes.set_ylim(low, high)
    axes.set_xticks(sizes, [str(k) for k in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size k")
    style_axes(axes)


# --- shared with figure 5: features of a small network on the watch data ---


def small_trainer(
    task: str, *, seed: int, steps: int, lr: float, sampler: str = "uniform", period: int = 100
) -> Trainer:
    """A trainer of the default small network with MMD and k = 32, in memory."""
    config = RunConfig(
        algorithm="mmd",
        sampler=sampler,
        steps=steps,
        batch_size=32,
        lr=lr,
        refresh_every=period,
        feature_source="full",
        eval_every=steps,
        device="cpu",
        seed=seed,
    )
    return Trainer(config, split_task(load_task("watch", task), seed=seed))


def source_features(trainer: Trainer) -> Tensor:
    """Features (n, d) of all source samples that the run trains on, as the network is now."""
    data = trainer.streams["source"].inputs.data
    return extract_features(trainer.algorithm, data, forward=lambda model, x: model.features(x))
