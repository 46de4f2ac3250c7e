"""Strata within given groups, such as classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import DEFAULT_BLOCK_BYTES, Kernel, as_kernel
from vardass.solvers import stratify
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_features, as_generator, as_labels, check_count
from vardass.variance import uniform_variance

__all__ = ["share_out", "stratify_groups"]

_EXACT_WORK = 4e9  # kernel pairs times dimensions that may be spent on the variance of uniform draws
_PAIRS = 20_000  # pairs that estimate it beyond that


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
    kernel = as_kernel(options.pop("kernel", "mmd")).fit(x)
    # a kernel that takes its mean or scale from the data must not take them from each group again
    fixed = kernel if type(kernel).fit is Kernel.fit else _FixedKernel(kernel)
    previous = _warm_labels(options.pop("warm_start", None), n, k)
    labels = torch.empty(n, dtype=torch.int64, device=x.device)
    variance = squared_error = 0.0
    start = 0
    paths = []
    for g, share in enumerate(shares.tolist()):
        members = (group == g).nonzero().flatten()
        warm = None if previous is None else _relative(previous.to(x.device)[members], start, share)
        part = stratify(x[members], share, kernel=fixed, warm_start=warm, **options)
        labels[members] = part.labels + start
        # strata of different groups are drawn independently: their variances add, each weighted by its share
        weight = (len(members) / n) ** 2
        variance += weight * part.variance
        squared_error += (weight * part.variance_stderr) ** 2
        start += share
        paths.append(part.info["path"])
    uniform, uniform_stderr = _uniform_variance(x, k, kernel)
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


@dataclass(frozen=True, eq=False)
class _FixedKernel(Kernel):
    """A fitted kernel that stays as it is when it is fitted again."""

    fitted: Kernel

    def matrix(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.fitted.matrix(x, y)

    def diag(self, x: Tensor) -> Tensor:
        return self.fitted.diag(x)

    def blocks(
        self, x: Tensor, y: Tensor | None = None, *, max_bytes: int = DEFAULT_BLOCK_BYTES
    ) -> Iterator[tuple[slice, Tensor]]:
        return self.fitted.blocks(x, y, max_bytes=max_bytes)

    def paired(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fitted.paired(x, y)

    def explicit_features(self, x: Tensor) -> Tensor | None:
        return self.fitted.explicit_features(x)

    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.fitted._matrix(x, y)

    def _diag(self, x: Tensor) -> Tensor:
        return self.fitted._diag(x)


def _uniform_variance(x: Tensor, k: int, kernel: Kernel) -> tuple[float, float]:
    """Variance of k uniform draws and its standard error: half the mean d_ij of two draws, over k."""
    n, d = x.shape
    if float(n) * n * d <= _EXACT_WORK:
        return uniform_variance(x, k, kernel=kernel), 0.0
    generator = as_generator(0, x.device)
    i = torch.randint(n, (_PAIRS,), generator=generator, device=x.device)
    j = torch.randint(n, (_PAIRS,), generator=generator, device=x.device)
    gap = (kernel.diag(x[i]) + kernel.diag(x[j]) - 2.0 * kernel.paired(x[i], x[j])).double() / (2 * k)
    gap = gap.masked_fill(i == j, 0.0)
    return float(gap.mean()), float(gap.std()) / _PAIRS**0.5


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
