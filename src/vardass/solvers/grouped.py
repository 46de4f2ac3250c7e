"""Strata within given groups, such as classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import fitted_kernel
from vardass.solvers.evaluate import uniform_evaluation
from vardass.solvers.starts import given_labels
from vardass.solvers.stratification import stratify
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_features, as_generator, as_labels, check_count

__all__ = ["share_out", "stratify_groups"]


def stratify_groups(features: ArrayLike, k: int, groups: ArrayLike, **options: Any) -> Strata:
    """Partition samples into k strata, none of which crosses a group.

    Each group gets strata in proportion to its size, at least one, so batches that draw one sample from each
    stratum keep the group proportions: exactly in weight, and in count to within one sample unless groups
    smaller than n / k take more than their share.

    Parameters
    ----------
    features : tensor or array of shape (n, d)
        As for `stratify`.
    k : int
        Number of strata, at least the number of groups.
    groups : array of shape (n,)
        Whole numbers, for example class labels.
    **options
        For `stratify`, which is called for each group with a kernel that was fitted to all samples. A
        ``warm_start`` is used where its strata respect the groups.
    """
    x = as_features(features)
    n = len(x)
    k = check_count(k, "k", high=n, remedy="lower k or batch_size")
    names, group = torch.unique(as_labels(groups, n, "groups").to(x.device), return_inverse=True)
    counts = torch.bincount(group, minlength=len(names))
    if len(names) > k:
        raise InputError(f"{len(names)} groups need at least {len(names)} strata, got k={k}; raise batch_size")
    if options.get("bound") or options.get("certify"):
        raise InputError("bound and certify are for strata without groups; leave them out or call stratify")
    shares = share_out(counts, k, min_size=options.get("min_size", 1))
    # fitted here: a mean or a scale is that of all samples, not of each group
    kernel = fitted_kernel(options.pop("kernel", "mmd"), x)
    previous = _warm_labels(options.pop("warm_start", None), n, k, x.device)
    labels = torch.empty(n, dtype=torch.int64, device=x.device)
    variance = squared_error = 0.0
    start = 0
    paths = []
    for g, share in enumerate(shares.tolist()):
        members = (group == g).nonzero().flatten()
        warm = None if previous is None else _relative(previous[members], start, share)
        part = stratify(x[members], share, kernel=kernel, warm_start=warm, **options)
        labels[members] = part.labels + start
        # strata of different groups are drawn independently: their variances add, each weighted by its share
        weight = (len(members) / n) ** 2
        variance += weight * part.variance
        squared_error += (weight * part.variance_stderr) ** 2
        start += share
        paths.append(part.info["path"])
    uniform, uniform_stderr = uniform_evaluation(x, k, kernel=kernel, generator=as_generator(0, x.device))
    return Strata(
        labels=labels,
        k=k,
        variance=variance,
        uniform_variance=uniform,
        variance_stderr=squared_error**0.5,
        solver=str(options.get("solver", "min-sum")),
        kernel=repr(kernel),
        info={
            "path": "exact" if set(paths) == {"exact"} else "low-rank",
            "groups": len(names),
            "uniform_stderr": uniform_stderr,
        },
    )


def share_out(counts: Tensor, k: int, *, min_size: int = 1) -> Tensor:
    """Share k strata among groups of ``counts`` (g,) samples: in proportion, at least one, none below min_size."""
    most = counts // check_count(min_size, "min_size")
    if int(most.min()) == 0:
        raise InputError(
            f"a group has {int(counts.min())} samples, fewer than min_size={min_size}; lower min_size or merge groups"
        )
    if int(most.sum()) < k:
        raise InputError(
            f"{len(counts)} groups hold at most {int(most.sum())} strata of min_size={min_size}, got k={k}; "
            "lower min_size or batch_size"
        )
    exact = counts.double() * k / counts.sum()
    shares = exact.floor().long().clamp_min(1).minimum(most)
    while int(shares.sum()) != k:
        wanted = exact - shares
        if int(shares.sum()) < k:
            shares[wanted.masked_fill(shares >= most, -torch.inf).argmax()] += 1
        else:
            shares[wanted.masked_fill(shares <= 1, torch.inf).argmin()] -= 1
    return shares


def _warm_labels(warm_start: Any, n: int, k: int, device: torch.device) -> Tensor | None:
    if warm_start is None or (isinstance(warm_start, Strata) and (warm_start.n, warm_start.k) != (n, k)):
        return None
    return given_labels(warm_start, n, k, "warm_start", device)


def _relative(labels: Tensor, start: int, share: int) -> Tensor | None:
    """Earlier labels of one group counted from 0, or None where they do not fit the group."""
    inside = (labels >= start) & (labels < start + share)
    return labels - start if bool(inside.all()) else None
