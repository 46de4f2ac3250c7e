"""What `diagnose` found, for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from vardass.analysis.batch_noise import Estimate
from vardass.analysis.doctor.advice import Advice
from vardass.scaling import CLIP

__all__ = ["ClassShares", "Diagnosis", "KernelPart", "SamplerEffect"]


@dataclass(frozen=True)
class KernelPart:
    """One term of a sum of kernels, such as one bandwidth of a mixture; both domains together.

    Attributes
    ----------
    name : str
        Such as ``"γ=0.1"``.
    share : float
        Of the variance of a uniform batch's mean embedding, to which the terms add up.
    irreducible : float
        Share of this term's variance that no strata can remove (nearest-neighbour bound over uniform draws): near 1
        where the kernel is close to the identity.
    neighbour : float
        Mean similarity κ(z, z') / √(κ(z, z) κ(z', z')) of a sample and the other most like it; near 0 for the
        identity.

    Examples
    --------
    >>> import torch, vardass
    >>> z = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> found = vardass.diagnose(z[:100], z[100:], batch_size=8, gradient=False)
    >>> [part.name for part in found.parts]
    ['γ=0.001', 'γ=0.01', 'γ=0.1', 'γ=1', 'γ=10']
    >>> found.parts[0].neighbour > found.parts[-1].neighbour
    True
    """

    name: str
    share: float
    irreducible: float
    neighbour: float


@dataclass(frozen=True)
class SamplerEffect:
    """Batches of one sampler.

    Attributes
    ----------
    name : str
        As ``--sampler`` takes it.
    excess : Estimate
        Var(μ̂_s) + Var(μ̂_t), by which the V-statistic exceeds the discrepancy on average; standard error 0 where it
        is exact.
    contraction : float
        The excess over discrepancy + excess: the share of the loss's mean that a network lowers by shrinking its
        features.
    gradient_noise : float or None
        Root mean square deviation of the gradient of λ times the loss from its mean, for the parameters A of a linear
        layer z + z A after the features, at A = 0.
    gradient_bias : float or None
        Distance of that mean from the whole gradient: how strongly the excess pulls. Bandwidths at which the kernel is
        the identity add to the excess, but have no slope. 0 where it is below what the drawn batches can tell.

    Examples
    --------
    >>> import torch, vardass
    >>> z = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> found = vardass.diagnose(z[:100], z[100:], batch_size=8)
    >>> found["balanced"].gradient_noise < found["uniform"].gradient_noise
    True
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
    source, target : tuple of float
        Shares.
    distance : Estimate
        Their total variation distance ½ Σ|p - q|, with the standard error of drawing the samples anew; errors of the
        pseudo-labels come on top.
    chance : float
        Mean distance of two samples of these sizes with the same shares.
    agreement : float
        Share of target samples that head and nearest class centre give the same class: how far to trust pseudo-labels.

    Examples
    --------
    >>> import torch, vardass
    >>> generator = torch.Generator().manual_seed(0)
    >>> classes = torch.arange(200) % 2
    >>> z = torch.randn(200, 4, generator=generator) + 5.0 * classes[:, None]
    >>> found = vardass.diagnose(z, z[classes == 1], labels=classes, batch_size=8, gradient=False)
    >>> found.classes.source, found.classes.distance.value
    ((0.5, 0.5), 0.5)
    """

    source: tuple[float, ...]
    target: tuple[float, ...]
    distance: Estimate
    chance: float
    agreement: float


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; ``print`` it, or see `to_dict`.

    Attributes
    ----------
    loss : {"mmd", "coral"}
        The discrepancy.
    sizes, measured : (int, int)
        Samples of source and target, and how many of them were looked at.
    batch_size : int
        Of each domain.
    penalty : float
        λ.
    discrepancy : float
        The loss of all samples that were looked at, |μ_s - μ_t|².
    spread : float
        1 - mean κ(z, z') / mean κ(z, z): 0 where all features are alike, 1 for the identity.
    irreducible : float
        Share of the variance of uniform batches that no strata can remove, for the kernel as a whole.
    parts : tuple of KernelPart
        Its terms; none if they were not looked at.
    samplers : tuple of SamplerEffect
        Uniform first.
    gradient : float or None
        Norm of the whole gradient of λ times the discrepancy.
    task_gradient : float or None
        Root mean square norm of the cross-entropy's gradient over uniform batches, in the same layer.
    top_share : float
        Share of the variance that the 1% of samples furthest from the mean embedding carry, in the worse domain.
    beyond_clip : float
        Share of values further than 8 source deviations from the source's mean, in the worse domain.
    scaled : bool
        Whether the columns were scaled robustly before all else.
    classes : ClassShares or None
        Without labels None.
    advice : tuple of Advice
        Sampler, estimator, batch size, class alignment, scaling.

    Examples
    --------
    >>> import torch, vardass
    >>> z = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> found = vardass.diagnose(z[:100], z[100:] + 1.0, batch_size=8)
    >>> found.sizes, found.batches_per_epoch, found.advice[0].topic
    ((100, 100), 12, 'sampler')
    """

    loss: str
    sizes: tuple[int, int]
    measured: tuple[int, int]
    batch_size: int
    penalty: float
    discrepancy: float
    spread: float
    irreducible: float
    parts: tuple[KernelPart, ...]
    samplers: tuple[SamplerEffect, ...]
    gradient: float | None
    task_gradient: float | None
    top_share: float
    beyond_clip: float
    scaled: bool
    classes: ClassShares | None
    advice: tuple[Advice, ...] = ()

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in the smaller domain."""
        return min(self.sizes) // self.batch_size

    def __getitem__(self, sampler: str) -> SamplerEffect:
        return {effect.name: effect for effect in self.samplers}[sampler]

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain numbers and text, for JSON."""
        return {**_plain(self), "batches_per_epoch": self.batches_per_epoch}

    def short(self) -> str:
        """One line for the end of a run, and one on classes if labels were given."""
        shares = ", ".join(f"{_percent(effect.contraction)} with {effect.name}" for effect in self.samplers)
        text = f"finite-batch bias in the mean {self.loss.upper()}: {shares} batches of {self.batch_size}; no strata "
        text += f"remove {_percent(self.irreducible)} of that of uniform ones"
        if self.classes is not None:
            text += f"\nclass shares differ by {self.classes.distance.value:.2f} by pseudo-labels "
            text += f"({self.classes.chance:.2f} by chance)"
        return text

    def __str__(self) -> str:
        sizes = " and ".join(f"{n:,}" for n in self.sizes)
        looked = "" if self.sizes == self.measured else f" ({self.measured[0]:,} and {self.measured[1]:,} looked at)"
        loss = self.loss.upper()
        lines = [
            f"{sizes} samples{looked}, batches of {self.batch_size}, {self.batches_per_epoch:,} an epoch",
            f"{loss} {self.discrepancy:.3g}; spread of the features {self.spread:.2g} (0 all alike, 1 all apart)",
            f"{_percent(self.irreducible)} of a uniform batch's variance cannot be removed by stratification",
        ]
        for part in self.parts if len(self.parts) > 1 else ():
            line = f"  {part.name}: {_percent(part.share)} of the variance, {_percent(part.irreducible)} of it not "
            lines.append(
                line + f"removable by stratification; similarity to the nearest neighbour {part.neighbour:.2f}"
            )
        for effect in self.samplers:
            line = f"{effect.name}: {_percent(effect.contraction)} of the mean {loss} is finite-batch bias"
            if effect.gradient_noise is not None:
                line += f"; of the gradient, noise {effect.gradient_noise:.3g} and bias {effect.gradient_bias:.3g}"
            lines.append(line)
        if self.gradient is not None:
            task = "" if self.task_gradient is None else f"; that of a batch's cross-entropy {self.task_gradient:.3g}"
            lines.append(f"whole gradient of {loss} x {self.penalty:g}: {self.gradient:.3g}{task}")
        line = (
            f"1 % of samples carry {_percent(self.top_share)} of the variance; {_percent(self.beyond_clip)} of values"
        )
        lines.append(f"{line} are beyond {CLIP:g} source deviations")
        if self.classes is not None:
            distance, found = self.classes.distance, self.classes
            line = (
                f"class shares differ by {distance.value:.2f} ± {distance.stderr:.2f} ({found.chance:.2f} by chance); "
            )
            lines.append(f"{line}nearest centres confirm {_percent(found.agreement)} of pseudo-labels")
        return "\n".join([*lines, "", "use", *(f"  {line}" for line in self.advice)])


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return {name: _plain(entry) for name, entry in value._asdict().items()}
    if dataclasses.is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
