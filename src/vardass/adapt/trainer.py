"""The training loop: batches of both domains, refreshes, evaluations, and checkpoints that resume bit for bit."""

from __future__ import annotations

import copy
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Draw, Inputs, embed, take_out_backbone, training_streams
from vardass.adapt.config import RunConfig
from vardass.adapt.devices import Processes, deferred_interrupt, join_processes, pick_device, run_in_processes
from vardass.adapt.model import MODEL_FILE, RunResult, build_algorithm, require_safetensors, save_model, types_of
from vardass.adapt.optimisation import ScaledOptimiser, Schedule, load_optimiser, make_optimisers
from vardass.adapt.run_folder import CHECKPOINT_FILE, History, RunFolder, TensorBoardLog
from vardass.adapt.selection import Evaluator, ModelChoice
from vardass.adapt.strata_updater import StrataUpdater
from vardass.data.domains import Domain
from vardass.data.splits import TaskSplits, named_seed, seed_generators
from vardass.errors import InputError, VardassError
from vardass.refresh import Timer
from vardass.samplers import MinibatchSampler
from vardass.validate import Progress, check_count, reading


class Trainer:
    """Train one algorithm with one sampler on one task.

    All randomness comes from ``config.seed`` and the step, so a run is determined by its settings, and a resumed
    one is the same as one that was never interrupted.

    Parameters
    ----------
    config : RunConfig
        Settings.
    splits : TaskSplits
        From ``split_task``. Labels of the target are not read, except those of ``target_val`` with the selection
        ``"oracle"``; the caller must reveal them.
    out : path, optional
        Folder for checkpoints, metrics and the model; None keeps all in memory.
    algorithm : Algorithm or subclass of it, optional
        Your own instead of ``config.algorithm``: an object with its network, or a class that is called with the
        network and ``config.algorithm_options``.
    network : nn.Module, optional
        Your own instead of ``config.network``: a ``Network``, or any module from samples to features. It is trained
        in place.
    samplers : dict of str to MinibatchSampler, optional
        Your own for ``"source"``, ``"target"`` or both, endless, instead of ``config.sampler``.
    observed : Domain, optional
        Labelled; its scores are logged at each evaluation as ``target_accuracy``, and used for nothing else. Sweeps
        pass the test part of the target, to compare rules of model selection.

    Notes
    -----
    `run` starts ``config.devices`` processes, see ``vardass.adapt.devices``, unless torchrun has done so.

    Objects of your own are not in the settings: pass them again to resume the run, and to ``load_model``. Parts named
    in the settings as ``package.module:Name`` only need to be importable.

    Examples
    --------
    >>> from vardass.data import load_task, split_task
    >>> splits = split_task(load_task("watch", "left-A->right-B"), seed=0)
    >>> Trainer(RunConfig(steps=2, sampler="uniform"), splits).run().step
    2
    """

    def __init__(
        self,
        config: RunConfig,
        splits: TaskSplits,
        out: str | os.PathLike[str] | None = None,
        *,
        algorithm: Algorithm | type[Algorithm] | None = None,
        network: nn.Module | None = None,
        samplers: Mapping[str, MinibatchSampler] | None = None,
        observed: Domain | None = None,
    ) -> None:
        _check(config, splits)
        self.config, self.splits, self.observed = config, splits, observed
        self.out = None if out is None else Path(out)
        if self.out is not None:
            require_safetensors()  # for the model at the end: find out before hours of training
        self.folder = None if self.out is None else RunFolder(self.out)
        self.tensorboard = TensorBoardLog(self.out) if config.tensorboard else None
        self.processes, self.device, self._starts_processes = join_processes(config)
        sampler = None if samplers is None else next(iter(samplers.values()), None)
        self.own_parts = types_of(algorithm=algorithm, network=network, sampler=sampler)
        if self._starts_processes and self.own_parts:
            raise InputError(
                f"{', '.join(self.own_parts)}= stays in this process, but devices={config.devices} "
                "starts others; leave it out, or name parts as package.module:Name in the settings"
            )
        self.account = Timer(device=self.device)
        self.history = History(self.device)
        source = Inputs(splits.source_train, self.device)
        self.input_shape = source.shape
        classes = len(splits.source_train.class_names)
        built = build_algorithm(config, source.shape, classes, algorithm=algorithm, network=network).to(self.device)
        built.use_populations(len(splits.source_train), len(splits.target_unlabelled))
        if built.units is not None:
            built.units.fit(splits.source_train.known_labels(), splits.source_train.class_names)
        self.backbone = take_out_backbone(config, built)
        if self.processes.count > 1 and self.device.type == "cuda":  # elsewhere each process normalises its own part
            built = nn.SyncBatchNorm.convert_sync_batchnorm(built)  # type: ignore[no-untyped-call]
        built.processes = self.processes
        self.algorithm = built
        # all optimisers of a step see one scale: it changes only when the step is over
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "16-mixed")
        self.optimisers = make_optimisers(config, built)
        self.schedule = Schedule(config.lr_schedule, config.steps, self.optimisers)
        self._scaled: dict[str, Any] = {
            role: ScaledOptimiser(each, self.scaler) for role, each in self.optimisers.items()
        }
        self.streams = training_streams(config, splits, source, built, samplers=samplers)
        self.strata = StrataUpdater(config, built, self.streams, account=self.account)
        self.evaluator = Evaluator(config, splits, self.device, observed=observed)
        self.choice = ModelChoice(config.selection, built.full_strength)
        self.step = 0
        self._kept: dict[str, Tensor] | None = None  # weights of the chosen model

    # --- the loop -------------------------------------------------------------------------------------

    def run(self, *, resume: bool = False, progress: Progress | None = None) -> RunResult:
        """Train until ``config.steps``.

        Ctrl-C finishes the current step, writes a checkpoint and returns; a second Ctrl-C stops immediately. A
        KeyboardInterrupt raised by ``progress`` counts as the first.

        Parameters
        ----------
        resume : bool
            Resume from the checkpoint in ``out``, or start from the beginning if there is none yet.
        progress : callable, optional
            ``progress(share_done, message)`` after each step.
        """
        if self._starts_processes:
            self._check_begin(resume)
            with tempfile.TemporaryDirectory(prefix="vardass-") as spare:  # for a run without a folder of its own
                folder = self.folder or RunFolder(Path(spare))
                run_in_processes(self, folder, resume=resume or self.step > 0, progress=progress)
            self._tell_if_interrupted()
            return self._result()
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), deferred_interrupt() as asked_to_stop:
            tell = _noting(progress, asked_to_stop)
            self._start(resume, tell)
            self.algorithm.train()
            try:
                while self.step < self.config.steps:
                    stop, log = self.strata.before_step(self.step, stop=bool(asked_to_stop))
                    if stop:
                        break
                    self.history.add_refresh(log)
                    self._one_step()
                    is_last = self.step == self.config.steps
                    if is_last or self.step % self.config.eval_every == 0:
                        self._evaluate()
                    if not is_last and self.step % self.config.checkpoint_every == 0:
                        self._save()
                    if tell is not None:
                        message = self.history.message(self.step, self.config.steps, self.account)
                        tell(self.step / self.config.steps, message)
                self._save()
            except InputError as error:
                if isinstance(error.__cause__, OSError):
                    # a disk that has no room for a checkpoint may have some for the model, which is smaller
                    self._save_model(self._result())
                elif self._has_diverged():
                    raise VardassError(
                        f"training diverged: after step {self.step} losses or weights are not finite numbers; lower "
                        f"lr={self.config.lr} or the penalty"
                    ) from error
                raise
            finally:
                for stream in self.streams.values():
                    stream.close()
                if self.tensorboard is not None:
                    self.tensorboard.close()
            result = self._result()
            self._save_model(result)
            self._tell_if_interrupted()
            return result

    def _has_diverged(self) -> bool:
        # weights whose squares overflow make features that do
        sizes = [parameter.detach().square().sum() for parameter in self.algorithm.parameters()]
        return self.step > 0 and not all(bool(value.isfinite().all()) for value in (*sizes, *self.history.losses))

    def _one_step(self) -> None:
        with self.account("drawing"):
            draws = {name: stream.draw(augment_seed=self._augment_seed(name)) for name, stream in self.streams.items()}
            draws = self.strata.completed(draws)
        with self.account("training"):
            # dropout and the like draw from the global generators: their state is a function of the step alone
            seed_generators(named_seed("step", self.config.seed, self.step, *self._own_seed), self.device)
            self.schedule.before_step(self.step)
            self.history.add_losses(self._update(draws))
        if self.strata.banks:
            with self.account("features"):
                self.strata.after_step(draws, self.algorithm.computed)
        self.step += 1

    def _update(self, draws: dict[str, Draw]) -> dict[str, Tensor]:
        source = draws["source"].batch
        target = draws["target"].batch if "target" in draws else None
        self.algorithm.computed = {}
        with self.config.autocast(self.device):
            parts = self.algorithm.update(source, target, self.step, optimisers=self._scaled, backward=self._backward)
        self.scaler.update()
        self.processes.average_statistics(self.algorithm)
        return parts

    def _backward(self, loss: Tensor) -> None:
        """Write the gradients of the scaled loss, the same ones on all processes."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.processes.average_gradients(self.algorithm.parameters())

    @property
    def _own_seed(self) -> tuple[int, ...]:
        """Random numbers of this process's part of a batch are its own."""
        return (self.processes.rank,) if self.processes.rank else ()

    def _augment_seed(self, name: str) -> int | None:
        if self.config.augment not in (name, "both"):
            return None
        return named_seed("augment", name, self.config.seed, self.step, *self._own_seed)

    # --- beginning, evaluation, end -------------------------------------------------------------------

    def _check_begin(self, resume: bool) -> None:
        if self.folder is not None and self.folder.has_checkpoint:
            self.folder.load(self.config, resume=resume)
        elif self.step and not resume:
            raise InputError(f"this trainer is at step {self.step}; pass resume=True to continue, or create a new one")

    def _start(self, resume: bool, progress: Progress | None) -> None:
        spent = dict(self.account.seconds)  # that of killed attempts, where the caller has noted it
        if self.backbone is not None:
            with self.account("features"):
                everything = [stream.inputs for stream in self.streams.values()] + self.evaluator.inputs
                embed(everything, self.backbone, self.algorithm.network.preprocessing, self.config, progress=progress)
        if self.folder is not None and self.folder.has_checkpoint:
            now = dict(self.account.seconds)
            self.load_state_dict(self.folder.load(self.config, resume=resume))
            for part, seconds in now.items():  # beyond the checkpoint's, and since the beginning of this method
                before = spent.get(part, 0.0)
                lost = max(0.0, before - self.account.seconds.get(part, 0.0))
                self.account.add(part, lost + seconds - before)
            if self.processes.is_first:
                self.folder.write_metrics(self.history.metrics)  # without those of steps that are to be done again
        else:
            self._check_begin(resume)
            if not self.step:
                if self.folder is not None and self.processes.is_first:
                    self.folder.begin(self.config)
                self.strata.begin(progress)
        if self.tensorboard is not None and self.processes.is_first:
            self.tensorboard.begin(self.step)

    def _evaluate(self) -> None:
        with self.account("evaluation"):
            losses = self.history.take_losses(self.step, self.config.lr)
            found = self.evaluator(self.algorithm, self.step) if self.processes.is_first else None
            scores, judged = self.processes.same(found)
            if self.choice.offer(self.step, judged):
                self._kept = {name: value.detach().clone() for name, value in self.algorithm.state_dict().items()}
        line = {"step": self.step, **losses, **scores, "score": judged.score, "best_step": self.choice.step}
        line |= {**self.history.strata_log, "seconds": dict(self.account.seconds)}
        self.history.metrics.append(line)
        if self.processes.is_first:
            if self.folder is not None:
                self.folder.add_metrics(line)
            if self.tensorboard is not None:
                rates = {f"lr/{role}": each.param_groups[-1]["lr"] for role, each in self.optimisers.items()}
                self.tensorboard.add({**line, **rates})

    def _result(self) -> RunResult:
        chosen = copy.deepcopy(self.algorithm)
        chosen.processes = Processes()
        if self._kept is not None:
            chosen.load_state_dict(self._kept)
        if self.backbone is not None:
            chosen.network.featuriser = self.backbone
        if self._starts_processes:
            chosen = chosen.to(pick_device(self.config.device))
        return RunResult(
            config=self.config,
            algorithm=chosen.eval(),
            step=self.step,
            selected_step=self.step if self.choice.step is None else self.choice.step,
            score=self.choice.score,
            equal_steps=self.choice.equal,
            competing=self.choice.competing,
            interrupted=self.step < self.config.steps,
            metrics=list(self.history.metrics),
            seconds=dict(self.account.seconds),
            out=self.out,
            own_parts=self.own_parts,
        )

    def _tell_if_interrupted(self) -> None:
        alone = self._starts_processes or self.processes.count == 1
        if self.step < self.config.steps and self.processes.is_first and alone:
            kept = "nothing was saved, as there is no folder" if self.out is None else f"all is saved in {self.out}"
            message = f"stopped after step {self.step} of {self.config.steps}; {kept}; resume it to continue"
            print(message, file=sys.stderr, flush=True)

    # --- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on; learning rates follow from the step."""
        return {
            "step": self.step,
            "algorithm": dict(self.algorithm.state_dict()),
            "algorithm_extra": self.algorithm.extra_state(),
            "optimisers": {role: optimiser.state_dict() for role, optimiser in self.optimisers.items()},
            "scaler": self.scaler.state_dict(),
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "banks": {name: bank.state_dict() for name, bank in self.strata.banks.items()},
            "refresher": self.strata.refresher.state_dict(),
            "choice": self.choice.state_dict(),
            "kept": self._kept,
            "own_parts": self.own_parts,
            **self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        source = "the state" if self.folder is None else self.folder.path / CHECKPOINT_FILE
        with reading(source, "put a copy of it in its place, or start over in another folder"):
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        if state["own_parts"] != self.own_parts:
            raise InputError(
                f"the run had {_shown(state['own_parts'])} of its own, this trainer has {_shown(self.own_parts)}; give "
                "the trainer the same kinds of objects, or choose another folder"
            )
        self._kept = state["kept"]
        for weights in (self._kept, state["algorithm"]):  # those that are kept have to fit too
            if weights is not None or weights is state["algorithm"]:
                self.algorithm.load_state_dict(weights)
        self.algorithm.load_extra_state(state.get("algorithm_extra", {}))
        for role, optimiser in self.optimisers.items():
            load_optimiser(optimiser, state["optimisers"][role])
        self.scaler.load_state_dict(state["scaler"])
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        for name, bank in self.strata.banks.items():
            bank.load_state_dict(state["banks"][name])
        self.strata.refresher.load_state_dict(state["refresher"])
        self.step = check_count(state["step"], "step", low=0)
        self.choice.load_state_dict(state["choice"])
        self.history.load_state_dict(state)

    def _save(self) -> None:
        if self.folder is not None and self.processes.is_first:
            with self.account("saving"):
                self.folder.save(self.config, self.state_dict())

    def _save_model(self, result: RunResult) -> None:
        if self.out is not None and self.processes.is_first:
            save_model(result, self.out / MODEL_FILE, self.splits.source_train, input_shape=self.input_shape)


def _check(config: Any, splits: Any) -> None:
    if not isinstance(config, RunConfig):
        raise InputError(f"config must be a RunConfig, got {config!r}; use RunConfig(...)")
    if not isinstance(splits, TaskSplits):
        raise InputError(f"splits must be TaskSplits, got {splits!r}; use split_task(task, seed=0)")
    if splits.source_train.regression != config.regression:
        have = "numbers" if splits.source_train.regression else "classes"
        raise InputError(
            f"the labels of the source are {have}, but the settings say regression={config.regression}; use "
            f"regression={not config.regression} to predict them"
        )
    if not config.regression and len(names := splits.source_train.class_names) == 1:
        raise InputError(
            f"all samples of the source {splits.source_train.name!r} are of 1 class, {names[0]!r}, and a classifier "
            "needs 2; add samples of other classes"
        )


def _shown(own_parts: Mapping[str, str]) -> str:
    return ", ".join(f"{part} {kind}" for part, kind in own_parts.items()) or "no parts"


def _noting(progress: Progress | None, asked_to_stop: list[bool]) -> Progress | None:
    """``progress``, but a KeyboardInterrupt is only noted: other processes would wait for one that leaves."""
    if progress is None:
        return None

    def noting(share: float, message: str) -> None:
        try:
            progress(share, message)
        except KeyboardInterrupt:
            asked_to_stop.append(True)

    return noting


# --- how long a run will take -----------------------------------------------------------------------------

_FEW = 4  # samples of a domain in the first batch that is timed
_QUICK = 1.0  # seconds of a whole batch: where it takes less, whole ones are timed too
_PLAIN: dict[str, Any] = {  # batches that need no pass over all samples
    "sampler": "uniform",
    "sampler_options": {},
    "class_shares": "none",
    "class_options": {},
    "batch_per_source": False,
    "target_batch_size": None,
    "cache_embeddings": False,
    "selection": "last",
    "steps": 1,
    "tensorboard": False,
    "devices": 1,
    "workers": 0,
}


def seconds_needed(config: RunConfig, splits: TaskSplits) -> float:
    """Estimate of the seconds of a run from a step on a few samples, before anything that takes long has begun.

    Included are steps, evaluations and the first features of all samples; for samples that take long, which this is
    made for, solver and refreshes are a small part.
    """
    sizes = [config.batch_size, config.target_batch_size or config.batch_size]
    if config.batch_per_source:
        sizes[0] *= len(set(splits.source_train.domain_ids.tolist()))
    fewest = min(*sizes, len(splits.source_train), len(splits.target_unlabelled))
    step, forward = _timed(config, splits, few := min(_FEW, fewest))
    if step / few * sum(sizes) / 2 < _QUICK:  # a small batch takes more time for a sample, as does the first of all
        step, forward = _timed(config, splits, few := fewest)
    steps = config.steps * step / few * sum(sizes) / 2
    trained = len(splits.source_train) + len(splits.target_unlabelled)
    scored = len(splits.source_val) + (len(splits.target_val) or len(splits.target_unlabelled))
    return steps + forward * (trained + scored * math.ceil(config.steps / config.eval_every))


def _timed(config: RunConfig, splits: TaskSplits, size: int) -> tuple[float, float]:
    """Seconds of a step on ``size`` samples of each domain, and of a forward pass of one sample."""
    some, none = torch.arange(size), torch.arange(0)
    few = TaskSplits(
        source_train=splits.source_train.subset(some),
        source_val=splits.source_train.subset(none),
        target_unlabelled=splits.target_unlabelled.subset(some),
        target_test=splits.target_test.subset(none),
        target_val=splits.target_val.subset(none),
    )
    trainer = Trainer(config.changed(**_PLAIN, batch_size=size), few)
    with torch.random.fork_rng(devices=[trainer.device] if trainer.device.type == "cuda" else []):
        trainer.strata.begin()
        trainer.algorithm.train()
        trainer._one_step()
        trainer._evaluate()
    spent = trainer.account.seconds
    return spent["training"] + spent["drawing"], spent["evaluation"] / size
