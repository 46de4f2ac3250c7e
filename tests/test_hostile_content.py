"""Files from strangers: marks that hide rows, names that are formulas or escapes, backbones that name a hub."""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import refused
from model_files import change_model
from vardass.adapt import load_model
from vardass.adapt.pretrained import BACKBONES, backbone_from_config
from vardass.cli import main, terminal
from vardass.data.embedding_files import open_embeddings, read_embeddings
from vardass.errors import InputError, VardassWarning
from vardass.files import write_text
from vardass.table import csv_text, plain_text
from vardass.validate import as_features, as_weights

# --- tables ---

ROWS = ["1,2,a", "3,4,b", "5,6,c", "7,8,d"]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_no_quotation_marks_hide_a_row(tmp_path: Path, ending: str, delimiter: str) -> None:
    content = ending.join(["x,y,labels", *ROWS, ""]).replace(",", delimiter)
    places = range(len(content)) if (ending, delimiter) == ("\n", ",") else range(0, len(content), 3)
    for count in (1, 2):
        for marks in itertools.combinations(places, count):
            text = content
            for place in reversed(marks):
                text = text[:place] + '"' + text[place:]
            (tmp_path / "t.csv").write_bytes(text.encode())
            with suppress(InputError):
                assert len(read_embeddings(tmp_path / "t.csv", leave_out=["labels"])) == len(ROWS), text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('x,y,note\n1,2,"two\nlines"\n3,4,"she said ""no, no""\r\nand left"\n', 2),
        ('note,x,y\n"two\n\nlines",1,2\n"",3,4\n', 2),
        ('"x","y"\n"1","2"\n"3","4"\n', 2),
        ('x,y,note\n1,2,5" pipe\n3,4,6" pipe\n', 2),
    ],
)
def test_quotation_marks_in_their_place_are_read(tmp_path: Path, content: str, expected: int) -> None:
    (tmp_path / "t.csv").write_text(content)
    assert len(read_embeddings(tmp_path / "t.csv", columns="x,y")) == expected


def test_parquet_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], ["a", "a"]), tmp_path / "t.parquet")
    with refused("'a'", tmp_path / "t.parquet"), open_embeddings(tmp_path / "t.parquet"):
        pass


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "fuzzed").iterdir()), ids=lambda path: path.name)
def test_what_fuzzers_found_is_refused_in_one_message(path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_embeddings(path, leave_out=["labels"])
    assert len(str(caught.value)) <= 400


FLOAT8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_converted(dtype: torch.dtype) -> None:
    x = torch.ones(4, 2).to(dtype)
    assert as_features(x).dtype == torch.float32
    assert as_weights(x[:, 0].float() / 4, 4, x.float()) is not None


# --- messages and names ---


@pytest.mark.parametrize("kind", [InputError, VardassWarning])
def test_no_message_is_longer_than_400_characters(kind: type[Exception]) -> None:
    message = str(kind("the cell is " + 9000 * "x" + "; correct it"))
    assert len(message) <= 400
    assert message.startswith("the cell is x")
    assert message.endswith("; correct it")


def test_commands_quote_no_more_than_that(capsys: pytest.CaptureFixture[str]) -> None:
    long = 9000 * "x"
    for arguments in (["compare", long, "b"], [long], ["figure", long], ["compare", "a", "b", long]):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err) <= 401


NAMES = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1)",
    "\t=1",
    "\r=1",
    " =1",
    "a\r\n=1",
    "\x1b[31mred",
    "\x9b2J",
    "a\udcff",
    "\u202eabc",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_in_outputs_are_neither_formulas_nor_escapes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "t.csv", csv_text(["sample", name], [[name, 1.5], [np.str_(name), -2]]))
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 3
    terminal.note(name)
    terminal.print_lines(name)
    terminal.print_line(terminal.Console(), name)
    main(["doctor", name, name])
    said = capsys.readouterr()
    for text in [*itertools.chain(*rows), plain_text(name), *said.out.split("\n"), *said.err.split("\n")]:
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text)
        assert "\u202e" not in text
    for text in itertools.chain(*rows):
        assert text == "-2" or not text.startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("number", ["-1", "+2.5", "-1e-05", "-.5", "-3 ± 0.1"])
