"""A source-only reference beside every adapted run: what is kept, and that no target label decides it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import normal
from vardass.adapt import Adaptation, RunConfig, adaptation, load_model
from vardass.adapt.batches import Inputs
from vardass.adapt.class_structure import nearest_neighbours
from vardass.adapt.model import MODEL_FILE
from vardass.adapt.selection import outputs
from vardass.data import Domain, Task, TaskSplits, TensorInputs, split_task

CLASSES = ("a", "b", "c", "d", "e")
SMALL: dict[str, Any] = {"network_options": {"hidden": [16]}, "batch_size": 10, "steps": 120, "device": "cpu"}


def domain(name: str, x: Tensor, y: Tensor, classes: tuple[str, ...] = CLASSES) -> Domain:
    return Domain(name, TensorInputs(x), y, classes, kind="features", regression=y.is_floating_point())


def splits_of(present: int = 5, *, shift: float = 6.0, garbage: bool = False) -> TaskSplits:
    """Five classes; the target has the first of them, moved along an axis that tells classes apart in the source."""
    centres = 2.5 * normal(5, 8, seed=1)
    source, target = torch.arange(300) % 5, torch.arange(240) % present
    move = shift * torch.nn.functional.normalize(centres[1] - centres[0], dim=0)
    x = centres[source] + 0.7 * normal(300, 8, seed=2)
    t = centres[target] + 0.7 * normal(240, 8, seed=3) + move
    labels = torch.zeros_like(target) if garbage else target
    return split_task(Task("t", (domain("s", x, source),), domain("t", t, labels)), seed=0, unlabelled_fraction=1.0)


def accuracy(run: Any, splits: TaskSplits) -> float:
    target = splits.target_unlabelled.subset(torch.arange(len(splits.target_unlabelled))).reveal()
    predicted = outputs(run.algorithm, Inputs(target, torch.device("cpu")))[1].argmax(1)
    return float((predicted == target.known_labels()).double().mean())


def adapted(splits: TaskSplits, out: Any = None, **changes: Any) -> Any:
    return Adaptation(RunConfig.recommended(**{**SMALL, **changes}), splits, out)


def test_a_shift_that_structure_explains_keeps_the_vote():
    splits = splits_of()
    both = adapted(splits)
    run = both.run()
    assert both.reference is not None
    reference = both.reference._result()
    assert run.choice.model == "vote"
    assert accuracy(run, splits) > accuracy(reference, splits) + 0.2
    assert 0.0 < run.choice.evidence["changed"] <= 1.0


def test_a_partial_target_keeps_the_source_only_model():
    """Two of five classes: forcing all five upon the target would split them."""
    splits = splits_of(2, shift=1.0)
    both = adapted(splits)
    run = both.run()
    assert run.choice.model == "source-only"
    assert run.choice.objection is not None
    assert run.algorithm.name == "erm"
    assert accuracy(run, splits) == accuracy(both.reference._result(), splits)


def test_target_labels_decide_nothing(tmp_path):
    for garbage in (False, True):
        adapted(splits_of(garbage=garbage), tmp_path / str(garbage), steps=20).run()
    one, other = ((tmp_path / str(flag) / MODEL_FILE).read_bytes() for flag in (False, True))
    assert one == other


@pytest.mark.parametrize("present", [5, 2])
def test_the_model_that_was_kept_is_the_one_in_the_file(tmp_path, present):
    splits = splits_of(present, shift=1.0 if present == 2 else 6.0)
    run = adapted(splits, tmp_path / "run").run()
    x = Inputs(splits.target_unlabelled, torch.device("cpu")).data
    algorithm, about = load_model(tmp_path / "run")
    assert (about["vote"] is not None) == (run.choice.model == "vote")
    with torch.no_grad():
        assert torch.equal(algorithm.predict(x), run.algorithm.predict(x))
    reference, _ = load_model(tmp_path / "run" / "reference")
    assert reference.name == "erm"


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_interrupted_in_either_run_it_resumes_bit_for_bit(tmp_path, share, capsys):
    splits = splits_of()

    def stop(done: float, message: str) -> None:
        if done >= share:
            raise KeyboardInterrupt

    assert not adapted(splits, tmp_path / "whole", steps=30).run().interrupted
    assert adapted(splits, tmp_path / "halves", steps=30).run(progress=stop).interrupted
    run = adapted(splits, tmp_path / "halves", steps=30).run(resume=True)
    assert not run.interrupted
    one, other = ((tmp_path / name / MODEL_FILE).read_bytes() for name in ("whole", "halves"))
    assert one == other


def test_erm_and_rules_that_see_samples_together_have_no_reference():
    splits = splits_of()
    assert adapted(splits, algorithm="erm").reference is None
    assert adapted(splits, algorithm="erm", steps=2).run().choice is None


def regression(shift: float) -> TaskSplits:
    def make(n: int, seed: int, move: float) -> tuple[Tensor, Tensor]:
        x = normal(n, 5, seed=seed) + move
        return x, (x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5]))[:, None]

    (x, y), (t, u) = make(300, 4, 0.0), make(240, 5, shift)
    task = Task("t", (domain("s", x, y, ("y",)),), domain("t", t, u, ("y",)))
    return split_task(task, seed=0, unlabelled_fraction=1.0)


def test_a_regression_keeps_the_source_only_model_where_adaptation_costs_accuracy():
    """The target's numbers lie elsewhere: aligning the features moves the predictions back to the source's."""
    splits = regression(1.0)
    run = adapted(splits, regression=True, steps=300).run()
    assert run.choice.model == "source-only"
    assert run.choice.source_only_score > 0.9
    assert run.choice.evidence.keys() >= {"source_only", "adapted"}


def test_pictures_are_compared_where_neighbours_share_their_class(monkeypatch):
    """As they are, or by the features of the network before training; embeddings as they are."""
    labels = torch.arange(60) % 3
    pictures = 0.2 * torch.rand(60, 3, 16, 16, generator=torch.Generator().manual_seed(6))
    for row, place in enumerate((4 * labels).tolist()):  # where the square is tells the class: a mean over it does not
        pictures[row, :, place : place + 4, place : place + 4] += 0.5
    made = Domain("s", TensorInputs(pictures), labels, CLASSES[:3], kind="image")
    target = Domain("t", TensorInputs(pictures.flip(0)), None, CLASSES[:3], kind="image")
    splits = split_task(Task("t", (made,), target), seed=0, unlabelled_fraction=1.0)
    run = Adaptation(RunConfig(network="conv", steps=1, batch_size=6, device="cpu"), splits).trainer.run()
    as_they_are = nearest_neighbours(pictures.flip(0).flatten(1))
    assert torch.equal(adaptation._untrained_neighbours(run, target, made), as_they_are)
    monkeypatch.setattr(adaptation, "_MOST_VALUES", 1)  # too many values: features before training
    assert not torch.equal(adaptation._untrained_neighbours(run, target, made), as_they_are)
