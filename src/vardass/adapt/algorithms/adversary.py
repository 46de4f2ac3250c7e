"""What adversarial algorithms share: gradient reversal, discriminators and the smoothed domain loss."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vardass.adapt.algorithms.base import Algorithm, CommonOptions, Losses
from vardass.adapt.networks import Network
from vardass.losses import Batch
from vardass.validate import as_weights, check_count, check_number, choose

__all__ = [
    "Adversarial",
    "AdversarialOptions",
    "GradientReversal",
    "discriminator",
    "domain_loss",
    "domain_shares",
    "hidden_width",
]

REFERENCE_WIDTH = 1024


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
    """Identity forward, gradient times -c backward, with c rising from 0: c = 2h / (1 + exp(-a i/N)) - h.

    i counts the calls in training mode and is saved with the state. With the defaults of TLlib c is 0.46 at
    i = 1000 and 0.905 at i = 3000.

    Parameters
    ----------
    high : float
        h, the limit of c.
    rate : float
        a; the original paper of DANN has 10, with N the length of the training.
    steps : int
        N.
    """

    calls: Tensor

    def __init__(self, *, high: float = 1.0, rate: float = 1.0, steps: int = 1000) -> None:
        super().__init__()
        self.high, self.rate, self.steps = high, rate, steps
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @property
    def coefficient(self) -> Tensor:
        """C of the next call, a scalar."""
        progress = self.calls.float() / self.steps
        return 2.0 * self.high / (1.0 + torch.exp(-self.rate * progress)) - self.high

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        coefficient = self.coefficient
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        result: Tensor = _Reverse.apply(x, coefficient)  # type: ignore[no-untyped-call]
        return result


class AdversarialOptions(CommonOptions, total=False):
    """Options that DANN and CDAN share, see ``Adversarial``."""

    penalty: float
    smoothing: float
    reversal_high: float
    reversal_rate: float
    reversal_steps: int


class Adversarial(Algorithm):
    """Base of DANN and CDAN: cross-entropy + λ times the loss of a discriminator behind a gradient reversal.

    Parameters
    ----------
    penalty : float
        λ.
    smoothing : float
        ε of ELS (environment label smoothing), at most 1/2: the domain labels are 1 - ε and ε. 0 is none.
    reversal_high, reversal_rate, reversal_steps
        Schedule of the reversal, see ``GradientReversal``.
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
        reversal_high: float = 1.0,
        reversal_rate: float = 1.0,
        reversal_steps: int = 1000,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(network, num_classes, **common)
        self.penalty = check_number(penalty, "penalty", low=0.0)
        self.smoothing = check_number(
            smoothing, "smoothing", low=0.0, high=0.5, remedy="beyond one half the two domains change places"
        )
        self.reversal = GradientReversal(
            high=check_number(reversal_high, "reversal_high", low=0.0),
            rate=check_number(reversal_rate, "reversal_rate", low=0.0),
            steps=check_count(reversal_steps, "reversal_steps"),
        )

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

    Each domain has one half if ``balanced``, else the share of its rows, which for uniform weights is the
    plain mean over all rows; within a domain the sampling weights apply.
    """
    n_s, n_t = source.size, target.size
    share_s = 0.5 if balanced else n_s / (n_s + n_t)
    parts = []
    for batch, share, name in ((source, share_s, "source weights"), (target, 1.0 - share_s, "target weights")):
        w = as_weights(batch.weights, batch.size, like, name)
        parts.append(like.new_full((batch.size,), share / batch.size) if w is None else share * w)
    return torch.cat(parts)


def domain_loss(logits: Tensor, n_source: int, shares: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return Σ_i q_i BCE(logit_i, label_i), with label 1 - ε for the first ``n_source`` rows and ε for the rest."""
    labels = torch.full_like(logits, smoothing)
    labels[:n_source] = 1.0 - smoothing
    return (shares * F.binary_cross_entropy_with_logits(logits, labels, reduction="none")).sum()


def hidden_width(width: int | str, inputs: int) -> int:
    """Return a discriminator's width; ``"auto"`` is 4 times its inputs, between 32 and 1024."""
    if isinstance(width, str):
        choose(width, "discriminator_width", ("auto",))
        return min(REFERENCE_WIDTH, max(32, 4 * inputs))
    return check_count(width, "discriminator_width")


def discriminator(inputs: int, width: int) -> nn.Sequential:
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
