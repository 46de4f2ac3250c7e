import csv
import io
import itertools
import json
import math
import random
import re
from collections import defaultdict

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from typer.testing import CliRunner

from vardass.cli import report as command
from vardass.errors import InputError
from vardass.experiments import paper
from vardass.experiments.frame import Cell, Label, collect, mean_and_error
from vardass.experiments.record import Record, RunSpec
from vardass.experiments.render import FORMATS, PValue, Row, Table, entry_text, render
from vardass.experiments.statistics import holm, paired
from vardass.experiments.tables import TABLE_NAMES, best_of, compare_samplers, make_tables


def run(
    accuracy,
    *,
    score=0.5,
    data="watch",
    task="a->b",
    algorithm="mmd",
    sampler="uniform",
    repeat=0,
    search=0,
    status="finished",
    wall=1.0,
    seconds=None,
    dataset=None,
    config=(),
    grid=(),
    **result,
):
    result = {"target_accuracy": accuracy, "score": score, "mmd2": 0.1, "coral": 0.2, "oracle": 1 - score, **result}
    spec = RunSpec(
        dataset=dataset or data,
        task=task,
        data_name=data,
        config={"algorithm": algorithm, "sampler": sampler, **dict(config)},
        cell={"algorithm": algorithm, "sampler": sampler, **dict(grid)},
        repeat=repeat,
        search=search,
    )
    done = status == "finished"
    return Record(
        spec, status, result if done else {}, wall=wall, seconds=dict(seconds or {}), error=None if done else "x"
    )


def random_records(
    seed,
    *,
    gaps=0.2,
    failures=0.1,
    data=("watch",),
    algorithms=("erm", "coral", "mmd"),
    samplers=("uniform", "vardass"),
):
    rng = random.Random(seed)
    records = []
    for name, algorithm, sampler, task, repeat, search in itertools.product(
        data, algorithms, samplers, ("t0", "t1", "t2"), range(3), range(2)
    ):
        fate = rng.random()
        if fate > gaps:
            score = rng.choice([0.1, 0.5, 0.5, 0.9])  # with ties
            where = {"data": name, "task": task, "algorithm": algorithm, "sampler": sampler}
            number = {"repeat": repeat, "search": search, "wall": rng.random()}
            status = "failed" if fate < gaps + failures else "finished"
            found = {"mmd2": rng.random(), "coral": rng.random()}
            records.append(run(rng.random(), score=score, status=status, **where, **number, **found))
    rng.shuffle(records)
    return records


def brute_values(records, data, algorithm, sampler, key="target_accuracy"):
    """(task, repeat) to the value of the first run with the highest score, by exhaustive search."""
    found = {}
    mine = [
        r
        for r in records
        if r.status == "finished"
        and r.spec.data_name == data
        and r.spec.cell["algorithm"] == algorithm
        and r.spec.cell["sampler"] == sampler
    ]
    for task, repeat in {(r.spec.task, r.spec.repeat) for r in mine}:
        rivals = [r for r in mine if (r.spec.task, r.spec.repeat) == (task, repeat)]
        top = max(r.result["score"] for r in rivals)
        first = min(r.spec.search for r in rivals if r.result["score"] == top)
        found[task, repeat] = next(r.result[key] for r in rivals if r.spec.search == first)
    return found


def entries(table):
    return {(row.own_name, column): row.entries[j] for row in table.rows for j, column in enumerate(table.columns)}


def best_names(table):
    return {(table.rows[i].own_name, table.columns[j]) for i, j in table.best}


# model selection


def test_the_highest_score_wins_whatever_the_target_accuracy_or_the_oracle_say():
    records = [run(0.9, score=0.2, search=0), run(0.4, score=0.8, search=1), run(0.99, score=0.7, search=2)]
    for order in itertools.permutations(records):
        assert collect(order)["watch"].cell(Label("mmd", "uniform")).mean == 0.4


def test_equal_scores_go_to_the_lowest_search_number_in_any_order():
    records = [run(0.1 * search, score=0.5, search=search) for search in (3, 1, 2)]
    for order in itertools.permutations(records):
        assert collect(order)["watch"].cell(Label("mmd", "uniform")).mean == pytest.approx(0.1)


