"""The description and weights of a model's file, read and changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def change_model(run: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Path:
    """Let ``change(about, weights)`` change the model of a run in place, or return another description."""
    with safe_open(run / "model.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["vardass"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about = change(about, weights) or about
    save_file(weights, run / "model.safetensors", metadata={"vardass": json.dumps(about)})
    return run
