"""Errors of a sampler's batches in the mean embedding, the loss and its gradient.

The error of a batch's mean embedding is exact in the RKHS:
|μ̂ - μ|² = Σ_hl w_h w_l κ(z_h, z_l) - 2 Σ_h w_h <φ(z_h), μ> + |μ|² needs no feature map: the k x k kernel matrix of
the batch, and <φ(z_i), μ> = (1/n) Σ_j κ(z_i, z_j) for each sample once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.kernels import CoralKernel, Kernel, fitted_kernel
from vardass.losses import CORALLoss, MMDLoss
from vardass.samplers import Chunk, MinibatchSampler, StratifiedBatchSampler, UniformBatchSampler
from vardass.validate import ArrayLike, as_features, as_generator, row_blocks
from vardass.variance import stratified_variance
from vardass.view import KernelView

_BLOCK_NUMBERS = 2**21  # kernel values held at a time where gradients pass through them
_INPUT_ROWS = 1024  # rows that go through a model at a time


class Estimate(NamedTuple):
    """A Monte Carlo value and its standard error, batches counted as independent."""

    value: float
    stderr: float


def as_domains(source: ArrayLike, target: ArrayLike) -> list[Tensor]:
    """Features of two domains, checked to be of one featuriser."""
    x, y = as_features(source, "source"), as_features(target, "target")
    if x.shape[1] != y.shape[1] or x.device != y.device:
        raise InputError(
            f"source has {x.shape[1]} columns on {x.device}, target {y.shape[1]} on {y.device}; "
            "pass features of the same network on the same device"
        )
    return [x, y]


# --- batches as training would get them, and the time they take --------------------------------------------


class Drawn(NamedTuple):
    """The samplers of one entry of a report and their batches, one for each domain."""

    samplers: list[Any]
    batches: list[Chunk]  # with weights (b, k), double, or None where the sampler gives none
    refresh_seconds: float
    draw_seconds: float
    in_step: bool = False  # batch i of the source belongs to batch i of the target


def draw(name: str, entry: Any, domains: list[Tensor], count: int, *, seed: int) -> Drawn:
    """Make the samplers of ``entry``, refresh them on ``domains``, each (n, d), and draw ``count`` batches of each."""
    samplers = _samplers(name, entry, domains)
    paired = len(domains) == 2 and all(getattr(sampler, "plans_both_domains", False) for sampler in samplers)
    in_step = paired and samplers[0].seed == samplers[1].seed
    started = time.perf_counter()
    for place, (sampler, features) in enumerate(zip(samplers, domains)):
        if hasattr(sampler, "refresh"):
            sampler.refresh(features, **({"other": domains[1 - place]} if in_step else {}))
    refreshed = time.perf_counter()
    # other seeds for the other domain: two samplers with one seed would move in step
    batches = [
        _batches(name, sampler, features, count, 2 * seed + (0 if in_step else place))
        for place, (sampler, features) in enumerate(zip(samplers, domains))
    ]
    return Drawn(samplers, batches, refreshed - started, time.perf_counter() - refreshed, in_step)


def _samplers(name: str, entry: Any, domains: list[Tensor]) -> list[Any]:
    factories = list(entry) if isinstance(entry, tuple | list) else [entry] * len(domains)
    if len(factories) != len(domains) or not all(map(callable, factories)):
        raise InputError(
            f"{name!r} is {entry!r} for {len(domains)} domains; pass a factory n -> sampler, or one for each domain"
        )
    samplers = [make(len(features)) for make, features in zip(factories, domains)]
    for sampler, features in zip(samplers, domains):
        if not hasattr(sampler, "__iter__"):
            raise InputError(f"{name!r} gave type {type(sampler).__name__}, not a sampler: it cannot be iterated")
        n = getattr(sampler, "n", len(features))
        if n != len(features):
            raise InputError(
                f"{name!r} gave a sampler of n={n} samples, its features have {len(features)} rows; create it with the "
                "n that is passed to the factory"
            )
    return samplers


def _batches(name: str, sampler: Any, features: Tensor, count: int, seed: int) -> Chunk:
    ours = isinstance(sampler, MinibatchSampler)
    chunk = sampler.sample_batches(count, seed=seed) if ours else _iterate(name, sampler, count)
    rows, weights, n = chunk.rows, chunk.weights, len(features)
    if int(rows.min()) < 0 or int(rows.max()) >= n:
        raise InputError(
            f"{name!r} draws indices from {int(rows.min())} to {int(rows.max())}, the features have {n} rows; "
            "pass the features of the whole data set"
        )
    if weights is not None:
        weights = weights.double().to(features.device).expand(rows.shape)
    return chunk._replace(rows=rows.to(features.device), weights=weights)


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
    if all(each is None for each in weights):
        return Chunk(rows)
    even = torch.full((rows.shape[1],), 1.0 / rows.shape[1], dtype=torch.float64)
    return Chunk(rows, torch.stack([even if w is None else torch.as_tensor(w, dtype=torch.float64) for w in weights]))


# --- the mean embedding ------------------------------------------------------------------------------------


class EmbeddingErrors(NamedTuple):
    """One domain under a kernel fitted to it; what is None was not computed, for the domain is too large."""

    kernel: Kernel
    errors: list[Tensor]  # |μ̂ - μ|² (b,) of the batches of each sampler
    squared_bias: list[float] | None  # |mean of μ̂ - μ|² for each
    spread: float | None  # E|φ(z) - μ|² of one uniform draw


def sample_rows(n: int, limit: int, seed: int, device: torch.device) -> Tensor:
    """A seeded draw of ``limit`` of n rows without replacement, or all, in their order, if there are no more."""
    if n <= limit:
        return torch.arange(n, device=device)
    return torch.randperm(n, generator=as_generator(seed))[:limit].to(device)


@torch.no_grad()
def embedding_errors(x: Tensor, kernel: Kernel, draws: list[Chunk], *, max_columns: int, seed: int) -> EmbeddingErrors:
    """Errors of each sampler's batches in the domain ``x`` (n, d) under a fitted ``kernel``."""
    n, view = len(x), KernelView(x, kernel)
    columns = sample_rows(n, max_columns, seed, x.device)
    if len(columns) == n:
        # one pass over the kernel matrix gives <φ_i, μ> and, for each sampler, <φ_i, mean of μ̂ - μ>
        offsets = torch.stack([_mean_weights(batches, n) - 1.0 / n for batches in draws], dim=1)
        products = view.multiply(torch.cat([offsets.new_full((n, 1), 1.0 / n), offsets], dim=1))
        inner = products[:, 0]
        squared_norm = inner.mean()
        squared_bias = (offsets * products[:, 1:]).sum(0).clamp_min(0.0).tolist()
        spread = max(0.0, float(view.diag.double().mean() - squared_norm))
        errors = [view.batch_errors(batches.rows, _weights(batches), inner, squared_norm) for batches in draws]
        return EmbeddingErrors(kernel, errors, squared_bias, spread)
    # a sample of m stands in for all n: E|μ̂ - μ_m|² is too large by |μ_m - μ|², (n - m)/(n - 1) spread / m on average
    m, some = len(columns), KernelView(x[columns], kernel)
    used = torch.unique(torch.cat([columns, *(batches.rows.flatten() for batches in draws)]))
    inner = torch.zeros(n, dtype=torch.float64, device=x.device)
    inner[used] = some.mean_to_all(x[used])
    squared_norm = inner[columns].mean()
    of_sample = (some.diag.double().mean() - squared_norm) * m / (m - 1) * (n - 1) / n
    excess = of_sample / m * (n - m) / (n - 1)
    errors = [view.batch_errors(batches.rows, _weights(batches), inner, squared_norm) - excess for batches in draws]
    return EmbeddingErrors(kernel, errors, None, None)


