"""From records to numbers: model selection and averages."""

import itertools
import math

import numpy as np
import pytest

from table_records import brute_values, entries, random_records, run
from vardass.errors import InputError
from vardass.experiments.frame import Label, collect, mean_and_error
from vardass.experiments.record import Record
from vardass.experiments.render import FORMATS, entry_text, render
from vardass.experiments.tables import make_tables


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
