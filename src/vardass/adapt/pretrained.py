"""Backbones of transformers, which is imported only when asked for."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from vardass.data.images import IMAGENET, ImagePreprocessing
from vardass.errors import InputError, VardassWarning, needs_extra
from vardass.validate import shorten

RESNET18 = "microsoft/resnet-18"
_HUB = "https://huggingface.co"
_RECIPE = "preprocessor_config.json"
BACKBONES = (
    *("resnet", "regnet", "bit", "convnext", "convnextv2", "efficientnet", "focalnet", "poolformer", "swiftformer"),
    *("mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "levit", "cvt", "pvt", "pvt_v2", "swin", "swinv2"),
    *("vit", "vit_mae", "vit_msn", "vitdet", "deit", "beit", "data2vec-vision", "hiera", "ijepa", "dinov2"),
    *("dinov2_with_registers", "dinov3_vit", "dinov3_convnext", "clip_vision_model", "siglip_vision_model"),
)
"""Types of models that take pixels alone, and whose settings name no other model to be loaded."""


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
    load = partial(_transformers().AutoModel.from_pretrained, trust_remote_code=False, output_loading_info=True)
    try:
        with _without_report():
            model, info = _from_disk_or_hub(load, source, local_files_only)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"cannot load the backbone {source!r}: {reason}; check the name and the network, or pass a local folder "
            "saved with save_pretrained ('resnet18-random' needs no download)"
        ) from error
    _known_type(model.config.model_type)  # else the trained model could not be loaded again
    if missing := sorted(info["missing_keys"]):
        warnings.warn(
            f"the backbone {source!r} has no values for {shorten(missing)}, which are random now; give a folder that "
            "was saved from a model of this kind",
            VardassWarning,
            stacklevel=2,
        )
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


def backbone_from_config(saved: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a backbone with random parameters for ``weights``; no file and no network is asked for anything."""
    config = _without_hub(saved["config"])
    kind = _known_type(config.pop("model_type", None))
    _check_sizes(config, weights)
    transformers = _transformers()
    size = sum(tensor.numel() for tensor in weights.values())
    try:
        made = transformers.AutoConfig.for_model(kind, **config)
        with torch.device("meta"):  # takes no memory
            outline = transformers.AutoModel.from_config(made, trust_remote_code=False)
        if (described := sum(parameter.numel() for parameter in outline.parameters())) > size:
            raise InputError(f"it has {described} parameters, the file {size} numbers")
        return TransformersFeaturiser(transformers.AutoModel.from_config(made, trust_remote_code=False))
    except Exception as error:  # whatever a configuration leads to that is none
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise InputError(
            f"the file describes a backbone of type {kind!r} that cannot be built: {reason}; train again"
        ) from error


def _known_type(kind: Any) -> str:
    """Refuse a type of model that is no backbone: some load another one, by a name that their settings give."""
    if not isinstance(kind, str) or kind not in BACKBONES:
        raise InputError(f"{kind!r} is not a known type of backbone; take one of {', '.join(BACKBONES)}")
    return kind


def _without_hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without entries that name code, kernels or other models of a hub, and without classes."""
    return {
        name: _without_hub(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not re.search("auto_map|_implementation|backbone|name_or_path|quantization|label", name)
    }


def _check_sizes(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse numbers beyond what the weights have: even to outline such a model may take all time or memory."""
    most = max(10_000, *(tensor.numel() for tensor in weights.values()))
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_sizes(value, weights)
            continue
        counts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
        is_depth = re.search("layer|depth|block|stage", name)
        if counts and (sum(counts) > len(weights) if is_depth else max(counts) > most):
            raise InputError(f"the file describes a backbone with {name} {value}, more than its weights; train again")


@contextmanager
def _without_report() -> Iterator[None]:
    """Without what transformers prints of the weights that it has loaded, such as those of a head without use here."""
    logging = _transformers().utils.logging
    before, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if has_bar:
            logging.enable_progress_bar()


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