def _weights(batches: Chunk) -> Tensor:
    if batches.weights is not None:
        return batches.weights
    return torch.full(batches.rows.shape, 1.0 / batches.rows.shape[1], dtype=torch.float64, device=batches.rows.device)


def _mean_weights(batches: Chunk, n: int) -> Tensor:
    weights = _weights(batches).flatten()
    return weights.new_zeros(n).index_add_(0, batches.rows.flatten(), weights) / len(batches.rows)


def embedding_noise(
    draws: Sequence[Drawn], domains: list[Tensor], kernels: Sequence[Kernel], *, max_columns: int, seed: int = 0
) -> list[tuple[float | None, Estimate, float | None]]:
    """Of each of ``draws`` E|μ̂ - μ|², summed over the domains, by a closed form if known, and from batches; and bias.

    ``kernels`` are fitted, one for each domain. The bias is relative to its root mean square for unbiased independent
    batches.
    """
    embeddings = [
        embedding_errors(x, kernel, [each.batches[i] for each in draws], max_columns=max_columns, seed=seed)
        for i, (x, kernel) in enumerate(zip(domains, kernels))
    ]
    found = []
    for place, each in enumerate(draws):
        errors = torch.stack([embedding.errors[place] for embedding in embeddings])
        # batches of the two domains are independent, and so are their errors
        drawn = Estimate(float(errors.mean(1).sum()), math.sqrt(float(errors.var(1).sum()) / errors.shape[1]))
        exact = [_exact_variance(*parts) for parts in zip(each.samplers, domains, embeddings)]
        known = [value for value in exact if value is not None]
        biases = [embedding.squared_bias[place] for embedding in embeddings if embedding.squared_bias is not None]
        expected = drawn.value / errors.shape[1]
        bias = math.sqrt(sum(biases) / expected) if len(biases) == len(embeddings) and expected > 0 else None
        found.append((sum(known) if len(known) == len(exact) else None, drawn, bias))
    return found


