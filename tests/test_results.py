"""What is committed in results/ is what its records say."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vardass.lab.page import make_page

RESULTS = Path(__file__).parents[1] / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="results/ is not part of an installed package")


def load(name):
    spec = importlib.util.spec_from_file_location(name, RESULTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker():
    return load("make_tables")


@pytest.fixture(scope="module")
def rules():
    return load("claims")


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


def test_gains_and_the_page_are_those_of_the_records(maker):
    files = maker.gains_files()
    assert "samplers" in [file.parent.name for file in files]
    for file in files:
        assert file.read_text(encoding="utf-8") == maker.gains_text(file.parent), f"{file}: run results/make_tables.py"
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    for name in maker.BLOCKS:
        assert page.count(f"<!-- {name}, by make_tables.py -->") == page.count(f"<!-- end of {name} -->") == 1
    assert page == maker.page_text(page), "run results/make_tables.py"


def tasks(mean, spread, n=6, repeats=3, seed=0):
    """Differences (repeats, tasks) of which each task's mean over repeats is known."""
    generator = np.random.default_rng(seed)
    own = generator.normal(size=n)
    own = mean + spread * (own - own.mean()) / own.std(ddof=1)
    noise = generator.normal(size=(repeats, n))
    return own + noise - noise.mean(0)


def test_an_estimate_is_over_tasks_whatever_the_repeats(rules):
    one = tasks(2.0, 1.0)
    found = rules.estimate([one])
    interval = stats.ttest_1samp(one.mean(0), 0.0).confidence_interval()
    assert found.interval() == pytest.approx((interval.low, interval.high))
    assert found.p() == pytest.approx(stats.ttest_1samp(one.mean(0), 0.0).pvalue)
    assert found.equivalence_p(3.0) == pytest.approx(stats.ttest_1samp(one.mean(0), 3.0, alternative="less").pvalue)
    other = tasks(1.0, 2.0, n=4, seed=1)
    both = rules.estimate([one, other])
    assert both.mean == pytest.approx(1.5)
    welch = stats.ttest_ind(one.mean(0), -other.mean(0), equal_var=False)  # the sum of both means
    assert both.freedom == pytest.approx(welch.df)
    assert 2 * both.error == pytest.approx((one.mean() + other.mean()) / welch.statistic)


def test_verdicts_follow_the_rules(rules):
    def gain(mean, spread):
        return rules.estimate([tasks(mean, spread)])

    assert rules.judge_gain(gain(2.0, 1.0)) == "held"
    assert rules.judge_gain(gain(0.1, 0.3)) == "did not"
    assert rules.judge_gain(gain(-2.0, 1.0)) == "did not"
    assert rules.judge_gain(gain(1.0, 3.0)) == "cannot be told"
    same, unknown, other, small = gain(0.1, 0.3), gain(0.1, 3.0), gain(2.0, 0.3), gain(0.5, 0.1)
    assert rules.judge_same([same, same]) == "held"
    assert rules.judge_same([same, small]) == "held"  # a difference, but too small to matter
    assert rules.judge_same([same, unknown]) == rules.judge_same([small, unknown]) == "cannot be told"
    assert rules.judge_same([same, unknown, other]) == "did not"
    ahead, behind = [gain(2.0, 0.3), gain(1.0, 0.3)], [gain(2.0, 0.3), gain(-1.0, 0.3)]
    assert rules.judge_best([ahead] * 3 + [behind], 3) == (3, 1, "held")
    assert rules.judge_best([ahead, behind, behind, [unknown]], 3) == (1, 2, "did not")
    assert rules.judge_best([ahead, ahead, [unknown], behind], 3) == (2, 1, "cannot be told")


def numbers(page):
    """The data of a page's pictures and its summary table."""
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    return data, re.search(r'<table id="summary-table">.*?</table>', page, re.S)[0]


def test_pages_are_those_of_the_records(maker):
    assert maker.pages()
    for page in maker.pages():
        made = make_page(page.parent)
        assert numbers(page.read_text(encoding="utf-8")) == numbers(made), f"{page}: run results/make_tables.py"
