"""The training loop: batches of both domains, refreshes, evaluations, and checkpoints that resume bit for bit."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vardass.adapt.config import RunConfig
from vardass.adapt.evaluation import Evaluator
from vardass.adapt.folder import RunFolder
from vardass.adapt.outcome import MODEL_FILE, RunResult, build_algorithm, save_model
from vardass.adapt.samplers_by_name import algorithm_kernel, make_sampler
from vardass.adapt.streams import Draw, Inputs, Stream, recorded_features
from vardass.adapt.surroundings import (
    deferred_interrupt,
    make_optimisers,
    own_randomness,
    pick_device,
    plain_backward,
    say,
    seed_everything,
)
from vardass.data.splits import TaskSplits, derived_seed
from vardass.errors import InputError, VardassError
from vardass.refresh import FeatureBank, NeverRefresh, Refresher, RefreshEvery, RefreshPolicy, TimeAccount
from vardass.refresh.extract import Progress, extract_features

__all__ = ["Trainer"]


class Trainer:
    """Train one algorithm with one sampler on one task.

    All randomness comes from ``config.seed`` and the step, so a run is determined by its settings, and a resumed
    one is the same as one that was never interrupted.

    Parameters
    ----------
    config : RunConfig
        Settings.
    splits : TaskSplits
        From ``split_task``. Labels of the target are not read, except those of ``target_val`` under the selection
        ``"oracle"``, which the caller has to reveal.
    out : path, optional
        Folder for checkpoints, metrics and the model; None keeps all in memory.
    backward : callable, optional
        Called with the loss instead of ``loss.backward()``.

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
        backward: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.config = config
        self.splits = splits
        self.out = None if out is None else Path(out)
        self.folder = None if self.out is None else RunFolder(self.out)
        self.device = pick_device(config.device)
        self.backward: Callable[[Tensor], None] = backward or plain_backward
        self.account = TimeAccount(device=self.device)
        source = Inputs(splits.source_train, self.device)
        self.algorithm = build_algorithm(config, source.shape, len(splits.source_train.class_names)).to(self.device)
        self.optimisers = make_optimisers(config, self.algorithm)
        labels = splits.source_train.known_labels()
        self.streams = {"source": self._stream("source", source, labels, config.batch_size)}
        if self.algorithm.uses_target:
            target = Inputs(splits.target_unlabelled, self.device)
            size = config.batch_size if config.target_batch_size is None else config.target_batch_size
            self.streams["target"] = self._stream("target", target, None, size)
        self.banks = {
            name: FeatureBank(len(stream.inputs), device=self.device)
            for name, stream in self.streams.items()
            if self._refreshes and config.feature_source == "bank" and stream.sampler.needs_features
        }
        self.refresher = Refresher(
            self._policy(),
            {name: stream.sampler for name, stream in self.streams.items()},
            {name: self.banks.get(name, partial(self._all_features, name)) for name in self.streams},
            account=self.account,
        )
        self.evaluator = Evaluator(config, splits, self.device)
        self.step = 0
        self.metrics: list[dict[str, Any]] = []
        self._best: dict[str, Any] | None = None
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._strata_log: dict[str, float] = {}

    # --- the loop -------------------------------------------------------------------------------------

    def run(self, *, resume: bool = False, progress: Progress | None = None) -> RunResult:
        """Train until ``config.steps``.

        Ctrl-C finishes the present step, writes a checkpoint and returns; a second one stops at once. A
        KeyboardInterrupt that ``progress`` raises is taken as the first.

        Parameters
        ----------
        resume : bool
            Go on from the checkpoint in ``out``, or from the beginning if there is none yet.
        progress : callable, optional
            ``progress(share_done, message)`` after each step.
        """
        with own_randomness(self.device), deferred_interrupt() as asked_to_stop:
            self._start(resume)
            try:
                while self.step < self.config.steps and not asked_to_stop:
                    self._one_step()
                    if self._is_due(self.config.eval_every):
                        self._evaluate()
                    if self.step % self.config.checkpoint_every == 0 and self.step < self.config.steps:
                        self._save()
                    try:
                        self._report(progress)
                    except KeyboardInterrupt:
                        asked_to_stop.append(True)
            finally:
                for stream in self.streams.values():
                    stream.close()
            return self._finish()

    def _one_step(self) -> None:
        log = self.refresher.step(self.step)
        if log is not None:
            self._strata_log = {key: value for key, value in log.items() if "seconds" not in key and key != "step"}
        with self.account("drawing"):
            draws = {name: stream.draw(augment_seed=self._augment_seed(name)) for name, stream in self.streams.items()}
        with self.account("training"):
            # dropout and the like draw from the global generators: their state is a function of the step alone
            seed_everything(derived_seed("step", self.config.seed, self.step), self.device)
            features, parts = self._update(draws)
            for name, value in parts.items():
                self._sums[name] = self._sums[name] + value if name in self._sums else value
                self._counts[name] = self._counts.get(name, 0) + 1
        if self.banks:
            with self.account("features"):
                self._remember(draws, features)
        self.step += 1

    def _update(self, draws: dict[str, Draw]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        source = draws["source"].batch
        target = draws["target"].batch if "target" in draws else None
        half = self.config.autocast_dtype
        self.algorithm.train()
        recorder: AbstractContextManager[dict[str, Tensor]] = nullcontext({})
        if self.banks:
            recorder = recorded_features(self.algorithm, source, target)
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half is not None)
        with recorder as features, autocast:
            parts = self.algorithm.update(source, target, self.step, optimisers=self.optimisers, backward=self.backward)
        return features, parts

    def _remember(self, draws: dict[str, Draw], features: dict[str, Tensor]) -> None:
        for name in self.banks:
            if name in features:
                draw = draws[name]
                self.refresher.observe(name, draw.indices, features[name], step=self.step, weights=draw.batch.weights)
            elif name == "source":
                raise InputError(
                    f"a network of type {type(self.algorithm.network).__name__} does not show the features of its "
                    "steps to the feature bank; use feature_source='full'"
                )

    def _is_due(self, period: int) -> bool:
        return self.step % period == 0 or self.step == self.config.steps

    def _augment_seed(self, name: str) -> int | None:
        return derived_seed("augment", name, self.config.seed, self.step) if self.config.augment else None

    def _report(self, progress: Progress | None) -> None:
        if progress is None:
            return
        # from the last evaluation and refresh: reading the present loss would wait for the device
        parts = [f"step {self.step} of {self.config.steps}"]
        if self.metrics and "loss/total" in self.metrics[-1]:
            parts.append(f"loss {self.metrics[-1]['loss/total']:.4g}")
        if "source/reduction" in self._strata_log:
            parts.append(f"variance reduced {self._strata_log['source/reduction']:.3g}x")
        share = sorted(self.account.share().items(), key=lambda item: -item[1])
        parts.append(" ".join(f"{name} {part:.0%}" for name, part in share[:3]))
        progress(self.step / self.config.steps, ", ".join(parts))

    # --- strata ---------------------------------------------------------------------------------------

    @property
    def _refreshes(self) -> bool:
        return self.config.refresh_every > 0 and self.config.sampler != "kmeans-inputs"

    def _policy(self) -> RefreshPolicy:
        return RefreshEvery(self.config.refresh_every) if self._refreshes else NeverRefresh()

    def _stream(self, name: str, inputs: Inputs, labels: Tensor | None, batch_size: int) -> Stream:
        config = self.config
        sampler = make_sampler(
            config.sampler,
            len(inputs),
            batch_size,
            kernel=algorithm_kernel(self.algorithm),
            seed=derived_seed("sampler", name, config.seed),
            **config.sampler_options,
        )
        return Stream(inputs, labels, sampler, workers=config.workers)

    def _all_features(self, name: str) -> Tensor:
        inputs = self.streams[name].inputs
        return extract_features(self.algorithm, inputs.data, out_device=self.device, **self._pass_options(inputs))

    def _pass_options(self, inputs: Inputs) -> Any:
        return {
            "forward": lambda model, x: model.features(inputs.prepare(x)),
            "batch_size": self.config.eval_batch_size,
            "device": self.device,
            "num_workers": self.config.workers,
            "autocast_dtype": self.config.autocast_dtype,
        }

    # --- beginning, evaluation, end -------------------------------------------------------------------

    def _start(self, resume: bool) -> None:
        if self.folder is not None and self.folder.has_checkpoint:
            self.load_state_dict(self.folder.load(self.config, resume=resume))
            self.folder.write_metrics(self.metrics)  # without those of steps that are to be done again
            return
        if self.step:
            if resume:
                return
            raise InputError(f"this trainer is at step {self.step}; pass resume=True to go on, or make a new one")
        if self.folder is not None:
            self.folder.begin(self.config)
        with self.account("features"):
            for name, bank in self.banks.items():
                inputs = self.streams[name].inputs
                bank.fill(self.algorithm, inputs.data, step=0, **self._pass_options(inputs))
        if self.config.sampler == "kmeans-inputs":
            for stream in self.streams.values():
                with self.account("solver"):
                    stream.sampler.refresh(stream.inputs.flat())

    def _evaluate(self) -> None:
        with self.account("evaluation"):
            losses = {f"loss/{name}": float(total) / self._counts[name] for name, total in self._sums.items()}
            self._sums, self._counts = {}, {}
            if not all(math.isfinite(value) for value in losses.values()):
                raise VardassError(
                    f"the loss is not finite at step {self.step}: {losses}; lower lr={self.config.lr} or the penalty"
                )
            scores, score = self.evaluator(self.algorithm, self.step)
            if self._best is None or score > self._best["score"]:
                weights = {name: value.detach().clone() for name, value in self.algorithm.state_dict().items()}
                self._best = {"score": score, "step": self.step, "weights": weights}
        line = {"step": self.step, **losses, **scores, "score": score, "best_step": self._best["step"]}
        self.metrics.append({**line, **self._strata_log, "seconds": dict(self.account.seconds)})
        if self.folder is not None:
            self.folder.add_metrics(self.metrics[-1])

    def _finish(self) -> RunResult:
        interrupted = self.step < self.config.steps
        self._save()
        chosen = copy.deepcopy(self.algorithm)
        if self._best is not None:
            chosen.load_state_dict(self._best["weights"])
        result = RunResult(
            config=self.config,
            algorithm=chosen.eval(),
            step=self.step,
            selected_step=self.step if self._best is None else self._best["step"],
            score=None if self._best is None else self._best["score"],
            interrupted=interrupted,
            metrics=list(self.metrics),
            seconds=dict(self.account.seconds),
            out=self.out,
        )
        if self.out is not None:
            domain, shape = self.splits.source_train, self.streams["source"].inputs.shape
            save_model(result, self.out / MODEL_FILE, domain.class_names, input_shape=shape, kind=domain.kind)
        if interrupted:
            kept = "nothing was saved, as there is no folder" if self.out is None else f"all is saved in {self.out}"
            say(f"stopped after step {self.step} of {self.config.steps}; {kept}; resume=True (--resume) goes on")
        return result

    # --- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            "step": self.step,
            "algorithm": dict(self.algorithm.state_dict()),
            "optimisers": {role: optimiser.state_dict() for role, optimiser in self.optimisers.items()},
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "banks": {name: bank.state_dict() for name, bank in self.banks.items()},
            "refresher": self.refresher.state_dict(),
            "best": self._best,
            "sums": self._sums,
            "counts": self._counts,
            "strata_log": self._strata_log,
            "metrics": self.metrics,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.algorithm.load_state_dict(state["algorithm"])
        for role, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state["optimisers"][role])
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        for name, bank in self.banks.items():
            bank.load_state_dict(state["banks"][name])
        self.refresher.load_state_dict(state["refresher"])
        self.step, self._best, self._counts = state["step"], state["best"], state["counts"]
        self._sums = {name: value.to(self.device) for name, value in state["sums"].items()}
        self._strata_log, self.metrics = state["strata_log"], state["metrics"]

    def _save(self) -> None:
        if self.folder is not None:
            with self.account("saving"):
                self.folder.save(self.config, self.state_dict())
