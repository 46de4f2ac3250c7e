"""Files: written so that nothing is lost, read as if a stranger had made them, and folders locked by one process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from filelock import FileLock, SoftFileLock, Timeout  # torch needs it too

from vardass.errors import InputError

PathLike: TypeAlias = "str | os.PathLike[str]"

LOCK_FILE = "lock"
HOLDER_FILE = "holder.json"
OUTPUTS_FILE = ".vardass.json"
"""By the name of each file that a command wrote into a folder: the command, and digests of its content and the last."""
_TEMPORARY = ".vardass-tmp"


def as_path(path: PathLike, name: str = "path") -> Path:
    """Return ``path`` with ``~`` expanded to the home folder; an InputError if it is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{name} must be a path, got {path!r}; give it as text or as a Path")
    return Path(path).expanduser()


@contextmanager
def atomic_write(path: PathLike) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path``; on success flush it to disk and rename it to ``path``.

    On any error the temporary file is removed and an existing ``path`` stays as it was. A symbolic link is followed
    once, before anything is written.
    """
    target = Path(path).resolve()
    if target.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=_TEMPORARY)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another folder") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(file.fileno())
            # by its handle: the name could have become a link to another file
            os.chmod(file.fileno() if os.chmod in os.supports_fd else name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def is_temporary(path: Path) -> bool:
    """Whether a file has the name of one that `atomic_write` writes to."""
    return re.fullmatch(rf"\..+\.\w{{8}}{re.escape(_TEMPORARY)}", path.name, re.DOTALL) is not None


def remove_temporary(folder: Path) -> None:
    """Remove what a killed `atomic_write` left in a folder that no other process writes to."""
    for path in folder.iterdir():
        if is_temporary(path) and path.is_file():
            path.unlink(missing_ok=True)


def _umask() -> int:
    # mkstemp makes private files; the result should have the permissions of any other file of the user
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none of it. What is not Unicode, as in names of files, is written as an escape."""
    with atomic_write(path) as file:
        file.write(text.encode(errors="backslashreplace"))


# --- outputs of commands: which existing file may be replaced ---


def write_output(path: PathLike, content: str | bytes, command: str) -> None:
    """Write the whole output of a command, unless that would replace another file, see `check_replaceable`."""
    target, data = Path(path), content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    if target.is_file() and not is_own(target, command) and target.read_bytes() == data:
        return  # there is nothing to replace
    check_replaceable(target, command)
    _note_digest(target, command, hashlib.sha256(data).hexdigest())  # first: a kill in between must not make it foreign
    with atomic_write(target) as file:
        file.write(data)


def check_replaceable(path: PathLike, command: str) -> None:
    """Refuse a path at which there is anything but a file that is, byte for byte, as this command wrote it there."""
    if Path(path).is_dir():
        raise InputError(f"{path} is a folder; name a file in it")
    if Path(path).exists() and not is_own(path, command):
        raise InputError(
            f"{path} exists and is not as vardass {command} wrote it, so it is not replaced; choose another name, or "
            "move the file away"
        )


def is_own(path: PathLike, command: str) -> bool:
    """Whether a file is as a command wrote it there, and not write-protected."""
    file = Path(path).resolve()
    if not file.is_file() or not file.stat().st_mode & 0o222:
        return False
    writer, *digests = _digests(file.parent).get(file.name, [""])
    return writer == command and _digest(file) in digests


