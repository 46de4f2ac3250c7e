"""A batch of one domain with all that losses need to know of it, and what is known of the whole domain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.validate import ArrayLike, as_labels, as_weights, check_count, require_dense

__all__ = ["Bank", "Batch", "pair_of"]


class Bank(NamedTuple):
    """The latest known features of a whole domain, such as `FeatureBank` keeps them.

    Where n is large, rows drawn anew for each batch do as well: the mean over batches and draws stays the same.
    ``Bank(features[rows], weights)`` with rows and weights from a `StratifiedBatchSampler` has little noise of its own.
    CORAL then needs the ``mean`` of all rows.

    Attributes
    ----------
    rows : Tensor of shape (m, d)
        Features; no gradient goes through them.
    weights : Tensor of shape (m,), optional
        Of the rows, summing to 1; None means uniform.
    strata : Tensor of shape (m,), optional
        Stratum of each row, in the numbers of the batch's own.
    mean : Tensor of shape (d,), optional
        Mean of the whole domain, about which CORAL centres; by default that of the rows.
    """

    rows: Tensor
    weights: ArrayLike | None = None
    strata: ArrayLike | None = None
    mean: Tensor | None = None


class Batch(NamedTuple):
    """Samples of one domain, and how they were drawn.

    Attributes
    ----------
    x : Tensor of shape (b, d) or (b, *shape)
        Features, for a loss; inputs of the network, for an algorithm. Where several processes share a batch, the inputs
        are this one's part, and all else is of the whole batch.
    y : Tensor of shape (b,) or (b, m), optional
        Labels, or numbers in a regression as ``Units`` scales them. Those of a target batch are never read.
    weights : array of shape (b,), optional
        They sum to 1; None means uniform.
    strata : array of shape (b,), optional
        Stratum of each row. Rows of one stratum must be independent draws from it, and strata independent of one
        another: `StratifiedBatchSampler` gives such batches, `OrderedBatchSampler` and `BalancedBatchSampler` do not.
    pool : int or inf, optional
        Samples of the data set that rows were drawn from without replacement, of which a stratum has its weight's
        share; ``math.inf`` for draws with replacement. Strata must come with it, because the unbiased estimator of the
        one is biased for the other.
    bank : Bank or Tensor of shape (m, d), optional
        Features of the whole domain; a tensor is a bank of equal rows.
    domains : Tensor of shape (b,), optional
        Which one of several united sources each sample is from.
    rows : int, optional
        Samples over all processes, where ``x`` is only a part of them.

    Examples
    --------
    >>> from vardass import mmd2
    >>> z = torch.tensor([[0.0], [1.0], [4.0], [6.0]])
    >>> source = Batch(z, weights=[0.25] * 4, strata=[0, 0, 1, 1], pool=math.inf)  # two draws from each stratum
    >>> target = Batch(torch.tensor([[1.0], [3.0]]))  # independent draws of equal weight
    >>> mmd2(source, target, kernel="linear", estimator="unbiased")
    tensor(-0.7500)
    >>> source, target = (Batch(batch.x, bank=bank) for batch, bank in ((source, z), (target, z + 1.0)))
    >>> mmd2(source, target, kernel="linear", estimator="reference")
    tensor(-0.7500)
    """

    x: Tensor
    y: Tensor | None = None
    weights: ArrayLike | None = None
    strata: ArrayLike | Sequence[int] | None = None
    pool: float | None = None
    bank: Bank | Tensor | None = None
    domains: Tensor | None = None
    rows: int | None = None

    @property
    def size(self) -> int:
        """Samples of the batch over all processes."""
        return len(self.x) if self.rows is None else self.rows


class Side(NamedTuple):
    """A checked batch of features: rows z (b, d), weights w (b,), and how it was drawn; ``name`` is x or y."""

    name: str
    z: Tensor
    w: Tensor
    strata: Tensor | None
    pool: float | None
    bank: Bank | None
    is_weighted: bool


def pair_of(
    x: Tensor | Batch, y: Tensor | Batch, weights_x: ArrayLike | None, weights_y: ArrayLike | None
) -> tuple[Side, Side]:
    """Check two batches and all that is known of them, in one dtype, float32 or float64."""
    both = _as_batch(x, weights_x, "x"), _as_batch(y, weights_y, "y")
    z = _same_dtype(both[0].x, both[1].x)
    return _side("x", z[0], both[0]), _side("y", z[1], both[1])


def _as_batch(given: Tensor | Batch, weights: ArrayLike | None, name: str) -> Batch:
    if not isinstance(given, Batch):
        return Batch(given, weights=weights)
    if weights is not None:
        raise InputError(f"{name} is a Batch, which has its weights, but weights_{name} is given too; leave it out")
    return given


def _side(name: str, z: Tensor, batch: Batch) -> Side:
    n, pool = len(z), batch.pool
    w = as_weights(batch.weights, n, z, f"weights_{name}")
    # sums that are off by rounding would be multiplied by the features' distance from the origin
    unit = z.new_full((n,), 1.0 / n) if w is None else w / w.sum()
    ids = None if batch.strata is None else as_labels(batch.strata, n, f"strata of {name}")
    if ids is not None and pool is None:
        raise InputError(
            f"{name} has strata but no pool, so whether its draws repeat samples is not known; give pool=math.inf for "
            "draws with replacement, or the number of samples of the data set for draws without",
            field="pool",
        )
    if pool is not None and pool != math.inf:
        pool = check_count(pool, f"pool of {name}", low=n, remedy="it is the number of samples of the data set")
    bank = None if batch.bank is None else _as_bank(batch.bank, z, f"bank of {name}")
    return Side(name, z, unit, ids, None if pool == math.inf else pool, bank, w is not None)


def _same_dtype(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    for batch, name in ((x, "x"), (y, "y")):
        if not isinstance(batch, Tensor) or not batch.is_floating_point():
            kind = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
            raise InputError(f"{name} must be a tensor of floats, got {kind}; use torch.as_tensor(...).float()")
        require_dense(batch, name)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or 0 in (*x.shape, *y.shape):
        raise InputError(
            "x and y must have shapes (n_x, d) and (n_y, d) with the same d and at least one row, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}; flatten each sample with .flatten(1)"
        )
    if x.device != y.device:
        raise InputError(f"x is on {x.device} and y on {y.device}; move one with .to(device)")
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype), y.to(dtype)


def _as_bank(bank: object, like: Tensor, name: str) -> Bank:
    known = bank if isinstance(bank, Bank) else Bank(bank) if isinstance(bank, Tensor) else None
    d = like.shape[1]
    if known is None or not isinstance(known.rows, Tensor) or known.rows.ndim != 2 or known.rows.shape[1] != d:
        rows = bank if known is None else known.rows
        got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise InputError(
            f"{name} must be features of shape (m, {d}) or a Bank of them, got {got}; pass bank.features() of a "
            "FeatureBank, or vardass.losses.Bank(features, ...)"
        )
    rows = known.rows.detach().to(like)
    w = as_weights(known.weights, len(rows), like, f"weights of {name}")
    unit = rows.new_full((len(rows),), 1.0 / len(rows)) if w is None else w / w.sum()
    ids = None if known.strata is None else as_labels(known.strata, len(rows), f"strata of {name}")
    mean = unit @ rows if known.mean is None else known.mean.detach().to(like)
    return Bank(rows, unit, ids, mean)
