"""Images: decoding and random crops with Pillow, one file at a time in the workers; augmenting batches with kornia.

A network's own `ImagePreprocessing` says to which size, by which interpolation and with which normalisation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vardass.data.domains import find_sample, parts_of
from vardass.data.file_dataset import FileDataset
from vardass.data.splits import seed_generators
from vardass.errors import InputError, needs_extra
from vardass.files import PathLike
from vardass.validate import check_count, check_flag, choose

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_MODES = {1: "L", 3: "RGB"}
_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in Pillow's numbering
_AREA = (0.7, 1.0)  # of a random crop, and width / height, both as in DomainBed
_RATIO = (3 / 4, 4 / 3)


def _height_and_width(size: Any) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, Sequence) or isinstance(sides, str) or len(sides) != 2:
        raise InputError(f"size must be a whole number, or height and width, got {size!r}")
    return check_count(sides[0], "size"), check_count(sides[1], "size")


@dataclass(frozen=True)
class ImagePreprocessing:
    """How images are prepared for a network; the default is DomainBed's for ImageNet networks.

    For evaluation, images are resized to ``size`` without cropping, even if the network's own recipe crops the centre.

    Attributes
    ----------
    mean, deviation : tuple of float
        Of each channel, for values from 0 to 1. Grey images take the mean of the three.
    size : (int, int)
        Height and width; an int stands for both.
    interpolation : str
        One of nearest, lanczos, bilinear, bicubic, box, hamming.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    deviation: tuple[float, ...] = (0.229, 0.224, 0.225)
    size: int | tuple[int, int] = (224, 224)
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("mean", "deviation"):
            try:
                values = tuple(float(value) for value in getattr(self, name))
            except (TypeError, ValueError):
                values = ()
            if len(values) not in _MODES or not all(map(math.isfinite, values)):
                raise InputError(f"{name} of images must be 3 finite numbers, got {getattr(self, name)!r}; give RGB")
            object.__setattr__(self, name, values)
        if min(self.deviation) <= 0 or len(self.deviation) != len(self.mean):
            raise InputError(
                f"deviation of images must be above 0, one for each of the {len(self.mean)} means, got "
                f"{self.deviation}; give RGB"
            )
        object.__setattr__(self, "size", _height_and_width(self.size))
        choose(self.interpolation, "interpolation", _INTERPOLATIONS)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ImagePreprocessing:
        """From values by name, as of JSON; what is not given is the default."""
        for name in values:
            choose(name, "setting of image preprocessing:", [field.name for field in fields(cls)])
        return cls(**values)

    @classmethod
    def from_hub(cls, path: PathLike) -> ImagePreprocessing:
        """Read the ``preprocessor_config.json`` of a model of the Hugging Face hub.

        Parameters
        ----------
        path : path
            The file, or the folder that holds it.
        """
        file = Path(path).expanduser()
        file = file / "preprocessor_config.json" if file.is_dir() else file
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            # the hub normalises x f with x from 0 to 255; here x / 255 is normalised
            factor = 255 * float(found.get("rescale_factor", 1 / 255)) if found.get("do_rescale", True) else 255.0
            normal = found.get("do_normalize", True)
            mean, deviation = (found["image_mean"], found["image_std"]) if normal else ([0.0] * 3, [1.0] * 3)
            crops = found.get("do_center_crop", False) and "crop_size" in found
            size = found["crop_size"] if crops else found["size"]
            if isinstance(size, dict):
                size = size["shortest_edge"] if "shortest_edge" in size else (size["height"], size["width"])
            return cls(
                mean=tuple(value / factor for value in mean),
                deviation=tuple(value / factor for value in deviation),
                size=tuple(size) if isinstance(size, list) else size,
                interpolation=_INTERPOLATIONS[found.get("resample", 2)],
            )
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}; give the folder of a saved model") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
            raise InputError(
                f"{file} does not say how images are prepared ({type(error).__name__}: {error}); save it again with "
                "the image processor's save_pretrained"
            ) from None

    def for_channels(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of as many channels as asked for."""
        if channels == len(self.mean):
            return self.mean, self.deviation
        return ((sum(self.mean) / len(self.mean),) * channels, (sum(self.deviation) / len(self.deviation),) * channels)


IMAGENET = ImagePreprocessing()


class ImageDataset(FileDataset):
    """Image files as float32 tensors of shape (channels, height, width) with values from 0 to 1.

    Images are resized to one size with antialiasing, as in DomainBed; `crop` takes random crops of the full image.

    Parameters
    ----------
    paths : sequence of path
        Files that Pillow reads.
    size : int or (int, int)
        Height and width of the result.
    channels : {3, 1}
        3 turns all images into RGB, 1 into grey.
    cache : bool
        Keep decoded images, as bytes, in memory that the workers share. Random crops are read from the file.
    interpolation : str
        See `ImagePreprocessing`.
    crops : bool
        Whether augmentation may take random parts of the images; see `may_crop`.
    """

    def __init__(
        self,
        paths: Sequence[PathLike],
        size: int | tuple[int, int] = 224,
        channels: int = 3,
        cache: bool = False,
        interpolation: str = "bilinear",
        crops: bool = True,
    ) -> None:
        super().__init__(paths, "image")
        if channels not in _MODES:
            raise InputError(f"channels must be 3 or 1, got {channels!r}; 3 is RGB, 1 is grey")
        _pillow()
        self.size = _height_and_width(size)
        self.interpolation = choose(interpolation, "interpolation", _INTERPOLATIONS)
        self.crops = check_flag(crops, "crops")
        self.channels = channels
        if cache:
            self.keep((self.channels, *self.size), torch.uint8)

    def decode(self, index: int) -> Tensor:
        """Pixels of one file as bytes (channels, height, width)."""
        return self._resized(self._image(index))

    def crop(self, index: int, seed: int) -> Tensor:
        """A random part of the image in the file, see `crop_box`, resized: floats (channels, height, width)."""
        image = self._image(index)
        generator = torch.Generator().manual_seed(seed)
        return self.present(self._resized(image.crop(crop_box(image.height, image.width, generator))))

    def _image(self, index: int) -> Any:
        path = self.paths[index]
        image = _open(path)
        if image.mode.startswith(("I", "F")):
            values = np.asarray(image)  # Pillow's own conversion cuts values off at 255
            if values.dtype.kind == "f" or int(values.min()) < 0 or int(values.max()) > 65535:
                raise InputError(
                    f"{path} has {image.mode} pixels from {values.min()} to {values.max()}; save it with 8 or 16 bits"
                )
            image = _pillow().fromarray((values // 256).astype(np.uint8))
        return image.convert(_MODES[self.channels])

    def _resized(self, image: Any) -> Tensor:
        height, width = self.size
        image = image.resize((width, height), _INTERPOLATIONS.index(self.interpolation))
        pixels = np.array(image, dtype=np.uint8).reshape(height, width, self.channels)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def present(self, value: Tensor) -> Tensor:
        """Bytes as numbers from 0 to 1."""
        return value.float().div_(255.0)


class RandomCrops(Dataset[Tensor]):
    """Random crops of image files for training: item ``(index, seed)`` is `ImageDataset.crop` of that sample.

    The sampler of a loader yields the pairs, so that crops do not depend on which worker takes them.
    """

    def __init__(self, dataset: Dataset[Tensor]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        index, seed = key
        files, row = find_sample(self.dataset, index)
        return cast(ImageDataset, files).crop(row, seed)


def may_crop(dataset: Dataset[Tensor]) -> bool:
    """Whether augmentation may crop the images: unless some of them are an `ImageDataset` with ``crops=False``."""
    return all(part.crops for part in parts_of(dataset) if isinstance(part, ImageDataset))


def random_crops(dataset: Dataset[Tensor]) -> RandomCrops | None:
    """Random crops of the full images of a data set, or None if not all of it are image files that `may_crop`.

    Image files are cropped when they are decoded, because the data set itself resizes them; `augment` crops all other
    images. With random crops a training loop loads pairs (index, seed) and calls ``augment(batch, seed=...,
    crop=False)``; without, it loads indices and calls ``augment(batch, seed=...)``.
    """
    files = all(isinstance(part, ImageDataset) for part in parts_of(dataset))
    return RandomCrops(dataset) if files and may_crop(dataset) else None


def crop_box(height: int, width: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Draw left, top, right, bottom of a random crop as DomainBed does.

    Area uniform in 70 to 100% of the image, log of width / height uniform between those of 3/4 and 4/3, place uniform
    among those that fit. If ten draws do not fit into the image, the largest crop in the middle whose width / height
    is within these limits.
    """
    for _ in range(10):
        u, v, across, down = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * u)
        ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** v
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def normalise(batch: Tensor, preprocessing: ImagePreprocessing = IMAGENET) -> Tensor:
    """Subtract the mean and divide by the deviation of each channel of (n, C, H, W) with values from 0 to 1."""
    mean, deviation = preprocessing.for_channels(_check_batch(batch))
    return (batch - batch.new_tensor(mean)[:, None, None]) / batch.new_tensor(deviation)[:, None, None]


