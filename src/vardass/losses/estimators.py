"""What a batch says of the loss of all data: V-statistic, unbiased and reference estimators.

The loss of all data is D² = |μ_s - μ_t|² with μ = (1/n) Σ_i φ(z_i), for CORAL with the products of centred features
as φ. A batch gives μ̂ = Σ_h w_h φ(z_h) with mean μ. There are three estimators, each with the gradient through
the batch only.

``"v"``
    |μ̂_s - μ̂_t|². Its mean is D² + Var(μ̂_s) + Var(μ̂_t), and this excess rewards a network for shrinking its features.
``"unbiased"``
    Within a domain only pairs of independent rows count, with their due weights: rows of different strata weigh
    w_i w_j, distinct rows of one stratum w_i w_j W² / Σ_{i≠j} w_i w_j with W the stratum's weight (W² / (q (q - 1)) for
    q draws). A stratum with one draw has no such pair: there a `Bank` stands in with the mean of κ(z_h, z_j) over
    its members j, whose gradient counts twice, because only one side of each pair carries it. Rows that are
    chosen to suit one another (ordered, balanced) are not independent across strata, so no pair of them will do.
``"reference"``
    <μ̂_s - μ̂_t, B_s - B_t> with B the mean embeddings of two banks, and twice its gradient. It is linear in the batch,
    so weights that make μ̂ unbiased are all it takes, coupled rows or not.

Mean and mean gradient of the latter two are those of D², where the rows of banks are those of the present network; a
bank that lags behind makes them lag. ``contraction`` c keeps a share of the V-statistic's excess: c V + (1 - c) U.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.validate import (
    ArrayLike,
    as_labels,
    as_tensor,
    as_weights,
    check_count,
    check_number,
    choose,
    require_dense,
)

__all__ = [
    "ESTIMATOR_NAMES",
    "Bank",
    "Draws",
    "Estimator",
    "Side",
    "between_banks",
    "own_pairs",
    "sides_of",
    "stand_ins",
    "twice",
]

ESTIMATOR_NAMES = ("v", "unbiased", "reference")
_ESTIMATORS = {**{name: name for name in ESTIMATOR_NAMES}, "u": "unbiased"}


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

    Examples
    --------
    >>> z = torch.tensor([[0.0], [1.0], [5.0]])
    >>> from vardass import mmd2
    >>> batch, other = z[:2], z[1:]
    >>> mmd2(batch, other, kernel="linear", estimator="reference", bank_x=Bank(z), bank_y=Bank(z + 1.0))
    tensor(2.5000)
    """

    rows: Tensor
    weights: ArrayLike | None = None
    strata: ArrayLike | None = None
    mean: Tensor | None = None


class Draws(TypedDict, total=False):
    """How the rows of a batch were drawn, for the estimators that need to know.

    strata_x, strata_y : array of shape (n_x,) or (n_y,)
        Stratum of each row. Rows of one stratum must be independent draws from it, and strata independent of one
        another: `StratifiedBatchSampler` gives such batches, `OrderedBatchSampler` and `BalancedBatchSampler` do not.
    pool_x, pool_y : int
        Draws are without replacement from a data set of so many samples, of which a stratum has its weight's share.
        None: with replacement; the difference is of order 1 / n.
    bank_x, bank_y : Bank or Tensor of shape (m, d)
        Features of the whole domain; a tensor is a bank of equal rows.

    Examples
    --------
    >>> from vardass import mmd2
    >>> x, y = torch.tensor([[0.0], [1.0], [4.0], [6.0]]), torch.tensor([[1.0], [3.0]])
    >>> draws: Draws = {"strata_x": [0, 0, 1, 1], "strata_y": [0, 0]}  # two independent rows of each stratum
    >>> mmd2(x, y, kernel="linear", weights_x=[0.25] * 4, estimator="unbiased", **draws)
    tensor(-0.7500)
    """

    strata_x: ArrayLike | None
    strata_y: ArrayLike | None
    pool_x: int | None
    pool_y: int | None
    bank_x: Bank | Tensor | None
    bank_y: Bank | Tensor | None


