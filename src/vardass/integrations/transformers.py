"""Hugging Face's Trainer: a callback that refreshes, logs, and puts samplers and strata into its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from vardass.errors import InputError, needs_extra

with needs_extra("huggingface"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vardass.files import atomic_write
from vardass.integrations.checkpoints import CheckpointedSampler
from vardass.refresh import Refresher

__all__ = ["RefreshCallback"]

_FILE = "vardass.pt"


class RefreshCallback(TrainerCallback):
    """Refresh, log and checkpoint the sampler of the training loader in the Trainer's loop.

    The refresher is called before the first step and after each one; its report goes to ``state.log_history`` as
    ``vardass/<sampler>/variance`` and so on. Each checkpoint gets a file ``vardass.pt``, from which
    ``trainer.train(resume_from_checkpoint=...)`` continues with the very next batch and the same strata.

    Parameters
    ----------
    refresher : Refresher
        Refresher of the sampler that ``sampler`` wraps.
    sampler : CheckpointedSampler
        Sampler of the loader returned by ``Trainer.get_train_dataloader``, prepared by ``self.accelerator``.
    resume_from : path, optional
        Folder of the checkpoint to resume from, if not ``output_dir/checkpoint-<step>``. Resume with
        ``TrainingArguments(ignore_data_skip=True)``: the sampler knows where it was.
    """

    def __init__(
        self,
        refresher: Refresher,
        sampler: CheckpointedSampler,
        *,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(refresher, Refresher) or not isinstance(sampler, CheckpointedSampler):
            raise InputError(
                f"RefreshCallback takes a Refresher and a CheckpointedSampler, got {type(refresher).__name__} and "
                f"{type(sampler).__name__}; wrap the sampler before the loader is made"
            )
        self.refresher, self.sampler, self.resume_from = refresher, sampler, resume_from

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refresh for the first batch, or resume from a checkpoint."""
        if state.global_step == 0:
            self._refresh(state)
            return
        if not args.ignore_data_skip:
            raise InputError(
                f"this run resumes after step {state.global_step} with ignore_data_skip=False, which would leave out "
                "as many batches again as the sampler's own state does; set TrainingArguments(ignore_data_skip=True)"
            )
        file = Path(self.resume_from or _folder(args, state)) / _FILE
        if not file.is_file():
            raise InputError(f"there is no {file}; name the folder of the checkpoint as resume_from")
        saved = torch.load(file, map_location="cpu", weights_only=True)
        self.refresher.load_state_dict(saved["refresher"])
        self.sampler.load_state_dict(saved["sampler"])

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note a batch whose gradients are accumulated."""
        self.sampler.arrived()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the batch, and refresh if it is time."""
        self.sampler.arrived()
        self._refresh(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add a file to the checkpoint that was just written."""
        if state.is_world_process_zero:
            with atomic_write(_folder(args, state) / _FILE) as file:
                torch.save({"refresher": self.refresher.state_dict(), "sampler": self.sampler.state_dict()}, file)

    def _refresh(self, state: TrainerState) -> None:
        log = self.refresher.step(state.global_step)
        if log is not None:
            found = {f"vardass/{name}": value for name, value in log.items() if name != "step"}
            state.log_history.append({"step": state.global_step, **found})


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
