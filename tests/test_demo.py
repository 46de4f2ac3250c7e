"""The training part of the demo: what it writes, what it says, and that it can be repeated."""

import csv
import dataclasses
import math

import pytest
import torch

from vardass.cli import main
from vardass.cli.training_demo import PAIRS, WAYS, Job, Noise, Run, run_jobs, train
from vardass.cli.training_report import as_csv, findings, headline, pair_table, setting, summarise, summary_table

STEPS = 60


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def result(run):
    """All of a run but its seconds."""
    return dataclasses.replace(run, sampling_seconds=0.0)


def test_same_numbers_in_this_process_and_in_two_others():
    jobs = [Job(way, "coral", *PAIRS[0], seed=1, steps=STEPS) for way in ("ordered", "uniform")]
    counts = []
    here = [train(job) for job in jobs]
    two = run_jobs(jobs, processes=2, done=counts.append)
    assert [result(run) for run in here] == [result(run) for run in two]
    assert [run.job for run in two] == jobs
    assert counts == [1, 2]


def test_training_leaves_the_global_random_state_alone_and_depends_on_the_seed():
    job = Job("uniform", "mmd", *PAIRS[0], seed=0, steps=STEPS)
    state = torch.get_rng_state()
    first = train(job)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert result(train(job)) == result(first)
    assert train(dataclasses.replace(job, seed=1)).accuracy != first.accuracy
    # uniform is compared with itself, on the same draws
    (state,) = first.noise
    assert (state.variance, state.error) == (state.uniform_variance, state.uniform_error)


def test_strata_lower_the_noise_at_a_fixed_state():
    (state,) = train(Job("min-sum strata", "mmd", *PAIRS[0], seed=0, steps=STEPS)).noise
    assert state.variance < 0.5 * state.uniform_variance
    assert state.error < state.uniform_error


def test_a_failure_in_a_worker_is_raised():
    with pytest.raises(KeyError, match="nowhere"):
        run_jobs([Job("uniform", "mmd", "nowhere", "left-A", seed=0, steps=1)] * 2, processes=1)


