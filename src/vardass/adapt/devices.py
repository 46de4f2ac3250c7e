"""Devices of a run, and the processes that it starts on several of them with Lightning Fabric.

The batch sizes of a run are those of all its devices together. Every process draws the same batch, keeps its share of
the rows, and computes the loss from the features of all, so a run has the same losses and weights on two devices as on
one, up to rounding. What differs: dropout and augmentation draw other random numbers, BatchNorm normalises by the
process's own share (on GPUs by the whole batch), and each process computes the small layers after z for all rows. The
first process makes the strata, evaluates, and writes all files, while the others wait. Gradients are exchanged after
the backward pass, not during it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessRaisedException

from vardass.adapt.config import RunConfig
from vardass.adapt.distributed import Processes
from vardass.adapt.reproducibility import deferred_interrupt
from vardass.adapt.run_folder import RunFolder
from vardass.errors import InputError, VardassError
from vardass.validate import Progress

if TYPE_CHECKING:
    from vardass.adapt.trainer import Trainer

__all__ = ["count_devices", "join_processes", "make_fabric", "pick_device", "run_in_processes"]

_REPORT_SECONDS = 0.1
_ERRORS = {kind.__name__: kind for kind in (VardassError, InputError)}


# --- which devices ------------------------------------------------------------------------------------


def pick_device(name: str, accelerator: str = "auto") -> torch.device:
    """Device by name, if it is there; ``"auto"`` is that of the accelerator, or a GPU if there is one."""
    if name == "auto" and accelerator != "auto":
        name = "cuda" if accelerator == "gpu" else accelerator
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:1") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"device {name!r} is not there, torch sees {count} GPUs; use cpu or auto")
    return device


def count_devices(config: RunConfig) -> int:
    """Processes that a run is to have; ``"auto"`` is one for each GPU, and one on a CPU."""
    if config.devices != "auto":
        return int(config.devices)
    return max(1, torch.cuda.device_count()) if _accelerator(config) in ("auto", "cuda", "gpu") else 1


def make_fabric(config: RunConfig) -> Any:
    """Fabric for a run on several devices. It starts them; gradients are exchanged by ``Processes``.

    Raises
    ------
    InputError
        If Lightning Fabric is not installed, or the devices are not there.
    """
    count = count_devices(config)
    try:
        from lightning_fabric import Fabric  # takes seconds, and only runs on several devices need it
    except ModuleNotFoundError as error:
        raise InputError(
            f"devices={config.devices} needs Lightning Fabric, which cannot be imported ({error}); install it with "
            "pip install 'vardass[adapt]', or use devices=1"
        ) from None
    accelerator = _accelerator(config)
    if accelerator in ("auto", "cuda", "gpu"):
        there = torch.cuda.device_count()
        if there < count and (there or accelerator != "auto"):
            raise InputError(
                f"devices={count}, but torch sees {there} GPUs; use devices='auto', or accelerator='cpu' for "
                "processes on the CPU"
            )
    strategy = config.strategy
    if strategy == "auto":
        strategy = "ddp" if _under_torchrun() else "ddp_spawn"
    return Fabric(accelerator=accelerator, devices=count, strategy=strategy)


def join_processes(
    config: RunConfig, processes: Processes | None, device: torch.device | None
) -> tuple[Processes, torch.device, bool]:
    """The present process among those of a run, its device, and whether the run needs processes yet to be started.

    With the strategy ``"ddp"`` each process runs the user's script as a whole: torchrun has started it, or Fabric
    starts the script again for each device.
    """
    if processes is None and count_devices(config) > 1:
        fabric = make_fabric(config)
        if config.strategy != "ddp" and not (config.strategy == "auto" and _under_torchrun()):
            return Processes(), torch.device("cpu"), True  # only to look at the settings: the work is done elsewhere
        fabric.launch()
        return Processes(fabric.global_rank, fabric.world_size), fabric.device, False
    return processes or Processes(), device or pick_device(config.device, config.accelerator), False


def _accelerator(config: RunConfig) -> str:
    if config.device == "auto":
        return config.accelerator
    kind, colon, _ = config.device.partition(":")
    if colon and config.devices != 1:
        raise InputError(
            f"device={config.device!r} is one device, but devices={config.devices!r}; leave device out, and choose "
            "GPUs with the environment variable CUDA_VISIBLE_DEVICES"
        )
    if config.accelerator not in ("auto", kind) and (config.accelerator, kind) != ("gpu", "cuda"):
        raise InputError(f"device={config.device!r} is no {config.accelerator!r}; leave one of the two out")
    return kind


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


# --- processes of a run -------------------------------------------------------------------------------


def run_in_processes(trainer: Trainer, *, resume: bool, progress: Progress | None) -> None:
    """Run ``trainer`` in processes of its own and give it their final state.

    What it was given is sent to them, so data sets must be picklable, and a script must start its work under
    ``if __name__ == "__main__":``. An error that ``progress`` raises stops them after their step, and is raised once
    they have ended.
    """
    fabric = make_fabric(trainer.config)
    context: Any = multiprocessing.get_context("fork" if trainer.config.strategy == "ddp_fork" else "spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    with ExitStack() as stack:
        out = trainer.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vardass-")))
        folder = RunFolder(out)
        if trainer.out is None and trainer.step:
            folder.save(trainer.config, trainer.state_dict())
        asked = stack.enter_context(deferred_interrupt())
        listener = _Listener(messages, stop, asked, progress)
        try:
            fabric.launch(_run_one, _Job(trainer, out, resume), messages, stop)
        except ProcessRaisedException as error:
            listener.close()
            if listener.error is not None:
                raise _ERRORS[listener.error[0]](listener.error[1]) from error
            if listener.failure is not None:
                raise listener.failure from error
            raise
        finally:
            stop.set()
            listener.close()
        trainer.load_state_dict(folder.load(trainer.config, resume=True))
        if listener.failure is not None:
            raise listener.failure


class _Job:
    """What a process is to run; Fabric looks into dataclasses and refuses frozen ones, but not into this."""

    def __init__(self, trainer: Trainer, out: Path, resume: bool) -> None:
        self.make_trainer = type(trainer)
        self.config, self.splits, self.observed = trainer.config, trainer.splits, trainer.observed
        self.out, self.resume = out, resume


def _run_one(fabric: Any, job: _Job, messages: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one tells when to stop
    last = 0.0

    def report(share: float, message: str) -> None:
        nonlocal last
        if stop.is_set():
            raise KeyboardInterrupt
        if time.monotonic() - last >= _REPORT_SECONDS or share == 1.0:
            last = time.monotonic()
            messages.put(("progress", share, message))

    try:
        processes = Processes(fabric.global_rank, fabric.world_size)
        trainer = job.make_trainer(
            job.config, job.splits, job.out, observed=job.observed, processes=processes, device=fabric.device
        )
        trainer.run(resume=job.resume, progress=report if processes.leads else None)
    except VardassError as error:
        kind = "InputError" if isinstance(error, InputError) else "VardassError"
        messages.put(("error", kind, str(error)))
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class _Listener:
    """Hands on what the processes say, while the main thread waits for them.

    It reads until it is closed, come what may: a process that writes to a full pipe would wait for ever.

    Attributes
    ----------
    error : tuple of str, optional
        Kind and message of an error in a process.
    failure : BaseException, optional
        What ``progress`` raised; it is not called again then.
    """

    def __init__(self, messages: Any, stop: Any, asked: list[bool], progress: Progress | None) -> None:
        self.error: tuple[str, str] | None = None
        self.failure: BaseException | None = None
        self._messages, self._stop, self._asked, self._progress = messages, stop, asked, progress
        self._open = True
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until all has been handed on."""
        if self._open:
            self._open = False
            self._messages.put(None)
            self._thread.join()

    def _listen(self) -> None:
        while (message := self._messages.get()) is not None:
            if self._asked:
                self._stop.set()
            if message[0] == "error":
                self.error = message[1:]
            elif self._progress is not None and self.failure is None:
                try:
                    self._progress(message[1], message[2])
                except KeyboardInterrupt:
                    self._stop.set()
                except BaseException as failure:
                    self.failure = failure
                    self._stop.set()