class Estimator(NamedTuple):
    """Which estimator, and the share of the V-statistic in it."""

    name: str
    contraction: float

    @classmethod
    def of(cls, name: str, contraction: float | None) -> Estimator:
        """Check both; None is 1 for ``"v"`` and else 0."""
        known = _ESTIMATORS[choose(name, "estimator", _ESTIMATORS)]
        if contraction is None:
            return cls(known, 1.0 if known == "v" else 0.0)
        share = check_number(contraction, "contraction", low=0.0, high=1.0)
        if known == "v" and share != 1.0:
            raise InputError(
                f"estimator='v' has contraction 1, got {contraction}; use estimator='unbiased' or 'reference' with it"
            )
        return cls(known, share)


class Side(NamedTuple):
    """A checked batch of one domain: rows z (b, d), weights w (b,), and how it was drawn; ``name`` is x or y."""

    name: str
    z: Tensor
    w: Tensor
    strata: Tensor | None
    pool: int | None
    bank: Bank | None
    is_weighted: bool


def sides_of(
    x: Tensor,
    y: Tensor,
    weights_x: ArrayLike | None,
    weights_y: ArrayLike | None,
    *,
    strata_x: ArrayLike | None = None,
    strata_y: ArrayLike | None = None,
    pool_x: int | None = None,
    pool_y: int | None = None,
    bank_x: Bank | Tensor | None = None,
    bank_y: Bank | Tensor | None = None,
) -> tuple[Side, Side]:
    """Check two batches and all that is known of them, in one dtype, float32 or float64."""
    x, y = _as_batches(x, y)
    return (
        _side("x", x, weights_x, strata_x, pool_x, bank_x),
        _side("y", y, weights_y, strata_y, pool_y, bank_y),
    )


def _side(
    name: str, z: Tensor, weights: ArrayLike | None, strata: ArrayLike | None, pool: int | None, bank: object
) -> Side:
    n = len(z)
    w = as_weights(weights, n, z, f"weights_{name}")
    # sums that are off by rounding would be multiplied by the features' distance from the origin
    unit = z.new_full((n,), 1.0 / n) if w is None else w / w.sum()
    ids = None if strata is None else as_labels(strata, n, f"strata_{name}")
    if pool is not None:
        pool = check_count(pool, f"pool_{name}", low=n, remedy="it is the number of samples of the data set")
    known = None if bank is None else _as_bank(bank, z, f"bank_{name}")
    return Side(name, z, unit, ids, pool, known, weights is not None)