@pytest.mark.parametrize("score", [None, math.nan, "0.9", True])
def test_a_run_without_a_score_is_chosen_only_if_there_is_no_other(score):
    label = Label("mmd", "uniform")
    assert collect([run(0.9, score=0.1), run(0.4, search=1, score=0.0)])["watch"].cell(label).mean == 0.9
    bad = Record(run(0.3).spec, "finished", {"target_accuracy": 0.3, "score": score})
    assert collect([bad])["watch"].cell(label).mean == 0.3
    assert collect([bad, run(0.4, search=1, score=-5.0)])["watch"].cell(label).mean == 0.4


def test_a_chosen_run_without_target_accuracy_is_missing_and_not_replaced_by_the_second_best():
    cell = collect([run(None, score=0.9), run(0.8, score=0.1, search=1)])["watch"].cell(Label("mmd", "uniform"))
    assert cell.mean is None
    assert (cell.repeats, cell.expected, cell.complete) == (0, 1, False)


def test_a_failed_run_leaves_its_cell_but_marks_it():
    records = [run(0.5, search=0), run(0.6, search=1, status="failed")]
    cell = collect(records)["watch"].cell(Label("mmd", "uniform"), scale=100)
    assert (cell.mean, cell.runs, cell.expected_runs, cell.complete) == (50, 1, 2, False)
    assert entry_text(cell) == "50.0 ± – (1/2 runs)"


def test_a_finished_record_replaces_a_failed_one_of_the_same_run():
    for order in itertools.permutations([run(0.5, status="failed"), run(0.5)]):
        assert collect(order)["watch"].cell(Label("mmd", "uniform")).complete


def test_two_sweeps_with_other_settings_under_one_name_are_refused():
    with pytest.raises(InputError, match=r"differ in steps; .*own name"):
        collect([run(0.5, config={"steps": 10}), run(0.6, config={"steps": 20})])


def test_labels_of_the_users_own_stay_and_known_names_are_recognised():
    records = [run(0.5, algorithm="MMD", sampler="k-means++"), run(0.5, algorithm="Mine", sampler="S 1")]
    assert {label.method_name for label in collect(records)["watch"].labels} == {"MMD + k-means++", "Mine + S 1"}


# averages


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("gaps", "failures"), [(0, 0), (0.05, 0.1), (0.4, 0.2)])
def test_table_1_equals_a_brute_force_recomputation(seed, gaps, failures):
    records = random_records(seed, gaps=gaps, failures=failures)
    (table,) = make_tables(collect(records), "1")
    names = {"uniform": "Uniform random", "vardass": "VaRDASS"}
    cells = list(itertools.product(("erm", "coral", "mmd"), names))
    values = {cell: brute_values(records, "watch", *cell) for cell in cells}
    common = [t for t in ("t0", "t1", "t2") if all(any(k[0] == t for k in v) for v in values.values() if v)]
    repeats = sorted({r.spec.repeat for r in records})
    means = {}
    for algorithm, sampler in cells:
        found = values[algorithm, sampler]
        rows = [[found.get((t, r), np.nan) for t in common] for r in repeats]
        per_repeat = 100 * np.array([np.mean(row) for row in rows if row and not np.isnan(row).any()])
        cell = entries(table)[names[sampler], algorithm.upper()]
        assert (cell.repeats, cell.expected) == (len(per_repeat), len(repeats))
        if len(per_repeat):
            means[algorithm, names[sampler]] = cell.mean
            assert cell.mean == pytest.approx(per_repeat.mean())
        else:
            assert cell.mean is None
        if len(per_repeat) > 1:
            assert cell.stderr == pytest.approx(np.std(per_repeat) / np.sqrt(len(per_repeat)))
        else:
            assert cell.stderr is None
        finished = sum(
            r.status == "finished" and (r.spec.cell["algorithm"], r.spec.cell["sampler"]) == (algorithm, sampler)
            for r in records
        )
        assert (cell.runs, cell.expected_runs) == (finished, 3 * len(repeats) * 2)
        assert cell.complete == (finished == 18)
    assert (len(common) == 3) == (not any("averages over" in n or "no task" in n for n in table.notes))


