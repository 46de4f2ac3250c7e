"""Commands and programs on the pages run as they are printed, on tiny data under the names that the pages use."""

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset
from typer.main import get_command

from vardass import processes
from vardass.adapt import Trainer
from vardass.cli import main
from vardass.cli.adapt import recommended_for
from vardass.cli.app import app
from vardass.lab.spec import load_sweep
from vardass.samplers import StratifiedBatchSampler

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROWS, WIDTH = 100, 6
CLASSES = ("cat", "dog")

# not run, but their options are checked: what they need is not here, or takes long and is tested elsewhere
NOT_RUN = {
    "--engine ray": "a Ray cluster",
    "RAY_ADDRESS": "a Ray cluster",
    "torchrun": "several processes",
    "--devices 2": "several processes",
    "resnet18": "a download",
    "facebook/dinov2-small": "a download",
    "vardass figure": "minutes",
    "--out rows.csv": "a person labels these rows; test_target_labels",
    "--target-labels": "a person labels these rows; test_target_labels",
}
# pieces of another program, or for several processes: parsed by test_docs
PIECES = {
    "recipes/domainbed.md": "pieces of DomainBed's train.py",
    "recipes/lightning.md": "a piece of the program above it",
    "recipes/several-gpus.md": "several processes",
    "recipes/sklearn.md": "needs skada",
    "scale.md": "processes of its own, and a process group",
}
BEFORE = {  # what a page takes for granted
    "doctor.md": ["vardass adapt --source source.npz --target target.npz --out run"],
    "recipes/export.md": ["vardass adapt --source photos --target sketches --out run"],
}


def blocks(page):
    """Language and text of each block of code."""
    for found in re.finditer(r"^( *)```([^\n`]*)\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL):
        language = "python" if "python" in found[2] else found[2].strip(" {}").partition(" ")[0]
        yield language, re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)


def commands(page):
    """Commands of vardass in blocks, whole: without comments, and each by itself."""
    text = "\n".join(text for language, text in blocks(page) if language != "python")
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.sub(r"\s+# .*$", "", line).split(" && "):
            if re.match(r"\s*(\w+=\S+ |torchrun .*-m )?vardass [a-z]", part):
                yield part.strip()


def is_pattern(command):
    """Whether it stands for many: words in capitals, or dots."""
    return "..." in command or any(re.fullmatch(r"[A-Z_]{3,}|.*=DIR|<.*>", word) for word in shlex.split(command)[1:])


