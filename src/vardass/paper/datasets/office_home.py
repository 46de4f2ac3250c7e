"""Office-Home: 65 kinds of everyday things as art, clip art, product pictures and photographs."""

from __future__ import annotations

from pathlib import Path

from vardass.data.domains import Task, pair_names
from vardass.data.folders import folder_domain, locate, subfolders
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.validate import choose

__all__ = ["DOMAINS", "LAYOUT", "ORIGIN", "load_office_home", "office_home_names"]

DOMAINS = {"A": "Art", "C": "Clipart", "P": "Product", "R": "Real World"}
LAYOUT = """\
OfficeHomeDataset_10072016/Art/<class>/*.jpg
OfficeHomeDataset_10072016/Clipart/<class>/*.jpg
OfficeHomeDataset_10072016/Product/<class>/*.jpg
OfficeHomeDataset_10072016/Real World/<class>/*.jpg      65 classes, such as Alarm_Clock"""
ORIGIN = "https://www.hemanthdv.org/officeHomeDataset.html; 15,588 images, 1.1 GB"

_INSIDE = ("OfficeHomeDataset_10072016", "office_home", "OfficeHome", "Office-Home")
_CLASS_COUNT = 65


def office_home_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Twelve pairs, ``"A-C"`` (Art to Clipart) to ``"R-P"``."""
    return pair_names(list(DOMAINS), "-")


def load_office_home(
    task: str,
    root: PathLike | None,
    *,
    size: int | tuple[int, int] = 224,
    cache: bool = False,
    interpolation: str = "bilinear",
    class_count: int = _CLASS_COUNT,
) -> Task:
    """Task with one domain as source and one as target, such as ``"A-C"``, the paper's twelve pairs.

    Parameters
    ----------
    task : str
        Letters of source and target: A(rt), C(lipart), P(roduct), R(eal World).
    root : path
        Folder of the four domains, or the one around it. ``RealWorld`` and ``Real_World`` are found as well.
    size, cache, interpolation :
        See `ImageDataset`.
    class_count : int
        Classes that must be there; change it only for a part of the data set.
    """
    task = choose(task, "task of office-home", office_home_names(), any_case=True)
    info = f"{LAYOUT}\nfrom {ORIGIN}"
    folder = locate(root, ["Art", "Clipart", "Product"], inside=_INSIDE, info=info)
    source, target = (_domain_folder(folder, letter) for letter in task.split("-"))
    classes = [entry.name for entry in subfolders(source)]
    if len(classes) != class_count:
        raise InputError(f"{source} has {len(classes)} classes, not {class_count}; unpack the data set again\n{info}")

    domains = [
        folder_domain(
            place,
            name=DOMAINS[letter],
            class_names=classes,
            labelled=True,
            size=size,
            cache=cache,
            interpolation=interpolation,
        )
        for letter, place in zip(task.split("-"), (source, target), strict=True)
    ]
    return Task(task, (domains[0],), domains[1])


def _domain_folder(folder: Path, letter: str) -> Path:
    name = DOMAINS[letter]
    places = [folder / spelling for spelling in (name, name.replace(" ", ""), name.replace(" ", "_"))]
    for place in places:
        if place.is_dir():
            return place
    raise InputError(f"no folder {name!r} in {folder}, only {[entry.name for entry in subfolders(folder)]}\n{LAYOUT}")
