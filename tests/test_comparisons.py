"""Sampler against sampler: differences over repeats, tests and their errors, one winner everywhere."""

import csv
import io
import itertools
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from table_records import best_names, entries, random_records, run, write_records
from vardass.lab.averages import Label, best_of, collect, difference, holm, mean_and_error
from vardass.lab.page import make_page
from vardass.lab.tables import compare_samplers, make_tables
from vardass.table import Average, entry_text, render


def test_the_standard_error_divides_by_n_minus_1():
    values = [0.5, 0.7, 0.9]
    assert mean_and_error(values) == pytest.approx((0.7, np.std(values, ddof=1) / np.sqrt(3)))
    assert mean_and_error([0.5]) == (0.5, None)
    assert mean_and_error([]) == (None, None)
    assert mean_and_error([0.5, 0.5]) == (0.5, 0.0)


@given(st.lists(st.integers(-40, 40), min_size=2, max_size=9).filter(lambda values: len(set(values)) > 1))
@settings(max_examples=60, deadline=None)
def test_a_difference_agrees_with_scipy(values):
    means = np.array(values) / 10
    result = difference(means, margin=1.0)
    test = stats.ttest_1samp(means, 0.0)
    assert result.p == pytest.approx(test.pvalue, rel=1e-9)
    assert (result.low, result.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    above = stats.ttest_1samp(means, -1.0, alternative="greater").pvalue
    below = stats.ttest_1samp(means, 1.0, alternative="less").pvalue
    assert result.equivalence_p == pytest.approx(max(above, below), rel=1e-9)


def test_equal_or_single_differences_are_not_tested():
    for values in ([0.3], [0.3, 0.3, 0.3]):
        result = difference(values, margin=1.0)
        assert result.p is None
        assert result.equivalence_p is None
    assert difference([], margin=1.0) == (None, None, None, None)


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


# what the tests say is true when it is not, under the dependence that sweeps have


def sweeps(count, *, shift=0.0, samplers=1, repeats=5, tasks=4, seed=0):
    """Data sets on which samplers are ``shift`` points above uniform: the tasks of a repeat share what it draws."""
    rng = np.random.default_rng(seed)
    records = []
    for place in range(count):
        for sampler in range(samplers + 1):
            own = rng.normal(0, 0.01, (repeats, 1)) + rng.normal(0, 0.01, (repeats, tasks))
            accuracy = 0.7 + own + (shift / 100 if sampler else 0.0)
            name = f"s{sampler}" if sampler else "uniform"
            records += [
                run(float(accuracy[r, t]), data=f"d{place}", task=f"t{t}", sampler=name, repeat=r)
                for r in range(repeats)
                for t in range(tasks)
            ]
    return collect(records)


def naive_p(data):
    """The test that takes tasks as independent."""
    uniform, other = (data.values(Label("mmd", name)) for name in ("uniform", "s1"))
    return stats.ttest_1samp((other - uniform).ravel(), 0).pvalue


def test_a_difference_that_is_not_there_is_shown_in_5_percent_of_sweeps():
    count = 200
    results = sweeps(count)
    false = sum(one.gain.result.p < 0.05 for one in compare_samplers(results))
    low, high = stats.binom.interval(0.999, count, 0.05)
    assert low <= false <= high
    naive = sum(naive_p(data) < 0.05 for data in results.values())
    assert naive > 1.5 * high  # what this protects from


def test_equivalence_is_claimed_in_5_percent_on_its_border():
    count = 500
    means = np.random.default_rng(1).normal(1.0, 0.5, (count, 6))
    claimed = sum(difference(row, margin=1.0).equivalence_p < 0.05 for row in means)
    low, high = stats.binom.interval(0.999, count, 0.05)
    assert low <= claimed <= high


def test_any_false_difference_of_a_family_is_shown_in_at_most_5_percent():
    """Six samplers, of which none differs from uniform, against the same uniform runs."""
    count, rng = 300, np.random.default_rng(2)
    corrected = plain = 0
    for _ in range(count):
        gains = rng.normal(size=(6, 5)) - rng.normal(size=5)
        p_values = [difference(row, margin=1.0).p for row in gains]
        plain += min(p_values) < 0.05
        corrected += min(holm(p_values)) < 0.05
    limit = stats.binom.ppf(0.999, count, 0.05)
    assert corrected <= limit < plain


def test_a_large_difference_is_shown_and_a_small_one_is_shown_to_be_small():
    (large,) = compare_samplers(sweeps(1, shift=9.0, repeats=8))
    (small,) = compare_samplers(sweeps(1, shift=0.1, repeats=100))
    (undecided,) = compare_samplers(sweeps(1, shift=0.9, repeats=3))
    shown = [one.verdict("within 1") for one in (large, small, undecided)]
    assert shown == ["higher", "within 1", "open"]


# discrepancies


def discrepancy_records(factor, *, repeats=6, seed=0):
    """MMD² with VaRDASS is ``factor`` times that with uniform batches, on tasks of very different size."""
    rng = np.random.default_rng(seed)
    return [
        run(0.5, task=task, repeat=repeat, sampler=sampler, mmd2=size * ratio * float(np.exp(rng.normal(0, 0.05))))
        for repeat in range(repeats)
        for task, size in (("small", 0.01), ("large", 10.0))
        for sampler, ratio in (("uniform", 1.0), ("vardass", factor))
    ]


@pytest.mark.parametrize(("factor", "shown"), [(1.0, "within 1.25"), (2.0, "higher"), (0.5, "lower")])
def test_the_discrepancy_after_training_is_judged_by_ratios(factor, shown):
    records = discrepancy_records(factor)
    _, table = make_tables(collect(records), "discrepancy")
    (row,) = table.rows
    values = {r: {} for r in range(6)}
    for record in records:
        spec = record.spec
        sign = 1 if spec.cell["sampler"] == "vardass" else -1
        values[spec.repeat][spec.task] = values[spec.repeat].get(spec.task, 0.0) + sign * np.log(record.result["mmd2"])
    means = [np.mean(list(found.values())) for found in values.values()]
    test = stats.ttest_1samp(means, 0)
    low, high = np.exp(test.confidence_interval(0.95))
    assert row.name == "watch, MMD: VaRDASS / Uniform random"
    assert row.entries[0] == pytest.approx(np.exp(np.mean(means)))
    assert row.entries[1] == f"{low:.2f} to {high:.2f}"
    assert row.entries[3].p == pytest.approx(test.pvalue)
    assert row.entries[-1] == shown


def test_a_discrepancy_of_zero_has_no_ratio():
    records = [run(0.5, sampler=s, repeat=r, mmd2=0.1 * r) for s in ("uniform", "vardass") for r in range(3)]
    _, table = make_tables(collect(records), "discrepancy")
    assert table.rows[0].entries[0] == "1.00 (2/3)"
    assert table.rows[0].entries[-1] == "incomplete"


# pairs


def test_a_gain_is_over_repeats_in_which_both_have_all_tasks():
    accuracies = {("a", 0): (0.5, 0.6), ("a", 1): (0.7, 0.7), ("b", 0): (0.2, 0.4), ("b", 1): (0.9, None)}
    records = []
    for (task, repeat), (uniform, ours) in accuracies.items():
        records.append(run(uniform, task=task, repeat=repeat))
        records.append(
            run(ours or 0.0, task=task, repeat=repeat, sampler="vardass", status="finished" if ours else "failed")
        )
    (one,) = compare_samplers(collect(records))
    assert (one.gain.wins, one.gain.ties, one.gain.losses) == (2, 1, 0)
    assert one.gain.average.mean == pytest.approx(15)  # of repeat 0 alone
    assert not one.gain.whole
    assert (one.p, one.equivalence_p, one.gain.result.low) == (None, None, None)
    (table,) = make_tables(collect(records), "pairs")
    assert entry_text(table.rows[0].entries[0], 2) == "15.00 ± – (1/2)"
    assert table.rows[0].entries[-1] == "incomplete"


def test_gains_are_differences_of_the_means_in_table_1():
    results = collect(random_records(3, gaps=0, failures=0, samplers=("uniform", "vardass", "dpp")))
    cells = entries(make_tables(results, "1")[0])
    for one in compare_samplers(results):
        names = [(label.row_name, label.algorithm_name) for label in (one.label, one.reference)]
        assert one.gain.average.mean == pytest.approx(cells[names[0]].mean - cells[names[1]].mean)


class Best(HTMLParser):
    """The rows that a page marks as best."""

    def __init__(self, text):
        super().__init__()
        self.rows = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "tr" and given.get("class") == "best":
            self.rows.add((given["data-sampler"], given["data-algorithm"]))


@pytest.mark.parametrize("seed", range(3))
def test_page_and_table_have_the_same_winner(seed, tmp_path):
    """DPP has the highest numbers, in the first repeat only."""
    records = random_records(seed, gaps=0.0, failures=0.05, samplers=("uniform", "vardass", "ordered"))
    records += [
        run(0.999, task=task, algorithm=algorithm, sampler="dpp", search=search)
        for task in ("t0", "t1", "t2")
        for algorithm in ("coral", "mmd")
        for search in range(2)
    ]
    results = collect(records)
    (table,) = make_tables(results, "1")
    best = best_names(table)
    assert not any(name == "DPP" for name, _ in best)
    (splits,) = make_tables(results, "splits")
    assert {(name, column) for name, column in best_names(splits) if "DPP" in name} == set()
    assert Best(make_page(write_records(tmp_path, records))).rows == best
    # and DPP cuts nobody's pairs, nor is it part of the family of tests
    without = compare_samplers(collect(record for record in records if record.spec.cell["sampler"] != "dpp"))
    assert [one for one in compare_samplers(results) if one.label.sampler != "dpp"] == without


def test_the_family_of_tests_leaves_erm_apart_and_has_each_pair_once():
    found = compare_samplers(collect(random_records(5, gaps=0, failures=0, samplers=("uniform", "vardass", "dpp"))))
    names = [(c.label.algorithm, c.label.sampler, c.reference.sampler) for c in found]
    pairs = {("dpp", "uniform"), ("vardass", "uniform"), ("dpp", "vardass")}
    assert set(names) == {(a, *pair) for a in ("erm", "coral", "mmd") for pair in pairs}
    assert len(names) == 9
    for erm in (True, False):
        family = [c for c in found if (c.label.algorithm == "erm") == erm]
        assert [c.p for c in family] == holm([c.gain.result.p for c in family])
        assert [c.equivalence_p for c in family] == holm([c.gain.result.equivalence_p for c in family])


def test_uniform_with_replacement_is_what_others_are_compared_with():
    samplers = ("uniform", "uniform-replacement", "dpp")
    found = compare_samplers(collect(random_records(5, gaps=0, failures=0, samplers=samplers)))
    assert {(c.label.sampler, c.reference.sampler) for c in found} == {
        ("uniform", "uniform-replacement"),
        ("dpp", "uniform-replacement"),
    }


def test_one_whole_cell_alone_is_not_best():
    whole, other, partial = Average(1.0, None, 1, 1), Average(2.0, None, 1, 1), Average(3.0, None, 1, 2)
    assert best_of({"a": whole, "b": None, "c": partial}) == set()
    assert best_of({"a": whole, "b": other, "c": partial}) == {"b"}
    assert best_of({"a": whole, "b": other, "c": partial}, lowest=True) == {"a"}
    assert best_of({"a": whole, "b": Average(1.04, None, 1, 1)}) == {"a", "b"}  # the same as shown


def test_csv_has_all_digits_of_a_p_value():
    results = collect(random_records(4, gaps=0, failures=0))
    lines = csv.DictReader(io.StringIO(render(make_tables(results, "pairs"), "csv")))
    shown = [float(line["mean"]) for line in lines if line["column"] == "p"]
    assert shown == [one.gain.result.p for one in compare_samplers(results)]
