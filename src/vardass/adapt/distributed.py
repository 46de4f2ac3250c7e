"""Several devices: the processes of a run, how they are started, and what they exchange."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.modules.batchnorm import _BatchNorm

from vardass.adapt.reproducibility import deferred_interrupt
from vardass.adapt.run_folder import RunFolder
from vardass.data.splits import TaskSplits
from vardass.errors import InputError, VardassError
from vardass.validate import Progress

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig
    from vardass.adapt.trainer import Trainer

__all__ = [
    "Processes",
    "count_devices",
    "find_place",
    "make_fabric",
    "pick_device",
    "run_in_processes",
    "synchronised_statistics",
]


# --- processes that train together ---
#
# A discrepancy is no mean over samples, so averaging the losses of parts would give another loss. Hence the features
# of all parts are put together, with their gradients, and every process computes the loss of the whole batch.

_HALF = (torch.float16, torch.bfloat16)


class _Gather(torch.autograd.Function):
    """All parts, one after the other; the gradient of a part is the sum of what all processes ask of it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rank: int, count: int) -> Tensor:
        ctx.place = slice(rank * len(local), (rank + 1) * len(local))
        parts = [torch.empty_like(local) for _ in range(count)]
        dist.all_gather(parts, local)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[ctx.place], None, None


class Processes:
    """The present process among those that train together; all must call the methods in the same order.

    Parameters
    ----------
    rank, count : int
        Number of this process, and of all; by default it is alone, and nothing is exchanged.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @property
    def leads(self) -> bool:
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
        """Rows (b, ...) of all processes, put together in the order of the batch: (count b, ...).

        With the gradients of all processes averaged afterwards, each parameter has the gradient of the whole loss.
        """
        if self.count == 1:
            return local
        # not every backend exchanges half precision
        sent = (local.float() if local.dtype in _HALF else local).contiguous()
        gathered: Tensor = _Gather.apply(sent, self.rank, self.count)  # type: ignore[no-untyped-call]
        return gathered.to(local.dtype)

    def same(self, value: Any) -> Any:
        """The value that the leading process has."""
        if self.count == 1:
            return value
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

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


# --- lightning Fabric, imported only for runs on several devices ---

_INSTALL = "pip install 'vardass[adapt]'"


def count_devices(config: RunConfig) -> int:
    """Processes that a run is to have; ``"auto"`` is one for each GPU, and one on a CPU."""
    if config.devices != "auto":
        return int(config.devices)
    return max(1, torch.cuda.device_count()) if _accelerator(config) in ("auto", "cuda", "gpu") else 1


def make_fabric(config: RunConfig) -> Any:
    """Fabric for a run on several devices. It starts them; gradients are exchanged by `Processes`.

    Raises
    ------
    InputError
        If Lightning Fabric is not installed, or the devices are not there.
    """
    count = count_devices(config)
    try:
        from lightning_fabric import Fabric
    except ModuleNotFoundError as error:
        raise InputError(
            f"devices={config.devices} needs Lightning Fabric, which cannot be imported ({error}); install it with "
            f"{_INSTALL}, or use devices=1"
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


def find_place(
    config: RunConfig, processes: Processes | None, device: torch.device | None
) -> tuple[Processes, torch.device, bool]:
    """The present process among those of a run, its device, and whether the run needs processes yet to be started.

    With the strategy ``"ddp"`` each process runs the user's script as a whole: torchrun has started it, or Fabric
    starts the script again for each device.
    """
    starts = False
    if processes is None and count_devices(config) > 1:
        fabric = make_fabric(config)
        starts = not (config.strategy == "ddp" or (config.strategy == "auto" and _under_torchrun()))
        if starts:
            device = torch.device("cpu")  # only to look at the settings: the work is done elsewhere
        else:
            fabric.launch()
            processes, device = Processes(fabric.global_rank, fabric.world_size), fabric.device
    if device is None:
        device = pick_device(config.device, config.accelerator)
    return processes or Processes(), device, starts


def synchronised_statistics(algorithm: Any, device: torch.device) -> Any:
    """Let BatchNorm see the whole batch where torch can (on GPUs); elsewhere each process normalises its own part."""
    if device.type != "cuda":
        return algorithm
    return nn.SyncBatchNorm.convert_sync_batchnorm(algorithm)  # type: ignore[no-untyped-call]


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


# --- a run on several devices ---
#
# The batch sizes of a run are those of all its devices together. Every process draws the same batch, keeps its share
# of the rows, and computes the loss from the features of all, so a run has the same losses and weights on two devices
# as on one, up to rounding. What differs: dropout and augmentation draw other random numbers, BatchNorm normalises by
# the process's own share (on GPUs by the whole batch), and each process computes the small layers after z for all
# rows. The first process makes the strata, evaluates, and writes all files, while the others wait. Gradients are
# exchanged after the backward pass, not during it.

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
