"""Runs with unbiased and reference losses: the right banks, exact resume, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import refused
from test_trainer import SPLITS, Stop, assert_same_run, config, loaded_splits, resumable
from vardass.adapt import strata_updater
from vardass.adapt.algorithms import Batch
from vardass.adapt.trainer import Trainer
from vardass.losses import coral, mmd2

TWO_DRAWS = {"sampler": "vardass", "sampler_options": {"draws_per_stratum": 2}}
RUNS: dict[str, dict[str, Any]] = {
    "reference, uniform": {"algorithm_options": {"estimator": "reference"}, "sampler": "uniform"},
    "reference, balanced": {"algorithm_options": {"estimator": "reference"}, "sampler": "balanced"},
    "reference, full passes": {
        "algorithm_options": {"estimator": "reference"},
        "sampler": "ordered",
        "feature_source": "full",
    },
    "reference, some rows": {"algorithm_options": {"estimator": "reference"}, "sampler": "balanced"},
    "unbiased, uniform": {"algorithm_options": {"estimator": "unbiased"}, "sampler": "uniform"},
    "unbiased, one draw": {"algorithm_options": {"estimator": "unbiased"}, "sampler": "vardass"},
    "unbiased, two draws": {"algorithm_options": {"estimator": "unbiased"}, **TWO_DRAWS},
}


def batches_of(trainer: Trainer) -> list[tuple[Batch, Batch]]:
    """What the algorithm was given in each step."""
    seen: list[tuple[Batch, Batch]] = []
    update = trainer.algorithm.update

    def spy(source: Batch, target: Batch, *args: Any, **options: Any) -> Any:
        seen.append((source, target))
        return update(source, target, *args, **options)

    trainer.algorithm.update = spy  # type: ignore[method-assign]
    trainer.run()
    return seen


@pytest.mark.parametrize(
    ("run", "algorithm"),
    [*((run, "mmd") for run in RUNS), ("reference, some rows", "coral"), ("unbiased, one draw", "coral")],
)
def test_a_run_stops_and_resumes_bit_for_bit(
    run: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if run == "reference, some rows":
        monkeypatch.setattr(strata_updater, "_REFERENCE_ROWS", 20)
    settings = resumable(algorithm=algorithm, **RUNS[run])
    whole = Trainer(settings, SPLITS)
    whole.run()
    first = Trainer(settings, SPLITS, tmp_path)
    first.run(progress=Stop(6))
    second = Trainer(settings, SPLITS, tmp_path)
    second.run(resume=True)
    assert_same_run(whole, second)


@pytest.mark.parametrize(("algorithm", "source"), [("mmd", "bank"), ("coral", "bank"), ("mmd", "full")])
def test_with_fresh_banks_batches_have_the_mean_gradient_of_all_data(algorithm: str, source: str) -> None:
    """An epoch of a network that hardly moves: rows of all batches together have the gradient of the whole loss."""
    n_s, n_t = len(SPLITS.source_train), len(SPLITS.target_unlabelled)
    chosen = {
        "algorithm_options": {"estimator": "reference"},
        "sampler": "uniform",
        "batch_size": 1,
        "lr": 1e-12,
        "feature_source": source,
    }
    trainer = Trainer(config(algorithm=algorithm, steps=max(n_s, n_t), eval_every=1000, **chosen), SPLITS)
    features = {"source": torch.zeros(n_s, 6), "target": torch.zeros(n_t, 6)}
    seen = {"source": torch.zeros(n_s, dtype=torch.bool), "target": torch.zeros(n_t, dtype=torch.bool)}
    draw = trainer.strata.completed

    def spy(draws: Any, step: int) -> Any:
        found = draw(draws, step)
        z = [trainer.algorithm.features(found[name].batch.x).detach().requires_grad_() for name in features]
        batches = (Batch(each, bank=found[name].batch.bank) for each, name in zip(z, features))
        loss = trainer.algorithm.loss(*batches)  # type: ignore[operator]
        for name, slope in zip(features, torch.autograd.grad(loss, z)):
            features[name][found[name].rows] = slope / len(features[name])
            seen[name][found[name].rows] = True
        return found

    trainer.strata.completed = spy  # type: ignore[method-assign]
    trainer.run()
    assert all(bool(each.all()) for each in seen.values())
    domains = [trainer.strata.all_features(name).requires_grad_() for name in features]
    value = mmd2(*domains) if algorithm == "mmd" else coral(*domains, preset="domainbed", correction="none")
    for name, slope in zip(features, torch.autograd.grad(value, domains)):
        torch.testing.assert_close(features[name], slope, rtol=1e-3, atol=1e-4 * float(slope.abs().max()))


def test_batches_carry_what_their_sampler_says(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config(algorithm_options={"estimator": "unbiased"}, sampler="vardass", steps=5), SPLITS)
    for source, _ in batches_of(trainer):
        assert source.bank is not None
        assert isinstance(source.bank.strata, Tensor)
        assert source.strata is not None
        assert list(source.strata) == list(range(6))
        assert set(source.bank.strata.tolist()) == set(range(6))
    uniform = Trainer(config(algorithm_options={"estimator": "unbiased"}, sampler="uniform"), SPLITS)
    for source, target in batches_of(uniform):
        assert source.strata is not None
        assert not any(source.strata)
        assert (source.pool, target.pool) == (len(SPLITS.source_train), len(SPLITS.target_unlabelled))
    monkeypatch.setattr(strata_updater, "_REFERENCE_ROWS", 20)
    some = Trainer(config(algorithm_options={"estimator": "reference"}), SPLITS)
    drawn = [source.bank for source, _ in batches_of(some)]
    assert all(bank is not None and len(bank.rows) == 20 for bank in drawn)
    assert not torch.equal(drawn[0].rows, drawn[1].rows)  # type: ignore[union-attr]


def test_banks_of_aligned_classes_stand_for_the_same_mixture_as_the_batches() -> None:
    trainer = Trainer(config(algorithm_options={"estimator": "reference"}, sampler="vardass", steps=1), SPLITS)
    trainer.strata.begin()
    sampler: Any = trainer.streams["source"].sampler
    labels = SPLITS.source_train.known_labels()
    shares = torch.zeros(int(labels.max()) + 1)
    shares[:2] = torch.tensor([0.75, 0.25])
    sampler.refresh(trainer.strata.all_features("source"), groups=torch.where(labels < 2, labels, -1), shares=shares)
    draws = {name: stream.draw() for name, stream in trainer.streams.items()}
    bank = trainer.strata.completed(draws, 0)["source"].batch.bank
    assert bank is not None
    weights = torch.as_tensor(bank.weights)
    assert float(weights[labels == 0].sum()) == pytest.approx(0.75)
    assert float(weights[labels > 1].sum()) == 0.0


@pytest.mark.parametrize(
    ("changes", "field", "named"),
    [
        (
            {"algorithm_options": {"estimator": "unbiased"}, "sampler": "balanced"},
            None,
            ("estimator='unbiased'", "balanced", "estimator='reference'"),
        ),
        (
            {"algorithm_options": {"estimator": "unbiased"}, "sampler": "ordered"},
            None,
            ("estimator='unbiased'", "ordered"),
        ),
        ({"algorithm_options": {"estimator": "exact"}}, "estimator", ("'exact'", "v, unbiased, reference")),
        (
            {"algorithm_options": {"estimator": "unbiased"}, "algorithm": "dann"},
            None,
            ("algorithm 'dann'", "'estimator'"),
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], field: str | None, named: tuple[str, ...]) -> None:
    with refused(*named, field=field):
        Trainer(config(**changes), SPLITS).run()


def test_batches_asked_for_ahead_are_refused_where_their_strata_count() -> None:
    splits = loaded_splits()
    with refused("estimator='unbiased'", "1 workers", "workers=0", "estimator='reference'"):
        Trainer(config(algorithm_options={"estimator": "unbiased"}, workers=1), splits).run()
    Trainer(config(algorithm_options={"estimator": "unbiased"}, workers=1, steps=3, **TWO_DRAWS), splits).run()
