"""Which evaluation of a run its model is taken from.

Source accuracy hardly changes while a discrepancy pulls the domains together, and often falls a little, so its
maximum is mostly that of a network that is not adapted yet. Hence evaluations compete only once the penalty has its
full strength, and of those that held-out source samples cannot tell apart the latest is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["FIRST_BEST", "Judged", "ModelChoice"]

FIRST_BEST = "domainbed"
"""Name of DomainBed's rule, which the paper follows: the highest source accuracy, of equal ones the first."""


@dataclass(frozen=True, eq=False)
class Judged:
    """What an evaluation says of a model.

    Attributes
    ----------
    score : float
        Larger is better.
    errors : Tensor of shape (n,) or None
        Error of each held-out sample behind the score, whose mean falls as the score rises; None where the score is
        not a mean over samples.
    """

    score: float
    errors: Tensor | None = None

    def is_told_from(self, best: Judged) -> bool:
        """Whether ``best`` is better by more than one standard error, paired on the same samples.

        Examples
        --------
        >>> import torch
        >>> one, other = (Judged(1 - e.mean().item(), e) for e in (torch.tensor([0., 0, 0, 1]), torch.zeros(4)))
        >>> one.is_told_from(other), one.is_told_from(one)
        (False, False)
        """
        if self.errors is None or best.errors is None or len(self.errors) < 2:
            return self.score < best.score
        gap = self.errors.double() - best.errors.double()
        # where one sample differs the two sides are equal but for rounding
        return float(gap.mean()) > (1.0 + 1e-9) * float(gap.std()) / math.sqrt(len(gap))


class ModelChoice:
    """Decide at each evaluation whether its model is the one to keep so far.

    Parameters
    ----------
    selection : str
        Name of the score, or `FIRST_BEST`.
    full_strength : int
        Step from which on evaluations compete; of earlier ones the latest is kept until then. `FIRST_BEST` lets all
        of them compete.

    Attributes
    ----------
    step, score : int, float or None
        Of the evaluation whose model is kept; None before the first one.

    Examples
    --------
    >>> choice = ModelChoice("entropy", full_strength=200)
    >>> [choice.offer(step, Judged(score)) for step, score in ((100, 0.9), (200, 0.5), (300, 0.7), (400, 0.6))]
    [True, True, True, False]
    >>> choice.step, choice.score
    (300, 0.7)
    """

    def __init__(self, selection: str, full_strength: int = 0) -> None:
        self.is_first_best = selection == FIRST_BEST
        self.full_strength = 0 if self.is_first_best else full_strength
        self.step: int | None = None
        self.score: float | None = None
        self._seen: list[tuple[int, Judged]] = []  # that compete

    def offer(self, step: int, found: Judged) -> bool:
        """Whether the model of this evaluation is to be kept instead of the one before."""
        if step >= self.full_strength:
            self._seen.append((step, found))
        best = self._best
        taken = best is None or (best is found if self.is_first_best else not found.is_told_from(best))
        if taken:
            self.step, self.score = step, found.score
        return taken

    @property
    def equal(self) -> list[int]:
        """Steps of the evaluations that compete and cannot be told from the best one; it is among them."""
        best = self._best
        if best is None:
            return []
        return [step for step, found in self._seen if not found.is_told_from(best)]

    @property
    def competing(self) -> int:
        """How many evaluations compete."""
        return len(self._seen)

    @property
    def _best(self) -> Judged | None:
        return max((found for _, found in self._seen), key=lambda found: found.score, default=None)

    def state_dict(self) -> dict[str, Any]:
        """All that later decisions depend on."""
        seen = [{"step": step, "score": found.score, "errors": found.errors} for step, found in self._seen]
        return {"step": self.step, "score": self.score, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.step, self.score = state["step"], state["score"]
        self._seen = [(each["step"], Judged(each["score"], each["errors"])) for each in state["seen"]]
