"""Measure whether samplers can help on the features of two domains; `diagnosis` turns this into advice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vardass.analysis.batch_noise import (
    Drawn,
    Estimate,
    LossOfDomains,
    as_domains,
    draw,
    embedding_noise,
    sample_rows,
)
from vardass.analysis.diagnosis import Advice, ClassShares, Diagnosis, KernelPart, Limits, SamplerEffect, advise
from vardass.bounds import nearest_neighbour_bound
from vardass.errors import InputError
from vardass.kernels import CoralKernel, Kernel, RBFMixture, fitted_kernel, mixture_reach, squared_distances
from vardass.losses import CORALLoss, MMDLoss
from vardass.samplers.class_alignment import explained_by_shares
from vardass.samplers.registry import make_sampler
from vardass.scaling import CLIP, robust_scale, scale_columns, standardise
from vardass.validate import ArrayLike, as_labels, check_count, check_number, choose

__all__ = ["Advice", "ClassShares", "Diagnosis", "KernelPart", "Limits", "SamplerEffect", "diagnose"]

Head = Callable[[Tensor], Tensor]

_RESAMPLES = 500
_HEAD_DECAY, _HEAD_STEPS = 1e-2, 50


def diagnose(
    source: ArrayLike,
    target: ArrayLike,
    *,
    labels: ArrayLike | Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    loss: str | MMDLoss | CORALLoss = "mmd",
    batch_size: int = 32,
    penalty: float = 1.0,
    head: Head | None = None,
    scale: bool = False,
    samplers: Sequence[str] = ("stratified", "balanced"),
    batches: int = 32,
    gradient: bool = True,
    bandwidths: bool = True,
    max_rows: int = 1000,
    sizes: tuple[int, int] | None = None,
    limits: Limits | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Measure how much a sampler can help on the features of two domains, and advise what to use.

    Parameters
    ----------
    source, target : array of shape (n_s, d) and (n_t, d)
        Features as the discrepancy sees them: those of the network in training, or embeddings.
    labels : array of shape (n_s,) of integers or texts, optional
        Classes of the source; without them the task's gradient and class shares are not reported.
    class_names : sequence of str, optional
        Names of the classes 0, 1, ...; by default the labels themselves.
    loss : {"mmd", "coral"}, MMDLoss or CORALLoss
        ``"mmd"`` uses the paper's mixture, ``"coral"`` DomainBed's form. An `MMDLoss` provides only its kernel; the
        V-statistic is measured.
    batch_size : int
        Samples of each domain in a batch.
    penalty : float
        λ, the weight of the discrepancy next to the cross-entropy.
    head : callable, optional
        Logits (b, classes) from features (b, d); by default a softmax regression fitted to the source.
    scale : bool
        Scale the columns robustly by the source first, as ``vardass adapt`` does with embeddings.
    samplers : sequence of str
        Which samplers to measure beside ``"uniform"``.
    batches : int
        Batches to draw of each sampler, for gradients and for variances without a closed form.
    gradient, bandwidths : bool
        Whether to measure gradients, and the terms of the kernel one by one.
    max_rows : int
        Maximum number of samples to use of each domain, drawn without replacement; strata are made of these.
    sizes : (int, int), optional
        Full sizes of the domains, if the features are only of a part of them.
    limits : Limits, optional
        Thresholds of the advice.
    seed : int
        Seed of all draws.

    Examples
    --------
    >>> z = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    >>> found = diagnose(z[:200], z[200:] + 0.5, batch_size=16)
    >>> found["stratified"].contraction < found["uniform"].contraction
    True
    """
    x, y = as_domains(source, target)
    known, names = None, class_names
    if labels is not None:
        numbers, class_names = _numbered(labels, class_names)
        known, names = _positions(as_labels(numbers, len(x)).to(x.device), head, class_names)
    penalty = check_number(penalty, "penalty", low=0.0)
    batches = check_count(batches, "batches", low=2, remedy="a variance needs two values")
    max_rows = check_count(max_rows, "max_rows", low=2)
    robust = robust_scale(x, y)
    unclipped = {**robust, "clip": None}
    beyond = max(float((scale_columns(z, unclipped).abs() > CLIP).double().mean()) for z in (x, y))
    if scale:
        x, y = scale_columns(x, robust), scale_columns(y, robust)
    picked = [sample_rows(len(z), max_rows, seed, z.device) for z in (x, y)]
    features = [z[rows] for z, rows in zip((x, y), picked)]
    fewest = min(len(z) for z in features)
    k = check_count(batch_size, "batch_size", high=fewest, remedy=f"{fewest} samples of a domain are used")
    domains = [z.double() for z in features]
    name, kernel, function = _loss(loss, domains)
    whole = LossOfDomains(function, domains, kernel=kernel, limit=max_rows, seed=seed)
    size = penalty * float(whole.whole_gradient.norm()) if gradient else None
    drawn = {}
    for sampler in dict.fromkeys(("uniform", *samplers)):
        entry = partial(make_sampler, sampler, batch_size=k, kernel=kernel, seed=seed)
        drawn[sampler] = draw(sampler, entry, domains, batches, seed=seed)
    classes = task_gradient = None
    if known is not None:
        here = known[picked[0]]
        count = max(int(known.max()) + 1, len(names or ()))
        dtype = features[0].dtype  # that the features came in
        logits = _fit_head(domains[0], here, count) if head is None else lambda z: head(z.to(dtype))
        classes = _class_shares(domains, known, here, logits, names, seed)
        if gradient:
            task_gradient = _task_gradient(whole, drawn["uniform"].batches[0].rows, here, logits)
    matrices = [kernel.square_matrix(z) for z in domains]
    diagonal = sum(float(matrix.diagonal().mean()) for matrix in matrices)
    spread = sum(map(_spread, matrices))
    diagnosis = Diagnosis(
        loss=name,
        sizes=(len(x), len(y)) if sizes is None else sizes,
        measured=(len(domains[0]), len(domains[1])),
        batch_size=k,
        penalty=penalty,
        discrepancy=max(whole.whole, 0.0),
        spread=spread / diagonal if diagonal > 0 else 0.0,
        irreducible=_irreducible(domains, k, kernel, spread),
        parts=_kernel_parts(domains, k, kernel) if bandwidths else (),
        samplers=_effects(drawn, domains, kernel, whole, size),
        gradient=size,
        task_gradient=task_gradient,
        top_share=max(map(_top_share, matrices)),
        beyond_clip=beyond,
        scaled=scale,
        classes=classes,
    )
    return dataclasses.replace(diagnosis, advice=advise(diagnosis, limits or Limits()))