def note_output(path: Path, command: str) -> None:
    """Note a file that a command has just written by other means than `write_output`."""
    _note_digest(path, command, _digest(path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(folder: Path) -> dict[str, list[str]]:
    found = read_json(folder / OUTPUTS_FILE, lenient=True)
    is_ours = all(isinstance(note, list) and note and {*map(type, note)} == {str} for note in found.values())
    return found if is_ours else {}


def _note_digest(path: Path, command: str, digest: str) -> None:
    """Note what a file will hold, beside what it holds now, and forget files that are gone."""
    file = path.resolve()
    known, notes = _digests(file.parent), file.parent / OUTPUTS_FILE
    if not known and notes.exists():
        return  # a file of that name that is not ours: outputs beside it will not be replaced
    kept = {name: digests for name, digests in known.items() if (file.parent / name).exists()}
    kept[file.name] = [command, digest, *([_digest(file)] if file.exists() else ())]
    write_text(notes, json.dumps(kept, indent=0, sort_keys=True) + "\n")


def inside(folder: Path, *names: str | Path) -> Path:
    """The path ``names`` below ``folder``; an InputError if ``..``, a root or a link leads out of it."""
    path = folder.joinpath(*names)
    try:
        target = path.resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, a zero in the name
        target = None
    if target is None or not target.is_relative_to(folder.resolve()):
        raise InputError(
            f"{path} leads out of {folder}, and nothing is read or changed there; take the link or the name away, or "
            "choose another folder"
        )
    return path


_DEEPEST, _DIGITS = 100, 20  # no file of ours is nested as deeply, or has longer whole numbers


def parse_json(text: str | bytes) -> Any:
    """What JSON says; an InputError if it is none, has a key twice, or cannot be worked with or printed."""
    try:
        found = json.loads(text, object_pairs_hook=_each_key_once, parse_int=_whole_number)
        level = [found]
        for _ in range(_DEEPEST):
            "".join(entry for entry in level if isinstance(entry, str)).encode()
            containers = [entry for entry in level if isinstance(entry, dict | list)]
            level = [*chain(*containers, *(entry.values() for entry in containers if isinstance(entry, dict)))]
            if not level:
                return found
    except json.JSONDecodeError as error:
        raise InputError(f"it is not JSON in line {error.lineno}: {error.msg} at character {error.colno}") from None
    except UnicodeError:
        raise InputError("its text is not whole Unicode characters") from None
    except RecursionError:
        pass
    raise InputError(f"it is nested too deeply to be read, more than {_DEEPEST} levels")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise InputError(f"it has the key {twice[:80]!r} twice")
    return content


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise InputError(f"it has a whole number of {len(digits):,} digits")
    return int(digits)


def read_json(path: Path, *, lenient: bool = False) -> dict[str, Any]:
    """The content of a small file, empty if it is absent; if it is damaged an InputError, or empty with ``lenient``."""
    try:
        found = parse_json(path.read_bytes())
        if not isinstance(found, dict):
            raise InputError("it holds no JSON object")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, InputError) as error:
        if lenient:
            return {}
        why = f"{error.strerror}" if isinstance(error, OSError) else f"{error}"
        raise InputError(f"{path} cannot be read: {why}; restore it from a copy, or remove it") from None


def plain(value: Any) -> Any:
    """Convert ``value`` for JSON: dataclasses and named tuples become dicts, NaN and infinity become None.

    >>> plain({"a": (1.0, float("nan"))})
    {'a': [1.0, None]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # of numpy or torch
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def locked(folder: Path, *, wait: float = 0.0, work: str = "process") -> Iterator[None]:
    """Hold the lock of ``folder``, which the operating system frees when its holder dies.

    Wait ``wait`` seconds for another holder, then raise an InputError that names it and its ``work``.
    """
    _check_lock(folder)
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        raise InputError(
            f"another {work} is using {folder}: {holder_name(folder)}; wait for it, or choose another folder"
        ) from None
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot lock {folder}: {why}; choose another folder, or release it") from None
    try:
        if isinstance(lock, SoftFileLock):  # what filelock falls back to; a killed holder would keep it
            raise InputError(f"{folder} is on a file system without locks; choose a folder on another one")
        with suppress(OSError, InputError):  # only for messages, so a full disk is no reason to stop
            write_text(folder / HOLDER_FILE, json.dumps({"pid": os.getpid(), "host": platform.node()}))
        yield
    finally:
        (folder / HOLDER_FILE).unlink(missing_ok=True)
        lock.release()


def _check_lock(folder: Path) -> None:
    """Refuse files of the user that have the names of the lock and its holder, and links to files elsewhere.

    Locking would empty the former, and what the holder of the lock writes would replace the latter.
    """
    for path in folder.iterdir():
        if path.is_symlink() and not path.is_dir():
            inside(folder, path.name)
    lock, holder = folder / LOCK_FILE, folder / HOLDER_FILE
    known = read_json(holder, lenient=True).keys()
    is_ours = not holder.exists() or not holder.stat().st_size or known == {"pid", "host"}
    for path, is_free in ((lock, not lock.exists() or not lock.stat().st_size), (holder, is_ours)):
        if not is_free:
            raise InputError(f"{path} was not written by vardass, which needs that name; choose another folder")


def holder_name(folder: Path) -> str:
    """The process that took the lock last, in words."""
    found = read_json(folder / HOLDER_FILE, lenient=True)
    pid, host = found.get("pid"), found.get("host")
    process = pid if isinstance(pid, int) else "unknown"
    return f"process {process} on {host[:80] if isinstance(host, str) and host.isprintable() else 'unknown'}"


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock; where the lock cannot be tried, whether one has written that it does."""
    if not (folder / LOCK_FILE).exists():
        return False
    try:
        with FileLock(folder / LOCK_FILE, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return (folder / HOLDER_FILE).exists()
