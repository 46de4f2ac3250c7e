"""The paper's figures, recomputed: numbers, pictures, and whether what the paper says of them held."""

from __future__ import annotations

from vardass.backend import one_thread
from vardass.errors import InputError
from vardass.paper.figures.base import Claim, FigureResult, write_figure
from vardass.paper.figures.figure1 import figure1
from vardass.paper.figures.figure2 import figure2
from vardass.paper.figures.figure3 import figure3
from vardass.paper.figures.figure4 import figure4
from vardass.paper.figures.figure5 import figure5
from vardass.validate import Progress

__all__ = ["NUMBERS", "Claim", "FigureResult", "make_figure", "write_figure"]

_FIGURES = {1: figure1, 2: figure2, 3: figure3, 4: figure4, 5: figure5}
NUMBERS = tuple(_FIGURES)
"""Figures of the paper, in order."""


def make_figure(number: int, *, seed: int = 0, quick: bool = False, progress: Progress | None = None) -> FigureResult:
    """Compute one figure of the paper.

    Parameters
    ----------
    number : int
        1 to 5.
    seed : int
        The same seed gives the same numbers, apart from seconds.
    quick : bool
        A version scaled down to seconds, to see that it works; its numbers are rougher.
    progress : callable, optional
        Called as ``progress(fraction, message)``.

    Examples
    --------
    >>> make_figure(2, quick=True).number
    2
    """
    if isinstance(number, bool) or number not in _FIGURES:
        raise InputError(f"there is no figure {number!r}; choose one of {', '.join(map(str, NUMBERS))}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed must be a whole number of at least 0, got {seed!r}")

    def report(share: float, message: str) -> None:
        if progress is not None:
            progress(share, f"figure {number}, {message}")

    with one_thread():
        return _FIGURES[number](seed=seed, quick=quick, progress=report)
