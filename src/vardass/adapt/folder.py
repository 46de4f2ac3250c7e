"""The folder of a run: settings, metrics and the latest checkpoint, whole at any moment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vardass.adapt.checkpoint import flatten_state, load_checkpoint, save_checkpoint, unflatten_state
from vardass.adapt.config import RunConfig
from vardass.adapt.surroundings import write_text
from vardass.errors import InputError

__all__ = ["CHECKPOINT_FILE", "CONFIG_FILE", "METRICS_FILE", "RunFolder"]

CHECKPOINT_FILE = "checkpoint.safetensors"
CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
# between a checkpoint and the run that resumes it
_MAY_CHANGE = ("steps", "checkpoint_every", "device", "devices", "accelerator", "strategy", "tensorboard")


class RunFolder:
    """Files of one run in the folder ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to resume."""
        return (self.path / CHECKPOINT_FILE).exists()

    def begin(self, config: RunConfig) -> None:
        """Make the folder, write the settings and start an empty list of metrics."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {self.path}: {error.strerror}; choose another one") from None
        write_text(self.path / CONFIG_FILE, json.dumps(_plain(config), indent=2) + "\n")
        self.write_metrics([])

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation to the metrics, a JSON object on a line of its own."""
        with open(self.path / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Replace all metrics."""
        write_text(self.path / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))

    def save(self, config: RunConfig, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        tensors, tree = flatten_state(state)
        meta = {"kind": "run", "config": _plain(config), "state": tree}
        save_checkpoint(self.path / CHECKPOINT_FILE, tensors, meta)

    def load(self, config: RunConfig, *, resume: bool) -> dict[str, Any]:
        """Read the checkpoint's state.

        Raises
        ------
        InputError
            If nobody asked to resume, the file is damaged, or its run had other settings.
        """
        if not resume:
            raise InputError(f"{self.path} already holds a run; go on with resume=True, or choose another folder")
        tensors, meta = load_checkpoint(self.path / CHECKPOINT_FILE)
        if meta.get("kind") != "run":
            raise InputError(f"{self.path / CHECKPOINT_FILE} holds no state of a run; name the folder of a run")
        # a rate that falls to 0 at the last step depends on where that is
        may_change = [name for name in _MAY_CHANGE if name != "steps" or config.lr_schedule != "cosine"]
        defaults = _plain(RunConfig())  # for settings that an older version did not have
        for name, value in _plain(config).items():
            before = meta["config"].get(name, defaults[name])
            if name not in may_change and before != value:
                raise InputError(
                    f"the run in {self.path} has {name}={before!r}, this one {name}={value!r}; resume with the same "
                    "settings, or choose another folder"
                )
        state: dict[str, Any] = unflatten_state(tensors, meta["state"])
        return state


def _plain(config: RunConfig) -> dict[str, Any]:
    """Settings as JSON has them."""
    _, settings = flatten_state(config.to_dict())
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain
