"""Lightning Fabric, imported only for runs on several devices: it starts the processes and finds their devices."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from vardass.adapt.config import RunConfig
from vardass.adapt.processes import Processes
from vardass.adapt.surroundings import pick_device
from vardass.errors import InputError

__all__ = ["count_devices", "find_place", "make_fabric", "synchronised_statistics"]

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
