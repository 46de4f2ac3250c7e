import builtins
import json
import os
import pty
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from vardass.cli import main
from vardass.cli.app import app, in_options
from vardass.errors import VardassWarning
from vardass.lab.sweep import SweepResult
from vardass.strata import Strata

N, D = 300, 4


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def embeddings(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(N, D)).astype(np.float32) + 4.0 * generator.integers(0, 3, size=(N, 1))
    np.save(tmp_path / "z.npy", x)
    return tmp_path / "z.npy"


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, folder, *arguments):
    """Run a command that must fail: code 2, one line on stderr, no file made or changed."""
    before = snapshot(folder)
    code, out, err = run(capsys, *arguments)
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert snapshot(folder) == before
    return err


def snapshot(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# good input


def test_stratify_writes_strata_and_reports(embeddings, capsys):
    code, out, err = run(capsys, "stratify", embeddings, "--k", 8)
    assert code == 0
    assert err == ""
    strata = Strata.load(embeddings.with_name("z.strata.npz"))
    assert (strata.n, strata.k) == (N, 8)
    assert strata.bound is not None
    for part in (
        "300 samples",
        "4 features",
        "8 strata",
        "min-sum",
        "uniform",
        "lower bound",
        "median",
        "seconds",
    ):
        assert part in out
    assert f"{strata.reduction:.3g} times less variance" in out
    assert f"{100 * (N - 8) / (N - 1):.1f} %" in out  # uniform without replacement
    assert "z.strata.npz" in out


def test_json_is_the_only_output_and_agrees_with_the_file(embeddings, tmp_path, capsys):
    target = tmp_path / "s.npz"
    code, out, _ = run(
        capsys, "stratify", embeddings, "-k", 8, "--out", target, "--json", "--kernel", "coral", "--seed", 3
    )
    assert code == 0
    record = json.loads(out)
    strata = Strata.load(target)
    assert out.count("\n") == 1
    assert record["variance"] == strata.variance
    assert record["uniform_variance"] == strata.uniform_variance
    assert record["relative_variance"] == pytest.approx(strata.variance / strata.uniform_variance)
    assert record["bound"] == strata.bound.variance
    assert record["bound"] <= record["variance"] * (1 + 1e-9)
    assert record["without_replacement"] == pytest.approx((N - 8) / (N - 1))
    assert record["min_size"] <= record["median_size"] <= record["max_size"]
    assert (record["n"], record["d"], record["k"]) == (N, D, 8)
    assert {"read", "solve", "bound"} <= set(record["seconds"])
    assert record["out"] == str(target)


def test_same_seed_same_strata_whatever_the_format(embeddings, tmp_path, capsys):
    x = np.load(embeddings)
    np.savez(tmp_path / "a.npz", z=x, other=x[:, :2])
    np.savetxt(
        tmp_path / "b.csv",
        np.c_[np.arange(N), x],
        fmt="%.9g",
        delimiter=",",
        header="id,f0,f1,f2,f3",
        comments="",
    )
    labels = []
    for arguments in (
        [embeddings],
        [tmp_path / "a.npz", "--key", "z"],
        [tmp_path / "b.csv", "--columns", "f*"],
    ):
        assert run(capsys, "stratify", *arguments, "-k", 5, "--out", tmp_path / "s.npz", "--no-bound")[0] == 0
        labels.append(Strata.load(tmp_path / "s.npz").labels)
    assert torch.equal(labels[0], labels[1])
    assert torch.equal(labels[0], labels[2])


def test_options_reach_the_solver(embeddings, tmp_path, capsys):
    target = tmp_path / "s.npz"

    def strata(*options):
        code, _, err = run(capsys, "stratify", embeddings, "-k", 6, "--out", target, *options)
        assert code == 0, err
        return Strata.load(target)

    assert strata("--equal").sizes.unique().tolist() == [50]
    limited = strata("--min-size", 30, "--max-size", 70, "--no-bound")
    assert int(limited.sizes.min()) >= 30
    assert int(limited.sizes.max()) <= 70
    assert limited.bound is None
    scaled = strata("--kernel", "rbf", "--scale", "median", "--gammas", "0.5,2")
    assert "gammas=(0.5, 2.0)" in scaled.kernel
    assert "median" in scaled.kernel
    assert strata("--solver", "dynamic-kmeans").solver == "dynamic-kmeans"
    assert strata("--rank", 16, "--kernel", "rbf").info["rank"] <= 16


def test_warm_start_is_never_worse(embeddings, tmp_path, capsys):
    target = tmp_path / "s.npz"
    assert run(capsys, "stratify", embeddings, "-k", 6, "--out", target)[0] == 0
    first = Strata.load(target)
    # the older result is replaced by the new one
    assert run(capsys, "stratify", embeddings, "-k", 6, "--out", target, "--warm-start", target)[0] == 0
    assert Strata.load(target).variance <= first.variance * (1 + 1e-6)


def test_more_strata_than_distinct_points_still_gives_json(tmp_path, capsys):
    np.save(tmp_path / "same.npy", np.arange(10, dtype=np.float32)[:, None] % 3)
    code, out, err = run(capsys, "stratify", tmp_path / "same.npy", "-k", 4, "--json")
    assert code == 0, err
    record = json.loads(out, parse_constant=pytest.fail)
    assert record["variance"] == pytest.approx(0.0, abs=1e-6)


def test_report_says_how_to_avoid_singletons(tmp_path, capsys):
    x = np.r_[np.random.default_rng(0).normal(size=(50, 2)), [[90.0, 0.0]], [[0.0, 90.0]]].astype(np.float32)
    np.save(tmp_path / "z.npy", x)
    assert "--min-size 2" in run(capsys, "stratify", tmp_path / "z.npy", "-k", 5, "--kernel", "linear")[1]


def test_help_and_version_by_runner():
    runner = CliRunner()
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.split()[0] == "vardass"
    result = runner.invoke(app, ["stratify", "--help-all"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--warm-start" in result.output


@pytest.mark.parametrize("command", ["", *get_command(app).commands])
def test_help_fits_on_a_screen_and_names_no_paper_and_help_all_has_the_rest(command):
    def lines(option, columns=80):
        result = CliRunner().invoke(app, [*command.split(), option], env={"COLUMNS": f"{columns}"})
        assert result.exit_code == 0
        return result.output.splitlines()

    shown = lines("--help")
    assert len(shown) <= 60
    assert max(map(len, shown)) <= 80
    if command in ("adapt", "train"):
        assert "paper" not in " ".join(shown)
    if not any("--help-all" in line for line in shown):
        return
    text = " ".join(lines("--help-all", columns=160))
    for parameter in get_command(app).commands[command].params:
        assert parameter.param_type_name == "argument" or parameter.opts[0] in text
    assert len(lines("--help-all")) > len(shown)


def test_commands_are_in_groups_in_the_help():
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    places = [text.index(f"─ {group} ─") for group in ("Your data", "Your loop", "Comparing methods", "The paper")]
    assert places == sorted(places)
    assert places[0] < text.index("adapt  ") < places[1] < text.index("stratify  ") < places[2]


@pytest.mark.parametrize(
    ("message", "field", "told"),
    [
        ("batches of 9 are too large; lower batch_size", None, "batches of 9 are too large; lower --batch-size"),
        ("steps must be at least 1, got 0", "steps", "--steps must be at least 1, got 0"),
        ("these steps take long", None, "these steps take long"),
        ("use class_shares='none', lr=0.1.", None, "use --class-shares none, --lr 0.1."),
        ("use regression=False or resume=True", None, "use --no-regression or --resume"),
        ("network_options freeze_backbone=True", None, "--network-option freeze_backbone=True"),
        ("unknown setting 'batch_sizes'; known: batch_size", "setting", None),
        ("--config my.yaml: batch_size must be", "batch_size", None),
        ("--option takes key=value, such as penalty=0.5", None, None),
        ("/data/batch_size/x.npz has 'batch_size'", None, None),
    ],
)
def test_messages_of_commands_name_options(message, field, told):
    assert in_options(message, "adapt", field) == (told or message)
    assert in_options(message, "no-command", field) == message


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ("--lamda 1", "--penalty"),
        ("--learning-rate 1", "--lr"),
        ("--epochs 3", "--steps"),
        ("--batchsize 3", "--batch-size"),
        ("--stepz 3", "--steps"),
        ("--set learning_rate=3", "'lr'"),
    ],
)
def test_other_words_for_an_option_get_a_suggestion(tmp_path, capsys, given, option):
    (tmp_path / "a.csv").write_text("x,labels\n1,2\n")
    files = ("--source", tmp_path / "a.csv", "--target", tmp_path / "a.csv", "--out", tmp_path / "run")
    message = refused(capsys, tmp_path, "adapt", *files, *given.split())
    assert f"did you mean {option}?" in message
    assert len(message) <= 400


def complete(capsys, monkeypatch, *arguments, **variables):
    """What the command prints to a shell that asks it for completions."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    return out


def test_shells_complete_commands_and_options(capsys, monkeypatch):
    ask = {"_VARDASS_COMPLETE": "complete_bash", "COMP_WORDS": "vardass st", "COMP_CWORD": "1"}
    assert complete(capsys, monkeypatch, **ask).split() == ["stratify", "status"]
    ask |= {"COMP_WORDS": "vardass stratify --warm", "COMP_CWORD": "2"}
    assert complete(capsys, monkeypatch, **ask).split() == ["--warm-start"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_and_installed(capsys, monkeypatch, tmp_path, shell):
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # the options then take a shell's name
    assert "_VARDASS_COMPLETE" in complete(capsys, monkeypatch, "--show-completion", shell, **named)
    assert "installed" in complete(capsys, monkeypatch, "--install-completion", shell, HOME=str(tmp_path))
    assert any("_VARDASS_COMPLETE" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_python_m_vardass(embeddings, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def call(*arguments):
        command = [sys.executable, "-m", "vardass", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)

    done = call("stratify", embeddings.name, "--k", 4, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["out"] == "z.strata.npz"
    assert done.stderr == ""
    failed = call("stratify", "none.npy", "--k", 4)
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr == "error: no file at none.npy; check the name\n"


def test_a_column_of_labels_is_no_feature(tmp_path, capsys):
    rows = "".join(f"{i},{i % 7},{i % 2}\n" for i in range(40))
    (tmp_path / "a.csv").write_text("f0,f1,labels\n" + rows)
    (tmp_path / "b.csv").write_text("f0,f1,kind\n" + rows.replace(",1\n", ",odd\n").replace(",0\n", ",even\n"))
    for name, more in (("a.csv", ()), ("b.csv", ("--labels", "kind"))):
        code, out, err = run(capsys, "stratify", tmp_path / name, "--k", 4, "--json", *more)
        assert (code, err) == (0, "")
        assert json.loads(out)["d"] == 2


# bad input


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--k", "0"], "k must be"),
        (["--k", "301"], "300"),
        (["--k", "x"], "integer, got 'x'"),
        ([], "--k"),
        (["--k", "4", "--kernel", "cosine"], "unknown kernel 'cosine'"),
        (["--k", "4", "--solver", "magic"], "unknown solver 'magic'"),
        (["--k", "4", "--kernel", "coral", "--gammas", "1"], "leave them out"),
        (["--k", "4", "--gammas", "1,b"], "'1,b'"),
        (["--k", "4", "--gammas", "-1"], "positive"),
        (["--k", "4", "--scale", "big"], "'big'"),
        (["--k", "4", "--scale", "-2"], "positive"),
        (["--k", "4", "--min-size", "76"], "76"),
        (["--k", "4", "--max-size", "74"], "74"),
        (["--k", "4", "--rank", "-1"], "rank"),
        (["--k", "4", "--key", "z"], "leave the key out"),
        (["--k", "4", "--columns", "9"], "'9'"),
        (["--k", "4", "--nonsense"], "--nonsense"),
        (["--k", "4", "extra"], "extra"),
        (["--k", "4", "--warm-start", "none.npz"], "none.npz"),
        (["--k", "4", "--out", "no/such/folder/s.npz"], "no/such/folder"),
        (["--k", "4", "--out", "s.csv"], "a name that ends with .npz"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options(embeddings, capsys, monkeypatch, arguments, part):
    monkeypatch.chdir(embeddings.parent)
    assert part in refused(capsys, embeddings.parent, "stratify", embeddings.name, *arguments)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("nonsense", "nonsense"),
        ("--nonsense", "--nonsense"),
        ("stratify", "FILE"),
        ("adapt", "--source"),
        ("adapt --source notes.txt --target notes.txt --out run", "not a file of embeddings"),
        ("adapt --source none --target none --out run --steps 1.5", "integer, got '1.5'"),
        ("adapt --source none --target none --out run --lr abc", "number, got 'abc'"),
        ("train --dataset watch --out run", "--task"),
        ("train --dataset wach --task a --out run", "'watch'"),
        ("train --dataset watch --task left-A->right-B --out run --data-option x=1", "option of data set 'watch': 'x'"),
        ("train --dataset watch --task left-A->right-B --out run --data-option standardised=maybe", "got 'maybe'"),
        ("train --dataset watch --task left-A->right-B --out run --unlabelled-fraction 2", "got 2.0"),
        ("tasks --root .", "--dataset"),
        ("predict none none", "no model at none"),
        ("predict notes.txt none", "not a whole safetensors file"),
        ("sweep", "FILE_OR_PRESET"),
        ("sweep none", "unknown preset 'none'"),
        ("sweep notes.txt --dry-run", "a mapping of keys"),
        ("sweep watch-quick", "--out is not given"),
        ("sweep watch-quick --out sweep --engine slurm", "unknown engine 'slurm'"),
        ("sweep watch-quick --out notes.txt", "is a file"),
        ("sweep watch-quick --out sweep --set stepz=3", "'steps'"),
        ("status none", "not the folder of a sweep"),
        ("tables none", "there is no none"),
        ("tables notes.txt --table 9", "unknown table '9'"),
        ("report notes.txt", "is a file"),
        ("report none", "no folder at none"),
        ("figure 9", "no figure '9'"),
        ("demo --out .", "'notes.txt'"),
    ],
)
def test_bad_commands(tmp_path, capsys, monkeypatch, command, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("my notes\n")
    assert part.lower() in refused(capsys, tmp_path, *command.split()).lower()


def bad_files(folder):
    np.save(folder / "three.npy", np.zeros((2, 3, 4)))
    np.save(folder / "text.npy", np.array([["a", "b"]]))
    np.save(folder / "objects.npy", np.array([[None]]), allow_pickle=True)
    nan = np.zeros((5, 2))
    nan[3, 1] = np.nan
    np.save(folder / "nan.npy", nan)
    np.savez(folder / "two.npz", a=nan, b=nan)
    (folder / "empty.csv").touch()
    (folder / "header.csv").write_text("a,b\n")
    (folder / "words.csv").write_text("a,b\n1,2\n3,four\n")
    (folder / "fake.npy").write_text("1,2\n")
    (folder / "fake.npz").write_text("1,2\n")
    (folder / "fake.parquet").write_text("1,2\n")
    (folder / "model.pt").write_text("1")
    (folder / "folder.npy").mkdir()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("none.npy", "no file"),
        ("three.npy", "(2, 3, 4)"),
        ("text.npy", "<U1"),
        ("objects.npy", "objects"),
        ("nan.npy", "in row 4 (row 1 = first data row)"),
        ("two.npz", "--key"),
        ("empty.csv", "empty"),
        ("header.csv", "no rows"),
        ("words.csv", "'four' in row 2 ("),
        ("fake.npy", "not a .npy"),
        ("fake.npz", "not a .npz"),
        ("fake.parquet", "not a .parquet"),
        ("model.pt", ".parquet"),
        ("folder.npy", "cannot read"),
    ],
)
def test_bad_files(tmp_path, capsys, name, part):
    bad_files(tmp_path)
    assert part in refused(capsys, tmp_path, "stratify", tmp_path / name, "--k", 2)


def test_more_strata_than_rows_are_told_by_the_option(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((30, 2), np.float32))
    message = refused(capsys, tmp_path, "stratify", tmp_path / "x.npy", "--k", 50)
    assert "--k must be between 1 and 30, got 50; " in message
    assert "batch_size" not in message
    command = ("stratify", tmp_path / "x.npy", "--k", 50, "--sample", 60, "--out", tmp_path / "parts")
    assert main([str(part) for part in command]) == 2
    assert "k must be between 1 and 30, got 50; lower --k" in capsys.readouterr().err


def test_input_and_files_of_others_are_never_overwritten(tmp_path, capsys):
    np.savez(tmp_path / "z.npz", np.random.default_rng(0).normal(size=(20, 2)))
    (tmp_path / "link.npz").symlink_to(tmp_path / "z.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.save(tmp_path / "w.npy", np.random.default_rng(0).normal(size=(20, 2)))
    for arguments, part in [
        (["z.npz", "--out", "z.npz"], "is the input file"),
        (["z.npz", "--out", "link.npz"], "is the input file"),
        (["w.npy", "--out", "other.npz"], "not as vardass stratify wrote it"),
    ]:
        paths = [a if a.startswith("--") else tmp_path / a for a in arguments]
        assert part in refused(capsys, tmp_path, "stratify", *paths, "--k", 2)


def test_warm_start_of_other_data_is_refused(embeddings, tmp_path, capsys):
    np.save(tmp_path / "other.npy", np.random.default_rng(1).normal(size=(50, 4)))
    assert run(capsys, "stratify", tmp_path / "other.npy", "-k", 4)[0] == 0
    old = tmp_path / "other.strata.npz"
    assert "n=300" in refused(capsys, tmp_path, "stratify", embeddings, "-k", 4, "--warm-start", old)
    assert "k=4" in refused(capsys, tmp_path, "stratify", embeddings, "-k", 5, "--warm-start", old)
    assert "not a strata file" in refused(capsys, tmp_path, "stratify", embeddings, "-k", 4, "--warm-start", embeddings)


# trouble on the way


def test_failure_while_saving_leaves_no_file(embeddings, tmp_path, capsys, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    err = refused(capsys, tmp_path, "stratify", embeddings, "-k", 4)
    assert "No space left" in err


def test_links_that_lead_to_each_other_are_named(embeddings, tmp_path, capsys):
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    for command in (
        ("train", "--dataset", "watch", "--task", "left-A->right-B", "--steps", 1, "--out", tmp_path / "one"),
        ("stratify", embeddings, "-k", 4, "--out", tmp_path / "one" / "strata.npz"),
        ("predict", tmp_path / "one", embeddings),
    ):
        refused(capsys, tmp_path, *command)


@pytest.mark.parametrize("module", ["torch", "typer"])
def test_ctrl_c_while_modules_are_imported(module, tmp_path):
    """They take seconds; here one of them stands for the moment of the interrupt."""
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for command in (["-m", "vardass"], ["-c", "import sys; from vardass.cli import main; sys.exit(main())"]):
        done = subprocess.run(
            [sys.executable, *command, "tasks"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def _torch_memory_error():
    return RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 160 bytes")


@pytest.mark.parametrize(("trouble", "code"), [(KeyboardInterrupt, 130), (MemoryError, 2), (_torch_memory_error, 2)])
def test_interrupts_and_lack_of_memory(embeddings, tmp_path, capsys, monkeypatch, trouble, code):
    def fail(*_, **__):
        raise trouble()

    monkeypatch.setattr("vardass.cli.stratify.make_strata", fail)
    before = snapshot(tmp_path)
    found, out, err = run(capsys, "stratify", embeddings, "-k", 4)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("error: interrupted" if code == 130 else "error: out of memory")
    assert snapshot(tmp_path) == before


def test_warnings_of_the_package_take_one_line(embeddings, capsys, monkeypatch):
    from vardass.solvers import stratify

    def warn(*arguments, **options):
        warnings.warn("careful", VardassWarning, stacklevel=2)
        return stratify(*arguments, **options)

    monkeypatch.setattr("vardass.cli.stratify.make_strata", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run(capsys, "stratify", embeddings, "-k", 4)
    assert (code, err) == (0, "warning: careful\n")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_typer_or_rich_the_extra_is_named(capsys, monkeypatch, missing):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    for name in [name for name in sys.modules if name.startswith("vardass.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    code, out, err = run(capsys, "stratify", "x.npy", "--k", 4)
    assert (code, out) == (2, "")
    assert err == f"error: the command line needs {missing}; install it with pip install 'vardass[cli]'\n"


def test_progress_is_shown_on_a_terminal_only(embeddings, tmp_path):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "vardass", "stratify", str(embeddings), "--k", "4", "--json"]
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=environment) as process:
        out = process.stdout.read()
    os.close(slave)
    shown = os.read(master, 100_000)
    os.close(master)
    assert process.returncode == 0
    assert json.loads(out)["k"] == 4
    assert b"\x1b[" in shown


# exit codes, as vardass --help lists them


def ended(**how):
    return lambda *_, **__: SweepResult(**{**dict.fromkeys(SweepResult.__dataclass_fields__, 0), "total": 3, **how})


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ({"finished": 3}, 0, "3 of 3 runs have finished"),
        ({"finished": 2, "failed": 1}, 1, "1 failed; see vardass status"),
        ({"finished": 2, "interrupted": True}, 130, "the same command resumes"),
    ],
)
def test_exit_codes_of_a_sweep(tmp_path, capsys, monkeypatch, how, code, said):
    monkeypatch.setattr("vardass.lab.sweep.run_sweep", ended(**how))
    found, out, err = run(capsys, "sweep", "watch-quick", "--out", tmp_path / "sweep")
    assert found == code
    assert said in out + err


def test_the_help_lists_the_exit_codes(capsys):
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert "Exit codes: 0 done; 1 a run of a sweep failed; 2 bad input" in " ".join(out.split())


@pytest.mark.parametrize(("command", "key"), [("adapt", "lr_schedule"), ("train", "sampler"), ("sweep", "algorithms")])
def test_schemas_for_editors_need_no_other_option(capsys, command, key):
    code, out, err = run(capsys, command, "--schema")
    assert (code, err) == (0, "")
    assert json.loads(out)["properties"][key]["description"]


# figures


def test_figures_without_matplotlib_name_the_extra(monkeypatch):
    from vardass.errors import MissingExtraError
    from vardass.plots import new_figure

    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"vardass\[plot\]"):
        new_figure(4.0, 3.0)


def test_compare_matches_columns_by_name(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(50, 3)) * [1, 5, 25]
    for name, order in (("a", [0, 1, 2]), ("turned", [2, 0, 1])):
        lines = [",".join(f"f{i}" for i in order), *(",".join(f"{row[i]:.6f}" for i in order) for row in x)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    code, out, _ = run(capsys, "compare", tmp_path / "a.csv", tmp_path / "turned.csv", "--json")
    assert code == 0
    assert all(result["p_value"] > 0.5 for result in json.loads(out)["results"])
