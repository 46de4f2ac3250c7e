"""All data sets by name."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from vardass.data import camelyon17, humpbacks, office_home, spawrious
from vardass.data.digits import digit_names, load_digits_task
from vardass.data.domains import Task
from vardass.data.embedding_domains import embedding_names, load_embeddings
from vardass.data.folders import folder_names, load_folders
from vardass.data.layout import DatasetInfo, PathLike, choose
from vardass.data.watch_tasks import load_watch_task, watch_names
from vardass.errors import InputError

__all__ = ["DATASETS", "load_task", "task_names"]

_ENTRIES = (
    DatasetInfo(
        "watch",
        "exercises seen by a watch, 4 domains, 12 pairs",
        "",
        "comes with vardass",
        load_watch_task,
        watch_names,
    ),
    DatasetInfo(
        "digits",
        "MNIST part and optdigits, 2 pairs",
        "",
        "pip install 'vardass[digits]'",
        load_digits_task,
        digit_names,
    ),
    DatasetInfo(
        "camelyon17",
        "tumours in tissue, 5 hospitals",
        camelyon17.LAYOUT,
        camelyon17.ORIGIN,
        camelyon17.load_camelyon17,
        camelyon17.camelyon17_names,
    ),
    DatasetInfo(
        "humpbacks",
        "whale calls, 4 monitoring programs",
        humpbacks.LAYOUT,
        humpbacks.ORIGIN,
        humpbacks.load_humpbacks,
        humpbacks.humpback_names,
    ),
    DatasetInfo(
        "spawrious",
        "dogs on misleading backgrounds, 6 tasks",
        spawrious.LAYOUT,
        spawrious.ORIGIN,
        spawrious.load_spawrious,
        spawrious.spawrious_names,
    ),
    DatasetInfo(
        "office-home",
        "65 everyday things in 4 styles, 12 pairs",
        office_home.LAYOUT,
        office_home.ORIGIN,
        office_home.load_office_home,
        office_home.office_home_names,
    ),
    DatasetInfo(
        "images",
        "your folders of images",
        "root/<domain>/<class>/*.png      tasks <domain>-><domain>; the target may lack class folders",
        "your own files",
        load_folders,
        folder_names,
    ),
    DatasetInfo(
        "audio",
        "your folders of sounds",
        "root/<domain>/<class>/*.wav      tasks <domain>-><domain>; the target may lack class folders",
        "your own files",
        partial(load_folders, kind="audio"),
        folder_names,
    ),
    DatasetInfo(
        "embeddings",
        "your files of embeddings",
        "root/<domain>.npz      or .npy, .csv, .parquet; labels in the array or column 'labels'",
        "your own files",
        load_embeddings,
        embedding_names,
    ),
)
DATASETS: dict[str, DatasetInfo] = {entry.name: entry for entry in _ENTRIES}


def task_names(dataset: str, root: PathLike | None = None) -> tuple[str, ...]:
    """Tasks of a data set; those of user data depend on what is in ``root``.

    Examples
    --------
    >>> task_names("office-home")[:3]
    ('A-C', 'A-P', 'A-R')
    """
    return DATASETS[_find(dataset)].tasks(root)


def load_task(dataset: str, task: str, root: PathLike | None = None, **options: Any) -> Task:
    """Load a task of a data set.

    Parameters
    ----------
    dataset : str
        One of `DATASETS`.
    task : str
        One of ``task_names(dataset)``.
    root : path, optional
        Folder of the data set; not needed for watch and digits.
    **options
        Of the loader, such as ``size``, ``cache`` or ``per_hospital``.

    Raises
    ------
    InputError
        For unknown names, with the nearest one; and for a data set that is not there, with the expected files
        and where to get them.

    Examples
    --------
    >>> task = load_task("watch", "left-A->right-B")
    >>> task.sources[0].name, len(task.class_names)
    ('left-A', 7)
    """
    entry = DATASETS[_find(dataset)]
    known = [
        name
        for name, parameter in inspect.signature(entry.load).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for name in options:
        choose(name, known, f"option of {entry.name}")
        if name not in known:
            raise InputError(f"option {name!r} of {entry.name} is spelt otherwise; one of {known}")
    return entry.load(task, root, **options)


def _find(dataset: str) -> str:
    return choose(dataset.replace("_", "-"), list(DATASETS), "data set")
