"""Domains and tasks: what a model learns from, what it is adapted to, and labels that can be locked away."""

from __future__ import annotations

import copy
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from vardass.errors import InputError, VardassError, VardassWarning
from vardass.scaling import Scale
from vardass.validate import ArrayLike, as_labels, as_numbers, as_tensor, check_flag, choose, shorten, unknown

Kind: TypeAlias = Literal["features", "image", "audio"]


class LabelsHidden(VardassError):
    """Raised when hidden labels are read."""


class TensorInputs(Dataset[Tensor]):
    """Inputs that are in memory; item ``i`` is ``tensor[i]``.

    Columns of a table may have ``column_names``; ``scale`` says how they were scaled, see ``vardass.scaling``.
    """

    def __init__(self, tensor: Tensor, column_names: Sequence[str] | None = None, scale: Scale | None = None) -> None:
        self.tensor, self.column_names, self.scale = tensor, column_names, scale

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensor[int(index)]


class _FirstOfPair(Dataset[Tensor]):
    """Inputs of a data set whose items are (input, label)."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return _length(self.dataset)

    def __getitem__(self, index: int) -> Tensor:
        x, _ = _pair(self.dataset, index)
        if not isinstance(x, Tensor):
            raise InputError(
                f"item {index} of {type(self.dataset).__name__} begins with type {type(x).__name__}, not a tensor; let "
                "the data set make tensors, for example with torchvision's ToTensor as its transform"
            )
        return x


class Domain:
    """Samples of one origin, such as the images of one hospital.

    Parameters
    ----------
    name : str
        For reports and messages; unique within a task.
    dataset : map-style Dataset, or Tensor
        ``dataset[i]`` is the input tensor of sample i, without label.
    labels : Tensor of shape (n,) or None
        Classes as positions in ``class_names``; None if they are not known. With ``regression`` real numbers of shape
        (n,) or (n, m). Single labels of a target may be unknown: -1, or NaN with ``regression``.
    class_names : sequence of str
        Names of all classes of the task, the same in each of its domains; with ``regression`` those of the m numbers.
    kind : {"features", "image", "audio"}
        What the inputs are: vectors (d,), images (C, H, W), or spectrograms (1, bands, frames).
    domain_ids : Tensor of shape (n,), optional
        Which of the united domains each sample is from; by default all 0.
    regression : bool
        Whether labels are numbers to predict, not classes; `labels` then are float64 of shape (n, m).

    Examples
    --------
    >>> domain = Domain("left", TensorInputs(torch.zeros(3, 5)), torch.tensor([0, 1, 0]), ("cat", "dog"))
    >>> locked = domain.hide_labels()
    >>> locked.labels
    Traceback (most recent call last):
    vardass.data.domains.LabelsHidden: the labels of domain 'left' are hidden; ...
    >>> locked.reveal().labels
    tensor([0, 1, 0])
    >>> Domain("homes", torch.zeros(3, 5), torch.tensor([1.5, 2.5, 0.5]), ["price"], regression=True)
    Domain('homes', 3 samples, numbers: 'price', labelled)
    """

    def __init__(
        self,
        name: str,
        dataset: Dataset[Tensor] | Tensor,
        labels: ArrayLike | None,
        class_names: Sequence[str],
        *,
        kind: Kind = "features",
        domain_ids: Tensor | None = None,
        regression: bool = False,
    ) -> None:
        if not isinstance(name, str):
            raise InputError(f"the name of a domain must be a text, got {name!r}; reports call it so")
        if isinstance(class_names, str) or not isinstance(class_names, Sequence):
            raise InputError(f"class_names of domain {name!r} must be a list of names, got {class_names!r}")
        if isinstance(dataset, Tensor):
            dataset = TensorInputs(dataset)
        count = _length(dataset)
        self.name = name
        self.dataset = dataset
        self.class_names = tuple(class_names)
        self.kind = choose(kind, "kind", get_args(Kind))
        self.domain_ids = torch.zeros(count, dtype=torch.int64) if domain_ids is None else domain_ids
        self.regression = check_flag(regression, "regression")
        self._labels = None if labels is None else _any_known(self._checked(labels, count))
        self._hidden = False

    @classmethod
    def from_dataset(
        cls,
        name: str,
        dataset: Dataset[Any],
        class_names: Sequence[str] | None = None,
        *,
        kind: Kind = "features",
        regression: bool = False,
    ) -> Domain:
        """Make a domain of a data set whose items are pairs (input, label), as most of torch and torchvision are.

        A ``TensorDataset`` stays in memory. Of others the labels are their ``targets``, as torchvision has it, or
        are read once, item by item.

        Parameters
        ----------
        name : str
            As in `Domain`.
        dataset : map-style Dataset
            ``dataset[i]`` is (input tensor, label); images have values from 0 to 1.
        class_names : sequence of str, optional
            By default ``dataset.classes``, as torchvision has it.
        kind, regression
            As in `Domain`.
        """
        names = getattr(dataset, "classes", None) if class_names is None else class_names
        if names is None:
            raise InputError(
                f"{type(dataset).__name__} of domain {name!r} has no attribute classes; give their names as class_names"
            )
        if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
            return cls(name, *dataset.tensors, names, kind=kind, regression=regression)
        labels: Any = getattr(dataset, "targets", None)
        if labels is None:
            labels = np.array([_pair(dataset, index)[1] for index in range(_length(dataset))])
        return cls(name, _FirstOfPair(dataset), labels, names, kind=kind, regression=regression)

    def _checked(self, labels: ArrayLike, count: int) -> Tensor:
        what = f"labels of domain {self.name!r}"
        if not self.regression:
            if as_tensor(labels, what, "whole numbers").is_floating_point():
                raise InputError(
                    f"{what} are real numbers (floats); pass regression=True to predict numbers, or classes as "
                    "whole numbers"
                )
            classes = as_labels(labels, count, what)
            if count and not -1 <= int(classes.min()) <= int(classes.max()) < len(self.class_names):
                raise InputError(
                    f"{what} go from {int(classes.min())} to {int(classes.max())}, but there are "
                    f"{len(self.class_names)} class names; give labels as positions in class_names, "
                    "and -1 where a target has none"
                )
            return classes
        values = as_tensor(labels, what)
        blank = values.isnan()
        numbers = as_numbers(torch.where(blank, torch.zeros_like(values), values), count, what)
        numbers[blank.reshape(numbers.shape).any(1)] = torch.nan
        if numbers.shape[1] != len(self.class_names):
            raise InputError(
                f"{what} have {numbers.shape[1]} columns, but {len(self.class_names)} names "
                f"({shorten(self.class_names)}); give one for each number that is to be predicted"
            )
        return numbers

    def __len__(self) -> int:
        return _length(self.dataset)

    def __repr__(self) -> str:
        state = "no labels" if self._labels is None else "labels hidden" if self._hidden else "labelled"
        what = f"numbers: {shorten(self.class_names)}" if self.regression else f"{len(self.class_names)} classes"
        return f"Domain({self.name!r}, {len(self)} samples, {what}, {state})"

    @property
    def has_labels(self) -> bool:
        """Whether labels exist, hidden or not."""
        return self._labels is not None

    @property
    def labels(self) -> Tensor | None:
        """Classes of shape (n,), or numbers of shape (n, m), or None if they are not known.

        Raises
        ------
        LabelsHidden
            If they were hidden and not revealed.
        """
        if self._hidden:
            raise LabelsHidden(
                f"the labels of domain {self.name!r} are hidden; training and model selection must not read them, a "
                "final report calls reveal() first"
            )
        return self._labels

    def known_labels(self) -> Tensor:
        """Classes of shape (n,) or numbers of shape (n, m); an InputError if there are none."""
        labels = self.labels
        if labels is None:
            remedy = "sort its files into class folders, or fill them in"
            if self.regression:
                remedy = "give a number for each sample"
            raise InputError(f"domain {self.name!r} has no labels, but they are needed; {remedy}")
        return labels

    def labelled(self) -> Domain:
        """The samples whose label is known."""
        known = known_rows(self.known_labels())
        return self if bool(known.all()) else self.subset(known.nonzero().flatten())

    def hide_labels(self) -> Domain:
        """The same domain with labels that raise `LabelsHidden` until its ``reveal()`` is called."""
        return self._changed(_hidden=True)

    def reveal(self) -> Domain:
        """Make the labels of this domain readable, and return it; subsets made before stay hidden."""
        self._hidden = False
        return self

    def subset(self, rows: Tensor) -> Domain:
        """Some samples of the domain, in the order given; hidden labels stay hidden."""
        rows = torch.as_tensor(rows)
        labels = None if self._labels is None else _any_known(self._labels[rows])
        cut = Subset(self.dataset, rows.tolist())
        if isinstance(self.dataset, Subset):  # no subsets of subsets
            cut = Subset(self.dataset.dataset, [self.dataset.indices[row] for row in cut.indices])
        ids = self.domain_ids[rows]
        return self._changed(dataset=cut, _labels=labels, domain_ids=ids)

    def with_inputs(self, dataset: Dataset[Tensor]) -> Domain:
        """The same samples with other inputs, such as scaled ones; hidden labels stay hidden."""
        return self._changed(dataset=dataset)

    def _changed(self, **values: Any) -> Domain:
        domain = copy.copy(self)
        vars(domain).update(values)
        return domain


def unite(domains: Sequence[Domain]) -> Domain:
    """Concatenate domains; ``domain_ids`` of the result are their positions in ``domains``.

    The result has labels if all have, and hides them if any hides them.
    """
    if not domains:
        raise InputError("0 domains cannot be united; give at least one")
    for domain in domains:
        if not isinstance(domain, Domain):
            raise InputError(f"only domains can be united, got {domain!r}; make a Domain of it")
    first = domains[0]
    for other in domains[1:]:
        _same_prediction(first, other)
        if other.class_names != first.class_names or other.kind != first.kind:
            raise InputError(
                f"domains {first.name!r} and {other.name!r} differ in kind ({first.kind}, {other.kind}) or class names "
                f"({shorten(first.class_names)}; {shorten(other.class_names)}); load them with the same options"
            )
    known = [domain._labels for domain in domains if domain._labels is not None]
    return first._changed(
        name="+".join(domain.name for domain in domains),
        dataset=ConcatDataset([domain.dataset for domain in domains]),
        _labels=torch.cat(known) if len(known) == len(domains) else None,
        domain_ids=torch.cat([torch.full((len(domain),), i) for i, domain in enumerate(domains)]),
        _hidden=any(domain._hidden for domain in domains),
    )


@dataclass(frozen=True, eq=False)
class Task:
    """Labelled source domains to learn from, and a target domain to adapt to.

    Attributes
    ----------
    name : str
        Such as ``"A-C"``.
    sources : tuple of Domain
        Labelled; together they hold every class.
    target : Domain
        Its labels, if it has any, are never read here.
    """

    name: str
    sources: tuple[Domain, ...]
    target: Domain

    def __post_init__(self) -> None:
        sources = (self.sources,) if isinstance(self.sources, Domain) else tuple(self.sources or ())
        object.__setattr__(self, "sources", sources)
        if not sources:
            raise InputError(f"task {self.name!r} has 0 sources; give at least one labelled domain")
        domains = (*sources, self.target)
        for domain in domains:
            if not isinstance(domain, Domain):
                raise InputError(f"task {self.name!r} is made of domains, got {domain!r}; make a Domain of it")
            if not len(domain):
                raise InputError(f"domain {domain.name!r} has 0 samples; at least 1 is needed, check its files")
        names = [domain.name for domain in domains]
        if len(set(names)) < len(names):
            raise InputError(
                f"task {self.name!r} has domains {names}, two of one name; rename a file or folder, as "
                "reports tell domains apart by name"
            )
        _same_prediction(self.sources[0], self.target)
        classes = self.sources[0].class_names
        if not self.target.regression:
            refuse_unknown(self.target.class_names, classes, f"target {self.target.name!r}", "source")
        if self.target.class_names != classes:
            raise InputError(
                f"target {self.target.name!r} has the {'numbers' if self.target.regression else 'classes'} "
                f"{shorten(self.target.class_names)}, the source {shorten(classes)}; name the same ones in the same "
                "order"
            )
        labels = unite(self.sources).known_labels()
        if unknown_rows := (~known_rows(labels)).nonzero().flatten().tolist():
            raise InputError(
                f"{len(unknown_rows)} of {len(labels)} samples in the sources of task {self.name!r} have no label, the "
                f"first is {unknown_rows[0]} (from 0); label them or leave them out: only a target may lack labels"
            )
        if self.target.regression:
            return
        counts = torch.bincount(labels, minlength=len(classes))
        absent = [classes[i] for i in (counts == 0).nonzero().flatten().tolist()]
        if absent:
            raise InputError(
                f"classes {shorten(absent)} of {len(classes)} have no sample in the sources of task {self.name!r}; add "
                "samples, or leave these classes out of class_names"
            )

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels, or of the numbers to predict."""
        return self.target.class_names


