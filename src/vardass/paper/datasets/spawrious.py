"""Spawrious: four breeds of dog on six backgrounds, and backgrounds that mislead."""

from __future__ import annotations

from pathlib import Path

import torch

from vardass.data.domains import Domain, Task
from vardass.data.folders import files_in, locate
from vardass.data.images import ImageDataset
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.validate import check_count, choose

__all__ = ["BACKGROUNDS", "CLASSES", "LAYOUT", "ORIGIN", "environments", "load_spawrious", "spawrious_names"]

CLASSES = ("bulldog", "corgi", "dachshund", "labrador")  # label order of the published code
LAYOUT = """\
spawrious224/0/<background>/<class>/*.png
spawrious224/1/<background>/<class>/*.png
backgrounds: beach desert dirt jungle mountain snow; classes: bulldog corgi dachshund labrador"""
ORIGIN = "https://github.com/aengusl/spawrious; 'entire_dataset' holds all six tasks, the M2M tasks need it"

_ORDER = ("bulldog", "dachshund", "labrador", "corgi")  # class order of the tables below
# task: backgrounds of the training environments, of the test environment, and the filler (O2O only)
BACKGROUNDS: dict[str, tuple[tuple[str, str, str, str], tuple[str, str, str, str], str | None]] = {
    "O2O-easy": (("desert", "jungle", "dirt", "snow"), ("dirt", "snow", "desert", "jungle"), "beach"),
    "O2O-medium": (("mountain", "beach", "dirt", "jungle"), ("jungle", "dirt", "beach", "snow"), "desert"),
    "O2O-hard": (("jungle", "mountain", "snow", "desert"), ("mountain", "snow", "desert", "jungle"), "beach"),
    "M2M-easy": (("desert", "mountain", "dirt", "jungle"), ("dirt", "jungle", "mountain", "desert"), None),
    "M2M-medium": (("beach", "snow", "mountain", "desert"), ("desert", "mountain", "beach", "snow"), None),
    "M2M-hard": (("dirt", "jungle", "snow", "beach"), ("snow", "beach", "dirt", "jungle"), None),
}
_SHARES = (97, 87)  # per cent on the misleading background, O2O, in the two training environments


def spawrious_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Six tasks, ``"O2O-easy"`` to ``"M2M-hard"``."""
    return tuple(BACKGROUNDS)


def environments(task: str, total: int = 3168) -> dict[str, list[tuple[str, str, str, int | None]]]:
    """Which images make the environments "train-1", "train-2" and "test" of a task.

    Parameters
    ----------
    task : str
        One of `spawrious_names`.
    total : int
        Images of each class in each training environment; 3,168 is all of a folder.

    Returns
    -------
    dict of lists of (group, background, class, count)
        Take ``count`` images, or all if None, of ``spawrious224/<group>/<background>/<class>``.

    Notes
    -----
    One-to-one (O2O): in training 97% and 87% of a class's images are on its own background, the rest on a
    filler that all classes share; environment 1 takes from group 0, environment 2 from group 1, and the test takes
    both groups. Many-to-many (M2M): classes come in pairs that exchange backgrounds between the two training
    environments; the test has both new backgrounds for each class; all from group 0.
    """
    task = choose(task, "task of spawrious", spawrious_names(), any_case=True)
    train, test, filler = BACKGROUNDS[task]
    result: dict[str, list[tuple[str, str, str, int | None]]] = {"train-1": [], "train-2": [], "test": []}
    for i, name in enumerate(_ORDER):
        for environment in range(2):
            group = str(environment) if filler is not None else "0"
            if filler is not None:
                own = total * _SHARES[environment] // 100
                result[f"train-{environment + 1}"] += [
                    (group, train[i], name, own),
                    (group, filler, name, total - own),
                ]
                result["test"].append((group, test[i], name, None))
            else:
                place = i if environment == 0 else i ^ 1  # 0 and 1 exchange, 2 and 3 exchange
                result[f"train-{environment + 1}"].append((group, train[place], name, total))
                result["test"].append((group, test[place], name, None))
    return result


def load_spawrious(
    task: str,
    root: PathLike | None,
    *,
    per_class: int = 3168,
    test_per_folder: int | None = None,
    size: int | tuple[int, int] = 224,
    cache: bool = False,
    interpolation: str = "bilinear",
) -> Task:
    """Task with two training environments as sources and the test environment as target.

    Of each folder the first images by name are taken; the published code takes them in the order in which the
    file system lists them. Augmentation mirrors and recolours the images but does not crop them, as in DomainBed.
    The defaults are the published benchmark. The paper states 18,664 examples and not which;
    ``per_class=1167, test_per_folder=1166`` gives that many, 2 · 4 · 1,167 + 8 · 1,166, as nearly even as can be.

    Parameters
    ----------
    task : str
        ``"O2O-easy"``, ``"O2O-medium"``, ``"O2O-hard"``, ``"M2M-easy"``, ``"M2M-medium"`` or ``"M2M-hard"``.
    root : path
        Folder ``spawrious224`` or the one around it.
    per_class : int
        Images of each class in each training environment.
    test_per_folder : int, optional
        Images of each folder of the test environment; by default all.
    size, cache, interpolation :
        See `ImageDataset`.
    """
    task = choose(task.replace("_", "-"), "task of spawrious", spawrious_names(), any_case=True)
    check_count(per_class, "per_class")
    folder = locate(root, ["0"], inside=["spawrious224"], info=f"{LAYOUT}\nfrom {ORIGIN}")
    if test_per_folder is not None:
        check_count(test_per_folder, "test_per_folder")
    domains = []
    found: dict[Path, int] = {}
    short: list[str] = []
    for name, parts in environments(task, per_class).items():
        paths: list[Path] = []
        labels: list[int] = []
        for group, background, breed, count in parts:
            place = folder / group / background / breed
            images = files_in(place, "image")
            limit = test_per_folder if name == "test" else count
            if len(images) < (limit or 1):
                short.append(f"{place} has {len(images)} of {limit or 'at least 1'}")
            found[place] = len(images)
            paths += images[:limit]
            labels += [CLASSES.index(breed)] * len(images[:limit])
        if not short:
            dataset = ImageDataset(paths, size, 3, cache, interpolation, crops=False)  # DomainBed does not
            domains.append(Domain(name, dataset, torch.tensor(labels), CLASSES, kind="image"))
    if short:
        raise InputError(
            f"{len(short)} folders have too few images for {task}: {', '.join(short[:4])}"
            f"{', ...' if len(short) > 4 else ''}; unpack the data set again, or take fewer with "
            f"{_remedy(task, folder, found)}test_per_folder\n{LAYOUT}\nfrom {ORIGIN}"
        )
    return Task(task, (domains[0], domains[1]), domains[2])


def _remedy(task: str, folder: Path, found: dict[Path, int]) -> str:
    """The largest ``per_class`` for which all training folders have enough images, if there is one."""

    def fits(total: int) -> bool:
        parts = environments(task, total)
        return all(
            found[folder / group / background / breed] >= (count or 0)
            for name in ("train-1", "train-2")
            for group, background, breed, count in parts[name]
        )

    largest = next((total for total in range(max(found.values()) * 2, 0, -1) if fits(total)), None)
    return "" if largest is None else f"per_class={largest}, or with a smaller "