@pytest.mark.parametrize("seed", range(6))
def test_splits_and_discrepancies_equal_a_brute_force_recomputation(seed):
    records = random_records(seed, gaps=0.1)
    results = collect(records)
    splits = entries(make_tables(results, "splits")[0])
    shift = entries(make_tables(results, "discrepancy")[0])
    metrics = {"coral": "coral", "mmd": "mmd2"}
    common = set.intersection(
        *({t for t, _ in brute_values(records, "watch", a, s)} for a in metrics for s in ("uniform", "vardass"))
    )
    for algorithm, (sampler, shown) in itertools.product(metrics, {"uniform": "", "vardass": " + VaRDASS"}.items()):
        found = brute_values(records, "watch", algorithm, sampler)
        for task in ("t0", "t1", "t2"):
            mine = [100 * v for (t, _), v in found.items() if t == task]
            assert splits[algorithm.upper() + shown, task].mean == pytest.approx(np.mean(mine))
        found = brute_values(records, "watch", algorithm, sampler, metrics[algorithm])
        rows = [[found.get((t, r), np.nan) for t in sorted(common)] for r in range(3)]
        mine = [np.mean(row) for row in rows if not np.isnan(row).any()]
        cell = shift[shown.removeprefix(" + ") or "Uniform random", algorithm.upper()]
        assert cell.repeats == len(mine)
        assert cell.mean == (pytest.approx(np.mean(mine)) if mine else None)


def test_averages_are_over_tasks_that_all_compared_entries_have():
    records = [run(0.2, task="easy"), run(0.8, task="hard"), run(0.3, task="easy", sampler="vardass")]
    (table,) = make_tables(collect(records), "1")
    cells = entries(table)
    assert cells["Uniform random", "MMD"].mean == pytest.approx(20)
    assert cells["VaRDASS", "MMD"].mean == pytest.approx(30)
    assert not cells["VaRDASS", "MMD"].complete
    assert table.notes[0] == ("watch: averages over 1 of 2 tasks, those that all compared entries have; without hard")


def test_a_repeat_that_lacks_a_task_does_not_count():
    records = [run(0.2, task=t, repeat=r, sampler=s) for t in "ab" for r in (0, 1) for s in ("uniform", "vardass")]
    whole = entries(make_tables(collect(records), "1")[0])["VaRDASS", "MMD"]
    part = entries(make_tables(collect(records[:-1]), "1")[0])["VaRDASS", "MMD"]
    assert (whole.repeats, part.repeats, part.expected) == (2, 1, 2)
    assert entry_text(part) == "20.0 ± – (1/2)"


def test_the_error_of_a_single_repeat_is_unknown_and_not_zero():
    assert mean_and_error([0.5]) == (0.5, None)
    assert mean_and_error([]) == (None, None)
    assert mean_and_error([0.5, 0.5]) == (0.5, 0.0)
    for form in FORMATS:
        text = render(make_tables(collect([run(0.5), run(0.6, sampler="dpp")]), "1"), form)
        assert "60.0 ± –" in text or "60.0 $\\pm$ --" in text


def test_cells_whose_runs_all_failed_are_shown_and_do_not_hide_the_others():
    records = [
        run(0.5, repeat=r, sampler=s, status=f) for r in (0, 1) for s, f in (("uniform", "finished"), ("dpp", "failed"))
    ]
    cells = entries(make_tables(collect(records), "1")[0])
    assert entry_text(cells["DPP", "MMD"]) == "– (0/2)"
    assert entry_text(cells["Uniform random", "MMD"]) == "50.0 ± 0.0"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("table", TABLE_NAMES)
def test_all_failed_makes_every_table_in_every_format(form, table):
    text = render(
        make_tables(collect([run(0.5, status="failed"), run(0.5, status="failed", sampler="dpp")]), table), form
    )
    assert text.strip()
    assert "50.0" not in text


