"""Images: decoding with Pillow, one file at a time in the workers, and augmentation of batches with kornia."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vardass.data.file_dataset import FileDataset, SharedCache
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.validate import check_count

__all__ = ["IMAGE_ENDINGS", "ImageDataset", "augment", "normalise"]

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_MODES = {1: "L", 3: "RGB"}
# of ImageNet; for grey images the means of the three
_MEAN = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_DEVIATION = {3: (0.229, 0.224, 0.225), 1: (0.226,)}


class ImageDataset(FileDataset):
    """Image files as float32 tensors of shape (channels, size, size) with values from 0 to 1.

    Images are squeezed to a square (bilinear, smoothed when made smaller), as in DomainBed.

    Parameters
    ----------
    paths : sequence of path
        Files that Pillow reads.
    size : int or (int, int)
        Height and width of the result.
    channels : {3, 1, None}
        3 turns all images into RGB, 1 into grey. None takes what the first image has, and images that
        differ from it are errors.
    cache : bool
        Keep decoded images, as bytes, in memory that the workers share.

    Raises
    ------
    InputError
        If there are no paths, if Pillow is missing; and, when an item is read, if its file is not an image.
    """

    def __init__(
        self,
        paths: Sequence[PathLike],
        size: int | tuple[int, int] = 224,
        channels: int | None = 3,
        cache: bool = False,
    ) -> None:
        super().__init__(paths, "image")
        if channels not in (None, 1, 3):
            raise InputError(f"channels must be 3, 1 or None, got {channels!r}; 3 is RGB, 1 is grey")
        _pillow()
        height, width = (size, size) if isinstance(size, int) else size
        self.size = (check_count(height, "size"), check_count(width, "size"))
        self.mixed = channels is None
        self.channels = _channels(self.paths[0]) if channels is None else channels
        self.cache = SharedCache(len(paths), (self.channels, *self.size), torch.uint8) if cache else None

    def decode(self, index: int) -> Tensor:
        """Pixels of one file as bytes (channels, height, width)."""
        path = self.paths[index]
        pillow = _pillow()
        image = _open(path)
        found = _count(image)
        if self.mixed and found != self.channels:
            raise InputError(
                f"{path} has {found} channels, {self.paths[0]} has {self.channels}; turn all into one kind with "
                "channels=3 (RGB) or channels=1 (grey)"
            )
        if image.mode.startswith(("I", "F")):
            image = _eight_bit(image, path)
        height, width = self.size
        image = image.convert(_MODES[self.channels]).resize((width, height), pillow.Resampling.BILINEAR)
        pixels = np.array(image, dtype=np.uint8).reshape(height, width, self.channels)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def present(self, value: Tensor) -> Tensor:
        """Bytes as numbers from 0 to 1."""
        return value.float().div_(255.0)


def normalise(batch: Tensor) -> Tensor:
    """Subtract ImageNet's mean and divide by its deviation, for each channel of (n, C, H, W) in [0, 1]."""
    channels = _check_batch(batch)
    mean = batch.new_tensor(_MEAN[channels])[:, None, None]
    return (batch - mean) / batch.new_tensor(_DEVIATION[channels])[:, None, None]


def augment(batch: Tensor, *, seed: int, size: int | tuple[int, int] | None = None, normalised: bool = True) -> Tensor:
    """Augment images as DomainBed does, each of the batch differently, on the batch's device.

    Random crop of 70 to 100% of the area (ratio 3/4 to 4/3) resized to ``size``, mirroring with probability
    1/2, jitter of brightness, contrast, saturation and hue by 0.3 in random order, grey with probability 0.1,
    normalisation. Grey images get crop, mirroring, brightness and contrast.

    Parameters
    ----------
    batch : Tensor of shape (n, C, H, W)
        Values from 0 to 1; C is 3 or 1.
    seed : int
        Determines the result; make it from the run's seed and the step. kornia draws from torch's global
        generators: they are seeded inside and put back as they were.
    size : int or (int, int), optional
        Height and width of the result, by default those of the batch.
    normalised : bool
        If False, the values stay within 0 and 1.
    """
    channels = _check_batch(batch)
    shape = tuple(batch.shape[-2:]) if size is None else (size, size) if isinstance(size, int) else tuple(size)
    pipeline = _pipeline((int(shape[0]), int(shape[1])), channels)
    devices = [batch.device] if batch.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reach devices that are not put back
        if devices:
            with torch.cuda.device(batch.device):
                torch.cuda.manual_seed(seed)
        result: Tensor = pipeline(batch.expand(-1, 3, -1, -1))[:, :channels].clamp(0.0, 1.0)
    return normalise(result) if normalised else result


@lru_cache(maxsize=8)
def _pipeline(size: tuple[int, int], channels: int) -> torch.nn.Sequential:
    try:
        import kornia.augmentation as K
    except ModuleNotFoundError:
        raise InputError("augmentation needs kornia, which is not installed: pip install 'vardass[adapt]'") from None
    steps: list[torch.nn.Module] = [
        K.RandomResizedCrop(size, scale=(0.7, 1.0), ratio=(3 / 4, 4 / 3)),
        K.RandomHorizontalFlip(p=0.5),
    ]
    if channels == 3:
        steps += [K.ColorJitter(0.3, 0.3, 0.3, 0.3, p=1.0), K.RandomGrayscale(p=0.1)]
    else:
        steps += [K.ColorJitter(0.3, 0.3, 0.0, 0.0, p=1.0)]
    return torch.nn.Sequential(*steps)


def _check_batch(batch: Tensor) -> int:
    if batch.ndim != 4 or batch.shape[1] not in _MEAN or not batch.is_floating_point():
        raise InputError(
            f"a batch of images must be floats of shape (n, 3 or 1, height, width), got {batch.dtype} of shape "
            f"{tuple(batch.shape)}; stack items of ImageDataset"
        )
    return int(batch.shape[1])


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise InputError("reading images needs Pillow, which is not installed: pip install 'vardass[adapt]'") from None
    return Image


def _open(path: str) -> Any:
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            image.load()
            return image
    except FileNotFoundError:
        raise InputError(f"no image at {path}; check the path, or unpack the data set again") from None
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
        reason = "not an image" if isinstance(error, pillow.UnidentifiedImageError) else str(error) or "damaged"
        size = Path(path).stat().st_size if Path(path).is_file() else 0
        raise InputError(
            f"cannot decode the image {path} ({size} bytes): {reason.splitlines()[0]}; replace or remove the file"
        ) from None


def _count(image: Any) -> int:
    return 1 if image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I") else 3


def _channels(path: str) -> int:
    return _count(_open(path))


def _eight_bit(image: Any, path: str) -> Any:
    # Pillow's own conversion cuts values off at 255
    values = np.asarray(image)
    if values.dtype.kind == "f" or int(values.min()) < 0 or int(values.max()) > 65535:
        raise InputError(
            f"{path} has {image.mode} pixels from {values.min()} to {values.max()}; save it with 8 or 16 bits"
        )
    return _pillow().fromarray((values // 256).astype(np.uint8))
