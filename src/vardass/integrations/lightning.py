"""Lightning: one callback that distributes batches over processes, refreshes, logs, and completes checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vardass.errors import InputError, needs_extra

with needs_extra("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

from vardass.integrations.checkpoints import CheckpointedSampler
from vardass.refresh import FeatureBank, Refresher

__all__ = ["RefreshCallback"]


class RefreshCallback(Callback):
    """Refresh, log and checkpoint the samplers of a `Refresher` in Lightning's loop.

    The refresher is called before the first batch and after each one; its report goes to the trainer's loggers as
    ``vardass/<sampler>/variance`` and so on. A checkpoint holds the samplers, banks and the refresher: a run resumed
    with ``ckpt_path`` gets the batches of an uninterrupted one. With several processes each gets its share of the
    batches, and the strata of the first: create the trainer with ``use_distributed_sampler=False``, and leave out
    ``num_replicas`` and ``rank`` of the samplers. With ``num_workers`` above 0 a DataLoader prefetches: wrap each
    sampler in a `CheckpointedSampler`, for the loader and for the refresher.

    Parameters
    ----------
    refresher : Refresher
        With the samplers of the training loaders, not endless: Lightning prefetches a batch of a loader without
        length, and a checkpoint would miss it.
    """

    def __init__(self, refresher: Refresher) -> None:
        if not isinstance(refresher, Refresher):
            raise InputError(
                f"refresher must be a Refresher, got {refresher!r}; pass vardass.Refresher(policy, samplers, sources)"
            )
        for name, sampler in refresher.samplers.items():
            if getattr(sampler, "endless", True):
                raise InputError(
                    f"sampler {name!r} is endless, and Lightning takes its batches ahead of time; make it with "
                    "endless=False, and batches=... for the length of an epoch"
                )
        self.refresher = refresher
        self.step = 0
        self._asked: int | None = None  # the step that the refresher was asked about last
        self._epoch_is_over = False  # at the checkpoint that is being loaded

    # --- hooks ----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share out the batches, and refresh for the first one: loaders are not asked before this."""
        if trainer.world_size > 1:
            if trainer._accelerator_connector.use_distributed_sampler:
                raise InputError(
                    f"Lightning would share out the samples over {trainer.world_size} processes itself; make the "
                    "trainer with Trainer(use_distributed_sampler=False)"
                )
            for sampler in self.refresher.samplers.values():
                sampler.shard(trainer.world_size, trainer.global_rank)
        self._refresh(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refresh if it is time, before the next batch is drawn."""
        self.step += 1
        for sampler in self.refresher.samplers.values():
            if isinstance(sampler, CheckpointedSampler):
                sampler.arrived()
        self._refresh(trainer)

    def _refresh(self, trainer: Trainer) -> None:
        if self._asked == self.step:  # a checkpoint holds the answer
            return
        log = self.refresher.step(self.step)
        self._asked = self.step
        if log is not None:
            metrics = {f"vardass/{name}": value for name, value in log.items() if name != "step"}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    # --- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the coming batches depend on; the same on every process."""
        sources, samplers = self.refresher.sources.items(), self.refresher.samplers.items()
        return {
            "step": self.step,
            "asked": self._asked,
            "refresher": self.refresher.state_dict(),
            "samplers": {name: sampler.state_dict() for name, sampler in samplers},
            "banks": {name: bank.state_dict() for name, bank in sources if isinstance(bank, FeatureBank)},
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Note where in its epoch the run was."""
        self._epoch_is_over = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a checkpoint was made."""
        self.step, self._asked = state["step"], state["asked"]
        self.refresher.load_state_dict(state["refresher"])
        for name, sampler in self.refresher.samplers.items():
            sampler.load_state_dict(state["samplers"][name])
            # the shorter of two loaders may be in the middle of its own epoch; Lightning begins both anew
            if self._epoch_is_over:
                sampler.leave_epoch()
        for name, bank in self.refresher.sources.items():
            if isinstance(bank, FeatureBank):
                bank.load_state_dict(state["banks"][name])
