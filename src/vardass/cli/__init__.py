"""The command ``vardass``. Bad input ends with one line on stderr and exit code 2, never with a traceback."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vardass import __version__
from vardass.errors import MissingExtraError, VardassError, VardassWarning, brief
from vardass.table import plain_text

__all__ = ["main"]

_NEEDED = ("typer", "rich", "click", "pydantic")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 if a run of a sweep failed, 2 for bad input, 130 if interrupted.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows ``vardass`` on the command line; by default taken from there.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: names of files need not be UTF-8
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while modules are imported, which takes seconds
        return _fail("interrupted", code=130)
    except MissingExtraError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        return _fail(f"the command line needs {missing}; install it with pip install 'vardass[cli]'")


def _run(arguments: Sequence[str] | None) -> int:
    # waiting threads that spin slow everything down many times over on a machine that others use too
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:  # the first thing tried: needs no extra
        print(f"vardass {__version__}")
        return 0
    import typer

    from vardass.cli.app import app, in_options, nearest_option

    typed = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in typed if not word.startswith("-")), None)

    def show_warning(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, VardassWarning):
            print("warning:", _line(in_options(str(message), command)), file=sys.stderr)
        else:
            print(warnings.formatwarning(message, category, *rest[:2]), end="", file=sys.stderr)

    # typer builds on click or carries a copy of it: this finds the class either way
    usage_error: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            warnings.simplefilter("always", VardassWarning)  # whichever module it is about
            code = app(args=arguments, prog_name="vardass", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", code=130)
    except VardassError as error:
        return _fail(in_options(str(error), command, getattr(error, "field", None)))
    except (MemoryError, RuntimeError) as error:
        if str(error).startswith("Symlink loop"):  # as pathlib says it
            return _fail(f"{error} of the file system: its symbolic links form a loop; choose another path")
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # as torch says it
            raise
        return _fail("out of memory; use fewer rows, or a small --rank such as 64")
    except OSError as error:
        where = "" if error.filename is None else f" at {error.filename}"
        return _fail(f"{error.strerror or error}{where}; check disk space and permissions")
    except usage_error as error:
        message = error.format_message().strip().rstrip(".") + _value_of(error, typed)
        near = nearest_option(getattr(error, "option_name", ""), command)
        message = message.partition(" (Possible options")[0] + (f"; did you mean {near}?" if near else "")
        # without any argument the help was printed and there is nothing to add
        return _fail(f"{message}; see vardass {f'{command} ' if near else ''}--help") if message else 2


def _value_of(error: Any, typed: Sequence[str]) -> str:
    """What was given for the option of an error, if its message does not say."""
    flags = getattr(getattr(error, "param", None), "opts", ())
    values = [value for flag, value in pairwise(typed) if flag in flags]
    return f", got {values[-1]!r}" if values and repr(values[-1]) not in error.format_message() else ""


def _fail(message: str, *, code: int = 2) -> int:
    if message.startswith("Caught "):  # in a loading process, whose traceback is around it
        message = message.rpartition("InputError: ")[2]
    print("error:", _line(message), file=sys.stderr)
    return code


def _line(message: str) -> str:
    return plain_text(brief(" ".join(message.split())))
