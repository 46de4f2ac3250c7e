"""How good a network is on held-out data, scores that need no target labels, and which evaluation's model is kept.

While a discrepancy aligns the domains, source accuracy hardly changes or falls slightly, so its maximum usually
belongs to a network that is not adapted yet. Therefore evaluations compete only from the full penalty on, and the
latest of those without a significant difference on held-out source samples is chosen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs, pass_over
from vardass.adapt.regression import regression_scores
from vardass.data.domains import Domain, LabelsHidden, known_rows
from vardass.data.splits import TaskSplits
from vardass.errors import InputError
from vardass.losses import mmd2
from vardass.samplers.class_alignment import ALIGNMENT_KERNEL
from vardass.validate import as_labels, check_count, some_rows

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig


FIRST_BEST = "domainbed"
"""Name of DomainBed's rule, which the paper follows: the highest source accuracy, of equal ones the first."""

SELECTION_NAMES = ("source-accuracy", FIRST_BEST, "information-maximisation", "last", "oracle")
"""Scores that models are chosen by; ``"oracle"`` reads target labels and is for comparison only."""

REGRESSION_SELECTION_NAMES = ("source-r2", "last", "oracle")
"""Where numbers are predicted."""

NEED_SOURCE = ("source-accuracy", "source-r2", FIRST_BEST)
"""Selections that need held-out source samples."""


class Verdict(NamedTuple):
    """What an evaluation says of a model."""

    score: float
    errors: Tensor | None = None

    def is_worse_than(self, best: Verdict) -> bool:
        """Whether ``best`` is better by more than one standard error, paired on the same samples."""
        if self.errors is None or best.errors is None or len(self.errors) < 2:
            return self.score < best.score
        gap = self.errors.double() - best.errors.double()
        # where one sample differs the two sides are equal but for rounding
        return float(gap.mean()) > (1.0 + 1e-9) * float(gap.std()) / math.sqrt(len(gap))


