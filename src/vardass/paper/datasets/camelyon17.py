"""Camelyon17-WILDS: tumour or not in patches of tissue, five hospitals."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vardass.data.domains import Domain, Task
from vardass.data.folders import locate
from vardass.data.images import ImageDataset
from vardass.data.splits import derived_seed
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.validate import check_count, choose

__all__ = ["HOSPITALS", "LAYOUT", "ORIGIN", "camelyon17_names", "load_camelyon17"]

HOSPITALS = 5
LAYOUT = """\
camelyon17_v1.0/metadata.csv      columns patient,node,x_coord,y_coord,tumor,slide,center,split
camelyon17_v1.0/patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png"""
ORIGIN = "https://wilds.stanford.edu/datasets/#camelyon17, or wilds.get_dataset('camelyon17', download=True); 10 GB"

_CLASSES = ("normal", "tumor")
_TEST_HOSPITAL = 2  # of WILDS
_TRAIN_HOSPITALS = (0, 3, 4)
_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")


@dataclass(frozen=True)
class _Patch:
    path: Path
    tumour: int
    hospital: int


def camelyon17_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Five tasks that leave one hospital out, ``"hospital-2"`` being the paper's, and ``"wilds"``."""
    return (*(f"hospital-{i}" for i in range(HOSPITALS)), "wilds")


def load_camelyon17(
    task: str,
    root: PathLike | None,
    *,
    per_hospital: int | None = 2800,
    subset_seed: int = 0,
    size: int | tuple[int, int] = 224,
    cache: bool = False,
    interpolation: str = "bilinear",
) -> Task:
    """Task with one hospital as target and the others as sources.

    The paper has one split, five domains and 14,000 patches of the 455,954, and does not say which. Here: the target
    is hospital 2, WILDS's test hospital, and the four others are sources (``"hospital-2"``); and of each hospital
    ``per_hospital`` = 14,000 / 5 patches are kept, drawn uniformly without replacement by a generator seeded with
    ``subset_seed`` and the hospital, so classes have about the shares that they have in WILDS (one half).

    Parameters
    ----------
    task : str
        ``"hospital-0"`` to ``"hospital-4"``, the target; or ``"wilds"``, hospitals 0, 3 and 4 to 2, which leaves
        hospital 1 to WILDS's validation.
    root : path
        Folder ``camelyon17_v1.0`` or the one around it.
    per_hospital : int or None
        Patches of each hospital; None for all.
    subset_seed : int
        Another seed keeps other patches.
    size, cache, interpolation :
        See `ImageDataset`. Patches have 96 pixels; 224 is DomainBed's.
    """
    task = choose(task, "task of camelyon17", camelyon17_names(), any_case=True)
    folder = locate(root, ["metadata.csv"], inside=["camelyon17_v1.0"], info=f"{LAYOUT}\nfrom {ORIGIN}")
    patches = _read(folder)
    target = _TEST_HOSPITAL if task == "wilds" else int(task[-1])
    sources = _TRAIN_HOSPITALS if task == "wilds" else tuple(i for i in range(HOSPITALS) if i != target)

    def domain(hospital: int) -> Domain:
        chosen = _subset(
            [patch for patch in patches if patch.hospital == hospital], hospital, per_hospital, subset_seed
        )
        missing = next((patch.path for patch in chosen if not patch.path.is_file()), None)
        if missing is not None:
            raise InputError(f"metadata.csv lists {missing}, which is not there; unpack the data set again\n{LAYOUT}")
        dataset = ImageDataset([patch.path for patch in chosen], size, 3, cache, interpolation)
        labels = torch.tensor([patch.tumour for patch in chosen])
        return Domain(f"hospital-{hospital}", dataset, labels, _CLASSES, kind="image")

    return Task(task, tuple(domain(hospital) for hospital in sources), domain(target))


def _subset(patches: Sequence[_Patch], hospital: int, count: int | None, seed: int) -> list[_Patch]:
    if not patches:
        raise InputError(f"metadata.csv has 0 patches of hospital {hospital}; unpack the data set again\n{LAYOUT}")
    if count is None:
        return list(patches)
    check_count(
        count,
        f"per_hospital for hospital {hospital}, which has {len(patches)} patches,",
        high=len(patches),
        remedy="lower per_hospital, or use None for all",
    )
    generator = torch.Generator().manual_seed(derived_seed("camelyon17", seed, hospital))
    rows = torch.randperm(len(patches), generator=generator)[:count].sort().values
    return [patches[i] for i in rows.tolist()]


def _read(folder: Path) -> list[_Patch]:
    table = folder / "metadata.csv"
    patches = []
    with table.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or [])]
        if missing:
            raise InputError(f"{table} has columns {reader.fieldnames} and lacks {missing}; unpack it again\n{LAYOUT}")
        for row in reader:
            try:
                case = f"patient_{row['patient']}_node_{int(row['node'])}"
                name = f"patch_{case}_x_{int(row['x_coord'])}_y_{int(row['y_coord'])}.png"
                patches.append(_Patch(folder / "patches" / case / name, int(row["tumor"]), int(row["center"])))
            except (TypeError, ValueError):
                raise InputError(f"line {reader.line_num} of {table} is damaged: {row}; unpack it again") from None
    return patches
