"""A command replaces only a file that is as a command wrote it: any other content, by any name, stays as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from conftest import refused
from vardass.cli import main
from vardass.files import OUTPUTS_FILE, atomic_write, locked, remove_temporary, write_output
from vardass.lab.record import Record, RunSpec


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != OUTPUTS_FILE}


def edited(out: Path) -> None:
    write_output(out, "of a command", "demo")
    out.write_text("of a command, with a label by hand")


def copied(out: Path) -> None:
    write_output(out.with_name("other"), "of a command", "demo")
    out.write_bytes(out.with_name("other").read_bytes())


def linked(out: Path) -> None:
    out.with_name("notes").write_text("mine")
    out.symlink_to(out.with_name("notes"))


def linked_hard(out: Path) -> None:
    write_output(out.with_name("other"), "of a command", "demo")
    os.link(out.with_name("other"), out)


def of_another_command(out: Path) -> None:
    write_output(out, "of a command", "export")


def protected(out: Path) -> None:
    write_output(out, "of a command", "demo")
    out.chmod(0o444)


def put_back(out: Path) -> None:
    write_output(out, "of a command", "demo")
    out.unlink()
    out.write_text("mine")


def beside_foreign_notes(out: Path) -> None:
    out.with_name(OUTPUTS_FILE).write_text('{"mine": 1}')
    write_output(out, "of a command", "demo")


def a_folder(out: Path) -> None:
    out.mkdir()


def foreign(out: Path) -> None:
    out.write_text("mine")


LINKS = (linked, linked_hard)
IN_THE_WAY = (foreign, edited, copied, of_another_command, *LINKS, protected, put_back, beside_foreign_notes, a_folder)


@pytest.mark.parametrize("content", ["new", b"new"])
@pytest.mark.parametrize("make", IN_THE_WAY)
def test_what_a_user_put_there_stays(make: Callable[[Path], None], content: str | bytes, tmp_path: Path) -> None:
    make(tmp_path / "out.csv")
    before = snapshot(tmp_path)
    with refused(tmp_path / "out.csv"):
        write_output(tmp_path / "out.csv", content, "demo")
    assert snapshot(tmp_path) == before


def test_its_own_is_replaced_by_any_name_of_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for number, path in enumerate((tmp_path / "out", tmp_path / "x/../out", tmp_path / "link", tmp_path / "out")):
        (tmp_path / "x").mkdir(exist_ok=True)
        write_output(path, str(number), "demo")
        assert (tmp_path / "out").read_text() == str(number)
    assert (tmp_path / "link").is_symlink()


def test_content_that_is_there_already_is_left_but_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("the same")
    write_output(tmp_path / "out", "the same", "demo")
    with refused(tmp_path / "out"):
        write_output(tmp_path / "out", "another", "demo")


def test_a_kill_between_any_two_steps_makes_no_output_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, replace = tmp_path / "out", os.replace
    for stop in range(4):  # each output is two renames: of the notes and of the file
        renames: list[object] = []

        def stopping(source: str, target: str, stop: int = stop, renames: list[object] = renames) -> None:
            if len(renames) == stop:
                raise KeyboardInterrupt
            renames.append(target)
            replace(source, target)

        monkeypatch.setattr(os, "replace", stopping)
        for _ in range(3):
            with suppress(KeyboardInterrupt):
                write_output(out, f"first {stop}", "demo")
                write_output(out, f"second {stop}", "demo")
        monkeypatch.setattr(os, "replace", replace)
        write_output(out, f"third {stop}", "demo")
        assert out.read_text() == f"third {stop}"


def test_files_of_a_user_that_look_temporary_stay(tmp_path: Path) -> None:
    names = [".x.tmp", ".tmp", "x.tmp", ".x.vardass-tmp", ".out.k1ll3d_x.tmp"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".out.k1ll3d_x.vardass-tmp").write_text("half")
    remove_temporary(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize(("name", "text"), [("lock", "mine"), ("holder.json", "[1]"), ("holder.json", '{"pid": 1}')])
def test_a_lock_empties_no_file_of_a_user(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with refused(tmp_path / name), locked(tmp_path):
        pass
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("swap", ["target", "temporary"])
def test_names_that_become_links_while_a_file_is_written_lead_nowhere(swap: str, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    victim.chmod(0o600)
    with atomic_write(out) as file:
        file.write(b"new")
        name = out if swap == "target" else Path(file.name if isinstance(file.name, str) else _temporary(tmp_path))
        name.unlink(missing_ok=True)
        name.symlink_to(victim)
    assert victim.read_text() == "mine"
    assert victim.stat().st_mode & 0o777 == 0o600


def _temporary(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.name.endswith("vardass-tmp"))


# --- each command ---


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two files of embeddings, and the record of a sweep."""
    folder = tmp_path_factory.mktemp("made")
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(folder / "a.npz", x=x, labels=np.array(["cat", "dog"])[np.arange(40) % 2])
    np.savez(folder / "b.npz", x=x + 1, labels=np.array(["cat", "dog"])[np.arange(40) % 2])
    short = ("--steps", 2, "--batch-size", 4, "--device", "cpu", "--algorithm", "erm", "--sampler", "uniform")
    files = "--source", folder / "a.npz", "--target", folder / "b.npz"
    assert command("adapt", *files, "--out", folder / "run", *short) == 0
    (folder / "sweep").mkdir()
    spec = RunSpec("watch", "left-A->right-B", "d", {"algorithm": "erm"}, {"algorithm": "erm", "sampler": "uniform"})
    record = Record(spec, "finished", {"target_accuracy": 0.5, "score": 1.0}, [{"step": 10}], {"training": 1.0}, 2.0)
    (folder / "sweep/records.jsonl").write_text(record.to_json() + "\n")
    (folder / "watch.yaml").write_text(
        "data: [{dataset: watch, tasks: [left-A->right-B]}]\nalgorithms: [erm]\nsamplers: [uniform]\n"
    )
    return folder


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


