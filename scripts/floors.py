"""Tests of the integrations with the lowest versions that pyproject.toml allows; `make floors` calls this.

They are installed into .venv-floors, which sees .venv for all else. torch stays that of .venv: an older one would come
with CUDA. What has no wheel, or no set of versions that fit together, is an error of pip, and so of a floor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
EXTRAS = ("cli", "fast", "plot", "adapt", "lab", "huggingface", "lightning", "sklearn")
TESTS = [f"tests/test_integrations_{name}.py" for name in ("pairs", "lightning", "huggingface", "sklearn", "examples")]


def floors() -> list[str]:
    """Each package at the highest of its floors, as all extras together ask for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, Version] = {}
    for text in [
        *project["dependencies"],
        *(one for extra in EXTRAS for one in project["optional-dependencies"][extra]),
    ]:
        need = Requirement(text)
        for part in need.specifier:
            if need.name != "torch" and part.operator == ">=":
                found[need.name] = max(found.get(need.name, Version("0")), Version(part.version))
    return [f"{name}=={lowest}" for name, lowest in sorted(found.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-floors")
    parser.add_argument("tests", nargs="*", default=TESTS)
    arguments = parser.parse_args()
    venv.create(arguments.folder, clear=True)
    base = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", "posix_prefix", {"base": str(arguments.folder)})
    (Path(own) / "base.pth").write_text(base + "\n")  # after its own packages
    python = str(arguments.folder / "bin" / "python")
    print("floors:", *floors(), flush=True)
    stays = f"torch=={version('torch').partition('+')[0]}"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", stays, *floors()], check=True)
    # what numba has compiled is of its version: the files beside the sources stay those of .venv
    mine = {"PYTHONPATH": str(ROOT / "src"), "NUMBA_CACHE_DIR": str(arguments.folder / "compiled")}
    tests = [python, "-m", "pytest", "-q", *arguments.tests]
    sys.exit(subprocess.run(tests, cwd=ROOT, env={**os.environ, **mine}, check=False).returncode)


if __name__ == "__main__":
    main()
