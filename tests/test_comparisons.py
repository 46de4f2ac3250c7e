"""Sampler against sampler: paired tests, families of tests, wins."""

import csv
import io
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from table_records import entries, random_records, run
from vardass.experiments.frame import collect
from vardass.experiments.render import entry_text, render
from vardass.experiments.statistics import holm, paired
from vardass.experiments.tables import compare_samplers, make_tables

NUMBERS = st.lists(st.integers(-4, 4), min_size=2, max_size=9)


@given(NUMBERS)
@settings(max_examples=80, deadline=None)
def test_paired_tests_agree_with_scipy_and_with_all_sign_patterns(differences):
    one = {i: d / 8 for i, d in enumerate(differences)}
    result = paired(one.values())
    values = np.array(list(one.values()))
    assert result.mean == pytest.approx(values.mean())
    assert result.stderr == pytest.approx(scipy_stats.sem(values), abs=1e-12)
    assert (result.wins, result.ties, result.losses) == tuple((np.sign(values) == s).sum() for s in (1, 0, -1))
    decided = result.wins + result.losses
    patterns = [sum(p) for p in itertools.product((0, 1), repeat=decided)]
    uneven = sum(abs(2 * heads - decided) >= abs(result.wins - result.losses) for heads in patterns)
    assert result.sign_p == pytest.approx(uneven / len(patterns))
    if len(set(differences)) == 1:
        assert result.t_p is None
    else:
        assert result.t_p == pytest.approx(scipy_stats.ttest_1samp(values, 0).pvalue, rel=1e-9)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_holm_equals_closed_testing_with_bonferroni(p_values):
    """A hypothesis is rejected at p if every subset with it is, by Bonferroni: the definition of closed testing."""
    filled = [1.0 if p is None else p for p in p_values]
    for place, adjusted in enumerate(holm(p_values)):
        if p_values[place] is None:
            assert adjusted is None
            continue
        subsets = (s for n in range(len(filled)) for s in itertools.combinations(set(range(len(filled))) - {place}, n))
        closed = max(min(1.0, (len(s) + 1) * min(filled[i] for i in (*s, place))) for s in subsets)
        assert adjusted == pytest.approx(closed)


def test_pairs_are_of_the_same_task_and_repeat():
    accuracies = {("a", 0): (0.5, 0.6), ("a", 1): (0.7, 0.7), ("b", 0): (0.2, 0.4), ("b", 1): (0.9, None)}
    records = []
    for (task, repeat), (uniform, ours) in accuracies.items():
        records.append(run(uniform, task=task, repeat=repeat))
        records.append(
            run(ours or 0.0, task=task, repeat=repeat, sampler="vardass", status="finished" if ours else "failed")
        )
    (one,) = compare_samplers(collect(records))
    assert (one.result.pairs, one.expected) == (3, 4)
    assert (one.result.wins, one.result.ties, one.result.losses) == (2, 1, 0)
    assert one.result.mean == pytest.approx(0.1)
    table, wins = make_tables(collect(records), "pairs")
    assert entry_text(table.rows[0].entries[0], 2) == "10.00 ± 5.77 (3/4)"
    assert entries(wins)["VaRDASS", "ahead of uniform"] == "1 of 1"
    assert entries(wins)["VaRDASS", "best"] == "1 of 1"
    assert entries(wins)["Uniform random", "ahead of VaRDASS"] == "0 of 1"


def test_wins_are_counted_on_what_all_have():
    """Uniform's mean of all is the highest, only because the others lack the easy repeat."""
    accuracies = {"uniform": (0.3, 0.9), "vardass": (0.4, None), "dpp": (0.5, 0.1)}
    records = [
        run(value, sampler=sampler, repeat=repeat)
        for sampler, values in accuracies.items()
        for repeat, value in enumerate(values)
        if value is not None
    ]
    wins = entries(make_tables(collect(records), "pairs")[1])
    assert {name: wins[name, "best"] for name in ("Uniform random", "VaRDASS", "DPP")} == {
        "Uniform random": "0 of 1",
        "VaRDASS": "0 of 1",
        "DPP": "1 of 1",
    }
    assert wins["VaRDASS", "ahead of uniform"] == "1 of 1"
    assert wins["DPP", "ahead of uniform"] == "0 of 1"
    assert wins["DPP", "ahead of VaRDASS"] == "1 of 1"


def test_the_family_of_tests_leaves_erm_apart_and_has_each_pair_once():
    found = compare_samplers(collect(random_records(5, gaps=0, samplers=("uniform", "vardass", "dpp"))))
    names = [(c.label.algorithm, c.label.sampler, c.reference.sampler) for c in found]
    pairs = {("dpp", "uniform"), ("vardass", "uniform"), ("dpp", "vardass")}
    assert set(names) == {(a, *pair) for a in ("erm", "coral", "mmd") for pair in pairs}
    assert len(names) == 9
    for erm in (True, False):
        family = [c for c in found if (c.label.algorithm == "erm") == erm]
        assert [c.holm_p for c in family] == holm([c.result.t_p for c in family])


def test_csv_has_all_digits_of_a_p_value():
    results = collect(random_records(4))
    lines = csv.DictReader(io.StringIO(render(make_tables(results, "pairs"), "csv")))
    shown = [float(line["mean"]) for line in lines if line["column"] == "sign p"]
    assert shown == [one.result.sign_p for one in compare_samplers(results)]
