"""Figure 4: variance of the estimator against the batch size, for the paper's solver and its three ablations.

The paper takes embeddings of Humpbacks and an RBF kernel with unit bandwidth. Here they are features of a small network
trained on the smart-watch data, whose scale and number of columns are choices: shown are unit bandwidth, the median
distance, and what strata can gain over bandwidths, with 64 and with 8 columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vardass.adapt.config import RunConfig
from vardass.adapt.trainer import Trainer
from vardass.bounds import nearest_neighbour_bound
from vardass.data import load_task, split_task
from vardass.kernels import RBFMixture
from vardass.paper.figures import Claim, FigureResult
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

__all__ = ["figure4"]

# raw distances are far above 1, where exp(-d²) is 0
KERNELS = {"raw": RBFMixture(gammas=(1.0,)), "median": RBFMixture(gammas=(1.0,), scale="median")}
BANDWIDTHS = {b: RBFMixture(gammas=(b**-2,), scale="median") for b in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)}
"""Kernels by their bandwidths in median distances, all that are tried at the largest k."""
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
_LOW, _HIGH = _PAPERS_FOLD / 2.0, _PAPERS_FOLD * 2.0  # what counts as around 50-fold
_NARROW = 8  # columns of features that strata can do more with
_PLACE = ["columns", "bandwidth", "k", "method"]
_SAME = 0.05  # variances that differ by less overlap in a plot of decades
_MOST = 0.75
"""Share of the seeds in which something must show: 15 of 20, where a sign test has p = 0.04."""


def figure4(*, seed: int, quick: bool, progress: Progress) -> FigureResult:
    """Measure Var(μ̂) against k for uniform draws, k-means, kernel k-means and Algorithm 1, and for ours."""
    n, steps, repeats, batches = (160, 30, 3, 32) if quick else (1000, 1000, 20, 64)
    ks = (4, 8, 32) if quick else (2, 4, 8, 16, 32, 64, 128, 256)
    progress(0.0, "features")

    def within(low: float, high: float) -> Progress:
        return lambda share, message: progress(low + share * (high - low), message)

    wide = trained_features(n, seed=seed, steps=steps)
    curves = measure(wide, ks, seeds=range(seed, seed + repeats), batches=batches, progress=within(0.0, 0.8))
    narrow = trained_features(n, seed=seed, steps=steps, columns=_NARROW)
    bandwidths = pd.concat(
        measure(
            each,
            ks[-1:],
            kernels=BANDWIDTHS,
            solvers={PAPER: SOLVERS[PAPER]},
            planned={},
            seeds=range(seed, seed + max(2, repeats // 4)),
            batches=batches,
            progress=within(*shares),
        )
        for each, shares in ((wide, (0.8, 0.9)), (narrow, (0.9, 1.0)))
    )
    numbers = over_seeds(pd.concat([curves, bandwidths]))
    return FigureResult(
        number=4,
        title="variance of the estimator against batch size",
        caption=(
            f"{n:,} features of a small network after {steps:,} steps of MMD on the smart-watch data (source: left "
            "wrist, all people; the paper's are features of whale calls), Gaussian kernel with unit bandwidth on "
            f"distances as they are, whose median is {float(torch.pdist(wide).median()):.3g} (left), and with the "
            f"median distance as bandwidth (middle): means over {repeats} seeds of the solvers, bands from 10 to 90 % "
            f"of them; the variance of each is exact, of ordered and balanced measured on {batches} batches. Right: "
            f"k = {ks[-1]} over bandwidths, on these {wide.shape[1]} columns of features and on the {_NARROW} of a "
            "narrower network; dotted is what no partition can exceed."
        ),
        numbers=numbers,
        claims=(*claims(curves), *bandwidth_claims(bandwidths)),
        draw=lambda figure: _draw(figure, numbers),
        size=(15.0, 5.4),
        settings={"seed": seed, "quick": quick, "n": n, "sizes": ks, "solver_seeds": repeats, "batches": batches},
    )


def trained_features(n: int, *, seed: int, steps: int, columns: int = 64) -> Tensor:
    """Features (n, columns) of samples of the left wrist, drawn from those that a small network was trained on."""
    trainer = small_trainer("left-A+left-B->right-A", seed=seed, steps=steps, lr=1e-3, hidden=(128, columns))
    trainer.run()
    z = source_features(trainer)
    return z[torch.randperm(len(z), generator=as_generator(derive_seed(seed, 4)))[:n]]


def measure(
    features: Tensor,
    ks: Sequence[int],
    *,
    kernels: Mapping[Any, RBFMixture] = KERNELS,
    solvers: Mapping[str, str] = SOLVERS,
    planned: Mapping[str, Any] = PLANNED,
    seeds: Sequence[int],
    batches: int,
    progress: Progress,
) -> pd.DataFrame:
    """Var(μ̂) of every way to draw, for each kernel, k and seed; one seed where nothing is random."""
    (n, columns), rows = features.shape, []
    for number, (bandwidth, kernel) in enumerate(kernels.items()):
        kernel = kernel.fit(features)
        view = ExactView(kernel.matrix(features).double())
        for place, k in enumerate(ks):
            progress((number + place / len(ks)) / len(kernels), f"k = {k}")
            uniform = view.whole / (k * n**2)
            found = {"uniform": [uniform], _NO_REPEATS: [uniform * (n - k) / (n - 1)]}
            for name, solver in solvers.items():
                strata = (stratify(features, k, kernel=kernel, solver=solver, seed=seed) for seed in seeds)
                found[name] = [each.variance for each in strata]
            for name, kind in planned.items():
                plans = (_plan(kind(n, k, kernel=kernel, seed=seed), features, batches) for seed in seeds)
                found[name] = [float(view.batch_errors(*plan).mean()) for plan in plans]
            found[_BOUND] = [nearest_neighbour_bound(features, k, kernel=kernel, rows=n).variance]
            for name, variances in found.items():
                own = (columns, bandwidth, k, name)
                rows += [(*own, seed, variance, uniform) for seed, variance in enumerate(variances)]
    return pd.DataFrame(rows, columns=[*_PLACE, "seed", "variance", "uniform"])


def _plan(sampler: MinibatchSampler, features: Tensor, batches: int) -> tuple[Tensor, Tensor]:
    """Rows (batches, k) and weights (k,) of a sampler's first batches."""
    sampler.refresh(features)
    chunk = sampler.sample_batches(batches)
    k = chunk.rows.shape[1]
    return chunk.rows, torch.full((k,), 1.0 / k) if chunk.weights is None else chunk.weights


