"""The figures by number. A figure's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from vardass.errors import InputError
from vardass.figures.base import FigureResult, Progress
from vardass.figures.threads import one_thread

__all__ = ["NUMBERS", "make_figure"]

NUMBERS = (1, 2, 3, 4, 5)
"""Figures of the paper, in order."""


def make_figure(number: int, *, seed: int = 0, quick: bool = False, progress: Progress | None = None) -> FigureResult:
    """Compute one figure of the paper.

    Parameters
    ----------
    number : int
        1 to 5.
    seed : int
        The same seed gives the same numbers.
    quick : bool
        A version scaled down to seconds, to see that it works; its numbers are rougher.
    progress : callable, optional
        Called as ``progress(fraction, message)``.
    """
    if isinstance(number, bool) or number not in NUMBERS:
        raise InputError(f"there is no figure {number!r}; choose one of {', '.join(map(str, NUMBERS))}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed must be a whole number of at least 0, got {seed!r}")
    name = f"{__package__}.figure{number}"
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise InputError(f"figure {number} is not part of this version; choose another") from None
    function = cast(Callable[..., Any], getattr(module, f"figure{number}"))
    with one_thread():
        return cast(FigureResult, function(seed=seed, quick=quick, progress=progress))
