"""The commands and the options they share."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from vardass import __version__
from vardass.cli.adapt import adapt, tasks, train
from vardass.cli.demo import demo
from vardass.cli.doctor import doctor
from vardass.cli.embeddings import compare, coreset
from vardass.cli.lab import figure, report, status, sweep, tables
from vardass.cli.models import evaluate, export, predict
from vardass.cli.stratify import stratify, warmup
from vardass.validate import nearest

app = typer.Typer(
    name="vardass",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("standardize", "standardise"),
    },
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


_GROUPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Your data": (adapt, predict, evaluate, doctor, export, compare, coreset),
    "Your loop": (stratify, warmup),
    "Comparing methods": (demo, train, tasks, sweep, status, tables, report),
    "The paper": (figure,),
}
# options in --help, where there are too many for one screen; --help-all has the others
_FEW = {
    "adapt": "source target out labels columns network algorithm penalty steps seed resume help_all",
    "train": "dataset task out root network algorithm sampler penalty steps seed resume help_all",
    "stratify": "files k kernel scale equal min_size labels columns seed out help_all",
    "compare": "first second loss scale permutations standardise labels columns seed help_all",
    "coreset": "file size kernel scale weights labels columns seed out help_all",
    "doctor": "source target model loss penalty batch_size labels columns out help_all",
    "sweep": "specification out jobs root repeats setting dry_run help_all",
}


class ShortHelp(TyperCommand):
    """A command with ``--help`` for the options in `_FEW` and ``--help-all`` for all of them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Hide the other options, but only here: shells complete all that are not hidden."""
        every, few = self.params, _FEW[self.name or ""].split()
        self.params = every if "all" in ctx.meta else [parameter for parameter in every if parameter.name in few]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = every


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta["all"] = True
        print(ctx.get_help())
        raise typer.Exit


_ALL = typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options, and exit.")
_HELP_ALL = inspect.Parameter(
    "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, _ALL]
)


def _command(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with the Abort that `main` reports (typer exits silently), and ``--help-all`` if it is long."""

    @functools.wraps(command)
    def run(*values: Any, help_all: bool = False, **options: Any) -> None:
        try:
            command(*values, **options)
        except KeyboardInterrupt:
            raise typer.Abort from None

    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    parameters += [_HELP_ALL] if command.__name__ in _FEW else []
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


for group, commands in _GROUPS.items():
    for command in commands:
        kind = ShortHelp if command.__name__ in _FEW else TyperCommand
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")  # typer keeps line breaks
        app.command(cls=kind, help=text, rich_help_panel=group)(_command(command))


_QUOTES = "'\""
_NAME = re.compile(
    r"""(?<![\w.'"/=-])([a-z]\w*)(?:=('[^']*'|"[^"]*"|[\w+-]+(?:\.\d+)?))?(?![\w/'"(=])"""  # name, or name=value
)


def _options(command: str | None) -> dict[str, list[str]]:
    """Options of a command by their names in Python: the flag, and the one that says no, or ""."""
    entry = getattr(get_command(app), "commands", {}).get(command)
    return {
        p.name: [min((f for f in flags if f[:2] == "--"), key=len, default="") for flags in (p.opts, p.secondary_opts)]
        for p in (entry.params if entry else ())
        if p.param_type_name == "option"
    }


def in_options(message: str, command: str | None, field: str | None = None) -> str:
    """A message with the options of a command for what Python calls them: ``--batch-size 8`` for ``batch_size=8``.

    Names count that have an underscore or a value, or are the ``field`` that the message is about. Quoted ones stay:
    they are names in files, and of ``--set``.
    """
    options = _options(command)
    if field == "setting" or message.startswith("--"):  # these name settings as the user did
        options = {name: flags for name, flags in options.items() if name == "trust_code"}

    def spelt(match: re.Match[str]) -> str:
        name, value = match.groups()
        is_about = name == field and not message.startswith("unknown ")
        if name not in options or not (is_about or "_" in name or (value and len(name) > 1)):
            return match[0]
        yes, no = options[name]
        if value in (None, "True"):
            return yes
        return no or f"no {yes}" if value == "False" else f"{yes} {value.strip(_QUOTES)}"

    return _NAME.sub(spelt, message)


def nearest_option(flag: str, command: str | None) -> str | None:
    """The option of a command that someone meant who typed ``flag``."""
    options = _options(command)
    near = nearest(flag.strip("-").replace("-", "_"), options)
    return options[near][0] if near else None
