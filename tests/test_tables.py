"""The tables of the paper, and the command that prints them."""

import json
from collections import defaultdict

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from conftest import refused
from table_records import best_names, entries, random_records, run, write_records
from vardass.cli import lab as command
from vardass.lab.averages import collect
from vardass.lab.tables import make_tables
from vardass.table import render


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
        by_repeat = [np.mean([w for k, w in walls[sampler].items() if k[2] == repeat]) for repeat in range(3)]
        assert (cell.mean, cell.stderr) == pytest.approx((mine.mean(), np.std(by_repeat, ddof=1) / np.sqrt(3)))
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
    table, _ = make_tables(collect(records), "discrepancy")
    assert {name: cell.mean for name, cell in entries(table).items()} == {
        ("Uniform random", "CORAL"): 0.01,
        ("Uniform random", "MMD"): 0.3,
        ("VaRDASS", "CORAL"): 0.02,
        ("VaRDASS", "MMD"): 0.2,
        ("ERM (no adaptation)", "CORAL"): 0.002,
        ("ERM (no adaptation)", "MMD"): 0.001,
    }
    assert best_names(table) == {("VaRDASS", "MMD"), ("Uniform random", "CORAL")}


def test_best_is_the_highest_shown_mean_of_whole_cells_without_erm():
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
    assert best_names(table) == {("Uniform random", "MMD"), ("DPP", "MMD")}  # CORAL lacks a repeat
    assert render([table]).split("  *: best")[0].count("*") == 2
    assert render([table], "markdown").count("**") == 2 * 2 + 2  # and the title
    assert render([table], "latex").count("\\textbf{") == 2


def test_data_without_any_such_method_have_no_column():
    records = [run(0.5, data="one"), run(0.5, data="two", sampler="dpp")]
    assert make_tables(collect(records), "2")[0].columns == ("one",)


def test_the_summary_is_one_table_for_each_data_set_and_all_leaves_out_empty_ones():
    methods = [run(0.5, data="methods", algorithm=name) for name in ("dann", "mcc")]
    periods = [run(0.5, data="periods", sampler="vardass", grid={"refresh_every": every}) for every in (10, 100)]
    results = collect([*random_records(0, data=("one",)), *methods, *periods])
    assert [table.kind for table in make_tables(results)] == ["accuracy", "refresh", "methods"]
    summary = make_tables(results)
    assert summary[0] == make_tables(results, "1")[0]
    assert summary[2].columns == ("methods",)  # Table 1 would leave them out
    assert all(table.rows for table in make_tables(results, "all"))
    empty = make_tables(collect(methods), "splits")
    assert [(table.kind, table.rows) for table in empty] == [("splits", ())]


def test_unknown_names_are_refused():
    with refused("'5'", "summary", field="table"):
        make_tables({}, "5")
    with refused("format", "'html'", "latex"):
        render([], "html")


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
    ("arguments", "field", "named"),
    [
        (("--table", "9"), "table", ("'9'", "summary")),
        (("--format", "pdf"), "format", ("'pdf'", "latex")),
        (("--against", "me"), None, ("'me'", "--against paper")),
    ],
)
def test_command_refuses_what_it_does_not_know(tmp_path, invoke, arguments, field, named):
    folder = write_records(tmp_path / "one", [run(0.5)])
    with refused(*named, field=field):
        invoke(folder, *arguments)


def test_command_on_an_empty_folder_is_one_clear_error(tmp_path, invoke):
    (tmp_path / "none").mkdir()
    with refused(tmp_path / "none", "records.jsonl"):
        invoke(tmp_path / "none")
    with refused(tmp_path / "empty", "no records of runs"):
        invoke(write_records(tmp_path / "empty", []))


def test_tables_say_which_coral_they_have():
    def notes(which, *options):
        records = [
            run(0.5, algorithm="coral", repeat=i, config={"algorithm_options": o}) for i, o in enumerate(options)
        ]
        return [note for table in make_tables(collect([*records, run(0.5)]), which) for note in table.notes]

    domainbed, printed = {"preset": "domainbed"}, {"preset": "paper"}
    before = {"preset": "paper", "correction": "none"}
    means = "|R_s − R_t|² / d² + |μ_s − μ_t|² / d, R over 1 − Σw², which is over b − 1 for uniform batches"
    assert f"CORAL was trained as {means}" in notes("1", domainbed)
    assert "CORAL was trained as |R_s − R_t|², R with weights |S_h| / (n − 1)" in notes("2", printed)
    assert "CORAL was trained as |R_s − R_t|², R with weights |S_h| / n" in notes("discrepancy", before)
    assert f"CORAL was trained as {means}; and as |R_s − R_t|², R with weights |S_h| / n" in notes(
        "1", domainbed, before
    )
    assert not any("CORAL was" in table.notes for table in make_tables(collect([run(0.5)]), "1"))