def test_a_table_without_records_is_one_line():
    for name in TABLE_NAMES[:-1]:
        text = render(make_tables({}, name), "text")
        assert text.count("\n") == 1
        assert ": no " in text
    assert "refresh_every" in render(make_tables(collect([run(0.5)]), "4"))


# tables


def test_methods_are_rows_and_data_sets_columns():
    records = [
        run(0.5 + 0.1 * i, data=data, algorithm=algorithm, sampler=sampler)
        for data in ("watch", "pacs")
        for i, (algorithm, sampler) in enumerate(
            [("mmd", "vardass"), ("erm", "uniform"), ("cdan+els", "uniform"), ("mmd", "dpp"), ("erm", "vardass")]
        )
        if (data, algorithm) != ("pacs", "cdan+els")
    ]
    (table,) = make_tables(collect(records), "2")
    assert table.columns == ("watch", "pacs")
    assert [row.name for row in table.rows] == ["ERM", "CDAN + ELS", "MMD + VaRDASS"]
    assert table.rows[1].entries[1] is None
    assert best_names(table) == {("CDAN + ELS", "watch"), ("ERM", "pacs")}


def test_steps_between_refreshes_are_columns_in_order():
    records = [run(t / 1000, sampler="vardass", grid={"refresh_every": t}) for t in (100, 10, 500)]
    records += [run(0.1, grid={"refresh_every": t}) for t in (10, 100)] + [run(0.3, sampler="vardass")]
    (table,) = make_tables(collect(records), "4")
    assert table.columns == ("T=10", "T=100", "T=500")
    assert [row.name for row in table.rows] == ["MMD + VaRDASS"]
    assert [cell.mean for cell in table.rows[0].entries] == pytest.approx([1, 10, 50])
    assert best_names(table) == {("MMD + VaRDASS", "T=500")}


@pytest.mark.parametrize("seed", range(4))
def test_seconds_are_over_all_finished_runs_of_coral_and_mmd(seed):
    records = random_records(seed)
    whole, ratio, _ = make_tables(collect(records), "3")
    walls = defaultdict(dict)
    for r in records:
        cell = r.spec.cell
        if r.status == "finished" and cell["algorithm"] != "erm":
            walls[cell["sampler"]][cell["algorithm"], r.spec.task, r.spec.repeat, r.spec.search] = r.wall
    for sampler, name in (("uniform", "Uniform random"), ("vardass", "VaRDASS")):
        mine = np.array(list(walls[sampler].values()))
        cell = entries(whole)[name, "watch"]
        assert (cell.mean, cell.stderr) == pytest.approx((mine.mean(), mine.std() / np.sqrt(len(mine))))
        assert (cell.repeats, cell.expected) == (len(mine), max(map(len, walls.values())))
        both = walls[sampler].keys() & walls["uniform"].keys()
        expected = sum(walls[sampler][k] for k in both) / sum(walls["uniform"][k] for k in both)
        assert entries(ratio)[name, "watch"] == pytest.approx(expected)


def test_parts_of_the_time_and_the_fastest():
    records = [
        run(0.5, wall=5.0, seconds={"training": 4.0, "evaluation": 1.0}),
        run(0.5, sampler="vardass", wall=9.0, seconds={"training": 4.0, "solver": 3.0, "drawing": 1.0}),
    ]
    whole, ratio, parts = make_tables(collect(records), "3")
    assert best_names(whole) == {("Uniform random", "watch")}
    assert entries(ratio)["VaRDASS", "watch"] == pytest.approx(1.8)
    assert parts.columns == ("training", "solver", "drawing", "evaluation", "whole run")
    assert [cell.mean for cell in parts.rows[1].entries] == [4, 3, 1, 0, 9]


