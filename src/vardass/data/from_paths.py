"""From a user's folders and files to domains and tasks: class folders of images or sounds, and files of embeddings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vardass.data.audio import AUDIO_ENDINGS, AudioDataset, FrontEnd
from vardass.data.domains import (
    Domain,
    Kind,
    Task,
    TensorInputs,
    open_positions,
    pair_names,
    parse_pair,
    parts_of,
    refuse_unknown,
)
from vardass.data.embedding_files import EMBEDDING_ENDINGS
from vardass.data.embedding_tasks import (
    class_positions,
    embedding_task,
    labels_name,
    read_labelled,
    scaled_inputs,
)
from vardass.data.images import IMAGE_ENDINGS, ImageDataset
from vardass.errors import InputError, VardassWarning
from vardass.files import PathLike, as_path
from vardass.validate import choose, shorten

FileKind = Literal["image", "audio"]
_ENDINGS: dict[FileKind, tuple[str, ...]] = {"image": IMAGE_ENDINGS, "audio": AUDIO_ENDINGS}


def locate(root: PathLike | None, marks: Sequence[str], *, inside: Sequence[str], info: str) -> Path:
    """The folder, ``root`` or one of ``inside`` it, that holds all ``marks``; else an InputError with ``info``."""
    if root is None:
        raise InputError(f"root is None, but this data set is read from files; give its folder\n{info}")
    base = as_path(root, "root")
    folders = [base, *(base / name for name in inside)]
    for folder in folders:
        if folder.is_dir() and all((folder / mark).exists() for mark in marks):
            return folder
    if not base.is_dir():
        raise InputError(f"no folder at {base}; give the folder of the data set\n{info}")
    found = sorted(entry.name for entry in base.iterdir())[:8]
    raise InputError(
        f"{base} holds {', '.join(found) or 'nothing'}, but {', '.join(marks)} should be there; unpack the data set "
        f"into it\n{info}"
    )


def subfolders(root: Path) -> list[Path]:
    """Folders in ``root`` by name, without hidden ones."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and _tidy(entry.name))


def _tidy(name: str) -> bool:
    """Whether a file is the user's and not left by a file manager."""
    return not name.startswith((".", "__MACOSX"))


