"""How good a network is on held-out data, validators that need no target labels, and which evaluation's model is kept.

Source accuracy hardly changes while a discrepancy pulls the domains together, and often falls a little, so its
maximum is mostly that of a network that is not adapted yet. Hence evaluations compete only once the penalty has its
full strength, and of those that held-out source samples cannot tell apart the latest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs, pass_over
from vardass.adapt.regression import regression_scores
from vardass.data.domains import Domain, LabelsHidden
from vardass.data.splits import TaskSplits
from vardass.errors import InputError
from vardass.losses import mmd2
from vardass.registry import Registry
from vardass.samplers.class_alignment import ALIGNMENT_KERNEL, some_rows
from vardass.validate import as_labels, row_blocks

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig

__all__ = [
    "FIRST_BEST",
    "REGRESSION_SELECTION_NAMES",
    "SCORE_NAMES",
    "SELECTION_NAMES",
    "Evaluator",
    "HeldOut",
    "ModelChoice",
    "Verdict",
    "accuracy",
    "alignment",
    "confidence",
    "errors",
    "information_maximisation",
    "label_scores",
    "outputs",
    "score",
    "soft_neighbourhood_density",
]


FIRST_BEST = "domainbed"
"""Name of DomainBed's rule, which the paper follows: the highest source accuracy, of equal ones the first."""


