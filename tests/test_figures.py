"""All figures: the same numbers again, their files, the command, and one thread only meanwhile."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pandas as pd
import pytest
import torch

from conftest import refused
from quick_figures import quick, select
from vardass import __version__
from vardass.paper import figures
from vardass.paper.figures import NUMBERS, Claim, FigureResult, draw_figure, make_figure, write_figure


def without_seconds(result: FigureResult) -> pd.DataFrame:
    return result.numbers.drop(columns="seconds", errors="ignore")


@pytest.mark.parametrize("number", NUMBERS)
def test_the_same_seed_gives_the_same_figure_and_leaves_the_global_random_state_alone(number: int) -> None:
    first = quick(number)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    shares: list[float] = []
    again = make_figure(number, quick=True, progress=lambda share, message: shares.append(share))
    assert torch.equal(torch.get_rng_state(), state)
    assert without_seconds(again).equals(without_seconds(first))
    held = [[claim.statement for claim in result.claims] for result in (again, first)]  # what they measure has seconds
    assert held[0] == held[1]
    assert shares == sorted(shares)
    assert 0.0 <= shares[0] < shares[-1] <= 1.0


@pytest.mark.parametrize("number", [2, 4])
def test_another_seed_gives_other_numbers(number: int) -> None:
    assert not without_seconds(make_figure(number, quick=True, seed=1)).equals(without_seconds(quick(number)))


@pytest.mark.parametrize("number", NUMBERS)
def test_files_are_whole_and_the_same_again(number: int, tmp_path: Path) -> None:
    result = quick(number)
    written = write_figure(result, tmp_path / "one", provenance={"command": "vardass figure"})
    assert [path.name for path in written] == [f"figure{number}.{e}" for e in ("png", "svg", "csv", "md", "json")]
    png, svg, table, text, record = (path.read_bytes() for path in written)
    again = [path.read_bytes() for path in write_figure(result, tmp_path / "two")]
    assert again[1:4] == [svg, table, text]
    assert b"<dc:date>" not in svg
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert (width, height) == tuple(round(150 * inches) for inches in result.size)
    assert 20_000 < len(png) < 1_000_000
    rows = list(csv.reader(io.StringIO(table.decode())))
    assert rows[0] == list(result.numbers.columns)
    assert len(rows) == 1 + len(result.numbers)
    assert all(line in text.decode() for line in (result.caption, *map(str, result.claims)))
    details = json.loads(record)
    assert details["versions"]["vardass"] == __version__
    assert "commit" in details["versions"]
    assert details["settings"]["seed"] == 0
    assert details["command"] == "vardass figure"
    assert [claim["held"] for claim in details["claims"]] == [claim.held for claim in result.claims]


@pytest.mark.parametrize(("number", "column", "panels"), [(4, "method", 3), (5, "batches", 3)])
def test_every_curve_is_in_a_legend(number: int, column: str, panels: int) -> None:
    result = quick(number)
    drawn = draw_figure(result)
    assert len(drawn.axes) == panels
    names = {row[column] for row in select(result)} - {"lower bound"}
    legends = [*drawn.legends, *(axes.get_legend() for axes in drawn.axes)]
    assert {text.get_text() for legend in legends if legend is not None for text in legend.get_texts()} == names


def test_the_number_of_threads_is_the_users_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, result = [], quick(2)

    def stub(**options: object) -> FigureResult:
        inside.append(torch.get_num_threads())
        if options["seed"] == 1:
            raise RuntimeError("stopped")
        return result

    monkeypatch.setattr(figures, "_FIGURES", {"2": stub})
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        make_figure(2)
        assert torch.get_num_threads() == 3
        with pytest.raises(RuntimeError, match="stopped"):
            make_figure(2, seed=1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert inside == [1, 1]


def test_a_verdict_is_part_of_the_words() -> None:
    assert str(Claim("a is b", True, "1 = 1")) == "Held: a is b. Measured: 1 = 1."
    assert str(Claim("a is b", None, "1 = n")) == "Cannot be told: a is b. Measured: 1 = n."
    assert str(Claim("a is b", False, "1 < 2", source="ours")).startswith("Did not hold, not of the paper: a is b.")


@pytest.mark.parametrize("number", NUMBERS)
def test_only_what_the_paper_says_is_listed_as_the_papers(number: int) -> None:
    said = {  # words of the paper's text on each figure
        1: ("covariances",),
        2: ("near-monotonic",),
        3: ("poor solution", "average solution", "improves the best", "integer solutions", "local minimum"),
        4: ("gap between", "linear k-means for small k", "overlap", "50-fold"),
        5: ("less frequently", "become worse over time", "strongest towards the start", "increasing schedule"),
    }[number]
    result = quick(number)
    whole = result.to_markdown()
    papers, _, ours = whole.partition("What we found besides:")
    for claim in result.claims:
        assert (str(claim) in papers) == (claim.source == "paper") == any(word in claim.statement for word in said)
        assert (str(claim) in ours) == (claim.source == "ours")


def test_bad_figures_are_refused(tmp_path: Path) -> None:
    with refused(6, "1, 2, 3, 4, 5"):
        make_figure(6)
    with refused(-1, 0, field="seed"):
        make_figure(1, seed=-1)
    taken = tmp_path / "file"
    taken.write_text("")
    with refused(taken / "folder", "Not a directory", "--out"):
        write_figure(quick(1), taken / "folder")


def test_the_command_writes_files_and_says_what_they_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vardass.cli.lab import figure

    figure("2", out=tmp_path / "out", seed=3, quick=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Figure 2: ")
    assert make_figure(2, seed=3, quick=True).text() in printed
    assert str(tmp_path / "out" / "figure2.csv") in printed
    record = json.loads((tmp_path / "out" / "figure2.json").read_text())
    assert record["command"].endswith("--seed 3 --quick")
    assert record["seconds"] > 0
    for bad in ("0", "6", "one", "1.0"):
        with refused(repr(bad), "1, 2, 3, 4, 5, all"):
            figure(bad, out=tmp_path)
