"""The settings of a run: one model behind the Python API, YAML, command-line options and ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal

import torch

from vardass.errors import InputError, needs_extra

with needs_extra("adapt"):
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from vardass.adapt.algorithms import ALGORITHM_NAMES, algorithm_options
from vardass.adapt.algorithms.registry import find_algorithm
from vardass.adapt.devices import check_device
from vardass.adapt.networks import NETWORK_NAMES, pretrained_source
from vardass.adapt.optimisation import PRECISIONS, SCHEDULE_NAMES, check_optimiser_options
from vardass.adapt.selection import REGRESSION_SELECTION_NAMES, SELECTION_NAMES
from vardass.adapt.strata_updater import ClassAligner
from vardass.processes import count_cpus
from vardass.samplers.registry import SAMPLER_NAMES
from vardass.validate import check_count, check_flag, check_number, choose, unknown

_USUAL_RATE, _TUNING_RATE = 1e-3, 5e-5
_SELECTIONS = tuple(dict.fromkeys((*SELECTION_NAMES, *REGRESSION_SELECTION_NAMES)))
_USUAL_SELECTION = {False: "information-maximisation", True: "source-r2"}

# --- kinds of settings --------------------------------------------------------------------------------


def _checked(check: Callable[..., Any], **bounds: Any) -> BeforeValidator:
    """``check(value, name, **bounds)`` returns what a setting holds, or raises an InputError."""
    return BeforeValidator(lambda value, info: check(value, info.field_name, **bounds))


def _own_or_known(value: Any, name: str, *, known: Sequence[str]) -> Any:
    return value if isinstance(value, str) and ":" in value else choose(value, name, known)


def _known_algorithm(value: Any, name: str) -> Any:
    algorithm_options(value)  # refuses an unknown one
    return value


def _usual_rate(settings: dict[str, Any]) -> float:
    frozen = settings.get("network_options", {}).get("freeze_backbone", False)
    tuned = pretrained_source(settings.get("network", "mlp")) is not None and not frozen
    return _TUNING_RATE if tuned else _USUAL_RATE


def _count_or_name(value: Any, name: str, *, names: Sequence[str], low: int, remedy: str = "") -> int | str:
    if not isinstance(value, str):
        return check_count(value, name, low=low, remedy=remedy)
    if value not in names:
        raise InputError(f"{name} must be a whole number or {' or '.join(map(repr, names))}, got {value!r}", field=name)
    return value


def _caching(value: Any, name: str) -> Any:
    if not isinstance(value, bool) and value != "auto":
        raise InputError(f"{name} must be True, False or 'auto', got {value!r}", field=name)
    return value


def _one_of(*names: str) -> BeforeValidator:
    """One of ``names``, in the schema too; the message for another has the nearest."""
    known: Any = Literal[names]
    return BeforeValidator(lambda value, info: choose(value, info.field_name, names), json_schema_input_type=known)


def _text(*names: str) -> dict[str, Any]:
    """For editors: a text, such as one of ``names`` or the user's own class."""
    return {"examples": [*names, "package.module:Name"]}


Flag = Annotated[bool, _checked(check_flag)]
Options = dict[str, Any]
Count = Annotated[int, Field(ge=1), _checked(check_count)]
CountFromZero = Annotated[int, Field(ge=0), _checked(check_count, low=0)]


# --- the settings -------------------------------------------------------------------------------------