def over_seeds(measured: pd.DataFrame) -> pd.DataFrame:
    """What is drawn: the mean, its standard error (n - 1) and the band of the middle 80 % of seeds."""
    groups = measured.groupby(_PLACE, sort=False)
    found, variance = groups.variance, groups.variance.mean()
    columns = {
        "variance": variance,
        "relative_to_uniform": variance / groups.uniform.first(),
        "stderr": found.sem().fillna(0.0),  # a single value is exact
        "low": found.quantile(0.1),
        "high": found.quantile(0.9),
        "seeds": found.size(),
    }
    return pd.DataFrame(columns).reset_index()


def claims(measured: pd.DataFrame) -> tuple[Claim, ...]:
    """What is said of the curves at either bandwidth, and in how many seeds it is borne out."""
    measured = measured.assign(fold=_fold(measured))
    tables = measured.pivot_table(index="seed", columns=["bandwidth", "method", "k"], values=["variance", "fold"])
    return tuple(
        claim
        for bandwidth, where in (("raw", "at unit bandwidth"), ("median", "with the median distance as bandwidth"))
        for claim in _claims_at(tables["variance", bandwidth], tables["fold", bandwidth], where)
    )


def _fold(measured: pd.DataFrame) -> pd.Series:
    """Times less variance than uniform draws."""
    return measured.uniform / measured.variance.clip(lower=1e-300)


