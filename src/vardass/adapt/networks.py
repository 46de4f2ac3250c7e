"""Networks: a featuriser, whose output the discrepancy sees, and a head; by name, from other libraries, or your own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vardass.adapt.pretrained import RESNET18, backbone_preprocessing, resnet18_random, transformers_model
from vardass.adapt.regression import check_outputs
from vardass.data.images import IMAGENET, ImagePreprocessing
from vardass.errors import InputError
from vardass.registry import Registry, check_options
from vardass.validate import check_count, check_flag, check_number, check_seed, unknown

__all__ = [
    "NETWORK_NAMES",
    "Network",
    "check_network_options",
    "make_network",
    "output_size",
    "preprocessing_of",
    "pretrained_source",
    "seeded",
]


class Network(nn.Module):
    """Featuriser, bottleneck, dropout and head: x -> backbone -> [bottleneck] = z -> [dropout] -> logits.

    Parameters
    ----------
    featuriser : nn.Module
        Maps a batch (b, *input_shape) to (b, m); trailing dimensions are flattened.
    head : nn.Module
        Maps z (b, feature_dim) to logits (b, classes).
    feature_dim : int, optional
        Columns of z; taken from a linear ``head`` if not given.
    input_shape : sequence of int, optional
        Shape of one sample, for code that builds on it.
    bottleneck : nn.Module, optional
        Trained layers between the backbone and z. A frozen backbone needs one: otherwise the discrepancy cannot
        change z.
    freeze_backbone : bool
        No gradient and evaluation mode for ``featuriser``, so that its outputs may be cached.
    freeze_bn : bool
        BatchNorm layers of the featuriser stay in evaluation mode while training. The affine parameters
        still learn. DomainBed always did so until July 2024; the paper does not say which version it used.
    dropout : float
        Dropout on z, as in DomainBed: the discrepancy sees features after dropout.

    Attributes
    ----------
    preprocessing : ImagePreprocessing
        How images are normalised for the featuriser: as it says itself, or as for ImageNet.
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

    def features(self, x: Tensor) -> Tensor:
        """Return z of shape (b, feature_dim), before dropout."""
        z: Tensor = self.bottleneck(self.featuriser(x).flatten(1))
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (b, classes)."""
        logits: Tensor = self.head(self.dropout(self.features(x)))
        return logits

    def train(self, mode: bool = True) -> Network:
        """Set training mode, except for frozen parts."""
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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw initial parameters from ``seed`` and leave torch's global CPU generator, where they come from, as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(check_seed(seed))
        yield


# --- small featurisers that train from scratch on a CPU -----------------------------------------------

_SMALLEST_IMAGE = 16


class MLPFeaturiser(nn.Sequential):
    """Linear layers with ReLU after each: (b, *shape) -> (b, hidden[-1])."""

    def __init__(self, input_shape: Sequence[int], *, hidden: Sequence[int] = (128, 64)) -> None:
        if not hidden:
            raise InputError("hidden must name at least one layer width, got none; use hidden=(128, 64)")
        widths = [math.prod(input_shape), *(check_count(width, "a width in hidden", high=_WIDEST) for width in hidden)]
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

    The maximum over time keeps a short call in a long clip from being averaged away. The code of the network that the
    paper used for its Humpbacks data is not public: this one is ours.
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


# --- from a short text to a network -------------------------------------------------------------------


_BUILDERS: Registry[Callable[..., nn.Module]] = Registry(
    "network",
    {
        "mlp": MLPFeaturiser,
        "conv": ConvFeaturiser,
        "audio": AudioFeaturiser,
        "resnet18": partial(transformers_model, RESNET18),
        "resnet18-random": resnet18_random,
    },
    base=nn.Module,
    own=("class", "function"),
)
_WIDEST = 2**20  # of a layer: two such fill a terabyte
_OF_ALL = ("seed", "bottleneck", "freeze_backbone", "freeze_bn", "dropout")

NETWORK_NAMES = tuple(_BUILDERS)


def pretrained_source(spec: str) -> str | None:
    """Hub name or folder of a network that starts from pretrained parameters; None for other networks."""
    if spec in _BUILDERS:
        return RESNET18 if spec == "resnet18" else None
    return spec if Path(spec).expanduser().is_dir() or ("/" in spec and ":" not in spec) else None


def preprocessing_of(spec: str, options: Mapping[str, Any]) -> ImagePreprocessing | None:
    """How a pretrained network with such options wants its images, without building it; None for other networks."""
    source = pretrained_source(spec)
    local = bool(options.get("local_files_only"))
    return None if source is None else backbone_preprocessing(source, local_files_only=local)


# 64 features do not hold many classes apart: on Office-Home's 65, from the source alone, they have 49.9 %, 512 in one
# layer 53.6 %; on data with 2 to 10 classes that layer is no better
_FEW_CLASSES, _WIDE = 32, (512,)


def make_network(
    spec: str | nn.Module,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    regression: bool = False,
    seed: int = 0,
    bottleneck: int | None = None,
    freeze_backbone: bool = False,
    freeze_bn: bool = False,
    dropout: float = 0.0,
    **options: Any,
) -> Network:
    """Build a network from its name, or around a module.

    Parameters
    ----------
    spec : str or nn.Module
        One of ``NETWORK_NAMES``; a hub name with a slash or a local folder of a ``transformers`` vision
        backbone; or ``"package.module:Class"``, the user's own. That class gets ``input_shape`` and
        ``num_classes`` if it has parameters of these names. It may be a ``Network``; any other module is
        used as the featuriser. An object is taken as it is, with its parameters.
    input_shape : sequence of int
        Shape of one sample: (d,) or (channels, height, width).
    num_classes : int
        Columns of the output, at least 2.
    regression : bool
        The outputs are numbers to predict; one is enough.
    seed : int
        Seed of the initial parameters.
    bottleneck : int, optional
        Width of a linear layer with BatchNorm and ReLU between backbone and z (256 in TLlib).
    freeze_backbone, freeze_bn, dropout
        See ``Network``.
    **options
        Of the featuriser: ``hidden`` (mlp; by default (128, 64), and (512,) for more than 32 classes), ``widths``
        (conv, audio), ``local_files_only`` (transformers),
        ``arguments`` (own class: a mapping of keyword arguments).

    Examples
    --------
    >>> make_network("mlp", (10,), 3, hidden=(32, 16)).feature_dim
    16
    """
    shape = tuple(check_count(size, "a size in input_shape") for size in input_shape)
    check_outputs(num_classes, regression=regression)
    if bottleneck is not None:
        check_count(bottleneck, "bottleneck", high=_WIDEST)
    build = _builder(spec, num_classes)
    if isinstance(spec, nn.Module):
        spec = type(spec).__name__
    check_network_options(spec, options, build)
    if spec == "mlp" and num_classes > _FEW_CLASSES:
        options = {"hidden": _WIDE, **options}
    with seeded(seed):
        featuriser = build(shape, **options)
        if isinstance(featuriser, Network):
            return _finished(featuriser, spec, shape, num_classes, (bottleneck, freeze_backbone, freeze_bn, dropout))
        width = output_size(featuriser, shape)
        if width == 0:
            raise InputError(f"network {spec!r} gives no features for samples of shape {shape}")
        between = None
        if bottleneck is not None:
            between = nn.Sequential(nn.Linear(width, bottleneck), nn.BatchNorm1d(bottleneck), nn.ReLU())
            width = bottleneck
        return Network(
            featuriser,
            nn.Linear(width, num_classes),
            input_shape=shape,
            bottleneck=between,
            freeze_backbone=freeze_backbone,
            freeze_bn=freeze_bn,
            dropout=dropout,
        )


def _builder(spec: str | nn.Module, num_classes: int) -> Callable[..., nn.Module]:
    if isinstance(spec, nn.Module):
        return lambda input_shape: spec
    if not isinstance(spec, str) or not spec:
        raise InputError(f"network must be a name or a module, got {spec!r}; use one of {', '.join(NETWORK_NAMES)}")
    if spec in _BUILDERS:
        return _BUILDERS[spec]
    if pretrained_source(spec) is not None:
        return partial(transformers_model, spec)
    if ":" in spec:
        return partial(_own_module, spec, num_classes)
    raise unknown("network", spec, [*NETWORK_NAMES, "a hub name or folder (owner/name)", "package.module:Class"])


def check_network_options(spec: str, options: Mapping[str, Any], build: Callable[..., nn.Module] | None = None) -> None:
    """Refuse options of its own that a network does not have, without building it."""
    check_options(f"network {spec!r}", options, build or _builder(spec, 2), besides=_OF_ALL, without=("input_shape",))


def _own_module(
    spec: str, num_classes: int, input_shape: Sequence[int], *, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    made = _BUILDERS.find(spec)
    offered = {"input_shape": tuple(input_shape), "num_classes": num_classes}
    wanted = inspect.signature(made).parameters
    try:
        module = made(**{key: value for key, value in offered.items() if key in wanted}, **arguments or {})
    except TypeError as error:
        raise InputError(f"{spec!r} could not be made: {error}; pass what it needs as arguments=") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"{spec!r} made type {type(module).__name__}, not a torch.nn.Module")
    return module


def _finished(
    network: Network, spec: str, shape: tuple[int, ...], num_classes: int, changes: tuple[int | None, bool, bool, float]
) -> Network:
    """Check a user's own network, which comes complete."""
    if any(changes):
        raise InputError(
            f"{spec!r} is a complete Network: set bottleneck, freeze_backbone, freeze_bn and dropout there, or give a "
            "module that is only the featuriser"
        )
    classes = output_size(network, shape)
    if classes != num_classes:
        raise InputError(f"{spec!r} gives {classes} logits, but there are {num_classes} classes")
    network.input_shape = network.input_shape or shape
    with torch.no_grad():
        training = network.training
        width = network.eval().features(torch.zeros(2, *shape)).shape[1]
        network.train(training)
    if width != network.feature_dim:
        raise InputError(f"{spec!r} gives {width} features, but its feature_dim is {network.feature_dim}")
    return network