def test_demo_trains_with_every_way_and_writes_what_it_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    options = ["--sizes", "4,8", "--seeds", "1", "--steps", "1", "--pairs", "1", "--processes", "1"]
    assert main(["demo", "--out", str(tmp_path), *options]) == 0
    out = capsys.readouterr().out
    assert {"training.png", "training.svg", "training.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["batches"], row["loss"]) for row in rows} == {
        (n, loss) for n, way in WAYS.items() for loss in way.losses
    }
    shown = out[out.index("training a small network") :]
    for row in rows:
        assert sum(line.split("  ")[0].strip() == row["batches"] for line in shown.splitlines()) >= 1
        assert f"{100 * float(row['target_accuracy']):.1f}" in shown
    assert "1 seed x 1 source-target pair = 1 run of 1 steps" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("option", "value"), [("--steps", -1), ("--pairs", 0), ("--pairs", 5), ("--processes", 0), ("--seeds", -1)]
)
def test_bad_options_are_refused_before_anything_is_made(tmp_path, capsys, option, value):
    folder = tmp_path / "demo"
    assert main(["demo", "--out", str(folder), option, str(value)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert option in captured.err
    assert str(value) in captured.err
    assert not folder.exists()


# the report, on made-up runs


def made_up(way, loss, seed, accuracy, variance=1.0, error=1.0, pair=PAIRS[0]):
    noise = (
        () if way == "source only" else (Noise(50, variance, error, 2.0, 4.0), Noise(250, variance, error, 8.0, 1.0))
    )
    return Run(Job(way, loss, *pair, seed, 600), accuracy, noise, 0.25)


def made_up_runs():
    runs = []
    for loss in ("mmd", "coral"):
        for seed, uniform in enumerate((0.70, 0.80)):
            runs += [
                made_up("uniform", loss, seed, uniform),
                made_up("VaRDASS (paper)", loss, seed, uniform + 0.10 + 0.02 * seed, variance=0.4),
                made_up("min-sum strata", loss, seed, uniform - 0.10 - 0.02 * seed, variance=0.2),
                made_up("ordered", loss, seed, uniform + (-1) ** seed * 0.05, variance=0.1),
            ]
    runs += [made_up("source only", "none", seed, 0.6) for seed in (0, 1)]
    return runs


def test_summary_is_paired_and_geometric():
    cells = {cell.way: cell for cell in summarise(made_up_runs())["mmd"]}
    assert list(cells) == ["source only", "uniform", "VaRDASS (paper)", "min-sum strata", "ordered"]
    paper = cells["VaRDASS (paper)"]
    assert paper.accuracy == pytest.approx(86.0)
    assert paper.gain == pytest.approx(11.0)
    assert paper.gain_error == pytest.approx(1.0)  # 10 and 12
    assert paper.accuracy_error == pytest.approx(6.0)  # 80 and 92
    assert paper.variance == pytest.approx(math.sqrt(0.4 / 2 * 0.4 / 8))
    assert paper.error == pytest.approx(math.sqrt(1 / 4 * 1 / 1))
    assert (paper.wins, paper.runs) == (2, 2)
    assert (cells["ordered"].wins, cells["source only"].variance) == (1, None)
    assert paper.by_pair == {PAIRS[0]: pytest.approx(86.0)}


def test_words_follow_the_numbers():
    runs = made_up_runs()
    text = findings("mmd", summarise(runs)["mmd"])
    assert text.startswith("MMD: least variance: ordered (0.025 of uniform's), which is not the most accurate; ")
    assert "most accurate: VaRDASS (paper) (86.0 %, uniform 75.0 %)" in text
    assert "more than two standard errors above uniform: VaRDASS (paper) (+11.0)" in text
    assert "more than two standard errors below uniform: min-sum strata (-11.0)" in text
    assert "within two standard errors of uniform: ordered (+0.0)" in text
    assert text.index("above") < text.index("within") < text.index("below")
    assert headline(summarise(runs)) == (
        "Target accuracy -11.0 to +11.0 points next to uniform batches, with 0.025 to 0.1 of the loss variance"
    )
    quieter = [
        dataclasses.replace(run, noise=tuple(dataclasses.replace(state, variance=1e-3) for state in run.noise))
        if run.job.way == "VaRDASS (paper)"
        else run
        for run in runs
    ]
    assert "VaRDASS (paper) (0.000 of uniform's), which is also" in findings("mmd", summarise(quieter)["mmd"])
    once = [run for run in runs if run.job.seed == 0]
    assert "gain over uniform in the only run: VaRDASS (paper) (+10.0), min" in findings("mmd", summarise(once)["mmd"])
    assert setting(once).startswith("1 seed x 1 source-target pair = 1 run of 600 steps, batch size 8")


def test_tables_hold_every_cell_and_mark_the_losing_ones():
    cells = summarise(made_up_runs())
    table = summary_table("coral", cells["coral"], caption="over 2 runs")
    assert table.caption == "over 2 runs"
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == [cell.way for cell in cells["coral"]]
    assert columns[1][:2] == ["-", f"{math.sqrt(1 / 2 * 1 / 8):.3f}"]
    assert columns[4][2:] == ["+11.0 ± 1.0", "-11.0 ± 1.0", "+0.0 ± 5.0"]
    pairs = pair_table(cells)
    assert list(pairs.columns[2].cells)[:5] == ["60.0*", "75.0 ", "86.0 ", "64.0*", "75.0 "]


def test_csv_has_a_line_for_each_run():
    runs = made_up_runs()
    rows = list(csv.DictReader(as_csv(runs).splitlines()))
    assert len(rows) == len(runs)
    assert float(rows[1]["relative_variance"]) == pytest.approx(0.1)
    assert rows[-1]["relative_variance"] == ""
    assert {row["seed"] for row in rows} == {"0", "1"}
