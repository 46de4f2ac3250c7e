"""What batch samplers do to the noise of training: one report for any of them on given features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vardass.analysis.batch_noise import (
    Drawn,
    EmbeddingErrors,
    Estimate,
    LossOfDomains,
    check_samplers,
    draw,
    embedding_errors,
    exact_variance,
)
from vardass.errors import InputError
from vardass.files import plain
from vardass.kernels import FunctionKernel, KernelLike, as_kernel, fitted_kernel
from vardass.refresh.feature_extraction import evaluation_mode
from vardass.samplers import UniformBatchSampler
from vardass.table import Table, TableRow, render
from vardass.validate import ArrayLike, as_features, as_generator, check_count

__all__ = ["MEASURES", "Estimate", "SamplerRow", "VarianceReport", "variance_report"]

MEASURES = {"variance": "Var(μ̂)", "loss_variance": "Var(loss)", "gradient_mse": "gradient MSE"}
"""Quantities that samplers are compared by, and what they are called."""


# --- what a report holds, and how it is shown --------------------------------------------------------------


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
    refresh_seconds: float
    batch_seconds: float
    loss_mean: Estimate | None = None
    loss_bias: float | None = None
    loss_variance: Estimate | None = None
    gradient_mse: Estimate | None = None
    gradient_variance: Estimate | None = None


@dataclass(frozen=True)
class VarianceReport:
    """Result of `variance_report`.

    Attributes
    ----------
    rows : tuple of SamplerRow
        In the order given; ``baseline`` names the one that the others are compared with.
    kernel, loss : str
        What was measured; ``loss`` is "" without a target domain.
    loss_value : float or None
        Loss of the whole domains, which have ``sizes`` samples.
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
        found = {name: value for name, value in vars(self).items() if name != "rows"}
        found["samplers"] = {}
        for row in self.rows:
            numbers = {**vars(row), **{f"{name}_relative": self.relative(row.name, name) for name in MEASURES}}
            del numbers["name"]
            for name, value in list(numbers.items()):
                if isinstance(value, Estimate):
                    numbers[name], numbers[f"{name}_stderr"] = value
            found["samplers"][row.name] = numbers
        result: dict[str, Any] = plain(found)
        return result

    def table(self, *, markdown: bool = False) -> str:
        """Text with a line for each sampler: aligned columns, or a Markdown table."""
        columns = {name: [cell(self, row) for row in self.rows] for name, cell in _COLUMNS.items()}
        columns = {name: cells for name, cells in columns.items() if any(cells)}
        title = f"{' and '.join(f'{n:,}' for n in self.sizes)} samples, {self.batches} batches, kernel {self.kernel}"
        if self.loss_value is not None:
            title += f", loss {self.loss} ({self.loss_value:.4g} on all samples)"
        found = Table(
            "noise",
            f"{title}; × is relative to {self.baseline}",
            corner="sampler",
            columns=tuple(columns),
            rows=tuple(TableRow(row.name, cells) for row, *cells in zip(self.rows, *columns.values())),  # type: ignore[arg-type]
            decimals=(0,) * len(columns),
            notes=self.notes,
        )
        return render([found], "markdown" if markdown else "text").rstrip("\n")

    def __str__(self) -> str:
        return self.table()


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


# --- making one --------------------------------------------------------------------------------------------