@dataclass(frozen=True, eq=False)
class Verdict:
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
        """Whether the model of this evaluation is to be kept instead of the one before."""
        if step >= self.full_strength:
            self._seen.append((step, found))
        best = self._best
        taken = best is None or (best is found if self.is_first_best else not found.is_worse_than(best))
        if taken:
            self.step, self.score = step, found.score
        return taken

    @property
    def equal(self) -> list[int]:
        """Steps of the evaluations that compete and are as good as the best one; it is among them."""
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
        seen = [{"step": step, "score": found.score, "errors": found.errors} for step, found in self._seen]
        return {"step": self.step, "score": self.score, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.step, self.score = state["step"], state["score"]
        self._seen = [(each["step"], Verdict(each["score"], each["errors"])) for each in state["seen"]]


# --- validators: scores on held-out data, larger is better ---------------------------------------------

_TEMPERATURE = 0.05  # of the soft neighbourhood density's authors
_BLOCK_NUMBERS = 2**22  # similarities held at a time


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What a network gives on held-out samples that it was not trained on."""

    step: int
    target_logits: Tensor
    target_features: Tensor
    source_logits: Tensor | None = None
    source_labels: Tensor | None = None
    source_features: Tensor | None = None
    oracle_labels: Tensor | None = None


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of rows of ``logits`` (n, classes) whose largest entry is at the label: the paper's, on the source."""
    _check_logits(logits)
    truth = as_labels(labels, len(logits)).to(logits.device)
    return float((logits.argmax(1) == truth).double().mean())


SCORE_NAMES: dict[bool, tuple[str, ...]] = {False: ("accuracy",), True: ("rmse", "mae", "r2")}
"""Names of `label_scores`, by whether it is a regression."""


def label_scores(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """`accuracy` of logits (n, classes) for classes (n,), or `regression_scores` for numbers (n, m)."""
    return regression_scores(outputs, labels) if labels.is_floating_point() else {"accuracy": accuracy(outputs, labels)}


def confidence(logits: Tensor) -> float:
    """Minus the mean entropy of the predictions, in nats, at most 0 (Morerio et al. 2018).

    A network that gives every sample the same class surely has the best score: prefer
    `information_maximisation`.
    """
    return -float(_entropy(_probabilities(logits)).mean())


def information_maximisation(logits: Tensor) -> float:
    """Entropy of the mean prediction minus the mean entropy: sure of each sample, and of all classes in turn."""
    p = _probabilities(logits)
    return float(_entropy(p.mean(0, keepdim=True))[0] - _entropy(p).mean())


def soft_neighbourhood_density(logits: Tensor, *, temperature: float = _TEMPERATURE) -> float:
    """Mean entropy of each sample's soft neighbours among the others (Saito et al. 2021).

    With f the predictions scaled to length 1, sample i has neighbour j ≠ i with probability proportional to
    exp(<f_i, f_j> / temperature). Dense clusters of like predictions have many equal neighbours.
    """
    if not temperature > 0:
        raise InputError(f"temperature must be positive, got {temperature}; the authors use {_TEMPERATURE}")
    f = F.normalize(_probabilities(logits), dim=1)
    n = len(f)
    if n < 2:
        raise InputError(f"soft neighbourhood density compares samples, got {n}; hold out more target samples")
    total = f.new_zeros(())
    for rows in row_blocks(n, _BLOCK_NUMBERS // n):
        similar = f[rows] @ f.T / temperature
        here = torch.arange(n, device=f.device)[rows]
        similar[here - rows.start, here] = -torch.inf
        total += _entropy(similar.softmax(1)).sum()
    return float(total / n)


def alignment(source_features: Tensor, target_features: Tensor) -> float:
    """Minus MMD² of held-out features, at most 0, on up to 1,000 rows of each domain.

    With `ALIGNMENT_KERNEL`.
    """
    with torch.no_grad():
        return -float(mmd2(some_rows(source_features), some_rows(target_features), kernel=ALIGNMENT_KERNEL))


def score(name: str, held_out: HeldOut) -> float:
    """Score of a network by the validator ``name``, one of ``SELECTION_NAMES`` or ``REGRESSION_SELECTION_NAMES``."""
    return _VALIDATORS.find(name)(held_out)


def errors(outputs: Tensor, labels: Tensor) -> Tensor:
    """What each sample takes from `label_scores`: whether it is wrong, or its squared error in units of the variance.

    One minus the mean of the result (n,) is the accuracy, or R².
    """
    if not labels.is_floating_point():
        return outputs.argmax(1) != labels.to(outputs.device)
    y = labels.double()
    spread = (y - y.mean(0)).square().mean(0).clamp_min(torch.finfo(y.dtype).tiny)
    return ((outputs.to(y) - y).square() / spread).mean(1).float()


def _source_score(name: str, held_out: HeldOut) -> float:
    if held_out.source_logits is None or held_out.source_labels is None:
        raise InputError(f"'source-{name}' needs held-out source samples, got none; split with holdout above 0")
    return label_scores(held_out.source_logits, held_out.source_labels)[name]


def _alignment(held_out: HeldOut) -> float:
    if held_out.source_features is None:
        raise InputError("'mmd' needs held-out source samples, got none; split with holdout above 0")
    return alignment(held_out.source_features, held_out.target_features)


def _oracle(held_out: HeldOut) -> float:
    if held_out.oracle_labels is None:
        raise InputError(
            "'oracle' chooses models by target labels, got none; reveal those of target_val, or choose without labels, "
            "for example by 'source-accuracy'"
        )
    found = label_scores(held_out.target_logits, held_out.oracle_labels)
    return found["r2"] if "r2" in found else found["accuracy"]


_VALIDATORS: Registry[Callable[[HeldOut], float]] = Registry(
    "selection",
    {
        "source-accuracy": partial(_source_score, "accuracy"),
        FIRST_BEST: partial(_source_score, "accuracy"),
        "entropy": lambda held_out: confidence(held_out.target_logits),
        "information-maximisation": lambda held_out: information_maximisation(held_out.target_logits),
        "snd": lambda held_out: soft_neighbourhood_density(held_out.target_logits),
        "mmd": _alignment,
        "last": lambda held_out: float(held_out.step),
        "oracle": _oracle,
        "source-r2": partial(_source_score, "r2"),
    },
)

SELECTION_NAMES = tuple(name for name in _VALIDATORS if name != "source-r2")
"""``"oracle"`` reads target labels and is for comparison only; the others do not."""

REGRESSION_SELECTION_NAMES = ("source-r2", "mmd", "last", "oracle")
"""Where numbers are predicted; the others look at class probabilities."""


def _probabilities(logits: Tensor) -> Tensor:
    _check_logits(logits)
    return logits.detach().double().softmax(1)


def _entropy(p: Tensor) -> Tensor:
    """Entropy of each row, in nats: (n,)."""
    entropy: Tensor = torch.special.entr(p).sum(1)
    return entropy


def _check_logits(logits: Tensor) -> None:
    if logits.ndim != 2 or not len(logits):
        raise InputError(f"logits must have shape (n, classes) with n at least 1, got {tuple(logits.shape)}")


# --- measurements while a run is under way ------------------------------------------------------------


def outputs(algorithm: Algorithm, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """Features (n, d) and logits (n, classes) of all samples of a domain, on the CPU, in evaluation mode.

    In a regression there are numbers (n, m) in their own units instead of logits. ``options`` are those of
    ``extract_features``; ``RunConfig.pass_options`` has a run's.
    """

    def both(model: Algorithm, x: Tensor) -> Tensor:
        z = model.features(x)
        return torch.cat([z, model.readout(z)], 1)

    joint = pass_over(algorithm, inputs, both, **options)
    width = joint.shape[1] - algorithm.num_classes
    return joint[:, :width], joint[:, width:]


_PAIRS_LIMIT = 2048  # beyond so many samples the density, which looks at all pairs, is measured only if asked for
_BY_SAMPLES = ("source-accuracy", "source-r2")  # scores that are means over held-out source samples
NEED_SOURCE = (*_BY_SAMPLES, FIRST_BEST, "mmd")
"""Selections that need held-out source samples."""


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
        self.source: Inputs | None = None
        self.source_labels: Tensor | None = None
        if len(splits.source_val):
            self.source = Inputs(splits.source_val, device)
            self.source_labels = splits.source_val.known_labels()
        elif config.selection in NEED_SOURCE:
            others = "'last'" if config.regression else "'information-maximisation' or 'last'"
            raise InputError(
                f"selection {config.selection!r} needs held-out source samples, got 0; split with holdout above 0, or "
                f"choose by {others}"
            )

    @property
    def inputs(self) -> list[Inputs]:
        """Samples that it looks at."""
        others = [] if self.observed is None else [self.observed[0]]
        return [self.target, *([] if self.source is None else [self.source]), *others]

    def __call__(self, algorithm: Algorithm, step: int) -> tuple[dict[str, float], Verdict]:
        """Measurements by name, and that by which models are chosen."""
        options = self.config.pass_options
        z_t, logits_t = outputs(algorithm, self.target, **options)
        z_s, logits_s = (None, None) if self.source is None else outputs(algorithm, self.source, **options)
        found = {} if self.config.regression else _of_probabilities(logits_t)
        if z_s is not None and logits_s is not None and self.source_labels is not None:
            scores = label_scores(logits_s, self.source_labels)
            found |= {f"source_{name}": value for name, value in scores.items()}
            found["mmd"] = -alignment(z_s, z_t)
        if self.observed is not None:
            inputs, labels = self.observed
            scores = label_scores(outputs(algorithm, inputs, **options)[1], labels)
            found |= {f"target_{name}": value for name, value in scores.items()}
        held_out = HeldOut(
            step=step,
            target_logits=logits_t,
            target_features=z_t,
            source_logits=logits_s,
            source_labels=self.source_labels,
            source_features=z_s,
            oracle_labels=self.oracle_labels,
        )
        missed = None
        if self.config.selection in _BY_SAMPLES and logits_s is not None and self.source_labels is not None:
            missed = errors(logits_s, self.source_labels)
        return found, Verdict(score(self.config.selection, held_out), missed)


def _of_probabilities(logits: Tensor) -> dict[str, float]:
    """What class probabilities say without labels."""
    found = {
        "target_entropy": -confidence(logits),
        "target_information": information_maximisation(logits),
    }
    if 2 <= len(logits) <= _PAIRS_LIMIT:
        found["target_density"] = soft_neighbourhood_density(logits)
    return found


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
