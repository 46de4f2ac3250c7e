"""The commands and the options they share."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from vardass.cli.adapt import adapt
from vardass.cli.demo import demo
from vardass.cli.figure import figure
from vardass.cli.predict import predict
from vardass.cli.report_page import report
from vardass.cli.stratify import stratify
from vardass.cli.sweep import status, sweep
from vardass.cli.tables import tables
from vardass.cli.train import tasks, train

__all__ = ["app"]

app = typer.Typer(
    name="vardass",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vardass {version('vardass')}")
        raise typer.Exit


@app.callback()
def _shared(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Variance-reduced minibatches for training with a domain-discrepancy loss."""


app.command()(stratify)
app.command()(adapt)
app.command()(predict)
app.command()(train)
app.command()(tasks)
app.command()(sweep)
app.command()(status)
app.command()(tables)
app.command()(figure)
app.command()(report)
app.command()(demo)
