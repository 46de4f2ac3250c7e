"""Classes of target samples from their structure: class means, clusters and selection in several spaces, and a vote.

A head draws its boundaries where the source needs them, and an MLP on many classes is worse than class means. The
target's own samples say more: their clusters, named by the class means of the source. Labels of the surest samples of
each class improve the projection in which the next labels are made (selective pseudo-labels, Wang and Breckon, AAAI
2020). No space is the best everywhere, so several vote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vardass.adapt.networks import Network
from vardass.errors import InputError
from vardass.scaling import CLIP, deviations
from vardass.validate import row_blocks, some_rows

__all__ = [
    "ClassSpace",
    "Evidence",
    "Vote",
    "class_separation",
    "class_votes",
    "fit_class_space",
    "judge",
    "nearest_neighbours",
]

_ROUNDS = 10  # of selection: the last one takes all samples
_COLUMNS, _WIDTH = 256, 128  # principal directions, and those of them in which classes are told apart
_ITERATIONS = 30  # of the clusters
_MOST_ROWS = 4096  # for principal directions and neighbours
_NEIGHBOURS = 5
_TINY = 1e-9


class ClassSpace(nn.Module):
    """Class means and cluster centres in a projection of one space: features (b, d) -> probabilities (b, C).

    Parameters
    ----------
    tensors : mapping of str to Tensor
        ``shift`` and ``scale`` (d,), ``centre`` (d,), ``directions`` (d, p), ``projection`` (p, w), ``offset`` (w,),
        ``means`` (C, w) of the source's classes and ``clusters`` (C, w) of the target.
    """

    NAMES = ("shift", "scale", "centre", "directions", "projection", "offset", "means", "clusters")
    shift: Tensor
    scale: Tensor
    centre: Tensor
    directions: Tensor
    projection: Tensor
    offset: Tensor
    means: Tensor
    clusters: Tensor

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        dimensions = (1, 1, 1, 2, 2, 1, 2, 2)
        for name, axes in zip(self.NAMES, dimensions, strict=True):
            value = tensors.get(name)
            if value is None or value.ndim != axes or not value.is_floating_point():
                kind = "none" if value is None else f"shape {tuple(value.shape)} and dtype {value.dtype}"
                raise InputError(f"{name} of a class space must be a tensor of numbers with {axes} axes, got {kind}")
            # of one layout, as rounding depends on it: a model that was loaded predicts the same, bit for bit
            self.register_buffer(name, value.contiguous())
        d, (p, w), classes = len(self.shift), self.projection.shape, len(self.means)
        shapes = ((d,), (d,), (d,), (d, p), (p, w), (w,), (classes, w), (classes, w))
        for name, expected in zip(self.NAMES, shapes, strict=True):
            if tuple(getattr(self, name).shape) != expected:
                got = tuple(getattr(self, name).shape)
                raise InputError(f"{name} of a class space has shape {got}, the other tensors need {expected}")

    def forward(self, features: Tensor) -> Tensor:
        """Return the probabilities (b, C)."""
        z = _scaled(features.to(self.shift), self.shift, self.scale)
        z = F.normalize((z - self.centre) @ self.directions, dim=1)
        z = F.normalize(z @ self.projection - self.offset, dim=1)
        return _sureness(z, self.means, self.clusters)


@torch.no_grad()
def fit_class_space(
    source: Tensor, labels: Tensor, target: Tensor, classes: int, *, by_domain: bool = False
) -> ClassSpace:
    """Fit a `ClassSpace` to a labelled source and an unlabelled target.

    Parameters
    ----------
    source : Tensor of shape (n_s, d)
        Features of the source.
    labels : Tensor of shape (n_s,)
        Its classes, 0 to C - 1.
    target : Tensor of shape (n_t, d)
        Features of the target.
    classes : int
        C.
    by_domain : bool
        Standardise each domain by its own statistics. New samples are standardised as the target.
    """
    source, target = source.float(), target.float()
    target_scale = _moments(target) if by_domain else _no_moments(torch.cat([source, target]))
    x, t = _scaled(source, *(_moments(source) if by_domain else target_scale)), _scaled(target, *target_scale)
    both = torch.cat([x, t])
    centre = both.mean(0)
    directions = _principal_directions(both - centre)
    x, t = (F.normalize((z - centre) @ directions, dim=1) for z in (x, t))
    candidate = labels.new_zeros(len(t))
    selected = torch.zeros(len(t), dtype=torch.bool, device=t.device)
    for round_number in range(1, _ROUNDS + 1):
        projection = _class_projection(torch.cat([x, t[selected]]), torch.cat([labels, candidate[selected]]), classes)
        a, b = x @ projection, t @ projection
        offset = torch.cat([a, b]).mean(0)
        a, b = F.normalize(a - offset, dim=1), F.normalize(b - offset, dim=1)
        means = _class_means(a, labels, classes, a.new_zeros(classes, a.shape[1]))
        clusters = means
        for _ in range(_ITERATIONS):
            previous, clusters = clusters, _class_means(b, (b @ clusters.T).argmax(1), classes, clusters)
            if torch.equal(previous, clusters):
                break
        certainty, candidate = _sureness(b, means, clusters).max(1)
        selected = _surest(candidate, certainty, classes, round_number / _ROUNDS)
    tensors = (*target_scale, centre, directions, projection, offset, means, clusters)
    return ClassSpace(dict(zip(ClassSpace.NAMES, tensors, strict=True)))


@torch.no_grad()
def class_separation(source: Tensor, labels: Tensor, held_out: Tensor, truth: Tensor, classes: int) -> float:
    """Chance-corrected accuracy of class means for held-out samples (m, d) of the source itself.

    0 is that of always predicting the most frequent class. Where class means fail on the source, classes overlap, and
    clusters of the target say little about them.
    """
    x, v = (F.normalize(z.float(), dim=1) for z in (source, held_out))
    centre = x.mean(0)
    directions = _principal_directions(x - centre)
    x, v = (F.normalize((z - centre) @ directions, dim=1) for z in (x, v))
    projection = _class_projection(x, labels, classes)
    offset = (x @ projection).mean(0)
    x, v = (F.normalize(z @ projection - offset, dim=1) for z in (x, v))
    means = _class_means(x, labels, classes, x.new_zeros(classes, x.shape[1]))
    most = torch.bincount(truth).double().amax() / len(truth)
    accuracy = ((v @ means.T).argmax(1) == truth).double().mean()
    return float((accuracy - most) / (1.0 - most).clamp_min(_TINY))


def _moments(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation (d,) of each column; 1 for a constant one."""
    deviation = deviations(z)
    return z.mean(0), torch.where(deviation > 0, deviation, 1.0)


