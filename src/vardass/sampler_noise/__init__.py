"""What a batch sampler does to the noise of training: one report for any samplers on given features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.kernels import FunctionKernel, KernelLike, as_kernel
from vardass.sampler_noise.discrepancy import Producer, as_loss, gradient_noise, loss_noise, whole_domains
from vardass.sampler_noise.draws import Drawn, check_samplers, draw
from vardass.sampler_noise.embedding import Embedding, embedding_errors, exact_variance
from vardass.sampler_noise.result import MEASURES, Estimate, SamplerRow, VarianceReport
from vardass.samplers import UniformBatchSampler
from vardass.validate import ArrayLike, as_features, as_generator, check_count

__all__ = ["MEASURES", "Estimate", "SamplerRow", "VarianceReport", "variance_report"]

_NOT_MEASURED: dict[str, Any] = dict.fromkeys(
    ("loss_mean", "loss_bias", "loss_variance", "gradient_mse", "gradient_variance")
)


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
    and variance of the loss over independent pairs of a source and a target batch, the mean squared error of its
    gradient, and the seconds that refreshing and drawing take. It takes n² kernel evaluations for each domain.

    Parameters
    ----------
    samplers : mapping from name to factory or samplers
        ``factory(n)`` makes a sampler of n samples; it is called for each domain. Or a ready sampler (source only)
        or a pair of them, which are copied, so that a training stream is not disturbed. A sampler that is not a
        `MinibatchSampler` is iterated and yields lists of indices, with an attribute ``weights`` or without.
    source, target : array of shape (n_s, d) and (n_t, d)
        Features of all samples. Without ``target`` only the mean embedding is measured.
    kernel : Kernel, name or callable
        Whose mean embedding is measured; what it takes from data comes from each domain, as in samplers.
    loss : {"mmd2", "mmd2-u", "coral"} or callable, optional
        V- or U-statistic of MMD² with ``kernel``, fitted to both domains together, or the paper's CORAL; by
        default the one that belongs to ``kernel``. A callable, such as `CORALLoss`, is called as
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
    discrepancy = None if target is None else as_loss(loss, chosen, *domains)
    producer: Producer | None = None
    if discrepancy is not None and gradient_batches:
        producer = Producer(domains, model, [source_inputs, target_inputs])
    drawn = {name: draw(name, entry, features, batches, refresh=refresh, seed=seed) for name, entry in entries.items()}
    baseline = _baseline(baseline, drawn)
    embeddings = [
        embedding_errors(
            x,
            chosen.fit(x),
            [draws.batches[domain] for draws in drawn.values()],
            max_columns=max_columns,
            seed=seed,
        )
        for domain, x in enumerate(domains)
    ]
    whole = None
    measured: dict[str, dict[str, Any]] = {name: dict(_NOT_MEASURED) for name in drawn}
    if discrepancy is not None:
        pairing = torch.randperm(batches, generator=as_generator(seed)).tolist()
        with nullcontext() if producer is None else producer.evaluating():
            whole = whole_domains(discrepancy, domains, producer, limit=max_columns, seed=seed)
            for name, draws in drawn.items():
                measured[name] |= loss_noise(discrepancy, domains, draws.batches, pairing, whole)
                if producer is not None:
                    few = pairing[:gradient_batches]
                    measured[name] |= gradient_noise(discrepancy, producer, draws.batches, few, whole)
    return VarianceReport(
        rows=tuple(
            _row(name, draws, place, domains, embeddings, measured[name])
            for place, (name, draws) in enumerate(drawn.items())
        ),
        baseline=baseline,
        kernel=kernel if isinstance(kernel, str) else repr(chosen),
        loss="" if discrepancy is None else discrepancy.name,
        loss_value=None if whole is None else whole.value,
        sizes=tuple(len(x) for x in domains),
        batches=batches,
        gradient_batches=0 if producer is None else gradient_batches,
        notes=tuple(_notes(domains, max_columns, producer)),
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
    embeddings: list[Embedding],
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


def _notes(domains: list[Tensor], max_columns: int, producer: Producer | None) -> list[str]:
    summed = "summed over both domains; " if len(domains) > 1 else ""
    notes = [f"Var(μ̂): {summed}bias: |mean of μ̂ - μ| over its root mean square for unbiased independent batches"]
    if any(len(x) > max_columns for x in domains):
        notes.append(
            f"a domain has more than {max_columns:,} samples: μ, the whole loss and its gradient come from that many"
        )
    if producer is not None:
        notes.append(f"{producer.note}; its error is relative to the whole gradient")
    return notes