def _exact_variance(sampler: Any, x: Tensor, domain: EmbeddingErrors) -> float | None:
    n = len(x)
    # subclasses couple their draws, so only these very classes have a closed form
    if type(sampler) is UniformBatchSampler and domain.spread is not None:
        k = sampler.batch_size
        share = 1.0 if sampler.replacement else (n - k) / max(1, n - 1)
        return domain.spread / k * share
    if type(sampler) is StratifiedBatchSampler:
        assert sampler.strata is not None  # it was refreshed
        labels, replacement = sampler.strata.labels, sampler.replacement
        return stratified_variance(x, labels, kernel=domain.kernel, replacement=replacement)
    return None


# --- the loss and its gradient over pairs of batches -------------------------------------------------------


def _as_loss(loss: Any, kernel: Kernel, x: Tensor, y: Tensor) -> tuple[str, Callable[..., Tensor], Kernel | None]:
    """Name, function and, of MMD², whose value on whole domains is computed in blocks, the fitted kernel of a loss."""
    if loss is None:
        loss = "coral" if isinstance(kernel, CoralKernel) else "mmd2"
    if loss == "coral":
        return "coral", CORALLoss(population_x=len(x), population_y=len(y)), None
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", repr(loss))
    if loss == "mmd2":
        loss = MMDLoss(kernel=kernel)
    if not callable(loss):
        raise InputError(f"unknown loss {loss!r}; choose mmd2 or coral, or pass a callable")
    if not isinstance(loss, MMDLoss):
        return name, loss, None
    # fitted once: batches of all samplers are then measured by one and the same kernel
    fitted = fitted_kernel(loss.kernel, torch.cat([x, y]))
    return name, MMDLoss(kernel=fitted, estimator=loss.estimator), fitted


