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
bank that lags behind makes them lag.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import Kernel
from vardass.losses.batch import Side
from vardass.validate import as_labels, as_tensor, choose

__all__ = ["between_banks", "estimator_name", "own_pairs", "stand_ins", "twice"]

_ESTIMATORS = {"v": "v", "unbiased": "unbiased", "reference": "reference", "u": "unbiased"}


def estimator_name(name: str) -> str:
    """The name in full: ``"u"`` is short for ``"unbiased"``."""
    return _ESTIMATORS[choose(name, "estimator", _ESTIMATORS)]


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
            f"estimator='unbiased' must know how rows of {s} with weights were drawn; pass a Batch with strata, which "
            f"with_weights(..., strata=True) gives, leave out the weights of {s} for independent draws of equal "
            "weight, or use estimator='reference' with banks"
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
            f"{len(alone)} of {len(ids)} strata of {s} have one row, so no pair shows how they vary; pass a Batch with "
            "bank=Bank(features, strata=sampler.strata.labels), draw twice from each stratum (draws_per_stratum=2), "
            "or use estimator='reference'"
        )
    absent = alone[~torch.isin(alone, bank.strata.cpu())]  # type: ignore[union-attr]
    if len(absent):
        raise InputError(
            f"stratum {int(absent[0])} of {s} has no row in its bank; the bank's strata must be those that the batch "
            "was drawn from"
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
                f"estimator='reference' compares batches with features of all data, but {side.name} has no bank; pass "
                "Batch(z, weights=..., bank=bank.features()) with that of a FeatureBank"
            )
        banks.append(side.bank)
    x, y = sides
    v_x, v_y = (as_tensor(bank.weights, "weights") for bank in banks)
    rows = torch.cat([bank.rows for bank in banks])
    return twice(form(torch.cat([x.z, y.z]), torch.cat([x.w, -y.w]), rows, torch.cat([v_x, -v_y])))
