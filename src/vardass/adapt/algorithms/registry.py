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
from vardass.validate import import_by_name, unknown

__all__ = ["ALGORITHM_NAMES", "algorithm_options", "algorithm_uses_target", "check_regression", "make_algorithm"]

_CLASSES: dict[str, type[Algorithm]] = {kind.name: kind for kind in (ERM, MMD, CORAL, DANN, CDAN, ARM, MCC)}
_ADDITIONS: dict[str, tuple[str, Any]] = {
    "sdat": ("sharpness", 0.05),
    "els": ("smoothing", 0.1),
    "e": ("entropy", True),
}

ALGORITHM_NAMES = ("erm", "mmd", "coral", "dann", "cdan", "cdan+sdat", "cdan+els", "arm", "mcc")
"""The paper's nine; other sums such as ``"dann+els"`` or ``"cdan+e+sdat"`` are known too."""


def make_algorithm(algorithm: str | type[Algorithm], network: Network, num_classes: int, **options: Any) -> Algorithm:
    """Make an algorithm from its name.

    Parameters
    ----------
    algorithm : str or subclass of Algorithm
        One of ``ALGORITHM_NAMES``; any algorithm with additions: ``+sdat`` sets ``sharpness=0.05`` (0.02
        is recommended for Office-Home), ``+els`` sets ``smoothing=0.1``, ``+e`` sets ``entropy=True``, where the
        paper does not say which values it used; or your own, as a class or as ``"package.module:Name"``.
    network : Network
        Trained in place.
    num_classes : int
        At least 2.
    **options
        Of the algorithm, see its class and ``algorithm_options``. They come before what an addition sets.

    Raises
    ------
    InputError
        If the name or an option is unknown (the message names the nearest) or a value is not usable.

    Examples
    --------
    >>> from vardass.adapt import make_network
    >>> rule = make_algorithm("coral", make_network("mlp", (3,), 2, hidden=(4,)), 2, penalty=0.5)
    >>> rule.name, rule.penalty
    ('coral', 0.5)
    """
    kind, additions = _parse(algorithm)
    defaults = _defaults(kind)
    for option in options:
        if option not in defaults:
            shown = algorithm if isinstance(algorithm, str) else kind.__name__
            raise unknown(f"option of algorithm {shown!r}:", option, defaults)
    return kind(network, num_classes, **{**additions, **options})


def algorithm_options(algorithm: str | type[Algorithm]) -> dict[str, Any]:
    """Return the options of an algorithm and their defaults.

    Examples
    --------
    >>> algorithm_options("mcc")["temperature"]
    2.5
    """
    kind, additions = _parse(algorithm)
    return {**_defaults(kind), **additions}


def algorithm_uses_target(algorithm: str | type[Algorithm]) -> bool:
    """Whether an algorithm draws batches of the target."""
    return _parse(algorithm)[0].uses_target


def check_regression(algorithm: str | type[Algorithm]) -> None:
    """Refuse an algorithm that cannot predict numbers."""
    _parse(algorithm)[0].check_regression()


def _parse(algorithm: str | type[Algorithm]) -> tuple[type[Algorithm], dict[str, Any]]:
    """The class that is meant, and the options that its additions set."""
    if isinstance(algorithm, type):
        return _own(algorithm, algorithm.__name__), {}
    base, *additions = str(algorithm).split("+")
    kind = _CLASSES.get(base)
    if ":" in base:
        kind = _own(import_by_name(base, "algorithm"), base)
    if kind is None or any(addition not in _ADDITIONS for addition in additions):
        raise unknown("algorithm", algorithm, ALGORITHM_NAMES)
    chosen = dict(_ADDITIONS[addition] for addition in additions)
    for option in chosen:
        if option not in _defaults(kind):
            raise InputError(
                f"algorithm {algorithm!r} cannot be: {base!r} has no option {option!r}; use 'cdan' or 'dann'"
            )
    return kind, chosen


def _own(kind: Any, name: str) -> type[Algorithm]:
    if not isinstance(kind, type) or not issubclass(kind, Algorithm):
        raise InputError(f"algorithm {name!r} is {kind!r}, not a subclass of vardass.adapt.Algorithm; derive it")
    return kind


def _defaults(kind: type[Algorithm]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parent in reversed(kind.__mro__):
        if issubclass(parent, Algorithm) and "__init__" in vars(parent):
            parameters = inspect.signature(parent).parameters.values()
            found.update({p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY})
    return found
