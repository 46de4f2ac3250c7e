"""Tasks between domains of embeddings that a user computed elsewhere: .npz, .npy, .csv or .parquet files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.data.domains import Domain, Task, TensorInputs, open_positions, pair_names, parse_pair, refuse_unknown
from vardass.data.embedding_files import (
    EMBEDDING_ENDINGS,
    Columns,
    finite_rows,
    in_one_order,
    is_number,
    open_embeddings,
    row_name,
)
from vardass.errors import InputError, VardassWarning
from vardass.files import PathLike, as_path
from vardass.scaling import Scale, robust_scale, scale_columns, usual_reach
from vardass.validate import as_numbers, as_tensor, shorten

_MOST_FRACTIONS = 20  # different labels with fractions that may be names of classes
_FAR = 1000.0  # deviations: a mark for missing values, or another unit, rather than a tail


def embedding_task(
    sources: PathLike | Sequence[PathLike],
    target: PathLike,
    *,
    key: str | None = None,
    labels: str | None = None,
    target_labelled: bool | None = False,
    columns: Columns | None = None,
    names: Sequence[str] | None = None,
    standardise: bool = True,
    regression: bool = False,
) -> Task:
    """Make a task of files of embeddings.

    Parameters
    ----------
    sources, target : path, or for the sources several
        Files, see `read_labelled`. One file may serve for several domains with different keys.
    key, labels : str, optional
        Names of features and labels in the files. ``{domain}`` is replaced by the name of the domain, and in labels
        ``{name}`` by the file name without ending. The default for labels is ``labels``; for an ``.npy`` file, the
        file ``{name}.labels.npy`` beside it.
    target_labelled : bool or None
        False never reads labels of the target; None reads them if present. Blank ones are unknown, as are classes that
        no source has.
    columns : optional
        Columns that are features.
    names : sequence of str, optional
        Names of the sources and the target; by default those of the files.
    standardise : bool
        Scale all columns by mean and deviation of the sources together, robustly; see `standardise_task`.
    regression : bool
        Labels are numbers to predict, named like the first source's labels.

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
    titles = [path.stem for path in paths] if names is None else list(names)
    label_names = [labels_name(path, labels, title) for path, title in zip(paths, titles, strict=True)]
    options: Any = {"columns": columns, "leave_out": label_names, "regression": regression}
    read: list[LabelledTable] = []
    for path, title, label_name in zip(paths, titles, label_names, strict=True):
        of_target = len(read) == len(given)
        own = None if key is None else key.replace("{domain}", title)
        wanted = None if of_target and target_labelled is False else label_name
        optional = of_target and target_labelled is None
        read.append(read_labelled(path, key=own, labels=wanted, optional=optional, blanks=of_target, **options))
    if len(set(titles)) < len(titles):
        titles = [str(path) for path in paths]
    tables, column_names = in_one_order(
        [each.features for each in read], [each.column_names for each in read], paths, columns
    )
    widths = {title: table.shape[1] for title, table in zip(titles, tables, strict=True)}
    if len(set(widths.values())) > 1:
        raise InputError(f"the domains have features of different width, {widths}; use one encoder for all")
    known = [each.labels for each in read[:-1] if each.labels is not None]
    classes = _number_names(paths[0], label_names[0], known[0].shape[1]) if regression else _classes(known)
    domains = []
    for title, table, each in zip(titles, tables, read, strict=True):
        positions = each.labels if regression else class_positions(each.labels, classes, f"domain {title!r}", "source")
        domains.append(Domain(title, TensorInputs(table, column_names), positions, classes, regression=regression))
    _tell_of_columns(torch.cat(tables[:-1]), tables[-1], column_names)
    task = Task("+".join(titles[:-1]) + "->" + titles[-1], tuple(domains[:-1]), domains[-1])
    return standardise_task(task) if standardise else task


