"""Every example runs as it stands, short, and ends with an accuracy that is better than guessing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
CHANCE = 0.35  # the largest class of any domain is below it


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def accuracy(line):
    found = re.fullmatch(r"target accuracy .*: (\d\.\d+)", line)
    assert found, line
    return float(found[1])


@pytest.mark.parametrize("name", ["three_lines.py", "feature_bank.py"])
def test_training_loops(name):
    lines = run(name, "--steps", "120")
    assert "120 steps" in lines[-1]
    assert CHANCE < accuracy(lines[-1]) <= 1.0
    if name == "feature_bank.py":
        assert 2 <= int(lines[0].split()[0]) <= 3  # before the first batch and when the features have moved


def test_compare_samplers():
    lines = run("compare_samplers.py", "--steps", "60", "--batches", "40")
    assert CHANCE < accuracy(lines[-1]) <= 1.0
    for name in ("uniform", "VaRDASS (paper)", "stratified", "ordered", "balanced"):
        assert any(line.startswith(name) for line in lines)
    assert lines[-2] in ("least noise in the loss: ordered", "least noise in the loss: balanced")


def test_own_dataset(tmp_path):
    """As objects, and by its name from the command line."""
    assert 0.7 < accuracy(run("own_dataset.py")[-1]) <= 1.0
    assert len((EXAMPLES / "own_dataset.py").read_text().splitlines()) <= 30
    command = "import sys; from vardass.cli import main; sys.exit(main(sys.argv[1:]))"
    data = ["--dataset", "own_dataset:load", "--task", "0->30", "--data-option", "noise=0.2"]
    done = subprocess.run(
        [sys.executable, "-c", command, "train", *data, "--steps", "2", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "own_dataset:load 0->30" in done.stdout


def test_three_lines_is_short_and_marks_its_lines():
    text = (EXAMPLES / "three_lines.py").read_text()
    assert len(text.splitlines()) < 60
    assert [text.count(f"# ({number})") for number in (1, 2, 3)] == [1, 1, 1]


def test_a_sampler_of_ones_own_is_used_as_ours_are():
    lines = run("own_sampler.py")
    uniform, bands = (next(line for line in lines if line.startswith(name)).split() for name in ("uniform", "bands"))
    assert float(uniform[-4]) == 1.0
    assert float(bands[-4]) < 0.4  # the main direction has 16 of 19 parts of the variance
    assert len((EXAMPLES / "own_sampler.py").read_text().split("\n\n\nz = ")[0].splitlines()) <= 30


OWN_PARTS = ["own_algorithm.py", "own_kernel.py", "own_network.py"]


@pytest.mark.parametrize("name", OWN_PARTS)
def test_own_parts_take_at_most_thirty_lines(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 30
    assert CHANCE < accuracy(run(name)[-1]) <= 1.0


def test_regression_adapts_to_the_drift():
    found = dict(
        re.fullmatch(r"(\w+) +target R²: (-?\d\.\d+), error .* mg/l", line).groups() for line in run("regression.py")
    )
    assert float(found["mmd"]) > float(found["erm"]) + 0.15
    assert float(found["coral"]) > float(found["erm"]) + 0.1


def test_every_example_is_run_here():
    covered = {
        "regression.py",
        "three_lines.py",
        "feature_bank.py",
        "compare_samplers.py",
        "own_dataset.py",
        "own_sampler.py",
        *OWN_PARTS,
        "losses_of_others.py",  # in test_migration.py
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == covered
