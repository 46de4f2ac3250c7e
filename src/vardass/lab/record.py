"""What a run of a sweep is and what it leaves: a specification named by its content, and a record as JSON."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from vardass.adapt.algorithms import algorithm_options
from vardass.adapt.selection import FIRST_BEST
from vardass.data.registry import find_dataset
from vardass.errors import InputError

__all__ = ["FORMAT", "Record", "RunSpec"]

FORMAT = 2  # of a record; raised when the meaning of a field changes
# where and how fast, but not what: the same run on another machine has the same name
_SURROUNDINGS = ("device", "accelerator", "workers", "checkpoint_every", "eval_batch_size", "tensorboard")
# Left out of a run's name where they have these values, which were the defaults when format 1 was made. The table is
# frozen: a default that changes later, or a setting that is added, renames no run. What is added later belongs here
# too, with the value that means what runs did before it.
_UNNAMED: dict[str, Any] = {
    "algorithm": "mmd",
    "algorithm_options": {},
    "estimator": None,
    "contraction": None,
    "reference_rows": 2048,
    "sampler": "vardass",
    "sampler_options": {},
    "network": "mlp",
    "network_options": {},
    "regression": False,
    "steps": 3000,
    "batch_size": 32,
    "batch_per_source": False,
    "target_batch_size": None,
    "groups": None,
    "class_aligned": "none",
    "class_shares": "none",
    "class_options": {},
    "lr": 1e-3,
    "lr_schedule": "none",
    "lr_multipliers": {},
    "discriminator_lr": None,
    "weight_decay": 0.0,
    "discriminator_weight_decay": None,
    "momentum": 0.9,
    "optimiser": "adam",
    "optimiser_options": {},
    "adam_betas": None,
    "refresh_every": 100,
    "refresh_policy": "every",
    "refresh_options": {},
    "feature_source": "bank",
    "background": False,
    "eval_every": 100,
    "selection": "domainbed",  # in format 1 it was called source-accuracy
    "augment": False,
    "augment_target": False,  # with augment, runs before it did augment the target; none of them is published
    "cache_embeddings": False,
    "precision": "32-true",
    "devices": 1,
    "strategy": "auto",
    "seed": 0,
}
# The same for CORAL, whose form has changed since. A run's settings always say it, so that a record means the same in
# every version; those that do not say it have these.
_FIRST_CORAL = {"preset": "paper", "correction": "none"}
# And for options of data sets.
_UNNAMED_DATA: dict[str, dict[str, Any]] = {"embeddings": {"standardise": False}, "watch": {"clip": False}}
_NOT_NAMED_BY = ("cache",)  # options of data that change how fast, but not what


@dataclass(frozen=True)
class RunSpec:
    """One run of a sweep: its data, its settings and its place.

    Attributes
    ----------
    dataset, task, root, data_options
        See ``vardass.data.load_task``.
    data_name : str
        What tables call the data.
    cell : dict of str to (str, int or float)
        What is compared: ``"algorithm"``, ``"sampler"`` and the settings of the sweep's grid. Runs that differ only
        in ``search`` compete for the cell's entry of their repeat.
    search, repeat : int
        Number of the draw of hyper-parameters and of the repetition.
    split_seed : int
        Seed of the task's splits.
    holdout, unlabelled_fraction : float
        See ``split_task``.
    config : dict
        All settings of the run, as ``RunConfig.to_dict`` gives them.

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

    def __post_init__(self) -> None:
        if _is_coral(self.config):
            now = {"preset": algorithm_options(self.config["algorithm"])["preset"], "correction": "population"}
            object.__setattr__(self, "config", _with_form(self.config, now))
        scaling = _UNNAMED_DATA.get(self.dataset, {})
        if scaling:
            parameters = inspect.signature(find_dataset(self.dataset).load).parameters
            defaults = {name: parameters[name].default for name in scaling}
            object.__setattr__(self, "data_options", {**defaults, **self.data_options})

    @cached_property
    def run_id(self) -> str:
        """Name made from all that determines the result; the data's place and the machine's do not."""
        content = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "root"}
        before = _UNNAMED_DATA.get(self.dataset, {})
        content["data_options"] = {
            name: value
            for name, value in self.data_options.items()
            if name not in _NOT_NAMED_BY and (name not in before or before[name] != value)
        }
        options = self.config.get("algorithm_options", {})
        if _is_coral(self.config) and options["preset"] == _FIRST_CORAL["preset"]:
            options = {name: value for name, value in options.items() if _FIRST_CORAL.get(name) != value}
        content["config"] = {
            name: value
            for name, value in {**self.config, "algorithm_options": options}.items()
            if name not in _SURROUNDINGS
            and _UNNAMED.get(name, _UNNAMED) != value
            and (name, value) != ("augment", "none")
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> RunSpec:
        """The specification that `to_dict` gave."""
        values = _known(cls, found, "a run's specification")
        config = values["config"]
        if _is_coral(config):
            config = _with_form(config, _FIRST_CORAL)
        options = {**_UNNAMED_DATA.get(values["dataset"], {}), **values.get("data_options", {})}
        return cls(**{**values, "config": config, "data_options": options})


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

    @property
    def run_id(self) -> str:
        """Of the specification."""
        return self.spec.run_id

    def to_json(self) -> str:
        """One line of JSON."""
        content = {"format": FORMAT, "id": self.run_id, **asdict(self)}
        return json.dumps(content, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record that `to_json` gave.

        Raises
        ------
        InputError
            If the line is not whole, not a record, or has another format.
        """
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"not a whole record ({error.msg} at character {error.pos}); remove the line and run the sweep again"
            ) from None
        if not isinstance(found, dict) or "format" not in found:
            raise InputError(f"not a record of a run: {line[:60]!r}; name a folder that a sweep wrote")
        if found["format"] == 1:
            config = found.get("spec", {}).get("config", {})
            if config.get("selection") == "source-accuracy":
                config["selection"] = FIRST_BEST
        elif found["format"] != FORMAT:
            raise InputError(
                f"the record has format {found['format']}, this version reads 1 and {FORMAT}; use the version that "
                f"wrote it ({found.get('version', 'unknown')}), or run the sweep again in a new folder"
            )
        given = {name: value for name, value in found.items() if name not in ("format", "id")}
        values = _known(cls, given, "a record")
        return cls(**{**values, "spec": RunSpec.from_dict(values["spec"])})


def _is_coral(config: Mapping[str, Any]) -> bool:
    return str(config.get("algorithm", "")).split("+")[0] == "coral"


def _with_form(config: Mapping[str, Any], usual: Mapping[str, str]) -> dict[str, Any]:
    """``config`` with options that say CORAL's form; the paper's formula has its correction beside it."""
    options = {"preset": usual["preset"], **config.get("algorithm_options", {})}
    counted = ("correction", "population_x", "population_y")
    if options["preset"] == "paper" and all(options.get(name) is None for name in counted):
        options["correction"] = usual["correction"]
    return {**config, "algorithm_options": options}


def _known(cls: type, found: Mapping[str, Any], what: str) -> dict[str, Any]:
    names = {entry.name for entry in fields(cls)}
    required = {"spec", "status"} if cls is Record else {"dataset", "task", "data_name", "config", "cell"}
    if not required <= set(found) <= names:
        odd = sorted(required - set(found)) or sorted(set(found) - names)
        raise InputError(f"{what} has missing or unknown fields {odd}; was it written by another version of vardass?")
    return dict(found)
