"""Humpbacks: whale calls or not in underwater recordings of four monitoring programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vardass.data.audio import FrontEnd
from vardass.data.domains import Task
from vardass.data.folders import folder_task, locate, subfolders
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.validate import choose

__all__ = ["LAYOUT", "ORIGIN", "humpback_names", "load_humpbacks"]

LAYOUT = """\
humpbacks/<program>/<class>/*.wav      four programs; classes such as humpback and background"""
ORIGIN = (
    "the authors of 'Unsupervised domain adaptation for the cross-dataset detection of humpback whale calls' "
    "(DCASE 2023): the clips are cut from public archives, but the set itself is not published"
)
_PROGRAMS = 4


def humpback_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Four tasks, one program left out in each: the folders of ``root``, or their positions "1" to "4"."""
    if root is None:
        return tuple(str(i + 1) for i in range(_PROGRAMS))
    folder = locate(root, [], inside=[], info=f"{LAYOUT}\nfrom {ORIGIN}")
    return tuple(entry.name for entry in subfolders(folder))


def load_humpbacks(
    task: str,
    root: PathLike | None,
    *,
    front_end: FrontEnd | Mapping[str, Any] | None = None,
    cache: bool = False,
    programs: int = _PROGRAMS,
) -> Task:
    """Task with one program as target and the others as sources.

    The study that the paper cites is published (Napoli and White, DCASE 2023), but its code and clips are not to be
    had; `FrontEnd` and its defaults are ours. The paper's "Domain 1" to "Domain 4" are not named there: the position
    of a folder by name is not its number in the paper's table.

    Parameters
    ----------
    task : str
        Name of the target's folder, or its position by name, ``"1"`` to ``"4"``.
    root : path
        Folder with one folder for each program.
    front_end : FrontEnd or mapping, optional
        Rate, length and mel bands, see `FrontEnd.of`.
    cache : bool
        Keep spectrograms in shared memory: 8,000 take 0.3 GB.
    programs : int
        Programs that must be there.
    """
    folder = locate(root, [], inside=[], info=f"{LAYOUT}\nfrom {ORIGIN}")
    folders = subfolders(folder)
    if len(folders) != programs:
        raise InputError(
            f"{folder} has {len(folders)} program folders ({[entry.name for entry in folders]}), not {programs}; "
            f"sort the clips so, or use the data set 'audio' for other folders\n{LAYOUT}\nfrom {ORIGIN}"
        )
    names = [entry.name for entry in folders]
    positions = [str(i + 1) for i in range(programs)]
    if task not in names and task in positions:
        task = names[positions.index(task)]
    task = choose(task, "task of humpbacks", names, any_case=True)
    sources = [entry for entry in folders if entry.name != task]
    return folder_task(
        sources, folder / task, kind="audio", name=task, target_labelled=True, front_end=front_end, cache=cache
    )
