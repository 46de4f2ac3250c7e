"""Figure 4: variance of the estimator against the batch size, for the paper's solver and its three ablations.

The paper takes 1,000 feature embeddings of Humpbacks and an RBF kernel with unit bandwidth. Here they are features of
a small network trained on the smart-watch data, in the unit of their median distance. `batch_size_figure` makes the
same figure of any features; the demo shows it for inputs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardass.bounds import nearest_neighbour_bound
from vardass.figures.base import Cell, Claim, FigureResult
from vardass.figures.network_features import Gram, small_trainer, source_features
from vardass.kernels import RBFMixture
from vardass.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, dress
from vardass.samplers import BalancedBatchSampler, OrderedBatchSampler
from vardass.samplers.base import derive_seed
from vardass.solvers import stratify
from vardass.validate import Progress, as_generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["KERNEL", "OURS", "PAPER", "PLANNED", "SOLVERS", "Point", "batch_size_figure", "figure4"]

KERNEL = RBFMixture(gammas=(1.0,), scale="median")
"""Unit bandwidth, for distances in the unit of their median: raw ones are far above 1, where exp(-d²) is 0."""

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


@dataclass(frozen=True)
class Point:
    """Var(μ̂) of one way to draw at one batch size; ``stderr`` is 0 where the variance is exact."""

    k: int
    method: str
    variance: float
    relative_to_uniform: float
    stderr: float = 0.0
    seconds: float = 0.0

    @property
    def fold(self) -> float:
        """How many times less variance than uniform draws."""
        return 1.0 / max(self.relative_to_uniform, 1e-300)


def figure4(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Measure Var(μ̂) against k for uniform draws, k-means, kernel k-means and Algorithm 1, and for ours.

    Parameters
    ----------
    seed : int
        Of the network, of the samples, and the first of the solvers' seeds.
    quick : bool
        160 features and k up to 32 instead of 1,000 and 256.
    progress : callable
        Called as ``progress(fraction, message)``.
    """
    n, steps, repeats, batches = (160, 30, 1, 64) if quick else (1000, 1000, 3, 1024)
    ks = (4, 8, 32) if quick else (2, 4, 8, 16, 32, 64, 128, 256)
    progress(0.0, "features")
    return batch_size_figure(
        trained_features(n, seed=seed, steps=steps),
        ks,
        seeds=range(seed, seed + repeats),
        batches=batches,
        caption=(
            f"{n:,} features of a small network after {steps:,} steps of MMD on the smart-watch data (source: left "
            "wrist, all people; the paper's are features of whale calls), Gaussian kernel with unit bandwidth in the "
            f"unit of the median distance. Strata: exact variance, mean over {repeats} of the solver's seeds; ordered "
            f"and balanced: measured on {batches:,} batches."
        ),
        settings={"seed": seed, "quick": quick},
        progress=progress,
    )


def trained_features(n: int, *, seed: int, steps: int) -> Tensor:
    """Features (n, d) of samples of the left wrist, drawn from those that a small network was trained on."""
    trainer = small_trainer("left-A+left-B->right-A", seed=seed, steps=steps, lr=1e-3)
    trainer.run()
    z = source_features(trainer)
    return z[torch.randperm(len(z), generator=as_generator(derive_seed(seed, 4)))[:n]]


def batch_size_figure(
    features: Tensor,
    ks: Sequence[int],
    *,
    seeds: Sequence[int],
    batches: int = 0,
    caption: str,
    settings: dict[str, Any],
    progress: Progress | None = None,
) -> FigureResult:
    """Figure 4 of any features.

    Parameters
    ----------
    features : Tensor of shape (n, d)
        All samples of one domain.
    ks : sequence of int
        Batch sizes.
    seeds : sequence of int
        The solvers' variances are means over these.
    batches : int
        Batches of each of `PLANNED` to measure; 0 leaves these out.
    caption, settings
        What the features are.
    progress : callable, optional
        Called as ``progress(fraction, message)``.

    Returns
    -------
    FigureResult
        Columns ``k``, ``method``, ``variance``, ``relative_to_uniform``, ``stderr``, which is 0 where the variance is
        exact, and ``seconds`` of one solution.
    """
    report = progress or (lambda share, message: None)
    kernel = KERNEL.fit(features)
    gram = Gram(features, kernel)
    n = len(features)
    points = []
    for place, k in enumerate(ks):
        uniform = gram.uniform(k)
        points.append(Point(k, "uniform", uniform, 1.0))
        points.append(Point(k, _NO_REPEATS, uniform * (n - k) / (n - 1), (n - k) / (n - 1)))
        for name, solver in SOLVERS.items():
            report(place / len(ks), f"{name}, k = {k}")
            clock = time.perf_counter()
            found = [stratify(features, k, kernel=kernel, solver=solver, seed=seed) for seed in seeds]
            seconds = (time.perf_counter() - clock) / len(seeds)
            variance = sum(strata.variance for strata in found) / len(seeds)
            points.append(Point(k, name, variance, variance / uniform, seconds=seconds))
        for name, kind in PLANNED.items() if batches else ():
            report((place + 0.6) / len(ks), f"{name}, k = {k}")
            clock = time.perf_counter()
            sampler = kind(n, k, kernel=kernel, seed=seeds[0])
            sampler.refresh(features)
            seconds = time.perf_counter() - clock
            chunk = sampler.sample_batches(batches)
            weights = torch.full((k,), 1.0 / k) if chunk.weights is None else chunk.weights
            errors = gram.drawn(chunk.rows, weights)
            variance, stderr = float(errors.mean()), float(errors.std()) / len(errors) ** 0.5
            points.append(Point(k, name, variance, variance / uniform, stderr, seconds))
        bound = nearest_neighbour_bound(features, k, kernel=kernel, rows=n).variance
        points.append(Point(k, _BOUND, bound, bound / uniform))
    rows: list[tuple[Cell, ...]] = [astuple(point) for point in points]
    return FigureResult(
        number=4,
        title="variance of the estimator against batch size",
        caption=caption,
        columns=tuple(Point.__annotations__),
        rows=rows,
        claims=claims(points),
        draw=lambda figure: _draw(figure, points),
        size=(11.5, 5.4),
        settings={**settings, "n": len(features), "sizes": ks, "solver_runs": len(seeds), "batches": batches},
    )


