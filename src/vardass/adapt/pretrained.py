"""Backbones of transformers, which is imported only when asked for."""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import Tensor, nn

from vardass.data.images import IMAGENET, ImagePreprocessing
from vardass.errors import InputError, needs_extra

RESNET18 = "microsoft/resnet-18"
_HUB = "https://huggingface.co"
_RECIPE = "preprocessor_config.json"


class TransformersFeaturiser(nn.Module):
    """A vision model of ``transformers``: its pooled output, or the mean of the last hidden states."""

    def __init__(self, model: Any, preprocessing: ImagePreprocessing = IMAGENET) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing

    def forward(self, x: Tensor) -> Tensor:
        """Return features (b, m) of images (b, channels, height, width)."""
        out = self.model(pixel_values=x)
        pooled: Tensor | None = getattr(out, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        hidden: Tensor = out.last_hidden_state
        return hidden.mean(1) if hidden.ndim == 3 else hidden.flatten(2).mean(2)


def transformers_model(source: str, input_shape: Sequence[int], *, local_files_only: bool = False) -> nn.Module:
    """Load a vision backbone from a hub name such as ``"microsoft/resnet-18"`` or from a local folder.

    Cached downloads are used as they are; only missing files are requested from the hub.
    """
    if not Path(source).expanduser().is_dir() and source.startswith((".", "/", "~")):
        raise InputError(f"there is no folder {source!r}; pass a folder saved with save_pretrained, or a hub name")
    load = partial(_transformers().AutoModel.from_pretrained, trust_remote_code=False)
    try:
        model = _from_disk_or_hub(load, source, local_files_only)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"cannot load the backbone {source!r}: {reason}; check the name and the network, or pass a local folder "
            "saved with save_pretrained ('resnet18-random' needs no download)"
        ) from error
    preprocessing = backbone_preprocessing(source, local_files_only=local_files_only)
    channels = getattr(model.config, "num_channels", None)
    if channels is not None and (len(input_shape) != 3 or input_shape[0] != channels):
        raise InputError(
            f"backbone {source!r} takes images of {channels} channels, but samples have shape {tuple(input_shape)}; "
            "repeat or convert the channels"
        )
    return TransformersFeaturiser(model, preprocessing)


def backbone_preprocessing(source: str, *, local_files_only: bool = False) -> ImagePreprocessing:
    """How a backbone wants its images, from its folder or the hub; as those of ImageNet if it does not say."""
    load = partial(_transformers().utils.cached_file, filename=_RECIPE)
    try:
        recipe = _from_disk_or_hub(load, source, local_files_only)
    except OSError:  # there is none, or the hub cannot be asked
        return IMAGENET
    return IMAGENET if recipe is None else ImagePreprocessing.from_hub(recipe)


def backbone_config(featuriser: nn.Module) -> dict[str, Any] | None:
    """What `backbone_from_config` needs to build a backbone of another library again, without its weights."""
    if not isinstance(featuriser, TransformersFeaturiser):
        return None
    config: dict[str, Any] = json.loads(json.dumps(featuriser.model.config.to_dict(), default=str))
    return {"library": "transformers", "config": config}


def backbone_from_config(saved: Mapping[str, Any]) -> nn.Module:
    """Build a backbone with random parameters; no file and no network is asked for anything."""
    config = _without_code(saved["config"])
    transformers = _transformers()
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return TransformersFeaturiser(transformers.AutoModel.from_config(made, trust_remote_code=False))


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what names code of a hub: classes of one's own and compiled kernels."""
    return {
        name: _without_code(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name != "auto_map" and not name.endswith("_implementation")
    }


def _from_disk_or_hub(load: Callable[..., Any], source: str, local_files_only: bool) -> Any:
    """``load`` a folder, what was downloaded before, or else what the hub has."""
    folder = Path(source).expanduser()
    try:
        return load(str(folder) if folder.is_dir() else source, local_files_only=True)
    except OSError:
        if local_files_only or folder.is_dir():
            raise
    endpoint = os.environ.get("HF_ENDPOINT", _HUB)
    if not _answers(endpoint):  # the hub's own attempts take half a minute to fail
        raise OSError(f"it is not among the downloaded ones, and {endpoint} cannot be reached")
    return load(source)


def _answers(address: str, seconds: float = 3.0) -> bool:
    """Whether a connection to the host of a web address can be made; behind a proxy, that is left to the proxy."""
    parts = urlsplit(address)
    if not parts.hostname or parts.scheme in getproxies():
        return True
    try:
        socket.create_connection((parts.hostname, parts.port or 443), timeout=seconds).close()
    except OSError:
        return False
    return True


def resnet18_random(input_shape: Sequence[int]) -> nn.Module:
    """ResNet-18 with random parameters."""
    transformers = _transformers()
    if len(input_shape) != 3:
        raise InputError(f"'resnet18-random' needs samples (channels, height, width), got {tuple(input_shape)}")
    config = transformers.ResNetConfig(
        num_channels=input_shape[0],
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
    )
    return TransformersFeaturiser(transformers.ResNetModel(config))


def _transformers() -> ModuleType:
    with needs_extra("adapt"):
        return importlib.import_module("transformers")
