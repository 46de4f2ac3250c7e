"""The settings of a run: one model behind the Python API, YAML, command-line options and ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from vardass.errors import InputError, needs_extra

with needs_extra("adapt"):
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
    from pydantic_core import core_schema

from vardass.adapt.algorithms import ALGORITHM_NAMES, algorithm_options
from vardass.adapt.algorithms.registry import check_regression
from vardass.adapt.class_aligner import ClassAligner
from vardass.adapt.evaluation import REGRESSION_SELECTION_NAMES, SELECTION_NAMES
from vardass.adapt.networks import NETWORK_NAMES, is_pretrained
from vardass.adapt.optimisation import PARTS, PRECISIONS, SCHEDULE_NAMES, autocast_dtype
from vardass.adapt.refreshing import POLICY_NAMES, make_policy
from vardass.losses.estimators import ESTIMATOR_NAMES, Estimator
from vardass.samplers.class_alignment import CLASS_SHARES
from vardass.samplers.registry import SAMPLER_NAMES
from vardass.validate import check_count, check_flag, check_number, choose, unknown

__all__ = ["RunConfig", "as_input_error"]


_USUAL_RATE, _TUNING_RATE = 1e-3, 5e-5
_USUAL_SELECTION = {False: "information-maximisation", True: "source-r2"}

# --- kinds of settings --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Checked:
    """``check(value, name)`` returns what a setting holds or raises an InputError; editors read ``schema``."""

    check: Callable[[Any, str], Any]
    schema: dict[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        def check(value: Any, info: Any) -> Any:
            return self.check(value, info.field_name)

        return core_schema.with_info_before_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self.schema)  # pydantic adds to it


def _count(low: int) -> _Checked:
    """Whole numbers from ``low``; those of numpy too, but no booleans, texts or fractions."""
    return _Checked(lambda value, name: check_count(value, name, low=low), {"type": "integer", "minimum": low})


def _number(below: float = math.inf) -> _Checked:
    schema = {"type": "number", "minimum": 0.0}
    if below < math.inf:
        schema["exclusiveMaximum"] = below
    return _Checked(lambda value, name: check_number(value, name, low=0.0, below=below), schema)


def _one_of(names: Iterable[str]) -> _Checked:
    known = list(names)
    return _Checked(lambda value, name: choose(value, name, known), {"type": "string", "enum": known})


def _or_own(names: Iterable[str], check: Callable[[Any, str], Any]) -> _Checked:
    """One of ``names``, another that ``check`` accepts, or the user's own as ``package.module:Name``."""
    return _Checked(check, {"type": "string", "examples": [*names, "package.module:Name"]})


def _known_algorithm(value: Any, name: str) -> Any:
    algorithm_options(value)  # says so if it is unknown
    return value


def _known_sampler(value: Any, name: str) -> Any:
    return value if isinstance(value, str) and ":" in value else choose(value, name, SAMPLER_NAMES)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be a mapping of names to values, got {value!r}")
    return dict(value)


def _multipliers(value: Any, name: str) -> dict[str, float]:
    return {
        part: check_number(factor, f"{name}[{choose(part, f'part of {name}', PARTS)!r}]", low=0.0)
        for part, factor in _mapping(value, name).items()
    }


def _rate(value: Any, name: str) -> float:
    rate = check_number(value, name, low=0.0)
    if rate == 0.0:
        raise InputError(f"{name} must be above 0, got {value}; {_USUAL_RATE} is usual")
    return rate


def _usual_rate(settings: dict[str, Any]) -> float:
    frozen = settings.get("network_options", {}).get("freeze_backbone", False)
    return _TUNING_RATE if is_pretrained(settings.get("network", "mlp")) and not frozen else _USUAL_RATE


def _usual_selection(settings: dict[str, Any]) -> str:
    return _USUAL_SELECTION[settings.get("regression", False)]


def _betas(value: Any, name: str) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InputError(f"{name} must be two numbers such as (0.9, 0.999), got {value!r}")
    return [check_number(beta, name, low=0.0, below=1.0) for beta in value]


def _device(value: Any, name: str) -> str:
    if value != "auto":
        try:
            torch.device(value)  # whether it is there is another question: settings may be made elsewhere
        except (RuntimeError, TypeError):
            raise InputError(
                f"{name} is {value!r}, which is not a valid device; use auto, cpu, cuda or cuda:1"
            ) from None
    return str(value)


