"""What a run measures, and the files that it leaves in its folder."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator
from torch import Tensor

from vardass.adapt.config import RunConfig, as_input_error
from vardass.data.domains import Kind
from vardass.errors import InputError, VardassError
from vardass.files import atomic_write, check_replaceable, is_own, read_json, write_output, write_text
from vardass.refresh import Timer
from vardass.validate import check_count, check_tensor, reading

CHECKPOINT_FILE = "checkpoint.pt"
CONFIG_FILE = "config.json"
DATA_FILE = "data.json"
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
RUN = "adapt"  # what files in the folder of a run are noted to be by, see `write_output`
_FORMAT = 3  # raised too when runs are split otherwise, as a resumed run would mix splits
# between a checkpoint and the run that resumes it
_MAY_CHANGE = ("steps", "checkpoint_every", "device", "devices", "tensorboard")


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
        metrics = self.path / METRICS_FILE
        if not is_own(self.path / CONFIG_FILE, RUN):  # else they are what a stopped run left
            check_replaceable(metrics, RUN)
        write_output(self.path / CONFIG_FILE, json.dumps(config.to_json(), indent=2) + "\n", RUN)
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
        save_checkpoint(self.path / CHECKPOINT_FILE, {"config": config.to_json(), "state": dict(state)})

    def load(self, config: RunConfig, *, resume: bool) -> dict[str, Any]:
        """Read the checkpoint's state."""
        if not resume:
            raise InputError(f"{self.path} already holds a run; resume it, or choose another folder")
        file = self.path / CHECKPOINT_FILE
        with reading(file, "put a copy of it in its place, or start over in another folder"):
            return self._of_these_settings(load_checkpoint(file), config)

    def _of_these_settings(self, content: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
        """The state in a checkpoint, if it is of a run with this configuration."""
        # a rate that falls to 0 at the last step depends on where that is
        may_change = [name for name in _MAY_CHANGE if name != "steps" or config.lr_schedule != "cosine"]
        # options last: their defaults may follow from the other settings
        for name, value in sorted(config.to_json().items(), key=lambda item: isinstance(item[1], dict)):
            before = content["config"].get(name)
            if name in may_change or before == value:
                continue
            if isinstance(before, dict) and isinstance(value, dict):
                differing = [key for key in {**before, **value} if before.get(key) != value.get(key)]
                before, value = ({key: each.get(key) for key in differing} for each in (before, value))
            raise InputError(
                f"the run in {self.path} has {name}={before!r}, this one {name}={value!r}; resume with the same "
                "settings, or choose another folder"
            )
        state: dict[str, Any] = content["state"]
        return state


def read_data_file(run: Path) -> dict[str, Any]:
    """How the data of a run were read; empty if it does not say."""
    file = run / DATA_FILE
    found, why = read_json(file, lenient=True), ""
    try:
        _DataFile.model_validate(found)
    except ValidationError as error:
        why = f" ({as_input_error(error)})"
    if file.exists() and (why or not found):
        raise InputError(
            f"{file} is damaged{why}, and says how the data of the run were read; restore it from a copy, or train "
            "again in another folder"
        )
    return found


class _Scale(BaseModel):
    mean: Annotated[list[FiniteFloat], Field(min_length=1)]
    deviation: list[Annotated[FiniteFloat, Field(gt=0)]]
    clip: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_deviation_for_each_mean(self) -> _Scale:
        if len(self.mean) != len(self.deviation):
            raise InputError(f"{len(self.mean)} means and {len(self.deviation)} deviations of columns")
        return self


class Reading(BaseModel):
    """How samples were read, as a file says: checked before it is used."""

    scale: _Scale | None = None
    column_names: list[str] | None = None
    interpolation: str = ""
    front_end: dict[str, Any] | None = None


class _DataFile(Reading):
    kind: Kind | None = None
    sources: Annotated[list[str], Field(min_length=1)] | None = None
    target: str | None = None
    dataset: str | None = None
    task: str | None = None
    root: str | None = None
    options: dict[str, str] = {}
    source_samples: list[int] = []
    target_samples: int = 0
    classes: list[str] = []
    numbers: list[str] = []
    key: str | None = None
    labels: str | None = None
    columns: str | None = None
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    unlabelled_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0


def reading_of(model: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """How the samples of a model were read: as its own file says, the rest as the run's ``data.json`` says."""
    return {**read_data_file(model if model.is_dir() else model.parent), **about["reading"]}


# --- checkpoints --------------------------------------------------------------------------------------


def save_checkpoint(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write plain values and tensors, in dicts, lists and tuples, to one file; a crash leaves the old one whole."""
    _refuse_objects(content, "")
    try:
        with atomic_write(path) as file:
            torch.save({"vardass": _FORMAT, **content}, file)
    except (OSError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else error.__context__  # torch wraps what the file raised
        if not isinstance(reason, OSError):
            raise
        remedy = "start again in another folder"
        if Path(path).exists():
            remedy = "resume, as the one before it is whole"
        raise InputError(
            f"the checkpoint {path} cannot be written: {reason.strerror or reason}; make room, and {remedy}"
        ) from reason


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, tensors on the CPU; no code in the file is run."""
    file = Path(path)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise InputError(f"no checkpoint at {file}; check the path, or start over") from None
    except Exception as error:  # torch raises errors of many kinds for files that are cut off or not its own
        # in a file that was cut off it seeks to an invalid place; other errors of the system are not about its content
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise InputError(
                f"cannot read {file}: {error.strerror or error}; the file is left alone: try again, or check its "
                "permissions"
            ) from error
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        if isinstance(error, OSError):
            reason = "its end is missing"
        raise InputError(
            f"{file} ({file.stat().st_size} bytes) is damaged, not a whole checkpoint: {reason}; put a copy of it in "
            "its place, or start over in another folder"
        ) from None
    if not isinstance(content, dict) or content.pop("vardass", None) != _FORMAT:
        raise InputError(f"{file} is not a checkpoint of a vardass run in format {_FORMAT}; pass one that a run wrote")
    return content


def _refuse_objects(value: Any, place: str) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _refuse_objects(entry, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for position, entry in enumerate(value):
            _refuse_objects(entry, f"{place}.{position}")
    elif value is not None and not isinstance(value, bool | int | float | str | Tensor):
        raise InputError(
            f"{place or 'the content'} is of type {type(value).__name__}, which a checkpoint cannot hold; use tensors, "
            "numbers, text, and lists, tuples or dicts of them"
        )


# --- what a run has measured so far -------------------------------------------------------------------


class History:
    """Losses, metrics and the latest variances of a run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.metrics: list[dict[str, Any]] = []
        self.strata_log: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    @property
    def losses(self) -> list[Tensor]:
        """Sums of the losses since the last evaluation."""
        return list(self._sums.values())

    def add_losses(self, parts: Mapping[str, Tensor]) -> None:
        """Add the losses of one step."""
        for name, value in parts.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def add_refresh(self, log: Mapping[str, Any] | None) -> None:
        """Add the report of a refresh; None if there was none."""
        if log is not None:
            self.strata_log |= {key: value for key, value in log.items() if "seconds" not in key and key != "step"}

    def take_losses(self, step: int, lr: float) -> dict[str, float]:
        """Mean losses since the last call."""
        losses = {f"loss/{name}": float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        if not all(math.isfinite(value) for value in losses.values()):
            raise VardassError(f"the loss is not finite at step {step}: {losses}; lower lr={lr} or the penalty")
        return losses

    def message(self, step: int, steps: int, account: Timer) -> str:
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
        return {"sums": self._sums, "counts": self._counts, "strata_log": self.strata_log, "metrics": self.metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._sums = {name: check_tensor(value, name, ()).to(self.device) for name, value in state["sums"].items()}
        self._counts = {name: check_count(state["counts"][name], name) for name in self._sums}
        self.strata_log = {name: float(value) for name, value in state["strata_log"].items()}
        self.metrics = [dict(line) for line in state["metrics"]]
        json.dumps(self.metrics)  # they are written again


class TensorBoardLog:
    """Scalars of each evaluation in ``RUN/tensorboard``."""

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            raise InputError("tensorboard=True needs a folder to write to, got out=None; give the run one")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"tensorboard=True needs TensorBoard, which cannot be imported ({error}); pip install tensorboard"
            ) from None
        self._open = partial(SummaryWriter, str(folder / TENSORBOARD_FOLDER))
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Open a file; a resumed run hides what an earlier one wrote after ``step``."""
        self.close()
        self._writer = self._open(purge_step=step + 1 if step else None)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write one evaluation, as it is in ``metrics.jsonl``; seconds by part."""
        scalars = {name: value for name, value in line.items() if name not in ("step", "best_step", "seconds")}
        scalars |= {f"seconds/{part}": value for part, value in line["seconds"].items()}
        for name, value in scalars.items():
            self._writer.add_scalar(name if "/" in name else f"score/{name}", value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
