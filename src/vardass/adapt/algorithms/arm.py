"""Adaptive risk minimisation: the network is told about the domain by a context of unlabelled samples."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from vardass.adapt.algorithms.base import Algorithm, Batch, CommonOptions, Losses, trainable
from vardass.adapt.networks import Network, widen_input
from vardass.adapt.networks.base import seeded
from vardass.errors import InputError
from vardass.validate import as_weights, check_count

__all__ = ["ARM"]


class ARM(Algorithm):
    """Cross-entropy of a network that sees each sample together with its batch's context (Zhang et al. 2021).

    A context network's outputs are averaged over a support set, consecutive samples of one domain, and
    joined to each of its inputs: for images (c, h, w) three 5x5 convolutions give one more channel, as in
    DomainBed; for vectors (d,) two linear layers give ``context_dim`` more columns. In training the average
    uses the sampling weights. The target is used only at prediction, so a batch to predict must come from
    one domain; its size matters too.

    Several sources are united in one stream, so a training batch, and a support set in it, may hold samples of all
    of them: the context is then that of the mixture. Zhang et al. take a support set from one domain; for that,
    train on one source.

    The first layer of ``network`` is widened in place.

    Parameters
    ----------
    support_size : int, optional
        Samples of a support set. None, or if it does not divide the batch: the whole batch.
    context_width : int
        Hidden channels or units of the context network.
    context_dim : int
        Columns of a vector's context.
    **common
        See ``Algorithm``.
    """

    name: ClassVar[str] = "arm"
    uses_target: ClassVar[bool] = False

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        support_size: int | None = None,
        context_width: int = 64,
        context_dim: int = 16,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(network, num_classes, **common)
        self.support_size = None if support_size is None else check_count(support_size, "support_size")
        check_count(context_width, "context_width")
        shape = network.input_shape
        if shape is None or len(shape) not in (1, 3):
            raise InputError(
                f"'arm' needs a network with input_shape (d,) or (channels, height, width), got {shape}; "
                "build it with make_network"
            )
        with seeded(self.seed):
            if len(shape) == 3:
                self.context: nn.Module = _image_context(shape[0], context_width)
                widen_input(network, 1)
            else:
                check_count(context_dim, "context_dim")
                self.context = nn.Sequential(
                    nn.Linear(shape[0], context_width), nn.ReLU(), nn.Linear(context_width, context_dim)
                )
                widen_input(network, context_dim)

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, which is the total."""
        task = self.task_loss(self.source_features(source), source)
        return {"total": task, "task": task}

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """One role, ``network``, the context network included."""
        return {"network": trainable(self.network, self.context)}

    def features(self, x: Tensor) -> Tensor:
        """Return z (b, feature_dim) of samples of one domain."""
        return self.network.features(self.with_context(x))

    def source_features(self, source: Batch) -> Tensor:
        """Return z of a source batch, its context averaged with the sampling weights."""
        return self.processes.whole(self.network.features(self.with_context(source.x, source.weights, source.size)))

    def with_context(self, x: Tensor, weights: Tensor | None = None, rows: int | None = None) -> Tensor:
        """Return ``x`` (b, c, ...) with the mean context of its support set as more channels or columns.

        If ``x`` is this process's part of a batch of ``rows`` samples, support sets are those of the whole batch.
        """
        context: Tensor = self.context(x)
        mine = slice(None)
        if rows is not None and rows != len(x):
            context, mine = self.processes.whole(context), self.processes.part(rows)
        b = len(context)
        size = self.support_size if self.support_size and b % self.support_size == 0 else b
        groups = context.reshape(b // size, size, *context.shape[1:])
        w = as_weights(weights, b, context)
        if w is None:
            mean = groups.mean(1)
        else:
            # a support set whose weights are all zero has no part in the loss
            shares = w.view(-1, size)
            shares = shares / shares.sum(1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
            mean = torch.einsum("gs,gs...->g...", shares, groups)
        return torch.cat([x, mean.repeat_interleave(size, 0)[mine].to(x.dtype)], 1)


def _image_context(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, padding=2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 5, padding=2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 1, 5, padding=2),
    )
