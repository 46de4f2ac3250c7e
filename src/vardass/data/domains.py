"""Domains and tasks: what a model learns from, what it is adapted to, and labels that can be locked away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vardass.errors import InputError, VardassError
from vardass.validate import ArrayLike, as_labels

__all__ = ["Domain", "Kind", "LabelsHidden", "Rows", "Task", "TensorInputs", "United", "unite"]

Kind: TypeAlias = Literal["features", "image", "audio"]


class LabelsHidden(VardassError):
    """Labels that are locked away were read."""


class TensorInputs(Dataset[Tensor]):
    """Inputs that are in memory; item ``i`` is ``tensor[i]``."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensor[int(index)]


class Rows(Dataset[Tensor]):
    """Some rows of a data set, in the order given."""

    def __init__(self, dataset: Dataset[Tensor], rows: Tensor) -> None:
        self.dataset = dataset
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.dataset[int(self.rows[int(index)])]


class United(Dataset[Tensor]):
    """Data sets one after the other."""

    def __init__(self, datasets: Sequence[Dataset[Tensor]]) -> None:
        self.datasets = tuple(datasets)
        self.ends = np.cumsum([_length(dataset) for dataset in self.datasets])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Tensor:
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside {len(self)} items")
        index %= len(self)
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.datasets[part][index - (int(self.ends[part - 1]) if part else 0)]