def of_method(points: Sequence[Point], method: str) -> list[Point]:
    """The points of one method, by batch size."""
    return [point for point in points if point.method == method]


def claims(points: Sequence[Point]) -> tuple[Claim, ...]:
    """What is said of the figure, and whether ``points`` bear it out."""
    plain, kernelised, paper = (of_method(points, name) for name in list(SOLVERS)[:3])
    sizes = [point.k for point in paper]
    gains = [a.variance / b.variance for a, b in zip(plain, kernelised, strict=True)]
    half = len(sizes) // 2
    better = [k for k, gain in zip(sizes[:half], gains, strict=False) if gain > 1.0 + _SAME]
    lowest = [
        p.k for p, *rest in zip(paper, plain, kernelised, strict=True) if p.variance <= min(r.variance for r in rest)
    ]
    folds = ", ".join(f"{point.fold:.3g} (k = {point.k})" for point in paper)
    shown = ", ".join(f"{gain:.2f} (k = {k})" for gain, k in zip(gains, sizes, strict=True))
    found = [
        Claim(
            "the gap between uniform and stratified sampling increases with k",
            all(a.fold < b.fold for a, b in pairwise(paper)),
            f"Algorithm 1 has {folds} times less variance",
        ),
        Claim(
            "Algorithm 1 has less variance than its three ablations",
            len(lowest) == len(sizes) and all(point.fold > 1.0 for point in paper),
            f"lowest of the four at {len(lowest)} of {len(sizes)} batch sizes",
            source="ours",
        ),
        Claim(
            "kernel k-means has less variance than linear k-means for small k",
            2 * len(better) > half,
            f"more than {100 * _SAME:.0f} % less at {len(better)} of the {half} smaller batch sizes; variance of "
            f"linear over kernel k-means {shown}",
        ),
        Claim(
            "kernel and linear k-means more or less overlap for large k",
            abs(gains[-1] - 1.0) <= _SAME,
            f"variance of linear over kernel k-means {gains[-1]:.2f} for k = {sizes[-1]}",
        ),
    ]
    if _PAPERS_K in sizes:
        fold, most = (of_method(points, name)[sizes.index(_PAPERS_K)].fold for name in (PAPER, _BOUND))
        low, high = _PAPERS_FOLD / 2.0, _PAPERS_FOLD * 2.0
        found.append(
            Claim(
                "the reduction in variance is around 50-fold for k = 256",
                low <= fold <= high,
                f"{fold:.3g}-fold ({low:.0f} to {high:.0f} would count as around 50); no partition of these features "
                f"can reach more than {most:.3g}-fold",
            )
        )
    return tuple(found)


def _draw(figure: Figure, points: Sequence[Point]) -> None:
    absolute, relative = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.0, 1.25)})
    _draw_curves(absolute, points, "variance")
    _draw_curves(relative, points, "relative_to_uniform")
    absolute.set_ylabel("Var(μ̂), variance of the minibatch mean embedding")
    relative.set_ylabel("Var(μ̂) relative to uniform draws")
    relative.yaxis.set_major_formatter("{x:g}")
    relative.annotate(
        "out of reach of strata\nwith independent draws",
        (points[0].k * 1.1, relative.get_ylim()[0] * 1.15),
        color=GREY,
        fontsize=9.5,
        va="bottom",
    )
    figure.tight_layout(rect=(0.0, 0.0, 0.83, 1.0), w_pad=2.0)
    figure.legend(*relative.get_legend_handles_labels(), loc="center right", fontsize=10, frameon=False)


def _draw_curves(axes: Axes, points: Sequence[Point], field: str) -> None:
    """Every method against k, and a shaded region below the bound."""
    for name, (colour, marker, dashes) in _LOOKS.items():
        if found := of_method(points, name):
            axes.plot(
                [point.k for point in found],
                [getattr(point, field) for point in found],
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
    bound = of_method(points, _BOUND)
    sizes = [point.k for point in bound]
    floor = [max(getattr(point, field), low) for point in bound]
    axes.fill_between(sizes, floor, low, color="#DDDDDD", linewidth=0, zorder=0)
    axes.set_ylim(low, high)
    axes.set_xticks(sizes, [str(k) for k in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size k")
    dress(axes)
