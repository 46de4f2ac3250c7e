"""Names that a user types: one error message for all that are not known, and seeded construction."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from vardass.errors import InputError

__all__ = ["choose", "seeded", "unknown"]

Value = TypeVar("Value", bound=str)


def unknown(kind: str, given: str, known: Iterable[str]) -> InputError:
    """Return an error for a name that is not among ``known``, with the nearest one as the remedy."""
    names = list(known)
    near = difflib.get_close_matches(str(given).lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? known: " if near else "choose one of "
    return InputError(f"unknown {kind} {given!r}; {hint}{', '.join(names) or 'none'}")


def choose(value: Value, kind: str, choices: Iterable[str]) -> Value:
    """Return ``value`` if it is one of ``choices``, else raise the error of ``unknown``."""
    known = list(choices)
    if value not in known:
        raise unknown(kind, value, known)
    return value


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw initial parameters from ``seed`` and leave torch's global generator as it was.

    Layers take their initial values from the global CPU generator and from nowhere else; None lets them.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