def _loss(loss: Any, domains: list[Tensor]) -> tuple[str, Kernel, MMDLoss | CORALLoss]:
    """Name of the loss, its kernel fitted to both domains, and its V-statistic."""
    if isinstance(loss, str):
        loss = MMDLoss() if choose(loss, "loss", ("mmd", "coral")) == "mmd" else CORALLoss(preset="domainbed")
    if isinstance(loss, CORALLoss):
        # with μ halfway between the means, MMD² in this kernel is the loss
        return "coral", loss.kernel(domains[0].shape[1]).fit(torch.stack([z.mean(0) for z in domains])), loss
    if isinstance(loss, MMDLoss):
        fitted = fitted_kernel(loss.kernel, torch.cat(domains))
        return "mmd", fitted, MMDLoss(kernel=fitted)
    raise InputError(f"loss must be 'mmd', 'coral', an MMDLoss or a CORALLoss, got {type(loss).__name__}")


def _effects(
    drawn: dict[str, Drawn], domains: list[Tensor], kernel: Kernel, whole: LossOfDomains, size: float | None
) -> tuple[SamplerEffect, ...]:
    """How the batches of each sampler change the loss and its gradient, whose norm on all samples is ``size``."""
    noises = embedding_noise(list(drawn.values()), domains, [kernel, kernel], max_columns=max(map(len, domains)))
    effects = []
    for (name, entry), (exact, found, _) in zip(drawn.items(), noises):
        excess = found if exact is None else Estimate(exact, 0.0)
        total = max(whole.whole, 0.0) + excess.value
        noise = bias = None
        if size:
            mse, variance = whole.gradient_noise(entry.batches, list(range(len(entry.batches[0].rows))))
            variance = max(variance, 0.0)
            noise, bias = size * math.sqrt(variance), size * math.sqrt(max(mse.value - variance, 0.0))
        effects.append(SamplerEffect(name, excess, excess.value / total if total > 0 else 0.0, noise, bias))
    return tuple(effects)


