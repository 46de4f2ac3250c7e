"""Errors and warnings that vardass raises on purpose."""

__all__ = ["InputError", "VardassError", "VardassWarning"]


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

    Examples
    --------
    >>> import torch, vardass
    >>> try:
    ...     vardass.stratify(torch.zeros(5, 2), 9)
    ... except InputError as error:
    ...     print(isinstance(error, ValueError))
    True
    """


class VardassWarning(UserWarning):
    """Something was handled, but the user should know; the message says the remedy.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", VardassWarning)  # stop where something was only handled
    """
