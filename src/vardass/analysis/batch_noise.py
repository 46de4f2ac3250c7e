"""What the batches of a sampler leave of the mean embedding, the loss and its gradient.

The error of a batch's mean embedding is exact in the RKHS:
|μ̂ - μ|² = Σ_hl w_h w_l κ(z_h, z_l) - 2 Σ_h w_h <φ(z_h), μ> + |μ|² needs no feature map: the k x k kernel matrix of
the batch, and <φ(z_i), μ> = (1/n) Σ_j κ(z_i, z_j) for each sample once.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.kernels import CoralKernel, Kernel, fitted_kernel
from vardass.losses import Batch, CORALLoss, MMDLoss
from vardass.samplers import (
    Chunk,
    IndexBatch,
    MinibatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
)
from vardass.validate import ArrayLike, as_generator, row_blocks
from vardass.variance import stratified_variance
from vardass.view import KernelView

__all__ = [
    "Batches",
    "Drawn",
    "EmbeddingErrors",
    "Estimate",
    "Loss",
    "Producer",
    "Whole",
    "as_loss",
    "check_samplers",
    "draw",
    "embedding_errors",
    "exact_variance",
    "gradient_noise",
    "loss_noise",
    "whole_domains",
]

LOSSES = ("mmd2", "mmd2-u", "coral")

_BLOCK_NUMBERS = 2**21  # kernel values held at a time where gradients pass through them
_INPUT_ROWS = 1024  # rows that go through a model at a time


class Estimate(NamedTuple):
    """A Monte Carlo value and its standard error, batches counted as independent."""

    value: float
    stderr: float


# --- batches as training would get them, and the time they take --------------------------------------------


class Batches(NamedTuple):
    """Batches of one domain: ``rows`` (b, k), and their ``weights`` (b, k), double, of which each row sums to 1.

    Losses are called without weights where the sampler gives none. ``strata`` (k,) and ``pool`` are those of an
    `IndexBatch`, for independent draws.
    """

    rows: Tensor
    weights: Tensor
    weighted: bool
    strata: Tensor | None = None
    pool: int | None = None

    def pick(self, i: int) -> tuple[Tensor, Tensor | None]:
        """Indices and weights of batch ``i`` as a loss takes them."""
        return self.rows[i], self.weights[i] if self.weighted else None


class Drawn(NamedTuple):
    """What one entry of the report's samplers gave: a sampler and its batches for each domain."""

    samplers: list[Any]
    batches: list[Batches]
    refresh_seconds: float
    draw_seconds: float
    in_step: bool = False  # batch i of the source belongs to batch i of the target


def check_samplers(samplers: Any) -> Mapping[str, Any]:
    """Refuse what is not a mapping with at least one entry."""
    if not isinstance(samplers, Mapping):
        raise InputError(
            f"samplers must map names to samplers or factories, got {type(samplers).__name__}; "
            "pass {'uniform': lambda n: UniformBatchSampler(n, 32), ...}"
        )
    if not samplers:
        raise InputError(
            "got no samplers; pass at least one, such as {'uniform': lambda n: UniformBatchSampler(n, 32)}"
        )
    return samplers


def draw(name: str, entry: Any, domains: list[Tensor], count: int, *, refresh: bool, seed: int) -> Drawn:
    """Make the samplers of ``entry``, refresh them on ``domains``, each (n, d), and draw ``count`` batches of each."""
    samplers = _samplers(name, entry, domains)
    paired = len(domains) == 2 and all(getattr(sampler, "plans_both_domains", False) for sampler in samplers)
    in_step = paired and samplers[0].seed == samplers[1].seed
    started = time.perf_counter()
    if refresh:
        for place, (sampler, features) in enumerate(zip(samplers, domains)):
            if hasattr(sampler, "refresh"):
                sampler.refresh(features, **({"other": domains[1 - place]} if in_step else {}))
    refreshed = time.perf_counter()
    # other seeds for the other domain: two samplers with one seed would move in step
    batches = [
        _batches(name, sampler, len(features), count, 2 * seed + (0 if in_step else place))
        for place, (sampler, features) in enumerate(zip(samplers, domains))
    ]
    drawn = time.perf_counter()
    batches = [_on(batch, features.device) for batch, features in zip(batches, domains)]
    return Drawn(samplers, batches, refreshed - started, drawn - refreshed, in_step)


