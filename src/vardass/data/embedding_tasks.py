"""Tasks between domains of embeddings that a user computed elsewhere: .npz, .npy, .csv or .parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.data.domains import Domain, Task, TensorInputs, pair_names, parse_pair
from vardass.data.embedding_files import EMBEDDING_ENDINGS, Columns, read_labelled
from vardass.data.scaling import standardise_task
from vardass.errors import InputError
from vardass.files import PathLike, as_path
from vardass.validate import shorten

__all__ = ["embedding_names", "embedding_task", "label_texts", "load_embeddings"]


def embedding_task(
    sources: PathLike | Sequence[PathLike],
    target: PathLike,
    *,
    key: str | Sequence[str | None] | None = None,
    labels: str | Sequence[str | None] = "labels",
    target_labels: str | None = None,
    columns: Columns | None = None,
    names: Sequence[str] | None = None,
    name: str | None = None,
    standardise: bool = True,
    regression: bool = False,
) -> Task:
    """Make a task of files of embeddings.

    Parameters
    ----------
    sources, target : path, or for the sources several
        Files, see `read_labelled`. One file may serve for several domains with different keys.
    key, labels : str, or one for each source and then the target
        Names of features and labels in the files. The last of several ``labels`` may be None: a target without.
    target_labels : str, optional
        Labels of the target where ``labels`` is one name; by default they are not read, even if they are there.
    columns : optional
        Columns that are features.
    names : sequence of str, optional
        Names of the sources and the target; by default those of the files.
    name : str, optional
        Of the task.
    standardise : bool
        Scale all columns by mean and deviation of the sources together, robustly; see `standardise_task`.
    regression : bool
        Labels are numbers to predict, which get the name of the first source's labels.

    Raises
    ------
    InputError
        If files do not fit each other, or the target has a class that no source has.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder) / "clinic.npz", x=np.eye(4), labels=["ill", "well"] * 2)
    ...     np.savez(Path(folder) / "home.npz", x=np.ones((3, 4)))
    ...     task = embedding_task(Path(folder) / "clinic.npz", Path(folder) / "home.npz")
    >>> task.name, task.class_names, len(task.target)
    ('clinic->home', ('ill', 'well'), 3)
    """
    given = [sources] if isinstance(sources, str) or not isinstance(sources, Sequence) else list(sources)
    paths = [as_path(path, "source or target") for path in (*given, target)]
    keys = [key] * len(paths) if key is None or isinstance(key, str) else list(key)
    marks = [*[labels] * len(given), target_labels] if isinstance(labels, str) else list(labels)
    titles = [path.stem for path in paths] if names is None else list(names)
    for what, values in (("key", keys), ("labels", marks), ("names", titles)):
        if len(values) != len(paths):
            raise InputError(
                f"{what} has {len(values)} entries for {len(paths)} domains; give one for each, target last"
            )
    if len(set(titles)) < len(titles):
        titles = [str(path) for path in paths]
    tables = [
        read_labelled(
            path, key=array, labels=mark, columns=columns, leave_out=[m for m in marks if m], regression=regression
        )
        for path, array, mark in zip(paths, keys, marks, strict=True)
    ]
    widths = {title: table.shape[1] for title, (table, _) in zip(titles, tables, strict=True)}
    if len(set(widths.values())) > 1:
        raise InputError(f"the domains have features of different width, {widths}; use one encoder for all")
    known = [values for _, values in tables[:-1] if values is not None]
    if len(known) < len(given):
        raise InputError(f"{len(given) - len(known)} of {len(given)} sources have no labels; name them with labels=")
    classes = _number_names(paths[0], str(marks[0]), known[0].shape[1]) if regression else _classes(known)
    domains = [
        Domain(
            title,
            TensorInputs(table),
            values if regression else _positions(values, classes, title),
            classes,
            regression=regression,
        )
        for title, (table, values) in zip(titles, tables, strict=True)
    ]
    task = Task(name or "+".join(titles[:-1]) + "->" + titles[-1], tuple(domains[:-1]), domains[-1])
    return standardise_task(task)[0] if standardise else task


def embedding_names(root: PathLike | None) -> tuple[str, ...]:
    """Tasks between the files in ``root``, such as ``"clinic->home"``; none without a root or for a single file."""
    return () if root is None or as_path(root, "root").is_file() else pair_names(list(_files(root)))


def load_embeddings(
    task: str,
    root: PathLike | None,
    *,
    key: str | None = None,
    labels: str = "labels",
    target_labelled: bool = True,
    columns: Columns | None = None,
    standardise: bool = True,
    regression: bool = False,
) -> Task:
    """Task ``"a->b"``, or ``"a+b->c"``, between the files ``a``, ``b``, ``c`` of a folder, or arrays of one .npz file.

    ``{domain}`` in ``key`` and ``labels`` stands for the name of the domain, so that one file can hold all:
    ``load_embeddings("photo->sketch", "pacs.npz", key="feat_{domain}", labels="y_{domain}")``.
    Columns are scaled unless ``standardise`` is False, see `standardise_task`. With ``regression`` labels are numbers.
    """
    if root is None:
        raise InputError("root is None; give a folder with one file of embeddings for each domain, or one .npz file")
    root = as_path(root, "root")
    if root.is_file():
        if key is None or "{domain}" not in key:
            raise InputError(f"{root} is one file and key is {key!r}; name its arrays, such as key='x_{{domain}}'")
        left, arrow, right = task.partition("->")
        if not arrow:
            raise InputError(f"task {task!r} has no arrow; write it as 'source->target'")
        parts = [*left.split("+"), right]
        paths = [root] * len(parts)
    else:
        files = _files(root)
        sources, target = parse_pair(task, list(files), str(root))
        parts = [*sources, target]
        paths = [files[part] for part in parts]
    marks: list[str | None] = [labels.replace("{domain}", part) for part in parts]
    if not target_labelled:
        marks[-1] = None
    return embedding_task(
        paths[:-1],
        paths[-1],
        key=None if key is None else [key.replace("{domain}", part) for part in parts],
        labels=marks,
        columns=columns,
        names=parts,
        name=task,
        standardise=standardise,
        regression=regression,
    )


def _files(root: PathLike) -> dict[str, Path]:
    base = as_path(root, "root")
    entries = sorted(base.iterdir()) if base.is_dir() else []
    files = {path.stem: path for path in entries if path.suffix.lower() in EMBEDDING_ENDINGS and path.is_file()}
    if len(files) < 2:
        raise InputError(
            f"{base} has {len(files)} files of embeddings ({' '.join(EMBEDDING_ENDINGS)}); give one for each domain"
        )
    return files


def _number_names(path: Path, labels: str, count: int) -> tuple[str, ...]:
    name = "labels" if path.suffix.lower() == ".npy" else labels  # there it is the name of a file
    return (name,) if count == 1 else tuple(f"{name}_{place}" for place in range(count))


def _classes(columns: Sequence[NDArray[Any]]) -> tuple[str, ...]:
    numbers = all(values.dtype.kind in "iub" for values in columns)
    found = {int(value) if numbers else str(value) for values in columns for value in np.unique(values)}
    return tuple(str(value) for value in sorted(found, key=lambda value: (value if numbers else 0, str(value))))


def _positions(values: NDArray[Any] | None, classes: tuple[str, ...], name: str) -> Tensor | None:
    if values is None:
        return None
    texts, inverse = label_texts(values)
    absent = [text for text in texts if text not in classes]
    if absent:
        raise InputError(
            f"domain {name!r} has the classes {shorten(absent)}, which no source has (they have {shorten(classes)}); "
            "add them to a source or remove these rows"
        )
    return torch.tensor([classes.index(text) for text in texts])[inverse]


def label_texts(values: NDArray[Any]) -> tuple[list[str], Tensor]:
    """The different labels of an array as names of classes, and which of them each entry (n,) is."""
    found, inverse = np.unique(values, return_inverse=True)
    texts = [str(int(value)) if values.dtype.kind in "iub" else str(value) for value in found]
    return texts, torch.from_numpy(inverse.reshape(-1))