def test_discrepancy_has_its_own_metric_and_the_lowest_is_best():
    records = [
        run(0.5, algorithm=a, sampler=s, mmd2=m, coral=c)
        for a, s, m, c in [
            ("mmd", "uniform", 0.3, 9.0),
            ("mmd", "vardass", 0.2, 9.0),
            ("coral", "uniform", 9.0, 0.01),
            ("coral", "vardass", 9.0, 0.02),
            ("erm", "uniform", 0.001, 0.002),
        ]
    ]
    (table,) = make_tables(collect(records), "discrepancy")
    assert {name: cell.mean for name, cell in entries(table).items()} == {
        ("Uniform random", "CORAL"): 0.01,
        ("Uniform random", "MMD"): 0.3,
        ("VaRDASS", "CORAL"): 0.02,
        ("VaRDASS", "MMD"): 0.2,
        ("ERM (no adaptation)", "CORAL"): 0.002,
        ("ERM (no adaptation)", "MMD"): 0.001,
    }
    assert best_names(table) == {("VaRDASS", "MMD"), ("Uniform random", "CORAL")}


def test_best_is_the_highest_shown_mean_without_erm_and_prefers_whole_cells():
    records = [
        run(a, algorithm=g, sampler=s, repeat=r)
        for g, s, a, repeats in [
            ("erm", "uniform", 0.9, 2),
            ("erm", "dpp", 0.8, 2),
            ("mmd", "uniform", 0.50001, 2),
            ("mmd", "dpp", 0.50003, 2),
            ("mmd", "vardass", 0.7, 1),
            ("coral", "uniform", 0.4, 1),
            ("coral", "dpp", 0.6, 1),
        ]
        for r in range(repeats)
    ]
    (table,) = make_tables(collect(records), "1")
    assert best_names(table) == {("Uniform random", "MMD"), ("DPP", "MMD"), ("DPP", "CORAL")}
    assert render([table]).split("  *: best")[0].count("*") == 3
    assert render([table], "markdown").count("**") == 2 * 3 + 2  # and the title
    assert render([table], "latex").count("\\textbf{") == 3


def test_one_number_alone_is_not_best():
    rows = [Row("a", (Cell(1.0, None, 1, 1),)), Row("b", (None,))]
    assert best_of(rows, [(0, 0), (1, 0)], (1,)) == set()


# statistics

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


# formats

NASTY = [
    "=cmd|' /C calc'!A0",
    "@SUM(A1)",
    "+1+1",
    "-2+3",
    "a|b\\c_d*e`f",
    "{x}$y$ #1 & 50% ~^",
    "\x1b[31mred\r\n\tx",
    "[a](b)<b>",
    "\u202egnp",
]


def nasty_records():
    return [
        run(0.5 + 0.01 * i, data=name, task=task, sampler=sampler, algorithm=algorithm, grid={"refresh_every": name})
        for name in NASTY
        for i, (task, sampler, algorithm) in enumerate(
            itertools.product((name, "t"), (name, "uniform", "vardass"), (name, "mmd"))
        )
    ]


@pytest.mark.parametrize("records", [random_records(0), nasty_records()], ids=["random", "nasty"])
def test_latex_has_balanced_braces_and_equal_columns(records):
    text = render(make_tables(collect(records), "all"), "latex")
    bare = re.sub(r"\\[\\{}$&#%_]", "", text)  # without escaped marks
    depth = 0
    for character in bare:
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    assert not set("^~|<>") & set(bare)
    assert not re.search(r"[#_]", bare)
    assert "%" not in bare.split("\n", 1)[1]
    bodies = re.findall(r"\\begin\{tabular\}\{(l c*|lc*)\}(.*?)\\end\{tabular\}", text, re.S)
    assert len(bodies) == text.count("\\begin{table}") == text.count("\\end{table}") > 3
    for shape, body in bodies:
        lines = [line for line in body.strip().splitlines() if not line.endswith("rule")]
        assert len(lines) > 1
        for line in lines:
            assert line.endswith(" \\\\")
            assert len(re.findall(r"(?<!\\)&", line)) == len(shape) - 1


