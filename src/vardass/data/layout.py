"""What the loaders share: finding a data set, explaining where it comes from, and names of tasks."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TypeAlias

from vardass.data.domains import Task
from vardass.errors import InputError

__all__ = ["DatasetInfo", "PathLike", "choose", "locate", "pair_names", "parse_pair", "subfolders", "tidy"]

PathLike: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True)
class DatasetInfo:
    """One data set of the registry.

    Attributes
    ----------
    name, summary : str
        For lists.
    layout : str
        Files that the loader expects, one to a line; empty if nothing has to be there.
    origin : str
        Where to get it.
    load : callable
        ``load(task, root, **options) -> Task``.
    tasks : callable
        ``tasks(root) -> names of tasks``; for user data the names depend on what is in ``root``.
    """

    name: str
    summary: str
    layout: str
    origin: str
    load: Callable[..., Task]
    tasks: Callable[[PathLike | None], tuple[str, ...]]


def locate(root: PathLike | None, marks: Sequence[str], *, inside: Sequence[str], info: str) -> Path:
    """The folder, ``root`` or one of ``inside`` it, that holds all ``marks``; else an InputError with ``info``."""
    if root is None:
        raise InputError(f"root is None, but this data set is read from files; give its folder\n{info}")
    base = Path(root).expanduser()
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
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and tidy(entry.name))


def tidy(name: str) -> bool:
    """Whether a file is the user's and not left by a file manager."""
    return not name.startswith((".", "__MACOSX"))


def choose(value: str, known: Sequence[str], what: str) -> str:
    """``value`` as spelt in ``known``, whatever the case; else an InputError with the nearest name."""
    by_lower = {name.lower(): name for name in known}
    if value.lower() in by_lower:
        return by_lower[value.lower()]
    near = difflib.get_close_matches(value.lower(), by_lower, n=1, cutoff=0.4)
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else "; choose one of these"
    listing = ", ".join(known[:20]) + (f", ... ({len(known)} in all)" if len(known) > 20 else "")
    raise InputError(f"unknown {what} {value!r}, not one of {listing or 'none'}{hint}")


def pair_names(domains: Sequence[str], arrow: str = "->") -> tuple[str, ...]:
    """Names of all ordered pairs, such as ``"a->b"``."""
    return tuple(f"{source}{arrow}{target}" for source, target in permutations(domains, 2))


def parse_pair(task: str, domains: Sequence[str], dataset: str) -> tuple[list[str], str]:
    """Split ``"a->b"``, or ``"a+b->c"`` for two sources, into names of domains."""
    left, arrow, right = task.partition("->")
    if not arrow:
        choose(task, pair_names(domains), f"task of {dataset}")  # raises, with the nearest name
    sources = [choose(name.strip(), domains, f"domain of {dataset}") for name in left.split("+")]
    target = choose(right.strip(), domains, f"domain of {dataset}")
    if target in sources or len(set(sources)) < len(sources):
        raise InputError(f"task {task!r} of {dataset} names a domain twice; give different sources and target")
    return sources, target