# --- the kernel, its terms and its outliers ----------------------------------------------------------------


def _terms(kernel: Kernel, x: Tensor) -> Iterator[tuple[str, Kernel, Tensor]]:
    """Name, kernel and matrix on the rows of ``x`` of all that ``kernel`` is the sum of."""
    if not isinstance(kernel, RBFMixture):
        yield "covariance, mean" if isinstance(kernel, CoralKernel) else repr(kernel), kernel, kernel.square_matrix(x)
        return
    d2 = squared_distances(x, reach=mixture_reach(kernel.rates))  # once for all bandwidths
    for gamma, rate in zip(kernel.gammas, kernel.rates, strict=True):
        yield f"γ={gamma:g}", RBFMixture((rate,)), torch.exp(-rate * d2)


def _kernel_parts(domains: list[Tensor], k: int, kernel: Kernel) -> tuple[KernelPart, ...]:
    parts = []
    for (name, term, of_source), (_, _, of_target) in zip(*(_terms(kernel, z) for z in domains)):
        spread = _spread(of_source) + _spread(of_target)
        neighbour = (_neighbour_similarity(of_source) + _neighbour_similarity(of_target)) / 2
        parts.append(KernelPart(name, spread, _irreducible(domains, k, term, spread), neighbour))
    total = sum(part.share for part in parts) or 1.0
    return tuple(dataclasses.replace(part, share=part.share / total) for part in parts)


def _irreducible(domains: list[Tensor], k: int, kernel: Kernel, spread: float) -> float:
    """Bound on the share of a uniform batch's variance, ``spread / k`` in both domains, that strata leave."""
    bounds = [nearest_neighbour_bound(z, k, kernel=kernel) for z in domains]
    return min(1.0, sum(bound.variance for bound in bounds) * k / spread) if spread > 0 else 0.0


def _spread(matrix: Tensor) -> float:
    """E|φ(z) - μ|², the variance of a single draw."""
    return max(0.0, float(matrix.diagonal().mean()) - float(matrix.mean()))


def _neighbour_similarity(matrix: Tensor) -> float:
    norms = matrix.diagonal().clamp_min(torch.finfo(matrix.dtype).tiny).sqrt()
    return float((matrix / norms[:, None] / norms).fill_diagonal_(-1.0).amax(1).mean())


