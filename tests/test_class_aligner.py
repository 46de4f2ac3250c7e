"""Class-aligned batches in training runs, sweeps and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import refused
from sweep_yaml import changed, load
from test_trainer import Stop, assert_same_run
from vardass.adapt.algorithms import ERM
from vardass.adapt.config import RunConfig
from vardass.adapt.trainer import Trainer
from vardass.cli.run_options import settings_of
from vardass.data import Domain, LabelsHidden, Task, TaskSplits, TensorInputs, split_task
from vardass.kernels import fitted_kernel
from vardass.samplers import UniformBatchSampler
from vardass.samplers.class_alignment import ALIGNMENT_KERNEL, explained_by_shares

CLASSES = 3


def blobs() -> TaskSplits:
    """Three classes that are easily told apart, in opposite shares in source and target."""

    def domain(name: str, counts: tuple[int, ...], shift: float, seed: int) -> Domain:
        labels = torch.repeat_interleave(torch.tensor(counts))
        x = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(seed)) + shift
        x[torch.arange(len(labels)), labels] += 6.0
        return Domain(name, TensorInputs(x), labels, tuple("abc"))

    return split_task(Task("blobs", (domain("s", (90, 40, 20), 0.0, 0),), domain("t", (20, 40, 90), 0.5, 1)), seed=0)


SPLITS = blobs()


def config(**changes: Any) -> RunConfig:
    settings = {
        **{"class_shares": "uniform", "class_options": {"start": 8}, "sampler": "stratified", "batch_size": 9},
        **{"steps": 15, "eval_every": 5, "refresh_every": 4, "checkpoint_every": 4, "lr": 0.05, "device": "cpu"},
        **{"network_options": {"hidden": [16], "dropout": 0.1}, "algorithm_options": {"penalty": 0.1}},
        **changes,
    }
    return RunConfig(**settings)


def shares_of(weights: Any, classes: torch.Tensor) -> list[float]:
    found = torch.zeros(CLASSES, dtype=torch.float64)
    return found.index_add_(0, classes, torch.as_tensor(weights, dtype=torch.float64)).tolist()


@pytest.mark.parametrize("sampler", ["stratified", "vardass", "ordered", "balanced"])
def test_both_sides_of_a_batch_have_the_same_classes_from_the_start_on(sampler: str) -> None:
    # the policy refreshes at 4 and 8: the start has a refresh of its own
    trainer = Trainer(config(sampler=sampler, class_options={"start": 7}), SPLITS)
    source, target = trainer.streams["source"], trainer.streams["target"]
    seen: list[bool] = []
    update = trainer._update

    def watched(draws: Any) -> Any:
        groups = [stream.sampler.groups for stream in (source, target)]  # type: ignore[attr-defined]
        seen.append(groups[0] is not None)
        if seen[-1]:
            assert torch.equal(groups[0], SPLITS.source_train.known_labels())
            for group, name in zip(groups, ("source", "target"), strict=True):
                draw = draws[name]
                assert shares_of(draw.batch.weights, group[draw.rows]) == pytest.approx([1 / 3] * 3, abs=1e-6)
        return update(draws)

    trainer._update = watched  # type: ignore[method-assign]
    trainer.run()
    assert seen == [False] * 7 + [True] * 8  # plain strata first
    log = trainer.history.metrics[-1]
    assert (log["classes/aligned"], log["classes/unsure"]) == (1.0, 0.0)
    assert "classes/aligned" not in trainer.history.metrics[0]
    with pytest.raises(LabelsHidden):  # and no label of the target was revealed for that
        SPLITS.target_unlabelled.known_labels()


@pytest.mark.parametrize("sampler", ["stratified", "ordered", "balanced"])
def test_the_task_loss_keeps_the_class_shares_of_the_source(sampler: str) -> None:
    trainer = Trainer(config(sampler=sampler), SPLITS)
    labels = SPLITS.source_train.known_labels()
    natural = torch.bincount(labels).double() / len(labels)
    seen: list[bool] = []
    losses = trainer.algorithm.losses

    def watched(source: Any, target: Any, step: int) -> Any:
        found = losses(source, target, step)
        seen.append(source.task_weights is not None)
        if seen[-1]:
            assert shares_of(source.task_weights, source.y) == pytest.approx(natural.tolist(), abs=1e-6)
            each = torch.nn.functional.cross_entropy(trainer.algorithm.predict(source.x), source.y, reduction="none")
            task = float((each.detach() * source.task_weights).sum())
            assert float(found["task"].detach()) == pytest.approx(task, rel=1e-5)
        return found

    trainer.algorithm.losses = watched  # type: ignore[method-assign]
    trainer.algorithm.network.dropout.p = 0.0
    trainer.run()
    assert seen == [False] * 8 + [True] * 7


def test_groups_of_the_target_are_what_the_network_predicts_at_the_refresh() -> None:
    trainer = Trainer(config(steps=8), SPLITS)
    trainer.run()
    trainer.algorithm.eval()
    x = torch.stack([SPLITS.target_unlabelled.dataset[i] for i in range(len(SPLITS.target_unlabelled))])
    assert trainer.strata.classes is not None
    found = trainer.strata.classes(8)["target"]
    assert torch.equal(found["groups"], trainer.algorithm.predict(x).argmax(1))
    assert trainer.strata.classes(7) == {}


def test_samples_below_the_confidence_are_left_out() -> None:
    before = Trainer(config(steps=8), SPLITS)
    before.run()
    before.algorithm.eval()
    x = torch.stack([SPLITS.target_unlabelled.dataset[i] for i in range(len(SPLITS.target_unlabelled))])
    sureness = before.algorithm.predict(x).detach().double().softmax(1).max(1).values
    confidence = float(sureness.quantile(0.1))
    trainer = Trainer(config(steps=9, class_options={"start": 8, "confidence": confidence}), SPLITS)
    trainer.run()
    assert trainer.history.metrics[-1]["classes/unsure"] == pytest.approx(0.1, abs=0.03)


def weighted_mmd2(x: torch.Tensor, y: torch.Tensor, shares: torch.Tensor, labels: torch.Tensor) -> float:
    """MMD² over pairs of different samples, of the source with other class shares, one pair at a time."""
    kernel = fitted_kernel(ALIGNMENT_KERNEL, torch.cat([x, y]))
    own, across, rest = (kernel.matrix(a, b).tolist() for a, b in ((x, x), (x, y), (y, y)))
    total = 0.0
    for a, share_a in enumerate(shares.tolist()):
        rows = (labels == a).nonzero().flatten().tolist()
        for b, share_b in enumerate(shares.tolist()):
            pairs = [(i, j) for i in rows for j in (labels == b).nonzero().flatten().tolist() if i != j]
            total += share_a * share_b * sum(own[i][j] for i, j in pairs) / len(pairs)
        total -= 2.0 * share_a * sum(across[i][j] for i in rows for j in range(len(y))) / (len(rows) * len(y))
    n = len(y)
    return total + sum(rest[i][j] for i in range(n) for j in range(n) if i != j) / (n * (n - 1))


def test_what_shares_explain_is_what_vanishes_of_the_discrepancy() -> None:
    generator = torch.Generator().manual_seed(0)
    labels, predicted = torch.randint(3, (20,), generator=generator), torch.randint(3, (15,), generator=generator)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64) + labels[:, None]
    y = torch.randn(15, 4, generator=generator, dtype=torch.float64) + predicted[:, None] + 0.5
    plain, shifted = (torch.bincount(of, minlength=3).double() / len(of) for of in (labels, predicted))
    before, after = (weighted_mmd2(x, y, shares, labels) for shares in (plain, shifted))
    assert explained_by_shares(x, labels, y, predicted) == pytest.approx(1.0 - after / before)


def test_classes_are_aligned_early_only_where_shares_explain_the_shift() -> None:
    seen = {}
    for name, bar in (("shares", 0.35), ("never", 1.01)):
        options = {"early": 8, "start": 12, "explained": bar}
        trainer = Trainer(config(class_options=options, steps=14, eval_every=1, lr=0.1, refresh_every=4), SPLITS)
        trainer.run()
        seen[name] = [line.get("classes/aligned", 0.0) for line in trainer.history.metrics]
    assert seen["shares"] == [0.0] * 8 + [1.0] * 6  # opposite shares, nearly the same classes
    assert seen["never"] == [0.0] * 12 + [1.0] * 2


def test_recommended_settings_align_where_the_sampler_can() -> None:
    found = RunConfig.recommended(sampler_options={"min_size": 2})
    assert (found.sampler, found.sampler_options) == ("stratified", {"equal": True, "min_size": 2})
    assert RunConfig.recommended(steps=800).class_options == {"early": 100, "start": 300}
    assert RunConfig.recommended(steps=80).algorithm_options == {
        **{"penalty": 3.0, "delay": 10, "ramp": 10},
        "confusion": 0.3,
    }
    assert RunConfig.recommended(batch_size=8).algorithm_options["penalty"] == 0.75
    for changes in ({"sampler": "uniform"}, {"refresh_every": 0}, {"algorithm": "dann"}):
        assert RunConfig.recommended(**changes).class_shares == "none"
    assert RunConfig.recommended(class_shares="uniform").class_options == {}
    assert RunConfig.recommended(algorithm_options={"penalty": 5.0}).algorithm_options["penalty"] == 5.0


@pytest.mark.parametrize("sampler", ["stratified", "balanced"])
def test_a_resumed_run_is_the_same_bit_for_bit(sampler: str, tmp_path: Path) -> None:
    settings = config(sampler=sampler)
    whole = Trainer(settings, SPLITS)
    whole.run()
    assert Trainer(settings, SPLITS, tmp_path).run(progress=Stop(13)).step == 13
    resumed = Trainer(settings, SPLITS, tmp_path)
    resumed.run(resume=True)
    assert_same_run(whole, resumed)
    assert whole.history.metrics[-1]["classes/aligned"] == 1.0


@pytest.mark.parametrize(
    ("changes", "field", "named"),
    [
        ({"sampler": "uniform"}, None, ("class_shares='uniform'", "sampler 'uniform'", "stratified")),
        (
            {"algorithm": "erm", "algorithm_options": {}},
            "class_shares",
            ("class_shares='uniform'", "'erm'", "class_shares='none'"),
        ),
        ({"refresh_every": 0}, "class_shares", ("class_shares='uniform'", "refresh_every=0", "refresh_every=100")),
        (
            {"sampler": "kmeans-inputs"},
            "class_shares",
            ("class_shares='uniform'", "refresh_every=4", "sampler 'kmeans-inputs'", "another sampler"),
        ),
        ({"class_shares": "target"}, "class_shares", ("'target'", "none, source, uniform")),
        ({"class_options": {"confidenc": 1}}, None, ("class_shares", "'confidenc'", "'confidence'")),
        ({"class_options": {"confidence": 2}}, "confidence", ("at most 1", 2)),
        ({"class_options": {"start": -1}}, "start", ("at least 0", -1)),
        ({"class_options": {"early": -1}}, "early", ("at least 0", -1)),
        ({"class_options": {"explained": -1}}, "explained", ("at least 0", -1)),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        config(**changes)


def test_own_parts_that_cannot_be_aligned() -> None:
    own = UniformBatchSampler(len(SPLITS.source_train), 9, endless=True)
    with refused("class_shares='uniform'", "source", "UniformBatchSampler", "stratified"):
        Trainer(config(), SPLITS, samplers={"source": own})
    with refused("class_shares='uniform'", "'erm'", "class_shares='none'", field="class_shares"):
        Trainer(config(algorithm_options={}), SPLITS, algorithm=ERM)


def test_a_sweep_compares_a_sampler_with_and_without(tmp_path: Path) -> None:
    aligned = {"name": "stratified", "label": "aligned", "settings": {"class_shares": "uniform"}}
    runs = load(tmp_path, changed(algorithms=["mmd"], samplers=["uniform", "stratified", aligned])).runs()
    found = {run.cell["sampler"]: run for run in runs}
    assert {name: run.config["class_shares"] for name, run in found.items()} == {
        **{"uniform": "none", "stratified": "none", "aligned": "uniform"}
    }
    with refused("sweep.yaml", "class_shares='uniform'", "sampler 'uniform'", "stratified"):
        load(
            tmp_path, changed(algorithms=["mmd"], samplers=["uniform"], grid={"class_shares": ["none", "uniform"]})
        ).runs()


def test_options_of_the_command_line() -> None:
    found = settings_of(
        {"class_shares": "uniform", "class_options": ["floor=0.5"], "settings": ["class_options.start=7"]}
    )
    assert found["class_shares"] == "uniform"
    assert found["class_options"] == {"floor": 0.5, "start": 7}
