"""What a run needs from its surroundings: a device, optimisers, random numbers of its own, and Ctrl-C in time."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.config import RunConfig
from vardass.adapt.schedule import check_parts, parameter_parts
from vardass.errors import InputError
from vardass.files import atomic_write

__all__ = [
    "deferred_interrupt",
    "make_optimisers",
    "own_randomness",
    "pick_device",
    "plain_backward",
    "say",
    "seed_everything",
    "write_text",
]


def plain_backward(loss: Tensor) -> None:
    """Write gradients, in a single process and full precision."""
    loss.backward()  # type: ignore[no-untyped-call]


def pick_device(name: str, accelerator: str = "auto") -> torch.device:
    """Device by name; ``"auto"`` is that of the accelerator, or a GPU if there is one."""
    if name == "auto" and accelerator != "auto":
        name = "cuda" if accelerator == "gpu" else accelerator
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"unknown device {name!r}: {str(error).splitlines()[0]}; use 'auto', 'cpu' or 'cuda'"
        ) from None


def make_optimisers(config: RunConfig, algorithm: Algorithm) -> dict[str, Optimizer]:
    """One optimiser for each role of the algorithm's parameters."""
    check_parts(algorithm, config.lr_multipliers)
    return {role: _optimiser(config, algorithm, list(group)) for role, group in algorithm.parameter_groups().items()}


def _optimiser(config: RunConfig, algorithm: Algorithm, parameters: list[nn.Parameter]) -> Optimizer:
    if not parameters:
        raise InputError(f"algorithm {config.algorithm!r} has a role without trainable parameters; add a bottleneck")
    groups: Any = parameters
    if config.lr_multipliers:
        groups = parameter_parts(algorithm, parameters, config.lr_multipliers, config.lr)
    if config.optimiser == "sgd":
        return SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
            weight_decay=config.weight_decay,
        )
    # DomainBed's alternating adversaries have betas of their own
    betas = (0.5, 0.9) if getattr(algorithm, "adversary", None) == "alternating" else (0.9, 0.999)
    if config.adam_betas is not None:
        betas = (config.adam_betas[0], config.adam_betas[1])
    return Adam(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay)


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none of it."""
    with atomic_write(path) as file:
        file.write(text.encode())


def say(message: str) -> None:
    """Tell the user, apart from what the program puts out."""
    print(message, file=sys.stderr, flush=True)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the global generators that layers such as dropout draw from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
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
        say("stopping after this step; Ctrl-C again stops at once and keeps the last checkpoint")

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
