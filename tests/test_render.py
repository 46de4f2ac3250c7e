"""Tables as text, Markdown, LaTeX and CSV."""

import csv
import io
import itertools
import re

import pytest

from table_records import random_records, run
from vardass.lab.averages import collect
from vardass.lab.tables import TABLE_NAMES, make_tables
from vardass.table import FORMATS, Average, PValue, Table, TableRow, entry_text, render


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("table", TABLE_NAMES)
def test_all_failed_makes_every_table_in_every_format(form, table):
    text = render(
        make_tables(collect([run(0.5, status="failed"), run(0.5, status="failed", sampler="dpp")]), table), form
    )
    assert text.strip()
    assert "50.0" not in text


def test_a_table_without_records_is_one_line():
    for name in TABLE_NAMES[:-1]:
        text = render(make_tables({}, name), "text")
        assert text.count("\n") == 1
        assert ": no " in text
    assert "refresh_every" in render(make_tables(collect([run(0.5)]), "4"))


NASTY = [
    "=cmd|' /C calc'!A0",
    "@SUM(A1)",
    "+1+1",
    "-2+3",
    "a|b\\c_d*e`f",
    "{x}$y$ #1 & 50% ~^",
    "\x1b[31mred\r\n\tx",
    "[a](b)<b>",
    "\u202egnp",
]


def nasty_records():
    return [
        run(0.5 + 0.01 * i, data=name, task=task, sampler=sampler, algorithm=algorithm, grid={"refresh_every": name})
        for name in NASTY
        for i, (task, sampler, algorithm) in enumerate(
            itertools.product((name, "t"), (name, "uniform", "vardass"), (name, "mmd"))
        )
    ]


@pytest.mark.parametrize("records", [random_records(0), nasty_records()], ids=["random", "nasty"])
def test_latex_has_balanced_braces_and_equal_columns(records):
    text = render(make_tables(collect(records), "all"), "latex")
    bare = re.sub(r"\\[\\{}$&#%_]", "", text)  # without escaped marks
    depth = 0
    for character in bare:
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    assert not set("^~|<>") & set(bare)
    assert not re.search(r"[#_]", bare)
    assert "%" not in bare.split("\n", 1)[1]
    bodies = re.findall(r"\\begin\{tabular\}\{(l c*|lc*)\}(.*?)\\end\{tabular\}", text, re.S)
    assert len(bodies) == text.count("\\begin{table}") == text.count("\\end{table}") > 3
    for shape, body in bodies:
        lines = [line for line in body.strip().splitlines() if not line.endswith("rule")]
        assert len(lines) > 1
        for line in lines:
            assert line.endswith(" \\\\")
            assert len(re.findall(r"(?<!\\)&", line)) == len(shape) - 1


@pytest.mark.parametrize("records", [random_records(0), nasty_records()], ids=["random", "nasty"])
def test_csv_has_all_numbers_and_no_formulas(records):
    tables = make_tables(collect(records), "all")
    lines = list(csv.DictReader(io.StringIO(render(tables, "csv"))))
    assert len(lines) == sum(max(1, len(t.rows) * len(t.columns)) for t in tables)
    shown = iter(lines)
    for table in tables:
        for row in table.rows:
            for entry in row.entries:
                line = next(shown)
                if isinstance(entry, Average) and entry.mean is not None:
                    assert float(line["mean"]) == entry.mean
                    assert int(line["repeats"]) == entry.repeats
        if not table.rows:
            next(shown)
    for line in lines:
        assert None not in line
        for field in ("table", "row", "column", "text"):
            harmless = re.fullmatch(r"[+-][\d.]+( ± .*)?", line[field])
            assert harmless or not line[field].startswith(("=", "+", "-", "@", "\t", "\r")), line[field]


@pytest.mark.parametrize("records", [random_records(0), nasty_records()], ids=["random", "nasty"])
def test_markdown_and_text_keep_their_shape(records):
    tables = make_tables(collect(records), "all")
    for line in render(tables, "markdown").splitlines():
        assert "<b>" not in line
        assert not re.search(r"(?<!\\)`", line)
    blocks = [block for block in render(tables, "markdown").split("\n\n") if block.startswith("|")]
    assert len(blocks) == sum(bool(table.rows) for table in tables)
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    text = render(tables, "text")
    assert not set("\x1b\r\t\u202e") & set(text)
    assert text.count("\n\n") == len(tables) - 1


def test_text_columns_are_aligned_also_with_wide_characters():
    table = Table("x", "t", "c", ("ab",), (TableRow("数据", ("1",)), TableRow("long name", ("2",))), (0,))
    first, second = render([table]).splitlines()[3:5]
    assert first == "数据       1"
    assert second == "long name  2"


def test_entries_as_text():
    assert entry_text(Average(78.32, 0.41, 3, 5)) == "78.3 ± 0.4 (3/5)"
    assert entry_text(Average(78.32, 0.41, 5, 5, 48, 50)) == "78.3 ± 0.4 (48/50 runs)"
    assert entry_text(Average(-0.01, 0.0, 2, 2)) == "0.0 ± 0.0"
    assert entry_text(None) == "–"
    assert entry_text(1.25, 2) == "1.25"
    assert entry_text(PValue(0.0004)) == "< 0.001"
    assert entry_text(PValue(0.0125)) == "0.013"
