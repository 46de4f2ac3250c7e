"""Small featurisers that train from scratch on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.validate import check_count

__all__ = ["AudioFeaturiser", "ConvFeaturiser", "MLPFeaturiser"]

_SMALLEST_IMAGE = 16


class MLPFeaturiser(nn.Sequential):
    """Linear layers with ReLU after each: (b, *shape) -> (b, hidden[-1])."""

    def __init__(self, input_shape: Sequence[int], *, hidden: Sequence[int] = (128, 64)) -> None:
        if not hidden:
            raise InputError("hidden must name at least one layer width, got none; use hidden=(128, 64)")
        widths = [math.prod(input_shape), *(check_count(width, "a width in hidden") for width in hidden)]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers)


class ConvFeaturiser(nn.Sequential):
    """Blocks of convolution, BatchNorm, ReLU and pooling by 2, then the mean: (b, c, h, w) -> (b, widths[-1])."""

    def __init__(self, input_shape: Sequence[int], *, widths: Sequence[int] = (32, 64, 128)) -> None:
        channels = _image_channels(input_shape, "conv", len(widths))
        super().__init__(*_blocks(channels, widths), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class AudioFeaturiser(nn.Module):
    """Convolutions on mel patches; mean over frequency, mean and maximum over time: (b, 1, mels, frames) -> (b, m).

    The maximum over time keeps a short call in a long clip from being averaged away; m is twice the last
    width. The network of the paper's Humpbacks data is described in a published study (DCASE 2023) whose code is not
    to be had: this one is ours.
    """

    def __init__(self, input_shape: Sequence[int], *, widths: Sequence[int] = (16, 32, 64, 64)) -> None:
        super().__init__()
        channels = _image_channels(input_shape, "audio", len(widths))
        self.blocks = nn.Sequential(*_blocks(channels, widths))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of mel patches (b, channels, mels, frames)."""
        over_time: Tensor = self.blocks(x).mean(2)
        return torch.cat([over_time.mean(2), over_time.amax(2)], 1)


def _image_channels(input_shape: Sequence[int], name: str, blocks: int) -> int:
    smallest = max(_SMALLEST_IMAGE, 2**blocks)
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise InputError(
            f"network {name!r} needs samples of shape (channels, height, width) with at least {smallest} pixels each "
            f"way, got {tuple(input_shape)}; use 'mlp' or larger samples"
        )
    return input_shape[0]


def _blocks(channels: int, widths: Sequence[int]) -> list[nn.Module]:
    if not widths:
        raise InputError("widths must name at least one block, got none; use widths=(32, 64, 128)")
    layers: list[nn.Module] = []
    for width in widths:
        check_count(width, "a width in widths")
        # a bias before BatchNorm would be subtracted again
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    return layers
