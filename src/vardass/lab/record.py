"""What a run of a sweep is and what it leaves: a specification named by its content, a record as JSON, versions."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, TypeAdapter

import vardass
from vardass.adapt.config import RunConfig
from vardass.errors import InputError
from vardass.files import parse_json
from vardass.lab.yaml_file import check_content

__all__ = ["FORMAT", "Record", "RunId", "RunSpec", "versions"]

FORMAT = 2  # of a record; raised when the meaning of a field changes
_DEFAULTS = 4  # of settings and splits; raised when one changes, so that runs with old and new ones differ in name
# where and how fast, but not what: the same run on another machine has the same name
_SURROUNDINGS = ("device", "workers", "checkpoint_every", "eval_batch_size", "tensorboard")
_NOT_NAMED_BY = ("cache",)  # options of data that change how fast, but not what

RunId = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
"""The name of a run, which names its folder too."""
Seconds = Annotated[FiniteFloat, Field(ge=0)]
_WHOLE = ConfigDict(extra="forbid")  # nothing unknown in a file is dropped in silence


@cache
def _defaults() -> dict[str, Any]:
    return RunConfig().to_dict()


@dataclass(frozen=True)
class RunSpec:
    """One run of a sweep: its data, its settings and its place."""

    __pydantic_config__ = _WHOLE

    dataset: str  # see ``vardass.data.load_task``, as for task, root and data_options
    task: str
    data_name: str  # what tables call the data
    config: dict[str, Any]  # settings of the run, as ``RunConfig.to_dict`` gives them
    # what is compared: algorithm, sampler and the settings of the sweep's grid; runs that differ only in ``search``
    # compete for the cell's entry of their repeat
    cell: dict[str, Any]
    root: str | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    search: NonNegativeInt = 0  # number of the draw of hyper-parameters
    repeat: NonNegativeInt = 0
    split_seed: int = 0  # of the task's splits, as the shares below: see ``split_task``
    holdout: float = 0.2
    unlabelled_fraction: float = 0.5

    @cached_property
    def run_id(self) -> str:
        """Name made from all that determines the result, so not the folder of the data or the machine.

        Settings that have their defaults are left out, so that a setting added later renames no run.
        """
        content = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "root"}
        content["data_options"] = {k: v for k, v in self.data_options.items() if k not in _NOT_NAMED_BY}
        content["config"] = {
            name: value
            for name, value in self.config.items()
            if name not in _SURROUNDINGS and (name not in _defaults() or _defaults()[name] != value)
        }
        text = json.dumps([_DEFAULTS, content], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """What a run left."""

    __pydantic_config__ = _WHOLE

    spec: RunSpec
    status: Literal["finished", "failed"]  # failed with an error and no result
    # target_accuracy and source_accuracy in [0, 1], target_samples, selected_step, the score by which runs of a search
    # are compared, mmd2 and coral between held-out source and target features of the chosen model, coral_relative
    result: dict[str, Any] = field(default_factory=dict)
    # evaluations as in metrics.jsonl, with the accuracy on the target's test part, which the run itself did not see
    curve: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, Seconds] = field(default_factory=dict)  # of each part of the run, see ``RunResult``
    wall: Seconds = 0.0  # seconds of the whole run, all attempts together
    attempts: PositiveInt = 1  # how often it was started because it failed before
    error: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)  # `versions`, and the machine
    version: str = ""  # of vardass
    run_id: RunId = ""  # by default the specification's; one from a file keeps its name, whatever the defaults are now

    def __post_init__(self) -> None:
        if not self.run_id:
            object.__setattr__(self, "run_id", self.spec.run_id)

    def to_json(self) -> str:
        """One line of JSON."""
        content = asdict(self)
        content = {"format": FORMAT, "id": content.pop("run_id"), **content}
        return json.dumps(content, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record that `to_json` gave; an InputError if the line is not whole, not a record, or of another format.

        Settings are not checked, so that records outlive settings that are no longer there.
        """
        try:
            found = parse_json(line)
            json.dumps(found, allow_nan=False)  # it may have to be written again
        except ValueError as error:
            raise InputError(f"not a whole record, {error}; remove the line and run the sweep again") from None
        if not isinstance(found, dict) or "format" not in found:
            raise InputError(f"not a record of a run: {line[:60]!r}; name a folder that a sweep wrote")
        form = found.pop("format")
        if form != FORMAT:
            raise InputError(
                f"the record has format {str(form)[:40]}, this version reads {FORMAT}; use the version that wrote it "
                f"({str(found.get('version', 'unknown'))[:40]}), or run the sweep again in a new folder"
            )
        try:
            return check_content(_checked().validate_python, {"run_id": found.pop("id", ""), **found})
        except InputError as error:
            raise InputError(
                f"not the fields of a record: {error}; was it changed, or written by another version of vardass?"
            ) from None


@cache
def _checked() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


# --- versions of what makes numbers ---


@cache
def versions() -> dict[str, str | None]:
    """Of vardass with its commit, Python, torch and numpy.

    The commit is that of the checkout, with ``-dirty`` if files were changed, or the one that pip installed from; None
    where neither is known.
    """
    return {
        "vardass": vardass.__version__,
        "commit": _checkout_commit() or _installed_commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def _checkout_commit() -> str | None:
    # a folder of packages may lie within another project's checkout, whose commit says nothing of vardass
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(*command: str) -> str | None:
    place = Path(vardass.__file__).parent
    try:
        found = subprocess.run(["git", *command], cwd=place, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _installed_commit() -> str | None:
    try:
        origin = json.loads(metadata.distribution("vardass").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    commit = origin.get("vcs_info", {}).get("commit_id")
    return None if commit is None else str(commit)
