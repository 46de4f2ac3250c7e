"""What figures 1 and 2 share: moments of strata, random covariances, and panels of target against surrogate.

Lemma 1 and Theorem 4 take batch means or draws to be Gaussian, and the paper turns to simulation for the rest. One
independent draw from each stratum needs neither: with x_h the deviation of the draw from its stratum's mean, both
losses are polynomials in the x_h whose mixed terms are uncorrelated, and four moments of each stratum suffice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["StratumMoments", "log_axes", "note", "rho_text", "scale_factors", "scatter", "wishart"]

_DECADES = 2.0  # powers of ten that the scales of one population cover where they vary


@dataclass(frozen=True, eq=False)
class StratumMoments:
    """Moments of one draw z from each of k strata, with x = z - E z; leading dimensions are problems side by side.

    Attributes
    ----------
    mean : Tensor of shape (..., k, d)
        E z.
    cov : Tensor of shape (..., k, d, d)
        E x xᵀ.
    third : Tensor of shape (..., k, d)
        E |x|² x.
    fourth : Tensor of shape (..., k)
        E |x|⁴.
    """

    mean: Tensor
    cov: Tensor
    third: Tensor
    fourth: Tensor

    @classmethod
    def of_points(cls, phi: Tensor, labels: Tensor, k: int) -> StratumMoments:
        """Moments of a uniform draw from each of k strata of points ``phi`` (n, d), none of them empty."""
        member = torch.nn.functional.one_hot(labels, k).to(phi)
        share = member / member.sum(0)
        mean = share.T @ phi
        x = phi - mean[labels]
        square = x.square().sum(1)
        cov = torch.einsum("nk,ni,nj->kij", share, x, x)
        return cls(mean, cov, share.T @ (square[:, None] * x), share.T @ square.square())

    @property
    def trace(self) -> Tensor:
        """E |x|²: (..., k)."""
        return self.cov.diagonal(dim1=-2, dim2=-1).sum(-1)

    @property
    def square(self) -> Tensor:
        """|E x xᵀ|_F²: (..., k)."""
        return self.cov.square().sum((-2, -1))

    def along(self, c: Tensor) -> Tensor:
        """E (c_h·x_h)² for ``c`` (..., k, d): (..., k)."""
        return (c * (self.cov @ c[..., None])[..., 0]).sum(-1)


def wishart(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A Aᵀ/d of ``shape`` (..., d, d), with A standard normal, float64."""
    root = torch.randn(shape, dtype=torch.float64, generator=generator)
    return root @ root.mT / shape[-1]


def scale_factors(count: int, generator: torch.Generator) -> Tensor:
    """Log-uniform factors from 0.01 to 1: (count,)."""
    return 10.0 ** (-_DECADES * torch.rand(count, dtype=torch.float64, generator=generator))


def rho_text(rho: float) -> str:
    """Four digits, never rounded up to one."""
    return "1 exactly" if rho == 1.0 else f"{math.floor(rho * 1e4) / 1e4:.4f}"


def scatter(axes: Axes, x: Tensor, y: Tensor, colour: str, marker: str, label: str) -> None:
    """Many small half-transparent points."""
    axes.plot(
        x.numpy(),
        y.numpy(),
        marker,
        color=colour,
        markersize=2.6,
        alpha=0.6,
        markeredgewidth=0.5,
        label=label,
        rasterized=True,
    )


def note(axes: Axes, notes: Sequence[tuple[float, str]]) -> None:
    """Rank correlations in the colours of their points, in the upper left corner, where rising data leave room."""
    for line, (rho, colour) in enumerate(notes):
        text = "ρ = 1" if rho == 1.0 else f"ρ = {rho_text(rho)}"
        place = (0.05, 0.95 - 0.105 * line)
        axes.text(*place, text, transform=axes.transAxes, fontsize=9.5, color=colour, va="top", fontweight="bold")


def log_axes(axes: Axes) -> None:
    """Logarithmic scales with few plain labels that do not run into each other; call it after the data are drawn."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        decades = math.log10(high / low)
        axis.set_minor_formatter(NullFormatter())
        if decades < 1.7:  # two labels at least
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades > 0.7 else (1.0, 2.0, 3.0, 5.0, 7.0)))
        elif decades > 4.0:
            axis.set_major_locator(LogLocator(numticks=5))
        if low > 1e-4 and high < 1e5:
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
