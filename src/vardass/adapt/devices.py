"""Devices of a run, the processes that it starts on several of them, what these exchange, and Ctrl-C.

The batch sizes of a run are those of all its devices together. Every process draws the same batch, keeps its share of
the rows, and computes the loss from the features of all: a discrepancy is not a mean over samples: averaging the losses
of parts would give another loss. A run thus has the same losses and weights on two devices as on one, up to rounding.
What differs: dropout and augmentation draw other random numbers, BatchNorm normalises by the process's own share (on
GPUs by the whole batch), and each process computes the small layers after z for all rows. The first process makes the
strata, evaluates, and writes all files, while the others wait. Gradients are exchanged after the backward pass, not
during it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.modules.batchnorm import _BatchNorm

from vardass.errors import InputError, VardassError
from vardass.processes import count_cpus, from_first, gather_rows, quiet_workers
from vardass.validate import Progress

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig
    from vardass.adapt.run_folder import RunFolder
    from vardass.adapt.trainer import Trainer


_REPORT_SECONDS = 0.1


# --- which devices ------------------------------------------------------------------------------------


def check_device(value: Any, name: str = "device") -> str:
    """Check the name of a device, or ``"auto"``, but not whether it exists: settings may be made on another machine."""
    try:
        torch.device("cpu" if value == "auto" else value)
    except (RuntimeError, TypeError):
        raise InputError(
            f"{name} is {value!r}, which is not a valid device; use auto, cpu, cuda or cuda:1", field=name
        ) from None
    return str(value)


def pick_device(name: str) -> torch.device:
    """Device by name, if available; ``"auto"`` is a GPU if available."""
    if check_device(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"device {name!r} is not there, torch sees {count} GPUs; use cpu or auto", field="device")
    return device


def count_devices(config: RunConfig) -> int:
    """Number of processes of a run; ``"auto"`` is one for each GPU, and one on a CPU."""
    if config.devices != "auto":
        return int(config.devices)
    return max(1, torch.cuda.device_count()) if config.device in ("auto", "cuda") else 1


def _kind_of_devices(config: RunConfig) -> str:
    """``"cuda"`` or ``"cpu"``, for a run on several devices that are there."""
    count, there = count_devices(config), torch.cuda.device_count()
    if ":" in config.device:
        raise InputError(
            f"device={config.device!r} is one device, but devices={config.devices!r}; leave device out, and choose "
            "GPUs with the environment variable CUDA_VISIBLE_DEVICES",
            field="devices",
        )
    if config.device not in ("auto", "cpu", "cuda"):
        raise InputError(
            f"devices={config.devices!r} needs GPUs of CUDA or the CPU, got device={config.device!r}; use devices=1",
            field="devices",
        )
    kind = config.device if config.device != "auto" else "cuda" if there else "cpu"
    if kind == "cpu" and count_cpus() < count:
        raise InputError(
            f"devices={count}, but this process may use {count_cpus()} CPUs; use devices={count_cpus()} or less",
            field="devices",
        )
    if kind == "cuda" and there < count:
        raise InputError(
            f"devices={count}, but torch sees {there} GPUs; use devices='auto', or device='cpu' for processes on the "
            "CPU",
            field="devices",
        )
    return kind


def join_processes(config: RunConfig) -> tuple[Processes, torch.device, bool]:
    """The present process among those of a run, its device, and whether the run needs processes yet to be started.

    Under torchrun each process runs the user's script as a whole.
    """
    if count_devices(config) == 1:
        return Processes(), pick_device(config.device), False
    kind = _kind_of_devices(config)
    if not dist.is_initialized() and "TORCHELASTIC_RUN_ID" not in os.environ:
        return Processes(), torch.device("cpu"), True  # only to look at the settings: the work is done elsewhere
    return *_join_group(kind), False


def _join_group(kind: str, **place: Any) -> tuple[Processes, torch.device]:
    """Join the process group at ``place``, by default that of torchrun, unless this process is in one."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # objects are sent by way of it
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", **place)
    return Processes(dist.get_rank(), dist.get_world_size()), device


# --- what processes exchange --------------------------------------------------------------------------