def variance_report(
    samplers: Mapping[str, Any],
    source: ArrayLike,
    target: ArrayLike | None = None,
    *,
    kernel: KernelLike = "mmd",
    loss: str | Callable[..., Tensor] | None = None,
    batches: int = 500,
    gradient_batches: int = 100,
    model: nn.Module | None = None,
    source_inputs: ArrayLike | None = None,
    target_inputs: ArrayLike | None = None,
    baseline: str | None = None,
    refresh: bool = True,
    max_columns: int = 20_000,
    seed: int = 0,
) -> VarianceReport:
    """Measure the noise of the batches of several samplers on the same features.

    For each sampler: the variance of the mean embedding (exact where a closed form exists, and from draws), mean
    and variance of the loss over pairs of a source and a target batch, the mean squared error of its
    gradient, and the seconds that refreshing and drawing take. It takes n² kernel evaluations for each domain.

    Parameters
    ----------
    samplers : mapping from name to factory or samplers
        ``factory(n)`` makes a sampler of n samples; it is called for each domain. Or a ready sampler (source only)
        or a pair of them, which are copied, so that a training stream is not disturbed. A sampler that is not a
        `MinibatchSampler` is iterated and yields lists of indices, with an attribute ``weights`` or without. A
        ready pair of one seed that plans both
        domains together, such as two `PairedBatchSampler`, is refreshed with both, and its batches are taken in step.
    source, target : array of shape (n_s, d) and (n_t, d)
        Features of all samples. Without ``target`` only the mean embedding is measured.
    kernel : Kernel, name or callable
        Whose mean embedding is measured; what it takes from data comes from each domain, as in samplers.
    loss : {"mmd2", "mmd2-u", "coral"} or callable, optional
        V-statistic or unbiased estimate of MMD² with ``kernel``, fitted to both domains together, or the paper's
        CORAL; by default the one that belongs to ``kernel``. The unbiased one is for samplers of independent draws, two
        or more from each stratum. A callable, such as `CORALLoss`, is called as
        ``loss(x, y, weights_x=..., weights_y=...)``, and as ``loss(x, y)`` with all samples.
    batches : int
        Batches drawn from each sampler in each domain.
    gradient_batches : int
        How many pairs of them have their gradient computed, all at most; 0 leaves it out.
    model : nn.Module, optional
        The featuriser: gradients are with respect to its parameters, with features ``model(source_inputs[rows])``
        (b, d) in evaluation mode. Without it they are those of a linear layer z + z A after the features at A = 0:
        a proxy, which sees the features' noise but not how inner layers weigh it.
    source_inputs, target_inputs : array of shape (n_s, ...) and (n_t, ...)
        What the model takes.
    baseline : str, optional
        Name of the sampler to compare with; by default the first uniform one, else the first.
    refresh : bool
        Refresh the samplers on the features first. False measures ready samplers with the strata that they have,
        for example to see what staleness costs.
    max_columns : int
        In a larger domain μ comes from that many samples, drawn without replacement, and the excess of |μ̂ - μ|²
        that this brings on average is subtracted; the whole loss and its gradient come from these samples too.
    seed : int
        Of the draws and of the pairing.

    Returns
    -------
    VarianceReport
        ``.table()`` for people, ``.to_dict()`` for loggers; `vardass.plots.report_figure` draws it.

    Examples
    --------
    >>> from vardass.samplers import StratifiedBatchSampler
    >>> z = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    >>> report = variance_report(
    ...     {
    ...         "uniform": lambda n: UniformBatchSampler(n, batch_size=8),
    ...         "stratified": lambda n: StratifiedBatchSampler(n, batch_size=8),
    ...     },
    ...     z,
    ...     batches=50,
    ... )
    >>> report["stratified"].exact_variance < report["uniform"].exact_variance
    True
    """
    batches = check_count(batches, "batches", low=2, remedy="a variance needs two values")
    gradient_batches = min(batches, check_count(gradient_batches, "gradient_batches", low=0))
    if gradient_batches == 1:
        raise InputError("gradient_batches must be 0 or at least 2, got 1; a variance needs two values")
    max_columns = check_count(max_columns, "max_columns", low=2)
    entries = check_samplers(samplers)
    features = _domains(source, target)
    chosen = as_kernel(kernel)
    # samplers get the features as they are; a user's function may hold tensors of their type
    domains = features if isinstance(chosen, FunctionKernel) else [x.double() for x in features]
    whole: LossOfDomains | None = None
    if target is not None:
        inputs = (source_inputs, target_inputs)
        options: dict[str, Any] = {"model": model, "inputs": inputs} if gradient_batches else {}
        whole = LossOfDomains(loss, domains, kernel=chosen, limit=max_columns, seed=seed, **options)
    drawn = {name: draw(name, entry, features, batches, refresh=refresh, seed=seed) for name, entry in entries.items()}
    baseline = _baseline(baseline, drawn)
    embeddings = [
        embedding_errors(
            x,
            fitted_kernel(chosen, x),
            [draws.batches[domain] for draws in drawn.values()],
            max_columns=max_columns,
            seed=seed,
        )
        for domain, x in enumerate(domains)
    ]
    measured: dict[str, dict[str, Any]] = {name: {} for name in drawn}
    if whole is not None:
        shuffled = torch.randperm(batches, generator=as_generator(seed)).tolist()
        with evaluation_mode(model):  # a sample's features must not depend on its batch
            for name, draws in drawn.items():
                pairing = list(range(batches)) if draws.in_step else shuffled
                measured[name] |= whole.noise(draws.batches, pairing)
                if gradient_batches:
                    measured[name] |= whole.gradient_noise(draws.batches, pairing[:gradient_batches])
    return VarianceReport(
        rows=tuple(
            _row(name, draws, place, domains, embeddings, measured[name])
            for place, (name, draws) in enumerate(drawn.items())
        ),
        baseline=baseline,
        kernel=kernel if isinstance(kernel, str) else repr(chosen),
        loss="" if whole is None else whole.name,
        loss_value=None if whole is None else whole.whole,
        sizes=tuple(len(x) for x in domains),
        batches=batches,
        gradient_batches=0 if whole is None else gradient_batches,
        notes=tuple(_notes(domains, max_columns, whole.note if whole is not None and gradient_batches else None)),
    )


