"""The notebooks run from top to bottom, and what is stored in them is what they say now."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")  # the style of the site's pictures
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from run_notebooks import NOTEBOOKS, run_notebook, texts, words_and_numbers


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = json.loads(path.read_text())
    for before, now in zip(texts(stored), texts(run_notebook(path)), strict=True):
        (words, numbers), (new_words, new_numbers) = words_and_numbers(before), words_and_numbers(now)
        assert new_words == words, "run scripts/run_notebooks.py"
        assert new_numbers == pytest.approx(numbers, rel=0.25, abs=0.05), "run scripts/run_notebooks.py"


def test_there_are_three_lessons():
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3"]
    for path in NOTEBOOKS:
        assert path.stat().st_size < 400_000
        cells = json.loads(path.read_text())["cells"]
        assert any("image/svg+xml" in out.get("data", {}) for cell in cells for out in cell.get("outputs", ()))
