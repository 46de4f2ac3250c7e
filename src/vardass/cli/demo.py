"""``vardass demo``: what the package does, on data that comes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figures, the numbers and the strata.")],
    sizes: Annotated[str, typer.Option(help="Batch sizes k of the first figure.")] = "8,16,32,64,128",
    seeds: Annotated[int, typer.Option(help="Runs to average, each with its own seed.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each training; 0 leaves it out.")] = 600,
    pairs: Annotated[int, typer.Option(help="Source-target pairs to train on, 1 to 4.")] = 4,
    processes: Annotated[int | None, typer.Option(help="Processes to train in; by default one for each CPU.")] = None,
) -> None:
    """Show on real smart-watch data what strata save and what that does to training.

    First variance against batch size (the paper's Figure 4), then a small network trained from one wrist and
    group of people to the others, with each way to draw batches: noise of the loss and target accuracy. Last
    ``vardass adapt`` on two files, against source-only training and uniform batches.
    """
    # torch is imported only now, so that --help and --version answer at once
    from vardass.cli.adapt_demo import run_adapt
    from vardass.cli.figure4 import run_demo
    from vardass.cli.training import check_options, run_training

    check_options(seeds=seeds, steps=steps, pairs=pairs, processes=processes)
    run_demo(out, sizes, seeds)
    if steps > 0:
        run_training(out, seeds=seeds, steps=steps, pairs=pairs, processes=processes)
        run_adapt(out, pairs=pairs, steps=steps)
