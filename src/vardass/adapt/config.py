"""The settings of a run: one model behind the Python API, YAML, command-line options and ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import core_schema

from vardass.adapt.algorithms import ALGORITHM_NAMES, algorithm_options
from vardass.adapt.algorithms.base import check_number
from vardass.adapt.batches import SAMPLER_NAMES
from vardass.adapt.evaluation import SELECTION_NAMES
from vardass.adapt.networks import NETWORK_NAMES
from vardass.adapt.optimisation import PARTS, PRECISIONS, SCHEDULE_NAMES, autocast_dtype
from vardass.adapt.refreshing import POLICY_NAMES, make_policy
from vardass.errors import InputError
from vardass.validate import check_count, choose, unknown

__all__ = ["RunConfig", "as_input_error"]


def _count(low: int) -> BeforeValidator:
    """Whole numbers from ``low``; those of numpy too, but no booleans, texts or fractions."""
    return BeforeValidator(lambda value, info: check_count(value, info.field_name, low=low))


def _number(**bounds: float) -> BeforeValidator:
    return BeforeValidator(lambda value, info: check_number(value, info.field_name, **{"low": 0.0, **bounds}))


class _OneOf:
    """One of ``names``, which a JSON schema lists."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        def check(value: Any, info: Any) -> str:
            return str(choose(value, info.field_name, self.names))

        return core_schema.with_info_before_validator_function(check, core_schema.str_schema())

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.names)}


