"""Errors and warnings that vardass raises on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["InputError", "MissingExtraError", "VardassError", "VardassWarning", "brief", "needs_extra"]

_MOST = 390  # characters: 400 with what a command writes before a message


def brief(message: str) -> str:
    """Leave out the middle of a message that quotes too much; the values are at its start, the remedy at its end.

    >>> len(brief("the cell is " + 9000 * "x" + "; correct it"))
    390
    """
    half = (_MOST - 5) // 2
    return message if len(message) <= _MOST else f"{message[: _MOST - 5 - half]} ... {message[-half:]}"


class VardassError(Exception):
    """Base of every error that vardass raises on purpose.

    Examples
    --------
    >>> try:
    ...     raise InputError("k is 9 and n is 5; lower k")
    ... except VardassError as error:
    ...     print(error)
    k is 9 and n is 5; lower k
    """


class InputError(VardassError, ValueError):
    """An argument or a file is not usable; the message names both values and a remedy.

    ``field`` is the name of the argument or setting, if any, so that a command can name the option.

    Examples
    --------
    >>> import torch, vardass
    >>> try:
    ...     vardass.stratify(torch.zeros(5, 2), 2, solver="min-sums")
    ... except InputError as error:
    ...     print(isinstance(error, ValueError), error.field)
    True solver
    """

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__(brief(message))
        self.field = field


class MissingExtraError(VardassError, ImportError):
    """An optional package is missing; the message gives the command that installs it."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Say which extra brings the package that an import within cannot find."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "vardass":
            raise
        raise MissingExtraError(
            f"this needs {package}, which is not installed: pip install 'vardass[{extra}]'", name=error.name
        ) from None


class VardassWarning(UserWarning):
    """A problem was handled, but the user should know; the message contains the remedy."""

    def __init__(self, message: str = "") -> None:
        super().__init__(brief(message))