def _samplers(name: str, entry: Any, domains: list[Tensor]) -> list[Any]:
    """One sampler for each domain: made by a factory, or copies of ready ones."""
    if callable(entry):
        samplers = [entry(len(features)) for features in domains]
    else:
        ready = list(entry) if isinstance(entry, tuple | list) else [entry]
        if len(ready) != len(domains):
            raise InputError(
                f"{name!r} has {len(ready)} ready samplers for {len(domains)} domains; pass one for each domain, in a "
                "tuple, or a factory n -> sampler"
            )
        samplers = [_copy(name, sampler) for sampler in ready]
    for sampler, features in zip(samplers, domains):
        if not hasattr(sampler, "__iter__"):
            raise InputError(f"{name!r} gave a {type(sampler).__name__}, which is no sampler: it cannot be iterated")
        n = getattr(sampler, "n", len(features))
        if n != len(features):
            raise InputError(
                f"{name!r} has a sampler made for n={n} samples, its features have {len(features)} rows; "
                "pass a factory n -> sampler"
            )
    return samplers


def _copy(name: str, sampler: Any) -> Any:
    """A copy of a ready sampler: refreshing and drawing would move a stream that is in use."""
    # samplers of torch hold the data set, which need not be copied
    parts = [sampler, getattr(sampler, "sampler", None)]
    shared = [getattr(part, data, None) for part in parts for data in ("data_source", "dataset")]
    try:
        return copy.deepcopy(sampler, {id(data): data for data in shared if data is not None})
    except Exception as error:
        raise InputError(
            f"the sampler {name!r}, a {type(sampler).__name__}, cannot be copied ({error}), and measuring would move "
            "its stream; pass a factory n -> sampler"
        ) from error


def _batches(name: str, sampler: Any, n: int, count: int, seed: int) -> Batches:
    if isinstance(sampler, MinibatchSampler):
        chunk = sampler.sample_batches(count, seed=seed)
    else:
        chunk = _iterate(name, sampler, count)
    rows, weights = chunk.rows, chunk.weights
    if int(rows.min()) < 0 or int(rows.max()) >= n:
        raise InputError(
            f"{name!r} draws indices from {int(rows.min())} to {int(rows.max())}, the features have {n} rows; "
            "pass the features of the whole data set"
        )
    if weights is None:
        even = torch.full(rows.shape, 1.0 / rows.shape[1], dtype=torch.float64)
        return Batches(rows, even, False, chunk.strata, chunk.pool)
    return Batches(rows, weights.double().to(rows.device).expand(rows.shape), True, chunk.strata, chunk.pool)


def _iterate(name: str, sampler: Any, count: int) -> Chunk:
    """Batches of any iterable, as often as it takes; a smaller one at its end is left out."""
    found: list[Any] = []
    while len(found) < count:
        before = len(found)
        for batch in sampler:
            if not found or len(batch) == len(found[0]):
                found.append(batch)
            if len(found) == count:
                break
        if len(found) == before:
            raise InputError(f"{name!r} yields no batches; lower its batch size or set drop_last=False")
    rows = torch.stack([torch.as_tensor(list(batch), dtype=torch.int64) for batch in found])
    weights = [getattr(batch, "weights", None) for batch in found]
    # plain lists are those of torch, whose samples are independent
    given = getattr(found[0], "strata", None if isinstance(found[0], IndexBatch) else [0] * rows.shape[1])
    strata = None if given is None else torch.as_tensor(given)
    if all(each is None for each in weights):
        return Chunk(rows, strata=strata)
    even = torch.full((rows.shape[1],), 1.0 / rows.shape[1], dtype=torch.float64)
    stacked = torch.stack([even if w is None else torch.as_tensor(w, dtype=torch.float64) for w in weights])
    return Chunk(rows, stacked, strata=strata)


def _on(batches: Batches, device: torch.device) -> Batches:
    return batches._replace(rows=batches.rows.to(device), weights=batches.weights.to(device))


# --- the mean embedding ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbeddingErrors:
    """One domain under a kernel fitted to it: |μ̂ - μ|² (b,) of the batches of each sampler.

    And for a domain that is not too large, |mean of μ̂ - μ|² for each, and ``spread``, E|φ(z) - μ|² of one uniform draw.
    """

    kernel: Kernel
    errors: list[Tensor]
    squared_bias: list[float] | None
    spread: float | None


def sample_rows(n: int, limit: int, seed: int, device: torch.device) -> Tensor | None:
    """A seeded draw of ``limit`` of n rows without replacement, or None if there are no more than that."""
    if n <= limit:
        return None
    return torch.randperm(n, generator=as_generator(seed))[:limit].to(device)


