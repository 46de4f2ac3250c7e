"""Validators against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vardass.adapt import selection
from vardass.adapt.selection import (
    SELECTION_NAMES,
    HeldOut,
    accuracy,
    alignment,
    confidence,
    information_maximisation,
    score,
    soft_neighbourhood_density,
)
from vardass.errors import InputError


def logits_of(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


QUARTERS = logits_of((0.25, 0.75), (0.5, 0.5))
ENTROPY_OF_QUARTERS = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)


def test_accuracy_is_the_share_of_right_rows() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 5.0, 2.0], [0.0, 1.0, 2.0]])
    assert accuracy(logits, torch.tensor([2, 0, 2, 2])) == 0.75
    with pytest.raises(InputError, match="shape"):
        accuracy(logits, torch.tensor([1]))
    with pytest.raises(InputError, match="logits must have shape"):
        accuracy(logits[:0], torch.zeros(0, dtype=torch.int64))


def test_confidence_is_minus_the_mean_entropy() -> None:
    assert confidence(QUARTERS) == pytest.approx(-(ENTROPY_OF_QUARTERS + math.log(2)) / 2)
    assert confidence(torch.tensor([[1000.0, -1000.0]])) == pytest.approx(0.0)


def test_information_maximisation_is_the_mutual_information() -> None:
    mean = (0.375, 0.625)
    marginal = -sum(p * math.log(p) for p in mean)
    expected = marginal - (ENTROPY_OF_QUARTERS + math.log(2)) / 2
    assert information_maximisation(QUARTERS) == pytest.approx(expected)
    # a network that is sure of one class for all has nothing, though its confidence is perfect
    assert information_maximisation(torch.tensor([[99.0, 0.0], [99.0, 0.0]])) == pytest.approx(0.0)


def test_density_of_three_samples_by_hand() -> None:
    # two equal predictions and one orthogonal to both: f = (1,0), (1,0), (0,1)
    logits = torch.tensor([[1000.0, 0.0], [1000.0, 0.0], [0.0, 1000.0]])
    t = 0.5
    near = math.exp(1 / t) / (math.exp(1 / t) + 1)
    paired = -near * math.log(near) - (1 - near) * math.log(1 - near)
    expected = (2 * paired + math.log(2)) / 3
    assert soft_neighbourhood_density(logits, temperature=t) == pytest.approx(expected)


def test_density_lengths_are_one_and_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    whole = soft_neighbourhood_density(logits)
    p = logits.double().softmax(1)
    f = p / p.norm(dim=1, keepdim=True)
    entropies = []
    for i in range(30):
        others = [j for j in range(30) if j != i]
        q = (f[others] @ f[i] / 0.05).softmax(0)
        entropies.append(float(-(q * q.log()).sum()))
    assert whole == pytest.approx(sum(entropies) / 30)
    monkeypatch.setattr(selection, "_BLOCK_NUMBERS", 7 * 30)
    assert soft_neighbourhood_density(logits) == pytest.approx(whole)


def test_density_prefers_dense_clusters() -> None:
    centres = torch.eye(3).repeat_interleave(20, 0) * 8
    noise = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    assert soft_neighbourhood_density(centres + 0.1 * noise) > soft_neighbourhood_density(centres + 4.0 * noise)


def test_density_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(InputError, match="got 1"):
        soft_neighbourhood_density(torch.zeros(1, 2))
    with pytest.raises(InputError, match="temperature"):
        soft_neighbourhood_density(torch.zeros(3, 2), temperature=0.0)


def test_alignment_by_hand_and_free_of_scale() -> None:
    x, y = torch.tensor([[0.0]]), torch.tensor([[3.0]])
    # one pair, whose squared distance is the scale: MMD² = Σ_γ 2 - 2 exp(-γ)
    expected = -sum(2 - 2 * math.exp(-gamma) for gamma in (0.25, 0.5, 1.0, 2.0, 4.0))
    assert alignment(x, y) == pytest.approx(expected)
    assert alignment(x * 1e-3, y * 1e-3) == pytest.approx(expected)
    z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    assert alignment(z, z) == pytest.approx(0.0, abs=1e-9)
    assert alignment(z[:20], z[20:]) > alignment(z[:20], z[20:] + 2.0)


def test_scores_by_name() -> None:
    z = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    source_logits = torch.eye(2).repeat(4, 1)
    labels = torch.tensor([0, 1, 0, 1, 0, 1, 1, 0])
    held_out = HeldOut(
        step=7,
        target_logits=QUARTERS,
        target_features=z,
        source_logits=source_logits,
        source_labels=labels,
        source_features=z + 1.0,
        oracle_labels=torch.tensor([0, 0]),
    )
    expected = {
        "source-accuracy": 0.75,
        "domainbed": 0.75,
        "entropy": confidence(QUARTERS),
        "information-maximisation": information_maximisation(QUARTERS),
        "snd": soft_neighbourhood_density(QUARTERS),
        "mmd": alignment(z + 1.0, z),
        "last": 7.0,
        "oracle": 0.5,
    }
    assert set(expected) == set(SELECTION_NAMES)
    assert {name: score(name, held_out) for name in SELECTION_NAMES} == expected


def test_a_score_says_what_it_lacks() -> None:
    bare = HeldOut(step=1, target_logits=QUARTERS, target_features=torch.zeros(2, 1))
    for name, said in (("source-accuracy", "held-out source"), ("mmd", "held-out source"), ("oracle", "target labels")):
        with pytest.raises(InputError, match=said):
            score(name, bare)
    with pytest.raises(InputError, match="did you mean 'entropy'"):
        score("entropi", bare)
