"""The model of a run as a program of torch alone, with the preparation of its inputs inside."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardass.adapt.algorithms import Algorithm
from vardass.errors import InputError
from vardass.files import PathLike, as_path, atomic_write, write_text

__all__ = ["export_model"]


class _WholeModel(nn.Module):
    """Samples as they are, (b, *input_shape) -> probabilities (b, classes), or numbers (b, m) in their own units."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, algorithm: Algorithm, about: Mapping[str, Any], reading: Mapping[str, Any]) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.clip: float | None = None
        shape = [1] * len(about["input_shape"])
        mean, deviation = torch.zeros(shape), torch.ones(shape)
        if about["data_kind"] == "image":
            values = algorithm.network.preprocessing.for_channels(about["input_shape"][0])
            mean, deviation = (torch.tensor(value)[:, None, None] for value in values)
        elif reading.get("scale"):
            mean, deviation = (torch.tensor(reading["scale"][name]) for name in ("mean", "deviation"))
            self.clip = reading["scale"].get("clip")
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, x: Tensor) -> Tensor:
        """Prepare, predict and turn logits into probabilities."""
        x = (x - self.mean) / self.deviation
        x = x if self.clip is None else x.clamp(-self.clip, self.clip)
        found = self.algorithm.predict(x)
        return found.softmax(1) if self.algorithm.units is None else found


def export_model(
    algorithm: Algorithm, about: Mapping[str, Any], reading: Mapping[str, Any], path: PathLike
) -> tuple[Path, Path]:
    """Write a model as a program that ``torch.export.load`` reads, and a JSON file that describes it beside it.

    The program takes float32 samples of any batch size as a user has them: rows of embeddings unscaled, pixels from 0
    to 1 at the size that is described, mel patches of sounds. It returns probabilities, or numbers.

    Parameters
    ----------
    algorithm, about
        From `load_model`, on the CPU.
    reading : mapping
        From `reading_of`: how samples were read and scaled.
    path : path
        Such as ``model.pt2``; the description is ``model.json`` then.

    Raises
    ------
    InputError
        If predictions depend on the other samples of a batch, or torch cannot follow the network.
    """
    file = as_path(path)
    if algorithm.seen_together > 1:
        raise InputError(
            f"predictions of {algorithm.name!r} depend on {algorithm.seen_together} samples that are seen together, so "
            "there is no program for single ones; train with another algorithm"
        )
    whole = _WholeModel(algorithm, about, reading).eval()
    example = torch.zeros(2, *about["input_shape"])
    try:
        program = torch.export.export(whole, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # whatever the network does that torch cannot follow
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"torch.export cannot follow the network: {reason}; change it, or use load_model") from error
    content = io.BytesIO()
    torch.export.save(program, content)
    with atomic_write(file) as written:
        written.write(content.getvalue())
    image = about["data_kind"] == "image"
    description = {
        "input": "pixels from 0 to 1" if image else "mel patches" if reading.get("front_end") else "rows of features",
        "input_shape": list(about["input_shape"]),
        **({"interpolation": reading.get("interpolation", "bilinear")} if image else {}),
        **({"front_end": reading["front_end"]} if reading.get("front_end") else {}),
        "output": "probabilities" if algorithm.units is None else "numbers",
        "classes" if algorithm.units is None else "numbers": list(about["class_names"]),
        "torch": torch.__version__,
    }
    beside = file.with_suffix(".json")
    write_text(beside, json.dumps(description, indent=2) + "\n")
    return file, beside