def _no_moments(z: Tensor) -> tuple[Tensor, Tensor]:
    # the clip is meant for standardised columns only: others are scaled so that it cuts none of these rows
    largest = z.abs().amax().clamp_min(_TINY)
    return z.new_zeros(z.shape[1]), largest.expand(z.shape[1]).clone()


def _scaled(z: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Rows (n, d) shifted, scaled, clipped and of length 1."""
    return F.normalize(((z - shift) / scale).clamp(-CLIP, CLIP), dim=1)


def _principal_directions(centred: Tensor) -> Tensor:
    """At most 256 directions (d, p) in which the rows vary most."""
    rows = some_rows(centred, _MOST_ROWS)
    if len(rows) < rows.shape[1]:  # the smaller of both Gram matrices
        value, vector = torch.linalg.eigh((rows @ rows.T).double())
        value, vector = value[-_COLUMNS:], vector[:, -_COLUMNS:]
        keep = value > _TINY * value[-1].clamp_min(_TINY)
        return F.normalize(rows.T @ vector[:, keep].to(rows), dim=0)
    directions: Tensor = torch.linalg.eigh((rows.T @ rows).double())[1][:, -_COLUMNS:].to(rows)
    return directions


def _class_projection(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Directions (p, w) in which samples of one class lie close together: supervised locality preserving projection.

    Of the generalised eigenvectors of T = Σ_c n_c Σ_{i in c} x_i x_iᵀ and W + 1, W = T - Σ_c s_c s_cᵀ, those of the
    largest eigenvalues, with n_c the size and s_c the sum of class c.
    """
    x = rows.double()  # in single precision the difference of two large sums would hide the 1
    member = F.one_hot(labels, classes).to(x)
    total = (x * (member @ member.sum(0))[:, None]).T @ x
    sums = member.T @ x
    within = total - sums.T @ sums
    lower = torch.linalg.cholesky(within + torch.eye(len(within), dtype=within.dtype, device=within.device))
    half = torch.linalg.solve_triangular(lower, total, upper=False)
    both = torch.linalg.solve_triangular(lower, half.T, upper=False)
    vector = torch.linalg.eigh((both + both.T) / 2)[1][:, -_WIDTH:]
    projection: Tensor = torch.linalg.solve_triangular(lower.T, vector, upper=True).to(rows)
    return projection


def _class_means(rows: Tensor, labels: Tensor, classes: int, empty: Tensor) -> Tensor:
    """Directions (C, w) of the mean row of each class; that of ``empty`` (C, w) for a class without rows."""
    member = F.one_hot(labels, classes).to(rows)
    sums = member.T @ rows
    return F.normalize(torch.where(member.sum(0)[:, None] > 0, sums, empty), dim=1)


def _near(z: Tensor, centres: Tensor) -> Tensor:
    return (2.0 - 2.0 * z @ centres.T).clamp_min(0.0).sqrt().neg().softmax(1)


def _sureness(z: Tensor, means: Tensor, clusters: Tensor) -> Tensor:
    near = torch.maximum(_near(z, means), _near(z, clusters))
    return near / near.sum(1, keepdim=True)


def _surest(labels: Tensor, certainty: Tensor, classes: int, share: float) -> Tensor:
    """Mask (n,) of the ``share`` of each class that is surest."""
    order = certainty.argsort(descending=True, stable=True)
    order = order[labels[order].argsort(stable=True)]
    sizes = torch.bincount(labels, minlength=classes)
    rank = torch.arange(len(labels), device=labels.device) - (sizes.cumsum(0) - sizes)[labels[order]]
    selected = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    selected[order] = rank < (sizes * share).floor()[labels[order]]
    return selected


def class_votes(probabilities: Sequence[Tensor]) -> Tensor:
    """Shares (b, C) of the votes of several classifiers, each for its most probable class; ties go to the surest.

    A mean of the probabilities decides ties: it counts for half a vote.

    Examples
    --------
    >>> one, other = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.3, 0.7]])
    >>> class_votes([one, other]).argmax(1)
    tensor([0])
    """
    classes = probabilities[0].shape[1]
    votes = sum(F.one_hot(p.argmax(1), classes).to(p) + p / (2 * len(probabilities)) for p in probabilities)
    assert isinstance(votes, Tensor)
    return votes / votes.sum(1, keepdim=True)


class Vote(nn.Module):
    """Vote of class spaces: the inputs, inputs standardised by domain, and features of both networks.

    Parameters
    ----------
    reference : Network
        Trained on the source alone.
    spaces : mapping of str to ClassSpace
        By the names in `SPACES`.
    """

    SPACES: ClassVar[tuple[str, ...]] = ("inputs", "inputs_by_domain", "reference", "adapted")

    def __init__(self, reference: Network, spaces: Mapping[str, ClassSpace]) -> None:
        super().__init__()
        self.reference = reference
        self.spaces = nn.ModuleDict({name: spaces[name] for name in self.SPACES if name in spaces})

    @classmethod
    def from_tensors(cls, reference: Network, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Vote:
        """Build the vote of the spaces ``names`` from ``tensors`` with names such as ``"inputs.means"``."""
        return cls(
            reference,
            {name: ClassSpace({key: tensors.get(f"{name}.{key}") for key in ClassSpace.NAMES}) for name in names},
        )

    def check(self, widths: Mapping[str, int], classes: int) -> None:
        """Refuse spaces that do not fit a network and its samples."""
        for name in self.spaces:
            space = self.spaces.get_submodule(name)
            assert isinstance(space, ClassSpace)
            shape = len(space.shift), len(space.means)
            if shape != (widths[name], classes):
                raise InputError(
                    f"the space {name} takes {shape[0]} columns for {shape[1]} classes, the network has {widths[name]} "
                    f"for {classes}"
                )

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the logarithm of the shares of the votes (b, C) for samples ``x``, of features ``z`` when adapted."""
        return class_votes([space(self._features(name, x, z)) for name, space in self.spaces.items()]).log()

    def _features(self, name: str, x: Tensor, z: Tensor) -> Tensor:
        if name == "adapted":
            return z
        return self.reference.features(x) if name == "reference" else x.flatten(1)


# --- whether to believe it, without target labels ---------------------------------------------------------

MIN_SEPARATION = 0.5
"""Chance-corrected accuracy that class means need on held-out source samples."""
MIN_GAIN = 0.04
"""Neighbour agreement that the vote must have beyond the source-only model."""
ABSENT = 0.08
"""Agreement by which leaving classes out may exceed the gain of the vote before classes count as absent."""
WEAK, MOVED = 0.35, 0.1
"""Neighbour agreement below which neighbours hardly know classes, and how far class shares may move then."""
_STEP = 0.005  # gain in agreement below which no further class is left out


class Evidence(NamedTuple):
    """What speaks for and against the vote; all without target labels.

    Attributes
    ----------
    separation : float
        Chance-corrected accuracy of class means on held-out source samples, see `class_separation`.
    reference, vote : float
        Neighbour agreement of the source-only model and of the vote in the target, see `agreement`.
    pruned : float
        That of the vote without the classes that are better left out.
    moved : float
        Half the sum of the differences between the class shares that both predict.
    changed : float
        Share of the samples for which they predict different classes.
    """

    separation: float
    reference: float
    vote: float
    pruned: float
    moved: float
    changed: float

    @property
    def objection(self) -> str | None:
        """Why the source-only model is the better choice; None if the vote is."""
        if not self.separation >= MIN_SEPARATION:
            return "classes overlap in the source, so clusters of the target say little about classes"
        if self.pruned - self.vote > self.vote - self.reference + ABSENT:
            return "classes of the source seem to be absent from the target"
        if self.vote < WEAK and self.moved > MOVED:
            return "classes seem to have other shares in the target than in the source"
        if not self.vote - self.reference >= MIN_GAIN:  # NaN where there are no neighbours
            return "neighbouring target samples agree on their class as often without adaptation"
        return None


def judge(separation: float, reference: Tensor, votes: Tensor, neighbours: Tensor) -> Evidence:
    """Compare the predictions of two models for the same target samples by what their neighbours say.

    Parameters
    ----------
    separation : float
        See `class_separation`.
    reference : Tensor of shape (m,)
        Classes by the source-only model.
    votes : Tensor of shape (m, C)
        Shares of the votes.
    neighbours : Tensor of shape (m, j)
        Rows of the nearest neighbours in a space that no model was trained in, from `nearest_neighbours`.
    """
    classes, voted = votes.shape[1], votes.argmax(1)
    agreed = agreement(voted, neighbours, classes)
    pruned = _pruned_agreement(votes, neighbours, agreed)
    shares = [torch.bincount(labels, minlength=classes).double() / len(labels) for labels in (reference, voted)]
    moved = float((shares[0] - shares[1]).abs().sum() / 2)
    changed = float((reference != voted).double().mean())
    return Evidence(separation, agreement(reference, neighbours, classes), agreed, pruned, moved, changed)


def nearest_neighbours(z: Tensor, count: int = _NEIGHBOURS) -> Tensor:
    """Rows (n, count) of the nearest neighbours of each row of ``z`` (n, d) by cosine, about the mean."""
    z = F.normalize((z - z.mean(0)).float(), dim=1)
    count = min(count, len(z) - 1)
    blocks = []
    for block in row_blocks(len(z), 1024):
        near = z[block] @ z.T
        rows = torch.arange(block.start, block.stop, device=z.device)
        near.scatter_(1, rows[:, None], -math.inf)
        blocks.append(near.topk(count, dim=1).indices)
    return torch.cat(blocks)


def agreement(labels: Tensor, neighbours: Tensor, classes: int) -> float:
    """How far neighbours agree on their class beyond chance: 0 if shares alone explain it, 1 if all agree.

    Examples
    --------
    >>> agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([[1], [0], [3], [2]]), 2)
    1.0
    """
    observed = (labels[neighbours] == labels[:, None]).double().mean()
    chance = (torch.bincount(labels, minlength=classes).double() / len(labels)).square().sum()
    return float((observed - chance) / (1.0 - chance).clamp_min(_TINY))


def _pruned_agreement(votes: Tensor, neighbours: Tensor, start: float) -> float:
    """Agreement after leaving out one class at a time, that with the largest gain, while there is one."""
    votes, best = votes.clone(), start
    classes = votes.shape[1]
    for _ in range(classes - 2):
        used = torch.unique(votes.argmax(1)).tolist()
        if len(used) <= 2:
            break
        trials = []
        for candidate in used:
            remaining = votes.clone()
            remaining[:, candidate] = -1.0
            trials.append((agreement(remaining.argmax(1), neighbours, classes), candidate))
        value, candidate = max(trials)
        if value < best + _STEP:
            break
        best = value
        votes[:, candidate] = -1.0
    return best
