"""From records to numbers: model selection and averages."""

import itertools
import math

import numpy as np
import pytest

from conftest import refused
from table_records import best_names, brute_values, entries, random_records, run
from vardass.lab.averages import Label, collect
from vardass.lab.record import Record
from vardass.lab.tables import make_tables
from vardass.table import FORMATS, entry_text, render


def test_the_highest_score_wins_whatever_the_target_accuracy_or_the_oracle_say():
    records = [run(0.9, score=0.2, search=0), run(0.4, score=0.8, search=1), run(0.99, score=0.7, search=2)]
    for order in itertools.permutations(records):
        assert collect(order)["watch"].average(Label("mmd", "uniform")).mean == 0.4


def test_equal_scores_go_to_the_lowest_search_number_in_any_order():
    records = [run(0.1 * search, score=0.5, search=search) for search in (3, 1, 2)]
    for order in itertools.permutations(records):
        assert collect(order)["watch"].average(Label("mmd", "uniform")).mean == pytest.approx(0.1)


@pytest.mark.parametrize("score", [None, math.nan, "0.9", True])
def test_a_run_without_a_score_is_chosen_only_if_there_is_no_other(score):
    label = Label("mmd", "uniform")
    assert collect([run(0.9, score=0.1), run(0.4, search=1, score=0.0)])["watch"].average(label).mean == 0.9
    bad = Record(run(0.3).spec, "finished", {"target_accuracy": 0.3, "score": score})
    assert collect([bad])["watch"].average(label).mean == 0.3
    assert collect([bad, run(0.4, search=1, score=-5.0)])["watch"].average(label).mean == 0.4


def test_a_chosen_run_without_target_accuracy_is_missing_and_not_replaced_by_the_second_best():
    cell = collect([run(None, score=0.9), run(0.8, score=0.1, search=1)])["watch"].average(Label("mmd", "uniform"))
    assert cell.mean is None
    assert (cell.repeats, cell.expected, cell.whole) == (0, 1, False)


def test_a_failed_run_leaves_its_cell_but_marks_it():
    records = [run(0.5, search=0), run(0.6, search=1, status="failed")]
    cell = collect(records)["watch"].average(Label("mmd", "uniform"), scale=100)
    assert (cell.mean, cell.runs, cell.expected_runs, cell.failed) == (50, 1, 2, 1)
    assert entry_text(cell) == "50.0 ± – (1/2 runs)"
    assert cell.whole  # an outcome of the search
    missing = collect([*records[:1], run(0.5, sampler="dpp"), run(0.5, sampler="dpp", search=1)])["watch"]
    assert not missing.average(Label("mmd", "uniform")).whole  # its search is not at its end


def test_a_finished_record_replaces_a_failed_one_of_the_same_run():
    for order in itertools.permutations([run(0.5, status="failed"), run(0.5)]):
        assert collect(order)["watch"].average(Label("mmd", "uniform")).whole


def test_two_sweeps_with_other_settings_under_one_name_are_refused():
    with refused("watch", "a->b", "MMD", "steps", "name"):
        collect([run(0.5, config={"steps": 10}), run(0.6, config={"steps": 20})])


def test_labels_of_the_users_own_stay_and_known_names_are_recognised():
    records = [run(0.5, algorithm="MMD", sampler="k-means++"), run(0.5, algorithm="Mine", sampler="S 1")]
    assert {label.method_name for label in collect(records)["watch"].labels} == {"MMD + k-means++", "Mine + S 1"}


def brute_means(found, tasks=("t0", "t1", "t2")):
    """Mean of each repeat over the tasks that were ever seen, and their number, by loops."""
    seen = [task for task in tasks if any(place[0] == task for place in found)]
    rows = [[found.get((task, repeat)) for task in seen] for repeat in range(3)]
    return [float(np.mean(row)) for row in rows if row and None not in row], len(seen)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("gaps", "failures"), [(0, 0), (0.05, 0.1), (0.6, 0.2)])
