"""``vardass figure NUMBER``: a figure of the paper, recomputed."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from vardass.cli.terminal import progress_bar
from vardass.errors import InputError
from vardass.paper.figures import NUMBERS, make_figure, write_figure
from vardass.plots import require_matplotlib

__all__ = ["figure"]


def figure(
    number: Annotated[str, typer.Argument(help="1 to 5, or all.", metavar="NUMBER")],
    out: Annotated[Path, typer.Option(help="Folder for pictures, numbers and text.")] = Path("figures"),
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same numbers.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Scaled down to seconds; rougher numbers.")] = False,
) -> None:
    """Recompute a figure of the paper and say in words whether what the paper says of it held.

    Writes figureN.png, .svg, .csv (the numbers), .md (the words) and .json (settings and versions).
    """
    known = {str(n): (n,) for n in NUMBERS} | {"all": NUMBERS}
    if number not in known:
        raise InputError(f"there is no figure {number!r}; choose one of {', '.join(known)}")
    require_matplotlib()  # before the work, not after it
    for n in known[number]:
        started = time.perf_counter()
        with progress_bar() as progress:
            result = make_figure(n, seed=seed, quick=quick, progress=progress)
        command = f"vardass figure {n} --out {shlex.quote(str(out))} --seed {seed}" + (" --quick" if quick else "")
        seconds = round(time.perf_counter() - started, 2)
        written = write_figure(result, out, provenance={"command": command, "seconds": seconds})
        print(f"Figure {n}: {result.title}\n{result.text()}\nwritten: {', '.join(map(str, written))}\n")
