"""Strata and one minibatch of each sampler on a plane: what drawing from strata means, to look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardass.analysis.sampler_noise import variance_report
from vardass.data import standardise, watch_domains
from vardass.errors import InputError
from vardass.kernels import RBFMixture
from vardass.lab.averages import SAMPLERS
from vardass.lab.page.content import short
from vardass.samplers import StratifiedBatchSampler
from vardass.samplers.registry import make_sampler
from vardass.validate import ArrayLike, as_features, as_generator, check_count

__all__ = ["principal_plane", "strata_content", "watch_features"]

_MOST_ROWS = 1500  # drawn; a page with more is slow on a phone
_BATCHES = 6  # of each sampler, to step through
_MEASURED = 200  # batches behind the variance of each sampler
_WATCH = "left-A"
# names for make_sampler, and what they do
_SAMPLERS = (
    ("uniform", "Every sample is as likely as any other."),
    ("vardass", "One sample from each stratum, weighted by the stratum's share: the paper's."),
    ("stratified", "The same with strata of the default solver."),
    ("ordered", "Draws from strata, coupled so that each batch's mean is close to that of all samples."),
    ("balanced", "Each sample once in an epoch, batches balanced by swaps, equal weights."),
    ("kmeans++", "Samples far from those already drawn. Not unbiased."),
    ("dpp", "A determinantal point process: unlike samples together. Not unbiased."),
)


def watch_features() -> tuple[Tensor, str]:
    """Standardised features (n, 78) of one domain of the embedded watch recordings, and what they are."""
    features, _ = watch_domains()[_WATCH]
    return standardise(features), f"embedded watch recordings, domain {_WATCH}"


def principal_plane(features: Tensor) -> tuple[Tensor, float]:
    """Coordinates (n, 2) on the first two principal components, and the share of the variance that they show.

    Signs are fixed, so that the same features always give the same picture.
    """
    centred = features.double() - features.double().mean(0)
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    width = min(2, len(values))
    largest = right[:width].abs().argmax(1, keepdim=True)
    signs = torch.where(right[:width].gather(1, largest).squeeze(1) < 0, -1.0, 1.0).to(left)
    plane = left.new_zeros(len(features), 2)
    plane[:, :width] = left[:, :width] * values[:width] * signs
    total = float(values.square().sum())
    return plane, float(values[:2].square().sum()) / total if total > 0 else 1.0


def strata_content(features: ArrayLike, about: str, *, batch_size: int = 8, seed: int = 0) -> dict[str, Any]:
    """Everything that the strata picture needs, as JSON."""
    x = as_features(features).float()
    total = len(x)
    batch_size = check_count(batch_size, "batch_size", low=2)
    if total < 2 * batch_size:
        raise InputError(
            f"{total} rows of features are too few for strata of a batch of {batch_size}; give at least "
            f"{2 * batch_size} rows or lower --batch-size"
        )
    if total > _MOST_ROWS:
        x = x[torch.randperm(total, generator=as_generator(seed))[:_MOST_ROWS].sort().values.to(x.device)]
    n = len(x)
    kernel = RBFMixture(scale="median")  # features of any size then make strata that can be seen
    samplers = {name: make_sampler(name, n, batch_size, kernel=kernel, seed=seed) for name, _ in _SAMPLERS}
    usable = {}
    for name, sampler in samplers.items():
        try:
            sampler.refresh(x)
        except InputError:  # such as a k-DPP on features with too many copies
            continue
        usable[name] = sampler
    report = variance_report(usable, x, kernel=kernel, batches=_MEASURED, baseline="uniform", refresh=False, seed=seed)
    plane, share = principal_plane(x)
    shown = usable["stratified"]
    if not isinstance(shown, StratifiedBatchSampler) or shown.strata is None:
        raise InputError(f"no strata could be made from the {n} rows of features; give features that differ")
    drawn = []
    for name, what in _SAMPLERS:
        if name not in usable:
            continue
        sampler = usable[name]
        chunk = sampler.sample_batches(_BATCHES, seed=seed)
        ratio = report.relative(name)
        own = sampler.strata if isinstance(sampler, StratifiedBatchSampler) and sampler is not shown else None
        drawn.append(
            {
                "name": SAMPLERS[name],
                "what": what,
                "strata": None if own is None else _ordered_labels(own.labels, plane).tolist(),
                "batches": chunk.rows.tolist(),
                "weights": None if chunk.weights is None else [short(value) for value in chunk.weights.tolist()],
                "variance": short(report[name].variance.value),
                "relative": None if ratio is None else short(ratio.value),
                "error": None if ratio is None else short(ratio.stderr),
            }
        )
    return {
        "about": about,
        "total": total,
        "share": short(share),
        "batch_size": batch_size,
        "points": [[short(a), short(b)] for a, b in plane.tolist()],
        "strata": _ordered_labels(shown.strata.labels, plane).tolist(),
        "samplers": drawn,
    }


def _ordered_labels(labels: Tensor, plane: Tensor) -> Tensor:
    """Number strata from left to right, so that the same number has the same place in every picture."""
    labels = labels.to(plane.device)
    count = int(labels.max()) + 1
    sums = plane.new_zeros(count).index_add_(0, labels, plane[:, 0])
    centres = sums / torch.bincount(labels, minlength=count).clamp_min(1)
    rank = centres.argsort().argsort()
    return rank[labels]
