"""Class structure of a target: projections, selection, neighbours and votes against brute force, and what they gain."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import gen, normal, refused
from vardass.adapt import make_network
from vardass.adapt.class_structure import (
    ABSENT,
    MIN_GAIN,
    MIN_SEPARATION,
    MOVED,
    WEAK,
    ClassSpace,
    Evidence,
    Vote,
    _class_projection,
    _pruned_agreement,
    _surest,
    agreement,
    class_separation,
    class_votes,
    fit_class_space,
    judge,
    nearest_neighbours,
)


def classes_of(n: int, classes: int, seed: int, d: int = 6, spread: float = 0.4) -> tuple[Tensor, Tensor]:
    """Samples (n, d) about the centres of classes, the same centres for every seed."""
    labels = torch.arange(n) % classes
    return normal(classes, d, seed=99)[labels] * 2.0 + spread * normal(n, d, seed=seed), labels


def test_the_projection_is_that_of_the_generalised_eigenproblem():
    x, y = classes_of(60, 3, seed=1)
    projection = _class_projection(x.double(), y, 3).numpy()
    rows, labels = x.double().numpy(), y.numpy()
    total, within = np.zeros((2, 6, 6))
    for c in range(3):
        z = rows[labels == c]
        total += len(z) * z.T @ z
        within += len(z) * z.T @ z - np.outer(z.sum(0), z.sum(0))
    value, vector = scipy.linalg.eigh(total, within + np.eye(6))
    np.testing.assert_allclose(np.abs(projection.T @ total @ vector), np.diag(value), atol=1e-8 * value.max())


@pytest.mark.parametrize("share", [0.1, 0.35, 1.0])
def test_the_surest_of_each_class_are_selected(share):
    labels, certainty = torch.randint(4, (40,), generator=gen(2)), torch.rand(40, generator=gen(3))
    expected = torch.zeros(40, dtype=torch.bool)
    for c in range(4):
        rows = (labels == c).nonzero().flatten()
        order = certainty[rows].argsort(descending=True)
        expected[rows[order[: int(len(rows) * share)]]] = True
    assert torch.equal(_surest(labels, certainty, 4, share), expected)


def test_neighbours_and_their_agreement_are_those_of_brute_force():
    z, labels = normal(30, 4, seed=4), torch.randint(3, (30,), generator=gen(5))
    unit = F.normalize(z - z.mean(0), dim=1)
    cosine = unit @ unit.T - 9.0 * torch.eye(30)
    near = nearest_neighbours(z, 3)
    assert all(set(row.tolist()) == set(cosine[i].topk(3).indices.tolist()) for i, row in enumerate(near))
    observed = np.mean([int(labels[j] == labels[i]) for i in range(30) for j in near[i]])
    chance = sum(float((labels == c).double().mean()) ** 2 for c in range(3))
    assert agreement(labels, near, 3) == pytest.approx((observed - chance) / (1.0 - chance))
    assert nearest_neighbours(z[:2], 5).shape == (2, 1)


def test_votes_count_and_ties_go_to_the_surest():
    votes = class_votes(
        [torch.tensor([[0.6, 0.4, 0.0]]), torch.tensor([[0.5, 0.1, 0.4]]), torch.tensor([[0.0, 1.0, 0.0]])]
    )
    assert votes.argmax(1).tolist() == [0]
    assert float(votes.sum()) == pytest.approx(1.0)
    assert class_votes([torch.tensor([[0.6, 0.4]]), torch.tensor([[0.1, 0.9]])]).argmax(1).tolist() == [1]


def test_leaving_out_a_class_that_splits_a_cluster_is_found():
    """One cluster of the target, labelled 0 and 1 at random, beside one of class 2."""
    z = torch.cat([normal(40, 3, seed=6) * 0.1 + torch.tensor([1.0, 0, 0]), normal(20, 3, seed=7) * 0.1])
    split = torch.rand(40, generator=gen(8)) < 0.5
    votes = torch.tensor([0.6, 0.3, 0.1]).repeat(60, 1)
    votes[:40][split] = torch.tensor([0.3, 0.6, 0.1])
    votes[40:] = torch.tensor([0.1, 0.1, 0.8])
    near = nearest_neighbours(z)
    start = agreement(votes.argmax(1), near, 3)
    assert start < 0.7
    assert _pruned_agreement(votes, near, start) > 0.95


def test_structure_labels_what_a_head_of_the_source_cannot():
    """Each column of the target has another offset and scale: standardising by domain undoes it."""
    x, y = classes_of(200, 4, seed=10)
    t, truth = classes_of(160, 4, seed=11)
    t = t * torch.tensor([3.0, 0.5, 2.0, 1.0, 4.0, 0.2]) + 5.0 * normal(6, seed=12)
    plain, by_domain = (fit_class_space(x, y, t, 4, by_domain=flag) for flag in (False, True))
    assert float((by_domain(t).argmax(1) == truth).double().mean()) > 0.98
    assert float((plain(t).argmax(1) == truth).double().mean()) > 0.9
    x_means = F.normalize(F.one_hot(y, 4).float().T @ x, dim=1)  # class means of the source alone
    assert float(((F.normalize(t, dim=1) @ x_means.T).argmax(1) == truth).double().mean()) < 0.8
    assert torch.allclose(by_domain(t).sum(1), torch.ones(160))
    # the scale of all columns together is of no consequence
    far = fit_class_space(x * 1e4, y, t * 1e4, 4)
    assert torch.equal(far(t * 1e4).argmax(1), plain(t).argmax(1))


def test_wide_rows_and_few_samples_have_a_space_too():
    x, y = classes_of(12, 3, seed=13, d=400)
    space = fit_class_space(x, y, x[:2], 3)
    assert space(x[:1]).shape == (1, 3)
    assert bool(space(x).isfinite().all())
    constant = fit_class_space(x, y, torch.ones(5, 400), 3, by_domain=True)
    assert bool(constant(torch.ones(2, 400)).isfinite().all())


def test_separation_is_high_for_classes_apart_and_zero_for_noise():
    x, y = classes_of(300, 3, seed=14)
    v, truth = classes_of(150, 3, seed=15)
    assert class_separation(x, y, v, truth, 3) > 0.95
    noise = class_separation(normal(300, 6, seed=16), y, normal(150, 6, seed=17), truth, 3)
    assert abs(noise) < 0.2


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((MIN_SEPARATION - 0.01, 0.5, 0.9, 0.9, 0.2, 0.2), "overlap"),
        ((0.9, 0.5, 0.6, 0.7 + ABSENT + 0.01, 0.2, 0.2), "absent"),
        ((0.9, 0.1, WEAK - 0.01, WEAK, MOVED + 0.01, 0.2), "shares"),
        ((0.9, 0.8, 0.8 + MIN_GAIN - 0.01, 0.85, 0.2, 0.2), "without adaptation"),
        ((float("nan"), 0.5, 0.9, 0.9, 0.2, 0.2), "overlap"),
        ((0.9, float("nan"), float("nan"), float("nan"), 0.2, 0.2), "without adaptation"),
    ],
)
def test_each_objection_has_its_case(values, word):
    assert word in str(Evidence(*values).objection)


def test_a_vote_that_neighbours_support_has_no_objection():
    labels = torch.arange(60) % 3
    near = nearest_neighbours(F.one_hot(labels, 3).float() + 0.01 * normal(60, 3, seed=18))
    evidence = judge(0.9, torch.randint(3, (60,), generator=gen(19)), F.one_hot(labels, 3).float(), near)
    assert evidence.objection is None
    assert evidence.vote == 1.0
    assert evidence.changed > 0.4


def test_damaged_spaces_are_refused():
    x, y = classes_of(30, 3, seed=20)
    tensors = dict(fit_class_space(x, y, x, 3).named_buffers())
    with refused("means", 2):
        ClassSpace({**tensors, "means": tensors["means"][0]})
    with refused("clusters"):
        ClassSpace({**tensors, "clusters": tensors["clusters"][:2]})
    with refused("projection"):
        ClassSpace({name: value for name, value in tensors.items() if name != "projection"})
    with refused("offset"):
        ClassSpace({**tensors, "offset": tensors["offset"].long()})
    vote = Vote(make_network("mlp", (6,), 3), {"inputs": ClassSpace(tensors)})
    with refused("inputs", 6, 7):
        vote.check({"inputs": 7}, 3)
    with refused(3, 4):
        vote.check({"inputs": 6}, 4)
