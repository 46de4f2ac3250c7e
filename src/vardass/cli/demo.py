"""``vardass demo``: what the package does, on data that comes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure, the numbers and the strata.")],
    sizes: Annotated[str, typer.Option(help="Batch sizes k of the figure.")] = "8,16,32,64,128,256",
    seeds: Annotated[int, typer.Option(help="Runs to average, each with its own seed.")] = 3,
) -> None:
    """Stratify real smart-watch data and draw variance against batch size (the paper's Figure 4)."""
    # torch is imported only now, so that --help and --version answer at once
    from vardass.cli.figure4 import run_demo

    run_demo(out, sizes, seeds)
