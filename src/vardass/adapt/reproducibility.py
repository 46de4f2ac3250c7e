"""What a resume bit for bit needs: random numbers that depend on the step alone, and Ctrl-C between steps only."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

__all__ = [
    "deferred_interrupt",
    "randomness_restored",
    "seed_everything",
    "tell_user",
]


def tell_user(message: str) -> None:
    """Tell the user, apart from what the program puts out."""
    print(message, file=sys.stderr, flush=True)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the global generators that layers such as dropout draw from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def randomness_restored(device: torch.device) -> Iterator[None]:
    """Give the global generators back as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def deferred_interrupt() -> Iterator[list[bool]]:
    """Let the first Ctrl-C only put an entry in the list; half a step could not be resumed bit for bit."""
    asked: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        tell_user("stopping after this step; Ctrl-C again stops at once and keeps the last checkpoint")

    # a process that ignores Ctrl-C is told in another way
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        # None stands for a handler that was not set from Python and cannot be put back
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