@torch.no_grad()
def embedding_errors(
    x: Tensor, kernel: Kernel, draws: list[Batches], *, max_columns: int, seed: int
) -> EmbeddingErrors:
    """Errors of each sampler's batches in the domain ``x`` (n, d) under a fitted ``kernel``."""
    n, view = len(x), KernelView(x, kernel)
    columns = sample_rows(n, max_columns, seed, x.device)
    if columns is None:
        # one pass over the kernel matrix gives <φ_i, μ> and, for each sampler, <φ_i, mean of μ̂ - μ>
        offsets = torch.stack([_mean_weights(batches, n) - 1.0 / n for batches in draws], dim=1)
        products = view.multiply(torch.cat([offsets.new_full((n, 1), 1.0 / n), offsets], dim=1))
        inner = products[:, 0]
        squared_norm = inner.mean()
        squared_bias = (offsets * products[:, 1:]).sum(0).clamp_min(0.0).tolist()
        spread = max(0.0, float(view.diag.double().mean() - squared_norm))
        errors = [view.batch_errors(*batches[:2], inner, squared_norm) for batches in draws]
        return EmbeddingErrors(kernel, errors, squared_bias, spread)
    # a sample of m stands in for all n: E|μ̂ - μ_m|² is too large by |μ_m - μ|², (n - m)/(n - 1) spread / m on average
    m, some = len(columns), KernelView(x[columns], kernel)
    used = torch.unique(torch.cat([columns, *(batches.rows.flatten() for batches in draws)]))
    inner = torch.zeros(n, dtype=torch.float64, device=x.device)
    inner[used] = some.mean_to_all(x[used])
    squared_norm = inner[columns].mean()
    variance_of_sample = (some.diag.double().mean() - squared_norm) * m / (m - 1) * (n - 1) / n
    excess = variance_of_sample / m * (n - m) / (n - 1)
    errors = [view.batch_errors(*batches[:2], inner, squared_norm) - excess for batches in draws]
    return EmbeddingErrors(kernel, errors, None, None)


def _mean_weights(batches: Batches, n: int) -> Tensor:
    total = batches.weights.new_zeros(n)
    return total.index_add_(0, batches.rows.flatten(), batches.weights.flatten()) / len(batches.rows)


def exact_variance(sampler: Any, x: Tensor, domain: EmbeddingErrors) -> float | None:
    """E|μ̂ - μ|² of a sampler's batches where a closed form is known, else None."""
    n = len(x)
    # subclasses couple their draws, so only these very classes have a closed form
    if type(sampler) is UniformBatchSampler and domain.spread is not None:
        k = sampler.batch_size
        share = 1.0 if sampler.replacement else (n - k) / max(1, n - 1)
        return domain.spread / k * share
    if type(sampler) is StratifiedBatchSampler:
        strata = sampler.strata
        if strata is None:
            return None if domain.spread is None else domain.spread / sampler.batch_size
        return stratified_variance(
            x,
            strata.labels,
            kernel=domain.kernel,
            draws_per_stratum=sampler.draws_per_stratum,
            replacement=sampler.replacement,
        )
    return None


# --- the loss and its gradient over pairs of batches -------------------------------------------------------


class Loss(NamedTuple):
    """A discrepancy; ``kernel`` is set for MMD², whose value on whole domains is computed in blocks."""

    name: str
    value: Callable[..., Tensor]
    kernel: Kernel | None


def as_loss(loss: Any, kernel: Kernel, x: Tensor, y: Tensor) -> Loss:
    """Resolve a name or a callable, for domains ``x`` (n_s, d) and ``y`` (n_t, d)."""
    if loss is None:
        loss = "coral" if isinstance(kernel, CoralKernel) else "mmd2"
    if isinstance(loss, str) and loss in ("mmd2", "mmd2-u"):
        loss, name = MMDLoss(kernel=kernel, estimator="u" if loss == "mmd2-u" else "v"), loss
    elif loss == "coral":
        return Loss("coral", CORALLoss(population_x=len(x), population_y=len(y)), None)
    elif callable(loss):
        name = repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__name__", type(loss).__name__)
    else:
        raise InputError(f"unknown loss {loss!r}; choose one of {', '.join(LOSSES)} or pass a callable")
    if not isinstance(loss, MMDLoss):
        return Loss(name, loss, None)
    # fitted once: batches of all samplers are then measured by one and the same kernel
    fitted = fitted_kernel(loss.kernel, torch.cat([x, y]))
    return Loss(name, MMDLoss(kernel=fitted, estimator=loss.estimator), fitted)