def _flag(value: Any, info: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{info.field_name} must be true or false, got {value!r}")
    return value


def _mapping(value: Any, info: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{info.field_name} must be a mapping of names to values, got {value!r}")
    return dict(value)


def _known_algorithm(name: Any) -> Any:
    algorithm_options(name)  # says so if the name is unknown
    return name


def _rates(factors: dict[str, Any]) -> dict[str, float]:
    return {
        name: check_number(factor, f"lr_multipliers[{choose(name, 'part of lr_multipliers', PARTS)!r}]", low=0.0)
        for name, factor in factors.items()
    }


def _betas(value: Any) -> Any:
    if value is None:
        return None
    betas = list(value) if isinstance(value, list | tuple) else []
    if len(betas) != 2:
        raise InputError(f"adam_betas must be two numbers such as (0.9, 0.999), got {value!r}")
    return [check_number(beta, "adam_betas", low=0.0, below=1.0) for beta in betas]


def _positive(value: float) -> float:
    if value == 0.0:
        raise InputError(f"lr must be above 0, got {value}; 1e-3 is usual")
    return value


def _devices(value: Any) -> Any:
    return value if value == "auto" else check_count(value, "devices", remedy="'auto' takes all GPUs")


def _caching(value: Any) -> Any:
    if not isinstance(value, bool) and value != "auto":
        raise InputError(f"cache_embeddings must be True, False or 'auto', got {value!r}")
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]
Options = Annotated[dict[str, Any], BeforeValidator(_mapping)]
Count = Annotated[int, _count(1)]
CountFromZero = Annotated[int, _count(0)]
NotNegative = Annotated[float, _number()]


class RunConfig(BaseModel):
    """Settings of one training run, immutable; each is described where it stands.

    Raises
    ------
    InputError
        If a name is unknown (the message has the nearest one) or a value cannot be used.

    Examples
    --------
    >>> RunConfig(algorithm="coral", steps=10).sampler
    'vardass'
    >>> RunConfig.from_dict({"step": 10})
    Traceback (most recent call last):
    vardass.errors.InputError: unknown setting 'step'; did you mean 'steps'? known: ...
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, arbitrary_types_allowed=True)

    algorithm: Annotated[str, AfterValidator(_known_algorithm)] = Field(
        "mmd", description=f"{', '.join(ALGORITHM_NAMES)}, or other sums, see ``make_algorithm``."
    )
    algorithm_options: Options = Field(
        default_factory=dict, description="Options of the algorithm, such as its penalty."
    )
    sampler: Annotated[str, _OneOf(*SAMPLER_NAMES)] = Field(
        "vardass",
        description="How batches of both domains are drawn, see ``make_sampler``; ``vardass`` is the paper's.",
    )
    sampler_options: Options = Field(default_factory=dict, description="Options of the sampler, such as its solver.")
    network: str = Field(
        "mlp",
        description=f"{', '.join(NETWORK_NAMES)}, a transformers backbone (folder or owner/name), or "
        "package.module:Class, see ``make_network``.",
    )
    network_options: Options = Field(default_factory=dict, description="Options of the network, such as its widths.")
    steps: Count = Field(3000, description="Batches trained on; 3,000 in the paper.")
    batch_size: Count = Field(32, description="Samples of the source in a batch, over all devices together.")
    target_batch_size: Count | None = Field(None, description="Samples of the target, if not as many.")
    groups: Annotated[str, _OneOf("classes")] | None = Field(
        None,
        description="``classes``: strata of the source are made within its classes; samplers without strata or plan "
        "refuse.",
    )
    lr: Annotated[NotNegative, AfterValidator(_positive)] = Field(1e-3, description="Learning rate of all optimisers.")
    lr_schedule: Annotated[str, _OneOf(*SCHEDULE_NAMES)] = Field(
        "none",
        description="The rate at step i of N is lr times 1, (1 + cos(π i/N)) / 2, or TLlib's (1 + 0.001 i)^-0.75.",
    )
    lr_multipliers: Annotated[Options, AfterValidator(_rates)] = Field(
        default_factory=dict,
        description="Further factors of the rates of featuriser, bottleneck, head, discriminator or context.",
    )
    weight_decay: NotNegative = Field(0.0, description="Weight decay of all optimisers.")
    momentum: Annotated[float, _number(below=1.0)] = Field(0.9, description="Momentum of SGD.")
    optimiser: Annotated[str, _OneOf("adam", "sgd")] = Field(
        "adam", description="Optimiser; SGD has Nesterov momentum."
    )
    adam_betas: Annotated[list[float] | None, BeforeValidator(_betas)] = Field(
        None,
        description="Of Adam; by default (0.9, 0.999), or DomainBed's (0.5, 0.9) for adversaries in alternating steps.",
    )
    refresh_every: CountFromZero = Field(
        100, description="T, steps between refreshes of strata; 0 never refreshes. 100 in the paper."
    )
    refresh_policy: Annotated[str, _OneOf(*POLICY_NAMES)] = Field(
        "every",
        description="Refresh every T steps, ever less often, or when the features have drifted or the strata's "
        "variance has risen (both with a bank); these three use of T only whether it is 0.",
    )
    refresh_options: Options = Field(
        default_factory=dict,
        description="Options of ``RefreshEvery``, ``GrowingRefresh``, ``DriftRefresh`` or ``VarianceRefresh``.",
    )
    feature_source: Annotated[str, _OneOf("bank", "full")] = Field(
        "bank",
        description="Strata are made from a store that the training batches keep up to date, or from a pass over all "
        "samples at each refresh, as in the paper.",
    )
    background: Flag = Field(
        False,
        description="Refresh and draw in a process of their own, see ``BackgroundSampler``: training does not wait, "
        "and new strata apply a quarter to a half of T later (at most 64 steps). The run is as repeatable.",
    )
    eval_every: Count = Field(100, description="Steps between evaluations.")
    checkpoint_every: Count = Field(500, description="Steps between checkpoints.")
    eval_batch_size: Count = Field(256, description="Samples in a forward pass without gradient.")
    selection: Annotated[str, _OneOf(*SELECTION_NAMES)] = Field(
        "source-accuracy", description="Validator by which the model is chosen, see ``vardass.adapt.evaluation``."
    )
    augment: Flag = Field(False, description="Augment training images as DomainBed does.")
    cache_embeddings: Annotated[bool | Literal["auto"], BeforeValidator(_caching)] = Field(
        False,
        description="Compute the outputs of a frozen backbone once and train the rest on them; ``auto`` does so where "
        "nothing random comes before them.",
    )
    tensorboard: Flag = Field(False, description="Write the metrics for TensorBoard too.")
    precision: Annotated[str, _OneOf(*PRECISIONS)] = Field(
        "32-true", description="Precision of the forward pass, by Lightning's names. ``16-mixed`` scales the loss."
    )
    device: str = Field("auto", description="auto, cpu, cuda or ``cuda:1``; ``auto`` is a GPU if there is one.")
    devices: Annotated[int | Literal["auto"], BeforeValidator(_devices)] = Field(
        1,
        description="Processes that train together, each on a device of its own, see ``vardass.adapt.distributed``. "
        "``auto`` takes all GPUs.",
    )
    accelerator: Annotated[str, _OneOf("auto", "cpu", "cuda", "gpu", "mps")] = Field(
        "auto", description="Kind of the devices, where ``device`` leaves it open."
    )
    strategy: Annotated[str, _OneOf("auto", "ddp", "ddp_spawn", "ddp_fork")] = Field(
        "auto",
        description="How Lightning Fabric starts several processes; ``auto`` is ``ddp`` under torchrun, else "
        "``ddp_spawn``.",
    )
    workers: CountFromZero = Field(0, description="Processes that load samples which are not in memory.")
    seed: CountFromZero = Field(0, description="Determines the whole run.")

    def __init__(self, **settings: Any) -> None:
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
        return self

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type of a forward pass in mixed precision, or None."""
        return autocast_dtype(self.precision)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return self.model_dump()

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> RunConfig:
        """Make a configuration from settings by name; those that are absent have their defaults."""
        return cls(**settings)

    def changed(self, **settings: Any) -> RunConfig:
        """A copy with other settings."""
        return type(self)(**{**self.to_dict(), **settings})


def as_input_error(error: ValidationError) -> InputError:
    """The first complaint of pydantic as one line: our own words where a check of ours raised it."""
    first = error.errors(include_url=False)[0]
    ours = first.get("ctx", {}).get("error")
    if isinstance(ours, InputError):
        return ours
    place = ".".join(str(part) for part in first["loc"])
    return InputError(f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}")
