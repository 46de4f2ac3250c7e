"""The same classes on both sides of a batch: source samples by label, target samples by pseudo-label.

Where class shares differ between domains, a discrepancy is lowered by mapping classes onto wrong ones. It is not if
batches hold the same classes in the same shares (implicit class-conditioned alignment, Jiang et al. 2020, arXiv
2006.04996). No target label is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import RBFMixture, fitted_kernel
from vardass.solvers.grouped import fits
from vardass.validate import ArrayLike, as_features, as_labels, check_count, check_number, some_rows

__all__ = ["ALIGNMENT_KERNEL", "EXPLAINED", "ClassAlignment", "align_classes", "explained_by_shares", "task_weights"]

ALIGNMENT_KERNEL = RBFMixture(gammas=(0.25, 0.5, 1.0, 2.0, 4.0), scale="median")
"""For comparing networks: bandwidths follow the median distance, so that shrinking features gains nothing."""
EXPLAINED = 0.35
"""Share of MMD² that class shares must explain to count as its cause: spoken digits, of equal shares, have at most
0.17; sketches of PACS, whose shares differ, 0.38."""
FEWEST_CLASSES = 1.5  # in effect, that pseudo-labels must have: of two with so many, one has a share of 0.14


class ClassAlignment(NamedTuple):
    """Groups and shares of both domains, for ``sampler.refresh(features, **alignment.source)``.

    ``source`` and ``target`` have ``"groups"`` (n,) and ``"shares"`` (g,); where no aligned batch can be made, groups
    of zeros without shares, which have no effect.
    """

    source: dict[str, Any]
    target: dict[str, Any]

    @property
    def is_aligned(self) -> bool:
        """Whether aligned batches can be made."""
        return "shares" in self.source

    @property
    def by_domain(self) -> dict[str, dict[str, Any]]:
        """``{"source": ..., "target": ...}``, as `Refresher` takes them."""
        return self._asdict()


@torch.no_grad()
def align_classes(
    source_labels: ArrayLike,
    target_logits: ArrayLike,
    *,
    strata: int | tuple[int, int],
    confidence: float = 0.0,
    floor: float = 0.2,
    min_size: int = 1,
) -> ClassAlignment:
    """Group source samples by label and target samples by predicted class, for the ``refresh`` of both samplers.

    Every class that both domains have gets the same share in both. Batches are then unbiased for the mixture
    Σ_c share_c P_c of each domain's classes.

    Parameters
    ----------
    source_labels : array of shape (n_s,)
        Classes 0 to C - 1.
    target_logits : array of shape (n_t, C)
        Outputs of the current network, before the softmax.
    strata : int or two of them
        Strata of a batch (of source and target, where they differ): its size.
    confidence : float
        Target samples whose largest probability is below this are left out of all classes and batches.
    floor : float
        Minimum share of a class, as a fraction of 1 / C. A class with fewer pseudo-labels than its rows in a batch,
        m_c < strata / C, gets less than 1 / C, in proportion to m_c, but at least floor / C. A class without any
        pseudo-labels keeps this minimum in the source, so that the network does not forget it; in the target the
        other classes share it in proportion.
    min_size : int
        Minimum number of samples in a stratum, as set for the samplers. Smaller classes are left out.

    Returns
    -------
    ClassAlignment
        Not aligned in three cases: pseudo-labels fill the rows of at most half of the source's classes (an untrained or
        collapsed network); their effective number of classes, the exponential of their entropy, is below 1.5; or
        classes have fewer samples than a batch has strata. With more classes than strata, the class with the smallest
        share is repeatedly merged with the one that the network confuses it with most.

    Examples
    --------
    >>> labels, logits = torch.tensor([0, 0, 0, 1]), torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> aligned = align_classes(labels, logits, strata=2)
    >>> aligned.target["groups"].tolist(), aligned.target["shares"].tolist()
    ([0, 1, 1], [0.5, 0.5])
    """
    confidence = check_number(confidence, "confidence", low=0.0, high=1.0)
    floor = check_number(floor, "floor", low=0.0, high=1.0)
    wanted = [check_count(k, "strata") for k in (strata if isinstance(strata, tuple) else (strata, strata))]
    probabilities = as_features(target_logits, "target_logits").double().softmax(1)
    classes = probabilities.shape[1]
    source = as_labels(source_labels, len(source_labels), "source_labels").to(probabilities.device)
    if int(source.min()) < 0 or int(source.max()) >= classes:
        raise InputError(
            f"source_labels lie in {int(source.min())}..{int(source.max())}, target_logits have {classes} columns; "
            "number the classes as the network does"
        )
    sureness, target = probabilities.max(1)
    target = target.masked_fill(sureness < confidence, -1)

    def counted(groups: Tensor, count: int) -> Tensor:
        return torch.bincount(groups + 1, minlength=count + 1)[1:]

    plain = ClassAlignment(*({"groups": torch.zeros_like(each)} for each in (source, target)))
    seen, known = counted(target, classes), counted(source, classes)
    filled = (seen.double() * classes / wanted[1]).clamp_max(1.0)
    present = int((known > 0).sum())
    if 2.0 * float(filled[known > 0].sum()) <= present or (present > 1 and _effective(seen) < FEWEST_CLASSES):
        return plain
    share = filled.clamp_min(floor).masked_fill(known < min_size, 0.0)
    joint = _joined(share, probabilities, min(wanted))
    count = int(joint.max()) + 1
    total = share.new_zeros(count).index_add_(0, joint, share)
    found = []
    for groups, k in zip((source, target), wanted, strict=True):
        groups = torch.where(groups < 0, groups, joint[groups])
        size = counted(groups, count)
        mine = total.masked_fill(size < min_size, 0.0)
        if not fits(size[mine > 0], k, min_size=min_size):
            return plain
        found.append({"groups": groups, "shares": mine / mine.sum()})
    return ClassAlignment(*found)


def _effective(counts: Tensor) -> float:
    """Exponential of the entropy of the shares that ``counts`` (C,) give."""
    shares = counts.double() / counts.sum()
    return float(torch.special.entr(shares).sum().exp())


def _joined(share: Tensor, probabilities: Tensor, most: int) -> Tensor:
    """Number of the joint class of each class (C,), with at most ``most`` joint classes that have a share."""
    likeness = probabilities.T @ probabilities
    joint = torch.arange(len(share), device=share.device)
    share = share.clone()
    while int((share > 0).sum()) > most:
        least = int(share.masked_fill(share == 0, torch.inf).argmin())
        others = (share > 0) & (torch.arange(len(share), device=share.device) != least)
        # cosine of the columns: a class that is often given is not like all others for that
        cosine = likeness[least] / likeness.diagonal().clamp_min(torch.finfo(likeness.dtype).tiny).sqrt()
        partner = int(cosine.masked_fill(~others, -torch.inf).argmax())
        joint[joint == least] = partner
        share[partner] += share[least]
        share[least] = 0.0
        likeness[partner] += likeness[least]
        likeness[:, partner] += likeness[:, least]
    return joint


def task_weights(weights: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """Weights (b,) of an aligned source batch under which each group counts as much as in the data.

    With them the task loss is that of the source as it is; with ``weights`` it would be that of the aligned shares, and
    the classifier too ready to predict rare classes.

    Parameters
    ----------
    weights : Tensor of shape (b,)
        Those that the sampler gave the batch.
    groups : Tensor of shape (b,)
        Groups of the rows, 0 to g - 1: their labels, unless `align_classes` joined classes.
    sizes : Tensor of shape (g,)
        Samples of each group in the data set.

    Examples
    --------
    >>> task_weights(torch.tensor([0.3, 0.2, 0.5]), torch.tensor([0, 0, 1]), torch.tensor([90, 10]))
    tensor([0.5400, 0.3600, 0.1000])
    """
    share = weights.new_zeros(len(sizes)).index_add_(0, groups, weights)
    found = weights * (sizes.to(weights) / share)[groups]
    return found / found.sum()


def explained_by_shares(source: Tensor, labels: Tensor, target: Tensor, predicted: Tensor) -> float:
    """How much of MMD² between two domains vanishes if the source's classes get the shares of the target's predictions.

    With G the mean kernel values between the source's classes, h those between classes and the target, the source with
    class shares q has MMD²(q) = qᵀ G q - 2 qᵀ h + const, all means over pairs of different samples. Near 1 only shares
    differ; near 0, or below, the classes themselves look different.

    ``source`` (n_s, d) and ``target`` (n_t, d) are features, of which at most 1,000 rows each are used; ``labels``
    (n_s,) the source's classes, ``predicted`` (n_t,) those that the network gives the target.
    """
    x, y = (some_rows(z.detach()).double() for z in (source, target))
    if min(len(x), len(y)) < 2:
        return 0.0  # no pairs
    labels = some_rows(labels).long().to(x.device)
    known = torch.unique(labels)  # a class without samples has no mean embedding
    member = (labels[:, None] == known).double().to(x.device)
    kernel = fitted_kernel(ALIGNMENT_KERNEL, torch.cat([x, y]))
    own, across, rest = (kernel.matrix(a, b) for a, b in ((x, x), (x, y), (y, y)))
    counts = member.sum(0)
    pairs = counts[:, None] * counts - counts.diag()
    between = (member.T @ own.fill_diagonal_(0.0) @ member) / pairs.clamp_min(1.0)
    to_target = (member.T @ across).mean(1) / counts
    constant = rest.fill_diagonal_(0.0).sum() / (len(y) * (len(y) - 1))
    given = (predicted.to(x.device)[:, None] == known).double().mean(0)

    def distance(shares: Tensor) -> float:
        q = shares / shares.sum().clamp_min(torch.finfo(shares.dtype).tiny)
        return float(q @ between @ q - 2.0 * q @ to_target + constant)

    before = distance(counts)
    return 0.0 if before <= 0.0 else 1.0 - distance(given) / before
