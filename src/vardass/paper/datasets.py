"""The four data sets of the paper: readers of their published layouts."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vardass.data.audio import FrontEnd
from vardass.data.domains import Domain, Task, pair_names
from vardass.data.from_paths import files_in, folder_domain, folder_task, locate, subfolders
from vardass.data.images import ImageDataset
from vardass.data.registry import DatasetInfo
from vardass.data.splits import named_seed
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.validate import check_count, choose

__all__ = ["CAMELYON17", "HUMPBACKS", "OFFICE_HOME", "OFFICE_HOME_DOMAINS", "SPAWRIOUS"]

Size = int | tuple[int, int]

# --- Camelyon17-WILDS: tumour or not in patches of tissue, five hospitals ---

_HOSPITALS = 5
_TEST_HOSPITAL = 2  # of WILDS
_TRAIN_HOSPITALS = (0, 3, 4)
_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")


class _Patch(NamedTuple):
    path: Path
    tumour: int
    hospital: int


def _camelyon17_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Five tasks that leave one hospital out, ``"hospital-2"`` being the paper's, and ``"wilds"``."""
    return (*(f"hospital-{i}" for i in range(_HOSPITALS)), "wilds")


def _load_camelyon17(
    task: str,
    root: PathLike | None,
    *,
    per_hospital: int | None = 2800,
    size: Size = 224,
    cache: bool = False,
    interpolation: str = "bilinear",
) -> Task:
    """Task with one hospital as target and the others as sources; ``"wilds"`` is hospitals 0, 3 and 4 to 2.

    The paper has one split, five domains and 14,000 patches of the 455,954, and does not say which. Here: the target
    is hospital 2, WILDS's test hospital, and the four others are sources (``"hospital-2"``); and of each hospital
    ``per_hospital`` = 14,000 / 5 patches are kept (None for all), the same ones in every run, drawn uniformly
    without replacement, so classes have about the shares that they have in WILDS (one half).
    Patches have 96 pixels; ``size`` 224 is DomainBed's.
    """
    task = choose(task, "task of camelyon17", _camelyon17_names(), any_case=True)
    folder = locate(root, ["metadata.csv"], inside=["camelyon17_v1.0"], info=CAMELYON17.where)
    patches = _read_patches(folder)
    target = _TEST_HOSPITAL if task == "wilds" else int(task[-1])
    sources = _TRAIN_HOSPITALS if task == "wilds" else tuple(i for i in range(_HOSPITALS) if i != target)

    def domain(hospital: int) -> Domain:
        chosen = _subset([patch for patch in patches if patch.hospital == hospital], hospital, per_hospital)
        missing = next((patch.path for patch in chosen if not patch.path.is_file()), None)
        if missing is not None:
            raise InputError(
                f"metadata.csv lists {missing}, which is not there; unpack the data set again\n{CAMELYON17.layout}"
            )
        dataset = ImageDataset([patch.path for patch in chosen], size, 3, cache, interpolation)
        labels = torch.tensor([patch.tumour for patch in chosen])
        return Domain(f"hospital-{hospital}", dataset, labels, ("normal", "tumor"), kind="image")

    return Task(task, tuple(domain(hospital) for hospital in sources), domain(target))


def _subset(patches: Sequence[_Patch], hospital: int, count: int | None) -> list[_Patch]:
    if not patches:
        raise InputError(
            f"metadata.csv has 0 patches of hospital {hospital}; unpack the data set again\n{CAMELYON17.layout}"
        )
    if count is None:
        return list(patches)
    check_count(
        count,
        f"per_hospital for hospital {hospital}, which has {len(patches)} patches,",
        high=len(patches),
        remedy="lower per_hospital, or use None for all",
    )
    generator = torch.Generator().manual_seed(named_seed("camelyon17", 0, hospital))
    rows = torch.randperm(len(patches), generator=generator)[:count].sort().values
    return [patches[i] for i in rows.tolist()]


def _read_patches(folder: Path) -> list[_Patch]:
    table = folder / "metadata.csv"
    patches = []
    with table.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or [])]
        if missing:
            raise InputError(
                f"{table} has columns {reader.fieldnames} and lacks {missing}; unpack it again\n{CAMELYON17.layout}"
            )
        for row in reader:
            try:
                case = f"patient_{row['patient']}_node_{int(row['node'])}"
                name = f"patch_{case}_x_{int(row['x_coord'])}_y_{int(row['y_coord'])}.png"
                patches.append(_Patch(folder / "patches" / case / name, int(row["tumor"]), int(row["center"])))
            except (TypeError, ValueError):
                raise InputError(f"line {reader.line_num} of {table} is damaged: {row}; unpack it again") from None
    return patches