def relative(page):
    return page.relative_to(ROOT / "docs").as_posix() if page.is_relative_to(ROOT / "docs") else page.name


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with everything that the pages name."""
    folder, draw = tmp_path_factory.mktemp("pages"), np.random.default_rng(0)

    def vectors(shift=0.0):
        labels = np.arange(ROWS) % 2
        return (draw.normal(size=(ROWS, WIDTH)) + 2 * labels[:, None] + shift).astype(np.float32), labels

    def table(name, label):
        x, labels = vectors()
        lines = [",".join([*(f"f{i}" for i in range(WIDTH)), label])]
        lines += [",".join(f"{v:.4f}" for v in (*row, y + 0.01 * i)) for i, (row, y) in enumerate(zip(x, labels))]
        (folder / name).write_text("\n".join(lines) + "\n")

    (folder / "embeddings").mkdir()
    for i, name in enumerate(
        ("a", "b", "c", "source", "target", "embeddings/clinic", "embeddings/lab", "embeddings/home")
    ):
        x, labels = vectors(0.3 * i)
        np.savez(folder / f"{name}.npz", x=x, labels=np.array(CLASSES)[labels])
        np.save(folder / f"{name}.npy", x) if i < 3 else None
    photo, sketch = vectors(), vectors(0.5)
    np.savez(folder / "pacs.npz", feat_photo=photo[0], y_photo=photo[1], feat_sketch=sketch[0], y_sketch=sketch[1])
    for name, label in (("a", "price"), ("b", "price"), ("clinic", "dose"), ("home", "dose"), ("more", "dose")):
        table(f"{name}.csv", label)
    np.save(folder / "embeddings.npy", vectors()[0].repeat(2, 0) + draw.normal(size=(2 * ROWS, WIDTH)).astype("f4"))
    _parquet(folder, draw)
    for name in ("photos", "sketches", "more_sketches", "labelled_sketches"):
        for i in range(ROWS):
            place = folder / name / CLASSES[i % 2] / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(place)
    shutil.copy(place, folder / "new.png")
    _sounds(folder, draw)
    _backbone(folder / "models/resnet-18")
    small = "algorithms: [mmd]\nsamplers: [uniform]\nrepeats: 1\nsettings: {steps: 2}\n"
    (folder / "my_sweep.yaml").write_text(small + "data: [{dataset: watch, tasks: [left-A->right-B]}]\n")
    return folder


def _parquet(folder, draw):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("features/0", "features/1", "a/0", "a/1", "b/0", "b/1"):
        (folder / name).parent.mkdir(exist_ok=True)
        columns = {f"f{i}": draw.normal(size=150) for i in range(3)}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")


def _sounds(folder, draw):
    audio = pytest.importorskip("soundfile")
    for name in (
        "hydrophone_a",
        "hydrophone_b",
        "new_recordings",
        "recordings/hydrophone_a",
        "recordings/hydrophone_b",
    ):
        for i in range(ROWS):
            place = folder / name / ("call", "noise")[i % 2] / f"{i}.wav"
            place.parent.mkdir(parents=True, exist_ok=True)
            audio.write(place, draw.normal(size=4000).astype("f4") / 9, 16_000)


def _backbone(folder):
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    transformers.ResNetModel(transformers.ResNetConfig(**sizes)).save_pretrained(folder)


def given(page):
    """What the programs of a page take for granted: data and networks, but no import."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def samplers():
        return [StratifiedBatchSampler(64, 32, seed=i) for i in range(2)]

    x, y = normal(64, WIDTH), torch.arange(64) % 2
    names = {
        "data": TensorDataset(x, y),
        "source_data": TensorDataset(x, y),
        "target_data": TensorDataset(x),
        "steps": 2,
        "featuriser": nn.Linear(WIDTH, 3),
        "network": nn.Linear(WIDTH, 3),
        "features": x,
        "target_features": x,
        "labels": y,
        "z": normal(200, 3),
        "z_s": normal(32, 3),
        "z_t": normal(32, 3),
        "z_source": normal(200, 3).numpy(),
        "z_target": normal(200, 3).numpy(),
        "y_source": np.array(CLASSES).repeat(100),
        "task": torch.tensor(0.5),
        "lam": 1.0,
        "w_t": None,
    }
    if page == "samplers/stream.md":
        names |= {"task": lambda z, y: z.mean(), "source_loader": [(x, y)] * 2, "target_loader": [x] * 2}
    if page == "samplers/balanced.md":
        names |= {"x": normal(400, 3), "treated": torch.arange(400) % 2}
        names |= {"cells": normal(2048, 3), "perturbation": torch.arange(2048) % 4}
    if page == "samplers/paired.md":
        names |= {"source_data": x, "target_data": x, "z_s": x, "z_t": x}
    if page == "samplers/class-alignment.md":
        source, target = samplers()
        names |= {"source_sampler": source, "target_sampler": target, "source_labels": y, "z_s": x, "z_t": x}
        names["target_logits"] = nn.functional.one_hot(y, 2).float()
    if page == "recipes/export.md":
        names["x"] = torch.rand(2, 3, 32, 32)
    if page == "recipes/resume.md":
        names |= {"model": nn.Linear(2, 2), "samplers": samplers(), "banks": [], "step": 3}
        names["optimiser"] = torch.optim.Adam(names["model"].parameters())
        states = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        names["refresher"] = states
    return names


