"""Adversarial algorithms: DANN and CDAN with their discriminators, ELS (smoothed domain labels) and SDAT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from vardass.adapt.algorithms.base import Algorithm, Backward, Batch, Losses
from vardass.adapt.algorithms.mcc import entropy
from vardass.adapt.networks import Network, seeded
from vardass.validate import as_weights, check_count, check_flag, check_number, choose

__all__ = ["CDAN", "DANN", "Adversarial", "GradientReversal", "at_ascent", "domain_loss"]

_REFERENCE_WIDTH, _DOMAINBED_WIDTH = 1024, 256


class _Reverse(torch.autograd.Function):
    """Identity whose gradient is multiplied by -c."""

    @staticmethod
    def forward(x: Tensor, coefficient: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (coefficient,) = ctx.saved_tensors
        return -coefficient.to(grads[0].dtype) * grads[0], None


class GradientReversal(nn.Module):
    """Identity forward, gradient times -c backward, with c = 2 / (1 + exp(-i / 1000)) - 1 rising from 0 (TLlib's).

    i counts the calls in training mode and is saved with the state: c is 0.46 at i = 1000, 0.905 at i = 3000.
    """

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @property
    def coefficient(self) -> Tensor:
        """The c of the next call, a scalar."""
        return 2.0 / (1.0 + torch.exp(-self.calls.float() / 1000)) - 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        coefficient = self.coefficient
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        result: Tensor = _Reverse.apply(x, coefficient)  # type: ignore[no-untyped-call]
        return result


class Adversarial(Algorithm):
    """Base of DANN and CDAN: cross-entropy + λ times the loss of a discriminator behind a gradient reversal.

    Parameters
    ----------
    penalty : float
        λ.
    smoothing : float
        ε of ELS (environment label smoothing), at most 1/2: the domain labels are 1 - ε and ε. 0 is none.
    sharpness : float
        ρ of SDAT: the step's gradients are taken at w + ρ g/|g| with g the gradient of the task loss alone
        and the norm over all parameters of the role ``"network"``. 0 is the ordinary step. BatchNorm
        statistics are updated once for each step.
    **common
        See ``Algorithm``.
    """

    uses_target: ClassVar[bool] = True
    discriminator: nn.Module

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        penalty: float = 1.0,
        smoothing: float = 0.0,
        sharpness: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(network, num_classes, **common)
        self.sharpness = check_number(sharpness, "sharpness", low=0.0)
        self.penalty = check_number(penalty, "penalty", low=0.0)
        self.smoothing = check_number(
            smoothing, "smoothing", low=0.0, high=0.5, remedy="beyond one half the two domains change places"
        )
        self.reversal = GradientReversal()

    def update(
        self, source: Batch, target: Batch | None, step: int, *, optimisers: dict[str, Optimizer], backward: Backward
    ) -> Losses:
        """Take one step, whose gradients are those of SDAT's ascent if ``sharpness`` is set; see ``Algorithm``."""
        trained = self.trained_roles(step, list(optimisers))
        if not self.sharpness or "network" not in trained:
            return super().update(source, target, step, optimisers=optimisers, backward=backward)
        for optimiser in optimisers.values():
            optimiser.zero_grad()
        with paused_statistics(self):
            z, _ = self.pair_features(source, self.need_target(target))
            backward(self.task_loss(z, source))
        computed = dict(self.computed)  # those of the network's own parameters
        with at_ascent(self.parameter_groups()["network"], self.sharpness):
            self.zero_grad()
            parts = self.losses(source, target, step)
            backward(parts["total"])
        self.computed = computed
        for role in trained:
            optimisers[role].step()
        return {name: value.detach() for name, value in parts.items()}

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, ``domain`` and their sum."""
        target = self.need_target(target)
        z_s, z_t = self.pair_features(source, target)
        logits_s = self.network.head(z_s)
        task = self.output_loss(logits_s, source)
        domain = self.domain(z_s, z_t, logits_s, source, target)
        return {"total": task + self.penalty * domain, "task": task, "domain": domain}

    def domain(self, z_s: Tensor, z_t: Tensor, logits_s: Tensor, source: Batch, target: Batch) -> Tensor:
        """Return the discriminator's loss, its gradient reversed for the features."""
        raise NotImplementedError

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Roles ``network`` and ``discriminator``."""
        return {**super().parameter_groups(), "discriminator": list(self.discriminator.parameters())}


def domain_shares(source: Batch, target: Batch, like: Tensor, *, balanced: bool) -> Tensor:
    """Return the weight of each row of the concatenated batches in a domain loss: (b_s + b_t,), sum 1.

    Each domain has one half if ``balanced``, else the share of its rows; within a domain sampling weights apply.
    """
    n_s, n_t = source.size, target.size
    share_s = 0.5 if balanced else n_s / (n_s + n_t)
    parts = []
    for batch, share, name in ((source, share_s, "source weights"), (target, 1.0 - share_s, "target weights")):
        w = as_weights(batch.weights, batch.size, like, name, read=False)
        parts.append(like.new_full((batch.size,), share / batch.size) if w is None else share * w)
    return torch.cat(parts)


def domain_loss(logits: Tensor, n_source: int, shares: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return Σ_i q_i BCE(logit_i, label_i), with label 1 - ε for the first ``n_source`` rows and ε for the rest."""
    labels = torch.full_like(logits, smoothing)
    labels[:n_source] = 1.0 - smoothing
    return (shares * F.binary_cross_entropy_with_logits(logits, labels, reduction="none")).sum()


def _discriminator(inputs: int, width: int) -> nn.Sequential:
    """Return TLlib's: two hidden layers with BatchNorm and ReLU, one logit that means "source"."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 1),
        nn.Flatten(0),
    )


# --- DANN ---------------------------------------------------------------------------------------------


class DANN(Adversarial):
    """Features that a discriminator cannot tell apart (Ganin et al. 2016).

    The paper does not say which of the two forms it used.

    Parameters
    ----------
    adversary : {"grl", "alternating"}
        ``"grl"`` is TLlib's: gradient reversal, one logit, each domain one half of the loss. ``"alternating"`` is
        DomainBed's: of every 1 + ``d_steps_per_g_step`` steps one trains the network on task - λ domain and the others
        train the discriminator, with two logits and the mean over all rows; Adam has betas (0.5, 0.9).
    discriminator_width : int, optional
        By default 1024 for ``"grl"``, 256 for ``"alternating"``.
    discriminator_depth, discriminator_dropout
        Of the alternating form: linear layers, and dropout before each ReLU.
    d_steps_per_g_step : int
        Discriminator steps for each step of the network.
    grad_penalty : float
        Times Σ_i q_i |∂ CE_i / ∂ z_i|², part of the alternating form's domain loss.
    **shared
        See ``Adversarial`` and ``Algorithm``.
    """

    name: ClassVar[str] = "dann"
    takes_regression: ClassVar[bool] = True

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        adversary: str = "grl",
        discriminator_width: int | None = None,
        discriminator_depth: int = 3,
        discriminator_dropout: float = 0.0,
        d_steps_per_g_step: int = 1,
        grad_penalty: float = 0.0,
        **shared: Any,
    ) -> None:
        super().__init__(network, num_classes, **shared)
        self.adversary = choose(adversary, "adversary", ("grl", "alternating"))
        self.grad_penalty = check_number(grad_penalty, "grad_penalty", low=0.0)
        self.d_steps_per_g_step = check_count(d_steps_per_g_step, "d_steps_per_g_step")
        if discriminator_width is None:
            discriminator_width = _REFERENCE_WIDTH if self.adversary == "grl" else _DOMAINBED_WIDTH
        inputs, width = network.feature_dim, check_count(discriminator_width, "discriminator_width")
        depth = check_count(discriminator_depth, "discriminator_depth", low=2)
        dropout = check_number(discriminator_dropout, "discriminator_dropout", low=0.0, below=1.0)
        with seeded(self.seed):
            if self.adversary == "grl":
                self.discriminator = _discriminator(inputs, width)
            else:
                self.discriminator = _two_logits(inputs, width, depth, dropout)

    def domain(self, z_s: Tensor, z_t: Tensor, logits_s: Tensor, source: Batch, target: Batch) -> Tensor:
        """Return half the source's and half the target's binary cross-entropy."""
        logits = self.discriminator(self.reversal(torch.cat([z_s, z_t])))
        shares = domain_shares(source, target, logits, balanced=True)
        return domain_loss(logits, len(z_s), shares, smoothing=self.smoothing)

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, ``domain`` and the total.

        In the alternating form that is task - λ domain in a step of the network; a step of the discriminator has only
        ``domain``, which is its total.
        """
        if self.adversary == "grl":
            return super().losses(source, target, step)
        target = self.need_target(target)
        if self.turn(step) == "discriminator":
            with torch.no_grad():  # it has no use for the network's gradient
                z = torch.cat(self.pair_features(source, target))
            domain = self.alternating_domain(z, source, target)
            return {"total": domain, "domain": domain}
        z_s, z_t = self.pair_features(source, target)
        task = self.task_loss(z_s, source)
        domain = self.alternating_domain(torch.cat([z_s, z_t]), source, target)
        return {"total": task - self.penalty * domain, "task": task, "domain": domain}

    def alternating_domain(self, z: Tensor, source: Batch, target: Batch) -> Tensor:
        """Return the discriminator's loss at the features ``z`` (b_s + b_t, d) of both batches."""
        if self.grad_penalty and not z.requires_grad:
            z.requires_grad_()
        logits = self.discriminator(z)
        shares = domain_shares(source, target, logits, balanced=False)
        labels = torch.full_like(logits, self.smoothing)
        is_source = torch.arange(len(z), device=z.device) < source.size
        labels[torch.arange(len(z), device=z.device), (~is_source).long()] = 1.0 - self.smoothing
        each = F.cross_entropy(logits, labels, reduction="none")
        loss = (shares * each).sum()
        if self.grad_penalty:
            (slope,) = torch.autograd.grad(each.sum(), z, create_graph=True)
            loss = loss + self.grad_penalty * (shares * slope.square().sum(1)).sum()
        return loss

    def trained_roles(self, step: int, roles: list[str]) -> list[str]:
        """Return all roles; in the alternating form that of `turn`."""
        return roles if self.adversary == "grl" else [self.turn(step)]

    def turn(self, step: int) -> str:
        """Return the role that ``step`` trains in the alternating form; with one discriminator step, network first."""
        steps = self.d_steps_per_g_step
        return "discriminator" if (step + 1) % (1 + steps) < steps else "network"


def _two_logits(inputs: int, width: int, depth: int, dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for layer in range(depth - 1):
        layers += [nn.Linear(width if layer else inputs, width), nn.Dropout(dropout), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 2))


# --- CDAN ---------------------------------------------------------------------------------------------


class CDAN(Adversarial):
    """Conditional domain-adversarial network (Long et al. 2018): the discriminator sees predictions times features.

    Parameters
    ----------
    entropy : bool
        CDAN+E: rows weigh in proportion to 1 + exp(-H) with H the entropy of the prediction.
    discriminator_width : int
        Units of its hidden layers.
    **shared
        See ``Adversarial`` and ``Algorithm``.
    """

    name: ClassVar[str] = "cdan"

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        entropy: bool = False,
        discriminator_width: int = _REFERENCE_WIDTH,
        **shared: Any,
    ) -> None:
        super().__init__(network, num_classes, **shared)
        self.entropy = check_flag(entropy, "entropy")
        width = check_count(discriminator_width, "discriminator_width")
        with seeded(self.seed):
            self.discriminator = _discriminator(network.feature_dim * num_classes, width)

    def domain(self, z_s: Tensor, z_t: Tensor, logits_s: Tensor, source: Batch, target: Batch) -> Tensor:
        """Return the binary cross-entropy over the rows of both batches; predictions carry no gradient."""
        p = torch.cat([logits_s, self.network.head(z_t)]).detach().softmax(1)
        z = torch.cat([z_s, z_t])
        joint = (p.to(z.dtype)[:, :, None] * z[:, None, :]).flatten(1)
        logits = self.discriminator(self.reversal(joint))
        shares = domain_shares(source, target, logits, balanced=False)
        if self.entropy:
            shares = shares * (1.0 + torch.exp(-entropy(p)))
            shares = shares / shares.sum()
        return domain_loss(logits, len(z_s), shares, smoothing=self.smoothing)


# --- SDAT: sharpness-aware minimisation of the task loss ----------------------------------------------


@contextmanager
def at_ascent(parameters: Sequence[nn.Parameter], rho: float) -> Iterator[None]:
    """Within the block the parameters are w + ρ g/(|g| + 1e-12), g their present gradients; after it, exactly w again.

    Nothing moves where |g| is not finite, as after an overflow of a scaled loss.
    """
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
        before = [parameter.detach().clone() for parameter in moved]
        if moved:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients]))
            factor = rho / (norm + 1e-12)
            for parameter, gradient in zip(moved, gradients):
                parameter.add_(torch.where(torch.isfinite(norm), gradient * factor.to(gradient.dtype), 0))
    torch.clear_autocast_cache()  # it may hold half-precision copies of the old values
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(moved, before):
                parameter.copy_(value)
        torch.clear_autocast_cache()


@contextmanager
def paused_statistics(module: nn.Module) -> Iterator[None]:
    """Within the block BatchNorm layers use the batch as before but leave their running statistics alone."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
