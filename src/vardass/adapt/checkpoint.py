"""Checkpoints: the whole state of a run in one safetensors file, with everything that is not a tensor as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.files import atomic_write

__all__ = ["flatten_state", "load_checkpoint", "save_checkpoint", "unflatten_state"]

_HEADER = "vardass"
_FORMAT = 1
# how each kind of value that JSON does not know is written: {mark: content}
_TENSOR, _ARRAY, _TUPLE, _MAPPING = "$tensor", "$array", "$tuple", "$dict"


def save_checkpoint(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and JSON values to one file; a crash leaves the old file whole.

    Parameters
    ----------
    path : path
        File to write or replace.
    tensors : dict of str to Tensor
        Any device; they are read on the CPU later.
    meta : dict
        Plain values, kept in the header of the file.
    """
    safetensors = _safetensors()
    try:
        header = json.dumps({"format": _FORMAT, "meta": dict(meta)})
    except (TypeError, ValueError) as error:
        raise InputError(f"the meta data of {path} are not JSON values: {error}; pass them to flatten_state") from None
    # safetensors refuses tensors that share memory, so each one gets its own
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    content = safetensors.torch.save(own, metadata={_HEADER: header})
    with atomic_write(path) as file:
        file.write(content)


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote: tensors on the CPU, and the meta data.

    Raises
    ------
    InputError
        If there is no such file, or it is cut off, or something else. If it cannot be read just now, the ``OSError``
        is the cause of the error.
    """
    safetensors = _safetensors()
    file = Path(path)
    try:
        with open(file, "rb") as opened:  # safetensors says "no such file" of any that it cannot open
            opened.read(1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise InputError(f"no checkpoint at {file}; check the path, or start the run anew") from None
    except OSError as error:
        raise _unreadable(file, error) from error
    try:
        with safetensors.safe_open(str(file), framework="pt") as opened:
            header = (opened.metadata() or {}).get(_HEADER)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except OSError as error:
        raise _unreadable(file, error) from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise InputError(
            f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file: {error}; it was cut off or is "
            "something else: use another checkpoint, or start the run anew"
        ) from None
    try:
        found = {} if header is None else json.loads(header)
    except ValueError:
        found = {}
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise InputError(
            f"{file} is a safetensors file, but not a vardass checkpoint of format {_FORMAT}; pass one that a vardass "
            "run wrote"
        )
    return tensors, found["meta"]


def _unreadable(file: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot read {file}: {error.strerror or error}; the file is left alone: try again, or check its permissions"
    )


def flatten_state(nested: Any) -> tuple[dict[str, Tensor], Any]:
    """Take the tensors out of a nested state: ``(tensors by name, JSON tree that refers to them)``.

    Mappings with keys that are not text, tuples and NumPy arrays come back as they were; so do NaN and infinity.

    Examples
    --------
    >>> tensors, tree = flatten_state({"betas": (0.9, 0.99), 3: torch.ones(2)})
    >>> sorted(tensors)
    ['3']
    >>> unflatten_state(tensors, tree)
    {'betas': (0.9, 0.99), 3: tensor([1., 1.])}
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(nested, "", tensors)


def unflatten_state(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """Put together what `flatten_state` took apart."""
    if isinstance(tree, list):
        return [unflatten_state(tensors, value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((mark, content),) = tree.items()
        if mark in (_TENSOR, _ARRAY):
            if content not in tensors:
                raise InputError(f"the checkpoint lacks the tensor {content!r}; use another one, or start the run anew")
            return tensors[content] if mark == _TENSOR else tensors[content].numpy()
        if mark == _TUPLE:
            return tuple(unflatten_state(tensors, value) for value in content)
        if mark == _MAPPING:
            return {unflatten_state(tensors, key): unflatten_state(tensors, value) for key, value in content}
    return {key: unflatten_state(tensors, value) for key, value in tree.items()}


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor | np.ndarray):
        key = name
        while key in tensors or not key:  # the keys 1 and "1" would have one name
            key += "_"
        tensors[key] = value.detach() if isinstance(value, Tensor) else torch.from_numpy(value.copy())
        return {_TENSOR if isinstance(value, Tensor) else _ARRAY: key}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        items = [(key, _encode(entry, _join(name, key), tensors)) for key, entry in value.items()]
        return dict(items) if plain else {_MAPPING: [[_encode(key, "", {}), entry] for key, entry in items]}
    if isinstance(value, list | tuple):
        parts = [_encode(entry, _join(name, place), tensors) for place, entry in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    raise InputError(
        f"{name or 'the state'} is a {type(value).__name__}, which a checkpoint cannot hold; use tensors, numbers, "
        "text, and lists, tuples or dicts of them"
    )


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise InputError(
            "checkpoints need safetensors, which is not installed: pip install 'vardass[adapt]'"
        ) from error
    return safetensors