COMMANDS = {
    "export": ("export run --out out/m.pt2", "m.pt2 m.json"),
    "export .PT2 by another way": ("export run --out out/../out/m.pt2", "m.json"),
    "predict": ("predict run b.npz --out out/p.csv", "p.csv"),
    "predict in capitals": ("predict run b.npz --out out/P.CSV", "P.CSV"),
    "evaluate": ("evaluate run b.npz --out out", "evaluation.json samples.csv evaluation.png evaluation.svg"),
    "coreset": ("coreset a.npz --size 3 --out out/c.csv", "c.csv"),
    "coreset of arrays": ("coreset a.npz --size 3 --out out/c.npz", "c.npz"),
    "stratify": ("stratify a.npz --k 3 --out out/s.npz", "s.npz"),
    "doctor": ("doctor a.npz b.npz --warm-up 0 --rows 20 --out out", "doctor.json doctor.png doctor.svg"),
    "tables": ("tables sweep --out out/t.md", "t.md"),
    "report": ("report run --out out/r.html", "r.html"),
    "adapt": ("adapt --source a.npz --target b.npz --out out", "config.json data.json metrics.jsonl report.md"),
    "adapt, lock": ("adapt --source a.npz --target b.npz --steps 2 --out out", "lock holder.json"),
    "sweep": ("sweep watch.yaml --set steps=2 --out out", "sweep.yaml plan.json lock holder.json"),
    "figure": ("figure 1 --quick --out out", "figure1.png figure1.svg figure1.csv figure1.md figure1.json"),
}


@pytest.mark.parametrize(("line", "names"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_replaces_no_file_of_a_user(
    line: str, names: str, made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    for name in names.split():
        out = made / "out"
        out.mkdir()
        (out / name).write_text('{"mine": true}\n')
        before = snapshot(made)
        assert command(*line.split()) == 2, name
        said = capsys.readouterr().err
        assert name in said
        assert len(said) <= 401
        after = snapshot(made)
        assert {path: after.get(path) for path in before} == before
        for path in out.rglob("*"):
            if path.is_file():
                path.unlink()
        for path in sorted((path for path in out.rglob("*")), reverse=True):
            path.rmdir()
        out.rmdir()


@pytest.mark.parametrize(
    "line",
    [
        "export run --out run/config.pt2",
        "export run --out run/data.pt2",
        "tables sweep --out sweep/records.jsonl",
        "report sweep --out sweep/records.jsonl",
        "report run --out run/model.safetensors",
        "report run --out run/../run/checkpoint.pt",
        "predict run b.npz --out run/../run/predictions.csv",
        "coreset b.npz --size 3 --out a.npz",
    ],
)
def test_files_of_runs_and_sweeps_are_no_outputs_of_other_commands(
    line: str, made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    before = snapshot(made)
    assert command(*line.split()) == 2
    assert snapshot(made) == before


def test_outputs_of_a_command_are_replaced_by_the_same_command(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    for name in ("predict", "coreset", "coreset of arrays", "stratify", "tables", "report", "evaluate"):
        line = COMMANDS[name][0].replace("out/", f"{tmp_path}/").replace("--out out", f"--out {tmp_path}")
        for _ in range(2):
            assert command(*line.split()) == 0, capsys.readouterr().err
    (tmp_path / "c.csv").write_text((tmp_path / "c.csv").read_text().replace("\n", ",by hand\n"))
    assert command(*COMMANDS["coreset"][0].replace("out/", f"{tmp_path}/").split()) == 2
    assert "by hand" in (tmp_path / "c.csv").read_text()
