"""A user's folders and files: what they hold, and the task or domain made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vardass.data.audio import AUDIO_ENDINGS, AudioDataset
from vardass.data.domains import Domain, Kind, Task, TensorInputs, parts_of, refuse_unknown
from vardass.data.embedding_files import EMBEDDING_ENDINGS
from vardass.data.embedding_tasks import ScaledInputs, class_positions, embedding_task, read_labelled, scaled_inputs
from vardass.data.folders import folder_domain, folder_task, subfolders
from vardass.data.images import IMAGE_ENDINGS, ImageDataset
from vardass.errors import InputError
from vardass.validate import choose

__all__ = ["KINDS", "domain_from_path", "find_kind", "preparation", "task_from_paths"]

KINDS: dict[str, Kind] = {"images": "image", "audio": "audio", "embeddings": "features"}
_LABELS = "labels"
_LABELS_BESIDE = "{name}.labels.npy"  # an .npy file has no room for a second array


def find_kind(paths: Sequence[Path], kind: str | None) -> Kind:
    """Kind of the data at ``paths``: the one named, or what the first of them holds."""
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
    if kind != "features":
        if regression:
            raise InputError(
                f"{sources[0]} holds {_plural(kind)} in class folders, which are no numbers; leave --regression out, "
                "or give files of embeddings with numbers as labels"
            )
        return folder_task(list(sources), target, kind=kind, **options)
    marks: list[str | None] = [_labels_name(path, labels) for path in (*sources, target)]
    more: Any = {"standardise": standardise, "regression": regression, "target_labels_optional": True}
    return embedding_task(list(sources), target, key=key, labels=marks, columns=columns, **more)


def preparation(domain: Domain) -> dict[str, Any]:
    """How files or rows became the samples of a domain, in plain values; `domain_from_path` reads more of them so."""
    first = parts_of(domain.dataset)[0]
    if isinstance(first, AudioDataset):
        return {"front_end": asdict(first.front_end)}
    if isinstance(first, ImageDataset):
        return {"interpolation": first.interpolation}
    return {"scale": first.scale if isinstance(first, ScaledInputs) else None}


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
    must be classes of the model, or numbers.
    """
    kind: Kind = about["data_kind"]
    shape, names = tuple(about["input_shape"]), tuple(about["class_names"])
    found = find_kind([path], None)
    if found != kind:
        raise InputError(f"{path} holds {_plural(found)}, the model was trained on {_plural(kind)}; give those")
    if kind != "features":
        if labelled:
            refuse_unknown([folder.name for folder in subfolders(path)], names, str(path), "model")
        options: dict[str, Any] = {"front_end": data.get("front_end")}
        if kind == "image":
            interpolation = data.get("interpolation", "bilinear")
            options = {"size": shape[1:], "channels": shape[0], "interpolation": interpolation}
        return folder_domain(path, kind=kind, class_names=names, labelled=labelled, **options)
    regression: bool = about["config"].regression
    marks = [_labels_name(path, name) for name in (labels or data.get("labels"), data.get("labels"))]
    table, values = read_labelled(
        path,
        key=key or data.get("key"),
        labels=marks[0] if labelled else None,
        columns=data.get("columns"),
        leave_out=marks,
        regression=labelled and regression,
    )
    if tuple(table.shape[1:]) != shape:
        raise InputError(
            f"{path} has {table.shape[1]} features, the model was trained on samples of shape {shape}; use the same "
            "encoder and columns"
        )
    inputs = scaled_inputs(table, data["scale"], str(path)) if data.get("scale") else TensorInputs(table)
    if values is None or regression:
        return Domain(path.stem, inputs, values, names, regression=regression)
    return Domain(path.stem, inputs, class_positions(values, names, str(path), "model"), names)


def _guess(path: Path) -> Kind:
    if path.is_file():
        if path.suffix.lower() in EMBEDDING_ENDINGS:
            return "features"
        raise InputError(
            f"{path} is no file of embeddings ({' '.join(EMBEDDING_ENDINGS)}); give such a file, or a folder"
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


def _labels_name(path: Path, labels: str | None) -> str:
    if labels is None:
        labels = _LABELS_BESIDE if path.suffix.lower() == ".npy" else _LABELS
    return labels.replace("{name}", path.stem)
