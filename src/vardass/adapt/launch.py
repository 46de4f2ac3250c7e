"""A run on several devices: processes that are started for it, and how their result comes back.

The batch sizes of a run are those of all its devices together. Every process draws the same batch, keeps its share
of the rows, and computes the loss from the features of all, so a run has the same losses and weights on two devices
as on one, up to rounding. What differs: dropout and augmentation draw other random numbers, BatchNorm normalises by
the process's own share (on GPUs by the whole batch), and each process computes the small layers after z for all rows.
The first process makes the strata, evaluates, and writes all files, while the others wait. Gradients are exchanged
after the backward pass, not during it.
"""

from __future__ import annotations

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
from vardass.adapt.fabric import make_fabric
from vardass.adapt.folder import RunFolder
from vardass.adapt.processes import Processes
from vardass.adapt.surroundings import deferred_interrupt
from vardass.data.splits import TaskSplits
from vardass.errors import InputError, VardassError
from vardass.refresh.extract import Progress

if TYPE_CHECKING:
    from vardass.adapt.trainer import Trainer

__all__ = ["run_in_processes"]

_REPORT_SECONDS = 0.1
_ERRORS = {kind.__name__: kind for kind in (VardassError, InputError)}


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
            fabric.launch(_run_one, _Job(trainer.config, trainer.splits, out, resume), messages, stop)
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

    def __init__(self, config: RunConfig, splits: TaskSplits, out: Path, resume: bool) -> None:
        self.config, self.splits, self.out, self.resume = config, splits, out, resume


def _run_one(fabric: Any, job: _Job, messages: Any, stop: Any) -> None:
    from vardass.adapt.trainer import Trainer

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
        trainer = Trainer(job.config, job.splits, job.out, processes=processes, device=fabric.device)
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