class RunConfig(BaseModel):
    """Settings of one training run, immutable; each field has a description.

    Examples
    --------
    >>> RunConfig(algorithm="coral", steps=10).sampler
    'balanced'
    >>> RunConfig(step=10)
    Traceback (most recent call last):
    vardass.errors.InputError: unknown setting 'step'; did you mean 'steps'? known: ...
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, arbitrary_types_allowed=True)

    algorithm: Annotated[str, _checked(_known_algorithm)] = Field(
        "mmd",
        description=f"How the network is adapted: {', '.join(ALGORITHM_NAMES)}; others with +els (smoothed domain "
        "labels), +e (entropy weights) or +sdat (flat minima), such as dann+els; or your own as package.module:Name.",
        json_schema_extra=_text(*ALGORITHM_NAMES),
    )
    algorithm_options: Options = Field(
        default_factory=dict,
        description="Options of the algorithm. For mmd and coral: penalty (λ), delay (steps of task loss only), ramp "
        "(steps over which λ then rises), confusion (weight of the target's class confusion), kernel or preset, "
        "and stream_weights, which weighs batches of samplers without weights by running statistics. vardass adapt "
        "uses penalty 3 (less for batches below 32), delay 100, ramp 100 and confusion 0.3.",
    )
    sampler: Annotated[str, _checked(_own_or_known, known=SAMPLER_NAMES)] = Field(
        "balanced",
        description=f"How batches of both domains are drawn: {', '.join(SAMPLER_NAMES)}; or your own as "
        "package.module:Name. balanced visits each sample once per epoch and needs no weights; vardass adapt uses "
        "stratified with the option equal=True.",
        json_schema_extra=_text(*SAMPLER_NAMES),
    )
    sampler_options: Options = Field(default_factory=dict, description="Options of the sampler, such as solver.")
    network: str = Field(
        "mlp",
        description=f"What is trained: {', '.join(NETWORK_NAMES)}; a folder or hub name (owner/name) of a vision model "
        "of transformers; or your own as package.module:Name.",
        json_schema_extra=_text(*NETWORK_NAMES, "owner/name"),
    )
    network_options: Options = Field(
        default_factory=dict, description="Options of the network, such as bottleneck, dropout or freeze_backbone."
    )
    regression: Flag = Field(
        False,
        description="Predict numbers instead of classes. The loss is their squared error, in units of the source's "
        "standard deviation. For erm, mmd, coral, dann and arm.",
    )
    steps: Count = Field(3000, description="Batches to train on.")
    batch_size: Count = Field(32, description="Source samples in a batch, over all devices together.")
    batch_per_source: Flag = Field(
        False,
        description="batch_size is per source domain, as in DomainBed, not for all sources together. The sampler "
        "uniform-replacement draws batch_size of each; others draw (batch_size x number of sources) from their union.",
    )
    target_batch_size: Count | None = Field(None, description="Target samples in a batch; batch_size by default.")
    class_shares: Annotated[str, _one_of("none", "source", "uniform")] = Field(
        "none",
        description="Shares of the classes in each batch. source: strata of the source are made within its classes. "
        "uniform: batches of both domains have the same classes, with equal shares; target classes are the network's "
        "predictions, updated at each refresh. uniform helps if class shares differ between the domains, and hurts "
        "if predictions are poor. For samplers with strata.",
    )
    class_options: Options = Field(
        default_factory=dict,
        description="Options of class_shares uniform, with defaults: start (step of the first alignment, 300), early "
        "(earlier step of alignment if class shares explain enough of the discrepancy, off), explained (how much is "
        "enough, 0.35), confidence (target samples with a lower largest probability are left out, 0), floor "
        "(minimum share of a class as a fraction of 1 / classes, 0.2).",
    )
    lr: Annotated[float, Field(gt=0.0), _checked(check_number, low=0.0)] = Field(
        default_factory=_usual_rate,
        description="Learning rate; 1e-3 by default, or DomainBed's 5e-5 if a pretrained network is fine-tuned.",
    )
    lr_schedule: Annotated[str, _one_of(*SCHEDULE_NAMES)] = Field(
        "none",
        description="The rate at step i of N is lr times 1 (none), (1 + cos(π i/N)) / 2 (cosine), or TLlib's "
        "(1 + 0.001 i)^-0.75 (inverse).",
    )
    weight_decay: Annotated[float, Field(ge=0.0), _checked(check_number, low=0.0)] = Field(
        0.0, description="Weight decay of all parameters."
    )
    optimiser: Annotated[str, _one_of("adam", "sgd")] = Field("adam", description="Optimiser of all parameters.")
    optimiser_options: Options = Field(
        default_factory=dict,
        description="Options of the optimiser: betas of adam (0.9 and 0.999; DomainBed's 0.5 and 0.9 for adversaries "
        "in alternating steps), momentum of sgd (Nesterov's, 0.9), lr_multipliers (factors of the rate by part of the "
        "network: featuriser, bottleneck, head, discriminator, context), discriminator_lr and "
        "discriminator_weight_decay (by default as for the network).",
    )
    refresh_every: Annotated[
        int | Literal["growing"], _checked(_count_or_name, names=("growing",), low=0, remedy="0 never refreshes")
    ] = Field(
        "growing",
        description="When to recompute strata: a number of steps between refreshes (0: never), or growing: less "
        "and less often, 12 times in 2,000 steps.",
    )
    feature_source: Annotated[str, _one_of("bank", "full")] = Field(
        "bank",
        description="Features that strata are made from: bank stores those of the training batches; full makes a "
        "pass over all samples at each refresh.",
    )
    eval_every: Count = Field(100, description="Steps between evaluations.")
    checkpoint_every: Count = Field(500, description="Steps between checkpoints.")
    eval_batch_size: Count = Field(256, description="Batch size of forward passes without gradient.")
    selection: Annotated[str, _one_of(*_SELECTIONS)] = Field(
        default_factory=lambda settings: _USUAL_SELECTION[settings.get("regression", False)],
        description="Score by which the model is chosen among the evaluations at full penalty. "
        "information-maximisation: confident predictions that cover all classes; in a regression source-r2 is the "
        "default. domainbed: the first of the highest source accuracies. Only oracle reads target labels, for "
        "comparison.",
        json_schema_extra={"default": _USUAL_SELECTION[False]},
    )
    augment: Annotated[str, _one_of("none", "source", "both")] = Field(
        "none", description="Augment training images as DomainBed does: those of the source, or of both domains."
    )
    cache_embeddings: Annotated[bool | Literal["auto"], _checked(_caching)] = Field(
        False,
        description="Compute the outputs of a frozen backbone once and train the rest on them; auto does so if "
        "no augmentation or other randomness precedes them.",
    )
    tensorboard: Flag = Field(False, description="Also write metrics for TensorBoard.")
    precision: Annotated[str, _one_of(*PRECISIONS)] = Field(
        "32-true", description="Precision of the forward pass, with Lightning's names; 16-mixed scales the loss."
    )
    device: Annotated[str, _checked(check_device)] = Field(
        "auto", description="For example cpu or cuda:1; auto is a GPU if available, else the CPU."
    )
    devices: Annotated[
        int | Literal["auto"], _checked(_count_or_name, names=("auto",), low=1, remedy="'auto' takes all GPUs")
    ] = Field(
        1, description="Number of training processes, each on its own GPU (or all on the CPU); auto uses all GPUs."
    )
    workers: CountFromZero = Field(0, description="DataLoader workers for samples that are not in memory.")
    seed: CountFromZero = Field(0, description="Random seed; it determines the whole run.")

    def __init__(self, **settings: Any) -> None:
        for name in settings:
            if name not in type(self).model_fields:
                raise unknown("setting", name, type(self).model_fields)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise as_input_error(error) from None

    @model_validator(mode="after")
    def _settings_fit(self) -> RunConfig:
        ClassAligner.check(self)
        check_optimiser_options(self.optimiser, self.optimiser_options)
        for group in ("algorithm_options", "network_options"):
            if "regression" in getattr(self, group):
                raise InputError(
                    f"regression is a setting of its own, got it in {group}; use regression=True", field=group
                )
        known = REGRESSION_SELECTION_NAMES if self.regression else SELECTION_NAMES
        if self.selection not in known:
            raise InputError(
                f"selection={self.selection!r} is incompatible with regression={self.regression}; use one of "
                f"{', '.join(known)}",
                field="selection",
            )
        if self.regression:
            find_algorithm(self.algorithm).check_regression()
            if self.class_shares != "none":
                raise InputError(
                    f"class_shares={self.class_shares!r} needs classes, but with regression=True there are none; use "
                    "class_shares='none'",
                    field="class_shares",
                )
        return self

    @classmethod
    def checked(cls, name: str, value: Any) -> Any:
        """``value`` converted and checked as the setting ``name``, without checks against other settings."""
        try:
            return getattr(_alone(choose(name, "setting", cls.model_fields))(**{name: value}), name)
        except ValidationError as error:
            raise as_input_error(error) from None

    def autocast(self, device: torch.device) -> torch.autocast:
        """Context in which a forward pass has the precision of the run."""
        half = PRECISIONS[self.precision]
        return torch.autocast(device.type, dtype=half or torch.bfloat16, enabled=half is not None)

    @property
    def pass_options(self) -> dict[str, Any]:
        """Options of a forward pass over many samples, see ``extract_features``."""
        return {
            "batch_size": self.eval_batch_size,
            "num_workers": min(self.workers, count_cpus()),  # the same results, whatever the number
            "autocast_dtype": PRECISIONS[self.precision],
        }

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return self.model_dump()

    def to_json(self) -> dict[str, Any]:
        """All settings in a form that can be written as JSON."""
        try:
            settings: dict[str, Any] = json.loads(json.dumps(self.to_dict(), default=_plain_number))
        except TypeError as error:
            raise InputError(
                f"the settings cannot be written to a file: {error}; name it as 'package.module:Name', or run without "
                "a folder (out=None)"
            ) from None
        return settings

    @classmethod
    def recommended(cls, **settings: Any) -> RunConfig:
        """Settings of ``vardass adapt``, unless given: chosen on some data sets and measured on others.

        For MMD and CORAL: one sample from each of ``batch_size`` strata of equal size. After 100 steps of task loss
        only, the penalty rises to 3 over 100 steps, and (not in a regression) the weight of the target's class
        confusion to 0.3. From step 300 on both sides of a batch have the same classes, if the sampler supports it;
        from step 100 on if class shares explain the discrepancy. Runs below 800 steps use an eighth of their steps
        instead of 100. Batches of b < 32 have a penalty of 3 b / 32, because finite-batch bias in the loss grows as
        1 / b. All else is as in ``RunConfig()``, which like the paper has none of these. See
        benchmarks/results/adaptation.md.

        Examples
        --------
        >>> RunConfig.recommended(steps=1000).algorithm_options
        {'penalty': 3.0, 'delay': 100, 'ramp': 100, 'confusion': 0.3}
        >>> RunConfig.recommended().sampler, RunConfig.recommended().sampler_options
        ('stratified', {'equal': True})
        >>> RunConfig.recommended().class_options, RunConfig.recommended(sampler="uniform").class_shares
        ({'early': 100, 'start': 300}, 'none')
        """
        plain = cls(**settings)
        if "ramp" not in algorithm_options(plain.algorithm):
            return plain
        early = min(100, plain.steps // 8)
        penalty = 3.0 * min(1.0, plain.batch_size / 32)
        options: dict[str, Any] = {"penalty": penalty, "delay": early, "ramp": early}
        if not plain.regression:
            options["confusion"] = 0.3
        usual: dict[str, Any] = {"algorithm_options": {**options, **plain.algorithm_options}}
        if "sampler" not in plain.model_fields_set:
            usual |= {"sampler": "stratified", "sampler_options": {"equal": True, **plain.sampler_options}}
        if "class_shares" not in plain.model_fields_set:
            aligned = {"early": early, "start": 3 * early, **plain.class_options}
            with suppress(InputError):  # where the sampler or the refreshes cannot have aligned classes
                return plain.changed(**usual, class_shares="uniform", class_options=aligned)
        return plain.changed(**usual)

    def changed(self, **settings: Any) -> RunConfig:
        """A copy with other settings; defaults that depend on them, such as ``lr`` on the network, are recomputed."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **settings})


@cache
def _alone(name: str) -> type[BaseModel]:
    """A model of one setting."""
    field = RunConfig.model_fields[name]
    return create_model(name, **{name: (field.annotation, field)})  # type: ignore[call-overload,no-any-return]


def _plain_number(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of numpy or torch
        return value.tolist()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")


def as_input_error(error: ValidationError) -> InputError:
    """The first complaint of pydantic as one line: our own words where a check of ours raised it."""
    first = error.errors(include_url=False)[0]
    ours = first.get("ctx", {}).get("error")
    if isinstance(ours, InputError):
        return ours
    place = ".".join(str(part) for part in first["loc"])
    return InputError(f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}", field=place)
