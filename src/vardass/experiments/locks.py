"""Locks on folders that the operating system frees when their holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vardass.errors import InputError

__all__ = ["LOCK_FILE", "holder", "is_locked", "locked"]

LOCK_FILE = "lock"
_POLL = 0.05  # seconds between two tries
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextmanager
def locked(folder: Path, *, wait: float = 0.0, work: str = "process") -> Iterator[None]:
    """Hold the lock of ``folder``, which is ``flock`` on its file `LOCK_FILE`; the file stays.

    Parameters
    ----------
    folder : Path
        Existing folder.
    wait : float
        Seconds to wait for another holder to go away.
    work : str
        What the lock is for; the message to a second one says it.

    Raises
    ------
    InputError
        If another process has it (the message names it) or the folder cannot be written to.
    """
    path = folder / LOCK_FILE
    until = time.monotonic() + wait
    while (handle := _try_lock(path)) is None:
        if time.monotonic() >= until:
            found = holder(folder)
            who = f"process {found.get('pid', 'unknown')} on {found.get('host', 'unknown')}"
            raise InputError(f"another {work} is at work in {folder}: {who}; wait for it, or choose another folder")
        time.sleep(_POLL)
    try:
        _sign(handle)
        yield
    finally:
        os.close(handle)


def holder(folder: Path) -> dict[str, Any]:
    """``"pid"`` and ``"host"`` of the process that took the lock last; empty if the file does not say."""
    try:
        found = json.loads((folder / LOCK_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock just now."""
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN
    finally:
        os.close(handle)
    return False


def _try_lock(path: Path) -> int | None:
    """An open file with the lock, or None if another process has it."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"cannot write to {path.parent}: {error.strerror}; choose another folder or free it") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the folder may have been removed and made anew in between: then this lock is on a file nobody else sees
        if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except OSError as error:
        if error.errno not in _TAKEN and error.errno != errno.ENOENT:
            os.close(handle)
            raise InputError(
                f"{path.parent} is on a file system without locks: {error.strerror}; choose a folder on another one"
            ) from None
    os.close(handle)
    return None


def _sign(handle: int) -> None:
    """Say who holds the lock; only for messages, so a full disk is no reason to stop."""
    text = json.dumps({"pid": os.getpid(), "host": platform.node()}).encode()
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, text, 0)
    except OSError:
        pass