@pytest.mark.parametrize("records", [random_records(0), nasty_records()], ids=["random", "nasty"])
def test_csv_has_all_numbers_and_no_formulas(records):
    tables = make_tables(collect(records), "all")
    lines = list(csv.DictReader(io.StringIO(render(tables, "csv"))))
    assert len(lines) == sum(max(1, len(t.rows) * len(t.columns)) for t in tables)
    shown = iter(lines)
    for table in tables:
        for row in table.rows:
            for entry in row.entries:
                line = next(shown)
                if isinstance(entry, Cell) and entry.mean is not None:
                    assert float(line["mean"]) == entry.mean
                    assert int(line["repeats"]) == entry.repeats
        if not table.rows:
            next(shown)
    for line in lines:
        assert None not in line
        for field in ("table", "row", "column", "text"):
            harmless = re.fullmatch(r"[+-][\d.]+( ± .*)?", line[field])
            assert harmless or not line[field].startswith(("=", "+", "-", "@", "\t", "\r")), line[field]


@pytest.mark.parametrize("records", [random_records(0), nasty_records()], ids=["random", "nasty"])
def test_markdown_and_text_keep_their_shape(records):
    tables = make_tables(collect(records), "all")
    for line in render(tables, "markdown").splitlines():
        assert "<b>" not in line
        assert not re.search(r"(?<!\\)`", line)
    blocks = [block for block in render(tables, "markdown").split("\n\n") if block.startswith("|")]
    assert len(blocks) == sum(bool(table.rows) for table in tables)
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    text = render(tables, "text")
    assert not set("\x1b\r\t\u202e") & set(text)
    assert text.count("\n\n") == len(tables) - 1


def test_text_columns_are_aligned_also_with_wide_characters():
    table = Table("x", "t", "c", ("ab",), (Row("数据", ("1",)), Row("long name", ("2",))), (0,))
    first, second = render([table]).splitlines()[3:5]
    assert first == "数据       1"
    assert second == "long name  2"


def test_entries_as_text():
    assert entry_text(Cell(78.32, 0.41, 3, 5)) == "78.3 ± 0.4 (3/5)"
    assert entry_text(Cell(78.32, 0.41, 5, 5, 48, 50)) == "78.3 ± 0.4 (48/50 runs)"
    assert entry_text(Cell(-0.01, 0.0, 2, 2)) == "0.0 ± 0.0"
    assert entry_text(None) == "–"
    assert entry_text(1.25, 2) == "1.25"
    assert entry_text(PValue(0.0004)) == "< 0.001"
    assert entry_text(PValue(0.0125)) == "0.013"


def test_csv_has_all_digits_of_a_p_value():
    results = collect(random_records(4))
    lines = csv.DictReader(io.StringIO(render(make_tables(results, "pairs"), "csv")))
    shown = [float(line["mean"]) for line in lines if line["column"] == "sign p"]
    assert shown == [one.result.sign_p for one in compare_samplers(results)]


def test_data_without_any_such_method_have_no_column():
    records = [run(0.5, data="one"), run(0.5, data="two", sampler="dpp")]
    assert make_tables(collect(records), "2")[0].columns == ("one",)


def test_gains_follow_tables_of_accuracy_only():
    results = collect(random_records(0))
    for name, expected in (("1", True), ("2", True), ("3", False), ("pairs", False)):
        kinds = [table.kind for table in paper.against_paper(make_tables(results, name), results)]
        assert ("gains" in kinds) == expected


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="unknown table '5'"):
        make_tables({}, "5")
    with pytest.raises(InputError, match="unknown format 'html'"):
        render([], "html")


# beside the paper


