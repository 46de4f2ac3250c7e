"""What a run of a sweep is and what it leaves: a specification named by its content, and a record as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from typing import Any

from vardass.adapt.config import RunConfig
from vardass.errors import InputError

__all__ = ["FORMAT", "Record", "RunSpec"]

FORMAT = 2  # of a record; raised when the meaning of a field changes
_DEFAULTS = 3  # of settings; raised when one of them changes, so that runs with the old and the new one differ in name
# where and how fast, but not what: the same run on another machine has the same name
_SURROUNDINGS = ("device", "workers", "checkpoint_every", "eval_batch_size", "tensorboard")
_NOT_NAMED_BY = ("cache",)  # options of data that change how fast, but not what


@cache
def _defaults() -> dict[str, Any]:
    return RunConfig().to_dict()


@dataclass(frozen=True)
class RunSpec:
    """One run of a sweep: its data, its settings and its place.

    Attributes
    ----------
    dataset, task, root, data_options
        See ``vardass.data.load_task``.
    data_name : str
        What tables call the data.
    config : dict
        Settings of the run, as ``RunConfig.to_dict`` gives them.
    cell : dict of str to (str, int or float)
        What is compared: ``"algorithm"``, ``"sampler"`` and the settings of the sweep's grid. Runs that differ only
        in ``search`` compete for the cell's entry of their repeat.
    search, repeat : int
        Number of the draw of hyper-parameters and of the repetition.
    split_seed : int
        Seed of the task's splits.
    holdout, unlabelled_fraction : float
        See ``split_task``.

    Examples
    --------
    >>> cell = {"algorithm": "mmd", "sampler": "balanced"}
    >>> one = RunSpec("watch", "left-A->right-B", "watch", {**cell, "seed": 0}, cell)
    >>> other = RunSpec("watch", "left-A->right-B", "watch", {**cell, "seed": 1}, cell, repeat=1)
    >>> one.run_id == other.run_id  # named by what determines its numbers
    False
    """

    dataset: str
    task: str
    data_name: str
    config: dict[str, Any]
    cell: dict[str, Any]
    root: str | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    search: int = 0
    repeat: int = 0
    split_seed: int = 0
    holdout: float = 0.2
    unlabelled_fraction: float = 0.5

    @cached_property
    def run_id(self) -> str:
        """Name made from all that determines the result; the data's place and the machine's do not.

        Settings that have their defaults are left out, so that one which is added later renames no run.
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
    """What a run left.

    Attributes
    ----------
    spec : RunSpec
        What was run.
    status : {"finished", "failed"}
        A failed run has an error and no result.
    result : dict
        ``"target_accuracy"``, ``"source_accuracy"`` in [0, 1], ``"target_samples"``, ``"selected_step"``,
        ``"score"`` by which runs of a search are compared, ``"mmd2"`` and ``"coral"`` between held-out source and
        target features of the chosen model; ``"coral_relative"`` is over the mean of |R_s|² and |R_t|².
    curve : list of dict
        One entry for each evaluation, as in ``metrics.jsonl``, with the accuracy on the target's test part, which the
        run itself did not see.
    seconds : dict of str to float
        Time of each part of the run, see ``RunResult``.
    wall : float
        Seconds of the whole run, all attempts together.
    attempts : int
        How often it was started because it failed before.
    error : str or None
        Message of a failed run.
    environment : dict
        Versions of vardass (and its commit, where it is known), Python, torch and numpy; the machine.
    version : str
        Of vardass.
    run_id : str
        Name of the run, by default that of the specification. A record from a file keeps the name it has there,
        whatever the defaults are now.

    Examples
    --------
    >>> cell = {"algorithm": "mmd", "sampler": "balanced"}
    >>> spec = RunSpec("watch", "left-A->right-B", "watch", dict(cell), cell)
    >>> record = Record(spec, "finished", {"target_accuracy": 0.8, "score": 0.9})
    >>> Record.from_json(record.to_json()) == record
    True
    """

    spec: RunSpec
    status: str
    result: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0
    attempts: int = 1
    error: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    run_id: str = ""

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
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"not a whole record ({error.msg} at character {error.pos}); remove the line and run the sweep again"
            ) from None
        if not isinstance(found, dict) or "format" not in found:
            raise InputError(f"not a record of a run: {line[:60]!r}; name a folder that a sweep wrote")
        if found.pop("format") != FORMAT:
            raise InputError(
                f"the record has format {json.loads(line)['format']}, this version reads {FORMAT}; use the version "
                f"that wrote it ({found.get('version', 'unknown')}), or run the sweep again in a new folder"
            )
        values = _fields(cls, {"run_id": found.pop("id", ""), **found}, "a record")
        return cls(**{**values, "spec": RunSpec(**_fields(RunSpec, values["spec"], "a run's specification"))})


def _fields(cls: type, found: Mapping[str, Any], what: str) -> dict[str, Any]:
    names = {entry.name for entry in fields(cls)}
    required = {"spec", "status"} if cls is Record else {"dataset", "task", "data_name", "config", "cell"}
    if not required <= set(found) <= names:
        odd = sorted(required - set(found)) or sorted(set(found) - names)
        raise InputError(f"{what} has missing or unknown fields {odd}; was it written by another version of vardass?")
    return dict(found)
