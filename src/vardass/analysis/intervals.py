"""Confidence intervals of MMD² and CORAL, with and without a difference.

Variance
    By Hoeffding's decomposition that of the unbiased estimate U is exactly

        4 Var(g(x))/n + 4 Var(g(y))/m + 2|Σ_x|²/(n(n-1)) + 2|Σ_y|²/(m(m-1)) + 4<Σ_x, Σ_y>/(nm)

    with g = w = μ_x - μ_y, as a function of a row, and Σ the covariance of φ. The first two terms, of order 1/n, vanish
    where the data sets are alike; the others, of order 1/n², remain.
Interval
    U is skewed, and its standard error σ grows with it: U ± zσ is too low in one of ten samples where a difference is
    of a few σ. The terms of first order are 4λθ, with θ = |w|² the true value and λ = <w, (Σ_x/n + Σ_y/m) w> / |w|².
    So |μ̂_x - μ̂_y| = √V has the standard error √λ at any distance, and the ends are (√V ± z√λ)² - (V - U). The lower
    one is at most that of sets which are alike. The upper one is at least the largest θ for which U is not too low by
    its variance at θ, (θ - U)² = z² (4λθ + second order); heavy tails need this, as they make λ too small where U is.
    Both are cut at 0, below which θ cannot be.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from vardass.analysis.estimates import Measured

__all__ = ["Interval", "confidence_interval", "covariances"]


class Interval(NamedTuple):
    """Ends of the interval, and the standard error of U."""

    low: float
    high: float
    stderr: float


def covariances(measured: Measured) -> tuple[float, float, float]:
    """Unbiased |Σ_x|², |Σ_y|² and <Σ_x, Σ_y>: mean squares of κ centred in both arguments."""
    inside = []
    for rows, square in zip(measured.rows, measured.squares[:2]):
        n = rows.n
        total, by_row = n * (n - 1) * rows.within.mean(), n * (n - 1) ** 2 * rows.within.square().mean()
        centred = n * (n - 1) * square + total.square() / ((n - 1) * (n - 2)) - 2.0 * by_row / (n - 2)
        inside.append(max(0.0, float(centred) / (n * (n - 3))))
    (n, _, of_x, _), (m, _, of_y, _) = measured.rows
    mean = float(of_x.mean())
    between = measured.squares[2] - float(of_x.square().mean()) - float(of_y.square().mean()) + mean * mean
    return inside[0], inside[1], max(0.0, between * n * m / ((n - 1) * (m - 1)))


def confidence_interval(measured: Measured, confidence: float) -> Interval:
    """The interval of the true value at the top of the file."""
    n, m = measured.rows[0].n, measured.rows[1].n
    xx, yy, xy = covariances(measured)
    second = 2.0 * xx / (n * (n - 1)) + 2.0 * yy / (m * (m - 1)) + 4.0 * xy / (n * m)
    first = sum(4.0 * float(rows.witness.var()) / rows.n for rows in measured.rows)
    computing = measured.computing_stderr**2
    # the noise of g adds to its variance twice the second-order term on average
    stderr = math.sqrt(max(first - second, second) + computing)
    z = float(torch.special.ndtri(torch.tensor(0.5 + confidence / 2.0, dtype=torch.float64)))
    value, plug_in = measured.value, max(0.0, measured.v_statistic)
    # no direction has more variance than the root of the sum of all squared ones
    along = math.sqrt(second / 2.0)
    if first < 4.0 * along * plug_in:
        along = first / (4.0 * plug_in)
    shift, alike = z * z * along, z * math.sqrt(second + computing)
    reach = z * math.sqrt(4.0 * along * plug_in + computing)
    low = min(value + shift - reach, value - alike) if plug_in > shift else 0.0
    score = 2.0 * shift + z * math.sqrt(4.0 * along * (max(0.0, value) + shift) + second + computing)
    return Interval(max(0.0, low), max(0.0, value + max(shift + reach, score)), stderr)