def augment(batch: Tensor, *, seed: int, crop: bool = True, preprocessing: ImagePreprocessing = IMAGENET) -> Tensor:
    """Augment images as DomainBed does, each of the batch differently, on the batch's device.

    Random crop of 70 to 100% of the area (ratio 3/4 to 4/3) resized to what it was, mirroring with probability
    1/2, jitter of brightness, contrast, saturation and hue by 0.3 in random order, grey with probability 0.1,
    normalisation. Grey images get crop, mirroring, brightness and contrast.

    Parameters
    ----------
    batch : Tensor of shape (n, C, H, W)
        Values from 0 to 1; C is 3 or 1.
    seed : int
        Determines the result; derive it from the run's seed and the step. kornia draws from torch's global
        generators, which are seeded inside and restored afterwards.
    crop : bool
        False for images that are `random_crops` already.
    preprocessing : ImagePreprocessing
        Its mean and deviation.
    """
    channels = _check_batch(batch)
    pipeline = _pipeline((batch.shape[-2], batch.shape[-1]) if crop else None, channels)
    devices = [batch.device] if batch.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        seed_generators(seed, batch.device)
        result: Tensor = pipeline(batch.expand(-1, 3, -1, -1))[:, :channels].clamp(0.0, 1.0)
    return normalise(result, preprocessing)