def files_in(folder: Path, kind: FileKind) -> list[Path]:
    """Image or sound files in a folder and below it, by path, without hidden ones."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in _ENDINGS[kind]
        and path.is_file()
        and all(_tidy(part) for part in path.relative_to(folder).parts)
    )


def _tell_of_hidden(root: Path, kind: FileKind) -> None:
    """Warn of hidden folders with samples, which are not taken for classes."""
    hidden = [entry for entry in sorted(root.iterdir()) if entry.is_dir() and entry.name.startswith(".")]
    left_out = [entry.name for entry in hidden if files_in(entry, kind)]
    if left_out:
        warnings.warn(
            f"{root} has hidden folders with {kind} files, {shorten(left_out)}, which are not read; rename them if "
            "they are classes",
            VardassWarning,
            stacklevel=4,
        )


def _scan_classes(
    root: Path, kind: FileKind, class_names: Sequence[str] | None = None
) -> tuple[list[Path], Tensor, tuple[str, ...]]:
    """Files, labels and class names of a folder of class folders, which may lack some of ``class_names``."""
    folders = subfolders(root)
    _tell_of_hidden(root, kind)
    found = [folder.name for folder in folders]
    names = tuple(found if class_names is None else class_names)
    files = {folder.name: files_in(folder, kind) for folder in folders}
    for folder in folders:
        if not files[folder.name]:
            raise InputError(
                f"the class folder {folder} has 0 {kind} files ({' '.join(_ENDINGS[kind])}); add files or remove "
                "the folder"
            )
    counts = {name: len(paths) for name, paths in files.items()}
    positions = torch.tensor(open_positions(counts, names, str(root)), dtype=torch.int64)
    paths = [path for name in found for path in files[name]]
    return paths, positions.repeat_interleave(torch.tensor(list(counts.values()))), names


def folder_domain(
    root: PathLike,
    *,
    kind: FileKind = "image",
    name: str | None = None,
    class_names: Sequence[str] | None = None,
    labelled: bool | None = None,
    size: int | tuple[int, int] = 224,
    channels: int = 3,
    front_end: FrontEnd | Mapping[str, Any] | None = None,
    cache: bool = False,
    interpolation: str = "bilinear",
) -> Domain:
    """Make a domain of a folder: ``root/<class>/<file>``, or ``root/<file>`` without labels.

    Parameters
    ----------
    root : path
        The folder; files deeper inside a class folder belong to it.
    kind : {"image", "audio"}
        Kind of the files to read.
    name : str, optional
        By default the name of the folder.
    class_names : sequence of str, optional
        Classes of the source, for a target; samples of others are unlabelled.
    labelled : bool, optional
        True requires class folders, False reads all files without labels; by default it is detected.
    size, channels, interpolation :
        Of images, see `ImageDataset`.
    front_end : FrontEnd or mapping, optional
        Of sounds, see `FrontEnd.of`.
    cache : bool
        Keep decoded samples in shared memory.
    """
    choose(kind, "kind", _ENDINGS)
    base = as_path(root, "root")
    if not base.is_dir():
        raise InputError(f"no folder at {base}; give a folder of {kind} files")
    loose = [path for path in files_in(base, kind) if path.parent == base]
    folders = subfolders(base)
    if labelled is None:
        labelled = bool(folders)
    if labelled and not folders:
        raise InputError(
            f"{base} has {len(loose)} {kind} files and 0 class folders, but labels are needed; sort the files into one "
            "folder for each class"
        )
    if labelled and loose:
        raise InputError(
            f"{base} has {len(loose)} {kind} files, such as {loose[0].name}, beside {len(folders)} class folders; move "
            "them into class folders, or give a target without classes as unlabelled"
        )
    if labelled:
        paths, labels, names = _scan_classes(base, kind, class_names)
    else:
        paths, labels, names = files_in(base, kind), None, tuple(class_names or ())
    if not paths:
        raise InputError(
            f"no {kind} files ({' '.join(_ENDINGS[kind])}) in {base}, 0 of {len(list(base.iterdir()))} entries; give "
            "another folder"
        )
    dataset: Dataset[Tensor]
    if kind == "audio":
        dataset = AudioDataset(paths, front_end=front_end, cache=cache)
    else:
        dataset = ImageDataset(paths, size, channels, cache, interpolation)
    return Domain(name or base.name, dataset, labels, names, kind=kind)


def folder_task(
    sources: PathLike | Sequence[PathLike],
    target: PathLike,
    *,
    kind: FileKind = "image",
    name: str | None = None,
    target_labelled: bool | None = None,
    **options: Any,
) -> Task:
    """Make a task of one or several folders with class folders and a target folder, flat or with class folders.

    The classes are those of all sources together. ``target_labelled=False`` ignores folders in the target; further
    options are those of `folder_domain`: size, channels, interpolation, front_end, cache.
    """
    given = [sources] if isinstance(sources, str) or not isinstance(sources, Sequence) else list(sources)
    folders = [as_path(folder, "source") for folder in given]
    target = as_path(target, "target")
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"no folder at {folder}; give a folder of class folders with {kind} files")
    classes = sorted({entry.name for folder in folders for entry in subfolders(folder)})

    def domain(folder: Path, labelled: bool | None) -> Domain:
        same = sum(other.name == folder.name for other in (*folders, target))
        title = str(folder) if same > 1 else folder.name
        return folder_domain(folder, kind=kind, name=title, class_names=classes, labelled=labelled, **options)

    labelled = tuple(domain(folder, True) for folder in folders)
    goal = domain(target, target_labelled)
    return Task(name or "+".join(source.name for source in labelled) + "->" + goal.name, labelled, goal)


def folder_names(root: PathLike | None) -> tuple[str, ...]:
    """Tasks between the folders in ``root``, such as ``"photo->sketch"``; none without a root."""
    return () if root is None else pair_names([folder.name for folder in _domains(root)])


def load_folders(
    task: str,
    root: PathLike | None,
    *,
    kind: FileKind = "image",
    target_labelled: bool | None = None,
    size: int | tuple[int, int] = 224,
    channels: int = 3,
    front_end: FrontEnd | Mapping[str, Any] | None = None,
    cache: bool = False,
    interpolation: str = "bilinear",
) -> Task:
    """Task between folders of ``root``: ``"photo->sketch"``, or ``"photo+art->sketch"`` for two sources."""
    if root is None:
        raise InputError("root is None; give the folder that holds one folder for each domain")
    by_name = {folder.name: folder for folder in _domains(root)}
    sources, target = parse_pair(task, list(by_name), str(root))
    options: Any = {"size": size, "channels": channels, "interpolation": interpolation, "front_end": front_end}
    options |= {"kind": kind, "target_labelled": target_labelled, "cache": cache}
    return folder_task([by_name[source] for source in sources], by_name[target], **options)


def _domains(root: PathLike) -> list[Path]:
    base = as_path(root, "root")
    folders = subfolders(base) if base.is_dir() else []
    if len(folders) < 2:
        raise InputError(f"{base} has {len(folders)} folders; at least 2 are needed, one for each domain")
    return folders


# --- folders and files of any kind, as commands are given them --------------------------------------

KINDS: dict[str, Kind] = {"images": "image", "audio": "audio", "embeddings": "features"}


def find_kind(paths: Sequence[Path], kind: str | None) -> Kind:
    """Kind of the data at ``paths``: as given, or detected from the first path."""
    for path in paths:
        if not path.exists():
            raise InputError(f"there is nothing at {path}; check the path")
    if kind is not None:
        return KINDS[choose(kind, "kind", KINDS)]
    guesses = {path: _guess(path) for path in paths}
    first = guesses[paths[0]]
    for path, guess in guesses.items():
        if guess != first:
            raise InputError(f"{paths[0]} holds {_plural(first)}, {path} {_plural(guess)}; give data of one kind")
    return first


def task_from_paths(
    sources: Sequence[Path],
    target: Path,
    kind: Kind,
    *,
    key: str | None = None,
    labels: str | None = None,
    columns: str | None = None,
    standardise: bool = True,
    regression: bool = False,
    **options: Any,
) -> Task:
    """Make a task of folders of files, with the options of `folder_domain`, or of files of embeddings.

    The labels of the target are loaded if they are there, and stay hidden until the model is chosen. ``{name}`` in
    ``labels`` stands for the name of the file without ending.
    """
    for path in sources:
        if path.exists() and target.exists() and path.samefile(target):
            raise InputError(f"{path} is both source and target; give two sets of data")
    if kind != "features":
        if regression:
            raise InputError(
                f"{sources[0]} holds {_plural(kind)} in class folders, which are no numbers; leave --regression out, "
                "or give files of embeddings with numbers as labels"
            )
        return folder_task(list(sources), target, kind=kind, **options)
    more: Any = {"standardise": standardise, "regression": regression, "target_labelled": None}
    return embedding_task(list(sources), target, key=key, labels=labels, columns=columns, **more)


def preparation(domain: Domain) -> dict[str, Any]:
    """How files or rows became the samples of a domain, in plain values; `domain_from_path` reads more of them so."""
    first = parts_of(domain.dataset)[0]
    if isinstance(first, AudioDataset):
        return {"front_end": asdict(first.front_end)}
    if isinstance(first, ImageDataset):
        return {"interpolation": first.interpolation}
    names, scale = getattr(first, "column_names", None), getattr(first, "scale", None)
    return {"scale": scale, **({"column_names": list(names)} if names else {})}


def columns_text(domain: Domain) -> str | None:
    """How many columns the samples of a domain have, and the names of the first and last one; None for files."""
    table = domain.dataset
    if not isinstance(table, TensorInputs) or table.tensor.ndim != 2:
        return None
    names = table.column_names
    return f"{table.tensor.shape[1]:,}" + (f", from {names[0]!r} to {names[-1]!r}" if names else "")


def domain_from_path(
    path: Path,
    about: Mapping[str, Any],
    data: Mapping[str, Any],
    *,
    key: str | None = None,
    labels: str | None = None,
    labelled: bool = False,
) -> Domain:
    """Samples to predict, read as those that the model was trained on.

    ``about`` is that of ``load_model``, ``data`` how the run read its data, with what `preparation` said of them.
    ``key`` and ``labels`` name other arrays of embeddings than in training. Labels are read only if ``labelled``, and
    must be classes of the model, or numbers; those that are blank or of other classes are unknown.
    """
    kind: Kind = about["data_kind"]
    shape, names = tuple(about["input_shape"]), tuple(about["class_names"])
    found = find_kind([path], None)
    if found != kind:
        raise InputError(f"{path} holds {_plural(found)}, the model was trained on {_plural(kind)}; give those")
    if kind != "features":
        folders = [folder.name for folder in subfolders(path)]
        if labelled and not set(folders) & set(names):
            refuse_unknown(folders, names, str(path), "model")
        options: dict[str, Any] = {"front_end": data.get("front_end")}
        if kind == "image":
            interpolation = data.get("interpolation", "bilinear")
            options = {"size": shape[1:], "channels": shape[0], "interpolation": interpolation}
        return folder_domain(path, kind=kind, class_names=names, labelled=labelled, **options)
    regression: bool = about["config"].regression
    label_names = [labels_name(path, name, path.stem) for name in (labels or data.get("labels"), data.get("labels"))]
    table, values, _ = read_labelled(
        path,
        key=key or data.get("key"),
        labels=label_names[0] if labelled else None,
        columns=data.get("columns"),
        column_names=data.get("column_names"),
        leave_out=label_names,
        regression=labelled and regression,
        blanks=True,
    )
    if tuple(table.shape[1:]) != shape:
        raise InputError(
            f"{path} has {table.shape[1]} features, the model was trained on samples of shape {shape}; use the same "
            "encoder and columns"
        )
    inputs = scaled_inputs(table, data["scale"], str(path)) if data.get("scale") else TensorInputs(table)
    known = values if regression else class_positions(values, names, str(path), "model")
    return Domain(path.stem, inputs, known, names, regression=regression)


def _guess(path: Path) -> Kind:
    if path.is_file():
        if path.suffix.lower() in EMBEDDING_ENDINGS:
            return "features"
        raise InputError(
            f"{path} is not a file of embeddings ({' '.join(EMBEDDING_ENDINGS)}); give such a file, or a folder"
        )
    for file in sorted(path.rglob("*")):
        ending = file.suffix.lower()
        if ending in IMAGE_ENDINGS:
            return "image"
        if ending in AUDIO_ENDINGS:
            return "audio"
    raise InputError(f"{path} has no image or sound file in it; give another folder, or a file of embeddings")


def _plural(kind: Kind) -> str:
    return next(name for name, value in KINDS.items() if value == kind)
