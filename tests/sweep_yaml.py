"""A small specification of a sweep, and how the tests change and load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vardass.lab.spec import Sweep, load_sweep

BASE: dict[str, Any] = {
    "seed": 3,
    "repeats": 2,
    "search": {"size": 3, "space": "paper-small"},
    "settings": {"steps": 20, "eval_every": 10},
    "data": [{"dataset": "watch", "tasks": ["left-A->right-B", "right-B->left-A"]}],
    "algorithms": ["erm", "mmd"],
    "samplers": ["uniform", "vardass"],
}


def load(folder: Path, content: dict[str, Any] | str, **options: Any) -> Sweep:
    path = folder / "sweep.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return load_sweep(path, **options)


def changed(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}
