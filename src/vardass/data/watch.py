"""Smart-watch recordings of physiotherapy exercises: a small real data set with a strong domain shift.

Ten people did seven shoulder exercises with a watch on the left or the right wrist. A model trained on one
wrist and one group of people performs poorly on the other wrist and other people.
"""

from __future__ import annotations

import io
import lzma
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from vardass.data.domains import Domain, Task, TensorInputs, pair_names, parse_pair
from vardass.data.embedding_tasks import standardise_task
from vardass.files import PathLike
from vardass.scaling import standardise

_SIDES = ("left", "right")
_GROUPS = {"A": (1, 5), "B": (6, 10)}  # first and last person
_DOMAINS = tuple(f"{side}-{group}" for side in _SIDES for group in _GROUPS)


@dataclass(frozen=True, eq=False)
class WatchData:
    """Windows of 2 s, one row for each.

    Attributes
    ----------
    features : Tensor of shape (n, 78)
        float32; 13 statistics of each of three accelerations (g) and three angular rates (rad/s).
    labels : Tensor of shape (n,)
        Exercise, 0 to 6.
    side : Tensor of shape (n,)
        Wrist, 0 left or 1 right.
    subject : Tensor of shape (n,)
        Person, 1 to 10.
    class_names, feature_names : tuple of str
        Names of the 7 exercises and of the 78 columns, such as ``"ax_mean"``.
    """

    features: Tensor
    labels: Tensor
    side: Tensor
    subject: Tensor
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...]


def load_watch() -> WatchData:
    """Read the embedded recordings: 4,677 windows of 78 features, not standardised.

    From the package seglearn (BSD-3-Clause, notice in ``vardass/data/watch/LICENSE.seglearn``; study:
    arXiv 1802.01489), derived by ``scripts/make_watch.py``.
    """
    packed = (files("vardass.data") / "watch" / "watch.npz.xz").read_bytes()
    with np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False) as data:
        return WatchData(
            features=torch.from_numpy(data["features"].astype(np.float32, order="C")),
            labels=torch.from_numpy(data["labels"].astype(np.int64)),
            side=torch.from_numpy(data["side"].astype(np.int64)),
            subject=torch.from_numpy(data["subject"].astype(np.int64)),
            class_names=tuple(data["class_names"].tolist()),
            feature_names=tuple(data["feature_names"].tolist()),
        )


def watch_domains() -> dict[str, tuple[Tensor, Tensor]]:
    """Four domains, wrist by group of people: ``{"left-A": (features, labels), "left-B": ...}``.

    Group A is persons 1 to 5, B is 6 to 10, so domains of different groups share nobody.
    """
    data = load_watch()
    domains = {}
    for side, side_name in enumerate(_SIDES):
        for group, (first, last) in _GROUPS.items():
            rows = (data.side == side) & (data.subject >= first) & (data.subject <= last)
            domains[f"{side_name}-{group}"] = (data.features[rows], data.labels[rows])
    return domains


def watch_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Twelve pairs, such as ``"left-A->right-B"``."""
    return pair_names(_DOMAINS)


def load_watch_task(task: str, root: PathLike | None = None, *, standardised: bool = True, clip: bool = True) -> Task:
    """Task between wrists and groups of people, such as ``"left-A->right-B"`` or ``"left-A+left-B->right-A"``.

    The 78 features are scaled by mean and deviation of the sources together, with ``clip`` robustly, as embeddings are
    by default: what is beyond 8 deviations, a few values in a thousand, is cut.
    """
    sources, target = parse_pair(task, _DOMAINS, "watch")
    tables = watch_domains()
    names = load_watch().class_names
    reference = torch.cat([tables[source][0] for source in sources])

    def domain(name: str) -> Domain:
        features, labels = tables[name]
        scaled = standardise(features, reference=reference) if standardised and not clip else features
        return Domain(name, TensorInputs(scaled), labels, names)

    loaded = Task(task, tuple(domain(source) for source in sources), domain(target))
    return standardise_task(loaded) if standardised and clip else loaded
