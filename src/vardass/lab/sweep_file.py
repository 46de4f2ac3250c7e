"""The format of a sweep's file. Settings of runs are checked by ``RunConfig``, options by what they belong to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from vardass.adapt.algorithms import algorithm_options
from vardass.adapt.config import Count, CountFromZero, RunConfig
from vardass.data.registry import DATASETS, find_dataset
from vardass.errors import InputError
from vardass.lab.search import SPACE_NAMES, Distribution
from vardass.lab.yaml_file import Section, as_mapping, at, check_content
from vardass.validate import choose, unknown

__all__ = ["RECOMMENDED", "AlgorithmSection", "DataSection", "SamplerSection", "Specification", "full_name"]

RECOMMENDED = "recommended"
"""In the place of a sampler: all settings of ``RunConfig.recommended``, which has one."""
_OPTIONS = ("algorithm_options", "network_options", "optimiser_options")
_GRID_OPTIONS = (*_OPTIONS, "sampler_options")
_ELSEWHERE = {
    "algorithm": "list them under algorithms",
    "sampler": "list them under samplers",
    "seed": "give seed at the top of the file; each run's is made from it",
    "regression": "tables of a sweep hold accuracies of classes; use vardass adapt or train --regression",
    "sampler_options": "give them as options of the sampler, under samplers, or under grid",
}


# --- settings under one set of names: options have a dot, and ``penalty`` is short for that of the algorithm ---


def full_name(key: str, groups: Sequence[str] = _GRID_OPTIONS) -> str:
    """``key`` as a setting's full name; an InputError with the nearest if there is none."""
    key = "algorithm_options.penalty" if key == "penalty" else key
    group, dot, option = key.partition(".")
    if dot and group in groups and option:
        return key
    if group in _ELSEWHERE:
        raise InputError(f"{key} cannot be set here; {_ELSEWHERE[group]}")
    known = [name for name in RunConfig.model_fields if name not in (*_ELSEWHERE, *_OPTIONS)]
    if key not in known:
        raise unknown("setting", key, [*known, "penalty", *(f"{group}.*" for group in groups)])
    return key


def flatten(content: Any, groups: Sequence[str] = _OPTIONS) -> Iterator[tuple[str, str, Any]]:
    """Each setting as it is written, its full name and its value; mappings of options become settings with a dot."""
    seen = set()
    for key, value in as_mapping(content).items():
        with at(key):
            inner = as_mapping(value).items() if key in groups else [("", value)]
        for name, each in inner:
            written = f"{key}.{name}" if name else key
            full = full_name(written, groups)
            if full in seen:
                raise InputError(f"gives {full} twice; write it once")
            seen.add(full)
            yield written, full, each


def check_setting(name: str, value: Any) -> Any:
    """``value`` as the run has it, if a run can have it; options are checked with their owner."""
    if "." in name:
        return value
    return RunConfig.checked(name, value)


def _settings(given: Any) -> dict[str, Any]:
    found = {}
    for written, full, value in flatten(given):
        with at(written):
            found[full] = check_setting(full, value)
    return found


