"""What a run leaves in its folder: checkpoints, metrics, TensorBoard's files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vardass.errors import InputError, VardassError
from vardass.files import atomic_write, write_text
from vardass.refresh import TimeAccount

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig

__all__ = [
    "BOARD_FOLDER",
    "CHECKPOINT_FILE",
    "CONFIG_FILE",
    "METRICS_FILE",
    "Board",
    "History",
    "RunFolder",
    "flatten_state",
    "load_checkpoint",
    "save_checkpoint",
    "unflatten_state",
]


# --- checkpoints ---

_HEADER = "vardass"
_FORMAT = 1
# how each kind of value that JSON does not know is written: {mark: content}
_TENSOR, _ARRAY, _TUPLE, _MAPPING = "$tensor", "$array", "$tuple", "$dict"


def save_checkpoint(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and JSON values to one file; a crash leaves the old file whole.

    Parameters
    ----------
    path : path
        File to write or replace.
    tensors : dict of str to Tensor
        Any device; they are read on the CPU later.
    meta : dict
        Plain values, kept in the header of the file.
    """
    safetensors = _safetensors()
    try:
        header = json.dumps({"format": _FORMAT, "meta": dict(meta)})
    except (TypeError, ValueError) as error:
        raise InputError(f"the meta data of {path} are not JSON values: {error}; pass them to flatten_state") from None
    # safetensors refuses tensors that share memory, so each one gets its own
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    content = safetensors.torch.save(own, metadata={_HEADER: header})
    with atomic_write(path) as file:
        file.write(content)


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote: tensors on the CPU, and the meta data.

    Raises
    ------
    InputError
        If there is no such file, or it is cut off, or something else. If it cannot be read just now, the ``OSError``
        is the cause of the error.
    """
    safetensors = _safetensors()
    file = Path(path)
    try:
        with open(file, "rb") as opened:  # safetensors says "no such file" of any that it cannot open
            opened.read(1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise InputError(f"no checkpoint at {file}; check the path, or start the run anew") from None
    except OSError as error:
        raise _unreadable(file, error) from error
    try:
        with safetensors.safe_open(str(file), framework="pt") as opened:
            header = (opened.metadata() or {}).get(_HEADER)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except OSError as error:
        raise _unreadable(file, error) from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise InputError(
            f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file: {error}; it was cut off or is "
            "something else: use another checkpoint, or start the run anew"
        ) from None
    try:
        found = {} if header is None else json.loads(header)
    except ValueError:
        found = {}
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise InputError(
            f"{file} is a safetensors file, but not a vardass checkpoint of format {_FORMAT}; pass one that a vardass "
            "run wrote"
        )
    return tensors, found["meta"]


def _unreadable(file: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot read {file}: {error.strerror or error}; the file is left alone: try again, or check its permissions"
    )


def flatten_state(nested: Any) -> tuple[dict[str, Tensor], Any]:
    """Take the tensors out of a nested state: ``(tensors by name, JSON tree that refers to them)``.

    Mappings with keys that are not text, tuples and NumPy arrays come back as they were; so do NaN and infinity.

    Examples
    --------
    >>> tensors, tree = flatten_state({"betas": (0.9, 0.99), 3: torch.ones(2)})
    >>> sorted(tensors)
    ['3']
    >>> unflatten_state(tensors, tree)
    {'betas': (0.9, 0.99), 3: tensor([1., 1.])}
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(nested, "", tensors)