def _devices(value: Any, name: str) -> int | str:
    return "auto" if value == "auto" else check_count(value, name, remedy="'auto' takes all GPUs")


def _caching(value: Any, name: str) -> Any:
    if not isinstance(value, bool) and value != "auto":
        raise InputError(f"{name} must be True, False or 'auto', got {value!r}")
    return value


def _share(value: Any, name: str) -> float:
    return check_number(value, name, low=0.0, high=1.0)


Flag = Annotated[bool, _Checked(check_flag, {"type": "boolean"})]
Options = Annotated[dict[str, Any], _Checked(_mapping, {"type": "object"})]
Count = Annotated[int, _count(1)]
CountFromZero = Annotated[int, _count(0)]
NotNegative = Annotated[float, _number()]


# --- the settings -------------------------------------------------------------------------------------

_SPELLINGS = {"optimizer": "optimiser"}


class RunConfig(BaseModel):
    """Settings of one training run, immutable; each is described where it stands.

    Raises
    ------
    InputError
        If a name is unknown (the message has the nearest one) or a value cannot be used.

    Examples
    --------
    >>> RunConfig(algorithm="coral", steps=10).sampler
    'balanced'
    >>> RunConfig(optimizer="sgd").optimiser
    'sgd'
    >>> RunConfig.from_dict({"step": 10})
    Traceback (most recent call last):
    vardass.errors.InputError: unknown setting 'step'; did you mean 'steps'? known: ...
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, arbitrary_types_allowed=True)

    algorithm: Annotated[str, _or_own(ALGORITHM_NAMES, _known_algorithm)] = Field(
        "mmd",
        description=f"How the network is adapted: {', '.join(ALGORITHM_NAMES)}; other sums, such as dann+els or "
        "cdan+e+sdat; or your own as package.module:Name.",
    )
    algorithm_options: Options = Field(
        default_factory=dict,
        description="Options of the algorithm, such as penalty (λ) or kernel; vardass adapt gives mmd and coral "
        "penalty 10, delay 100, a ramp of a fifth of the steps and limit 1.",
    )
    estimator: Annotated[str, _one_of(ESTIMATOR_NAMES)] | None = Field(
        None,
        description="What mmd and coral make of a batch: the V-statistic, which rewards shrinking features (v, the "
        "default); pairs of independent samples only (unbiased), for uniform batches and strata; or each batch against "
        "the feature banks of both domains (reference), for every sampler.",
    )
    contraction: Annotated[float, _Checked(_share, {"type": "number", "minimum": 0.0, "maximum": 1.0})] | None = Field(
        None,
        description="Share, 0 to 1, of the V-statistic's reward for shrinking that unbiased and reference keep; 0 by "
        "default.",
    )
    reference_rows: Count = Field(
        2048,
        description="Rows of each feature bank that estimator reference looks at; of a larger bank so many are drawn "
        "anew for each step.",
    )
    sampler: Annotated[str, _or_own(SAMPLER_NAMES, _known_sampler)] = Field(
        "balanced",
        description=f"How batches of both domains are drawn: {', '.join(SAMPLER_NAMES)}, of which vardass is the "
        "paper's; or your own as package.module:Name. Balanced is the default, as it visits every sample "
        "once an epoch and needs no weights; vardass adapt takes stratified with the option equal=True.",
    )
    sampler_options: Options = Field(default_factory=dict, description="Options of the sampler, such as solver.")
    network: str = Field(
        "mlp",
        description=f"What is trained: {', '.join(NETWORK_NAMES)}; a folder or hub name (owner/name) of a vision model "
        "of transformers; or your own as package.module:Name.",
        json_schema_extra={"examples": [*NETWORK_NAMES, "owner/name", "package.module:Name"]},
    )
    network_options: Options = Field(
        default_factory=dict, description="Options of the network, such as bottleneck, dropout or freeze_backbone."
    )
    regression: Flag = Field(
        False,
        description="Predict numbers instead of classes: the loss is their squared error, in units of the source's "
        "deviation, and models are chosen by R² on held-out source samples. For erm, mmd, coral, dann and arm, without "
        "class alignment.",
    )
    steps: Count = Field(3000, description="Batches trained on; 3,000 in the paper, which tunes a ResNet-18.")
    batch_size: Count = Field(32, description="Source samples in a batch, over all devices together.")
    batch_per_source: Flag = Field(
        False,
        description="batch_size counts samples of each source, as in DomainBed, instead of all sources together: the "
        "sampler uniform-replacement draws so many of each, others batch_size times the sources from their union.",
    )
    target_batch_size: Count | None = Field(None, description="Target samples in a batch; by default batch_size.")
    groups: Annotated[str, _one_of(["classes"])] | None = Field(
        None,
        description="classes: strata of the source are made within its classes; samplers without strata or plan "
        "refuse.",
    )
    class_aligned: Annotated[str, _one_of(["none", *CLASS_SHARES])] = Field(
        "none",
        description="The same classes on both sides of a batch, source samples by label, target samples by the "
        "network's present prediction, renewed at each refresh by a pass over the target: all classes alike (uniform), "
        "or in the predictions' shares (target). Discrepancy and task loss are then those of that mixture of classes. "
        "For samplers with strata; helps where class shares differ, and costs where predictions are poor.",
    )
    class_options: Options = Field(
        default_factory=dict,
        description="Options of class_aligned: start (aligned from the first refresh at or after so many steps, "
        "300), early (aligned already at this step if different class shares explain enough of the discrepancy, off), "
        "explained (how much of it, 0.35), confidence (target samples whose largest probability is lower are left out, "
        "0), floor (least share of a class in parts of 1 / classes, 0.2), smoothing (of target shares towards equal "
        "ones, 0.75).",
    )
    lr: Annotated[float, _Checked(_rate, {"type": "number", "exclusiveMinimum": 0.0})] = Field(
        default_factory=_usual_rate,
        description="Learning rate of all optimisers; by default 1e-3, and DomainBed's 5e-5 where the parameters of a "
        "pretrained network are tuned.",
    )
    lr_schedule: Annotated[str, _one_of(SCHEDULE_NAMES)] = Field(
        "none",
        description="The rate at step i of N is lr times 1 (none), (1 + cos(π i/N)) / 2 (cosine), or TLlib's "
        "(1 + 0.001 i)^-0.75 (inverse).",
    )
    lr_multipliers: Annotated[dict[str, float], _Checked(_multipliers, {"type": "object"})] = Field(
        default_factory=dict, description=f"Further factors of the rates, by part of the network: {', '.join(PARTS)}."
    )
    discriminator_lr: Annotated[float, _Checked(_rate, {"type": "number", "exclusiveMinimum": 0.0})] | None = Field(
        None, description="Learning rate of the discriminator; by default that of the rest. DomainBed draws both."
    )
    weight_decay: NotNegative = Field(0.0, description="Weight decay of all optimisers.")
    discriminator_weight_decay: NotNegative | None = Field(
        None, description="Weight decay of the discriminator; by default that of the rest."
    )
    momentum: Annotated[float, _number(below=1.0)] = Field(0.9, description="Nesterov momentum of SGD.")
    optimiser: Annotated[str, _one_of(["adam", "sgd"])] = Field(
        "adam", description="Optimiser of all parts; optimizer is understood too."
    )
    adam_betas: Annotated[list[float] | None, _Checked(_betas, {"anyOf": [{"type": "array"}, {"type": "null"}]})] = (
        Field(
            None,
            description="Betas of Adam; by default 0.9 and 0.999, and DomainBed's 0.5 and 0.9 for adversaries in "
            "alternating steps.",
        )
    )
    refresh_every: CountFromZero = Field(
        100,
        description="T, steps between refreshes of the strata; 0 never refreshes. 100 in the paper. To give it is to "
        "choose the policy every, unless another one is given too.",
    )
    refresh_policy: Annotated[str, _one_of(POLICY_NAMES)] = Field(
        "growing",
        description="Refresh every T steps; ever less often (growing), which kept all of the reduction of T = 100 with "
        "12 refreshes instead of 20 in 2,000 steps; when the features have drifted, with a bank; or as often as keeps "
        "the strata's variance near that of fresh ones (variance). These three use of T only whether it is 0.",
    )
    refresh_options: Options = Field(
        default_factory=dict,
        description="Options of the refresh policy, such as threshold of drift or first of growing.",
    )
    feature_source: Annotated[str, _one_of(["bank", "full"])] = Field(
        "bank",
        description="Strata are made from a store that the training batches keep up to date (bank), or from a pass "
        "over all samples at each refresh, as in the paper (full).",
    )
    background: Flag = Field(
        False,
        description="Refresh and draw in a thread of their own: training does not wait, and new strata apply a "
        "quarter to a half of T later (at most 64 steps). The run is as repeatable.",
    )
    eval_every: Count = Field(100, description="Steps between evaluations.")
    checkpoint_every: Count = Field(500, description="Steps between checkpoints.")
    eval_batch_size: Count = Field(256, description="Samples in a forward pass without gradient.")
    selection: Annotated[str, _one_of(dict.fromkeys((*SELECTION_NAMES, *REGRESSION_SELECTION_NAMES)))] = Field(
        default_factory=_usual_selection,
        description="By what the model is chosen among the evaluations at full penalty; of those that source accuracy "
        "cannot tell apart the latest. Information maximisation (sure of each target sample, and of all classes in "
        "turn) lost least in benchmarks/results/adaptation.md; in a regression source-r2 is the default. domainbed is "
        "the paper's rule, the first of the highest source accuracies of all evaluations. Only oracle reads target "
        "labels, and is for comparison.",
        json_schema_extra={"default": _USUAL_SELECTION[False]},
    )
    augment: Flag = Field(
        False, description="Augment training images of the source as DomainBed does; those of the target are not."
    )
    augment_target: Flag = Field(False, description="With augment, augment the images of the target too.")
    cache_embeddings: Annotated[
        bool | Literal["auto"], _Checked(_caching, {"anyOf": [{"type": "boolean"}, {"const": "auto"}]})
    ] = Field(
        False,
        description="Compute the outputs of a frozen backbone once and train the rest on them; auto does so where "
        "nothing random comes before them.",
    )
    tensorboard: Flag = Field(False, description="Write the metrics for TensorBoard too.")
    precision: Annotated[str, _one_of(PRECISIONS)] = Field(
        "32-true", description="Precision of the forward pass, by Lightning's names; 16-mixed scales the loss."
    )
    device: Annotated[str, _Checked(_device, {"type": "string"})] = Field(
        "auto", description="Such as cpu or cuda:1; auto is a GPU if there is one."
    )
    devices: Annotated[
        int | Literal["auto"], _Checked(_devices, {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]})
    ] = Field(1, description="Processes that train together, each on a device of its own; auto takes all GPUs.")
    accelerator: Annotated[str, _one_of(["auto", "cpu", "cuda", "gpu", "mps"])] = Field(
        "auto", description="Kind of the devices, where device leaves it open."
    )
    strategy: Annotated[str, _one_of(["auto", "ddp", "ddp_spawn", "ddp_fork"])] = Field(
        "auto",
        description="How Lightning Fabric starts several processes; auto is ddp under torchrun, else ddp_spawn.",
    )
    workers: CountFromZero = Field(0, description="Processes that load samples which are not in memory.")
    seed: CountFromZero = Field(0, description="Determines the whole run.")

    def __init__(self, **settings: Any) -> None:
        settings = _one_spelling(settings)
        if "refresh_every" in settings:
            settings = {"refresh_policy": "every", **settings}
        for name in settings:
            if name not in type(self).model_fields:
                raise unknown("setting", name, type(self).model_fields)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise as_input_error(error) from None

    @model_validator(mode="after")
    def _policy_fits(self) -> RunConfig:
        make_policy(self)
        ClassAligner.check(self)
        return self

    @model_validator(mode="after")
    def _estimator_fits(self) -> RunConfig:
        for name, value in self.loss_options.items():
            known = algorithm_options(self.algorithm)
            if name not in known:
                raise InputError(
                    f"{name}={value!r} is for the discrepancies mmd and coral, got algorithm={self.algorithm!r}; leave "
                    "it out"
                )
            if name in self.algorithm_options:
                raise InputError(
                    f"{name}={value!r} and algorithm_options[{name!r}]={self.algorithm_options[name]!r} are one "
                    "setting; give one"
                )
        told = {**self.algorithm_options, **self.loss_options}
        if "contraction" in told:
            Estimator.of(told.get("estimator", "v"), told["contraction"])
        return self

    @model_validator(mode="after")
    def _regression_fits(self) -> RunConfig:
        for group in ("algorithm_options", "network_options"):
            if "regression" in getattr(self, group):
                raise InputError(f"regression is a setting of its own, got it in {group}; use regression=True")
        known = REGRESSION_SELECTION_NAMES if self.regression else SELECTION_NAMES
        if self.selection not in known:
            raise InputError(
                f"selection={self.selection!r} does not go with regression={self.regression}; use one of "
                f"{', '.join(known)}"
            )
        if not self.regression:
            return self
        check_regression(self.algorithm)
        for name, off in (("groups", None), ("class_aligned", "none")):
            if getattr(self, name) != off:
                raise InputError(
                    f"{name}={getattr(self, name)!r} needs classes, but with regression=True there are none; use "
                    f"{name}={off!r}"
                )
        return self

    @property
    def loss_options(self) -> dict[str, Any]:
        """The estimator and its contraction, where they are given, as options of the algorithm."""
        given = {"estimator": self.estimator, "contraction": self.contraction}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type of a forward pass in mixed precision, or None."""
        return autocast_dtype(self.precision)

    @property
    def pass_options(self) -> dict[str, Any]:
        """Options of a forward pass over many samples, see ``extract_features``."""
        return {
            "batch_size": self.eval_batch_size,
            "num_workers": self.workers,
            "autocast_dtype": self.autocast_dtype,
        }

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return self.model_dump()

    def to_json(self) -> dict[str, Any]:
        """All settings as a file holds them.

        Raises
        ------
        InputError
            If an option is an object that no file can hold, such as a kernel of one's own.
        """
        try:
            settings: dict[str, Any] = json.loads(json.dumps(self.to_dict(), default=_plain_number))
        except TypeError as error:
            raise InputError(
                f"the settings cannot be written to a file: {error}; name it as 'package.module:Name', or run without "
                "a folder (out=None)"
            ) from None
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> RunConfig:
        """Make a configuration from settings by name; those that are absent have their defaults."""
        return cls(**settings)

    @classmethod
    def recommended(cls, **settings: Any) -> RunConfig:
        """Settings of ``vardass adapt``, unless given: chosen on some data sets and measured on others.

        For MMD and CORAL: one sample from each of ``batch_size`` strata of equal size; 100 steps of the task alone, 100
        in which the penalty rises to 3 and the class confusion of the target's predictions to 0.3 (not in a
        regression), and from step 300 on the same classes on both sides of a batch, where the
        sampler can; from step 100 on where class shares explain the discrepancy. Short runs have an eighth of their
        steps in place of 100. Batches of b < 32 have a penalty of 3 b / 32, because finite-batch bias in the loss
        grows as 1 / b. All else is as in ``RunConfig()``, which has
        none of these, as the paper has none. See benchmarks/results/adaptation.md.

        Examples
        --------
        >>> RunConfig.recommended(steps=1000).algorithm_options
        {'penalty': 3.0, 'delay': 100, 'ramp': 100, 'confusion': 0.3}
        >>> RunConfig.recommended().sampler, RunConfig.recommended().sampler_options
        ('stratified', {'equal': True})
        >>> RunConfig.recommended().class_options, RunConfig.recommended(sampler="uniform").class_aligned
        ({'early': 100, 'start': 300}, 'none')
        """
        plain = cls(**settings)
        if "ramp" not in algorithm_options(plain.algorithm):
            return plain
        if "sampler" not in plain.model_fields_set:
            plain = plain.changed(sampler="stratified", sampler_options={"equal": True, **plain.sampler_options})
        early = min(100, plain.steps // 8)
        penalty = 3.0 * min(1.0, plain.batch_size / 32)
        options: dict[str, Any] = {"penalty": penalty, "delay": early, "ramp": early}
        if not plain.regression:
            options["confusion"] = 0.3
        options |= plain.algorithm_options
        usual: dict[str, Any] = {"algorithm_options": options}
        if "class_aligned" not in plain.model_fields_set and ClassAligner.can_align(plain):
            usual |= {
                "class_aligned": "uniform",
                "class_options": {"early": early, "start": 3 * early, **plain.class_options},
            }
        return plain.changed(**usual)

    def changed(self, **settings: Any) -> RunConfig:
        """A copy with other settings; those that were never given follow them, such as the rate the network."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **_one_spelling(settings)})


def _one_spelling(settings: Mapping[str, Any]) -> dict[str, Any]:
    for american, british in _SPELLINGS.items():
        if american in settings and british in settings:
            raise InputError(
                f"{british}={settings[british]!r} and {american}={settings[american]!r} are one setting; give one"
            )
    return {_SPELLINGS.get(name, name): value for name, value in settings.items()}


def _plain_number(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of numpy or torch
        return value.tolist()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def as_input_error(error: ValidationError) -> InputError:
    """The first complaint of pydantic as one line: our own words where a check of ours raised it."""
    first = error.errors(include_url=False)[0]
    ours = first.get("ctx", {}).get("error")
    if isinstance(ours, InputError):
        return ours
    place = ".".join(str(part) for part in first["loc"])
    return InputError(f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}")