def _grid(given: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for written, full, values in flatten(given, _GRID_OPTIONS):
        with at(written):
            if not isinstance(values, list) or not values:
                raise InputError(f"must be a list of values to compare, got {values!r}; write it as [10, 100]")
            found[written] = []
            for index, value in enumerate(values):
                with at(index):
                    if not isinstance(value, str | int | float):
                        raise InputError(f"must be a text or a number, got {value!r}")
                    checked = check_setting(full, value)
                    if checked in found[written]:
                        raise InputError(f"is {value!r}, which is already listed; remove it")
                    found[written].append(checked)
    return found


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise InputError(f"must be a text, got {given!r}; put it in quotes if it is one")
    return given


def _list(given: Any) -> list[Any]:
    """A list with entries; a single text or mapping stands for a list of one."""
    if isinstance(given, str | Mapping):
        return [given]
    if not isinstance(given, list):
        raise InputError(f"must be a list, got {given!r}; write it as [a, b]")
    if not given:
        raise InputError("is an empty list; give at least one entry")
    return given


def _space(given: Any) -> str | dict[str, Distribution]:
    """The name of a space, or settings by their full names, each with a distribution of values that it can have."""
    if isinstance(given, str):
        return choose(given, "space", SPACE_NAMES)
    found = {}
    for _, full, each in flatten(given):
        with at(full):
            if not isinstance(each, Mapping | Distribution):
                raise InputError(
                    f"must be a distribution such as {{log10_uniform: [-5, -3.5]}}, got {each!r}; a value that is not "
                    "searched belongs under settings"
                )
            found[full] = check_content(Distribution.model_validate, each)
            for value in found[full].extremes():
                check_setting(full, value)
    return found


def _settings_schema() -> dict[str, Any]:
    """RunConfig's settings, for editors."""
    known = RunConfig.model_json_schema()["properties"]
    return {
        "type": "object",
        "properties": {name: entry for name, entry in known.items() if name not in _ELSEWHERE} | {"penalty": {}},
        "patternProperties": {rf"^({'|'.join(_OPTIONS)})\.": {}},
        "additionalProperties": False,
    }


Text = Annotated[str, BeforeValidator(_text)]
Options = Annotated[dict[str, Any], BeforeValidator(as_mapping)]
Settings = Annotated[dict[str, Any], BeforeValidator(_settings), WithJsonSchema(_settings_schema())]


# --- the parts of a file ---


class SettingsSection(Section):
    """What all parts have in common: settings that count for their runs."""

    settings: Settings = Field(default_factory=dict, description="Settings of these runs, see RunConfig.")

    @property
    def values(self) -> dict[str, Any]:
        """What is fixed, by the full names of settings."""
        return self.settings


class _Owner(SettingsSection):
    """An algorithm or a sampler: its options are settings with a dot."""

    short: ClassVar[str] = "name"
    group: ClassVar[str]

    name: Text = Field(description="write the entry as a text, or as {name: ..., options: {...}}")
    label: Text = Field(default="", description="Name in tables, by default the name.")
    options: Options = Field(default_factory=dict, description="Options of the algorithm or sampler.")

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Label it by its name."""
        super().prepare(given)
        return {"label": given["name"], **given} if "name" in given else given

    @property
    def values(self) -> dict[str, Any]:
        """Settings and options, by full names."""
        return {**self.settings, **{f"{self.group}.{name}": value for name, value in self.options.items()}}

    @model_validator(mode="after")
    def _options_once(self) -> _Owner:
        for name in self.options:
            if f"{self.group}.{name}" in self.settings:
                raise InputError(f"has {name} in options and in settings; give it once")
        return self


class SamplerSection(_Owner):
    """A sampler with its options; or ``recommended``, with the other settings of ``vardass adapt`` too."""

    group: ClassVar[str] = "sampler_options"

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        return name if name == RECOMMENDED else RunConfig(sampler=name).sampler


Samplers = Annotated[list[SamplerSection], BeforeValidator(_list)]


class AlgorithmSection(_Owner):
    """An algorithm with its options and the samplers that serve it."""

    group: ClassVar[str] = "algorithm_options"

    samplers: Samplers = Field(
        description="the file has none either; add 'samplers: [uniform, vardass]', or labels of the sweep's samplers"
    )

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        algorithm_options(name)  # says so if the name is unknown
        return name

    @model_validator(mode="after")
    def _options_known(self) -> AlgorithmSection:
        known = algorithm_options(self.name)
        for name in self.values:
            group, _, option = name.partition(".")
            if group == "algorithm_options" and option not in known:
                raise unknown(f"option of algorithm {self.name!r}:", option, known)
        return self


class DataSection(SettingsSection):
    """Tasks of a data set that share settings."""

    short: ClassVar[str] = "dataset"

    dataset: Text = Field(description=f"name one of {', '.join(DATASETS)}")
    name: Text = Field(default="", description="Name in tables, by default that of the data set.")
    root: Text | None = Field(default=None, description="Folder of the files; relative to the folder of this file.")
    tasks: Annotated[list[Text], BeforeValidator(_list)] = Field(
        default=["all"], description="Names of tasks, or 'all'."
    )
    options: Options = Field(default_factory=dict, description="Options of the data set's loader, such as cache: true.")

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Spell the data set as the registry does, and name the entry by it."""
        super().prepare(given)
        if "dataset" not in given:
            return given
        with at("dataset"):
            dataset = find_dataset(_text(given["dataset"])).name
        return {"name": dataset, **given, "dataset": dataset}

    @model_validator(mode="after")
    def _options_known(self) -> DataSection:
        with at("options"):
            find_dataset(self.dataset).check_options(self.options)
            if self.dataset in DATASETS and self.options.get("regression"):
                raise InputError(f"regression cannot be set here; {_ELSEWHERE['regression']}")
        if self.root is not None and self.dataset in DATASETS and not DATASETS[self.dataset].layout:
            with at("root"):
                raise InputError(f"is {self.root!r}, but {self.dataset} is not read from there; remove it")
        return self


class SearchSection(Section):
    """How hyper-parameters are searched."""

    size: Count = Field(default=1, description="Trials of each cell.")
    first: Annotated[
        Literal["defaults", "random"], BeforeValidator(lambda first: choose(first, "choice", ("defaults", "random")))
    ] = Field(
        default="defaults", description="Whether the first trial uses the defaults, as in DomainBed, or is also drawn."
    )
    space: Annotated[str | dict[str, Distribution], BeforeValidator(_space)] = Field(
        default_factory=dict,
        description=f"Settings to search with their distributions, or a named space: {', '.join(SPACE_NAMES)}.",
    )

    @property
    def own(self) -> dict[str, Distribution]:
        """What is searched, by the full names of settings, unless it is a named space."""
        return {} if isinstance(self.space, str) else self.space


class Specification(SettingsSection):
    """The content of a sweep's file."""

    name: Text = Field(default="", description="Title, by default the file's name.")
    seed: CountFromZero = Field(default=0, description="Determines all seeds and draws.")
    repeats: Count = Field(default=1, description="Repetitions with different seeds, splits and draws.")
    search: SearchSection = Field(default_factory=SearchSection)
    overrides: Settings = Field(default_factory=dict, description="Settings that override all others, like --set.")
    grid: Annotated[dict[str, list[Any]], BeforeValidator(_grid)] = Field(
        default_factory=dict, description="Settings with the values to compare; each combination is a cell."
    )
    holdout: float = Field(
        default=0.2, ge=0.0, lt=1.0, strict=True, description="Share of each domain that is held out."
    )
    unlabelled_fraction: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        strict=True,
        description="Share of the remaining target samples used for adaptation, without labels.",
    )
    data: Annotated[list[DataSection], BeforeValidator(_list)] = Field(
        description="the file needs data, algorithms and samplers"
    )
    samplers: Samplers | None = Field(default=None, description="Samplers of algorithms that name none.")
    algorithms: Annotated[list[AlgorithmSection], BeforeValidator(_list)] = Field(
        description="the file needs data, algorithms and samplers"
    )

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Give each algorithm its samplers: its own, which may be labels of the sweep's, or the sweep's."""
        super().prepare(given)
        shared = _entries(given.get("samplers"))
        labels = {str(entry.get("label", entry.get("name"))): entry for entry in shared if isinstance(entry, dict)}
        algorithms = []
        for entry in _entries(given.get("algorithms")):
            if isinstance(entry, dict) and ("samplers" in entry or shared):
                own = _entries(entry["samplers"], labels) if "samplers" in entry else shared
                algorithms.append({**entry, "samplers": own})
            else:
                algorithms.append(entry)
        return {**given, "algorithms": algorithms} if algorithms else given

    @property
    def cells(self) -> int:
        """Number of cells that are compared on each task."""
        points = math.prod(len(values) for values in self.grid.values())
        return points * sum(len(part.samplers) for part in self.algorithms)

    @property
    def tasks(self) -> int:
        """Number of tasks of all data."""
        return sum(len(part.tasks) for part in self.data)

    @model_validator(mode="after")
    def _parts_fit(self) -> Specification:
        cells: set[tuple[str, str]] = set()
        for index, algorithm in enumerate(self.algorithms):
            for sampler in algorithm.samplers:
                if (algorithm.label, sampler.label) in cells:
                    with at("algorithms", index):
                        raise InputError(
                            f"is {algorithm.label!r} with sampler {sampler.label!r}, which is already listed; remove "
                            "one of them, or give one a label"
                        )
                cells.add((algorithm.label, sampler.label))
        known = dict.fromkeys(option for part in self.algorithms for option in algorithm_options(part.name))
        named = [name for part in (self, *self.data) for name in part.settings]
        for name in (*named, *self.search.own, *self.overrides):
            group, _, option = name.partition(".")
            if group == "algorithm_options" and option not in known:
                raise unknown("option of the algorithms of this sweep:", option, known)
        for name in self.search.own:
            if name in self.settings:
                raise InputError(
                    f"space searches {name}, which is also fixed, to {self.settings[name]!r}; remove one of them"
                )
        for name in self.overrides:
            if name in map(full_name, self.grid):
                raise InputError(f"{name} is compared under grid, so it cannot be {self.overrides[name]!r} in all runs")
        if self.search.size > 1 and not self.search.space:
            raise InputError(
                f"search.size is {self.search.size}, but there is no space to search; add 'space: paper' to search"
            )
        return self


def _entries(given: Any, labels: Mapping[str, Any] | None = None) -> list[Any]:
    """Entries of a list that may still be wrong; a text is one of ``labels`` or the name of an entry."""
    found = given if isinstance(given, list) else [] if given is None else [given]
    return [(labels or {}).get(each, {"name": each}) if isinstance(each, str) else each for each in found]
