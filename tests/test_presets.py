"""The presets are the paper's experiments; the specifications of results are what was run, and what is to be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import refused
from vardass.lab.spec import Sweep, load_sweep, preset_names

RESULTS = Path(__file__).parents[1] / "results"
TASKS = 1 + 4 + 6 + 12
RUNS = {"paper-table1": TASKS * 18 * 50, "paper-table2": TASKS * 11 * 50, "paper-table4": 4 * 10 * 50}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that look like the paper's data as far as the names of tasks go."""
    place = tmp_path_factory.mktemp("data")
    for program in ("p1", "p2", "p3", "p4"):
        (place / "humpbacks" / program).mkdir(parents=True)
    return {"humpbacks": place / "humpbacks", **{name: place for name in ("camelyon17", "spawrious", "office-home")}}


def load(name: str, roots: dict[str, Path], **options: int) -> Sweep:
    needed = {"humpbacks": roots["humpbacks"]} if name == "paper-table4" else roots
    return load_sweep(name, roots=needed, **options)


def ids(sweep: Sweep) -> set[str]:
    return {run.run_id for run in sweep.runs()}


@pytest.mark.parametrize("name", RUNS)
def test_presets_are_the_papers_protocol(name: str, roots: dict[str, Path]) -> None:
    runs = load(name, roots).runs()
    assert len(runs) == RUNS[name]
    assert {(run.config["steps"], run.config["feature_source"]) for run in runs} == {(3000, "full")}
    grid = {10, 50, 100, 500, 1000} if name == "paper-table4" else {100}
    assert {run.config["refresh_every"] for run in runs} == grid
    of_arm = {run.run_id: run.config for run in runs if run.cell["algorithm"] == "arm"}.values()
    assert {(each["batch_size"], each["batch_per_source"]) for each in of_arm} <= {(8, True)}
    assert {run.config["batch_per_source"] for run in runs if run.cell["algorithm"] != "arm"} == {False}
    assert {run.config["network"] for run in runs if run.dataset != "humpbacks"} <= {"resnet18"}
    # λ of CORAL means the same for any number of features
    assert {run.config["algorithm_options"]["preset"] for run in runs if run.config["algorithm"] == "coral"} == {
        "domainbed"
    }
    penalties = [run.config["algorithm_options"].get("penalty", 1.0) for run in runs]
    assert 0.1 <= min(penalties) < 0.2 < 5 < max(penalties) <= 10
    # files are decoded once, by processes of their own
    assert all(run.config["workers"] > 0 and run.data_options["cache"] for run in runs)
    sizes = {"per_class": 1167, "test_per_folder": 1166}
    for run in runs:
        assert run.data_options == {"cache": True, **(sizes if run.dataset == "spawrious" else {})}


def test_all_presets_load(roots: dict[str, Path]) -> None:
    assert set(preset_names()) == {*RUNS, "demo", "watch-quick"}
    assert load_sweep("watch-quick").runs()
    assert load_sweep("demo").runs()
    with refused("paper-table1", "data 'camelyon17'", "--root camelyon17=DIR"):
        load_sweep("paper-table1")
    chosen = load_sweep("paper-table1", roots=roots, data=["office-home"])
    assert {run.dataset for run in chosen.runs()} == {"office-home"}


def test_a_folder_named_as_a_preset_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # as `make demo` leaves it
    assert load_sweep("demo").runs()


def test_tables_1_and_2_share_runs(roots: dict[str, Path]) -> None:
    one, two = (load(name, roots, repeats=1, search_size=2) for name in ("paper-table1", "paper-table2"))
    assert len(ids(one) & ids(two)) == TASKS * 2 * 5  # ERM, and both samplers of CORAL and MMD