class Producer:
    """Features of chosen samples as a function of parameters: those of a model of ``inputs`` (n, ...) of each domain.

    Without a model they are a matrix A (d, d), zero, and the features are z + z A of ``domains`` (n, d).
    """

    def __init__(self, domains: list[Tensor], model: nn.Module | None, inputs: list[ArrayLike | None]) -> None:
        self.model = model
        self.sizes = [len(x) for x in domains]
        self.parameters: list[Tensor]
        if model is None:
            if any(value is not None for value in inputs):
                raise InputError("source_inputs and target_inputs were given without a model; pass model=... too")
            d = domains[0].shape[1]
            self.parameters = [domains[0].new_zeros(d, d, requires_grad=True)]
            self.inputs = domains
            self.note = "gradient: of a linear layer z + z A after the features, at A = 0; no model was given"
            return
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise InputError("no parameter of the model requires a gradient; call model.requires_grad_()")
        self.inputs = []
        for value, n, name in zip(inputs, self.sizes, ("source_inputs", "target_inputs")):
            if value is None or len(value) != n:
                got = "none" if value is None else f"{len(value)} rows"
                raise InputError(f"model needs {name} with {n} rows, one for each row of the features, got {got}")
            self.inputs.append(torch.as_tensor(value))
        count = sum(p.numel() for p in self.parameters)
        self.note = f"gradient: of the model's {count:,} parameters"

    def __call__(self, domain: int, rows: Tensor) -> Tensor:
        """Features (b, d) of the given rows of domain 0 or 1, with their graph."""
        x = self.inputs[domain][rows.to(self.inputs[domain].device)]
        if self.model is None:
            return x + x @ self.parameters[0]
        z = self.model(x)
        if not isinstance(z, Tensor) or z.ndim != 2 or len(z) != len(x):
            got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise InputError(f"model must return features of shape ({len(x)}, d), got {got}; pass the featuriser alone")
        return z

    def gradient(self, output: Tensor, slope: Tensor | None = None) -> Tensor:
        """Gradient of <output, slope> with respect to all parameters, as one double vector."""
        grads = torch.autograd.grad(output, self.parameters, slope, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, grads)]
        return torch.cat([part.flatten().double() for part in parts])


@dataclass(frozen=True)
class Whole:
    """The loss of the whole domains and its gradient (p,), if a `Producer` was given."""

    value: float
    gradient: Tensor | None


def whole_domains(loss: Loss, domains: list[Tensor], producer: Producer | None, *, limit: int, seed: int) -> Whole:
    """Loss of all samples, or of ``limit`` of each domain, and its gradient.

    For MMD² it is |μ_s - μ_t|², which both estimators aim at.
    """
    rows = [
        torch.arange(len(x), device=x.device) if chosen is None else chosen
        for x, chosen in ((x, sample_rows(len(x), limit, seed, x.device)) for x in domains)
    ]
    with torch.no_grad():
        features = [x[picked] for x, picked in zip(domains, rows)]
        value = float(loss.value(*features)) if loss.kernel is None else _mmd2_in_blocks(features, loss.kernel)
    if producer is None:
        return Whole(value, None)
    with torch.no_grad():  # the model's features may be newer than the given ones
        features = [
            torch.cat([producer(i, picked[block]) for block in row_blocks(len(picked), _INPUT_ROWS)])
            for i, picked in enumerate(rows)
        ]
    slopes = _slopes(loss, features)
    gradient: Tensor | None = None
    for i, (picked, slope) in enumerate(zip(rows, slopes)):
        for block in row_blocks(len(picked), _INPUT_ROWS):
            part = producer.gradient(producer(i, picked[block]), slope[block])
            gradient = part if gradient is None else gradient + part
    return Whole(value, gradient)