class Processes:
    """The present process among those that train together; all must call the methods in the same order."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @property
    def is_first(self) -> bool:
        """Whether this process refreshes, evaluates and writes for all."""
        return self.rank == 0

    def part(self, rows: int) -> slice:
        """Rows of a batch that are this process's."""
        if rows % self.count:
            raise InputError(
                f"a batch of {rows} samples cannot be shared evenly by {self.count} processes; use a batch_size and "
                f"target_batch_size that {self.count} divides"
            )
        each = rows // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def whole(self, local: Tensor) -> Tensor:
        """Rows (b, ...) of all processes, put together in the order of the batch: (count b, ...); see `gather_rows`."""
        return local if self.count == 1 else gather_rows(local)

    def same(self, value: Any) -> Any:
        """The value that the leading process has."""
        return value if self.count == 1 else from_first(lambda: value)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give all processes the mean of their gradients."""
        if self.count > 1:
            self._average([parameter.grad for parameter in parameters if parameter.grad is not None])

    def average_statistics(self, module: nn.Module) -> None:
        """Give all processes the mean of the running statistics of their BatchNorm layers."""
        if self.count > 1:
            layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.training]
            found = [statistic for layer in layers for statistic in (layer.running_mean, layer.running_var)]
            self._average([statistic for statistic in found if statistic is not None])

    def _average(self, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        with torch.no_grad():
            flat = torch.cat([tensor.flatten().float() for tensor in tensors])  # one exchange for all
            dist.all_reduce(flat)
            flat /= self.count
            for tensor, mean in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors])):
                tensor.copy_(mean.view_as(tensor))


# --- processes that a run starts ----------------------------------------------------------------------


def run_in_processes(trainer: Trainer, folder: RunFolder, *, resume: bool, progress: Progress | None) -> None:
    """Run ``trainer`` in processes of its own, with their files in ``folder``, and give it their final state.

    What it was given is sent to them, so data sets must be picklable, and a script must start its work under
    ``if __name__ == "__main__":``. An error that ``progress`` raises is raised again once they have ended.
    """
    context: Any = multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    if trainer.out is None and trainer.step:
        folder.save(trainer.config, trainer.state_dict())
    make_trainer = partial(type(trainer), trainer.config, trainer.splits, folder.path, observed=trainer.observed)
    count, kind = count_devices(trainer.config), _kind_of_devices(trainer.config)
    errors: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="vardass-") as place, deferred_interrupt() as asked:

        def hand_on() -> None:
            if asked:
                stop.set()
            while not messages.empty():
                share, message = messages.get()
                if isinstance(message, Exception):
                    errors.insert(0, message)
                elif progress is not None and not errors:
                    try:
                        progress(share, message)
                    except KeyboardInterrupt:
                        stop.set()
                    except BaseException as error:
                        errors.append(error)
                        stop.set()

        meeting = (Path(place) / "group").as_uri()
        try:
            with quiet_workers():
                given = (make_trainer, resume, kind, count, meeting, messages, stop)
                running: Any = spawn(_run_one, given, nprocs=count, join=False)  # type: ignore[no-untyped-call]
            while not running.join(timeout=_REPORT_SECONDS):
                hand_on()
        except (ProcessRaisedException, ProcessExitedException) as error:
            hand_on()
            ends = {rank: process.exitcode for rank, process in enumerate(running.processes)}
            # one that raises ends with 1, and the others are terminated then
            dead = [rank for rank, end in ends.items() if end not in (None, 0, 1, -signal.SIGTERM)]
            if isinstance(error, ProcessExitedException):
                dead = dead or [error.error_index]
            if dead and not any(isinstance(each, InputError) for each in errors):
                kept = "nothing was saved, as there is no folder"
                if trainer.out is not None:
                    kept = f"what was saved in {trainer.out} is whole: go on from it with resume=True (--resume)"
                raise VardassError(
                    f"process {dead[0]} of {count} died (exit code {ends[dead[0]]}), perhaps it was killed or out of "
                    f"memory; {kept}"
                ) from error
            raise (errors[0] if errors else error) from error
        finally:
            stop.set()
        hand_on()
        trainer.load_state_dict(folder.load(trainer.config, resume=True))
        if errors:
            raise errors[0]


def _run_one(
    rank: int, make_trainer: Any, resume: bool, kind: str, count: int, meeting: str, messages: Any, stop: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one tells when to stop
    last = 0.0

    def report(share: float, message: str) -> None:
        nonlocal last
        if stop.is_set():
            raise KeyboardInterrupt
        if time.monotonic() - last >= _REPORT_SECONDS or share == 1.0:
            last = time.monotonic()
            messages.put((share, message))

    try:
        os.environ["LOCAL_RANK"] = str(rank)
        _join_group(kind, init_method=meeting, rank=rank, world_size=count)
        make_trainer().run(resume=resume, progress=report if rank == 0 else None)
    except VardassError as error:
        messages.put((1.0, error))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# --- Ctrl-C -------------------------------------------------------------------------------------------


@contextmanager
def deferred_interrupt() -> Iterator[list[bool]]:
    """On the first Ctrl-C only add to the list that is yielded: half a step could not be resumed bit for bit."""
    asked: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        say = "stopping after this step; Ctrl-C again stops at once and keeps the last checkpoint"
        print(say, file=sys.stderr, flush=True)

    # a process that ignores Ctrl-C is stopped by a message
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
