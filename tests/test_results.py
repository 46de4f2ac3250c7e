"""What is committed in results/ is what its records say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from vardass.lab.page import make_page

RESULTS = Path(__file__).parents[1] / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="results/ is not part of an installed package")


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_tables", RESULTS / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_records(maker):
    files = maker.table_files()
    assert {(file.parent.name, file.name) for file in files} >= {
        ("algorithms", "table-2.md"),
        ("refresh", "table-4.md"),
        ("samplers", "table-1.md"),
        ("samplers", "table-splits.md"),
    }
    for file in files:
        assert file.read_text(encoding="utf-8") == maker.table_text(file), f"{file}: run results/make_tables.py"


def test_gains_are_those_of_the_records_and_on_the_page(maker):
    files = maker.gains_files()
    assert [file.parent.name for file in files] == ["samplers"]
    for file in files:
        gains = file.read_text(encoding="utf-8")
        assert gains == maker.gains_text(file.parent), f"{file}: run results/make_tables.py"
        assert gains.partition("\n\n")[2].strip() in (RESULTS / "README.md").read_text(encoding="utf-8")


def numbers(page):
    """The data of a page's pictures and its summary table."""
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    return data, re.search(r'<table id="summary-table">.*?</table>', page, re.S)[0]


def test_pages_are_those_of_the_records(maker):
    assert maker.pages()
    for page in maker.pages():
        made = make_page(page.parent)
        assert numbers(page.read_text(encoding="utf-8")) == numbers(made), f"{page}: run results/make_tables.py"