def _top_share(matrix: Tensor) -> float:
    """Share of Σ|φ_i - μ|² that the 1% of samples with the largest terms have."""
    inner = matrix.mean(1)
    terms = (matrix.diagonal() - 2.0 * inner + inner.mean()).clamp_min(0.0)
    total = float(terms.sum())
    return float(terms.topk(-(-len(terms) // 100)).values.sum()) / total if total > 0 else 0.0


# --- classes and the task ----------------------------------------------------------------------------------


def _numbered(labels: Any, names: Sequence[str] | None) -> tuple[Any, Sequence[str] | None]:
    """Labels that are texts as positions in ``names``, by default all texts that occur; others as they are."""
    array: Any = None if isinstance(labels, Tensor) else np.asarray(labels)
    if array is None or array.ndim != 1 or not all(isinstance(label, str) for label in array.tolist()):
        return labels, names
    texts = sorted(set(array.tolist())) if names is None else list(names)
    return np.array([texts.index(choose(label, "label", texts)) for label in array.tolist()]), texts


def _positions(labels: Tensor, head: Head | None, names: Sequence[str] | None) -> tuple[Tensor, Sequence[str] | None]:
    """Labels as the columns of the logits, and names of these: as they are for a head or names, else from 0."""
    if head is None and names is None:
        values, places = torch.unique(labels, return_inverse=True)
        return places, [str(value) for value in values.tolist()]
    if int(labels.min()) < 0:
        raise InputError(f"labels must be columns of the head's logits, got {int(labels.min())}; number them from 0")
    return labels, names


def _fit_head(x: Tensor, labels: Tensor, classes: int) -> Head:
    """A softmax regression on standardised columns, with a decay of 0.01."""
    z = standardise(x)
    weight = z.new_zeros(classes, z.shape[1] + 1, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight], max_iter=_HEAD_STEPS, line_search_fn="strong_wolfe")

    def logits(rows: Tensor) -> Tensor:
        return rows @ weight[:, :-1].T + weight[:, -1]

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(logits(z), labels) + 0.5 * _HEAD_DECAY * weight[:, :-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    weight.requires_grad_(False)
    return lambda rows: logits(standardise(rows, reference=x))


@torch.no_grad()
def _class_shares(
    domains: list[Tensor], labels: Tensor, here: Tensor, head: Head, names: Sequence[str] | None, seed: int
) -> ClassShares:
    """Compare all ``labels`` of the source with pseudo-labels of the target; ``here`` are those of its rows here."""
    x, y = domains
    logits = head(y)
    classes = logits.shape[1] if logits.ndim == 2 else 0
    if classes <= int(labels.max()) or len(logits) != len(y):
        raise InputError(
            f"head gives logits of shape {tuple(logits.shape)} for {len(y)} samples and labels up to "
            f"{int(labels.max())}; it must return a column for each class"
        )
    names = tuple(map(str, range(classes))) if names is None else tuple(names)
    if len(names) != classes:
        raise InputError(f"there are {len(names)} class_names for {classes} classes; give {classes}")
    pseudo = logits.argmax(1)
    counts = [torch.bincount(found, minlength=classes).cpu().numpy() for found in (labels, pseudo)]
    sizes = [int(count.sum()) for count in counts]
    p, q, pooled = counts[0] / sizes[0], counts[1] / sizes[1], (counts[0] + counts[1]) / sum(sizes)
    generator = np.random.default_rng(seed)

    def distances(*shares: Any) -> Any:
        first, second = (generator.multinomial(n, share, _RESAMPLES) / n for n, share in zip(sizes, shares))
        return np.abs(first - second).sum(1) / 2

    present = torch.bincount(here, minlength=classes)
    centres = x.new_zeros(classes, x.shape[1]).index_add_(0, here, x) / present.clamp_min(1)[:, None]
    nearest = torch.cdist(y, centres).masked_fill(present == 0, torch.inf).argmin(1)
    return ClassShares(
        names=names,
        source=tuple(p.tolist()),
        target=tuple(q.tolist()),
        distance=Estimate(float(np.abs(p - q).sum() / 2), float(distances(p, q).std(ddof=1))),
        chance=float(distances(pooled, pooled).mean()),
        agreement=float((nearest == pseudo).double().mean()),
        explained=explained_by_shares(x, here, y, pseudo),
    )


def _task_gradient(whole: LossOfDomains, batches: Tensor, labels: Tensor, head: Head) -> float:
    """Root mean square norm of the cross-entropy's gradient over batches (b, k) of the source."""
    squares = [
        whole.gradient(F.cross_entropy(head(whole.features(0, rows)), labels[rows])).square().sum() for rows in batches
    ]
    return float(torch.stack(squares).mean().sqrt())
