"""Versions of what makes numbers, for records and figures."""

from __future__ import annotations

import json
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

import vardass

__all__ = ["versions"]


@cache
def versions() -> dict[str, str | None]:
    """Of what makes the numbers: vardass with its commit, Python, torch and numpy.

    The commit is that of the checkout which vardass is imported from, with ``-dirty`` if files were changed, or the
    one that pip installed it from; None where neither is known.
    """
    return {
        "vardass": vardass.__version__,
        "commit": _checkout_commit() or _installed_commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def _checkout_commit() -> str | None:
    # a folder of packages may lie within another project's checkout, whose commit says nothing of vardass
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(*command: str) -> str | None:
    place = Path(vardass.__file__).parent
    try:
        found = subprocess.run(["git", *command], cwd=place, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _installed_commit() -> str | None:
    try:
        origin = json.loads(metadata.distribution("vardass").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    commit = origin.get("vcs_info", {}).get("commit_id")
    return None if commit is None else str(commit)
