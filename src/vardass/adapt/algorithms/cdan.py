"""Conditional adversarial training: the discriminator sees features and predictions together."""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from vardass.adapt.algorithms.adversary import (
    Adversarial,
    AdversarialOptions,
    discriminator,
    domain_loss,
    domain_shares,
    hidden_width,
)
from vardass.adapt.algorithms.mcc import entropy
from vardass.adapt.networks import Network
from vardass.adapt.networks.base import seeded
from vardass.losses import Batch
from vardass.validate import as_generator, check_count, check_flag

__all__ = ["CDAN", "OuterMap", "RandomisedMap"]


class OuterMap(nn.Module):
    """The flattened outer product of predictions (b, C) and features (b, d): (b, C d)."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.width = features * classes

    def forward(self, z: Tensor, p: Tensor) -> Tensor:
        """Return p ⊗ z."""
        return (p[:, :, None] * z[:, None, :]).flatten(1)


class RandomisedMap(nn.Module):
    """(1/√D) (R_z z) * (R_p p) with fixed standard normal R: inner products have the mean of ``OuterMap``'s.

    The matrices are buffers, so that a checkpoint keeps them.
    """

    random_z: Tensor
    random_p: Tensor

    def __init__(self, features: int, classes: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("random_z", torch.randn(features, width, generator=generator))
        self.register_buffer("random_p", torch.randn(classes, width, generator=generator))

    def forward(self, z: Tensor, p: Tensor) -> Tensor:
        """Return (b, D)."""
        return (z @ self.random_z.to(z.dtype)) * (p @ self.random_p.to(p.dtype)) / math.sqrt(self.width)


class CDAN(Adversarial):
    """Conditional domain-adversarial network (Long et al. 2018).

    Parameters
    ----------
    entropy : bool
        CDAN+E: rows weigh in proportion to 1 + exp(-H) with H the entropy of the prediction.
    randomised : bool
        The randomised map instead of the outer product, for many classes times features.
    randomised_dim : int
        Its width D.
    discriminator_width : int or "auto"
        ``"auto"``: 4 times the inputs, within 32 and 1024.
    **shared
        See ``Adversarial`` and ``Algorithm``; ``sharpness`` makes this SDAT.

    Examples
    --------
    >>> from vardass.adapt import make_network
    >>> CDAN(make_network("mlp", (3,), 2, hidden=(4,)), 2, entropy=True).map.width  # features times classes
    8
    """

    name: ClassVar[str] = "cdan"
    map: OuterMap | RandomisedMap

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        entropy: bool = False,
        randomised: bool = False,
        randomised_dim: int = 1024,
        discriminator_width: int | str = 1024,
        **shared: Unpack[AdversarialOptions],
    ) -> None:
        super().__init__(network, num_classes, **shared)
        self.entropy = check_flag(entropy, "entropy")
        check_count(randomised_dim, "randomised_dim")
        if check_flag(randomised, "randomised"):
            generator = as_generator(self.seed)
            self.map = RandomisedMap(network.feature_dim, num_classes, randomised_dim, generator)
        else:
            self.map = OuterMap(network.feature_dim, num_classes)
        with seeded(self.seed):
            width = hidden_width(discriminator_width, self.map.width)
            self.discriminator = discriminator(self.map.width, width)

    def domain(self, z_s: Tensor, z_t: Tensor, logits_s: Tensor, source: Batch, target: Batch) -> Tensor:
        """Return the binary cross-entropy over the rows of both batches; predictions carry no gradient."""
        p = torch.cat([logits_s, self.network.head(z_t)]).detach().softmax(1)
        joint = self.map(torch.cat([z_s, z_t]), p.to(z_s.dtype))
        logits = self.discriminator(self.reversal(joint))
        shares = domain_shares(source, target, logits, balanced=False)
        if self.entropy:
            shares = shares * (1.0 + torch.exp(-entropy(p)))
            shares = shares / shares.sum()
        return domain_loss(logits, len(z_s), shares, smoothing=self.smoothing)
