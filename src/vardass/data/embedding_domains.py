"""Domains of embeddings that a user computed elsewhere: .npz, .npy, .csv or .parquet files with labels."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.data.domains import Domain, Task, TensorInputs
from vardass.data.embedding_files import read_embeddings
from vardass.data.layout import PathLike, pair_names, parse_pair
from vardass.data.watch import standardise as standardise_columns
from vardass.errors import InputError
from vardass.validate import as_features

__all__ = [
    "embedding_names",
    "embedding_task",
    "load_embeddings",
    "read_labelled",
    "scale_columns",
    "standardise_task",
]

_ENDINGS = (".npz", ".npy", ".parquet", ".csv")


def read_labelled(
    path: PathLike,
    *,
    key: str | None = None,
    labels: str | None = None,
    columns: str | Sequence[str | int] | None = None,
    leave_out: Collection[str] = (),
) -> tuple[Tensor, NDArray[Any] | None]:
    """Read features and labels from one file.

    Parameters
    ----------
    path : path
        See `vardass.data.embedding_files.read_embeddings`.
    key : str, optional
        Array of features in an ``.npz`` file.
    labels : str, optional
        Array of an ``.npz`` file or column of a ``.csv`` or ``.parquet`` file; for an ``.npy`` file, the path of
        another ``.npy`` file, from the same folder. Whole numbers or names. Without it there are no labels.
    columns : optional
        Columns that are features; by default all but the labels.
    leave_out : collection of str
        Further columns that are not features if they are there, such as labels that must not be used.

    Returns
    -------
    Tensor of shape (n, d), float, and an array of shape (n,) or None
    """
    path = Path(path).expanduser()
    ending = path.suffix.lower()
    others = {labels, *leave_out} - {None}
    if others and columns is None and ending in (".csv", ".parquet"):
        names = _column_names(path, ending)
        if labels is not None and labels not in names:
            raise InputError(f"no column {labels!r} for labels in {path}; it has {', '.join(map(repr, names[:8]))}")
        if not others.isdisjoint(names) and (ending == ".csv" or not _has_lists(path)):
            columns = [name for name in names if name not in others]
    features = as_features(read_embeddings(path, key=key, columns=columns), f"features of {path}")
    if labels is None:
        return features, None
    values = _read_labels(path, ending, labels)
    if values.shape != (len(features),) or values.dtype.kind not in "iuUSfb":
        raise InputError(
            f"labels {labels!r} of {path} are {values.dtype} of shape {values.shape} for {len(features)} rows; "
            "give one whole number or name for each row"
        )
    if values.dtype.kind == "f":
        whole = np.where(np.isfinite(values), values, 0.5)
        if (whole != np.round(whole)).any():
            raise InputError(f"labels {labels!r} of {path} hold {values[whole != np.round(whole)][0]}, no whole number")
        values = values.astype(np.int64)
    return features, values


def embedding_task(
    sources: PathLike | Sequence[PathLike],
    target: PathLike,
    *,
    key: str | Sequence[str | None] | None = None,
    labels: str | Sequence[str | None] = "labels",
    target_labels: str | None = None,
    columns: str | Sequence[str | int] | None = None,
    names: Sequence[str] | None = None,
    name: str | None = None,
    standardise: bool = False,
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
        Scale all columns by mean and deviation of the sources together.

    Raises
    ------
    InputError
        If files do not fit each other, or the target has a class that no source has.
    """
    given = [sources] if isinstance(sources, str) or not isinstance(sources, Sequence) else list(sources)
    paths = [Path(path) for path in (*given, target)]
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
        read_labelled(path, key=array, labels=mark, columns=columns, leave_out=[m for m in marks if m])
        for path, array, mark in zip(paths, keys, marks, strict=True)
    ]
    widths = {title: table.shape[1] for title, (table, _) in zip(titles, tables, strict=True)}
    if len(set(widths.values())) > 1:
        raise InputError(f"the domains have features of different width, {widths}; use one encoder for all")
    known = [values for _, values in tables[:-1] if values is not None]
    if len(known) < len(given):
        raise InputError(f"{len(given) - len(known)} of {len(given)} sources have no labels; name them with labels=")
    classes = _classes(known)
    if standardise:
        reference = torch.cat([table for table, _ in tables[:-1]])
        tables = [(standardise_columns(table, reference=reference), values) for table, values in tables]
    domains = [
        Domain(title, TensorInputs(table), _positions(values, classes, title), classes)
        for title, (table, values) in zip(titles, tables, strict=True)
    ]
    return Task(name or "+".join(titles[:-1]) + "->" + titles[-1], tuple(domains[:-1]), domains[-1])


def standardise_task(task: Task) -> tuple[Task, dict[str, list[float]]]:
    """Scale all columns by mean and deviation of the sources together.

    Returns
    -------
    task : Task
        With scaled samples.
    scale : dict
        ``"mean"`` and ``"deviation"`` of each column, for `scale_columns` on samples that come later.

    Raises
    ------
    InputError
        If the samples are not vectors in memory.
    """
    tables = []
    for domain in (*task.sources, task.target):
        if not isinstance(domain.dataset, TensorInputs) or domain.dataset.tensor.ndim != 2:
            raise InputError(f"only embeddings can be standardised, domain {domain.name!r} holds {domain.kind} data")
        tables.append(domain.dataset.tensor)
    reference = torch.cat(tables[:-1])
    spread = reference.std(0, correction=0)
    scale = {"mean": reference.mean(0).tolist(), "deviation": torch.where(spread > 0, spread, 1.0).tolist()}
    scaled = [
        domain._derive(
            domain.name,
            TensorInputs(scale_columns(table, scale)),
            domain._labels,
            domain.domain_ids,
            hidden=domain._hidden,
        )
        for domain, table in zip((*task.sources, task.target), tables, strict=True)
    ]
    return Task(task.name, tuple(scaled[:-1]), scaled[-1]), scale


