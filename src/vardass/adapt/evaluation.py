"""Measurements on held-out data while a run is under way, without target labels."""

from __future__ import annotations

import torch
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.config import RunConfig
from vardass.adapt.outcome import outputs
from vardass.adapt.selection import (
    HeldOut,
    accuracy,
    alignment,
    confidence,
    information_maximisation,
    score,
    soft_neighbourhood_density,
)
from vardass.adapt.streams import Inputs
from vardass.data.domains import LabelsHidden
from vardass.data.splits import TaskSplits
from vardass.errors import InputError

__all__ = ["Evaluator"]

_PAIRS_LIMIT = 2048  # beyond so many samples the density, which looks at all pairs, is measured only if asked for
_NEED_SOURCE = ("source-accuracy", "mmd")


class Evaluator:
    """Score a network on held-out samples: those of ``source_val``, and of ``target_val`` without labels.

    If nothing was held out of the target, the samples that are trained on stand in.

    Parameters
    ----------
    config : RunConfig
        Its ``selection`` says what the score is.
    splits : TaskSplits
        Parts of the task.
    device : torch.device
        Of the network.

    Raises
    ------
    InputError
        If the selection needs held-out source samples or revealed target labels that are not there.
    """

    def __init__(self, config: RunConfig, splits: TaskSplits, device: torch.device) -> None:
        self.config = config
        self.oracle_labels = _oracle_labels(splits) if config.selection == "oracle" else None
        held_out = splits.target_val if len(splits.target_val) else splits.target_unlabelled
        self.target = Inputs(held_out, device)
        self.source: Inputs | None = None
        self.source_labels: Tensor | None = None
        if len(splits.source_val):
            self.source = Inputs(splits.source_val, device)
            self.source_labels = splits.source_val.known_labels()
        elif config.selection in _NEED_SOURCE:
            raise InputError(
                f"selection {config.selection!r} needs held-out source samples, got 0; split with holdout above 0, or "
                "choose by 'information-maximisation' or 'last'"
            )

    @property
    def inputs(self) -> list[Inputs]:
        """Samples that it looks at."""
        return [self.target] if self.source is None else [self.target, self.source]

    def __call__(self, algorithm: Algorithm, step: int) -> tuple[dict[str, float], float]:
        """Measurements by name, and the score by which models are chosen."""
        z_t, logits_t = self._outputs(algorithm, self.target)
        z_s, logits_s = (None, None) if self.source is None else self._outputs(algorithm, self.source)
        found = {
            "target_entropy": -confidence(logits_t),
            "target_information": information_maximisation(logits_t),
        }
        if 2 <= len(logits_t) <= _PAIRS_LIMIT:
            found["target_density"] = soft_neighbourhood_density(logits_t)
        if z_s is not None and logits_s is not None and self.source_labels is not None:
            found["source_accuracy"] = accuracy(logits_s, self.source_labels)
            found["mmd"] = -alignment(z_s, z_t)
        held_out = HeldOut(
            step=step,
            target_logits=logits_t,
            target_features=z_t,
            source_logits=logits_s,
            source_labels=self.source_labels,
            source_features=z_s,
            oracle_labels=self.oracle_labels,
        )
        return found, score(self.config.selection, held_out)

    def _outputs(self, algorithm: Algorithm, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return outputs(
            algorithm,
            inputs,
            batch_size=self.config.eval_batch_size,
            workers=self.config.workers,
            dtype=self.config.autocast_dtype,
        )


def _oracle_labels(splits: TaskSplits) -> Tensor:
    try:
        labels = splits.target_val.labels
    except LabelsHidden:
        labels = None
    if labels is None or not len(labels):
        raise InputError(
            "selection 'oracle' chooses models by target labels, but those of target_val are hidden or absent; call "
            "splits.target_val.reveal() first, or choose by 'source-accuracy'"
        )
    return labels