def _claims_at(variances: Any, folds: Any, where: str) -> list[Claim]:
    """Claims on tables whose columns are (method, k), a seed in each row; mypy knows no such columns."""
    sizes, seeds = list(folds[PAPER].columns), len(folds)
    plain, kernelised = variances["k-means"], variances["kernel k-means"]
    lowest = int((variances[PAPER] <= np.minimum(plain, kernelised)).sum().min())
    ratios = plain / kernelised
    half = len(sizes) // 2
    better = sum(_most(ratios[k] > 1.0 + _SAME) for k in sizes[:half])
    # of means: single runs scatter by more than this, so that even the same solver twice would not pass run by run
    large = sizes[-1]
    overlap = plain[large].mean() / kernelised[large].mean()
    errors = [f"{100.0 * each[large].sem() / each[large].mean():.1f} %" for each in (plain, kernelised)]
    found = []
    for name in ("k-means", "kernel k-means", PAPER):
        rising = int((folds[name].diff(axis=1).iloc[:, 1:] > 0.0).sum().min())
        found.append(
            Claim(
                f"the gap between uniform and stratified sampling increases with k, for {name}, {where}",
                rising >= _MOST * seeds,
                f"from each k to the next in at least {rising} of {seeds} seeds; times less variance: "
                + _by_size(folds[name]),
            )
        )
    found += [
        Claim(
            f"kernel k-means has less variance than linear k-means for small k, {where}",
            2 * better > half,
            f"more than {100 * _SAME:.0f} % less in {100 * _MOST:.0f} % of the seeds at {better} of the {half} "
            f"smaller batch sizes; variance of linear over kernel k-means {_by_size(ratios)}",
        ),
        Claim(
            f"kernel and linear k-means more or less overlap for large k, taken as means within {100 * _SAME:.0f} %, "
            f"{where}",
            bool(abs(overlap - 1.0) <= _SAME),
            f"mean variance of linear over that of kernel k-means {overlap:.3f} for k = {large}, standard "
            f"errors {' and '.join(errors)}",
        ),
        Claim(
            f"Algorithm 1 has less variance than its three ablations, {where}",
            lowest >= _MOST * seeds and bool((folds[PAPER] > 1.0).all(axis=None)),
            f"lowest of the four in at least {lowest} of {seeds} seeds at every k",
            source="ours",
        ),
    ]
    if _PAPERS_K in sizes:
        own, most = folds[PAPER][_PAPERS_K], folds[_BOUND][_PAPERS_K].max()
        besides = ", ".join(
            f"{name} {folds[name][_PAPERS_K].mean():.3g}" for name in (_NO_REPEATS, "k-means", "kernel k-means")
        )
        found.append(
            Claim(
                f"the reduction in variance is around 50-fold for k = 256, {where}",
                _most(own.between(_LOW, _HIGH)) if most >= _LOW else None,
                f"{_with_error(own)}-fold; {besides}; no partition of these features can reach more than {most:.3g}",
            )
        )
    return found


def bandwidth_claims(measured: pd.DataFrame) -> tuple[Claim, ...]:
    """Whether around 50-fold is reached with the least bandwidth at which a partition could."""
    k = int(measured.k.max())
    table = measured.assign(fold=_fold(measured)).pivot_table(
        index=["columns", "bandwidth"], columns="method", values="fold"
    )
    found = []
    for columns, own in table.groupby("columns"):
        folds, most = own[PAPER].droplevel("columns"), own[_BOUND].droplevel("columns")
        able = most.index[most >= _PAPERS_FOLD]
        shown = f"at {able[0]:g} x the median distance {folds[able[0]]:.3g}-fold" if len(able) else "at none tried"
        found.append(
            Claim(
                f"the reduction in variance is around 50-fold for k = {k}, on {columns} columns of features with the "
                "least bandwidth where a partition could reach 50-fold",
                bool(_LOW <= folds[able[0]] <= _HIGH) if len(able) else None,
                f"{shown}; from {most.index[0]:g} to {most.index[-1]:g} x the median distance {folds.iloc[0]:.3g} to "
                f"{folds.max():.3g}-fold, no partition above {most.max():.3g}",
            )
        )
    return tuple(found)


def _most(seeds: pd.Series) -> bool:
    return bool(seeds.mean() >= _MOST)


def _with_error(values: pd.Series) -> str:
    """Mean over seeds and its standard error."""
    mean, error = values.agg(["mean", "sem"])
    return f"{mean:.3g} ± {error:.1g}"


def _by_size(table: pd.DataFrame) -> str:
    return ", ".join(f"{_with_error(values)} (k = {k})" for k, values in table.items())


