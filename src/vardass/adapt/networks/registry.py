"""From a short text to a network."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vardass.adapt.networks.base import Network, output_size, seeded
from vardass.adapt.networks.pretrained import (
    RESNET18,
    backbone_preprocessing,
    efficientnet_lite0,
    resnet18_random,
    transformers_model,
)
from vardass.adapt.networks.small import AudioFeaturiser, ConvFeaturiser, MLPFeaturiser
from vardass.adapt.regression import check_outputs
from vardass.data.images import EFFICIENTNET_LITE, ImagePreprocessing
from vardass.errors import InputError
from vardass.registry import Registry, check_options
from vardass.validate import check_count, unknown

__all__ = ["NETWORK_NAMES", "check_network_options", "is_pretrained", "make_network", "preprocessing_of"]


def _resnet18(input_shape: Sequence[int], *, local_files_only: bool = False) -> nn.Module:
    return transformers_model(RESNET18, input_shape, local_files_only=local_files_only)


_BUILDERS: Registry[Callable[..., nn.Module]] = Registry(
    "network",
    {
        "mlp": MLPFeaturiser,
        "conv": ConvFeaturiser,
        "audio": AudioFeaturiser,
        "resnet18": _resnet18,
        "resnet18-random": resnet18_random,
        "efficientnet-lite0": efficientnet_lite0,
    },
    base=nn.Module,
    own=("class", "function"),
)
_OF_ALL = ("seed", "bottleneck", "freeze_backbone", "freeze_bn", "dropout")

NETWORK_NAMES = tuple(_BUILDERS)


def is_pretrained(spec: str) -> bool:
    """Whether a network starts from parameters that were trained on other data."""
    return spec in ("resnet18", "efficientnet-lite0") or (spec not in _BUILDERS and _is_backbone(spec))


def preprocessing_of(spec: str, options: Mapping[str, Any]) -> ImagePreprocessing | None:
    """How a pretrained network with such options wants its images, without building it; None for other networks."""
    if not is_pretrained(spec):
        return None
    if spec == "efficientnet-lite0":
        return EFFICIENTNET_LITE
    local = bool(options.get("local_files_only"))
    return backbone_preprocessing(RESNET18 if spec == "resnet18" else spec, local_files_only=local)


def _is_backbone(spec: str) -> bool:
    return Path(spec).expanduser().is_dir() or ("/" in spec and ":" not in spec)


# 64 features do not hold many classes apart: on Office-Home's 65, from the source alone, they have 49.9 %, 512 in one
# layer 53.6 %; on data with 2 to 10 classes that layer is no better
_FEW_CLASSES, _WIDE = 32, (512,)


def make_network(
    spec: str | nn.Module,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    regression: bool = False,
    seed: int | None = 0,
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
        They are numbers to predict, at least 1.
    seed : int, optional
        Of the initial parameters; None takes them from torch's global generator.
    bottleneck : int, optional
        Width of a linear layer with BatchNorm and ReLU between backbone and z (256 in TLlib).
    freeze_backbone, freeze_bn, dropout
        See ``Network``.
    **options
        Of the featuriser: ``hidden`` (mlp; by default (128, 64), and (512,) for more than 32 classes), ``widths``
        (conv, audio), ``local_files_only`` (transformers),
        ``arguments`` (own class: a mapping of keyword arguments).

    Raises
    ------
    InputError
        If the spec or an option is unknown, a package is missing, or the samples do not fit.

    Examples
    --------
    >>> make_network("mlp", (10,), 3, hidden=(32, 16)).feature_dim
    16
    """
    shape = tuple(check_count(size, "a size in input_shape") for size in input_shape)
    check_outputs(num_classes, regression=regression)
    if bottleneck is not None:
        check_count(bottleneck, "bottleneck")
    build = _builder(spec, num_classes)
    if isinstance(spec, nn.Module):
        spec = type(spec).__name__
    _check_options(spec, build, options)
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
        raise InputError(
            f"a network is chosen by a text or given as a module, got {spec!r}; use one of {', '.join(NETWORK_NAMES)}"
        )
    if spec in _BUILDERS:
        return _BUILDERS[spec]
    if _is_backbone(spec):

        def backbone(input_shape: Sequence[int], *, local_files_only: bool = False) -> nn.Module:
            return transformers_model(spec, input_shape, local_files_only=local_files_only)

        return backbone
    if ":" in spec:

        def own(input_shape: Sequence[int], *, arguments: Mapping[str, Any] | None = None) -> nn.Module:
            return _own_module(spec, input_shape, num_classes, dict(arguments or {}))

        return own
    raise unknown("network", spec, [*NETWORK_NAMES, "a hub name or folder (owner/name)", "package.module:Class"])


def check_network_options(spec: str, options: Mapping[str, Any]) -> None:
    """Refuse options of its own that a network does not have, without building it."""
    _check_options(spec, _builder(spec, 2), options)


def _check_options(spec: str, build: Callable[..., nn.Module], options: Mapping[str, Any]) -> None:
    check_options(f"network {spec!r}", options, build, besides=_OF_ALL, without=("input_shape",))


def _own_module(spec: str, input_shape: Sequence[int], num_classes: int, arguments: dict[str, Any]) -> nn.Module:
    made = _BUILDERS.find(spec)
    offered = {"input_shape": tuple(input_shape), "num_classes": num_classes}
    wanted = inspect.signature(made).parameters
    try:
        module = made(**{key: value for key, value in offered.items() if key in wanted}, **arguments)
    except TypeError as error:
        raise InputError(f"{spec!r} could not be made: {error}; pass what it needs as arguments=") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"{spec!r} made a {type(module).__name__}, not a torch.nn.Module")
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
