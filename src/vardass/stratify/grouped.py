"""Strata within given groups, such as classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import as_kernel
from vardass.strata import Strata
from vardass.stratify import stratify
from vardass.validate import ArrayLike, as_features, as_labels, check_count
from vardass.variance import uniform_variance

__all__ = ["share_out", "stratify_groups"]


def stratify_groups(features: ArrayLike, k: int, groups: ArrayLike, **options: Any) -> Strata:
    """Partition samples into k strata, none of which crosses a group.

    Each group gets strata in proportion to its size, at least one, so batches that draw one sample from each
    stratum keep the group proportions (exactly in weight, to within one sample in count).

    Parameters
    ----------
    features : tensor or array of shape (n, d)
        As for `stratify`.
    k : int
        Number of strata, at least the number of groups.
    groups : array of shape (n,)
        Whole numbers, for example class labels.
    **options
        For `stratify`. A ``warm_start`` is used where its strata respect the groups.
    """
    x = as_features(features)
    n = len(x)
    k = check_count(k, "k", high=n, remedy="lower k or batch_size")
    names, group = torch.unique(as_labels(groups, n, "groups").to(x.device), return_inverse=True)
    counts = torch.bincount(group, minlength=len(names))
    if len(names) > k:
        raise InputError(f"{len(names)} groups need at least {len(names)} strata, got k={k}; raise batch_size")
    kernel = as_kernel(options.pop("kernel", "mmd")).fit(x)
    previous = _warm_labels(options.pop("warm_start", None), n, k)
    labels = torch.empty(n, dtype=torch.int64, device=x.device)
    variance = stderr = 0.0
    start = 0
    info: Mapping[str, Any] = {}
    for g, share in enumerate(share_out(counts, k).tolist()):
        members = (group == g).nonzero().flatten()
        warm = None if previous is None else _relative(previous.to(x.device)[members], start, share)
        part = stratify(x[members], share, kernel=kernel, warm_start=warm, **options)
        labels[members] = part.labels + start
        # strata of different groups are drawn independently: their variances add, each weighted by its share
        weight = (len(members) / n) ** 2
        variance += weight * part.variance
        stderr += (weight * part.variance_stderr) ** 2
        start += share
        info = part.info
    return Strata(
        labels=labels,
        k=k,
        variance=variance,
        uniform_variance=uniform_variance(x, k, kernel=kernel),
        variance_stderr=stderr**0.5,
        solver=str(options.get("solver", "min-sum")),
        kernel=repr(kernel),
        info={"path": info.get("path"), "groups": len(names)},
    )


def share_out(counts: Tensor, k: int) -> Tensor:
    """Share k strata among groups of ``counts`` (g,) samples: in proportion, at least one, at most all."""
    exact = counts.double() * k / counts.sum()
    shares = exact.floor().long().clamp_min(1).minimum(counts)
    while int(shares.sum()) != k:
        wanted = exact - shares
        if int(shares.sum()) < k:
            shares[wanted.masked_fill(shares >= counts, -torch.inf).argmax()] += 1
        else:
            shares[wanted.masked_fill(shares <= 1, torch.inf).argmin()] -= 1
    return shares


def _warm_labels(warm_start: Any, n: int, k: int) -> Tensor | None:
    if warm_start is None:
        return None
    if isinstance(warm_start, Strata):
        return warm_start.labels if (warm_start.n, warm_start.k) == (n, k) else None
    return as_labels(warm_start, n, "warm_start")


def _relative(labels: Tensor, start: int, share: int) -> Tensor | None:
    """Earlier labels of one group counted from 0, or None where they do not fit the group."""
    inside = (labels >= start) & (labels < start + share)
    return labels - start if bool(inside.all()) else None