def _signed(features: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All rows z, and the c with μ_s - μ_t = Σ_i c_i φ(z_i)."""
    z = torch.cat(features)
    sizes = [len(part) for part in features]
    shares = torch.tensor([1.0 / sizes[0], -1.0 / sizes[1]], dtype=torch.float64, device=z.device)
    return z, shares.repeat_interleave(torch.tensor(sizes, device=z.device))


def _mmd2_in_blocks(features: list[Tensor], kernel: Kernel) -> float:
    z, c = _signed(features)
    parts = [c[rows] @ (block.to(c.dtype) @ c) for rows, block in kernel.blocks(z)]
    return float(torch.stack(parts).sum())


def _slopes(loss: Loss, features: list[Tensor]) -> list[Tensor]:
    """Gradient of the loss of all samples with respect to the features of each domain."""
    if loss.kernel is None:
        leaves = [z.detach().requires_grad_() for z in features]
        return list(torch.autograd.grad(loss.value(*leaves), leaves))
    z, c = _signed([z.detach() for z in features])
    slopes = torch.empty_like(z)
    for rows in row_blocks(len(z), _BLOCK_NUMBERS // len(z)):
        # the kernel is symmetric: what z_i does as a first argument counts twice
        leaf = z[rows].clone().requires_grad_()
        half = c[rows] @ (loss.kernel.matrix(leaf, z).to(c.dtype) @ c)
        slopes[rows] = torch.autograd.grad(2.0 * half, leaf)[0]
    return [slopes[: len(features[0])], slopes[len(features[0]) :]]


def _drawn(loss: Loss, batches: list[Batches]) -> Callable[[int, Tensor, Tensor | None], Batch] | None:
    """What makes a `Batch` of the features and weights of a domain's batch, for an unbiased loss."""
    if getattr(loss.value, "estimator", "v") != "unbiased":
        return None
    if any(batch.strata is None for batch in batches):
        raise InputError(
            f"loss {loss.name!r} is unbiased for independent draws, but the samples of a batch of one of the samplers "
            "depend on one another, or it gives no strata; use loss='mmd2', or samplers such as UniformBatchSampler "
            "and StratifiedBatchSampler(..., draws_per_stratum=2)"
        )
    pools = [math.inf if batch.pool is None else batch.pool for batch in batches]
    return lambda i, z, weights: Batch(z, weights=weights, strata=batches[i].strata, pool=pools[i])


def _value(
    loss: Loss,
    drawn: Callable[[int, Tensor, Tensor | None], Batch] | None,
    features: tuple[Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    if drawn is None:
        return loss.value(*features, weights_x=weights[0], weights_y=weights[1])
    return loss.value(*(drawn(i, z, w) for i, (z, w) in enumerate(zip(features, weights))))


@torch.no_grad()
def loss_noise(
    loss: Loss, domains: list[Tensor], batches: list[Batches], pairing: list[int], whole: Whole
) -> dict[str, Any]:
    """Mean, bias and variance of the loss of source batch i with target batch ``pairing[i]``."""
    values, drawn = [], _drawn(loss, batches)
    for i, j in enumerate(pairing):
        (rows_x, weights_x), (rows_y, weights_y) = batches[0].pick(i), batches[1].pick(j)
        values.append(_value(loss, drawn, (domains[0][rows_x], domains[1][rows_y]), (weights_x, weights_y)))
    values_of_pairs = torch.stack(values).double()
    count = len(values)
    mean, variance = float(values_of_pairs.mean()), float(values_of_pairs.var())
    squares = (values_of_pairs - mean).square()
    return {
        "loss_mean": Estimate(mean, math.sqrt(variance / count)),
        "loss_bias": mean - whole.value,
        "loss_variance": Estimate(variance, float(squares.std()) / math.sqrt(count)),
    }


def gradient_noise(
    loss: Loss, producer: Producer, batches: list[Batches], pairing: list[int], whole: Whole
) -> dict[str, Any]:
    """Mean squared error and variance of the gradient over pairs of batches, relative to |G|²."""
    truth = whole.gradient
    assert truth is not None
    total = torch.zeros_like(truth)
    errors, drawn = [], _drawn(loss, batches)
    for i, j in enumerate(pairing):
        (rows_x, weights_x), (rows_y, weights_y) = batches[0].pick(i), batches[1].pick(j)
        value = _value(loss, drawn, (producer(0, rows_x), producer(1, rows_y)), (weights_x, weights_y))
        error = producer.gradient(value) - truth
        errors.append(error.square().sum())
        total += error
    count = len(errors)
    size = float(truth.square().sum())
    if not size > 0:
        return {"gradient_mse": Estimate(math.nan, math.nan), "gradient_variance": Estimate(math.nan, math.nan)}
    squares = torch.stack(errors) / size
    mse, stderr = float(squares.mean()), float(squares.std()) / math.sqrt(count)
    # Σ|g - mean g|² = Σ|g - G|² - |Σ (g - G)|² / count
    variance = (float(squares.sum()) - float(total.square().sum()) / size / count) / (count - 1)
    return {"gradient_mse": Estimate(mse, stderr), "gradient_variance": Estimate(variance, stderr)}
