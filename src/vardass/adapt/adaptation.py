"""An adapted model beside a source-only reference, the vote of both, and the choice of what to ship.

A discrepancy can make a model worse than training on the source alone, for example where classes are absent from the
target. So a reference is trained too, on the source alone, and the model that ships is chosen without target labels.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs, in_memory
from vardass.adapt.class_structure import (
    Evidence,
    Vote,
    agreement,
    class_separation,
    fit_class_space,
    judge,
    nearest_neighbours,
)
from vardass.adapt.config import RunConfig
from vardass.adapt.model import MODEL_FILE, Choice, RunResult, build_algorithm, save_model
from vardass.adapt.selection import label_scores, outputs
from vardass.adapt.trainer import Trainer
from vardass.data.domains import Domain
from vardass.data.splits import TaskSplits
from vardass.validate import Progress, some_rows

REFERENCE_FOLDER = "reference"
_SHARE = 0.3  # of the time of both runs that the reference takes, for the progress bar
_FEWER = 2  # where a step is slow, the reference trains for this fraction of the steps
_FIT_ROWS, _JUDGED_ROWS = 50_000, 4096  # of a domain that spaces are fitted to, and predictions compared on
_MOST_VALUES = 10**8  # of samples that neighbours are found among as they are
_MIN_R2_GAIN = 0.04  # in agreement of neighbours, for the adapted model of a regression
_MAX_R2_LOSS = 0.01  # on the source


class Adaptation:
    """Two runs, source-only and adapted, and the choice between them; for data that one has no target labels of.

    Parameters
    ----------
    config : RunConfig
        Settings of the adapted run.
    splits : TaskSplits
        From ``split_task``. No target label is read.
    out : path, optional
        Folder of the adapted run; that of the source-only one is ``reference`` below it.

    Examples
    --------
    >>> from vardass.data import load_task, split_task
    >>> splits = split_task(load_task("watch", "left-A->right-B"), seed=0)
    >>> Adaptation(RunConfig.recommended(steps=8), splits).run().choice.model
    'vote'
    """

    def __init__(self, config: RunConfig, splits: TaskSplits, out: str | os.PathLike[str] | None = None) -> None:
        self.config, self.splits = config, splits
        self.trainer = Trainer(config, splits, out)
        self.reference: Trainer | None = None
        algorithm = self.trainer.algorithm
        if algorithm.uses_target and algorithm.seen_together == 1:
            folder = None if out is None else Path(out) / REFERENCE_FOLDER
            self.reference = Trainer(source_only(config, splits), splits, folder)

    def run(self, *, resume: bool = False, progress: Progress | None = None) -> RunResult:
        """Train both, choose, and write the model that was chosen; arguments as of `Trainer.run`.

        Returns
        -------
        RunResult
            Of the adapted run, with the chosen model as its ``algorithm``, and with its ``choice``.
        """
        if self.reference is None:
            return self.trainer.run(resume=resume, progress=progress)
        adapted = self.trainer.run(resume=resume, progress=_share_of(progress, 0.0, 1.0 - _SHARE, ""))
        if adapted.interrupted:
            return adapted
        reference = self.reference.run(resume=resume, progress=_share_of(progress, 1.0 - _SHARE, 1.0, "source-only: "))
        if reference.interrupted:
            return replace(adapted, interrupted=True)
        with self.trainer.account("choice"):
            result = choose_model(adapted, reference, self.splits)
        if self.trainer.out is not None and self.trainer.processes.is_first:
            kept = reference if result.choice is not None and result.choice.model == "source-only" else result
            saved = replace(kept, algorithm=result.algorithm, choice=result.choice)
            save_model(
                saved, self.trainer.out / MODEL_FILE, self.splits.source_train, input_shape=self.trainer.input_shape
            )
        return replace(result, seconds=_sum(reference.seconds, dict(self.trainer.account.seconds)))


def source_only(config: RunConfig, splits: TaskSplits) -> RunConfig:
    """Settings of the source-only reference of a run: the same network, without target and strata.

    Where a step is slow, which it is on samples that are not embeddings, it trains for half the steps.
    """
    slow = splits.source_train.kind != "features"
    return config.changed(
        algorithm="erm",
        algorithm_options={},
        sampler="uniform",
        sampler_options={},
        class_shares="none",
        class_options={},
        steps=max(1, config.steps // _FEWER) if slow else config.steps,
        tensorboard=False,
    )


@torch.no_grad()
def choose_model(adapted: RunResult, reference: RunResult, splits: TaskSplits) -> RunResult:
    """The adapted run with the model that should ship: the vote of both, or the source-only one.

    In a regression there is no vote, and the adapted model itself is compared. Labels of the target are not read.
    """
    target = splits.target_unlabelled
    picked = target.subset(some_rows(torch.arange(len(target)), _JUDGED_ROWS))
    _, before = _outputs(reference, picked)
    labelled = splits.source_train.subset(some_rows(torch.arange(len(splits.source_train)), _JUDGED_ROWS))
    neighbours = _untrained_neighbours(adapted, picked, labelled).to(before.device)
    scores = _source_score(reference, splits), _source_score(adapted, splits)
    evidence: Evidence | RegressionEvidence
    if adapted.config.regression:
        model, candidate = "adapted", adapted.algorithm
        _, after = _outputs(adapted, picked)
        r2 = (math.nan if score is None else score for score in scores)
        evidence = RegressionEvidence(*r2, *(number_agreement(y, neighbours) for y in (before, after)))
    else:
        model = "vote"
        candidate, separation = _fit_vote(adapted, reference, splits)
        votes = _outputs(replace(adapted, algorithm=candidate), picked)[1].exp()
        evidence = judge(separation, before.argmax(1), votes, neighbours)
    objection = evidence.objection
    choice = Choice(model if objection is None else "source-only", objection, *scores, evidence._asdict())
    return replace(adapted, algorithm=candidate if objection is None else reference.algorithm, choice=choice)


def _fit_vote(adapted: RunResult, reference: RunResult, splits: TaskSplits) -> tuple[Algorithm, float]:
    """The adapted algorithm with a vote in place of its head, and how well class means separate the source."""
    source, target, classes = splits.source_train, splits.target_unlabelled, len(splits.source_train.class_names)
    source, target = (domain.subset(some_rows(torch.arange(len(domain)), _FIT_ROWS)) for domain in (source, target))
    held_out = splits.source_val if len(splits.source_val) else source
    labels, truth = source.known_labels(), held_out.known_labels()
    features = {
        name: [_outputs(run, domain)[0] for domain in (source, target, held_out)]
        for name, run in (("reference", reference), ("adapted", adapted))
    }
    separated = features["reference"]
    if source.kind == "features":
        separated = [_flat(domain) for domain in (source, target, held_out)]
        features = {"inputs": separated, "inputs_by_domain": separated, **features}
    device = next(adapted.algorithm.parameters()).device
    labels, truth = labels.to(device), truth.to(device)
    spaces = {
        name: fit_class_space(x.to(device), labels, t.to(device), classes, by_domain=name == "inputs_by_domain")
        for name, (x, t, _) in features.items()
    }
    candidate = copy.deepcopy(adapted.algorithm)
    candidate.final = Vote(copy.deepcopy(reference.algorithm.network), spaces).to(device).eval()
    x, _, v = (z.to(device) for z in separated)
    return candidate, class_separation(x, labels, v, truth, classes)


def _outputs(run: RunResult, domain: Domain) -> tuple[Tensor, Tensor]:
    inputs = Inputs(domain, next(run.algorithm.parameters()).device)
    return outputs(run.algorithm, inputs, **run.config.pass_options)


def _flat(domain: Domain) -> Tensor:
    samples = in_memory(domain.dataset)
    if samples is None:
        samples = torch.stack([domain.dataset[row] for row in range(len(domain))])
    return samples.flatten(1)


def _untrained_neighbours(adapted: RunResult, target: Domain, source: Domain) -> Tensor:
    """Neighbours (m, j) of target samples in a space that neither run was trained in.

    Embeddings are that space. For images and sounds it is the one of two in which neighbours in the source share their
    labels more: the samples as they are, or the network's features before training.
    """
    if target.kind == "features":
        return nearest_neighbours(_flat(target))
    shape = tuple(target.dataset[0].shape)
    beginning = build_algorithm(adapted.config, shape, len(target.class_names)).eval()
    untrained = replace(adapted, algorithm=beginning.to(next(adapted.algorithm.parameters()).device))
    spaces = [tuple(_outputs(untrained, domain)[0] for domain in (target, source))]
    if math.prod(shape) * max(len(target), len(source)) <= _MOST_VALUES:
        spaces.insert(0, (_flat(target), _flat(source)))  # of two that are as good

    def shared(space: tuple[Tensor, ...]) -> float:
        near = nearest_neighbours(space[1])
        labels = source.known_labels().to(near.device)
        if labels.is_floating_point():
            return number_agreement(labels, near)
        return agreement(labels, near, len(target.class_names))

    return nearest_neighbours(max(spaces, key=shared)[0])


def _source_score(run: RunResult, splits: TaskSplits) -> float | None:
    """Accuracy, or R², on held-out source samples."""
    if not len(splits.source_val):
        return None
    scores = label_scores(_outputs(run, splits.source_val)[1], splits.source_val.known_labels())
    return scores["r2" if run.config.regression else "accuracy"]


def number_agreement(values: Tensor, neighbours: Tensor) -> float:
    """How much of the variance of predicted numbers (n, m) the mean of each sample's neighbours explains."""
    y = values.double()
    residual = (y - y[neighbours].mean(1)).square().sum()
    return float(1.0 - residual / (y - y.mean(0)).square().sum().clamp_min(torch.finfo(y.dtype).tiny))


class RegressionEvidence(NamedTuple):
    """What speaks for and against the adapted model of a regression; all without target labels.

    ``source_only`` and ``adapted`` are R² on held-out source samples, NaN if there are none; ``reference`` and
    ``candidate`` are the `number_agreement` of both models in the target.
    """

    source_only: float
    adapted: float
    reference: float
    candidate: float

    @property
    def objection(self) -> str | None:
        """Why the source-only model is the better choice; None if the adapted one is."""
        if self.adapted < self.source_only - _MAX_R2_LOSS:
            return "the adapted model is worse on the source"
        if not self.candidate - self.reference >= _MIN_R2_GAIN:
            return "neighbouring target samples have as similar numbers without adaptation"
        return None


def _share_of(progress: Progress | None, start: float, end: float, prefix: str) -> Progress | None:
    """``progress`` for a part of the work."""
    if progress is None:
        return None
    return lambda share, message: progress(start + (end - start) * share, f"{prefix}{message}")


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**other, **one}}
