"""Tasks between the four domains of the embedded watch recordings."""

from __future__ import annotations

import torch

from vardass.data.domains import Domain, Task, TensorInputs
from vardass.data.layout import PathLike, pair_names, parse_pair
from vardass.data.watch import load_watch, standardise, watch_domains

__all__ = ["load_watch_task", "watch_names"]

_DOMAINS = ("left-A", "left-B", "right-A", "right-B")


def watch_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Twelve pairs, such as ``"left-A->right-B"``."""
    return pair_names(_DOMAINS)


def load_watch_task(task: str, root: PathLike | None = None, *, standardised: bool = True) -> Task:
    """Task between wrists and groups of people, such as ``"left-A->right-B"`` or ``"left-A+left-B->right-A"``.

    Parameters
    ----------
    task : str
        Sources and target.
    root : None
        Not used; the data come with the package.
    standardised : bool
        Scale the 78 features by mean and deviation of the sources together.

    Examples
    --------
    >>> load_watch_task("left-A->right-B").target
    Domain('right-B', 1222 samples, 7 classes, labelled)
    """
    sources, target = parse_pair(task, _DOMAINS, "watch")
    tables = watch_domains()
    names = load_watch().class_names
    reference = torch.cat([tables[source][0] for source in sources])

    def domain(name: str) -> Domain:
        features, labels = tables[name]
        scaled = standardise(features, reference=reference) if standardised else features
        return Domain(name, TensorInputs(scaled), labels, names)

    return Task(task, tuple(domain(source) for source in sources), domain(target))
