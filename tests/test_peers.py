"""The rivals of `vardass adapt` in benchmarks/peers.py: each learns something, none from target labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vardass.data import Domain, Task, split_task

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks/ is not part of the sdist")
CLASSES, COLUMNS = 3, 6
METHODS = ("logistic", "per-domain", "prototypes", "self-training", "selective", "coral", "linear-ot", "subspace")
METHODS += ("sinkhorn", "boosting", "erm", "mcc", "dan", "deep-coral")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pytest.importorskip("skada")
    import peer_methods
    import peers

    monkeypatch.setitem(peer_methods.STEPS, "steps", 60)
    return peers


def task(target_labels: torch.Tensor | None = None, *, regression: bool = False) -> Task:
    """Three classes around three centres; the target lies a little aside."""
    generator = torch.Generator().manual_seed(0)
    centres = 4.0 * torch.randn(CLASSES, COLUMNS, generator=generator)
    y = torch.arange(CLASSES).repeat(60)
    domains = []
    for name, shift in (("s", 0.0), ("t", 0.5)):
        x = centres[y] + shift + torch.randn(len(y), COLUMNS, generator=generator)
        labels = y if name == "s" or target_labels is None else target_labels
        names = ["sum"] if regression else list("abc")
        numbers = x.sum(1).double() if regression else labels
        domains.append(Domain(name, x, numbers, names, regression=regression))
    return Task("s->t", (domains[0],), domains[1])


@pytest.mark.parametrize("name", METHODS)
def test_a_peer_beats_chance_and_sees_no_target_label(peers: Any, name: str) -> None:
    assert tuple(peers.PEERS) == METHODS
    garbage = torch.zeros(CLASSES * 60, dtype=torch.int64)
    results = []
    for labels in (None, garbage):
        splits = split_task(task(labels), seed=0)
        predicted = peers.METHODS[name][1](peers.Problem.of(splits, 0))
        results.append((predicted, peers.score(predicted, splits)))
    (plain, accuracy), (blind, _) = results
    assert (plain == blind).all()
    assert accuracy > 60.0


def test_numbers_instead_of_classes(peers: Any) -> None:
    case = peers.Case("regression", "made", "s->t")
    names = [name for name in peers.PEERS if peers.can(name, case)]
    records = list(peers.run_case(case, task(regression=True), 0, names))
    assert [record["method"] for record in records] == names
    assert all(record["score"] > 0.0 for record in records if record["method"] not in {"dan", "deep-coral", "erm"})


def test_partial_targets_keep_the_classes_of_the_source(peers: Any) -> None:
    case, entry = next((case, entry) for case, entry in peers.cases(["partial"]) if case.data == "watch")
    partial = peers.load(case, entry, Path())
    assert len(partial.class_names) == 7
    assert sorted(set(partial.target.known_labels().tolist())) == [0, 1, 2]


def test_the_page_and_what_is_missing(peers: Any, tmp_path: Path) -> None:
    case, methods = peers.Case("first", "watch", "left-A->right-B"), ["logistic", "selective", "adapt-mmd"]
    scores = {"logistic": 60.0, "selective": 80.0, "adapt-mmd": 79.0}
    records = [
        {**case._asdict(), "seed": 0, "method": name, "score": scores[name], "seconds": 1.0, "commit": "c"}
        for name in methods
    ]
    path = tmp_path / "peers.jsonl.gz"
    peers.write(path, [*records, {**records[0], "score": 61.0}])
    assert [record["score"] for record in peers.read(path)] == [61.0, 80.0, 79.0]  # the last of a key
    peers.write_page(peers.read(path), tmp_path / "peers.md")
    page = (tmp_path / "peers.md").read_text()
    assert "**80.0**" in page
    assert "MMD is below the best peer: watch -1.0" in page
    undone = [work for work in peers.missing(records, ["first"], [0], methods) if work.case.data == "watch"]
    assert [work.case.task for work in undone if work.methods == methods] == [
        "left-B->right-A",
        "right-A->left-B",
        "right-B->left-A",
    ]
    assert case not in [work.case for work in undone]


@pytest.mark.parametrize("regression", [False, True])
def test_the_row_of_adapt_is_what_the_command_ships(peers: Any, regression: bool) -> None:
    splits = split_task(task(regression=regression), seed=0)
    predicted = peers.METHODS["adapt-mmd"][1](peers.Problem.of(splits, 0))
    assert predicted.shape == (len(splits.target_test),)
    if not regression:
        assert peers.score(predicted, splits) > 60.0
