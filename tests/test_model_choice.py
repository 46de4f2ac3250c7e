"""The rule by which a run chooses its model, against the rule written out over all evaluations at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vardass.adapt.selection import FIRST_BEST, ModelChoice, Verdict, errors, label_scores

STEPS = list(range(10, 110, 10))


def runs(seed: int, *, by_samples: bool) -> list[Verdict]:
    """Evaluations of ten models that are about as good; some have equal scores."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in STEPS:
        wrong = torch.rand(12, generator=generator) < 0.3
        found.append(Verdict(1.0 - float(wrong.double().mean()), wrong if by_samples else None))
    return found


def is_equal(one: Tensor, best: Tensor) -> bool:
    """Whether the mean gap of two sets of errors is within its standard error, by the textbook's sums."""
    gaps = [float(a) - float(b) for a, b in zip(one, best, strict=True)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
    return mean <= math.sqrt(variance / len(gaps)) + 1e-12


def chosen_at_once(found: list[Verdict], start: int) -> int:
    competing = [(step, each) for step, each in zip(STEPS, found, strict=True) if step >= start]
    if not competing:
        return STEPS[-1]
    best = max((each for _, each in competing), key=lambda each: each.score)
    if best.errors is None:
        return max(step for step, each in competing if each.score == best.score)
    return max(step for step, each in competing if is_equal(each.errors, best.errors))  # type: ignore[arg-type]


@pytest.mark.parametrize("by_samples", [True, False])
@pytest.mark.parametrize("start", [0, 40, 101])
def test_one_by_one_chooses_as_all_at_once(start: int, by_samples: bool) -> None:
    latest = set()
    for seed in range(40):
        found = runs(seed, by_samples=by_samples)
        choice = ModelChoice("source-accuracy", start)
        kept = None
        for step, each in zip(STEPS, found, strict=True):
            if choice.offer(step, each):
                kept = step
        assert choice.step == kept == chosen_at_once(found, start)
        assert choice.competing == sum(step >= start for step in STEPS)
        assert (choice.step in choice.equal) is (choice.competing > 0)
        latest.add(choice.step)
    assert len(latest) > 1 or start > STEPS[-1]  # it is not always the last one


def test_domainbeds_rule_is_the_first_of_the_best() -> None:
    for seed in range(20):
        found = runs(seed, by_samples=False)
        choice = ModelChoice(FIRST_BEST, full_strength=50)
        for step, each in zip(STEPS, found, strict=True):
            choice.offer(step, each)
        scores = [each.score for each in found]
        assert choice.step == STEPS[scores.index(max(scores))]  # as Python's max, which DomainBed uses


def test_a_model_from_before_the_penalty_does_not_win_by_a_tie() -> None:
    same = torch.tensor([False, False, True])
    choice = ModelChoice("source-accuracy", full_strength=30)
    for step in (10, 20, 30, 40):
        choice.offer(step, Verdict(2 / 3, same))
    assert choice.step == 40
    assert choice.equal == [30, 40]


def test_a_model_that_is_clearly_worse_on_the_source_is_not_taken() -> None:
    good, bad = torch.zeros(50, dtype=torch.bool), torch.arange(50) < 10
    choice = ModelChoice("source-accuracy")
    assert choice.offer(10, Verdict(1.0, good))
    assert not choice.offer(20, Verdict(0.8, bad))
    assert choice.equal == [10]


def test_a_restored_choice_goes_on_as_it_was() -> None:
    found = runs(3, by_samples=True)
    whole, first, second = (ModelChoice("source-accuracy", 20) for _ in range(3))
    for step, each in zip(STEPS, found, strict=True):
        whole.offer(step, each)
        (first if step <= 50 else second).offer(step, each)
        if step == 50:
            second.load_state_dict(first.state_dict())
    assert (second.step, second.score, second.equal) == (whole.step, whole.score, whole.equal)


def test_errors_are_what_the_scores_are_made_of() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(30, 4, generator=generator), torch.randint(4, (30,), generator=generator)
    assert 1 - errors(logits, labels).double().mean() == pytest.approx(label_scores(logits, labels)["accuracy"])
    numbers = torch.randn(30, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 9.0])
    predicted = numbers + torch.randn(30, 2, generator=generator)
    assert 1 - errors(predicted, numbers).double().mean() == pytest.approx(label_scores(predicted, numbers)["r2"])
