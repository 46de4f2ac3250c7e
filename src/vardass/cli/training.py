"""The demo's second part: train with each way to draw, then show noise and accuracy side by side."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from vardass.cli.progress import progress_bar
from vardass.cli.training_demo import PAIRS, WAYS, Job, run_jobs
from vardass.cli.training_figure import training_figure
from vardass.cli.training_report import as_csv, findings, headline, pair_table, setting, summarise, summary_table
from vardass.files import atomic_write
from vardass.plots import save_figure
from vardass.validate import check_count

__all__ = ["check_options", "run_training"]

_NOTES = (
    "variance, sq. error: of the minibatch loss, around its mean and around the loss of all samples, with the network "
    "held still half-way between refreshes; relative to uniform batches at the same state, geometric mean over states. "
    "gain: difference from uniform with the same pair, seed and first weights. better: runs with a gain."
)


def check_options(*, seeds: int, steps: int, pairs: int, processes: int | None) -> None:
    """Refuse what cannot be run, before anything is."""
    check_count(seeds, "--seeds")
    check_count(steps, "--steps", low=0)
    check_count(pairs, "--pairs", high=len(PAIRS))
    if processes is not None:
        check_count(processes, "--processes")


def run_training(folder: Path, *, seeds: int, steps: int, pairs: int, processes: int | None) -> None:
    """Write figure and numbers into ``folder`` and print what they show."""
    console = Console(highlight=False)
    console.rule("training a small network: other wrist, other people")
    jobs = [
        Job(name, loss, source, target, seed, steps)
        for seed in range(seeds)
        for source, target in PAIRS[:pairs]
        for name, way in WAYS.items()
        for loss in way.losses
    ]
    clock = time.perf_counter()
    with progress_bar() as progress:

        def show(count: int) -> None:
            if progress is not None:
                progress(count / len(jobs), f"training, {count} of {len(jobs)} runs")

        runs = run_jobs(jobs, processes=processes, done=show)
    seconds = time.perf_counter() - clock
    cells = summarise(runs)
    for loss, group in cells.items():
        console.print(summary_table(loss, group, caption=f"{setting(runs)}; ± is the standard error over runs"))
    console.print(_NOTES)
    console.print()
    console.print(pair_table(cells))
    for loss, group in cells.items():
        console.print(findings(loss, group))
    figure = training_figure(
        cells,
        title=headline(cells),
        subtitle=(
            f"Smart-watch exercises; {setting(runs)}.\nVariance with the network held still. Accuracy: mean over runs; "
            "ticks are the pairs, bars the standard error of the gain over uniform."
        ),
    )
    table = folder / "training.csv"
    with atomic_write(table) as file:
        file.write(as_csv(runs).encode())
    written = [*save_figure(figure, folder / "training.png"), table]
    console.print(f"{len(runs)} trainings in {seconds:.0f} s")
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, markup=False)