def labels_name(path: Path, labels: str | None, domain: str) -> str:
    """Name of the labels in a file, or beside an ``.npy`` file, which has no room for a second array."""
    if labels is None:
        labels = "{name}.labels.npy" if path.suffix.lower() == ".npy" else "labels"
    return labels.replace("{name}", path.stem).replace("{domain}", domain)


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
    options: Any = {"key": key, "labels": labels, "target_labelled": target_labelled, "columns": columns}
    options |= {"names": parts, "standardise": standardise, "regression": regression}
    return embedding_task(paths[:-1], paths[-1], **options)


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


def class_positions(
    values: NDArray[Any] | None, classes: Sequence[str], owner: str, known_to: str
) -> NDArray[Any] | None:
    """Labels (n,), if there are any, as positions in ``classes``; -1 of blank ones and of other classes.

    If all are of other classes than those of a model, they are refused.
    """
    if values is None:
        return None
    labels, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    texts = [str(int(value)) if values.dtype.kind in "iub" else str(value) for value in labels]
    if known_to == "model" and not set(texts) & set(classes):
        refuse_unknown([text for text in texts if text], classes, owner, known_to)
    positions = open_positions(dict(zip(texts, counts.tolist(), strict=True)), classes, owner)
    return np.array(positions)[inverse.reshape(-1)]


# --- labels ---


class LabelledTable(NamedTuple):
    """Features (n, d), labels (n,) or (n, m), and names of the columns of features; None where there are none."""

    features: Tensor
    labels: NDArray[Any] | None
    column_names: list[str] | None


def read_labelled(
    path: PathLike,
    *,
    key: str | None = None,
    labels: str | None = None,
    columns: Columns | None = None,
    column_names: Sequence[str] | None = None,
    leave_out: Collection[str] = (),
    regression: bool = False,
    optional: bool = False,
    blanks: bool = False,
) -> LabelledTable:
    """Features (n, d), float32 as networks are, and labels (n,), or float64 (n, m), of one file, opened once.

    Labels are whole numbers or names, with ``regression`` real numbers: an array of an ``.npz`` file, a column of a
    ``.csv`` or ``.parquet`` file, or an ``.npy`` file beside an ``.npy`` file. They are never among the features, and
    neither is what ``leave_out`` names. If they are ``optional``, None stands for labels that the file lacks. With
    ``blanks`` some may be blank, "" or NaN; if all are, None stands for them. Where columns have names,
    ``column_names`` are read instead of ``columns``.
    """
    with open_embeddings(path, key) as file:
        if labels is not None and labels not in file.names and not optional:
            texts = ", ".join(map(repr, file.texts()))
            what = f"of which these are text: {texts}" if texts else "none of them text"
            where = f"in {path}; it has" if file.member != "file" else f"of {path}; beside it there are"
            raise InputError(
                f"no {file.member} {labels!r} for labels {where} {shorten(file.names)}, {what}; name another one with "
                "--labels"
            )
        if column_names and file.member == "column" and file.names:
            columns = column_names
        hidden = [name for name in (labels, *leave_out) if name is not None]
        names = file.feature_names(columns, hidden)
        features = finite_rows(file.features(columns, hidden).float(), f"features of {path}")
        values = file.column(labels) if labels is not None and labels in file.names else None
    what = f"labels {labels!r} of {path}"
    n = len(features)
    blank = np.zeros(n, dtype=bool)
    if blanks and values is not None and values.shape[:1] == (n,):
        blank = _blank_rows(values)
    if values is None or (n and blank.all()):
        return LabelledTable(features, None, names)
    if blank.any():  # a label stands in, so that messages count all rows
        values = np.array(values)
        values[blank] = values[~blank][0]
        values = _without_fractions(values)
    if regression:
        numbers = finite_rows(as_tensor(_as_numeric(values, what), what), what)
        values = as_numbers(numbers, n, what).numpy()
        values[blank] = np.nan
    else:
        values = _as_classes(values, n, what)
        values = np.where(blank, "", values.astype(str)) if blank.any() else values
    return LabelledTable(features, values, names)


