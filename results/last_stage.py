"""Tune the last stage of ResNet-18 alone: ``python results/last_stage.py PICTURES OUT`` stores what goes into it.

PICTURES are Office-Home at 64 pixels, as `make_data.py` writes them; OUT gets an .npz of the stage before by domain.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import ResNetModel

from vardass.adapt.pretrained import backbone_preprocessing
from vardass.data.from_paths import folder_domain
from vardass.data.images import normalise

RESNET = "../shared/models/resnet-18"
_SHAPE = (256, 4, 4)  # of 64 pixels after the third stage
_AT_ONCE = 64


class LastStage(nn.Module):
    """The fourth stage of a ResNet-18 and the mean over places: (b, 256 · 4 · 4) -> (b, 512)."""

    def __init__(self, folder: str = RESNET) -> None:
        super().__init__()
        self.stage = ResNetModel.from_pretrained(folder).encoder.stages[3]

    def forward(self, x: Tensor) -> Tensor:
        """Return features of stored activations."""
        features: Tensor = self.stage(x.unflatten(1, _SHAPE)).mean((2, 3))
        return features


@torch.no_grad()
def stored(model: ResNetModel, pictures: Tensor) -> np.ndarray:
    """Activations (n, 256 · 4 · 4) after the third stage, of normalised pictures (n, 3, 64, 64)."""
    rows = []
    for some in pictures.split(_AT_ONCE):
        x = model.embedder(some)
        for stage in model.encoder.stages[:3]:
            x = stage(x)
        rows.append(x.flatten(1).half())
    return torch.cat(rows).numpy()


def main() -> None:
    """Write one file for each domain."""
    if len(sys.argv) != 3:
        sys.exit("usage: python results/last_stage.py PICTURES OUT")
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    model, preparation = ResNetModel.from_pretrained(RESNET).eval(), backbone_preprocessing(RESNET)
    for folder in sorted(source.iterdir()):
        domain = folder_domain(folder, kind="image", size=64)
        pictures = normalise(torch.stack([domain.dataset[row] for row in range(len(domain))]), preparation)
        labels = np.array(domain.class_names)[domain.known_labels().numpy()]
        np.savez(out / f"{folder.name}.npz", x=stored(model, pictures), labels=labels)


if __name__ == "__main__":
    main()
