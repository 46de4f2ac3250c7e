"""Errors and warnings that vardass raises on purpose."""

__all__ = ["InputError", "VardassError", "VardassWarning"]


class VardassError(Exception):
    """Base of every error that vardass raises on purpose."""


class InputError(VardassError, ValueError):
    """An argument or a file is not usable; the message names both values and a remedy."""


class VardassWarning(UserWarning):
    """Something was handled, but the user should know; the message says the remedy."""
