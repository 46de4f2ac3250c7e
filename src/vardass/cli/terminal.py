"""What commands show on a terminal: progress, how long it will take, lines and plain tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from vardass.errors import MissingExtraError
from vardass.files import plain
from vardass.plots import require_matplotlib, save_figure
from vardass.table import plain_text

_BAR = 28  # characters
_WATCHED, _WORTH_TELLING, _LONG_START = 2.0, 20.0, 10.0  # seconds
Report = Callable[[float, str], None]


@contextmanager
def progress_bar() -> Iterator[Report | None]:
    """A transient bar on stderr with the time spent and the time left, or None where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        BarColumn(bar_width=12),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        # what does not fit is cut here, not at the times
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        task = bars.add_task("starting", total=1.0)
        yield lambda fraction, message: bars.update(task, completed=fraction, description=plain_text(message))


def tell_time(
    progress: Report | None, tell: Callable[[float], None], *, clock: Callable[[], float] = time.monotonic
) -> Report:
    """``progress``, which also calls ``tell`` once with the seconds that remain, if they are many.

    The estimate is made from two seconds of steps, or one step if it takes longer; what comes before the first report,
    such as compiling, is not counted. Where a first pass over the data takes long, one line says how far it has come.
    """
    began, is_told, start_is_told = clock(), False, False
    first: tuple[float, float] | None = None  # time and share done

    def report(share: float, message: str) -> None:
        nonlocal first, is_told, start_is_told
        if progress is not None:
            progress(share, message)
        now = clock()
        if share <= 0.0:
            if not start_is_told and now - began >= _LONG_START:
                start_is_told = True
                note(f"before the first step: {message}")
            return
        first = first or (now, share)
        seconds, done = now - first[0], share - first[1]
        if not is_told and seconds >= _WATCHED and done > 0.0:
            is_told = True
            tell_if_long((1.0 - share) * seconds / done, tell)

    return report


def tell_if_long(seconds: float, tell: Callable[[float], None]) -> None:
    """Call ``tell`` with the seconds of a run, if they are many."""
    if seconds >= _WORTH_TELLING:
        tell(seconds)


def time_text(seconds: float) -> str:
    """A duration, such as ``"4 min"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def note(text: str) -> None:
    """One line on stderr."""
    print(plain_text(text), file=sys.stderr)


def print_lines(text: str) -> None:
    """Lines on stdout, whose names can neither move the cursor nor colour the terminal."""
    print("\n".join(map(plain_text, text.split("\n"))), flush=True)


def print_json(record: Any, *, indent: int | None = None) -> None:
    """One JSON object on stdout; numbers that are not finite are null, paths are text."""
    print(json.dumps(plain(record), indent=indent, allow_nan=False, default=str))


def print_line(console: Console, text: str, style: str = "") -> None:
    """One line as it is: no markup, not cut at the width of the terminal."""
    console.print(Text(plain_text(text), style=style), soft_wrap=True)


def name_cell(text: str) -> Text:
    """A name in a table, without markup and control characters."""
    return Text(plain_text(text))


def save_picture(draw: Callable[[], Any], path: Path, command: str) -> list[Path]:
    """Files of the figure that ``draw`` makes for a command; none where matplotlib is not installed."""
    try:
        require_matplotlib()
    except MissingExtraError:
        return []
    return save_figure(draw(), path, command)


def titled_table(titles: Sequence[str]) -> Table:
    """A table without lines; all columns but the first are numbers."""
    table = Table(box=None, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(name_cell(title), justify="right" if place else "left", overflow="fold")
    return table


def shares_table(rows: Sequence[tuple[str, float, float, str]], whole: float, console: Console) -> Table:
    """A line for each name, value, standard error and style, with the value's share of ``whole`` as a bar."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(4):
        table.add_column(justify="right" if column in (1, 2) else "left", no_wrap=True)
    plus_minus, mark = ("+-", "#") if console.options.ascii_only else ("±", "█")
    for name, value, error, style in rows:
        share = value / whole if whole > 0 else 0.0
        shown = f"{value:.4g} {plus_minus} {error:.1g}" if error > 0 else f"{value:.4g}"
        bar = mark * min(_BAR, max(int(share > 0), round(_BAR * share)))
        table.add_row(name, shown, f"{100 * share:.1f} %", bar, style=style)
    return table