def test_table_1_equals_a_brute_force_recomputation(seed, gaps, failures):
    records = random_records(seed, gaps=gaps, failures=failures)
    assert {r.spec.repeat for r in records} == {0, 1, 2}
    assert {r.spec.task for r in records} == {"t0", "t1", "t2"}
    (table,) = make_tables(collect(records), "1")
    names = {"uniform": "Uniform random", "vardass": "VaRDASS"}
    shown = {(name, algorithm): cell for (name, algorithm), cell in entries(table).items() if cell is not None}
    whole = {}
    for algorithm, sampler in itertools.product(("erm", "coral", "mmd"), names):
        mine = [r for r in records if (r.spec.cell["algorithm"], r.spec.cell["sampler"]) == (algorithm, sampler)]
        cell = shown.get((names[sampler], algorithm.upper()))
        if cell is None:
            assert not mine
            continue
        means, tasks = brute_means(brute_values(records, "watch", algorithm, sampler))
        assert (cell.repeats, cell.expected, cell.tasks, cell.expected_tasks) == (len(means), 3, tasks, 3)
        assert cell.mean == (pytest.approx(100 * np.mean(means)) if means else None)
        if len(means) > 1:
            assert cell.stderr == pytest.approx(100 * np.std(means, ddof=1) / np.sqrt(len(means)))
        else:
            assert cell.stderr is None
        finished = sum(r.status == "finished" for r in mine)
        assert (cell.runs, cell.failed, cell.expected_runs) == (finished, len(mine) - finished, 18)
        assert cell.whole == (len(means) == 3 and tasks == 3 and len(mine) == 18)
        assert (cell.mark == "") == (cell.whole and finished == 18)
        if cell.whole and algorithm != "erm":
            whole.setdefault(algorithm.upper(), {})[names[sampler]] = round(cell.mean, 1)
    expected = {
        (name, algorithm)
        for algorithm, found in whole.items()
        for name, mean in found.items()
        if len(found) > 1 and mean == max(found.values())
    }
    assert best_names(table) == expected


@pytest.mark.parametrize("seed", range(6))
def test_splits_and_discrepancies_equal_a_brute_force_recomputation(seed):
    records = random_records(seed, gaps=0.1)
    results = collect(records)
    splits = entries(make_tables(results, "splits")[0])
    shift = entries(make_tables(results, "discrepancy")[0])
    metrics = {"coral": "coral", "mmd": "mmd2"}
    for algorithm, (sampler, shown) in itertools.product(metrics, {"uniform": "", "vardass": " + VaRDASS"}.items()):
        found = brute_values(records, "watch", algorithm, sampler)
        for task in ("t0", "t1", "t2"):
            mine = [100 * v for (t, _), v in found.items() if t == task]
            assert splits[algorithm.upper() + shown, task].mean == pytest.approx(np.mean(mine))
        means, _ = brute_means(found)
        average = splits[algorithm.upper() + shown, "Average"]
        assert average.mean == (pytest.approx(100 * np.mean(means)) if means else None)
        means, _ = brute_means(brute_values(records, "watch", algorithm, sampler, metrics[algorithm]))
        cell = shift[shown.removeprefix(" + ") or "Uniform random", algorithm.upper()]
        assert cell.repeats == len(means)
        assert cell.mean == (pytest.approx(np.mean(means)) if means else None)


def test_a_label_that_lacks_a_task_is_marked_and_does_not_cut_others():
    records = [run(0.2, task="easy"), run(0.8, task="hard"), run(0.9, task="easy", sampler="vardass")]
    records += [run(value, task=task, sampler="dpp") for task, value in (("easy", 0.1), ("hard", 0.6))]
    (table,) = make_tables(collect(records), "1")
    cells = entries(table)
    assert entry_text(cells["Uniform random", "MMD"]) == "50.0 ± –"
    assert entry_text(cells["VaRDASS", "MMD"]) == "90.0 ± – (1/2 tasks)"
    assert best_names(table) == {("Uniform random", "MMD")}
    assert "(n/N tasks): over n of N tasks, so not to be compared; never best" in table.notes


def test_a_repeat_that_lacks_a_task_does_not_count():
    records = [run(0.2, task=t, repeat=r, sampler=s) for t in "ab" for r in (0, 1) for s in ("uniform", "vardass")]
    whole = entries(make_tables(collect(records), "1")[0])["VaRDASS", "MMD"]
    part = entries(make_tables(collect(records[:-1]), "1")[0])["VaRDASS", "MMD"]
    assert (whole.repeats, part.repeats, part.expected) == (2, 1, 2)
    assert entry_text(part) == "20.0 ± – (1/2)"


def test_the_error_of_a_single_repeat_is_unknown_and_not_zero():
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
    assert {t.kind for t in tables} >= {"accuracy", "methods", "seconds", "splits", "discrepancy", "pairs"}
    assert all(render(tables, form) for form in FORMATS)