@pytest.fixture
def _quick(monkeypatch):
    """Two steps for each run, one process."""
    torch.set_num_threads(1)

    def short(config, *parts, **options):
        return Trainer(config.changed(steps=min(2, config.steps)), *parts, **options)

    def quick(*name, settings=None, **options):
        return load_sweep(*name, **{**options, "repeats": 1}, settings={**(settings or {}), "steps": 2})

    def recommended(task, settings, out, *, resume):
        return recommended_for(task, {**settings, "steps": 2}, out, resume=resume)

    monkeypatch.setattr("vardass.cli.adapt.Trainer", short)
    monkeypatch.setattr("vardass.cli.adapt.recommended_for", recommended)
    monkeypatch.setattr("vardass.cli.adapt.seconds_needed", lambda config, splits: 0.0)
    monkeypatch.setattr("vardass.adapt.Trainer", short)
    monkeypatch.setattr("vardass.lab.spec.load_sweep", quick)
    monkeypatch.setattr("vardass.lab.spec.Sweep.runs", lambda sweep: sweep._runs[:2])
    for module in ("vardass.processes", "vardass.cli.lab", "vardass.lab.sweep"):
        monkeypatch.setattr(f"{module}.count_cpus", lambda: 1, raising=False)
    assert processes.count_cpus() == 1


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page)) or any(blocks(page))], ids=relative)
def test_what_a_page_shows_runs(page, data, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "here"
    shutil.copytree(data, folder, symlinks=True)
    monkeypatch.chdir(folder)
    name, known = relative(page), get_command(app).commands
    done = set()
    for command in [*BEFORE.get(name, ()), *commands(page)]:
        if command in done or is_pattern(command):
            continue
        done.add(command)
        words = shlex.split(command[command.index("vardass") :].replace("--workers 8", "--workers 1"))[1:]
        assert words[0] in known, command
        if any(mark in command for mark in NOT_RUN):
            known[words[0]].make_context(words[0], words[1:])
            continue
        if "--resume" in words:
            assert main(words) == 0
            continue
        for flag in ("--out",):  # a page may write to one folder in two examples
            if flag in words:
                out = Path(words[words.index(flag) + 1])
                shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        code = main(words)
        assert code == 0, f"{command}: {capsys.readouterr().err}"
    space = {**given(name), "__name__": name}
    for language, text in blocks(page):
        needs_onnx = "torch.onnx" in text and find_spec("onnxscript") is None
        if language == "python" and "--8<--" not in text and name not in PIECES and not needs_onnx:
            exec(compile(text, name, "exec"), space)


def test_options_in_the_text_are_those_of_their_commands():
    known, found = get_command(app).commands, 0
    for page in PAGES:
        for command in re.findall(r"(?<!`)`vardass ([a-z]+ [^`]*)`(?!`)", page.read_text()):
            name, *words = command.split()
            flags = {flag for parameter in known[name].params for flag in (*parameter.opts, *parameter.secondary_opts)}
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= flags, (
                f"{page.name}: {command}"
            )
            found += 1
    assert found > 20


def test_recipes_stand_alone():
    """A page with a program that imports one beside it shows that one too; all names come from somewhere."""
    for page in sorted((ROOT / "docs/recipes").glob("*.md")):
        shown = re.findall(r'--8<-- "(examples/integrations/\w+\.py)', page.read_text())
        for file in shown:
            if re.search(r"^from watch import", (ROOT / file).read_text(), re.MULTILINE):
                assert "examples/integrations/watch.py" in shown, f"{page.name} shows {file} without watch.py"


def test_every_exception_is_needed():
    texts = "\n".join(command for page in PAGES for command in commands(page))
    assert [mark for mark in NOT_RUN if mark not in texts] == []
    assert [page for page in (*PIECES, *BEFORE) if not (ROOT / "docs" / page).is_file()] == []
    assert sum(1 for page in PAGES for _ in commands(page)) > 45
