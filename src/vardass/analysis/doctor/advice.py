"""From measurements to what to use: the rules, and their thresholds in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vardass.analysis.doctor.diagnosis import Diagnosis, SamplerEffect

__all__ = ["Advice", "Limits", "advise"]


class Limits(NamedTuple):
    """Thresholds of the rules.

    Examples
    --------
    >>> Limits().worth, Limits(worth=0.5).worth
    (0.8, 0.5)
    """

    worth: float = 0.8
    """Share of uniform batches' noise that a sampler may leave: one that saves less than a fifth is not worth it."""
    neighbour: float = 0.1
    """Similarity to the nearest neighbour below which a kernel is an identity, without noise to save or a slope."""
    contraction: float = 0.5
    """Share of the mean gradient that may be due to the batch's noise: beyond, features shrink rather than align."""
    collapsed: float = 0.01
    """Spread of the features below which they are all alike for the kernel."""
    top_share: float = 0.25
    """Variance that 1% of the samples may carry: 25 times their share, which equal weights may not balance."""
    beyond_clip: float = 1e-3
    """Share of values beyond the clip that asks for scaling; a normal distribution has 1e-15."""
    class_distance: float = 0.2
    """Distance of class shares, above chance and two standard errors, from which aligned batches gain."""
    agreement: float = 0.6
    """Share of pseudo-labels that a second classifier must confirm before batches are built on them."""
    epoch: int = 4
    """Batches that the smaller domain should have: with fewer, a batch is nearly the whole domain."""


@dataclass(frozen=True)
class Advice:
    """One line: what to use for ``topic``, and why.

    Examples
    --------
    >>> print(Advice("sampler", "balanced", "5 % of the noise of uniform batches"))
    sampler: balanced (5 % of the noise of uniform batches)
    """

    topic: str
    choice: str
    why: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.choice} ({self.why})"


def advise(found: Diagnosis, limits: Limits) -> tuple[Advice, ...]:
    """Sampler, estimator, batch size, class alignment and scaling for what was measured."""
    effect, sampler = _sampler(found, limits)
    share = _pull(found, effect)
    return (
        sampler,
        _estimator(effect, share, limits),
        _batch_size(found, share, limits),
        _classes(found, limits),
        _scaling(found, limits),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _sampler(found: Diagnosis, limits: Limits) -> tuple[SamplerEffect, Advice]:
    uniform, *others = found.samplers
    if found.spread < limits.collapsed:
        why = f"the features have collapsed, their spread is {found.spread:.2g}: lower the penalty first"
        return uniform, Advice("sampler", uniform.name, why)
    if _is_identity(found, limits):
        left = _percent(found.irreducible)
        why = f"the kernel is the identity, {left} of the variance cannot be removed by stratification"
        return uniform, Advice("sampler", uniform.name, why)
    outliers = found.top_share > limits.top_share
    best = min(others, key=_noise, default=uniform)
    if not outliers:  # balanced needs no weights, and is the most robust; with outliers what was measured decides
        best = next((effect for effect in others if effect.name == "balanced"), best)
    share = _noise(best) / _noise(uniform) if _noise(uniform) > 0 else 1.0
    if share > limits.worth:
        return uniform, Advice("sampler", uniform.name, f"{best.name} leaves {_percent(share)} of its noise")
    why = f"{_percent(share)} of the noise of uniform batches"
    if outliers:
        why += f", the least where 1 % of the samples carry {_percent(found.top_share)} of it"
    return best, Advice("sampler", best.name, why)


def _is_identity(found: Diagnosis, limits: Limits) -> bool:
    return max((part.neighbour for part in found.parts), default=1.0) < limits.neighbour


def _noise(effect: SamplerEffect) -> float:
    """Variance of the gradient where it was measured, else of the mean embeddings."""
    return effect.excess.value if effect.gradient_noise is None else effect.gradient_noise**2


def _pull(found: Diagnosis, effect: SamplerEffect) -> float:
    """Share of the excess in the mean gradient where that was measured, else in the mean loss."""
    if found.gradient is None or effect.gradient_bias is None:
        return effect.contraction
    total = found.gradient + effect.gradient_bias
    return effect.gradient_bias / total if total > 0 else 0.0


def _estimator(effect: SamplerEffect, share: float, limits: Limits) -> Advice:
    what = "loss" if effect.gradient_bias is None else "gradient"
    why = f"{_percent(share)} of the mean {what} of {effect.name} batches is finite-batch bias"
    if share > limits.contraction:
        why += ", which shrinking the features lowers: lower the penalty, or take larger batches"
        return Advice("estimator", "v with a small penalty", why)
    return Advice("estimator", "v", why)


def _batch_size(found: Diagnosis, share: float, limits: Limits) -> Advice:
    b, most = found.batch_size, max(1, min(found.sizes) // limits.epoch)
    if b > most:
        why = f"{found.batches_per_epoch} batches an epoch; {limits.epoch} leave a sampler something to choose from"
        return Advice("batch size", str(2 ** int(math.log2(most))), why)
    if share <= limits.contraction:
        return Advice("batch size", str(b), "large enough for this loss and sampler")
    # the excess, and its gradient, falls at least as 1/b
    wanted = b * share / (1.0 - share) * (1.0 - limits.contraction) / limits.contraction if share < 1.0 else math.inf
    if wanted > most:
        return Advice("batch size", str(b), f"even {most} would not be enough for this loss; see estimator")
    size = min(2 ** math.ceil(math.log2(wanted)), most)
    return Advice("batch size", str(size), f"there finite-batch bias has {_percent(limits.contraction)} or less")


def _classes(found: Diagnosis, limits: Limits) -> Advice:
    topic, shares = "class alignment", found.classes
    if shares is None:
        return Advice(topic, "not known", "give the labels of the source")
    confirmed = f"nearest centres confirm {_percent(shares.agreement)} of pseudo-labels"
    if shares.agreement < limits.agreement:
        return Advice(topic, "no", f"{confirmed}, too few to build batches on")
    distance, stderr = shares.distance
    differ = f"class shares differ by {distance:.2f}"
    if distance - 2.0 * stderr > max(limits.class_distance, shares.chance):
        return Advice(topic, "yes", f"{differ}, and {confirmed}")
    return Advice(topic, "not needed", f"{differ}, {shares.chance:.2f} by chance alone")


def _scaling(found: Diagnosis, limits: Limits) -> Advice:
    beyond = f"{_percent(found.beyond_clip)} of values are beyond 8 source deviations"
    if found.scaled:
        return Advice("scaling", "robust", f"done, {beyond}")
    if found.beyond_clip > limits.beyond_clip:
        return Advice("scaling", "robust", beyond)
    if found.loss == "mmd" and found.irreducible > limits.worth:
        return Advice("scaling", "kernel with scale='median'", "most of its bandwidths are small for these features")
    return Advice("scaling", "as it is", beyond)
