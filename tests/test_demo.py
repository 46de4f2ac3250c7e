"""The demo: made of the product's own commands, it can be stopped, repeated and checked against its own files."""

import json

import pytest
import torch

from vardass.adapt import RunConfig
from vardass.analysis.sampler_noise import variance_report
from vardass.cli import main
from vardass.lab.spec import load_sweep
from vardass.lab.store import read_records
from vardass.strata import Strata

SAMPLERS = {"uniform", "vardass", "stratified", "ordered", "balanced", "recommended"}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def demo(folder, *options):
    small = ("--steps", "2", "--pairs", "1", "--repeats", "1", "--jobs", "1")
    return main(["demo", "--out", str(folder), *small, *options])


def test_the_preset_compares_five_ways_to_draw_and_the_recommended_run_with_two_losses():
    runs = load_sweep("demo").runs()
    cells = {(run.config["algorithm"], run.cell["sampler"]) for run in runs}
    assert cells == {("erm", "uniform")} | {(loss, sampler) for loss in ("mmd", "coral") for sampler in SAMPLERS}
    assert len({run.task for run in runs}) == 4
    # the row of that name is what adapt does, but for the demo's small batches and the columns of its plans
    given = {name: runs[0].config[name] for name in ("steps", "batch_size")}
    wanted = RunConfig.recommended(**given)
    for run in runs:
        if run.cell["sampler"] == "recommended":
            assert run.config["sampler"] == wanted.sampler
            assert run.config["sampler_options"] == wanted.sampler_options
            assert run.config["class_shares"] == wanted.class_shares
            assert run.config["class_options"] == wanted.class_options
            assert wanted.algorithm_options.items() <= run.config["algorithm_options"].items()
    assert len({run.repeat for run in runs}) == 3


def test_demo_shows_what_its_files_hold_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr("vardass.cli.demo._NOISE_BATCHES", 40)
    kernels = []

    def spy(samplers, *features, kernel, **options):
        kernels.append((kernel, [getattr(make(100), "kernel", kernel) for make in samplers.values()]))
        return variance_report(samplers, *features, kernel=kernel, **options)

    monkeypatch.setattr("vardass.cli.demo.variance_report", spy)
    folder = tmp_path / "new" / "demo"
    assert demo(folder) == 0
    # noise is that of strata for the very loss that is trained: DomainBed's CORAL has a term of the means
    assert {type(kernel).__name__ for kernel, _ in kernels} == {"RBFMixture", "CoralKernel"}
    for kernel, of_samplers in kernels:
        assert all(one is kernel for one in of_samplers)
        assert getattr(kernel, "mean_scale", 1.0) > 0.0
    shown = capsys.readouterr().out
    # vardass stratify
    assert Strata.load(folder / "data/right-wrist.strata.npz").k == 64
    # vardass adapt
    runs = {path.name for path in (folder / "adapt").iterdir()}
    assert runs == {"mmd-left-A-right-B", "coral-left-A-right-B"}
    assert json.loads((folder / "adapt/mmd-left-A-right-B/data.json").read_text())["scale"] is not None
    # vardass sweep
    records = [json.loads(line) for line in (folder / "sweep/records.jsonl").read_text().splitlines()]
    assert len(records) == 13
    table = shown[shown.index("noise of the loss") :]
    noise = json.loads((folder / "noise.json").read_text())
    assert set(noise) == {"mmd", "coral"}
    for found in noise.values():
        assert set(found) == SAMPLERS
        assert found["uniform"] == 1.0
        for sampler in SAMPLERS - {"uniform"}:
            assert 0.0 < found[sampler] < 0.9
            assert f"{found[sampler]:.3f}" in table
    by_cell = {
        (each.spec.config["algorithm"], each.spec.cell["sampler"]): 100 * each.result["target_accuracy"]
        for each in read_records(folder / "sweep")
    }
    for accuracy in by_cell.values():
        assert f"{accuracy:.1f}" in table
    assert f"{by_cell['mmd', 'ordered'] - by_cell['mmd', 'uniform']:+.1f}" in table
    assert (folder / "sweep/report.html").read_text().startswith("<!DOCTYPE html>")

    before = (folder / "sweep/records.jsonl").stat().st_mtime_ns
    assert demo(folder) == 0  # the same command finds all of it done
    assert (folder / "sweep/records.jsonl").stat().st_mtime_ns == before
    assert capsys.readouterr().out[-500:] == shown[-500:]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--steps", 0), ("--pairs", 0), ("--pairs", 5), ("--jobs", 0), ("--jobs", -1), ("--repeats", -1)],
)
def test_bad_options_are_refused_before_anything_is_made(tmp_path, capsys, option, value):
    folder = tmp_path / "demo"
    assert main(["demo", "--out", str(folder), option, str(value)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(value) in captured.err
    assert captured.err.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize("name", ["notes.txt", "data/mine.npz"])
def test_a_folder_with_other_things_is_refused_without_options_too(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / name).parent.mkdir(parents=True)
    (tmp_path / "demo" / name).write_text("mine")
    assert main(["demo"]) == 2
    assert repr(name.rpartition("/")[2]) in capsys.readouterr().err
    assert [path for path in (tmp_path / "demo").rglob("*") if path.is_file()] == [tmp_path / "demo" / name]


def test_demo_into_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "demo").write_text("")
    assert demo(tmp_path / "demo") == 2
    assert "--out" in capsys.readouterr().err
