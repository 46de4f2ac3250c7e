"""Scores on held-out data against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from conftest import refused
from vardass.adapt.selection import (
    held_out_mmd2,
    label_free_scores,
    label_scores,
)


def logits_of(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


QUARTERS = logits_of((0.25, 0.75), (0.5, 0.5))
ENTROPY_OF_QUARTERS = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)


def test_accuracy_is_the_share_of_right_rows() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 5.0, 2.0], [0.0, 1.0, 2.0]])
    assert label_scores(logits, torch.tensor([2, 0, 2, 2])) == {"accuracy": 0.75}
    with refused("(4,)", "(1,)", field="labels"):
        label_scores(logits, torch.tensor([1]))


def test_entropy_is_the_mean_over_predictions() -> None:
    assert label_free_scores(QUARTERS)["target_entropy"] == pytest.approx((ENTROPY_OF_QUARTERS + math.log(2)) / 2)
    assert label_free_scores(torch.tensor([[1000.0, -1000.0]])) == pytest.approx(
        {"target_entropy": 0.0, "target_information": 0.0}
    )


def test_information_maximisation_is_the_mutual_information() -> None:
    mean = (0.375, 0.625)
    marginal = -sum(p * math.log(p) for p in mean)
    expected = marginal - (ENTROPY_OF_QUARTERS + math.log(2)) / 2
    assert label_free_scores(QUARTERS)["target_information"] == pytest.approx(expected)
    # a network that is sure of one class for all has nothing, though its entropy is the best
    sure = label_free_scores(torch.tensor([[99.0, 0.0], [99.0, 0.0]]))
    assert sure["target_information"] == pytest.approx(0.0)


def test_density_of_three_samples_by_hand() -> None:
    # two equal predictions and one orthogonal to both: f = (1,0), (1,0), (0,1)
    logits = torch.tensor([[1000.0, 0.0], [1000.0, 0.0], [0.0, 1000.0]])
    t = 0.05
    near = math.exp(1 / t) / (math.exp(1 / t) + 1)
    paired = -near * math.log(near) - (1 - near) * math.log(1 - near)
    expected = (2 * paired + math.log(2)) / 3
    assert label_free_scores(logits)["target_density"] == pytest.approx(expected)


def test_density_is_that_of_a_loop() -> None:
    logits = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    p = logits.double().softmax(1)
    f = p / p.norm(dim=1, keepdim=True)
    entropies = []
    for i in range(30):
        others = [j for j in range(30) if j != i]
        q = (f[others] @ f[i] / 0.05).softmax(0)
        entropies.append(float(-(q * q.log()).sum()))
    assert label_free_scores(logits)["target_density"] == pytest.approx(sum(entropies) / 30)


def test_density_prefers_dense_clusters() -> None:
    centres = torch.eye(3).repeat_interleave(20, 0) * 8
    noise = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    dense, loose = (label_free_scores(centres + share * noise)["target_density"] for share in (0.1, 4.0))
    assert dense > loose


def test_mmd_by_hand_and_free_of_scale() -> None:
    x, y = torch.tensor([[0.0]]), torch.tensor([[3.0]])
    # one pair, whose squared distance is the scale: MMD² = Σ_γ 2 - 2 exp(-γ)
    expected = sum(2 - 2 * math.exp(-gamma) for gamma in (0.25, 0.5, 1.0, 2.0, 4.0))
    assert held_out_mmd2(x, y) == pytest.approx(expected)
    assert held_out_mmd2(x * 1e-3, y * 1e-3) == pytest.approx(expected)
    z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    assert held_out_mmd2(z, z) == pytest.approx(0.0, abs=1e-9)
    assert held_out_mmd2(z[:20], z[20:]) < held_out_mmd2(z[:20], z[20:] + 2.0)