def _blank_rows(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Mask (n,) of the rows of which a cell is "" or NaN."""
    is_text = values.dtype.kind in "US"
    cells = np.asarray(np.char.strip(values) == values.dtype.type() if is_text else values != values)
    return np.array([row.any() for row in cells], dtype=bool)


def _without_fractions(values: NDArray[Any]) -> NDArray[Any]:
    """Texts such as "3.0", as whole numbers beside blank cells are written, as numbers; others as they are."""
    cells = [str(value) for value in values.flatten().tolist()] if values.dtype.kind == "U" else []
    whole = any("." in cell for cell in cells) and all(is_number(cell) and float(cell).is_integer() for cell in cells)
    return values.astype(np.float64) if whole else values


def _as_classes(values: NDArray[Any], n: int, what: str) -> NDArray[Any]:
    """Labels (n,) as whole numbers or names."""
    if _are_real(values):
        raise InputError(
            f"{what} are {len(values):,} real numbers such as {float(values[0]):.6g}; give --regression to predict "
            "numbers, or name classes with --labels"
        )
    if values.shape != (n,) or values.dtype.kind not in "iuUSfb":
        raise InputError(
            f"{what} are {values.dtype} of shape {values.shape} for {n} rows; give one whole number or name for each "
            "row"
        )
    if values.dtype.kind in "US":
        empty = (np.char.strip(values) == values.dtype.type()).nonzero()[0]
        if len(empty):
            raise InputError(
                f"{what} are empty in {row_name(empty[0])}, and in {len(empty)} of {n} rows in all; fill them in, or "
                "leave these rows out"
            )
    if values.dtype.kind == "f":
        whole = np.where(np.isfinite(values), values, 0.5)
        if (whole != np.round(whole)).any():
            rows = (whole != np.round(whole)).nonzero()[0]
            raise InputError(
                f"{what} hold {values[rows[0]]}, no whole number, in {len(rows)} of {n} rows, the first in "
                f"{row_name(rows[0])}; correct or drop these rows, or give --regression to predict numbers"
            )
        return values.astype(np.int64)
    return values


def _are_real(values: NDArray[Any]) -> bool:
    """Whether labels look like measurements: fractions, more of them than one would name classes after."""
    if values.ndim != 1 or values.dtype.kind not in "fU" or len(np.unique(values)) <= _MOST_FRACTIONS:
        return False
    try:
        numbers = values.astype(np.float64)
    except ValueError:  # names
        return False
    finite = numbers[np.isfinite(numbers)]
    return bool((finite != np.round(finite)).any())


def _as_numeric(values: NDArray[Any], what: str) -> NDArray[Any]:
    """Labels as numbers, those written as text too."""
    if values.dtype.kind in "iuf":
        return values
    cells = [str(value) for value in values.flatten().tolist()]
    wrong = [place for place, cell in enumerate(cells) if values.dtype.kind != "U" or not is_number(cell)]
    if not wrong:
        return values.astype(np.float64)
    examples = list(dict.fromkeys(cells[place] for place in wrong))
    row = int(np.unravel_index(wrong[0], values.shape or (1,))[0])
    raise InputError(
        f"{what} have {shorten(examples[:3])} where a number is expected in {len(wrong)} of {len(cells)} cells, the "
        f"first in {row_name(row)}; correct or drop these rows, name a numeric column "
        "with --labels, or leave --regression out to predict classes"
    )


# --- columns that are no measurements, or say nothing ---

_ID = re.compile(
    r"(.*[\W_])?(id|ids|idx|index|uuid|guid|row)|.*[a-z]I[dD]", re.ASCII
)  # names, in small letters or like sampleId
_FEWEST_ROWS = 10  # of each domain, below which ranges and orders say little


def _tell_of_columns(source: Tensor, target: Tensor, names: Sequence[str] | None) -> None:
    """Warn of columns that count rows, have other ranges in the ``target`` (m, d), or vary only there."""
    if min(len(source), len(target)) < _FEWEST_ROWS:
        return
    domains = source, target
    low, high = (torch.stack([getattr(x, end)(0) for x in domains]) for end in ("amin", "amax"))
    named = torch.tensor([bool(_ID.fullmatch(n) or _ID.fullmatch(n.lower())) for n in names or ["x"] * len(low[0])])
    ids = torch.stack([_whole(x) & (named | _counts(x)) for x in domains]).all(0)
    apart = ((low[0] > high[1]) | (low[1] > high[0])) & ~ids
    constant = low[0] == high[0]
    if not bool(constant.all()):
        constant &= (usual_reach(target) > 0) & ~apart  # else no step will ever depend on them
    remedy = "to leave them out, choose the others by names, patterns or numbers, as columns='f*' or columns='1:'"
    for columns, what in (
        (ids, "that look like ids, not like measurements"),
        (apart, "whose ranges in source and target do not overlap (other units?)"),
        (constant, "that are constant in the sources, so that nothing can be learnt from them"),
    ):
        if places := columns.nonzero().flatten().tolist():
            which = shorten([names[i] for i in places]) if names else f"{', '.join(map(str, places[:6]))} (from 0)"
            text = f"{len(places):,} of {len(columns):,} columns are features {what}: {which}; {remedy}"
            warnings.warn(text, VardassWarning, stacklevel=3)


def _whole(x: Tensor) -> Tensor:
    return (x == x.round()).all(0) & (x[0] != x).any(0)


def _counts(x: Tensor) -> Tensor:
    """Whether the values of each column (d,) all rise, or all fall, from row to row."""
    steps = x.diff(dim=0)
    return (steps > 0).all(0) | (steps < 0).all(0)


def _column(names: Sequence[str] | None, place: int) -> str:
    return f"column {place} (from 0)" if names is None else f"column {names[place]!r}"


# --- columns scaled by those of the sources ---


def scaled_inputs(table: Tensor, scale: Scale, name: str, column_names: Sequence[str] | None = None) -> TensorInputs:
    """Rows (n, d) of the domain ``name`` scaled by ``scale``, with a warning if values are extremely far from it."""
    far = scale_columns(table, {**scale, "clip": None}).abs()
    if "clip" in scale and bool((far > _FAR).any()):
        row, column = divmod(int(far.argmax()), far.shape[1])
        warnings.warn(
            f"{name} has {float(table[row, column]):.6g} in {_column(column_names, column)} of {row_name(row)}, "
            f"{float(far[row, column]):.3g} deviations of the sources from their mean; it is cut to "
            f"{scale['clip']:g}, as are {int((far > _FAR).sum()) - 1:,} more such values: fix them if they stand for "
            "missing values",
            VardassWarning,
            stacklevel=3,
        )
    return TensorInputs(scale_columns(table, scale), column_names, scale)


def standardise_task(task: Task) -> Task:
    """Scale all columns by mean and deviation of the sources together, robustly; see `robust_scale`."""
    tables = []
    for domain in (*task.sources, task.target):
        if not isinstance(domain.dataset, TensorInputs) or domain.dataset.tensor.ndim != 2:
            raise InputError(f"only embeddings can be standardised, domain {domain.name!r} holds {domain.kind} data")
        if domain.dataset.scale is not None:
            raise InputError(f"domain {domain.name!r} is standardised already; ask for it once")
        tables.append(domain.dataset.tensor)
        column_names = domain.dataset.column_names
    reference = torch.cat(tables[:-1])
    scale = robust_scale(reference, tables[-1])
    scaled = [
        domain.with_inputs(scaled_inputs(table, scale, domain.name, column_names))
        for domain, table in zip((*task.sources, task.target), tables, strict=True)
    ]
    return Task(task.name, tuple(scaled[:-1]), scaled[-1])
