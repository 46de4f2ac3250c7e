"""Algorithms in training: they learn, their state goes on identically, and nothing reads what it must not."""

from __future__ import annotations

import copy
from typing import Any

import torch

from test_algorithms import batches, build, every, same_state, sgd, train
from vardass.adapt import ALGORITHM_NAMES


@every
def test_overfits_two_blobs(name: str, options: dict[str, Any]) -> None:
    algorithm = build(name, options)
    source, target = batches(n_s=16, n_t=16)
    groups = algorithm.parameter_groups()
    optimisers = {role: torch.optim.Adam(parameters, lr=0.01) for role, parameters in groups.items()}
    first = algorithm.output_loss(algorithm.predict(source.x), source).detach()
    for step in range(100):
        algorithm.update(source, target, step, optimisers=optimisers, backward=lambda loss: loss.backward())
    logits = algorithm.eval().predict(source.x)
    assert torch.equal(logits.argmax(1), source.y)
    assert float(algorithm.output_loss(logits, source).detach()) < 0.5 * float(first)
    assert algorithm.features(source.x).shape == (16, 8)


@every
def test_state_goes_on_identically(name: str, options: dict[str, Any]) -> None:
    algorithm = build(name, options)
    optimisers = sgd(algorithm)
    train(algorithm, optimisers, range(3))
    other = build(name, options, seed=1)
    assert not same_state(algorithm, other)
    other.load_state_dict({key: entry.clone() for key, entry in algorithm.state_dict().items()})
    others = sgd(other)
    for role, optimiser in others.items():
        optimiser.load_state_dict(copy.deepcopy(optimisers[role].state_dict()))  # it does not copy tensors
    train(algorithm, optimisers, range(3, 6))
    train(other, others, range(3, 6))
    assert same_state(algorithm, other)


def test_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    for name in ALGORITHM_NAMES:
        build(name, {})
    assert torch.equal(torch.get_rng_state(), state)


class Secret:
    """A label that may not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"target labels were read: {name}")

    def __len__(self) -> int:
        raise AssertionError("target labels were read")


@every
def test_target_labels_are_never_read(name: str, options: dict[str, Any]) -> None:
    algorithm = build(name, options)
    source, target = batches()
    secret: Any = Secret()
    for step in range(2):
        algorithm.update(
            source,
            target._replace(y=secret),
            step,
            optimisers=sgd(algorithm),
            backward=lambda loss: loss.backward(),
        )


def test_groups_hold_every_trainable_parameter_once() -> None:
    for name in ALGORITHM_NAMES:
        algorithm = build(name, {})
        grouped = [p for group in algorithm.parameter_groups().values() for p in group]
        assert len(grouped) == len({id(p) for p in grouped}) == len(list(algorithm.parameters()))
