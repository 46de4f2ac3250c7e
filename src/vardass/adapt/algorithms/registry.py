"""Algorithms by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vardass.adapt.algorithms.base import ERM, Algorithm
from vardass.adapt.algorithms.discrepancy import CORAL, MMD
from vardass.adapt.algorithms.mcc import MCC
from vardass.adapt.networks import Network
from vardass.errors import InputError
from vardass.registry import Registry, check_options, declared_options
from vardass.validate import unknown

_KINDS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    {
        "erm": ERM,
        "mmd": MMD,
        "coral": CORAL,
        "dann": "vardass.paper.adversarial:DANN",
        "cdan": "vardass.paper.adversarial:CDAN",
        "arm": "vardass.paper.arm:ARM",
        "mcc": MCC,
    },
    base=Algorithm,
)
_ADDITIONS: dict[str, tuple[str, Any]] = {
    "sdat": ("sharpness", 0.05),
    "els": ("smoothing", 0.1),
    "e": ("entropy", True),
}

ALGORITHM_NAMES = ("erm", "mmd", "coral", "dann", "cdan", "cdan+sdat", "cdan+els", "arm", "mcc")
"""The paper's nine; other combinations such as ``"dann+els"`` or ``"cdan+e+sdat"`` are known too."""


def make_algorithm(algorithm: str | type[Algorithm], network: Network, num_classes: int, **options: Any) -> Algorithm:
    """Make an algorithm from its name.

    Parameters
    ----------
    algorithm : str or subclass of Algorithm
        One of ``ALGORITHM_NAMES``; dann and cdan with additions: ``+sdat`` sets ``sharpness=0.05`` (0.02 is
        recommended for Office-Home), ``+els`` sets ``smoothing=0.1``, for cdan ``+e`` sets ``entropy=True``; the paper
        does not say which values it used; or your own, as a class or as ``"package.module:Name"``.
    network : Network
        Trained in place.
    num_classes : int
        At least 2.
    **options
        Of the algorithm, see its class and ``algorithm_options``. They override what an addition sets.

    Examples
    --------
    >>> from vardass.adapt import make_network
    >>> rule = make_algorithm("coral", make_network("mlp", (3,), 2, hidden=(4,)), 2, penalty=0.5)
    >>> rule.name, rule.penalty
    ('coral', 0.5)
    """
    kind, additions = _parse(algorithm)
    shown = algorithm if isinstance(algorithm, str) else kind.__name__
    check_options(f"algorithm {shown!r}", options, kind)
    return kind(network, num_classes, **{**additions, **options})


def algorithm_options(algorithm: str | type[Algorithm]) -> dict[str, Any]:
    """Return the options of an algorithm and their defaults.

    >>> algorithm_options("mcc")["temperature"]
    2.5
    """
    kind, additions = _parse(algorithm)
    return {**_options(kind), **additions}


def find_algorithm(algorithm: str | type[Algorithm]) -> type[Algorithm]:
    """The class that is meant, without what its additions set."""
    return _parse(algorithm)[0]


def _options(kind: Any) -> Mapping[str, Any]:  # to mypy a class of modules is not hashable
    return declared_options(kind)


def _parse(algorithm: str | type[Algorithm]) -> tuple[type[Algorithm], dict[str, Any]]:
    """The class that is meant, and the options that its additions set."""
    if isinstance(algorithm, type):
        return _KINDS.check_own(algorithm, algorithm.__name__), {}
    base, *additions = str(algorithm).split("+")
    if (base not in _KINDS and ":" not in base) or any(addition not in _ADDITIONS for addition in additions):
        raise unknown("algorithm", algorithm, ALGORITHM_NAMES)
    kind = _KINDS.find(base)
    chosen = dict(_ADDITIONS[addition] for addition in additions)
    for option in chosen:
        if option not in _options(kind):
            raise InputError(
                f"algorithm {algorithm!r} is invalid: {base!r} has no option {option!r}; use 'cdan' or 'dann'"
            )
    return kind, chosen
