"""Estimators of the loss of all data from batches of two domains: V-statistic, unbiased and reference.

The loss of all data is D² = |μ_s - μ_t|² with μ = (1/n) Σ_i φ(z_i), for CORAL with the products of centred features
as φ. A batch gives μ̂ = Σ_h w_h φ(z_h) with mean μ. The gradient goes through the batch only.

``"v"``
    |μ̂_s - μ̂_t|². Its mean is D² + Var(μ̂_s) + Var(μ̂_t), and this excess rewards a network for shrinking its features.
``"unbiased"``
    Within a domain only pairs of independent rows count, each with the correct weight: rows of different strata have
    w_i w_j, distinct rows of one stratum w_i w_j W² / Σ_{i≠j} w_i w_j with W the stratum's weight (W² / (q (q - 1)) for
    q draws). A stratum with one draw has no pair, so a `Bank` supplies the mean of κ(z_h, z_j) over its members j; its
    gradient counts twice, because only one side of each pair carries it. Rows of ordered and balanced batches are
    not independent, so this estimator does not apply to them.
``"reference"``
    <μ̂_s - μ̂_t, B_s - B_t> with B the mean embeddings of two banks, and twice its gradient. It is linear in the batch,
    so it only needs weights that make μ̂ unbiased; rows may be coupled.

The latter two have the mean and the mean gradient of D², if the rows of banks are those of the current network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.validate import ArrayLike, as_labels, as_weights, check_count, choose, require_dense

ESTIMATORS = ("v", "unbiased", "reference")


class Bank(NamedTuple):
    """The latest known features of a whole domain, for example from a `FeatureBank`.

    Rows drawn afresh for each batch also work; CORAL then needs the ``mean`` of all rows.

    Attributes
    ----------
    rows : Tensor of shape (m, d)
        Features; no gradient goes through them.
    weights : Tensor of shape (m,), optional
        Weights of the rows, summing to 1; None means uniform.
    strata : Tensor of shape (m,), optional
        Stratum of each row, numbered as in the batch.
    mean : Tensor of shape (d,), optional
        Mean of the whole domain, used by CORAL for centring; by default the mean of the rows.
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
        Features, for a loss; inputs of the network, for an algorithm: those of this process.
    y : Tensor of shape (b,) or (b, m), optional
        Labels, or in a regression numbers scaled by ``Units``. Labels of a target batch are never read.
    weights : array of shape (b,), optional
        They sum to 1; None means uniform.
    strata : array of shape (b,), optional
        Stratum of each row. Rows of one stratum must be independent draws from it, and strata independent of one
        another: `StratifiedBatchSampler` gives such batches, `OrderedBatchSampler` and `BalancedBatchSampler` do not.
    pool : int or inf, optional
        Number of samples of the data set, for draws without replacement (a stratum has its weight's share of them);
        ``math.inf`` for draws with replacement. Needed with ``strata``.
    bank : Bank or Tensor of shape (m, d), optional
        Features of the whole domain; a tensor is a bank with uniform weights.
    domains : Tensor of shape (b,), optional
        The source domain of each sample, where several are combined.
    task_weights : Tensor of shape (b,), optional
        Weights of the task loss, where they are not ``weights``; see `vardass.samplers.task_weights`.
    rows : int, optional
        Samples over all processes, where ``x`` is only a part of them.
    """

    x: Tensor
    y: Tensor | None = None
    weights: ArrayLike | None = None
    strata: ArrayLike | Sequence[int] | None = None
    pool: float | None = None
    bank: Bank | Tensor | None = None
    domains: Tensor | None = None
    task_weights: Tensor | None = None
    rows: int | None = None

    @property
    def size(self) -> int:
        """Samples of the batch over all processes."""
        return len(self.x) if self.rows is None else self.rows


class CheckedBank(NamedTuple):
    """A checked `Bank`, in the dtype and on the device of its batch."""

    rows: Tensor
    weights: Tensor
    strata: Tensor | None
    mean: Tensor


class CheckedBatch(NamedTuple):
    """A checked batch of features: rows z (b, d), weights w (b,), and how it was drawn; ``name`` is x or y."""

    name: str
    z: Tensor
    w: Tensor
    strata: Tensor | None
    pool: float | None
    bank: CheckedBank | None
    is_weighted: bool

    def need_bank(self, estimator: str) -> CheckedBank:
        """The bank, without which an estimator has nothing to compare with."""
        if self.bank is None:
            raise InputError(
                f"estimator={estimator!r} needs features of all data, but {self.name} has no bank; pass "
                "Batch(z, weights=..., bank=bank.features()) with that of a FeatureBank"
            )
        return self.bank


Pair: TypeAlias = "tuple[CheckedBatch, CheckedBatch]"


class DiscrepancyLoss(nn.Module):
    """A loss of two batches: options in the constructor, batches in ``forward``."""

    def __init__(self, estimator: str) -> None:
        super().__init__()
        self.estimator = choose(estimator, "estimator", ESTIMATORS)

    def forward(
        self,
        x: Tensor | Batch,
        y: Tensor | Batch,
        weights_x: ArrayLike | None = None,
        weights_y: ArrayLike | None = None,
    ) -> Tensor:
        """Return the loss of ``x`` and ``y``, features (n_x, d) and (n_y, d) with weights, or Batches."""
        both = _as_batch(x, weights_x, "x"), _as_batch(y, weights_y, "y")
        z = _same_dtype(both[0].x, both[1].x)
        with torch.autocast(z[0].device.type, enabled=False):
            return self._loss((_side("x", z[0], both[0]), _side("y", z[1], both[1])))

    def _loss(self, pair: Pair) -> Tensor:
        """The loss of two checked batches of one dtype, float32 or float64."""
        raise NotImplementedError


def _as_batch(given: Tensor | Batch, weights: ArrayLike | None, name: str) -> Batch:
    if not isinstance(given, Batch):
        return Batch(given, weights=weights)
    if weights is not None:
        raise InputError(f"{name} is a Batch, which has its weights, but weights_{name} is given too; leave it out")
    return given


def _side(name: str, z: Tensor, batch: Batch) -> CheckedBatch:
    n, pool = len(z), batch.pool
    w = _unit_weights(batch.weights, z, f"weights_{name}")
    ids = None if batch.strata is None else as_labels(batch.strata, n, f"strata of {name}")
    if ids is not None and pool is None:
        raise InputError(
            f"{name} has strata but no pool, so it is unknown whether draws can repeat; give pool=math.inf for "
            "draws with replacement, or the number of samples of the data set for draws without",
            field="pool",
        )
    if pool is not None and pool != math.inf:
        pool = check_count(pool, f"pool of {name}", low=n, remedy="it is the number of samples of the data set")
    bank = None if batch.bank is None else _as_bank(batch.bank, z, f"bank of {name}")
    return CheckedBatch(name, z, w, ids, None if pool == math.inf else pool, bank, batch.weights is not None)


def _unit_weights(weights: ArrayLike | None, z: Tensor, name: str) -> Tensor:
    """Weights (n,) of the rows ``z``, uniform for None; their sum is 1 up to rounding.

    Sums that are further off would be multiplied by the features' distance from the origin.
    """
    w = as_weights(weights, len(z), z, name)
    return z.new_full((len(z),), 1.0 / len(z)) if w is None else w / w.sum()


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


def _as_bank(bank: object, like: Tensor, name: str) -> CheckedBank:
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
    unit = _unit_weights(known.weights, rows, f"weights of {name}")
    ids = None if known.strata is None else as_labels(known.strata, len(rows), f"strata of {name}")
    mean = unit @ rows if known.mean is None else known.mean.detach().to(like)
    return CheckedBank(rows, unit, ids, mean)


# --- estimators ---------------------------------------------------------------------------------------


def with_doubled_gradient(value: Tensor) -> Tensor:
    """The value with twice its gradient: a pair of which only one side carries a gradient."""
    return 2.0 * value - value.detach()


def unbiased_pair_weights(side: CheckedBatch) -> Tensor:
    """The matrix U (b, b) with E[Σ_ij U_ij κ(z_i, z_j)] = |μ|², but for strata of one row, see `single_draw_terms`.

    It is the V-statistic's w wᵀ less the form that estimates Var(μ̂): in a stratum with S = Σ w² and
    P = Σ_{i≠j} w_i w_j that has w_i² on its diagonal and -w_i w_j S / P elsewhere. Draws without replacement from N
    samples have 1 - q / N times that variance.
    """
    w, n, s = side.w, len(side.w), side.name
    if side.strata is not None:
        _require_pairs(side, side.strata)
        ids = side.strata.to(w.device)
        same = (ids[:, None] == ids).to(w.dtype)
    elif side.is_weighted:
        raise InputError(
            f"estimator='unbiased' must know how rows of {s} with weights were drawn; pass a Batch with strata, which "
            f"with_weights(..., strata=True) gives, leave out the weights of {s} for independent draws of equal "
            "weight, or use estimator='reference' with banks"
        )
    elif n < 2:
        raise InputError(f"estimator='unbiased' needs at least 2 rows of each domain, got {n}; use a larger batch")
    else:
        same = w.new_ones(n, n)
    outer = torch.outer(w, w)
    distinct = (outer * same).fill_diagonal_(0.0)
    squares, mass = same @ w.square(), same @ distinct.sum(1)
    share = torch.where(mass > 0.0, squares / mass, 0.0)
    left = torch.ones_like(w)
    if side.pool is not None:  # a stratum of one draw keeps nothing: its pair comes from the bank
        drawn = same.sum(1) / (side.pool * (same @ w))
        left = torch.where(mass > 0.0, (1.0 - drawn).clamp_min(0.0), 1.0)
    return outer + distinct * (share * left)[:, None] - torch.diag(w.square() * left)


def _require_pairs(side: CheckedBatch, strata: Tensor) -> None:
    """Two rows of each stratum, or members of it in the bank; checked where the strata are on the CPU."""
    s, bank = side.name, side.bank
    if strata.device.type != "cpu":  # the check would make the training loop wait for the device
        return
    ids, counts = torch.unique(strata, return_counts=True)
    single = ids[counts == 1]
    if len(single) == 0:
        return
    if bank is None or bank.strata is None:
        raise InputError(
            f"{len(single)} of {len(ids)} strata of {s} have one row, too few to estimate their variance; pass a "
            "Batch with bank=Bank(features, strata=sampler.strata.labels), draw twice from each stratum "
            "(draws_per_stratum=2), or use estimator='reference'"
        )
    absent = single[~torch.isin(single, bank.strata.cpu())]
    if len(absent):
        raise InputError(
            f"stratum {int(absent[0])} of {s} has no row in its bank; the bank's strata must be those that the batch "
            "was drawn from"
        )


def single_draw_terms(side: CheckedBatch, kernel: Kernel) -> Tensor | None:
    """Σ_h w_h² (mean of κ(z_h, z_j) over the bank's members j of h) over the strata with one row, gradient doubled.

    One kernel value for each row of the bank. None if no bank has strata. A stratum that is not in the bank gives NaN.
    """
    bank = side.bank
    if side.strata is None or bank is None or bank.strata is None:
        return None
    labels, ids = bank.strata.to(side.z.device), side.strata.to(side.z.device)
    single = (ids[:, None] == ids).sum(1) == 1
    member = (labels[:, None] == ids) & single  # (m, b), at most one of each row
    place = member.to(torch.uint8).argmax(1)
    share = bank.weights * member.any(1)
    values = kernel.paired(side.z[place], bank.rows).to(share.dtype) * share
    mass = share.new_zeros(len(ids)).index_add(0, place, share)
    means = share.new_zeros(len(ids)).index_add(0, place, values) / torch.where(single, mass, 1.0)
    return with_doubled_gradient((side.w.square() * means).sum())
