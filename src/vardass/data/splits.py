"""Splits of a task: the parts that training, model selection and the final report may each see."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vardass.data.domains import Domain, Task, unite
from vardass.errors import InputError
from vardass.validate import check_count, check_number

SPLITS = "role"  # what seeds the shuffles of domains; a run notes it, as its held-out samples follow from it


@dataclass(frozen=True, eq=False)
class TaskSplits:
    """Disjoint parts of a task; the labels of the three target parts are hidden.

    Attributes
    ----------
    source_train, source_val : Domain
        All sources united, with ``domain_ids``: to train on, and to choose models by.
    target_unlabelled : Domain
        To train on, without labels.
    target_test : Domain
        For the accuracy that is reported.
    target_val : Domain
        For the oracle only, which chooses models by target labels.
    """

    source_train: Domain
    source_val: Domain
    target_unlabelled: Domain
    target_test: Domain
    target_val: Domain


def named_seed(*parts: object) -> int:
    """A seed below 2^62 made from numbers and names, the same in each process and on each machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 2


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the global generators of the CPU and of ``device``, from which dropout draws, and no others."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def split_task(task: Task, *, seed: int, holdout: float = 0.2, unlabelled_fraction: float = 0.5) -> TaskSplits:
    """Split each domain as DomainBed does.

    Each domain is shuffled by the seed and its role, target or position among the sources; the first ``holdout`` of it
    is kept out, for validation. What is left of a source is trained on. What is left of the target is cut again: the
    first ``unlabelled_fraction`` is trained on without labels, the remainder is the test set. With the defaults 40% of
    the target is trained on, 40% tested on, and 20% is for the oracle. Sizes are rounded down, as in DomainBed; the
    shuffles are not DomainBed's, so single samples differ. Names have no effect: renamed files give the same run.

    Parameters
    ----------
    task : Task
        Sources and target.
    seed : int
        Another seed gives other splits.
    holdout : float in [0, 1)
        DomainBed's ``holdout_fraction``. With 0 the validation parts are empty.
    unlabelled_fraction : float in (0, 1]
        DomainBed's ``uda_holdout_fraction``, which defaults to 0 there and leaves nothing to adapt to. The
        paper mentions "a held-out subset of the evaluation set" without its size; 0.5 is the value of its
        authors' TMLR 2025 paper. With 1 the test set is empty: for targets without labels.
    """
    if not isinstance(task, Task):
        raise InputError(f"only a Task can be split, got {task!r}; make one of domains, or with load_task")
    seed = check_count(seed, "seed", low=0)  # numbers of numpy are spelt differently and would give other splits
    check_number(holdout, "holdout", low=0.0, below=1.0, remedy="0.2 is DomainBed's")
    check_number(unlabelled_fraction, "unlabelled_fraction", low=0.0, high=1.0, remedy="0.5 is usual")
    train, validation = [], []
    for place, source in enumerate(task.sources):
        out, rest = _held_out(source, named_seed("split", seed, "source", place), holdout)
        train.append(source.subset(rest))
        validation.append(source.subset(out))
    target = task.target.hide_labels()
    out, rest = _held_out(target, named_seed("split", seed, "target"), holdout)
    unlabelled, test = _cut(rest, unlabelled_fraction)
    if not len(unlabelled):
        raise InputError(
            f"unlabelled_fraction {unlabelled_fraction} of the {len(rest)} target samples left by holdout {holdout} is "
            "0 samples to adapt to; enlarge the fraction or the target"
        )
    return TaskSplits(
        source_train=unite(train),
        source_val=unite(validation),
        target_unlabelled=target.subset(unlabelled),
        target_test=target.subset(test),
        target_val=target.subset(out),
    )


TARGET_SHARE = 0.25  # of what is trained on; docs/recipes/few-labels.md has it measured


def learn_from_target(splits: TaskSplits, target: Domain, *, share: float = TARGET_SHARE) -> TaskSplits:
    """Splits whose ``source_train`` has the labelled samples of the ``target`` too, repeated to ``share`` of it.

    They count as one more source, of which nothing is held out. A few samples alone would hardly matter to the task
    loss. The parts of the target keep them, with labels that stay hidden.
    """
    count = len(target.labelled()) if target.has_labels else 0
    if not 0 < count < len(target):
        raise InputError(
            f"{count:,} of the {len(target):,} samples of target {target.name!r} have a label that can be trained on; "
            f"{'leave the others blank, as nothing is left to adapt to' if count else 'fill in one or more'}, or leave "
            "out --target-labels"
        )
    labelled, source = target.labelled(), splits.source_train
    times = max(1, round(share / (1.0 - share) * len(source) / len(labelled)))
    copies = labelled.subset(torch.arange(len(labelled)).repeat(times))
    train = unite([source, copies])
    ids = torch.full((len(copies),), int(source.domain_ids.max()) + 1)
    train.name, train.domain_ids = source.name, torch.cat([source.domain_ids, ids])
    return replace(splits, source_train=train)


def _cut(rows: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    first = int(len(rows) * fraction)
    return rows[:first], rows[first:]


def _held_out(domain: Domain, seed: int, holdout: float) -> tuple[Tensor, Tensor]:
    """Rows of a domain that are kept out for validation, and all others, both shuffled."""
    out, rest = _cut(torch.randperm(len(domain), generator=torch.Generator().manual_seed(seed)), holdout)
    if not len(rest) or (holdout > 0 and not len(out)):
        raise InputError(
            f"domain {domain.name!r} has {len(domain)} samples, of which holdout {holdout} leaves {len(out)} for "
            f"validation and {len(rest)} for the rest; add samples or change holdout"
        )
    return out, rest
