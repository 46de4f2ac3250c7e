"""The progress bar of all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None] | None]:
    """A bar on stderr with the time spent and the time left that leaves no trace, or None where nobody is looking."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        BarColumn(bar_width=12),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=1.0)
        yield lambda fraction, message: bars.update(task, completed=fraction, description=message)