_AS_THE_PAPER = {"network": "resnet18", "augment": "source"}
CAMELYON17 = DatasetInfo(
    "camelyon17",
    "tumours in tissue, 5 hospitals",
    """\
camelyon17_v1.0/metadata.csv      columns patient,node,x_coord,y_coord,tumor,slide,center,split
camelyon17_v1.0/patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png""",
    "https://wilds.stanford.edu/datasets/#camelyon17, or wilds.get_dataset('camelyon17', download=True); 10 GB",
    _load_camelyon17,
    _camelyon17_names,
    _AS_THE_PAPER,
)


# --- Humpbacks: whale calls or not in underwater recordings of four monitoring programs ---

_PROGRAMS = 4


def _humpback_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Four tasks, one program left out in each: the folders of ``root``, or their positions "1" to "4"."""
    if root is None:
        return tuple(str(i + 1) for i in range(_PROGRAMS))
    return tuple(entry.name for entry in subfolders(locate(root, [], inside=[], info=HUMPBACKS.where)))


def _load_humpbacks(
    task: str,
    root: PathLike | None,
    *,
    front_end: FrontEnd | Mapping[str, Any] | None = None,
    cache: bool = False,
) -> Task:
    """Task with one program as target, given by its folder or position by name, and the others as sources.

    Code and clips of the study (Napoli and White, DCASE 2023) are not published; the defaults of `FrontEnd` are ours.
    The position of a folder by name is not the number of a domain in the paper's table.
    """
    folder = locate(root, [], inside=[], info=HUMPBACKS.where)
    names = [entry.name for entry in subfolders(folder)]
    if len(names) != _PROGRAMS:
        raise InputError(
            f"{folder} has {len(names)} program folders ({names}), not {_PROGRAMS}; sort the clips so, or use the data "
            f"set 'audio' for other folders\n{HUMPBACKS.where}"
        )
    if task not in names and task in _humpback_names():
        task = names[int(task) - 1]
    task = choose(task, "task of humpbacks", names, any_case=True)
    sources = [folder / name for name in names if name != task]
    return folder_task(
        sources, folder / task, kind="audio", name=task, target_labelled=True, front_end=front_end, cache=cache
    )


HUMPBACKS = DatasetInfo(
    "humpbacks",
    "whale calls, 4 monitoring programs",
    "humpbacks/<program>/<class>/*.wav      four programs; classes such as humpback and background",
    "the authors of 'Unsupervised domain adaptation for the cross-dataset detection of humpback whale calls' "
    "(DCASE 2023): the clips are cut from public archives, but the set itself is not published",
    _load_humpbacks,
    _humpback_names,
    {"network": "audio"},
)


# --- Spawrious: four breeds of dog on six backgrounds, and backgrounds that mislead ---

CLASSES = ("bulldog", "corgi", "dachshund", "labrador")  # label order of the published code
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


def _spawrious_names(root: PathLike | None = None) -> tuple[str, ...]:
    return tuple(BACKGROUNDS)


def environments(task: str, total: int = 3168) -> dict[str, list[tuple[str, str, str, int | None]]]:
    """Which images make the environments "train-1", "train-2" and "test" of a task.

    ``total`` images of each class are in each training environment; 3,168 is all of a folder. An entry (group,
    background, class, count) takes ``count`` images, or all if None, of ``spawrious224/<group>/<background>/<class>``.

    One-to-one (O2O): in training 97% and 87% of a class's images are on its own background, the rest on a
    filler that all classes share; environments 1 and 2 take from groups 0 and 1. Many-to-many (M2M): classes come in
    pairs that exchange backgrounds between the two training environments.
    """
    train, test, filler = BACKGROUNDS[choose(task, "task of spawrious", BACKGROUNDS, any_case=True)]
    result: dict[str, list[tuple[str, str, str, int | None]]] = {"train-1": [], "train-2": [], "test": []}
    for i, name in enumerate(_ORDER):
        for environment in range(2):
            place, group, own = i, str(environment), total * _SHARES[environment] // 100
            if filler is None:
                place, group, own = i if environment == 0 else i ^ 1, "0", total  # 0 and 1 exchange, 2 and 3 exchange
            result[f"train-{environment + 1}"].append((group, train[place], name, own))
            if filler is not None:
                result[f"train-{environment + 1}"].append((group, filler, name, total - own))
            result["test"].append((group, test[place], name, None))
    return result


def _load_spawrious(
    task: str,
    root: PathLike | None,
    *,
    per_class: int = 3168,
    test_per_folder: int | None = None,
    size: Size = 224,
    cache: bool = False,
    interpolation: str = "bilinear",
) -> Task:
    """Task with two training environments as sources and the test environment as target.

    Of each folder the first images by name are taken. The defaults are the published benchmark: ``per_class`` images of
    each class in each training environment, and all of the test's folders. The paper states 18,664 examples and not
    which; ``per_class=1167, test_per_folder=1166`` gives that many.
    """
    task = choose(task.replace("_", "-"), "task of spawrious", BACKGROUNDS, any_case=True)
    check_count(per_class, "per_class")
    folder = locate(root, ["0"], inside=["spawrious224"], info=SPAWRIOUS.where)
    if test_per_folder is not None:
        check_count(test_per_folder, "test_per_folder")
    domains = []
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
            paths += images[:limit]
            labels += [CLASSES.index(breed)] * len(images[:limit])
        if not short:
            dataset = ImageDataset(paths, size, 3, cache, interpolation, crops=False)  # DomainBed does not
            domains.append(Domain(name, dataset, torch.tensor(labels), CLASSES, kind="image"))
    if short:
        raise InputError(
            f"{len(short)} folders have too few images for {task}: {', '.join(short[:4])}"
            f"{', ...' if len(short) > 4 else ''}; unpack the data set again, or take fewer with "
            f"per_class and test_per_folder\n{SPAWRIOUS.where}"
        )
    return Task(task, (domains[0], domains[1]), domains[2])


SPAWRIOUS = DatasetInfo(
    "spawrious",
    "dogs on misleading backgrounds, 6 tasks",
    """\
