"""The summary section: the table of all cells, task by task, and runs without a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from vardass.experiments.labels import sampler_name
from vardass.experiments.page.content import PageContent, duration
from vardass.experiments.page.elements import (
    cell,
    download,
    estimate_cell,
    head,
    number_cell,
    number_text,
    scroller,
    select,
    table,
    unique,
)
from vardass.experiments.page.summary import SummaryRow, TaskTable

__all__ = ["summary_section"]


def summary_section(content: PageContent) -> str:
    """Filters and tables."""
    parts = [f'<p class="note">{escape(content.notes["summary"])}</p>']
    if content.rows:
        filters = [
            select("filter-data", "Data", unique(row.data for row in content.rows)),
            select("filter-algorithm", "Algorithm", unique(row.label.algorithm_name for row in content.rows)),
            select("filter-sampler", "Sampler", unique(sampler_name(row.label.sampler) for row in content.rows)),
            '<label>Text<input type="search" id="filter-text" autocomplete="off" spellcheck="false"></label>',
        ]
        if len(content.rows) == 1:
            filters = [f"<div hidden>{''.join(filters)}</div>"]
        count = f'<p id="shown" role="status">{len(content.rows):,} of {len(content.rows):,} rows</p>'
        parts.append(
            f'<div class="bar needs-script" hidden>{"".join(filters)}{count}{download("summary", "summary.csv")}</div>'
        )
        parts.append(scroller(_summary_table(content), "Summary of all cells"))
    parts += [_task_table(one) for one in content.tasks]
    if content.failures:
        more = f" {content.failures_left_out:,} more are not listed." if content.failures_left_out else ""
        body = "".join(_failure_row(row) for row in content.failures)
        names = head(("data", "task", "algorithm", "sampler", "repeat", "search", "what happened"))
        listed = table(f"Runs without a result.{more}", names, body, name="failures")
        parts.append(f'<h3 class="warn">Failed and unfinished runs</h3>{scroller(listed, "Runs without a result")}')
    return "".join(parts)


def _failure_row(row: Sequence[str]) -> str:
    *where, what = row
    if len(where) == 1:  # a run under way, of which only a description is known
        return f'<tr><td colspan="6">{escape(where[0])}</td>{cell(what, "wide")}</tr>'
    return f"<tr>{''.join(cell(value, 'tight') for value in where)}{cell(what, 'wide')}</tr>"


def _task_table(one: TaskTable) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(label.algorithm_name)}</th>{cell(label.row_name, "tight")}'
        f"{''.join(estimate_cell(value) for value in values)}</tr>"
        for label, values in one.rows
    )
    names = head(("algorithm", "sampler", *one.tasks), numbers_from=2)
    title = f"{one.data}, task by task"
    body = table("Target accuracy, %, mean over repeats ± standard error.", names, rows)
    return f"<details><summary>{escape(title)}</summary>{scroller(body, title)}</details>"


def _summary_table(content: PageContent) -> str:
    columns = [column for column in _COLUMNS if not column.optional or any(map(column.optional, content.rows))]
    names = "".join(_sortable(name, "text") for name in ("data", "algorithm", "sampler", *content.grid))
    names += "".join(_sortable(column.name, "number", column.extra) for column in columns)
    best: dict[tuple[str, str], float] = {}
    for row in content.rows:
        group = (row.data, row.label.algorithm)
        best[group] = max(best.get(group, -1.0), -1.0 if row.accuracy[0] is None else row.accuracy[0])
    several = len(content.rows) > len(best)
    body = "".join(
        _summary_row(
            row, content.grid, columns, best=several and row.accuracy[0] == best[row.data, row.label.algorithm]
        )
        for row in content.rows
    )
    caption = "One row for each data set and cell."
    if any(row.gain[0] is not None for row in content.rows):
        caption += " Gains are in percentage points."
    if several:
        caption += " Bold is the best of its data and algorithm, within the error or not."
    return table(caption, f"<thead><tr>{names}</tr></thead>", body, name="summary-table")


def _sortable(name: str, kind: str, extra: str = "") -> str:
    return f'<th scope="col" aria-sort="none" class="{kind}"{extra}><button type="button">{escape(name)}</button></th>'


def _summary_row(row: SummaryRow, grid: Sequence[str], columns: Sequence[_Column], *, best: bool) -> str:
    algorithm, sampler = row.label.algorithm_name, sampler_name(row.label.sampler)
    settings = dict(row.label.grid)
    cells = [f'<th scope="row">{escape(row.data)}</th>', cell(algorithm, "tight"), cell(sampler, "tight")]
    cells += [cell(str(settings.get(name, "")), "tight") for name in grid]
    cells += [column.show(row) for column in columns]
    return (
        f'<tr data-data="{escape(row.data)}" data-algorithm="{escape(algorithm)}" data-sampler="{escape(sampler)}"'
        f"{' class=best' if best else ''}>{''.join(cells)}</tr>"
    )


def _runs(row: SummaryRow) -> str:
    runs = f"{row.finished:,}"
    if row.finished + row.failed < row.expected:
        runs += f" of {row.expected:,}"
    if row.failed:
        runs += f' <span class="warn">+ {row.failed:,} failed</span>'
    return number_cell(row.finished, runs)


def _source(row: SummaryRow) -> str:
    value = None if row.source_accuracy is None else 100 * row.source_accuracy
    return number_cell(value, number_text(value, "{:.1f}"))


def _wall(row: SummaryRow) -> str:
    return number_cell(row.wall, "–" if row.wall is None else duration(row.wall))


class _Column(NamedTuple):
    """A column of numbers; an optional one is left out if nothing was measured."""

    name: str
    show: Callable[[SummaryRow], str]
    optional: Callable[[SummaryRow], bool] | None = None
    extra: str = ""  # attributes for the download: a column of errors, and a unit


_ERROR = ' data-error="yes"'
_COLUMNS = (
    _Column("accuracy, %", lambda row: estimate_cell(row.accuracy, kind="accuracy"), None, _ERROR),
    _Column("gain", lambda row: estimate_cell(row.gain, signed=True), lambda row: row.gain[0] is not None, _ERROR),
    _Column("source, %", _source, lambda row: row.source_accuracy is not None),
    _Column(
        "MMD²", lambda row: number_cell(row.mmd2, number_text(row.mmd2, "{:.3g}")), lambda row: row.mmd2 is not None
    ),
    _Column(
        "CORAL", lambda row: number_cell(row.coral, number_text(row.coral, "{:.3g}")), lambda row: row.coral is not None
    ),
    _Column("time of a run", _wall, None, ' data-unit="s"'),
    _Column("runs", _runs),
)