def test_numbers_are_no_formulas(number: str) -> None:
    assert csv_text([], [[number]]).split("\n")[1] == number


# --- models ---


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was tried")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
VIT |= {"intermediate_size": 8, "image_size": 8, "patch_size": 4}


def build(config: Any) -> Any:
    weights = {str(number): torch.zeros(500) for number in range(20)}
    return backbone_from_config({"library": "transformers", "config": config}, weights)


@pytest.mark.parametrize(
    "kind", ["detr", "maskformer", "dpt", "upernet", "timm_backbone", "timm_wrapper", "vilt", "zoedepth"]
)
def test_types_that_load_other_models_are_refused(offline: None, kind: str) -> None:
    pytest.importorskip("transformers")
    for extra in ({"backbone": "evil/resnet"}, {"backbone": "evil/resnet", "use_timm_backbone": True}, {}):
        with refused(kind):
            build({"model_type": kind, "use_pretrained_backbone": True, **extra})


def test_known_types_are_built_without_a_network_whatever_names_a_hub(offline: None) -> None:
    transformers = pytest.importorskip("transformers")
    names = {"backbone": "evil/x", "backbone_config": {"model_type": "detr"}, "_name_or_path": "evil/x"}
    names |= {"use_timm_backbone": True, "quantization_config": {"quant_method": "bitsandbytes"}}
    assert type(build({**VIT, **names}).model) is transformers.ViTModel
    for kind in BACKBONES:
        config = transformers.AutoConfig.for_model(kind)
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config)
        assert "load_backbone" not in Path(inspect.getfile(type(model))).read_text()


@pytest.mark.parametrize("value", [None, -1, 0, 10**18, 1e300, "x", [], [1, 2], {}, {"a": 1}, True])
def test_damaged_descriptions_of_backbones_are_refused_or_built(value: Any) -> None:
    pytest.importorskip("transformers")
    for name in (*VIT, "hidden_act", "num_channels", "initializer_range", "dtype", "layer_norm_eps", "num_labels"):
        with suppress(InputError):
            build({**VIT, name: value})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    for name in "ab":
        np.savez(folder / f"{name}.npz", x=x, labels=np.array(["cat", "dog"])[np.arange(40) % 2])
    files = "--source", folder / "a.npz", "--target", folder / "b.npz", "--out", folder / "run"
    short = ("--steps", 2, "--batch-size", 4, "--device", "cpu", "--algorithm", "erm", "--sampler", "uniform")
    assert main(["adapt", *map(str, (*files, *short))]) == 0
    return folder


def test_a_model_that_names_a_hub_without_describing_its_backbone_is_refused(
    trained: Path, tmp_path: Path, offline: None
) -> None:
    for name in ("evil/resnet", "resnet18", str(tmp_path)):
        shutil.copytree(trained / "run", tmp_path / "run", dirs_exist_ok=True)
        with refused(name):
            load_model(change_model(tmp_path / "run", lambda about, _, name=name: about["config"].update(network=name)))


@pytest.mark.parametrize("value", [None, -1, "x", {"a": 1}])
def test_a_damaged_data_file_is_named(
    value: Any, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    about = json.loads((tmp_path / "run/data.json").read_text())
    for name in about:
        changes = [{**about, name: value}, {key: entry for key, entry in about.items() if key != name}]
        for change in changes[: 1 if value is not None else 2]:
            (tmp_path / "run/data.json").write_text(json.dumps(change))
            assert main(["evaluate", str(tmp_path / "run")]) in (0, 2)
            said = capsys.readouterr().err
            assert len(said) <= 401
            assert said.count("\n") <= 1


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_model_with_float8_weights_loads(dtype: torch.dtype, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")

    def change(_: Any, weights: dict[str, Any]) -> None:
        weights.update({name: tensor.to(dtype) for name, tensor in weights.items() if tensor.is_floating_point()})

    load_model(change_model(tmp_path / "run", change))


def test_files_whose_names_are_not_utf8_keep_their_predictions(tmp_path: Path) -> None:
    text = csv_text(["sample"], [["\udcff.png"], ["é"]])
    write_text(tmp_path / "p.csv", text + "\udcfe")
    assert (tmp_path / "p.csv").read_text(encoding="utf-8") == "sample\n\\udcff.png\né\n\\udcfe"