spawrious224/0/<background>/<class>/*.png
spawrious224/1/<background>/<class>/*.png
backgrounds: beach desert dirt jungle mountain snow; classes: bulldog corgi dachshund labrador""",
    "https://github.com/aengusl/spawrious; 'entire_dataset' holds all six tasks, the M2M tasks need it",
    _load_spawrious,
    _spawrious_names,
    _AS_THE_PAPER,
)


# --- Office-Home: 65 kinds of everyday things as art, clip art, product pictures and photographs ---

OFFICE_HOME_DOMAINS = {"A": "Art", "C": "Clipart", "P": "Product", "R": "Real World"}
_OFFICE_HOME_CLASSES = 65


def _office_home_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Twelve pairs, ``"A-C"`` (Art to Clipart) to ``"R-P"``."""
    return pair_names(list(OFFICE_HOME_DOMAINS), "-")


def _load_office_home(
    task: str,
    root: PathLike | None,
    *,
    size: Size = 224,
    cache: bool = False,
    interpolation: str = "bilinear",
) -> Task:
    """Task with one domain as source and one as target, such as ``"A-C"``, the paper's twelve pairs.

    ``root`` is the folder of the four domains, or the one around it; ``RealWorld`` and ``Real_World`` are found as
    well.
    """
    task = choose(task, "task of office-home", _office_home_names(), any_case=True)
    inside = ("OfficeHomeDataset_10072016", "office_home", "OfficeHome", "Office-Home")
    folder = locate(root, ["Art", "Clipart", "Product"], inside=inside, info=OFFICE_HOME.where)
    letters = task.split("-")
    places = [_domain_folder(folder, OFFICE_HOME_DOMAINS[letter]) for letter in letters]
    classes = [entry.name for entry in subfolders(places[0])]
    if len(classes) != _OFFICE_HOME_CLASSES:
        raise InputError(
            f"{places[0]} has {len(classes)} classes, not {_OFFICE_HOME_CLASSES}; unpack the data set again\n"
            f"{OFFICE_HOME.where}"
        )
    options: Any = {"class_names": classes, "size": size, "cache": cache, "interpolation": interpolation}
    source, target = (
        folder_domain(place, name=OFFICE_HOME_DOMAINS[letter], labelled=True, **options)
        for letter, place in zip(letters, places, strict=True)
    )
    return Task(task, (source,), target)


def _domain_folder(folder: Path, name: str) -> Path:
    for spelling in (name, name.replace(" ", ""), name.replace(" ", "_")):
        if (folder / spelling).is_dir():
            return folder / spelling
    found = [entry.name for entry in subfolders(folder)]
    raise InputError(f"no folder {name!r} in {folder}, only {found}\n{OFFICE_HOME.layout}")


OFFICE_HOME = DatasetInfo(
    "office-home",
    "65 everyday things in 4 styles, 12 pairs",
    """\
OfficeHomeDataset_10072016/Art/<class>/*.jpg
OfficeHomeDataset_10072016/Clipart/<class>/*.jpg
OfficeHomeDataset_10072016/Product/<class>/*.jpg
OfficeHomeDataset_10072016/Real World/<class>/*.jpg      65 classes, such as Alarm_Clock""",
    "https://www.hemanthdv.org/officeHomeDataset.html; 15,588 images, 1.1 GB",
    _load_office_home,
    _office_home_names,
    _AS_THE_PAPER,
)
