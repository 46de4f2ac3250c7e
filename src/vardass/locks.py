"""Locks of folders: one process at a time writes to the folder of a run or sweep."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout  # torch needs it too

from vardass.errors import InputError
from vardass.files import read_json

LOCK_FILE = "lock"
HOLDER_FILE = "holder.json"


@contextmanager
def locked(folder: Path, *, wait: float = 0.0, work: str = "process") -> Iterator[None]:
    """Hold the lock of ``folder``, which the operating system frees when its holder dies, however it dies.

    Another holder is waited for ``wait`` seconds, then named in an InputError, which also says what ``work`` it does.
    """
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        raise InputError(
            f"another {work} is at work in {folder}: {holder_name(folder)}; wait for it, or choose another folder"
        ) from None
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot lock {folder}: {why}; choose another folder, or free it") from None
    try:
        if isinstance(lock, SoftFileLock):  # what filelock falls back to; a killed holder would keep it
            raise InputError(f"{folder} is on a file system without locks; choose a folder on another one")
        with suppress(OSError):  # only for messages, so a full disk is no reason to stop
            who = {"pid": os.getpid(), "host": platform.node()}
            (folder / HOLDER_FILE).write_text(json.dumps(who), encoding="utf-8")
        yield
    finally:
        (folder / HOLDER_FILE).unlink(missing_ok=True)
        lock.release()


def holder_name(folder: Path) -> str:
    """The process that took the lock last, in words."""
    found = read_json(folder / HOLDER_FILE)
    return f"process {found.get('pid', 'unknown')} on {found.get('host', 'unknown')}"


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock just now; where one may not try, whether one says that it does."""
    if not (folder / LOCK_FILE).exists():
        return False
    try:
        with FileLock(folder / LOCK_FILE, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return (folder / HOLDER_FILE).exists()
