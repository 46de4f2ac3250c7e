"""The library without the rooms of the paper and the lab."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import vardass

PROGRAM = """
import os, sys
from vardass.cli import main
assert sys.modules["vardass"].__file__.startswith(os.getcwd())
assert "vardass.paper" not in sys.modules and "vardass.lab" not in sys.modules
run = "adapt --source a.npz --target b.npz --algorithm mmd --steps 8 --eval-every 8 --device cpu --out run"
for command in (run, "predict run b.npz --out p.csv", "stratify a.npz --k 4 --out s.npz", "compare a.npz b.npz --json"):
    assert main(command.split()) == 0, command
"""


def test_the_paper_and_the_lab_can_be_deleted(tmp_path: Path) -> None:
    shutil.copytree(
        Path(vardass.__file__).parent,
        tmp_path / "vardass",
        ignore=lambda folder, names: {"paper", "lab", "__pycache__"} & set(names),
    )
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=rng.standard_normal((80, 4)), labels=np.arange(80) % 2)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