def _domains(source: ArrayLike, target: ArrayLike | None) -> list[Tensor]:
    x = as_features(source, "source")
    if target is None:
        return [x]
    y = as_features(target, "target")
    if x.shape[1] != y.shape[1] or x.device != y.device:
        raise InputError(
            f"source has {x.shape[1]} columns on {x.device}, target {y.shape[1]} on {y.device}; "
            "pass the features of one featuriser on one device"
        )
    return [x, y]


def _baseline(name: str | None, drawn: dict[str, Drawn]) -> str:
    if name is None:
        uniform = [other for other, draws in drawn.items() if isinstance(draws.samplers[0], UniformBatchSampler)]
        return next(iter([*uniform, *drawn]))
    if name not in drawn:
        raise InputError(f"baseline {name!r} is none of the samplers; choose one of {', '.join(drawn)}")
    return name


def _row(
    name: str,
    draws: Drawn,
    place: int,
    domains: list[Tensor],
    embeddings: list[EmbeddingErrors],
    measured: dict[str, Any],
) -> SamplerRow:
    """Put together what was measured of one sampler, the ``place``-th."""
    count = len(draws.batches[0].rows)
    errors = torch.stack([embedding.errors[place] for embedding in embeddings])
    # batches of the two domains are independent, and so are their errors
    variance = Estimate(float(errors.mean(1).sum()), math.sqrt(float(errors.var(1).sum()) / count))
    exact = [
        exact_variance(sampler, x, embedding) for sampler, x, embedding in zip(draws.samplers, domains, embeddings)
    ]
    known = [value for value in exact if value is not None]
    biases = [embedding.squared_bias[place] for embedding in embeddings if embedding.squared_bias is not None]
    expected = variance.value / count
    whole = len(biases) == len(embeddings) and expected > 0
    return SamplerRow(
        name=name,
        batch_sizes=tuple(batches.rows.shape[1] for batches in draws.batches),
        exact_variance=sum(known) if len(known) == len(exact) else None,
        variance=variance,
        bias_ratio=math.sqrt(sum(biases) / expected) if whole else None,
        refresh_seconds=draws.refresh_seconds,
        batch_seconds=draws.draw_seconds / count,
        **measured,
    )


def _notes(domains: list[Tensor], max_columns: int, gradient: str | None) -> list[str]:
    summed = "summed over both domains; " if len(domains) > 1 else ""
    notes = [f"Var(μ̂): {summed}bias: |mean of μ̂ - μ| over its root mean square for unbiased independent batches"]
    if any(len(x) > max_columns for x in domains):
        notes.append(
            f"a domain has more than {max_columns:,} samples: μ, the whole loss and its gradient come from that many"
        )
    if gradient is not None:
        notes.append(f"{gradient}; its error is relative to the whole gradient")
    return notes
