"""All data sets by name, and a user's own by package.module:name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vardass.data import embedding_tasks, from_paths, watch
from vardass.data.domains import Task
from vardass.data.images import ImagePreprocessing
from vardass.errors import InputError
from vardass.files import PathLike, as_path
from vardass.registry import Registry, check_options, declared_options
from vardass.validate import check_flag


@dataclass(frozen=True)
class DatasetInfo:
    """One data set of the registry.

    Attributes
    ----------
    name, summary : str
        For lists.
    layout : str
        Files that the loader expects, one per line; empty if it needs none.
    origin : str
        Where to get it.
    load : callable
        ``load(task, root, **options) -> Task``.
    tasks : callable
        ``tasks(root) -> names of tasks``; for user data the names depend on what is in ``root``.
    settings : mapping
        Default settings of a run on the data: for those of the paper, the network that it names (for humpbacks one of
        ours, as its code is not public) and DomainBed's augmentation.
    """

    name: str
    summary: str
    layout: str
    origin: str
    load: Callable[..., Task]
    tasks: Callable[[PathLike | None], tuple[str, ...]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Files and their origin, for messages."""
        return f"{self.layout}\nfrom {self.origin}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the loader and their defaults."""
        return {name: value for name, value in declared_options(self.load).items() if name not in _PLACES}

    def check_options(self, names: Iterable[str]) -> None:
        """Raise an InputError for a name that is not an option of the loader."""
        check_options(f"data set {self.name!r}", names, self.load, without=_PLACES)


_PLACES = ("task", "root")  # of a loader; given by every caller
_ENTRIES = (
    DatasetInfo(
        "watch",
        "exercises seen by a watch, 4 domains, 12 pairs",
        "",
        "comes with vardass",
        watch.load_watch_task,
        watch.watch_names,
        {"network": "mlp"},
    ),
    DatasetInfo(
        "images",
        "your folders of images",
        "root/<domain>/<class>/*.png      tasks <domain>-><domain>; the target may lack class folders",
        "your own files",
        from_paths.load_folders,
        from_paths.folder_names,
    ),
    DatasetInfo(
        "audio",
        "your folders of sounds",
        "root/<domain>/<class>/*.wav      tasks <domain>-><domain>; the target may lack class folders",
        "your own files",
        partial(from_paths.load_folders, kind="audio"),
        from_paths.folder_names,
        {"network": "audio"},
    ),
    DatasetInfo(
        "embeddings",
        "your files of embeddings",
        "root/<domain>.npz      or .npy, .csv, .parquet; labels in the array or column 'labels'",
        "your own files",
        embedding_tasks.load_embeddings,
        embedding_tasks.embedding_names,
        {"network": "mlp"},
    ),
)
_OF_THE_PAPER = {
    "camelyon17": "vardass.paper.datasets:CAMELYON17",
    "humpbacks": "vardass.paper.datasets:HUMPBACKS",
    "spawrious": "vardass.paper.datasets:SPAWRIOUS",
    "office-home": "vardass.paper.datasets:OFFICE_HOME",
}
DATASETS: Registry[DatasetInfo] = Registry(
    "data set",
    {**{entry.name: entry for entry in _ENTRIES}, **_OF_THE_PAPER},
    base=DatasetInfo,
    own=("object", "function"),
)


def find_dataset(name: str) -> DatasetInfo:
    """The data set of a name, ignoring case and underscores, or the one that ``"package.module:name"`` makes.

    That may be a `DatasetInfo` or a function ``load(task, root, **options) -> Task``, whose tasks cannot be listed.
    """
    own = ":" in str(name)
    found: Any = DATASETS.find(name if own else str(name).replace("_", "-"), any_case=True)
    if isinstance(found, DatasetInfo):
        return replace(found, name=name) if own else found
    return DatasetInfo(name, "your own code", "", name, found, lambda root: ())


def image_options(dataset: str, preprocessing: ImagePreprocessing | None) -> dict[str, Any]:
    """Options for `load_task` that make images as a network wants them; none if the data set has no such options."""
    if preprocessing is None or "interpolation" not in find_dataset(dataset).options:
        return {}
    return {"size": preprocessing.size, "interpolation": preprocessing.interpolation}


def task_names(dataset: str, root: PathLike | None = None) -> tuple[str, ...]:
    """Tasks of a data set; those of user data depend on what is in ``root``."""
    return find_dataset(dataset).tasks(None if root is None else as_path(root, "root"))


def load_task(dataset: str, task: str, root: PathLike | None = None, **options: Any) -> Task:
    """Load a task of a data set.

    Parameters
    ----------
    dataset : str
        One of `DATASETS`, or ``"package.module:name"``, see `find_dataset`.
    task : str
        One of ``task_names(dataset)``.
    root : path, optional
        Folder of the data set; not needed for watch.
    **options
        Of the loader, such as ``size``, ``cache`` or ``per_hospital``.

    Examples
    --------
    >>> task = load_task("watch", "left-A->right-B")
    >>> task.sources[0].name, len(task.class_names)
    ('left-A', 7)
    """
    entry = find_dataset(dataset)
    if not isinstance(task, str):
        raise InputError(f"task must be a name, got {task!r}; choose one of task_names({entry.name!r})")
    root = None if root is None else as_path(root, "root")
    entry.check_options(options)
    for name, default in entry.options.items():
        if isinstance(default, bool):
            check_flag(options.get(name, default), f"option {name} of {entry.name}")
    loaded = entry.load(task, root, **options)
    if not isinstance(loaded, Task):
        raise InputError(f"data set {dataset!r} gave type {type(loaded).__name__} for task {task!r}; return a Task")
    return loaded
