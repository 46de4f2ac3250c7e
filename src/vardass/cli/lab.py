"""Many runs and what came of them: ``vardass sweep``, ``status``, ``tables``, ``report``; ``figure``, of the paper."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vardass.backend import one_thread
from vardass.cli.run_options import TrustCode, parse_pairs, schema_option
from vardass.cli.terminal import print_lines, progress_bar, time_text
from vardass.errors import InputError, VardassError
from vardass.files import check_replaceable, write_output
from vardass.plots import require_matplotlib
from vardass.processes import count_workers
from vardass.table import FORMATS, plain_text, render
from vardass.validate import choose

if TYPE_CHECKING:
    from vardass.lab.record import RunSpec
    from vardass.lab.sweep import Status, SweepResult

_JOBS = "Concurrent runs; by default, and at most, one for each CPU. Each run uses one thread."
_ENGINE = "local: processes on this machine. ray: the Ray cluster at RAY_ADDRESS, or a local Ray."
_ROOT = "NAME=DIR: folder of the data set NAME of the specification; repeatable."
_SET = "key=value for all runs, such as steps=100; repeatable."
_SHOWN = 10  # runs that a list for people names
_TABLE = (
    "summary (one for each data set), 1 (samplers), 2 (methods), 3 (seconds), 4 (steps between refreshes), splits, "
    "discrepancy, pairs (tests), or all (every table with content)."
)
_SUFFIXES = {".md": "markdown", ".tex": "latex", ".csv": "csv"}


def _schema() -> dict[str, Any]:
    from vardass.lab.sweep_file import Specification

    return Specification.model_json_schema()


def sweep(
    specification: Annotated[str, typer.Argument(metavar="FILE_OR_PRESET", help="YAML file, or name of a preset.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the records; an existing one is resumed.")] = None,
    engine: Annotated[str, typer.Option(help=_ENGINE)] = "local",
    jobs: Annotated[int | None, typer.Option(help=_JOBS)] = None,
    root: Annotated[list[str] | None, typer.Option(help=_ROOT)] = None,
    data: Annotated[list[str] | None, typer.Option(help="Only this data set of the specification; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, overriding the specification.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Number of repeats, overriding the specification.")] = None,
    search_size: Annotated[int | None, typer.Option(help="Draws of the search, overriding the specification.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help=_SET)] = None,
    retry: Annotated[int, typer.Option(help="How often to retry a failed run.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the runs and the estimated time.")] = False,
    trust_code: TrustCode = False,
    schema: Annotated[bool, schema_option(_schema)] = False,
) -> None:
    """Execute all runs of a sweep specification, each of them once.

    The sweep may be killed at any moment; the same command resumes it. Finished runs are not repeated, interrupted runs
    resume from their checkpoints, and failed runs are retried.
    """
    from vardass.lab.spec import load_sweep
    from vardass.lab.store import read_records, record_files
    from vardass.lab.sweep import run_sweep

    asked = load_sweep(
        specification,
        roots=_roots(root),
        data=data,
        seed=seed,
        repeats=repeats,
        search_size=search_size,
        settings=parse_pairs("--set", setting),
        trust_code=trust_code,
    )
    runs = asked.runs()
    if dry_run:
        print_lines(asked.describe())
        print(_time_needed(runs, count_workers(jobs)))
        if out is not None:
            names = {spec.run_id for spec in runs}
            records = read_records(out) if record_files(out) else []
            done = names & {record.run_id for record in records if record.status == "finished"}
            to_do = len(names) - len(done)
            print(f"{len(done):,} of {len(names):,} runs have finished in {out}, {to_do:,} remain")
        return
    if out is None:
        raise InputError("--out is not given, but the records need a folder; add --out DIR, or --dry-run to only look")
    changed = any(given is not None for given in (root, data, seed, repeats, search_size, setting))
    text = asked.to_yaml() if changed else asked.text
    with progress_bar() as progress:
        summary = run_sweep(runs, out, engine=engine, jobs=jobs, retry=retry, progress=progress, text=text)
    print(_ending(summary, out), file=sys.stderr if summary.interrupted else sys.stdout)
    if summary.interrupted:
        raise typer.Exit(130)
    if summary.failed:
        raise typer.Exit(1)


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder given to vardass sweep --out.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show the progress of a sweep, which may be running."""
    from vardass.lab.sweep import status as look

    found = look(folder)
    print_lines(json.dumps(asdict(found), allow_nan=False) if as_json else _report(found))


def _roots(given: list[str] | None) -> dict[str, str]:
    roots = {}
    for pair in given or []:
        name, _, place = pair.partition("=")
        if not name or not place:
            raise InputError(f"--root must be NAME=DIR, got {pair!r}; for example --root pacs=/data/pacs")
        roots[name] = place
    return roots


def _time_needed(runs: list[RunSpec], jobs: int) -> str:
    from vardass.lab.sweep import estimate_seconds

    try:
        with one_thread():
            found = estimate_seconds(runs)
    except VardassError as error:
        return f"time cannot be estimated: {error}"
    total = sum(found.values())
    parts = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in found.items())
    return (
        f"time    about {time_text(total / jobs)} with {jobs} at a time, {time_text(total)} in one process ({parts}); "
        "measured on this machine from the first ten steps of one run of each cell"
    )