class ModelChoice:
    """Decide at each evaluation whether its model is the one to keep so far."""

    def __init__(self, selection: str, full_strength: int = 0) -> None:
        self.is_first_best = selection == FIRST_BEST
        self.full_strength = 0 if self.is_first_best else full_strength
        self.step: int | None = None
        self.score: float | None = None
        self._seen: list[tuple[int, Verdict]] = []  # that compete

    def offer(self, step: int, found: Verdict) -> bool:
        """Whether the model of this evaluation should replace the one kept so far."""
        if step >= self.full_strength:
            self._seen.append((step, found))
        best = self._best
        taken = best is None or (best is found if self.is_first_best else not found.is_worse_than(best))
        if taken:
            self.step, self.score = step, found.score
        return taken

    @property
    def equal(self) -> list[int]:
        """Steps of the competing evaluations that are not worse than the best one, which is included."""
        best = self._best
        if best is None:
            return []
        return [step for step, found in self._seen if not found.is_worse_than(best)]

    @property
    def competing(self) -> int:
        """How many evaluations compete."""
        return len(self._seen)

    @property
    def _best(self) -> Verdict | None:
        return max((found for _, found in self._seen), key=lambda found: found.score, default=None)

    def state_dict(self) -> dict[str, Any]:
        """All that later decisions depend on."""
        seen = [{"step": step, **found._asdict()} for step, found in self._seen]
        return {"step": self.step, "score": self.score, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        seen = [(each["step"], Verdict(each["score"], each["errors"])) for each in state["seen"]]
        chosen = [] if state["step"] is None else [(state["step"], Verdict(state["score"]))]
        for step, verdict in (*seen, *chosen):
            check_count(step, "step")
            if not isinstance(verdict.score, float | int) or not isinstance(verdict.errors, Tensor | None):
                raise TypeError(f"a score of type {type(verdict.score).__name__}, or errors that are no tensor")
        self.step, self.score, self._seen = state["step"], state["score"], seen


# --- scores on held-out data --------------------------------------------------------------------------

_TEMPERATURE = 0.05  # of the soft neighbourhood density's authors
_PAIRS_LIMIT = 2048  # beyond so many samples the density, which looks at all pairs, is not measured


SCORE_NAMES: dict[bool, tuple[str, ...]] = {False: ("accuracy",), True: ("rmse", "mae", "r2")}
"""Names of `label_scores`, by whether it is a regression."""


def label_scores(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy of logits (n, classes) for classes (n,), or `regression_scores` for numbers (n, m).

    Samples whose label is unknown, -1 or NaN, are left out.
    """
    if len(labels) == len(outputs):
        known = known_rows(labels)
        outputs, labels = outputs[known.to(outputs.device)], labels[known]
    if labels.is_floating_point():
        return regression_scores(outputs, labels)
    truth = as_labels(labels, len(outputs)).to(outputs.device)
    return {"accuracy": float((outputs.argmax(1) == truth).double().mean())}


def errors(outputs: Tensor, labels: Tensor) -> Tensor:
    """What each sample takes from `label_scores`: whether it is wrong, or its squared error in units of the variance.

    One minus the mean of the result (n,) is the accuracy, or R².
    """
    if not labels.is_floating_point():
        return outputs.argmax(1) != labels.to(outputs.device)
    y = labels.double()
    spread = (y - y.mean(0)).square().mean(0).clamp_min(torch.finfo(y.dtype).tiny)
    return ((outputs.to(y) - y).square() / spread).mean(1).float()


def label_free_scores(logits: Tensor) -> dict[str, float]:
    """Scores of class predictions by ``logits`` (n, classes) that need no labels.

    Returns
    -------
    dict
        ``"target_entropy"``, the mean entropy of the predictions in nats; ``"target_information"``, the entropy of the
        mean prediction minus that, which is high if each prediction is sure and all classes occur; and, for 2 to 2,048
        samples, ``"target_density"``, the mean entropy of each sample's soft neighbours (Saito et al. 2021). With f the
        predictions scaled to length 1, sample i has neighbour j ≠ i with probability proportional to
        exp(<f_i, f_j> / 0.05). Dense clusters of like predictions have many equal neighbours.
    """
    p = logits.detach().double().softmax(1)
    mean_entropy = _entropy(p).mean()
    information = _entropy(p.mean(0, keepdim=True))[0] - mean_entropy
    found = {"target_entropy": float(mean_entropy), "target_information": float(information)}
    if 2 <= len(p) <= _PAIRS_LIMIT:
        f = F.normalize(p, dim=1)
        similar = (f @ f.T / _TEMPERATURE).fill_diagonal_(-torch.inf)
        found["target_density"] = float(_entropy(similar.softmax(1)).sum() / len(p))
    return found


def held_out_mmd2(source_features: Tensor, target_features: Tensor) -> float:
    """MMD² of held-out features by `ALIGNMENT_KERNEL`, on up to 1,000 rows of each domain."""
    with torch.no_grad():
        z = (some_rows(each).double() for each in (source_features, target_features))
        return float(mmd2(*z, kernel=ALIGNMENT_KERNEL))


def _entropy(p: Tensor) -> Tensor:
    """Entropy of each row, in nats: (n,)."""
    entropy: Tensor = torch.special.entr(p).sum(1)
    return entropy


# --- measurements while a run is under way ------------------------------------------------------------


def outputs(algorithm: Algorithm, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """Features (n, d) and logits (n, classes) of all samples of a domain, on the CPU, in evaluation mode.

    In a regression there are numbers (n, m) in their own units instead of logits. ``options`` are those of
    ``extract_features``; ``RunConfig.pass_options`` has a run's.
    """

    def both(model: Algorithm, x: Tensor) -> Tensor:
        z = model.features(x)
        return torch.cat([z, model.decide(x, z)], 1)

    joint = pass_over(algorithm, inputs, both, **options)
    width = joint.shape[1] - algorithm.num_classes
    return joint[:, :width], joint[:, width:]


class Evaluator:
    """Score a network on held-out samples: those of ``source_val``, and of ``target_val`` without labels.

    If nothing was held out of the target, the samples that are trained on stand in.
    """

    def __init__(
        self, config: RunConfig, splits: TaskSplits, device: torch.device, *, observed: Domain | None = None
    ) -> None:
        self.config = config
        self.observed = None if observed is None else (Inputs(observed, device), observed.known_labels())
        self.oracle_labels = _oracle_labels(splits) if config.selection == "oracle" else None
        held_out = splits.target_val if len(splits.target_val) else splits.target_unlabelled
        self.target = Inputs(held_out, device)
        self.source: tuple[Inputs, Tensor] | None = None
        if len(splits.source_val):
            self.source = Inputs(splits.source_val, device), splits.source_val.known_labels()
        elif config.selection in NEED_SOURCE:
            others = "'last'" if config.regression else "'information-maximisation' or 'last'"
            raise InputError(
                f"selection {config.selection!r} needs held-out source samples, got 0; split with holdout above 0, or "
                f"choose by {others}"
            )

    @property
    def inputs(self) -> list[Inputs]:
        """Samples that it looks at."""
        return [self.target, *(labelled[0] for labelled in (self.source, self.observed) if labelled is not None)]

    def __call__(self, algorithm: Algorithm, step: int) -> tuple[dict[str, float], Verdict]:
        """Measurements by name, and that by which models are chosen."""
        options, selection = self.config.pass_options, self.config.selection
        z, target = outputs(algorithm, self.target, **options)
        found = {} if self.config.regression else label_free_scores(target)
        sample_errors = None
        if self.source is not None:
            inputs, labels = self.source
            z_s, source = outputs(algorithm, inputs, **options)
            found |= {f"source_{name}": value for name, value in label_scores(source, labels).items()}
            found["mmd"] = held_out_mmd2(z_s, z)
            if selection in NEED_SOURCE and selection != FIRST_BEST:
                sample_errors = errors(source, labels)
        if self.observed is not None:
            inputs, labels = self.observed
            scores = label_scores(outputs(algorithm, inputs, **options)[1], labels)
            found |= {f"target_{name}": value for name, value in scores.items()}
        if selection == "last":
            return found, Verdict(float(step))
        if self.oracle_labels is not None:
            scores = label_scores(target, self.oracle_labels)
            return found, Verdict(scores["r2" if self.config.regression else "accuracy"])
        return found, Verdict(found[_MEASURED[selection]], sample_errors)


_MEASURED = {
    "source-accuracy": "source_accuracy",
    FIRST_BEST: "source_accuracy",
    "source-r2": "source_r2",
    "information-maximisation": "target_information",
}


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
