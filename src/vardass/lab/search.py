"""Search spaces: distributions of settings, draws from them, and the spaces of DomainBed and of the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from vardass.adapt.algorithms import algorithm_options
from vardass.adapt.config import Flag
from vardass.data.splits import named_seed
from vardass.errors import InputError
from vardass.lab.yaml_file import Section
from vardass.registry import Registry

__all__ = ["SPACE_NAMES", "Distribution", "draw", "named_space"]

_POWERS = {"uniform": None, "log10_uniform": 10.0, "log2_uniform": 2.0}
_KINDS = (*_POWERS, "choice")
_LARGEST_EXPONENT = 64


def _ends(given: Any, info: ValidationInfo) -> list[float]:
    ends = given if isinstance(given, list | tuple) else []
    if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int | float) for end in ends):
        raise InputError(f"must be two numbers, lowest and highest, got {given!r}; for example [-5, -3.5]")
    low, high = map(float, ends)
    if not low < high:
        raise InputError(f"must be lowest and highest, got {given!r}; change their order")
    if info.field_name != "uniform" and max(-low, high) > _LARGEST_EXPONENT:
        raise InputError(f"must be exponents within ±{_LARGEST_EXPONENT}, got {given!r}; give exponents, not values")
    return [low, high]


def _choices(given: Any) -> list[Any]:
    if not isinstance(given, list | tuple) or not given:
        raise InputError(f"must be a list of values, got {given!r}; for example [0.0, 0.1, 0.5]")
    return list(given)


Ends = Annotated[list[float], BeforeValidator(_ends)]


class Distribution(Section):
    """Values that a search tries: one kind of distribution, written as in a sweep's file."""

    uniform: Ends | None = Field(default=None, description="Uniform between two numbers.")
    log10_uniform: Ends | None = Field(default=None, description="10 to the power of a uniform number between two.")
    log2_uniform: Ends | None = Field(default=None, description="2 to the power of a uniform number between two.")
    choice: Annotated[list[Any], BeforeValidator(_choices)] | None = Field(
        default=None, description="One of these values."
    )
    integer: Flag = Field(default=False, description="Round down to a whole number, as DomainBed does.")
    default: Any = Field(
        default=None,
        description="Value of the first trial under ``first: defaults``; by default that of the settings.",
    )

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Check that exactly one kind is given."""
        super().prepare(given)
        kinds = [key for key in given if key in _KINDS]
        if len(kinds) != 1:
            raise InputError(
                f"needs one of {', '.join(_KINDS)}, got {' and '.join(kinds) or 'none'}; for example "
                "{log10_uniform: [-5, -3.5]}"
            )
        if kinds == ["choice"] and given.get("integer"):
            raise InputError("has choice and integer: true; write whole numbers in choice instead")
        return given

    @property
    def kind(self) -> str:
        """Which of the four it is."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def values(self) -> tuple[Any, ...]:
        """The two ends, as exponents for the logarithmic kinds, or the values to choose from."""
        return tuple(getattr(self, self.kind))

    def at(self, u: float) -> Any:
        """Value at the quantile ``u`` in [0, 1).

        Numbers have six digits, so that they, and names made from them, are the same on all machines.
        """
        if self.kind == "choice":
            return self.values[int(u * len(self.values))]
        low, high = self.values
        value = low + u * (high - low)
        base = _POWERS[self.kind]
        if base is not None:
            value = base**value
        return math.floor(value) if self.integer else float(f"{value:.6g}")

    def extremes(self) -> tuple[Any, ...]:
        """Values that stand for all when they are checked: both ends, or each choice, and the default."""
        found = self.values if self.kind == "choice" else (self.at(0.0), self.at(1.0 - 2.0**-40))
        return found if self.default is None else (*found, self.default)


def draw(space: Mapping[str, Distribution], *, seed: int, repeat: int, search: int) -> dict[str, Any]:
    """Draw a value of each key, which depends on (seed, repeat, search, key) and nothing else.

    So all samplers and algorithms try the same values, and a further key or a longer search changes no other draw.
    """
    # 53 bits: a quantile below 1
    return {key: each.at((named_seed("draw", seed, repeat, search, key) >> 9) / 2**53) for key, each in space.items()}


