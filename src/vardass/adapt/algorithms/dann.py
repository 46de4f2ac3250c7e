"""Domain-adversarial training, with gradient reversal or with alternating steps."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from vardass.adapt.algorithms.adversary import (
    REFERENCE_WIDTH,
    Adversarial,
    AdversarialOptions,
    discriminator,
    domain_loss,
    domain_shares,
    hidden_width,
)
from vardass.adapt.algorithms.base import Backward, Losses, zero_gradients
from vardass.adapt.networks import Network
from vardass.adapt.networks.base import seeded
from vardass.losses import Batch
from vardass.validate import check_count, check_number, choose

__all__ = ["DANN"]

DOMAINBED_WIDTH = 256


class DANN(Adversarial):
    """Features that a discriminator cannot tell apart (Ganin et al. 2016).

    The paper does not say which of the two forms it used.

    Parameters
    ----------
    adversary : {"grl", "alternating"}
        ``"grl"`` is TLlib's: one step for all, gradient reversal, one logit, each domain one half of the
        loss. ``"alternating"`` is DomainBed's: of every 1 + ``d_steps_per_g_step`` steps one trains the
        network on task - λ domain and the others train the discriminator, with two logits and the mean over
        all rows. There both optimisers are Adam with betas (0.5, 0.9).
    discriminator_width : int or "auto", optional
        None: 1024 for ``"grl"``, 256 for ``"alternating"``. ``"auto"``: 4 times the features, within 32 and
        1024.
    discriminator_depth, discriminator_dropout
        Of the alternating form: linear layers, and dropout before each ReLU.
    d_steps_per_g_step : int
        Discriminator steps for each step of the network.
    grad_penalty : float
        Times Σ_i q_i |∂ CE_i / ∂ z_i|², part of the alternating form's domain loss.
    **shared
        See ``Adversarial`` and ``Algorithm``.

    Examples
    --------
    >>> from vardass.adapt import Batch, make_network
    >>> rule = DANN(make_network("mlp", (3,), 2, hidden=(4,)), 2)
    >>> x = torch.randn(4, 3)
    >>> sorted(rule.losses(Batch(x, torch.tensor([0, 1, 0, 1])), Batch(x), 0))
    ['domain', 'task', 'total']
    """

    name: ClassVar[str] = "dann"
    takes_regression: ClassVar[bool] = True

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        adversary: str = "grl",
        discriminator_width: int | str | None = None,
        discriminator_depth: int = 3,
        discriminator_dropout: float = 0.0,
        d_steps_per_g_step: int = 1,
        grad_penalty: float = 0.0,
        **shared: Unpack[AdversarialOptions],
    ) -> None:
        super().__init__(network, num_classes, **shared)
        self.adversary = choose(adversary, "adversary", ("grl", "alternating"))
        self.grad_penalty = check_number(grad_penalty, "grad_penalty", low=0.0)
        self.d_steps_per_g_step = check_count(d_steps_per_g_step, "d_steps_per_g_step")
        inputs = network.feature_dim
        depth = check_count(discriminator_depth, "discriminator_depth", low=2)
        dropout = check_number(discriminator_dropout, "discriminator_dropout", low=0.0, below=1.0)
        with seeded(self.seed):
            if discriminator_width is None:
                discriminator_width = REFERENCE_WIDTH if self.adversary == "grl" else DOMAINBED_WIDTH
            width = hidden_width(discriminator_width, inputs)
            if self.adversary == "grl":
                self.discriminator = discriminator(inputs, width)
            else:
                self.discriminator = _two_logits(inputs, width, depth, dropout)

    def domain(self, z_s: Tensor, z_t: Tensor, logits_s: Tensor, source: Batch, target: Batch) -> Tensor:
        """Return half the source's and half the target's binary cross-entropy."""
        logits = self.discriminator(self.reversal(torch.cat([z_s, z_t])))
        shares = domain_shares(source, target, logits, balanced=True)
        return domain_loss(logits, len(z_s), shares, smoothing=self.smoothing)

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, ``domain`` and the total; in the alternating form that of the network, task - λ domain."""
        if self.adversary == "grl":
            return super().losses(source, target, step)
        target = self.need_target(target)
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

    def update(
        self,
        source: Batch,
        target: Batch | None,
        step: int,
        *,
        optimisers: dict[str, Optimizer],
        backward: Backward,
    ) -> Losses:
        """Take one step; in the alternating form of the network or of the discriminator, by ``step``.

        A discriminator's step returns only ``domain``, which is its total.
        """
        if self.adversary == "grl":
            return super().update(source, target, step, optimisers=optimisers, backward=backward)
        target = self.need_target(target)
        role = self.turn(step)
        if role == "network":
            # the discriminator gets gradients too: they are forgotten before its own step
            return self.descend(
                lambda: self.losses(source, target, step), source, target, {role: optimisers[role]}, backward
            )
        zero_gradients(optimisers)
        with torch.no_grad():  # a discriminator's step has no use for the network's gradient
            z = torch.cat(self.pair_features(source, target))
        domain = self.alternating_domain(z, source, target)
        backward(domain)
        optimisers[role].step()
        return {"total": domain.detach(), "domain": domain.detach()}

    def turn(self, step: int) -> str:
        """Return the role that ``step`` trains in the alternating form; with one discriminator step, network first."""
        steps = self.d_steps_per_g_step
        return "discriminator" if (step + 1) % (1 + steps) < steps else "network"


def _two_logits(inputs: int, width: int, depth: int, dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for layer in range(depth - 1):
        layers += [nn.Linear(width if layer else inputs, width), nn.Dropout(dropout), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 2))
