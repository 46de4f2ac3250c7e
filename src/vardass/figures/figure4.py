"""Figure 4: variance of the estimator against the batch size, for the paper's solver and its three ablations.

The paper takes 1,000 feature embeddings of Humpbacks and an RBF kernel with unit bandwidth. Here they are features of
a small network trained on the smart-watch data, in the unit of their median distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vardass.figures.base import GREY, Cell, Claim, FigureResult, Progress, dress
from vardass.figures.batch_sizes import COUPLED, METHODS, Point, measure, measure_coupled, of_method
from vardass.figures.small_network import small_trainer, source_features
from vardass.figures.threads import one_thread
from vardass.samplers.base import derive_seed
from vardass.validate import as_generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure4", "trained_features"]

_PAPER = METHODS[2].name
_NO_REPEATS, _BOUND = "uniform, no repeats", "lower bound"
_PAPERS_K, _PAPERS_FOLD = 256, 50.0
_SAME = 0.05  # variances that differ by less overlap in a plot of decades


def trained_features(n: int, *, seed: int, steps: int) -> Tensor:
    """Features (n, d) of samples of the left wrist, drawn from those that a small network was trained on."""
    trainer = small_trainer("left-A+left-B->right-A", seed=seed, steps=steps, lr=1e-3)
    trainer.run()
    z = source_features(trainer)
    return z[torch.randperm(len(z), generator=as_generator(derive_seed(seed, 4)))[:n]]


def figure4(*, seed: int = 0, quick: bool = False, progress: Progress | None = None) -> FigureResult:
    """Measure Var(μ̂) against k for uniform draws, k-means, kernel k-means and Algorithm 1, and for ours.

    Parameters
    ----------
    seed : int
        Of the network, of the samples, and the first of the solvers' seeds.
    quick : bool
        160 features and k up to 32 instead of 1,000 and 256.
    progress : callable, optional
        Called as ``progress(fraction, message)``.

    Returns
    -------
    FigureResult
        Columns ``k``, ``method``, ``variance``, ``relative_to_uniform`` and ``stderr``, which is 0 where the
        variance is exact.
    """
    n, steps, repeats, batches = (160, 30, 1, 64) if quick else (1000, 1000, 3, 1024)
    ks = (4, 8, 32) if quick else (2, 4, 8, 16, 32, 64, 128, 256)

    def report(share: float, message: str) -> None:
        if progress is not None:
            progress(share, f"figure 4, {message}")

    with one_thread():
        report(0.0, "features")
        features = trained_features(n, seed=seed, steps=steps)
        seeds = range(seed, seed + repeats)
        points, bounds = measure(features, ks, seeds=seeds, progress=lambda share, text: report(0.6 * share, text))
        for place, k in enumerate(ks):
            report(0.6 + 0.4 * place / len(ks), f"planned batches, k = {k}")
            points += measure_coupled(features, k, seed=seed, batches=batches)
    for point in of_method(points, "uniform"):
        share = (n - point.k) / (n - 1)
        points.append(Point(point.k, _NO_REPEATS, share * point.variance, share, 0.0))
    for uniform, bound in zip(of_method(points, "uniform"), bounds, strict=True):
        points.append(Point(uniform.k, _BOUND, bound, bound / uniform.variance, 0.0))
    rows: list[tuple[Cell, ...]] = [
        (point.k, point.method, point.variance, point.relative, point.stderr)
        for point in sorted(points, key=lambda point: point.k)
    ]
    return FigureResult(
        number=4,
        title="variance of the estimator against batch size",
        columns=("k", "method", "variance", "relative_to_uniform", "stderr"),
        rows=rows,
        sentences=_sentences(points, n, steps, repeats, batches),
        claims=_claims(points),
        draw=lambda figure: _draw(figure, points),
        size=(11.5, 5.4),
        settings={"seed": seed, "quick": quick, "n": n, "sizes": ks, "solver_runs": repeats, "batches": batches},
    )


def _folds(points: Sequence[Point], method: str) -> list[float]:
    """How many times less variance than uniform draws, by k."""
    return [1.0 / max(point.relative, 1e-300) for point in of_method(points, method)]


def _fold_text(points: Sequence[Point], method: str) -> str:
    found = of_method(points, method)
    return ", ".join(f"{1.0 / max(p.relative, 1e-300):.3g} (k = {p.k})" for p in found)


def _sentences(points: Sequence[Point], n: int, steps: int, repeats: int, batches: int) -> tuple[str, ...]:
    names = [method.name for method in METHODS]
    ours, paper = of_method(points, names[-1]), of_method(points, _PAPER)
    ratios = [100.0 * a.variance / b.variance for a, b in zip(ours, paper, strict=True)]
    last = paper[-1].k
    bare = of_method(points, _NO_REPEATS)[-1].relative
    visited = last * (n // last)
    left_out = 100.0 * (n - visited) / (n - 1) * last / visited
    return (
        f"{n:,} features of a small network after {steps:,} steps of MMD on the smart-watch data (source: left wrist, "
        "all people), Gaussian kernel with unit bandwidth in the unit of the median distance. The paper's embeddings "
        "are features of a trained network too, of whale calls. Strata: exact variance, mean over "
        f"{repeats} of the solver's seeds; ordered and balanced: measured on {batches:,} batches.",
        *(
            f"{name}: times less variance than uniform draws: {_fold_text(points, name)}."
            for name in (*names, *COUPLED)
        ),
        f"min-sum strata have {min(ratios):.1f} to {max(ratios):.1f} % of the variance of the paper's.",
        f"Uniform draws without repeats, which cost nothing, have {100.0 * bare:.0f} % of the variance of those with "
        f"repeats at k = {last}. There a balanced epoch has {n // last} batches and leaves out {n - visited} "
        f"samples at random, which alone is {left_out:.1f} % of the variance of uniform draws.",
    )


def _claims(points: Sequence[Point]) -> tuple[Claim, ...]:
    plain, kernelised, paper = (of_method(points, method.name) for method in METHODS[:3])
    sizes = [point.k for point in paper]
    folds = _folds(points, _PAPER)
    gains = [a.variance / b.variance for a, b in zip(plain, kernelised, strict=True)]
    half = len(sizes) // 2
    better = [k for k, gain in zip(sizes[:half], gains, strict=False) if gain > 1.0 + _SAME]
    shown = ", ".join(f"{gain:.2f} (k = {k})" for gain, k in zip(gains, sizes, strict=True))
    lowest = [
        p.k for p, *rest in zip(paper, plain, kernelised, strict=True) if p.variance <= min(r.variance for r in rest)
    ]
    claims = [
        Claim(
            "the gap between uniform and stratified sampling increases with k",
            all(a < b for a, b in pairwise(folds)),
            f"Algorithm 1 has {_fold_text(points, _PAPER)} times less variance",
        ),
        Claim(
            "Algorithm 1 has less variance than its three ablations",
            len(lowest) == len(sizes) and min(folds) > 1.0,
            f"lowest of the four at {len(lowest)} of {len(sizes)} batch sizes",
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
        place = sizes.index(_PAPERS_K)
        near = _PAPERS_FOLD / 2.0, _PAPERS_FOLD * 2.0
        claims.append(
            Claim(
                "the reduction in variance is around 50-fold for k = 256",
                near[0] <= folds[place] <= near[1],
                f"{folds[place]:.3g}-fold ({near[0]:.0f} to {near[1]:.0f} would count as around 50); no partition of "
                f"these features can reach more than {_folds(points, _BOUND)[place]:.3g}-fold",
            )
        )
    return tuple(claims)


def _draw(figure: Figure, points: Sequence[Point]) -> None:
    absolute, relative = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.0, 1.25)})
    looks = {method.name: (method.colour, method.marker, "-") for method in METHODS}
    looks |= {name: (*look, "-") for name, look in COUPLED.items()}
    looks = {"uniform": ("#000000", "", "--"), _NO_REPEATS: (GREY, "", ":"), **looks}
    for axes, field in ((absolute, "variance"), (relative, "relative")):
        for name, (colour, marker, dashes) in looks.items():
            found = of_method(points, name)
            values = [getattr(point, field) for point in found]
            axes.plot(
                [point.k for point in found],
                values,
                color=colour,
                marker=marker,
                linestyle=dashes,
                linewidth=1.7,
                markersize=6,
                markeredgecolor="white",
                markeredgewidth=0.6,
                label=name,
            )
        bound = of_method(points, _BOUND)
        low = min(getattr(p, field) for name in looks for p in of_method(points, name)) / 1.5
        high = max(getattr(p, field) for p in points) * 1.15
        floor = [max(getattr(p, field), low) for p in bound]
        axes.fill_between([p.k for p in bound], floor, low, color="#DDDDDD", linewidth=0, zorder=0)
        _scale(axes, [p.k for p in bound])
        axes.set_ylim(low, high)
    relative.set_yticks([1.0, 0.1, 0.01], ["1", "0.1", "0.01"])
    absolute.set_ylabel("Var(μ̂), variance of the minibatch mean embedding")
    relative.set_ylabel("Var(μ̂) relative to uniform draws")
    sizes = [p.k for p in of_method(points, _BOUND)]
    relative.annotate(
        "out of reach of strata\nwith independent draws",
        (sizes[0] * 1.1, relative.get_ylim()[0] * 1.15),
        color=GREY,
        fontsize=9.5,
        va="bottom",
    )
    figure.tight_layout(rect=(0.0, 0.0, 0.83, 1.0), w_pad=2.0)
    handles, labels = relative.get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=10, frameon=False)


def _scale(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(k) for k in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size k")
    dress(axes)