@lru_cache(maxsize=8)
def _pipeline(crop: tuple[int, int] | None, channels: int) -> torch.nn.Sequential:
    with needs_extra("adapt"):
        import kornia.augmentation as K
    steps: list[torch.nn.Module] = []
    if crop is not None:
        steps.append(K.RandomResizedCrop(crop, scale=_AREA, ratio=_RATIO))
    steps.append(K.RandomHorizontalFlip(p=0.5))
    if channels == 3:
        steps += [K.ColorJitter(0.3, 0.3, 0.3, 0.3, p=1.0), K.RandomGrayscale(p=0.1)]
    else:
        steps += [K.ColorJitter(0.3, 0.3, 0.0, 0.0, p=1.0)]
    return torch.nn.Sequential(*steps)


def small_size(folders: Sequence[Path]) -> int:
    """Image size, 32 to 64 pixels, for a small network trained from scratch: the median shorter side of some files."""
    sides = []
    for folder in folders:
        files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_ENDINGS)
        for file in files[:: max(1, len(files) // 16)]:
            try:
                with _pillow().open(file) as image:
                    sides.append(min(image.size))
            except (OSError, SyntaxError, ValueError):
                continue  # reported when it is decoded
    middle = sorted(sides)[len(sides) // 2] if sides else 64
    return min(64, max(32, -8 * (-middle // 8)))


def _check_batch(batch: Tensor) -> int:
    if not isinstance(batch, Tensor):
        raise InputError(f"a batch of images must be a tensor, got {type(batch).__name__}; stack items of ImageDataset")
    if batch.ndim != 4 or batch.shape[1] not in _MODES or not batch.is_floating_point():
        raise InputError(
            f"a batch of images must be floats of shape (n, 3 or 1, height, width), got {batch.dtype} of shape "
            f"{tuple(batch.shape)}; stack items of ImageDataset"
        )
    return int(batch.shape[1])


def _pillow() -> Any:
    with needs_extra("adapt"):
        from PIL import Image
    return Image


def _open(path: str) -> Any:
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            image.load()
            return image
    except FileNotFoundError:
        raise InputError(f"no image at {path}; check the path, or unpack the data set again") from None
    except pillow.DecompressionBombError as error:
        raise InputError(f"the image {path} is too large: {str(error).partition(',')[0]}; make it smaller") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        reason = "not an image" if isinstance(error, pillow.UnidentifiedImageError) else str(error) or "damaged"
        size = Path(path).stat().st_size if Path(path).is_file() else 0
        raise InputError(
            f"cannot decode the image {path} ({size} bytes): {reason.splitlines()[0]}; replace or remove the file"
        ) from None
