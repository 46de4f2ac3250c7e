"""Strata within given groups, such as classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import fitted_kernel
from vardass.solvers.labels import given_labels
from vardass.solvers.min_sum import EXCHANGED
from vardass.solvers.stratification import stratify
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_features, as_generator, as_labels, as_tensor, check_count
from vardass.variance import uniform_evaluation

__all__ = ["Groups", "fits", "share_out", "stratify_groups"]


class Groups(NamedTuple):
    """Disjoint groups of samples and the mixture Σ_g share_g P_g that batches stand for.

    ``of_sample`` (n,) is the group of each sample, 0 to g - 1, or -1 for none; ``counts`` (g,) are at least 1;
    ``shares`` (g,) are above 0, in double precision, and sum to 1.
    """

    of_sample: Tensor
    counts: Tensor
    shares: Tensor

    @property
    def sample_weights(self) -> Tensor:
        """Probability of each sample in the mixture, share_g / n_g: (n,), 0 for those in no group."""
        return torch.cat([self.shares / self.counts, self.shares.new_zeros(1)])[self.of_sample]

    @classmethod
    def of(cls, groups: ArrayLike, shares: ArrayLike | None, n: int) -> Groups:
        """Check what a user gave: whole numbers (n,), and with shares (g,) these are in -1..g - 1.

        Samples of group -1 and of groups whose share is 0 are in no group. Shares are divided by their sum; without
        them each group has that of its samples.
        """
        given = as_labels(groups, n, "groups")
        if shares is None:
            _, of_sample, counts = torch.unique(given, return_inverse=True, return_counts=True)
            return cls(of_sample, counts, counts.double() / n)
        share = as_tensor(shares, "shares", "a number for each group").to(given.device, torch.float64)
        if share.ndim != 1 or not bool(torch.isfinite(share).all()) or bool((share < 0).any()) or not share.sum() > 0:
            raise InputError(
                f"shares must be one number for each group, not negative and with a positive sum, got {shares!r}"
            )
        if int(given.min()) < -1 or int(given.max()) >= len(share):
            raise InputError(
                f"groups with {len(share)} shares must lie in -1..{len(share) - 1} (-1 for samples to leave out), got "
                f"{int(given.min())}..{int(given.max())}; number them so, and give each a share"
            )
        counts = torch.bincount(given + 1, minlength=len(share) + 1)[1:]
        if bool(missing := ((share > 0) & (counts == 0)).nonzero().flatten().tolist()):
            raise InputError(
                f"groups {missing} have a share but no samples; set their shares to 0, here and in the other domain"
            )
        used = (share > 0).nonzero().flatten()
        number = torch.full((len(share) + 1,), -1, device=given.device)
        number[used] = torch.arange(len(used), device=given.device)
        return cls(number[given], counts[used], share[used] / share.sum())  # -1 is the last entry, which is -1


def stratify_groups(
    features: ArrayLike, k: int, groups: ArrayLike, *, shares: ArrayLike | None = None, **options: Any
) -> Strata:
    """Partition samples into k strata, none of which crosses a group.

    Each group gets strata in proportion to its share, at least one and at most one for each of its samples. Batches
    keep the shares exactly in weight, and in count to within one sample where these limits allow it.

    Parameters
    ----------
    features : tensor or array of shape (n, d)
        As for `stratify`.
    k : int
        Number of strata, at least the number of groups.
    groups : array of shape (n,)
        Whole numbers, for example class labels.
    shares : array of shape (g,), optional
        Shares of the groups 0 to g - 1, by default n_c / n. Stratum h of group c weighs share_c |S_h| / n_c, so one
        draw from each stratum is unbiased for the mixture Σ_c share_c P_c. Samples of group -1, and of groups with
        share 0, are left out.
    **options
        For `stratify`, which is called for each group with a kernel fitted to all samples in groups. A
        ``warm_start`` is used for groups that its strata respect.

    Examples
    --------
    >>> z = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
    >>> classes = torch.arange(90) % 3
    >>> strata = stratify_groups(z, 6, classes)
    >>> [len(strata.labels[classes == c].unique()) for c in range(3)]
    [2, 2, 2]
    """
    x = as_features(features, check_finite=options.pop("check_finite", True))
    n = len(x)
    k = check_count(k, "k", high=n, remedy=f"{n} samples make at most {n} strata")
    found = Groups.of(groups, shares, n)
    group = found.of_sample.to(x.device)
    if len(found.counts) > k:
        raise InputError(
            f"{len(found.counts)} groups need at least {len(found.counts)} strata, got k={k}; raise batch_size"
        )
    if options.get("bound"):
        raise InputError("bound is for strata without groups; leave it out or call stratify")
    strata_of = share_out(found.counts, k, found.shares, min_size=options.get("min_size", 1))
    # fitted here: a mean or a scale is that of all samples, not of each group
    kernel = fitted_kernel(options.pop("kernel", "mmd"), x if shares is None else x[group >= 0])
    previous = _warm_labels(options.pop("warm_start", None), n, k, x.device)
    if options.get("equal") and n > EXCHANGED and options.get("solver", "min-sum") == "min-sum":
        options.setdefault("max_passes", 0)  # as without groups: exchanges take longer than all the rest
    labels = torch.full((n,), -1, device=x.device)
    variance = squared_error = 0.0
    start = 0
    paths = []
    weights: list[float] = []
    for g, (count, share) in enumerate(zip(strata_of.tolist(), found.shares.tolist(), strict=True)):
        members = (group == g).nonzero().flatten()
        warm = None if previous is None else _relative(previous[members], start, count)
        part = stratify(x[members], count, kernel=kernel, warm_start=warm, check_finite=False, **options)
        labels[members] = part.labels + start
        # strata of different groups are drawn independently: their variances add, each weighted by its share
        variance += share**2 * part.variance
        squared_error += (share**2 * part.variance_stderr) ** 2
        start += count
        paths.append(part.info["path"])
        weights += (part.exact_weights * share).tolist()
    each = None if shares is None else found.sample_weights.to(x.device)
    uniform, uniform_stderr = uniform_evaluation(
        x, k, kernel=kernel, generator=as_generator(0, x.device), probabilities=each
    )
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
            "groups": len(found.counts),
            "uniform_stderr": uniform_stderr,
        },
        shares=None if shares is None else weights,
    )


def fits(counts: Tensor, k: int, *, min_size: int = 1) -> bool:
    """Whether groups of ``counts`` (g,) samples can hold k strata of at least min_size, one or more each."""
    most = counts // min_size
    return 0 < len(counts) <= k <= int(most.sum()) and int(most.min()) > 0


def share_out(counts: Tensor, k: int, shares: Tensor, *, min_size: int = 1) -> Tensor:
    """Share k strata among groups of ``counts`` (g,) samples in proportion to ``shares`` (g,), which sum to 1.

    Each gets at least one, and none gets strata of fewer than ``min_size`` samples.
    """
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
    exact = shares * k
    given = exact.floor().long().clamp_min(1).minimum(most)
    while int(given.sum()) != k:
        wanted = exact - given
        if int(given.sum()) < k:
            given[wanted.masked_fill(given >= most, -torch.inf).argmax()] += 1
        else:
            given[wanted.masked_fill(given <= 1, torch.inf).argmin()] -= 1
    return given


def _warm_labels(warm_start: Any, n: int, k: int, device: torch.device) -> Tensor | None:
    if warm_start is None or (isinstance(warm_start, Strata) and (warm_start.n, warm_start.k) != (n, k)):
        return None
    if isinstance(warm_start, Strata):  # whose samples may be in no stratum
        return warm_start.labels.to(device)
    return given_labels(warm_start, n, k, "warm_start", device)


def _relative(labels: Tensor, start: int, count: int) -> Tensor | None:
    """Earlier labels of one group counted from 0, or None if they are not ``count`` strata from ``start`` on."""
    inside = (labels >= start) & (labels < start + count)
    return labels - start if bool(inside.all()) else None