def known_rows(labels: Tensor) -> Tensor:
    """Mask (n,) of the samples whose class (n,) is not -1, or of whose numbers (n, m) none is NaN."""
    return labels.isfinite().all(1) if labels.is_floating_point() else labels >= 0


def _any_known(labels: Tensor) -> Tensor | None:
    return None if len(labels) and not bool(known_rows(labels).any()) else labels


def _same_prediction(one: Domain, other: Domain) -> None:
    if one.regression != other.regression:
        numbers, classes = (one, other) if one.regression else (other, one)
        raise InputError(
            f"domain {numbers.name!r} has numbers as labels, domain {classes.name!r} classes; give regression=True to "
            "all domains of a task or to none"
        )


def refuse_unknown(found: Sequence[str], classes: Sequence[str], owner: str, known_to: str) -> None:
    """Refuse classes that ``owner`` has and the source or model, which ``classes`` are of, has not."""
    if extra := [name for name in found if name not in classes]:
        alike = _alike(extra, classes)
        remedy = "rename them, or leave their samples out"
        if alike:
            remedy = f"{alike[0][0]!r} and {alike[0][1]!r} differ in capitals or blanks: write them alike"
        elif known_to == "source":
            remedy += "; or give the target without labels, which only score"
        lacking = f"which the {known_to} lacks (it has {shorten(classes)})"
        raise InputError(f"{owner} has the classes {shorten(extra)}, {lacking}; {remedy}")