def _draw(figure: Figure, numbers: pd.DataFrame) -> None:
    from matplotlib.ticker import LogLocator

    unit, median, bandwidths = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.15, 1.15, 1.0)})
    for axes, bandwidth, title in (
        (unit, "raw", "bandwidth: 1, as in the paper"),
        (median, "median", "bandwidth: the median distance"),
    ):
        _draw_curves(axes, numbers[numbers.bandwidth == bandwidth])
        axes.set_title(title, fontsize=10.5)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))  # the left one may span less than a decade
        axes.yaxis.set_major_formatter("{x:g}")
    unit.set_ylabel("Var(μ̂) relative to uniform draws")
    place = (numbers.k.min() * 1.1, median.get_ylim()[0] * 1.15)
    median.annotate("out of reach of strata\nwith independent draws", place, color=GREY, fontsize=9.5, va="bottom")
    _draw_bandwidths(bandwidths, numbers[numbers.bandwidth.isin(BANDWIDTHS)])
    figure.tight_layout(rect=(0.0, 0.0, 0.87, 1.0), w_pad=2.0)
    figure.legend(*median.get_legend_handles_labels(), loc="center right", fontsize=10, frameon=False)


def _draw_bandwidths(axes: Axes, numbers: pd.DataFrame) -> None:
    """Times less variance against the bandwidth, for either network, with what no partition exceeds."""
    for columns, own in numbers.groupby("columns"):
        for method, colour, dashes in ((_BOUND, GREY, ":"), (PAPER, PURPLE, "-")):
            curve = own[own.method == method].sort_values("bandwidth", key=lambda b: b.astype(float))
            axes.plot(curve.bandwidth.astype(float), 1.0 / curve.relative_to_uniform, dashes, color=colour)
        end = float(curve.bandwidth.iloc[-1]), 1.0 / float(curve.relative_to_uniform.iloc[-1])
        looks: dict[str, Any] = {"ha": "right", "va": "top", "color": PURPLE, "fontsize": 10}
        axes.annotate(f"{columns} columns", end, (0, -4), textcoords="offset points", **looks)
    axes.axhline(_PAPERS_FOLD, color=GREY, linewidth=1.0, linestyle="--")
    axes.text(min(BANDWIDTHS), _PAPERS_FOLD * 1.05, "the paper's", color=GREY, fontsize=9.5, va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(BANDWIDTHS), [f"{b:g}" for b in BANDWIDTHS])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title(f"k = {numbers.k.max()}, {PAPER}", fontsize=10.5)
    axes.set_xlabel("bandwidth, median distances")
    axes.set_ylabel("times less variance than uniform draws")
    style_axes(axes)


def _draw_curves(axes: Axes, numbers: pd.DataFrame) -> None:
    """Every method against k with its band, and a shaded region below the bound."""
    curves = dict(list(numbers.set_index("k").groupby("method")))
    sizes = curves["uniform"].index
    unit = curves["uniform"].variance
    for name, (colour, marker, dashes) in _LOOKS.items():
        own = curves[name]
        looks: dict[str, Any] = {
            "linestyle": dashes,
            "linewidth": 1.7,
            "marker": marker,
            "markersize": 6,
            "markeredgewidth": 0.6,
        }
        axes.fill_between(sizes, own.low / unit, own.high / unit, color=colour, alpha=0.2, linewidth=0)
        axes.plot(sizes, own.variance / unit, color=colour, markeredgecolor="white", label=name, **looks)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    floor = (curves[_BOUND].variance / unit).clip(lower=low)
    axes.fill_between(sizes, floor, low, color="#DDDDDD", linewidth=0, zorder=0)
    axes.set_ylim(low, high)
    axes.set_xticks(sizes, [str(k) for k in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size k")
    style_axes(axes)


# --- shared with figure 5: features of a small network on the watch data ---


def small_trainer(
    task: str,
    *,
    seed: int,
    steps: int,
    lr: float,
    sampler: str = "uniform",
    period: int = 100,
    hidden: Sequence[int] = (128, 64),
) -> Trainer:
    """A trainer of a small network with MMD and k = 32, in memory."""
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
        network_options={"hidden": list(hidden)},
    )
    return Trainer(config, split_task(load_task("watch", task), seed=seed))


def source_features(trainer: Trainer) -> Tensor:
    """Features (n, d) of all source samples that the run trains on, as the network is now."""
    data = trainer.streams["source"].inputs.data
    return extract_features(trainer.algorithm, data, forward=lambda model, x: model.features(x))