def _as_batches(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Check the two batches and bring both to one dtype, float32 or float64."""
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


def twice(value: Tensor) -> Tensor:
    """The value with twice its gradient: a pair of which only one side carries a gradient."""
    return 2.0 * value - value.detach()


def own_pairs(side: Side) -> Tensor:
    """The matrix U (b, b) with E[Σ_ij U_ij κ(z_i, z_j)] = |μ|², but for strata of one row, see `stand_ins`.

    It is the V-statistic's w wᵀ less the form that estimates Var(μ̂): in a stratum with S = Σ w² and
    P = Σ_{i≠j} w_i w_j that has w_i² on its diagonal and -w_i w_j S / P elsewhere. Draws without replacement from N
    samples have 1 - q / N times that variance.
    """
    w, n = side.w, len(side.w)
    if side.strata is None and side.is_weighted:
        s = side.name
        raise InputError(
            f"estimator='unbiased' must know how rows with weights_{s} were drawn; pass strata_{s}, which "
            f"with_weights(..., strata=True) gives, leave out weights_{s} for independent draws of equal weight, or "
            f"use estimator='reference' with bank_{s}"
        )
    if side.strata is None:
        if n < 2:
            raise InputError(f"estimator='unbiased' needs at least 2 rows of each domain, got {n}; use a larger batch")
        same = w.new_ones(n, n)
    else:
        _require_pairs(side)
        ids = side.strata.to(w.device)
        same = (ids[:, None] == ids).to(w.dtype)
    outer = torch.outer(w, w)
    distinct = (outer * same).fill_diagonal_(0.0)
    squares, mass = same @ w.square(), same @ distinct.sum(1)
    share = torch.where(mass > 0.0, squares / mass, 0.0)
    left = torch.ones_like(w)
    if side.pool is not None:  # a stratum of one draw keeps nothing: its pair comes from the bank
        drawn = same.sum(1) / (side.pool * (same @ w))
        left = torch.where(mass > 0.0, (1.0 - drawn).clamp_min(0.0), 1.0)
    return outer + distinct * (share * left)[:, None] - torch.diag(w.square() * left)


def _require_pairs(side: Side) -> None:
    """Two rows of each stratum, or members of it in the bank; looked at where the strata are on the CPU."""
    assert side.strata is not None
    s, bank = side.name, side.bank
    if side.strata.device.type != "cpu":  # to look would make the training loop wait for the device
        return
    ids, counts = torch.unique(side.strata, return_counts=True)
    alone = ids[counts == 1]
    if len(alone) == 0:
        return
    if bank is None or bank.strata is None:
        raise InputError(
            f"{len(alone)} of {len(ids)} strata of strata_{s} have one row, so no pair shows how they vary; pass "
            f"bank_{s}=Bank(features, strata=sampler.strata.labels), draw twice from each stratum "
            "(draws_per_stratum=2), or use estimator='reference'"
        )
    absent = alone[~torch.isin(alone, bank.strata.cpu())]  # type: ignore[union-attr]
    if len(absent):
        raise InputError(
            f"stratum {int(absent[0])} of strata_{s} has no row in bank_{s}; the bank's strata must be those that the "
            "batch was drawn from"
        )


def stand_ins(side: Side, kernel: Kernel) -> Tensor | None:
    """Σ_h w_h² (mean of κ(z_h, z_j) over the bank's members j of h) over the strata with one row, gradient doubled.

    One kernel value for each row of the bank. None if no bank has strata. A stratum that is not in the bank gives NaN.
    """
    bank = side.bank
    if side.strata is None or bank is None or bank.strata is None:
        return None
    labels = as_labels(bank.strata, len(bank.rows)).to(side.z.device)
    ids = side.strata.to(side.z.device)
    alone = (ids[:, None] == ids).sum(1) == 1
    member = (labels[:, None] == ids) & alone  # (m, b), at most one of each row
    place = member.to(torch.uint8).argmax(1)
    share = as_tensor(bank.weights, "weights") * member.any(1)
    values = kernel.paired(side.z[place], bank.rows).to(share.dtype) * share
    mass = share.new_zeros(len(ids)).index_add(0, place, share)
    means = share.new_zeros(len(ids)).index_add(0, place, values) / torch.where(alone, mass, 1.0)
    return twice((side.w.square() * means).sum())


def between_banks(sides: tuple[Side, Side], form: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """<μ̂_x - μ̂_y, B_x - B_y> with twice its gradient; ``form(z, c, r, v)`` is Σ_ij c_i v_j κ(z_i, r_j)."""
    banks = []
    for side in sides:
        if side.bank is None:
            raise InputError(
                f"estimator='reference' compares the batch with features of all data, but bank_{side.name} is missing; "
                "pass bank_x and bank_y, such as bank.features() of a FeatureBank"
            )
        banks.append(side.bank)
    x, y = sides
    v_x, v_y = (as_tensor(bank.weights, "weights") for bank in banks)
    rows = torch.cat([bank.rows for bank in banks])
    return twice(form(torch.cat([x.z, y.z]), torch.cat([x.w, -y.w]), rows, torch.cat([v_x, -v_y])))