def test_ours_stand_beside_the_papers_where_names_match():
    records = random_records(1, gaps=0, failures=0, data=("humpbacks",), samplers=("uniform", "vardass", "ordered"))
    results = collect(
        [*records, *random_records(2, gaps=0, failures=0, data=("watch",), samplers=("uniform", "vardass"))]
    )
    shown = paper.against_paper(make_tables(results, "all"), results)
    ours = {(t.kind, t.data): t for t in make_tables(results, "all")}
    both = {(t.kind, t.data): t for t in shown}
    table = both["accuracy", "humpbacks"]
    assert table.columns == ("ERM", "ERM (paper)", "CORAL", "CORAL (paper)", "MMD", "MMD (paper)")
    assert entries(table)["VaRDASS", "MMD (paper)"] == Cell(92.0, 0.5, 5, 5)
    assert entries(table)["ordered", "MMD (paper)"] is None
    assert best_names(table) == best_names(ours["accuracy", "humpbacks"])
    assert "humpbacks: ours has 3 tasks, the paper's 4" in table.notes
    assert both["accuracy", "watch"].columns == ("ERM", "CORAL", "MMD")
    assert "not in the paper: watch" in both["accuracy", "watch"].notes
    assert both["methods", None].columns == ("humpbacks", "humpbacks (paper)", "watch")
    gains = both["gains", None]
    assert gains.columns == ("CORAL, paper", "CORAL, watch", "MMD, paper", "MMD, watch", "same sign")
    assert gains.rows[0].entries[2] == "+3.1 (4 of 4 positive)"
    mine = {}
    for algorithm in ("coral", "mmd"):
        cells = entries(ours["accuracy", "watch"])
        mine[algorithm] = cells["VaRDASS", algorithm.upper()].mean - cells["Uniform random", algorithm.upper()].mean
        assert f"{mine[algorithm]:+.1f}" in gains.rows[0].entries
    assert gains.rows[0].entries[-1] == f"{sum(gain > 0 for gain in mine.values())} of 2"
    for form in FORMATS:
        assert "92.0" in render(shown, form)


def test_data_of_another_name_are_known_by_their_loader():
    results = collect([run(0.5, data="Wards", dataset="camelyon17"), run(0.5, data="mine", dataset="images")])
    assert [paper.paper_name(data) for data in results.values()] == ["camelyon17", None]


# many records, and the command


def test_ten_thousand_records():
    algorithms = ("erm", "coral", "mmd")
    samplers = ("uniform", "dpp", "kmeans++", "vardass", "ordered")
    tasks = [f"t{i}" for i in range(12)]
    records = [
        run((7 * i % 101) / 101, score=(i % 13) / 13, algorithm=a, sampler=s, task=t, repeat=r, search=h)
        for i, (a, s, t, r, h) in enumerate(itertools.product(algorithms, samplers, tasks, range(6), range(10)))
    ][:10_000]
    assert len(records) == 10_000
    results = collect(records)
    data = results["watch"]
    assert len(data.finished) == 10_000
    assert (len(data.labels), len(data.tasks), len(data.repeats), len(data.searches)) == (14, 12, 6, 10)
    assert len(data.chosen) == math.ceil(10_000 / 10)
    tables = make_tables(results, "all")
    assert {t.kind for t in tables} >= {"accuracy", "methods", "seconds", "splits", "discrepancy", "pairs", "wins"}
    assert all(render(tables, form) for form in FORMATS)


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(command.tables)

    def call(*arguments):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


def write_records(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    return folder


def test_command_prints_and_writes(tmp_path, invoke):
    one = write_records(tmp_path / "one", random_records(0, data=("watch",)))
    two = write_records(tmp_path / "two", random_records(1, data=("humpbacks",)))
    printed = invoke(one, two, "--table", "1").output
    assert "Table 1: target accuracy (%) by sampler, watch" in printed
    assert "Table 1: target accuracy (%) by sampler, humpbacks" in printed
    assert "(paper)" in invoke(one, two, "--against", "paper").output
    out = tmp_path / "all.tex"
    assert "written" in invoke(one, "--out", out).output
    assert "\\toprule" in out.read_text()
    assert invoke(one, "--format", "csv", "--table", "pairs").output.startswith("table,row,column")
    records = json.loads((one / "records.jsonl").read_text().splitlines()[0])
    assert records["spec"]["data_name"] == "watch"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--table", "9"), "unknown table '9'"),
        (("--format", "pdf"), "unknown format 'pdf'"),
        (("--against", "me"), "--against paper"),
    ],
)
def test_command_refuses_what_it_does_not_know(tmp_path, invoke, arguments, message):
    folder = write_records(tmp_path / "one", [run(0.5)])
    with pytest.raises(InputError, match=message):
        invoke(folder, *arguments)


def test_command_on_an_empty_folder_is_one_clear_error(tmp_path, invoke):
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="none"):
        invoke(tmp_path / "none")
    with pytest.raises(InputError, match="no records of runs"):
        invoke(write_records(tmp_path / "empty", []))