def _ending(summary: SweepResult, out: Path) -> str:
    remarks = {
        f"{summary.before:,} of them had finished before": summary.before,
        f"{summary.others:,} finished runs there are no longer part of the specification": summary.others,
        f"{summary.failed:,} failed; see vardass status {out}; the same command retries them": summary.failed,
        "interrupted; all progress is saved, the same command resumes": summary.interrupted,
    }
    first = f"{summary.finished:,} of {summary.total:,} runs have finished in {out}, {time_text(summary.seconds)}"
    return "\n".join([first, *(text for text, applies in remarks.items() if applies)])


def _report(found: Status) -> str:
    at_work = "not running" if found.worker is None else f"running in {found.worker}"
    lines = [
        f"finished   {found.finished:,} of {found.total:,} runs; {at_work}",
        f"under way  {len(found.under_way):,}",
        *(
            f"  {run.label}: step {run.step:,} of {run.steps:,} ({run.share:.0%})" + ("" if run.active else ", stopped")
            for run in found.under_way[:_SHOWN]
        ),
        f"failed     {len(found.failed):,}",
        *(f"  {run.label}: {plain_text(run.last_line or run.error)}\n    {run.log}" for run in found.failed[:_SHOWN]),
        f"to do      {found.to_do:,}",
    ]
    if found.seconds_left:
        lines.append(f"time left  about {time_text(found.seconds_left)} with {found.jobs} at a time")
    if found.others:
        lines.append(f"others     {found.others:,} finished runs are no longer part of the specification")
    if found.half_line:
        lines.append("a crash cut off the last record; starting the sweep again repairs it")
    if found.worker is None and found.finished < found.total:
        lines.append("the same vardass sweep command resumes")
    return "\n".join(lines)


# --- what came of them ---


def tables(
    folders: Annotated[list[Path], typer.Argument(help="Folders of sweeps, or files of records.", metavar="DIR...")],
    table: Annotated[str, typer.Option(help=_TABLE)] = "summary",
    form: Annotated[
        str | None, typer.Option("--format", help="text, markdown, latex or csv; by default from the ending of --out.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="paper: show the paper's numbers beside ours.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead.")] = None,
) -> None:
    """Select models by their score, average over tasks and repeats, and print tables.

    Averages with missing runs are marked. Target labels are not used for the selection.
    """
    from vardass.lab.averages import collect, current_records
    from vardass.lab.tables import TABLE_NAMES, make_tables

    form = form or _SUFFIXES.get(out.suffix.lower() if out else "", "text")
    choose(table, "table", TABLE_NAMES)
    choose(form, "format", FORMATS)
    if against not in (None, "paper"):
        raise InputError(f"cannot compare with {against!r}; the only choice is --against paper")
    records = []
    for folder in folders:
        found, left_out = current_records(folder)
        records += found
        if left_out:
            print(f"{left_out} records in {folder} are left out: the sweep was changed since", file=sys.stderr)
    if not records:
        named = ", ".join(map(str, folders))
        raise InputError(f"no records of runs in {named}; name the folder of a sweep with at least one finished run")
    results = collect(records)
    made = make_tables(results, table)
    if against:
        from vardass.paper.numbers import against_paper

        made = against_paper(made, results)
    text = render(made, form)
    if out is None:
        print(text, end="")
        if table == "summary":
            print(f"more: --table {', '.join(TABLE_NAMES[1:])}", file=sys.stderr)
        return
    write_output(out, text, "tables")
    print(f"written: {out}")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a sweep or of a run.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; default: DIR/report.html.")] = None,
) -> None:
    """Write one self-contained HTML page: tables, curves, variance, time, settings.

    The page needs neither a network connection nor other files.
    """
    from vardass.lab.page import write_page

    path = write_page(folder, out)
    print(f"written: {path} ({path.stat().st_size / 1e6:.2f} MB); open it in a browser")


def figure(
    number: Annotated[str, typer.Argument(help="1 to 5, or all.", metavar="NUMBER")],
    out: Annotated[Path, typer.Option(help="Folder for figures, numbers and text.")] = Path("figures"),
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same numbers.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Scale down to seconds; rougher numbers.")] = False,
) -> None:
    """Recompute a figure of the paper and report whether the paper's claim held.

    Writes figureN.png, .svg, .csv (the numbers), .md (the text) and .json (settings and versions).
    """
    from vardass.paper.figures import ENDINGS, NUMBERS, make_figure, write_figure

    known = {str(n): (n,) for n in NUMBERS} | {"all": NUMBERS}
    if number not in known:
        raise InputError(f"there is no figure {number!r}; choose one of {', '.join(known)}")
    require_matplotlib()  # before the work, not after it
    for path in (out / f"figure{n}.{ending}" for n in known[number] for ending in ENDINGS):
        check_replaceable(path, "figure")
    for n in known[number]:
        started = time.perf_counter()
        with progress_bar() as progress:
            result = make_figure(n, seed=seed, quick=quick, progress=progress)
        command = f"vardass figure {n} --out {shlex.quote(str(out))} --seed {seed}" + (" --quick" if quick else "")
        seconds = round(time.perf_counter() - started, 2)
        written = write_figure(result, out, provenance={"command": command, "seconds": seconds})
        print(f"Figure {n}: {result.title}\n{result.text()}\nwritten: {', '.join(map(str, written))}\n")