def _alike(names: Sequence[str], classes: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of one of ``names`` and a class that differ in capitals or blanks only."""
    plain = {" ".join(name.split()).casefold(): name for name in classes}
    return [(name, plain[key]) for name in names if (key := " ".join(name.split()).casefold()) in plain]


def open_positions(counts: Mapping[str, int], classes: Sequence[str], owner: str) -> list[int]:
    """Position in ``classes`` of each class that ``owner`` has so many samples of; -1, with a warning, of others.

    The name "" stands for samples without label. One that differs from a class in capitals only is refused.
    """
    if extra := [name for name in counts if name and name not in classes]:
        if alike := _alike(extra, classes):
            refuse_unknown([name for name, _ in alike], classes, owner, "source")
        warnings.warn(
            f"{sum(counts[name] for name in extra):,} of {sum(counts.values()):,} samples of {owner} are of classes "
            f"that the source lacks ({shorten(extra)}; it has {shorten(classes)}): they are predicted as one of the "
            "source's, and left out of the score",
            VardassWarning,
            stacklevel=3,
        )
    return [classes.index(name) if name in classes else -1 for name in counts]


def parts_of(dataset: Dataset[Tensor]) -> list[Dataset[Tensor]]:
    """The data sets that subsets and concatenations are made of."""
    if isinstance(dataset, Subset):
        return parts_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [found for part in dataset.datasets for found in parts_of(part)]
    return [dataset]


def find_sample(dataset: Dataset[Tensor], index: int) -> tuple[Dataset[Tensor], int]:
    """Which of `parts_of` a sample is from, and its index there."""
    if isinstance(dataset, Subset):
        return find_sample(dataset.dataset, dataset.indices[index])
    if isinstance(dataset, ConcatDataset):
        part = bisect_right(dataset.cumulative_sizes, index)
        return find_sample(dataset.datasets[part], index - (dataset.cumulative_sizes[part - 1] if part else 0))
    return dataset, index


def pair_names(domains: Sequence[str], arrow: str = "->") -> tuple[str, ...]:
    """Names of the tasks between all ordered pairs of domains, such as ``"a->b"``."""
    return tuple(f"{source}{arrow}{target}" for source, target in permutations(domains, 2))


def parse_pair(task: str, domains: Sequence[str], dataset: str) -> tuple[list[str], str]:
    """Split the name of a task, ``"a->b"``, or ``"a+b->c"`` for two sources, into names of domains."""
    left, arrow, right = task.partition("->")
    if not arrow:
        raise unknown(f"task of {dataset}", task, pair_names(domains))
    sources = [choose(name.strip(), f"domain of {dataset}", domains, any_case=True) for name in left.split("+")]
    target = choose(right.strip(), f"domain of {dataset}", domains, any_case=True)
    if target in sources or len(set(sources)) < len(sources):
        raise InputError(f"task {task!r} of {dataset} names a domain twice; give different sources and target")
    return sources, target


def _pair(dataset: Dataset[Any], index: int) -> tuple[Any, Any]:
    item = dataset[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(
            f"item {index} of {type(dataset).__name__} is of type {type(item).__name__}, not a pair (input, label); "
            "return such pairs, or make a Domain of separate inputs and labels"
        )
    return item[0], item[1]


def _length(dataset: Dataset[Any]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(
            f"{type(dataset).__name__} has no length; give a map-style data set, with __len__ and __getitem__"
        ) from None