class Domain:
    """Samples of one origin, such as the images of one hospital.

    Parameters
    ----------
    name : str
        Also seeds the splits of this domain, so give each domain of a task its own name.
    dataset : map-style Dataset
        ``dataset[i]`` is the input tensor of sample i, without label.
    labels : Tensor of shape (n,) or None
        Classes as positions in ``class_names``; None if they are not known.
    class_names : sequence of str
        Names of all classes of the task, the same in each of its domains.
    kind : {"features", "image", "audio"}
        What the inputs are: vectors (d,), images (C, H, W), or spectrograms (1, bands, frames).
    domain_ids : Tensor of shape (n,), optional
        Which of the united domains each sample is from; by default all 0.

    Examples
    --------
    >>> domain = Domain("left", TensorInputs(torch.zeros(3, 5)), torch.tensor([0, 1, 0]), ("cat", "dog"))
    >>> locked = domain.hide_labels()
    >>> locked.labels
    Traceback (most recent call last):
    vardass.data.domains.LabelsHidden: the labels of domain 'left' are hidden; ...
    >>> locked.reveal().labels
    tensor([0, 1, 0])
    """

    def __init__(
        self,
        name: str,
        dataset: Dataset[Tensor],
        labels: ArrayLike | None,
        class_names: Sequence[str],
        *,
        kind: Kind = "features",
        domain_ids: Tensor | None = None,
    ) -> None:
        count = _length(dataset)
        self.name = name
        self.dataset = dataset
        self.class_names = tuple(class_names)
        self.kind = kind
        self.domain_ids = torch.zeros(count, dtype=torch.int64) if domain_ids is None else domain_ids
        self._labels = None if labels is None else as_labels(labels, count, f"labels of domain {name!r}")
        self._hidden = False
        if self._labels is not None and count:
            low, high = int(self._labels.min()), int(self._labels.max())
            if low < 0 or high >= len(self.class_names):
                raise InputError(
                    f"labels of domain {name!r} go from {low} to {high}, but there are {len(self.class_names)} class "
                    "names; give labels as positions in class_names"
                )

    def __len__(self) -> int:
        return _length(self.dataset)

    def __repr__(self) -> str:
        state = "no labels" if self._labels is None else "labels hidden" if self._hidden else "labelled"
        return f"Domain({self.name!r}, {len(self)} samples, {len(self.class_names)} classes, {state})"

    @property
    def has_labels(self) -> bool:
        """Whether labels exist, hidden or not."""
        return self._labels is not None

    @property
    def labels(self) -> Tensor | None:
        """Classes of shape (n,), or None if they are not known.

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
        """Classes of shape (n,); an InputError if there are none."""
        labels = self.labels
        if labels is None:
            raise InputError(
                f"domain {self.name!r} has no labels, but they are needed; sort its files into class folders"
            )
        return labels

    def hide_labels(self) -> Domain:
        """The same domain with labels that raise `LabelsHidden` until its own ``reveal()`` is called."""
        return self._derive(self.name, self.dataset, self._labels, self.domain_ids, hidden=True)

    def reveal(self) -> Domain:
        """Make the labels of this domain readable, and return it; what was cut from it before stays hidden."""
        self._hidden = False
        return self

    def subset(self, rows: Tensor, *, name: str | None = None) -> Domain:
        """Some samples of the domain, in the order given; hidden labels stay hidden."""
        labels = None if self._labels is None else self._labels[rows]
        dataset: Dataset[Tensor] = Rows(self.dataset, rows)
        if isinstance(self.dataset, Rows):  # one step from sample to data, however often it is cut
            dataset = Rows(self.dataset.dataset, self.dataset.rows[rows])
        return self._derive(name or self.name, dataset, labels, self.domain_ids[rows], hidden=self._hidden)

    def _derive(
        self, name: str, dataset: Dataset[Tensor], labels: Tensor | None, domain_ids: Tensor, *, hidden: bool
    ) -> Domain:
        domain = Domain(name, dataset, labels, self.class_names, kind=self.kind, domain_ids=domain_ids)
        domain._hidden = hidden
        return domain


def unite(domains: Sequence[Domain], *, name: str | None = None) -> Domain:
    """Put domains one after the other; ``domain_ids`` of the result are their positions in ``domains``.

    The result has labels if all have, and hides them if any hides them.
    """
    if not domains:
        raise InputError("0 domains cannot be united; give at least one")
    first = domains[0]
    for other in domains[1:]:
        if other.class_names != first.class_names or other.kind != first.kind:
            raise InputError(
                f"domains {first.name!r} and {other.name!r} differ in kind ({first.kind}, {other.kind}) or class names "
                f"({_some(first.class_names)}; {_some(other.class_names)}); load them with the same options"
            )
    ids = torch.cat([torch.full((len(domain),), i) for i, domain in enumerate(domains)])
    labels = [domain._labels for domain in domains]
    known = [column for column in labels if column is not None]
    united = Domain(
        name or "+".join(domain.name for domain in domains),
        United([domain.dataset for domain in domains]),
        torch.cat(known) if len(known) == len(domains) else None,
        first.class_names,
        kind=first.kind,
        domain_ids=ids,
    )
    united._hidden = any(domain._hidden for domain in domains)
    return united


@dataclass(frozen=True, eq=False)
class Task:
    """Learn from labelled sources, do well on the target.

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
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources:
            raise InputError(f"task {self.name!r} has 0 sources; give at least one labelled domain")
        domains = (*self.sources, self.target)
        names = [domain.name for domain in domains]
        if len(set(names)) < len(names):
            raise InputError(
                f"task {self.name!r} has domains {names}, two of one name; rename one, names seed the splits"
            )
        for domain in domains:
            if not len(domain):
                raise InputError(f"domain {domain.name!r} has 0 samples; at least 1 is needed, check its files")
        classes = self.sources[0].class_names
        absent = [name for name in self.target.class_names if name not in classes]
        if absent:
            raise InputError(
                f"target {self.target.name!r} has classes {_some(absent)} that the source {self.sources[0].name!r} "
                f"lacks (it has {_some(classes)}); add them to the source or remove them from the target"
            )
        if self.target.class_names != classes:
            raise InputError(
                f"target class names {_some(self.target.class_names)} are not those of the source {_some(classes)}, in "
                "the same order; load the target with the class names of the source"
            )
        counts = torch.bincount(unite(self.sources).known_labels(), minlength=len(classes))
        absent = [classes[i] for i in (counts == 0).nonzero().flatten().tolist()]
        if absent:
            raise InputError(
                f"classes {_some(absent)} of {len(classes)} have no sample in the sources of task {self.name!r}; add "
                "samples, or leave these classes out of class_names"
            )

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.target.class_names


def _length(dataset: Dataset[Tensor]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(
            f"{type(dataset).__name__} has no length; give a map-style data set, with __len__ and __getitem__"
        ) from None


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")