def scale_columns(features: Tensor, scale: Mapping[str, Sequence[float]]) -> Tensor:
    """Features (n, d) minus the means, divided by the deviations, that `standardise_task` gave."""
    return (features - features.new_tensor(scale["mean"])) / features.new_tensor(scale["deviation"])


def embedding_names(root: PathLike | None) -> tuple[str, ...]:
    """Tasks between the files in ``root``, such as ``"clinic->home"``; none without a root or for a single file."""
    return () if root is None or Path(root).is_file() else pair_names(list(_files(root)))


def load_embeddings(
    task: str,
    root: PathLike | None,
    *,
    key: str | None = None,
    labels: str = "labels",
    target_labelled: bool = True,
    columns: str | Sequence[str | int] | None = None,
    standardise: bool = False,
) -> Task:
    """Task ``"a->b"``, or ``"a+b->c"``, between the files ``a``, ``b``, ``c`` of a folder, or arrays of one .npz file.

    ``{domain}`` in ``key`` and ``labels`` stands for the name of the domain, so that one file can hold all:
    ``load_embeddings("photo->sketch", "pacs.npz", key="feat_{domain}", labels="y_{domain}")``.
    """
    if root is None:
        raise InputError("root is None; give a folder with one file of embeddings for each domain, or one .npz file")
    if Path(root).expanduser().is_file():
        if key is None or "{domain}" not in key:
            raise InputError(f"{root} is one file and key is {key!r}; name its arrays, such as key='x_{{domain}}'")
        left, arrow, right = task.partition("->")
        if not arrow:
            raise InputError(f"task {task!r} has no arrow; write it as 'source->target'")
        parts = [*left.split("+"), right]
        paths = [Path(root)] * len(parts)
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
    )


def _files(root: PathLike) -> dict[str, Path]:
    base = Path(root).expanduser()
    entries = sorted(base.iterdir()) if base.is_dir() else []
    files = {path.stem: path for path in entries if path.suffix.lower() in _ENDINGS and path.is_file()}
    if len(files) < 2:
        raise InputError(
            f"{base} has {len(files)} files of embeddings ({' '.join(_ENDINGS)}); give one for each domain"
        )
    return files


def _column_names(path: Path, ending: str) -> list[str]:
    if not path.is_file():
        raise InputError(f"no file at {path}; check the name")
    if ending == ".parquet":
        return list(_parquet(path, None).names)
    with path.open(encoding="utf-8-sig", newline="") as file:
        line = file.readline()
        return [cell.strip() for cell in next(csv.reader([line], delimiter=max(",;\t", key=line.count)), [])]


def _read_labels(path: Path, ending: str, labels: str) -> NDArray[Any]:
    if ending == ".parquet":
        return np.asarray(_parquet(path, labels).to_pylist())
    if ending == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(",;\t", key=line.count), skipinitialspace=True)
            reader.fieldnames = [field.strip() for field in reader.fieldnames or []]
            if labels not in reader.fieldnames:
                raise InputError(f"no column {labels!r} for labels in {path}; it has {reader.fieldnames[:8]}")
            return _tighten([row[labels] for row in reader])
    source = path if ending == ".npz" else path.parent / labels
    if not source.is_file():
        raise InputError(f"no file at {source} for the labels of {path}; give the name of an .npy file beside it")
    try:
        loaded = np.load(source, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            if labels not in loaded.files:
                raise InputError(f"{path} has no array {labels!r} for labels; it holds {', '.join(loaded.files)}")
            return np.asarray(loaded[labels])
    except InputError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"the labels in {source} are not usable ({error}); save whole numbers or text") from None


def _parquet(path: Path, column: str | None) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise InputError(f"{path} needs pyarrow to be read: pip install 'vardass[parquet]'") from None
    try:
        with pq.ParquetFile(path) as file:
            return file.schema_arrow if column is None else file.read(columns=[column]).column(column)
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot read {column or 'the columns'} of {path} ({reason}); write it again") from None


def _has_lists(path: Path) -> bool:
    from pyarrow import types

    kinds = _parquet(path, None).types
    return any(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) for kind in kinds)


def _tighten(cells: list[str]) -> NDArray[Any]:
    try:
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    except ValueError:
        return np.array([cell.strip() for cell in cells])


def _classes(columns: Sequence[NDArray[Any]]) -> tuple[str, ...]:
    numbers = all(values.dtype.kind in "iub" for values in columns)
    found = {int(value) if numbers else str(value) for values in columns for value in np.unique(values)}
    return tuple(str(value) for value in sorted(found, key=lambda value: (value if numbers else 0, str(value))))


def _positions(values: NDArray[Any] | None, classes: tuple[str, ...], name: str) -> Tensor | None:
    if values is None:
        return None
    found, inverse = np.unique(values, return_inverse=True)
    texts = [str(int(value)) if values.dtype.kind in "iub" else str(value) for value in found]
    absent = [text for text in texts if text not in classes]
    if absent:
        raise InputError(
            f"domain {name!r} has the classes {', '.join(absent[:6])}, which no source has (they have "
            f"{', '.join(classes[:6])}{', ...' if len(classes) > 6 else ''}); add them to a source or remove these rows"
        )
    return torch.from_numpy(np.array([classes.index(text) for text in texts])[inverse.reshape(-1)])
