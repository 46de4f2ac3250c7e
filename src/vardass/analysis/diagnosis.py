"""The result of `diagnose`, and the advice: rules and thresholds in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from vardass.analysis.batch_noise import Estimate
from vardass.files import plain
from vardass.samplers.class_alignment import FEWEST_CLASSES
from vardass.scaling import CLIP


@dataclass(frozen=True)
class Advice:
    """One line: what to use for ``topic``, and why."""

    topic: str
    choice: str
    why: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.choice} ({self.why})"


@dataclass(frozen=True)
class KernelPart:
    """One term of a sum of kernels, such as one bandwidth of a mixture (``"γ=0.1"``); both domains together.

    ``neighbour`` is the mean κ(z, z') / √(κ(z, z) κ(z', z')) of a sample and the one most like it. Close to the
    identity it is near 0, and ``irreducible`` near 1.
    """

    name: str
    share: float  # of the variance of a uniform batch's mean embedding, to which the terms add up
    irreducible: float  # share of this term's variance that no strata can remove (nearest-neighbour bound)
    neighbour: float


@dataclass(frozen=True)
class SamplerEffect:
    """Batches of one sampler, with its name as ``--sampler`` takes it.

    Attributes
    ----------
    excess : Estimate
        Var(μ̂_s) + Var(μ̂_t), by which the V-statistic exceeds the discrepancy on average; standard error 0 where it
        is exact.
    contraction : float
        Excess / (discrepancy + excess): the share of the mean loss that shrinking the features would lower.
    gradient_noise : float or None
        Root mean square deviation of the gradient of λ times the loss from its mean, for the parameters A of a linear
        layer z + z A after the features, at A = 0.
    gradient_bias : float or None
        Distance of that mean from the whole gradient; 0 where it is below the noise of the drawn batches. Bandwidths at
        which the kernel is the identity add to the excess, but not to this: they have no slope.
    """

    name: str
    excess: Estimate
    contraction: float
    gradient_noise: float | None
    gradient_bias: float | None


@dataclass(frozen=True)
class ClassShares:
    """Shares of the classes: labels of the source, pseudo-labels of the target.

    Attributes
    ----------
    distance : Estimate
        Their total variation distance ½ Σ|p - q|, with its standard error over new samples; errors of the
        pseudo-labels are not included.
    chance : float
        Mean distance of two samples of these sizes with the same shares.
    agreement : float
        Share of target samples for which the head and the nearest class centre predict the same class.
    explained : float
        Share of MMD² that vanishes if the source's classes get the pseudo-labels' shares, see `explained_by_shares`:
        near 1 the shares differ, near 0 the inputs have shifted and pseudo-labels with them.
    """

    names: tuple[str, ...]
    source: tuple[float, ...]
    target: tuple[float, ...]
    distance: Estimate
    chance: float
    agreement: float
    explained: float

    @property
    def most_frequent(self) -> tuple[str, float]:
        """The class that has most of the pseudo-labels, and its share of them."""
        share = max(self.target)
        return self.names[self.target.index(share)], share

    @property
    def effective(self) -> float:
        """Effective number of classes of the pseudo-labels: the exponential of their entropy."""
        return math.exp(-sum(share * math.log(share) for share in self.target if share > 0))


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; ``print`` it, or see `to_dict`.

    Attributes
    ----------
    sizes, measured : (int, int)
        Samples of source and target, and how many of them were measured.
    discrepancy : float
        The loss of all measured samples, |μ_s - μ_t|².
    spread : float
        1 - mean κ(z, z') / mean κ(z, z): 0 if all features are equal to the kernel, 1 for the identity.
    irreducible : float
        Share of the variance of uniform batches that no strata can remove, for the kernel as a whole.
    gradient, task_gradient : float or None
        Norm of the whole gradient of λ times the discrepancy; root mean square norm of the cross-entropy's gradient
        over uniform batches, in the same layer.
    top_share, beyond_clip : float
        Share of the variance that the 1% of samples furthest from the mean embedding carry, and share of values
        further than 8 source deviations from the source's mean; of the worse domain.
    """

    loss: str
    sizes: tuple[int, int]
    measured: tuple[int, int]
    batch_size: int
    penalty: float
    discrepancy: float
    spread: float
    irreducible: float
    parts: tuple[KernelPart, ...]  # none if they were not looked at
    samplers: tuple[SamplerEffect, ...]  # uniform first
    gradient: float | None
    task_gradient: float | None
    top_share: float
    beyond_clip: float
    scaled: bool
    classes: ClassShares | None  # None without labels
    advice: tuple[Advice, ...] = ()

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in the smaller domain."""
        return min(self.sizes) // self.batch_size

    def __getitem__(self, sampler: str) -> SamplerEffect:
        return {effect.name: effect for effect in self.samplers}[sampler]

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain numbers and text, for JSON."""
        return {**plain(self), "batches_per_epoch": self.batches_per_epoch}

    def short(self) -> str:
        """One line for the end of a run."""
        shares = ", ".join(f"{_percent(effect.contraction)} with {effect.name}" for effect in self.samplers)
        return (
            f"of the mean {self.loss.upper()} in batches of {self.batch_size}, {shares} draws comes from their small "
            f"size (less is better); no strata can remove more than {_percent(1.0 - self.irreducible)} of the variance"
        )

    def __str__(self) -> str:
        """The advice, and below it the numbers that it comes from."""
        sizes, measured = (" and ".join(f"{n:,}" for n in counts) for counts in (self.sizes, self.measured))
        looked_at = "" if sizes == measured else f" ({measured} looked at)"
        loss = self.loss.upper()
        lines = ["use", *(f"  {line}" for line in self.advice), "", "measured"]
        lines += [
            f"  {sizes} samples{looked_at}, batches of {self.batch_size}, {self.batches_per_epoch:,} an epoch",
            f"  {loss} {self.discrepancy:.3g}; spread of the features {self.spread:.2g} (0 all alike, 1 all apart)",
            f"  no strata can remove more than {_percent(1.0 - self.irreducible)} of a uniform batch's variance",
        ]
        for part in self.parts if len(self.parts) > 1 else ():
            lines.append(
                f"    {part.name}: {_percent(part.share)} of the variance, of which any strata leave "
                f"{_percent(part.irreducible)}; similarity to the nearest neighbour {part.neighbour:.2f}"
            )
        for effect in self.samplers:
            line = f"  {effect.name}: {_percent(effect.contraction)} of the mean {loss} is finite-batch bias"
            if effect.gradient_noise is not None:
                share = _percent(self.relative_noise(effect))
                line += f"; gradient: noise {effect.gradient_noise:.3g} ({share}), bias {effect.gradient_bias:.3g}"
            lines.append(line)
        if self.gradient is not None:
            task = "" if self.task_gradient is None else f"; that of a batch's cross-entropy {self.task_gradient:.3g}"
            lines.append(f"  whole gradient of {loss} x {self.penalty:g}: {self.gradient:.3g}{task}")
        line = f"  1 % of samples carry {_percent(self.top_share)} of the variance"
        lines.append(f"{line}; {_percent(self.beyond_clip)} of values are beyond {CLIP:g} source deviations")
        if self.classes is not None:
            found, (value, stderr), (name, most) = self.classes, self.classes.distance, self.classes.most_frequent
            confirmed = _percent(found.agreement)
            lines += [
                f"  class shares of pseudo-labels differ from the source's by {value:.2f} ± {stderr:.2f} "
                f"({found.chance:.2f} by chance), which explains {_percent(max(found.explained, 0.0))} of MMD²",
                f"  {_percent(most)} of pseudo-labels are {name}; nearest centres confirm {confirmed} of all",
            ]
        return "\n".join(lines)

    def relative_noise(self, effect: SamplerEffect) -> float:
        """Root mean square noise of a sampler's batches over that of uniform ones, which are the first.

        Of the gradient where it was measured, else of the mean embeddings.
        """
        mine, uniform = (
            math.sqrt(max(each.excess.value, 0.0)) if each.gradient_noise is None else each.gradient_noise
            for each in (effect, self.samplers[0])
        )
        return mine / uniform if uniform > 0 else 1.0


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


# --- from measurements to what to use ---------------------------------------------------------------------


class Limits(NamedTuple):
    """Thresholds of the rules, explained in the troubleshooting guide."""

    worth: float = 0.9  # share of uniform batches' noise that a sampler may leave: a fifth less variance
    neighbour: float = 0.1  # similarity to the nearest neighbour below which a kernel is an identity
    contraction: float = 0.5  # share of the mean gradient due to finite-batch bias: beyond, features shrink
    collapsed: float = 0.01  # spread of the features below which they are all alike for the kernel
    top_share: float = 0.25  # variance that 1% of the samples may carry: 25 times their share
    beyond_clip: float = 1e-3  # share of values beyond the clip that asks for scaling; a normal distribution has 1e-15
    class_distance: float = 0.2  # of class shares, above chance and two standard errors: aligned batches gain
    # of MMD², by different class shares: below, the inputs have shifted too, and pseudo-labels with them. Watch data
    # have equal shares, and 0.5 by pseudo-labels of a network that is not adapted
    explained: float = 0.8
    agreement: float = 0.6  # share of pseudo-labels that a second classifier must confirm
    epoch: int = 4  # batches that the smaller domain should have: with fewer, a batch is nearly the whole domain


def advise(found: Diagnosis, limits: Limits) -> tuple[Advice, ...]:
    """Sampler, estimator, batch size, class alignment and scaling for what was measured."""
    effect, sampler = _sampler(found, limits)
    share, part = effect.contraction, "loss"  # of the mean gradient where that was measured
    if found.gradient is not None and effect.gradient_bias is not None:
        total = found.gradient + effect.gradient_bias
        share, part = effect.gradient_bias / total if total > 0 else 0.0, "gradient"
    choice, why = "v", f"{_percent(share)} of the mean {part} of {effect.name} batches is finite-batch bias"
    if share > limits.contraction:
        choice = "v with a small penalty"
        why += ", which shrinking the features lowers: lower the penalty, or take larger batches"
    estimator = Advice("estimator", choice, why)
    return sampler, estimator, _batch_size(found, share, limits), _classes(found, limits), _scaling(found, limits)


def _sampler(found: Diagnosis, limits: Limits) -> tuple[SamplerEffect, Advice]:
    uniform, *others = found.samplers
    if found.spread < limits.collapsed:
        why = f"the features have collapsed, their spread is {found.spread:.2g}: lower the penalty first"
        return uniform, Advice("sampler", uniform.name, why)
    if max((part.neighbour for part in found.parts), default=1.0) < limits.neighbour:
        why = f"the kernel is the identity, any strata leave {_percent(found.irreducible)} of the variance"
        return uniform, Advice("sampler", uniform.name, why)
    outliers = found.top_share > limits.top_share
    best = min(others, key=found.relative_noise, default=uniform)
    if not outliers:  # balanced needs no weights, and is the most robust; with outliers what was measured decides
        best = next((effect for effect in others if effect.name == "balanced"), best)
    share = found.relative_noise(best)
    if share > limits.worth:
        return uniform, Advice("sampler", uniform.name, f"{best.name} batches have {_percent(share)} of its noise")
    why = f"{_percent(share)} of the noise of uniform batches"
    if outliers:
        why += f", the least where 1 % of the samples carry {_percent(found.top_share)} of the variance"
    return best, Advice("sampler", best.name, why)


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
    later = "let the discrepancy act first, as vardass adapt does"
    if shares is None:
        return Advice(topic, "not known", "give the labels of the source")
    confirmed = f"nearest centres confirm {_percent(shares.agreement)} of pseudo-labels"
    if shares.agreement < limits.agreement:
        return Advice(topic, "no", f"{confirmed}, too few to build batches on")
    if sum(share > 0 for share in shares.source) > 1 and shares.effective < FEWEST_CLASSES:
        name, most = shares.most_frequent
        why = f"{_percent(most)} of pseudo-labels are {name}: the inputs have shifted, more likely than the classes"
        return Advice(topic, "not yet", f"{why}; {later}")
    distance, stderr = shares.distance
    differ = f"class shares differ by {distance:.2f} ± {stderr:.2f} by pseudo-labels"
    least = max(limits.class_distance, shares.chance)
    if distance - 2.0 * stderr <= least:
        return Advice(topic, "not needed", f"{differ}, not clearly more than {least:.2f}")
    explained = f"explains {_percent(max(shares.explained, 0.0))} of MMD²"
    if shares.explained < limits.explained:
        return Advice(topic, "not yet", f"{differ}, but that {explained}: the inputs have shifted too; {later}")
    return Advice(topic, "yes", f"{differ}, which {explained}, and {confirmed}")


def _scaling(found: Diagnosis, limits: Limits) -> Advice:
    beyond = f"{_percent(found.beyond_clip)} of values are beyond 8 source deviations"
    if found.scaled:
        return Advice("scaling", "robust", f"done, {beyond}")
    if found.beyond_clip > limits.beyond_clip:
        return Advice("scaling", "robust", beyond)
    if found.loss == "mmd" and found.irreducible > limits.worth**2:  # of the variance
        return Advice("scaling", "kernel with scale='median'", "most of its bandwidths are small for these features")
    return Advice("scaling", "as it is", beyond)
