"""Mean, variance and gradient error of a discrepancy loss over pairs of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.kernels import CoralKernel, Kernel, fitted_kernel
from vardass.losses import CORALLoss, MMDLoss
from vardass.sampler_noise.draws import Batches
from vardass.sampler_noise.embedding import sample_rows
from vardass.sampler_noise.result import Estimate
from vardass.validate import ArrayLike, row_blocks

__all__ = ["Loss", "Producer", "Whole", "as_loss", "gradient_noise", "loss_noise", "whole_domains"]

LOSSES = ("mmd2", "mmd2-u", "coral")

_BLOCK_NUMBERS = 2**21  # kernel values held at a time where gradients pass through them
_INPUT_ROWS = 1024  # rows that go through a model at a time


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
    """Features of chosen samples as a function of parameters: a model's, or those of a linear layer.

    Parameters
    ----------
    domains : list of Tensor of shape (n, d)
        Features of source and target.
    model : nn.Module or None
        None: the parameters are a matrix A (d, d), zero, and the features z + z A.
    inputs : list of arrays of shape (n, ...)
        What the model takes.
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

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode for the time: a batch's features must not depend on the batch."""
        modes = [] if self.model is None else [(module, module.training) for module in self.model.modules()]
        if self.model is not None:
            self.model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


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


@torch.no_grad()
def loss_noise(
    loss: Loss, domains: list[Tensor], batches: list[Batches], pairing: list[int], whole: Whole
) -> dict[str, Any]:
    """Mean, bias and variance of the loss of source batch i with target batch ``pairing[i]``."""
    values = []
    for i, j in enumerate(pairing):
        (rows_x, weights_x), (rows_y, weights_y) = batches[0].pick(i), batches[1].pick(j)
        values.append(loss.value(domains[0][rows_x], domains[1][rows_y], weights_x=weights_x, weights_y=weights_y))
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
    errors = []
    for i, j in enumerate(pairing):
        (rows_x, weights_x), (rows_y, weights_y) = batches[0].pick(i), batches[1].pick(j)
        value = loss.value(producer(0, rows_x), producer(1, rows_y), weights_x=weights_x, weights_y=weights_y)
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