class LossOfDomains:
    """A discrepancy of two domains: of all their samples, and of pairs of batches; each with its gradient.

    Gradients are for the parameters of a ``model`` that takes ``inputs``, or without one for a matrix A (d, d) at 0
    with features z + z A. The whole domains are ``limit`` samples at most, drawn with the seed.
    """

    def __init__(
        self,
        loss: Any,
        domains: list[Tensor],
        *,
        kernel: Kernel,
        limit: int,
        seed: int,
        model: nn.Module | None = None,
        inputs: tuple[ArrayLike | None, ArrayLike | None] = (None, None),
    ) -> None:
        self.name, self.function, self.kernel = _as_loss(loss, kernel, *domains)
        self.domains, self.model = domains, model
        self.rows = [sample_rows(len(x), limit, seed, x.device) for x in domains]
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
        for value, x, name in zip(inputs, domains, ("source_inputs", "target_inputs")):
            if value is None or len(value) != len(x):
                got = "none" if value is None else f"{len(value)} rows"
                raise InputError(f"model needs {name} with {len(x)} rows, one for each row of the features, got {got}")
            self.inputs.append(torch.as_tensor(value))
        self.note = f"gradient: of the model's {sum(p.numel() for p in self.parameters):,} parameters"

    def features(self, domain: int, rows: Tensor) -> Tensor:
        """Features (b, d) of rows of domain 0 or 1 as a function of the parameters, with their graph."""
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

    @cached_property
    def whole(self) -> float:
        """Loss of the whole domains; for MMD² it is |μ_s - μ_t|²."""
        with torch.no_grad():
            features = [x[rows] for x, rows in zip(self.domains, self.rows)]
            if self.kernel is None:
                return float(self.function(*features))
            c = self._signs()
            blocks = self.kernel.blocks(torch.cat(features))
            return float(torch.stack([c[rows] @ (block.to(c.dtype) @ c) for rows, block in blocks]).sum())

    @cached_property
    def whole_gradient(self) -> Tensor:
        """Its gradient (p,)."""
        blocks = [(i, some) for i, rows in enumerate(self.rows) for some in rows.split(_INPUT_ROWS)]  # type: ignore[no-untyped-call]
        with torch.no_grad():  # the model's features may be newer than the given ones
            z = torch.cat([self.features(i, some) for i, some in blocks])
        slopes = self._slopes(z).split([len(some) for _, some in blocks])  # type: ignore[no-untyped-call]
        parts = [self.gradient(self.features(i, some), slope) for (i, some), slope in zip(blocks, slopes)]
        return sum(parts[1:], start=parts[0])

    def _slopes(self, z: Tensor) -> Tensor:
        """Gradient of the loss of all samples with respect to their features, source before target."""
        if self.kernel is None:
            z.requires_grad_()
            split = len(self.rows[0])
            return torch.autograd.grad(self.function(z[:split], z[split:]), z)[0]
        c, slopes = self._signs(), torch.empty_like(z)
        for rows in row_blocks(len(z), _BLOCK_NUMBERS // len(z)):
            # the kernel is symmetric: what z_i does as a first argument counts twice
            leaf = z[rows].clone().requires_grad_()
            half = c[rows] @ (self.kernel.matrix(leaf, z).to(c.dtype) @ c)
            slopes[rows] = torch.autograd.grad(2.0 * half, leaf)[0]
        return slopes

    def _signs(self) -> Tensor:
        """The c with μ_s - μ_t = Σ_i c_i φ(z_i), over all rows."""
        n, m = map(len, self.rows)
        signs = self.rows[0].new_full((n + m,), -1.0 / m, dtype=torch.float64)
        signs[:n] = 1.0 / n
        return signs

    def _of_pair(self, batches: list[Chunk], pair: tuple[int, int], features: list[Tensor]) -> Tensor:
        """Loss of a source and a target batch with the given features."""
        weights = [None if of.weights is None else of.weights[place] for of, place in zip(batches, pair)]
        return self.function(*features, weights_x=weights[0], weights_y=weights[1])

    @torch.no_grad()
    def noise(self, batches: list[Chunk], pairing: list[int]) -> dict[str, Any]:
        """Mean, bias and variance of the loss of source batch i with target batch ``pairing[i]``."""
        found = []
        for pair in enumerate(pairing):
            features = [x[of.rows[place]] for x, of, place in zip(self.domains, batches, pair)]
            found.append(self._of_pair(batches, pair, features))
        values, count = torch.stack(found).double(), len(found)
        mean, variance = float(values.mean()), float(values.var())
        squares = (values - mean).square()
        return {
            "loss_mean": Estimate(mean, math.sqrt(variance / count)),
            "loss_bias": mean - self.whole,
            "loss_variance": Estimate(variance, float(squares.std()) / math.sqrt(count)),
        }

    def gradient_noise(self, batches: list[Chunk], pairing: list[int]) -> tuple[Estimate, float]:
        """Mean squared error of the gradient over pairs of batches, and its variance, relative to |G|²."""
        truth = self.whole_gradient
        total, errors, size = torch.zeros_like(truth), [], float(truth.square().sum())
        for pair in enumerate(pairing):
            features = [self.features(i, of.rows[place]) for i, (of, place) in enumerate(zip(batches, pair))]
            error = self.gradient(self._of_pair(batches, pair, features)) - truth
            errors.append(error.square().sum())
            total += error
        if not size > 0:
            return Estimate(math.nan, math.nan), math.nan
        squares, count = torch.stack(errors) / size, len(errors)
        # Σ|g - mean g|² = Σ|g - G|² - |Σ (g - G)|² / count
        variance = (float(squares.sum()) - float(total.square().sum()) / size / count) / (count - 1)
        return Estimate(float(squares.mean()), float(squares.std()) / math.sqrt(count)), variance
