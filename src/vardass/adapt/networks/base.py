"""A classifier in two parts: the featuriser, whose output the discrepancy sees, and a head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vardass.data.images import IMAGENET, ImagePreprocessing
from vardass.errors import InputError
from vardass.validate import check_count, check_flag, check_number

__all__ = ["Network", "output_size", "seeded", "widen_input"]


class Network(nn.Module):
    """Featuriser, bottleneck, dropout and head: x -> backbone -> [bottleneck] -> [dropout] = z -> logits.

    Parameters
    ----------
    featuriser : nn.Module
        Maps a batch (b, *input_shape) to (b, m); trailing dimensions are flattened.
    head : nn.Module
        Maps z (b, feature_dim) to logits (b, classes).
    feature_dim : int, optional
        Columns of z; taken from a linear ``head`` if not given.
    input_shape : sequence of int, optional
        Shape of one sample, for those who must build on it.
    bottleneck : nn.Module, optional
        Trained layers between the backbone and z. A frozen backbone needs one: otherwise no discrepancy can
        move z.
    freeze_backbone : bool
        No gradient and evaluation mode for ``featuriser``, so that its outputs may be cached.
    freeze_bn : bool
        BatchNorm layers of the featuriser stay in evaluation mode while training. The affine parameters
        still learn. DomainBed did so always up to July 2024; the paper does not say which version it used.
    dropout : float
        On z, as DomainBed has it: the discrepancy sees the dropped features.

    Attributes
    ----------
    preprocessing : ImagePreprocessing
        How images are normalised for the featuriser: as it says itself, or as for ImageNet.

    Examples
    --------
    >>> network = Network(nn.Linear(3, 2), nn.Linear(2, 4))
    >>> network.features(torch.zeros(5, 3)).shape, network(torch.zeros(5, 3)).shape
    (torch.Size([5, 2]), torch.Size([5, 4]))
    """

    def __init__(
        self,
        featuriser: nn.Module,
        head: nn.Module,
        *,
        feature_dim: int | None = None,
        input_shape: Sequence[int] | None = None,
        bottleneck: nn.Module | None = None,
        freeze_backbone: bool = False,
        freeze_bn: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if feature_dim is None:
            if not isinstance(head, nn.Linear):
                raise InputError(f"feature_dim is needed with a head of type {type(head).__name__}; pass feature_dim=")
            feature_dim = head.in_features
        check_number(dropout, "dropout", low=0.0, below=1.0)
        self.featuriser = featuriser
        self.bottleneck = nn.Identity() if bottleneck is None else bottleneck
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = head
        self.feature_dim = check_count(feature_dim, "feature_dim")
        self.input_shape = None if input_shape is None else tuple(input_shape)
        # a backbone knows how its images were prepared when it was trained
        self.preprocessing: ImagePreprocessing = getattr(featuriser, "preprocessing", IMAGENET)
        self.freeze_backbone = check_flag(freeze_backbone, "freeze_backbone")
        self.freeze_bn = check_flag(freeze_bn, "freeze_bn")
        if freeze_backbone:
            featuriser.requires_grad_(False)
        self.train(self.training)

    @property
    def num_classes(self) -> int | None:
        """Columns of the logits, if the head is linear."""
        return self.head.out_features if isinstance(self.head, nn.Linear) else None

    def embed(self, x: Tensor) -> Tensor:
        """Return the output of the backbone, (b, m): what a frozen backbone may cache."""
        z: Tensor = self.featuriser(x)
        return z.flatten(1)

    def features(self, x: Tensor) -> Tensor:
        """Return z of shape (b, feature_dim)."""
        z: Tensor = self.dropout(self.bottleneck(self.embed(x)))
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (b, classes)."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def train(self, mode: bool = True) -> Network:
        """Set training mode, except for what is frozen."""
        super().train(mode)
        if self.freeze_backbone:
            self.featuriser.eval()
        if self.freeze_bn:
            for module in self.featuriser.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self


def output_size(module: nn.Module, input_shape: Sequence[int]) -> int:
    """Return the number of features that ``module`` gives for one sample, by trying two blank ones."""
    training = module.training
    module.eval()
    parameter = next(module.parameters(), None)
    device = None if parameter is None else parameter.device
    try:
        with torch.no_grad():
            out = module(torch.zeros(2, *input_shape, device=device))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"{type(module).__name__} does not take samples of shape {tuple(input_shape)}: {error}; "
            "change the network or the size of the samples"
        ) from error
    finally:
        module.train(training)
    if not isinstance(out, Tensor) or out.ndim < 2 or len(out) != 2:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(f"{type(module).__name__} must return a tensor of shape (2, m) for 2 samples, got {got}")
    return int(out[0].numel())


def widen_input(network: Network, extra: int) -> None:
    """Let the first layer of ``network`` take ``extra`` more channels (images) or columns (vectors), in place.

    A convolution's new channels copy the weights of the old ones in turn (new channel i is a copy of channel
    i mod c), which keeps a pretrained filter meaningful; columns of a linear layer have no such likeness and
    get a fresh initialisation. A linear first layer sees images flattened, channel by channel.
    """
    shape = network.input_shape
    if shape is None or len(shape) not in (1, 3):
        raise InputError(f"input_shape must be (d,) or (channels, height, width) to be widened, got {shape}")
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


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw initial parameters from ``seed`` and leave torch's global generator as it was.

    Layers take their initial values from the global CPU generator and from nowhere else; None lets them.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
