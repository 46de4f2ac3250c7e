"""A table of numbers, and its writers: aligned text, Markdown, LaTeX and CSV.

Names come from files, so each format quotes what it must; the writers of pandas do not.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vardass.errors import InputError


@dataclass(frozen=True)
class Average:
    """A mean with its error, and what is missing behind it."""

    mean: float | None  # None if no repeat has a value
    stderr: float | None  # standard error of the mean; None if it is unknown, as it is from a single repeat
    repeats: int  # repeats (or runs) that the mean is over, and how many there should be
    expected: int
    runs: int = 0  # finished runs of the search behind it, how many there should be, and how many failed
    expected_runs: int = 0
    failed: int = 0
    tasks: int = 1  # tasks that the mean is over, and how many there should be
    expected_tasks: int = 1

    @property
    def whole(self) -> bool:
        """Whether all tasks and repeats are there, and no run of a search, finished or failed, is missing."""
        averaged = self.repeats >= self.expected > 0 and self.tasks >= self.expected_tasks
        return averaged and self.runs + self.failed >= self.expected_runs

    @property
    def mark(self) -> str:
        """What is missing, such as ``(2/3)`` repeats, ``(1/4 tasks)`` or ``(9/10 runs)``; empty if nothing is."""
        if self.repeats < self.expected:
            return f"({self.repeats}/{self.expected})"
        if self.tasks < self.expected_tasks:
            return f"({self.tasks}/{self.expected_tasks} tasks)"
        return "" if self.runs >= self.expected_runs else f"({self.runs}/{self.expected_runs} runs)"


@dataclass(frozen=True)
class PValue:
    """A probability, shown to three decimals."""

    p: float


Entry = Average | PValue | float | str | None  # with and without an error, text, nothing


@dataclass(frozen=True)
class TableRow:
    """One row: what it is called in its place, its entries, and what it is called by itself (default: the same)."""

    name: str
    entries: tuple[Entry, ...]
    full_name: str = ""
    block: int = 0  # a line is drawn between blocks
    label: Any = None  # what it is about

    @property
    def own_name(self) -> str:
        """Name that needs no other row to be understood."""
        return self.full_name or self.name


@dataclass(frozen=True)
class Table:
    """Rows and columns of entries."""

    kind: str  # which table it is, such as ``"accuracy"``
    title: str  # caption, and what the rows' names are
    corner: str = ""
    columns: tuple[str, ...] = ()  # names of the columns
    rows: tuple[TableRow, ...] = ()  # without any, the notes say why
    decimals: tuple[int, ...] = ()  # for each column
    best: frozenset[tuple[int, int]] = frozenset()  # entries that none is better than, at the decimals that are shown
    notes: tuple[str, ...] = ()  # sentences below the table
    data: str | None = None  # the data set, if it is a table of one


def entry_mean(entry: Entry) -> float | None:
    """The number of an entry, if it has one."""
    if isinstance(entry, Average):
        return entry.mean
    return entry if isinstance(entry, float) else None


_NOTHING = "–"
_LATEX = {mark: f"\\{mark}" for mark in "{}$&#%_"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # else it could be the option of a line break before it
    "]": "{]}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "²": r"\textsuperscript{2}",
}
_MARKDOWN = {mark: f"\\{mark}" for mark in "\\`*_[]|~$#!"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_CSV_COLUMNS = ("table", "row", "column", "mean", "stderr", "repeats", "expected_repeats", "runs", "expected_runs")


def render(tables: Sequence[Table], form: str = "text") -> str:
    """All tables as one text that ends with a line break."""
    if form not in FORMATS:
        raise InputError(f"unknown format {form!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[form](tables)


def entry_text(entry: Entry, decimals: int = 1) -> str:
    """An entry as people read it: ``78.3 ± 0.4``, with ``(3/5)`` if repeats are missing; an unknown error is a dash."""
    if entry is None:
        return _NOTHING
    if isinstance(entry, str):
        return entry
    if isinstance(entry, PValue):
        return "< 0.001" if entry.p < 0.001 else f"{entry.p:.3f}"
    if isinstance(entry, float):
        return _fixed(entry, decimals)
    text = _NOTHING
    if entry.mean is not None:
        error = _NOTHING if entry.stderr is None else f"{entry.stderr:.{decimals}f}"
        text = f"{_fixed(entry.mean, decimals)} ± {error}"
    return f"{text} {entry.mark}".rstrip()


def _fixed(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text  # no minus zero


def plain_text(text: str) -> str:
    """Without line breaks, control and invisible characters, which could move the cursor or hide text."""
    text = text.encode(errors="backslashreplace").decode()  # names of files need not be UTF-8
    kept = (" " if character.isspace() else character for character in text)
    return "".join(character for character in kept if unicodedata.category(character)[0] != "C")


def _cells(table: Table, quote: Callable[[str], str], bold: Callable[[str], str]) -> list[list[str]]:
    """Header and rows, quoted, the best in bold."""
    lines = [[quote(table.corner), *map(quote, table.columns)]]
    for i, row in enumerate(table.rows):
        line = [quote(row.name)]
        for j, entry in enumerate(row.entries):
            text = quote(entry_text(entry, table.decimals[j]))
            line.append(bold(text) if (i, j) in table.best else text)
        lines.append(line)
    return lines


def _text_table(table: Table) -> str:
    if not table.rows:
        return plain_text(f"{table.title}: {'; '.join(table.notes)}")
    lines = _cells(table, plain_text, lambda text: f"{text}*")
    widths = [max(map(_width, column)) for column in zip(*lines)]
    shown = []
    for place, line in enumerate(lines):
        if place < 2 or _starts_block(table.rows, place - 1):
            shown.append("-" * (sum(widths) + 2 * len(widths) - 2) if place else "")
        padded = [cell + " " * (width - _width(cell)) for cell, width in zip(line, widths)]
        shown.append("  ".join(padded).rstrip())
    notes = ["*: best", *table.notes] if any(cell.endswith("*") for line in lines for cell in line) else table.notes
    return "\n".join([plain_text(table.title), *shown[1:], *(plain_text(f"  {note}") for note in notes)])


def _width(text: str) -> int:
    return sum(
        2 if unicodedata.east_asian_width(character) in "WF" else int(not unicodedata.combining(character))
        for character in text
    )


def _starts_block(rows: Sequence[TableRow], place: int) -> bool:
    return place > 0 and rows[place].block != rows[place - 1].block


def _markdown_table(table: Table) -> str:
    title = f"**{quote_markdown(table.title)}**"
    notes = [quote_markdown(note) for note in table.notes]
    if not table.rows:
        return f"{title}: {'; '.join(notes)}"
    header, *rows = _cells(table, quote_markdown, lambda text: f"**{text}**")
    below = ["", "; ".join(notes)] if notes else []
    return "\n".join([title, "", markdown(header, rows, quoted=True), *below])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = True, quoted: bool = False) -> str:
    """Lines of a table of texts; all columns but the first end at the right unless they are texts too."""
    lines = [[text if quoted else quote_markdown(text) for text in line] for line in (header, *rows)]
    rule = "|---|" + ("---:|" if right else "---|") * (len(header) - 1)
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], rule, *shown[1:]])


def quote_markdown(text: str) -> str:
    """A name as Markdown shows it: nothing in it is taken for a mark, a link or HTML."""
    quoted = "".join(_MARKDOWN.get(character, character) for character in plain_text(text))
    return f"\\{quoted}" if quoted.startswith(("+ ", "- ")) else quoted


def _latex(tables: Sequence[Table]) -> str:
    return "% needs \\usepackage{booktabs} and, for quotation marks in names, T1 fonts\n" + "\n".join(
        _latex_table(table) for table in tables
    )


def _latex_table(table: Table) -> str:
    title = _quote_latex(table.title)
    notes = "; ".join(_quote_latex(note) for note in table.notes)
    if not table.rows:
        return f"\\noindent {title}: {notes}\n"
    lines = [f"{' & '.join(line)} \\\\" for line in _cells(table, _quote_latex, lambda text: f"\\textbf{{{text}}}")]
    body = []
    for place, line in enumerate(lines[1:]):
        body += ["\\midrule", line] if _starts_block(table.rows, place) else [line]
    return "\n".join(
        [
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{title}}}",
            f"\\begin{{tabular}}{{l{'c' * len(table.columns)}}}",
            "\\toprule",
            lines[0],
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}",
            *([f"\\par\\smallskip\\footnotesize {notes}"] if notes else []),
            "\\end{table}",
            "",
        ]
    )


def _quote_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in plain_text(text))


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows below their header, separated by commas; no text is taken for a formula or a line break."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in itertools.chain([header], rows):
        writer.writerow([_quote_csv(cell) if isinstance(cell, str) else cell for cell in row])
    return stream.getvalue()


def _csv(tables: Sequence[Table]) -> str:
    rows: list[list[Any]] = []
    for table in tables:
        if not table.rows:
            rows.append([table.title, *[""] * (len(_CSV_COLUMNS)), "; ".join(table.notes)])
        for i, row in enumerate(table.rows):
            for j, entry in enumerate(row.entries):
                names = [table.title, row.own_name, table.columns[j]]
                best = "yes" if (i, j) in table.best else ""
                rows.append([*names, *_numbers(entry), best, entry_text(entry, table.decimals[j])])
    return csv_text([*_CSV_COLUMNS, "best", "text"], rows)


def _numbers(entry: Entry) -> list[float | int | None]:
    if isinstance(entry, Average):
        return [entry.mean, entry.stderr, entry.repeats, entry.expected, entry.runs, entry.expected_runs]
    number = entry.p if isinstance(entry, PValue) else entry
    return [number if isinstance(number, float) else None, *[None] * 5]


def _quote_csv(text: str) -> str:
    """Keep spreadsheets from running a name as a formula."""
    plain = plain_text(text).strip()
    is_number = re.fullmatch(r"[-+]\d*\.?\d+(e[-+]?\d+)?( ± .*)?", plain)  # 78.3 ± 0.4 is taken as text
    return f"'{plain}" if plain.startswith(("=", "+", "-", "@")) and not is_number else plain


FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {
    "text": lambda tables: "\n\n".join(map(_text_table, tables)) + "\n",
    "markdown": lambda tables: "\n\n".join(map(_markdown_table, tables)) + "\n",
    "latex": _latex,
    "csv": _csv,
}
