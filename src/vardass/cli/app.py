"""The commands and the options they share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from vardass import __version__
from vardass.cli.adapt import adapt, tasks, train
from vardass.cli.demo import demo
from vardass.cli.doctor import doctor
from vardass.cli.embeddings import compare, coreset
from vardass.cli.lab import figure, report, status, sweep, tables
from vardass.cli.models import evaluate, export, predict
from vardass.cli.stratify import stratify, warmup

app = typer.Typer(
    name="vardass",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 a run of a sweep failed; 2 bad input, with a one-line explanation; 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vardass {__version__}")
        raise typer.Exit


@app.callback()
def _shared(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Variance-reduced minibatches for training with a domain-discrepancy loss."""


def _with_abort(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, with the Abort that `main` reports; typer exits silently on a KeyboardInterrupt."""

    @functools.wraps(command)
    def run(*values: Any, **options: Any) -> None:
        try:
            command(*values, **options)
        except KeyboardInterrupt:
            raise typer.Abort from None

    return run


_ON_DATA = (stratify, compare, coreset, adapt, predict, evaluate, export, doctor)
for command in (*_ON_DATA, train, tasks, sweep, status, tables, figure, report, demo, warmup):
    app.command()(_with_abort(command))
