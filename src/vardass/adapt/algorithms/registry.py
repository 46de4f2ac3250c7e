"""Algorithms by name."""

from __future__ import annotations

import inspect
from typing import Any

from vardass.adapt.algorithms.arm import ARM
from vardass.adapt.algorithms.base import Algorithm
from vardass.adapt.algorithms.cdan import CDAN
from vardass.adapt.algorithms.coral import CORAL
from vardass.adapt.algorithms.dann import DANN
from vardass.adapt.algorithms.erm import ERM
from vardass.adapt.algorithms.mcc import MCC
from vardass.adapt.algorithms.mmd import MMD
from vardass.adapt.networks import Network
from vardass.errors import InputError
from vardass.validate import unknown

__all__ = ["ALGORITHM_NAMES", "algorithm_options", "make_algorithm"]

_CLASSES: dict[str, type[Algorithm]] = {kind.name: kind for kind in (ERM, MMD, CORAL, DANN, CDAN, ARM, MCC)}
_ADDITIONS: dict[str, tuple[str, Any]] = {
    "sdat": ("sharpness", 0.05),
    "els": ("smoothing", 0.1),
    "e": ("entropy", True),
}

ALGORITHM_NAMES = ("erm", "mmd", "coral", "dann", "cdan", "cdan+sdat", "cdan+els", "arm", "mcc")
"""The paper's nine; other sums such as ``"dann+els"`` or ``"cdan+e+sdat"`` are known too."""


def make_algorithm(name: str, network: Network, num_classes: int, **options: Any) -> Algorithm:
    """Make an algorithm from its name.

    Parameters
    ----------
    name : str
        One of ``ALGORITHM_NAMES``, or any algorithm with additions: ``+sdat`` sets ``sharpness=0.05`` (0.02
        is recommended for Office-Home), ``+els`` sets ``smoothing=0.1``, ``+e`` sets ``entropy=True``. The
        paper does not say which values it used. Options that are given come first.
    network : Network
        Trained in place.
    num_classes : int
        At least 2.
    **options
        Of the algorithm, see its class and ``algorithm_options``.

    Raises
    ------
    InputError
        If the name or an option is unknown (the message names the nearest) or a value is not usable.
    """
    defaults = algorithm_options(name)
    for option in options:
        if option not in defaults:
            raise unknown(f"option of algorithm {name!r}:", option, defaults)
    base, additions = _parse(name)
    return _CLASSES[base](network, num_classes, **{**additions, **options})


def algorithm_options(name: str) -> dict[str, Any]:
    """Return the options of an algorithm and their defaults."""
    base, additions = _parse(name)
    return {**_defaults(_CLASSES[base]), **additions}


def _defaults(kind: type[Algorithm]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parent in reversed(kind.__mro__):
        if issubclass(parent, Algorithm) and "__init__" in vars(parent):
            parameters = inspect.signature(parent).parameters.values()
            found.update({p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY})
    return found


def _parse(name: str) -> tuple[str, dict[str, Any]]:
    base, *additions = str(name).split("+")
    if base not in _CLASSES or any(addition not in _ADDITIONS for addition in additions):
        raise unknown("algorithm", name, ALGORITHM_NAMES)
    chosen = dict(_ADDITIONS[addition] for addition in additions)
    for option in chosen:
        if option not in _defaults(_CLASSES[base]):
            raise InputError(f"algorithm {name!r} cannot be: {base!r} has no option {option!r}; use 'cdan' or 'dann'")
    return base, chosen
