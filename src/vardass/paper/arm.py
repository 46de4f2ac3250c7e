"""Adaptive risk minimisation: the network is told about the domain by a context of unlabelled samples."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vardass.adapt.algorithms.base import Algorithm, Batch, Losses, trainable
from vardass.adapt.networks import Network, seeded
from vardass.data.splits import named_seed
from vardass.errors import InputError
from vardass.validate import as_generator, as_weights, check_count

__all__ = ["ARM", "widen_input"]

_HIDDEN, _COLUMNS = 64, 16  # channels or units within a context network, and columns of a vector's context


class ARM(Algorithm):
    """Cross-entropy of a network that sees each sample together with a context of its domain (Zhang et al. 2021).

    A context network's outputs are averaged over a support set, ``support_size`` samples of one domain, and joined to
    each of its inputs: for images (c, h, w) three 5x5 convolutions give one more channel, as in DomainBed; for
    vectors (d,) two linear layers give 16 more columns. The last support set of a domain is filled up with samples
    before it; a domain with fewer samples in a batch has one set of all of them. In training sets are drawn at random
    in each step and averages use the sampling weights; in evaluation sets are consecutive samples, so what `features`
    and `predict` are given must come from one domain.

    The first layer of ``network`` is widened in place.

    Parameters
    ----------
    support_size : int
        Samples of a support set; DomainBed's batches have 8 of each source (``batch_per_source`` of ``RunConfig``).
    **common
        See ``Algorithm``.
    """

    name: ClassVar[str] = "arm"
    uses_target: ClassVar[bool] = False
    takes_regression: ClassVar[bool] = True
    _step = 0  # of the update under way: all its passes see the same support sets

    def __init__(
        self,
        network: Network,
        num_classes: int,
        *,
        support_size: int = 8,
        **common: Any,
    ) -> None:
        super().__init__(network, num_classes, **common)
        self.support_size = self.seen_together = check_count(support_size, "support_size")
        shape = network.input_shape
        if shape is None or len(shape) not in (1, 3):
            raise InputError(
                f"'arm' needs a network with input_shape (d,) or (channels, height, width), got {shape}; "
                "build it with make_network"
            )
        with seeded(self.seed):
            if len(shape) == 3:
                self.context: nn.Module = _image_context(shape[0])
                widen_input(network, 1)
            else:
                self.context = nn.Sequential(nn.Linear(shape[0], _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _COLUMNS))
                widen_input(network, _COLUMNS)

    def update(self, source: Batch, target: Batch | None, step: int, **how: Any) -> Losses:
        """Take one step, see ``Algorithm``."""
        self._step = step
        return super().update(source, target, step, **how)

    def losses(self, source: Batch, target: Batch | None, step: int) -> Losses:
        """Return ``task``, which is the total."""
        self._step = step
        task = self.task_loss(self.source_features(source), source)
        return {"total": task, "task": task}

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """One role, ``network``, the context network included."""
        return {"network": trainable(self.network, self.context)}

    def features(self, x: Tensor) -> Tensor:
        """Return z (b, feature_dim) of samples of one domain."""
        return self.network.features(self.with_context(x))

    def source_features(self, source: Batch) -> Tensor:
        """Return z of a source batch, its contexts averaged with the sampling weights."""
        if source.size < self.support_size:
            raise InputError(
                f"support_size={self.support_size} needs batches of at least as many samples, got {source.size}; lower "
                "support_size or enlarge batch_size"
            )
        generator = as_generator(named_seed("support", self._step))
        order = torch.randperm(source.size, generator=generator)
        joined = self.with_context(source.x, source.weights, rows=source.size, domains=source.domains, order=order)
        return self.after_dropout(self.network.features(joined), "source")

    def with_context(
        self,
        x: Tensor,
        weights: Tensor | None = None,
        *,
        rows: int | None = None,
        domains: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Tensor:
        """Return ``x`` (b, c, ...) with the mean context of its support set as more channels or columns.

        If ``x`` is this process's part of a batch of ``rows`` samples, support sets are those of the whole batch, by
        ``domains`` (rows,) and in the given ``order`` (rows,).
        """
        context: Tensor = self.context(x)
        mine = slice(None)
        if rows is not None and rows != len(x):
            context, mine = self.processes.whole(context), self.processes.part(rows)
        shares = _support(len(context), self.support_size, domains, order).to(context)
        w = as_weights(weights, len(context), context, read=False)
        if w is not None:
            shares = shares * w
        # a support set whose weights are all zero has no part in the loss
        shares = shares / shares.sum(1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
        with torch.autocast(x.device.type, enabled=False):
            mean = torch.einsum("ij,j...->i...", shares[mine], context)
        return torch.cat([x, mean.to(x.dtype)], 1)


def _support(b: int, size: int, domains: Tensor | None, order: Tensor | None) -> Tensor:
    """(b, b): whether the context of sample j is part of that of sample i."""
    found = torch.zeros(b, b, dtype=torch.bool)
    ids = torch.zeros(b, dtype=torch.int64) if domains is None else domains.cpu()
    order = torch.arange(b) if order is None else order
    for domain in set(ids.tolist()):
        rows = order[ids[order] == domain]
        for start in range(0, len(rows), size):
            first = min(start, max(0, len(rows) - size))
            found[rows[start : start + size][:, None], rows[first : first + size]] = True
    return found


def _image_context(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, _HIDDEN, 5, padding=2),
        nn.BatchNorm2d(_HIDDEN),
        nn.ReLU(),
        nn.Conv2d(_HIDDEN, _HIDDEN, 5, padding=2),
        nn.BatchNorm2d(_HIDDEN),
        nn.ReLU(),
        nn.Conv2d(_HIDDEN, 1, 5, padding=2),
    )


def widen_input(network: Network, extra: int) -> None:
    """Let the first layer of ``network`` take ``extra`` more channels (images) or columns (vectors), in place.

    New channel i of a convolution copies channel i mod c, which keeps a pretrained filter meaningful; new columns of a
    linear layer get a fresh initialisation. A linear first layer sees images flattened, channel by channel.
    """
    shape = network.input_shape or ()
    before_head = (module for module in network.modules() if module is not network.head)
    kinds = (nn.Conv2d, nn.Linear) if len(shape) == 3 else (nn.Linear,)
    found = next((module for module in before_head if isinstance(module, kinds)), None)
    if found is None:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(f"the network has no {names} layer to widen for input of shape {shape}; use another")
    total = shape[0] + extra
    if isinstance(found, nn.Conv2d):
        _check_inputs(found.in_channels, shape[0], found.groups)
        weight = found.weight.detach()[:, torch.arange(total) % shape[0]]
        found.in_channels = total
    else:
        columns = math.prod(shape[1:])
        _check_inputs(found.in_features, shape[0] * columns)
        fresh = nn.Linear(total * columns, found.out_features).weight.detach()[:, shape[0] * columns :]
        weight = torch.cat([found.weight.detach(), fresh.to(found.weight)], 1)
        found.in_features = total * columns
    found.weight = nn.Parameter(weight.contiguous(), requires_grad=found.weight.requires_grad)
    for module in network.modules():  # backbones of transformers check the number of channels
        if len(shape) == 3 and getattr(module, "num_channels", None) == shape[0]:
            setattr(module, "num_channels", total)  # noqa: B010
    network.input_shape = (total, *shape[1:])


def _check_inputs(takes: int, have: int, groups: int = 1) -> None:
    if takes != have or groups != 1:
        raise InputError(
            f"the first layer takes {takes} inputs in {groups} groups, but samples have {have}; only a plain first "
            "layer can be widened"
        )