def _log10(low: float, high: float, default: Any = None) -> Distribution:
    return Distribution(log10_uniform=[low, high], default=default)


def _log2(low: float, high: float, default: Any = None) -> Distribution:
    return Distribution(log2_uniform=[low, high], integer=True, default=default)


_RESNET = {
    "lr": _log10(-5.0, -3.5, 5e-5),
    "weight_decay": _log10(-6.0, -2.0, 0.0),
    "network_options.dropout": Distribution(choice=[0.0, 0.1, 0.5], default=0.0),
}
# of images of 28 pixels in DomainBed; weight decay is 0 there
_SMALL = {"lr": _log10(-4.5, -2.5, 1e-3)}
_PENALTY = {"algorithm_options.penalty": _log10(-1.0, 1.0, 1.0)}
# The paper's batch size and λ, for all algorithms that have one, beside DomainBed's ranges for images of 224 pixels and
# ResNets; "-small" has DomainBed's for small images and small networks.
SPACES: Registry[dict[str, Distribution]] = Registry(
    "space",
    {
        "paper": {**_RESNET, "batch_size": _log2(3.0, 7.0, 32), **_PENALTY},
        "paper-small": {**_SMALL, "batch_size": _log2(3.0, 7.0, 64), **_PENALTY},
        "domainbed": {**_RESNET, "batch_size": _log2(3.0, 5.5, 32), **_PENALTY},
        "domainbed-small": {**_SMALL, "batch_size": _log2(3.0, 9.0, 64), **_PENALTY},
    },
)
_DOMAINBED_ADVERSARY = {"algorithm_options.penalty": _log10(-2.0, 2.0, 1.0)}
_ADVERSARY = {"algorithm_options.discriminator_width": _log2(6.0, 10.0)}
# the paper does not say what it searched: values around those that SDAT's authors recommend, and those of ELS's script
_ADDITIONS = {
    "sdat": {"algorithm_options.sharpness": Distribution(choice=[0.02, 0.05, 0.1], default=0.05)},
    "els": {
        "algorithm_options.smoothing": Distribution(choice=[0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.45, 0.5], default=0.1)
    },
}
# DomainBed's form of DANN alone has these
_ALTERNATING = {
    "algorithm_options.discriminator_depth": Distribution(choice=[3, 4, 5]),
    "algorithm_options.discriminator_dropout": Distribution(choice=[0.0, 0.1, 0.5]),
    "algorithm_options.d_steps_per_g_step": _log2(0.0, 3.0),
    "algorithm_options.grad_penalty": _log10(-2.0, 1.0),
    "optimiser_options.betas": Distribution(choice=[[0.0, 0.9], [0.5, 0.9]], default=[0.5, 0.9]),
    "optimiser_options.discriminator_weight_decay": _log10(-6.0, -2.0, 0.0),
}

SPACE_NAMES = tuple(SPACES)


def named_space(name: str, algorithm: str = "erm", options: Mapping[str, Any] | None = None) -> dict[str, Distribution]:
    """Space of DomainBed or of the paper for an algorithm, with a dot for options; only its own options are in it.

    ARM's batch has 8 samples of each source. DomainBed has no CDAN, which here searches as DANN does.
    """
    space = dict(SPACES.find(name))
    known = algorithm_options(algorithm)
    base, *additions = algorithm.split("+")
    if base == "arm":
        space["batch_size"] = Distribution(choice=[8], default=8)
        space["batch_per_source"] = Distribution(choice=[True], default=True)
    if base in ("dann", "cdan"):
        space.update(_ADVERSARY)
        if name.startswith("domainbed"):
            space.update(_DOMAINBED_ADVERSARY)
    for addition in additions:
        space.update(_ADDITIONS.get(addition, {}))
    if {**known, **(options or {})}.get("adversary") == "alternating":
        space.update(_ALTERNATING)
        space["optimiser_options.discriminator_lr"] = space["lr"]  # the range is the same, the draw is not
    return {
        key: each
        for key, each in space.items()
        if not key.startswith("algorithm_options.") or key.partition(".")[2] in known
    }
