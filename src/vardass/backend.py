"""Which of two backends runs a hot loop: the compiled one on a CPU where numba is installed, else plain torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["compiled_loops", "has_numba", "one_thread", "were_compiled"]


def compiled_loops(tensor: Tensor) -> ModuleType | None:
    """The module ``vardass.compiled``, if it can work on data like ``tensor``; otherwise None.

    This needs a CPU, single or double precision, and numba (``pip install 'vardass[fast]'``). Both backends run the
    same algorithm to the same quality; they may take steps in a different order where it is not fixed.
    """
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
        return None
    return _compiled()


@cache
def has_numba() -> bool:
    """Whether numba is installed; streams of samplers that are refreshed depend on it."""
    return find_spec("numba") is not None


@cache
def _compiled() -> ModuleType | None:
    if not has_numba():
        return None
    from vardass import compiled

    if sys.stderr.isatty() and not any(Path(compiled.centre.stats.cache_path or "").glob("compiled.*.nbi")):
        print("vardass: compiling on first use, some seconds; `vardass warmup` does it beforehand", file=sys.stderr)
    return compiled


def were_compiled() -> bool:
    """Whether loops were compiled in this process, and not found on disk: times of first calls then include it."""
    loops = vars(sys.modules["vardass.compiled"]) if "vardass.compiled" in sys.modules else {}
    return any(loop.stats.cache_misses for loop in loops.values() if hasattr(loop, "stats"))


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread inside this block: sums then have one order on every machine.

    Small operations gain nothing from more threads, and those of several wait for one another and for other processes.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