def unflatten_state(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """Put together what `flatten_state` took apart."""
    if isinstance(tree, list):
        return [unflatten_state(tensors, value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((mark, content),) = tree.items()
        if mark in (_TENSOR, _ARRAY):
            if content not in tensors:
                raise InputError(f"the checkpoint lacks the tensor {content!r}; use another one, or start the run anew")
            return tensors[content] if mark == _TENSOR else tensors[content].numpy()
        if mark == _TUPLE:
            return tuple(unflatten_state(tensors, value) for value in content)
        if mark == _MAPPING:
            return {unflatten_state(tensors, key): unflatten_state(tensors, value) for key, value in content}
    return {key: unflatten_state(tensors, value) for key, value in tree.items()}


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor | np.ndarray):
        key = name
        while key in tensors or not key:  # the keys 1 and "1" would have one name
            key += "_"
        tensors[key] = value.detach() if isinstance(value, Tensor) else torch.from_numpy(value.copy())
        return {_TENSOR if isinstance(value, Tensor) else _ARRAY: key}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        items = [(key, _encode(entry, _join(name, key), tensors)) for key, entry in value.items()]
        return dict(items) if plain else {_MAPPING: [[_encode(key, "", {}), entry] for key, entry in items]}
    if isinstance(value, list | tuple):
        parts = [_encode(entry, _join(name, place), tensors) for place, entry in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    raise InputError(
        f"{name or 'the state'} is a {type(value).__name__}, which a checkpoint cannot hold; use tensors, numbers, "
        "text, and lists, tuples or dicts of them"
    )


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise InputError(
            "checkpoints need safetensors, which is not installed: pip install 'vardass[adapt]'"
        ) from error
    return safetensors


# --- what a run has measured so far ---


class History:
    """Losses, metrics and the latest variances of a run.

    Attributes
    ----------
    metrics : list of dict
        One entry for each evaluation.
    strata_log : dict of str to float
        Variances of the latest refresh, by domain.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.metrics: list[dict[str, Any]] = []
        self.strata_log: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add_losses(self, parts: Mapping[str, Tensor]) -> None:
        """Take in the losses of one step."""
        for name, value in parts.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def add_refresh(self, log: Mapping[str, Any] | None) -> None:
        """Take in what a refresh reports; None if there was none."""
        if log is not None:
            self.strata_log = {key: value for key, value in log.items() if "seconds" not in key and key != "step"}

    def take_losses(self, step: int, lr: float) -> dict[str, float]:
        """Mean losses since the last call.

        Raises
        ------
        VardassError
            If one is not finite.
        """
        losses = {f"loss/{name}": float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        if not all(math.isfinite(value) for value in losses.values()):
            raise VardassError(f"the loss is not finite at step {step}: {losses}; lower lr={lr} or the penalty")
        return losses

    def message(self, step: int, steps: int, account: TimeAccount) -> str:
        """One line for a progress bar: step, loss, variance reduction and where the time goes."""
        parts = [f"step {step} of {steps}"]
        if self.device.type == "cpu" and "total" in self._sums:
            parts.append(f"loss {float(self._sums['total']) / self._counts['total']:.4g}")
        elif self.metrics and "loss/total" in self.metrics[-1]:
            # of the last evaluation: reading the present one would wait for the device
            parts.append(f"loss {self.metrics[-1]['loss/total']:.4g}")
        if "source/reduction" in self.strata_log:
            parts.append(f"variance reduced {self.strata_log['source/reduction']:.3g}x")
        total = account.total or 1.0
        largest = sorted(account.seconds.items(), key=lambda item: -item[1])[:3]
        parts.append(" ".join(f"{name} {seconds / total:.0%}" for name, seconds in largest))
        return ", ".join(parts)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {
            "sums": self._sums,
            "counts": self._counts,
            "strata_log": self.strata_log,
            "metrics": self.metrics,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self._sums = {name: value.to(self.device) for name, value in state["sums"].items()}
        self._counts, self.strata_log, self.metrics = state["counts"], state["strata_log"], state["metrics"]


# --- metrics of a run as TensorBoard reads them ---

BOARD_FOLDER = "tensorboard"
_NO_SCALARS = ("step", "best_step")


class Board:
    """Scalars of each evaluation in ``RUN/tensorboard``.

    Parameters
    ----------
    folder : Path or None
        Of the run.

    Raises
    ------
    InputError
        If there is no folder, or TensorBoard is not installed.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            raise InputError("tensorboard=True needs a folder to write to, got out=None; give the run one")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"tensorboard=True needs TensorBoard, which cannot be imported ({error}); pip install tensorboard"
            ) from None
        self._make: Any = SummaryWriter
        self._folder = folder / BOARD_FOLDER
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Open a file; a resumed run hides what an earlier one wrote after ``step``."""
        self.close()
        self._writer = self._make(str(self._folder), purge_step=step + 1 if step else None)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write one evaluation, as it is in ``metrics.jsonl``; seconds by part."""
        if self._writer is None:
            return
        scalars = {name: value for name, value in line.items() if name not in _NO_SCALARS and name != "seconds"}
        scalars |= {f"seconds/{part}": value for part, value in line["seconds"].items()}
        for name, value in scalars.items():
            self._writer.add_scalar(name if "/" in name else f"score/{name}", value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


# --- the folder of a run ---

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
        from vardass.adapt.config import RunConfig  # which needs this package

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
