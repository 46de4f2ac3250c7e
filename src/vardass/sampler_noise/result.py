"""What a report holds, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["MEASURES", "Estimate", "SamplerRow", "VarianceReport"]

MEASURES = {"variance": "Var(μ̂)", "loss_variance": "Var(loss)", "gradient_mse": "gradient MSE"}
"""Quantities that samplers are compared by, and what they are called."""


class Estimate(NamedTuple):
    """A Monte Carlo value and its standard error, batches counted as independent."""

    value: float
    stderr: float


@dataclass(frozen=True)
class SamplerRow:
    """One sampler of a report. What was not measured, or has no closed form, is None.

    Attributes
    ----------
    name : str
        Of the sampler.
    batch_sizes : tuple of int
        Samples in a batch of each domain.
    exact_variance : float or None
        E|μ̂ - μ|², summed over the domains, where a closed form is known: for uniform draws, and for independent
        draws from strata (section 2.2).
    variance : Estimate
        The same over the drawn batches. With two domains it is by how much the V-statistic of MMD² is too large
        on average.
    bias_ratio : float or None
        |mean of μ̂ - μ| over its root mean square for independent unbiased batches: 1 or less for an unbiased
        sampler, give or take its noise, and growing with the root of ``batches`` for a biased one.
    loss_mean, loss_variance : Estimate or None
        Over independent pairs of a source and a target batch.
    loss_bias : float or None
        ``loss_mean`` less the loss of the whole domains.
    gradient_mse, gradient_variance : Estimate or None
        Mean of |g - G|² over |G|², with g the gradient of a pair's loss and G that of the whole domains' loss;
        and the part of it that is not bias.
    refresh_seconds, batch_seconds : float
        For refreshing the samplers of all domains, and for drawing one batch of each, its share of a plan included.
    """

    name: str
    batch_sizes: tuple[int, ...]
    exact_variance: float | None
    variance: Estimate
    bias_ratio: float | None
    loss_mean: Estimate | None
    loss_bias: float | None
    loss_variance: Estimate | None
    gradient_mse: Estimate | None
    gradient_variance: Estimate | None
    refresh_seconds: float
    batch_seconds: float


@dataclass(frozen=True)
class VarianceReport:
    """Result of `variance_report`.

    Attributes
    ----------
    rows : tuple of SamplerRow
        In the order given.
    baseline : str
        The sampler that the others are compared with.
    kernel, loss : str
        What was measured; ``loss`` is "" without a target domain.
    loss_value : float or None
        Loss of the whole domains.
    sizes : tuple of int
        Samples in each domain.
    batches, gradient_batches : int
        How many were drawn.
    notes : tuple of str
        What a reader of the numbers has to know.
    """

    rows: tuple[SamplerRow, ...]
    baseline: str
    kernel: str
    loss: str
    loss_value: float | None
    sizes: tuple[int, ...]
    batches: int
    gradient_batches: int
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> SamplerRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no sampler {name!r} in the report; it has {', '.join(row.name for row in self.rows)}")

    def relative(self, name: str, measure: str = "variance") -> Estimate | None:
        """One of the `MEASURES` of a sampler over that of the baseline; None where it was not measured."""
        value: Estimate | None = getattr(self[name], measure)
        base: Estimate | None = getattr(self[self.baseline], measure)
        if value is None or base is None:
            return None
        if name == self.baseline:
            return Estimate(1.0, 0.0)
        if not base.value > 0:
            return Estimate(math.nan, math.nan)
        ratio = value.value / base.value
        return Estimate(ratio, math.hypot(value.stderr, ratio * base.stderr) / base.value)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text for loggers and JSON; what is missing or not finite is None."""
        samplers = {}
        for row in self.rows:
            values: dict[str, Any] = {"batch_sizes": list(row.batch_sizes)}
            numbers = {name: value for name, value in vars(row).items() if name not in ("name", "batch_sizes")}
            numbers |= {f"{measure}_relative": self.relative(row.name, measure) for measure in MEASURES}
            for name, value in numbers.items():
                if isinstance(value, Estimate):
                    values[name], values[f"{name}_stderr"] = _finite(value.value), _finite(value.stderr)
                else:
                    values[name] = _finite(value)
            samplers[row.name] = values
        return {
            "kernel": self.kernel,
            "loss": self.loss,
            "loss_value": _finite(self.loss_value),
            "sizes": list(self.sizes),
            "baseline": self.baseline,
            "batches": self.batches,
            "gradient_batches": self.gradient_batches,
            "notes": list(self.notes),
            "samplers": samplers,
        }

    def table(self, *, markdown: bool = False) -> str:
        """Text with a line for each sampler: aligned columns, or a Markdown table."""
        columns = {name: [cell(self, row) for row in self.rows] for name, cell in _COLUMNS.items()}
        columns = {name: cells for name, cells in columns.items() if any(cells)}
        lines = [list(columns), *map(list, zip(*columns.values()))]
        widths = [max(_width(cell) for cell in column) for column in zip(*lines)]
        rule = ["-" * width for width in widths]
        if markdown:
            rule = [rule[0], *(dashes[:-1] + ":" for dashes in rule[1:])]
        table = []
        for line in (lines[0], rule, *lines[1:]):
            gaps = [" " * (width - _width(cell)) for cell, width in zip(line, widths)]
            cells = [line[0] + gaps[0], *(gap + cell for gap, cell in zip(gaps[1:], line[1:]))]
            table.append(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip())
        bullet = "- " if markdown else ""
        return "\n".join([*table, "", *(f"{bullet}{note}" for note in self._legend())])

    def _legend(self) -> list[str]:
        sizes = " and ".join(f"{n:,}" for n in self.sizes)
        measured = f"{sizes} samples, {self.batches} batches, kernel {self.kernel}"
        if self.loss_value is not None:
            measured += f", loss {self.loss} ({self.loss_value:.4g} on all samples)"
        return [f"{measured}; × is relative to {self.baseline}", *self.notes]

    def __str__(self) -> str:
        return self.table()


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _width(text: str) -> int:
    return len(text) - text.count("\u0302")  # the hat of μ̂ stands on the letter before it


def _estimate(value: Estimate | None) -> str:
    return "" if value is None else f"{value.value:.3g} ±{value.stderr:.1g}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _relative(measure: str) -> Callable[[VarianceReport, SamplerRow], str]:
    def cell(report: VarianceReport, row: SamplerRow) -> str:
        ratio = report.relative(row.name, measure)
        return "" if ratio is None else _number(ratio.value)

    return cell


_COLUMNS: dict[str, Callable[[VarianceReport, SamplerRow], str]] = {
    "sampler": lambda report, row: row.name,
    "batch": lambda report, row: "+".join(map(str, row.batch_sizes)),
    "exact Var(μ̂)": lambda report, row: _number(row.exact_variance),
    "Var(μ̂)": lambda report, row: _estimate(row.variance),
    "× Var(μ̂)": _relative("variance"),
    "bias": lambda report, row: _number(row.bias_ratio, 2),
    "loss": lambda report, row: _estimate(row.loss_mean),
    "loss bias": lambda report, row: _number(row.loss_bias, 2),
    "Var(loss)": lambda report, row: _estimate(row.loss_variance),
    "× Var(loss)": _relative("loss_variance"),
    "gradient MSE": lambda report, row: _estimate(row.gradient_mse),
    "× gradient MSE": _relative("gradient_mse"),
    "refresh s": lambda report, row: _number(row.refresh_seconds, 2),
    "ms a batch": lambda report, row: _number(1e3 * row.batch_seconds, 2),
}
