"""How batch samplers change the noise of training: one report for any samplers on given features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vardass.analysis.batch_noise import Estimate, LossOfDomains, as_domains, draw, embedding_noise
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
    """One sampler of a report. Values that were not measured, or lack a closed form, are None.

    Attributes
    ----------
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
        Over independent pairs of a source and a target batch; ``loss_bias`` is the mean less the whole domains' loss.
    gradient_mse : Estimate or None
        Mean of |g - G|² over |G|², with g the gradient of a pair's loss and G that of the whole domains' loss.
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


@dataclass(frozen=True)
class VarianceReport:
    """Result of `variance_report`; ``report["uniform"]`` is the row of one sampler."""

    rows: tuple[SamplerRow, ...]
    baseline: str  # the sampler that the others are compared with
    kernel: str
    loss: str  # "" without a target domain
    loss_value: float | None  # of the whole domains
    sizes: tuple[int, ...]  # samples of the domains
    batches: int
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> SamplerRow:
        return {row.name: row for row in self.rows}[name]

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

    def _cells(self, row: SamplerRow) -> dict[str, str]:
        """Texts by column; empty where nothing was measured."""

        def number(value: float | None, digits: int = 3) -> str:
            return "" if value is None else f"{value:.{digits}g}"

        def estimate(value: Estimate | None) -> str:
            return "" if value is None else f"{value.value:.3g} ±{value.stderr:.1g}"

        def ratio(measure: str) -> str:
            found = self.relative(row.name, measure)
            return "" if found is None else number(found.value)

        return {
            "batch": "+".join(map(str, row.batch_sizes)),
            "exact Var(μ̂)": number(row.exact_variance),
            "Var(μ̂)": estimate(row.variance),
            "× Var(μ̂)": ratio("variance"),
            "bias": number(row.bias_ratio, 2),
            "loss": estimate(row.loss_mean),
            "loss bias": number(row.loss_bias, 2),
            "Var(loss)": estimate(row.loss_variance),
            "× Var(loss)": ratio("loss_variance"),
            "gradient MSE": estimate(row.gradient_mse),
            "× gradient MSE": ratio("gradient_mse"),
            "refresh s": number(row.refresh_seconds, 2),
            "ms a batch": number(1e3 * row.batch_seconds, 2),
        }

    def __str__(self) -> str:
        """Aligned columns with a line for each sampler."""
        cells = [self._cells(row) for row in self.rows]
        columns = tuple(name for name in cells[0] if any(each[name] for each in cells))
        title = f"{' and '.join(f'{n:,}' for n in self.sizes)} samples, {self.batches} batches, kernel {self.kernel}"
        if self.loss_value is not None:
            title += f", loss {self.loss} ({self.loss_value:.4g} on all samples)"
        found = Table(
            "noise",
            f"{title}; × is relative to {self.baseline}",
            corner="sampler",
            columns=columns,
            rows=tuple(TableRow(row.name, tuple(map(each.get, columns))) for row, each in zip(self.rows, cells)),
            decimals=(0,) * len(columns),
            notes=self.notes,
        )
        return render([found]).rstrip("\n")


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
    max_columns: int = 20_000,
    seed: int = 0,
) -> VarianceReport:
    """Measure the noise of the batches of several samplers on the same features.

    For each sampler: the variance of the mean embedding (exact where a closed form exists, and from draws), mean and
    variance of the loss over pairs of a source and a target batch, the mean squared error of its gradient, and the
    seconds of refreshing and drawing. It takes n² kernel evaluations for each domain.

    Parameters
    ----------
    samplers : mapping from name to factory
        ``factory(n)`` makes a new sampler of n samples and is called for each domain; a pair gives one for each. The
        samplers are refreshed on the features. A sampler that is not a `MinibatchSampler` must yield lists of
        indices, optionally with an attribute ``weights``. Two with the same seed that plan both domains together,
        such as `PairedBatchSampler`, are refreshed with both, and their batches are paired. The baseline is the first
        uniform sampler, or else the first.
    source, target : array of shape (n_s, d) and (n_t, d)
        Features of all samples. Without ``target`` only the mean embedding is measured.
    kernel : Kernel, name or callable
        Kernel of the mean embedding; it is fitted to each domain, as in samplers.
    loss : {"mmd2", "coral"} or callable, optional
        V-statistic of MMD² with ``kernel``, fitted to both domains together, or the paper's CORAL; by default the one
        that belongs to ``kernel``. A callable, such as `CORALLoss`, is called as
        ``loss(x, y, weights_x=..., weights_y=...)``, and as ``loss(x, y)`` with all samples.
    batches : int
        Batches drawn from each sampler in each domain.
    gradient_batches : int
        Number of pairs whose gradient is computed, at most ``batches``; 0 skips it.
    model : nn.Module, optional
        The featuriser: gradients are with respect to its parameters, with features ``model(source_inputs[rows])``
        (b, d) in evaluation mode. Without it they are those of a linear layer z + z A after the features at A = 0:
        a proxy, which sees the features' noise but not how inner layers weigh it.
    source_inputs, target_inputs : array of shape (n_s, ...) and (n_t, ...)
        Inputs of the model.
    max_columns : int
        In a larger domain μ comes from that many samples, drawn without replacement, and the excess of |μ̂ - μ|²
        that this brings on average is subtracted; the whole loss and its gradient come from these samples too.
    seed : int
        Seed of the draws and of the pairing.

    Returns
    -------
    VarianceReport
        ``print`` it, or ``.to_dict()`` for loggers.

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
    if not isinstance(samplers, Mapping) or not samplers:
        raise InputError(
            f"samplers must map names to factories, got {samplers!r}; "
            "pass {'uniform': lambda n: UniformBatchSampler(n, 32), ...}"
        )
    features = [as_features(source, "source")] if target is None else as_domains(source, target)
    chosen = as_kernel(kernel)
    # samplers get the features as they are; a user's function may hold tensors of their type
    domains = features if isinstance(chosen, FunctionKernel) else [x.double() for x in features]
    whole: LossOfDomains | None = None
    if target is not None:
        inputs = (source_inputs, target_inputs)
        options: dict[str, Any] = {"model": model, "inputs": inputs} if gradient_batches else {}
        whole = LossOfDomains(loss, domains, kernel=chosen, limit=max_columns, seed=seed, **options)
    drawn = {name: draw(name, entry, features, batches, seed=seed) for name, entry in samplers.items()}
    uniform = [name for name, draws in drawn.items() if isinstance(draws.samplers[0], UniformBatchSampler)]
    kernels = [fitted_kernel(chosen, x) for x in domains]
    noises = embedding_noise(list(drawn.values()), domains, kernels, max_columns=max_columns, seed=seed)
    shuffled = torch.randperm(batches, generator=as_generator(seed)).tolist()
    rows = []
    with evaluation_mode(model):  # a sample's features must not depend on its batch
        for (name, draws), (exact, variance, bias) in zip(drawn.items(), noises):
            measured: dict[str, Any] = {}
            if whole is not None:
                pairing = list(range(batches)) if draws.in_step else shuffled
                measured = whole.noise(draws.batches, pairing)
                if gradient_batches:
                    measured["gradient_mse"], _ = whole.gradient_noise(draws.batches, pairing[:gradient_batches])
            rows.append(
                SamplerRow(
                    name=name,
                    batch_sizes=tuple(chunk.rows.shape[1] for chunk in draws.batches),
                    exact_variance=exact,
                    variance=variance,
                    bias_ratio=bias,
                    refresh_seconds=draws.refresh_seconds,
                    batch_seconds=draws.draw_seconds / batches,
                    **measured,
                )
            )
    summed = "summed over both domains; " if len(domains) > 1 else ""
    notes = [f"Var(μ̂): {summed}bias: |mean of μ̂ - μ| over its root mean square for unbiased independent batches"]
    if any(len(x) > max_columns for x in domains):
        notes.append(
            f"a domain has more than {max_columns:,} samples: μ, the whole loss and its gradient come from that many"
        )
    if whole is not None and gradient_batches:
        notes.append(f"{whole.note}; its error is relative to the whole gradient")
    return VarianceReport(
        rows=tuple(rows),
        baseline=[*uniform, *drawn][0],
        kernel=kernel if isinstance(kernel, str) else repr(chosen),
        loss="" if whole is None else whole.name,
        loss_value=None if whole is None else whole.whole,
        sizes=tuple(len(x) for x in domains),
        batches=batches,
        notes=tuple(notes),
    )
